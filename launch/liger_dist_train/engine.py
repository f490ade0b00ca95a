"""Backward, gradient accumulation, clipping and optimizer step of torch's strategies; DeepSpeed's are in
:mod:`.deepspeed_engine`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from liger_dist import LigerDistError, clip_grad_norm_

from .config import TrainConfig
from .model import build
from .optimizer import Ema, clean, decayed_parameters, make_optimizer, matrices_of_layers, not_finite
from .parallel_dims import ParallelDims
from .state_files import FORMAT, load_state, save_state


class Engine(Protocol):
    """A wrapped model and its optimizer."""

    model: Any
    optimizer: Optimizer
    format: str
    """of what :meth:`save` writes; :meth:`load` reads no other"""

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        """Wraps forward and backward of a micro-batch. Sharded gradients are reduced over ranks in each one, full ones
        in the last one of a step."""

    def backward(self, loss: Tensor) -> None: ...

    def update(self, accepts: Callable[[Tensor], bool] | None = None) -> Tensor:
        """Makes one optimizer step; returns the norm of the gradients before clipping. The gradients stay until
        :meth:`clear`.

        Args:
            accepts: is given the norm; where it returns False, the weights stay as they are.
        """

    def clear(self) -> None: ...

    def averaged(self) -> AbstractContextManager[Any] | None:
        """Gives the model the moving average of its weights, inside; None where there is none."""

    def broken_gradients(self) -> list[str]:
        """Names this rank's parameters whose gradients hold NaN or Inf."""

    def broken_weights(self) -> list[str]:
        """Names the parameters whose part on this rank holds NaN or Inf."""

    def save(self, folder: Path, *, in_background: bool) -> Future[Any] | None:
        """Starts to write the state; the model may change once this returns. None where it is written already."""

    def load(self, folder: Path, *, weights_only: bool) -> None:
        """Restores what :meth:`save` wrote, or of it the weights. Hyperparameters stay as they are.

        Raises:
            LigerDistError: it does not fit; DeepSpeed: a pickle in it names something else than tensors.
        """


class TorchEngine:
    """Everything but DeepSpeed. Checkpoints are sharded safetensors of torch.distributed.checkpoint, which any strategy
    here and any number of ranks can read; under LoRA they hold the LoRA layers alone."""

    def __init__(self, config: TrainConfig, dims: ParallelDims, model: nn.Module) -> None:
        if dims.strategy != "none":
            refuse_without_launcher(dims)
        self.format = FORMAT + (", LoRA" if config.lora_rank else "")
        self._options = StateDictOptions(ignore_frozen_params=config.lora_rank > 0)
        decayed = decayed_parameters(model, config)
        matrices = matrices_of_layers(model, config)
        self.model = build(config, dims, model)
        self.optimizer = make_optimizer(self.model, config, decayed, matrices)
        self._ema = Ema(self.model, config.ema_decay) if config.ema_decay else None
        self._max_norm = config.max_grad_norm
        self._accumulates_unsharded = dims.holds_unsharded_gradients(config)

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[Any]:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last or not self._accumulates_unsharded)
        is_fsdp1 = isinstance(self.model, FullyShardedDataParallel) and self._accumulates_unsharded
        skips = not is_last and (is_fsdp1 or isinstance(self.model, DistributedDataParallel))
        return self.model.no_sync() if skips else nullcontext()  # type: ignore[operator]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self, accepts: Callable[[Tensor], bool] | None = None) -> Tensor:
        norm = clip_grad_norm_(self.model, self._max_norm)
        if accepts is None or accepts(norm):
            self.optimizer.step()
            if self._ema is not None:
                self._ema.update()
        return norm

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def averaged(self) -> AbstractContextManager[Any] | None:
        # liger_dist.wrap reshards after calls without gradients: no full weights stay beside the average.
        return None if self._ema is None else self._ema.swapped()

    def broken_gradients(self) -> list[str]:
        if isinstance(self.model, FullyShardedDataParallel):
            # Its clipping has made all of them NaN.
            return []
        return not_finite({name: parameter.grad for name, parameter in self.model.named_parameters()})

    def broken_weights(self) -> list[str]:
        return not_finite({name: p for name, p in self.model.named_parameters() if p.requires_grad})

    def save(self, folder: Path, *, in_background: bool) -> Future[Any] | None:
        return save_state(self._state(), folder, in_background=in_background)

    def load(self, folder: Path, *, weights_only: bool) -> None:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        state = self._state()
        entries = ("model", "ema") if weights_only else state.keys()
        load_state({name: state[name] for name in entries if name in state}, folder)
        _, moments = get_state_dict(self.model, self.optimizer, options=self._options)
        moments["state"] = state["optimizer"]
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=moments,
            options=StateDictOptions(strict=not self._options.ignore_frozen_params),
        )
        for group, settings in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(settings)

    def _state(self) -> dict[str, Any]:
        """Collects the state by parameter name alone: groups of the optimizer differ between strategies."""
        has_stepped = bool(self.optimizer.state)
        weights, moments = get_state_dict(self.model, self.optimizer, options=self._options)
        if self._options.ignore_frozen_params:
            # bitsandbytes adds the scales of frozen weights.
            trained = {
                clean(name) for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad
            }
            weights = {name: value for name, value in weights.items() if name in trained}
        for state in () if has_stepped else self.optimizer.state.values():
            # Torch has made a step of zeros, to have a state.
            if "step" in state:
                state["step"].zero_()
        average = {} if self._ema is None else {"ema": self._ema.state}
        return {"model": weights, "optimizer": moments["state"], **average}


def refuse_without_launcher(dims: ParallelDims) -> None:
    """Raises:
    LigerDistError: torchrun, or another launcher, did not start this process.
    """
    if not dist.is_initialized():
        raise LigerDistError(
            f"--strategy is {dims.strategy} but no launcher started this process, which it needs also for one: "
            "torchrun --standalone --nproc-per-node 1 liger-dist train ..."
        )
