"""Liger-Kernel's names and signatures (0.8), computed here: code written for them runs with its import changed.

    from liger_dist.integrations.liger import LigerFusedLinearCrossEntropyLoss, liger_rms_norm

Differences, all on the safe side: sums over more than two chunks are in fp32 whatever ``accum_dtype`` says, memory is
set by ``liger_dist.linear_cross_entropy``'s own budget and not by ``chunk_mem_const``, and nothing is written over what
the caller still holds, whatever ``in_place`` says. For whole models there is :func:`liger_dist.wrap`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.layers import gated_activation, norm
from liger_dist.losses.arguments import LossOutput
from liger_dist.losses.cross_entropy import cross_entropy
from liger_dist.losses.linear_cross_entropy import linear_cross_entropy
from liger_dist.losses.normalization import Reduction
from liger_dist_kernels import NormOptions


@dataclass
class CrossEntropyOutput:
    """What a loss returns when more than itself was asked for."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    chunk_mem_const: int = 1,
) -> Any:
    """:func:`liger_dist.linear_cross_entropy`: ``input`` ``[T, D]``, ``weight`` ``[V, D]``, ``target`` ``[T]``.

    With ``use_token_scaling`` each token's loss is multiplied by the probability of its label, which costs another
    product of ``input`` and ``weight``.
    """
    _refuse_predicted_tokens(return_predicted_tokens)
    common: dict[str, Any] = {"bias": bias, "ignore_index": ignore_index, "softcap": softcap}
    token_weight = None
    if use_token_scaling:
        with torch.no_grad():
            seen = linear_cross_entropy(input, weight, target, outputs=("log_prob",), **common)
        assert isinstance(seen, LossOutput)
        assert seen.log_prob is not None
        token_weight = seen.log_prob.exp()
    result = linear_cross_entropy(
        input,
        weight,
        target,
        class_weight=ce_weight,
        z_loss=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        token_weight=token_weight,
        outputs=("z_loss", "is_top1"),
        **common,
    )
    return _returned(result, target, ignore_index, reduction, return_z_loss, return_token_accuracy)


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> Any:
    """:func:`liger_dist.cross_entropy` of logits ``[T, V]``; ``size_average`` and ``reduce`` are placeholders."""
    _refuse_predicted_tokens(return_predicted_tokens)
    result = cross_entropy(
        input,
        target,
        class_weight=weight,
        ignore_index=ignore_index,
        z_loss=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=reduction,
        softcap=softcap,
        outputs=("z_loss", "is_top1"),
    )
    return _returned(result, target, ignore_index, reduction, return_z_loss, return_token_accuracy)


def _refuse_predicted_tokens(asked: bool) -> None:
    if asked:
        raise LigerDistError(
            "return_predicted_tokens is True but this loss does not look for the class with the largest logit; leave "
            "it out, or take the argmax of logits that you compute."
        )


def _returned(
    result: Tensor | LossOutput,
    target: Tensor,
    ignore_index: int,
    reduction: Reduction,
    with_z_loss: bool,
    with_accuracy: bool,
) -> Tensor | CrossEntropyOutput:
    assert isinstance(result, LossOutput)
    if not with_z_loss and not with_accuracy:
        return result.loss
    assert result.is_top1 is not None
    accuracy = result.is_top1.float()
    if reduction != "none":
        accuracy = accuracy.sum() / (target != ignore_index).sum().to(accuracy.device)
    return CrossEntropyOutput(
        loss=result.loss,
        z_loss=result.z_loss if with_z_loss else None,
        token_accuracy=accuracy if with_accuracy else None,
    )


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """:func:`liger_fused_linear_cross_entropy` with its options kept."""

    def __init__(
        self,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.ce_weight = ce_weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction: Reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.accum_dtype = accum_dtype
        self.use_token_scaling = use_token_scaling
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, lin_weight: Tensor, _input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        return liger_fused_linear_cross_entropy(
            _input,
            lin_weight,
            target,
            bias,
            self.ce_weight,
            self.ignore_index,
            self.lse_square_scale,
            self.label_smoothing,
            self.reduction,
            self.softcap,
            self.return_z_loss,
            self.accum_dtype,
            self.use_token_scaling,
            self.return_token_accuracy,
            self.return_predicted_tokens,
        )


class LigerCrossEntropyLoss(nn.Module):
    """:func:`liger_cross_entropy` with its options kept."""

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.ignore_index = ignore_index
        self.lse_square_scale = lse_square_scale
        self.label_smoothing = label_smoothing
        self.reduction: Reduction = reduction
        self.softcap = softcap
        self.return_z_loss = return_z_loss
        self.return_token_accuracy = return_token_accuracy
        self.return_predicted_tokens = return_predicted_tokens

    def forward(self, _input: Tensor, target: Tensor) -> Any:
        return liger_cross_entropy(
            _input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            softcap=self.softcap,
            return_z_loss=self.return_z_loss,
            return_token_accuracy=self.return_token_accuracy,
            return_predicted_tokens=self.return_predicted_tokens,
        )


def liger_rms_norm(
    X: Tensor, W: Tensor | None, eps: float, offset: float = 0.0, casting_mode: str = "llama", in_place: bool = True
) -> Tensor:
    """RMSNorm of ``[..., D]``. ``casting_mode`` "llama" rounds before the weight, "gemma" once behind it."""
    return norm(X, W, options=_rms_options(eps, offset, casting_mode))[0]


def liger_fused_add_rms_norm(
    X: Tensor,
    R: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of ``X + R``, and the sum."""
    return norm(X, W, residual=R, options=_rms_options(eps, offset, casting_mode))


def _rms_options(eps: float, offset: float, casting_mode: str) -> NormOptions:
    if casting_mode not in ("llama", "gemma"):
        raise LigerDistError(f"casting_mode is {casting_mode!r}; expected 'llama' or 'gemma'.")
    return NormOptions(eps=eps, offset=offset, round_before_weight=casting_mode == "llama")


def liger_layer_norm(X: Tensor, W: Tensor | None, B: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of ``[..., D]``."""
    return norm(X, W, B, options=NormOptions(eps=eps, subtract_mean=True))[0]


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """``silu(a) * b``."""
    return gated_activation(a, b, activation="silu")


def liger_geglu(a: Tensor, b: Tensor) -> Tensor:
    """``gelu(a) * b``, the gelu by tanh."""
    return gated_activation(a, b, activation="gelu_tanh")


class LigerRMSNorm(nn.Module):
    """:func:`liger_rms_norm` with a weight."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = "llama",
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        if init_fn not in ("ones", "zeros"):
            raise LigerDistError(f"init_fn is {init_fn!r}; expected 'ones' or 'zeros'.")
        start = torch.ones(hidden_size) if init_fn == "ones" else torch.zeros(hidden_size)
        self.weight = nn.Parameter(start) if elementwise_affine else None
        self.variance_epsilon, self.offset, self.casting_mode = eps, offset, casting_mode

    def forward(self, hidden_states: Tensor) -> Tensor:
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset, self.casting_mode)
