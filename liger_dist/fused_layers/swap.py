"""Swaps the forward of one module, reversibly: by a subclass of its class, set on the instance.

Parameters, names, state dict, ``isinstance`` and the class's name stay; only the instance changes. A swapped forward
falls back to the original one wherever the module has changed since it was matched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from inspect import unwrap
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from liger_dist.model.class_swap import below_wrappers, subclass_of, with_base
from liger_dist.model.stand_ins import swapped
from liger_dist.model.torch_modes import is_transformed
from liger_dist_kernels import Backend

Forward = Callable[..., Any]
_MATCH = "_liger_dist_match"
_OWNER = "_liger_dist_owner"
_REPLACED = "_liger_dist_replaced"
_SIMPLE = (Number, str, bytes, type(None), torch.dtype, torch.device)
"""compared by value; NumPy's numbers are among them"""
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type, ModuleType, nn.Module)
"""compared by identity"""
_DEPTH, _WIDTH = 3, 32
"""depth and size up to which lists, dicts and objects among the attributes are compared by what they hold"""
_OF_TORCH = ("__composable_api", "_fsdp", "_is_fsdp", "_flat_param")
_OF_ENGINES = (*_OF_TORCH, "_is_hf", "_hf_", "_old_forward", "_ds", "ds_", "_z3", "_external")
"""beginnings of names that torch's FSDP and DDP, transformers, Accelerate and DeepSpeed give modules"""
_HELD = ("_parameters", "_buffers", "_modules")
_MISSING = object()
_LINEAR_FORWARD = nn.Linear.forward
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_FRAMEWORKS = ("torch.distributed.", "deepspeed.", "liger_dist.")
"""modules whose hooks unshard, move and free tensors, and change no value"""
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""dtypes with kernels; fp64 models keep their original arithmetic to the last digit"""


PROBE_SCALES = (0.3, 3.0, 30.0, 300.0)
"""scales of probe values, compared one by one: clipping, as by relu6, shows at large values, and the approximation of
an activation at small ones"""


class LeftAloneError(Exception):
    """Raised for a module that keeps its original forward; the message is the reason. Never leaves this package."""


@dataclass(frozen=True)
class Kind:
    """Kind of layer that kernels compute. A new kind is a file that defines one, and an entry in
    :data:`liger_dist.fused_layers.KINDS`."""

    name: str
    is_candidate: Callable[[nn.Module], bool]
    """True if a module looks like one of this kind"""
    match: Callable[[nn.Module, Backend], Any]
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
    """True if the kind is swapped in compiled layers too: its operation is opaque to the compiler"""

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
        return _loaded_forward, (self.cls, _identity_of(self.function))


def _loaded_forward(cls: Any, identity: tuple[Any, ...]) -> ClassForward:
    return ClassForward(cls, cls.forward if _identity_of(cls.forward) == identity else None)


def _identity_of(function: Any) -> tuple[Any, ...]:
    """Returns what tells functions apart in another process: name and bytecode."""
    code = getattr(function, "__code__", None)
    names = (getattr(function, name, None) for name in ("__module__", "__qualname__"))
    return *names, getattr(code, "co_code", None)


class Swapped:
    """Mixin of the classes that :func:`swap_forward` creates."""

    _liger_dist_kind: Kind
    _liger_dist_probed: ClassForward

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle cannot name a class defined at run time.
        return _blank, (self._liger_dist_kind, self._liger_dist_probed), vars(self)


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


def swap_forward(module: nn.Module, kind: Kind, match: Any, *, owner: str) -> None:
    """Gives the instance the forward of ``kind``, which reads its ``match``.

    Args:
        owner: id of the ``wrap`` call; :func:`restore_forward` restores only the modules swapped under it.

    Raises:
        LeftAloneError: see :func:`check_swappable`.
    """
    check_swappable(module, has_forward=not kind.attribute)
    base = below_wrappers(type(module))
    _install(module, with_base(type(module), base, _class_for(kind, ClassForward.of(base))), match, owner)


def _install(module: nn.Module, cls: type, match: Any, owner: str) -> None:
    setattr(module, _MATCH, match)
    setattr(module, _OWNER, owner)
    name = cls._liger_dist_kind.attribute  # type: ignore[attr-defined]
    if name:
        vars(module).update({_REPLACED: vars(module)[name], name: getattr(match, name)})
    module.__class__ = cls


def check_swappable(module: nn.Module, *, has_forward: bool = True) -> None:
    """Checks that a swapped class of the instance takes effect.

    Args:
        has_forward: False for a class that keeps the module's own forward.

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
def suspended_forwards(model: nn.Module, *, owner: str, keeps: Kind | None = None) -> Iterator[None]:
    """Restores the original forwards of modules that :func:`swap_forward` of this owner has swapped, but for those of
    the kind ``keeps``, within the context."""
    swapped = [
        (module, type(module), match_of(module))
        for module in model.modules()
        if isinstance(module, Swapped) and vars(module)[_OWNER] == owner and module._liger_dist_kind is not keeps
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


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Within, the module and its submodules are in training or evaluation mode, for code with dropout."""
    with ExitStack() as stack:
        for part in module.modules():
            if part.training != training:
                stack.enter_context(swapped(vars(part), "training", training))
        yield


def agrees(run: Callable[[bool], tuple[Sequence[Any], Sequence[Tensor]] | None], *, tolerance: float) -> bool:
    """True if a module's original code and the kernel that will replace it have the same outputs and gradients.

    Args:
        run: returns outputs and the leaves that they were computed from, for True by the module's code, for False by
            the kernel; None if the code computes something else.
        tolerance: relative L2 error of each output and gradient.
    """
    results: list[list[Any]] = []
    for is_original in (True, False):
        with torch.enable_grad():
            found = run(is_original)
        if found is None or not all(isinstance(output, Tensor) for output in found[0]):
            return False
        outputs, leaves = found
        upstream = [torch.linspace(-1, 1, output.numel()).reshape(output.shape) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
        results.append([*(output.detach() for output in outputs), *gradients])
    return len(results[0]) == len(results[1]) and all(
        a is not None and b is not None and a.shape == b.shape and bool((b - a).norm() <= tolerance * a.norm())
        for a, b in zip(*results, strict=True)
    )


class Attributes:
    """What the forward of a module may read from it beside weights and submodules, as it was when it was probed:
    attributes of the instance, and what the probed code has read from its configs.

    Numbers and strings are compared by value, tensors by identity and version, functions by identity, lists, dicts and
    objects by what they hold. One that is new counts if the class's code has its name: engines add some of their own.
    """

    def __init__(self, module: nn.Module) -> None:
        own, names = vars(module), names_in(below_wrappers(type(module)))
        self._held = frozenset(name for held in _HELD for name, value in own[held].items() if value is not None)
        self._names = names
        self._configs: list[str] = []
        self._read: dict[tuple[str, ...], Any] = {}
        simple: list[tuple[str, Any]] = []
        self._contents: list[tuple[str, Any]] = []
        for name, value in own.items():
            if name in _OF_EVERY_MODULE or name in self._held or not self._counts(name):
                continue
            if _is_config(name, value):
                self._configs.append(name)
            elif _is_simple(value):
                simple.append((name, value))
            else:
                self._contents.append((name, _content(value)))
        self.simple = tuple(simple)
        """names and values of numbers, strings and flags"""
        self._absent = names - own.keys() - self._held - {"forward"}

    @contextmanager
    def noting(self, module: nn.Module) -> Iterator[None]:
        """Within, takes note of what the module's code reads from its configs."""
        own = vars(module)
        with ExitStack() as stack:
            for name in self._configs:
                stack.enter_context(swapped(own, name, _NotedConfig(own[name], (name,), self._read)))
            yield

    def are_those_of(self, module: nn.Module) -> bool:
        """True if all of them are unchanged, and the module has no others that its forward may read."""
        now = vars(module)
        for name, value in self.simple:
            found = now.get(name, _MISSING)
            if found is not value and (type(found) is not type(value) or found != value):
                return False
        # Without methods of sets: torch 2.11 does not compile them.
        if any(name in now for name in self._absent):
            return False
        for held in _HELD:
            for name, value in now[held].items():
                if value is not None and name not in self._held and self._counts(name):
                    return False
        for name, content in self._contents:
            if name not in now or _content(now[name]) != content:
                return False
        return all(_content(_at(module, path)) == content for path, content in self._read.items())

    def _counts(self, name: str) -> bool:
        return name in self._names or not name.startswith(_OF_ENGINES)


class _NotedConfig:
    """Config of a module in a probe, which notes what the module's forward reads from it, by path."""

    def __init__(self, config: Any, path: tuple[str, ...], read: dict[tuple[str, ...], Any]) -> None:
        self.__dict__.update(_own=config, _path=path, _read=read)

    def __getattr__(self, name: str) -> Any:
        path = (*self._path, name)
        # One that is absent, which a default stands for, may be set later.
        value = getattr(self._own, name, None)
        if _is_config(name, value):
            return _NotedConfig(value, path, self._read)
        self._read[path] = _content(value)
        return getattr(self._own, name)


def _is_config(name: str, value: Any) -> bool:
    """True for the config of a model, of which a module reads little."""
    return (name == "config" and value is not None) or hasattr(type(value), "model_type")


def _at(module: nn.Module, path: tuple[str, ...]) -> Any:
    value: Any = module
    for name in path:
        value = getattr(value, name, None)
    return value


def _is_simple(value: Any) -> bool:
    return isinstance(value, _SIMPLE) or (type(value) is tuple and all(isinstance(item, _SIMPLE) for item in value))


class _Same:
    """Equals the same object alone. In a pickle, functions have their name and bytecode."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:
        return _loaded_same, (self.value, _identity_of(self.value))


def _loaded_same(value: Any, identity: tuple[Any, ...]) -> _Same:
    return _Same(value if _identity_of(value) == identity else None)


def _content(value: Any, depth: int = _DEPTH) -> Any:
    """Returns what is equal for a value that has not changed."""
    if isinstance(value, _SIMPLE):
        return type(value), value
    if isinstance(value, _FUNCTIONS):
        return _Same(value)
    if isinstance(value, Tensor):
        return _Same(value), None if value.is_inference() else value._version
    if isinstance(value, MethodType):
        return _Same(value.__func__), _Same(value.__self__)
    # Others of these types may have more than they hold.
    by_value = type(value) in (list, tuple, dict, set, frozenset)
    held: Any = value if isinstance(value, list | tuple | dict | set | frozenset) else getattr(value, "__dict__", {})
    if depth == 0 or len(held) > _WIDTH:
        return _Same(value)
    if isinstance(held, dict):
        content: Any = [(key, _content(item, depth - 1)) for key, item in held.items()]
    elif isinstance(held, set | frozenset):
        content = frozenset(held)
    else:
        content = [_content(item, depth - 1) for item in held]
    return type(value) if by_value else _Same(value), content


def numbers_of(module: nn.Module) -> list[int | float]:
    """Returns the numbers among the attributes of a module, flags left out."""
    return [v for name, v in vars(module).items() if type(v) in (int, float) and name not in _OF_EVERY_MODULE]


@lru_cache(maxsize=256)
def names_in(cls: Any) -> frozenset[str]:
    """Returns names of the attributes of a class, and all names and words in the code of its methods: what its forward
    may read from an instance."""
    own = (base for base in cls.__mro__ if base not in (nn.Module, object))
    words: set[str] = set()
    seen: set[int] = set()
    for base in own:
        for value in vars(base).values():
            _add_words(value, words, seen)
    return (frozenset(dir(cls)) - frozenset(dir(nn.Module)) | words) - _OF_EVERY_MODULE


def _add_words(value: Any, words: set[str], seen: set[int]) -> None:
    """Adds the names and strings in the code of a function, of those inside of it, and of those that it decorates."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if id(value) in seen or not isinstance(value, FunctionType | CodeType):
        return
    seen.add(id(value))
    if isinstance(value, CodeType):
        words.update(value.co_names, (one for one in value.co_consts if isinstance(one, str)))
        further: list[Any] = list(value.co_consts)
    else:
        further = [value.__code__, unwrap(value)]
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # It is empty.
                further.append(cell.cell_contents)
    for one in further:
        _add_words(one, words, seen)


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


def has_hooks(module: nn.Module) -> bool:
    """True if the module has hooks, or a patched forward, that do not belong to FSDP or DeepSpeed."""
    if "forward" in vars(module):
        return True
    hooks = _hooks(module)
    return bool(hooks) and any(not is_of_framework(hook) for hook in hooks)


def _hooks(module: nn.Module) -> list[Any]:
    """Returns the hooks of a call of the module."""
    everywhere = nn.modules.module
    found: list[Any] = []
    # Most modules have none, in every layer and step: no generators.
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_forward_hooks,
        everywhere._global_backward_pre_hooks,
        everywhere._global_backward_hooks,
    ):
        if hooks:
            found += hooks.values()
    return found


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
    # DeepSpeed and others replace it by a Python function.
    is_linear = is_linear and isinstance(F.linear, BuiltinFunctionType)
    return is_linear and is_local(module.weight) and not _hooks(module)


def runs_own_code(tensor: object, *, under_autocast: bool = True) -> bool:
    """True if a layer with this input runs its original code: while it is compiled (the compiler fuses it itself),
    under torch.func, under autocast if the layer behaves differently there, and for dtypes without kernels."""
    if torch.compiler.is_compiling() or is_transformed() or not is_local(tensor):
        return True
    assert isinstance(tensor, Tensor)
    return tensor.dtype not in KERNEL_DTYPES or (not under_autocast and torch.is_autocast_enabled(tensor.device.type))


def _class_for(kind: Kind, probed: ClassForward) -> Any:
    base = probed.cls

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        match, current = match_of(self), base.forward
        # Other code may have exchanged the class's forward, or still hold this one after the module was restored.
        is_probed = match is not None and current is probed.function
        result = kind.compute(self, match, *args, **kwargs) if is_probed else NotImplemented
        return current(self, *args, **kwargs) if result is NotImplemented else result

    members = {"_liger_dist_kind": kind, "_liger_dist_probed": probed}
    return subclass_of(base, Swapped, members if kind.attribute else {**members, "forward": forward})


def _blank(kind: Kind, probed: ClassForward) -> nn.Module:
    cls = _class_for(kind, probed)
    module: nn.Module = cls.__new__(cls)
    return module
