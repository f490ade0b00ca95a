"""Patches of host classes within a ``with`` block, and what they share."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from inspect import signature
from typing import Any

from torch import nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.fused_layers.packed_calls import packing_objection
from liger_dist.model.peft import base_model_of
from liger_dist.record import inner_model, is_wrapped, record_of
from liger_dist.sharding.base import Strategy
from liger_dist.sharding.fsdp2.strategy import LMHead
from liger_dist.versions import HOSTS, newest_checked
from liger_dist.wrap import wrap

from .startup.after_import import AfterImport

_LOGGER = logging.getLogger(__name__)


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets ``owner.name`` to ``value`` within the context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def models_wrapped_for(trainer: Any, config: WrapConfig | None, lm_head: LMHead) -> Iterator[None]:
    """Patches a trainer class within the context, so that its trainers get a wrapped ``model`` and ``ref_model``. Their
    constructors copy and shard reference models, so both are wrapped before those run."""
    original = trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if lm_head != "gather":
            raise LigerDistError(f"lm_head is {lm_head!r}, which {trainer.__name__} does not have; leave it out.")
        given = signature(original).bind(self, *args, **kwargs)
        for name in ("model", "ref_model"):
            model = given.arguments.get(name)
            if isinstance(model, str):
                raise LigerDistError(
                    f"{name} is {model!r}, which {trainer.__name__} would load unwrapped; load it and pass the model."
                )
            if isinstance(model, nn.Module) and not is_wrapped(model):
                wrap(model, config=config)
        original(*given.args, **given.kwargs)

    with patched(trainer, "__init__", init):
        yield


def refuse_liger_kernel(settings: Mapping[str, Any]) -> None:
    """Refuses ``use_liger_kernel`` among the settings of a host's model.

    Raises:
        LigerDistError: it is True.
    """
    if settings.get("use_liger_kernel"):
        raise LigerDistError(
            "use_liger_kernel is True, which replaces the model's forward, with its loss; leave it out: liger_dist "
            "fuses the loss and the layers."
        )


def with_config(cls: type[nn.Module], config: WrapConfig | None) -> type[nn.Module]:
    """Makes a subclass of ``cls``, with its name, whose models are wrapped with ``config``."""
    members = {"wrap_config": WrapConfig() if config is None else config, "__module__": cls.__module__}
    return type(cls.__name__, (cls,), members)


def patch_class(module_name: str, name: str, make: Callable[[], type[nn.Module]], *, host: str) -> None:
    """Sets the class ``name`` of a host's module to that of ``make``: now if the module is imported, otherwise after
    its import.

    Args:
        host: a package of :data:`liger_dist.versions.HOSTS`.

    Raises:
        LigerDistError: the module has no such class.
    """

    def patch() -> None:
        module = sys.modules[module_name]
        if not hasattr(module, name):
            raise LigerDistError(f"{module_name} has no {name} in {_installed(host)}; expected one, {_as_tested(host)}")
        setattr(module, name, make())

    if module_name in sys.modules:
        patch()
    else:
        sys.meta_path.insert(0, AfterImport(module_name, patch))


def refuse_packing(model: nn.Module, setting: str, *, way_out: str = "pad rows of single documents instead") -> None:
    """Refuses a setting of a host that packs documents into rows, for a model that would mix them.

    Args:
        model: wrapped or not; it is not changed.
        setting: its name.

    Raises:
        LigerDistError: the model would mix them.
    """
    inner = inner_model(model)
    objection = record_of(inner).found.packing.objection() if is_wrapped(model) else packing_objection(model)
    if objection is not None:
        raise LigerDistError(
            f"{setting} packs documents into rows, which {type(base_model_of(inner)).__name__} would mix: {objection}; "
            f"{way_out}."
        )


def wrap_policy(
    model: nn.Module, strategy: str | Strategy, config: WrapConfig, *, way_out: str, packs: str | None = None
) -> None:
    """Wraps a model that a host asks for log-probabilities.

    Args:
        packs: the setting with which the host packs samples into rows; None if it pads them.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`; or the loss of the model is not fused, or it would mix samples.
    """
    if packs is not None:
        refuse_packing(model, packs, way_out="set it to False")
    wrap(model, strategy, config=config)
    reason = record_of(inner_model(model)).found.unfused_reason
    if reason is not None:
        raise LigerDistError(f"the loss of {type(inner_model(model)).__name__} is not fused: {reason}. {way_out}")


def check_members(
    owner: Any, members: Mapping[str, tuple[str, ...]], *, host: str, optional: Mapping[str, tuple[str, ...]] = {}
) -> None:
    """Refuses a release of a host whose functions are not those that are patched, and warns of one that is newer than
    those tested.

    Args:
        owner: a class or a module.
        members: names in ``owner``, and the names of their parameters.
        host: a package of :data:`liger_dist.versions.HOSTS`.
        optional: parameters at the end that some of its releases do not have: all of a function's, or none.

    Raises:
        LigerDistError: one is missing, or has other parameters.
    """
    for name, expected in members.items():
        function = getattr(owner, name, None)
        found = None if function is None else tuple(signature(function).parameters)
        if found not in (expected, expected + optional.get(name, ())):
            described = "is missing" if found is None else f"has the parameters {', '.join(found)}"
            raise LigerDistError(
                f"{name} of {owner.__name__} {described} in {_installed(host)}; expected "
                f"{', '.join(expected + optional.get(name, ()))}, {_as_tested(host)}"
            )
    warn_of_newer(host)


@functools.cache
def warn_of_newer(host: str) -> None:
    """Logs a warning, once in a process, if a host is newer than the releases that its integration was tested with. An
    integration calls it after it has checked what it patches.

    Args:
        host: a package of :data:`liger_dist.versions.HOSTS`.
    """
    try:
        is_newer = newest_checked(host, metadata.version(host), HOSTS) is not None
    except metadata.PackageNotFoundError:
        return
    if is_newer:
        _LOGGER.warning(
            "%s is newer than the releases that liger_dist was tested with (%s). What liger_dist patches is there, so "
            "it goes on; compare a step with one without it, or install %s.",
            _installed(host),
            ", ".join(HOSTS[host]),
            HOSTS[host][-1],
        )


def _installed(host: str) -> str:
    try:
        return f"{host} {metadata.version(host)}"
    except metadata.PackageNotFoundError:
        return host


def _as_tested(host: str) -> str:
    releases = HOSTS[host]
    return (
        f"as in {' and '.join(releases)}, which this release of liger_dist was tested with. Install {host} "
        f"{releases[-1]}, or train without liger_dist."
    )
