"""Attention with sinks by FlashAttention, against scores in fp64."""

from __future__ import annotations

import copy
from typing import Any

import on_device
import pytest
import torch
from models import make_model, norm_errors
from torch import Tensor

import liger_dist
from liger_dist.fused_layers.sink_attention import sink_attention

LENGTHS = (70, 1, 129, 56)


def true_attention(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, window: int | None, scale: float) -> Tensor:
    """One document after the other, with the sink as one more key without a value."""
    results = []
    for q_LHD, k_LHD, v_LHD in zip(q.split(LENGTHS), k.split(LENGTHS), v.split(LENGTHS), strict=True):
        groups = q.shape[1] // k.shape[1]
        k_LHD, v_LHD = (x.repeat_interleave(groups, 1) for x in (k_LHD, v_LHD))
        scores = torch.einsum("qhd,khd->hqk", q_LHD, k_LHD) * scale
        place = on_device.arange(len(q_LHD))
        is_seen = place <= place[:, None]
        if window is not None:
            is_seen = is_seen & (place > place[:, None] - window)
        scores = scores.masked_fill(~is_seen, -torch.inf)
        of_sinks = sinks[:, None, None].expand(-1, len(q_LHD), 1)
        weights = torch.cat([scores, of_sinks], -1).softmax(-1)[..., :-1]
        results.append(torch.einsum("hqk,khd->qhd", weights, v_LHD))
    return torch.cat(results)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_a_softmax_with_one_more_key(dtype: torch.dtype, heads: tuple[int, int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    total, scale = sum(LENGTHS), 0.3
    q, k, v = (
        on_device.randn(total, count, 64, generator=generator).to(dtype).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    sinks = on_device.randn(heads[0], generator=generator).to(dtype).requires_grad_()
    ends = on_device.tensor([0, *LENGTHS]).cumsum(0).int()
    upstream = on_device.randn(total, heads[0], 64, generator=generator).to(dtype)
    true = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    found = sink_attention(q, k, v, sinks, (ends, max(LENGTHS), -1 if window is None else window - 1), scale)
    expected = true_attention(*true, window, scale)
    found.backward(upstream)
    expected.backward(upstream.double())
    limit = 8e-3 if dtype == torch.bfloat16 else 1e-3
    pairs = {"output": (found, expected)} | {
        name: (one.grad, other.grad) for name, one, other in zip("qkvs", (q, k, v, sinks), true, strict=True)
    }
    for name, (one, other) in pairs.items():
        assert one is not None
        assert other is not None
        assert float((one.double() - other).norm() / other.norm()) < limit, name


@pytest.mark.gpu(1)
@pytest.mark.parametrize("rows", ["packed", "texts", "padded"])
def test_gpt_oss_equals_its_own_attention(rows: str) -> None:
    """Gradients in bf16 are as near to those of fp32 as those of the eager attention are."""
    model: Any = make_model("gpt_oss", dtype=torch.bfloat16)
    true = copy.deepcopy(model).float()
    eager = copy.deepcopy(model)
    lengths = [9, 30, 25]
    ids = on_device.randint(1, 100, (2, 64), generator=torch.Generator().manual_seed(0))
    batch: dict[str, Tensor] = {"input_ids": ids, "labels": ids.clone()}
    if rows == "packed":
        batch["position_ids"] = torch.cat([on_device.arange(length) for length in lengths]).expand(2, -1)
        batch["labels"][:, [0, 9, 39]] = -100
    if rows == "padded":
        batch["attention_mask"] = (on_device.arange(64) < on_device.tensor([[64], [40]])).long()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    errors = []
    liger_dist.wrap(model, "none")
    assert liger_dist.explain(model).attention.startswith("liger_dist")
    for one in (eager, true):
        liger_dist.wrap(one, "none", config=liger_dist.WrapConfig(varlen_attention=False))
    for one in (model, eager, true):
        one(**batch).loss.backward()
    gradients = {name: p.grad.double() for name, p in true.named_parameters() if p.grad is not None}
    for one in (model, eager):
        found = norm_errors(
            {name: p.grad.double() for name, p in one.named_parameters() if p.grad is not None}, gradients
        )
        errors.append(max(found.values()))
    assert errors[0] < 1.5 * errors[1] + 1e-3, errors
