"""Checks the options of a run against each other (:func:`parse`); a new option is declared in :mod:`.options`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import SchedulerType

from liger_dist import LigerDistError

from .json_text import parse_json
from .options import EVAL_FRACTION, MIN_RATIO, PRESETS, WINDOW, TrainOptions, is_hub_name
from .parser import parse_as


@dataclass(frozen=True)
class TrainConfig(TrainOptions):
    """Trains a causal language model with liger_dist."""

    def __post_init__(self) -> None:
        on_gpu = torch.cuda.is_available()
        pretrained = 2e-4 if self.lora_rank else 2e-5
        defaults = {
            "dtype": "bfloat16" if on_gpu else "float32",
            "matmul_precision": "high" if on_gpu else "highest",
            "learning_rate": pretrained if self._is_pretrained() else 1e-3,
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._check_ranges()
        self._check_choices()
        self._check_experts()
        self._check_mtp()
        self._check_data()
        self._check_effect()

    def _is_pretrained(self) -> bool:
        path = Path(self.model)
        return self.model not in PRESETS and (path.is_dir() or (is_hub_name(self.model) and not path.exists()))

    @property
    def lr_kwargs(self) -> dict[str, Any]:
        """``lr_scheduler_kwargs`` as a dict."""
        found: dict[str, Any] = parse_json(self.lr_scheduler_kwargs or "{}")
        return found

    @property
    def mtp_options(self) -> dict[str, Any] | None:
        """``mtp`` as arguments of :class:`liger_dist.mtp.MultiTokenPrediction`; None without it."""
        if self.mtp is None:
            return None
        found: dict[str, Any] = {"depth": 1} | parse_json(self.mtp)
        return found

    def _check_mtp(self) -> None:
        try:
            options = self.mtp_options
        except (ValueError, TypeError):
            options = {"": self.mtp}
        if options is None:
            return
        depth, unknown = options.get("depth"), options.keys() - {"depth", "weight", "main_weight"}
        weights, main = options.get("weight", 0.3), options.get("main_weight", 1.0)
        weights = weights if isinstance(weights, list) else [weights]
        are_numbers = all(isinstance(one, int | float) for one in (*weights, main))
        is_depth = isinstance(depth, int) and not isinstance(depth, bool) and depth > 0
        if unknown or not is_depth or not are_numbers or min(weights, default=0) <= 0 or main < 0:
            raise LigerDistError(
                f"--mtp is {self.mtp!r}; expected depth, weight and main_weight, such as "
                """'{"depth": 2, "weight": 0.1}'."""
            )
        if (self.sp or 1) > 1:
            raise LigerDistError(
                f"--mtp is given and --sp is {self.sp}, with which this program trains no further tokens; leave one of "
                "them out."
            )

    def _has_held_out(self) -> bool:
        has_data = bool(self.eval_data) or (self.eval_fraction > 0 and not self.streaming)
        return has_data and (self.eval_every > 0 or self.eval_only)

    def _check_data(self) -> None:
        if self.data_weights and len(self.data_weights) != len(self.data):
            raise LigerDistError(
                f"--data_weights has {len(self.data_weights)} numbers and --data {len(self.data)} sources; expected "
                "one for each."
            )
        for weight in self.data_weights:
            if not 0 < weight < math.inf:
                raise LigerDistError(f"--data_weights holds {weight}; expected finite numbers above 0.")
        if self.steps is not None and self.epochs is not None:
            raise LigerDistError(f"--steps is {self.steps} and --epochs {self.epochs}; give one of them.")
        if self.streaming and self.steps is None and not self.eval_only:
            raise LigerDistError("--streaming is true, and the length of a stream is not known; give --steps.")
        if self.shuffle_window != WINDOW and not self.streaming:
            raise LigerDistError(
                f"--shuffle_window is {self.shuffle_window} but --streaming is false, where all data is shuffled; "
                "leave it out."
            )
        if self.streaming and 0 < self.max_bad_rows < 1:
            raise LigerDistError(
                f"--max_bad_rows is {self.max_bad_rows}, a share of all rows, and --streaming is true, where their "
                "number is not known; give a number of rows."
            )
        if self.max_bad_rows >= 1 and self.max_bad_rows % 1:
            raise LigerDistError(
                f"--max_bad_rows is {self.max_bad_rows}; expected a number of rows, or a share below 1."
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

    def _check_lora(self) -> None:
        if self.dora and not self.lora_rank:
            raise LigerDistError("--dora is true but --lora_rank is 0; give the rank of the LoRA layers.")
        has_lora_options = (self.lora_alpha, self.lora_dropout, self.lora_targets) != (16.0, 0.0, ["all-linear"])
        if has_lora_options and not self.lora_rank:
            raise LigerDistError(
                "--lora_alpha, --lora_dropout or --lora_targets is given but --lora_rank is 0; give it."
            )
        if "all-linear" in self.lora_targets and len(self.lora_targets) > 1:
            raise LigerDistError(
                f"--lora_targets is {' '.join(self.lora_targets)}; expected all-linear alone, or names of layers."
            )
        if self.frozen == "replicate" and not self.lora_rank:
            raise LigerDistError("--frozen is replicate but --lora_rank is 0, and no weight is frozen; leave it out.")

    def _check_four_bit(self) -> None:
        if not self.load_in_4bit:
            return
        if not self.lora_rank:
            raise LigerDistError(
                "--load_in_4bit is true but --lora_rank is 0, and weights of 4 bits do not train; give the rank of the "
                "LoRA layers."
            )
        if self.strategy in ("deepspeed", "tp") or (self.strategy == "fsdp1" and self.frozen == "shard"):
            raise LigerDistError(
                f"--load_in_4bit is true but --strategy is {self.strategy}, which is not combined with "
                "4-bit weights; use none, ddp, fsdp2, or fsdp1 with --frozen replicate."
            )
        if self.float8 is not None or self.cpu_offload or self.compile:
            raise LigerDistError(
                f"--load_in_4bit is true with --float8 {self.float8}, --cpu_offload {self.cpu_offload} and --compile "
                f"{self.compile}, none of which works on weights of 4 bits; leave them out."
            )

    def _check_dry_run(self) -> None:
        for name in ("world_size", "gpu"):
            given = getattr(self, name)
            if given is not None and not self.dry_run:
                raise LigerDistError(f"--{name} is {given}; it is for --dry_run, a run has the GPUs it is started on.")

    def _check_choices(self) -> None:
        self._check_lora()
        self._check_four_bit()
        if self.offload_checkpoints and not self.activation_checkpointing:
            raise LigerDistError(
                "--offload_checkpoints is true but --activation_checkpointing false, so that there are none; give both."
            )
        self._check_teacher()
        self._check_optimizer()
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
        if self.z_loss and (self.teacher is not None or not self.fused_loss):
            raise LigerDistError(
                f"--z_loss is {self.z_loss}, which needs the fused loss and no --teacher; leave one of them out."
            )
        if self.resume_step is not None and not self.resume:
            raise LigerDistError(f"--resume_step is {self.resume_step} but --resume is false; give --resume true, too.")
        if self.resume and self.overwrite:
            raise LigerDistError("--resume and --overwrite are both true; go on from the checkpoints, or remove them.")
        self._check_dry_run()
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
        if (self.early_stopping_patience or self.keep_best) and not self._has_held_out():
            raise LigerDistError("--early_stopping_patience and --keep_best need held-out data; give --eval_data.")
        if self.keep_best and not self.checkpoint_every:
            raise LigerDistError("--keep_best is true and --checkpoint_every 0, no checkpoint at all; leave one out.")

    def _check_experts(self) -> None:
        """Refuses options that do not fit a mixture."""
        if self.router_bias_rate and self.lora_rank:
            raise LigerDistError(
                f"--router_bias_rate is {self.router_bias_rate} with --lora_rank {self.lora_rank}, whose checkpoints "
                "have no biases of routers; leave one of them out."
            )
        if (self.ep or 1) > 1 and self.load_in_4bit:
            raise LigerDistError(
                f"--ep is {self.ep} with --load_in_4bit true, whose blocks belong to no expert; leave one of them out."
            )
        if (self.ep or 1) > 1 and not self.layer_kernels:
            raise LigerDistError(
                f"--ep is {self.ep} with --layer_kernels false, and only those layers send tokens to other ranks; "
                "leave one of them out."
            )

    def _check_optimizer(self) -> None:
        if self.optimizer == "muon" and (self.lora_rank or self.strategy in ("fsdp1", "deepspeed")):
            raise LigerDistError(
                f"--optimizer is muon, with --lora_rank {self.lora_rank} and --strategy {self.strategy}; expected the "
                "decoder's matrices as such: no LoRA, and none, ddp, fsdp2 or tp. Take --optimizer adamw."
            )
        if self.strategy == "deepspeed" and self.max_skipped_steps:
            raise LigerDistError(
                f"--max_skipped_steps is {self.max_skipped_steps} and --strategy deepspeed, whose step cannot be "
                "skipped; leave it out."
            )
        if self.ema_decay and self.strategy in ("fsdp1", "deepspeed"):
            raise LigerDistError(
                f"--ema_decay is {self.ema_decay} and --strategy {self.strategy}, which keeps no tensor of each "
                "parameter; leave it out, or use fsdp2."
            )

    def _check_effect(self) -> None:
        """Raises:
        LigerDistError: an option is given that this run would not read.
        """
        for field in fields(TrainOptions):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            value = getattr(self, field.name)
            is_read, reason = READ_IF.get(field.name, (None, ""))
            if is_read is not None and value != default and not is_read(self):
                raise LigerDistError(f"--{field.name} is {_shown(value)}, but {reason}; leave one of them out.")
        if not self.sample_prompts and (self.sample_tokens, self.sample_chat) != (64, False):
            raise LigerDistError(
                f"--sample_tokens is {self.sample_tokens} and --sample_chat {self.sample_chat}, but there are no "
                "--sample_prompts; give some."
            )
        if self.sample_prompts and not self._has_held_out():
            raise LigerDistError(
                "--sample_prompts are continued at each evaluation, and there is no held-out data; give --eval_data."
            )
        if self.sample_prompts and (self.sp or 1) > 1:
            raise LigerDistError(
                f"--sample_prompts are given and --sp is {self.sp}, which generates no text; leave one out."
            )
        if self.eval_fraction not in (0, EVAL_FRACTION) and (self.eval_data or self.streaming):
            other = "--eval_data names what is held out" if self.eval_data else "--streaming is true, where none is"
            raise LigerDistError(
                f"--eval_fraction is {self.eval_fraction}, the share of --data that is held out, but {other}; leave it "
                "out."
            )
        if self.min_learning_rate_ratio != MIN_RATIO and self.lr_scheduler not in RATIO_OF:
            raise LigerDistError(
                f"--min_learning_rate_ratio is {self.min_learning_rate_ratio}, which --lr_scheduler "
                f"{self.lr_scheduler} does not have; leave it out, or take one of {', '.join(RATIO_OF)}."
            )
        for name in ("steps", "stop_at_step"):
            last = getattr(self, name)
            if self.profile_step is not None and last is not None and self.profile_step > last:
                raise LigerDistError(
                    f"--profile_step is {self.profile_step} and --{name} {last}; expected a step of the run."
                )
        if self.stop_at_step is not None and self.steps is not None and self.stop_at_step > self.steps:
            raise LigerDistError(
                f"--stop_at_step is {self.stop_at_step} and --steps {self.steps}; expected a step of the run."
            )

    def _check_teacher(self) -> None:
        given = (self.divergence, self.distillation_beta, self.distillation_temperature, self.hard_weight)
        if self.teacher is None and given != ("forward_kl", 0.5, 1.0, 0.0):
            raise LigerDistError(
                "--divergence, --distillation_beta, --distillation_temperature or --hard_weight is given but --teacher "
                "is not; give the model to distil from."
            )
        if self.teacher is not None and self.hard_weight == 1:
            raise LigerDistError(
                "--hard_weight is 1 with --teacher, whose probabilities would not count; give less, or no teacher."
            )
        if self.top_k and self.soft_weight == 0:
            raise LigerDistError(
                f"--soft_weight is 0 with --top_k {self.top_k}, whose probabilities would not count; give more, or no "
                "--top_k."
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
        if self.seed >= 2**63:
            raise LigerDistError(f"--seed is {self.seed}; expected less than 2**63.")
        for name in ("adam_beta1", "adam_beta2", "eval_fraction", "lora_dropout", "ema_decay"):
            if getattr(self, name) >= 1:
                raise LigerDistError(f"--{name} is {getattr(self, name)}; expected less than 1.")
        for name in ("min_learning_rate_ratio", "hard_weight", "soft_weight"):
            if getattr(self, name) > 1:
                raise LigerDistError(f"--{name} is {getattr(self, name)}; expected at most 1.")


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


READ_IF: dict[str, tuple[Callable[[TrainConfig], bool], str]] = {
    "eval_data": (lambda c: c.eval_every > 0 or c.eval_only, "--eval_every is 0, so that nothing is evaluated"),
    "run_name": (lambda c: bool(c.trackers), "--trackers names none"),
    "no_weight_decay": (lambda c: c.weight_decay > 0, "--weight_decay is 0"),
    "warmup_steps": (lambda c: c.lr_scheduler != "constant" or not c.warmup_steps, "--lr_scheduler is constant"),
    "data_weights": (lambda c: len(c.data) != 1, "--data names one source"),
    "allow_changed_data": (lambda c: c.resume, "--resume is false"),
}
"""options that only some runs read: whether this one does, and why not"""
ABOVE_ZERO = 1e-300
MINIMA: dict[str, float] = {
    **dict.fromkeys(("steps", "batch_size", "global_batch_size", "global_batch_tokens", "num_proc"), 1),
    "eval_every": 0,
    **dict.fromkeys(
        (
            "dp_replicate",
            "dp_shard",
            "tp",
            "sp",
            "ep",
            "layers_per_unit",
            "world_size",
            "profile_step",
            "memory_budget",
            "mlp_tile_tokens",
        ),
        1,
    ),
    **dict.fromkeys(("shuffle_window", "log_every", "resume_step", "sample_tokens"), 1),
    **dict.fromkeys(("epochs", "lora_alpha", "distillation_temperature"), ABOVE_ZERO),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", "adam_epsilon"), 0),
    **dict.fromkeys(("max_skipped_steps", "ema_decay", "router_bias_rate"), 0),
    **dict.fromkeys(("lora_rank", "lora_dropout", "early_stopping_patience", "learning_rate", "hard_weight"), 0),
    **dict.fromkeys(("top_k", "soft_weight", "z_loss"), 0),
    **dict.fromkeys(("min_learning_rate_ratio", "checkpoint_every", "keep_checkpoints", "stall_timeout", "seed"), 0),
    **dict.fromkeys(("gc_every", "grace_seconds", "eval_batches", "eval_fraction", "max_bad_rows", "stop_at_step"), 0),
    "rows": 1,
    "sequence_length": 2,
}
"""the least that an option may be; 2 tokens are a token and the one it predicts"""
RATIO_OF = {
    **dict.fromkeys(("cosine_with_min_lr", "cosine_warmup_with_min_lr"), "min_lr_rate"),
    "warmup_stable_decay": "min_lr_ratio",
}
"""schedules of transformers with a lowest rate, and what they call ``--min_learning_rate_ratio``"""
UNUSABLE_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""of transformers: they go by a metric"""


def parse(argv: list[str]) -> TrainConfig:
    """Parses the options of a training run, as :func:`.parse_as`."""
    return parse_as(argv, TrainConfig)
