"""Continuations of prompts, as they change in a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from liger_dist import LigerDistError

from .config import TrainConfig
from .conversations import BadRowError
from .distributed import on_rank_zero, rank
from .metrics import complete_rows
from .output_folder import write_text
from .tokenization import Tokenization


class Samples:
    """The file ``samples.jsonl`` in the folder of a run: an object for each prompt at each evaluation.

    Raises:
        LigerDistError: a prompt has no token, fills a sequence, or its chat template refuses it.
    """

    def __init__(self, config: TrainConfig, tokenization: Tokenization) -> None:
        self._file = Path(config.output_dir) / "samples.jsonl"
        self._tokenizer, self._prompts = tokenization.load_tokenizer(), config.sample_prompts
        encoder = tokenization.encoder()
        try:
            self._ids = [encoder.prompt(prompt, as_turn=config.sample_chat) for prompt in self._prompts]
        except BadRowError as error:
            raise LigerDistError(f"--sample_prompts: a prompt {error}.") from error
        for prompt, ids in zip(self._prompts, self._ids, strict=True):
            if not 0 < len(ids) < config.sequence_length:
                raise LigerDistError(
                    f"--sample_prompts has {prompt!r}, of {len(ids)} tokens; expected at least one, and fewer than "
                    f"--sequence_length, {config.sequence_length}."
                )

    def begin(self, first_step: int) -> None:
        """Keeps what was written up to the step from which the run goes on."""

        def keep() -> None:
            rows = complete_rows(self._file) if self._file.is_file() else ()
            write_text(self._file, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= first_step))

        on_rank_zero(keep)

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
