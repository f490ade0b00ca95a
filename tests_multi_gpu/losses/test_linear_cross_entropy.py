"""The fused linear cross entropy against whole logits in fp64: every option, every gradient, both backends."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
from loss_inputs import BACKENDS, DEVICE, IGNORED, OPTIONS, assert_gradients, fill_weights, fused, make_inputs, truth_of
from torch import Tensor
from truth import relative_error

import liger_dist
from liger_dist.losses.labels import put_rows, take_rows

VOCABULARIES = (2, 63, 64, 65, 127, 257, 264, 1001, 32001, 50257)
"""with and without a rest of 64 classes, above and below the size from which products are split"""


@pytest.mark.nightly(V=[63, 65, 257, 264], backend=["triton"])
@pytest.mark.cover("pairs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("V", VOCABULARIES)
def test_every_vocabulary_matches_fp64(V: int, backend: str, dtype: torch.dtype) -> None:
    """The scalar loss in two chunks, per-token outputs with kept and with recomputed logits, and scoring."""
    if backend == "triton" and DEVICE == "cpu" and V > 2000:
        pytest.skip("the interpreter takes minutes")
    T, itemsize = 7, torch.finfo(dtype).bits // 8
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    hidden, weight, bias, labels = make_inputs(T, 12, V)
    hidden, weight, bias = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias))
    # Labels among the last classes, which are computed apart.
    labels = torch.where(labels >= 0, V - 1 - labels % min(V, 5), labels)
    truth, leaves = truth_of(hidden, weight, bias, labels, reduction="none")
    result = fused(hidden, weight, bias, labels, backend=backend, memory_budget=4 * V * itemsize, reduction="sum")
    assert relative_error(result.loss, truth.loss.sum()) < tolerance
    total = truth.loss.sum()
    assert_gradients(result.loss, [hidden, weight, bias], total, leaves, tolerance)
    upstream = torch.linspace(-1.0, 2.0, T, device=DEVICE).double().reshape(truth.log_prob.shape)
    for budget in (None, 4 * V * itemsize):
        truth, leaves = truth_of(hidden, weight, bias, labels, reduction="none")
        names = ("log_prob", "entropy")
        result = fused(hidden, weight, bias, labels, backend=backend, memory_budget=budget, outputs=names)
        mine, true = (((one.log_prob + one.entropy).double() * upstream).sum() for one in (result, truth))
        assert relative_error(mine, true) < tolerance
        assert_gradients(mine, [hidden, weight, bias], true, leaves, tolerance)
    with torch.no_grad():
        scored = fused(hidden, weight, bias, labels, backend=backend, outputs=("log_prob",))
    assert relative_error(scored.log_prob, truth.log_prob) < tolerance


@pytest.mark.nightly(
    name=["sum", "z-loss", "softcap", "scale", "temperature", "class weight", "token weight", "items"],
    backend=["triton"],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matches_fp64(name: str, backend: str) -> None:
    hidden, weight, bias, labels = make_inputs()
    options = fill_weights(OPTIONS[name], *hidden.shape[:1], weight.shape[0])
    # Six rows of logits a chunk: several chunks, the last one short.
    result = fused(hidden, weight, bias, labels, backend=backend, memory_budget=6 * 37 * 4, **options)
    truth, leaves = truth_of(hidden, weight, bias, labels, **options)
    assert relative_error(result.loss, truth.loss) < 2e-6
    upstream = torch.linspace(-1, 2, result.loss.numel(), device=DEVICE).reshape(result.loss.shape)
    assert_gradients(
        (result.loss * upstream).sum(), [hidden, weight, bias], (truth.loss * upstream).sum(), leaves, 3e-6
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "temperature": 1.5, "z_loss": 1e-2}], ids=["plain", "capped"])
def test_outputs_and_their_gradients_match_fp64(options: dict[str, Any], backend: str) -> None:
    hidden, weight, bias, labels = make_inputs()
    names = ("log_prob", "entropy", "is_top1", "z_loss", "mean_logit")
    result = fused(hidden, weight, bias, labels, backend=backend, memory_budget=600, outputs=names, **options)
    truth, leaves = truth_of(hidden, weight, bias, labels, **options)
    for name in ("loss", "log_prob", "entropy", "z_loss", "mean_logit"):
        assert relative_error(getattr(result, name), getattr(truth, name)) < 2e-6, name
    assert torch.equal(result.is_top1, truth.is_top1)
    assert not result.z_loss.requires_grad
    u, v = torch.randn(2, labels.numel(), device=DEVICE)

    def total(x: Any) -> Tensor:
        return 0.5 * x.loss + (u * x.log_prob).sum() + (v * x.entropy).sum()

    assert_gradients(total(result), [hidden, weight, bias], total(truth), leaves, 3e-6)


@pytest.mark.nightly(budget_rows=[5], backend=["triton"])
@pytest.mark.cover("pairs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget_rows", [100, 5], ids=["two chunks", "many chunks"])
def test_other_dtypes_are_no_worse_than_torch(dtype: torch.dtype, backend: str, budget_rows: int) -> None:
    T, D, V = 61, 24, 131
    hidden, weight, _, labels = make_inputs(T, D, V, dtype=dtype, bias=False)
    budget = budget_rows * V * hidden.element_size()
    result = fused(hidden, weight, None, labels, backend=backend, memory_budget=budget)
    truth, leaves = truth_of(hidden, weight, None, labels)
    torch_loss = torch.nn.functional.cross_entropy(
        (hidden @ weight.T).to(torch.promote_types(dtype, torch.float32)), labels
    )
    wanted = torch.autograd.grad(truth.loss, leaves)
    ours = torch.autograd.grad(result.loss, (hidden, weight))
    torchs = torch.autograd.grad(torch_loss, (hidden, weight))
    floor = 1e-12 if dtype == torch.float64 else 0.0
    # Triton's interpreter truncates to bf16 where every GPU rounds.
    truncates = backend == "triton" and DEVICE == "cpu" and dtype == torch.bfloat16
    ratio = 3.0 if truncates else 1.5
    assert relative_error(result.loss, truth.loss) <= 1.5 * relative_error(torch_loss, truth.loss) + floor + 1e-6
    for ours_g, torchs_g, want in zip(ours, torchs, wanted, strict=True):
        assert ours_g.dtype == dtype
        assert relative_error(ours_g, want) <= ratio * relative_error(torchs_g, want) + floor


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "needs",
    [(True, False, False), (False, True, False), (False, False, True), (True, True, False), (False, True, True)],
    ids=lambda needs: "".join("hwb"[i] for i in range(3) if needs[i]),
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_each_gradient_depends_on_its_own_requires_grad(
    needs: tuple[bool, bool, bool], reduction: str, backend: str
) -> None:
    hidden, weight, bias, labels = make_inputs()
    tensors = [t.detach().requires_grad_(need) for t, need in zip((hidden, weight, bias), needs, strict=True)]
    result = fused(*tensors, labels, backend=backend, reduction=reduction)
    result.loss.sum().backward()
    truth, leaves = truth_of(hidden, weight, bias, labels, reduction=reduction)
    expected = torch.autograd.grad(truth.loss.sum(), leaves)
    for tensor, need, want in zip(tensors, needs, expected, strict=True):
        if need:
            assert relative_error(tensor.grad, want) < 3e-6
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_backward_and_upstream_gradient(reduction: str) -> None:
    hidden, weight, bias, labels = make_inputs()
    loss = fused(hidden, weight, bias, labels, reduction=reduction).loss.sum()
    first = torch.autograd.grad(loss * 0.5, (hidden, weight, bias), retain_graph=True)
    second = torch.autograd.grad(loss * 2.0, (hidden, weight, bias), retain_graph=True)
    third = torch.autograd.grad(loss * 0.5, (hidden, weight, bias))
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(4 * a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_batched_input(backend: str) -> None:
    hidden, weight, _, labels = make_inputs(T=24, bias=False)
    batched = hidden.detach().reshape(4, 6, 10).transpose(0, 1).requires_grad_()
    wide = torch.randn(37, 20, device=DEVICE)
    wide[:, ::2] = weight.detach()
    strided = wide[:, ::2].requires_grad_()
    labels_64 = labels.reshape(4, 6).T
    result = fused(batched, strided, None, labels_64, backend=backend, outputs=("log_prob",))
    truth, leaves = truth_of(batched.detach().reshape(24, 10), weight, None, labels_64.reshape(-1))
    assert result.log_prob.shape == (6, 4)
    assert relative_error(result.log_prob.reshape(-1), truth.log_prob) < 2e-6
    grads = torch.autograd.grad(result.loss, (batched, strided))
    wanted = torch.autograd.grad(truth.loss, leaves)
    assert relative_error(grads[0].reshape(24, 10), wanted[0]) < 3e-6
    assert relative_error(grads[1], wanted[1]) < 3e-6


def test_autocast_computes_in_its_dtype_and_returns_gradients_in_the_parameters_dtype() -> None:
    hidden, weight, bias, labels = make_inputs(T=61, D=24, V=131)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = liger_dist.linear_cross_entropy(hidden, weight, labels, bias=bias)
        expected = torch.nn.functional.cross_entropy(torch.nn.functional.linear(hidden, weight, bias).float(), labels)
    assert loss.dtype == torch.float32
    grads = torch.autograd.grad(loss, (hidden, weight, bias))
    wanted = torch.autograd.grad(expected, (hidden, weight, bias))
    assert abs(loss - expected) < 1e-3
    for got, want in zip(grads, wanted, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, want) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("labels_on", ["cpu", DEVICE])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_no_valid_token_gives_zeros(reduction: str, labels_on: str, backend: str) -> None:
    hidden, weight, bias, labels = make_inputs()
    nothing = torch.full_like(labels, IGNORED).to(labels_on)
    result = fused(hidden, weight, bias, nothing, backend=backend, reduction=reduction, outputs=("entropy",))
    assert torch.all(result.loss == 0)
    result.loss.sum().backward()
    for tensor in (hidden, weight, bias):
        assert torch.all(tensor.grad == 0)


@pytest.mark.nightly(T=[127], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "D", "V"), [(1, 7, 5), (2, 1, 2), (127, 33, 1031), (3, 64, 9001)])
def test_shapes_that_divide_nothing(T: int, D: int, V: int, backend: str) -> None:
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False)
    labels = labels.clamp_min(0)
    result = fused(hidden, weight, None, labels, backend=backend, memory_budget=30 * V * 4)
    truth, leaves = truth_of(hidden, weight, None, labels)
    assert relative_error(result.loss, truth.loss) < 2e-6
    assert_gradients(result.loss, [hidden, weight], truth.loss, leaves, 5e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("backend", BACKENDS)
def test_true_class_gradient_as_its_probability_nears_one(backend: str) -> None:
    """1 - p is 1e-6: a difference of p and 1 in fp32 would be off by 10 %."""
    V = 50
    weight = torch.eye(V, device=DEVICE).requires_grad_()
    gap = torch.log(on_device.tensor((V - 1) * 1e6)).item()
    hidden = torch.zeros(2, V, device=DEVICE)
    hidden[:, 3] = gap
    hidden.requires_grad_()
    labels = torch.tensor([3, 3], device=DEVICE)
    result = fused(hidden, weight, None, labels, backend=backend, reduction="sum")
    truth, leaves = truth_of(hidden, weight, None, labels, reduction="sum")
    (got,) = torch.autograd.grad(result.loss, hidden)
    (want,) = torch.autograd.grad(truth.loss, leaves[0])
    assert abs(got[0, 3] / want[0, 3] - 1) < 1e-2
    assert abs(result.loss / truth.loss - 1) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [0.0, -300.0, 300.0])
def test_extreme_logits_stay_finite(shift: float, backend: str) -> None:
    hidden, weight, _, labels = make_inputs(bias=False)
    hidden = (hidden.detach() * 60).requires_grad_()
    bias = torch.full((37,), shift, device=DEVICE, requires_grad=True)
    result = fused(hidden, weight, bias, labels, backend=backend, outputs=("entropy",))
    truth, leaves = truth_of(hidden, weight, bias, labels)
    assert relative_error(result.loss, truth.loss) < 1e-5
    assert_gradients(result.loss, [hidden, weight], truth.loss, leaves[:2], 2e-4)


REGIMES = (
    "likely labels",
    "one logit 80 above the rest",
    "logits nearly alike",
    "classes that cannot be",
    "tiny logits",
)


def make_regime(name: str, T: int = 23, D: int = 10, V: int = 37) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False)
    x, w, b = hidden.detach(), weight.detach(), torch.zeros(V, device=DEVICE)
    if name == "likely labels":
        rows = w[labels.clamp_min(0)]
        x = x + 8.0 * rows / rows.square().sum(-1, keepdim=True)
    elif name == "one logit 80 above the rest":
        b[5] = 80.0
    elif name == "logits nearly alike":
        w = w[:1] + 0.1 * w
    elif name == "classes that cannot be":
        b[torch.arange(V, device=DEVICE) % 3 == 1] = float("-inf")
        labels = torch.where(labels % 3 == 1, labels - 1, labels)
    else:
        x = x * 1e-4
    return x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), labels


@pytest.mark.cover("values")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REGIMES)
def test_regimes_of_logits(name: str, backend: str) -> None:
    hidden, weight, bias, labels = make_regime(name)
    result = fused(hidden, weight, bias, labels, backend=backend, outputs=("log_prob",))
    scalar = fused(hidden, weight, bias, labels, backend=backend, memory_budget=9 * 37 * 4)
    truth, leaves = truth_of(hidden, weight, bias, labels)
    for value in (result.loss, scalar.loss):
        assert relative_error(value, truth.loss) < 1e-5
        assert_gradients(value, [hidden, weight], truth.loss, leaves[:2], 3e-5)
        truth, leaves = truth_of(hidden, weight, bias, labels)


@pytest.mark.nightly(backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_change_nothing(backend: str) -> None:
    hidden, weight, bias, labels = make_inputs()
    assert bias is not None
    runs = []
    for rows in (1, 4, 11, 100):
        loss = fused(hidden, weight, bias, labels, backend=backend, memory_budget=rows * 37 * 4, z_loss=1e-3).loss
        runs.append((loss, *torch.autograd.grad(loss, (hidden, weight, bias))))
    for other in runs[1:]:
        for got, want in zip(other, runs[0], strict=True):
            assert relative_error(got, want) < 1e-6


def test_no_tensor_of_tokens_by_vocabulary_is_allocated() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor))
            return out

    T, D, V = 64, 8, 512
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False)
    with Sizes():
        result = fused(hidden, weight, None, labels, memory_budget=8 * V * 4)
        result.loss.backward()
    assert sizes
    assert max(sizes) <= max(8 * V, T * D, V * D)


def test_no_gradient_means_no_gradient_work() -> None:
    hidden, weight, bias, labels = make_inputs()
    with torch.no_grad():
        frozen = fused(hidden, weight, bias, labels)
    assert not frozen.loss.requires_grad
    assert relative_error(frozen.loss, fused(hidden, weight, bias, labels).loss) < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": torch.zeros(22, dtype=torch.long, device="cpu")}, ("(22,)", "(23,)", "Pad or cut")),
        ({"labels": torch.zeros(23, device="cpu")}, ("float32", "labels.long()")),
        ({"labels": torch.full((23,), 37, device="cpu")}, ("a label is 37", "37 rows", "resize_token_embeddings")),
        ({"labels": torch.full((23,), -5, device="cpu")}, ("a label is -5",)),
        ({"hidden_states": torch.zeros(23, 9, device="cpu")}, ("(23, 9)", "(37, 10)")),
        ({"weight": torch.zeros(370, device="cpu")}, ("(370,)", "sharded")),
        ({"weight": torch.zeros(37, 10, dtype=torch.float64, device="cpu")}, ("float64", "autocast")),
        ({"bias": torch.zeros(36, device="cpu")}, ("(36,)", "(37,)")),
        ({"label_smoothing": 1.5}, ("1.5", "[0, 1]")),
        ({"softcap": 0.0}, ("softcap is 0.0",)),
        ({"temperature": 0.0}, ("temperature is 0.0",)),
        ({"z_loss": float("nan")}, ("z_loss is nan",)),
        ({"reduction": "average"}, ("'average'", "'mean'")),
        ({"reduction": "sum", "num_items_in_batch": 3}, ("reduction='sum'", "reduction='mean'")),
        ({"num_items_in_batch": torch.ones(2, device="cpu")}, ("(2,)", "one number")),
        ({"num_items_in_batch": -1}, ("-1",)),
        ({"class_weight": torch.ones(36, device="cpu")}, ("class_weight", "(36,)", "(37,)")),
        ({"token_weight": torch.ones(5, device="cpu")}, ("token_weight", "(5,)", "(23,)")),
        ({"token_weight": torch.ones(23, dtype=torch.long, device="cpu")}, ("token_weight", "int64")),
        ({"token_weight": torch.ones(23, requires_grad=True, device="cpu")}, ("token_weight", "Detach")),
        ({"outputs": ("logits",)}, ("'logits'", "entropy")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_input_is_refused_with_the_value_and_the_way_out(change: dict[str, Any], words: tuple[str, ...]) -> None:
    hidden, weight, _, labels = make_inputs(bias=False)
    given: dict[str, Any] = {"hidden_states": hidden.cpu(), "weight": weight.cpu(), "labels": labels.cpu()}
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.linear_cross_entropy(**(given | change))
    for word in words:
        assert word in str(caught.value)


def test_rows_are_taken_and_put_back_once_and_fillers_go_nowhere() -> None:
    x = on_device.randn(6, 3, dtype=torch.float64, requires_grad=True)
    index = on_device.tensor([4, 0, -1, 2, -1])
    taken = take_rows(x, index)
    assert torch.equal(taken[[0, 1, 3]], x[[4, 0, 2]])
    upstream = on_device.randn(5, 3, dtype=torch.float64)
    (got,) = torch.autograd.grad((taken * upstream).sum(), x)
    want = on_device.zeros(6, 3, dtype=torch.float64)
    want[[4, 0, 2]] = upstream[[0, 1, 3]]
    assert torch.equal(got, want)
    values = on_device.arange(1.0, 6.0, requires_grad=True)
    spread = put_rows(values, index, 6)
    assert spread.tolist() == [2.0, 0.0, 4.0, 0.0, 1.0, 0.0]
    (back,) = torch.autograd.grad((spread * on_device.arange(6.0)).sum(), values)
    assert back.tolist() == [4.0, 0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("name", ["memory_budget", "max_valid_tokens"])
def test_a_number_below_one_is_refused(name: str) -> None:
    hidden, weight, _, labels = make_inputs(bias=False)
    with pytest.raises(liger_dist.LigerDistError, match=f"{name} is 0; expected a number of"):
        liger_dist.linear_cross_entropy(hidden, weight, labels, **{name: 0})
