"""Runs a function after the import of a module. Imports nothing but the standard library, because every Python process
may run it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any


class AfterImport:
    """Finder that calls ``action`` when the module ``name`` has been imported. Other code may look for the module
    without importing it."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action
        self.is_looking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name or self.is_looking:
            return None
        self.is_looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.is_looking = False
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                sys.meta_path.remove(self)
                self.action()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
