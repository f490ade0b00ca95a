"""Implementations of the memory-bound kernels: this library's, torch's, and Liger's where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import liger_dist
from liger_dist.fused_layers.gated_mlp import gated_activation
from liger_dist.fused_layers.norm import norm
from liger_dist.fused_layers.rotary import rotary
from liger_dist_kernels import NormOptions, RotaryLayout

Layer = Callable[..., Tensor | Sequence[Tensor]]
EPS = 1e-6


def inputs(kernel: str, shape: tuple[int, ...], seed: int) -> list[Tensor]:
    """bf16 arguments of one call; those of which gradients are wanted require them."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    if kernel == "RoPE":
        batch, tokens, heads_q, heads_k, width = shape
        q, k = (random(batch, tokens, heads, width).transpose(1, 2).requires_grad_() for heads in (heads_q, heads_k))
        angles = torch.rand(batch, tokens, width // 2, generator=generator, device="cuda").repeat(1, 1, 2)
        return [q, k, angles.cos().bfloat16(), angles.sin().bfloat16()]
    rows, width = shape
    if kernel in ("SwiGLU", "GeGLU"):
        return [random(rows, width).requires_grad_(), random(rows, width).requires_grad_()]
    x, weight, other = random(rows, width).requires_grad_(), random(width).requires_grad_(), random(rows, width)
    if kernel == "add + RMSNorm":
        return [x, other.requires_grad_(), weight]
    return [x, weight, random(width).requires_grad_()] if kernel == "LayerNorm" else [x, weight]


def _rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def _torch_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _torch_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, EPS), total


def _our_add_norm(x: Tensor, residual: Tensor, weight: Tensor, options: NormOptions) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm(total, weight, options=options), total


def _our_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return rotary(
        (q, k), cos.unsqueeze(1), sin.unsqueeze(1), num_rotated=q.shape[-1], layout=RotaryLayout(tables="shared")
    )


def implementations(kernel: str) -> list[tuple[str, Layer]]:
    """Name and function of every implementation of ``kernel``."""
    rms, layer = NormOptions(eps=EPS, round_before_weight=True), NormOptions(eps=EPS, subtract_mean=True)
    ours: dict[str, Layer] = {
        "RMSNorm": lambda x, w: norm(x, w, options=rms),
        "add + RMSNorm": lambda x, r, w: _our_add_norm(x, r, w, rms),
        "LayerNorm": lambda x, w, b: norm(x, w, b, options=layer),
        "SwiGLU": partial(gated_activation, activation="silu"),
        "GeGLU": partial(gated_activation, activation="gelu_tanh"),
        "RoPE": _our_rope,
    }
    plain: dict[str, Layer] = {
        "RMSNorm": lambda x, w: F.rms_norm(x, w.shape, w, EPS),
        "add + RMSNorm": _torch_add_norm,
        "LayerNorm": lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        "SwiGLU": lambda g, u: F.silu(g) * u,
        "GeGLU": lambda g, u: F.gelu(g, approximate="tanh") * u,
        "RoPE": _torch_rope,
    }
    found = [("liger_dist", ours[kernel]), ("torch", plain[kernel])]
    compiled: Any = torch.compile(plain[kernel])
    found.append(("torch.compile", compiled))
    if find_spec("liger_kernel"):
        found.append(("Liger", _liger(kernel)))
    return found


def _liger(kernel: str) -> Layer:
    from liger_kernel import ops
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    functions: dict[str, Layer] = {
        "RMSNorm": lambda x, w: ops.LigerRMSNormFunction.apply(x, w, EPS, 0.0, "llama", True),
        "add + RMSNorm": lambda x, r, w: LigerFusedAddRMSNormFunction.apply(x, r, w, EPS, 0.0, "llama", True),
        "LayerNorm": lambda x, w, b: ops.LigerLayerNormFunction.apply(x, w, b, EPS),
        "SwiGLU": ops.LigerSiLUMulFunction.apply,
        "GeGLU": ops.LigerGELUMulFunction.apply,
        "RoPE": ops.LigerRopeFunction.apply,
    }
    return functions[kernel]


def cross_entropies() -> list[tuple[str, Callable[[Tensor, Tensor], Tensor]]]:
    """Name and ``loss(logits, labels)`` of every cross entropy on given logits."""

    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    compiled: Any = torch.compile(plain)
    found: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
        ("liger_dist", liger_dist.cross_entropy),  # type: ignore[list-item]
        ("liger_dist, overwriting", partial(liger_dist.cross_entropy, overwrite_logits=True)),  # type: ignore[list-item]
        ("torch", plain),
        ("torch.compile", compiled),
    ]
    if find_spec("liger_kernel"):
        from liger_kernel.ops import LigerCrossEntropyFunction

        def liger(logits: Tensor, labels: Tensor) -> Tensor:
            result = LigerCrossEntropyFunction.apply(logits, labels, None)
            return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]

        found.append(("Liger, overwriting", liger))
    return found
