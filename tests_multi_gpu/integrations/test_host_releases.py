"""Releases of host frameworks: a newer one is used if what is patched is there, after one warning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import liger_dist
from liger_dist import doctor
from liger_dist.integrations import patches
from liger_dist.versions import HOSTS, numbers

PAGE = Path(__file__).parents[2] / "docs" / "versions.md"
MEMBERS = {"forward": ("self", "tokens")}
OPTIONAL = {"forward": ("mask", "support")}


class Old:
    def forward(self, tokens: Any) -> None: ...


class New:
    def forward(self, tokens: Any, mask: Any = None, support: Any = None) -> None: ...


class Partial:
    def forward(self, tokens: Any, mask: Any = None) -> None: ...


class Other:
    def forward(self, tokens: Any, mask: Any = None, support: Any = None, route: Any = None) -> None: ...


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Releases by package, instead of those installed."""
    found: dict[str, str] = {}
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: found[name] if name in found else real(name))
    patches.warn_of_newer.cache_clear()
    yield found
    patches.warn_of_newer.cache_clear()


@pytest.mark.parametrize("owner", [Old, New])
@pytest.mark.parametrize(("release", "warnings"), [("0.4.0", 0), ("0.3.0", 0), ("0.3.5", 0), ("0.5.0.dev1", 1)])
def test_a_newer_host_is_used_after_one_warning(
    owner: Any, release: str, warnings: int, installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed["skyrl"] = release
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            patches.check_members(owner, MEMBERS, host="skyrl", optional=OPTIONAL)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == warnings
    for line in said:
        assert line.startswith(
            f"skyrl {release} is newer than the releases that liger_dist was tested with (0.3.0, 0.4.0)"
        )


@pytest.mark.parametrize("release", ["0.4.0", "0.5.0"])
@pytest.mark.parametrize("owner", [Partial, Other, object])
def test_a_host_with_other_functions_is_refused(
    owner: Any, release: str, installed: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    installed["skyrl"] = release
    with pytest.raises(
        liger_dist.LigerDistError, match=r"expected self, tokens, mask, support, as in 0\.3\.0 and 0\.4\.0"
    ) as said:
        patches.check_members(owner, MEMBERS, host="skyrl", optional=OPTIONAL)
    assert f"in skyrl {release}" in str(said.value)
    assert "Install skyrl 0.4.0, or train without liger_dist." in str(said.value)
    assert not caplog.records


def test_a_host_without_the_class_is_refused(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["openrlhf"] = "0.12.0"
    monkeypatch.setitem(sys.modules, "a_host_without_it", ModuleType("a_host_without_it"))
    with pytest.raises(
        liger_dist.LigerDistError, match=r"has no Actor in openrlhf 0\.12\.0; expected one, as in 0\.11\.2"
    ):
        patches.patch_class("a_host_without_it", "Actor", lambda: object, host="openrlhf")  # type: ignore[arg-type, return-value]


def test_a_host_that_is_not_a_distribution_is_used(installed: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """On PYTHONPATH, without metadata."""
    for name in HOSTS:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            patches.check_members(Old, MEMBERS, host=name)
    assert not caplog.records


def test_the_doctor_tells_of_a_newer_host(installed: dict[str, str]) -> None:
    installed |= {"verl": "99.0.0", "skyrl": HOSTS["skyrl"][-1]}
    found = {finding.what: finding for finding in doctor.versions()}
    assert found["verl"].verdict == "note"
    assert (
        found["verl"].found == f"99.0.0 is newer than {HOSTS['verl'][-1]}, the newest that liger_dist was tested with"
    )
    assert found["skyrl"].verdict == "ok"


@pytest.mark.parametrize("host", HOSTS)
def test_the_page_lists_the_tested_releases(host: str) -> None:
    releases = HOSTS[host]
    assert list(releases) == sorted(releases, key=numbers)
    assert f"| {host} | {', '.join(releases)} |" in PAGE.read_text()
