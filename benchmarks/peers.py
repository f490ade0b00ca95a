"""Other libraries, each imported only where it is installed, with the accuracy class of its weight gradient.

"fp32 sum": chunks, or all tokens, are added up in fp32. "bf16 sum": in the weight's dtype, chunk by chunk.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import newer_torch

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def linear_cross_entropies() -> list[tuple[str, Loss, str]]:
    """Name, ``loss(hidden_TD, weight_VD, labels_T)`` and accuracy class of every one that is installed."""
    found: list[tuple[str, Loss, str]] = []
    if find_spec("liger_kernel"):
        found += [
            ("Liger default", liger(), "bf16 sum"),
            ("Liger x8", liger(chunk_mem_const=8), "bf16 sum"),
            ("Liger fp32", liger(accum_dtype=torch.float32), "fp32 sum"),
            ("Liger fp32 x4", liger(accum_dtype=torch.float32, chunk_mem_const=4), "fp32 sum"),
            ("Liger fp32 x8", liger(accum_dtype=torch.float32, chunk_mem_const=8), "fp32 sum"),
        ]
        if find_spec("cutlass"):
            found.append(("Liger CuTe, for Hopper", liger_cute, "fp32 sum"))
    if find_spec("trl"):
        found.append(("TRL", trl(), "fp32 sum"))
    if find_spec("cut_cross_entropy"):
        found.append(("Apple CCE", cut_cross_entropy(), "bf16 sum"))
    if find_spec("quack") and find_spec("cutlass"):
        found += [("QuACK", quack(use_scaled_exp=False), "fp32 sum"), ("QuACK scaled-exp", quack(), "fp32 sum")]
    found += torch_op()
    compiled: Any = torch.compile(plain)
    return [*found, ("torch.compile", compiled, "fp32 sum"), ("torch", plain, "fp32 sum")]


POLICIES = {"auto": "torch's op", "balanced": "torch's op, balanced", "accurate": "torch's op, accurate"}
"""``acc_policy`` of torch's op, and the names of its rows"""


def torch_op() -> list[tuple[str, Loss, str]]:
    """``torch.nn.functional.linear_cross_entropy`` in chunks (torch 2.13 and later), of each way to accumulate."""
    given = os.environ.get(newer_torch.FILES)
    folder = None if given is None else Path(given)
    if not hasattr(F, "linear_cross_entropy") and folder is None:
        return []
    op, options = (newer_torch.module_of(name, folder) for name in (newer_torch.OP, newer_torch.OPTIONS))

    try:
        options.LinearCrossEntropyOptions(acc_policy="balanced")
        policies = ("auto", "balanced")
    except ValueError:  # torch 2.15 has no policy "balanced".
        policies = ("auto", "accurate")

    def chosen(policy: str, hidden: Tensor, weight: Tensor) -> Any:
        (T, D), V = hidden.shape, weight.shape[0]
        return options.LinearCrossEntropyOptions(acc_policy=policy)._adjust(
            num_batches=T, in_features=D, num_classes=V, dtype=hidden.dtype, device=hidden.device
        )

    def loss_of(policy: str) -> Loss:
        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            plan = chosen(policy, hidden, weight)
            sizes = (plan.batch_chunk_size, plan.acc_policy, plan.acc_dtype, False)
            wanted = (hidden.requires_grad, weight.requires_grad, False)
            values = (hidden, weight, labels, None, None, "mean", -100, 0.0)
            result: Tensor = op._linear_cross_entropy_batch_chunked(*values, *sizes, *wanted)[0]
            return result

        return loss

    # Sums of chunks have the dtype of the weight: ``acc_dtype`` is fp32 under "auto" alone, for its logits.
    found = [(POLICIES[policy], loss_of(policy), "bf16 sum") for policy in policies]
    if folder is not None and newer_torch.has_kernel(folder):
        kernel = newer_torch.kernel_loss(folder, lambda x, w: int(chosen("compact", x, w).batch_chunk_size))
        found.append(("torch's op, CuTe kernel", kernel, "bf16 sum"))
    return found


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A bf16 product and torch's cross entropy in fp32, as models write it."""
    return F.cross_entropy((hidden @ weight.T).float(), labels)


def liger(**options: Any) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyFunction,
    )

    names = ("bias", "ce_weight", "ignore_index", "lse_square_scale", "label_smoothing", "reduction", "softcap")
    first = (None, None, -100, 0.0, 0.0, "mean", None)
    assert len(names) == len(first)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        rest = (False, options.get("accum_dtype"), False, False, False, None, None, options.get("chunk_mem_const", 1))
        result = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, *first, *rest)
        return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

    return loss


def liger_cute(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """bf16, whole tiles of tokens and classes, no option."""
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import LigerFusedLinearCrossEntropySM90Function

    loss: Tensor = LigerFusedLinearCrossEntropySM90Function.apply(hidden, weight, labels)
    return loss


def trl() -> Loss:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        valid = labels >= 0
        log_probs = ChunkedLogProbFunction.apply(hidden, weight, None, labels.clamp_min(0), 1.0, 32768, None, 1.0, ())[
            0
        ]
        return -(log_probs * valid).sum() / valid.sum()  # type: ignore[no-any-return]

    return loss


def cut_cross_entropy() -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy  # type: ignore[no-any-return]


def quack(use_scaled_exp: bool | None = None) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return chunked_linear_cross_entropy(  # type: ignore[no-any-return]
            hidden, weight, labels, use_scaled_exp=use_scaled_exp
        )

    return loss


Outputs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def log_probs() -> list[tuple[str, Outputs, str]]:
    """Name, ``log_prob_and_entropy(hidden_TD, weight_VD, labels_T)`` and dtype of the logits."""
    found: list[tuple[str, Outputs, str]] = []
    if find_spec("liger_kernel"):
        found.append(("512-token chunks (verl's fallback, in Liger)", liger_log_probs("fallback"), "fp32 copy of bf16"))
        if find_spec("cutlass"):
            found.append(("Liger scaled cross entropy (CuTe)", liger_log_probs("native"), "fp32 logits"))
    if find_spec("trl"):
        found.append(("TRL", trl_log_probs, "bf16 logits"))
    return found


def liger_log_probs(kind: str) -> Outputs:
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    def outputs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if kind == "fallback":
            nll, entropy = module._FusedLinearPPOFallbackFunction.apply(hidden, weight, labels, 1.0, -100, True)
        else:
            nll, entropy = module.LigerFusedLinearScaledCrossEntropyFunction.apply(
                hidden, weight, labels, return_entropy=True
            )
        return -nll, entropy

    return outputs


def trl_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    found = ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, 32768, None, 1.0, ("log_probs", "entropy"))
    return found[0], found[1]


def divergences(teacher_TE: Tensor, teacher_VE: Tensor, divergence: str) -> list[tuple[str, Loss, str]]:
    """Name, ``loss(hidden_TD, weight_VD, labels_T)`` and accuracy class of every one that is installed; "jsd" with a
    beta of 0.5."""
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}[divergence]
    found: list[tuple[str, Loss, str]] = []
    if find_spec("liger_kernel"):
        found += [
            ("Liger fused JSD", liger_divergence(teacher_TE, teacher_VE, beta), "bf16 sum"),
            ("Liger chunked JSD", liger_chunked_divergence(teacher_TE, teacher_VE, beta), "bf16 sum"),
        ]
    if find_spec("trl"):
        found.append(("TRL", trl_divergence(teacher_TE, teacher_VE, beta), "fp32 sum"))

    def plain_divergence(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        log_q = (hidden @ weight.T).float().log_softmax(-1)
        with torch.no_grad():
            log_p = (teacher_TE @ teacher_VE.T).float().log_softmax(-1)
        if beta == 0.0:
            return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
        log_m = torch.logaddexp(log_q, log_p) - 0.6931471805599453
        of_teacher = F.kl_div(log_m, log_p, reduction="batchmean", log_target=True)
        return 0.5 * of_teacher + 0.5 * F.kl_div(log_m, log_q, reduction="batchmean", log_target=True)

    return [*found, ("torch", plain_divergence, "fp32 sum")]


def liger_divergence(teacher_TE: Tensor, teacher_VE: Tensor, beta: float) -> Loss:
    from liger_kernel.transformers.fused_linear_jsd import LigerFusedLinearJSD

    module = LigerFusedLinearJSD(jsd_beta=beta)
    return lambda hidden, weight, labels: module(hidden, weight, teacher_TE, teacher_VE, labels)


def liger_chunked_divergence(teacher_TE: Tensor, teacher_VE: Tensor, beta: float) -> Loss:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    module = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta)
    return lambda hidden, weight, labels: module(hidden, weight, teacher_TE, teacher_VE, labels)


def trl_divergence(teacher_TE: Tensor, teacher_VE: Tensor, beta: float) -> Loss:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        each, _ = ChunkedDivergenceFunction.apply(hidden, weight, None, teacher_TE, teacher_VE, None, beta)
        return each.mean()  # type: ignore[no-any-return]

    return loss
