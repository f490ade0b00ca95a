"""How gradients become steps, and what of that is stored: by torch, or by a DeepSpeed engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from liger_dist import LigerDistError

from .arguments import TrainArguments
from .layout import Layout
from .model import build
from .process import checkpoint_group
from .together import UnwrittenError


class Writing(Protocol):
    """Something that is written, perhaps in the background; a ``concurrent.futures.Future`` is one."""

    def done(self) -> bool: ...

    def result(self) -> object:
        """Waits, and raises what went wrong."""


class Engine(Protocol):
    """A wrapped model and its optimiser."""

    model: Any
    optimizer: Optimizer
    format: str
    """of what :meth:`save` writes; :meth:`load` reads no other"""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of one; gradients are reduced over ranks in the last of a step."""

    def backward(self, loss: Tensor) -> None: ...

    def update(self) -> Tensor:
        """One optimiser step; the gradient's norm before it was clipped. The gradients stay until :meth:`clear`."""

    def clear(self) -> None: ...

    def broken_gradients(self) -> list[str]:
        """Names of this rank's parameters whose gradients are not finite."""

    def broken_weights(self) -> list[str]:
        """Names of those whose part on this rank is not finite."""

    def save(self, folder: Path, *, in_background: bool) -> Writing:
        """Starts to write the state; the model may change once this returns."""

    def load(self, folder: Path) -> None:
        """Restores what :meth:`save` wrote. Hyperparameters stay as they are."""

    def generating(self) -> AbstractContextManager[Any]:
        """Around calls of the transformers model by itself."""


def make_engine(arguments: TrainArguments, layout: Layout, model: nn.Module) -> Engine:
    """The engine around a model without storage."""
    decayed = frozenset(name for name, parameter in model.named_parameters() if parameter.dim() >= 2)
    if layout.strategy == "deepspeed":
        return DeepSpeedEngine(arguments, layout, model, decayed)
    return TorchEngine(arguments, layout, model, decayed)


class TorchEngine:
    """Everything but DeepSpeed. Checkpoints are those of torch.distributed.checkpoint, which any strategy here and any
    number of ranks can read."""

    format = "torch.distributed.checkpoint"

    def __init__(self, arguments: TrainArguments, layout: Layout, model: nn.Module, decayed: frozenset[str]) -> None:
        if layout.strategy != "none":
            refuse_without_launcher(layout)
        self.model = build(arguments, layout, model)
        self.optimizer = make_optimizer(self.model, arguments, decayed)
        self._max_norm = arguments.max_grad_norm

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        is_wrapper = isinstance(self.model, DistributedDataParallel | FullyShardedDataParallel)
        return self.model.no_sync() if is_wrapper and not is_last else nullcontext()  # type: ignore[operator]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> Tensor:
        norm = clip(self.model, self._max_norm)
        self.optimizer.step()
        return norm

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def broken_gradients(self) -> list[str]:
        return broken({name: parameter.grad for name, parameter in self.model.named_parameters()})

    def broken_weights(self) -> list[str]:
        return broken(dict(self.model.named_parameters()))

    def save(self, folder: Path, *, in_background: bool) -> Writing:
        state = self._state()
        options: dict[str, Any] = {"checkpoint_id": str(folder), "no_dist": not dist.is_initialized()}
        if not in_background:
            state_dict_saver.save(state, **options)
            return written()
        # It exchanges what ranks write while the training exchanges gradients: it has a process group of its own.
        writing = state_dict_saver.async_save(state, process_group=checkpoint_group(), **options)
        assert isinstance(writing, Future)
        return writing

    def load(self, folder: Path) -> None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=str(folder), no_dist=not dist.is_initialized())
        _, moments = get_state_dict(self.model, self.optimizer)
        moments["state"] = state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=moments)
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)

    def generating(self) -> AbstractContextManager[Any]:
        if isinstance(self.model, FullyShardedDataParallel):
            # Its own forward is not what is called; the layers gather theirs.
            return FullyShardedDataParallel.summon_full_params(self.model, recurse=False, writeback=False)
        return nullcontext()

    def _state(self) -> dict[str, Any]:
        """By parameter name alone: groups of the optimiser differ between strategies."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": moments["state"]}


class DeepSpeedEngine:
    """DeepSpeed, at any ZeRO stage. Its checkpoints are its own: the same stage, dtype and number of ranks reads
    them."""

    def __init__(self, arguments: TrainArguments, layout: Layout, model: nn.Module, decayed: frozenset[str]) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Asked for by its CPU communication; torchrun gives it another name.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        import deepspeed

        from liger_dist.integrations.deepspeed_section import read_section

        settings = deepspeed_settings(arguments, layout)
        refuse_without_launcher(layout)
        section = read_section(settings)
        wrapped = build(arguments, layout, model, None if section is None else section.wrap_config())
        # DeepSpeed puts its own around it, which reads the learning rate from this one.
        self.optimizer = make_optimizer(wrapped, arguments, decayed)
        self.model, *_ = deepspeed.initialize(model=wrapped, optimizer=self.optimizer, config=settings)
        stage = self.model.zero_optimization_stage()
        # Without an optimiser of its own it knows one only where it clips.
        self._has_no_norm = stage == 0 and arguments.dtype == "float32"
        self.format = f"DeepSpeed, ZeRO stage {stage}, {layout.world_size} ranks, {arguments.dtype}"

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The loss is divided by the tokens of all micro-batches already. At stage 0 DeepSpeed would divide the model's
        # very output by their number all the same, and does not divide what is computed from it.
        self.model.backward(loss.clone(), scale_wrt_gas=False)

    def update(self) -> Tensor:
        norm = clip(self.model.module, 0.0) if self._has_no_norm else None
        self.model.step()
        return torch.as_tensor(self.model.get_global_grad_norm()) if norm is None else norm

    def clear(self) -> None:
        """Its step does."""

    def broken_gradients(self) -> list[str]:
        """It has let go of them."""
        return []

    def broken_weights(self) -> list[str]:
        # The third stage leaves an empty tensor, and keeps the part beside it.
        return broken({name: getattr(p, "ds_tensor", p) for name, p in self.model.named_parameters()})

    def save(self, folder: Path, *, in_background: bool) -> Writing:
        assert not in_background
        with (
            together_at_the_end(self.model.checkpoint_engine, "save"),
            together_at_the_end(self.model, "_copy_recovery_script"),
        ):
            self.model.save_checkpoint(str(folder), tag="state", save_latest=False)
        return written()

    def load(self, folder: Path) -> None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.model.load_checkpoint(str(folder), tag="state", load_lr_scheduler_states=False)
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)

    def generating(self) -> AbstractContextManager[Any]:
        return nullcontext()


def refuse_without_launcher(layout: Layout) -> None:
    """Raises:
    LigerDistError: torchrun, or another launcher, did not start this process.
    """
    if not dist.is_initialized():
        raise LigerDistError(
            f"--strategy is {layout.strategy} but no launcher started this process, which it needs also for one: "
            "torchrun --standalone --nproc-per-node 1 launch/train.py ..."
        )


def deepspeed_settings(arguments: TrainArguments, layout: Layout) -> dict[str, Any]:
    """The JSON, with what the arguments say in the place of "auto" and of what it leaves out.

    Raises:
        LigerDistError: it cannot be read, or says something else than the arguments.
    """
    path = Path(arguments.deepspeed or "")
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LigerDistError(f"--deepspeed {path} cannot be read: {error}; expected DeepSpeed's JSON.") from error
    _check_sections(path, settings)
    wanted = {
        "train_micro_batch_size_per_gpu": arguments.batch_size,
        "gradient_accumulation_steps": arguments.accumulation_steps,
        "train_batch_size": arguments.batch_size * arguments.accumulation_steps * layout.world_size,
        "gradient_clipping": arguments.max_grad_norm,
    }
    for name, value in wanted.items():
        if settings.get(name, "auto") not in ("auto", value):
            raise LigerDistError(
                f'{path} sets {name} to {settings[name]} but the arguments make it {value}; write "auto", or change '
                "--batch_size, --accumulation_steps or --max_grad_norm."
            )
        settings[name] = value
    in_bf16 = arguments.dtype == "bfloat16"
    given = settings.setdefault("bf16", {}).setdefault("enabled", "auto")
    if given not in ("auto", in_bf16):
        raise LigerDistError(
            f'{path} sets bf16.enabled to {json.dumps(given)} but --dtype is {arguments.dtype}; write "auto".'
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
    if settings.get("fp16", {}).get("enabled", False):
        raise LigerDistError(f"{path} enables fp16, which this program has no scaling for; use --dtype bfloat16.")
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise LigerDistError(f"{path} has a section {name!r}; the program brings its own, leave it out.")


def make_optimizer(model: nn.Module, arguments: TrainArguments, decayed: frozenset[str]) -> Optimizer:
    """AdamW with decay of ``decayed`` parameters only."""
    # Torch's updates of many tensors at once do not mix plain ones with DTensors, or DTensors of two meshes.
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = clean(name) in decayed
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            group = groups.setdefault(
                (decays, mesh), {"params": [], "weight_decay": arguments.weight_decay if decays else 0.0}
            )
            group["params"].append(parameter)
    # In one pass over the states, where updates of many tensors at once would hold intermediate ones of all.
    is_fused = all(parameter.is_cuda for parameter in model.parameters())
    return AdamW(
        list(groups.values()), lr=arguments.learning_rate, betas=(0.9, arguments.adam_beta2), fused=is_fused or None
    )


def broken(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Names of those whose part on this rank is not finite."""
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items() if t is not None}
    return [clean(name) for name, tensor in local.items() if not bool(tensor.isfinite().all())]


def written() -> Writing:
    """What is done already."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


@contextmanager
def together_at_the_end(writer: Any, method: str) -> Iterator[None]:
    """What ``method`` cannot write is raised when the context ends: DeepSpeed has barriers in between, where the other
    ranks would wait for this one."""
    own = getattr(writer, method)
    failures: list[Exception] = []

    def write(*arguments: Any, **options: Any) -> None:
        try:
            own(*arguments, **options)
        except (OSError, RuntimeError) as error:
            failures.append(error)

    setattr(writer, method, write)
    try:
        yield
    finally:
        delattr(writer, method)
    if failures:
        raise UnwrittenError from failures[0]


def clean(name: str) -> str:
    """A parameter's name in the model itself."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")


def clip(model: nn.Module, max_norm: float) -> Tensor:
    """Clips the gradient of the whole model to ``max_norm``, 0 for not; returns its norm before."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm or float("inf"))
    # Torch adds up norms on one mesh; rows of a vocab-parallel head may lie on another than the rest.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = nn.utils.get_total_norm(norms)
    # One that is no number stays where it is, so that its parameter can be named.
    finite = torch.where(total.isfinite(), total, 0.0)
    for kind in by_mesh.values() if max_norm > 0 else ():
        nn.utils.clip_grads_with_norm_(kind, max_norm, finite)
    return total
