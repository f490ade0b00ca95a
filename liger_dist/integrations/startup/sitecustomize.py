"""Applies liger_dist's section after the import of DeepSpeed. Python imports this module when it starts, if
``liger-dist deepspeed`` has put its folder on the path. Another ``sitecustomize`` later on the path runs as well."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from after_import import AfterImport


def _install() -> None:
    from liger_dist.integrations.deepspeed import install

    install()


def _run_another() -> None:
    this_folder = str(Path(__file__).parent)
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != this_folder])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, AfterImport("deepspeed", _install))
_run_another()
