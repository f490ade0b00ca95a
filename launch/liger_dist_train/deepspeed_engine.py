"""DeepSpeed at any ZeRO stage: its engine, and its JSON completed from the configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist import LigerDistError, clip_grad_norm_

from .config import TrainConfig
from .distributed import UnwrittenError, rank
from .engine import refuse_without_launcher
from .json_text import parse_json
from .model import build
from .optimizer import decayed_parameters, make_optimizer, not_finite
from .parallel_dims import ParallelDims
from .safe_pickle import deepspeed_names


class DeepSpeedEngine:
    """Its checkpoints have DeepSpeed's format: the same stage, dtype and number of ranks reads them."""

    def __init__(self, config: TrainConfig, dims: ParallelDims, model: nn.Module) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Asked for by its CPU communication; torchrun gives it another name.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        import deepspeed

        from liger_dist.integrations.deepspeed_section import read_section

        if rank() == 0 and not torch.cuda.is_available():
            print(
                "DeepSpeed compiles what it communicates with on CPUs at its first start (deepspeed_shm_comm), which "
                "takes minutes and prints nothing",
                flush=True,
            )
        settings = deepspeed_settings(config, dims)
        refuse_without_launcher(dims)
        decayed = decayed_parameters(model, config)
        wrapped = build(config, dims, model, read_section(settings))
        # DeepSpeed puts an optimizer around it, which reads the learning rate from this one.
        self.optimizer = make_optimizer(wrapped, config, decayed)
        self.model, *_ = deepspeed.initialize(model=wrapped, optimizer=self.optimizer, config=settings)
        stage = self.model.zero_optimization_stage()
        # Without ZeRO and bf16, DeepSpeed computes the gradient norm only where it clips.
        self._has_no_norm = stage == 0 and config.dtype == "float32"
        lora = ", LoRA" if config.lora_rank else ""
        self.format = f"DeepSpeed, ZeRO stage {stage}, {dims.world_size} ranks, {config.dtype}{lora}"

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The loss is divided by the tokens of all micro-batches already. At stage 0 DeepSpeed would divide the model's
        # very output by their number all the same, and does not divide what is computed from it.
        self.model.backward(loss.clone(), scale_wrt_gas=False)

    def update(self, accepts: Callable[[Tensor], bool] | None = None) -> Tensor:
        assert accepts is None
        norm = clip_grad_norm_(self.model.module, 0.0) if self._has_no_norm else None
        self.model.step()
        return torch.as_tensor(self.model.get_global_grad_norm()) if norm is None else norm

    def clear(self) -> None:
        """Does nothing: DeepSpeed's step frees the gradients."""

    def averaged(self) -> None:
        """Returns None: it keeps no tensor of each parameter."""

    def broken_gradients(self) -> list[str]:
        """Returns none: DeepSpeed's step has freed the gradients."""
        return []

    def broken_weights(self) -> list[str]:
        # The third stage leaves an empty tensor, and keeps the shard beside it.
        return not_finite({name: getattr(p, "ds_tensor", p) for name, p in self.model.named_parameters()})

    def save(self, folder: Path, *, in_background: bool) -> None:
        assert not in_background
        with (
            raised_at_the_end(self.model.checkpoint_engine, "save"),
            raised_at_the_end(self.model, "_copy_recovery_script"),
        ):
            self.model.save_checkpoint(str(folder), tag="state", save_latest=False)

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Loads everything, with ``weights_only`` too: ZeRO's fp32 weights are among the optimizer states."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        with deepspeed_names(folder):
            self.model.load_checkpoint(str(folder), tag="state", load_lr_scheduler_states=False)
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)


def deepspeed_settings(config: TrainConfig, dims: ParallelDims) -> dict[str, Any]:
    """Completes the JSON: the configuration replaces "auto" and what is left out.

    Raises:
        LigerDistError: it cannot be read, or says something else than the configuration.
    """
    path = Path(config.deepspeed or "")
    try:
        settings = parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise LigerDistError(f"--deepspeed {path} cannot be read: {error}; expected DeepSpeed's JSON.") from error
    _check_sections(path, settings)
    # It is off, or "auto", which transformers' examples have beside bf16.
    settings.pop("fp16", None)
    micro_batches = dims.micro_batches(config, dims.global_batch_size(config))
    wanted = {
        "train_micro_batch_size_per_gpu": config.batch_size,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": config.batch_size * micro_batches * dims.world_size,
        "gradient_clipping": config.max_grad_norm,
    }
    for name, value in wanted.items():
        if settings.get(name, "auto") not in ("auto", value):
            raise LigerDistError(
                f'{path} sets {name} to {settings[name]} but the options make it {value}; write "auto", or change '
                "--batch_size, --global_batch_size or --max_grad_norm."
            )
        settings[name] = value
    in_bf16 = config.dtype == "bfloat16"
    given = settings.setdefault("bf16", {}).setdefault("enabled", "auto")
    if given not in ("auto", in_bf16):
        raise LigerDistError(
            f'{path} sets bf16.enabled to {json.dumps(given)} but --dtype is {config.dtype}; write "auto".'
        )
    settings["bf16"]["enabled"] = in_bf16
    found: dict[str, Any] = settings
    return found


def _check_sections(path: Path, settings: Any) -> None:
    if not isinstance(settings, dict):
        raise LigerDistError(f"{path} holds a {type(settings).__name__}; expected an object with DeepSpeed's settings.")
    for name in ("bf16", "fp16", "zero_optimization"):
        if not isinstance(settings.get(name, {}), dict):
            raise LigerDistError(
                f"{path} sets {name} to {json.dumps(settings[name])}; expected an object, such as "
                + ('{"stage": 3}.' if name == "zero_optimization" else '{"enabled": "auto"}.')
            )
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise LigerDistError(f"{path} sets the ZeRO stage to {json.dumps(stage)}; expected 0, 1, 2 or 3.")
    if settings.get("fp16", {}).get("enabled", False) not in (False, "auto"):
        raise LigerDistError(f"{path} enables fp16, which this program has no scaling for; use --dtype bfloat16.")
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise LigerDistError(f"{path} has a section {name!r}; the program sets it, leave it out.")


@contextmanager
def raised_at_the_end(writer: Any, method: str) -> Iterator[None]:
    """Raises what ``method`` cannot write when the context ends: DeepSpeed has barriers in between, where the other
    ranks would wait for this one."""
    original = getattr(writer, method)
    failures: list[Exception] = []

    def write(*arguments: Any, **options: Any) -> None:
        try:
            original(*arguments, **options)
        except (OSError, RuntimeError) as error:
            failures.append(error)

    setattr(writer, method, write)
    try:
        yield
    finally:
        delattr(writer, method)
    if failures:
        raise UnwrittenError from failures[0]
