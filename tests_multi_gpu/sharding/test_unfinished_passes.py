"""Passes that end early, or of which only a part is used: losses without a backward under mixed precision, all-gathers
begun ahead of a pass that raises, the decoder alone beside a loss, and gradients that a closure completes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients, full_parameters
from harness import Workers
from models import full, make_batch, make_model
from peft_methods import adapted
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)

import liger_dist
from liger_dist.model.peft import base_model_of

FSDP2: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, units of two layers": {"layers_per_unit": 2},
    "fsdp2, not resharded": {"reshard_after_forward": False},
    "fsdp2, replicas": {"mesh": (2, 1)},
    "vocab-parallel": {"lm_head": "vocab_parallel"},
}
LAYOUTS: dict[str, Callable[[], Any]] = {
    name: lambda options=options: liger_dist.FSDP2(reduce_dtype=torch.float64, **options)  # type: ignore[misc]
    for name, options in FSDP2.items()
}
LAYOUTS["fsdp1"] = lambda: liger_dist.FSDP1(reduce_dtype=torch.float64)


def batch(step: int, rank: int | None = None) -> dict[str, Tensor]:
    return make_batch(dist.get_rank() if rank is None else rank, seed=step)


def both(layout: str) -> tuple[Any, Any]:
    """The truth, which one process computes for all ranks, and the wrapped model."""
    model = make_model("llama")
    truth = copy.deepcopy(model)
    return truth, liger_dist.wrap(model, LAYOUTS[layout]())


def true_loss(truth: Any, of: Callable[[Any, int], Tensor]) -> Tensor:
    return torch.stack([of(truth, rank) for rank in range(dist.get_world_size())]).mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def errors(found: dict[str, Tensor], true: dict[str, Tensor]) -> float:
    return max(float((found[n] - true[n]).norm() / true[n].norm().clamp_min(1e-30)) for n in true)


def weight_errors(model: Any, truth: Any) -> float:
    true = {name: parameter.detach() for name, parameter in truth.named_parameters()}
    return errors({name.removeprefix("module."): full(p) for name, p in full_parameters(model).items()}, true)


# --- losses without a backward, under mixed precision -----------------------------------------------------------------

MOMENTS = ("before the first step", "before backward", "after step", "within no_sync")
MIXED = {
    "fsdp1": lambda: liger_dist.FSDP1(param_dtype=torch.bfloat16),
    "fsdp1, not resharded": lambda: liger_dist.FSDP1(param_dtype=torch.bfloat16, reshard_after_forward=False),
    "fsdp2": lambda: liger_dist.FSDP2(param_dtype=torch.bfloat16),
    "vocab-parallel": lambda: liger_dist.FSDP2(param_dtype=torch.bfloat16, lm_head="vocab_parallel"),
}


@pytest.mark.parametrize("layout", MIXED)
def test_losses_without_a_backward_in_16_bits(layout: str, workers_2: Workers) -> None:
    for found in workers_2.run(weights_of_mixed, layout):
        usual = found.pop("none")
        assert len(usual) > 10
        for moment, weights in found.items():
            assert weights.keys() == usual.keys()
            assert all(torch.equal(weights[name], usual[name]) for name in usual), moment


def weights_of_mixed(layout: str) -> dict[str, dict[str, Tensor]]:
    return {moment: train_mixed(layout, moment) for moment in ("none", *MOMENTS)}


def train_mixed(layout: str, moment: str) -> dict[str, Tensor]:
    model = liger_dist.wrap(make_model("llama", dtype=torch.float32), MIXED[layout]())
    optimizer, kept = optimizer_of(model), []

    def unused(now: str) -> None:
        if now == moment:
            # A loss that is held, as by the name of a variable, and one that is not.
            kept.append(model(**batch(9)).loss)
            model(**batch(8))

    unused("before the first step")
    for step in range(3):
        if layout.startswith("fsdp1"):
            with model.no_sync():
                unused("within no_sync")
                model(**batch(step)).loss.backward()
        loss = model(**batch(step + 20)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        unused("after step")
        # The last one is not used before this backward.
        last = model(**batch(step + 30)).loss
        unused("before backward") if not layout.startswith("fsdp1") else None
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: full(parameter).clone() for name, parameter in full_parameters(model).items()}


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2"])
def test_two_losses_with_one_backward_in_16_bits(layout: str, workers_2: Workers) -> None:
    """After a loss without one."""
    for one, two in workers_2.run(two_losses, layout):
        assert one.keys() == two.keys()
        assert errors(one, two) < 2e-2
        assert all(float(value.norm()) > 0 for value in one.values())


def two_losses(layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found = []
    for together in (True, False):
        model = liger_dist.wrap(make_model("llama", dtype=torch.float32), MIXED[layout]())
        model(**batch(5))
        if together:
            (model(**batch(1)).loss + model(**batch(2)).loss).backward()
        else:
            for step in (1, 2):
                model(**batch(step)).loss.backward()
        found.append({name: gradient.clone() for name, gradient in full_gradients(model).items()})
    return found[0], found[1]


# --- passes that raise while weights are being all-gathered ahead -----------------------------------------------------


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise MemoryError("in the backward")


@pytest.mark.parametrize("layout", FSDP2)
@pytest.mark.parametrize("what", ["backward", "forward"])
def test_weights_that_were_gathered_ahead_of_a_pass_that_raised(what: str, layout: str, workers_2: Workers) -> None:
    for loss_error, weight_error in workers_2.run(after_a_failed_pass, what, layout):
        assert loss_error < 1e-6
        assert weight_error < 1e-6


def after_a_failed_pass(what: str, layout: str) -> tuple[float, float]:
    truth, model = both(layout)
    layers = list(model.model.layers)
    own, optimizer = optimizer_of(truth), optimizer_of(model)
    others = get_model_state_dict(model)
    others = {name: value.clone() * 1.25 for name, value in others.items()}
    for step in range(2):
        true_loss(truth, lambda m, rank, s=step: m(**batch(s, rank)).loss).backward()  # type: ignore[misc]
        model(**batch(step)).loss.backward()
        own.step(), own.zero_grad(), optimizer.step(), optimizer.zero_grad()
    if what == "forward":
        for layer, following in pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
        hook = layers[0].mlp.register_forward_hook(raise_memory_error)
        with pytest.raises(MemoryError):
            model(**batch(3))
        hook.remove()
    else:
        hook = layers[1].register_forward_pre_hook(lambda module, args: (RaisesInBackward.apply(args[0]), *args[1:]))
        loss = model(**batch(3)).loss
        with pytest.raises(MemoryError):
            loss.backward()
        hook.remove()
        del loss
    set_model_state_dict(model, others)
    with torch.no_grad():
        truth.load_state_dict({name: full(value) for name, value in others.items()})
    own.zero_grad(), optimizer.zero_grad()
    true = true_loss(truth, lambda m, rank: m(**batch(4, rank)).loss)
    found = model(**batch(4)).loss
    true.backward(), found.backward()
    own.step(), optimizer.step()
    mean = found.detach().clone()
    dist.all_reduce(mean)
    return abs(float(mean / dist.get_world_size() - true)), weight_errors(model, truth)


def raise_memory_error(*_: Any) -> None:
    raise MemoryError("in the forward")


# --- written weights, before generate and before the decoder alone ----------------------------------------------------


@pytest.mark.parametrize("layout", ["fsdp1", "fsdp2", "fsdp2, not resharded", "vocab-parallel"])
@pytest.mark.parametrize("what", ["generate", "decoder"])
def test_weights_written_through_listed_parameters_are_read(what: str, layout: str, workers_2: Workers) -> None:
    if what == "decoder" and layout in ("fsdp1", "vocab-parallel"):
        pytest.skip("its final norm is in the root's unit")
    for found, true in workers_2.run(read_after_writing, what, layout):
        torch.testing.assert_close(found, true)


def read_after_writing(what: str, layout: str) -> tuple[Tensor, Tensor]:
    truth, model = both(layout)
    optimizer_of(model)
    listed = list(model.parameters())
    model(**batch(0))
    with torch.no_grad():
        for parameter in (*listed, *truth.parameters()):
            parameter.mul_(1.5)
    ids = batch(1, 0)["input_ids"]
    found = []
    for one in (model, truth):
        inner = getattr(one, "module", one)
        if what == "generate":
            output = inner.eval().generate(
                input_ids=ids, max_new_tokens=2, do_sample=False, output_scores=True, return_dict_in_generate=True
            )
            found.append(torch.stack(output.scores))
        else:
            found.append(inner.model(input_ids=ids).last_hidden_state.detach())
    return found[0], found[1]


# --- hidden states of the decoder alone beside a loss -----------------------------------------------------------------

ORDERS: dict[str, Callable[[Callable[[], Tensor], Callable[[], Tensor]], Any]] = {
    "hidden, loss, one backward": lambda hidden, loss: (hidden() + loss()).backward(),
    "loss, hidden, one backward": lambda hidden, loss: (loss() + hidden()).backward(),
    "hidden, hidden, one backward": lambda hidden, loss: (hidden() + 2 * hidden()).backward(),
    "hidden, unused loss": lambda hidden, loss: (hidden(), loss())[0].backward(),
    "hidden, evaluation": lambda hidden, loss: (hidden(), without_gradients(loss))[0].backward(),
    "unused hidden, loss": lambda hidden, loss: (hidden(), loss())[1].backward(),
}


def without_gradients(loss: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        loss()


@pytest.mark.nightly(layout=["fsdp2, not resharded", "fsdp2, replicas"])
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2, not resharded", "fsdp2, replicas"])
def test_hidden_states_of_the_decoder_alone_beside_a_loss(layout: str, workers_2: Workers) -> None:
    for found in workers_2.run(errors_beside_a_loss, layout):
        assert {order: error for order, error in found.items() if not error < 1e-8} == {}


def errors_beside_a_loss(layout: str) -> dict[str, float]:
    found = {}
    for order, run in ORDERS.items():
        truth, model = both(layout)
        own, optimizer = optimizer_of(truth), optimizer_of(model)
        # FSDP2 knows its root by the first forward.
        without_gradients(lambda m=model: m(**batch(0)).loss)  # type: ignore[misc]
        for step in range(2):
            run(
                lambda m=model: hidden_mean(m, dist.get_rank()),  # type: ignore[misc]
                lambda m=model, s=step: m(**batch(s)).loss,  # type: ignore[misc]
            )
            run(
                lambda m=truth: true_loss(m, hidden_mean),  # type: ignore[misc]
                lambda m=truth, s=step: true_loss(m, lambda one, rank: one(**batch(s, rank)).loss),  # type: ignore[misc]
            )
            own.step(), own.zero_grad(), optimizer.step(), optimizer.zero_grad()
        found[order] = weight_errors(model, truth)
    return found


def hidden_mean(model: Any, rank: int) -> Tensor:
    hidden: Tensor = model.model(input_ids=batch(7, rank)["input_ids"], use_cache=False).last_hidden_state
    return hidden.square().mean()


LATER: dict[str, Callable[[Callable[[int], Any]], Any]] = {
    "hidden states, then a loss": lambda call: call(0).hidden_states[-1].square().mean() + call(1).loss,
    "two hidden states": lambda call: (
        call(0).hidden_states[-1].square().mean() + call(1).hidden_states[-1].abs().mean()
    ),
    "loss, then hidden states": lambda call: call(0).loss + call(1).hidden_states[-1].square().mean(),
}


@pytest.mark.nightly(layout=["fsdp2, not resharded", "fsdp2, replicas"])
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp2, not resharded", "fsdp2, replicas", "vocab-parallel"])
def test_hidden_states_of_a_forward_beside_a_later_one(layout: str, workers_2: Workers) -> None:
    """With one backward of both, as of embeddings and losses."""
    for found in workers_2.run(errors_of_later, layout):
        assert {order: error for order, error in found.items() if not error < 1e-7} == {}


def errors_of_later(layout: str) -> dict[str, float]:
    found = {}
    for order, run in LATER.items():
        truth, model = both(layout)
        own, optimizer = optimizer_of(truth), optimizer_of(model)
        for _ in range(2):
            run(lambda n, m=model: m(**batch(n), output_hidden_states=True)).backward()  # type: ignore[misc]

            def of(one: Any, rank: int, run: Any = run) -> Tensor:
                loss: Tensor = run(lambda n: one(**batch(n, rank), output_hidden_states=True, use_cache=False))
                return loss

            true_loss(truth, of).backward()
            own.step(), own.zero_grad(), optimizer.step(), optimizer.zero_grad()
        found[order] = weight_errors(model, truth)
    return found


# --- steps with a closure, and states of optimizers -------------------------------------------------------------------


@pytest.mark.parametrize("what", ["closure", "closure by keyword", "state"])
def test_rows_are_summed_over_replicas_in_a_closure(what: str, workers_2: Workers) -> None:
    """The last backward of a step is in its closure; torch makes the state of an optimizer in a step of rate 0."""
    for error in workers_2.run(step_with_closure, what):
        assert error < 1e-8


def step_with_closure(what: str) -> float:
    model = make_model("llama")
    truth = copy.deepcopy(model)
    options = liger_dist.FSDP2(reduce_dtype=torch.float64, lm_head="vocab_parallel", mesh=(2, 1))
    model = liger_dist.wrap(model, options)
    own, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (truth, model))
    model.set_requires_gradient_sync(False)
    model(**batch(0)).loss.backward()
    if what == "state":
        get_optimizer_state_dict(model, optimizer)
    model.set_requires_gradient_sync(True)

    def closure() -> Tensor:
        loss: Tensor = model(**batch(1)).loss
        loss.backward()
        return loss

    if what == "closure":
        optimizer.step(closure)
    elif what == "closure by keyword":
        optimizer.step(closure=closure)
    else:
        closure()
        optimizer.step()
    for step in range(2):
        true_loss(truth, lambda m, rank, s=step: m(**batch(s, rank)).loss).backward()  # type: ignore[misc]
    own.step()
    return weight_errors(model, truth)


def test_rows_that_a_closure_does_not_sum_are_refused(workers_2: Workers) -> None:
    for sentence in workers_2.run(closure_without_sum):
        assert "that no backward has summed over the replicas" in sentence


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_rows_that_are_not_summed_are_refused_at_any_rate(rate: float, workers_2: Workers) -> None:
    """Also in the first step of a warm-up."""
    for sentence in workers_2.run(step_without_sum, rate):
        assert "that no backward has summed over the replicas" in sentence


def step_without_sum(rate: float) -> str:
    options = liger_dist.FSDP2(reduce_dtype=torch.float64, lm_head="vocab_parallel", mesh=(2, 1))
    model: Any = liger_dist.wrap(make_model("llama"), options)
    model.set_requires_gradient_sync(False)
    model(**batch(0)).loss.backward()
    model.set_requires_gradient_sync(True)
    model.lm_head.requires_grad_(False)
    model(**batch(1)).loss.backward()
    model.lm_head.requires_grad_(True)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        torch.optim.SGD(model.parameters(), lr=rate).step()
    return str(caught.value)


def closure_without_sum() -> str:
    options = liger_dist.FSDP2(reduce_dtype=torch.float64, lm_head="vocab_parallel", mesh=(2, 1))
    model = liger_dist.wrap(make_model("llama"), options)
    optimizer = optimizer_of(model)
    model.set_requires_gradient_sync(False)
    model(**batch(0)).loss.backward()
    with pytest.raises(liger_dist.LigerDistError) as caught:
        optimizer.step(lambda: on_device.zeros(()))
    return str(caught.value)


# --- what is refused by name ------------------------------------------------------------------------------------------

REFUSED = {
    "merge": (lambda: liger_dist.FSDP2(frozen="replicate"), "to base weights that every rank has"),
    "reentrant": (lambda: liger_dist.FSDP1(frozen="replicate"), "2 layers share a unit of FSDP1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_adapters_of_replicated_layers(what: str, workers_2: Workers) -> None:
    for sentence in workers_2.run(refusal_of, what):
        assert REFUSED[what][1] in sentence


def refusal_of(what: str) -> str:
    model: Any = adapted("LORA")
    if what == "reentrant":
        base: Any = base_model_of(model)
        base.enable_input_require_grads()
        base.gradient_checkpointing_enable({"use_reentrant": True})
    root = liger_dist.wrap(model.train(), REFUSED[what][0]())
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model.merge_adapter() if what == "merge" else root(**batch(0))
    return str(caught.value)


@pytest.mark.parametrize("what", ["logits", "generate"])
def test_rows_of_a_vocab_parallel_head_in_inference_mode(what: str, workers_2: Workers) -> None:
    for error in workers_2.run(steps_around_inference, what):
        assert error < 1e-8


def steps_around_inference(what: str) -> float:
    truth, model = both("vocab-parallel")
    own, optimizer = optimizer_of(truth), optimizer_of(model)
    for step in range(2):
        with torch.inference_mode():
            ids = batch(5, 0)["input_ids"]
            if what == "generate":
                model.generate(input_ids=ids, max_new_tokens=2, do_sample=False)
            else:
                assert model(input_ids=ids).logits.shape[-1] == 101
        model(**batch(step)).loss.backward()
        true_loss(truth, lambda m, rank, s=step: m(**batch(s, rank)).loss).backward()  # type: ignore[misc]
        own.step(), own.zero_grad(), optimizer.step(), optimizer.zero_grad()
    return weight_errors(model, truth)


# --- a forward with a graph in which nothing trains -------------------------------------------------------------------


@pytest.mark.nightly(reshard=[False])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("when", ["before forward", "before step"])
def test_checkpointed_forwards_while_all_is_frozen(when: str, reshard: bool, workers_2: Workers) -> None:
    """Transformers makes the embedding's output require a gradient for checkpoints."""
    assert max(workers_2.run(error_beside_frozen_forwards, when, reshard)) < 1e-6


def error_beside_frozen_forwards(when: str, reshard: bool) -> float:
    truth = make_model("llama")
    model: Any = copy.deepcopy(truth)
    model.gradient_checkpointing_enable()
    strategy = liger_dist.FSDP1(reduce_dtype=torch.float64, reshard_after_forward=reshard)
    root: Any = liger_dist.wrap(model.train(), strategy)
    optimizers = [optimizer_of(root), optimizer_of(truth)]

    def frozen_forward(moment: str) -> None:
        if moment == when:
            root.requires_grad_(False)
            root(**batch(7))
            root.requires_grad_(True)

    for step in range(3):
        frozen_forward("before forward")
        root(**batch(step)).loss.backward()
        true_loss(truth, lambda m, rank, step=step: m(**batch(step, rank)).loss).backward()  # type: ignore[misc]
        frozen_forward("before step")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weight_errors(root, truth)


def test_full_logits_after_micro_batches_without_sync(workers_2: Workers) -> None:
    """Of a vocab-parallel lm_head with replicas: its rows of the earlier micro-batch are summed, too."""
    assert max(workers_2.run(error_of_full_logits_after_no_sync)) < 1e-6


def error_of_full_logits_after_no_sync() -> float:
    truth = make_model("llama")
    strategy = liger_dist.FSDP2(lm_head="vocab_parallel", mesh=(2, 1), reduce_dtype=torch.float64)
    root: Any = liger_dist.wrap(copy.deepcopy(truth), strategy)
    optimizers = [optimizer_of(root), optimizer_of(truth)]
    root.set_requires_gradient_sync(False)
    root(**batch(0)).loss.backward()
    root.set_requires_gradient_sync(True)
    root(**batch(1), outputs=("logits",)).loss.backward()
    for step in (0, 1):
        true_loss(truth, lambda m, rank, step=step: m(**batch(step, rank)).loss).backward()  # type: ignore[misc]
    found, true = full_gradients(root), {n: p.grad for n, p in truth.named_parameters() if p.grad is not None}
    for optimizer in optimizers:
        optimizer.step()
    return max(errors({n: full(g) for n, g in found.items()}, true), weight_errors(root, truth))
