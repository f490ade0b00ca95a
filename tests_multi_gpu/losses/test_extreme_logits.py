"""Logits that are -inf, ``finfo.min``, +inf or NaN, against full logits in fp64: every option and output, dtype and
backend of the cross entropies and divergences.

The truth has -1e30 where a logit is -inf: in fp64 that class has the probability 0, and products with it stay finite.
What is larger than 1e20 there must be as large, or infinite, in the ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any

import on_device
import pytest
import torch
from distilled import divergences
from loss_inputs import BACKENDS, DEFAULTS, DEVICE
from torch import Tensor
from truth import DIFFERENTIABLE, cross_entropy_truth

from liger_dist.losses.cross_entropy import fused_cross_entropy
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist_kernels import LossOptions
from liger_dist_kernels.divergence import DIVERGENCES, DivergenceOptions, divergence_bwd
from liger_dist_kernels.divergence_terms import OF_PROBABILITIES, divergence_terms

T, D, V = 6, 8, 261
BAD = 1
"""the row that has a logit of +inf or NaN, or none but -inf"""
HUGE = 1e20
DTYPES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MOST = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly)]
OUTPUTS = ("log_prob", "is_top1", "entropy", "mean_logit", "log_sum_exp", "sum_sq_prob", "log_prob_at", "top_k")
PLACES = {
    "first lanes": slice(0, 16),
    "a whole tile": slice(128, 256),
    "the tail": slice(200, V),
    "every third": slice(0, V, 3),
}
OPTIONS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "plain": lambda labels: {},
    "temperature": lambda labels: {"temperature": 0.7},
    "temperatures": lambda labels: {"temperature": torch.linspace(0.5, 2.0, T, device=DEVICE)},
    "scale": lambda labels: {"logit_scale": 0.5},
    "softcap": lambda labels: {"softcap": 5.0, "temperature": 0.7},
    "z-loss": lambda labels: {"z_loss": 1e-3},
    "smoothing": lambda labels: {"label_smoothing": 0.1},
    "class weight": lambda labels: {"class_weight": torch.linspace(0.5, 2.0, V, device=DEVICE)},
    "smoothing of allowed classes": lambda labels: {"label_smoothing": 0.1, "class_weight": allowed().float()},
    "token weight": lambda labels: {"token_weight": torch.where(labels == -100, math.inf, 2.0)},
    "soft labels": lambda labels: {"soft_labels": soft_labels(), "soft_weight": 0.5},
    "soft labels alone": lambda labels: {"soft_labels": soft_labels(), "soft_weight": 1.0},
    "token ids": lambda labels: {"token_ids": soft_labels()[0]},
}
masked: slice = PLACES["first lanes"]


def allowed() -> Tensor:
    is_allowed = torch.ones(V, dtype=torch.bool, device=DEVICE)
    is_allowed[masked] = False
    return is_allowed


def soft_labels() -> tuple[Tensor, Tensor]:
    """Of allowed classes, one of them twice, and with the probability 0 of a class that cannot be."""
    ids = allowed().nonzero()[:, 0][torch.arange(4 * T, device=DEVICE).reshape(T, 4) % 7].clone()
    ids[:, 3] = (~allowed()).nonzero()[0]
    probs = torch.tensor([0.3, 0.3, 0.4, 0.0], device=DEVICE).repeat(T, 1)
    return ids, probs


def make_labels() -> Tensor:
    """Allowed classes, but for an ignored token and one whose class cannot be."""
    labels = allowed().nonzero()[:, 0][torch.arange(T, device=DEVICE) * 13].clone()
    labels[3], labels[4] = -100, (~allowed()).nonzero()[0, 0]
    return labels


def extremes(dtype: torch.dtype) -> Iterator[tuple[str, float, Callable[[Tensor], None]]]:
    """Names of the extremes, the number they put into logits, and how."""

    def columns(value: float) -> Callable[[Tensor], None]:
        return lambda logits: logits[:, masked].fill_(value)

    yield "-inf", -math.inf, columns(-math.inf)
    yield "finfo.min", torch.finfo(dtype).min, columns(torch.finfo(dtype).min)
    for name, value in (("NaN", math.nan), ("+inf", math.inf)):
        yield name, value, lambda logits, value=value: logits[BAD, 5].fill_(value)
    yield "a row of -inf", -math.inf, lambda logits: logits[BAD].fill_(-math.inf)


def combined(
    backend: str, dtype: torch.dtype, step: int, *sets: Iterable[Any], offset: int = 0
) -> list[tuple[Any, ...]]:
    """Every combination; in Triton's interpreter, which takes 0.1 to 1 s for each, every ``step``-th, others for each
    dtype and ``offset``."""
    every = list(product(*sets))
    first = list(DTYPES).index(dtype) + len(DTYPES) * offset
    return every[first % step :: step] if backend == "triton" and DEVICE == "cpu" else every


def finite(logits: Tensor) -> Tensor:
    return logits.detach().double().nan_to_num(nan=0.0, posinf=1e30, neginf=-1e30)


def differences(got: Any, want: Any, bad: Tensor, tolerance: float) -> list[str]:
    """Names of outputs whose good rows differ."""
    wrong = []
    for name in ("loss", *OUTPUTS):
        mine, true = getattr(got, name), getattr(want, name)
        if true is None or mine is None:
            continue
        pairs = [(mine, true)]
        if name == "top_k":
            distinct = ~bad[:, None] & are_distinct(true.log_prob, 4 * tolerance)
            wrong += [] if torch.equal(mine.ids[distinct], true.ids[distinct]) else ["ids of top_k"]
            pairs = [(mine.log_prob, true.log_prob), (mine.remainder, true.remainder)]
        for all_mine, all_true in pairs:
            mine, true = all_mine[~bad].detach().double(), all_true[~bad].detach().double()
            is_huge = true.abs() > HUGE
            if not bool((mine[is_huge] * true[is_huge].sign() > HUGE).all()):
                wrong.append(f"{name} (huge)")
            scale = 1.0 + true[~is_huge].abs()
            if not bool(((mine - true)[~is_huge].abs() <= tolerance * scale).all()):
                wrong.append(name)
    return wrong


def are_distinct(values: Tensor, gap: float) -> Tensor:
    """Which of the largest logits, in their order, rounding cannot have put into another place."""
    steps = (values[:, :-1] - values[:, 1:]) > gap * (1.0 + values[:, 1:].abs())
    # What follows the last one is not known.
    last = torch.full_like(steps[:, :1], gap < 1e-3)
    return torch.cat([last | True, steps], 1) & torch.cat([steps, last], 1)


def gradients_differ(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return not bool((got.double() - want).norm() <= tolerance * want.norm().clamp_min(1e-3))


def upstream_total(result: Any, rows: Tensor) -> Tensor:
    """A scalar whose gradient reaches every differentiable output of the rows."""
    total: Tensor = result.loss[rows].sum()
    for number, name in enumerate(DIFFERENTIABLE):
        value = getattr(result, name)
        if value is not None:
            total = total + (0.3 + 0.2 * number) * value[rows].sum()
    return total


def outputs_of(options: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Every output that these options allow."""
    without = {"log_prob_at"} if "token_ids" not in options else set()
    without |= {"mean_logit"} if "class_weight" in options else set()
    names = tuple(name for name in OUTPUTS if name not in without)
    return names, options | {"top_k": 3}


def truth_options(options: dict[str, Any]) -> dict[str, Any]:
    weights = options.get("token_weight")
    return options if weights is None else options | {"token_weight": weights.nan_to_num(posinf=1.0)}


@pytest.mark.nightly(place=["first lanes"], backend=["triton"])
@pytest.mark.nightly(dtype=[torch.float32], backend=["triton"])
@pytest.mark.nightly(place=["a whole tile", "the tail", "every third"], backend=["triton"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_cross_entropy_of_extreme_logits(dtype: torch.dtype, backend: Any, place: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "masked", PLACES[place])
    tolerance, wrong = DTYPES[dtype], []
    for (kind, _, put), (name, given), ignores in combined(
        backend, dtype, 19, extremes(dtype), OPTIONS.items(), (False, True), offset=list(PLACES).index(place)
    ):
        labels = make_labels()
        if ignores:
            labels[BAD] = -100
        options = given(labels)
        names, asked = outputs_of(options)
        logits = on_device.randn(T, V, generator=torch.Generator().manual_seed(1)).mul(3.0).to(DEVICE, dtype)
        put(logits)
        logits.requires_grad_()
        leaf = finite(logits).requires_grad_()
        execution = Execution(backend=backend)
        truth = cross_entropy_truth(leaf, labels, **truth_options(asked), reduction="none")
        spec = LossSpec(**(DEFAULTS | asked), outputs=names, reduction="none")
        result = fused_cross_entropy(logits, labels, spec=spec, execution=execution)
        bad = torch.zeros(T, dtype=torch.bool, device=DEVICE)
        # A soft-cap makes finite numbers of infinite ones.
        bad[BAD] = kind == "NaN" or (kind in ("+inf", "a row of -inf") and "softcap" not in options)
        where = f"{kind}, {name}, ignored {ignores}: "
        wrong += [where + output for output in differences(result, truth, bad & ~(labels == -100), tolerance)]
        if bool(bad[BAD]) and not ignores and not torch.isnan(result.loss[BAD]):
            wrong.append(where + f"loss of the bad row {float(result.loss[BAD])}")
        rows = ~bad | (labels == -100)
        (got,) = torch.autograd.grad(upstream_total(result, rows), logits)
        (want,) = torch.autograd.grad(upstream_total(truth, rows), leaf)
        if gradients_differ(got[rows], want[rows], tolerance):
            wrong.append(where + "gradient of the outputs")
        if name == "token ids":
            continue  # They are outputs alone.
        summed = LossSpec(**(DEFAULTS | options), outputs=(), reduction="sum")
        (got,) = torch.autograd.grad(fused_cross_entropy(logits, labels, spec=summed, execution=execution).loss, logits)
        leaf = finite(logits).requires_grad_()
        truth = cross_entropy_truth(leaf, labels, **truth_options(options), reduction="none")
        (want,) = torch.autograd.grad(truth.loss[rows].sum(), leaf)
        if gradients_differ(got[rows], want[rows], tolerance):
            wrong.append(where + "gradient of the loss")
    assert not wrong, f"{len(wrong)}: {wrong[:12]}"


@pytest.mark.nightly(dtype=[torch.float32], backend=["triton"])
@pytest.mark.nightly(logits_dtype=[None], backend=["triton"])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=["rounded", "fp32"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_linear_cross_entropy_with_an_extreme_bias(dtype: torch.dtype, backend: Any, logits_dtype: Any) -> None:
    """In one tile and in three, with gradients and without; hidden states of NaN in one row."""
    tolerance, wrong = DTYPES[dtype], []
    hidden = on_device.randn(T, D, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    weight = on_device.randn(V, D, generator=torch.Generator().manual_seed(3)).to(DEVICE, dtype)
    budgets = (None, T * 128 * 4)
    values = (-math.inf, torch.finfo(dtype).min)
    for value, (name, given), budget, has_nan in combined(
        backend, dtype, 23, values, OPTIONS.items(), budgets, (False, True)
    ):
        labels = make_labels()
        options = given(labels)
        names, asked = outputs_of(options)
        bias = torch.where(allowed(), 0.1, value).to(dtype)
        hidden[BAD] = math.nan if has_nan else 0.5
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight, bias)]
        true_leaves = [finite(tensor).requires_grad_() for tensor in leaves]
        logits = true_leaves[0] @ true_leaves[1].T + true_leaves[2]
        truth = cross_entropy_truth(logits, labels, **truth_options(asked), reduction="none")
        execution = Execution(backend=backend, memory_budget=budget, logits_dtype=logits_dtype)
        spec = LossSpec(**(DEFAULTS | asked), outputs=names, reduction="none")
        bad = torch.zeros(T, dtype=torch.bool, device=DEVICE)
        bad[BAD] = has_nan
        where = f"{value}, {name}, budget {budget}, NaN {has_nan}: "
        with torch.no_grad():
            scored = fused_linear_cross_entropy(*leaves, labels, spec=spec, execution=execution)
        wrong += [where + f"{output} scored" for output in differences(scored, truth, bad, 2 * tolerance)]
        if has_nan:
            if not torch.isnan(scored.loss[BAD]):
                wrong.append(where + f"loss of the bad row {float(scored.loss[BAD])}")
            continue
        result = fused_linear_cross_entropy(*leaves, labels, spec=spec, execution=execution)
        got = torch.autograd.grad(upstream_total(result, ~bad), leaves)
        want = torch.autograd.grad(upstream_total(truth, ~bad), true_leaves, retain_graph=True)
        wrong += [where + f"gradient of outputs {place}" for place in range(3) if gradients_differ(got[place], want[place], 2 * tolerance)]  # fmt: skip # noqa: E501
        if name == "token ids":
            continue  # They are outputs alone.
        summed = LossSpec(**(DEFAULTS | options), outputs=(), reduction="sum")
        loss = fused_linear_cross_entropy(*leaves, labels, spec=summed, execution=execution).loss
        got, want = torch.autograd.grad(loss, leaves), torch.autograd.grad(truth.loss.sum(), true_leaves)
        wrong += [where + f"gradient of the loss {place}" for place in range(3) if gradients_differ(got[place], want[place], 2 * tolerance)]  # fmt: skip # noqa: E501
    assert not wrong, f"{len(wrong)}: {wrong[:12]}"


@pytest.mark.nightly(divergence=["jsd", "total_variation"], backend=["triton"])
@pytest.mark.nightly(dtype=[torch.float32], backend=["triton"])
@pytest.mark.nightly(divergence=["forward_kl", "reverse_kl"], backend=["triton"])
@pytest.mark.smoke
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", MOST, ids=str)
def test_divergences_of_extreme_logits(
    dtype: torch.dtype, backend: Any, divergence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full rows and of three slices of the vocabulary."""
    tolerance, wrong, factor = DTYPES[dtype], [], torch.linspace(0.5, 1.5, T, device=DEVICE)
    factor[2] = 0.0
    values = (-math.inf, torch.finfo(dtype).min)
    labels = torch.zeros(T, dtype=torch.int64, device=DEVICE)
    for place, value, who, tau, slices in combined(
        backend, dtype, 61, PLACES, values, ("both", "teacher", "student"), (1.0, 2.0), (1, 3)
    ):
        monkeypatch.setitem(globals(), "masked", PLACES[place])
        student, teacher = (
            on_device.randn(2, T, V, generator=torch.Generator().manual_seed(4)).mul(2.0).to(DEVICE, dtype)
        )
        for logits, name in ((student, "student"), (teacher, "teacher")):
            if who in ("both", name):
                logits[:, masked] = value
        leaf = finite(student).requires_grad_()
        want = divergences(leaf, finite(teacher), divergence=divergence, temperature=tau)
        one = LossOptions(temperature=tau)
        options = DivergenceOptions(divergence=divergence, student=one, teacher=one)
        columns = [slice(start, min(start + 128, V)) for start in range(0, V, 128)] if slices == 3 else [slice(0, V)]
        gathered: list[list[Tensor]] = []
        for step in range(2 if divergence in OF_PROBABILITIES else 1):
            fields: list[Tensor] = []
            for part in columns:
                gather = stop_with(fields, gathered, step)
                with pytest.raises(GatheredError):
                    divergence_terms(
                        student[:, part], teacher[:, part], options=options, gather_slices=gather, backend=backend
                    )
            gathered.append(fields)
        got_gradient = torch.empty_like(student)
        for part in columns:
            terms = divergence_terms(
                student[:, part],
                teacher[:, part],
                options=options,
                gather_slices=answer_with(gathered),
                backend=backend,
            )
            arguments = (student[:, part], teacher[:, part], labels, terms, factor)
            divergence_bwd(*arguments, options=options, out_TV=got_gradient[:, part], backend=backend)
        where = f"{place}, {value}, {who}, {tau}, {slices}: "
        is_huge = want.detach() > HUGE
        if not bool((terms.divergence_T[is_huge] > HUGE).all()):
            wrong.append(where + "infinite divergence")
        if not bool(((terms.divergence_T - want.detach())[~is_huge].abs() <= 4 * tolerance).all()):
            wrong.append(where + "value")
        if divergence == "forward_kl" or not bool(is_huge.any()):
            (want_gradient,) = torch.autograd.grad((factor * want).sum(), leaf)
            if gradients_differ(got_gradient, want_gradient, 4 * tolerance):
                wrong.append(where + "gradient")
        elif bool((got_gradient[2] != 0).any()):
            wrong.append(where + "gradient of a token of weight 0")
    assert not wrong, f"{len(wrong)}: {wrong[:12]}"


class GatheredError(Exception):
    """A slice has handed over its fields."""


def stop_with(fields: list[Tensor], known: list[list[Tensor]], step: int) -> Callable[[Tensor], Tensor]:
    """Gathers what earlier steps gathered, then keeps this slice's fields and stops."""
    asked = 0

    def gather(own: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        if asked <= step:
            return torch.stack(known[asked - 1])
        fields.append(own.clone())
        raise GatheredError

    return gather


def answer_with(known: list[list[Tensor]]) -> Callable[[Tensor], Tensor]:
    steps = iter(known)
    return lambda own: torch.stack(next(steps))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [1.0, 1e-2, 1e-4, 1e-6])
def test_probabilities_do_not_drift_with_the_size_of_logits(temperature: float, backend: Any) -> None:
    logits = (on_device.randn(T, V, generator=torch.Generator().manual_seed(7)) + 1000.0).to(DEVICE).requires_grad_()
    labels = torch.arange(T, device=DEVICE)
    spec = LossSpec(**(DEFAULTS | {"temperature": temperature}), outputs=())
    (got,) = torch.autograd.grad(
        fused_cross_entropy(logits, labels, spec=spec, execution=Execution(backend=backend)).loss, logits
    )
    # Transformed logits are rounded to fp32, as torch's are: kernels multiply by 1 / temperature.
    z = logits.detach() * (1.0 / temperature) if backend == "triton" else logits.detach() / temperature
    want = z.double().softmax(-1) - torch.nn.functional.one_hot(labels, V)
    assert float((got.double() * temperature * T - want).norm() / want.norm()) < 2e-5
