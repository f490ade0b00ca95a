"""Lists and removes what ``--cache_dir`` keeps: tokenised data, a folder for each source, tokenizer and chat template.

liger-dist cache
liger-dist cache runs/cache --unused_days 30 --remove
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

from liger_dist import LigerDistError

from .options import TrainOptions

OWN = "tokens-"
"""begins the names of folders that can be made again"""


def main(arguments: list[str]) -> None:
    """Runs ``liger-dist cache``."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="liger-dist cache", description=__doc__, formatter_class=how)
    parser.add_argument("folder", nargs="?", default=TrainOptions().cache_dir, type=Path, help="[%(default)s]")
    parser.add_argument("--unused_days", type=float, default=0.0, help="those alone that no run read for so long [0]")
    parser.add_argument("--remove", action="store_true", help="remove what is listed; runs make it again")
    options = parser.parse_args(arguments)
    if not options.unused_days >= 0:
        raise LigerDistError(f"--unused_days is {options.unused_days}; expected 0 or more.")
    folder = Path(options.folder)
    if not folder.is_dir():
        raise LigerDistError(f"the folder {folder} does not exist; give what --cache_dir was.")
    total = 0
    for path in sorted(path for path in folder.iterdir() if path.is_dir() and path.name.startswith(OWN)):
        days = (time.time() - last_use(path)) / 86400
        if days < options.unused_days:
            continue
        size = size_of(path)
        total += size
        print(f"{path}: {size / 2**20:.1f} MiB, last read {days:.0f} days ago")
        if options.remove:
            shutil.rmtree(path)
    print(f"{'removed' if options.remove else 'in all'}: {total / 2**20:.1f} MiB")


def size_of(folder: Path) -> int:
    """Adds up the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def last_use(folder: Path) -> float:
    """Returns when a file of the folder was last read or written, in seconds since 1970."""
    times = [max(path.stat().st_atime, path.stat().st_mtime) for path in folder.rglob("*") if path.is_file()]
    return max(times, default=folder.stat().st_mtime)
