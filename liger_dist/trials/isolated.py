"""Isolation of trials: a model's code runs on made-up values, and nothing of it, of torch's defaults or of another
thread is changed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from liger_dist.model.class_swap import swapped


class StandIn(nn.Module):
    """Stand-in that answers calls instead of ``real``; its attributes are those of ``real``, and modules among them
    stand-ins."""

    def __init__(self, real: nn.Module, respond: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        # Not as a submodule: names and parameters of the model must not change.
        vars(self).update(real=real, respond=respond)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.respond(self.real, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._instead(getattr(vars(self)["real"], name))

    def __iter__(self) -> Iterator[Any]:
        return (self._instead(item) for item in self.real)

    def __getitem__(self, key: Any) -> Any:
        return self._instead(self.real[key])

    def __len__(self) -> int:
        return len(self.real)

    def _instead(self, value: Any) -> Any:
        return StandIn(value, self.respond) if isinstance(value, nn.Module) else value


def hidden_states_of(hidden_states: Tensor) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a response with ``hidden_states``: a model's usual output for models, the tensor for any other module."""
    # Not from the top-level package, whose lazy namespace caches every name that was read.
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.modeling_utils import PreTrainedModel

    class Output(BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            # Some families read fields of other outputs here, such as router logits.
            return None

    def respond(real: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = hidden_states[:, : _num_tokens(args, hidden_states.shape)]
        return Output(last_hidden_state=states) if isinstance(real, PreTrainedModel) else states

    return respond


def _num_tokens(args: tuple[Any, ...], shape: torch.Size) -> int:
    """Returns the number of tokens of the first argument, which may be a part of the sequences ``[B, S, D]``."""
    first = args[0] if args else None
    is_part = isinstance(first, Tensor) and first.dim() in (2, 3) and len(first) == shape[0]
    return min(first.shape[1], shape[1]) if is_part else shape[1]  # type: ignore[union-attr]


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Resets defaults of torch within the context, in this thread alone: tensors are on the CPU in fp32 and record
    gradients. A probe's result is used for calls under other settings than those of the caller of ``wrap``, and another
    thread may change the default dtype meanwhile, as ``from_pretrained`` does."""
    with torch.device("cpu"), torch.inference_mode(False), torch.autocast("cpu", enabled=False), _Fp32ByDefault():
        yield


class _Fp32ByDefault(TorchFunctionMode):
    """Makes tensors of fp32 where torch would use its default dtype, which is one for all threads."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_dtype = kwargs.get("dtype") is not None or kwargs.get("out") is not None
        is_of_floats = func in _OF_NUMBERS and any(isinstance(leaf, float) for leaf in tree_leaves((args, kwargs)))
        if (func in _OF_FLOATS or is_of_floats) and not has_dtype:
            kwargs = kwargs | {"dtype": torch.float32}
        result = func(*args, **kwargs)
        default = torch.get_default_dtype()
        if default == torch.float32 or has_dtype or not isinstance(result, Tensor) or result.dtype != default:
            return result
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not given or any(tensor.is_floating_point() for tensor in given):
            return result
        if all(tensor.dtype == torch.bool for tensor in given):
            return result.float()  # A choice between numbers.
        # A function of integers, such as their quotient.
        args, kwargs = tree_map_only(Tensor, _as_fp32, (args, kwargs))
        return func(*args, **kwargs)


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.bool else tensor.float()


_OF_FLOATS = frozenset(
    {
        *(torch.empty, torch.ones, torch.zeros, torch.rand, torch.randn, torch.eye, torch.linspace, torch.logspace),
        *(torch.empty_strided, torch.hann_window, torch.hamming_window, torch.blackman_window, torch.kaiser_window),
    }
)
"""functions whose result has torch's default dtype"""
_OF_NUMBERS = frozenset({torch.full, torch.tensor, torch.as_tensor, torch.arange, torch.scalar_tensor})
"""functions whose result has torch's default dtype if they are given a float"""


def without_hooks(real: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the forward of a module without its hooks."""
    return real.forward(*args, **kwargs)


@contextmanager
def stand_ins(
    model: nn.Module, head_name: str, *, head: nn.Module, hidden_states: Tensor, training: bool
) -> Iterator[None]:
    """Runs only the modules on the path from ``model`` to its lm_head within the context, in the given training mode;
    ``head`` replaces lm_head, and all other modules return ``hidden_states``."""
    respond = hidden_states_of(hidden_states)
    path = head_name.split(".")
    with ExitStack() as stack:
        owner = model
        for depth, on_path in enumerate(path):
            stack.enter_context(swapped(vars(owner), "training", training))
            below = owner._modules[on_path]
            for name, child in list(owner._modules.items()):
                if child is None:
                    continue
                instead: nn.Module = StandIn(child, respond)
                if name == on_path:
                    instead = head if depth == len(path) - 1 else StandIn(child, without_hooks)
                stack.enter_context(swapped(owner._modules, name, instead))
            assert below is not None
            owner = below
        yield


class LeftAloneError(Exception):
    """Raised for a module that keeps its original forward; the message is the reason. Never leaves this package."""


@contextmanager
def probing(module: nn.Module) -> Iterator[None]:
    """Turns errors of the module's code on probe values into :class:`LeftAloneError` within the context. Random number
    generators and the module's attributes are restored afterwards."""
    before = dict(vars(module))
    try:
        with torch.random.fork_rng([]):
            yield
    except LeftAloneError:
        raise
    except Exception as error:
        raise LeftAloneError(f"its own forward cannot be probed ({type(error).__name__}: {error})") from error
    finally:
        vars(module).clear()
        vars(module).update(before)


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Within, the module and its submodules are in training or evaluation mode, for code with dropout."""
    with ExitStack() as stack:
        for part in module.modules():
            if part.training != training:
                stack.enter_context(swapped(vars(part), "training", training))
        yield
