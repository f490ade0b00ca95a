"""Versions of other packages: which releases the private names that this library reads of them were checked with."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

CHECKED: dict[str, tuple[str, ...]] = {
    "torch": ("2.11.0", "2.13.0", "2.15.0"),
    "transformers": ("5.0.0", "5.24.0"),
    "peft": ("0.21.0", "0.21.2"),
    "deepspeed": ("0.18.0", "0.19.8"),
    "accelerate": ("1.15.0",),
    "trl": ("1.16.0",),
}
"""releases that ``test_canary.py`` has passed with, oldest first; the first one is the oldest that
``setup.cfg`` allows"""
HOSTS: dict[str, tuple[str, ...]] = {
    "axolotl": ("0.19.0", "0.21.0"),
    "llamafactory": ("0.9.5",),
    "openrlhf": ("0.11.2",),
    "skyrl": ("0.3.0", "0.4.0"),
    "trl": CHECKED["trl"],
    "verl": ("0.9.1",),
}
"""releases of host frameworks that their integrations were tested with, oldest first"""


def newest_checked(package: str, installed: str, checked: Mapping[str, tuple[str, ...]] = CHECKED) -> str | None:
    """Returns the newest release of ``checked`` if ``installed`` is a newer one; else, and for other packages, None."""
    releases = checked.get(package)
    return releases[-1] if releases is not None and numbers(installed) > numbers(releases[-1]) else None


def numbers(version: str) -> tuple[int, ...]:
    """Returns major, minor and micro number, without what follows them: ``2.15.0+cu130`` is ``(2, 15, 0)``."""
    parts = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(takewhile(str.isdigit, part)) or 0) for part in parts)
