"""LoRA layers, ``base(x) + scaling * B(A(x))``: one autograd function that adds in place, the match of PEFT's layers,
and their swapped forward.

PEFT's forward allocates three tensors of the output's size (product, scaled product, sum), and one more in the
backward. Here the GEMM adds the product to the output of the base layer, and the gradient is scaled on
the ``[T, r]`` side. Base layer and A stay modules that are called as before.

Legend: T tokens, O features of the output, r LoRA rank.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.errors import refuse_second_order
from liger_dist.model.peft import has_lora, only_plain_adapter
from liger_dist.model.stand_ins import swapped
from liger_dist.sharding.deepspeed import is_stored_by_zero3
from liger_dist_kernels import Backend

from .swap import Kind, LeftAloneError, agrees, has_hooks, is_local, probing, runs_own_code

TOLERANCE = 1e-5
_PARTS = ("lora_A", "lora_B")


class _AddLowRank(torch.autograd.Function):
    """Adds ``scaling * low @ B.T`` to ``y`` in place."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, low: Tensor, weight_Or: Tensor, scaling: float) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(low, weight_Or)
        ctx.scaling = scaling
        y.view(-1, y.shape[-1]).addmm_(low.flatten(0, -2), weight_Or.T, alpha=scaling)
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        low, weight_Or = ctx.saved_tensors
        d_y_TO, low_Tr = d_y.flatten(0, -2), low.flatten(0, -2)
        d_low, d_weight = None, None
        if ctx.needs_input_grad[1]:
            d_low = (d_y_TO @ weight_Or).mul_(ctx.scaling).view(low.shape)
        if ctx.needs_input_grad[2]:
            d_weight = (d_y_TO.T @ low_Tr).mul_(ctx.scaling)
        return d_y, d_low, d_weight, None


@dataclass(frozen=True)
class LowRankMatch:
    """Match of a LoRA layer."""

    def __str__(self) -> str:
        return "LoRA (added in place)"


def _is_candidate(module: nn.Module) -> bool:
    return (
        all(isinstance(module._modules.get(name), nn.ModuleDict) for name in _PARTS) and "base_layer" in module._modules
    )


def _match(module: Any, backend: Backend) -> LowRankMatch:
    if not isinstance(module.base_layer, nn.Linear):
        raise LeftAloneError(f"its base layer is a {type(module.base_layer).__name__}")
    name = only_plain_adapter(module)
    if name is None:
        raise LeftAloneError("it has several active adapters, none, a variant of LoRA, or active dropout")
    with probing(module):
        if not agrees(partial(_probe, module, name), tolerance=TOLERANCE):
            raise LeftAloneError("it does not compute base(x) + scaling * B(A(x))")
    return LowRankMatch()


def _probe(module: Any, name: str, is_original: bool) -> tuple[list[Any], list[Tensor]]:
    """Runs PEFT's forward, or this one, around small layers; returns output and leaves."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        base, a, b = nn.Linear(6, 8), nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        x = torch.randn(2, 3, 6, requires_grad=True)
    small = {"base_layer": base, "lora_A": nn.ModuleDict({name: a}), "lora_B": nn.ModuleDict({name: b})}
    with ExitStack() as stack:
        stack.enter_context(swapped(vars(module), "training", False))
        for part, layers in small.items():
            stack.enter_context(swapped(module._modules, part, layers))
        y = type(module).forward(module, x) if is_original else _added(base(x), a(x), b.weight, module.scaling[name])
    return [y], [x, base.weight, a.weight, b.weight]


def _compute(module: Any, match: LowRankMatch, x: Any = None, *args: Any, **kwargs: Any) -> Any:
    name = None if args or kwargs else _adapter(module, x)
    if name is None:
        return NotImplemented
    modules = module._modules
    y = modules["base_layer"](x)
    low = modules["lora_A"]._modules[name](x)
    b = modules["lora_B"]._modules[name]
    if not _may_add(y, low, b.weight):
        return (y + b(low) * module.scaling[name]).to(y.dtype)
    return _added(y, low, b.weight, module.scaling[name])


def _added(y: Tensor, low: Tensor, weight_Or: Tensor, scaling: float) -> Tensor:
    result: Tensor = _AddLowRank.apply(y, low, weight_Or, scaling)  # type: ignore[no-untyped-call]
    return result


def _adapter(module: Any, x: Any) -> str | None:
    """Returns the name of the PEFT adapter to add; None where PEFT's forward has to run: another dtype, active dropout,
    several adapters or none, hooks or wrappers on A, B or the base layer."""
    if runs_own_code(x, under_autocast=False):
        return None
    name = only_plain_adapter(module)
    modules = module._modules
    if name is None or not _is_fresh_output_of(modules["base_layer"]):
        return None
    a, b = modules["lora_A"]._modules[name], modules["lora_B"]._modules[name]
    for part in (a, b):
        if type(part) is not nn.Linear or part.bias is not None:
            return None
        weight = part.weight
        if not is_local(weight) or weight.dtype != x.dtype:
            return None
    return None if has_hooks(b) else name


def _is_fresh_output_of(base: nn.Module) -> bool:
    """True if nothing else holds or reads what ``base`` returns: it computes torch's linear layer, or torchao's."""
    forward: Any = type(base).forward
    return not has_hooks(base) and (forward is nn.Linear.forward or forward.__module__.startswith("torchao.float8."))


def _may_add(y: Any, low: Any, weight_Or: Tensor) -> bool:
    """True if ``y`` is a fresh output of the base layer in the PEFT adapter's dtype, and B is no ZeRO-3 parameter,
    which is all-gathered only inside its module's forward."""
    is_fresh = is_local(y) and y._base is None and y.is_contiguous() and y.dtype == weight_Or.dtype
    fits = is_local(low) and low.dtype == weight_Or.dtype and not is_stored_by_zero3(weight_Or)
    return is_fresh and fits and tuple(weight_Or.shape) == (y.shape[-1], low.shape[-1])


LOW_RANK = Kind(
    name="LoRA",
    is_candidate=_is_candidate,
    match=_match,
    compute=_compute,
    absent="no layer of PEFT has lora_A, lora_B and a base layer",
    is_expected=lambda model: any(map(has_lora, model.modules())),
)
