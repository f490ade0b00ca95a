"""Losses asked of the model inside DDP or FSDP1: sent through the wrapper that wrap made, warned of or refused under
others."""

from __future__ import annotations

import copy
import gc
import io
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from harness import Workers
from layouts import zero_settings
from models import make_batch, make_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import liger_dist
from liger_dist.sharding.process_groups import compute_device

DDP = DistributedDataParallel


class Policy(nn.Module):
    """A module around the model that asks the model for two losses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        return self.model(**batch).loss + 2.0 * self.model(**batch).loss


def gradient_of_the_head(model: Any) -> float:
    head = model.get_output_embeddings().weight
    return float(head.grad.norm()) if head.grad is not None else 0.0


def expected(scale: float = 1.0) -> float:
    """The averaged gradient, without this library."""
    model = make_model("llama")
    for rank in range(dist.get_world_size()):
        (scale * model(**make_batch(rank)).loss / dist.get_world_size()).backward()
    return gradient_of_the_head(model)


def of_wrap_after_a_freeze() -> Any:
    model = make_model("llama")
    root = liger_dist.wrap(model, "ddp")
    gc.freeze()
    return model, root


def of_a_copy() -> Any:
    root = copy.deepcopy(liger_dist.wrap(make_model("llama"), "ddp"))
    return root.module, root


def of_peft() -> Any:
    peft = pytest.importorskip("peft")
    model = make_model("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return model, liger_dist.wrap(adapted, "ddp")


def of_another_ddp_within() -> Any:
    """A call of another DDP inside the wrapper's forward, before the model is called."""
    other = DDP(nn.Linear(2, 2).to(compute_device()))
    model, root = of_peft()

    def call_other(*_: Any) -> None:
        other(torch.ones(1, 2, device=compute_device()))

    root.module.register_forward_pre_hook(call_other)
    return model, root


MAKERS = {
    maker.__name__: maker
    for maker in (
        of_wrap_after_a_freeze,
        of_a_copy,
        of_peft,
        of_another_ddp_within,
    )
}


@pytest.mark.parametrize("name", MAKERS)
def test_gradients_are_averaged(name: str, workers_2: Workers) -> None:
    for actual, wanted in workers_2.run(asked_inside, name):
        assert abs(actual - wanted) < 1e-6 * wanted


def asked_inside(name: str) -> tuple[float, float]:
    model, root = MAKERS[name]()
    try:
        model(**make_batch(dist.get_rank())).loss.backward()
        actual = gradient_of_the_head(model)
    finally:
        gc.unfreeze()
    assert root is not None
    return actual, expected()


def early(root_is_made: str) -> Any:
    """A wrapped model that has had a loss before ``DDP`` was made around it, or around a module that holds it."""
    model = liger_dist.wrap(make_model("llama"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(**make_batch(0)).loss.backward()
    model.zero_grad()
    return model, DDP(Policy(model) if root_is_made == "around a policy" else model)


@pytest.mark.parametrize("root_is_made", ["around the model", "around a policy"])
def test_a_loss_outside_ddp_that_nothing_averages_is_warned_of(root_is_made: str, workers_2: Workers) -> None:
    for sentences in workers_2.run(asked_outside, root_is_made):
        assert sentences == [1, 0]


def asked_outside(root_is_made: str) -> list[int]:
    """Warnings of a loss outside the wrapper, and of one inside it, in a process that has not started DeepSpeed."""
    counts = []
    if "deepspeed.comm.comm" in sys.modules:
        sys.modules["deepspeed.comm.comm"].cdb = None
    for is_inside in (False, True):
        model = liger_dist.wrap(make_model("llama"))
        root = DDP(Policy(model) if root_is_made == "around a policy" else model)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            (root if is_inside else model)(**make_batch(dist.get_rank()))
            with torch.no_grad():
                model(**make_batch(dist.get_rank()))
        counts.append(sum("nothing averages its gradients" in str(warning.message) for warning in seen))
    return counts


@pytest.mark.parametrize("by", ["fully_shard", "FSDP1", "DeepSpeed 1", "DeepSpeed 3", "a checkpoint in DDP"])
def test_what_averages_is_not_warned_of(by: str, workers_2: Workers) -> None:
    for count in workers_2.run(warnings_under, by):
        assert count == 0


def warnings_under(by: str) -> int:
    model: Any = liger_dist.wrap(make_model("llama", dtype=torch.float32))
    root: Any = model
    if by == "fully_shard":
        fully_shard(model)
    elif by == "FSDP1":
        root = FullyShardedDataParallel(model, device_id=compute_device())
    elif by == "a checkpoint in DDP":
        root = DDP(Checkpointed(model))
    else:
        deepspeed = pytest.importorskip("deepspeed")
        settings = zero_settings({"stage": int(by[-1])})
        root, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings
        )
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss = root(**make_batch(dist.get_rank()))
        (loss if isinstance(loss, Tensor) else loss.loss).backward()
    return sum("nothing averages its gradients" in str(warning.message) for warning in seen)


class Checkpointed(Policy):
    """Computes its model again in the backward."""

    def forward(self, **batch: Tensor) -> Tensor:
        run = torch.utils.checkpoint.checkpoint
        return run(lambda: self.model(**batch).loss, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_wrapper_made_after_a_first_loss_averages(workers_2: Workers) -> None:
    for averaged, wanted in workers_2.run(asked_of_the_wrapper_after_an_early_loss):
        assert abs(averaged - wanted) < 1e-6 * wanted


def asked_of_the_wrapper_after_an_early_loss() -> tuple[float, float]:
    model, root = early("around the model")
    root(**make_batch(dist.get_rank())).loss.backward()
    return gradient_of_the_head(model), expected()


def test_a_larger_module_inside_fsdp1_may_ask_twice(workers_2: Workers) -> None:
    for errors in workers_2.run(asked_twice):
        assert max(errors.values()) < 1e-6


def asked_twice() -> dict[str, float]:
    errors = {}
    batch = make_batch(dist.get_rank())
    for use_orig_params in (False, True):
        model = liger_dist.wrap(make_model("llama"))
        reference = make_model("llama")
        root = FullyShardedDataParallel(Policy(model), use_orig_params=use_orig_params, device_id=compute_device())
        for _ in range(2):
            loss = root(**batch)
            loss.backward()
            errors[f"loss {use_orig_params}"] = abs(float(loss) - 3.0 * float(reference(**batch).loss))
        with pytest.raises(liger_dist.LigerDistError, match="outside the wrapper's forward"):
            model(**batch)
    return errors


def test_keywords_go_through_the_wrapper(workers_2: Workers) -> None:
    for shapes in workers_2.run(asked_inside_with_keywords):
        assert shapes == [(3, 12, 101), True]


def asked_inside_with_keywords() -> list[Any]:
    model = make_model("llama")
    root = liger_dist.wrap(model, "ddp")
    batch = make_batch(dist.get_rank())
    logits = model(**batch, outputs=("logits",)).logits
    smoothed, plain = (model(**batch, label_smoothing=amount).loss for amount in (0.5, 0.0))
    assert root is not None
    return [tuple(logits.shape), float(smoothed.detach()) != float(plain.detach())]


def test_fsdp1_serves_the_inner_model_before_and_after_training(workers_2: Workers) -> None:
    for errors in workers_2.run(served_early):
        assert max(errors) < 1e-6


def served_early() -> list[float]:
    model, reference = make_model("llama"), make_model("llama")
    root = liger_dist.wrap(model, liger_dist.FSDP1(reduce_dtype=torch.float64))
    batch = make_batch(dist.get_rank())
    errors = []
    for _ in range(2):
        with torch.no_grad():
            errors.append(abs(float(model(**batch).loss) - float(reference(**batch).loss)))
            difference = model(input_ids=batch["input_ids"]).logits - reference(input_ids=batch["input_ids"]).logits
            errors.append(float(difference.abs().max()))
        with pytest.raises(liger_dist.LigerDistError, match="labels have shape"):
            model(input_ids=batch["input_ids"], labels=batch["labels"][:, 1:])
        model(**batch).loss.backward()
    assert root is not None
    return errors


def test_a_saved_inner_model_is_inside_nothing(workers_2: Workers) -> None:
    for differences in workers_2.run(saved_and_loaded):
        assert differences == 0.0


def saved_and_loaded() -> float:
    root = liger_dist.wrap(make_model("llama"), "ddp")
    batch = make_batch(dist.get_rank())
    root(**batch).loss.backward()
    file = io.BytesIO()
    torch.save(root.module, file)
    assert b"DistributedDataParallel" not in file.getvalue()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    file = io.BytesIO()
    torch.save(root, file)
    wrapper = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    return sum(abs(float(one(**batch).loss) - float(root.module(**batch).loss)) for one in (loaded, wrapper))


@pytest.mark.smoke
def test_a_forward_put_on_top_stays_when_unwrapped(workers_2: Workers) -> None:
    for calls in workers_2.run(with_a_forward_on_top):
        assert calls == 2


def with_a_forward_on_top() -> int:
    model: Any = liger_dist.wrap(make_model("llama"))
    calls = []
    below = model.forward

    def on_top(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return below(*args, **kwargs)

    model.forward = on_top
    model(**make_batch(0))
    liger_dist.unwrap(model)
    assert model(**make_batch(0)).logits.shape[-1] == 101
    return len(calls)


def test_an_interrupted_forward_leaves_later_losses_averaged(workers_2: Workers) -> None:
    for differences in workers_2.run(after_an_interrupt):
        assert differences == 0


def after_an_interrupt() -> float:
    model = make_model("llama")
    root = liger_dist.wrap(model, "ddp")

    def interrupt(*_: Any) -> None:
        handle.remove()
        raise KeyboardInterrupt

    handle = model.model.norm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        root(**make_batch(dist.get_rank()))
    model(**make_batch(dist.get_rank())).loss.backward()
    gradient = model.lm_head.weight.grad.clone()
    dist.all_reduce(gradient, op=dist.ReduceOp.MAX)
    return float((gradient - model.lm_head.weight.grad).abs().max())
