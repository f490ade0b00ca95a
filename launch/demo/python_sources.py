"""Writes the sources of Python's standard library on this machine as JSONL: text for a first run.

python launch/demo/python_sources.py runs/demo/python.jsonl
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

LEFT_OUT = {"site-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "turtledemo"}
"""folders of other packages, of tables, of tests and of programs"""


def main(to: Path) -> None:
    """One file is one row, with its text in the column ``text``."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(folder.rglob("*.py")) if not LEFT_OUT.intersection(file.parts)]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    rows = [json.dumps({"text": text}) + "\n" for text in texts if text]
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text("".join(rows))
    print(f"written to {to}: {len(rows)} files of {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
