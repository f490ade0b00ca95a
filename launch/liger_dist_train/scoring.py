"""Writes the most likely tokens of a teacher for each token of the data, which ``liger-dist train --top_k`` reads.

The data is packed into sequences as for training. Shards of them are written by all ranks, one each at a time; a shard
gets its name when it is complete, so a run that was killed goes on after the shards that it finished, on any number of
ranks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from pyarrow import parquet
from torch import nn
from tqdm import tqdm

from liger_dist import LigerDistError, WrapConfig

from .config import TrainConfig
from .data_loader import CachedData, check_sources, collate, find_tokenization, load_data
from .dataset import Piece
from .distributed import device, gathered, on_rank_zero, rank, world_size
from .fault_tolerance import Watchdog
from .hub import with_local_models
from .model import check_packing, find_config, has_weights_at, shell
from .output_folder import LOCK, check_shared, held, write_text
from .parallel_dims import parallel_dims_of
from .score_options import ScoreOptions
from .teacher import load_frozen
from .tokenization import IGNORE_INDEX

SHARDS = 64
LEAST_SEQUENCES, MOST_TOKENS = 16, 2**18
"""of one shard"""
ROW_GROUP = 256
COUNTS = b"liger_dist"
"""key of the counts in the metadata of a shard"""
T = TypeVar("T")


@dataclass(frozen=True)
class ScoreConfig(ScoreOptions):
    """Writes the most likely tokens of a model for each token of the data, to distil from with liger-dist train."""

    def as_training(self) -> TrainConfig:
        """The options that a training run on this data would have."""
        of_scoring = ("top_k", "overwrite")
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in of_scoring}
        return TrainConfig(**named, eval_fraction=0.0)


class Row(NamedTuple):
    """One piece of a document with its scores; position s is of the logits at s, which predict token s + 1."""

    piece: Piece
    is_scored: NDArray[np.bool_]
    """``[tokens]``, True where the next token is a label"""
    ids: NDArray[np.int64]
    """``[tokens, K]``, from the most likely class on; -1 for none"""
    log_probs: NDArray[np.float32]
    """``[tokens, K]``"""
    remainder: NDArray[np.float32]
    """``[tokens]``, probability of all other classes"""


def score(config: ScoreConfig) -> None:
    """Scores all data and leaves it in the folder ``data`` of ``output_dir``.

    Raises:
        LigerDistError: on every rank: the model or the data cannot be read, the folder holds other scores, or nothing
            can be written.
    """
    if config.top_k < 1:
        raise LigerDistError(f"--top_k is {config.top_k}; expected 1 or more.")
    folder = Path(config.output_dir)
    watchdog = Watchdog(config.stall_timeout)
    with watchdog.watching(), held(folder / "parts"):
        _score(config, folder, watchdog)


def _score(config: ScoreConfig, folder: Path, watchdog: Watchdog) -> None:
    training = with_local_models(config.as_training())
    check_sources(training)
    check_shared(Path(config.cache_dir))
    tokenization = find_tokenization(training)
    tokenizer = tokenization.load_tokenizer()
    model_config = find_config(training, len(tokenizer))
    vocab_size = model_config.get_text_config().vocab_size
    if config.top_k > vocab_size:
        raise LigerDistError(f"--top_k is {config.top_k} but the model has {vocab_size} classes; ask for fewer.")
    check_packing(training, shell(training, model_config), way_out="score with a model that has attention alone")
    watchdog.at(0, "preparing")
    data, _ = load_data(
        training, replace(tokenization, vocab_size=vocab_size), parallel_dims_of(training, world_size())
    )
    assert isinstance(data, CachedData)
    weights = _weights_of(training)
    key = [data.fingerprint, model_config.to_json_string(), weights, config.top_k, config.dtype, config.seed]
    shards = Shards(folder, data, hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16], config)
    missing = on_rank_zero(lambda: shards.begin(overwrite=config.overwrite))
    if missing:
        model = load_frozen(training, model_config, WrapConfig(logits_dtype=torch.float32))
        _write_missing(model, shards, missing, config, tokenizer, watchdog)
    said = on_rank_zero(lambda: shards.finish(config, data))
    if rank() == 0:
        print(said, flush=True)


def _weights_of(training: TrainConfig) -> list[tuple[str, int, int]]:
    """Lists name, size and time of the files of pretrained weights."""
    if not has_weights_at(training.model):
        return []
    return on_rank_zero(
        lambda: [
            (file.name, file.stat().st_size, file.stat().st_mtime_ns)
            for file in sorted(Path(training.model).iterdir())
            if file.suffix in (".safetensors", ".bin")
        ]
    )


def _write_missing(
    model: nn.Module, shards: Shards, missing: list[int], config: ScoreConfig, tokenizer: Any, watchdog: Watchdog
) -> None:
    """Every rank computes as many batches, with padding where it has no shard: they gather weights together."""
    batches = -(-shards.size // config.batch_size)
    rounds = range(0, len(missing), world_size())
    num_batches = 0
    with tqdm(total=len(rounds) * batches, desc="scoring", unit=" batches", disable=rank() != 0, mininterval=1) as bar:
        for first in rounds:
            mine = missing[first + rank()] if first + rank() < len(missing) else None
            sequences = together(lambda: [] if mine is None else shards.sequences(mine))  # noqa: B023
            rows: list[Row] = []
            for begin in range(0, shards.size, config.batch_size):
                num_batches += 1
                watchdog.at(num_batches, "computing")
                rows += score_batch(model, sequences[begin : begin + config.batch_size], config, tokenizer)
                bar.update()
            together(lambda: None if mine is None else shards.write(mine, rows))  # noqa: B023


def together(work: Callable[[], T]) -> T:
    """Does this rank's work, and waits for the other ranks.

    Raises:
        LigerDistError: on every rank, what one of them raises.
    """
    problem, results = "", []
    try:
        results.append(work())
    except (LigerDistError, OSError) as error:
        problem = str(error)
    problems = gathered(problem)
    if any(problems):
        raise LigerDistError(next(filter(None, problems)))
    return results[0]


@torch.no_grad()
def score_batch(model: Any, sequences: list[list[Piece]], config: ScoreConfig, tokenizer: Any) -> list[Row]:
    """Computes the scores of the pieces of a batch, in their order. Classes that the tokenizer does not have, which pad
    the vocabulary of the model, are in the remainder."""
    batch = collate(sequences, config.batch_size, config.sequence_length, tokenizer.eos_token_id, restart=True)
    labels = batch.pop("labels")
    inputs = {name: tensor.to(device()) for name, tensor in batch.items()}
    output = model(**inputs, labels=labels, use_cache=False, outputs=("top_k",), top_k=config.top_k)
    ids, log_probs, remainder = (part.cpu().numpy() for part in output.top_k)
    is_padding = ids >= len(tokenizer)
    remainder = remainder + np.where(is_padding, np.exp(log_probs), 0.0).sum(-1, dtype=np.float32)
    ids, log_probs = np.where(is_padding, -1, ids), np.where(is_padding, -np.inf, log_probs)
    is_scored = np.zeros(labels.shape, np.bool_)
    is_scored[:, :-1] = labels[:, 1:].numpy() != IGNORE_INDEX
    rows = []
    for row, pieces in enumerate(sequences):
        start = 0
        for piece in pieces:
            here = slice(start, start + len(piece.ids))
            found = (is_scored[row, here], ids[row, here], log_probs[row, here], remainder[row, here])
            rows.append(Row(piece, *found))
            start += len(piece.ids)
    return rows


class Shards:
    """The parquet files of a scoring run.

    Args:
        fingerprint: of everything that changes their content.
    """

    def __init__(self, folder: Path, data: CachedData, fingerprint: str, config: ScoreConfig) -> None:
        self._folder, self._data, self._fingerprint, self._top_k = folder, data, fingerprint, config.top_k
        most = max(1, MOST_TOKENS // config.sequence_length)
        self.size = min(most, max(LEAST_SEQUENCES, -(-data.num_sequences // SHARDS)))
        """sequences of one shard"""
        self.count = -(-data.num_sequences // self.size)

    def begin(self, *, overwrite: bool) -> list[int]:
        """Lists the shards that are missing; on rank 0. Those of these scores are kept.

        Raises:
            LigerDistError: the folder has scores of other data, another model or other options, or a damaged shard.
        """
        for file in self._here.glob("*.partial"):
            file.unlink()
        files = [file for file in self._here.glob("*.parquet") if file.is_file()]
        different = [file for file in files if _counts_of(file).get("fingerprint") != self._fingerprint]
        if different and not overwrite:
            raise LigerDistError(
                f"{different[0]} has scores of other data, another model (or other files of it) or other options "
                "(--top_k, --sequence_length, --dtype); choose another --output_dir, or remove them with --overwrite "
                "true."
            )
        for file in different:
            file.unlink()
        missing = [index for index in range(self.count) if not self._path(index).is_file()]
        done, parts = self._folder / "data", self._folder / "parts"
        if missing and done.is_dir():
            # It has that name when it is complete.
            (self._folder / "scores.json").unlink(missing_ok=True)
            for file in done.iterdir():
                file.replace(parts / file.name)
            done.rmdir()
        return missing

    def sequences(self, index: int) -> list[list[Piece]]:
        """Takes the sequences of a shard."""
        return self._data.in_order(index * self.size, self.size)

    def write(self, index: int, rows: list[Row]) -> None:
        """Writes a shard completely or not at all.

        Raises:
            LigerDistError: a token was lost, or the file cannot be written.
        """
        scored = sum(int((row.is_scored & (row.ids >= 0).any(1)).sum()) for row in rows)
        labels = sum(_num_labels(row.piece) for row in rows)
        if scored != labels:
            raise LigerDistError(
                f"{labels - scored} of the {labels} labels of shard {index} have no class of the tokenizer among their "
                f"{self._top_k} most likely ones; expected one for each. Give a larger --top_k."
            )
        path = self._path(index)
        partial = path.with_suffix(".parquet.partial")
        # A text may end in a piece of one token, which predicts nothing.
        kept = [row for row in rows if _num_labels(row.piece)]
        left_out = sum(len(row.piece.ids) for row in rows) - sum(len(row.piece.ids) for row in kept)
        table = _table(kept, self._top_k, {"fingerprint": self._fingerprint, "tokens_left_out": left_out})
        try:
            parquet.write_table(table, partial, compression="zstd", row_group_size=ROW_GROUP, use_dictionary=False)
            partial.replace(path)
        except (OSError, pa.ArrowException) as error:
            partial.unlink(missing_ok=True)
            raise LigerDistError(
                f"{path} cannot be written: {error}; make room and start again, finished shards are kept."
            ) from error

    def finish(self, config: ScoreConfig, data: CachedData) -> str:
        """Counts what is in all shards, gives them the name ``data``, and draws the plot; on rank 0.

        Raises:
            LigerDistError: tokens are missing.
        """
        done, parts = self._folder / "data", self._folder / "parts"
        found = [_counts_of(self._path(index)) for index in range(self.count)]
        names = ("rows", "tokens", "tokens_left_out", "labels")
        counts = {name: sum(shard[name] for shard in found) for name in names}
        sources = data.counts([])["sources"]
        tokens = sum(source["splits"]["train"]["tokens"] for source in sources)
        if counts["tokens"] + counts["tokens_left_out"] != tokens:
            raise LigerDistError(
                f"the shards in {self._here} have {counts['tokens']} tokens and left {counts['tokens_left_out']} out, "
                f"and the data has {tokens}; expected all of them. Report this with the data."
            )
        (parts / LOCK).unlink(missing_ok=True)
        if self._here == parts:
            parts.rename(done)
        else:
            shutil.rmtree(parts)
        outside = np.sum([shard["outside"] for shard in found], axis=0) / max(1, counts["labels"])
        report = {
            "fingerprint": self._fingerprint,
            "model": config.model,
            "top_k": config.top_k,
            "shards": self.count,
            **counts,
            "mean_remainder": round(float(outside[-1]), 6),
            "sources": sources,
        }
        write_text(self._folder / "scores.json", json.dumps(report, indent=1) + "\n")
        _plot(outside, self._folder / "top_k.png")
        return (
            f"scores of {counts['labels']} labels in {counts['tokens']} tokens are in {done}; the {config.top_k} most "
            f"likely classes have {1 - outside[-1]:.1%} of the probability"
        )

    @property
    def _here(self) -> Path:
        """The folder of the shards: ``data`` when all are there."""
        done = self._folder / "data"
        return done if done.is_dir() else self._folder / "parts"

    def _path(self, index: int) -> Path:
        return self._here / f"{index:05d}-of-{self.count:05d}.parquet"


def _num_labels(piece: Piece) -> int:
    return int((piece.labels[1:] != IGNORE_INDEX).sum())


def _table(rows: list[Row], top_k: int, more: dict[str, Any]) -> Any:
    """The columns of a shard, with its counts and ``more`` in the metadata. Where the next token is no label, ids are
    -1 and log-probabilities -inf."""
    ids = [np.where(row.is_scored[:, None], row.ids, -1).astype(np.int32) for row in rows]
    log_probs = [np.where(row.is_scored[:, None], row.log_probs, -np.inf).astype(np.float32) for row in rows]
    remainder = [np.where(row.is_scored, row.remainder, 1.0).astype(np.float32) for row in rows]
    outside = np.zeros(top_k)
    for row in rows:
        outside += (1.0 - np.exp(row.log_probs[row.is_scored], dtype=np.float64).cumsum(1)).sum(0)
    labels = [row.piece.labels if row.piece.is_conversation else None for row in rows]
    columns = {
        "input_ids": pa.array([row.piece.ids for row in rows], pa.list_(pa.int32())),
        "labels": pa.array(labels, pa.list_(pa.int32())),
        "top_k_ids": _matrices(ids, pa.int32(), top_k),
        "top_k_log_probs": _matrices(log_probs, pa.float32(), top_k),
        "remainder": pa.array(remainder, pa.list_(pa.float32())),
    }
    counts = {
        "rows": len(rows),
        "tokens": sum(len(row.piece.ids) for row in rows),
        "labels": sum(int(row.is_scored.sum()) for row in rows),
        "outside": outside.tolist(),
        **more,
    }
    return pa.table(columns).replace_schema_metadata({COUNTS: json.dumps(counts)})


def _matrices(values: list[NDArray[Any]], dtype: Any, top_k: int) -> Any:
    offsets = np.concatenate([[0], np.cumsum([len(value) for value in values])])
    none = np.zeros(0, dtype.to_pandas_dtype())
    flat = pa.array(np.concatenate([none, *(value.reshape(-1) for value in values)]), dtype)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.FixedSizeListArray.from_arrays(flat, top_k))


def _counts_of(path: Path) -> dict[str, Any]:
    """Reads the counts of a shard from its metadata.

    Raises:
        LigerDistError: the file is damaged or no shard.
    """
    try:
        counts: dict[str, Any] = json.loads(parquet.read_schema(path).metadata[COUNTS])
    except (OSError, pa.ArrowException, KeyError, TypeError) as error:
        raise LigerDistError(
            f"{path} is damaged, or no file that liger-dist score wrote ({error!r}); remove it and start again, then "
            "it is written."
        ) from error
    return counts


def _plot(outside: NDArray[np.float64], path: Path) -> None:
    """Draws how much probability smaller ``--top_k`` of the training would leave out."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(np.arange(1, len(outside) + 1), outside.clip(min=1e-9))
    axes.set(xlabel="k", ylabel="mean probability outside the k most likely classes", xscale="log", yscale="log")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
