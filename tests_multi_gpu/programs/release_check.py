"""Checks a release before it is published: ``make release-check VERSION=0.3.0``. Prints one sentence for each failed
check, and exits with status 1 if there is one. ``--notes`` prints the release's section of CHANGELOG.md instead."""

from __future__ import annotations

import argparse
import configparser
import datetime
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
DISTRIBUTION = "liger_dist"
URLS = ("Documentation", "Source", "Changelog", "Issues")
TYPED = ("liger_dist", "liger_dist_kernels")
"""packages whose type annotations are meant for users"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="0.3.0, or the tag v0.3.0")
    parser.add_argument("--notes", action="store_true", help="print the section of CHANGELOG.md, and check nothing")
    options = parser.parse_args()
    version = options.version.removeprefix("v")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        parser.error(f"VERSION is {options.version!r}; expected three numbers, such as VERSION=0.3.0")
    if options.notes:
        print(notes(ROOT, version))
        return 0
    found = list(failures(ROOT, version))
    for sentence in found:
        print(f"- {sentence}", file=sys.stderr)
    print(f"{DISTRIBUTION} {version}: " + (f"{len(found)} checks failed" if found else "ready to be released"))
    return 1 if found else 0


def failures(root: Path, version: str) -> Iterator[str]:
    """Yields a sentence for each check that fails on the project in ``root`` and on the files in its ``dist``."""
    yield from check_version(root, version)
    yield from check_changelog(root, version)
    yield from check_git(root, version)
    yield from check_dist(root, version)
    wheel = root / "dist" / f"{DISTRIBUTION}-{version}-py3-none-any.whl"
    if wheel.is_file():
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            text = archive.read(metadata).decode()
        yield from check_wheel(root, set(names))
        yield from check_metadata(Parser().parsestr(text), version)


def check_version(root: Path, version: str) -> Iterator[str]:
    """Compares the version in the library and in the citation."""
    for file, pattern in (("liger_dist/_version.py", r'__version__ = "(.*)"'), ("CITATION.cff", r"version: (.*)")):
        found = re.search(f"^{pattern}$", (root / file).read_text(), re.MULTILINE)
        if found is None or found[1] != version:
            is_ = "no version" if found is None else found[1]
            yield f"{file} has {is_}; expected {version}: write it there, or release with VERSION={is_}."


def check_changelog(root: Path, version: str) -> Iterator[str]:
    """Looks for a section of this version with a date."""
    headings = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    expected = f"## {version} ({datetime.date.today()})"
    found = next((heading for heading in headings if heading.split()[:1] == [version]), None)
    if found is None:
        yield f"CHANGELOG.md has sections {', '.join(headings)}; expected one {expected!r}: write what has changed."
        return
    date = re.fullmatch(r"\S+ \((\d{4}-\d{2}-\d{2})\)", found)
    try:
        datetime.date.fromisoformat(date[1] if date else "")
    except ValueError:
        yield f"CHANGELOG.md has the heading '## {found}'; expected the day of the release: write {expected!r}."


def check_git(root: Path, version: str) -> Iterator[str]:
    """Checks that all changes are committed, and that no other commit has the version's tag."""
    changed = git(root, "status", "--porcelain").splitlines()
    if changed:
        yield f"{changed[0][3:]} is not committed ({len(changed)} in all); expected a clean tree: commit, or remove."
    names = "HEAD", f"v{version}"
    head, tagged = (git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}") for name in names)
    if tagged not in ("", head):
        yield f"the tag v{version} is on {tagged[:12]}; expected none or one on {head[:12]}: choose the next version."


def git(root: Path, *arguments: str) -> str:
    """Returns the output; empty after an error."""
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False).stdout.rstrip()


def check_dist(root: Path, version: str) -> Iterator[str]:
    """Checks that ``dist`` holds the sdist and the wheel of this version alone."""
    expected = [f"{DISTRIBUTION}-{version}-py3-none-any.whl", f"{DISTRIBUTION}-{version}.tar.gz"]
    found = sorted(path.name for path in (root / "dist").glob("*"))
    if found != expected:
        yield f"dist/ holds {', '.join(found) or 'nothing'}; expected {' and '.join(expected)}: run make wheel."


def check_wheel(root: Path, names: set[str]) -> Iterator[str]:
    """Compares the files of a wheel with the packages of ``setup.cfg``."""
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    folders = dict(re.findall(r"(\S+) = (\S+)", setup["options"]["package_dir"]))
    for package in setup["options"]["packages"].split():
        folder, inside = root / folders.get(package, package.replace(".", "/")), package.replace(".", "/")
        files = sorted(file.name for file in folder.glob("*.py"))
        missing = [name for name in files if f"{inside}/{name}" not in names]
        if missing:
            yield (
                f"the wheel lacks {', '.join(missing[:3])} of {package} ({len(missing)} of {len(files)} files); "
                "expected all of them: see packages in setup.cfg."
            )
    for package in TYPED:
        if f"{package}/py.typed" not in names:
            yield f"the wheel has no {package}/py.typed; expected it: see package_data in setup.cfg."
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield "the wheel has no LICENSE; expected it among its licenses: see license_files in setup.cfg."
    packages = {package.partition(".")[0] for package in setup["options"]["packages"].split()}
    foreign = sorted(name for name in names if name.split("/")[0] not in packages and ".dist-info/" not in name)
    foreign += sorted(name for name in names if re.search(r"(^|/)(tests?_|conftest)", name) and name not in foreign)
    if foreign:
        yield (
            f"the wheel holds {', '.join(foreign[:3])}; expected files of {', '.join(sorted(packages))} alone, and no "
            "tests: see packages in setup.cfg."
        )


def check_metadata(metadata: Message, version: str) -> Iterator[str]:
    """Checks what a package index and pip read, and that the README can be rendered."""
    urls = {line.partition(", ")[0] for line in metadata.get_all("Project-URL", [])}
    expected = {
        "Name": DISTRIBUTION,
        "Version": version,
        "Requires-Python": ">=3.10",
        "Description-Content-Type": "text/markdown",
    }
    for field, value in expected.items():
        if metadata[field] != value:
            yield f"the wheel's metadata has {field} {metadata[field]}; expected {value}: correct setup.cfg."
    if "Apache-2.0" not in (metadata["License"], metadata["License-Expression"]):
        yield f"the wheel's metadata has the license {metadata['License']}; expected Apache-2.0: correct setup.cfg."
    if not (metadata["Home-page"] or "").startswith("https://"):
        yield f"the wheel's metadata has the home page {metadata['Home-page']}; expected a URL: write url in setup.cfg."
    missing = [label for label in URLS if label not in urls]
    if missing:
        yield (
            f"the wheel's metadata has no URL of {', '.join(missing)}; expected those of {', '.join(URLS)}: add "
            "them to project_urls in setup.cfg."
        )
    yield from check_description(metadata)


def check_description(metadata: Message) -> Iterator[str]:
    """Renders the description as a package index does."""
    import readme_renderer.markdown
    import readme_renderer.rst

    is_markdown = metadata["Description-Content-Type"] == "text/markdown"
    render = readme_renderer.markdown.render if is_markdown else readme_renderer.rst.render
    rendered = render(str(metadata.get_payload()))
    if rendered is None or not re.search(r"<h1", rendered) or not re.search(r"<pre", rendered):
        yield (
            f"the README, rendered as {metadata['Description-Content-Type']}, has no title or no code; expected both: "
            "correct README.md, or its type in setup.cfg."
        )


def notes(root: Path, version: str) -> str:
    """Returns the section of a version in CHANGELOG.md."""
    for section in re.split(r"^## ", (root / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        if heading.split()[:1] == [version]:
            return text.strip()
    raise SystemExit(f"CHANGELOG.md has no section of {version}; expected '## {version} (...)'.")


if __name__ == "__main__":
    sys.exit(main())
