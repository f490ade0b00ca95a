"""Tokenizers: one that is given, or a byte-level BPE trained on the data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from liger_dist import LigerDistError

from .whole import write_whole

END = "<|end|>"
SPECIAL_TOKENS = [END, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path) -> None:
    """Trains a byte-level BPE (Sennrich et al. 2016; on bytes as GPT-2) and writes it to ``folder``, whole or not
    at all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = CHAT_TEMPLATE
    write_whole(folder, fast.save_pretrained)


def load_tokenizer(folder: Path) -> Any:
    """A tokenizer from a folder, never from the network.

    Raises:
        LigerDistError: no such folder, no tokenizer in it, or one without a vocabulary or an end-of-sequence token.
    """
    if not folder.is_dir():
        raise LigerDistError(
            f"the tokenizer folder {folder} does not exist; give a folder that holds tokenizer.json, or leave "
            "--tokenizer out for the one in the folder of --model, or one trained on the data."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # The tokenizers library and damaged files raise anything.
        raise LigerDistError(f"no tokenizer can be loaded from {folder}: {error!r}; give another folder.") from error
    if not tokenizer.is_fast:
        raise LigerDistError(
            f"the tokenizer in {folder} is a {type(tokenizer).__name__} without tokenizer.json; convert it to a "
            "fast one."
        )
    # Transformers makes an empty tokenizer for some kinds of models where a folder has only their config.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise LigerDistError(f"{folder} has no vocabulary of a tokenizer; give a folder that holds tokenizer.json.")
    if tokenizer.eos_token_id is None:
        raise LigerDistError(
            f"the tokenizer in {folder} has no end-of-sequence token; set eos_token and save it again."
        )
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """Changes with anything that could change a token."""
    serialized = f"{tokenizer.backend_tokenizer.to_str()}{tokenizer.chat_template}"
    return hashlib.sha256(serialized.encode()).hexdigest()[:16]
