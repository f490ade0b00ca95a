"""Checks the turns of a conversation, and what stands beside them in a row."""

from __future__ import annotations

import json
from typing import Any

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
        return (json.loads(tools) if tools.strip() else None) if isinstance(tools, str) else _without_nulls(tools)
    except ValueError as error:
        raise BadRowError(f"has tools that are no JSON ({error})") from error


def check_messages(turns: Any) -> list[dict[str, Any]]:
    """Checks chat turns with ``role`` and ``content``, and renames ``from`` and ``value`` of ShareGPT.

    Raises:
        BadRowError: no turns, or a turn without a role or content.
    """
    if not isinstance(turns, list) or not turns:
        raise BadRowError(f"has {turns!r} for its turns; expected a list of at least one")
    found = []
    for index, turn in enumerate(turns):
        if isinstance(turn, dict) and "from" in turn and "role" not in turn:
            if turn["from"] not in SHAREGPT_ROLES:
                raise BadRowError(
                    f"has a turn {index} from {turn['from']!r}; expected one of {', '.join(SHAREGPT_ROLES)}"
                )
            kept = {name: turn.get(name) for name in LEARNS}
            turn = {"role": SHAREGPT_ROLES[turn["from"]], "content": turn.get("value"), **kept}
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise BadRowError(f"has {turn!r} for turn {index}; expected a role and a content")
        # Columns of a table have every key in every row.
        turn = {name: value for name, value in turn.items() if value is not None}
        if isinstance(turn.get("content"), list):
            turn["content"] = "".join(_text_of_part(part, index) for part in turn["content"])
        if "tool_calls" in turn:
            turn["tool_calls"] = _without_nulls(turn["tool_calls"])
        if not isinstance(turn.get("content"), str) and not (turn.get("tool_calls") and "content" not in turn):
            raise BadRowError(f"has {turn!r} for turn {index}; expected a content that is text")
        found.append(turn)
    return found


def _text_of_part(part: Any, index: int) -> str:
    """Reads a part of a turn's content, which is text here."""
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise BadRowError(f"has {part!r} in the content of turn {index}; expected parts of text")
    return text


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
