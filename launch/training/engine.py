"""How gradients become steps, and what of that is stored: by torch, or by a DeepSpeed engine."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
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

    def update(self) -> Tensor | None:
        """One optimiser step; the gradient's norm before it was clipped. The gradients stay until :meth:`clear`."""

    def clear(self) -> None: ...

    def broken_gradients(self) -> list[str]:
        """Names of this rank's parameters whose gradients are not finite."""

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

    def update(self) -> Tensor | None:
        norm = clip(self.model, self._max_norm)
        self.optimizer.step()
        return norm

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def broken_gradients(self) -> list[str]:
        found = []
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if gradient is not None and not bool(gradient.isfinite().all()):
                found.append(clean(name))
        return found

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
    """DeepSpeed, at any ZeRO stage. Its checkpoints are its own: the same stage and number of ranks reads them."""

    def __init__(self, arguments: TrainArguments, layout: Layout, model: nn.Module, decayed: frozenset[str]) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Asked for by its CPU communication; torchrun gives it another name.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        import deepspeed

        from liger_dist.integrations.deepspeed_section import read_section

        settings = deepspeed_settings(arguments, layout)
        section = read_section(settings)
        wrapped = build(arguments, layout, model, None if section is None else section.wrap_config())
        # DeepSpeed puts its own around it, which reads the learning rate from this one.
        self.optimizer = make_optimizer(wrapped, arguments, decayed)
        self.model, *_ = deepspeed.initialize(model=wrapped, optimizer=self.optimizer, config=settings)
        self.format = f"DeepSpeed, ZeRO stage {self.model.zero_optimization_stage()}, {layout.world_size} ranks"

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        self.model.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The loss is divided by the tokens of all micro-batches already.
        self.model.backward(loss, scale_wrt_gas=False)

    def update(self) -> Tensor | None:
        self.model.step()
        norm = self.model.get_global_grad_norm()
        return None if norm is None else torch.as_tensor(norm)

    def clear(self) -> None:
        """Its step does."""

    def broken_gradients(self) -> list[str]:
        """It has let go of them."""
        return []

    def save(self, folder: Path, *, in_background: bool) -> Writing:
        assert not in_background
        self.model.save_checkpoint(str(folder), tag="state", save_latest=False)
        return written()

    def load(self, folder: Path) -> None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self.model.load_checkpoint(str(folder), tag="state", load_lr_scheduler_states=False)
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)

    def generating(self) -> AbstractContextManager[Any]:
        return nullcontext()


def deepspeed_settings(arguments: TrainArguments, layout: Layout) -> dict[str, Any]:
    """The JSON, with what the arguments say in the place of "auto" and of what it leaves out.

    Raises:
        LigerDistError: it cannot be read, or says something else than the arguments.
    """
    path = Path(arguments.deepspeed or "")
    try:
        settings: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LigerDistError(f"--deepspeed {path} cannot be read: {error}; expected DeepSpeed's JSON.") from error
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
    for name in ("optimizer", "scheduler"):
        if name in settings:
            raise LigerDistError(f"{path} has a section {name!r}; the program brings its own, leave it out.")
    return settings


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


def written() -> Writing:
    """What is done already."""
    done: Future[None] = Future()
    done.set_result(None)
    return done


def clean(name: str) -> str:
    """A parameter's name in the model itself."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")


def clip(model: nn.Module, max_norm: float) -> Tensor | None:
    """Clips the gradient of the whole model; returns its norm before."""
    if max_norm <= 0:
        return None
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    # Torch adds up norms on one mesh; rows of a vocab-parallel head may lie on another than the rest.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = nn.utils.get_total_norm(norms)
    for kind in by_mesh.values():
        nn.utils.clip_grads_with_norm_(kind, max_norm, total)
    return total
