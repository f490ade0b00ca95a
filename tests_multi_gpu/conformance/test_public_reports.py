"""Situations of public bug reports against other libraries, under every strategy: loss and gradients of the unwrapped
model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import full_parameters
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE, make_batch, make_model, relative_errors
from torch import Tensor, nn

import liger_dist
from liger_dist.sharding.process_groups import compute_device

STRATEGIES = ("ddp", "fsdp1", "fsdp2", "vocab_parallel")
LAST, SOME = VOCAB_SIZE - 1, [5, 6, 80]
"""the class that the last rank's rows end with, and some rows of both ranks"""
Step = Callable[[nn.Module, int], Tensor]
"""one rank's forward and backward of a model; the loss"""


def usual(model: nn.Module, rank: int) -> Tensor:
    return backward(model(**make_batch(rank)).loss)


def backward(loss: Tensor, **options: Any) -> Tensor:
    loss.backward(**options)  # type: ignore[no-untyped-call]
    return loss.detach()


@dataclass(frozen=True)
class Report:
    """One report; ``refused`` and ``plain_fails`` name strategies."""

    make: Callable[[], Any]
    step: Step = usual
    dtype: torch.dtype = torch.float64
    fused: bool = True
    refused: str = ""
    """the strategy that refuses it, in words of the unfused loss"""
    plain_fails: tuple[str, ...] = ()
    """strategies under which torch does not compute it without this library either"""


def adapted(*, tied: bool = False, frozen_too: bool = False, **settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        make_model("llama", tied=tied), peft.LoraConfig(r=2, target_modules=["q_proj"], **settings)
    )
    if frozen_too:
        model.add_adapter("old", peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
        model.base_model.set_adapter(["default", "old"])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "trainable_tokens" in name:
                parameter.copy_(0.2 * on_device.randn(parameter.shape, generator=generator))
            if ".old" in name:
                parameter.requires_grad_(False)
    return model


def padded_with(row: int) -> Any:
    model: Any = make_model("llama", tied=True)
    model.model.embed_tokens.padding_idx = model.config.pad_token_id = row
    return model


def ends_with(row: int) -> Step:
    """The padding token ends each text: no gradient as an input, all of it as a label."""

    def step(model: nn.Module, rank: int) -> Tensor:
        batch = make_batch(rank)
        batch["input_ids"][:, -3:] = batch["labels"][:, -1] = row
        batch["labels"][:, -3:-1] = -100
        return backward(model(**batch).loss)

    return step


def noisy(model: nn.Module, rank: int) -> Tensor:
    """A hook on the embedding that a trainer sets once the model is sharded, and takes away."""
    inner = next(module for module in model.modules() if hasattr(module, "get_input_embeddings"))

    def add_noise(_: nn.Module, __: Any, embedded: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7 + rank)
        return embedded + 0.1 * on_device.randn(embedded.shape, generator=generator).to(embedded)

    hook = inner.get_input_embeddings().register_forward_hook(add_noise)  # type: ignore[operator]
    loss = usual(model, rank)
    hook.remove()
    return loss


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
        initializer_range=0.3,
    )
    return MixtralForCausalLM(config).to(compute_device())


def balanced(model: nn.Module, rank: int) -> Tensor:
    batch: dict[str, Any] = make_batch(rank)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -4:] = mask[1, -2 - rank :] = 0
    labels = batch.pop("labels").masked_fill(mask == 0, -100)
    return backward(model(**batch, labels=labels, attention_mask=mask, output_router_logits=True).loss)


def frozen(*parts: str, all_but: bool = False) -> Any:
    model = make_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(parts) == all_but)
    return model


def grown() -> Any:
    model: Any = make_model("llama", tied=True)
    torch.manual_seed(3)
    model.resize_token_embeddings(VOCAB_SIZE + 4, mean_resizing=False)
    return model


def with_new_token(model: nn.Module, rank: int) -> Tensor:
    batch = make_batch(rank)
    batch["input_ids"][:, 7] = batch["labels"][:, 7] = VOCAB_SIZE + 2
    return backward(model(**batch).loss)


def two_losses(model: nn.Module, rank: int) -> Tensor:
    first, second = model(**make_batch(rank)).loss, model(**make_batch(rank, seed=3)).loss
    return backward(first) + backward(second)


def one_loss_twice(model: nn.Module, rank: int) -> Tensor:
    loss = model(**make_batch(rank)).loss
    return backward(loss, retain_graph=True) + backward(2 * loss)


def two_tokens(model: nn.Module, rank: int) -> Tensor:
    batch = {name: values[:1, -2:] for name, values in make_batch(rank).items()}
    return backward(model(**batch).loss)


def reduced_last(model: Any, rank: int) -> Tensor:
    losses = []
    for index in range(3):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(index == 2)
        losses.append(backward(model(**make_batch(rank, seed=index)).loss / 3))
    return torch.stack(losses).sum()


TWO_BACKWARDS = ("ddp", "fsdp1")
REPORTS: dict[str, Report] = {
    "apple/ml-cross-entropy#52: a bias of lm_head counts twice": Report(lambda: make_model("llama", bias=True)),
    "huggingface/peft#2863: some rows of an untied lm_head": Report(
        lambda: adapted(trainable_token_indices={"lm_head": SOME, "embed_tokens": SOME}),
        fused=False,
        refused="vocab_parallel",
    ),
    "huggingface/peft#2653: a saved lm_head beside some rows of the embedding": Report(
        lambda: adapted(modules_to_save=["lm_head"], trainable_token_indices={"embed_tokens": SOME})
    ),
    "huggingface/peft#2399: some rows of a tied pair": Report(
        lambda: adapted(tied=True, trainable_token_indices=SOME), fused=False, refused="vocab_parallel"
    ),
    "huggingface/peft#2450: a saved embedding and lm_head": Report(
        lambda: adapted(modules_to_save=["embed_tokens", "lm_head"])
    ),
    "huggingface/peft#2749: two adapters at once, one of them frozen": Report(lambda: adapted(frozen_too=True)),
    "pytorch/torchtitan#4637: the padding row of the first rank": Report(lambda: padded_with(0), ends_with(0)),
    "pytorch/torchtitan#4637: the padding row of the last rank": Report(lambda: padded_with(LAST), ends_with(LAST)),
    "huggingface/trl#923: a hook on a sharded embedding": Report(lambda: make_model("llama"), noisy),
    "huggingface/transformers#28505: padding in the balance of experts": Report(mixtral, balanced, torch.float32),
    "huggingface/transformers#40382: a vocabulary that has grown": Report(grown, with_new_token),
    "PrimeIntellect-ai/prime-rl#3011: a frozen lm_head": Report(lambda: frozen("lm_head")),
    "PrimeIntellect-ai/prime-rl#3011: nothing but lm_head": Report(lambda: frozen("lm_head", all_but=True)),
    "pytorch/pytorch#136861: two losses, two backwards": Report(
        lambda: make_model("llama"), two_losses, plain_fails=TWO_BACKWARDS
    ),
    "pytorch/pytorch#106637: two backwards of one loss": Report(
        lambda: make_model("llama"), one_loss_twice, plain_fails=TWO_BACKWARDS
    ),
    "NVIDIA-NeMo/Automodel#1097: a batch of one text": Report(lambda: make_model("llama", tied=True), two_tokens),
    "huggingface/accelerate#3762: an accumulation that reduces once": Report(
        lambda: make_model("llama", tied=True), reduced_last
    ),
}


@pytest.mark.nightly
@pytest.mark.smoke
@pytest.mark.parametrize("name", REPORTS)
def test_the_report_on_two_ranks(name: str, workers_2: Workers) -> None:
    report = REPORTS[name]
    used = [strategy for strategy in STRATEGIES if strategy not in report.plain_fails]
    for errors in workers_2.run(errors_of_report, name, used):
        assert [strategy for strategy, seen in errors.items() if seen == "refused"] == [*filter(None, [report.refused])]
        for strategy, seen in errors.items():
            if strategy != report.refused:
                worst = max(seen, key=seen.__getitem__)
                assert seen[worst] < (1e-5 if report.dtype == torch.float32 else 1e-6), (strategy, worst, seen[worst])


@pytest.mark.nightly
@pytest.mark.parametrize("name", REPORTS)
def test_the_report_on_one_process(name: str) -> None:
    report = REPORTS[name]
    reference = report.make().to(report.dtype)
    model = wrapped("none", copy.deepcopy(reference), is_fused=report.fused)
    losses = [report.step(each, 0) for each in (model, reference)]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    truth = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    errors = relative_errors(gradients, truth) | {"loss": float((losses[0] - losses[1]).abs())}
    assert max(errors.values()) < 1e-5, errors


def wrapped(strategy: str, model: nn.Module, *, is_fused: bool) -> nn.Module:
    reduced: dict[str, Any] = {"reduce_dtype": torch.float64}
    made: Any = {
        "fsdp1": lambda: liger_dist.FSDP1(**reduced),
        "fsdp2": lambda: liger_dist.FSDP2(**reduced),
        "vocab_parallel": lambda: liger_dist.FSDP2(lm_head="vocab_parallel", **reduced),
    }.get(strategy, lambda: strategy)()
    if is_fused or strategy == "vocab_parallel":
        return liger_dist.wrap(model, made)
    with pytest.warns(UserWarning, match="unfused"):
        return liger_dist.wrap(model, made)


def errors_of_report(name: str, strategies: list[str]) -> dict[str, Any]:
    """The error of the loss and of each gradient, by strategy, or "refused"."""
    report, rank, world = REPORTS[name], dist.get_rank(), dist.get_world_size()
    losses, truth = [], dict[str, Tensor]()
    for each in range(world):
        reference = report.make().to(report.dtype)
        losses.append(report.step(reference, each))
        for parameter_name, parameter in reference.named_parameters():
            if parameter.grad is not None:
                truth[parameter_name] = truth.get(parameter_name, 0) + parameter.grad / world
    errors: dict[str, Any] = {}
    for strategy in strategies:
        model = report.make().to(report.dtype)
        try:
            root = wrapped(strategy, model, is_fused=report.fused)
        except liger_dist.LigerDistError:
            errors[strategy] = "refused"
            continue
        loss, moved = step_of(root, lambda root=root: report.step(root, rank))
        errors[strategy] = relative_errors(moved, truth) | {"loss": float((loss - losses[rank]).abs() / losses[rank])}
    return errors


def step_of(root: nn.Module, compute: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and what SGD at rate 1 moves each trained parameter by, which is its gradient in every layout."""
    trained = {parameter for parameter in root.parameters() if parameter.requires_grad}
    # Torch's updates of many tensors at once do not mix plain ones with DTensors.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in trained:
        by_mesh.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    optimizer = torch.optim.SGD([{"params": parameters} for parameters in by_mesh.values()], lr=1.0)
    before = full_parameters(root)
    loss = compute()
    optimizer.step()
    return loss, {name: before[name] - after for name, after in full_parameters(root).items()}
