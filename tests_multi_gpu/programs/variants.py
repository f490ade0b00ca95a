"""Counts the variants that kernels are compiled in as the number of tokens changes, without a GPU.

Prints one JSON line for each op and number of tokens: the kernels that have not been launched like this before. Not in
Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from registers import described, recorded_launches
from torch import Tensor

import liger_dist
from liger_dist.fused_layers.gated_mlp import gated_activation
from liger_dist.fused_layers.grouped_experts import ExpertOptions, ExpertTensors, experts
from liger_dist.fused_layers.norm import norm
from liger_dist.fused_layers.rotary import rotary
from liger_dist_kernels import GateOptions, NormOptions, RotaryLayout
from liger_dist_kernels.divergence import DivergenceOptions, divergence_bwd
from liger_dist_kernels.divergence_terms import divergence_terms
from liger_dist_kernels.products import logits_buffer

LENGTHS = (1025, 8192, 131072, 1024, 1536, 2047, 3000, 4096, 5555, 9001, 12345, 16384, 33333, 65536, 77777, 100003)
D, V = 256, 128256


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


def ids(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.int64)


def head(T: int, **options: Any) -> None:
    result = liger_dist.linear_cross_entropy(empty(T, D), empty(V, D), ids(T), **options)
    if isinstance(result, Tensor):
        result.backward()
    else:
        sum(value.sum() for value in (result.log_prob, result.entropy) if value is not None).backward()


def probs(T: int) -> tuple[Tensor, Tensor]:
    return ids(T, 4), torch.empty(T, 4, device="meta")


def diverge(T: int, divergence: Any) -> None:
    options = DivergenceOptions(divergence=divergence)
    like = empty(T, D).detach()
    student, teacher = (logits_buffer(like, T, classes) for classes in (V, V - 7))
    terms = divergence_terms(student, teacher, options=options, is_padded=True)
    factor = torch.empty(T, device="meta")
    divergence_bwd(student, teacher, ids(T), terms, factor, options=options, out_TV=student, is_padded=True)


def compute_experts(T: int, rank: int = 0) -> None:
    weights: tuple[Tensor, ...] = (empty(8, 2 * D, D), empty(8, D, D), empty(8, 2 * D), empty(8, D))
    if rank:
        weights += empty(8, rank, D), empty(8, rank, 2 * D), empty(8, rank, D), empty(8, rank, D)
    options = ExpertOptions(gate=GateOptions(activation="silu"), up_scale=0.5, down_scale=0.5)
    experts(empty(T, D), ids(T, 2), empty(T, 2), ExpertTensors(*weights), options=options).sum().backward()


OPS: dict[str, Callable[[int], Any]] = {
    "mean": head,
    "smoothing, z-loss": lambda T: head(T, label_smoothing=0.1, z_loss=1e-4),
    "sum of weighted tokens": lambda T: head(T, reduction="sum", token_weight=torch.empty(T, device="meta")),
    "none": lambda T: head(T, outputs=("log_prob",), reduction="none"),
    "policy": lambda T: head(T, outputs=("log_prob", "entropy")),
    "policy, temperatures": lambda T: head(T, outputs=("log_prob",), temperature=torch.empty(T, device="meta")),
    "policy, fp32 logits": lambda T: head(T, outputs=("log_prob", "entropy"), logits_dtype=torch.float32),
    "fp32 logits": lambda T: head(T, logits_dtype=torch.float32),
    "soft labels": lambda T: head(T, soft_labels=probs(T)),
    "given logits": lambda T: liger_dist.cross_entropy(empty(T, V), ids(T)).backward(),
    "forward KL": lambda T: diverge(T, "forward_kl"),
    "JSD": lambda T: diverge(T, "jsd"),
    "total variation": lambda T: diverge(T, "total_variation"),
    "RMSNorm": lambda T: norm(empty(T, D), empty(D), options=NormOptions(eps=1e-6)).sum().backward(),
    "gated MLP": lambda T: gated_activation(empty(T, D), empty(T, D), activation="silu").sum().backward(),
    "experts": compute_experts,
    "experts, LoRA": lambda T: compute_experts(T, rank=16),
    "rotary": lambda T: rotary(
        (empty(1, T, 8, 64), empty(1, T, 2, 64)), *2 * [torch.empty(1, T, 1, 64, device="meta")], num_rotated=64,
        layout=RotaryLayout(),
    )[0].sum().backward(),
}  # fmt: skip


def main() -> None:
    seen: set[str] = set()
    with (
        recorded_launches() as recorded,
        # Of devices that torch has: tensors without memory are on none of them.
        mock.patch.object(torch, "is_autocast_enabled", return_value=False),
        mock.patch.object(torch, "autocast", return_value=contextlib.nullcontext()),
    ):
        for name, op in OPS.items():
            for T in LENGTHS:
                recorded.clear()
                op(T)
                launches = {described(*launch): launch[0].__name__ for launch in recorded}
                new = sorted(kernel for source, kernel in launches.items() if source not in seen)
                seen |= launches.keys()
                print(json.dumps({"op": name, "tokens": T, "launched": len(launches), "new": new}), flush=True)


if __name__ == "__main__":
    main()
