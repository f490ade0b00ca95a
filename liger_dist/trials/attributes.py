"""What a module's forward may read from it, as it was in a trial, to be compared with what it has in a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from inspect import unwrap
from numbers import Number
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.model.class_swap import below_wrappers, swapped

_SIMPLE = (Number, str, bytes, type(None), torch.dtype, torch.device)
"""compared by value; NumPy's numbers are among them"""
_FUNCTIONS = (FunctionType, BuiltinFunctionType, type, ModuleType, nn.Module)
"""compared by identity"""
_DEPTH, _WIDTH = 3, 32
"""depth and size up to which lists, dicts and objects among the attributes are compared by what they hold"""
_OF_TORCH = ("__composable_api", "_fsdp", "_is_fsdp", "_flat_param")
_OF_ENGINES = (*_OF_TORCH, "_liger_dist_", "_is_hf", "_hf_", "_old_forward", "_ds", "ds_", "_z3", "_external")
"""beginnings of names that torch's FSDP and DDP, this library, transformers, Accelerate and DeepSpeed give modules"""
_HELD = ("_parameters", "_buffers", "_modules")
_MISSING = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Attributes:
    """What the forward of a module may read from it beside weights and submodules, as it was when it was probed:
    attributes of the instance, and what the probed code has read from its configs.

    Numbers and strings are compared by value, tensors by identity and version, functions by identity, lists, dicts and
    objects by what they hold. One that is new counts if the class's code has its name: engines add some.
    """

    def __init__(self, module: nn.Module) -> None:
        namespace, names = vars(module), names_in(below_wrappers(type(module)))
        self._held = frozenset(name for held in _HELD for name, value in namespace[held].items() if value is not None)
        self._names = names
        self._configs: list[str] = []
        self._read: dict[tuple[str, ...], Any] = {}
        simple: list[tuple[str, Any]] = []
        self._contents: list[tuple[str, Any]] = []
        for name, value in namespace.items():
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
        self._absent = names - namespace.keys() - self._held - {"forward"}
        self._present = _names_of(namespace)

    @contextmanager
    def noting(self, module: nn.Module) -> Iterator[None]:
        """Within, takes note of what the module's code reads from its configs."""
        namespace = vars(module)
        with ExitStack() as stack:
            for name in self._configs:
                stack.enter_context(swapped(namespace, name, _NotedConfig(namespace[name], (name,), self._read)))
            yield

    def are_those_of(self, module: nn.Module) -> bool:
        """True if all of them are unchanged, and the module has no further ones that its forward may read."""
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

    def are_of_twin(self, module: nn.Module) -> bool:
        """True if all of them are those of another module, and it has no attributes of other names: functions that the
        code calls may read some by names that it does not contain."""
        return self._present == _names_of(vars(module)) and self.are_those_of(module)

    def _counts(self, name: str) -> bool:
        return name in self._names or not name.startswith(_OF_ENGINES)


def _names_of(attributes: dict[str, Any]) -> frozenset[str]:
    return frozenset(name for name in attributes if not name.startswith(_OF_ENGINES))


class _NotedConfig:
    """Config of a module in a probe, which notes what the module's forward reads from it, by path."""

    def __init__(self, config: Any, path: tuple[str, ...], read: dict[tuple[str, ...], Any]) -> None:
        self.__dict__.update(_original=config, _path=path, _read=read)

    def __getattr__(self, name: str) -> Any:
        path = (*self._path, name)
        # One that is absent, which a default stands for, may be set later.
        value = getattr(self._original, name, None)
        if _is_config(name, value):
            return _NotedConfig(value, path, self._read)
        self._read[path] = _content(value)
        return getattr(self._original, name)


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
        return _loaded_same, (self.value, identity_of(self.value))


def _loaded_same(value: Any, identity: tuple[Any, ...]) -> _Same:
    return _Same(value if identity_of(value) == identity else None)


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
    classes = (base for base in cls.__mro__ if base not in (nn.Module, object))
    words: set[str] = set()
    seen: set[int] = set()
    for base in classes:
        for value in vars(base).values():
            _add_words(value, words, seen)
    return (frozenset(dir(cls)) - frozenset(dir(nn.Module)) | words) - _OF_EVERY_MODULE


def _add_words(value: Any, words: set[str], seen: set[int]) -> None:
    """Adds the names and strings in the code of a function, of those inside of it, and of those that it decorates."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    if isinstance(value, tuple | frozenset):
        # Constants, as of a loop over names.
        words.update(one for one in value if isinstance(one, str))
        for one in value:
            _add_words(one, words, seen)
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


def identity_of(function: Any) -> tuple[Any, ...]:
    """Returns what tells functions apart in another process: name and bytecode."""
    code = getattr(function, "__code__", None)
    names = (getattr(function, name, None) for name in ("__module__", "__qualname__"))
    return *names, getattr(code, "co_code", None)
