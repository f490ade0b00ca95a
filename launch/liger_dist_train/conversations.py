"""Checks the turns of a conversation, and what stands beside them in a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .json_text import parse_json

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
LEARNS: dict[str, tuple[Any, Any]] = {"weight": (0, 1), "train": (False, True)}
"""keys of an assistant's turn that say whether it is learned (OpenAI's fine-tuning format, Axolotl)"""


REASONING = ("reasoning_content", "thinking", "reasoning")
"""names under which rows and templates have the reasoning before an answer"""
ROLES = ("system", "developer", "user", "assistant", "tool")


class BadRowError(Exception):
    """A row that cannot be trained on; the message goes on after "file line N"."""


def is_learned(turn: dict[str, Any], index: int) -> bool:
    """False for an assistant's turn that is marked as not to be learned."""
    for name, (no, yes) in LEARNS.items():
        if name in turn and turn[name] not in (no, yes):
            raise BadRowError(f"has {turn[name]!r} for {name!r} of turn {index}; expected {no} or {yes}")
    return all(bool(turn[name]) for name in LEARNS if name in turn)


def with_system(values: dict[str, Any], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns after the system prompt of a column beside them."""
    system = values.get("system")
    if not system:
        return turns
    if turns[0]["role"] == "system":
        raise BadRowError("has a 'system' column and a turn of the system; expected one of them")
    return [{"role": "system", "content": check_text("system", system)}, *turns]


def _without_nulls(value: Any) -> Any:
    """Without the keys of other rows, which tables fill with nulls."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def read_tools(tools: Any) -> Any:
    """Reads a column that may hold JSON; None for an empty one."""
    try:
        return (parse_json(tools) if tools.strip() else None) if isinstance(tools, str) else _without_nulls(tools)
    except ValueError as error:
        raise BadRowError(f"has tools that are no JSON ({error})") from error


def check_messages(turns: Any) -> list[dict[str, Any]]:
    """Makes one conversation of the shapes that rows come in: OpenAI's, ShareGPT's (``from`` and ``value``), calls of
    functions with arguments as objects or as JSON, ``function_call``, contents in parts, reasoning by three names.

    Returns:
        turns with ``role``, ``content``, ``reasoning_content`` and ``tool_calls`` (``name`` and ``arguments``, an
        object, in ``function``), and their other keys.

    Raises:
        BadRowError: no turns, or a turn without a role or content.
    """
    if not isinstance(turns, list) or not turns:
        raise BadRowError(f"has {turns!r} for its turns; expected a list of at least one")
    return [_checked(turn, index) for index, turn in enumerate(turns)]


def _checked(given: Any, index: int) -> dict[str, Any]:
    if isinstance(given, dict) and "from" in given and "role" not in given:
        given = _of_sharegpt(given, index)
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise BadRowError(f"has {given!r} for turn {index}; expected a role and a content")
    # Columns of a table have every key in every row.
    turn: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if turn["role"] == "function":
        turn["role"] = "tool"
    in_parts = ""
    if isinstance(turn.get("content"), list):
        parts = [part for part in turn["content"] if not _is_reasoning(part)]
        in_parts = "".join(part["thinking"] for part in turn["content"] if _is_reasoning(part))
        turn["content"] = "".join(_text_of_part(part, index) for part in parts)
    reasoning = [text for text in (in_parts, *(turn.pop(name, None) for name in REASONING)) if text]
    if any(text != reasoning[0] for text in reasoning):
        raise BadRowError(f"has {len(reasoning)} texts for the reasoning of turn {index}; expected one of {REASONING}")
    if not all(isinstance(text, str) for text in reasoning):
        raise BadRowError(f"has {reasoning[0]!r} for the reasoning of turn {index}; expected text")
    turn |= {"reasoning_content": reasoning[0]} if reasoning else {}
    calls = _calls_of(turn, index)
    turn |= {"tool_calls": calls} if calls else {}
    if "refusal" in turn and not turn.get("content"):
        turn["content"] = turn.pop("refusal")
    if not isinstance(turn.get("content"), str) and not (calls and "content" not in turn):
        raise BadRowError(f"has {turn!r} for turn {index}; expected a content that is text")
    return turn


def _of_sharegpt(turn: dict[str, Any], index: int) -> dict[str, Any]:
    if turn["from"] == "function_call":
        return {name: value for name, value in turn.items() if name not in ("from", "value")} | {
            "role": "assistant",
            "function_call": turn.get("value"),
        }
    if turn["from"] not in SHAREGPT_ROLES:
        raise BadRowError(f"has a turn {index} from {turn['from']!r}; expected one of {', '.join(SHAREGPT_ROLES)}")
    kept = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return kept | {"role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value")}


def _calls_of(turn: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """Takes the calls of functions from a turn."""
    calls = turn.pop("tool_calls", None) or []
    call = turn.pop("function_call", None)
    calls = _parsed(calls, "tool_calls", index) if isinstance(calls, str) else calls
    call = _parsed(call, "function_call", index) if isinstance(call, str) else call
    calls = (
        [*calls, *(call if isinstance(call, list) else [call] if call else [])] if isinstance(calls, list) else calls
    )
    if not isinstance(calls, list) or not all(isinstance(one, dict) for one in calls):
        raise BadRowError(f"has {calls!r} for the tool_calls of turn {index}; expected a list of objects")
    found = []
    for one in map(_without_nulls, calls):
        function = one.get("function", one)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise BadRowError(f"has {one!r} among the tool_calls of turn {index}; expected the name of a function")
        names = ("arguments", "parameters")
        arguments: Any = next((place[key] for place in (function, one) for key in names if key in place), {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments or "{}", f"the arguments of {name}", index)
        if not isinstance(arguments, dict):
            raise BadRowError(
                f"has {arguments!r} for the arguments of {name} in turn {index}; expected an object, or one as JSON"
            )
        further = {
            key: value for key, value in one.items() if key not in ("function", "name", "arguments", "parameters")
        }
        found.append({"type": "function"} | further | {"function": {"name": name, "arguments": arguments}})
    return found


def _parsed(text: str, what: str, index: int) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise BadRowError(f"has {text!r} for {what} in turn {index}, which is no JSON ({error})") from error


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking" and isinstance(part.get("thinking"), str)


def _text_of_part(part: Any, index: int) -> str:
    """Reads a part of a turn's content, which is text here."""
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise BadRowError(f"has {part!r} in the content of turn {index}; expected parts of text")
    return text


def texts_in(value: Any) -> Iterator[str]:
    """Yields every text in a value, the names of its fields among them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from (*texts_in(name), *texts_in(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def check_text(name: str, value: Any) -> str:
    """Raises:
    BadRowError: not a text, or not Unicode.
    """
    if not isinstance(value, str):
        raise BadRowError(f"has {value!r} in {name!r}; expected text")
    if not is_unicode(value):
        raise BadRowError(f"has characters in {name!r} that are no Unicode (half of a surrogate pair, or no UTF-8)")
    return value


def is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can hold and tokenizers refuse; and for bytes that are not
    UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
