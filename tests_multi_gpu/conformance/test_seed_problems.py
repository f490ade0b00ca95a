"""The five problems that this project was started from, each beside the naive code that has it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Workers
from models import VOCAB_SIZE, full, gradient_errors, make_batch, make_model, true_loss_sum
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import CustomPolicy
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device


def naive_forward(model: Any, input_ids: Tensor, labels: Any = None, **kwargs: Any) -> Any:
    """What a hand-copied forward with a fused loss looks like."""
    hidden_states = model.model(input_ids, use_cache=False).last_hidden_state
    shifted = F.pad(labels[..., 1:], (0, 1), value=-100)
    return liger_dist.linear_cross_entropy(hidden_states, model.lm_head.weight, shifted, **kwargs)


def test_1_arguments_of_flash_attention_reach_the_attention_and_not_the_loss() -> None:
    model: Any = make_model("llama")
    batch = make_batch(0, rows="packed, by lengths")
    with pytest.raises(TypeError, match=r"position_ids|cu_seq_lens_q"):
        naive_forward(model, **batch)
    total, count = true_loss_sum(model, batch)
    liger_dist.wrap(model)
    seen: list[dict[str, Any]] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    output = model(**batch)
    assert not hasattr(output, "logits")
    assert relative_error(output.loss, total / count) < 1e-6
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        assert seen[0][name] is batch[name]


def test_2_without_labels_there_are_ordinary_logits() -> None:
    model = make_model("llama")
    ids = make_batch(0)["input_ids"]
    with pytest.raises(TypeError, match="NoneType"):
        naive_forward(model, ids)
    expected = model(input_ids=ids).logits
    liger_dist.wrap(model)
    for labels in ({}, {"labels": None}):
        output = model(input_ids=ids, **labels)
        assert output.loss is None
        assert torch.equal(output.logits, expected)


def naive_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Saves memory by writing the gradient over the logits, which the caller still holds."""

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            loss = F.cross_entropy(logits, labels)
            probability = logits.softmax(-1)
            probability[torch.arange(len(labels)), labels] -= 1
            ctx.save_for_backward(logits.copy_(probability / len(labels)))
            return loss

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:
            return ctx.saved_tensors[0] * upstream  # type: ignore[no-any-return]

    return InPlace.apply(logits)  # type: ignore[no-any-return,no-untyped-call]


def saved_bytes(compute: Any) -> int:
    """What autograd keeps of one loss."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(storages.values())


def test_3_logits_that_the_caller_holds_stay_and_bf16_ones_are_not_kept_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 640, (64,), generator=generator).to(compute_device())

    def fresh(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = torch.randn(64, 640, generator=torch.Generator().manual_seed(1)).to(compute_device(), dtype)
        leaf.requires_grad_()
        return leaf, leaf * 1

    _, logits = fresh(torch.float32)
    before = logits.detach().clone()
    naive_cross_entropy(logits, labels)
    assert not torch.equal(logits, before)
    leaf, logits = fresh(torch.float32)
    loss = liger_dist.cross_entropy(logits, labels)
    assert isinstance(loss, Tensor)
    loss.backward()
    assert torch.equal(logits, before)
    reference, _ = fresh(torch.float32)
    F.cross_entropy(reference, labels).backward()
    assert relative_error(leaf.grad, reference.grad) < 1e-6  # type: ignore[arg-type]

    _, half = fresh(torch.bfloat16)
    size = half.numel() * half.element_size()
    assert saved_bytes(lambda: F.cross_entropy(half.float(), labels)) >= 2 * size
    assert saved_bytes(lambda: liger_dist.cross_entropy(half, labels)) <= 1.1 * size


def test_3_training_agrees_in_loss_gradients_and_parameters() -> None:
    """A loss that falls shows little; every gradient and parameter is compared at every step."""
    reference, model = make_model("llama"), make_model("llama")
    liger_dist.wrap(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=False) for one in (reference, model)]
    for step in range(5):
        batch = make_batch(0, seed=step)
        total, count = true_loss_sum(reference, batch)
        (total / count).backward()
        loss = model(**batch).loss
        loss.backward()
        assert relative_error(loss, total / count) < 1e-6
        assert max(gradient_errors(model, reference).values()) < 1e-5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for ours, own in zip(model.parameters(), reference.parameters(), strict=True):
            assert relative_error(ours, own) < 1e-5


def test_4_evaluation_with_right_padding_builds_no_cache() -> None:
    """With a cache, FlashAttention-2 refuses right padding in a batch of more than one sequence."""
    model: Any = make_model("qwen2").eval()
    batch = make_batch(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 7:] = 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    assert model(**batch, attention_mask=mask).past_key_values is not None, "the model itself builds one"
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    with torch.no_grad():
        output = model(**batch, attention_mask=mask)
        assert output.past_key_values is None
        alone = [
            true_loss_sum(reference, {"input_ids": ids[None, :length], "labels": labels[None, :length]})
            for ids, labels, length in zip(batch["input_ids"], batch["labels"], (12, 7, 12), strict=True)
        ]
    total, count = sum(loss for loss, _ in alone), sum(number for _, number in alone)
    assert relative_error(output.loss, torch.as_tensor(total / count)) < 1e-6


def test_5_a_head_in_its_own_fsdp1_unit(workers_2: Workers) -> None:
    for naive, error in workers_2.run(train_with_own_unit):
        assert any(words in naive for words in ("size mismatch", "[V, D]", "must be 2-D", "shape"))
        assert error < 1e-6


def train_with_own_unit() -> tuple[str, float]:
    import torch.distributed as dist

    def sharded(model: Any) -> Any:
        units = {*model.model.layers, model.lm_head}
        device = compute_device()
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            use_orig_params=True,
            device_id=device,
        )

    class Naive(nn.Module):
        """Reads the head's weight while the root's forward runs, where only the root's own unit is gathered."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.lm_head = model.model, model.lm_head

        def forward(self, **batch: Tensor) -> Any:
            return naive_forward(self, **batch)

    batch = make_batch(dist.get_rank())
    with pytest.raises((RuntimeError, ValueError)) as caught:
        sharded(Naive(make_model("llama")))(**batch).backward()
    model = make_model("llama")
    liger_dist.wrap(model)
    root = sharded(model)
    root(**batch).loss.backward()
    reference: Any = make_model("llama")
    for rank in range(2):
        total, count = true_loss_sum(reference, make_batch(rank))
        (total / count / 2).backward()
    with FullyShardedDataParallel.summon_full_params(root, with_grads=True):
        gradient = full(model.get_parameter("lm_head.weight").grad)  # type: ignore[arg-type]
    assert gradient.shape[0] == VOCAB_SIZE
    return str(caught.value), relative_error(gradient, reference.lm_head.weight.grad)
