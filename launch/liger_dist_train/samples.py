"""Continuations of prompts, as they change in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from liger_dist import LigerDistError

from .chat_template import ChatTemplate, read_variables
from .config import TrainConfig
from .conversations import BadRowError
from .distributed import on_rank_zero, rank


class Samples:
    """The file ``samples.jsonl`` in the folder of a run: an object for each prompt at each evaluation.

    Raises:
        LigerDistError: a prompt has no token, fills a sequence, or its chat template refuses it.
    """

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self._file = Path(config.output_dir) / "samples.jsonl"
        self._tokenizer, self._prompts = tokenizer, config.sample_prompts
        self._ids = [self._encode(prompt, config) for prompt in self._prompts]
        for prompt, ids in zip(self._prompts, self._ids, strict=True):
            if not 0 < len(ids) < config.sequence_length:
                raise LigerDistError(
                    f"--sample_prompts has {prompt!r}, of {len(ids)} tokens; expected at least one, and fewer than "
                    f"--sequence_length, {config.sequence_length}."
                )

    def _encode(self, prompt: str, config: TrainConfig) -> list[int]:
        if not config.sample_chat:
            ids: list[int] = self._tokenizer(prompt)["input_ids"]
            return ids
        template = ChatTemplate(self._tokenizer, variables=read_variables(config.chat_template_kwargs))
        try:
            text = template.render([{"role": "user", "content": prompt}], None, prompt=True)
        except BadRowError as error:
            raise LigerDistError(f"--sample_prompts: {prompt!r} {error}.") from error
        rendered: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return rendered

    def write(self, step: int, continued: Callable[[list[list[int]]], list[list[int]]]) -> None:
        """Adds what ``continued`` makes of the token ids of the prompts, and prints the first one."""
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in continued(self._ids)]
        rows = [{"step": step, "prompt": p, "text": text} for p, text in zip(self._prompts, texts, strict=True)]
        on_rank_zero(lambda: self._add("".join(json.dumps(row) + "\n" for row in rows)))
        if rank() == 0:
            print(f"step {step}: {self._prompts[0]!r} -> {texts[0]!r}", flush=True)

    def _add(self, lines: str) -> None:
        try:
            with self._file.open("a") as file:
                file.write(lines)
        except OSError as error:
            raise LigerDistError(f"{self._file} cannot be written: {error}; make room.") from error
