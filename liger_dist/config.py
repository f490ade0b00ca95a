"""Options of what is fused, in one frozen record. Sharding options are fields of the strategies in ``sharding/``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

import torch

from liger_dist_kernels import BACKENDS, Backend

from .errors import LigerDistError

TokenMean = Literal["local", "global"]
LogitsDtype = torch.dtype | Literal["fp32_operands"] | None
LOGITS = "logits"
LOGITS_DTYPES: tuple[LogitsDtype, ...] = (None, torch.float32, "fp32_operands")


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Options of :func:`liger_dist.wrap`. Everything has a default; nothing is read from the environment.

    Raises:
        LigerDistError: a value out of its range, or options that contradict each other.
    """

    fused_loss: bool = True
    """Compute the loss inside lm_head. False only shards, for comparison."""
    layer_kernels: bool = True
    """Compute norms, gated MLPs and rotary embeddings by kernels, where a probe of the model's code agrees.
    Layers that are compiled, or that compute in fp64, run their original code."""
    mlp_tile_tokens: int | None = None
    """Tokens that a gated MLP computes at a time: its activations exist for one tile, which the backward computes
    again. For long sequences, with activation checkpointing; 4096 to 16384 keep the products' speed. None for all at
    once."""
    varlen_attention: bool = True
    """Select ``attn_implementation="liger_dist"`` where the model's attention is "sdpa" or "eager" and causal: packed,
    padded and windowed sequences are computed without a dense mask. See docs/packing.md."""
    backend: Backend = "auto"
    """"triton", "reference" (plain torch), or "auto": Triton on GPUs, the reference elsewhere."""
    memory_budget: int | None = None
    """Bytes of the buffer for one chunk of logits (with a vocab-parallel lm_head, also of the exchanged hidden states);
    None for 1 GiB, or 256 MiB if the weight is frozen and not vocab-parallel (defaults of
    ``liger_dist_kernels/token_chunks.py``). Three and more chunks need an fp32 sum of the weight's gradient (4 bytes
    per element), so a smaller buffer may take more memory."""
    logits_dtype: LogitsDtype = None
    """``torch.float32`` keeps the logits of 16-bit operands in fp32, in which the products are summed anyway:
    log-probabilities without the rounding of logits to 16 bits. "fp32_operands" also converts hidden states and weight
    to fp32 before the products, as an lm_head in fp32 does (TRL's ``cast_lm_head_to_fp32``); slower, and with an fp32
    copy of the weight. None for the dtype of the operands."""
    max_valid_tokens: int | None = None
    """Number of tokens that the loss computes inside a CUDA graph, where the host cannot count those with a label; a
    device-side assertion fails if more labels are valid. None for all. Elsewhere they are counted."""
    token_mean: TokenMean = "local"
    """Divisor of a mean loss without ``num_items_in_batch``: "local" for the tokens of this rank (as the model does),
    "global" for those of all data-parallel ranks, so that the averaged gradient is that of one mean over all tokens.
    "global" costs an all-reduce of one number."""
    outputs: tuple[str, ...] = ()
    """What every call with labels returns beside its loss: names among "token_accuracy" (0-d), "is_top1", "entropy",
    "sum_sq_prob", "log_prob", "mean_logit", "log_sum_exp" and "z_loss" (the labels' shape; all without gradient), or
    "logits" alone: then evaluation computes the model's original loss and full logits, and training stays fused.
    ``outputs=`` of a call comes first."""

    def __post_init__(self) -> None:
        for name in ("fused_loss", "layer_kernels", "varlen_attention"):
            if not isinstance(getattr(self, name), bool):
                raise LigerDistError(f"{name} is {getattr(self, name)!r}; expected True or False.")
        check_choice("backend", self.backend, BACKENDS)
        check_choice("token_mean", self.token_mean, get_args(TokenMean))
        check_choice("logits_dtype", self.logits_dtype, LOGITS_DTYPES)
        check_count("memory_budget", self.memory_budget, "bytes")
        check_count("mlp_tile_tokens", self.mlp_tile_tokens, "tokens")
        if self.mlp_tile_tokens is not None and not self.layer_kernels:
            raise LigerDistError(
                f"mlp_tile_tokens is {self.mlp_tile_tokens} but layer_kernels is False, and only gated MLPs that are "
                "computed by kernels have tiles; leave one of them out."
            )
        check_count("max_valid_tokens", self.max_valid_tokens, "tokens")
        if self.fused_loss:
            return
        outputs = (self.outputs,) if isinstance(self.outputs, str) else tuple(self.outputs)
        contradictions = {
            "token_mean": self.token_mean != "local",
            "logits_dtype": self.logits_dtype is not None,
            "outputs": outputs not in ((), (LOGITS,)),
        }
        for name, is_given in contradictions.items():
            if is_given:
                raise LigerDistError(
                    f"{name} is {getattr(self, name)!r} but fused_loss is False, and the model's own loss does not "
                    "have it; leave one of them out."
                )


def check_count(name: str, value: int | None, unit: str) -> None:
    """Refuses what is neither None nor an integer of ``unit`` above 0."""
    is_count = isinstance(value, Integral) and not isinstance(value, bool) and value > 0
    if value is not None and not is_count:
        raise LigerDistError(f"{name} is {value!r}; expected a number of {unit} above 0, or None.")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuses a value that is none of ``choices``."""
    if value not in choices:
        raise LigerDistError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Refuses what is neither a floating dtype nor None."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise LigerDistError(f"{name} is {dtype!r}; expected a floating torch.dtype such as torch.bfloat16.")
