"""Memory, numbers from the host and launches: rows that do not lie side by side, outputs that are changed in place,
second backwards, strides beyond 2**31, rows of more pieces than a GPU runs at once."""

from __future__ import annotations

import math
import warnings
from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from loss_inputs import BACKENDS, DEFAULTS, DEVICE
from torch import Tensor
from truth import relative_error

import liger_dist
from liger_dist.fused_layers.gated_mlp import gated_activation
from liger_dist.losses.cross_entropy import fused_cross_entropy
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist_kernels import RotaryLayout, label_facts, rotate, scaled, sum_of_same_ids
from liger_dist_kernels.divergence import DIVERGENCES, DivergenceOptions, divergence_bwd
from liger_dist_kernels.divergence_terms import divergence_terms
from liger_dist_kernels.products import logits_buffer, write_product

T, D, V = 7, 8, 83
NAMES = ("log_prob", "entropy", "sum_sq_prob", "is_top1", "mean_logit", "log_sum_exp", "log_prob_at", "top_k")


def loss_of(logits: Tensor, labels: Tensor, backend: Any, *, overwrites: bool = False, **options: Any) -> Any:
    outputs = options.pop("outputs", ())
    spec = LossSpec(**(DEFAULTS | options), outputs=outputs)
    return fused_cross_entropy(
        logits, labels, spec=spec, execution=Execution(backend=backend, overwrite_logits=overwrites)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_overwritten_logits_of_a_wider_buffer(backend: Any) -> None:
    """Columns beyond the vocabulary belong to someone else."""
    leaf = torch.randn(T, 96, device=DEVICE, requires_grad=True)
    labels = torch.randint(V, (T,), device=DEVICE)
    wide = leaf * 1.0
    beyond = wide[:, V:].detach().clone()
    (loss_of(wide[:, :V], labels, backend, overwrites=True).loss / 4).backward()
    truth = leaf.detach().double().requires_grad_()
    (F.cross_entropy(truth[:, :V], labels) / 4).backward()
    assert leaf.grad is not None
    assert truth.grad is not None
    assert torch.allclose(leaf.grad.double(), truth.grad, rtol=1e-5, atol=1e-8)
    assert torch.equal(wide[:, V:], beyond)


LABELS: dict[str, list[int]] = {
    "none": [],
    "all ignored": [-100] * 5,
    "some ignored": [3, -100, 0, 82, -100],
    "one below": [3, -1, 5],
    "one above": [3, 83, 5],
    "more than a block": list(range(83)) * 100 + [-100] * 7,
}


@pytest.mark.smoke
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8])
@pytest.mark.parametrize("name", LABELS)
def test_facts_of_labels(name: str, dtype: torch.dtype, backend: Any) -> None:
    labels = torch.tensor(LABELS[name], dtype=dtype, device=DEVICE)
    column = labels[:, None].repeat(1, 3)[:, 1]
    for given in (labels, column):
        facts = label_facts(given, ignore_index=-100, vocab_size=V, backend=backend)
        valid = [label for label in LABELS[name] if label != -100]
        assert facts.labels_T.tolist() == [-1 if label == -100 else label for label in LABELS[name]]
        limits = torch.iinfo(torch.int64)
        smallest, largest = min(valid, default=limits.max), max(valid, default=limits.min)
        in_range = not valid or (smallest >= 0 and largest < V)
        assert facts.range_3.tolist() == [len(valid), smallest, largest]
        assert facts.is_in_range.item() is in_range
        assert facts.divisor.item() == max(len(valid), 1)
        assert facts.divisor.dtype == torch.float32


def test_an_unsigned_label_is_not_the_ignored_one() -> None:
    """156 as a number of 8 bits is -100."""
    facts = label_facts(torch.tensor([156, 3], dtype=torch.uint8, device=DEVICE), ignore_index=-100)
    assert facts.labels_T.tolist() == [156, 3]


@pytest.mark.smoke
@pytest.mark.parametrize("backend", BACKENDS)
def test_overwritten_logits_that_share_memory_are_refused(backend: Any) -> None:
    shared = torch.randn(1, V, device=DEVICE).expand(T, V).requires_grad_()
    labels = torch.randint(V, (T,), device=DEVICE)
    with pytest.raises(liger_dist.LigerDistError, match="share memory"):
        loss_of(shared, labels, backend, overwrites=True)
    assert torch.allclose(loss_of(shared, labels, backend).loss, F.cross_entropy(shared, labels))


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["cross_entropy", "linear_cross_entropy"])
def test_outputs_may_be_changed_in_place(op: str, backend: Any, ignores: bool) -> None:
    labels = torch.arange(T, device=DEVICE)
    if ignores:
        labels[2] = -100
    hidden, weight = torch.randn(T, D, device=DEVICE), torch.randn(V, D, device=DEVICE, requires_grad=True)
    options: dict[str, Any] = {"outputs": NAMES, "token_ids": labels.clamp_min(0)[:, None], "top_k": 2}

    def gradient(changes: bool) -> Tensor:
        if op == "cross_entropy":
            result = loss_of(hidden @ weight.T, labels, backend, **options)
        else:
            spec = LossSpec(**(DEFAULTS | {k: v for k, v in options.items() if k != "outputs"}), outputs=NAMES)
            result = fused_linear_cross_entropy(
                hidden, weight, None, labels, spec=spec, execution=Execution(backend=backend)
            )
        total = sum(getattr(result, name)[1:].sum() for name in ("log_prob", "entropy", "sum_sq_prob", "log_prob_at"))
        if changes:
            for name in NAMES:
                values = result.top_k.log_prob if name == "top_k" else getattr(result, name)
                values[:1] = 0
            total = sum(getattr(result, name).sum() for name in ("log_prob", "entropy", "sum_sq_prob", "log_prob_at"))
        return torch.autograd.grad(total, weight)[0]  # type: ignore[arg-type]

    assert torch.equal(gradient(True), gradient(False))


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_retained_graph_gives_the_same_gradient(backend: Any, dtype: torch.dtype, reduction: str) -> None:
    """The upstream gradient is multiplied in fp32: 1 / 3 in bf16 is 0.2 % off, 65536 in fp16 is infinite."""
    factor = 1 / 3 if reduction == "mean" else 65536.0
    labels = torch.arange(T, device=DEVICE)
    hidden = (torch.randn(T, D, device=DEVICE) * 1e-3).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, device=DEVICE) * 1e-3).to(dtype)

    def gradient(retains: bool) -> Tensor:
        spec = LossSpec(**(DEFAULTS | {"reduction": reduction}), outputs=())
        loss = fused_linear_cross_entropy(
            hidden, weight, None, labels, spec=spec, execution=Execution(backend=backend)
        ).loss
        return torch.autograd.grad(loss * factor, hidden, retain_graph=retains)[0]

    assert torch.equal(gradient(True), gradient(False))
    assert bool(gradient(True).isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaled_tensors_of_all_layouts(backend: Any) -> None:
    x = torch.randn(T, 96, device=DEVICE)
    factor = torch.tensor(0.3, device=DEVICE)
    for view in (x, x[:, :V], x[2:5, 3:40]):
        for dtype in (torch.float32, torch.float16):
            out = torch.empty(view.shape, dtype=dtype, device=DEVICE)
            assert torch.equal(scaled(view, factor, out=out, backend=backend), (view * factor).to(dtype))
    inner = x[:, :V]
    wanted = torch.cat([inner * factor, x[:, V:]], 1)
    scaled(inner, factor, out=inner, backend=backend)
    assert torch.equal(x, wanted)


def test_sums_of_classes_that_are_named_twice() -> None:
    ids = torch.randint(-1, 5, (T, 9), device=DEVICE)
    values = torch.randn(T, 9, device=DEVICE, dtype=torch.float64)
    is_same = ids[:, :, None] == ids[:, None, :]
    assert torch.allclose(sum_of_same_ids(values, ids), (is_same * values[:, None, :]).sum(-1))


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_divergences(backend: Any, divergence: Any, offset: float) -> None:
    """Their error is that of rounding the logits, whatever these have in common."""
    generator = torch.Generator().manual_seed(0)
    teacher = on_device.randn(T, V, generator=generator).mul(2.0).add(offset)
    student = teacher + (on_device.randn(T, V, generator=generator) * 0.03125).to(DEVICE)
    got = divergence_terms(student, teacher, options=DivergenceOptions(divergence=divergence), backend=backend)
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (teacher, student))
    if divergence == "jsd":
        log_m = torch.logaddexp(log_p, log_q) - on_device.tensor(2.0).double().log()
        want = (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1) / 2
    elif divergence == "total_variation":
        want = (log_p.exp() - log_q.exp()).abs().sum(-1) / 2
    else:
        own, other = (log_p, log_q) if divergence == "forward_kl" else (log_q, log_p)
        want = (own.exp() * (own - other)).sum(-1)
    assert float((got.divergence_T.double() - want).abs().max() / want.mean()) < 1e-2


@pytest.mark.smoke
def test_a_head_further_than_2_to_the_31_away() -> None:
    """Pages of ``torch.empty`` that nothing touches take no memory."""
    size, stride = 8, 2**30 + 64
    memory = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=DEVICE)
    x = memory.as_strided((1, 2, 3, size), (3 * stride, size, stride, 1))
    x.copy_(torch.arange(48, device=DEVICE).reshape(1, 2, 3, size))
    cos, sin = torch.ones(2, 1, 2, 1, size, dtype=torch.bfloat16, device=DEVICE)
    sin = torch.zeros_like(sin)
    (y,) = rotate([x], cos, sin, num_rotated=size, layout=RotaryLayout(), backend="triton")
    assert torch.equal(y, x)


@pytest.mark.smoke
def test_relu_gates_of_infinity() -> None:
    gate = torch.tensor([-torch.inf, -1.0, 0.0, 2.0, torch.nan], device=DEVICE)
    up = torch.full_like(gate, 3.0)
    for backend in BACKENDS:
        got = gated_activation(gate[None], up[None], activation="relu", backend=backend)  # type: ignore[arg-type]
        assert torch.allclose(got[0], F.relu(gate) * up, equal_nan=True)


def test_a_gate_whose_storage_is_held_stays() -> None:
    gate, up = (torch.randn(4, 8, device=DEVICE, requires_grad=True) for _ in range(2))
    projected = gate * 1.0
    held, before = projected.untyped_storage(), projected.detach().clone()
    result = gated_activation(projected, up * 1.0, activation="silu")
    del projected
    result.sum().backward()
    assert torch.equal(torch.empty(0, device=DEVICE).set_(held, 0, (4, 8), (8, 1)), before)


@pytest.mark.gpu
def test_rows_of_more_pieces_than_multiprocessors() -> None:
    pieces = torch.cuda.get_device_properties(0).multi_processor_count + 3
    vocab_size = pieces * 32 * 2**10 // 8
    logits = torch.randn(2, vocab_size, dtype=torch.float64, device="cuda", requires_grad=True)
    labels = torch.tensor([5, vocab_size - 1], device="cuda")
    (got,) = torch.autograd.grad(loss_of(logits, labels, "triton").loss, logits)
    (want,) = torch.autograd.grad(F.cross_entropy(logits, labels), logits)
    assert torch.allclose(got, want, rtol=1e-10, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"logit_scale": 0.3}, {"softcap": 3.3}], ids=str)
def test_fp64_options_are_fp64(options: dict[str, float]) -> None:
    logits = torch.randn(T, V, dtype=torch.float64, device="cuda", requires_grad=True)
    labels = torch.arange(T, device="cuda")
    (got,), (want,) = (
        torch.autograd.grad(loss_of(logits, labels, backend, **options).loss, logits)
        for backend in ("triton", "reference")
    )
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.gpu
def test_in_place_gradients_read_the_label_before_it_is_overwritten() -> None:
    labels = torch.randint(16384, (4096,), device="cuda")
    for seed in range(20):
        torch.manual_seed(seed)
        logits = (torch.randn(4096, 16384, device="cuda") * 8).bfloat16()
        apart, over = (logits.clone().requires_grad_() for _ in range(2))
        loss_of(apart, labels, "triton", softcap=5.0).loss.backward()
        loss_of(over * 1.0, labels, "triton", softcap=5.0, overwrites=True).loss.backward()
        assert apart.grad is not None
        assert over.grad is not None
        assert torch.equal(apart.grad, over.grad)


@pytest.mark.gpu(n=2)
def test_kernels_run_on_the_gpu_of_their_tensors() -> None:
    torch.cuda.set_device(0)
    hidden, weight = torch.randn(T, D, device="cuda:1", requires_grad=True), torch.randn(V, D, device="cuda:1")
    labels = torch.arange(T, device="cuda:1")
    loss = liger_dist.linear_cross_entropy(hidden, weight, labels)
    loss.backward()
    assert torch.allclose(loss, F.cross_entropy(hidden @ weight.T, labels), rtol=1e-5)


@pytest.mark.gpu
def test_unsigned_labels_on_a_gpu() -> None:
    """156 is -100 in eight bits."""
    from models import make_model

    model = liger_dist.wrap(make_model("llama", dtype=torch.float32).cuda(), "none")
    ids = torch.randint(1, 101, (2, 8), device="cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        signed, unsigned = (
            float(model(input_ids=ids, labels=ids.to(dtype)).loss.detach()) for dtype in (torch.int64, torch.uint8)
        )
    assert signed == unsigned
    with pytest.raises(liger_dist.LigerDistError, match="a label is 156"):
        model(input_ids=ids, labels=torch.full_like(ids, 156).to(torch.uint8))


@pytest.mark.smoke
@pytest.mark.cover("values")
@pytest.mark.parametrize("classes", [(40, 40), (37, 37), (40, 37), (37, 35)], ids=str)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_what_lies_between_the_rows_of_a_buffer_does_not_count(divergence: Any, classes: tuple[int, int]) -> None:
    """Of a student's and of a teacher's logits: NaN there, in kernels that read whole vectors."""
    generator = torch.Generator().manual_seed(0)
    both = []
    for count in classes:
        buffer = logits_buffer(torch.empty(1, device=DEVICE), 5, count)
        buffer._base.fill_(math.nan)  # type: ignore[union-attr]
        both.append(buffer.copy_(on_device.randn(5, count, generator=generator)))
    student, teacher = both
    labels = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    options = DivergenceOptions(divergence=divergence)
    factor = torch.linspace(0.5, 1.5, 5, device=DEVICE)
    found = []
    for backend, is_padded in (("reference", False), ("triton", True), ("triton", False)):
        named: Any = {"options": options, "is_padded": is_padded, "backend": backend}
        terms = divergence_terms(student, teacher, **named)
        out = logits_buffer(student, *student.shape)
        divergence_bwd(student, teacher, labels, terms, factor, out_TV=out, **named)
        found.append((terms.divergence_T, terms.entropy_T, out))
    for mine in found[1:]:
        for got, want in zip(mine, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_do_not_read_what_lies_between_the_rows_of_a_buffer(dtype: torch.dtype) -> None:
    """oneDNN does on processors with AMX, for at least 32 rows (ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX shows it): NaN of
    unused memory was in gradients in bf16."""
    left, right = (on_device.randn(*shape).to(dtype) for shape in ((40, 83), (83, 16)))
    buffer = logits_buffer(left, *left.shape)
    buffer._base.fill_(math.nan)  # type: ignore[union-attr]
    buffer.copy_(left)
    product = write_product(buffer, right, right.new_empty(40, 16))
    truth = left.double() @ right.double()
    assert relative_error(product, truth) < (1e-5 if dtype == torch.float32 else 1e-2)
