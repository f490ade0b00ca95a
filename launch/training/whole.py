"""Folders that are there as a whole, or not at all."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from liger_dist import LigerDistError

ABANDONED = 24 * 3600.0
"""seconds without a change, after which what another process began is taken for left behind"""


def write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Lets ``write`` fill a folder beside ``folder``, which then gets its name. Another process may do the same.

    Raises:
        LigerDistError: it cannot be written; nothing of it stays.
    """
    for other in folder.parent.glob(f"{folder.name}.*.partial"):
        if time.time() - other.stat().st_mtime > ABANDONED:
            shutil.rmtree(other, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: in containers, process ids are alike.
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise LigerDistError(f"{folder} cannot be written: {error}; choose another --cache_dir.") from error
    try:
        write(partial / folder.name)
        _rename(partial / folder.name, folder)
    except Exception as error:  # So general by the tokenizers library.
        raise LigerDistError(
            f"{folder} cannot be written: {error}; make room, or choose another --cache_dir."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        # Somebody else was first.
        if not folder.is_dir():
            raise
