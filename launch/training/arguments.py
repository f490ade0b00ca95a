"""What a run is made of: one dataclass, from the command line, a YAML file, or both."""

from __future__ import annotations

import contextlib
import dataclasses
import math
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


LEAST_VOCABULARY = 260


# Optional[...] rather than "... | None": the parser of transformers reads the former on every Python we support.
@dataclass(frozen=True)
class TrainArguments:
    """Trains a causal language model with liger_dist."""

    model: str = option("tiny", "preset (tiny, small, 160m, 1b, 8b), folder of a pretrained model, or config.json")
    data: list[str] = option(
        [], "files or folders (.txt .md .py .json .jsonl .parquet) or a saved dataset; none for Python's own sources"
    )
    text_column: str = option("text", "column that holds plain text")
    messages_column: str = option("messages", "column that holds chat turns; only assistant turns are learnt")
    tokenizer: Optional[str] = option(
        None,
        "folder with a tokenizer; default: the one in the folder of a pretrained model, else a byte-level BPE trained "
        "on the data",
    )
    vocab_size: int = option(4096, "size of the trained BPE")
    output_dir: str = option("runs/train", "where everything is written")
    cache_dir: str = option("runs/cache", "where tokenizers and tokenised data are kept between runs")

    strategy: Optional[Literal["none", "ddp", "fsdp1", "fsdp2", "tp", "deepspeed"]] = option(
        None, "fsdp2 where it is left out and several processes run"
    )
    dp_replicate: Optional[int] = option(None, "fsdp1, fsdp2: replicas of the model (HSDP); default: 1")
    dp_shard: Optional[int] = option(None, "fsdp1, fsdp2: processes that share a replica; default: all that remain")
    tp: Optional[int] = option(None, "fsdp2, tp: processes that share the head's rows and see the same tokens")
    deepspeed: Optional[str] = option(None, "deepspeed: its JSON, such as launch/deepspeed/zero3.json")
    fused_loss: bool = option(True, "compute the loss in the head; false trains with the model's own, to compare")
    lm_head: Literal["gather", "vocab_parallel"] = option(
        "gather", "fsdp2: all-gather lm_head's weight for the loss, or keep row shards and exchange the tokens"
    )
    memory_budget: Optional[int] = option(None, "bytes of the buffer for one chunk of logits; default: 1 GiB")
    dtype: Literal["float32", "bfloat16"] = option("float32", "compute dtype; masters and optimiser are fp32")
    activation_checkpointing: bool = option(False, "recompute layers in the backward")
    compile: bool = option(False, "compile every decoder layer; they then keep their own code instead of our kernels")
    layer_kernels: bool = option(True, "compute norms, gated MLPs and rotary embedding by kernels")
    attention: Optional[str] = option(None, "implementation that transformers knows, such as flash_attention_2")
    reshard_after_forward: bool = option(True, "fsdp1, fsdp2: free a layer's weights between forward and backward")
    cpu_offload: bool = option(False, "fsdp1, fsdp2: shards, gradients and optimiser state in host memory")

    steps: int = option(1000, "optimiser steps")
    sequence_length: int = option(512, "tokens of one packed sequence")
    attend_across_documents: bool = option(False, "let a sequence be one text: positions run on, attention is causal")
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
    checkpoint_every: int = option(200, "steps between checkpoints; one is written at the end; 0 for none at all")
    keep_checkpoints: int = option(3, "the newest so many are kept; 0 for all")
    async_checkpoints: bool = option(False, "write them beside the training; not with deepspeed")
    resume: bool = option(False, "continue from the newest whole checkpoint in output_dir, if there is one")
    overwrite: bool = option(False, "begin anew in an output_dir that has checkpoints, and remove them")
    stop_at_step: Optional[int] = option(None, "stop there with a checkpoint, as an interruption would")
    stall_timeout: float = option(900.0, "seconds without a step until the watchdog names who is stuck; 0 for none")
    profile_step: Optional[int] = option(None, "write a profiler trace of that step, trace-rank*.json")
    dry_run: bool = option(False, "print what each process would hold in memory, and allocate nothing")
    world_size: Optional[int] = option(None, "dry_run: how many processes; default: those that are running")
    sample_prompt: str = option("def ", "start of the final text sample")
    sample_tokens: int = option(80, "length of the final text sample; 0 for none")

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.stop_at_step is not None and self.stop_at_step < 0:
            raise LigerDistError(f"--stop_at_step is {self.stop_at_step}; expected 0 or more.")
        if self.resume and self.overwrite:
            raise LigerDistError("--resume and --overwrite are both true; go on from the checkpoints, or remove them.")
        if self.profile_step is not None and self.profile_step > self.steps:
            raise LigerDistError(f"--profile_step is {self.profile_step}; expected at most --steps, {self.steps}.")
        if self.tokenizer is None and self.vocab_size < LEAST_VOCABULARY:
            raise LigerDistError(
                f"--vocab_size is {self.vocab_size}; expected at least {LEAST_VOCABULARY}, bytes and special tokens."
            )
        if self.sample_tokens > 0 and not self.sample_prompt:
            raise LigerDistError("--sample_prompt is empty; give some text, or --sample_tokens 0 for no sample.")
        if self.world_size is not None and not self.dry_run:
            raise LigerDistError(f"--world_size is {self.world_size}; it is for --dry_run, torchrun starts processes.")
        if (self.strategy == "deepspeed") != (self.deepspeed is not None):
            raise LigerDistError(
                f"--strategy is {self.strategy} and --deepspeed is {self.deepspeed}; expected both or none: "
                "--strategy deepspeed --deepspeed launch/deepspeed/zero3.json"
            )
        if self.strategy == "deepspeed" and self.async_checkpoints:
            raise LigerDistError("--async_checkpoints is set, which DeepSpeed's checkpoints cannot do; leave it out.")
        if self.sequence_length < 2:
            raise LigerDistError(
                f"--sequence_length is {self.sequence_length}; expected at least 2, a token and the one it predicts."
            )

    def _check_ranges(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise LigerDistError(f"--{name} is {value}; expected a finite number.")
        positive = ("vocab_size", "steps", "batch_size", "accumulation_steps", "eval_every", "eval_batches")
        optional = ("dp_replicate", "dp_shard", "tp", "world_size", "profile_step", "memory_budget")
        for name in (*positive, *optional):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LigerDistError(f"--{name} is {value}; expected a number above 0.")
        for name in (
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "max_grad_norm",
            "adam_beta2",
            "min_learning_rate_ratio",
            "checkpoint_every",
            "keep_checkpoints",
            "stall_timeout",
            "sample_tokens",
        ):
            if getattr(self, name) < 0:
                raise LigerDistError(f"--{name} is {getattr(self, name)}; expected 0 or more.")
        if self.adam_beta2 >= 1 or self.min_learning_rate_ratio > 1:
            raise LigerDistError(
                f"--adam_beta2 is {self.adam_beta2} and --min_learning_rate_ratio {self.min_learning_rate_ratio}; "
                "expected less than 1, and at most 1."
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
        arguments, unknown = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
    if unknown:
        raise LigerDistError(f"{unknown[0]} is no option; expected those that --help lists.")
    assert isinstance(arguments, TrainArguments)
    return arguments


def _read_yaml(path: Path) -> list[str]:
    """The file as options of the command line, so that both are checked alike."""
    if not path.is_file():
        raise LigerDistError(f"the configuration file {path} does not exist; give a YAML file or --name value options.")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
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
