"""Outputs for policies, against full logits in fp64: temperatures of tokens, log-probabilities of chosen classes,
squared probabilities, the k likeliest classes, and logits in fp32; several tiles of the vocabulary, both backends."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from loss_inputs import BACKENDS, DEFAULTS, DEVICE, assert_gradients, fused, make_inputs, truth_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from truth import DIFFERENTIABLE, cross_entropy_truth, relative_error, weighted_sum

import liger_dist
from liger_dist.losses.cross_entropy import fused_cross_entropy
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec, PendingGradients

T, D, V, K = 19, 10, 331, 5
NAMES = ("log_prob", "log_prob_at", "top_k", "entropy", "sum_sq_prob", "is_top1", "mean_logit", "log_sum_exp")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperatures": {"temperature": True},
    "all": {"temperature": True, "softcap": 4.0, "logit_scale": -1.2, "z_loss": 1e-2, "label_smoothing": 0.1},
}
BUDGETS = {"three tiles": T * 128 * 4, "tiles of a few tokens": 5 * 128 * 4, "one tile": None}


def given_for(labels: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Options with temperatures of tokens, and chosen classes: the label itself, one class twice, and none at all."""
    generator = torch.Generator().manual_seed(5)
    ids = on_device.randint(V, (*labels.shape, K), generator=generator)
    ids[..., 1] = labels.clamp_min(0)
    ids[..., 3] = ids[..., 2]
    ids[::3, ..., 4] = -1
    given = options | {"token_ids": ids, "top_k": 7}
    if options.get("temperature") is True:
        given["temperature"] = (0.5 + on_device.rand(labels.shape, generator=generator)).to(DEVICE)
    return given


@pytest.mark.nightly(name=["temperatures"], backend=["triton"])
@pytest.mark.cover("values")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_and_their_gradients(name: str, budget: str, backend: str) -> None:
    hidden, weight, bias, labels = make_inputs(T, D, V)
    options = given_for(labels, OPTIONS[name])
    result = fused(
        hidden, weight, bias, labels, backend=backend, memory_budget=BUDGETS[budget], outputs=NAMES, **options
    )
    truth, leaves = truth_of(hidden, weight, bias, labels, **options)
    check_outputs(result, truth, 3e-6)
    upstream = upstream_of(truth)
    total, true_total = weighted_sum(result, NAMES, upstream), weighted_sum(truth, NAMES, upstream)
    assert_gradients(total, [hidden, weight, bias], true_total, leaves, 4e-6)


class Products(TorchDispatchMode):
    """Counts products of two matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


def test_logits_that_fit_the_budget_are_kept_for_the_backward() -> None:
    """Three products, more where they do not fit; a second backward of a retained graph, and only the first of several
    losses of a model."""
    sizes = 8, 16, 64
    hidden, weight, _, labels = make_inputs(*sizes, bias=False)
    labels = labels.clamp_min(0)

    def output(budget: int | None, pending: PendingGradients | None = None) -> Tensor:
        spec = LossSpec(**DEFAULTS, outputs=("log_prob", "entropy"))
        execution = Execution(memory_budget=budget, pending=pending)
        result = fused_linear_cross_entropy(hidden, weight, None, labels, spec=spec, execution=execution)
        assert result.log_prob is not None
        assert result.entropy is not None
        return result.log_prob.square().sum() + result.entropy.sum()

    counts = {}
    gradients = []
    for budget in (None, 8 * 64 * hidden.element_size(), 8 * 64 * hidden.element_size() - 1):
        with Products() as products:
            gradients.append(torch.autograd.grad(output(budget), (hidden, weight)))
        counts[budget] = products.count
    assert list(counts.values())[:2] == [3, 3]
    assert list(counts.values())[2] > 3
    total = output(None)
    for retains in (True, True, False):
        gradients.append(torch.autograd.grad(total, (hidden, weight), retain_graph=retains))
    pending = PendingGradients()
    with Products() as products:
        both = [output(None, pending), output(None, pending)]
        gradients += [torch.autograd.grad(one, (hidden, weight)) for one in both]
    # The second loss recomputes its logits, in one tile.
    assert products.count == 3 + 4
    for made in gradients[1:]:
        for mine, first in zip(made, gradients[0], strict=True):
            assert relative_error(mine, first) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_outputs_beside_a_scalar_loss(name: str, backend: str) -> None:
    """The gradients are made in the forward, over the logits that the outputs are read from."""
    hidden, weight, bias, labels = make_inputs(T, D, V)
    options = given_for(labels, OPTIONS[name])
    loss = LossSpec(**(DEFAULTS | options), outputs=NAMES, differentiable=False)
    execution = Execution(backend=backend, memory_budget=7 * V * 4)  # type: ignore[arg-type]
    result = fused_linear_cross_entropy(hidden, weight, bias, labels, spec=loss, execution=execution)
    truth, leaves = truth_of(hidden, weight, bias, labels, **options)
    check_outputs(result, truth, 3e-6)
    assert not any(getattr(result, name).requires_grad for name in DIFFERENTIABLE)
    assert_gradients(result.loss, [hidden, weight, bias], truth.loss, leaves, 4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_given_logits(name: str, backend: str) -> None:
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False)
    logits = (hidden @ weight.T).detach().requires_grad_()
    options = given_for(labels, OPTIONS[name])
    loss = LossSpec(**(DEFAULTS | options), outputs=NAMES)
    result = fused_cross_entropy(logits, labels, spec=loss, execution=Execution(backend=backend))  # type: ignore[arg-type]
    leaf = logits.detach().double().requires_grad_()
    truth = cross_entropy_truth(leaf, labels, **options)
    check_outputs(result, truth, 3e-6)
    upstream = upstream_of(truth)
    (got,) = torch.autograd.grad(weighted_sum(result, NAMES, upstream), logits)
    (want,) = torch.autograd.grad(weighted_sum(truth, NAMES, upstream), leaf)
    assert relative_error(got, want) < 4e-6


def upstream_of(truth: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    values = {name: getattr(truth, name) for name in ("loss", *DIFFERENTIABLE)}
    return {name: on_device.randn(value.shape, generator=generator) for name, value in values.items()}


def check_outputs(result: Any, truth: Any, tolerance: float) -> None:
    for name in ("loss", *NAMES):
        if name not in ("is_top1", "top_k"):
            assert relative_error(getattr(result, name), getattr(truth, name)) < tolerance, name
    assert torch.equal(result.is_top1, truth.is_top1)
    assert torch.equal(result.top_k.ids, truth.top_k.ids)
    assert relative_error(result.top_k.log_prob, truth.top_k.log_prob) < tolerance
    assert relative_error(result.top_k.remainder, truth.top_k.remainder) < tolerance


@pytest.mark.parametrize("shape", [(), (3,), (3, 4)], ids=str)
def test_a_temperature_for_the_call_the_sequence_or_the_token(shape: tuple[int, ...]) -> None:
    hidden, weight, _, labels = make_inputs(12, D, V, bias=False)
    temperature = 0.5 + torch.rand(shape, device=DEVICE)
    got = liger_dist.linear_cross_entropy(
        hidden.reshape(3, 4, D), weight, labels.reshape(3, 4), temperature=temperature, outputs=("log_prob",)
    )
    if shape == (3,):
        listed = liger_dist.linear_cross_entropy(
            hidden.reshape(3, 4, D), weight, labels.reshape(3, 4), temperature=temperature.tolist(), outputs="log_prob"
        )
        assert isinstance(listed, liger_dist.LossOutput)
        assert torch.equal(listed.log_prob, got.log_prob)  # type: ignore[union-attr,arg-type]
    each = temperature.reshape(*shape, *[1] * (2 - len(shape))).expand(3, 4).reshape(-1)
    truth, _ = truth_of(hidden, weight, None, labels, temperature=each)
    assert isinstance(got, liger_dist.LossOutput)
    assert relative_error(got.log_prob.reshape(-1), truth.log_prob) < 3e-6  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"temperature": on_device.ones(2)}, r"temperature has shape \(2,\) and labels have shape \(19,\)"),
        ({"temperature": on_device.ones(T, dtype=torch.int64)}, "temperature has dtype torch.int64"),
        ({"temperature": on_device.ones(T, requires_grad=True)}, "temperature requires a gradient"),
        ({"temperature": on_device.full((T,), 0.7).bfloat16()}, r"dtype torch.bfloat16, in which 0\.7 is 0\.699"),
        ({"token_ids": on_device.zeros(T, 2).long()}, r"token_ids was given and outputs is \(\)"),
        ({"outputs": ("log_prob_at",)}, "outputs contains 'log_prob_at' and token_ids is missing"),
        ({"token_ids": on_device.zeros(T, 2), "outputs": "log_prob_at"}, "token_ids have shape"),
        ({"outputs": ("top_k",)}, "outputs contains 'top_k' and top_k is missing"),
        ({"outputs": ("top_k",), "top_k": V + 1}, "top_k is 332 but lm_head has 331 rows"),
        ({"outputs": ("top_k",), "top_k": -1}, "top_k is -1; expected a number of classes above 0"),
        ({"logits_dtype": torch.bfloat16}, "logits_dtype is torch.bfloat16; expected one of None, torch.float32"),
        ({"temperature": "0.7"}, "temperature is '0.7'; expected a number above 0, a list"),
        ({"temperature": [0.7, "a"]}, "temperature is .*; expected a number above 0, a list"),
        ({"temperature": 1e-40}, "temperature is 1e-40; expected at least"),
        ({"token_ids": on_device.ones(T, 0).long(), "outputs": ("log_prob_at",)}, "expected K > 0 class indices"),
        ({"token_ids": [[1]], "outputs": ("log_prob_at",)}, "token_ids is of type list; expected a torch.Tensor"),
        ({"class_weight": [1.0]}, "class_weight is of type list; expected a torch.Tensor"),
        ({"top_k": 0, "outputs": ("top_k",)}, "top_k is 0; expected a number of classes above 0"),
        ({"top_k": 0}, "top_k was given and outputs is"),
        ({"outputs": 5}, "outputs is 5; expected a sequence of names"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_refused(given: dict[str, Any], sentence: str) -> None:
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False)
    given = {name: value.to(DEVICE) if isinstance(value, Tensor) else value for name, value in given.items()}
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        liger_dist.linear_cross_entropy(hidden, weight, labels, **given)


@pytest.mark.skipif(DEVICE == "cuda", reason="an assertion on the device ends the program")
def test_numbers_out_of_range_are_refused() -> None:
    hidden, weight, _, labels = make_inputs(T, D, V, bias=False)
    with pytest.raises(liger_dist.LigerDistError, match=r"not above 0 by at least 1e-06; .* smallest is 0\.0"):
        liger_dist.linear_cross_entropy(hidden, weight, labels, temperature=on_device.zeros(T))
    ids = on_device.full((T, 1), V)
    with pytest.raises(liger_dist.LigerDistError, match="token_ids has an id of 331 or more"):
        liger_dist.linear_cross_entropy(hidden, weight, labels, token_ids=ids, outputs=("log_prob_at",))


@pytest.mark.nightly(name=["plain", "temperatures", "all"], backend=["triton"])
@pytest.mark.nightly(dtype=[torch.float16], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "temperatures", "all", "class weights"])
def test_fp32_logits_of_16_bit_operands(name: str, dtype: torch.dtype, backend: str) -> None:
    """The loss is that of fp32 logits; gradients, which are rounded to the operands' dtype before the products, are no
    worse than with rounded logits but for luck."""
    hidden, weight, labels = large_logits(dtype)
    options = given_for(labels, OPTIONS.get(name, {}))
    if name == "class weights":
        options |= {"class_weight": torch.linspace(0.1, 2.0, V, device=DEVICE), "label_smoothing": 0.1}
    del options["token_ids"], options["top_k"]
    truth, leaves = truth_of(hidden, weight, None, labels, **options)
    wanted = torch.autograd.grad(truth.loss, leaves)
    ours, errors = {}, {}
    for logits_dtype in (None, torch.float32):
        loss = LossSpec(**(DEFAULTS | options), outputs=())
        execution = Execution(backend=backend, memory_budget=7 * V * 2, logits_dtype=logits_dtype)  # type: ignore[arg-type]
        result = run(hidden, weight, labels, loss, execution)
        got = torch.autograd.grad(result.loss, (hidden, weight))
        ours[logits_dtype] = relative_error(result.loss, truth.loss)
        errors[logits_dtype] = [relative_error(g, w) for g, w in zip(got, wanted, strict=True)]
    assert ours[torch.float32] < 2e-6
    eps = torch.finfo(dtype).eps
    for exact, rounded in zip(errors[torch.float32], errors[None], strict=True):
        assert exact < 1.25 * rounded
        assert exact < 1.5 * eps


@pytest.mark.nightly(name=["plain", "all"], backend=["triton"])
@pytest.mark.smoke
@pytest.mark.nightly(name=["temperatures"], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
def test_log_probs_of_fp32_logits(name: str, backend: str) -> None:
    hidden, weight, labels = large_logits(torch.bfloat16)
    options = given_for(labels, OPTIONS[name])
    truth, leaves = truth_of(hidden, weight, None, labels, **options)
    upstream = upstream_of(truth)
    wanted = torch.autograd.grad(weighted_sum(truth, NAMES, upstream), leaves)
    errors: dict[Any, list[float]] = {}
    for logits_dtype in (None, torch.float32):
        loss = LossSpec(**(DEFAULTS | options), outputs=NAMES)
        execution = Execution(backend=backend, memory_budget=7 * V * 4, logits_dtype=logits_dtype)  # type: ignore[arg-type]
        result = run(hidden, weight, labels, loss, execution)
        got = torch.autograd.grad(weighted_sum(result, NAMES, upstream), (hidden, weight))
        values = [relative_error(getattr(result, name), getattr(truth, name)) for name in DIFFERENTIABLE]
        errors[logits_dtype] = values + [relative_error(g, w) for g, w in zip(got, wanted, strict=True)]
    for exact, rounded in zip(errors[torch.float32][: len(DIFFERENTIABLE)], errors[None], strict=False):
        assert exact < 3e-6
        assert exact < rounded / 20
    for exact, rounded in zip(errors[torch.float32][-2:], errors[None][-2:], strict=True):
        assert exact < 1.25 * rounded


def test_fp32_operands() -> None:
    """As an lm_head in fp32: the gradients are those of fp32 products, rounded once."""
    hidden, weight, labels = large_logits(torch.bfloat16)
    truth, leaves = truth_of(hidden, weight, None, labels)
    wanted = torch.autograd.grad(truth.loss, leaves)
    loss = liger_dist.linear_cross_entropy(hidden, weight, labels, logits_dtype="fp32_operands")
    assert isinstance(loss, Tensor)
    got = torch.autograd.grad(loss, (hidden, weight))
    assert relative_error(loss, truth.loss) < 2e-6
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == torch.bfloat16
        assert relative_error(g, w.bfloat16()) < 1e-4


def large_logits(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of deviation 8, which 16 bits round by far more than fp32 sums err."""
    generator = torch.Generator().manual_seed(2)
    hidden = (8.0 * on_device.randn(T, D, generator=generator)).to(DEVICE, dtype).requires_grad_()
    weight = (on_device.randn(V, D, generator=generator) / D**0.5).to(DEVICE, dtype).requires_grad_()
    labels = on_device.randint(V, (T,), generator=generator)
    labels[::4] = -100
    return hidden, weight, labels


def run(hidden: Tensor, weight: Tensor, labels: Tensor, loss: Any, execution: Execution) -> Any:
    return fused_linear_cross_entropy(hidden, weight, None, labels, spec=loss, execution=execution)


def test_the_probability_of_a_sure_class() -> None:
    """The gradient of its log-probability does not get lost in that of rounded logits."""
    weight = torch.zeros(V, D, device=DEVICE)
    weight[3, 0], weight[7, 0] = 12.0, 1.0
    hidden = torch.eye(D, device=DEVICE)[:1].clone().to(torch.bfloat16).requires_grad_()
    ids = torch.tensor([[3, 7, 3]], device=DEVICE)
    result = liger_dist.linear_cross_entropy(
        hidden,
        weight.to(torch.bfloat16),
        torch.tensor([7], device=DEVICE),
        token_ids=ids,
        outputs=("log_prob_at",),
        logits_dtype=torch.float32,
    )
    assert isinstance(result, liger_dist.LossOutput)
    assert result.log_prob_at is not None
    (got,) = torch.autograd.grad(result.log_prob_at[0, 0], hidden)
    leaf = hidden.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(F.log_softmax(leaf @ weight.double().T, -1)[0, 3], leaf)
    assert relative_error(got, want) < 2e-2
