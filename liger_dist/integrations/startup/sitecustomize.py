"""Applies liger_dist's section after the import of DeepSpeed. Python imports this module when it starts, if
``liger-dist deepspeed`` has put its folder on the path. Another ``sitecustomize`` later on the path runs as well."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any


class _AfterDeepSpeed:
    """Calls ``install`` when DeepSpeed has been imported. Other code may look for DeepSpeed without importing it."""

    is_looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "deepspeed" or self.is_looking:
            return None
        self.is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_looking = False
        if spec is not None and spec.loader is not None:
            own = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                own(module)
                sys.meta_path.remove(self)
                from liger_dist.integrations.deepspeed import install

                install()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _run_another() -> None:
    own = str(Path(__file__).parent)
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != own])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _AfterDeepSpeed())
_run_another()
