"""Swaps the forward of one module, reversibly: by a subclass of its class, set on the instance.

Parameters, names, state dict, ``isinstance`` and the class's name stay; only the instance changes. A swapped forward
falls back to the original one wherever the module has changed since it was matched. A kind with an
:attr:`Kind.attribute` swaps that attribute instead, such as the config of experts; the original forward then calls the
kernels because of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import BuiltinFunctionType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from liger_dist.model.class_swap import MadeAtRunTime, below_wrappers, subclass_of, with_base
from liger_dist.model.torch_modes import is_traced
from liger_dist.trials.attributes import Attributes, identity_of
from liger_dist.trials.isolated import LeftAloneError
from liger_dist_kernels import Backend

Forward = Callable[..., Any]
_MATCH = "_liger_dist_match"
_OWNER = "_liger_dist_owner"
_REPLACED = "_liger_dist_replaced"
_LINEAR_FORWARD = nn.Linear.forward
_FRAMEWORKS = ("torch.distributed.", "deepspeed.", "liger_dist.")
"""modules whose hooks unshard, move and free tensors, and change no value"""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes with kernels; fp64 models keep their original arithmetic to the last digit"""


class Match:
    """What a kind has found out about one module, for its calls."""

    attributes: Attributes | None = None
    """attributes that the original forward reads; where they have changed since, it runs. None if the kind compares
    them itself, or reads none"""

    def of_twin(self, module: nn.Module) -> Match | None:
        """Returns the match of a module with the class, the submodules and the shapes of the one that was probed, after
        one comparison; None if it has to be probed as well."""
        return None


@dataclass(frozen=True)
class Kind:
    """Kind of layer that kernels compute. A new kind is a file that defines one, and an entry in
    :data:`liger_dist.fused_layers.KINDS`."""

    name: str
    is_candidate: Callable[[nn.Module], bool]
    """True if a module looks like one of this kind"""
    match: Callable[[nn.Module, Backend], Match]
    """Probes the candidate's original forward and returns the options of its kernel, whose ``str`` is shown by
    ``explain``. Raises :class:`LeftAloneError` if the module computes something else."""
    compute: Callable[..., Any]
    """Computes the layer from the module, its match and the arguments of its forward; ``NotImplemented`` where the
    original forward has to run."""
    absent: str
    """clause that ``explain`` shows where no module of a model is a candidate"""
    is_expected: Callable[[nn.Module], bool] = lambda model: True
    """False for models in which ``explain`` need not mention that the kind is absent"""
    attribute: str = ""
    """name of the module's attribute that the match's attribute of this name replaces, instead of the forward, which
    then calls ``compute`` because of it; empty to swap the forward"""
    in_compiled_layers: bool = False
    """True if ``compute`` also runs where torch.compile traces the layer, or a transform of torch.func is active"""

    def __deepcopy__(self, memo: dict[int, Any]) -> Kind:
        return self

    def __reduce__(self) -> Any:
        """Pickles by name: copies of a model keep the classes of the original."""
        module = sys.modules[self.match.__module__]
        return _kind_named, (module.__name__, next(name for name, value in vars(module).items() if value is self))


def _kind_named(module: str, name: str) -> Kind:
    kind: Kind = getattr(import_module(module), name)
    return kind


@dataclass(frozen=True)
class ClassForward:
    """Forward that a class had when it was probed, whatever has been assigned to the class since."""

    cls: Any
    function: Forward | None
    """None after a pickle was loaded where the class has another forward"""

    @classmethod
    def of(cls, probed: Any) -> ClassForward:
        return cls(probed, probed.forward)

    def is_current(self) -> bool:
        """True if the class has no other forward now."""
        return self.cls.forward is self.function

    def __deepcopy__(self, memo: dict[int, Any]) -> ClassForward:
        return self

    def __reduce__(self) -> Any:
        return _loaded_forward, (self.cls, identity_of(self.function))


def _loaded_forward(cls: Any, identity: tuple[Any, ...]) -> ClassForward:
    return ClassForward(cls, cls.forward if identity_of(cls.forward) == identity else None)


class Swapped(MadeAtRunTime):
    """Mixin of the classes that :func:`swap_forward` creates."""

    _liger_dist_kind: Kind
    _liger_dist_probed: ClassForward


def swap_forward(module: nn.Module, kind: Kind, match: Match, *, owner: str) -> None:
    """Gives the instance the forward of ``kind``, which reads its ``match``.

    Args:
        owner: id of the ``wrap`` call; :func:`restore_forward` restores only the modules swapped under it.

    Raises:
        LeftAloneError: see :func:`check_swappable`.
    """
    check_swappable(module, has_forward=not kind.attribute)
    base = below_wrappers(type(module))
    _install(module, with_base(type(module), base, _class_for(kind, ClassForward.of(base))), match, owner)


def _install(module: nn.Module, cls: type, match: Match, owner: str) -> None:
    setattr(module, _MATCH, match)
    setattr(module, _OWNER, owner)
    name = cls._liger_dist_kind.attribute  # type: ignore[attr-defined]
    if name:
        vars(module).update({_REPLACED: vars(module)[name], name: getattr(match, name)})
    module.__class__ = cls


def check_swappable(module: nn.Module, *, has_forward: bool = True) -> None:
    """Checks that a swapped class of the instance takes effect.

    Args:
        has_forward: False for a class that keeps the module's original forward.

    Raises:
        LeftAloneError: a swapped forward of the instance would not be called.
    """
    if isinstance(module, Swapped):
        raise LeftAloneError("its forward has been swapped by the wrap of another model that shares it")
    if not has_forward:
        return
    if "forward" in vars(module):
        raise LeftAloneError("its forward has been patched on the instance")
    if type(module) is not below_wrappers(type(module)) and "forward" in vars(type(module)):
        # transformers defines a forward on every subclass of its checkpointed layers, FSDP2's included, which calls the
        # base's: a swap below it would never run.
        raise LeftAloneError(f"{type(module).__name__}, made by fully_shard, defines its own forward")


def restore_forward(module: nn.Module, *, owner: str) -> None:
    """Undoes :func:`swap_forward` of the same ``wrap`` call."""
    if vars(module).get(_OWNER) != owner:
        return
    swapped: Any = next(cls for cls in type(module).__mro__ if "_liger_dist_kind" in vars(cls))
    module.__class__ = with_base(type(module), swapped, swapped._liger_dist_probed.cls)
    if _REPLACED in vars(module):
        name, replaced = swapped._liger_dist_kind.attribute, vars(module).pop(_REPLACED)
        # Unless something else has been assigned since.
        if vars(module).get(name) is getattr(match_of(module), name):
            vars(module)[name] = replaced
    delattr(module, _MATCH)
    delattr(module, _OWNER)


@contextmanager
def suspended_forwards(model: nn.Module, *, owner: str, keeps: Collection[Kind] = ()) -> Iterator[None]:
    """Restores the original forwards of modules that :func:`swap_forward` of this owner has swapped, but for those of
    the kinds ``keeps``, within the context."""
    swapped = [
        (module, type(module), match_of(module))
        for module in model.modules()
        if isinstance(module, Swapped) and vars(module)[_OWNER] == owner and module._liger_dist_kind not in keeps
    ]
    try:
        for module, _, _ in swapped:
            restore_forward(module, owner=owner)
        yield
    finally:
        for module, cls, match in swapped:
            _install(module, cls, match, owner)


def match_of(module: nn.Module) -> Any:
    """Returns the module's match, or None after :func:`restore_forward` (a caller may still hold the old bound
    method)."""
    return vars(module).get(_MATCH)


def original_forward(module: nn.Module) -> Forward:
    """Returns the forward of the module's class before the swap."""
    cls: Any = type(module)
    forward: Forward = cls._liger_dist_probed.cls.forward
    return forward


@dataclass(frozen=True)
class PartState:
    """Submodule that a swapped forward no longer calls, such as an activation, as it was when its owner was matched."""

    part: nn.Module
    forward: ClassForward
    attributes: Attributes

    @classmethod
    def of(cls, part: nn.Module) -> PartState:
        """Reads a part.

        Raises:
            LeftAloneError: it has parameters, buffers or submodules, which the swapped forward would not read.
        """
        if part._parameters or part._buffers or part._modules:
            raise LeftAloneError(f"its {type(part).__name__} has parameters, buffers or submodules")
        return cls(part, ClassForward.of(type(part)), Attributes(part))

    def is_unchanged(self, now: nn.Module | None) -> bool:
        """True if ``now`` is the part, and it has no hooks, patches or other attributes."""
        if now is not self.part or type(now) is not self.forward.cls or not self.forward.is_current():
            return False
        if now._parameters or now._buffers or now._modules or has_hooks(now):
            return False
        return self.attributes.are_those_of(now)

    def of_twin(self, part: nn.Module | None) -> PartState | None:
        """Returns the state of the same part of another module; None if it differs."""
        if part is None or type(part) is not self.forward.cls or has_hooks(part):
            return None
        return PartState.of(part) if self.attributes.are_of_twin(part) else None


def has_hooks(module: nn.Module) -> bool:
    """True if the module has hooks, or a patched forward, that do not belong to FSDP or DeepSpeed."""
    if "forward" in vars(module):
        return True
    hooks = _hooks(module)
    return bool(hooks) and any(not is_of_framework(hook) for hook in hooks)


def _hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks of a call of the module."""
    everywhere = nn.modules.module
    kinds = (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_forward_hooks,
        everywhere._global_backward_pre_hooks,
        everywhere._global_backward_hooks,
    )
    # Most modules have none, in every layer and step: no loop.
    return [hook for hooks in kinds for hook in hooks.values()] if any(kinds) else []


def is_of_framework(hook: Any) -> bool:
    """True for a hook of FSDP, DeepSpeed or this package."""
    function = getattr(hook, "func", hook)  # Of a partial one.
    return (getattr(function, "__module__", None) or "").startswith(_FRAMEWORKS)


def is_local(tensor: object) -> bool:
    """True for a full ordinary tensor: no DTensor or other subclass."""
    return type(tensor) in (Tensor, Parameter)


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True if only torch's ``F.linear`` of full ordinary tensors runs: no subclass, no hooks, no patches."""
    is_linear = type(module) is nn.Linear and "forward" not in vars(module) and nn.Linear.forward is _LINEAR_FORWARD
    # DeepSpeed and other engines replace it by a Python function.
    is_linear = is_linear and isinstance(F.linear, BuiltinFunctionType)
    return is_linear and is_local(tensor_of(module, "weight")) and not _hooks(module)


def tensor_of(linear: nn.Module, name: str) -> Any:
    """Returns an attribute of an ``nn.Linear``, no subclass, in a third of the time of ``getattr``. It is a parameter,
    or an attribute of the instance, as the full weights of FSDP1 are."""
    own = vars(linear)
    if name in own:
        return own[name]
    parameters = own["_parameters"]
    return parameters[name] if name in parameters else getattr(linear, name)


def has_kernels(tensor: object, *, under_autocast: bool = True) -> TypeGuard[Tensor]:
    """True if kernels compute a layer with this input: a full ordinary tensor of a dtype that they take, and no
    autocast if the layer behaves differently there."""
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return False
    return tensor.dtype in KERNEL_DTYPES and (under_autocast or not torch.is_autocast_enabled(tensor.device.type))


def _class_for(kind: Kind, probed: ClassForward) -> Any:
    base, compute, probed_forward, takes_transforms = probed.cls, kind.compute, probed.function, kind.in_compiled_layers

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        match: Match | None = vars(self).get(_MATCH)
        current: Forward = base.forward
        # Other code may have exchanged the class's forward, or still hold this one after the module was restored. A
        # compiler fuses a layer itself, and should not trace the checks that follow.
        runs_original = match is None or current is not probed_forward or (not takes_transforms and is_traced())
        if runs_original or not (match.attributes is None or match.attributes.are_those_of(self)):  # type: ignore[union-attr]
            return current(self, *args, **kwargs)
        result = compute(self, match, *args, **kwargs)
        return current(self, *args, **kwargs) if result is NotImplemented else result

    members = {"_liger_dist_kind": kind, "_liger_dist_probed": probed}
    maker = (_class_for, (kind, probed))
    return subclass_of(base, Swapped, maker, members if kind.attribute else {**members, "forward": forward})
