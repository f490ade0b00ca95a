"""Norms, gated activations and rotary embedding, forward and backward, against fp64 autograd of their definitions."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import product
from typing import Any
from weakref import ref

import on_device
import pytest
import torch
import torch.nn.functional as F
from loss_inputs import BACKENDS, DEVICE
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from truth import relative_error

from liger_dist.fused_layers import recompute
from liger_dist.fused_layers.gated_mlp import gated_activation
from liger_dist.fused_layers.norm import norm
from liger_dist.fused_layers.rotary import rotary
from liger_dist_kernels import ACTIVATIONS, NormOptions, RotaryLayout

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCE)
SHAPES = [(3, 2, 32), (7, 51), (0, 16)]


def true_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, options: NormOptions) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if options.subtract_mean else x
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + options.eps)
    y = y if weight is None else y * (options.offset + weight)
    return y if bias is None else y + bias


@pytest.mark.nightly(shape=[(3, 2, 32)], dtype=[torch.float64, torch.float32], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms(shape: tuple[int, ...], dtype: torch.dtype, backend: Any) -> None:
    cases = product([False, True], [0.0, 1.0], [False, True], ["both", "weight", "neither"])
    for subtract_mean, offset, round_before_weight, parameters in cases:
        options = NormOptions(
            eps=1e-5, subtract_mean=subtract_mean, offset=offset, round_before_weight=round_before_weight
        )
        check_norm(shape, dtype, backend, parameters, options)


@pytest.mark.nightly(D=[20000])
@pytest.mark.nightly(subtract_mean=[False])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("subtract_mean", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("D", [16384, 20000])
def test_a_norm_of_wide_rows(D: int, subtract_mean: bool, backend: Any) -> None:
    options = NormOptions(eps=1e-5, subtract_mean=subtract_mean)
    check_norm((9, D), torch.float32, backend, "both" if subtract_mean else "weight", options)


def check_norm(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    backend: Any,
    parameters: str,
    options: NormOptions,
) -> None:
    """Results and all gradients against fp64."""
    D = shape[-1]
    x = on_device.leaf(*shape, dtype=dtype)
    weight = None if parameters == "neither" else on_device.leaf(D, dtype=dtype, seed=2)
    bias = on_device.leaf(D, dtype=dtype, seed=3) if parameters == "both" else None
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    y = norm(x, weight, bias, options=options, backend=backend)
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    true_weight, true_bias = None if weight is None else leaves[1], None if bias is None else leaves[2]
    truth = true_norm(leaves[0], true_weight, true_bias, options)
    upstream = on_device.leaf(*shape, dtype=dtype, seed=4)
    loss, true_loss = (y * upstream).sum(), (truth * upstream.double()).sum()
    assert y.dtype == dtype
    assert relative_error(y, truth) <= TOLERANCE[dtype]
    got = torch.autograd.grad(loss, inputs)
    for gradient, want in zip(got, torch.autograd.grad(true_loss, leaves), strict=True):
        assert relative_error(gradient, want) <= 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_norm_rounds_where_its_model_rounds(backend: Any) -> None:
    x = on_device.leaf(9, 64, dtype=torch.bfloat16).detach()
    weight = on_device.leaf(64, dtype=torch.float32, seed=1).detach()
    n = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    before = norm(x, weight, options=NormOptions(eps=1e-6, round_before_weight=True), backend=backend)
    after = norm(x, weight, options=NormOptions(eps=1e-6), backend=backend)
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
    functions = {"silu": F.silu, "relu": F.relu, "gelu": F.gelu, "sigmoid": torch.sigmoid}
    functions["relu_squared"] = lambda x: F.relu(x).square()
    for shape in [(2, 3, 51), (5, 1100), (0, 8)]:
        gate_up = on_device.leaf(*shape[:-1], 2 * shape[-1], dtype=dtype)
        with torch.no_grad():
            gate_up *= 3
        gate, up = gate_up.chunk(2, -1)
        y = gated_activation(gate, up, activation=activation, backend=backend)
        leaf = gate_up.detach().double().requires_grad_()
        true_gate, true_up = leaf.chunk(2, -1)
        activated = functions.get(activation, lambda x: F.gelu(x, approximate="tanh"))(true_gate)
        upstream = on_device.leaf(*shape, dtype=dtype, seed=1)
        assert relative_error(y, activated * true_up) <= TOLERANCE[dtype]
        (got,) = torch.autograd.grad((y * upstream).sum(), gate_up)
        (want,) = torch.autograd.grad((activated * true_up * upstream.double()).sum(), leaf)
        assert relative_error(got, want) <= TOLERANCE[dtype]


@pytest.fixture
def outputs_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "MIN_BYTES", 1)


class Block(torch.nn.Module):
    """Two norms with a gated MLP between them, in truth or by kernels."""

    def __init__(self, bias: bool = False, of_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        given: dict[str, Any] = {"dtype": torch.float64, "device": DEVICE}
        self.gate, self.up = (torch.nn.Linear(16, 40, bias=bias, **given) for _ in range(2))
        self.down = torch.nn.Linear(40, 16, bias=bias, **given)
        self.scales = torch.nn.ParameterList(
            [on_device.leaf(16, dtype=torch.float64, seed=seed) for seed in range(5, 7)]
        )
        self.shift = torch.nn.Parameter(on_device.leaf(16, dtype=torch.float64, seed=8).detach()) if of_norm else None
        self.options = NormOptions(eps=1e-5, subtract_mean=of_norm)
        self.memories: list[StorageWeakRef] = []

    def forward(self, x: Tensor, *, by_kernels: bool = True) -> Tensor:
        if not by_kernels:
            y = true_norm(x, self.scales[0], self.shift, self.options)
            hidden = self.down(F.silu(self.gate(y)) * self.up(y))
            return true_norm(x + hidden, self.scales[1], None, self.options)
        y = norm(x, self.scales[0], self.shift, options=self.options)
        activated = gated_activation(self.gate(y), self.up(y), activation="silu")
        self.memories = [StorageWeakRef(part.untyped_storage()) for part in (y, activated)]
        hidden = self.changed(self.down, activated)
        del y, activated
        return norm(x + hidden, self.scales[1], None, options=self.options)

    def changed(self, down: Any, activated: Tensor) -> Tensor:
        result: Tensor = down(activated)
        return result


def check_block(block: Block, y: Tensor, x: Tensor) -> None:
    leaves = [x, *block.parameters()]
    upstream = on_device.leaf(*y.shape, dtype=torch.float64, seed=3).detach()
    want = torch.autograd.grad(block(x, by_kernels=False), leaves, upstream)
    for retains in (True, False):
        got = torch.autograd.grad(y, leaves, upstream, retain_graph=retains)
        assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) <= 1e-11


@pytest.mark.usefixtures("outputs_of_any_size")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("of_norm", [False, True], ids=["RMSNorm", "LayerNorm"])
def test_outputs_are_recomputed_instead_of_saved(bias: bool, of_norm: bool) -> None:
    """By a search of the graph the first time, at remembered places after it."""
    block, x = Block(bias, of_norm), on_device.leaf(2, 5, 16, dtype=torch.float64)
    for _ in range(3):
        y = block(x)
        assert all(memory.expired() for memory in block.memories)
        check_block(block, y, x)


class ProductBlock(Block):
    """Down projection of a product that kernels do not recompute, like an attention's output."""

    def changed(self, down: Any, activated: Tensor) -> Tensor:
        result: Tensor = down(activated.sigmoid() * 2.0)
        return result


class TanhBlock(Block):
    """A graph that no other test has, with hooks on what its down projection saves."""

    has_hooks = True

    def changed(self, down: Any, activated: Tensor) -> Tensor:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with hooks if self.has_hooks else nullcontext():
            result: Tensor = down(activated)
        return result.tanh()


@pytest.mark.usefixtures("outputs_of_any_size")
def test_an_output_that_a_hook_kept_once_is_recomputed_later() -> None:
    """The first search finds it behind a hook; the graph without the hook is the same."""
    block, x = TanhBlock(), on_device.leaf(2, 5, 16, dtype=torch.float64)
    for block.has_hooks in (True, False, False):
        y = block(x)
        assert [memory.expired() for memory in block.memories] == [True, not block.has_hooks]
        y.sum().backward()


@pytest.mark.usefixtures("outputs_of_any_size")
def test_graphs_that_begin_alike_are_told_apart() -> None:
    """Their last nodes are the same, and one of them holds outputs where the other has none."""
    x = on_device.leaf(2, 5, 16, dtype=torch.float64)
    for _ in range(3):
        other = ProductBlock()
        other(x)
        assert other.memories[0].expired()
        for bias in (False, True):
            block = Block(bias)
            y = block(x)
            assert all(memory.expired() for memory in block.memories)
            check_block(block, y, x)


@pytest.mark.usefixtures("outputs_of_any_size")
def test_hooks_of_others_decide_what_is_kept() -> None:
    block, x = Block(), on_device.leaf(2, 5, 16, dtype=torch.float64)
    for others in (
        torch.autograd.graph.save_on_cpu(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    ):
        with others:
            y = block(x)
        check_block(block, y, x)
    check_block(block, checkpoint(block, x, use_reentrant=False), x)


@pytest.mark.usefixtures("outputs_of_any_size")
def test_what_is_read_through_hooks_of_others_is_left_to_them() -> None:
    """Hooks that are on only while a part of the graph is made."""
    block, x, unpacked = Block(), on_device.leaf(2, 5, 16, dtype=torch.float64), []

    def offloaded(down: Any, activated: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: unpacked.append(x) or x):  # type: ignore[func-returns-value]
            result: Tensor = down(activated)
        return result

    block.changed = offloaded  # type: ignore[method-assign]
    y = block(x)
    assert not unpacked
    check_block(block, y, x)
    assert unpacked


@pytest.mark.usefixtures("outputs_of_any_size")
@pytest.mark.parametrize(
    "change",
    [
        lambda down, product: down(torch._neg_view(product)),
        lambda down, product: down(product.mul_(2.0)),
        lambda down, product: down(product).sigmoid(),
        lambda down, product: down(product.T.contiguous().T),
    ],
    ids=["negated", "changed in place", "result kept", "copied"],
)
def test_all_else_is_kept_as_it_is(change: Any) -> None:
    block, x = Block(), on_device.leaf(5, 16, dtype=torch.float64)
    leaves = list(block.parameters())
    block.changed = change
    got = torch.autograd.grad(block(x).sum(), leaves)
    y = true_norm(x, block.scales[0], None, block.options)
    hidden = change(block.down, F.silu(block.gate(y)) * block.up(y))
    want = torch.autograd.grad(true_norm(x + hidden, block.scales[1], None, block.options).sum(), leaves)
    assert max(relative_error(g, w) for g, w in zip(got, want, strict=True)) <= 1e-11


@pytest.mark.usefixtures("outputs_of_any_size")
def test_forwards_that_have_no_backward() -> None:
    """What autograd would refuse in the backward is no reason to refuse the forward."""
    block, x = Block(), on_device.leaf(5, 16, dtype=torch.float64)
    scale = block.scales[0]
    y = norm(x, scale, None, options=block.options)
    hidden = block.up(y)
    y.add_(1.0)
    norm(hidden @ block.down.weight.T, block.scales[1], None, options=block.options)
    hidden = block.up(norm(x, scale, None, options=block.options))
    first = hidden @ block.down.weight.T
    torch.autograd.grad(first.sum(), block.up.weight)
    again = norm(first, block.scales[1], None, options=block.options)
    torch.autograd.grad(again.sum(), [block.scales[1], first])


@pytest.mark.smoke
@pytest.mark.usefixtures("outputs_of_any_size")
def test_a_detached_branch_may_outlive_its_norm() -> None:
    block, x = Block(), on_device.leaf(5, 16, dtype=torch.float64)
    y = norm(x, block.scales[0], None, options=block.options)
    branch = block.up(y.detach())
    hidden = block.gate(y) + branch
    norm(hidden @ block.down.weight.T, block.scales[1], None, options=block.options)
    torch.autograd.grad(hidden.sum(), x)
    (got,) = torch.autograd.grad(branch.sum(), block.up.weight)
    assert relative_error(got, y.detach().sum(0).expand(40, 16)) < 1e-12


@pytest.mark.usefixtures("outputs_of_any_size")
def test_functions_of_others_are_not_remembered() -> None:
    block, x, constants = Block(), on_device.leaf(5, 16, dtype=torch.float64), []

    def plus(constant: Tensor) -> Any:
        class Plus(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, a: Tensor) -> Tensor:
                return a + constant

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Tensor:
                return gradient

        return Plus.apply

    constant = torch.ones(16, dtype=torch.float64, device=DEVICE)
    constants.append(ref(constant))
    hidden = plus(constant)(norm(x, block.scales[0], None, options=block.options))
    norm(hidden, block.scales[1], None, options=block.options).sum().backward()
    del constant, hidden
    gc.collect()
    assert constants[0]() is None


@pytest.mark.usefixtures("outputs_of_any_size")
def test_changes_that_autograd_has_to_notice() -> None:
    block, x = Block(), on_device.leaf(5, 16, dtype=torch.float64)
    y = block(x)
    with torch.no_grad():
        block.down.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def true_rotary(x: Tensor, cos: Tensor, sin: Tensor, *, layout: RotaryLayout) -> Tensor:
    """Pair by pair."""
    R = cos.shape[-1]

    def places(pairing: str, pair: int) -> tuple[int, int]:
        if pairing == "shared":
            return pair, pair
        return (2 * pair, 2 * pair + 1) if pairing == "interleaved" else (pair, pair + R // 2)

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
        ("halves", "interleaved"), ("halves", "interleaved"), ("halves", "interleaved", "shared")
    )
]


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.reads}, {layout.writes}, {layout.tables}")
def test_rotary(layout: RotaryLayout, dtype: torch.dtype, backend: Any) -> None:
    for D, R in ((8, 8), (20, 6)):
        x = on_device.leaf(2, 5, 3, D, dtype=dtype)
        # Not the tables of any angle, alike in no half: the definition alone counts.
        cos, sin = (on_device.leaf(2, 1, 5, R, dtype=dtype, seed=seed).detach() for seed in (1, 2))
        (y,) = rotary((x.transpose(1, 2),), cos, sin, num_rotated=R, layout=layout, backend=backend)
        leaf = x.detach().double().requires_grad_()
        truth = true_rotary(leaf.transpose(1, 2), cos.double(), sin.double(), layout=layout)
        upstream = on_device.leaf(2, 3, 5, D, dtype=dtype, seed=3)
        assert relative_error(y, truth) <= TOLERANCE[dtype]
        (got,) = torch.autograd.grad((y * upstream).sum(), x)
        (want,) = torch.autograd.grad((truth * upstream.double()).sum(), leaf)
        assert relative_error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_of_half_the_width(backend: Any) -> None:
    x = on_device.leaf(2, 3, 5, 8, dtype=torch.float32)
    cos, sin = (on_device.leaf(2, 1, 5, 4, dtype=torch.float32, seed=seed).detach() for seed in (1, 2))
    layout = RotaryLayout(tables="shared")
    (y,) = rotary((x,), cos, sin, num_rotated=8, layout=layout, backend=backend)
    assert relative_error(y, true_rotary(x, cos.repeat(1, 1, 1, 2), sin.repeat(1, 1, 1, 2), layout=layout)) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_queries_and_keys_in_one_launch(heads_dim: int, backend: Any) -> None:
    """Other numbers of heads, strides of a packed projection, one table for the batch, a gradient for one."""
    T, D = 5, 8
    packed = on_device.leaf(2, T, 7 * D, dtype=torch.float32)
    cos, sin = (on_device.leaf(1, T, D, dtype=torch.float32, seed=seed).detach().unsqueeze(2) for seed in (1, 2))
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
    q, k = on_device.leaf(2, 3, 5, 8, dtype=torch.float32), on_device.leaf(2, 3, 7, 8, dtype=torch.float32, seed=4)
    cos, sin = (on_device.leaf(2, 1, 1, 8, dtype=torch.float32, seed=seed).detach() for seed in (1, 2))
    layout = RotaryLayout()
    for y, x in zip(rotary((q, k), cos, sin, num_rotated=8, layout=layout, backend=backend), (q, k), strict=True):
        assert relative_error(y, true_rotary(x.double(), cos.double(), sin.double(), layout=layout)) < 1e-6


@pytest.mark.nightly(backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_norm_too_wide_for_both_sums(backend: Any) -> None:
    x, weight, bias = (
        on_device.leaf(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate([(3, 8200), (8200,), (8200,)])
    )
    y = norm(x, weight, bias, options=NormOptions(eps=1e-5, subtract_mean=True), backend=backend)
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    truth = torch.nn.functional.layer_norm(leaves[0], (8200,), leaves[1], leaves[2], 1e-5)
    upstream = on_device.leaf(3, 8200, dtype=torch.float32, seed=5).detach()
    assert relative_error(y, truth) < 1e-6
    wanted = torch.autograd.grad((truth * upstream).sum(), leaves)
    for got, want in zip(torch.autograd.grad((y * upstream).sum(), (x, weight, bias)), wanted, strict=True):
        assert relative_error(got, want) < 1e-5
