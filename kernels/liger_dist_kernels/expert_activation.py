"""Activation of an expert: its options, and what it computes, in torch.

Legend: S rows, H features of the first projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .gated_activation import Activation, activated_with_slope


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Options that define the activation of an expert: ``activation(gate) * up``, or that of ``up`` alone."""

    activation: Activation
    is_gated: bool = True
    """False for ``activation(up)``"""
    is_interleaved: bool = False
    """True if gate and up alternate in the features of their projection; otherwise gate is the first half"""
    limit: float | None = None
    """the gate is at most this, and up between plus and minus this"""
    limits_activation: bool = False
    """True if the activation of the gate is limited, instead of the gate"""
    slope: float = 1.0
    """``activation(slope * gate) / slope``, as in gpt-oss"""
    offset: float = 0.0
    """added to up, after its limit"""

    def features(self, projected: int) -> int:
        """Returns F for a projection of so many features."""
        return projected // 2 if self.is_gated else projected


def split_projection(h_SH: Tensor, options: GateOptions) -> tuple[Tensor, Tensor]:
    """Returns gate and up of a first projection; without a gate, the projection as both."""
    if not options.is_gated:
        return h_SH, h_SH
    gate, up = (h_SH[:, ::2], h_SH[:, 1::2]) if options.is_interleaved else h_SH.chunk(2, 1)
    return gate, up


def join_projection(gate: Tensor, up: Tensor, options: GateOptions) -> Tensor:
    """Undoes :func:`split_projection`."""
    if not options.is_gated:
        return gate
    return torch.stack([gate, up], 2).flatten(1) if options.is_interleaved else torch.cat([gate, up], 1)


def gate_in_torch(g: Tensor, u: Tensor, options: GateOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the activation, its derivative by the gate, and the factor up with its derivative."""
    limit, is_before = options.limit, options.limit is not None and not options.limits_activation
    activated, d_gate = activated_with_slope(
        options.slope * (g.clamp(max=limit) if is_before else g), options.activation
    )
    activated = activated / options.slope
    if limit is not None:
        d_gate = d_gate * ((g if is_before else activated) <= limit)
        activated = activated if is_before else activated.clamp(max=limit)
    ones = torch.ones_like(u)
    if not options.is_gated:
        return activated, d_gate, ones, ones
    if limit is None:
        return activated, d_gate, u + options.offset, ones
    return activated, d_gate, u.clamp(-limit, limit) + options.offset, (u.abs() <= limit).to(u.dtype)
