"""Declares the options of a run with defaults and descriptions, in sections. Imports no torch, so that ``--help`` is
fast."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal, Optional


def option(default: Any, help: str) -> Any:
    """Makes a field with a help text."""
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def usable_cores() -> int:
    """Counts the cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


COMPRESSED = (".gz", ".zst", ".bz2")
"""of text, JSON, JSONL and CSV; read by pyarrow, from the first byte to the last"""


def is_hub_name(name: str) -> bool:
    """True for what may be a model or a dataset of the hub, ``org/name[@revision]``: neither the name of a file, nor
    one in a folder that is here."""
    is_file = name.endswith(
        (".json", ".jsonl", ".ndjson", ".txt", ".md", ".py", ".csv", ".parquet", ".yaml", *COMPRESSED)
    )
    is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+(@[\w.-]+)?", name) is not None
    return is_name and not is_file and not os.path.isdir(name.split("/")[0])


WINDOW = 256
EVAL_FRACTION = 0.05
MIN_RATIO = 0.1
# hidden size, MLP size, layers, heads, key-value heads
PRESETS = {
    "tiny": (128, 352, 4, 4, 2),
    "small": (384, 1024, 6, 6, 2),
    "160m": (768, 2048, 12, 12, 4),
    "1b": (2048, 8192, 16, 32, 8),
    "8b": (4096, 14336, 32, 32, 8),
    "qwen3_0_6b": (1024, 3072, 28, 16, 8),
    "qwen3_4b": (2560, 9728, 36, 32, 8),
    "qwen3_8b": (4096, 12288, 36, 32, 8),
    "gemma3_1b": (1152, 6912, 26, 4, 1),
    "gemma3_4b": (2560, 10240, 34, 8, 4),
    "qwen3_5_tiny": (128, 352, 4, 4, 2),
    "qwen3_moe_tiny": (128, 352, 4, 4, 2),
    "qwen3_30b_a3b": (2048, 6144, 48, 32, 4),
}
HEAD_SIZES = {"qwen3": 128, "gemma3": 256}
"""of presets whose heads are no even parts of the hidden size, by the first part of their names"""
TIED = ("qwen3_0_6b", "qwen3_4b", "gemma3_1b", "gemma3_4b")
"""presets whose lm_head is the embedding"""
# MLP size of an expert, experts, experts of a token, head size
MIXTURES = {"qwen3_moe_tiny": (96, 8, 2, 32), "qwen3_30b_a3b": (768, 128, 8, 128)}


@dataclass(frozen=True)
class TrainOptions:
    """Trains a causal language model with liger_dist."""

    model: str = option(
        "tiny",
        f"preset ({', '.join(PRESETS)}), folder of a pretrained model, config.json, or NAME of the hub",
    )
    tokenizer: Optional[str] = option(None, "folder or NAME of a tokenizer; default: that of --model")
    chat_template: Optional[str] = option(None, "file with a Jinja template, instead of the tokenizer's own")
    chat_template_kwargs: Optional[str] = option(
        None, """variables of the template, as JSON: '{"enable_thinking": false}'"""
    )
    allow_left_out_weights: bool = option(
        False, "train without weights of the folder that the model has no parameters for (further tokens, vision)"
    )
    mtp: Optional[str] = option(
        None,
        "multi-token prediction, as JSON or a mapping of the file: depth (1), weight of the mean over depths (0.3), "
        "main_weight of the next token (1)",
    )

    data: list[str] = option(
        [],
        "files or folders (.txt .md .py .jsonl .json .csv .parquet), saved datasets, NAME[,SUBSET][:SPLIT] of the hub",
    )
    data_weights: list[float] = option(
        [], "shares of the sources in the sequences, or tokens of a stream; default: by their size"
    )
    eval_data: list[str] = option([], "held-out sources, with a loss each; default: --eval_fraction of --data")
    eval_fraction: float = option(EVAL_FRACTION, "of the documents, held out where there is no --eval_data; 0 for none")
    text_column: str = option("text", "column with plain text")
    messages_column: str = option("messages", "column with chat turns (conversations, prompt and completion, too)")
    prompt_column: str = option("prompt", "column with what --completion_column answers")
    completion_column: str = option("completion", "column with the answer to --prompt_column")
    train_on: Literal["assistant", "last_turn", "all"] = option(
        "assistant", "labels of a conversation: every answer, the last one, or prompts and all turns too"
    )
    split_special_tokens: bool = option(
        False, "read special tokens in texts as their characters, and refuse conversations that have some"
    )
    max_bad_rows: float = option(
        0, "rows that cannot be trained on and are skipped and counted; more are an error; below 1: share of all rows"
    )
    truncate: bool = option(False, "cut conversations that are longer than a sequence; otherwise they are bad rows")
    streaming: bool = option(False, "tokenise while training, instead of into --cache_dir before it; needs --steps")
    shuffle_window: int = option(WINDOW, "streaming: sequences that are packed and shuffled together")
    num_proc: int = option(usable_cores(), "processes that tokenise")
    cache_dir: str = option("runs/cache", "where tokenised data is kept between runs")
    allow_changed_data: bool = option(False, "resume though the data differs from that of the checkpoint")

    steps: Optional[int] = option(None, "optimizer steps; default: those of --epochs")
    epochs: Optional[float] = option(None, "passes over the data; default: 1 where --steps is left out")
    sequence_length: int = option(512, "tokens of one packed sequence")
    attend_across_documents: bool = option(False, "let a sequence be one text: positions and attention run on")
    batch_size: int = option(8, "sequences of one micro-batch on each rank")
    global_batch_size: Optional[int] = option(
        None, "sequences of one optimizer step on all ranks, by gradient accumulation; default: one micro-batch each"
    )
    global_batch_tokens: Optional[int] = option(None, "the same in tokens")
    accumulate_unsharded: bool = option(
        False,
        "fsdp1, fsdp2: reduce gradients in the last micro-batch alone, and keep unsharded ones in fp32 until then",
    )

    optimizer: Literal["adamw", "adamw_8bit", "muon"] = option(
        "adamw", "adamw_8bit: states in 8 bits, by torchao; muon: for the decoder's matrices, AdamW for the rest"
    )
    learning_rate: Optional[float] = option(
        None, "peak; default: 1e-3 for random weights, 2e-5 for pretrained ones, 2e-4 for LoRA"
    )
    lr_scheduler: str = option("cosine_with_min_lr", "of transformers: linear, cosine, constant_with_warmup ...")
    lr_scheduler_kwargs: Optional[str] = option(None, "more of its arguments, as JSON")
    min_learning_rate_ratio: float = option(MIN_RATIO, "final over peak, for schedules that have it")
    warmup_steps: Optional[float] = option(
        None, "of the schedule; below 1: share of all steps; default: 20, at most a tenth of all"
    )
    weight_decay: float = option(0.1, "of matrices; vectors have none")
    no_weight_decay: list[str] = option([], "parts of names of further parameters without weight decay")
    adam_beta1: float = option(0.9, "of AdamW")
    adam_beta2: float = option(0.95, "of AdamW")
    adam_epsilon: float = option(1e-8, "of AdamW")
    z_loss: float = option(0.0, "factor of the mean squared log-sum-exp of the logits, added to the loss: 1e-4")
    max_grad_norm: float = option(1.0, "gradient clipping; 0 for none")
    router_bias_rate: float = option(
        0.0, "mixtures: what a step adds to, or subtracts from, the bias with which a router selects; 0 for none"
    )
    max_skipped_steps: int = option(
        0, "steps with a loss or gradients of NaN or Inf that are skipped; more end the run"
    )
    ema_decay: float = option(0.0, "of a moving average of the weights, evaluated and exported too: 0.999; 0 for none")

    strategy: Optional[Literal["none", "ddp", "fsdp1", "fsdp2", "tp", "deepspeed"]] = option(
        None, "default: fsdp2 where several processes run, otherwise none"
    )
    dp_replicate: Optional[int] = option(None, "fsdp1, fsdp2: replicas of the model (HSDP); default: 1")
    dp_shard: Optional[int] = option(None, "fsdp1, fsdp2: ranks that share a replica; default: all that remain")
    tp: Optional[int] = option(None, "fsdp2, tp: ranks that share lm_head's rows and see the same tokens")
    ep: Optional[int] = option(None, "fsdp2: ranks that share the experts of each layer; tokens are sent to them")
    sp: Optional[int] = option(None, "fsdp2: ranks that hold shards of the same sequences")
    deepspeed: Optional[str] = option(None, "deepspeed: its JSON, such as launch/deepspeed/zero3.json")
    lm_head: Literal["gather", "vocab_parallel"] = option(
        "gather", "fsdp2: all-gather lm_head's weight for the loss, or keep row shards and communicate hidden states"
    )
    layers_per_unit: Optional[int] = option(
        None, "fsdp2: layers that are all-gathered together; default: as many as have 192 MiB, at least four units"
    )
    reshard_after_forward: bool = option(True, "fsdp1, fsdp2: free a layer's weights between forward and backward")
    frozen: Literal["shard", "replicate"] = option(
        "shard", "fsdp1, fsdp2: shard the weights that LoRA freezes, or keep all of them on every rank"
    )
    cpu_offload: bool = option(False, "fsdp1, fsdp2: shards, gradients and optimizer states in host memory")

    dtype: Optional[Literal["float32", "bfloat16"]] = option(
        None, "compute dtype, beside fp32 weights and optimizer states; default: bfloat16 on GPUs, float32 on CPUs"
    )
    matmul_precision: Optional[Literal["highest", "high", "medium"]] = option(
        None, "of fp32 products; default: high (TF32) on GPUs, highest on CPUs"
    )
    deterministic: bool = option(False, "let torch use deterministic algorithms alone, and fail where there is none")
    seed: int = option(0, "of weights, dropout and data order")
    fused_loss: bool = option(True, "compute the loss in lm_head; false trains with the model's own, to compare")
    memory_budget: Optional[int] = option(
        None, "bytes of the buffer for one chunk of logits; default: 1 GiB, with LoRA 256 MiB"
    )
    layer_kernels: bool = option(True, "compute norms, gated MLPs and rotary embedding by kernels")
    attention: Optional[str] = option(None, "of transformers: sdpa, flash_attention_2 ...; default: liger_dist's")
    activation_checkpointing: bool = option(False, "recompute layers in the backward")
    offload_checkpoints: bool = option(False, "activation_checkpointing: keep the layers' inputs in host memory")
    mlp_tile_tokens: Optional[int] = option(None, "tokens that gated MLPs compute at a time, for long sequences: 8192")
    compile: Optional[bool] = option(
        None,
        "compile every decoder layer from its own code, with the memory of our kernels; default: on GPUs, except with "
        "deepspeed, ep, mlp_tile_tokens, and layers that are recurrent or quantized",
    )
    float8: Optional[Literal["tensorwise", "rowwise"]] = option(
        None,
        "fsdp2, bfloat16: compute the decoder's linear layers in float8, compiled; needs torchao and an H100 or newer",
    )

    lora_rank: int = option(0, "train LoRA layers of this rank instead of the model; 0 for none")
    lora_alpha: float = option(16.0, "scale of the LoRA layers, over their rank")
    lora_dropout: float = option(0.0, "before the LoRA layers")
    lora_targets: list[str] = option(["all-linear"], "names of the linear layers; default: all but lm_head")
    dora: bool = option(False, "weight-decomposed LoRA")
    load_in_4bit: bool = option(
        False, "LoRA: keep the frozen linear layers in 4 bits (nf4, scales quantised too); needs bitsandbytes"
    )

    teacher: Optional[str] = option(None, "model to distil from: as --model; its tokenizer is the student's")
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = option("forward_kl", "of the student from the teacher")
    distillation_beta: float = option(0.5, "jsd: weight of the teacher in the mixture, between 0 and 1")
    distillation_temperature: float = option(1.0, "divisor of both models' logits in the divergence")
    hard_weight: float = option(0.0, "of the cross entropy of the labels beside the divergence, in [0, 1]")
    top_k: int = option(0, "soft labels: classes of each token read of what liger-dist score has written; 0 for none")
    soft_weight: float = option(
        1.0, "top_k: weight of the soft labels in the loss, in [0, 1]; the labels have the rest"
    )
    remainder: Literal["drop", "renormalize", "spread"] = option("drop", "top_k: the probability of all other classes")

    eval_every: int = option(50, "steps between evaluations on held-out data; 0 for none, and nothing is held out")
    eval_batches: int = option(8, "micro-batches of each held-out set on each rank; 0 for all of its data")
    eval_only: bool = option(False, "evaluate, print the held-out loss, and end; with --resume true of a checkpoint")
    early_stopping_patience: int = option(0, "evaluations without a better held-out loss until the run ends; 0: never")
    keep_best: bool = option(False, "write a checkpoint at every best held-out loss, and keep the best one")
    sample_prompts: list[str] = option([], "texts that the model continues at each evaluation, into samples.jsonl")
    sample_tokens: int = option(64, "of each continuation, by greedy decoding")
    sample_chat: bool = option(False, "sample_prompts: each is a user's turn, in the chat template")

    output_dir: str = option("runs/train", "where everything is written")
    checkpoint_every: int = option(200, "steps between checkpoints; one is written at the end; 0 for none at all")
    keep_checkpoints: int = option(3, "the newest so many are kept; 0 for all")
    async_checkpoints: bool = option(False, "write them beside the training; not with deepspeed")
    resume: bool = option(False, "continue from the newest complete checkpoint in output_dir, if there is one")
    resume_step: Optional[int] = option(None, "continue from the checkpoint of this step; later ones are put aside")
    overwrite: bool = option(False, "begin anew in an output_dir that has checkpoints, and remove them")
    stop_at_step: Optional[int] = option(None, "stop there with a checkpoint, as an interruption would")

    log_every: int = option(1, "steps between lines in metrics.jsonl and the trackers")
    trackers: list[str] = option([], "tensorboard, wandb and others that Accelerate knows")
    run_name: str = option("liger_dist", "project of the trackers")
    stall_timeout: float = option(900.0, "seconds without a step until the watchdog names the stuck rank; 0 for none")
    grace_seconds: Optional[float] = option(
        None,
        "from SIGTERM, SIGINT or SIGUSR1 to the end, checkpoint included; default: 10 less than torchrun's "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which is 120 in the launch files and otherwise 30",
    )
    gc_every: int = option(0, "steps between garbage collections, on all ranks together; 0: when Python likes")
    profile_step: Optional[int] = option(None, "write a profiler trace of that step, trace-rank*.json")
    dry_run: bool = option(False, "print each rank's memory and the time of a step as planned, and allocate nothing")
    world_size: Optional[int] = option(None, "dry_run: how many ranks; default: those that are running")
    gpu: Optional[Literal["H100", "H200", "A100", "B200"]] = option(
        None, "dry_run: whose time is predicted; default: this machine's"
    )


FIRST_OF_SECTION = {
    "model": "model",
    "data": "data",
    "steps": "batch",
    "optimizer": "optimizer",
    "strategy": "parallel",
    "dtype": "compute",
    "lora_rank": "lora",
    "teacher": "distillation",
    "eval_every": "evaluation",
    "output_dir": "checkpoint",
    "log_every": "run",
}
"""section of a configuration file, by its first option"""
OWN_KEY = {"model": "name", "data": "sources", "optimizer": "name"}
"""how a section writes the option that has its name"""
BASIC = (
    *("model", "tokenizer", "data", "eval_data", "steps", "epochs", "sequence_length", "batch_size"),
    *("global_batch_size", "learning_rate", "strategy", "dtype", "activation_checkpointing", "lora_rank"),
    *("eval_every", "output_dir", "checkpoint_every", "resume", "overwrite", "dry_run"),
)
"""options that ``--help`` lists; ``--help-all`` has all of them"""
READ_PATHS = ("model", "tokenizer", "chat_template", "data", "eval_data", "deepspeed", "teacher")
"""options that name files and folders that are read"""
ONE_TIME = ("overwrite", "resume", "resume_step", "stop_at_step", "profile_step", "allow_changed_data", "eval_only")
"""options of one start of a run"""

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
    "dataset_name": "it is --data NAME:SPLIT here",
    "model_revision": "it is --model NAME@REVISION here",
    **dict.fromkeys(("push_to_hub", "hub_model_id"), "nothing is sent to a hub; upload what liger-dist export writes"),
    **dict.fromkeys(("fp16", "bf16"), "--dtype bfloat16 computes in bf16; fp16 would need a scaled loss"),
    **dict.fromkeys(
        ("load_in_8bit", "quantization_bit"), "--load_in_4bit true keeps frozen weights in 4 bits, under LoRA"
    ),
    **dict.fromkeys(("save_only_model", "save_model_only"), "liger-dist export writes the weights alone"),
    **dict.fromkeys(("pipeline_parallel_degree", "pipeline_model_parallel_size"), "it shards with --strategy fsdp2"),
    **dict.fromkeys(("freeze_trainable_layers", "unfrozen_parameters"), "train few parameters with --lora_rank"),
    **dict.fromkeys(("train_on_prompts", "train_on_inputs"), "--train_on all makes prompts labels, too"),
    **dict.fromkeys(("dataset_text_field", "text_field", "field"), "it is --text_column here"),
    **dict.fromkeys(("field_messages", "conversation_column", "messages_field"), "it is --messages_column here"),
    **dict.fromkeys(
        ("prompt_key", "field_instruction", "prompt_field", "question_column", "input_column"),
        "it is --prompt_column here",
    ),
    **dict.fromkeys(
        ("response_key", "field_output", "response_column", "answer_column", "output_column", "response_field"),
        "it is --completion_column here",
    ),
    **dict.fromkeys(("train_test_split", "test_size", "val_set_size"), "it is --eval_fraction here"),
    **dict.fromkeys(("eval_steps", "evaluation_strategy", "eval_strategy"), "it is --eval_every here"),
    "auto_find_batch_size": "--dry_run true plans the memory before a run",
    "neftune_noise_alpha": "it belongs into a training loop with liger_dist.wrap",
    "loss_type": "the loss is cross entropy; others belong into a training loop with liger_dist.wrap",
    "activation_offloading": "--activation_checkpointing true with --offload_checkpoints true",
    "use_muon": "it is --optimizer muon here",
    "report_to": "it is --trackers here",
}
"""options of other programs that this one has in another way, or not; with the sentence that says so"""
