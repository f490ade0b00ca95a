"""Cross entropy on given logits against fp64; the caller's logits stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import on_device
import pytest
import torch
from loss_inputs import BACKENDS, DEFAULTS, DEVICE, OPTIONS, fill_weights
from torch import Tensor, nn
from truth import cross_entropy_truth, relative_error

import liger_dist
from liger_dist.losses.cross_entropy import fused_cross_entropy
from liger_dist.losses.execution import Execution
from liger_dist.losses.spec import LossSpec
from liger_dist_kernels import (
    GradientCoefficients,
    LossOptions,
    RowOptions,
    SoftmaxStatistics,
    TokenGradients,
    TokenOutputs,
    TokenTargets,
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_fwd_bwd,
    gradient_coefficients,
    merge_statistics,
    token_terms,
)

T, V = 19, 83


def make_logits(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (2 * on_device.randn(T, V, generator=generator)).to(DEVICE, dtype).requires_grad_()
    labels = on_device.randint(0, V, (T,), generator=generator)
    labels[::4] = -100
    return logits, labels.to(DEVICE)


def fused(logits: Tensor, labels: Tensor, *, backend: Any, outputs: tuple[str, ...] = (), **options: Any) -> Any:
    loss = LossSpec(**(DEFAULTS | options), outputs=outputs)
    return fused_cross_entropy(logits, labels, spec=loss, execution=Execution(backend=backend))


@pytest.mark.smoke
@pytest.mark.nightly(
    name=[
        *("softcap", "token weight", "scale", "sum", "z-loss", "class weight", "items", "none", "z-loss, sum"),
        *("softcap, scale, temperature", "class weight, smoothing", "token weight, none", "items tensor"),
    ],
    backend=["triton"],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matches_fp64_and_leaves_the_logits_alone(name: str, backend: str) -> None:
    logits, labels = make_logits()
    before = logits.detach().clone()
    options = fill_weights(OPTIONS[name], T, V)
    numbers = ("log_prob", "entropy", "z_loss") + (() if "class_weight" in options else ("mean_logit",))
    names = (*numbers, "is_top1")
    result = fused(logits, labels, backend=backend, outputs=names, **options)
    leaf = logits.detach().double().requires_grad_()
    truth = cross_entropy_truth(leaf, labels, **options)
    for output in ("loss", *numbers):
        assert relative_error(getattr(result, output), getattr(truth, output)) < 5e-6, output
    assert torch.equal(result.is_top1, truth.is_top1)
    u, v = torch.randn(2, T, device=DEVICE)
    upstream = torch.linspace(-1, 2, result.loss.numel(), device=DEVICE).reshape(result.loss.shape)

    def total(x: Any) -> Tensor:
        return (x.loss * upstream).sum() + (u * x.entropy).sum() + (v * x.log_prob).sum()

    (first,) = torch.autograd.grad(total(result), logits, retain_graph=True)
    (second,) = torch.autograd.grad(total(result), logits)
    (want,) = torch.autograd.grad(total(truth), leaf)
    assert relative_error(first, want) < 3e-6
    assert torch.equal(first, second)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_logits_without_unit_stride(backend: str) -> None:
    logits, labels = make_logits(torch.bfloat16)
    strided = logits.detach().T.contiguous().T.requires_grad_()
    loss = fused(strided, labels, backend=backend).loss
    leaf = logits.detach().double().requires_grad_()
    truth = cross_entropy_truth(leaf, labels).loss
    assert loss.dtype == torch.float32
    assert relative_error(loss, truth) < 2e-6
    (got,), (want,) = torch.autograd.grad(loss, strided), torch.autograd.grad(truth, leaf)
    assert got.dtype == torch.bfloat16
    assert relative_error(got, want) < 8e-3


@pytest.mark.smoke
def test_batched_shapes_and_refusals() -> None:
    logits = torch.randn(2, 3, V, device="cpu")
    labels = torch.randint(0, V, (2, 3), device="cpu")
    losses = liger_dist.cross_entropy(logits, labels, reduction="none")
    assert isinstance(losses, Tensor)
    assert losses.shape == (2, 3)
    with pytest.raises(liger_dist.LigerDistError, match=r"\(2, 3\)"):
        liger_dist.cross_entropy(logits, labels[:, :2])
    with pytest.raises(liger_dist.LigerDistError, match="a label is 83"):
        liger_dist.cross_entropy(logits, torch.full((2, 3), V, device="cpu"))
    with pytest.raises(liger_dist.LigerDistError, match="int64"):
        liger_dist.cross_entropy(labels, labels)


@pytest.mark.nightly(backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_may_take_the_memory_of_the_logits(backend: str) -> None:
    leaf, labels = make_logits()
    truth = cross_entropy_truth(leaf.detach().double().requires_grad_(), labels).loss
    (want,) = torch.autograd.grad(fused(leaf, labels, backend=backend).loss, leaf)
    logits = leaf * 1.0
    before = logits.detach().clone()
    loss = LossSpec(**DEFAULTS, outputs=())
    execution = Execution(backend=backend, overwrite_logits=True)
    value = fused_cross_entropy(logits, labels, spec=loss, execution=execution).loss
    assert relative_error(value, truth) < 2e-6
    (got,) = torch.autograd.grad(value * 3.0, leaf, retain_graph=True)
    (again,) = torch.autograd.grad(value, leaf)
    assert relative_error(got, 3.0 * want) < 1e-6
    assert relative_error(again, want) < 1e-6
    assert not torch.equal(logits, before)
    other = leaf * 1.0
    square = other.square().sum()
    fused_cross_entropy(other, labels, spec=loss, execution=execution)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.nightly(backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_that_are_columns_of_a_matrix(backend: Any) -> None:
    logits, labels = make_logits(torch.float64)
    generator = torch.Generator().manual_seed(4)
    gradient, z_gradient = on_device.rand(2, len(labels), generator=generator, dtype=torch.float64).to(logits.device)
    class_weight = on_device.rand(V, generator=generator, dtype=torch.float64).to(logits.device)
    options = LossOptions(label_smoothing=0.1, z_loss=1e-2)

    def passes(*vectors: Tensor) -> list[Tensor]:
        """Everything that reads a vector: statistics, terms, and the gradient in one pass and in two."""
        labels, gradient, z_gradient, class_weight = vectors
        upstream = TokenGradients(gradient, z_gradient)
        rows = RowOptions(vocab_size=V, options=options, class_weight_V=class_weight, backend=backend)
        leaf, outs, targets = logits.detach(), [torch.empty_like(logits) for _ in range(2)], TokenTargets(labels)
        terms = token_terms(cross_entropy_fwd(leaf, targets, rows), targets, rows)
        coefficients = gradient_coefficients(terms, upstream, targets, rows)
        coefficients = GradientCoefficients(*(None if c is None else column(c) for c in coefficients))
        cross_entropy_bwd(leaf, targets, coefficients, rows, out_TV=outs[0])
        cross_entropy_fwd_bwd(leaf, targets, upstream, rows, out_TV=outs[1])
        return [terms.cross_entropy_T, *outs]

    vectors = (labels, gradient, z_gradient, class_weight)
    for got, want in zip(passes(*map(column, vectors)), passes(*vectors), strict=True):
        assert relative_error(got, want) < 1e-12


def column(vector: Tensor) -> Tensor:
    """The same numbers, every third of a larger memory."""
    return vector[:, None].repeat(1, 3)[:, 1]


@pytest.mark.cover("values")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bounds", [(0, 83), (0, 40, 83), (0, 28, 56, 83, 83)], ids=str)
def test_statistics_of_slices_make_those_of_whole_rows(bounds: tuple[int, ...], smoothing: float, backend: Any) -> None:
    """The last slice may have no logits; in some, all may be -inf, as a padded vocabulary has them."""
    logits, labels = make_logits(torch.float64)
    logits = logits.detach()
    if smoothing == 0:
        labels[5] = 70
        logits[5, :60] = float("-inf")
    rows = RowOptions(
        vocab_size=V,
        options=LossOptions(label_smoothing=smoothing),
        outputs=TokenOutputs(entropy=True, sum_sq_prob=True),
        backend=backend,
    )
    slices = []
    for start, end in pairwise(bounds):
        own = torch.where((labels >= start) & (labels < end), labels - start, end - start)
        own = torch.where(labels < 0, labels, own)
        slices.append(cross_entropy_fwd(logits[:, start:end].contiguous(), TokenTargets(own), rows))
    fields = [None if each[0] is None else torch.stack(each) for each in zip(*slices, strict=True)]
    got = merge_statistics(SoftmaxStatistics(*fields), backend)
    want = cross_entropy_fwd(logits, TokenTargets(labels), rows)
    for name, value in want._asdict().items():
        assert value is None or torch.allclose(getattr(got, name), value, rtol=1e-12, atol=1e-12), name


def saved_bytes(compute: Callable[[], Any]) -> int:
    """What autograd keeps of one loss."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(storages.values())


def test_logits_in_bf16_are_kept_once() -> None:
    """Torch's own loss of the same logits, in fp32, keeps twice their bytes."""
    labels = on_device.randint(0, 640, (64,), generator=torch.Generator().manual_seed(0))
    leaf = on_device.randn(64, 640, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)
    logits = leaf.requires_grad_() * 1
    size = logits.numel() * logits.element_size()
    assert saved_bytes(lambda: nn.functional.cross_entropy(logits.float(), labels)) >= 2 * size
    assert saved_bytes(lambda: liger_dist.cross_entropy(logits, labels)) <= 1.1 * size
