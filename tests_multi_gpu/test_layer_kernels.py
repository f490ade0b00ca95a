"""Norms, gated activations and rotary embedding, forward and backward, against fp64 autograd of their definitions."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_linear_cross_entropy import BACKENDS, DEVICE
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from truth import relative_error

from liger_dist.layers import gated_activation, gated_projection, norm, rotary
from liger_dist_kernels import ACTIVATIONS, NormOptions, RotaryLayout

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)
SHAPES = [(3, 2, 32), (7, 51), (0, 16)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype).requires_grad_()


def true_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if options.subtract_mean else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + options.eps)
    y = y if weight is None else y * (options.offset + weight)
    return y if bias is None else y + bias


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "after an addition"])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype, backend: Any, with_residual: bool) -> None:
    cases = product([False, True], [0.0, 1.0], [False, True], ["both", "weight", "neither"])
    for subtract_mean, offset, round_before_weight, parameters in cases:
        options = NormOptions(
            eps=1e-5, subtract_mean=subtract_mean, offset=offset, round_before_weight=round_before_weight
        )
        check_norm(shape, dtype, backend, with_residual, parameters, options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("subtract_mean", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("D", [16384, 20000])
def test_a_norm_of_wide_rows(D: int, subtract_mean: bool, backend: Any) -> None:
    options = NormOptions(eps=1e-5, subtract_mean=subtract_mean)
    check_norm((9, D), torch.float32, backend, False, "both" if subtract_mean else "weight", options)


def check_norm(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    backend: Any,
    with_residual: bool,
    parameters: str,
    options: NormOptions,
) -> None:
    """Results and all gradients against fp64."""
    D = shape[-1]
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1) if with_residual else None
    weight = None if parameters == "neither" else random(D, dtype=dtype, seed=2)
    bias = random(D, dtype=dtype, seed=3) if parameters == "both" else None
    inputs = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    y, total = norm(x, weight, bias, residual=residual, options=options, backend=backend)
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    true_total = leaves[0] + leaves[-1] if with_residual else leaves[0]
    true_weight, true_bias = None if weight is None else leaves[1], None if bias is None else leaves[2]
    truth = true_norm(true_total, true_weight, true_bias, options)
    up_y, up_total = random(*shape, dtype=dtype, seed=4), random(*shape, dtype=dtype, seed=5)
    loss = (y * up_y).sum() + ((total * up_total).sum() if with_residual else 0)
    true_loss = (truth * up_y.double()).sum() + ((true_total * up_total.double()).sum() if with_residual else 0)
    assert y.dtype == dtype
    assert relative_error(y, truth) <= TOLERANCE[dtype]
    got = torch.autograd.grad(loss, inputs)
    for gradient, want in zip(got, torch.autograd.grad(true_loss, leaves), strict=True):
        assert relative_error(gradient, want) <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_rounds_where_its_model_rounds(backend: Any) -> None:
    x = random(9, 64, dtype=torch.bfloat16).detach()
    weight = random(64, dtype=torch.float32, seed=1).detach()
    n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    before, _ = norm(x, weight, options=NormOptions(eps=1e-6, round_before_weight=True), backend=backend)
    after, _ = norm(x, weight, options=NormOptions(eps=1e-6), backend=backend)
    assert before.dtype == torch.float32
    # The interpreter cuts numbers off where hardware rounds them.
    cuts_off = backend == "triton" and DEVICE == "cpu"
    assert relative_error(before, n.bfloat16() * weight) < (8e-3 if cuts_off else 1e-6)
    assert after.dtype == torch.bfloat16
    assert relative_error(after, (n * weight).bfloat16()) < (8e-3 if cuts_off else 1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(activation: Any, dtype: torch.dtype, backend: Any) -> None:
    functions = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu}
    for shape in [(2, 3, 51), (5, 1100), (0, 8)]:
        gate_up = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
        with torch.no_grad():
            gate_up *= 3
        gate, up = gate_up.chunk(2, -1)
        y = gated_activation(gate, up, activation=activation, backend=backend)
        leaf = gate_up.detach().double().requires_grad_()
        true_gate, true_up = leaf.chunk(2, -1)
        activated = functions.get(activation, lambda x: F.gelu(x, approximate="tanh"))(true_gate)
        upstream = random(*shape, dtype=dtype, seed=1)
        assert relative_error(y, activated * true_up) <= TOLERANCE[dtype]
        (got,) = torch.autograd.grad((y * upstream).sum(), gate_up)
        (want,) = torch.autograd.grad((activated * true_up * upstream.double()).sum(), leaf)
        assert relative_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("bias", [False, True])
def test_a_gated_projection_keeps_no_product(bias: bool) -> None:
    down = torch.nn.Linear(40, 6, bias=bias, dtype=torch.float64, device=DEVICE)
    gate, up = (random(2, 5, 40, dtype=torch.float64, seed=seed) for seed in range(2))
    products: list[StorageWeakRef] = []

    def projection(product: Tensor) -> Tensor:
        products.append(StorageWeakRef(product.untyped_storage()))
        result: Tensor = down(product)
        return result

    def run() -> Tensor:
        return gated_projection(projection, gate, up, activation="silu")

    y = run()
    assert products.pop().expired()
    leaves = [gate, up, *down.parameters()]
    upstream = random(*y.shape, dtype=torch.float64, seed=3).detach()
    want = torch.autograd.grad(down(F.silu(gate) * up), leaves, upstream)
    for _ in range(2):
        for gradient, expected in zip(torch.autograd.grad(y, leaves, upstream, retain_graph=True), want, strict=True):
            assert relative_error(gradient, expected) <= 1e-12
    for others in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        with others:
            y = run()
        for gradient, expected in zip(torch.autograd.grad(y, leaves, upstream), want, strict=True):
            assert relative_error(gradient, expected) <= 1e-12
    y = checkpoint(run, use_reentrant=False)
    for gradient, expected in zip(torch.autograd.grad(y, leaves, upstream), want, strict=True):
        assert relative_error(gradient, expected) <= 1e-12


def test_a_gated_projection_keeps_all_else_as_it_is() -> None:
    """Negated views, what an operation saves of its result, changes that autograd has to notice, and no graph."""
    weight = random(6, 40, dtype=torch.float64)
    gate, up = (random(5, 40, dtype=torch.float64, seed=seed) for seed in range(1, 3))
    for projection in (lambda x: F.linear(torch._neg_view(x), weight), lambda x: F.linear(x, weight).sigmoid()):
        y = gated_projection(projection, gate, up, activation="silu")
        (got,) = torch.autograd.grad(y.sum(), weight)
        (want,) = torch.autograd.grad(projection(F.silu(gate) * up).sum(), weight)
        assert relative_error(got, want) <= 1e-12
    y = gated_projection(lambda x: F.linear(x, weight).sigmoid(), gate, up, activation="silu")
    memory = StorageWeakRef(y.untyped_storage())
    del y
    assert memory.expired()
    y = gated_projection(lambda x: F.linear(x, weight), gate, up, activation="silu")
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_gated_projection_that_changes_its_input() -> None:
    """What it keeps is then not the product any more."""
    weight = random(6, 40, dtype=torch.float64)
    gate, up = (random(5, 40, dtype=torch.float64, seed=seed) for seed in range(1, 3))
    y = gated_projection(lambda x: F.linear(x.mul_(2.0), weight), gate, up, activation="relu")
    (got,) = torch.autograd.grad(y.sum(), weight, retain_graph=True)
    (want,) = torch.autograd.grad(F.linear(F.relu(gate) * up * 2.0, weight).sum(), weight)
    assert relative_error(got, want) <= 1e-12


def true_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, layout: RotaryLayout) -> Tensor:
    """Pair by pair."""
    R = cos.shape[-1]

    def places(pairing: str, pair: int) -> tuple[int, int]:
        if pairing == "shared":
            return pair, pair
        return (2 * pair, 2 * pair + 1) if pairing == "neighbours" else (pair, pair + R // 2)

    columns = list(x.unbind(-1))
    for pair in range(R // 2):
        a, b = (x[..., place] for place in places(layout.reads, pair))
        (cos_a, sin_a), (cos_b, sin_b) = ((cos[..., p], sin[..., p]) for p in places(layout.tables, pair))
        write_a, write_b = places(layout.writes, pair)
        columns[write_a], columns[write_b] = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    return torch.stack(columns, -1)


LAYOUTS = [
    RotaryLayout(reads=reads, writes=writes, tables=tables)
    for reads, writes, tables in product(
        ("halves", "neighbours"), ("halves", "neighbours"), ("halves", "neighbours", "shared")
    )
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.reads}, {layout.writes}, {layout.tables}")
def test_rotary(layout: RotaryLayout, dtype: torch.dtype, backend: Any) -> None:
    for D, R in ((8, 8), (20, 6)):
        x = random(2, 5, 3, D, dtype=dtype)
        # Not the tables of any angle, alike in no half: the definition alone counts.
        cos, sin = (random(2, 1, 5, R, dtype=dtype, seed=seed).detach() for seed in (1, 2))
        (y,) = rotary((x.transpose(1, 2),), cos, sin, num_rotated=R, layout=layout, backend=backend)
        leaf = x.detach().double().requires_grad_()
        truth = true_rotary(leaf.transpose(1, 2), cos.double(), sin.double(), layout=layout)
        upstream = random(2, 3, 5, D, dtype=dtype, seed=3)
        assert relative_error(y, truth) <= TOLERANCE[dtype]
        (got,) = torch.autograd.grad((y * upstream).sum(), x)
        (want,) = torch.autograd.grad((truth * upstream.double()).sum(), leaf)
        assert relative_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_of_half_the_width(backend: Any) -> None:
    x = random(2, 3, 5, 8, dtype=torch.float32)
    cos, sin = (random(2, 1, 5, 4, dtype=torch.float32, seed=seed).detach() for seed in (1, 2))
    layout = RotaryLayout(tables="shared")
    (y,) = rotary((x,), cos, sin, num_rotated=8, layout=layout, backend=backend)
    assert relative_error(y, true_rotary(x, cos.repeat(1, 1, 1, 2), sin.repeat(1, 1, 1, 2), layout=layout)) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_queries_and_keys_in_one_launch(heads_dim: int, backend: Any) -> None:
    """Other numbers of heads, strides of a packed projection, one table for the batch, a gradient for one."""
    T, D = 5, 8
    packed = random(2, T, 7 * D, dtype=torch.float32)
    cos, sin = (random(1, T, D, dtype=torch.float32, seed=seed).detach().unsqueeze(2) for seed in (1, 2))
    layout = RotaryLayout()

    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[..., : 5 * D].unflatten(-1, (5, D)), x[..., 5 * D :].unflatten(-1, (2, D))

    leaf = packed.detach().double().requires_grad_()
    truths = [true_rotary(x, cos.double(), sin.double(), layout=layout) for x in split(leaf)]
    given = [x.transpose(1, 2) if heads_dim == 1 else x for x in (*split(packed), cos, sin)]
    rotated = rotary(given[:2], given[2], given[3], num_rotated=D, layout=layout, backend=backend)
    for y, truth in zip(rotated, truths, strict=True):
        assert relative_error(y, truth.transpose(1, 2) if heads_dim == 1 else truth) < 1e-6
    (got,) = torch.autograd.grad(rotated[1].square().sum(), packed)
    (want,) = torch.autograd.grad(truths[1].square().sum(), leaf)
    assert relative_error(got, want) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_and_keys_of_other_lengths_under_one_position(backend: Any) -> None:
    """Tables that are one for all tokens do not say that there are as many queries as keys."""
    q, k = random(2, 3, 5, 8, dtype=torch.float32), random(2, 3, 7, 8, dtype=torch.float32, seed=4)
    cos, sin = (random(2, 1, 1, 8, dtype=torch.float32, seed=seed).detach() for seed in (1, 2))
    layout = RotaryLayout()
    for y, x in zip(rotary((q, k), cos, sin, num_rotated=8, layout=layout, backend=backend), (q, k), strict=True):
        assert relative_error(y, true_rotary(x.double(), cos.double(), sin.double(), layout=layout)) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_norm_too_wide_for_both_sums(backend: Any) -> None:
    x, weight, bias = (
        random(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate([(3, 8200), (8200,), (8200,)])
    )
    y, _ = norm(x, weight, bias, options=NormOptions(eps=1e-5, subtract_mean=True), backend=backend)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = torch.nn.functional.layer_norm(leaves[0], (8200,), leaves[1], leaves[2], 1e-5)
    upstream = random(3, 8200, dtype=torch.float32, seed=5).detach()
    assert relative_error(y, truth) < 1e-6
    wanted = torch.autograd.grad((truth * upstream).sum(), leaves)
    for got, want in zip(torch.autograd.grad((y * upstream).sum(), (x, weight, bias)), wanted, strict=True):
        assert relative_error(got, want) < 1e-5
