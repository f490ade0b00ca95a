"""Computes a token-wise module tile by tile: the activations of one tile exist at a time, and the backward recomputes
each tile before its gradient (Bekman et al. 2025, arXiv:2506.13996, "tiled MLP").

[Note: one run more, not two]

The backward needs the operands of the last product, not its result, so :func:`linear_without_output` replaces it.
Under activation checkpointing a layer runs twice; a tile that the backward computes once more would run a third time.
torch's recomputation ends at the last tensor that the layer saved. :class:`_SavedInput` saves the only one here before
the tiles run. So the recomputation ends there, if nothing after the module in the layer saves another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_dist.errors import LigerDistError, refuse_second_order
from liger_dist.model.class_swap import swapped
from liger_dist.model.peft import adapter_settings
from liger_dist.model.torch_modes import is_captured
from liger_dist.sharding.deepspeed import is_stored_by_zero3
from liger_dist.trials.attributes import names_in

Forward = Callable[[Tensor], Tensor]
_ACCUMULATED = (torch.float16, torch.bfloat16)
"""dtypes whose gradients are summed over tiles in fp32"""


def compute_in_tiles(
    module: nn.Module, forward: Forward, hidden_states: Tensor, tile_tokens: int, *, recompute: Forward
) -> Tensor:
    """Computes ``forward(hidden_states)`` with ``tile_tokens`` tokens at a time.

    Args:
        module: holds the weights that ``forward`` reads; they get their gradients once, summed over tiles.
        hidden_states: ``[..., D]``.
        recompute: as ``forward``, called in the backward only for its graph; the values of its result are not read.

    Returns:
        ``[..., D]``.
    """
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    if not torch.is_grad_enabled():
        return _in_tiles(forward, tokens, tile_tokens).view(hidden_states.shape)
    saved: Tensor = _SavedInput.apply(tokens)  # type: ignore[no-untyped-call]
    result: Tensor = _Tiles.apply(saved, saved.grad_fn, module, (forward, recompute), tile_tokens, *_weights_of(module))  # type: ignore[no-untyped-call]
    return result.view(hidden_states.shape)


def _in_tiles(forward: Forward, tokens_TD: Tensor, tile_tokens: int) -> Tensor:
    result_TD: Tensor | None = None
    for index, tile in enumerate(tokens_TD.split(tile_tokens)):
        part = forward(tile)
        if result_TD is None:
            # Under autocast another dtype than that of the tokens.
            result_TD = part.new_empty(tokens_TD.shape)
        result_TD[index * tile_tokens :][: len(tile)] = part
        del part
    assert result_TD is not None
    return result_TD


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields the modules, names and values of all weights, in a fixed order."""
    for part in module.modules():
        for name, value in (*part._parameters.items(), *vars(part).items()):
            if isinstance(value, Tensor):
                yield part, name, value


def _names_of(part: nn.Module, name: str) -> dict[str, Any]:
    """Returns the dict that holds a weight: FSDP1 may keep views of its flat parameter as plain attributes."""
    return vars(part) if part._parameters.get(name) is None else part._parameters


def _weights_of(module: nn.Module) -> list[Tensor]:
    """Returns the trained tensors, each once."""
    return list({id(value): value for _, _, value in _tensors(module) if value.requires_grad}.values())


class _Weights:
    """The weights of a module as a forward read them.

    Args:
        trained: :func:`_weights_of` the module.
    """

    def __init__(self, module: nn.Module, trained: Sequence[Tensor]) -> None:
        place = {id(value): index for index, value in enumerate(trained)}
        self._number = len(trained)
        self._slots = [_Slot.of(part, name, value, place.get(id(value))) for part, name, value in _tensors(module)]

    @contextmanager
    def restored(self) -> Iterator[list[Tensor]]:
        """Within, the module has the weights of the forward; the trained ones are leaves on the same memory, which it
        yields in their order. So hooks of a weight run once, for the gradient of all tiles.

        Raises:
            LigerDistError: a weight was changed in place since the forward.
        """
        for slot in self._slots:
            slot.check_version()
        values = {slot.place: slot.value() for slot in self._slots if slot.place is not None}
        leaves = [values[place].detach().requires_grad_() for place in range(self._number)]
        with ExitStack() as stack:
            for slot in self._slots:
                value = slot.value() if slot.place is None else leaves[slot.place]
                if slot.now() is not value:
                    stack.enter_context(swapped(_names_of(slot.part, slot.name), slot.name, value))
            yield leaves


@dataclass(frozen=True)
class _Slot:
    """Place of a weight in a module, and its value in a forward."""

    part: nn.Module
    name: str
    then: Tensor
    memory: Tensor | None
    """the value's memory, which outlives an exchange of its data; None where a framework frees and gathers it"""
    version: int | None
    place: int | None
    """of a trained weight among these"""

    @classmethod
    def of(cls, part: nn.Module, name: str, value: Tensor, place: int | None) -> _Slot:
        is_kept = type(value) in (Tensor, nn.Parameter) and not is_stored_by_zero3(value)
        memory = value.detach() if is_kept and value.layout is torch.strided else None
        return cls(part, name, value, memory, None if value.is_inference() else value._version, place)

    def now(self) -> Any:
        return _names_of(self.part, self.name).get(self.name)

    def value(self) -> Tensor:
        """Returns the weight of the forward. FSDP frees its memory in between, and may gather it into another
        tensor."""
        now = self.now()
        if self.memory is not None and self.memory.untyped_storage().nbytes() > 0:
            return self.memory if now is not self.then or now.data_ptr() != self.memory.data_ptr() else now
        return now if isinstance(now, Tensor) else self.then

    def check_version(self) -> None:
        if self.version is not None and self.now() is self.then and self.then._version != self.version:
            raise LigerDistError(
                f"{self.name} of an MLP that is computed in tiles was modified by an inplace operation after its "
                f"forward (version {self.then._version}, expected {self.version}), but the backward computes the tiles "
                "again. Change weights after the backward, or wrap with WrapConfig(mlp_tile_tokens=None)."
            )


class _SavedInput(torch.autograd.Function):
    """Saves the input of the tiles, before they run."""

    @staticmethod
    def forward(ctx: Any, tokens_TD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_TD)
        return tokens_TD.view_as(tokens_TD)

    @staticmethod
    def backward(ctx: Any, d_tokens_TD: Tensor) -> Tensor:
        return d_tokens_TD


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tokens_TD: Tensor,
        saved: Any,
        module: nn.Module,
        functions: tuple[Forward, Forward],
        tile_tokens: int,
        *weights: Tensor,
    ) -> Tensor:
        forward, ctx.recompute = functions
        ctx.saved, ctx.tile_tokens = saved, tile_tokens
        if saved is None:
            # Nothing before the module trains.
            ctx.save_for_backward(tokens_TD)
        ctx.context, ctx.weights = _Context(module, tokens_TD.device), _Weights(module, weights)
        with ctx.context.autocasting(keeps_casts=False):
            result = _in_tiles(forward, tokens_TD, tile_tokens)
        ctx.context.end()
        return result

    @staticmethod
    def backward(ctx: Any, d_result_TD: Tensor) -> tuple[Any, ...]:
        refuse_second_order("tiles of an MLP", "wrap with WrapConfig(mlp_tile_tokens=None)")
        (tokens_TD,) = (ctx if ctx.saved is None else ctx.saved).saved_tensors
        needs_tokens = ctx.needs_input_grad[0]
        d_tokens_TD = torch.empty_like(tokens_TD) if needs_tokens else None
        with ctx.context.restored(), ctx.weights.restored() as weights:
            sums: list[Tensor | None] = [None] * len(weights)
            tiles = zip(tokens_TD.split(ctx.tile_tokens), d_result_TD.split(ctx.tile_tokens), strict=True)
            for index, (tile, d_result) in enumerate(tiles):
                leaf = tile.detach().requires_grad_(needs_tokens)
                with torch.enable_grad():
                    result = ctx.recompute(leaf)
                wanted = ([leaf] if needs_tokens else []) + weights
                gradients = list(torch.autograd.grad(result, wanted, d_result, allow_unused=True))
                del result
                if d_tokens_TD is not None:
                    d_tile = gradients.pop(0)
                    d_tokens_TD[index * ctx.tile_tokens :][: len(tile)] = 0 if d_tile is None else d_tile
                sums = [_added(total, new) for total, new in zip(sums, gradients, strict=True)]
        totals = [None if total is None else total.to(w.dtype) for total, w in zip(sums, weights, strict=True)]
        return d_tokens_TD, None, None, None, None, *totals


class _LinearWithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight_DF: Tensor, bias_D: Tensor | None) -> Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x_TF if needs_weight else None, weight_DF if needs_x else None)
        return x_TF.new_empty(()).expand(len(x_TF), len(weight_DF))

    @staticmethod
    def backward(ctx: Any, d_y_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, weight_DF = ctx.saved_tensors
        d_x_TF = None if weight_DF is None else d_y_TD @ weight_DF
        d_weight_DF = None if x_TF is None else d_y_TD.T @ x_TF
        return d_x_TF, d_weight_DF, d_y_TD.sum(0) if ctx.needs_input_grad[2] else None


def linear_without_output(linear: nn.Linear, x_TF: Tensor) -> Tensor:
    """Builds the graph of ``linear(x_TF)`` for its gradients: computes no product, and the values of the result are
    undefined."""
    y_TD: Tensor = _LinearWithoutOutput.apply(x_TF, linear.weight, linear.bias)  # type: ignore[no-untyped-call]
    return y_TD


def _added(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    if new is None:
        return total
    if total is None:
        return new.float() if new.dtype in _ACCUMULATED else new
    return total.add_(new)


_CALLED = (
    "_modules",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in _CALLED[1:])
_ABSENT = object()


class _Context:
    """What a forward saw beside weights, for its recomputation: autocast, torch function modes, random number states,
    hooks, active adapters, and the attributes that the code of its submodules mentions."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device.type
        self.devices = [device] if device.type == "cuda" else []
        self.autocast = torch.is_autocast_enabled(self.device)
        self.dtype = torch.get_autocast_dtype(self.device)
        self.modes = _function_modes()
        parts = list(module.modules())
        self.buffers = [(buffer, buffer._version) for part in parts for buffer in _buffers_of(part)]
        self.forwards = {type(part): type(part).forward for part in parts}
        self.settings = [(vars(part), name, value) for part, name, value in adapter_settings(module)]
        everywhere = vars(nn.modules.module)
        self.settings += [(everywhere, name, dict(everywhere[name])) for name in _GLOBAL_HOOKS if name in everywhere]
        self.settings += [(vars(part), name, dict(vars(part)[name])) for part in parts for name in _CALLED]
        self.attributes = [(part, _attributes_of(part)) for part in parts]
        is_capturing = device.type == "cuda" and is_captured()
        has_dropout = any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in parts)
        # A CUDA graph that is captured does not tell its generator's state.
        self.states = _random_states(device) if has_dropout or not is_capturing else None

    def end(self) -> None:
        """Frees the random number states after a forward that has drawn no numbers.

        Raises:
            LigerDistError: the forward wrote to a buffer.
        """
        if self.states is not None and all(map(torch.equal, self.states, _random_states(*self.devices))):
            self.states = None
        if any(buffer._version != version for buffer, version in self.buffers):
            raise LigerDistError(
                "a module inside an MLP that is computed in tiles writes to its buffers in its forward, as spectral "
                "norms and batch norms do; tiles would write once each. Wrap with WrapConfig(mlp_tile_tokens=None)."
            )

    def autocasting(self, *, keeps_casts: bool) -> AbstractContextManager[Any]:
        """Returns a context with the forward's autocast. Casts of weights without gradients must not be cached: later
        calls would use them."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.autocast, cache_enabled=keeps_casts)

    def restored(self) -> AbstractContextManager[Any]:
        """Returns a context as in the forward; random number generators are restored afterwards.

        Raises:
            LigerDistError: the forward of a class was patched in between, or another torch function mode is active.
        """
        patched = next((cls for cls, forward in self.forwards.items() if cls.forward is not forward), None)
        modes = _function_modes()
        if patched is not None or (modes and modes != self.modes):
            what = "another TorchFunctionMode is active" if patched is None else f"{patched.__name__}.forward changed"
            raise LigerDistError(
                f"{what} since the forward of an MLP that is computed in tiles, and the backward computes the tiles "
                "again. Call backward under what the forward ran under, or wrap with WrapConfig(mlp_tile_tokens=None)."
            )
        stack = ExitStack()
        for mapping, name, value in self.settings:
            if not _is_same(mapping[name], value):
                stack.enter_context(swapped(mapping, name, value))
        for part, then in self.attributes:
            namespace, now = vars(part), _attributes_of(part)
            for name in now.keys() | then.keys():
                if name not in then:
                    stack.enter_context(_absent(namespace, name))
                elif not (_is_same(now.get(name, _ABSENT), then[name]) or isinstance(namespace.get(name), Tensor)):
                    stack.enter_context(swapped(namespace, name, then[name]))
        for mode in [] if modes else self.modes:
            stack.enter_context(mode)
        stack.enter_context(self.autocasting(keeps_casts=True))
        if self.states is None:
            return stack
        stack.enter_context(torch.random.fork_rng(self.devices))
        torch.set_rng_state(self.states[0])
        for device, state in zip(self.devices, self.states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
        return stack


def _attributes_of(part: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that the code of its class mentions, but for tensors: :class:`_Weights`
    restores them, and engines exchange them."""
    namespace, cls = vars(part), cast(Any, type(part))
    read = namespace.keys() & (names_in(cls) | {"forward", "training"})
    return {name: _copied(namespace[name]) for name in read if not isinstance(namespace[name], Tensor)}


def _copied(value: Any) -> Any:
    return copy.copy(value) if type(value) in (dict, list, set) else value


def _is_same(now: Any, then: Any) -> bool:
    """True for one object, or containers of the same ones."""
    if now is then:
        return True
    if isinstance(now, dict) and isinstance(then, dict):
        return now.keys() == then.keys() and all(now[key] is then[key] for key in then)
    return isinstance(now, list | set) and isinstance(then, list | set) and [*map(id, now)] == [*map(id, then)]


@contextmanager
def _absent(mapping: dict[str, Any], name: str) -> Iterator[None]:
    value = mapping.pop(name)
    try:
        yield
    finally:
        mapping[name] = value


def _function_modes() -> list[Any]:
    modes: list[Any] = torch.overrides._get_current_function_mode_stack()
    return modes


def _buffers_of(part: nn.Module) -> Iterator[Tensor]:
    return (buffer for buffer in part._buffers.values() if buffer is not None and not buffer.is_inference())


def _random_states(*devices: torch.device) -> list[Tensor]:
    """Returns the states of the CPU's generator and of those of GPUs, which are kept on the CPU."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in devices if one.type == "cuda")]
