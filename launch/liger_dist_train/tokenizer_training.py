"""Trains a byte-level BPE tokenizer with a chat template on your data, for models that start from random weights:

liger-dist tokenizer my-tokenizer notes.txt chats.jsonl --vocab_size 4096
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from liger_dist import LigerDistError

from .conversations import BadRowError, check_text
from .output_folder import write_folder
from .sources import find_source, read_rows, where

END = "<|end|>"
SPECIAL_TOKENS = [END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""tools and calls as JSON"""


def train_tokenizer(data: list[str], vocab_size: int, folder: Path) -> int:
    """Trains a byte-level BPE (Sennrich et al. 2016; on bytes as GPT-2) and writes it to ``folder``, completely or not
    at all; returns its number of entries.

    Raises:
        LigerDistError: ``folder`` exists or cannot be written, or the data cannot be read.
    """
    if folder.exists():
        raise LigerDistError(f"{folder} exists; give another folder, or remove it.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tqdm(_texts(data), desc="reading", unit=" texts", mininterval=1), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    write_folder(folder, fast.save_pretrained)
    return len(fast)


def _texts(data: list[str]) -> Iterator[str]:
    """Every text in every column of the data."""
    for name in data:
        for row in read_rows(find_source(name).parts(2**26)):
            try:
                if row["reason"] is not None:
                    raise BadRowError(row["reason"])
                for text in _strings(row["values"] if row["text"] is None else row["text"]):
                    yield check_text("a column", text)
            except BadRowError as error:
                raise LigerDistError(f"{where(row['file'], row['at'])} {error}. Correct the data.") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def main(arguments: list[str]) -> None:
    """Runs ``liger-dist tokenizer``."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="liger-dist tokenizer", description=__doc__, formatter_class=how)
    parser.add_argument("folder", type=Path, help="where the tokenizer is written")
    parser.add_argument("data", nargs="+", help="files and folders that liger-dist train reads")
    parser.add_argument("--vocab_size", type=int, default=4096, help="entries, at most; default: %(default)s")
    options = parser.parse_args(arguments)
    if options.vocab_size < 260:
        parser.error(f"--vocab_size is {options.vocab_size}; expected at least 260, bytes and special tokens")
    count = train_tokenizer(options.data, options.vocab_size, options.folder)
    print(f"written to {options.folder}: a tokenizer of {count} entries, of at most {options.vocab_size}")
