"""Multi-token prediction: losses and every gradient against own loops over single documents in fp64."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import WeightGradients
from models import gradient_errors, make_batch, make_config, make_model
from mtp_models import make_mtp, true_mtp_losses
from predicting import Prediction, make_predicting
from torch import Tensor
from transformers import LlamaForCausalLM
from truth import relative_error

import liger_dist
import liger_dist.integrations.trainer
from liger_dist.mtp import MultiTokenPrediction
from liger_dist.sharding.process_groups import compute_device


def true_loss(model: Any, batch: dict[str, Any], *, items: int | None = None) -> tuple[Tensor, Tensor]:
    """The loss of a call, and that of each depth."""
    main, *further = [total / (items or max(count, 1)) for total, count in true_mtp_losses(model, batch)]
    weighted = sum(w * loss for w, loss in zip(model.mtp.weights, further, strict=True))
    return model.mtp.main_weight * main + weighted, torch.stack(further)


def compare(
    model: Any, reference: Any, batch: dict[str, Any], *, items: int | None = None, **further_arguments: Any
) -> None:
    """Layers, and attention to packed documents, round to fp32 inside."""
    given = further_arguments | ({} if items is None else {"num_items_in_batch": items})
    output = model(**batch, **given)
    loss, further = true_loss(reference, batch, items=items)
    assert relative_error(output.loss, loss) < 1e-6
    assert relative_error(output.mtp_loss, further) < 1e-6
    (1.3 * output.loss).backward()
    (1.3 * loss).backward()
    errors = gradient_errors(model, reference)
    assert len(errors) == len([p for p in reference.parameters() if p.grad is not None]) > 0
    assert max(errors.values()) < 1e-5, errors
    for one in (model, reference):
        one.zero_grad()


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("rows", ["texts", "packed", "packed, by lengths", "padded"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_mtp_losses_and_gradients(family: str, depth: int, rows: str) -> None:
    if family == "gemma2" and rows == "padded":
        pytest.skip("transformers' own attention gives NaN to padding on the left")
    model = make_mtp(family, depth=depth, tied=depth == 2)
    reference = copy.deepcopy(model)
    batch = make_batch(0, rows=rows)
    if rows != "packed, by lengths" and family != "gemma2":
        compare(copy.deepcopy(model), reference, batch, use_cache=False)
    liger_dist.wrap(model, "none")
    compare(model, reference, batch)
    compare(model, reference, batch, items=17)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_mtp_with_a_frozen_model_and_checkpointing(checkpointing: bool) -> None:
    for options in ({"train_model": False, "main_weight": 0}, {"main_weight": 0}, {"weight": (0.2, 0.5)}):
        model = make_mtp(**options)
        reference = copy.deepcopy(model)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        liger_dist.wrap(model, "none")
        model.train()
        compare(model, reference, make_batch(0))


def test_mtp_makes_one_gradient_of_the_weight() -> None:
    """As one loss does: in the forward, because the factors of the losses are known there."""
    counts: list[list[int]] = []
    for model in (make_model("llama"), make_mtp(depth=3)):
        model.model.embed_tokens.weight.requires_grad_(False)  # It has the same shape.
        liger_dist.wrap(model, "none")
        counts.append([])
        for _ in range(2):
            with WeightGradients(model.lm_head.weight) as made:
                loss = model(**make_batch(0)).loss
            counts[-1].append(made.count)
            with WeightGradients(model.lm_head.weight) as made:
                loss.backward()
            counts[-1].append(made.count)
            model.zero_grad()
    assert counts[0] == counts[1]
    assert counts[1][0] == counts[1][2] == 1


def test_mtp_leaves_other_calls_alone() -> None:
    model = make_mtp()
    plain = make_model("llama")
    ids = make_batch(0)["input_ids"]
    liger_dist.wrap(model, "none")
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    with torch.no_grad():
        output = model(**make_batch(0))
    assert output.mtp_loss.shape == (2,)
    logits = model(**make_batch(0), outputs=("logits",)).logits
    assert torch.allclose(logits, plain(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"depth": 0}, "depth is 0; expected a number of further tokens"),
        ({"weight": 0.0}, "weight is 0.0 for depth 1; expected a number above 0"),
        ({"weight": (0.1, 0.2)}, "or one for each depth"),
        ({"main_weight": -1.0}, "main_weight is -1.0; expected a number of at least 0"),
    ],
)
def test_wrong_arguments_of_mtp_are_refused(options: dict[str, Any], sentence: str) -> None:
    model = make_model("llama")
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        MultiTokenPrediction(model, **options)
    assert not hasattr(model, "mtp")


@pytest.mark.smoke
def test_mtp_of_a_model_that_cannot_have_it_is_refused() -> None:
    wrapped = liger_dist.wrap(make_model("llama"), "none")
    for model, sentence in (
        (wrapped, "is wrapped already"),
        (make_mtp(), "has a module mtp already"),
        (make_model("t5"), "is no causal language model"),
    ):
        with pytest.raises(liger_dist.LigerDistError, match=sentence):
            MultiTokenPrediction(model)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["further losses", "multi-token prediction"])
def test_verify_compares_each_loss(kind: str) -> None:
    model = make_mtp() if kind == "multi-token prediction" else make_predicting(Prediction(depth=2))
    liger_dist.wrap(model, "none")
    batch = make_batch(0)
    seen = liger_dist.verify(model, batch)
    assert seen.ok, seen
    assert len(seen.losses) == 3
    assert "loss 3" in str(seen)
    # A fault in one loss is seen, and named.
    loss, head = model.lm_head.weight, model.lm_head
    own = type(head)._logits
    calls = []

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        logits = own(self, *args, **kwargs)
        return logits * 1.01 if len(calls) == 2 else logits

    head._logits = faulty.__get__(head)
    broken = liger_dist.verify(model, batch)
    assert any(problem.startswith("loss 2 of the call") for problem in broken.problems), broken
    assert not any(problem.startswith("loss 1 of the call") for problem in broken.problems)
    assert loss.grad is None


def test_mtp_beside_log_probabilities() -> None:
    """A first loss whose outputs carry gradients."""
    model = make_mtp()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, "none")
    batch = make_batch(0)
    output = model(**batch, outputs=("log_prob",), differentiable=True)
    (output.loss + output.log_prob.sum()).backward()
    loss, _ = true_loss(reference, batch)
    main = true_mtp_losses(reference, batch)[0][0]
    (loss - main).backward()
    assert max(gradient_errors(model, reference).values()) < 1e-5


def test_mtp_with_distillation() -> None:
    model, teacher = make_mtp(), liger_dist.wrap(make_model("qwen2", seed=3), "none").eval()
    reference = copy.deepcopy(model)
    plain = copy.deepcopy(model)
    for one in (model, plain):
        liger_dist.wrap(one, "none")
    batch = make_batch(0)
    liger_dist.distillation_loss(model, teacher, **batch).loss.backward()
    # Without the further losses, and these alone.
    del plain._modules["mtp"]
    liger_dist.distillation_loss(plain, teacher, **batch).loss.backward()
    losses = true_mtp_losses(reference, batch)
    sum(w * total / count for w, (total, count) in zip(reference.mtp.weights, losses[1:], strict=True)).backward()
    for name, parameter in plain.named_parameters():
        further = dict(reference.named_parameters())[name]
        further.grad = parameter.grad if further.grad is None else further.grad + parameter.grad
    assert max(gradient_errors(model, reference).values()) < 1e-5


def test_mtp_on_a_trunk_with_lora() -> None:
    peft = pytest.importorskip("peft")
    for targets in (["q_proj"], ["q_proj", "lm_head"]):
        base = make_model("llama")
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=targets, r=2))
        MultiTokenPrediction(model, 2)
        model.double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        reference = copy.deepcopy(model)
        liger_dist.wrap(model, "none")
        batch = make_batch(0)
        model(**batch).loss.backward()
        loss, _ = true_loss(reference.get_base_model(), batch)
        loss.backward()
        errors = gradient_errors(model, reference)
        assert {name for name in errors if "lora" in name}
        assert max(errors.values()) < 1e-5, errors


def test_mtp_under_the_trainer_of_transformers(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = make_mtp(dtype=torch.float32)
    rows = [{name: value[0].cpu() for name, value in make_batch(seed).items()} for seed in range(4)]
    seen = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {}

    options: dict[str, Any] = {"max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True}
    if compute_device().type == "cuda":
        del options["use_cpu"]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path), save_strategy="no", disable_tqdm=True, **options),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=metrics,
    )
    liger_dist.integrations.trainer.fuse(trainer)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert len(seen) == 1
    assert len(seen[0]) == 3


def test_evaluation_mode_with_gradients_has_those_of_the_next_token() -> None:
    model = make_mtp().eval()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, "none")
    batch = make_batch(0)
    model(**batch).loss.backward()
    total, count = true_mtp_losses(reference, batch)[0]
    (total / count).backward()
    assert max(gradient_errors(model, reference).values()) < 1e-6
    model.zero_grad()
    assert liger_dist.verify(model, batch).ok


def test_positional_tokens_are_predicted_further() -> None:
    model = liger_dist.wrap(make_mtp(), "none")
    batch = make_batch(0)
    outputs = model(batch["input_ids"], labels=batch["labels"]), model(**batch)
    assert torch.equal(outputs[0].mtp_loss, outputs[1].mtp_loss)
    assert torch.equal(outputs[0].loss, outputs[1].loss)


def test_wrapped_modules_are_refused() -> None:
    peft = pytest.importorskip("peft")
    base = make_mtp()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mtp"], r=2))
    liger_dist.wrap(model, "none")
    with pytest.raises(liger_dist.LigerDistError, match="out of PEFT's modules_to_save"):
        model(**make_batch(0))


@pytest.mark.smoke
def test_main_weight_0() -> None:
    """Verify, outputs, and a teacher."""
    model = make_mtp(main_weight=0)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, "none")
    batch = make_batch(0)
    assert liger_dist.verify(model, batch).ok
    output = model(**batch, outputs=("log_prob",), differentiable=True)
    (output.loss + output.log_prob.sum()).backward()
    loss, _ = true_loss(reference, batch)
    (loss - true_mtp_losses(reference, batch)[0][0]).backward()
    assert max(gradient_errors(model, reference).values()) < 1e-5
    teacher = liger_dist.wrap(make_model("llama", seed=3), "none").eval()
    with pytest.raises(liger_dist.LigerDistError, match="main_weight is 0, with which the divergence"):
        liger_dist.distillation_loss(model, teacher, **batch)


@pytest.mark.parametrize("fused", [True, False])
def test_depths_beyond_the_text_have_no_loss(fused: bool) -> None:
    model = make_mtp(depth=3)
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(fused_loss=fused))
    batch = {name: value[:, :3] for name, value in make_batch(0, num_ignored=0).items()}
    output = model(**batch)
    assert output.mtp_loss[0] > 0
    assert output.mtp_loss[1:].tolist() == [0, 0]
    assert torch.isfinite(output.loss)


def test_mtp_model_in_a_pickle() -> None:
    for model in (make_mtp(), liger_dist.wrap(make_mtp(), "none")):
        again = pickle.loads(pickle.dumps(model))
        assert type(again).__mro__[0].__name__ == type(model).__name__
        assert torch.equal(again(**make_batch(0)).mtp_loss, model(**make_batch(0)).mtp_loss)


@pytest.mark.parametrize("weights", [(0.3, 0.0), (0.0, 0.3), (0.0, 0.0), (2.0, 0.1)])
@pytest.mark.parametrize("main_weight", [1.0, 0.5])
def test_factors_may_change_between_steps(weights: tuple[float, ...], main_weight: float) -> None:
    model = make_mtp("llama", depth=2)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, "none")
    compare(model, reference, make_batch(0))
    for one in (model, reference):
        one.mtp.weights, one.mtp.main_weight = weights, main_weight
    compare(model, reference, make_batch(1))


@pytest.mark.parametrize("weights", [-0.1, (0.3,), (0.3, float("nan")), (0.3, float("inf")), ("a", "b")], ids=str)
def test_factors_that_are_none_are_refused_where_they_are_set(weights: Any) -> None:
    model = make_mtp("llama", depth=2)
    before = model.mtp.weights
    with pytest.raises(liger_dist.LigerDistError, match="weight is"):
        model.mtp.weights = weights
    with pytest.raises(liger_dist.LigerDistError, match="main_weight is -1"):
        model.mtp.main_weight = -1
    assert (model.mtp.weights, model.mtp.main_weight) == (before, 1.0)


def test_a_patched_forward_is_refused_before_modules_are_added() -> None:
    model: Any = make_model("llama")
    model.forward = partial(type(model).forward, model)
    with pytest.raises(liger_dist.LigerDistError, match="was patched on the instance"):
        MultiTokenPrediction(model, 1)
    assert "mtp" not in model._modules
    del model.forward
    MultiTokenPrediction(model, 1)


def scaled(loss: Tensor) -> Tensor:
    return 0.25 * loss


def scaled_in_place(loss: Tensor) -> Tensor:
    return loss.mul_(0.25)


def with_a_term(loss: Tensor) -> Tensor:
    return loss + 0.125


def with_a_term_in_place(loss: Tensor) -> Tensor:
    loss += 0.125
    return loss


def scaled_and_with_a_term(loss: Tensor) -> Tensor:
    return 3.0 * (loss + 1.0) + loss.detach()


def twice(loss: Tensor) -> Tensor:
    return loss + loss


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "change", [scaled, scaled_in_place, with_a_term, with_a_term_in_place, scaled_and_with_a_term, twice]
)
def test_a_model_that_changes_its_own_loss(change: Any, tied: bool) -> None:
    """The factor of the first loss is then not that of the further ones."""

    class Changed(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.loss = None if output.loss is None else change(output.loss)
            return output

    torch.manual_seed(0)
    model = Changed(make_config("llama", tied=tied)).double().to(compute_device())
    MultiTokenPrediction(model, 2, weight=(0.3, 0.1))
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, "none")
    for one in (model, reference):
        (1.5 * one(**make_batch(0)).loss).backward()
    errors = gradient_errors(model, reference)
    # The model's own loss goes through fp32.
    assert max(errors.values()) < 1e-5, errors


def test_a_hook_that_changes_logits_of_further_tokens_is_refused() -> None:
    model: Any = make_mtp()
    liger_dist.wrap(model, "none")
    calls: list[int] = []

    def scale(module: Any, args: Any, output: Tensor) -> Tensor | None:
        calls.append(1)
        return output * 1.3 if len(calls) > 1 else None

    model.lm_head.register_forward_hook(scale)
    with pytest.raises(liger_dist.LigerDistError, match="for further tokens, which were never computed"):
        model(**make_batch(0))
