"""What a chat template writes of a conversation, and where in it the assistant's answers stand."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from liger_dist import LigerDistError

from .conversations import BadRowError, is_learned

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""of templates that mark the answers themselves"""
END_OF_REASONING = "</think>"
SAMPLE = "liger"
Span = tuple[int, int]
"""first character, and the one after the last"""
Turns = list[dict[str, Any]]


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        train_on: "assistant" for every answer of a conversation, "last_turn" for the last one alone.
        variables: what the template is given beside the conversation, such as ``enable_thinking``.

    An answer begins where generation would, and ends with the token that ends a turn: see [Note: End of a turn].

    [Note: End of a turn] Most templates write a special token after an answer. Those of GLM write nothing: there the
    next turn's first token ends it, and a conversation that ends with an answer gets that token too. Where a template
    has no special token at all, the last answer gets the tokenizer's end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, train_on: str = "assistant", variables: dict[str, Any] | None = None) -> None:
        self._tokenizer, self._train_on, self._variables = tokenizer, train_on, variables or {}
        self._marks_answers = bool(GENERATION.search(str(tokenizer.chat_template)))

    def answers(self, turns: Turns, tools: Any, first: int = 0) -> tuple[str, list[Span]]:
        """Renders a conversation; returns the text, and the answers in it that are learned.

        Args:
            first: turns before it are not learned.

        Raises:
            BadRowError: the template refuses the conversation, or where the answers stand is not known.
        """
        if self._tokenizer.chat_template is None:
            raise BadRowError("holds chat turns but the tokenizer has no chat template; give --chat_template FILE")
        answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        learned = [index for index in answers if index >= first and is_learned(turns[index], index)]
        if self._train_on == "last_turn":
            learned = [index for index in learned if index == answers[-1]]
        if self._marks_answers:
            return self._marked(turns, tools, answers, learned)
        text, spans = self.render(turns, tools), []
        for index in learned:
            start, stop = self._span(turns, tools, index, text)
            if stop == len(text) and not self._has_end(text[start:]):
                text += self._added_end
                stop = len(text)
            spans.append((start, stop))
        return text, spans

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

    def refuse_special_tokens(self, turns: Turns) -> None:
        """Raises:
        BadRowError: a content has a special token, which could not be told from those of the template.
        """
        for index, turn in enumerate(turns):
            found = self._special.search(turn.get("content") or "")
            if found is not None:
                raise BadRowError(
                    f"has the special token {found.group()!r} in the content of turn {index}, which would end or begin "
                    "a turn there; take it out, or leave --split_special_tokens out to read it as such"
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

    def _marked(self, turns: Turns, tools: Any, answers: list[int], learned: list[int]) -> tuple[str, list[Span]]:
        """The answers that the template marks."""
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
        if learned == answers:
            return text, [(start, stop) for start, stop in spans]
        if len(spans) != len(answers):
            raise BadRowError(
                f"has {len(answers)} answers, of which the chat template marks {len(spans)}, so that those to learn "
                "are not known; learn all of them, or give another template with --chat_template FILE"
            )
        return text, [spans[answers.index(index)] for index in learned]

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
        answer = _answer(turns[index])
        if text.find(answer, start, stop) < 0:
            raise BadRowError(
                f"has a turn {index} whose content the chat template leaves out or changes: {answer[:80]!r}"
            )
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
        found = json.loads(text or "{}")
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


def _in_parts(turns: Turns) -> Turns:
    return [
        turn | {"content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn.get("content"), str)
        else turn
        for turn in turns
    ]
