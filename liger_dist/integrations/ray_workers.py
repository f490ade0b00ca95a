"""Programs of other packages that train in workers of Ray, which have to be patched when they start."""

from __future__ import annotations

import functools
import runpy
from importlib import import_module
from typing import Any

import ray

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError

from .patches import patched

HOOK = "worker_process_setup_hook"
"""key of Ray's runtime environment: a function that each worker calls when it starts"""


def run_patched(program: str, plug: str, config: WrapConfig | None = None) -> None:
    """Runs the module ``program`` with the arguments of this process, as ``python -m`` does. Each worker of its Ray
    calls ``patch(config)`` of the module ``plug`` when it starts.

    Raises:
        LigerDistError: Ray has been initialized already, the program gives Ray a hook already, or (after it) it did
            not call ``ray.init``.
    """
    if ray.is_initialized():
        raise LigerDistError(
            "Ray is initialized in this process already, so that its workers would not be patched; initialize it with "
            f"runtime_env={{{HOOK!r}: '{plug}.patch'}} and run {program} yourself."
        )
    original = ray.init
    is_patched = False

    def patch() -> None:
        import_module(plug).patch(config)

    @functools.wraps(original)
    def init(*args: Any, runtime_env: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        nonlocal is_patched
        given = dict(runtime_env or {})
        if HOOK in given:
            raise LigerDistError(
                f"runtime_env has the {HOOK} {given[HOOK]!r} already; call {plug}.patch in that function, and run "
                f"{program} itself."
            )
        is_patched = True
        return original(*args, runtime_env=given | {HOOK: patch}, **kwargs)

    with patched(ray, "init", init):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    if not is_patched:
        raise LigerDistError(
            f"{program} has not called ray.init as an attribute of ray, so that its workers were not patched and "
            f"trained without liger_dist; call ray.init there, or {plug}.patch in its workers."
        )
