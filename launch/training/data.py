"""Tokenizer, and sequences of tokens, from what the arguments name; prepared by rank 0, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liger_dist import LigerDistError

from .arguments import TrainArguments
from .corpus import Columns, find_corpus
from .model import PRESETS, read_config
from .packing import Blocks, load, load_counts, prepare
from .together import on_rank_zero
from .tokens import fingerprint, load_tokenizer, train_tokenizer


def find_tokenizer(arguments: TrainArguments) -> Any:
    """Loads the tokenizer of ``--tokenizer`` or of the pretrained folder, or one trained on the data.

    Raises:
        LigerDistError: there is none, or it makes no token of the prompt.
    """
    tokenizer = load_tokenizer(on_rank_zero(lambda: _tokenizer_folder(arguments)))
    if arguments.sample_tokens > 0 and not tokenizer(arguments.sample_prompt, add_special_tokens=False)["input_ids"]:
        raise LigerDistError(f"--sample_prompt {arguments.sample_prompt!r} has no token; give some text.")
    return tokenizer


def find_blocks(arguments: TrainArguments, tokenizer: Any, vocab_size: int) -> dict[str, Blocks]:
    """Blocks by split, "train" and "held_out". Rank 0 writes ``data.json`` into the output folder.

    Raises:
        LigerDistError: the data cannot be read, or is too short.
    """
    columns, mark = _columns(arguments), fingerprint(tokenizer)

    def prepare_all() -> Path:
        corpus = find_corpus(arguments.data, columns)
        prepared = prepare(corpus, tokenizer, mark, columns, vocab_size, Path(arguments.cache_dir))
        counts, output = load_counts(prepared), Path(arguments.output_dir)
        print(f"data: {counts}", flush=True)
        output.mkdir(parents=True, exist_ok=True)
        counts.write(output)
        return prepared

    folder = on_rank_zero(prepare_all)
    blocks = {
        split: Blocks(load(folder, split), arguments.sequence_length, restart=not arguments.attend_across_documents)
        for split in ("train", "held_out")
    }
    for split, cut in blocks.items():
        if len(cut) == 0:
            raise LigerDistError(
                f"the {split.replace('_', '-')} part of the data is shorter than one sequence of "
                f"{arguments.sequence_length} tokens; lower --sequence_length or give more data."
            )
    return blocks


def given_tokenizer(arguments: TrainArguments) -> Path | None:
    """Folder of the tokenizer that the arguments name: that of ``--tokenizer``, else a pretrained folder; None where
    one is to be trained on the data.

    Raises:
        LigerDistError: no tokenizer can be loaded from it, or ``--model`` is no model.
    """
    if arguments.tokenizer is not None:
        load_tokenizer(Path(arguments.tokenizer))
        return Path(arguments.tokenizer)
    # The name of a preset may be that of another folder.
    if arguments.model in PRESETS:
        return None
    model = Path(arguments.model)
    read_config(model)
    if not model.is_dir():
        return None
    # Pretrained weights know the ids of their own tokenizer only.
    try:
        load_tokenizer(model)
    except LigerDistError as error:
        raise LigerDistError(
            f"--model is the folder {model}, which has no tokenizer that can be used; name one with --tokenizer FOLDER "
            f"({error})"
        ) from error
    return model


def _tokenizer_folder(arguments: TrainArguments) -> Path:
    given = given_tokenizer(arguments)
    if given is not None:
        return given
    corpus = find_corpus(arguments.data, _columns(arguments))
    trained = Path(arguments.cache_dir) / f"tokenizer-{corpus.fingerprint()}-{arguments.vocab_size}"
    if not trained.is_dir():
        print(f"training a tokenizer of {arguments.vocab_size} entries", flush=True)
        train_tokenizer(corpus.texts(), arguments.vocab_size, trained)
    return trained


def _columns(arguments: TrainArguments) -> Columns:
    return Columns(arguments.text_column, arguments.messages_column)
