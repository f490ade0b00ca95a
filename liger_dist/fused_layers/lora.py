"""LoRA layers, ``base(x) + scaling * B(A(x))``: autograd functions that add in place, the match of PEFT's layers, and
their swapped forward.

PEFT's forward allocates three tensors of the output's size (product, scaled product, sum), and one more in the
backward, and autograd adds up the gradients of the input. Here all projections of one input, such as q, k and v, are
one function: one product with all their A, and each B's product is what the GEMM of the frozen weight adds to; in the
backward the GEMMs add up the gradient of the input. Where the base layer is another one, or has hooks, only B's product
is added in place.

[Note: fp32 matrices over a base of 16 bits]
PEFT makes A and B in fp32 unless it is told otherwise, and without autocast computes ``A(x)`` from an fp32 copy of each
input. Here A and B are rounded to bf16, as autocast does, and their gradients have fp32 again: the products are those
of adapters in bf16, and the optimizer updates fp32 masters. Over a base of fp16 only under autocast, whose loss scaling
expects it: products of small gradients underflow in fp16.

Legend: T tokens, I and O features of input and output, r LoRA rank.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_dist.errors import refuse_second_order
from liger_dist.model.peft import has_lora, only_plain_adapter
from liger_dist.model.quantized import dequantized, is_four_bit_linear, quant_state
from liger_dist.model.torch_modes import in_checkpoint
from liger_dist.sharding.deepspeed import is_stored_by_zero3
from liger_dist.trials.isolated import LeftAloneError, probing
from liger_dist.trials.kinds import agrees, run_class_forward
from liger_dist.trials.model_run import Groups
from liger_dist_kernels import Backend

from .swap import Kind, Match, has_hooks, has_kernels, is_local, is_plain_linear, match_of, tensor_of

TOLERANCE = 1e-5
_PARTS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Projection:
    """A frozen linear layer with LoRA."""

    weight: Tensor
    """``[O, I]``, or the bytes of 4-bit weights"""
    state: Any
    """``QuantState`` of 4-bit weights"""
    bias: Tensor | None
    weight_rI: Tensor
    """A, in the dtype of the input or in fp32"""
    weight_Or: Tensor
    """B, likewise"""
    scaling: float

    def tensors(self) -> tuple[Tensor, ...]:
        found = (self.weight, self.weight_rI, self.weight_Or)
        return found if self.bias is None else (*found, self.bias)

    def is_same(self, other: Projection) -> bool:
        """True for the same tensors and scaling."""
        pairs = zip(self.tensors(), other.tensors(), strict=False)
        is_same = self.state is other.state and (self.bias is None) == (other.bias is None)
        return is_same and self.scaling == other.scaling and all(one is two for one, two in pairs)

    def has_inference(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return any(tensor.is_inference() for tensor in self.tensors())

    def full_weight(self, dtype: torch.dtype) -> Tensor:
        return self.weight if self.state is None else dequantized(self.weight, self.state, dtype)


class _Projections(torch.autograd.Function):
    """Computes the projections of one input: ``y_i = x @ W_i.T + bias_i + scaling_i * x @ A_i.T @ B_i.T``."""

    @staticmethod
    def forward(ctx: Any, projections: Sequence[Projection], x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Takes as ``tensors`` bias, A and B of each projection, for their gradients."""
        x_TI = x.flatten(0, -2)
        low_Tr = x_TI @ _stacked(projections, x.dtype).T
        outputs = []
        for projection, low in zip(projections, _split_by_rank(low_Tr, _ranks(projections)), strict=True):
            # The output is no view, so that the model may change it in place.
            output = x.new_empty(*x.shape[:-1], projection.weight_Or.shape[0])
            y = output.view(-1, output.shape[-1]) if x.numel() else output.flatten(0, -2)
            given = y if projection.bias is None else projection.bias
            beta = 0 if projection.bias is None else 1
            torch.addmm(given, low, projection.weight_Or.to(x.dtype).T, beta=beta, alpha=projection.scaling, out=y)
            y.addmm_(x_TI, projection.full_weight(x.dtype).T)
            outputs.append(output)
        saved = (tensor for p in projections for tensor in (p.weight, p.weight_rI, p.weight_Or))
        ctx.save_for_backward(x, low_Tr, *saved)
        ctx.constants = [(p.state, p.scaling) for p in projections]
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        # A checkpoint unpacks them once.
        saved = ctx.saved_tensors
        device_type = saved[0].device.type
        # Of a backward inside of autocast, which casts some of the products: they have the forward's dtype.
        is_cast = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, enabled=False) if is_cast else nullcontext():
            return _Projections._gradients(ctx, saved, d_outputs)

    @staticmethod
    def _gradients(
        ctx: Any, tensors: Sequence[Tensor], d_outputs: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        x, low_Tr, *saved = tensors
        of_each = zip(ctx.constants, saved[0::3], saved[1::3], saved[2::3], strict=True)
        projections = [Projection(w, state, None, a, b, scaling) for (state, scaling), w, a, b in of_each]
        x_TI = x.flatten(0, -2)
        has_all = all(d is not None for d in d_outputs)
        d_low_Tr = torch.empty_like(low_Tr) if has_all else torch.zeros_like(low_Tr)
        ranks = _ranks(projections)
        lows, d_lows = _split_by_rank(low_Tr, ranks), _split_by_rank(d_low_Tr, ranks)
        d_y = [None if d is None else d.flatten(0, -2) for d in d_outputs]
        d_bs: list[Tensor | None] = []
        for projection, low, d_low, d in zip(projections, lows, d_lows, d_y, strict=True):
            if d is not None:
                b = projection.weight_Or.to(x.dtype)
                torch.addmm(d_low, d, b, beta=0, alpha=projection.scaling, out=d_low)
            d_b = None if d is None else _scaled_product(d.T, low, projection.scaling)
            d_bs.append(None if d_b is None else d_b.to(projection.weight_Or.dtype))
        trains_a = any(ctx.needs_input_grad[3::3])
        d_as = (d_low_Tr.T @ x_TI).to(projections[0].weight_rI.dtype).split(ranks) if trains_a else [None] * len(ranks)
        d_x = None
        if ctx.needs_input_grad[1]:
            d_x = d_low_Tr @ _stacked(projections, x.dtype)
            for projection, d in zip(projections, d_y, strict=True):
                if d is not None:
                    d_x.addmm_(d, projection.full_weight(x.dtype))
            d_x = d_x.view(x.shape)
        gradients: list[Tensor | None] = []
        for index, (d, d_a, d_b) in enumerate(zip(d_y, d_as, d_bs, strict=True)):
            has_bias_gradient = d is not None and ctx.needs_input_grad[2 + 3 * index]
            gradients += [d.sum(0) if has_bias_gradient else None, None if d is None else d_a, d_b]  # type: ignore[union-attr]
        return None, d_x, *gradients


def _scaled_product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    product = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(product, left, right, beta=0, alpha=scaling, out=product)


def _ranks(projections: Sequence[Projection]) -> list[int]:
    return [projection.weight_rI.shape[0] for projection in projections]


def _split_by_rank(low_Tr: Tensor, ranks: list[int]) -> Sequence[Tensor]:
    # Tensor.split is a Python function, which takes twice as long.
    return (low_Tr,) if len(ranks) == 1 else torch.split_with_sizes(low_Tr, ranks, 1)


def _stacked(projections: Sequence[Projection], dtype: torch.dtype) -> Tensor:
    """Returns A of all projections, one below the other."""
    if len(projections) == 1:
        return projections[0].weight_rI.to(dtype)
    return torch.cat([projection.weight_rI for projection in projections]).to(dtype)


def _project(projections: Sequence[Projection], x: Tensor) -> tuple[Tensor, ...]:
    tensors = (tensor for p in projections for tensor in (p.bias, p.weight_rI, p.weight_Or))
    outputs: tuple[Tensor, ...] = _Projections.apply(projections, x, *tensors)  # type: ignore[no-untyped-call]
    return outputs


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
            d_low = _scaled_product(d_y_TO, weight_Or, ctx.scaling).view(low.shape)
        if ctx.needs_input_grad[2]:
            d_weight = _scaled_product(d_y_TO.T, low_Tr, ctx.scaling)
        return d_y, d_low, d_weight, None


@dataclass
class LowRankMatch(Match):
    """Match of a LoRA layer."""

    parent: nn.Module | None = None
    followers: tuple[str, ...] = ()
    """names of LoRA layers in the parent that are called with the same input afterwards"""
    ready: tuple[Tensor, tuple[Any, ...], Projection, Tensor] | None = None
    """precomputed output: its input, the state it is valid for, parameters, output"""

    def __deepcopy__(self, memo: dict[int, Any]) -> LowRankMatch:
        # An output belongs to one call, and has a graph.
        return LowRankMatch(copy.deepcopy(self.parent, memo), self.followers)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"ready": None}

    def __str__(self) -> str:
        return "LoRA (added in place)"


def link_siblings(groups: Groups) -> None:
    """Lets LoRA layers that their parent calls with one input compute their outputs together."""
    for parent, names_of_groups in groups.items():
        for names in names_of_groups:
            match = match_of(parent.get_submodule(names[0]))
            if isinstance(match, LowRankMatch):
                match.parent, match.followers = parent, tuple(names[1:])


def drop_precomputed(model: nn.Module) -> None:
    """Frees outputs that were computed for layers which have not been called: a forward has raised."""
    for module in model.modules():
        match = match_of(module)
        if isinstance(match, LowRankMatch):
            match.ready = None


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
        if not _agrees(module, name):
            raise LeftAloneError("it does not compute base(x) + scaling * B(A(x))")
    return LowRankMatch()


def _agrees(module: Any, name: str) -> bool:
    """True if PEFT's forward around small layers has the same output and gradients as this one."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 6), (2, 6), (8, 2), (8, 6), (8,))
    x, a, b, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    scaling = module.scaling[name]

    def original(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return 2 * run_class_forward(module, (x,), small_layers(name, linear_of(weight, bias), a, b))

    def compute(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        (projected,) = _project([Projection(weight, None, bias, a, b, scaling)], x)
        return _added(F.linear(x, weight, bias), F.linear(x, a), b, scaling) + projected

    return agrees((x, a, b), original, compute, tolerance=TOLERANCE)


def small_layers(name: str, base: nn.Module, a: Tensor, b: Tensor) -> dict[str, Any]:
    """Makes the submodules of a LoRA layer with the PEFT adapter ``name``, whose weights are ``a`` and ``b``."""
    lora = {part: nn.ModuleDict({name: linear_of(weight)}) for part, weight in zip(_PARTS, (a, b), strict=True)}
    return {"base_layer": base, **lora}


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Makes a linear layer with the tensors themselves instead of parameters."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    vars(layer)["_parameters"] = {"weight": weight, "bias": bias}
    return layer


def _compute(module: Any, match: LowRankMatch, x: Any = None, *args: Any, **kwargs: Any) -> Any:
    ready, match.ready = match.ready, None
    if args or kwargs or not has_kernels(x) or x.dim() < 2 or _casts(x):
        return NotImplemented
    first = _projection(module, x)
    if first is not None:
        is_ready = ready is not None and ready[0] is x and first.is_same(ready[2]) and not has_hooks(module)
        if ready is not None and is_ready and ready[1] == _state_of_call(first, x):
            return ready[3]
        return _together(module, match, first, x)
    name = None if torch.is_autocast_enabled(x.device.type) else _adapter(module, x)
    if name is None:
        return NotImplemented
    modules = module._modules
    y = modules["base_layer"](x)
    low = modules["lora_A"]._modules[name](x)
    b = modules["lora_B"]._modules[name]
    if not _may_add(y, low, b.weight):
        return (y + b(low) * module.scaling[name]).to(y.dtype)
    if in_checkpoint():
        # Selective checkpoints keep the product of the base layer for the recomputation, as it is then.
        flat = torch.addmm(y.flatten(0, -2), low.flatten(0, -2), b.weight.T, alpha=module.scaling[name])
        return flat.view(y.shape)
    return _added(y, low, b.weight, module.scaling[name])


def _together(called: nn.Module, match: LowRankMatch, first: Projection, x: Tensor) -> Tensor:
    """Computes a layer, and those of its siblings that will be called with the same input."""
    computed: list[LowRankMatch] = []
    projections = [first]
    # Tensors of inference mode have no version, and nothing would tell that they have changed.
    children = {} if match.parent is None or x.is_inference() or first.has_inference() else match.parent._modules
    for name in match.followers:
        before, called = called, children.get(name) or called
        follower = match_of(called)
        # A hook may write to weights, or to the input of the next layers, by .data without a version.
        if has_hooks(before) or has_hooks(called) or not isinstance(follower, LowRankMatch):
            break
        projection = None if called is before else _projection(called, x)
        if projection is None or projection.has_inference():
            break
        computed.append(follower)
        projections.append(projection)
    output, *rest = _project(projections, x)
    for follower, projection, other in zip(computed, projections[1:], rest, strict=True):
        follower.ready = (x, _state_of_call(projection, x), projection, other)
    return output


def _state_of_call(projection: Projection, x: Tensor) -> tuple[Any, ...]:
    """Returns what tells whether an output is still that of its input: versions, which tensors require gradients, and
    the mode of autograd."""
    tensors = (x, *projection.tensors())
    # See quantized.dequantized.
    with torch._C.DisableTorchFunctionSubclass():
        versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
        return torch.is_grad_enabled(), *versions, *(tensor.requires_grad for tensor in tensors)


def _projection(module: Any, x: Tensor) -> Projection | None:
    """Returns what a LoRA layer computes; None if modules inside have to be called: another PEFT adapter than a plain
    one, a base layer that trains, is another one or is sharded here, or hooks."""
    name, modules = only_plain_adapter(module), module._modules
    if name is None:
        return None
    base, a, b = modules["base_layer"], modules["lora_A"]._modules[name], modules["lora_B"]._modules[name]
    is_plain = is_plain_linear(base)
    if not is_plain and (not is_four_bit_linear(base) or has_hooks(base)):
        return None
    # See [Note: fp32 matrices over a base of 16 bits].
    dtype = x.dtype
    rounds = dtype == torch.bfloat16 or torch.is_autocast_enabled(x.device.type)
    dtypes = (dtype, torch.float32) if rounds else (dtype,)
    low, high = _plain_matrix(a, dtypes), _plain_matrix(b, dtypes)
    if low is None or high is None or has_hooks(a) or has_hooks(b):
        return None
    weight, bias = (tensor_of(base, "weight"), tensor_of(base, "bias")) if is_plain else (base.weight, base.bias)
    (rank, width), (features, rank_of_b) = low.shape, high.shape
    if (width, features, rank_of_b) != (x.shape[-1], base.out_features, rank):
        return None
    state = None
    # See quantized.dequantized.
    with torch._C.DisableTorchFunctionSubclass():
        if is_plain:
            is_full = weight.dtype == dtype and weight.shape == (features, width)
            if not is_full or weight.untyped_storage().nbytes() == 0:
                return None
        else:
            # Without gradients bitsandbytes multiplies packed weights, of which it reads a quarter of the bytes.
            state = quant_state(base, dtype) if torch.is_grad_enabled() else None
            if state is None:
                return None
        if weight.requires_grad or is_stored_by_zero3(weight):
            return None
    if bias is not None and (bias.dtype != dtype or not is_local(bias)):
        return None
    return Projection(weight, state, bias, low, high, module.scaling[name])


def _plain_matrix(layer: nn.Module, dtypes: tuple[torch.dtype, ...]) -> Tensor | None:
    """Returns the full weight of A or B as PEFT makes it, in one of these dtypes; None otherwise."""
    if type(layer) is not nn.Linear or tensor_of(layer, "bias") is not None:
        return None
    weight = tensor_of(layer, "weight")
    return weight if is_local(weight) and weight.dtype in dtypes and weight.dim() == 2 else None


def _casts(x: Tensor) -> bool:
    """True where autocast computes products in another dtype than that of ``x``."""
    kind = x.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != x.dtype


def _added(y: Tensor, low: Tensor, weight_Or: Tensor, scaling: float) -> Tensor:
    result: Tensor = _AddLowRank.apply(y, low, weight_Or, scaling)  # type: ignore[no-untyped-call]
    return result


def _adapter(module: Any, x: Any) -> str | None:
    """Returns the name of the PEFT adapter to add; None where PEFT's forward has to run: another dtype, active dropout,
    several adapters or none, hooks or wrappers on A, B or the base layer."""
    name = only_plain_adapter(module)
    modules = module._modules
    if name is None or not _is_fresh_output_of(modules["base_layer"]):
        return None
    a, b = modules["lora_A"]._modules[name], modules["lora_B"]._modules[name]
    is_plain = all(_plain_matrix(part, (x.dtype,)) is not None for part in (a, b))
    return name if is_plain and not has_hooks(b) else None


def _is_fresh_output_of(base: nn.Module) -> bool:
    """True if nothing else holds or reads what ``base`` returns: it computes torch's linear layer, torchao's or that of
    bitsandbytes."""
    forward: Any = type(base).forward
    is_known = forward is nn.Linear.forward or forward.__module__.startswith("torchao.float8.")
    return not has_hooks(base) and (is_known or is_four_bit_linear(base))


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
