"""Attention with sinks by FlashAttention-2: a score for each head that takes part in the softmax and has no value
(StreamingLLM, Xiao et al. 2023, arXiv:2309.17453; as in gpt-oss).

[Note: sinks without a kernel]

With the scores ``s`` of a query, ``lse = log(sum(exp(s)))`` and the sink ``c``, the weights are ``exp(s - lse')`` where
``lse' = log(exp(lse) + exp(c))``: those without sinks, times ``exp(lse - lse')``. The backward of FlashAttention
computes the weights anew, as ``exp(s - lse)`` of the lse that it is given, and their gradient as ``weights * (d - sum(
upstream * output))``. Given ``lse'`` and the output with sinks it is exact for them. The gradient of the sink's
score is ``-exp(c - lse') * sum(upstream * output)``.

Legend: T tokens of all documents, H heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Bounds = tuple[Tensor, int, int]
"""cumulative lengths of documents int32 ``[documents + 1]``; tokens of the longest one; tokens to the left of a token
that it attends to, -1 for all"""


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, bounds: Bounds, scale: float | None
) -> Tensor:
    """Computes causal attention within documents and windows, with sinks.

    Args:
        query: ``[T, H, D]``, bf16 or fp16 on a GPU; ``key`` and ``value`` may have fewer heads.
        sinks: ``[H]``, the score of each head's sink.
        scale: of the scores; None for ``D ** -0.5``.

    Returns:
        ``[T, H, D]``.
    """
    result: Tensor = _SinkAttention.apply(query, key, value, sinks, bounds, scale)  # type: ignore[no-untyped-call]
    return result


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        bounds: Bounds,
        scale: float | None,
    ) -> Tensor:
        ends, longest, left = bounds
        output, lse, *_ = torch.ops.aten._flash_attention_forward(
            query,
            key,
            value,
            ends,
            ends,
            longest,
            longest,
            0.0,
            left < 0,
            return_debug_mask=False,
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )
        lse_with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
        output = (output * (lse - lse_with_sinks).exp().t()[..., None]).to(query.dtype)
        assert isinstance(output, Tensor)
        ctx.save_for_backward(query, key, value, sinks, ends, output, lse_with_sinks)
        ctx.longest, ctx.left, ctx.scale = longest, left, scale
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, ends, output, lse = ctx.saved_tensors
        gradient = gradient.contiguous()
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)
        of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
            gradient,
            query,
            key,
            value,
            output,
            lse,
            ends,
            ends,
            ctx.longest,
            ctx.longest,
            0.0,
            ctx.left < 0,
            unused,
            unused[:0],
            scale=ctx.scale,
            window_size_left=ctx.left,
            window_size_right=0,
        )
        of_sinks = None
        if ctx.needs_input_grad[3]:
            shares = (gradient.float() * output.float()).sum(-1).t()
            of_sinks = -((sinks.float()[:, None] - lse).exp() * shares).sum(1).to(sinks.dtype)
        return of_query, of_key, of_value, of_sinks, None, None
