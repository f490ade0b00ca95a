"""The vocabulary-parallel loss, every option, against whole logits in fp64: also with fewer classes than processes."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import make_batch, make_model
from row_shards import CASES, PLAIN, D, output_error, own_rows, tensors_of_tokens
from torch import Tensor
from torch.distributed.tensor import DTensor
from truth import cross_entropy_truth, relative_error, weighted_sum

import liger_dist
from liger_dist.losses.execution import Execution
from liger_dist.losses.spec import LossSpec
from liger_dist.losses.tensor_parallel import RowShard, vocab_parallel_linear_cross_entropy
from liger_dist.sharding.process_groups import compute_device

T = 13


@pytest.mark.nightly(name=["plain", "soft-cap and scales"], backend=["triton"])
@pytest.mark.nightly(name=["smoothing", "log-probabilities and entropy"], backend=["triton"])
@pytest.mark.smoke
@pytest.mark.nightly(vocab_size=[3], backend=["triton"])
@pytest.mark.nightly(
    name=["sum", "none", "z-loss", "token weights", "items", "bias", "class weights and smoothing"], backend=["triton"]
)
@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("vocab_size", [101, 3])
@pytest.mark.parametrize("name", CASES)
def test_equals_full_logits(name: str, vocab_size: int, backend: str, workers_on_all: Workers) -> None:
    # Triton takes the scale, the soft-cap and the temperature as fp32 numbers.
    tolerance = 1e-10 if backend == "reference" else 1e-6
    for errors in workers_on_all.run(errors_on_shared_tokens, name, vocab_size, backend):
        assert max(errors.values()) < tolerance, errors


def errors_on_shared_tokens(name: str, vocab_size: int, backend: Any) -> dict[str, float]:
    case = dict(CASES[name])
    device = compute_device()
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return on_device.randn(shape, generator=generator, dtype=torch.float64).to(device)

    hidden, weight, bias = random(T, D), random(vocab_size, D), random(vocab_size)
    labels = on_device.randint(vocab_size, (T,), generator=generator).to(device)
    labels[::4] = -100
    class_weight = random(vocab_size).abs() if case.pop("class_weight", False) else None
    token_weight = random(T).abs() if case.pop("token_weight", False) else None
    case |= tensors_of_tokens(case, T, vocab_size, generator)
    upstream = {"loss": random(T) if case.get("reduction") == "none" else random()}
    upstream |= {name: random(T) for name in ("log_prob", "entropy", "sum_sq_prob")} | {"log_prob_at": random(T, 3)}
    bias_used = bias if case.pop("bias", False) else None
    bias = torch.zeros_like(bias) if bias_used is None else bias
    outputs = case.pop("outputs", ())

    whole = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    truth = cross_entropy_truth(
        whole[0] @ whole[1].T + whole[2], labels, class_weight=class_weight, token_weight=token_weight, **case
    )
    weighted_sum(truth, outputs, upstream).backward()

    own = own_rows(vocab_size)
    mine = [hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()]
    mine.append(bias[own].clone().requires_grad_())
    plain = {key: case.pop(key) for key in PLAIN if key in case}
    temperature = case.pop("temperature") if isinstance(case.get("temperature"), Tensor) else None
    result = vocab_parallel_linear_cross_entropy(
        mine[0],
        mine[1],
        None if bias_used is None else mine[2],
        labels,
        shard=RowShard(group=dist.group.WORLD, start=own.start, vocab_size=vocab_size),  # type: ignore[arg-type]
        spec=LossSpec(
            **case,
            **({} if temperature is None else {"temperature": temperature}),
            class_weight=class_weight,
            token_weight=token_weight,
            outputs=outputs,
            **plain,
        ),
        execution=Execution(backend=backend, memory_budget=2 * -(-vocab_size // dist.get_world_size()) * 8),
    )
    weighted_sum(result, outputs, upstream).backward()
    expected = [whole[0].grad, whole[1].grad[own]]  # type: ignore[index]
    errors = {"loss": relative_error(result.loss, truth.loss)}
    for gradient, tensor in zip(expected, mine, strict=False):
        errors[f"gradient {len(errors)}"] = relative_error(tensor.grad, gradient)  # type: ignore[arg-type]
    if bias_used is not None:
        errors["gradient of the bias"] = relative_error(mine[2].grad, whole[2].grad[own])  # type: ignore[arg-type,index]
    return errors | {output: output_error(result, truth, output) for output in outputs}


@pytest.mark.nightly(reduction=["none"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_compiled_loss_of_row_shards_reads_all_rows(reduction: Any, workers_2: Workers) -> None:
    for errors in workers_2.run(errors_of_compiled, reduction):
        assert max(errors) < 1e-12


def errors_of_compiled(reduction: Any) -> list[float]:
    """Of the loss and its gradients, compiled without the collectives' own graphs and eager."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (on_device.randn(n, 8, generator=generator, dtype=torch.float64) for n in (12, 20))
    labels = on_device.randint(20, (12,), generator=generator)
    rank = dist.get_rank()
    shard = RowShard(group=dist.group.WORLD, start=10 * rank, vocab_size=20)  # type: ignore[arg-type]

    def loss(hidden: Tensor, rows: Tensor) -> Tensor:
        spec = LossSpec(reduction=reduction)
        return vocab_parallel_linear_cross_entropy(
            hidden, rows, None, labels, shard=shard, spec=spec, execution=Execution()
        ).loss

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        leaves = [hidden.clone().requires_grad_(), weight[10 * rank : 10 * rank + 10].clone().requires_grad_()]
        value = function(*leaves)
        found.append([value, *torch.autograd.grad(value.square().sum(), leaves)])
    return [relative_error(got, want) for got, want in zip(*reversed(found), strict=True)]


def test_the_op_refuses_a_weight_that_is_sharded(workers_2: Workers) -> None:
    for sentences in workers_2.run(given_sharded_weights):
        assert sum(layout.startswith("logits") for layout in sentences) == 2
        for layout, sentence in sentences.items():
            assert "liger_dist.wrap" in sentence, layout


def given_sharded_weights() -> dict[str, str]:
    """A loss computed outside the model, as code for whole weights does it."""
    from cells import Cell, _fsdp1, _fsdp2, _zero
    from layouts import SESSIONS

    sentences = {}
    batch = make_batch(0)
    for cell in (_fsdp1(use_orig_params=True), _fsdp1(own_unit=True), _fsdp2(), Cell(engine="tp"), _zero(3)):
        dtype = torch.float32 if cell.engine == "zero" else torch.float64
        session = SESSIONS[cell.engine](cell, make_model("llama", dtype=dtype))
        hidden = torch.zeros(3, 12, 16, dtype=dtype, device=compute_device())
        head: Any = session.inner.get_output_embeddings()  # type: ignore[operator]
        with pytest.raises(liger_dist.LigerDistError) as caught:
            liger_dist.linear_cross_entropy(hidden, head.weight, batch["labels"])
        sentences[str(cell)] = str(caught.value)
        if isinstance(head.weight, DTensor):
            with pytest.raises(liger_dist.LigerDistError) as caught:
                liger_dist.cross_entropy(head.weight, on_device.zeros(len(head.weight), dtype=torch.int64))
            sentences[f"logits, {cell}"] = str(caught.value)
        if cell.engine == "zero":
            import deepspeed

            with deepspeed.zero.GatheredParameters(head.weight), pytest.raises(liger_dist.LigerDistError) as caught:
                liger_dist.linear_cross_entropy(hidden, head.weight, batch["labels"])
            sentences["gathered by hand"] = str(caught.value)
        session.close()
    return sentences
