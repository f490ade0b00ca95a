"""AdamW with weight decay of matrices, Muon, a moving average of the weights, and the learning rate's schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import SchedulerType, get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from liger_dist import LigerDistError
from liger_dist.model.structure import find_structure

from .config import RATIO_OF, TrainConfig
from .options import MIN_RATIO

WARMUP = 20
MANY_STEPS = 10**6
"""of a run whose length is not known yet"""
GIVEN_BY_THE_RUN = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
"""arguments of transformers' schedules that other options decide"""
Kind = Literal["matrix", "matrices", "filter", "vector", "state"]
"""of a parameter: a matrix, a stack of matrices as of experts, filters of a convolution, a vector or a stack of
vectors, or what a recurrence multiplies its state by"""
STATES = ("A_log", "dt_bias")
"""endings of names of the last kind; transformers marks further ones by ``_no_weight_decay``"""


def clean(name: str) -> str:
    """Returns a parameter's name in the unwrapped model."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "").removeprefix("module.")


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Says what each parameter of an unsharded model is, by its name: by the module that owns it, since a stack of
    biases ``[experts, features]`` has two dimensions as well."""
    kinds: dict[str, Kind] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            kinds[f"{path}.{leaf}" if path else leaf] = _kind_of(leaf, parameter, module)
    # Of a tied weight model.named_parameters() has one name.
    return {name: kinds[name] for name, _ in model.named_parameters()}


def _kind_of(leaf: str, parameter: Tensor, owner: nn.Module) -> Kind:
    if leaf.endswith(STATES) or getattr(parameter, "_no_weight_decay", False):
        return "state"
    if parameter.dim() < 2 or "bias" in leaf:
        return "vector"
    if isinstance(owner, nn.modules.conv._ConvNd) or parameter.dim() > 3:
        return "filter"
    return "matrix" if parameter.dim() == 2 else "matrices"


def decays(name: str, kind: Kind, excluded: list[str]) -> bool:
    """True for a parameter with weight decay: matrices and filters that ``--no_weight_decay`` does not name."""
    return kind not in ("vector", "state") and not is_named(name, excluded)


def is_named(name: str, parts: list[str]) -> bool:
    """True where the name of a parameter has one of the parts."""
    return any(part in name for part in parts)


def decayed_parameters(model: nn.Module, config: TrainConfig) -> frozenset[str]:
    """Names the parameters with weight decay."""
    return frozenset(name for name, kind in kinds_of(model).items() if decays(name, kind, config.no_weight_decay))


def matrices_of_layers(model: nn.Module, config: TrainConfig) -> frozenset[str]:
    """Names the parameters that Muon trains: the matrices of the decoder layers, and those of stacked experts; none
    with another optimizer."""
    if config.optimizer != "muon":
        return frozenset()
    inside = {id(parameter) for layer in find_structure(model).layers for parameter in layer.parameters()}
    kinds, named = kinds_of(model), model.named_parameters()
    return frozenset(name for name, p in named if id(p) in inside and kinds[name] in ("matrix", "matrices"))


def has_decay(name: str, decayed: frozenset[str], config: TrainConfig) -> bool:
    """True for a trained parameter with weight decay: one of ``decayed``, or a matrix of LoRA."""
    is_lora_matrix = ".lora_A." in name or ".lora_B." in name
    return name in decayed or (is_lora_matrix and not is_named(name, config.no_weight_decay))


def rules_of(model: nn.Module, config: TrainConfig) -> str:
    """Says how many parameters each rule of the optimizer trains, of the model without storage."""
    decayed, matrices = decayed_parameters(model, config), matrices_of_layers(model, config)
    counts: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_decayed = bool(config.weight_decay) and has_decay(name, decayed, config)
            decay = f"weight decay {config.weight_decay:g}" if is_decayed else "no weight decay"
            rule = f"{'Muon' if name in matrices else 'AdamW'} with {decay}"
            counts[rule] = counts.get(rule, 0) + parameter.numel()
    return "; ".join(f"{rule}: {count:,} parameters" for rule, count in counts.items())


def make_optimizer(
    model: nn.Module, config: TrainConfig, decayed: frozenset[str], matrices: frozenset[str] = frozenset()
) -> Optimizer:
    """Makes the optimizer of the parameters that are trained, with weight decay of ``decayed`` only, and Muon for
    ``matrices``.

    Raises:
        LigerDistError: torchao is not installed, for 8-bit states.
    """
    groups: dict[Any, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # A shard may have one dimension, so that the shard's dimensions do not say.
            is_decayed = has_decay(clean(name), decayed, config)
            decay = config.weight_decay if is_decayed else 0.0
            is_matrix = clean(name) in matrices
            # 8-bit states do not mix plain tensors with DTensors, or DTensors of two meshes.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            mesh = mesh if config.optimizer == "adamw_8bit" else None
            group = groups.setdefault((is_decayed, mesh, is_matrix), {"params": [], "weight_decay": decay})
            group["params"].append(parameter)
    settings: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.optimizer == "adamw_8bit":
        return _eight_bit(list(groups.values()), settings)
    # In one pass over the states, where updates of many tensors at once would hold intermediate ones of all.
    settings["fused"] = all(parameter.is_cuda for parameter in model.parameters()) or None
    if matrices:
        of_muon, of_adamw = (
            [group for (_, _, is_matrix), group in groups.items() if is_matrix == of] for of in (True, False)
        )
        return MuonAndAdamW(of_muon, of_adamw, settings)
    # DeepSpeed takes torch's class alone.
    is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return (ShardedAdamW if is_sharded else AdamW)(list(groups.values()), **settings)


class ShardedAdamW(AdamW):
    """AdamW that updates the local shards of DTensors, all of a group at once: torch's operators on DTensors take 5 ms
    of host time more for 300 parameters, and do not mix them with plain tensors, or with DTensors of another mesh. The
    states are DTensors as torch's."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(_local, tensors)
        return is_complex


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)
"""coefficients of the quintic iteration, by Jordan et al."""


class ShardedMuon(Optimizer):
    """Muon (Jordan et al. 2024), whose update has the size of AdamW's (Liu et al. 2025, "Muon is Scalable for LLM
    Training"): the same as ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")``. Of a sharded matrix it all-gathers the
    update once, and every rank makes it orthogonal; torch's, on DTensors, all-gathers for each product of the
    iteration.
    """

    def __init__(self, params: list[dict[str, Any]], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                average = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(parameter.grad.lerp(average, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(parameter.shape[-2:])))


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Computes the nearest matrix with orthonormal rows or columns, ``[M, N]`` as the given one, about: by a
    Newton-Schulz iteration in bf16 (Jordan et al. 2024), on every rank alike. Of ``[E, M, N]`` each matrix."""
    a, b, c = NEWTON_SCHULZ
    full = (matrix.full_tensor() if isinstance(matrix, DTensor) else matrix).bfloat16()
    is_tall = full.shape[-2] > full.shape[-1]
    wide = full.mT if is_tall else full
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    product: Callable[..., Tensor] = torch.baddbmm if full.dim() == 3 else torch.addmm
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = product(wide, product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    found = (wide.mT if is_tall else wide).to(matrix.dtype)
    if not isinstance(matrix, DTensor):
        return found
    replicated = DTensor.from_local(found, matrix.device_mesh, [Replicate()] * matrix.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=matrix.placements)


class MuonAndAdamW(Optimizer):
    """Muon for matrices, AdamW for the other parameters, with one learning rate and weight decay."""

    def __init__(self, of_muon: list[dict[str, Any]], of_adamw: list[dict[str, Any]], settings: dict[str, Any]) -> None:
        self._parts: list[Optimizer] = [ShardedMuon(of_muon, settings["lr"]), ShardedAdamW(of_adamw, **settings)]
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": settings["lr"]})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        for part in self._parts:
            # Loading a state replaces both.
            part.param_groups, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            part.state = self.state
            part.step()


class Ema:
    """An exponential moving average of the parameters that are trained, in fp32 and sharded as they are: after each
    step ``decay`` of it and the rest of the new weights."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        trained = {clean(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._parameters, self._decay = list(trained.values()), decay
        self.state = {name: parameter.detach().clone() for name, parameter in trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        for parameter, average in zip(self._parameters, self.state.values(), strict=True):
            _local(average).lerp_(_local(parameter), 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Gives the model the averages as its weights, inside."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self._parameters, self.state.values(), strict=True):
            before = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(before)


def _eight_bit(groups: list[dict[str, Any]], settings: dict[str, Any]) -> Optimizer:
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise LigerDistError(
            f"--optimizer adamw_8bit needs torchao, which cannot be imported ({error}); pip install torchao, or take "
            "--optimizer adamw."
        ) from error
    # The states of a shard have 8 bits only where its size divides: ranks would differ, and torchao fails in its step.
    for parameter in (parameter for group in groups for parameter in group["params"]):
        if isinstance(parameter, DTensor):
            shards = [(p, parameter.device_mesh.size(axis)) for axis, p in enumerate(parameter.placements)]
            if any(isinstance(p, Shard) and parameter.shape[p.dim] % size for p, size in shards):
                raise LigerDistError(
                    f"--optimizer adamw_8bit: a parameter of shape {list(parameter.shape)} has uneven shards over "
                    f"{parameter.device_mesh.size()} ranks, which torchao does not support; choose sizes that divide "
                    "(resize the embeddings), or take --optimizer adamw."
                )
    optimizer: Optimizer = AdamW8bit(groups, **settings)
    return optimizer


def make_schedule(optimizer: Optimizer, config: TrainConfig, num_steps: int) -> LRScheduler:
    """Makes the schedule of transformers that ``--lr_scheduler`` names.

    Raises:
        LigerDistError: it does not take ``--lr_scheduler_kwargs``.
    """
    taken = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(config.lr_scheduler)]).parameters
    expected = [name for name in taken if name not in GIVEN_BY_THE_RUN]
    ratio = RATIO_OF.get(config.lr_scheduler)
    for name in config.lr_kwargs:
        if name not in expected:
            raise LigerDistError(
                f"--lr_scheduler {config.lr_scheduler} does not take {name} of --lr_scheduler_kwargs; expected some of "
                f"{', '.join(expected) or 'no arguments'} (--warmup_steps, --steps and --resume give the others)."
            )
        if name == ratio and config.min_learning_rate_ratio != MIN_RATIO:
            raise LigerDistError(
                f"--min_learning_rate_ratio is {config.min_learning_rate_ratio} and --lr_scheduler_kwargs has {name} "
                f"{config.lr_kwargs[name]}, which is the same; give one of them."
            )
    warmup_steps = min(WARMUP, num_steps // 10) if config.warmup_steps is None else config.warmup_steps
    warmup = int(warmup_steps if warmup_steps >= 1 else warmup_steps * num_steps)
    kwargs: dict[str, Any] = {}
    if config.lr_scheduler in RATIO_OF:
        kwargs[RATIO_OF[config.lr_scheduler]] = config.min_learning_rate_ratio
    if config.lr_scheduler == "warmup_stable_decay":
        kwargs["num_decay_steps"] = max(1, num_steps // 5)
    try:
        schedule: LRScheduler = get_scheduler(
            config.lr_scheduler,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=kwargs | config.lr_kwargs,
        )
        # What has a wrong type is met where it is read: in the warm-up, after it, or at the end.
        for factor in schedule.lr_lambdas if isinstance(schedule, LambdaLR) else ():
            for step in (0, warmup, warmup + 1, num_steps):
                math.isfinite(factor(step))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise LigerDistError(
            f"--lr_scheduler {config.lr_scheduler} does not take {kwargs | config.lr_kwargs}: {error}; change "
            "--lr_scheduler_kwargs."
        ) from error
    return schedule


def check_schedule(config: TrainConfig) -> None:
    """Refuses what :func:`make_schedule` would, before the data is read and the number of steps is known.

    Raises:
        LigerDistError: as :func:`make_schedule`.
    """
    optimizer = AdamW([torch.zeros(1)], lr=config.learning_rate or 0.0)
    make_schedule(optimizer, config, config.steps or MANY_STEPS)


def check_no_weight_decay(config: TrainConfig, model: nn.Module) -> None:
    """Raises:
    LigerDistError: ``--no_weight_decay`` has a part that no parameter's name has.
    """
    names = [name for name, _ in model.named_parameters()]
    for part in config.no_weight_decay:
        if not any(is_named(name, [part]) for name in names):
            raise LigerDistError(
                f"--no_weight_decay has {part!r}, which is in no parameter's name; expected parts of names such as "
                f"{', '.join(names[:3])}."
            )


def not_finite(tensors: dict[str, Tensor | None]) -> list[str]:
    """Names the tensors whose part on this rank holds NaN or Inf."""
    local = {name: _local(tensor) for name, tensor in tensors.items() if tensor is not None}
    return [clean(name) for name, tensor in local.items() if not bool(tensor.isfinite().all())]
