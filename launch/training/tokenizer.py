"""Loads tokenizers from folders, never from the network."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from liger_dist import LigerDistError


def load_tokenizer(folder: Path) -> Any:
    """A fast tokenizer.

    Raises:
        LigerDistError: no such folder, no tokenizer in it, or one without a vocabulary or an end-of-sequence token.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise LigerDistError(
            f"the tokenizer folder {folder} does not exist; give a folder that holds tokenizer.json, or leave "
            "--tokenizer out for the one in the folder of --model."
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
    serialized = f"{tokenizer.backend_tokenizer.to_str()}{tokenizer.chat_template}{tokenizer.eos_token}"
    return hashlib.sha256(serialized.encode()).hexdigest()[:16]
