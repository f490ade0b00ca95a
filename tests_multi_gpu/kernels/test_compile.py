"""torch.compile takes every op into its graph, without a break, and computes what eager computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import on_device
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from truth import relative_error

import liger_dist
from liger_dist.fused_layers.gated_mlp import gated_activation
from liger_dist.fused_layers.grouped_experts import ExpertOptions, ExpertTensors, experts
from liger_dist.fused_layers.norm import norm
from liger_dist.fused_layers.rotary import rotary
from liger_dist_kernels import GateOptions, NormOptions, RotaryLayout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Inductor needs a C++ compiler on a CPU; what it is given there is the same graph.
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"
T, D, V = 24, 16, 83


def leaf(*shape: int, seed: int) -> Tensor:
    return on_device.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def labels() -> Tensor:
    drawn = on_device.randint(0, V, (T,), generator=torch.Generator().manual_seed(9))
    drawn[::5] = -100
    return drawn.to(DEVICE)


LABELS = labels()
IDS = torch.arange(T, device=DEVICE)[:, None] * 3 + torch.tensor([0, 7, 0], device=DEVICE)
PROBS = torch.tensor([0.2, 0.3, 0.4], device=DEVICE).expand(T, 3)
ALL_OUTPUTS = (
    *("log_prob", "log_prob_at", "top_k", "entropy", "sum_sq_prob", "is_top1", "z_loss", "mean_logit"),
    "log_sum_exp",
)
TABLES = [leaf(2, T, 1, D, seed=seed).detach() for seed in (11, 12)]
RMS, LAYER = NormOptions(eps=1e-6), NormOptions(eps=1e-6, subtract_mean=True)

OPS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "RMSNorm": ([(2, T, D), (D,)], lambda x, w: norm(x, w, options=RMS)),
    "LayerNorm": ([(2, T, D), (D,), (D,)], lambda x, w, b: norm(x, w, b, options=LAYER)),
    "SwiGLU": ([(2, T, D), (2, T, D)], lambda g, u: gated_activation(g, u, activation="silu")),
    "GeGLU": ([(2, T, D), (2, T, D)], lambda g, u: gated_activation(g, u, activation="gelu_tanh")),
    "experts": (
        [(T, D), (T, 2), (4, 2 * 8, D), (4, D, 8), (4, 2 * 8), (4, D)],
        lambda x, weight, up, down, up_bias, down_bias: _experts(x, weight, up, down, up_bias, down_bias),
    ),
    "experts, LoRA on the second projection": (
        [(T, D), (T, 2), (4, 2 * 8, D), (4, D, 8), (4, 8, 8), (4, 8, D)],
        lambda x, weight, up, down, a, b: _experts(x, weight, up, down, down_a_ErF=a, down_b_ErD=b),
    ),
    "rotary": (
        [(2, T, 3, D), (2, T, 1, D)],
        lambda q, k: rotary((q, k), *TABLES, num_rotated=D, layout=RotaryLayout()),
    ),
    "cross entropy": ([(T, V)], lambda x: liger_dist.cross_entropy(x, LABELS, z_loss=1e-2)),
    "cross entropy, overwriting": (
        [(T, V)],
        lambda x: liger_dist.cross_entropy(x * 1.0, LABELS, overwrite_logits=True),
    ),
    "cross entropy, per token": (
        [(T, V)],
        lambda x: liger_dist.cross_entropy(x, LABELS, reduction="none", label_smoothing=0.1),
    ),
    "linear cross entropy": (
        [(T, D), (V, D), (V,)],
        lambda x, w, b: liger_dist.linear_cross_entropy(x, w, LABELS, bias=b, softcap=5.0, memory_budget=7 * V * 4),
    ),
    "linear cross entropy, outputs": (
        [(T, D), (V, D)],
        lambda x, w: _values(liger_dist.linear_cross_entropy(x, w, LABELS, outputs=("log_prob", "entropy"))),
    ),
    "linear cross entropy, every output": (
        [(T, D), (V, D), (V,)],
        lambda x, w, b: _values(
            liger_dist.linear_cross_entropy(
                *(x, w, LABELS),
                bias=b,
                outputs=ALL_OUTPUTS,
                token_ids=IDS,
                top_k=2,
                reduction="none",
                label_smoothing=0.1,
                z_loss=1e-2,
                memory_budget=7 * V * 4,
            )
        ),
    ),
    "linear cross entropy, soft labels": (
        [(T, D), (V, D)],
        lambda x, w: liger_dist.linear_cross_entropy(
            x, w, LABELS, soft_labels=(IDS, PROBS), soft_weight=0.6, remainder="spread", temperature=0.7
        ),
    ),
    "cross entropy, soft labels": (
        [(T, V)],
        lambda x: liger_dist.cross_entropy(x, LABELS, soft_labels=(IDS, PROBS), soft_weight=0.6),
    ),
}


def _experts(x: Tensor, weight: Tensor, up: Tensor, down: Tensor, *biases: Tensor, **tensors: Tensor) -> Tensor:
    index = torch.arange(T * 2, device=DEVICE).view(T, 2) % 3
    options = ExpertOptions(gate=GateOptions(activation="silu"), down_scale=0.5)
    return experts(x, index, weight, ExpertTensors(up, down, *biases, **tensors), options=options)


def _values(output: Any) -> tuple[Tensor, ...]:
    """Those that carry gradients, and the others without."""
    values = (output.loss, output.log_prob, output.log_prob_at, output.entropy, output.sum_sq_prob, output.z_loss)
    values += (output.mean_logit, output.log_sum_exp, None if output.top_k is None else output.top_k.log_prob)
    return tuple(value for value in values if value is not None)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", OPS)
def test_no_graph_break_and_the_same_gradients(name: str) -> None:
    shapes, function = OPS[name]
    leaves = [leaf(*shape, seed=seed) for seed, shape in enumerate(shapes)]

    def total(*tensors: Tensor) -> Tensor:
        results = function(*tensors)
        results = (results,) if isinstance(results, Tensor) else results
        return sum((result.square().sum() for result in results), torch.zeros((), device=DEVICE))

    compiled = torch.compile(total, backend=BACKEND, fullgraph=True)
    want, got = total(*leaves), compiled(*leaves)
    assert relative_error(got, want) < 1e-5
    for mine, other in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves), strict=True):
        assert relative_error(mine, other) < 1e-5


@pytest.mark.smoke
@pytest.mark.parametrize("outputs", [(), ("log_prob", "entropy")], ids=["mean", "outputs"])
def test_two_graphs_for_any_number_of_tokens(outputs: tuple[str, ...]) -> None:
    """One for the first number, one for all others; and one more where only some keep their logits for the backward."""
    graphs = CompileCounter()

    def loss(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
        result = liger_dist.linear_cross_entropy(x, w, labels, memory_budget=64 * V * 4, outputs=outputs)
        return result if isinstance(result, Tensor) else _values(result)[1].sum()

    compiled = torch.compile(loss, backend=graphs, fullgraph=True)
    weight = leaf(V, D, seed=0)
    for tokens in (17, 24, 40, 64, 65, 100, 333, 1000, 1024, 2048):
        drawn = torch.randint(0, V, (tokens,), device=DEVICE)
        compiled(leaf(tokens, D, seed=1), weight, drawn).backward()
        assert graphs.frame_count <= (2 if tokens <= 64 or not outputs else 3), tokens


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_does_not_change_a_mean(dtype: torch.dtype) -> None:
    """A graph counts labels on the device; 70,000 of them are infinite in fp16."""
    logits = on_device.randn(70_000, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    drawn = on_device.randint(0, 3, (len(logits),), generator=torch.Generator().manual_seed(1))
    truth = torch.nn.functional.cross_entropy(logits.detach().double(), drawn)
    torch.set_default_dtype(dtype)
    try:
        loss = torch.compile(liger_dist.cross_entropy, backend="aot_eager", fullgraph=True)(logits, drawn)
    finally:
        torch.set_default_dtype(torch.float32)
    assert loss.dtype == torch.float32
    assert relative_error(loss, truth) < 1e-6
