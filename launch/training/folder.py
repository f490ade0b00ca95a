"""The folder of a run: on a disk that every rank sees, and for one run at a time."""

from __future__ import annotations

import fcntl
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch.distributed as dist

from liger_dist import LigerDistError

from .process import world_size
from .together import on_rank_zero

SHARED_LIMIT = 30.0
"""seconds for a file of rank 0 to be seen by the others: shared disks are asked rarely"""
LOCK = "lock"
BEGUN = "begun"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes ``folder`` and ``folder/checkpoints``, and holds them for this run.

    Raises:
        LigerDistError: on every rank alike: nothing can be written there, another run writes there, or a rank does not
            see what rank 0 writes.
    """
    lock: list[IO[str]] = []
    try:
        word = on_rank_zero(lambda: _take(folder / "checkpoints", lock))
        objections = [_objection(folder / "checkpoints", word)]
        if dist.is_initialized():
            objections *= world_size()
            dist.all_gather_object(objections, objections[0])
        found = {rank: why for rank, why in enumerate(objections) if why is not None}
        if found:
            ranks = ", ".join(map(str, found))
            raise LigerDistError(f"rank {ranks}: {next(iter(found.values()))}; choose another --output_dir.")
        yield
    finally:
        for file in lock:
            file.close()


def goes_on(folder: Path, *, restarted: bool) -> bool:
    """Whether torchrun started these processes again after :func:`begin`: then the run goes on without being asked."""
    mark = folder / "checkpoints" / BEGUN

    def look() -> bool:
        if not restarted:
            mark.unlink(missing_ok=True)
        return mark.exists()

    return on_rank_zero(look)


def begin(folder: Path) -> None:
    """Notes that what is in the folder now belongs to this run."""
    on_rank_zero(lambda: (folder / "checkpoints" / BEGUN).touch())


def _take(folder: Path, lock: list[IO[str]]) -> str:
    """The word that rank 0 has written into the lock."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder.parent, folder):
            with tempfile.TemporaryFile(dir=place):
                pass
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise LigerDistError(f"nothing can be written to {folder}: {error}; choose another --output_dir.") from error
    lock.append(file)
    try:
        # Let go of by the system when the process ends, however it does.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LigerDistError(f"another run writes to {folder}; wait for it, or choose another --output_dir.") from error
    except OSError as error:
        print(f"{folder} is on a disk without locks ({error}): nothing keeps another run out of it", flush=True)
    word = uuid.uuid4().hex
    file.truncate(0)
    file.write(word)
    file.flush()
    return word


def _objection(folder: Path, word: str) -> str | None:
    """Why this rank cannot use the folder."""
    deadline = time.monotonic() + SHARED_LIMIT
    while time.monotonic() < deadline:
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
            if (folder / LOCK).read_text() == word:
                return None
        except FileNotFoundError:
            # Not yet, perhaps.
            pass
        except OSError as error:
            return f"nothing can be written to {folder}: {error}"
        time.sleep(0.2)
    return f"what rank 0 writes to {folder} is not seen here; expected a disk that all machines share"
