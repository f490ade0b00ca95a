"""Reads options from a YAML file and the command line into a dataclass, whichever options it has. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import shutil
import textwrap
import types
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from .options import BASIC, ELSEWHERE, FIRST_OF_SECTION, ONE_TIME, OWN_KEY, PRESETS, READ_PATHS

Config = TypeVar("Config")
YES, NO = ("true", "yes", "1"), ("false", "no", "0")
UNSET = "null"
"""value that gives an option its default again"""


def parse_as(argv: list[str], kind: type[Config]) -> Config:
    """Parses ``[FILE.yaml] [--name value ...]`` into a dataclass; the command line wins over the file.

    A file has options, or sections of them; ``null`` gives an option its default again. What a file names and what is
    beside it, as seen from its folder, is read there; other paths are those of the working directory.

    Raises:
        LigerDistError: the file does not exist, a name is no option, or a value has another type.
    """
    hints, given = get_type_hints(kind), dict[str, Any]()
    if argv and not argv[0].startswith("-"):
        given, argv = _read_yaml(Path(argv[0]).expanduser(), list(hints)), argv[1:]
    given |= _read_line(argv, hints)
    values = {name: _value(name, value, hints[name]) for name, value in given.items() if value is not None}
    return kind(**values)


def to_yaml(config: Any) -> str:
    """Writes a configuration as text that :func:`parse_as` reads, without what a run was asked for once."""
    import yaml

    found: dict[str, dict[str, Any]] = {}
    for section, names in sections_of(type(config)).items():
        for name in names:
            value = getattr(config, name)
            if value is not None and name not in ONE_TIME:
                found.setdefault(section, {})[OWN_KEY[name] if name == section else name] = value
    text: str = yaml.safe_dump(found, sort_keys=False)
    return text


def changes_text(config: Any) -> str:
    """Writes the options that are not the defaults, a line for each section."""
    defaults, lines = type(config)(), []
    for section, names in sections_of(type(config)).items():
        changed = [name for name in names if getattr(config, name) != getattr(defaults, name)]
        words = [f"{name} {_default_text(getattr(config, name))[2:-1]}" for name in changed]
        lines += [f"{section}: {', '.join(words)}"] if words else []
    return "\n".join(lines)


def sections_of(kind: type[Any]) -> dict[str, list[str]]:
    """Returns the names of the options of each section, in order."""
    found: dict[str, list[str]] = {}
    section = ""
    for field in dataclasses.fields(kind):
        section = FIRST_OF_SECTION.get(field.name, section)
        found.setdefault(section, []).append(field.name)
    return found


def help_text(kind: type[Any], command: str, *, is_whole: bool) -> str:
    """Writes the options with their defaults: the usual ones, or all of them in sections."""
    fields, hints, defaults = {field.name: field for field in dataclasses.fields(kind)}, get_type_hints(kind), kind()
    lines = [f"usage: {command} [FILE.yaml] [--name value ...]", "", str(kind.__doc__).splitlines()[0]]
    width = min(shutil.get_terminal_size((120, 24)).columns, 120)
    # A command whose options are in another order has no sections.
    has_sections = list(sections_of(kind)) == list(FIRST_OF_SECTION.values())
    lines += [""] if is_whole and not has_sections else []
    for section, names in sections_of(kind).items():
        shown = [name for name in names if is_whole or name in BASIC]
        if is_whole or section == "model":
            lines += ["", f"{section}:"] if is_whole and has_sections else [""] * (not is_whole)
        for name in shown:
            says = _kind_text(hints[name]) + fields[name].metadata["help"] + _default_text(getattr(defaults, name))
            lines += textwrap.wrap(f"  --{name:<24} {says}", width, subsequent_indent=" " * 29)
    lines += [] if is_whole else ["", "--help-all lists all options, in the sections of a configuration file."]
    return "\n".join(lines)


def _default_text(default: Any) -> str:
    if default is None or default == []:
        return ""
    return f" [{' '.join(map(str, default)) if isinstance(default, list) else _text(default)}]"


def _kind_text(hint: Any) -> str:
    kind = _without_none(hint)
    return f"{{{','.join(map(str, get_args(kind)))}}} " if get_origin(kind) is Literal else ""


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_line(argv: list[str], hints: dict[str, Any]) -> dict[str, Any]:
    """Reads ``--name value ...`` and ``--name=value``."""
    given: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            _refuse(f"{word!r} stands where an option is expected; the configuration file is the first argument.")
        name, has_value, value = word[2:].partition("=")
        if name not in hints:
            _refuse(f"--{name} is no option{_nearest(name, list(hints))}.")
        values = [value] if has_value else []
        while not has_value and words and not words[0].startswith("--"):
            values.append(words.pop(0))
        kind = _without_none(hints[name])
        if name in given and get_origin(kind) is list:
            _refuse(f"--{name} is given twice; expected all of its values after one: --{name} A B.")
        given[name] = _of_line(name, values, kind)
    return given


def _of_line(name: str, values: list[str], kind: Any) -> Any:
    if values == [UNSET]:
        return None
    if get_origin(kind) is list and values:
        return values
    if kind is bool and not values:
        return True
    if len(values) != 1:
        _refuse(f"--{name} has {len(values) or 'no'} values{': ' * bool(values)}{' '.join(values)}; expected one.")
    return values[0]


def _read_yaml(path: Path, known: list[str]) -> dict[str, Any]:
    import yaml

    if not path.is_file():
        _refuse(f"the configuration file {path} does not exist; give a YAML file or --name value options.")
    try:
        values = _load_yaml(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        _refuse(f"the configuration file {path} is not YAML: {error}")
    if not isinstance(values, dict):
        _refuse(f"the configuration file {path} holds a {type(values).__name__}; expected name: value lines.")
    given: dict[str, Any] = {}
    for name, value in values.items():
        is_section = name in FIRST_OF_SECTION.values() and (isinstance(value, dict) or name not in known)
        if not is_section:
            given |= _named(path, str(name), value, known, given)
            continue
        if not isinstance(value, dict | None):
            _refuse(f"{path} has {value!r} in the section {name!r}; expected name: value lines.")
        for key, one in (value or {}).items():
            given |= _named(path, name if key == OWN_KEY.get(name) else str(key), one, known, given)
    return given


def _load_yaml(text: str) -> Any:
    """Loads YAML as ``yaml.safe_load``, which keeps the last one of keys with the same name."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is there twice", node.start_mark)
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def _named(path: Path, name: str, value: Any, known: list[str], earlier: dict[str, Any]) -> dict[str, Any]:
    if name in earlier:
        _refuse(f"{path} sets {name!r} twice, in a section and outside of it or in two; expected it once.")
    if name not in known:
        _refuse(f"{path} sets {name!r}, which is no option{_nearest(name, known)}.")
    if name in READ_PATHS:
        value = [_beside(path, one) for one in value] if isinstance(value, list) else _beside(path, value)
    return {name: value}


def _beside(path: Path, value: Any) -> Any:
    """Returns the path of what a configuration file names and has beside it; all else as it is."""
    is_path = isinstance(value, str) and value not in PRESETS and value not in ("", ".")
    if is_path and not os.path.isabs(value) and (path.parent / value).exists():
        return str(path.parent / value)
    return value


def _value(name: str, value: Any, hint: Any) -> Any:
    """Converts what a file or the command line has to the type of an option."""
    kind = _without_none(hint)
    if get_origin(kind) is list:
        several = value if isinstance(value, list) else [value]
        if None in several:
            _refuse(f"--{name} has an empty entry: {several}; expected a value for each.")
        return [_value(name, one, get_args(kind)[0]) for one in several]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            _refuse(f"--{name} is {value!r}; expected one of {', '.join(map(str, get_args(kind)))}.")
        return value
    text = json.dumps(value) if isinstance(value, dict) else _text(value)
    if kind is bool:
        if text.lower() not in YES + NO:
            _refuse(f"--{name} is {text!r}; expected true or false.")
        return text.lower() in YES
    if kind in (int, float):
        return _number(name, text, kind)
    if not text:
        _refuse(f"--{name} is '', an empty text; expected a value, or null for the default.")
    return os.path.expanduser(text) if text.startswith("~/") else text


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        number = float(text)
    except ValueError:
        _refuse(f"--{name} is {text!r}; expected a number.")
    if kind is float:
        return number
    # 1e3, which YAML reads as text.
    whole = int(text) if text.lstrip("+-").isdigit() else int(number) if number.is_integer() else None
    if whole is None:
        _refuse(f"--{name} is {text}; expected a whole number.")
    return whole


def _without_none(hint: Any) -> Any:
    """``X`` of ``Optional[X]``."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(kind for kind in get_args(hint) if kind is not type(None))
    return hint


def _nearest(name: str, known: list[str]) -> str:
    name = name.replace("-", "_")
    if name in ELSEWHERE:
        return f": {ELSEWHERE[name]}"
    found = difflib.get_close_matches(name, known, n=1)
    return f"; the nearest is --{found[0]}" if found else "; expected those that --help-all lists"


def _refuse(sentence: str) -> NoReturn:
    from liger_dist import LigerDistError

    raise LigerDistError(sentence)
