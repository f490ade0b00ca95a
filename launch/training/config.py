"""What a run is made of: one dataclass, from the command line, a YAML file, or both."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar

import yaml
from transformers import HfArgumentParser, SchedulerType

from liger_dist import LigerDistError


def option(default: Any, help: str) -> Any:
    """Makes a field with a help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def usable_cores() -> int:
    """Counts the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


WINDOW = 256


# Optional[...] rather than "... | None": the parser of transformers reads the former on every Python we support.
@dataclass(frozen=True)
class TrainConfig:
    """Trains a causal language model with liger_dist."""

    model: str = option("tiny", "preset (tiny, small, 160m, 1b, 8b), folder of a pretrained model, or config.json")
    tokenizer: Optional[str] = option(None, "folder with a tokenizer; default: the one in the folder of --model")
    chat_template: Optional[str] = option(None, "file with a Jinja template, instead of the tokenizer's own")
    data: list[str] = option([], "sources: files or folders (.txt .md .py .jsonl .json .csv .parquet), saved datasets")
    data_weights: list[float] = option(
        [], "shares of the sources in the sequences, or tokens of a stream; default: by their size"
    )
    eval_data: list[str] = option([], "held-out sources; default: --eval_fraction of --data")
    eval_fraction: float = option(0.05, "of the documents, held out where there is no --eval_data; 0 for none")
    text_column: str = option("text", "column with plain text")
    messages_column: str = option("messages", "column with chat turns (conversations, prompt and completion, too)")
    train_on_prompts: bool = option(False, "make prompts and user turns labels, too")
    max_bad_rows: int = option(0, "rows that cannot be trained on and are skipped and counted; more are an error")
    streaming: bool = option(False, "tokenise while training, instead of into --cache_dir before it; needs --steps")
    shuffle_window: int = option(WINDOW, "streaming: sequences that are packed and shuffled together")
    num_proc: int = option(usable_cores(), "processes that tokenise")
    output_dir: str = option("runs/train", "where everything is written")
    cache_dir: str = option("runs/cache", "where tokenised data is kept between runs")
    allow_changed_data: bool = option(False, "resume though the data differs from that of the checkpoint")

    strategy: Optional[Literal["none", "ddp", "fsdp1", "fsdp2", "tp", "deepspeed"]] = option(
        None, "default: fsdp2 where several processes run, otherwise none"
    )
    dp_replicate: Optional[int] = option(None, "fsdp1, fsdp2: replicas of the model (HSDP); default: 1")
    dp_shard: Optional[int] = option(None, "fsdp1, fsdp2: ranks that share a replica; default: all that remain")
    tp: Optional[int] = option(None, "fsdp2, tp: ranks that share lm_head's rows and see the same tokens")
    sp: Optional[int] = option(None, "fsdp2: ranks that hold shards of the same sequences")
    deepspeed: Optional[str] = option(None, "deepspeed: its JSON, such as launch/deepspeed/zero3.json")
    fused_loss: bool = option(True, "compute the loss in lm_head; false trains with the model's own, to compare")
    lm_head: Literal["gather", "vocab_parallel"] = option(
        "gather", "fsdp2: all-gather lm_head's weight for the loss, or keep row shards and exchange the tokens"
    )
    memory_budget: Optional[int] = option(
        None, "bytes of the buffer for one chunk of logits; default: 1 GiB, with LoRA 256 MiB"
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "compute dtype; weights and optimizer states are fp32")
    activation_checkpointing: bool = option(False, "recompute layers in the backward")
    offload_checkpoints: bool = option(False, "activation_checkpointing: keep the layers' inputs in host memory")
    mlp_tile_tokens: Optional[int] = option(None, "tokens that gated MLPs compute at a time, for long sequences: 8192")
    compile: bool = option(False, "compile every decoder layer from its own code, with the memory of our kernels")
    float8: Optional[Literal["tensorwise", "rowwise"]] = option(
        None,
        "fsdp2, bfloat16: compute the decoder's linear layers in float8, compiled; needs torchao and an H100 or newer",
    )
    layer_kernels: bool = option(True, "compute norms, gated MLPs and rotary embedding by kernels")
    attention: Optional[str] = option(None, "of transformers: sdpa, flash_attention_2 ...; default: liger_dist's")
    reshard_after_forward: bool = option(True, "fsdp1, fsdp2: free a layer's weights between forward and backward")
    cpu_offload: bool = option(False, "fsdp1, fsdp2: shards, gradients and optimizer states in host memory")

    teacher: Optional[str] = option(None, "model to distil from: as --model; its tokenizer is the student's")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = option("forward_kl", "of the student from the teacher")
    distillation_beta: float = option(0.5, "jsd: weight of the teacher in the mixture, between 0 and 1")
    distillation_temperature: float = option(1.0, "divisor of both models' logits in the divergence")
    hard_weight: float = option(0.0, "of the cross entropy of the labels beside the divergence, in [0, 1]")

    top_k: int = option(0, "soft labels: classes of each token read of what launch/score.py has written; 0 for none")
    soft_weight: float = option(
        1.0, "top_k: weight of the soft labels in the loss, in [0, 1]; the labels have the rest"
    )
    remainder: Literal["drop", "renormalize", "spread"] = option("drop", "top_k: the probability of all other classes")

    lora_rank: int = option(0, "train LoRA layers of this rank instead of the model; 0 for none")
    lora_alpha: float = option(16.0, "scale of the LoRA layers, over their rank")
    lora_dropout: float = option(0.0, "before the LoRA layers")
    lora_targets: list[str] = option(["all-linear"], "names of the linear layers; default: all but lm_head")
    dora: bool = option(False, "weight-decomposed LoRA")

    steps: Optional[int] = option(None, "optimizer steps; default: those of --epochs")
    epochs: Optional[float] = option(None, "passes over the data; default: 1 where --steps is left out")
    sequence_length: int = option(512, "tokens of one packed sequence")
    attend_across_documents: bool = option(False, "let a sequence be one text: positions and attention run on")
    batch_size: int = option(8, "sequences of one micro-batch on each rank")
    accumulate_unsharded: bool = option(
        False,
        "fsdp1, fsdp2: reduce gradients in the last micro-batch alone, and keep unsharded ones in fp32 until then",
    )
    global_batch_size: Optional[int] = option(
        None, "sequences of one optimizer step on all ranks, by gradient accumulation; default: one micro-batch each"
    )
    global_batch_tokens: Optional[int] = option(None, "the same in tokens")
    optimizer: Literal["adamw", "adamw_8bit"] = option("adamw", "adamw_8bit: states in 8 bits, by torchao")
    learning_rate: float = option(1e-3, "peak")
    lr_scheduler: str = option("cosine_with_min_lr", "of transformers: linear, cosine, constant_with_warmup ...")
    lr_scheduler_kwargs: Optional[str] = option(None, "more of its arguments, as JSON")
    min_learning_rate_ratio: float = option(0.1, "final over peak, for schedules that have it")
    warmup_steps: float = option(20, "of the schedule; below 1: share of all steps")
    weight_decay: float = option(0.1, "of matrices; vectors have none")
    no_weight_decay: list[str] = option([], "parts of names of further parameters without weight decay")
    adam_beta1: float = option(0.9, "of AdamW")
    adam_beta2: float = option(0.95, "of AdamW")
    adam_epsilon: float = option(1e-8, "of AdamW")
    max_grad_norm: float = option(1.0, "gradient clipping; 0 for none")
    seed: int = option(0, "of weights, dropout and data order")
    deterministic: bool = option(False, "let torch use deterministic algorithms alone, and fail where there is none")
    matmul_precision: Literal["highest", "high", "medium"] = option("highest", "of fp32 products; high: TF32")

    eval_every: int = option(50, "steps between evaluations on held-out data")
    eval_batches: int = option(8, "micro-batches of one evaluation on each rank; 0 for all held-out data")
    eval_only: bool = option(False, "evaluate, print the held-out loss, and end; with --resume true of a checkpoint")
    early_stopping_patience: int = option(0, "evaluations without a better held-out loss until the run ends; 0: never")
    keep_best: bool = option(False, "write a checkpoint at every best held-out loss, and keep the best one")
    checkpoint_every: int = option(200, "steps between checkpoints; one is written at the end; 0 for none at all")
    keep_checkpoints: int = option(3, "the newest so many are kept; 0 for all")
    async_checkpoints: bool = option(False, "write them beside the training; not with deepspeed")
    resume: bool = option(False, "continue from the newest complete checkpoint in output_dir, if there is one")
    resume_step: Optional[int] = option(None, "continue from the checkpoint of this step; later ones are put aside")
    overwrite: bool = option(False, "begin anew in an output_dir that has checkpoints, and remove them")
    stop_at_step: Optional[int] = option(None, "stop there with a checkpoint, as an interruption would")
    stall_timeout: float = option(900.0, "seconds without a step until the watchdog names the stuck rank; 0 for none")
    grace_seconds: Optional[float] = option(
        None,
        "from SIGTERM, SIGINT or SIGUSR1 to the end, checkpoint included; default: 10 less than torchrun's "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which is 120 in the launch files and otherwise 30",
    )
    log_every: int = option(1, "steps between lines in metrics.jsonl and the trackers")
    trackers: list[str] = option([], "tensorboard, wandb and others that Accelerate knows")
    run_name: str = option("liger_dist", "project of the trackers")
    gc_every: int = option(0, "steps between garbage collections, on all ranks together; 0: when Python likes")
    profile_step: Optional[int] = option(None, "write a profiler trace of that step, trace-rank*.json")
    dry_run: bool = option(False, "print what each rank would hold in memory, and allocate nothing")
    world_size: Optional[int] = option(None, "dry_run: how many ranks; default: those that are running")

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_choices()
        self._check_data()

    @property
    def lr_kwargs(self) -> dict[str, Any]:
        """``lr_scheduler_kwargs`` as a dict."""
        found: dict[str, Any] = json.loads(self.lr_scheduler_kwargs or "{}")
        return found

    def _check_data(self) -> None:
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise LigerDistError(
                f"--data_weights has {len(self.data_weights)} numbers and --data {len(self.data)} sources; expected "
                "one for each."
            )
        if self.data_weights and min(self.data_weights) <= 0:
            raise LigerDistError(f"--data_weights holds {min(self.data_weights)}; expected numbers above 0.")
        if self.steps is not None and self.epochs is not None:
            raise LigerDistError(f"--steps is {self.steps} and --epochs {self.epochs}; give one of them.")
        if self.dora and not self.lora_rank:
            raise LigerDistError("--dora is true but --lora_rank is 0; give the rank of the LoRA layers.")
        if self.streaming and self.steps is None and not self.eval_only:
            raise LigerDistError("--streaming is true, and the length of a stream is not known; give --steps.")
        if self.shuffle_window != WINDOW and not self.streaming:
            raise LigerDistError(
                f"--shuffle_window is {self.shuffle_window} but --streaming is false, where all data is shuffled; "
                "leave it out."
            )
        if self.global_batch_size is not None and self.global_batch_tokens is not None:
            raise LigerDistError(
                f"--global_batch_size is {self.global_batch_size} and --global_batch_tokens "
                f"{self.global_batch_tokens}; give one of them."
            )
        if (self.global_batch_tokens or 0) % self.sequence_length:
            raise LigerDistError(
                f"--global_batch_tokens is {self.global_batch_tokens}; expected a multiple of --sequence_length, "
                f"{self.sequence_length}."
            )

    def _check_choices(self) -> None:
        has_lora_options = (self.lora_alpha, self.lora_dropout, self.lora_targets) != (16.0, 0.0, ["all-linear"])
        if has_lora_options and not self.lora_rank:
            raise LigerDistError(
                "--lora_alpha, --lora_dropout or --lora_targets is given but --lora_rank is 0; give it."
            )
        if self.offload_checkpoints and not self.activation_checkpointing:
            raise LigerDistError(
                "--offload_checkpoints is true but --activation_checkpointing false, so that there are none; give both."
            )
        self._check_teacher()
        if self.mlp_tile_tokens and (self.compile or self.float8 or not self.layer_kernels):
            raise LigerDistError(
                f"--mlp_tile_tokens is {self.mlp_tile_tokens} but the layers keep their own code (--compile, --float8 "
                "or --layer_kernels false); leave one of them out."
            )
        if self.float8 and self.dtype != "bfloat16":
            raise LigerDistError(
                f"--float8 is {self.float8} and --dtype {self.dtype}; expected bfloat16, in which everything else is "
                "computed."
            )
        if (self.sp or 1) > 1 and (self.teacher is not None or self.top_k or not self.fused_loss):
            raise LigerDistError(
                f"--sp is {self.sp}, which has no distillation (--teacher, --top_k) and needs the fused loss; leave "
                "one of them out."
            )
        if self.resume_step is not None and not self.resume:
            raise LigerDistError(f"--resume_step is {self.resume_step} but --resume is false; give --resume true, too.")
        if self.resume and self.overwrite:
            raise LigerDistError("--resume and --overwrite are both true; go on from the checkpoints, or remove them.")
        if self.world_size is not None and not self.dry_run:
            raise LigerDistError(f"--world_size is {self.world_size}; it is for --dry_run, torchrun starts processes.")
        if self.dry_run and self.lora_rank:
            raise LigerDistError(
                f"--dry_run plans the training of all weights, but --lora_rank is {self.lora_rank}; leave it out, or "
                "measure a step (peak_memory_bytes in metrics.jsonl)."
            )
        if (self.strategy == "deepspeed") != (self.deepspeed is not None):
            raise LigerDistError(
                f"--strategy is {self.strategy} and --deepspeed is {self.deepspeed}; expected both or none: "
                "--strategy deepspeed --deepspeed launch/deepspeed/zero3.json"
            )
        if self.strategy == "deepspeed" and self.async_checkpoints:
            raise LigerDistError("--async_checkpoints is set, which DeepSpeed's checkpoints cannot do; leave it out.")
        schedules = [schedule.value for schedule in SchedulerType if schedule.value not in UNUSABLE_SCHEDULES]
        if self.lr_scheduler not in schedules:
            raise LigerDistError(f"--lr_scheduler is {self.lr_scheduler!r}; expected one of {', '.join(schedules)}.")
        try:
            self.lr_kwargs.items()
        except (ValueError, AttributeError) as error:
            raise LigerDistError(
                f"--lr_scheduler_kwargs is {self.lr_scheduler_kwargs!r}; expected a JSON object."
            ) from error
        has_held_out = bool(self.eval_data) or (self.eval_fraction > 0 and not self.streaming)
        if (self.early_stopping_patience or self.keep_best) and not has_held_out:
            raise LigerDistError("--early_stopping_patience and --keep_best need held-out data; give --eval_data.")
        if self.keep_best and not self.checkpoint_every:
            raise LigerDistError("--keep_best is true and --checkpoint_every 0, no checkpoint at all; leave one out.")

    def _check_teacher(self) -> None:
        given = (self.divergence, self.distillation_beta, self.distillation_temperature, self.hard_weight)
        if self.teacher is None and given != ("forward_kl", 0.5, 1.0, 0.0):
            raise LigerDistError(
                "--divergence, --distillation_beta, --distillation_temperature or --hard_weight is given but --teacher "
                "is not; give the model to distil from."
            )
        if self.teacher is not None and not self.fused_loss:
            raise LigerDistError("--teacher is given and --fused_loss is false, which has no divergence; leave it out.")
        if self.top_k and (self.teacher is not None or not self.fused_loss):
            raise LigerDistError(
                f"--top_k is {self.top_k} and --teacher {self.teacher}, --fused_loss {self.fused_loss}; expected the "
                "probabilities that a teacher has written, and the fused loss. Leave one of them out."
            )
        if not self.top_k and (self.soft_weight, self.remainder) != (1.0, "drop"):
            raise LigerDistError(
                f"--soft_weight is {self.soft_weight} and --remainder {self.remainder}, but --top_k is 0; give it."
            )
        if not 0 < self.distillation_beta < 1 or (self.distillation_beta != 0.5 and self.divergence != "jsd"):
            raise LigerDistError(
                f"--distillation_beta is {self.distillation_beta} and --divergence {self.divergence}; expected a "
                "number between 0 and 1, with --divergence jsd."
            )

    def _check_ranges(self) -> None:
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise LigerDistError(f"--{name} is {value}; expected a finite number.")
            least = MINIMA.get(name)
            if least is not None and value < least:
                expected = f"{least} or more" if least != ABOVE_ZERO else "a number above 0"
                raise LigerDistError(f"--{name} is {value}; expected {expected}.")
        for name, limit in {"adam_beta1": 1, "adam_beta2": 1, "eval_fraction": 1, "lora_dropout": 1}.items():
            if getattr(self, name) >= limit:
                raise LigerDistError(f"--{name} is {getattr(self, name)}; expected less than {limit}.")
        for name in ("min_learning_rate_ratio", "hard_weight", "soft_weight"):
            if getattr(self, name) > 1:
                raise LigerDistError(f"--{name} is {getattr(self, name)}; expected at most 1.")


ABOVE_ZERO = 1e-300
MINIMA: dict[str, float] = {
    **dict.fromkeys(("steps", "batch_size", "global_batch_size", "global_batch_tokens", "eval_every", "num_proc"), 1),
    **dict.fromkeys(
        ("dp_replicate", "dp_shard", "tp", "sp", "world_size", "profile_step", "memory_budget", "mlp_tile_tokens"), 1
    ),
    **dict.fromkeys(("shuffle_window", "log_every", "resume_step"), 1),
    **dict.fromkeys(("epochs", "lora_alpha", "distillation_temperature"), ABOVE_ZERO),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"), 0),
    **dict.fromkeys(("lora_rank", "lora_dropout", "early_stopping_patience", "learning_rate", "hard_weight"), 0),
    **dict.fromkeys(("top_k", "soft_weight"), 0),
    **dict.fromkeys(("min_learning_rate_ratio", "checkpoint_every", "keep_checkpoints", "stall_timeout", "seed"), 0),
    **dict.fromkeys(("gc_every", "grace_seconds", "eval_batches", "eval_fraction", "max_bad_rows", "stop_at_step"), 0),
    "sequence_length": 2,
}
"""the least that an option may be; 2 tokens are a token and the one it predicts"""
ELSEWHERE = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulation_steps"), "it follows from --global_batch_size and --batch_size"
    ),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "it is --batch_size here"),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), "it is --epochs here"),
    **dict.fromkeys(("max_steps", "num_iterations"), "it is --steps here"),
    **dict.fromkeys(("max_length", "max_seq_length", "cutoff_len", "seq_len"), "it is --sequence_length here"),
    **dict.fromkeys(("packing", "sample_packing", "group_by_length"), "sequences are always packed, by best fit"),
    **dict.fromkeys(("model_name_or_path", "base_model"), "it is --model here"),
    **dict.fromkeys(("max_samples", "dataset_shard_num"), "give the files that are to be read"),
    **dict.fromkeys(("dataset_name", "model_revision"), "nothing is loaded from a hub; give a folder"),
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "nothing is sent to a hub; upload what launch/export.py writes"),
    **dict.fromkeys(("fp16", "bf16"), "--dtype bfloat16 computes in bf16; fp16 would need a scaled loss"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_bit"), "weights stay in fp32, sharded; see --cpu_offload"
    ),
    **dict.fromkeys(("save_only_model", "save_model_only"), "launch/export.py writes the weights alone"),
    **dict.fromkeys(("pipeline_parallel_degree", "pipeline_model_parallel_size"), "it shards with --strategy fsdp2"),
    **dict.fromkeys(("freeze_trainable_layers", "unfrozen_parameters"), "train few parameters with --lora_rank"),
    "auto_find_batch_size": "--dry_run true plans the memory before a run",
    "neftune_noise_alpha": "it belongs into a training loop with liger_dist.wrap",
    "loss_type": "the loss is cross entropy; others belong into a training loop with liger_dist.wrap",
    "activation_offloading": "--activation_checkpointing true with --offload_checkpoints true",
    "use_muon": "it needs full matrices, which shards are not; take --optimizer adamw",
    "report_to": "it is --trackers here",
}
"""options of other programs that this one has in another way, or not; with the sentence that says so"""
UNUSABLE_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""of transformers: they go by a metric"""


Config = TypeVar("Config")


def parse(argv: list[str]) -> TrainConfig:
    """Parses the options of a training run, as :func:`parse_as`."""
    return parse_as(argv, TrainConfig)


def parse_as(argv: list[str], kind: type[Config]) -> Config:
    """Parses ``[FILE.yaml] [--name value ...]`` into a dataclass; the command line wins over the file.

    Raises:
        LigerDistError: the file does not exist, or a name is no option.
        SystemExit: the command line cannot be read; only rank 0 says why.
    """
    parser = HfArgumentParser(kind, description=kind.__doc__, allow_abbrev=False)
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if argv and not argv[0].startswith("-"):
        argv = [*_read_yaml(Path(argv[0]), known), *argv[1:]]
    quiet = int(os.environ.get("RANK", "0")) != 0
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere if quiet else sys.stderr):
        config, unknown = parser.parse_args_into_dataclasses(args=argv, return_remaining_strings=True)
    if unknown:
        raise LigerDistError(f"{unknown[0]} is no option{_nearest(unknown[0].lstrip('-'), known)}.")
    assert isinstance(config, kind)
    return config


ONE_TIME = ("overwrite", "resume", "resume_step", "stop_at_step", "profile_step", "allow_changed_data", "eval_only")
"""options of one start of a run"""


def to_yaml(config: TrainConfig) -> str:
    """Writes the configuration as text that :func:`parse` reads, without what a run was asked for once."""
    values = {name: value for name, value in dataclasses.asdict(config).items() if value is not None}
    values = {name: value for name, value in values.items() if name not in ONE_TIME}
    text: str = yaml.safe_dump(values, sort_keys=False)
    return text


def _nearest(name: str, known: list[str]) -> str:
    if name.replace("-", "_") in ELSEWHERE:
        return f": {ELSEWHERE[name.replace('-', '_')]}"
    found = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    return f"; the nearest is --{found[0]}" if found else "; expected those that --help lists"


def _read_yaml(path: Path, known: list[str]) -> list[str]:
    """Turns the file into options of the command line, so that both are checked alike."""
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
    options: list[str] = []
    for name, value in values.items():
        if name not in known:
            raise LigerDistError(f"{path} sets {name!r}, which is no option{_nearest(str(name), known)}.")
        if value is None or value == []:
            continue
        if isinstance(value, dict):
            value = json.dumps(value)
        options += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return options
