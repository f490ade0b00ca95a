"""Models that a strategy trains wrongly without an error: what warns of them, and that the ways out are right."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients, full_parameters
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE, make_batch, make_model
from torch import Tensor, nn
from truth import relative_error

import liger_dist
from liger_dist.model.structure import find_structure
from liger_dist.sharding.gradient_checks import warn_of_experts
from liger_dist.sharding.process_groups import compute_device

TIME_LIMIT = 100.0
LEARNING_RATE = 0.1


HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
VOCAB_PARALLEL = liger_dist.FSDP2(lm_head="vocab_parallel")
ALL = 21
LOST = {"fsdp1": "and 18 more have hooks", "fsdp2": "and 18 more have hooks", "tp": "lm_head.weight has"}
"""words of the refusal or warning; the model has :data:`ALL` parameters"""


@pytest.mark.cover("values")
@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize(
    "strategy", ["ddp", "fsdp1", "fsdp2", VOCAB_PARALLEL, "tp"], ids=["ddp", "fsdp1", "fsdp2", "vocab-parallel", "tp"]
)
def test_hooks_of_parameters_that_sharding_drops_are_refused_or_warned_of(
    strategy: str | liger_dist.FSDP2, register: str, workers_2: Workers
) -> None:
    name = strategy if isinstance(strategy, str) else strategy.name
    for sentences, called, called_later in workers_2.run(calls_of_hooks, strategy, register, time_limit=TIME_LIMIT):
        warned = [sentence for sentence in sentences if "hook" in sentence]
        is_refused = register == HOOKS[0] and name in LOST
        if name not in LOST:
            assert not warned
            assert called == called_later == ALL
            continue
        (sentence,) = set(warned)
        assert LOST[name] in sentence
        assert ("register_hook), and strategy=" in sentence) == is_refused
        assert called == (ALL - 1 if name == "tp" and not is_refused else 0)
        # What the sentence says of hooks that are registered later.
        if name == "fsdp2" and register == HOOKS[0]:
            assert called_later < ALL
        else:
            assert called_later == (0 if name == "fsdp1" else ALL)


def calls_of_hooks(strategy: Any, register: str) -> tuple[list[str], int, int]:
    """The warnings of wrap, and how many parameters' hooks a backward calls: hooks from before wrap, and after."""
    sentences, called = [], []
    for is_later in (False, True):
        model = make_model("llama", dtype=torch.float32)
        names: set[str] = set()
        if not is_later:
            hook_all(model, register, names)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                root = liger_dist.wrap(model, strategy)
            except liger_dist.LigerDistError as refusal:
                sentences.append(str(refusal))
                called.append(0)
                continue
        sentences += [str(warning.message) for warning in caught]
        if is_later:
            hook_all(root, register, names)
        root(**make_batch(0)).loss.backward()
        called.append(len(names))
    return sentences, called[0], called[1]


def hook_all(model: nn.Module, register: str, called: set[str]) -> None:
    for name, parameter in model.named_parameters():
        getattr(parameter, register)(lambda _, name=name: called.add(name))


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_fsdp2_warns_of_experts_as_modules_and_fsdp1_trains_them(strategy: str, workers_2: Workers) -> None:
    for sentences, errors in workers_2.run(gradients_of_experts, strategy, time_limit=TIME_LIMIT):
        warned = {sentence for sentence in sentences if "experts as modules" in sentence}
        if strategy == "fsdp2":
            (sentence,) = warned
            assert "model.layers.0.mlp.experts, model.layers.1.mlp.experts hold experts" in sentence
            assert max(errors.values()) > 0.5
        else:
            assert not warned
            assert max(errors.values()) < 1e-6


def test_experts_as_modules_beside_a_dropout_are_warned_of() -> None:
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_layers": 1, "decoder_layers": 1}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": VOCAB_SIZE, "num_experts": 4}
    model = NllbMoeForConditionalGeneration(
        NllbMoeConfig(**heads, **sizes, encoder_sparse_step=1, decoder_sparse_step=1)
    )
    with pytest.warns(UserWarning, match=r"layers\.0\.ffn\.experts hold experts as modules"):
        warn_of_experts(model, find_structure(model))


class Experts(nn.Module):
    """Two experts as modules; one that gets no token is not called, as in transformers' NLLB-MoE."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN_SIZE, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE, bias=False) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        # All tokens of a rank go to one expert.
        chosen = dist.get_rank() if self.of_rank is None else self.of_rank
        gate = self.router(hidden_states).softmax(-1)[..., chosen, None]
        output: Tensor = self.experts[chosen](hidden_states) * gate
        return output

    of_rank: int | None = None


def with_experts() -> Any:
    model: Any = make_model("llama", dtype=torch.float64)
    model.config.num_local_experts = 2
    torch.manual_seed(3)
    for layer in model.model.layers:
        layer.mlp = Experts().to(compute_device(), torch.float64)
    return model


def gradients_of_experts(strategy: str) -> tuple[list[str], dict[str, float]]:
    """The warnings of wrap, and the relative error of each gradient."""
    model = with_experts()
    reference = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        root = liger_dist.wrap(model, strategy)
    before = full_parameters(root)
    root(**make_batch(dist.get_rank())).loss.backward()
    gradients = full_gradients(model)
    if strategy == "fsdp1":
        torch.optim.SGD(root.parameters(), lr=LEARNING_RATE).step()
        after = full_parameters(root)
        gradients = {name: (before[name] - after[name]) / LEARNING_RATE for name in before}
    for rank in range(2):
        for module in reference.modules():
            if isinstance(module, Experts):
                module.of_rank = rank
        (reference(**make_batch(rank), use_cache=False).loss / 2).backward()
    errors = {n: relative_error(gradients[n], p.grad) for n, p in reference.named_parameters() if n in gradients}
    return [str(warning.message) for warning in caught], errors


def encoder_decoder(family: str) -> Any:
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        MarianConfig,
        MarianMTModel,
        WhisperConfig,
        WhisperForConditionalGeneration,
    )

    torch.manual_seed(0)
    if family == "t5":
        return make_model("t5", dtype=torch.float32).cpu()
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": VOCAB_SIZE, "dropout": 0.0}
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    if family == "whisper":
        audio = {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 32}
        return WhisperForConditionalGeneration(WhisperConfig(**sizes, **tokens, **audio))
    sizes["max_position_embeddings"] = 64
    if family == "bart":
        return BartForConditionalGeneration(BartConfig(**sizes, **tokens))
    return MarianMTModel(MarianConfig(**sizes, **tokens))


@pytest.mark.parametrize("family", ["t5", "bart", "marian", "whisper"])
def test_training_an_encoder_decoder_with_num_items_in_batch_warns_once(family: str) -> None:
    model = liger_dist.wrap(encoder_decoder(family), "none")
    batch: dict[str, Tensor] = {name: tensor.cpu() for name, tensor in make_batch(0).items()}
    if family == "whisper":
        batch = {"input_features": torch.randn(3, 4, 16, device="cpu"), "labels": batch["labels"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch)
        with torch.no_grad():
            model(**batch, num_items_in_batch=7)
    with pytest.warns(UserWarning, match=r"num_items_in_batch was given .*accepts_loss_kwargs = False"):
        model(**batch, num_items_in_batch=7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**batch, num_items_in_batch=7)
        causal = liger_dist.wrap(make_model("llama", dtype=torch.float32).cpu(), "none")
        causal(**{name: tensor.cpu() for name, tensor in make_batch(0).items()}, num_items_in_batch=7)


@pytest.mark.parametrize(("accepts", "factor"), [(None, 2.0), (False, 1.0)])
def test_the_way_out_gives_a_trainer_the_mean_over_micro_batches(
    accepts: bool | None, factor: float, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    rows = [{name: tensor[0].cpu() for name, tensor in make_batch(number).items()} for number in range(2)]
    reference, model = (make_model("t5").cpu() for _ in range(2))
    for row in rows:
        (reference(**{name: tensor[None] for name, tensor in row.items()}).loss / 2).backward()
    if accepts is not None:
        model.accepts_loss_kwargs = accepts  # type: ignore[assignment]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        max_steps=1,
        learning_rate=1.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    wrapped = liger_dist.wrap(model, "none")
    trainer = Trainer(model=wrapped, args=arguments, train_dataset=rows, optimizers=(optimizer, None))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="num_items_in_batch was given") if accepts is None else nullcontext():
        trainer.train()
    moved = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        assert relative_error(moved[name], factor * parameter.grad) < 1e-3, name
