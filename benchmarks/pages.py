"""What each page of docs/benchmarks shows: text, tables and picture of one results file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Group:
    """Tables of the results that are written alike."""

    figures: tuple[str, ...]
    """columns, or the figures of one cell in a table of several problems"""
    of: str = ""
    """regular expression that is found in the names of the tables"""
    layout: Literal["each", "ways", "problems"] = "each"
    """a table for each problem; one table with a line for each way; one with a line for each problem"""
    title: str = ""
    """heading of one table of several problems"""


@dataclass(frozen=True)
class Picture:
    """Rows of tables that become bars: at most ten, over all panels."""

    title: str
    tables: tuple[str, ...]
    figures: tuple[str, ...]
    rows: tuple[str, ...] = ()
    """empty: the first ones that fit"""
    labels: Mapping[str, str] = field(default_factory=dict)
    """labels of rows whose names do not say whose they are"""


@dataclass(frozen=True)
class Page:
    """One results file and its page, of the same name."""

    results: str
    title: str
    text: str
    groups: tuple[Group, ...]
    picture: Picture | None = None
    skipped: str = "^before"
    """regular expression, matched with names of rows: variants that answer no reader's question"""
    hidden: str = "(?!)"
    """regular expression, found in names of tables that stand in the results alone: sizes between those of the page"""
    archived: str = "(?!)"
    """regular expression, found in names of tables that a newer result in another file replaces"""


COMPILED = (
    "liger_dist, layers compiled",
    "liger_dist",
    "Hugging Face, layers compiled",
    "Hugging Face",
    "Liger, all kernels",
)
STEP = ("ms", "peak GiB")
PAGES = (
    Page(
        "training_step",
        "Whole training steps",
        """Forward, backward, clipping and AdamW, under FSDP2 where nothing else is named: bf16 with fp32 masters and
reduction, 2 x 4096 tokens for each rank. Hugging Face and Liger are sharded as the documentation of FSDP
has it, each layer and the root. `computing`: milliseconds in which the GPU runs a kernel that is not
NCCL's.""",
        (Group((*STEP, "computing ms")),),
        Picture("A training step of Llama 8B under FSDP2, 8192 tokens for each GPU", ("Llama 8B, on 2",), STEP),
        skipped="^before|512 MiB",
        archived="(1B, tied|2048, untied)(, layers compiled)?, on 2$|4096, LoRA|compiled and float8",
    ),
    Page(
        "large_model",
        "Eight billion parameters",
        """`liger-dist train launch/llama_8b.yaml`: 8192 tokens for each GPU, bf16 with fp32 masters (ZeRO-3:
DeepSpeed's), AdamW, clipping. Every way runs by itself. `utilisation`: operations of the model to the 989
TFLOP/s of the data sheet. `planned`: the peak by `--dry_run`. Liger: the same program, data and optimizer
with its kernels.""",
        (Group((*STEP, "planned GiB", "utilisation")),),
        Picture(
            "A training step of Llama 8B by liger-dist train, 8192 tokens for each GPU",
            ("Llama 8B, on 2",),
            STEP,
            ("fsdp2", "fsdp2, vocab-parallel", "zero3", "Liger, fsdp2", "Liger, zero3"),
            {
                "fsdp2": "liger_dist, FSDP2",
                "fsdp2, vocab-parallel": "liger_dist, FSDP2, vocab-parallel",
                "zero3": "liger_dist, ZeRO-3",
                "Liger, fsdp2": "Liger, FSDP2",
                "Liger, zero3": "Liger, ZeRO-3",
            },
        ),
    ),
    Page(
        "small_models",
        "Small models: time of the host",
        """Steps of small models, all ways in memory together and a few steps each in turn: bf16 weights on one GPU;
under FSDP2 fp32 masters, bf16 compute and fp32 reduction. Fused AdamW and clipping are torch's, and for
liger_dist under FSDP2 those of `liger-dist train`. `host`: milliseconds until forward, backward and update
return, from an empty queue. `GPU`: milliseconds in which a kernel runs, NCCL's included, which may wait for
the other GPU. LoRA: rank 16 on all linear layers.""",
        (
            Group(STEP, "", "problems", "ms · peak GiB"),
            Group(("host ms", "GPU busy ms"), "", "problems", "host ms · GPU ms"),
        ),
        Picture(
            "A training step of Llama-3.2-1B under FSDP2, 8192 tokens for each GPU",
            ("Llama-3.2-1B, 8192 tokens, FSDP2 on 2 GPUs",),
            STEP,
            COMPILED,
        ),
        skipped="^before|.* layers? a unit$",
    ),
    Page(
        "host_time",
        "Where the time of a step goes",
        """By torch's profiler: milliseconds in which the GPU runs a kernel that is not NCCL's (`computing`), or none
(`waiting`). `host`: samples of the Python stacks of all threads, by the innermost frame that belongs to a
library; shares from 20 % on. A layer's kernels count for the library that computes it. Profiled steps are
longer than those that are timed.""",
        (Group(("ms", "computing ms", "waiting ms", "host")),),
        Picture(
            "A profiled step of Llama-3.2-1B under FSDP2: how long the GPU waits for the host",
            ("Llama-3.2-1B, tied, FSDP2, on 2",),
            ("ms", "waiting ms"),
        ),
    ),
    Page(
        "adapters",
        "Adapters: LoRA and QLoRA",
        """Steps of LoRA (rank 16 on all linear layers of the decoder), bf16, without activation checkpointing. 4 bits:
nf4 with double quantization. `replicated`: full frozen weights on every rank, LoRA layers in one group;
`per layer`: one group for each layer. `GPU`: at least one kernel runs. Peaks include weights. [Which way to
use](../adapters.md).""",
        (Group((*STEP, "host ms", "GPU busy ms")),),
        Picture(
            "A step of LoRA on 32 layers of Llama 8B, 4096 tokens",
            ("LoRA on 32 layers of Llama 8B, 2 x 2048 tokens, one GPU",),
            STEP,
            (
                "liger_dist",
                "PEFT + Liger",
                "PEFT, layers compiled",
                "liger_dist, fp32 adapters",
                "PEFT + Liger, fp32 adapters",
            ),
        ),
    ),
    Page(
        "experts",
        "Mixtures of experts",
        """Forward and backward of four layers of released shapes with their lm_head, random weights in bf16, 8192
tokens, without an optimizer; and of one layer's experts. `kept MiB`: what the experts' forward keeps for
the backward. `GPU ms`: at least one kernel runs. `GiB`: peak memory above the weights. LoRA has rank 16, on the
projections of attention (`of without`) and on experts too. Layers compiled with flex_attention are compiled anew
in some calls, until torch gives up. [Mixtures of experts](../experts.md) explains what is computed.""",
        (Group(("ms", "GPU ms", "GiB", "kept MiB", "of without")),),
        Picture(
            "Forward and backward of four layers of Qwen3-30B-A3B, 8192 tokens",
            ("Qwen3-30B-A3B, 4 layers, sdpa, 8192 tokens",),
            ("ms", "GiB"),
            ("liger_dist, layers compiled", "liger_dist", "Hugging Face, layers compiled"),
        ),
    ),
    Page(
        "mixture_step",
        "Training steps of a mixture on two GPUs",
        """Twelve layers of Qwen3-30B-A3B as `liger-dist train` builds them; sequences of 8192 random tokens. Balanced
routers: o_proj and down_proj start at zero. `ep`: each rank has half of the experts, layers are not compiled,
and transformers sharded the models; `FSDP2(expert_parallel=2)`, which does so now, has not been timed.
`transformers' exchange`: a row is sent for each expert of a token. `weights stay gathered`:
`--reshard_after_forward false`. `computing`: a kernel runs that is not NCCL's; `exposed`: NCCL's alone; `idle`:
none. Products, attention, optimizer (with norms and FSDP2's casts), copies, the rest and `nccl` are
milliseconds of kernels; `nccl` includes waiting for the other GPU. `load`: tokens of the fullest
expert over the mean, counted by one set of hooks in the first table and six in the last. [Mixtures of
experts](../experts.md#two-gpus) draws the conclusions.""",
        (
            Group(("tokens/s a GPU", "peak GiB"), "", "problems", "tokens/s of a GPU · peak GiB"),
            Group(("ms", "computing ms", "exposed ms", "idle ms"), "balanced"),
            Group(
                ("products ms", "attention ms", "optimizer ms", "copies ms", "rest ms", "nccl ms", "load"),
                "16384 tokens",
            ),
        ),
        Picture(
            "A training step of 12 layers of Qwen3-30B-A3B on two GPUs, 16,384 tokens for each, balanced routers",
            ("12 layers of Qwen3-30B-A3B, 16384 tokens a GPU, balanced routers, on 2",),
            STEP,
            (),
            {
                "fsdp2, layers compiled": "liger_dist, FSDP2",
                "fsdp2, layers compiled, weights stay gathered": "liger_dist, FSDP2, weights stay gathered",
                "ep": "liger_dist, experts on two ranks",
                "ep, transformers' exchange": "the same, transformers' exchange of tokens",
            },
        ),
    ),
    Page(
        "expert_parallel",
        "One layer's experts on two GPUs",
        """Forward and backward of the 128 experts of a layer of Qwen3-30B-A3B on several GPUs, each with an equal part
of them and its tokens; 8 different experts of each token, drawn evenly. bf16, without router and shared experts.
`products alone`: dense products of as many operations. `transformers, grouped_mm`: its dispatch, which sends a row for
each expert of a token. `Liger, expert parallel (CuTe)`: `moe_fused` of Liger's native kernels, without NVLink
multicast. A time is that of the slowest rank. `MiB`: peak memory beyond inputs and weights, with the gradients; that of
Liger is not known: it reserves memory outside of torch. Errors are relative (L2) to fp64, on 128 tokens and the
first expert of each rank.""",
        (
            Group(("ms", "ratio", "peak MiB"), ""),
            Group(("output error", "dX error", "router error", "gate and up error", "down error"), "16384"),
        ),
        Picture(
            "Experts of one layer of Qwen3-30B-A3B on two GPUs, 16,384 tokens of each rank, forward and backward",
            ("experts of one layer of Qwen3-30B-A3B, 16384 tokens of each rank, on 2",),
            ("ms", "peak MiB"),
            (),
            {"Liger, expert parallel (CuTe)": "Liger, CuTe"},
        ),
        skipped="products alone",
    ),
    Page(
        "replayed_update",
        "An update with replay",
        """The gradient of GRPO's clipped objective, clipping of gradients and AdamW with a learning rate of 0, of four
layers of Qwen3-30B-A3B under FSDP2 with two GPUs: fp32 masters, bf16 compute, 2 x 4096 tokens for each.
`sampling replay`: 50 classes of each token. `routing replay`: recorded experts. `of plain`: time to the
update without replay. `policy ratio error`: the largest distance from 1 of the ratio between the policy of
the update and that of an earlier forward at equal weights; 0 in all ways, because a forward repeats its
values.""",
        (Group((*STEP, "of plain", "policy ratio error")),),
        Picture(
            "An update of 4 layers of Qwen3-30B-A3B under FSDP2, 8192 tokens for each GPU",
            ("Qwen3-30B-A3B, 4 layers, 8192 tokens a GPU, FSDP2 on 2",),
            STEP,
            (),
            {way: f"liger_dist, {way}" for way in ("plain", "sampling replay", "routing replay", "both")},
        ),
    ),
    Page(
        "packed_documents",
        "Packed documents, by attention",
        """Forward and backward of four layers of each shape with its lm_head, random weights in bf16: 8192 tokens in
12 documents of 402 to 1010 tokens. `padded rows`: each document in a row, padded to the longest. `a dense
mask`: `WrapConfig(varlen_attention=False)`, with the model's own attention. Only Llama's mask separates the
documents of a packed row in transformers. `GiB`: above the weights, gradients included. [Packed
sequences](../packing.md) says how documents are kept apart.""",
        (Group(("ms", "GiB above the weights", "of padded rows")),),
        Picture(
            "Forward and backward of four layers of Llama-3.1-8B, 8192 tokens in 12 documents",
            ("4 layers of Llama-3.1-8B, 8192 tokens in 12 documents",),
            ("ms", "GiB above the weights"),
            ("liger_dist, packed", "liger_dist, padded rows", "Hugging Face, padded rows", "Hugging Face, packed"),
        ),
    ),
    Page(
        "hybrids",
        "Hybrid models: packed documents",
        """Forward and backward of eight layers of the shape of Qwen3.5-4B with its lm_head, bf16: 8192 tokens in 12
documents. `documents mix`: the time of a wrong result, because the recurrent layers of transformers read
the previous documents. `one by one`: a call for each document. `in rows`: one row for each document, where
the others read lengths. With fla the delta rule is that of flash-linear-attention, otherwise torch's
fallback in transformers. `GiB`: above the weights, gradients included. Without fla the padded rows do not
fit.""",
        (Group(("ms", "GiB above the weights")),),
        Picture(
            "Forward and backward of eight layers of Qwen3.5-4B, 8192 tokens in 12 documents, with fla",
            ("8 layers of Qwen3.5-4B, 8192 tokens in 12 documents, with fla",),
            ("ms", "GiB above the weights"),
            ("liger_dist, packed", "Hugging Face, padded rows", "Hugging Face, one by one"),
        ),
    ),
    Page(
        "sequences",
        "Packed, padded and long sequences",
        """Forward and backward of four layers of the shape of Llama 8B with its lm_head, bf16. `packed`: documents of
about 700 tokens whose positions restart. `dense mask`: the same model with
`WrapConfig(varlen_attention=False)`. `one text`: the same tokens without boundaries. The long sequences are
one text under activation checkpointing. `GiB`: above the weights, gradients included.""",
        (Group(("ms", "GiB above the weights")),),
        Picture(
            "Forward and backward of four layers of 8B, one text of 65,536 tokens",
            ("65536 tokens",),
            ("ms", "GiB above the weights"),
        ),
    ),
    Page(
        "long_context",
        "One long sequence over all GPUs",
        """Llama 8B with random weights, fp32 masters, bf16 compute, AdamW with 8-bit states, activation checkpointing
of every layer. `liger_dist`: `liger-dist train launch/llama_8b_long.yaml`, with tiles of the MLP.
Accelerate: FSDP2 with `cp_size`, ring attention of torch. DeepSpeed: ZeRO-3, Ulysses and tiled MLP (ALST).
Both with Liger's kernels. Every way runs by itself with `expandable_segments:True`; its first step is not
timed: medians of the following two (ALST on 131,072 tokens: one). Of 262,144 tokens the first step is all
there is, compilation included and before AdamW has states. 65,536 tokens were measured with an earlier
version, which computed one product more for each tile.""",
        (Group((*STEP, "tokens/s", "utilisation")),),
        Picture("A training step of Llama 8B on one text of 131,072 tokens", ("131072 tokens, on 2",), STEP),
    ),
    Page(
        "mtp",
        "Multi-token prediction",
        """Forward and backward of Llama-3.2-1B's shape (tied, random weights in bf16), 2 x 4096 tokens, without an
optimizer. `full logits`: the same model and layers, with torch's cross entropy of full logits for each
loss. `no losses`: without lm_head and losses; `losses MiB` is the peak above it. `ratio`: milliseconds of a
depth to those of a decoder layer and a loss. [Multi-token prediction](../mtp.md) explains the rest.""",
        (Group(("ms", "GiB", "losses MiB", "ms of this depth", "ratio")),),
        Picture(
            "Forward and backward of Llama-3.2-1B with multi-token prediction, 8192 tokens",
            ("Llama-3.2-1B, tied, 2 x 4096 tokens",),
            ("ms", "GiB"),
            ("depth 1, liger_dist", "depth 1, full logits", "depth 2, liger_dist", "depth 2, full logits"),
            {
                f"depth {depth}, {way}": f"{way}, depth {depth}"
                for depth in (1, 2)
                for way in ("liger_dist", "full logits")
            },
        ),
    ),
    Page(
        "policy_step",
        "Steps of DPO and GRPO",
        """Of a model of Llama 8B's layers and vocabulary with random weights, on stored completions: 8 x 1024 tokens
for each GPU, AdamW; GRPO scores, then trains. Both heads are called as TRL's trainers call them. Each row
is a separate process.""",
        (Group(STEP, "", "ways", "ms · peak GiB"),),
        Picture("A step of GRPO on 12 layers of Llama 8B, 8192 tokens", ("GRPO under fsdp2, 12 layers, 1 GPUs",), STEP),
    ),
    Page(
        "verl_actor",
        "Update of verl's actor",
        """verl's own actor on 12 layers of Llama 8B's shape, with and without `liger_dist.integrations.verl`. `with
all`: with the sum of squared probabilities and a temperature for each sample. `use_fused_kernels` is
verl's. `scoring`: log-probabilities without gradients. [verl](../hosts/verl.md) says how to set it up.""",
        (Group((*STEP, "ratio", "scoring ms", "scoring GiB")),),
        Picture(
            "An update of verl's actor, 12 layers of Llama 8B, 16,384 tokens", ("fsdp, 12 layers, 16384 tokens",), STEP
        ),
    ),
    Page(
        "openrlhf_actor",
        "Training step of OpenRLHF's actor",
        """OpenRLHF's own actor on 6 layers of Llama 8B's shape under ZeRO-3, with and without liger_dist.
[OpenRLHF](../hosts/openrlhf.md) says how to start it.""",
        (Group((*STEP, "ratio")),),
        Picture(
            "A step of OpenRLHF's actor, 6 layers of Llama 8B, 8192 tokens", ("ZeRO-3, 6 layers, 8192 tokens",), STEP
        ),
    ),
    Page(
        "linear_cross_entropy",
        "Fused linear cross entropy",
        """Forward and backward in bf16 with fresh gradients, N x D x V: tokens, hidden features, classes. `ratio`:
time divided by three bare cuBLAS GEMMs (two if lm_head is frozen). `MiB`: peak memory beyond inputs and the
two gradients. Errors are relative (L2) to fp64, on 256 rows. `sum`: the dtype in which the weight's
gradient is added up over chunks. `torch's op`: `torch.nn.functional.linear_cross_entropy` of torch 2.13, in the
table with torch 2.15's op of 2.15, run by torch 2.11 from the files of the wheel, with `LinearCrossEntropyOptions()`
(`balanced`, `accurate`: this `acc_policy`). Its loss is a sum of chunks in bf16. `CuTe kernel`: what 2.15 runs where
nvidia-cutlass-dsl is installed, called without torch's registry; its loss is summed in fp32 and rounded to bf16.""",
        (
            Group(("ratio", "extra MiB"), "torch's op$", "ways", "ratio · MiB, beside torch's own op"),
            Group(("ms", "ratio", "extra MiB", "dW error", "loss error"), "torch 2.15's op$"),
            Group(("ms", "sum", "dW error", "dX error", "loss error"), "^8192x4096x128256, with torch's op$"),
            Group(("ratio", "extra MiB"), r"^\d+x\d+x\d+$", "ways", "ratio · MiB, beside TRL, Apple CCE and QuACK"),
            Group(("ratio",), "masked|peaked", "ways", "ratio, masked tokens and peaked logits"),
            Group(("ratio",), "frozen", "ways", "ratio, frozen lm_head"),
        ),
        Picture(
            "Fused loss: 8192 tokens, 4096 features, 128,256 classes, bf16",
            ("8192x4096x128256, with torch's op",),
            ("ms", "extra MiB"),
            ("liger_dist 1024 MiB", "torch.compile", "Liger default", "torch's op", "torch"),
            {"liger_dist 1024 MiB": "liger_dist", "torch": "torch, full logits", "torch's op": "torch's fused op"},
        ),
        hidden="^(2048x4096x128256|16384x4096x128256|8192x8192x128256|16384x2304x256000), with torch's op$",
        skipped="GEMMs|(512|128) MiB|^Liger fp32( x4)?$|QuACK scaled",
    ),
    Page(
        "vocabularies",
        "Any vocabulary",
        """The fused linear cross entropy of 8192 tokens and 2048 hidden features, forward and backward in bf16, at
vocabularies that 64 divides and others, such as `resize_token_embeddings(len(tokenizer))` makes. `ratio`:
time to three bare cuBLAS GEMMs of the next multiple of 64 classes.""",
        (Group(("ratio",), "", "ways", "ratio, by classes"),),
        Picture(
            "Fused loss with a vocabulary of 128,257 classes, which 64 does not divide",
            ("128257",),
            ("ratio",),
            ("liger_dist", "torch.compile", "torch", "TRL", "Liger x8", "Liger CuTe, for Hopper", "QuACK"),
        ),
        skipped="QuACK scaled",
    ),
    Page(
        "vocab_parallel",
        "Vocab-parallel lm_head",
        """lm_head alone on several GPUs, forward and backward: N tokens of each rank, bf16, row shards with fp32
masters and gradients. `vocab_parallel`: tokens are exchanged, with budgets for one chunk. `gathered`: the
weight is all-gathered and its gradient reduced in the named dtype, as FSDP2 does. `ratio`: time of the
slowest rank to three bare GEMMs of its tokens with the full weight. `MiB`: peak memory beyond inputs and
masters, with the gradients. `tensor_parallel`: tokens are all-gathered, then scored as tensor parallelism scores
replicated tokens, and hidden gradients all-reduced. `Liger, tensor parallel (CuTe)`: the same tokens by
`fused_linear_scaled_cross_entropy_tp` of Liger's native kernels on row shards cast to bf16, without NVLink
multicast, with what it reserves outside of torch; on 16,384 tokens a check of its cluster sizes fails. Errors are
relative (L2) to fp64, on 256 rows of each gradient.""",
        (
            Group(("ratio", "peak MiB"), "", "problems", "ratio · MiB, by N x D x V and GPUs"),
            Group(("ms", "peak MiB", "dW error", "dX error", "loss error"), "^8192x4096x128256 on 2$"),
        ),
        Picture(
            "lm_head alone on two GPUs: 8192 tokens of each rank, 4096 features, 128,256 classes",
            ("8192x4096x128256 on 2",),
            ("ms", "peak MiB"),
            (
                "vocab_parallel, 1024 MiB",
                "gathered, bf16 reduction",
                "gathered, fp32 reduction",
                "tensor_parallel",
                "Liger, tensor parallel (CuTe)",
            ),
            {
                "tensor_parallel": "liger_dist, tensor parallel",
                "vocab_parallel, 1024 MiB": "liger_dist, vocab-parallel, 1024 MiB",
                "gathered, bf16 reduction": "all-gathered weight, bf16 reduction",
                "gathered, fp32 reduction": "all-gathered weight, fp32 reduction",
            },
        ),
        skipped="1700|700 MiB|three GEMMs",
    ),
    Page(
        "log_probs",
        "Log-probabilities and entropies",
        """bf16 operands. `scoring`: without gradients, `ratio` to one bare cuBLAS GEMM. `forward and backward`: with
fresh gradients, to four. `training`: the scalar loss with fp32 logits to that with bf16 logits. `MiB`: peak
memory beyond inputs and gradients. Errors are relative (L2) to fp64, on 512 tokens of peaked distributions.
`512-token chunks`: full logits of a chunk, its log-softmax by torch, checkpointed. `kept logits`: `liger_dist`
has the default budget of 1 GiB, `logits kept` one of 4 GiB, with which all logits are saved and three products are
computed instead of four. `sampling replay`: log-probabilities alone, forward and backward,
of the classes that a sampler kept, `of plain`: to those of the full vocabulary.""",
        (
            Group(("ratio", "extra MiB"), "^(scoring|forward)", "ways", "ratio · MiB"),
            Group(("ms", "of plain", "extra MiB"), "^sampling replay"),
            Group(("ms", "ratio", "extra MiB"), "^kept logits"),
            Group(("ratio", "extra MiB"), "^training", "ways", "ratio · MiB of the training loss"),
            Group(("ms", "log_prob error", "dX error"), "^forward and backward 8192x4096x128256$"),
        ),
        Picture(
            "Log-probabilities with gradients: 8192 tokens, 4096 features, 128,256 classes",
            ("forward and backward 8192x4096x128256",),
            ("ms", "extra MiB"),
            (
                "liger_dist",
                "liger_dist, fp32 logits",
                "Liger scaled cross entropy (CuTe)",
                "TRL",
                "512-token chunks (verl's fallback, in Liger)",
            ),
            {
                "512-token chunks (verl's fallback, in Liger)": "Liger, 512-token chunks",
                "Liger scaled cross entropy (CuTe)": "Liger, CuTe",
            },
        ),
    ),
    Page(
        "distillation",
        "Divergences from a teacher",
        """Student and teacher of the same sizes in bf16, forward and backward with fresh gradients; `soft labels`: the
loss of the labels, and half of it from K classes of each token. `ratio`: time to four bare cuBLAS GEMMs,
for soft labels to the labels alone. `MiB`: peak memory beyond inputs and gradients. Errors are relative
(L2) to fp64, on 256 rows of each gradient.""",
        (Group(("ratio", "extra MiB", "dW error", "dX error")),),
        Picture(
            "Forward KL from a teacher: 8192 tokens, 4096 features, 128,256 classes",
            ("forward_kl 8192x4096x128256",),
            ("ms", "extra MiB"),
            ("liger_dist", "Liger chunked JSD", "torch", "TRL", "Liger fused JSD"),
        ),
    ),
    Page(
        "distillation_step",
        "Steps of a student with its teacher",
        """A student of the shape of Llama 8B (fp32 masters, bf16 compute, AdamW) and a bf16 teacher of 14 billion
parameters (48 layers of 5120), random weights, both under FSDP2, 8192 tokens for each GPU. `ratio`: to the
student's own step and the teacher's forward with its logits together. `planned`: the peak by `liger-dist
train --dry_run`.""",
        (Group((*STEP, "planned GiB", "ratio")),),
        Picture(
            "A student of 8B with a teacher of 14B, 8192 tokens for each GPU",
            ("8B from 14B, on 2 GPUs",),
            STEP,
            (),
            {
                "student's step": "the student's step alone",
                "teacher's forward": "the teacher's forward alone",
                "distillation, forward KL": "liger_dist, forward KL",
                "distillation, JSD": "liger_dist, JSD",
            },
        ),
    ),
    Page(
        "draft_heads",
        "Draft heads",
        """Forward and backward of a divergence between a draft's lm_head of C classes and C rows of its target's
lm_head, for T tokens of all depths: T x hidden size x C x vocabulary of the target. Bare GEMMs are the
draft's three products and the target's logits of C classes. `torch`: losses of full logits with softmaxes
in fp32, as trainers of drafts write them, from all logits of the target (SpecForge) or from a copy of its
selected rows (speculators). `MiB`: peak memory of a call beyond what was allocated already.""",
        (Group(("ms", "ratio", "extra MiB", "dW error", "dX error")),),
        Picture(
            "Divergence of a draft's lm_head: 8192 tokens, 4096 features, 32,000 of 128,256 classes",
            ("forward_kl 8192x4096x32000x128256",),
            ("ms", "extra MiB"),
            (
                "liger_dist",
                "torch, all logits of the target",
                "torch.compile, all logits of the target",
                "torch, its selected rows",
                "torch.compile, its selected rows",
            ),
        ),
    ),
    Page(
        "memory_bound",
        "Kernels that move bytes",
        """Device time of one call on inputs that are not in the cache, as a percentage of a large copy's bandwidth for
the bytes that have to be moved: forward · backward.""",
        (
            Group(("forward %", "backward %"), "Norm|GLU|RoPE", "problems", "% of a copy, forward · backward"),
            Group(("ms", "of 4 bytes %", "extra MiB"), "cross_entropy"),
        ),
        Picture(
            "Norm, gated activation and rotary embedding of Llama 8B, 8192 tokens, forward and backward",
            ("RMSNorm 8192x4096", "SwiGLU 8192x14336", "RoPE 1x8192x32x8x128"),
            ("forward and backward ms",),
            ("liger_dist", "torch.compile", "Liger"),
        ),
        skipped="copy of this size",
        hidden="(8192x2048|32768x2048|8192x5120|16384x4096|4096x16384|GLU 8192x8192)$",
    ),
    Page(
        "norm_widths",
        "Norms of any width",
        """Device time of RMSNorm and LayerNorm in bf16 on tensors of about 2^25 numbers, in TB/s of the bytes that
have to be moved (forward: read and written once; backward: two read, one written), forward · backward.""",
        (Group(("forward TB/s", "backward TB/s"), "", "problems", "TB/s, forward · backward, by rows x width"),),
        Picture(
            "RMSNorm of 2880 columns, the width of gpt-oss-20b",
            ("RMSNorm 11650x2880",),
            ("backward TB/s", "forward TB/s"),
            ("liger_dist", "torch", "Liger"),
        ),
        hidden="x(768|1024|1152|1536|4096|2304|2560|3072|3584|5120|6144|7168)$",
    ),
)
