"""Experts of a mixture as one function, forward and backward, against fp64 autograd of a loop over experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from loss_inputs import BACKENDS, DEVICE
from torch import Tensor
from truth import relative_error

from liger_dist.fused_layers.grouped_experts import ExpertOptions, ExpertTensors, experts
from liger_dist_kernels import GateOptions, route

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""of bf16 beside 1.5 times the error of torch's own bf16"""
T, K, E, D, FEATURES, RANK = 7, 2, 5, 8, 16, 8
GATES = {
    "SwiGLU": GateOptions(activation="silu"),
    "GeGLU, limited after": GateOptions(activation="gelu", limit=0.5, limits_activation=True),
    "tanh": GateOptions(activation="gelu_tanh"),
    "limited": GateOptions(activation="silu", limit=0.7),
    "gpt-oss": GateOptions(activation="silu", is_interleaved=True, limit=1.0, slope=1.702, offset=1.0),
    "squared ReLU": GateOptions(activation="relu_squared", is_gated=False),
}
ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: F.relu(x).square(),
}


def true_experts(x: Tensor, index: Tensor, weight: Tensor, tensors: ExpertTensors, options: ExpertOptions) -> Tensor:
    total, gate = torch.zeros_like(x), options.gate
    for e in range(tensors.up.shape[0]):
        up, down = (w[e] if options.is_transposed else w[e].T for w in (tensors.up, tensors.down))
        if tensors.up_a_ErD is not None and tensors.up_b_ErH is not None:
            up = up + options.up_scale * tensors.up_a_ErD[e].T @ tensors.up_b_ErH[e]
        if tensors.down_a_ErF is not None and tensors.down_b_ErD is not None:
            down = down + options.down_scale * tensors.down_a_ErF[e].T @ tensors.down_b_ErD[e]
        token, k = torch.where(index == e)
        h = x[token] @ up
        if tensors.up_bias_EH is not None:
            h = h + tensors.up_bias_EH[e]
        g, u = (h, None) if not gate.is_gated else (h[:, ::2], h[:, 1::2]) if gate.is_interleaved else h.chunk(2, 1)
        if gate.limit is not None and not gate.limits_activation:
            g = g.clamp(max=gate.limit)
        activated = ACTIVATIONS[gate.activation](gate.slope * g) / gate.slope
        if gate.limit is not None and gate.limits_activation:
            activated = activated.clamp(max=gate.limit)
        if u is not None:
            u = u if gate.limit is None else u.clamp(-gate.limit, gate.limit)
            activated = activated * (u + gate.offset)
        y = activated @ down
        if tensors.down_bias_ED is not None:
            y = y + tensors.down_bias_ED[e]
        total = total.index_add(0, token, y * weight[token, k, None])
    return total


def values(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    drawn = on_device.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(DEVICE, dtype).requires_grad_()


def case(
    options: ExpertOptions,
    *,
    dtype: torch.dtype,
    has_bias: bool = False,
    lora: str = "",
    tokens: int = T,
    top_k: int = K,
    hidden: int = D,
    features: int = FEATURES,
    rank: int = RANK,
) -> tuple[Tensor, Tensor, Tensor, ExpertTensors]:
    """Inputs of a call. Expert 2 has no token, and some pairs have no expert, as on another rank."""
    H = features * (1 + options.gate.is_gated)
    shapes = {"up": (H, hidden), "down": (hidden, features)}
    if options.is_transposed:
        shapes = {name: shape[::-1] for name, shape in shapes.items()}  # type: ignore[misc]
    if has_bias:
        shapes |= {"up_bias_EH": (H,), "down_bias_ED": (hidden,)}  # type: ignore[dict-item]
    if "up" in lora:
        shapes |= {"up_a_ErD": (rank, hidden), "up_b_ErH": (rank, H)}
    if "down" in lora:
        shapes |= {"down_a_ErF": (rank, features), "down_b_ErD": (rank, hidden)}
    tensors = {name: values(E, *shape, dtype=dtype, seed=n) for n, (name, shape) in enumerate(shapes.items())}
    generator = torch.Generator().manual_seed(9)
    index = torch.stack(
        [on_device.randperm(E + 1, generator=generator)[:top_k] for _ in range(tokens)] or [on_device.empty(0)]
    )
    index = index.reshape(tokens, top_k).long()
    index[index == 2] = E
    weight = on_device.rand(tokens, top_k, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()
    return values(tokens, hidden, dtype=dtype, seed=20), index.to(DEVICE), weight, ExpertTensors(**tensors)


def assert_experts_are_true(
    x: Tensor, index: Tensor, weight: Tensor, tensors: ExpertTensors, options: ExpertOptions
) -> None:
    """The result and every gradient; those of an expert without tokens are zeros."""
    dtype = x.dtype
    y = experts(x, index, weight, tensors, options=options)
    upstream = values(*y.shape, dtype=dtype, seed=30).detach()
    leaves = [x, weight, *(tensor for tensor in tensors if tensor is not None)]
    found = [y, *torch.autograd.grad(y, leaves, upstream)]
    truths, of_torch = (by_loop(leaves, index, tensors, upstream, options, dtype=of) for of in (torch.float64, dtype))
    names = ["y", "x", "weight", *(name for name, tensor in tensors._asdict().items() if tensor is not None)]
    for name, mine, theirs, truth in zip(names, found, of_torch, truths, strict=True):
        allowed = TOLERANCE[dtype]
        if dtype == torch.bfloat16:
            allowed += 1.5 * relative_error(theirs.detach(), truth.detach())
        assert relative_error(mine.detach(), truth.detach()) <= allowed, name
    for gradient in found[3:]:
        if gradient.shape[0] == E:
            assert gradient[2].count_nonzero() == 0


def by_loop(
    leaves: list[Tensor],
    index: Tensor,
    tensors: ExpertTensors,
    upstream: Tensor,
    options: ExpertOptions,
    *,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Result and gradients of :func:`true_experts` in a dtype."""
    own = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    rest = iter(own[2:])
    own_tensors = ExpertTensors(*(None if tensor is None else next(rest) for tensor in tensors))
    y = true_experts(own[0], index, own[1], own_tensors, options)
    return [y, *torch.autograd.grad(y, own, upstream.to(dtype))]


@pytest.mark.nightly(gate=["GeGLU, limited after"], dtype=[torch.float64], backend=["triton"])
@pytest.mark.nightly(gate=["limited"], dtype=[torch.float32], backend=["triton"])
@pytest.mark.cover("pairs")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_and_layout(gate: str, dtype: torch.dtype, backend: Any) -> None:
    is_bf16 = dtype == torch.bfloat16
    if is_bf16 and backend == "triton" and DEVICE == "cpu":
        pytest.skip("Triton's interpreter cuts off the bits that bf16 has not, instead of rounding")
    if is_bf16 and GATES[gate].limit is not None:
        pytest.skip("a rounded gate may be on the other side of its limit, where the gradient is another")
    loras = ("", "up", "down", "up and down")
    for is_transposed, has_bias, lora in product((False, True), (False, True), loras):
        # No kernel sees whether weights are transposed.
        if (dtype, backend) != (torch.float64, "reference") and is_transposed:
            continue
        if dtype != torch.float64 and not has_bias:
            continue
        options = ExpertOptions(
            gate=GATES[gate], is_transposed=is_transposed, up_scale=0.5, down_scale=0.7, backend=backend
        )
        # Rounding is compared over more numbers.
        sizes: dict[str, int] = {"tokens": 64, "hidden": 64} if is_bf16 else {}
        assert_experts_are_true(*case(options, dtype=dtype, has_bias=has_bias, lora=lora, **sizes), options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 4), (13, 1), (5, 5)])
def test_few_tokens_and_every_number_of_experts(tokens: int, top_k: int, backend: Any) -> None:
    options = ExpertOptions(gate=GATES["SwiGLU"], backend=backend)
    assert_experts_are_true(*case(options, dtype=torch.float64, has_bias=True, tokens=tokens, top_k=top_k), options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lora", ["", "up and down"])
def test_rows_of_the_pairs_alone(lora: str, backend: Any) -> None:
    """As many rows as pairs with an expert, or more: the same results; and one row where there is no pair."""
    options = ExpertOptions(gate=GATES["gpt-oss"], up_scale=0.5, down_scale=0.7, backend=backend)
    x, index, weight, tensors = case(options, dtype=torch.float64, has_bias=True, lora=lora, tokens=24)
    for pairs in (index, index[:1].expand(24, K), torch.full_like(index, E)):
        num_rows = max(int((pairs < E).sum()), 1)
        for rows in (num_rows, num_rows + 1):
            assert_experts_are_true(x, pairs.contiguous(), weight, tensors, replace(options, num_rows=rows))
        assert len(route(pairs.contiguous(), E, num_rows).pair_S) == num_rows


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate", ["SwiGLU", "gpt-oss"])
@pytest.mark.parametrize("rank", [3, 16, 72])
def test_low_rank_products_of_several_tiles(rank: int, gate: str, backend: Any) -> None:
    """More rows, features and ranks than a program computes at once; rows of several experts in one program."""
    options = ExpertOptions(gate=GATES[gate], up_scale=0.5, down_scale=0.7, backend=backend)
    assert_experts_are_true(
        *case(options, dtype=torch.float32, lora="up and down", tokens=24, features=136, rank=rank), options
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_input_may_have_other_strides(backend: Any) -> None:
    options = ExpertOptions(gate=GATES["SwiGLU"], up_scale=0.5, down_scale=0.7, backend=backend)
    x, index, weight, tensors = case(options, dtype=torch.float32, has_bias=True, lora="up and down")

    def strided(tensor: Tensor) -> Tensor:
        every_other = tensor.detach().repeat_interleave(2, -1)[..., ::2]
        assert not every_other.is_contiguous()
        return every_other.requires_grad_()

    # Weights of products have one dim of stride 1.
    others = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in tensors[:2]]
    others += [strided(tensor) for tensor in tensors[2:]]
    assert_experts_are_true(strided(x), index.T.contiguous().T, strided(weight), ExpertTensors(*others), options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gate", GATES)
def test_a_limit_hides_no_nan(gate: str, backend: Any) -> None:
    options = ExpertOptions(gate=GATES[gate], backend=backend)
    x, index, weight, tensors = case(options, dtype=torch.float32)
    with torch.no_grad():
        x[0] = torch.nan
    y = experts(x, index, weight, tensors, options=options)
    has_expert = bool((index[0] < E).any())
    assert has_expert
    assert y[0].isnan().all()
    assert y[1:].isfinite().all()
    (d_up,) = torch.autograd.grad(y.sum(), [tensors.up])
    assert d_up[index[0][index[0] < E]].isnan().any()


@pytest.mark.smoke
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token(backend: Any) -> None:
    options = ExpertOptions(gate=GATES["SwiGLU"], backend=backend)
    x, index, weight, tensors = case(options, dtype=torch.float32, has_bias=True, lora="up and down", tokens=0)
    y = experts(x, index, weight, tensors, options=options)
    assert y.shape == (0, D)
    gradients = torch.autograd.grad(y.sum(), [x, weight, *tensors], allow_unused=True)
    assert all(gradient is not None and gradient.count_nonzero() == 0 for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_expert_twice_for_a_token(backend: Any) -> None:
    options = ExpertOptions(gate=GATES["SwiGLU"], backend=backend)
    x, index, weight, tensors = case(options, dtype=torch.float64, has_bias=True)
    index[:3] = 1
    assert_experts_are_true(x, index, weight, tensors, options)


@pytest.mark.nightly(backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_trains_has_a_gradient(backend: Any) -> None:
    options = ExpertOptions(gate=GATES["SwiGLU"], up_scale=0.5, down_scale=0.7, backend=backend)
    given = case(options, dtype=torch.float64, has_bias=True, lora="up and down")
    x, index, weight, tensors = given
    all_leaves = [x, weight, *tensors]
    y = experts(*given, options=options)
    everything = torch.autograd.grad(y.sum(), all_leaves)
    for place, leaf in enumerate(all_leaves):
        frozen = [other.detach() for other in all_leaves]
        frozen[place] = leaf
        y = experts(frozen[0], index, frozen[1], ExpertTensors(*frozen[2:]), options=options)
        (alone,) = torch.autograd.grad(y.sum(), [leaf])
        assert torch.equal(alone, everything[place])


def test_what_a_forward_keeps() -> None:
    """Besides its inputs: gate and up, and the order of tokens; not gathered tokens, activations or outputs."""
    options = ExpertOptions(gate=GATES["SwiGLU"])
    x, index, weight, tensors = case(options, dtype=torch.float32)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(x, index, weight, tensors, options=options)
    inputs = {tensor.data_ptr() for tensor in (x, index, weight, *tensors) if tensor is not None}
    of_forward = [tensor for pointer, tensor in kept.items() if pointer not in inputs]
    floating = [tuple(tensor.shape) for tensor in of_forward if tensor.is_floating_point()]
    assert floating == [(T * K, 2 * FEATURES)]
    assert all(tensor.numel() <= T * K for tensor in of_forward if not tensor.is_floating_point())


def test_autocast_computes_in_its_dtype() -> None:
    options = ExpertOptions(gate=GATES["SwiGLU"])
    x, index, weight, tensors = case(options, dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        y = experts(x, index, weight, tensors, options=options)
    (d_up,) = torch.autograd.grad(y.sum(), [tensors.up])
    assert y.dtype == d_up.dtype == torch.float32
    rounded = ExpertTensors(*(None if tensor is None else tensor.bfloat16() for tensor in tensors))
    assert torch.equal(y, experts(x.bfloat16(), index, weight, rounded, options=options).float())


def test_routes_sort_by_expert_and_keep_the_order_of_tokens() -> None:
    index = torch.tensor([[3, 0], [0, 9], [1, 3], [9, 0]], device=DEVICE)
    routing = route(index, 4)
    assert routing.pair_S.tolist() == [1, 2, 7, 4, 0, 5, 3, 6]
    assert routing.ends_E.tolist() == [3, 4, 4, 6]
    assert routing.row_TK.tolist() == [[4, 0], [1, 6], [3, 5], [7, 2]]


def test_a_result_is_the_same_in_each_run() -> None:
    options = ExpertOptions(gate=GATES["gpt-oss"])
    given = case(options, dtype=torch.float32, has_bias=True, tokens=40, top_k=4)
    runs = []
    for _ in range(3):
        y = experts(*given, options=options)
        runs.append([y, *torch.autograd.grad(y.square().sum(), [given[0], given[2], given[3].up])])
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def test_a_limit_counts() -> None:
    """The cases above reach their limits: without them, they differ."""
    for name in ("limited", "GeGLU, limited after", "gpt-oss"):
        limited = ExpertOptions(gate=GATES[name])
        free = replace(limited, gate=replace(GATES[name], limit=None, limits_activation=False))
        given = case(limited, dtype=torch.float64)
        difference = experts(*given, options=limited) - experts(*given, options=free)
        assert difference.norm() > 0.1
