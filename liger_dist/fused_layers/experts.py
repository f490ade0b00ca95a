"""Experts of a mixture: the match of transformers' modules, and the implementation that it selects for them.

transformers calls the experts of a model by the name of an implementation in the module's config
(``use_experts_implementation``). A swapped module has a config with another name, :data:`NAME`; nothing else of it
changes, so that it is also called where transformers has put the exchange of tokens of its expert parallelism around
its forward, and the number of experts is that of this rank.

LoRA of PEFT on the parameters of experts (``target_parameters``) is a module around them, which merges its product into
a copy of the weights. Swapped, it gives its matrices to the experts instead, for grouped products.

Legend: E experts, D hidden, H features of the first projection, r LoRA rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from liger_dist.errors import LigerDistError
from liger_dist.model.class_swap import swapped
from liger_dist.model.four_bit_experts import is_experts
from liger_dist.model.peft import has_lora, only_plain_adapter, target_parameters_of
from liger_dist.model.quantized import (
    four_bit_stack,
    four_bit_stacks,
    has_four_bits,
    lora_of_peft,
    remove_lora_of_peft,
)
from liger_dist.model.torch_modes import is_transformed
from liger_dist.sharding.fsdp2.expert_parallel import ranks_of_experts
from liger_dist.trials.attributes import Attributes, numbers_of
from liger_dist.trials.isolated import LeftAloneError, probing
from liger_dist.trials.kinds import PROBE_SCALES, agrees, exchanged, run_class_forward
from liger_dist_kernels import ACTIVATIONS, Backend, GateOptions, route
from liger_dist_kernels.expert_activation import gate_in_torch, split_projection

from .expert_dispatch import sent_to_experts
from .grouped_experts import ExpertOptions, ExpertTensors, experts, experts_of_four_bits, supports
from .lora import small_layers
from .swap import Kind, Match, PartState, Swapped, has_hooks, is_local, match_of

NAME = "liger_dist"
"""of the implementation, in transformers' interface"""
TOLERANCE = 1e-5
REPLACED = (None, "eager", "batched_mm", "grouped_mm")
"""transformers' implementations that compute with torch; all remaining ones are kernels that a user has chosen"""
_ALIGNED_RANK = 8
"""elements that a LoRA rank is padded to: a grouped product wants rows of 16 bytes"""
_TOKENS, _EXPERTS, _EXPERTS_OF_A_TOKEN, _HIDDEN, _FEATURES = 9, 3, 2, 4, 6
"""sizes of the probe; the last expert gets no token"""


class _Config:
    """Config of a module of experts with another implementation; all else is as in the module's config."""

    def __init__(self, original: Any, implementation: str = NAME) -> None:
        # Here, and not on import, which does not import transformers; pickles make one, too.
        _register()
        vars(self).update(original=original, _experts_implementation=implementation)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)

    def __reduce__(self) -> Any:
        return _Config, (self.original, self._experts_implementation)


@dataclass(frozen=True, kw_only=True)
class ExpertsMatch(Match):
    """Match of a module of experts."""

    options: ExpertOptions
    names: tuple[str | None, ...]
    """of the parameters, in the order of :class:`.ExpertTensors` without LoRA; None for one that is not there"""
    implementation: str | None
    """the model's config"""
    config: _Config
    """what the swapped module has as its config"""
    apply_gate: Any
    """function that the module calls for its gate: of its class, or patched on the instance"""
    activation: PartState | None
    """module of the activation; None where the experts' class computes it"""
    attributes: Attributes
    """attributes of the module when it was matched"""

    def __str__(self) -> str:
        gate = self.options.gate
        words = f"{gate.activation}(gate) * up" if gate.is_gated else f"{gate.activation}(up)"
        limited = "" if gate.limit is None else f", limited to {gate.limit:g}"
        return f"experts by grouped products, down({words}{limited})"


def _is_candidate(module: nn.Module) -> bool:
    """True for what transformers' ``use_experts_implementation`` makes."""
    down, packed = module._parameters.get("down_proj"), four_bit_stack(module, "down_proj")
    shape = packed.state.shape if packed is not None else () if down is None else down.shape
    return is_experts(module) and len(shape) == 3


def _match(module: Any, backend: Backend) -> ExpertsMatch:
    implementation = module.config._experts_implementation
    if implementation not in REPLACED:
        raise LeftAloneError(f"its implementation is {implementation}")
    if "forward" in vars(module) and not getattr(module, "_is_expert_parallel", False):
        raise LeftAloneError("its forward has been patched on the instance")
    if getattr(module, "has_post_expert_norm", False):
        raise LeftAloneError("it has a norm after each expert")
    is_gated, has_bias = getattr(module, "has_gate", True), getattr(module, "has_bias", False)
    up = "gate_up_proj" if is_gated else "up_proj"
    names = (up, "down_proj", f"{up}_bias" if has_bias else None, "down_proj_bias" if has_bias else None)
    has = {name for name in names if name is not None and (name in module._parameters or four_bit_stack(module, name))}
    if has != {*names} - {None}:
        raise LeftAloneError(f"it has no {up} and down_proj" + (" with biases" if has_bias else ""))
    activation, config = module._modules.get("act_fn"), _Config(module.config)
    attributes = Attributes(module)
    with probing(module), _without_four_bits(module), attributes.noting(module):
        gate = next(_gates(module, is_gated=is_gated), None)
        if gate is None:
            raise LeftAloneError("its activation is not a known one")
        match = ExpertsMatch(
            options=ExpertOptions(gate=gate, is_transposed=module.is_transposed, backend=backend),
            names=names,
            implementation=implementation,
            config=config,
            apply_gate=_gate_function(module),
            activation=None if activation is None else PartState.of(activation),
            attributes=attributes,
        )
        if not _agrees(module, match):
            raise LeftAloneError("it does not compute the weighted sum of its experts")
    return match


@contextmanager
def _without_four_bits(module: Any) -> Iterator[None]:
    """Within, the module is as it was before a parameter was quantised, which gets other values in a trial."""
    if "parametrizations" not in module._modules:
        yield
        return
    before, parts = type(module), {name: part for name, part in module._modules.items() if name != "parametrizations"}
    with swapped(vars(module), "_modules", parts):
        module.__class__ = next(cls for cls in before.__mro__ if not cls.__module__.startswith("torch."))
        try:
            yield
        finally:
            module.__class__ = before


def _gates(module: Any, *, is_gated: bool) -> Iterator[GateOptions]:
    """Yields options of the gate that agree with the module's activation, at small and large values, some of them
    beyond each number that could be a limit."""
    generator = torch.Generator().manual_seed(0)
    scales = (*PROBE_SCALES, *(4 * number for number in _numbers_of(module)))
    values = [scale * torch.randn(64, 2 * _FEATURES, generator=generator).double() for scale in scales]
    with torch.no_grad():
        truths = [module._apply_gate(x) if is_gated else module.act_fn(x) for x in values]
    for options in _candidates(module, is_gated=is_gated):
        if all(_close(options, x, truth) for x, truth in zip(values, truths, strict=True)):
            yield options


def _close(options: GateOptions, x: Tensor, truth: Tensor) -> bool:
    activated, _, factor, _ = gate_in_torch(*split_projection(x, options), options)
    found = activated * factor
    return found.shape == truth.shape and bool((found - truth).norm() <= TOLERANCE * truth.norm())


def _numbers_of(module: nn.Module) -> list[float]:
    """Returns the positive numbers on a module, which may be limits and slopes."""
    return sorted({float(value) for value in numbers_of(module) if 0 < value < 1e8})


def _candidates(module: Any, *, is_gated: bool) -> Iterator[GateOptions]:
    """Yields options, of which limits and slopes are numbers on the module."""
    numbers = _numbers_of(module)
    for activation in ACTIVATIONS:
        plain = GateOptions(activation=activation, is_gated=is_gated)
        if not is_gated:
            yield plain
            continue
        for is_interleaved in (False, True):
            one = replace(plain, is_interleaved=is_interleaved)
            yield one
            for limit in numbers:
                yield replace(one, limit=limit)
                yield replace(one, limit=limit, limits_activation=True)
                yield from (replace(one, limit=limit, slope=slope, offset=1.0) for slope in numbers)


def _agrees(module: Any, match: ExpertsMatch) -> bool:
    """True if the model's original experts have the same output and gradients as these, with small parameters."""
    x, (index_TK, weight_TK), small = _small_case(match)

    def original(x: Tensor, weight_TK: Tensor, *parameters: Tensor) -> Any:
        with exchanged(module, dict(zip(small, parameters, strict=True)) | {"num_experts": _EXPERTS}):
            return _original_experts(module, "eager")(module, x, index_TK, weight_TK)

    def compute(x: Tensor, weight_TK: Tensor, *parameters: Tensor) -> Tensor:
        tensors = _named(match, dict(zip(small, parameters, strict=True)))
        return experts(x, index_TK, weight_TK, tensors, options=replace(match.options, backend="reference"))

    return agrees((x, weight_TK, *small.values()), original, compute, tolerance=TOLERANCE)


def _small_case(match: ExpertsMatch) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Returns small hidden states, indices and weights of the router, and parameters by name."""
    generator = torch.Generator().manual_seed(0)
    width = 2 * _FEATURES if match.options.gate.is_gated else _FEATURES
    shapes = [(width, _HIDDEN), (_HIDDEN, _FEATURES), (width,), (_HIDDEN,)]
    if match.options.is_transposed:
        shapes[:2] = [shape[::-1] for shape in shapes[:2]]
    named = zip(match.names, shapes, strict=True)
    small = {name: torch.randn(_EXPERTS, *shape, generator=generator) for name, shape in named if name is not None}
    index_TK = torch.arange(_TOKENS * _EXPERTS_OF_A_TOKEN).view(_TOKENS, -1) % (_EXPERTS - 1)
    weight_TK = torch.rand(_TOKENS, _EXPERTS_OF_A_TOKEN, generator=generator)
    return torch.randn(_TOKENS, _HIDDEN, generator=generator), (index_TK, weight_TK), small


def _original_experts(module: Any, implementation: str | None) -> Any:
    """Returns the function of an implementation of transformers, which takes the module first; that of the module's
    class for "eager"."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # What use_experts_implementation has wrapped.
    eager = type(module).forward.__wrapped__
    return ALL_EXPERTS_FUNCTIONS.get_interface(implementation or "eager", eager)


def experts_forward(
    module: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    low_rank: Sequence[LowRankMatrices] = (),
    num_rows: int | None = None,
) -> Tensor:
    """Computes the experts of a swapped module, as an implementation of transformers' interface.

    Args:
        hidden_states: ``[T, D]``
        top_k_index: ``[T, K]``; experts of each token.
        top_k_weights: ``[T, K]``
        low_rank: LoRA on its parameters.
        num_rows: see :class:`.ExpertOptions`.
    """
    match: ExpertsMatch | None = match_of(module)
    if match is None:
        return _not_swapped(module)(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    ranks = ranks_of_experts(module)
    if ranks is not None and num_rows is None:
        compute_here = partial(_experts_of_this_rank, module, low_rank)
        router = (top_k_index, top_k_weights)
        return sent_to_experts(compute_here, hidden_states, *router, num_experts=ranks.num_experts, group=ranks.group)
    if not _is_ready(module, match, hidden_states):
        if low_rank or ranks is not None:
            what = "LoRA on it is computed with it" if ranks is None else "its experts are on several ranks"
            raise LigerDistError(
                f"the implementation, activation, dtype or settings of a {type(module).__name__} have changed since "
                f"liger_dist.wrap, and {what}; "
                + ("call liger_dist.unwrap(model) and wrap it again." if ranks is None else "change them back.")
            )
        original = partial(_original_experts(module, match.config.original._experts_implementation), module)
        if num_rows is not None:
            return pair_by_pair(
                original, hidden_states, top_k_index, top_k_weights, num_experts=module.num_experts, num_pairs=num_rows
            )
        return original(hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
    here = slice(None) if ranks is None else ranks.here
    tensors, options = _with_low_rank(*_tensors(module, match), match, low_rank, hidden_states.dtype, here)
    if num_rows is not None:
        options = replace(options, num_rows=num_rows)
    compute = experts if options.up_state is None and options.down_state is None else experts_of_four_bits
    return compute(hidden_states, top_k_index, top_k_weights, tensors, options=options)


def _experts_of_this_rank(
    module: Any,
    low_rank: Sequence[LowRankMatrices],
    hidden_MD: Tensor,
    index_MK: Tensor,
    weight_MK: Tensor,
    num_pairs: int,
) -> Tensor:
    return experts_forward(module, hidden_MD, index_MK, weight_MK, low_rank, num_pairs)


def pair_by_pair(
    forward: Callable[..., Tensor],
    hidden_TD: Tensor,
    index_TK: Tensor,
    weight_TK: Tensor,
    *,
    num_experts: int,
    num_pairs: int,
) -> Tensor:
    """Computes the experts by a forward of transformers that gets the pairs of a token and an expert alone, as tokens
    of one expert each: that of gpt-oss takes no index that names no expert, and others compute a row for it.

    Args:
        index_TK: ``num_experts`` or more names no expert.
        num_pairs: number of the others.
    """
    T, K = index_TK.shape
    pair_P = route(index_TK, num_experts, num_pairs).pair_S.long()
    index_P1, weight_P1 = (one.reshape(-1)[pair_P, None] for one in (index_TK, weight_TK))
    y_PD = forward(hidden_TD[pair_P // K], index_P1, weight_P1)
    return y_PD.new_zeros(T * K, y_PD.shape[1]).index_copy(0, pair_P, y_PD).view(T, K, -1).sum(1)


def _not_swapped(module: Any) -> Any:
    """Returns the function of a module that has been restored, or that never was swapped.

    Raises:
        LigerDistError: a config names this implementation.
    """
    config = module.config.original if isinstance(module.config, _Config) else module.config
    if config._experts_implementation == NAME:
        raise LigerDistError(
            f"the experts of a {type(module).__name__} have the implementation {NAME!r}, which liger_dist.wrap selects "
            "for the modules that it has probed; call model.set_experts_implementation('grouped_mm'), and "
            "liger_dist.wrap(model)."
        )
    return _original_experts(module, config._experts_implementation)


def _with_low_rank(
    tensors: ExpertTensors,
    options: ExpertOptions,
    match: ExpertsMatch,
    low_rank: Sequence[LowRankMatrices],
    dtype: torch.dtype,
    here: slice = slice(None),
) -> tuple[ExpertTensors, ExpertOptions]:
    """Adds LoRA to what :func:`.experts` gets, in the dtype of the weights; beside 4 bits in ``dtype``, that of the
    hidden states, which their products are computed in.

    Args:
        here: experts of this rank.
    """
    for one in low_rank:
        a, b = one.matrices(tensors.up.dtype if options.up_state is None else dtype, here)
        if one.parameter == match.names[0]:
            tensors = tensors._replace(up_a_ErD=a, up_b_ErH=b)
            options = replace(options, up_scale=one.scaling)
        else:
            tensors = tensors._replace(down_a_ErF=a, down_b_ErD=b)
            options = replace(options, down_scale=one.scaling)
    return tensors, options


def _tensors(module: nn.Module, match: ExpertsMatch) -> tuple[ExpertTensors, ExpertOptions]:
    """Returns the parameters of a module, and options that say which of them are of 4 bits."""
    stacks = [None if name is None else four_bit_stack(module, name) for name in match.names]
    if sum(lora_of_peft(module, name) for name in match.names[:2] if name is not None) > 1:
        raise LigerDistError(
            f"PEFT has added LoRA more than once to the experts of 4 bits of a {type(module).__name__}, or to two of "
            "their parameters, of which it reads one without: its modules were put around them after liger_dist.wrap. "
            "Add adapters before wrap, or call liger_dist.unwrap(model) and wrap it again."
        )
    stacks = [stack if stack is not None and stack.is_full else None for stack in stacks]
    # As attributes: FSDP1 keeps full weights there, and not among the parameters.
    named = {
        name: getattr(module, name) if stack is None else stack.packed
        for name, stack in zip(match.names, stacks, strict=True)
        if name is not None
    }
    if ranks_of_experts(module) is not None:
        named = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in named.items()}
    up, down = (None if stack is None else stack.state for stack in stacks[:2])
    is_plain = up is None and down is None
    options = match.options if is_plain else replace(match.options, up_state=up, down_state=down)
    return _named(match, named), options


def _named(match: ExpertsMatch, parameters: dict[str, Tensor]) -> ExpertTensors:
    return ExpertTensors(*(None if name is None else parameters[name] for name in match.names))  # type: ignore[arg-type]


def _is_ready(module: nn.Module, match: ExpertsMatch, hidden_states: Tensor) -> bool:
    """True if the module is as it was matched, and its parameters are full ordinary tensors."""
    # The user may have selected another implementation since.
    is_chosen = match.config.original._experts_implementation == match.implementation
    if not is_chosen or is_transformed() or hidden_states.dim() != 2:
        return False
    if _gate_function(module) is not match.apply_gate or not _are_as_matched(module, match.attributes):
        return False
    if match.activation is not None and not match.activation.is_unchanged(module._modules.get("act_fn")):
        return False
    return supports(hidden_states, *_tensors(module, match))


def _gate_function(module: Any) -> Any:
    method = getattr(module, "_apply_gate", None)
    return getattr(method, "__func__", method)


def _are_as_matched(module: nn.Module, attributes: Attributes) -> bool:
    if torch.compiler.is_compiling():
        # The compiler guards each that is read, and compiles again after a change.
        return all(getattr(module, name, None) == value for name, value in attributes.simple)
    return attributes.are_those_of(module)


def _register() -> None:
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


EXPERTS = Kind(
    name="experts",
    is_candidate=_is_candidate,
    match=_match,
    compute=experts_forward,
    absent="no module has the parameters of all experts and takes another implementation",
    is_expected=lambda model: any(map(_is_candidate, model.modules())),
    attribute="config",
    in_compiled_layers=True,
)


class LowRankMatrices(NamedTuple):
    """LoRA on one parameter of experts."""

    parameter: str
    a: Tensor
    """``[r * E, in]``, the ranks of an expert side by side"""
    b: Tensor
    """``[out, r * E]``, the experts of a rank side by side"""
    num_experts: int
    scaling: float

    def matrices(self, dtype: torch.dtype, here: slice) -> tuple[Tensor, Tensor]:
        """Returns A ``[E, r, in]`` and B ``[E, r, out]`` of the experts ``here``."""
        E = self.num_experts
        a_ErI = self.a.reshape(E, -1, self.a.shape[1])[here].to(dtype)
        b_ErO = self.b.reshape(self.b.shape[0], -1, E).permute(2, 1, 0)[here].to(dtype)
        missing = -a_ErI.shape[1] % _ALIGNED_RANK
        if missing:
            a_ErI, b_ErO = (F.pad(one, (0, 0, 0, missing)) for one in (a_ErI, b_ErO))
        return a_ErI.contiguous(), b_ErO.contiguous()


@dataclass(frozen=True)
class LowRankExpertsMatch(Match):
    """Match of PEFT's module around experts."""

    def __str__(self) -> str:
        return "LoRA by grouped products"


def experts_inside(module: Any) -> Any:
    """Returns the module of experts inside PEFT's modules around its parameters."""
    while "base_layer" in module._modules:
        module = module._modules["base_layer"]
    return module


def _has_low_rank(module: nn.Module) -> bool:
    """True for PEFT's module around a parameter of experts."""
    return (
        "base_layer" in module._modules and hasattr(module, "parameter_name") and _is_candidate(experts_inside(module))
    )


def _match_low_rank(module: Any, backend: Backend) -> LowRankExpertsMatch:
    inside = experts_inside(module)
    match = _match(inside, backend)
    name = only_plain_adapter(module)
    if name is None:
        raise LeftAloneError("it has several active adapters, none, or a variant of LoRA")
    if module.parameter_name not in match.names[:2]:
        raise LeftAloneError(f"it is on {module.parameter_name}")
    if module.num_experts == 1:
        raise LeftAloneError("it is on one expert")
    if "forward" in vars(inside):
        raise LeftAloneError("its experts are on several ranks")
    with probing(module), probing(inside), _without_four_bits(inside):
        if not _agrees_low_rank(module, match, name):
            raise LeftAloneError("it does not add the product of its matrices to the weights")
    return LowRankExpertsMatch()


def _agrees_low_rank(module: Any, match: ExpertsMatch, name: str) -> bool:
    """True if PEFT's forward around the model's original experts has the same output and gradients as these, with small
    parameters."""
    inside, (x, router, small) = experts_inside(module), _small_case(match)
    target = small[module.parameter_name]
    in_features, out_features = target.shape[1:] if match.options.is_transposed else target.shape[:0:-1]
    # Another dict: PEFT's parametrization takes the parameter out of it.
    parameters = {**inside._parameters, **{key: nn.Parameter(value) for key, value in small.items()}}
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*s, generator=generator) for s in ((2 * _EXPERTS, in_features), (out_features, 2 * _EXPERTS)))

    def original(x: Tensor, a: Tensor, b: Tensor) -> Any:
        parts = small_layers(name, inside, a, b) | {"num_experts": _EXPERTS}
        of_inside = {"_parameters": parameters, "num_experts": _EXPERTS, "config": _Config(inside.config, "eager")}
        with exchanged(inside, of_inside):
            return run_class_forward(module, (x, *router), parts, training=module.training)

    def compute(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        low = LowRankMatrices(module.parameter_name, a, b, _EXPERTS, module.scaling[name])
        options = replace(match.options, backend="reference")
        tensors, options = _with_low_rank(_named(match, small), options, match, [low], x.dtype)
        return experts(x, *router, tensors, options=options)

    return agrees((x, a, b), original, compute, tolerance=TOLERANCE)


def _compute_low_rank(
    module: Any,
    match: LowRankExpertsMatch,
    hidden_states: Tensor,
    *args: Any,
    low_rank: Sequence[LowRankMatrices] = (),
    **kwargs: Any,
) -> Any:
    inside, name = experts_inside(module), only_plain_adapter(module)
    of_experts = match_of(inside)
    if name is None or not isinstance(of_experts, ExpertsMatch):
        return _left_to_peft(module, inside)
    a, b = (module._modules[part]._modules[name] for part in ("lora_A", "lora_B"))
    is_patched = "forward" in vars(inside)
    is_local_here = is_local(a.weight) and is_local(b.weight)
    if is_patched or has_hooks(a) or has_hooks(b) or not is_local_here:
        return _left_to_peft(module, inside)
    # FSDP2 unshards experts of several ranks later, in their forward, which checks them.
    if ranks_of_experts(inside) is None and not _is_ready(inside, of_experts, hidden_states):
        return _left_to_peft(module, inside)
    matrices = LowRankMatrices(module.parameter_name, a.weight, b.weight, module.num_experts, module.scaling[name])
    return module._modules["base_layer"](hidden_states, *args, low_rank=(*low_rank, matrices), **kwargs)


def _left_to_peft(module: Any, inside: nn.Module) -> Any:
    """Returns ``NotImplemented``, for PEFT's forward to run.

    Raises:
        LigerDistError: it would compute something else, see :func:`_reads_one_without_lora`, or has not all experts.
    """
    if ranks_of_experts(inside) is not None and _has_active_lora(module):
        raise LigerDistError(
            f"LoRA on a {type(inside).__name__} has changed since liger_dist.wrap (several active adapters, hooks or "
            "patches of its layers) and is left to PEFT, which needs all experts, but these are on several ranks; "
            "change it back, or wrap without expert_parallel."
        )
    around = _modules_of_peft(module)
    if _reads_one_without_lora(module, inside) and sum(map(_has_active_lora, around)) > 1:
        raise LigerDistError(
            f"a {type(inside).__name__} {_ONE_WITHOUT_LORA}. Grouped products cannot be used in this call, because "
            "the LoRA matrices are sharded (ZeRO-3), or something has changed since liger_dist.wrap. Use "
            "strategy='fsdp2', or name one of the parameters in target_parameters."
        )
    return NotImplemented


def _modules_of_peft(module: Any) -> Iterator[Any]:
    """Yields PEFT's module around experts, and those inside of it."""
    while hasattr(module, "parameter_name"):
        yield module
        module = module._modules["base_layer"]


def _has_active_lora(module: Any) -> bool:
    """True if PEFT's forward of its module adds LoRA: an active adapter may be on other layers alone."""
    is_on = not module.disable_adapters and not module.merged
    return is_on and any(name in module.lora_A for name in module.active_adapters)


_ONE_WITHOUT_LORA = (
    "has LoRA on two parameters of experts of 4 bits, of which PEFT's own forward reads the second one without its LoRA"
)


def _reads_one_without_lora(module: nn.Module, inside: nn.Module) -> bool:
    """True if LoRA on one parameter of experts is around LoRA on another one, and these are quantised: PEFT then reads
    the inner one into the cache of torch's parametrizations before it adds its LoRA."""
    is_nested = hasattr(module._modules["base_layer"], "parameter_name")
    return is_nested and next(four_bit_stacks(inside), None) is not None


def needs_grouped_lora(model: nn.Module) -> bool:
    """True if PEFT's forward would compute something else than LoRA on all parameters of 4 bits."""
    return any(_reads_one_without_lora(module, experts_inside(module)) for _, module in _lora_on_four_bits(model))


def has_lora_on_four_bits(model: nn.Module) -> bool:
    """True if PEFT has put a module around a parameter of 4 bits."""
    return next(_lora_on_four_bits(model), None) is not None


def _lora_on_four_bits(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of PEFT around each parameter of 4 bits."""
    for name, module in model.named_modules():
        is_around = "base_layer" in module._modules and hasattr(module, "parameter_name")
        if is_around and has_four_bits(experts_inside(module), module.parameter_name):
            yield name, module


def remove_leftover_lora(model: nn.Module) -> None:
    """Removes the LoRA that PEFT's forwards have left on parameters of 4 bits, see :func:`.remove_lora_of_peft`."""
    for _, module in _lora_on_four_bits(model):
        remove_lora_of_peft(experts_inside(module), module.parameter_name)


def correct_peft(model: nn.Module) -> list[RemovableHandle]:
    """Removes after each forward of PEFT's modules what it leaves on parameters of 4 bits, and refuses merges: PEFT
    adds its product to a dequantised copy, which is freed. :func:`allow_merges` undoes the latter."""
    modules = [module for _, module in _lora_on_four_bits(model)]
    # On all layers: PEFT merges them one after the other, and rounds linear ones of 4 bits.
    for layer in model.modules() if modules else ():
        if has_lora(layer) and callable(getattr(layer, "merge", None)):
            vars(layer)["merge"] = _refuse_merge
    return [module.register_forward_hook(_remove_after_forward, always_call=True) for module in modules]


def allow_merges(model: nn.Module) -> None:
    """Undoes the refusals of :func:`correct_peft`."""
    for module in model.modules():
        if vars(module).get("merge") is _refuse_merge:
            del vars(module)["merge"]


def _remove_after_forward(module: Any, args: Any, output: Any) -> None:
    remove_lora_of_peft(experts_inside(module), module.parameter_name)


def refuse_merges_of_ranks(model: nn.Module) -> None:
    """Refuses merges of LoRA, as long as some of it is on experts of several ranks."""
    modules = list(model.modules())
    if any(hasattr(module, "parameter_name") and needs_its_ranks(module) for module in modules):
        # On all layers: PEFT merges them one after the other.
        for layer in modules:
            if has_lora(layer) and callable(getattr(layer, "merge", None)):
                vars(layer)["merge"] = _refuse_merge_of_ranks


def _refuse_merge_of_ranks(*args: Any, **kwargs: Any) -> None:
    raise LigerDistError(
        "PEFT was asked to merge LoRA, of which some is on experts that are on several ranks (expert_parallel), each "
        "with some of the experts. Load the adapter on a model that is not sharded and merge it there, or write the "
        "merged model of a run with liger-dist export."
    )


def _refuse_merge(*args: Any, **kwargs: Any) -> None:
    raise LigerDistError(
        "PEFT was asked to merge LoRA into experts of 4 bits: it would add the product to a dequantised copy, and the "
        "LoRA would be lost. Keep it as an adapter (model.save_pretrained), which PEFT loads on a base that is "
        "quantised in the same way, or write the merged model of a run with liger-dist export."
    )


def refuse_unswapped_experts(model: nn.Module, experts: Iterable[nn.Module], left: Mapping[str, str]) -> None:
    """Refuses experts that could not be on several ranks, because their own code runs, or PEFT's.

    Args:
        left: see :class:`.LayerReport`.

    Raises:
        LigerDistError: with the name of the first module.
    """
    names = {module: name for name, module in model.named_modules()}
    around = [module for module in names if "base_layer" in module._modules and hasattr(module, "parameter_name")]
    for module in experts:
        modules = [(module, EXPERTS), *((one, LOW_RANK_EXPERTS) for one in around if experts_inside(one) is module)]
        for one, kind in modules:
            if match_of(one) is None:
                what = "LoRA on it is added by PEFT" if kind is LOW_RANK_EXPERTS else "it is computed by its own code"
                reason = left.get(f"{type(one).__name__} ({kind.name})", "no kernel computes it")
                raise LigerDistError(
                    f"expert_parallel is above 1 but {names[module]} is a {type(module).__name__}, and {what} "
                    f"({reason}), which needs all experts; leave expert_parallel out."
                )


def needs_its_ranks(module: nn.Module) -> bool:
    """True for experts that are on several ranks, and for LoRA on them, which no other code computes."""
    return ranks_of_experts(experts_inside(module)) is not None


def refuse_merged_weights(model: nn.Module, strategy: str) -> None:
    """Refuses LoRA that PEFT merges into a parameter in each forward, where it cannot.

    Raises:
        LigerDistError: with the name of the first module.
    """
    for name, module in model.named_modules():
        if "base_layer" not in module._modules or not hasattr(module, "parameter_name"):
            continue
        if needs_its_ranks(module) and not isinstance(module, Swapped):
            raise LigerDistError(
                f"{name} is LoRA that PEFT adds to experts on several ranks (expert_parallel), each of which has some "
                "of them; make the adapter before liger_dist.wrap shards the model."
            )
        if "forward" in vars(experts_inside(module)):
            raise LigerDistError(
                f"{name} has LoRA on {module.parameter_name} of experts that transformers has put on several ranks "
                "(ep_size), each of which has some of them; leave target_parameters out, or load the model without "
                "ep_size."
            )
        if module.merged and has_four_bits(experts_inside(module), module.parameter_name):
            raise LigerDistError(
                f"PEFT has merged the LoRA of {name} into {module.parameter_name}, which is of 4 bits: it added the "
                "product to a dequantised copy, and the LoRA is lost; call model.unmerge_adapter() before wrap."
            )
        if not isinstance(module, Swapped) and _reads_one_without_lora(module, experts_inside(module)):
            raise LigerDistError(
                f"{name} {_ONE_WITHOUT_LORA}; have it added by grouped products (WrapConfig(layer_kernels=True); "
                "liger_dist.explain(model) says where that is not possible, and why), or name one of them in "
                "target_parameters."
            )
        if strategy == "fsdp1" and not isinstance(module, Swapped):
            raise LigerDistError(
                f"{name} has LoRA on {module.parameter_name}, which PEFT merges into the parameter in each forward, "
                "and FSDP1's views of its flat parameters do not allow that; use strategy='fsdp2', or have it added by "
                "grouped products (WrapConfig(layer_kernels=True); liger_dist.explain(model) says where that is not "
                "possible, and why)."
            )


def warn_of_missing_lora(outer: nn.Module, model: nn.Module) -> None:
    """Warns of experts of 4 bits that PEFT has not matched: it compares quantised parameters by full names, and others
    by the ends of their names, to which it translates ``target_modules``."""
    wanted = target_parameters_of(outer)
    if not any(wanted.values()):
        return
    around: dict[Any, Any] = {
        (experts_inside(m), m.parameter_name): m.lora_A for m in model.modules() if hasattr(m, "parameter_name")
    }
    left = [
        (adapter, name)
        for name, module, stack in four_bit_stacks(model)
        for adapter, parameters in wanted.items()
        if stack.name in parameters and adapter not in around.get((module, stack.name), ())
    ]
    if left:
        adapter, name = left[0]
        warnings.warn(
            f"PEFT has no LoRA of the adapter {adapter!r} on {name} and {len(left) - 1} more parameters of experts of "
            f"4 bits, though target_parameters has {name.rpartition('.')[2]}: it finds quantised ones by their full "
            "names alone, and for the first adapter of a model alone. Pass them before wrap: "
            "target_parameters=[name for name, module in base.named_modules() ...], as docs/adapters.md shows.",
            stacklevel=4,
        )


LOW_RANK_EXPERTS = Kind(
    name="LoRA on experts",
    is_candidate=_has_low_rank,
    match=_match_low_rank,
    compute=_compute_low_rank,
    absent="no module of PEFT is around the parameters of experts",
    is_expected=lambda model: False,
    in_compiled_layers=True,
)
