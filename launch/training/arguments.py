"""What a run is made of: one dataclass, from the command line, a YAML file, or both."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

import yaml
from transformers import HfArgumentParser

from liger_dist import LigerDistError


def option(default: Any, help: str) -> Any:
    """A field with its help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


# Optional[...] rather than "... | None": the parser of transformers reads the former on every Python we support.
@dataclass(frozen=True)
class TrainArguments:
    """Trains a causal language model with liger_dist."""

    model: str = option("tiny", "preset (tiny, small, 160m, 1b, 8b), folder of a pretrained model, or config.json")
    data: list[str] = option(
        [], "files or folders (.txt .md .py .json .jsonl .parquet) or a saved dataset; default: Python's"
    )
    text_column: str = option("text", "column that holds plain text")
    messages_column: str = option("messages", "column that holds chat turns; only assistant turns are learnt")
    tokenizer: Optional[str] = option(None, "folder with a tokenizer; default: a byte-level BPE trained on the data")
    vocab_size: int = option(4096, "size of the trained BPE")
    output_dir: str = option("runs/train", "where everything is written")
    cache_dir: str = option("runs/cache", "where tokenizers and tokenised data are kept between runs")

    strategy: Optional[Literal["none", "ddp", "fsdp2"]] = option(None, "default: fsdp2 for several processes")
    mesh: list[int] = option([], "fsdp2: one size (shard) or two (replicate, shard); default: all processes")
    fused_loss: bool = option(True, "compute the loss in the head; false trains with the model's own, to compare")
    head: Literal["auto", "gather", "vocab_parallel"] = option(
        "auto", "fsdp2: gather the head's weight for the loss, or keep its rows and let the tokens travel"
    )
    memory_budget: Optional[int] = option(None, "bytes of the buffer for one chunk of logits; default: 1 GiB")
    dtype: Literal["float32", "bfloat16"] = option("float32", "compute dtype; masters and optimiser are fp32")
    activation_checkpointing: bool = option(False, "recompute layers in the backward")
    reshard_after_forward: bool = option(True, "fsdp2: free a layer's weights between forward and backward")
    cpu_offload: bool = option(False, "fsdp2: shards, gradients and optimiser state in host memory")

    steps: int = option(1000, "optimiser steps")
    sequence_length: int = option(512, "tokens of one packed sequence")
    batch_size: int = option(8, "sequences of one micro-batch on each rank")
    accumulation_steps: int = option(1, "micro-batches of one optimiser step")
    learning_rate: float = option(1e-3, "peak")
    min_learning_rate_ratio: float = option(0.1, "final over peak")
    warmup_steps: int = option(20, "linear warm-up, then cosine")
    weight_decay: float = option(0.1, "of matrices; vectors have none")
    adam_beta2: float = option(0.95, "of AdamW")
    max_grad_norm: float = option(1.0, "gradient clipping; 0 for none")
    seed: int = option(0, "of weights and data order")

    eval_every: int = option(50, "steps between evaluations on held-out text")
    eval_batches: int = option(8, "micro-batches of one evaluation on each rank")
    checkpoint_every: int = option(200, "steps between checkpoints; one is always written at the end")
    resume: bool = option(False, "continue from the latest checkpoint in output_dir, if there is one")
    stop_at_step: Optional[int] = option(None, "stop there with a checkpoint, as an interruption would")
    sample_prompt: str = option("def ", "start of the final text sample")
    sample_tokens: int = option(80, "length of the final text sample")

    def __post_init__(self) -> None:
        for name in ("vocab_size", "steps", "batch_size", "accumulation_steps", "eval_every", "eval_batches"):
            if getattr(self, name) < 1:
                raise LigerDistError(f"--{name} is {getattr(self, name)}; expected a number above 0.")
        if self.checkpoint_every < 1:
            raise LigerDistError(f"--checkpoint_every is {self.checkpoint_every}; expected a number above 0.")
        for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "min_learning_rate_ratio"):
            if getattr(self, name) < 0:
                raise LigerDistError(f"--{name} is {getattr(self, name)}; expected 0 or more.")
        if self.sample_tokens < 1 or not self.sample_prompt:
            raise LigerDistError(
                "--sample_tokens and --sample_prompt are for a text sample; expected at least one token."
            )
        if self.sequence_length < 2:
            raise LigerDistError(
                f"--sequence_length is {self.sequence_length}; expected at least 2, a token and the one it predicts."
            )


def parse(argv: list[str]) -> TrainArguments:
    """``[FILE.yaml] [--name value ...]``; the command line wins over the file.

    Raises:
        LigerDistError: the file does not exist or has a key that is no option.
        SystemExit: the command line cannot be read; only rank 0 says why.
    """
    parser = HfArgumentParser(TrainArguments, description=TrainArguments.__doc__)
    if argv and not argv[0].startswith("-"):
        argv = [*_read_yaml(Path(argv[0])), *argv[1:]]
    quiet = int(os.environ.get("RANK", "0")) != 0
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere if quiet else sys.stderr):
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
    assert isinstance(arguments, TrainArguments)
    return arguments


def _read_yaml(path: Path) -> list[str]:
    """The file as options of the command line, so that both are checked alike."""
    if not path.is_file():
        raise LigerDistError(f"the configuration file {path} does not exist; give a YAML file or --name value options.")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise LigerDistError(f"the configuration file {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise LigerDistError(
            f"the configuration file {path} holds a {type(values).__name__}; expected name: value lines."
        )
    known = [field.name for field in dataclasses.fields(TrainArguments)]
    options: list[str] = []
    for name, value in values.items():
        if name not in known:
            raise LigerDistError(f"{path} sets {name!r}, which is no option; expected names among {', '.join(known)}.")
        if value is None or value == []:
            continue
        options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return options
