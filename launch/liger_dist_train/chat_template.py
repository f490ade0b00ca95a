"""What a chat template writes of a conversation, and where in it the assistant's answers stand."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from liger_dist import LigerDistError

from .conversations import LEARNS, REASONING, ROLES, BadRowError, is_learned, texts_in
from .json_text import parse_json

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""of templates that mark the answers themselves"""
END_OF_REASONING = "</think>"
SAMPLE = "liger"
KEY = "liger_key"
NO_FIELD = "take it out of the row, or give a template that writes it with --chat_template FILE"
Span = tuple[int, int]
"""first character, and the one after the last"""
Turns = list[dict[str, Any]]


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        train_on: "assistant" for every answer of a conversation, "last_turn" for the last one alone, "all" for all that
            the template writes but answers that are marked as not to be learned.
        variables: what the template is given beside the conversation, such as ``enable_thinking``.

    An answer begins where generation would, and ends with the token that ends a turn: see [Note: End of a turn].

    [Note: End of a turn] Most templates write a special token after an answer. Those of GLM write nothing: there the
    next turn's first token ends it, and a conversation that ends with an answer gets that token too. Where a template
    has no special token at all, the last answer gets the tokenizer's end-of-sequence token.

    Everything that a row has for a template is in what it writes, or the row is bad: contents, names and arguments of
    calls, tools, and of the answers that are learned their reasoning.
    """

    def __init__(self, tokenizer: Any, train_on: str = "assistant", variables: dict[str, Any] | None = None) -> None:
        self._tokenizer, self._train_on, self._variables = tokenizer, train_on, variables or {}
        self._marks_answers = bool(GENERATION.search(str(tokenizer.chat_template)))

    def answers(self, turns: Turns, tools: Any, first: int = 0) -> tuple[str, list[Span]]:
        """Renders a conversation; returns the text, and the answers in it that are learned. With "all" these are the
        answers that are left out: those that are marked as not to be learned.

        Args:
            first: turns before it are not learned, but with "all".

        Raises:
            BadRowError: the template refuses the conversation, or where the answers stand is not known.
        """
        if self._tokenizer.chat_template is None:
            raise BadRowError("holds chat turns but the tokenizer has no chat template; give --chat_template FILE")
        turns = self._as_the_template_has(turns)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        self._refuse_marks_elsewhere(turns)
        unmarked = [index for index in answers if is_learned(turns[index], index)]
        learned = [index for index in unmarked if index >= first]
        if self._train_on == "last_turn":
            learned = [index for index in learned if index == answers[-1]]
        is_all = self._train_on == "all"
        left_out = [index for index in answers if index not in unmarked] if is_all else []
        wanted = sorted({*learned, *left_out})
        if self._marks_answers:
            text, spans = self._marked(turns, tools, answers, wanted, told_apart=learned != answers)
        else:
            text, spans = self.render(turns, tools), []
            for index in wanted:
                start, stop = self._span(turns, tools, index, text)
                if stop == len(text) and not self._has_end(text[start:]):
                    text += self._added_end
                    stop = len(text)
                spans.append((start, stop))
        # A template may mark an answer in several places.
        is_one_each = len(wanted) == len(spans)
        by_turn = dict(zip(wanted, spans if is_one_each else [(0, len(text))] * len(wanted), strict=True))
        self._refuse_left_out(turns, tools, text, {index: by_turn[index] for index in learned})
        return text, [by_turn[index] for index in left_out] if is_all else spans

    def _as_the_template_has(self, turns: Turns) -> Turns:
        """Turns with the names and forms that the template reads.

        Raises:
            BadRowError: a role that neither a conversation nor the template has.
        """
        source, found = str(self._tokenizer.chat_template), []
        for index, turn in enumerate(turns):
            role = turn["role"]
            is_in_template = re.search(rf"""['"]{re.escape(role)}['"]""", source) is not None
            if role not in ROLES and not is_in_template:
                raise BadRowError(f"has the role {role!r} in turn {index}; expected one of {', '.join(ROLES)}")
            turn = turn | {"role": "system"} if role == "developer" and not is_in_template else dict(turn)
            if "reasoning_content" in turn:
                name = next((name for name in REASONING if name in source), REASONING[0])
                turn[name] = turn.pop("reasoning_content")
            if "tool_calls" in turn:
                content, is_text = self._form_of_calls
                turn["content"] = turn.get("content") or content
                turn["tool_calls"] = [_with_text_arguments(one) if is_text else one for one in turn["tool_calls"]]
            found.append(turn)
        return found

    def _refuse_marks_elsewhere(self, turns: Turns) -> None:
        """Raises:
        BadRowError: a turn that is no answer is marked as learned where answers alone are, or as not learned where all
            turns are.
        """
        is_all = self._train_on == "all"
        for index, turn in enumerate(turns):
            marks = [name for name in LEARNS if name in turn and turn["role"] != "assistant"]
            if marks and is_learned(turn, index) != is_all:
                raise BadRowError(
                    f"has {turn[marks[0]]!r} for {marks[0]!r} of turn {index} ({turn['role']}), which --train_on "
                    f"{self._train_on} {'learns' if is_all else 'does not learn'}; take it out of the row"
                )

    def _refuse_left_out(self, turns: Turns, tools: Any, text: str, spans: dict[int, Span]) -> None:
        """Refuses a row of which the template leaves something out.

        Args:
            spans: of the answers that are learned, by their turn.

        Raises:
            BadRowError: it names the field.
        """
        if tools and not self._writes_tools:
            raise BadRowError(f"has tools, which the chat template leaves out; {NO_FIELD}")
        for name in _names_of_tools(tools):
            if name not in text:
                raise BadRowError(f"has the tool {name!r}, which the chat template leaves out; {NO_FIELD}")
        answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        for index, turn in enumerate(turns):
            written = text[slice(*spans[index])] if index in spans else text
            is_answer = turn["role"] == "assistant"
            fields = [("content", _answer(turn) if is_answer else turn.get("content") or "")]
            if index in spans and not any(turn.get(name) for name in ("content", "tool_calls", *REASONING)):
                raise BadRowError(f"has an empty answer in turn {index}; fill it, or give it the weight 0")
            if index in spans:
                fields += [("reasoning", turn[name]) for name in REASONING if name in turn]
                fields += [("reasoning", _reasoning(turn))]
            for call in turn.get("tool_calls", ()):
                function = call["function"]
                fields.append(("tool_calls", function["name"]))
                fields += [("tool_calls", value) for value in _leaves(function["arguments"])]
            for field, value in fields:
                is_history = field == "reasoning" and index != answers[-1]
                if not _is_written(value, written, is_data=turn["role"] == "tool"):
                    raise BadRowError(
                        f"has {field} in turn {index} ({turn['role']}) that the chat template leaves out or changes: "
                        f"{str(value)[:80]!r}; {'--train_on last_turn, ' if is_history else ''}{NO_FIELD}"
                    )

    @cached_property
    def _writes_tools(self) -> bool:
        parameters = {"type": "object", "properties": {KEY: {"type": "string", "description": SAMPLE}}}
        tool = {"type": "function", "function": {"name": KEY, "description": SAMPLE, "parameters": parameters}}
        turns = [{"role": "user", "content": SAMPLE}, {"role": "assistant", "content": SAMPLE}]
        try:
            return KEY in self.render(turns, [tool])
        except BadRowError:
            return True

    @cached_property
    def _form_of_calls(self) -> tuple[str | None, bool]:
        """Content of an answer that is a call alone, and whether arguments have to be JSON: some templates write them
        as they are, and some write calls where there is no content."""
        as_json, plain = json.dumps({KEY: SAMPLE}), ("", False)
        for content, is_text in ((*plain,), ("", True), (None, False), (None, True)):
            call = {"type": "function", "function": {"name": SAMPLE, "arguments": {KEY: SAMPLE}}}
            call = _with_text_arguments(call) if is_text else call
            turns = [{"role": "user", "content": SAMPLE}]
            turns.append({"role": "assistant", "content": content, "tool_calls": [call]})  # type: ignore[dict-item]
            try:
                text = self.render(turns, None)
            except BadRowError:
                continue
            if as_json in text if is_text else KEY in text and f"{{'{KEY}'" not in text:
                return content, is_text
        return plain

    def render(self, turns: Turns, tools: Any, *, prompt: bool = False) -> str:
        """Renders turns, with ``prompt`` up to where the next answer would be generated.

        Raises:
            BadRowError: the template refuses them.
        """
        turns = _in_parts(turns) if self._takes_parts else turns
        try:
            text: str = self._tokenizer.apply_chat_template(
                turns, tools=tools, tokenize=False, add_generation_prompt=prompt, **self._variables
            )
        except Exception as error:  # Templates raise what they like.
            raise BadRowError(f"is refused by the chat template: {error}") from error
        return text

    def refuse_special_tokens(self, turns: Turns, tools: Any) -> None:
        """Raises:
        BadRowError: something that the row has for the template has a special token, which could not be told from those
            of the template.
        """
        given = [(f"{name} of turn {index}", value) for index, turn in enumerate(turns) for name, value in turn.items()]
        for where, value in (*given, ("tools", tools)):
            found = next(filter(None, map(self._special.search, texts_in(value))), None)
            if found is not None:
                raise BadRowError(
                    f"has the special token {found.group()!r} in the {where}, which would end or begin a turn there; "
                    "take it out, or leave --split_special_tokens out to read it as such"
                )

    def end_of_turn(self) -> str | None:
        """The special token that ends an answer; None for a template that refuses a question and an answer."""
        turns = [{"role": "user", "content": SAMPLE}, {"role": "assistant", "content": SAMPLE}]
        try:
            text, spans = self.answers(turns, None)
        except BadRowError:
            return None
        if not spans:
            # A template may mark no answer of these two turns.
            return None
        start, stop = spans[-1]
        found = self._special.search(text, max(text.find(SAMPLE, start), start), stop)
        return found.group() if found else None

    @cached_property
    def _takes_parts(self) -> bool:
        """True for a template that reads contents as lists of parts alone."""
        self.__dict__["_takes_parts"] = False
        turn, found = {"role": "user", "content": SAMPLE}, []
        for turns in ([turn], _in_parts([turn])):
            try:
                found.append(SAMPLE in self.render(turns, None))
            except BadRowError:
                found.append(False)
        return found == [False, True]

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Any special token, the longest first."""
        added = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        tokens = sorted(added | set(self._tokenizer.all_special_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    def _marked(
        self, turns: Turns, tools: Any, answers: list[int], wanted: list[int], *, told_apart: bool
    ) -> tuple[str, list[Span]]:
        """The answers that the template marks; those that are ``wanted``, one span each, if they are to be told
        apart."""
        from transformers.utils.chat_template_utils import render_jinja_template

        settings = self._tokenizer.special_tokens_map | self._variables
        turns = _in_parts(turns) if self._takes_parts else turns
        try:
            (text,), (spans,) = render_jinja_template(
                conversations=[turns],
                tools=tools,
                chat_template=self._tokenizer.get_chat_template(None, tools),
                return_assistant_tokens_mask=True,
                **settings,
            )
        except Exception as error:
            raise BadRowError(f"is refused by the chat template: {error}") from error
        if not told_apart:
            return text, [(start, stop) for start, stop in spans]
        if len(spans) != len(answers):
            raise BadRowError(
                f"has {len(answers)} answers, of which the chat template marks {len(spans)}, so that those to learn "
                "are not known; learn all of them, or give another template with --chat_template FILE"
            )
        return text, [spans[answers.index(index)] for index in wanted]

    def _span(self, turns: Turns, tools: Any, index: int, text: str) -> Span:
        """Finds an answer by what the template writes before and up to it, if it only appends."""
        before = self.render(turns[:index], tools, prompt=True) if index else ""
        after = text
        if index < len(turns) - 1:
            after = self.render(turns[: index + 1], tools)
            if not text.startswith(after):
                # Some write the end of the sequence where no turn follows.
                after = after.removesuffix(self._tokenizer.eos_token)
        if not text.startswith(after):
            raise BadRowError(
                f"has a turn {index} that the chat template writes differently when later turns follow, so its labels "
                "are not known; train the last answers alone with --train_on last_turn, or give a template that only "
                "appends, or one with {% generation %}, with --chat_template FILE"
            )
        if not after.startswith(before):
            raise BadRowError(
                f"has a turn {index} that does not begin as the chat template's prompt, which ends with "
                f"{before[-20:]!r}; if the template has a mode without reasoning, name it, such as "
                """--chat_template_kwargs '{"enable_thinking": false}', or give a template with {% generation %}, """
                "with --chat_template FILE"
            )
        start, stop = len(before), len(after)
        if stop < len(text) and not self._has_end(text[start:stop]):
            following = self._special.match(text, stop)
            stop = following.end() if following else stop
        return start, stop

    def _has_end(self, written: str) -> bool:
        return re.search(rf"(?:{self._special.pattern})\s*\Z", written) is not None

    @cached_property
    def _added_end(self) -> str:
        """What ends an answer that nothing follows, where the template writes nothing after it."""
        turns = [{"role": role, "content": SAMPLE} for role in ("user", "assistant", "user")]
        end: str = self._tokenizer.eos_token
        try:
            shorter, longer = self.render(turns[:2], None), self.render(turns, None)
        except BadRowError:
            return end
        following = self._special.match(longer, len(shorter)) if longer.startswith(shorter) else None
        return following.group() if following else end


def read_variables(text: str | None) -> dict[str, Any]:
    """Reads ``--chat_template_kwargs``.

    Raises:
        LigerDistError: no JSON object.
    """
    try:
        found = parse_json(text or "{}")
    except ValueError as error:
        raise LigerDistError(f"--chat_template_kwargs is {text!r}, which is no JSON ({error}).") from error
    if not isinstance(found, dict):
        raise LigerDistError(
            f"--chat_template_kwargs is {text!r}; expected a JSON object, such as '{{\"enable_thinking\": false}}'."
        )
    return found


def _answer(turn: dict[str, Any]) -> str:
    """The text of a turn without its reasoning, which templates may move or leave out."""
    content: str = turn.get("content") or ""
    return content.split(END_OF_REASONING)[-1].strip()


def _reasoning(turn: dict[str, Any]) -> str:
    """The reasoning at the beginning of a turn's content."""
    before, end, _ = (turn.get("content") or "").rpartition(END_OF_REASONING)
    return str(before.strip().removeprefix("<think>").strip()) if end else ""


def _in_parts(turns: Turns) -> Turns:
    return [
        turn | {"content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn.get("content"), str)
        else turn
        for turn in turns
    ]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


def _names_of_tools(tools: Any) -> list[str]:
    found = [tool.get("function", tool) for tool in tools or () if isinstance(tool, dict)]
    return [tool["name"] for tool in found if isinstance(tool, dict) and isinstance(tool.get("name"), str)]


def _leaves(value: Any) -> list[Any]:
    """The texts, numbers and flags in arguments, which may be JSON."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _is_written(value: Any, text: str, *, is_data: bool) -> bool:
    """True if ``text`` has a value, as it is or in JSON.

    Args:
        is_data: True if it may be data that a template writes in another form.
    """
    if value is None:
        return True
    if not isinstance(value, str):
        return any(form in text for form in (json.dumps(value), str(value)))
    value = value.strip()
    if any(form in text for form in (value, *(json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))):
        return True
    leaves = _leaves(value) if is_data else [value]
    return leaves != [value] and all(_is_written(leaf, text, is_data=False) for leaf in leaves)
