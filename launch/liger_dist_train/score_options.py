"""Declares the options of ``liger-dist score``. Imports no torch, so that ``--help`` is fast."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, Optional

from .options import TrainOptions


def _as_in_training(name: str, default: Any = MISSING) -> Any:
    """Makes a field as :class:`TrainOptions` has it."""
    found = TrainOptions.__dataclass_fields__[name]
    if default is not MISSING or found.default is not MISSING:
        return field(default=found.default if default is MISSING else default, metadata=found.metadata)
    return field(default_factory=found.default_factory, metadata=found.metadata)


@dataclass(frozen=True)
class ScoreOptions:
    """Writes the most likely tokens of a model for each token of the data, to distil from with liger-dist train."""

    model: str = _as_in_training("model")
    tokenizer: Optional[str] = _as_in_training("tokenizer")
    chat_template: Optional[str] = _as_in_training("chat_template")
    chat_template_kwargs: Optional[str] = _as_in_training("chat_template_kwargs")
    data: list[str] = _as_in_training("data")
    text_column: str = _as_in_training("text_column")
    messages_column: str = _as_in_training("messages_column")
    train_on: Literal["assistant", "last_turn", "all"] = _as_in_training("train_on")
    split_special_tokens: bool = _as_in_training("split_special_tokens")
    max_bad_rows: float = _as_in_training("max_bad_rows")
    truncate: bool = _as_in_training("truncate")
    num_proc: int = _as_in_training("num_proc")
    output_dir: str = _as_in_training("output_dir", "runs/scores")
    cache_dir: str = _as_in_training("cache_dir")
    top_k: int = field(default=64, metadata={"help": "most likely classes of each token that are written"})
    sequence_length: int = _as_in_training("sequence_length")
    batch_size: int = field(default=8, metadata={"help": "sequences that each rank computes at a time"})
    dtype: Literal["float32", "bfloat16"] = field(
        default="bfloat16", metadata={"help": "of weights and compute; logits are fp32"}
    )
    memory_budget: Optional[int] = _as_in_training("memory_budget")
    attention: Optional[str] = _as_in_training("attention")
    layer_kernels: bool = _as_in_training("layer_kernels")
    seed: int = field(default=0, metadata={"help": "of the weights of a preset"})
    stall_timeout: float = field(
        default=900.0, metadata={"help": "seconds without a batch until the watchdog names the stuck rank; 0 for none"}
    )
    overwrite: bool = field(
        default=False, metadata={"help": "remove scores of other data, models or options from output_dir"}
    )
