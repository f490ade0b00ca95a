"""The loss of row shards on ranks with different tokens, against full logits of all tokens in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Workers
from models import assert_below
from row_shards import CASES, PLAIN, D, output_error, shard_of, tensors_of_tokens
from torch import Tensor
from truth import cross_entropy_truth, relative_error, weighted_sum

import liger_dist
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist.losses.token_exchange import ExchangePlan, numbers_of_token
from liger_dist.sharding.process_groups import compute_device

TOKENS = {
    "even": (12, 12, 12, 12),
    "uneven": (13, 12, 14, 13),
    "ragged": (17, 3, 0, 9),
    "one rank alone": (0, 7, 0, 0),
    "none": (0, 0, 0, 0),
}
"""tokens of each of up to four ranks"""


@pytest.mark.parametrize("vocab_size", [101, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_option(name: str, vocab_size: int, workers_on_all: Workers) -> None:
    assert_small(workers_on_all.run(errors_on_own_tokens, name, vocab_size, TOKENS["ragged"], 2))


@pytest.mark.cover("values")
@pytest.mark.parametrize("num_chunks", [1, 2, 5, 17])
@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_tokens(tokens: str, num_chunks: int, workers_on_all: Workers) -> None:
    for name in ("plain", "log-probabilities and entropy"):
        assert_small(workers_on_all.run(errors_on_own_tokens, name, 101, TOKENS[tokens], num_chunks))
    assert_small(workers_on_all.run(errors_on_own_tokens, "plain", 101, TOKENS[tokens], num_chunks, (0, 1, 0)))


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0), (1, 1, 0)], ids=str)
def test_only_what_is_needed(needs: tuple[int, int, int], workers_on_all: Workers) -> None:
    assert_small(workers_on_all.run(errors_on_own_tokens, "bias", 101, TOKENS["uneven"], 2, needs))


@pytest.mark.parametrize(("outputs", "passes"), [((), 1), (("log_prob",), 2)], ids=["scalar", "outputs"])
def test_masters_are_cast_once_in_a_pass(outputs: tuple[str, ...], passes: int, workers_2: Workers) -> None:
    """Not for each chunk: two casts would be in memory at once. The backward of outputs computes the logits again."""
    assert workers_2.run(casts_of_masters, outputs) == [passes, passes]


def casts_of_masters(outputs: Any) -> int:
    """Counts the 16-bit copies of the rows in forward and backward of five chunks with fp32 masters."""
    vocab_size, rows = 96, 3
    shard, own = shard_of(vocab_size, divide_factor=1.0)
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden = on_device.randn(5 * rows, D, generator=generator).to(compute_device(), torch.bfloat16).requires_grad_()
    weight = on_device.randn(own.stop - own.start, D).to(compute_device()).requires_grad_()
    labels = on_device.randint(vocab_size, (5 * rows,), generator=generator).to(compute_device())
    execution = Execution(memory_budget=2 * rows * numbers_of_token(shard.largest, D) * 2)
    spec = LossSpec(outputs=outputs, differentiable=bool(outputs))
    with torch.profiler.profile(record_shapes=True) as profiled:
        result = fused_linear_cross_entropy(hidden, weight, None, labels, spec=spec, execution=execution, rows=shard)
        (result.log_prob.sum() if outputs else result.loss).backward()
    casts = [event for event in profiled.events() if event.name == "aten::_to_copy"]
    return sum(event.input_shapes[0] == list(weight.shape) for event in casts)


def assert_small(results: list[dict[str, float]]) -> None:
    # Triton, which runs on GPUs, takes the scale, the soft-cap and the temperature as fp32 numbers.
    tolerance = 1e-6 if torch.cuda.is_available() else 1e-10
    for errors in results:
        assert_below(errors, tolerance)


def errors_on_own_tokens(
    name: str,
    vocab_size: int,
    counts: tuple[int, ...],
    num_chunks: int,
    needs: tuple[int, int, int] = (1, 1, 1),
) -> dict[str, float]:
    case, device, rank = dict(CASES[name]), compute_device(), dist.get_rank()
    counts = counts[: dist.get_world_size()]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return on_device.randn(shape, generator=generator, dtype=torch.float64).to(device)

    weight, bias = random(vocab_size, D), random(vocab_size)
    class_weight = random(vocab_size).abs() if case.pop("class_weight", False) else None
    has_bias, has_token_weight = case.pop("bias", False), case.pop("token_weight", False)
    outputs, factor, scale = case.pop("outputs", ()), 3.0, random()
    whole = [tensor.clone().requires_grad_() for tensor in (weight, bias if has_bias else torch.zeros_like(bias))]
    objective = torch.zeros((), dtype=torch.float64, device=device)
    all_ranks: list[Any] = []
    for count in counts:
        hidden = random(count, D).requires_grad_()
        labels = on_device.randint(vocab_size, (count,), generator=generator).to(device)
        labels[::4] = -100
        token_weight = random(count).abs() if has_token_weight else None
        given = case | tensors_of_tokens(case, count, vocab_size, generator)
        upstream = {name: random(count) for name in ("loss", "log_prob", "entropy", "sum_sq_prob")}
        upstream["log_prob_at"] = random(count, 3)
        if case.get("reduction") != "none":
            upstream["loss"] = scale
        truth = cross_entropy_truth(
            hidden @ whole[0].T + whole[1], labels, class_weight=class_weight, token_weight=token_weight, **given
        )
        objective = objective + weighted_sum(truth, outputs, upstream)
        all_ranks.append((hidden, labels, token_weight, upstream, truth, given))
    objective.backward()

    hidden, labels, token_weight, upstream, truth, given = all_ranks[rank]
    shard, own = shard_of(vocab_size, divide_factor=factor)
    mine = [hidden.detach().clone(), weight[own].clone(), bias[own].clone()]
    for tensor, need in zip(mine, needs, strict=True):
        tensor.requires_grad_(bool(need))
    rows = max(-(-max(counts) // num_chunks), 1)
    plain = {key: given.pop(key) for key in PLAIN if key in given}
    weights = {"class_weight": class_weight, "token_weight": token_weight}
    loss = LossSpec(**given, outputs=outputs, **weights, **plain)
    execution = Execution(memory_budget=len(counts) * rows * numbers_of_token(shard.largest, D) * 8)
    bias_used = mine[2] if has_bias else None
    result = fused_linear_cross_entropy(mine[0], mine[1], bias_used, labels, spec=loss, execution=execution, rows=shard)
    if any(needs):
        weighted_sum(result, outputs, upstream).backward()
    expected = [hidden.grad, whole[0].grad[own] / factor, whole[1].grad[own] / factor]  # type: ignore[index]
    names = ("hidden states", "weight", "bias" if has_bias else "")
    return errors_of_inputs(mine, expected, names) | {
        output: output_error(result, truth, output) for output in ("loss", *outputs)
    }


def errors_of_inputs(mine: list[Tensor], expected: list[Any], names: Sequence[str]) -> dict[str, float]:
    """Of tensors that require gradients; the others, and those without a name, have none."""
    errors = {}
    for tensor, want, label in zip(mine, expected, names, strict=True):
        if tensor.requires_grad and label:
            errors[f"gradient of the {label}"] = relative_error(tensor.grad, want)  # type: ignore[arg-type]
        else:
            assert tensor.grad is None
    return errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_hidden_states_and_fp32_rows(dtype: torch.dtype, workers_on_all: Workers) -> None:
    """No worse than 1.5 times torch's own product in that dtype with fp32 softmax; gradients small enough to vanish in
    fp16 are there."""
    for errors in workers_on_all.run(rounding_errors, dtype):
        for name, (ours, torchs) in errors.items():
            assert ours <= 1.5 * torchs + 1e-6, (name, ours, torchs)


def rounding_errors(dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    device, rank, V, T, hidden_size = compute_device(), dist.get_rank(), 1009, 512, 64
    generator = torch.Generator().manual_seed(5)
    weight = (on_device.randn(V, hidden_size, generator=generator) / 8).to(dtype).float().to(device)
    counts = (T, T - 100, T // 8, T)[: dist.get_world_size()]
    hidden = [on_device.randn(count, hidden_size, generator=generator).to(device, dtype) for count in counts]
    labels = [on_device.randint(V, (count,), generator=generator).to(device) for count in counts]

    def gradients_of(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Gradients of all ranks' tokens, by torch."""
        w = weight.to(dtype, copy=True).requires_grad_()
        x = [tensor.to(dtype, copy=True).requires_grad_() for tensor in hidden]
        wide = torch.promote_types(dtype, torch.float32)
        scale = 1.0 if dtype == torch.float64 else 2.0**10
        losses = [F.cross_entropy((h @ w.T).to(wide), y) for h, y in zip(x, labels, strict=True)]
        (torch.stack(losses).sum() * scale).backward()
        assert w.grad is not None
        assert x[rank].grad is not None
        return w.grad.double() / scale / len(counts), x[rank].grad.double() / scale  # type: ignore[union-attr]

    shard, own = shard_of(V, divide_factor=float(len(counts)))
    mine = [hidden[rank].clone().requires_grad_(), weight[own].clone().requires_grad_()]
    loss = fused_linear_cross_entropy(
        mine[0], mine[1], None, labels[rank], spec=LossSpec(), execution=Execution(), rows=shard
    ).loss
    (loss * 2.0**10).backward()
    assert mine[1].grad is not None
    assert mine[1].grad.dtype == torch.float32
    true_weight, true_hidden = gradients_of(torch.float64)
    torch_weight, torch_hidden = gradients_of(dtype)
    return {
        "weight": (
            relative_error(mine[1].grad.double() / 2.0**10, true_weight[own]),
            relative_error(torch_weight[own], true_weight[own]),
        ),
        "hidden states": (
            relative_error(mine[0].grad.double() / 2.0**10, true_hidden),  # type: ignore[union-attr]
            relative_error(torch_hidden, true_hidden),
        ),
    }


@pytest.mark.smoke
@pytest.mark.skipif(compute_device().type == "cuda", reason="an assertion on the device ends the process")
def test_losses_scaled_differently_are_refused(workers_on_all: Workers) -> None:
    for sentence in workers_on_all.run(scaled_by_rank):
        assert "use FSDP2(lm_head='gather')" in sentence
        assert "scale their losses differently" in sentence


def scaled_by_rank() -> str:
    shard, own = shard_of(11, divide_factor=1.0)
    hidden, weight = (
        on_device.randn(5, D, requires_grad=True),
        on_device.randn(own.stop - own.start, D, requires_grad=True),
    )
    labels = on_device.arange(5)
    loss = fused_linear_cross_entropy(
        hidden, weight, None, labels, spec=LossSpec(), execution=Execution(), rows=shard
    ).loss
    with pytest.raises(liger_dist.LigerDistError) as caught:
        (loss * (1.0 + dist.get_rank())).backward()
    return str(caught.value)


def test_ranks_that_freeze_different_parameters_are_refused(workers_on_all: Workers) -> None:
    for sentence in workers_on_all.run(frozen_on_one):
        assert "called the model with different arguments: rank 0 of the group for a loss of" in sentence
        assert "weight=False" in sentence


def frozen_on_one() -> str:
    shard, own = shard_of(11, divide_factor=1.0)
    hidden, weight = (torch.randn(rows, D, device=compute_device()) for rows in (5, own.stop - own.start))
    labels = torch.arange(5, device=hidden.device)
    weight.requires_grad_(dist.get_rank() != 1)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        fused_linear_cross_entropy(hidden, weight, None, labels, spec=LossSpec(), execution=Execution(), rows=shard)
    return str(caught.value)


def test_a_plan_covers_every_token_once() -> None:
    for counts in ((5, 5), (17, 3, 0, 9), (0, 1), (1000, 999, 1)):
        for budget in (1, 100, 10**4, 10**9):
            plan = ExchangePlan.of(counts, bytes_of_token=14, memory_budget=budget)
            for rank, count in enumerate(counts):
                shares = [plan.share(rank, chunk) for chunk in range(plan.num_chunks)]
                assert [token for start, end in shares for token in range(start, end)] == list(range(count))
                assert all(end - start <= plan.rows for start, end in shares)
            assert plan.rows * len(counts) * 14 <= max(budget, len(counts) * 14)
