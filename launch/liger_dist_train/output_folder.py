"""The folder of a run: on a disk that every rank sees, and for one run at a time; and folders that are complete or not
there."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from liger_dist import LigerDistError

from .distributed import gathered, launcher, on_rank_zero, rank

SHARED_LIMIT = 30.0
"""seconds until other ranks must see a file of rank 0: network disks cache listings"""
LOCK = "lock"
BEGUN = "begun"
ABANDONED = 24 * 3600.0
"""seconds without a change, after which what another process began is taken for left behind"""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes ``folder``, in the output folder of a run, and locks it.

    Raises:
        LigerDistError: on every rank alike: nothing can be written there, another run writes there, or a rank does not
            see what rank 0 writes.
    """
    lock: list[IO[bytes]] = []
    try:
        word = on_rank_zero(lambda: _take(folder, lock))
        _refuse(_objection(folder, word), "--output_dir")
        yield
    finally:
        for file in lock:
            file.close()


def check_shared(cache: Path) -> None:
    """Raises:
    LigerDistError: a rank does not see what rank 0 writes into ``cache``. One that cannot be written to is not looked
        at; what is in there may be all that is needed.
    """
    name = on_rank_zero(lambda: _leave_probe(cache))
    if name is not None:
        try:
            _refuse(_unseen(cache / name, ""), "--cache_dir")
        finally:
            if rank() == 0:
                (cache / name).unlink(missing_ok=True)


def goes_on(folder: Path) -> bool:
    """True where what starts these processes has started them before, and they came as far as :func:`begin`: the run
    then resumes without being asked."""
    mark, starters = folder / "checkpoints" / BEGUN, _starters()
    return on_rank_zero(lambda: mark.is_file() and not starters.isdisjoint(mark.read_text().splitlines()))


def begin(folder: Path) -> None:
    """Marks what is in the folder as that of this run."""
    starters = _starters()
    on_rank_zero(lambda: (folder / "checkpoints" / BEGUN).write_text("\n".join(sorted(starters))))


def _starters() -> set[str]:
    """Identifies what starts this run again: its torchruns, and the job of a queue, which ``STARTED_BY`` names."""
    return {known for known in (*gathered(launcher()), os.environ.get("STARTED_BY")) if known}


def _take(folder: Path, lock: list[IO[bytes]]) -> str:
    """Takes the lock; returns the word that rank 0 has written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder.parent, folder):
            with tempfile.TemporaryFile(dir=place):
                pass
        file = (folder / LOCK).open("a+b", buffering=0)
    except OSError as error:
        raise LigerDistError(f"nothing can be written to {folder}: {error}; choose another --output_dir.") from error
    lock.append(file)
    try:
        # The system releases it when the process ends, after a crash too.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise LigerDistError(f"another run writes to {folder}; wait for it, or choose another --output_dir.") from error
    except OSError as error:
        print(f"{folder} is on a disk without locks ({error}): nothing keeps another run out of it", flush=True)
    word = uuid.uuid4().hex
    try:
        file.truncate(0)
        file.write(word.encode())
    except OSError as error:
        raise LigerDistError(f"nothing can be written to {folder}: {error}; make room.") from error
    return word


def _leave_probe(cache: Path) -> str | None:
    """Makes an empty file there, and returns its name."""
    name = f"probe-{uuid.uuid4().hex}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        (cache / name).touch()
    except OSError:
        return None
    return name


def _objection(folder: Path, word: str) -> str | None:
    """Says why this rank cannot use the folder; None for no reason."""
    unseen = _unseen(folder / LOCK, word)
    if unseen is not None:
        return unseen
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"nothing can be written to {folder}: {error}"


def _unseen(file: Path, words: str) -> str | None:
    """Says why this rank does not read ``words`` there; None where it does."""
    deadline, why = time.monotonic() + SHARED_LIMIT, ""
    while time.monotonic() < deadline:
        try:
            if file.read_text() == words:
                return None
        except OSError as error:
            # Not yet, perhaps.
            why = f" ({error.strerror})"
        time.sleep(0.2)
    return f"what rank 0 writes to {file.parent} is not seen here{why}; expected a disk that all machines share"


def _refuse(objection: str | None, option: str) -> None:
    found = {rank: why for rank, why in enumerate(gathered(objection)) if why is not None}
    if found:
        ranks = ", ".join(map(str, found))
        raise LigerDistError(f"rank {ranks}: {next(iter(found.values()))}; choose another {option}.")


def write_text(file: Path, text: str) -> None:
    """Writes a file completely or not at all.

    Raises:
        LigerDistError: it cannot be written.
    """
    partial = file.with_name(f"{file.name}.partial")
    try:
        partial.write_text(text)
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise LigerDistError(f"{file} cannot be written: {error}; make room, and go on with --resume true.") from error


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Fills a folder under another name by ``write``, and renames it to ``folder``. Another process may do the same.

    Raises:
        LigerDistError: it cannot be written; nothing of it stays.
    """
    for other in folder.parent.glob(f"{folder.name}.*.partial"):
        if time.time() - other.stat().st_mtime > ABANDONED:
            shutil.rmtree(other, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Not with the process id, which is the same in several containers.
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise LigerDistError(f"{folder} cannot be written: {error}; choose another folder.") from error
    try:
        write(partial / folder.name)
        set_usual_modes(partial / folder.name)
        _rename(partial / folder.name, folder)
    except Exception as error:  # So general by the tokenizers library.
        raise LigerDistError(f"{folder} cannot be written: {error}; make room, or choose another folder.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def set_usual_modes(folder: Path) -> None:
    """Gives files the mode that new files have: libraries write some of them for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~mask)


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        # Another process has written the same folder before.
        if not folder.is_dir():
            raise
