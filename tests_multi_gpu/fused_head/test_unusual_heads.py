"""Models that do something unusual with their labels or their head, on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import VOCAB_SIZE, gradient_errors, make_batch, make_config, make_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device

SEEN, UNSEEN, NO_TOKEN = 5, 7, -1
"""ids of images: the probe's labels have the first"""


class MasksImages(LlamaForCausalLM):
    """Changes its labels in place, as some vision-language models do with the places of images."""

    image = SEEN

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        if labels is not None and (labels == self.image).any():
            labels[labels == self.image] = -100
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


class MasksImagesLate(MasksImages):
    """The same after its head."""

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        output = LlamaForCausalLM.forward(self, input_ids=input_ids, **kwargs)
        if labels is None:
            return output
        if (labels == self.image).any():
            labels[labels == self.image] = -100
        output.loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=VOCAB_SIZE, **kwargs)
        return output


def with_images(cls: Any, image: int) -> tuple[Any, Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = cls(make_config("llama")).to(torch.float64).to(compute_device())
    model.image = image
    batch = make_batch(0, num_ignored=0)
    batch["labels"][:, 3:5] = image
    return model, copy.deepcopy(model), batch


@pytest.mark.smoke
@pytest.mark.parametrize("token", [SEEN, UNSEEN])
@pytest.mark.parametrize("cls", [MasksImages, MasksImagesLate])
def test_a_forward_that_changes_its_labels_in_place(cls: Any, token: int) -> None:
    """The probe has every token as a label, and leaves the loss its own."""
    model, reference, batch = with_images(cls, token)
    expected = reference(**copy.deepcopy(batch)).loss
    with pytest.warns(UserWarning, match=r"changes the labels? .*before the loss"):
        liger_dist.wrap(model)
    loss = model(**copy.deepcopy(batch)).loss
    assert relative_error(loss, expected) < 1e-6


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("cls", [MasksImages, MasksImagesLate])
def test_labels_changed_in_place_later_refuse_the_loss(cls: Any, inference: bool) -> None:
    """By a token that the model was given after wrap."""
    if inference and compute_device().type == "cuda":
        pytest.skip("inference tensors are compared by an assertion on the device, which ends the process")
    model, _, _ = with_images(cls, UNSEEN)
    model.image = NO_TOKEN
    liger_dist.wrap(model)
    model.image = UNSEEN
    with torch.inference_mode(inference):
        _, _, batch = with_images(cls, UNSEEN)
        without = {name: tensor.clone().clamp_min(UNSEEN + 1) for name, tensor in batch.items()}
        assert model(**without).loss.isfinite()
        with pytest.raises(liger_dist.LigerDistError, match="changed its labels before its loss"):
            model(**batch)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_lora_on_a_head_with_a_large_bias_keeps_its_weight_in_bf16(dora: bool) -> None:
    """Rounded together with a bias of 2, a weight of 0.02 would lose a third of itself."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model: Any = make_model("llama", bias=True)
    model.lm_head.weight.data.normal_(std=0.02)
    model.lm_head.bias.data.normal_(std=2.0)
    settings = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, use_dora=dora, init_lora_weights=False)
    peft.get_peft_model(model, settings)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.to(torch.bfloat16)
    reference = copy.deepcopy(model).double()
    own = copy.deepcopy(model)
    liger_dist.wrap(model)
    batch = make_batch(0)
    for one in (model, own, reference):
        one(**batch).loss.backward()
    for name, truth in reference.named_parameters():
        if "lm_head" not in name:
            continue
        mine, theirs = (dict(one.named_parameters())[name].grad for one in (model, own))
        norm = truth.grad.norm()
        error, usual = ((g.double() - truth.grad).norm() / norm for g in (mine, theirs))
        assert error <= 1.5 * usual + 4e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_lora_on_a_head_with_a_large_bias(dtype: torch.dtype) -> None:
    peft = pytest.importorskip("peft")
    model: Any = make_model("llama", bias=True)
    model.lm_head.weight.data.normal_(std=0.02)
    model.lm_head.bias.data.normal_(std=2.0)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False))
    model.to(dtype)
    exact = copy.deepcopy(model).double()
    hidden = torch.randn(4, 16, dtype=dtype, device=compute_device())
    from liger_dist.model.peft import effective_head

    head = model.lm_head
    used = effective_head(head.get_base_layer(), head.forward, hidden)
    lora = exact.lm_head
    weight = lora.get_base_layer().weight + lora.scaling["default"] * (
        lora.lora_B["default"].weight @ lora.lora_A["default"].weight
    )
    rounding = {torch.float32: 1e-6, torch.bfloat16: 6e-3}[dtype]
    assert (used.weight.double() - weight).norm() / weight.norm() < rounding


@pytest.mark.parametrize("bias", [False, True], ids=["head without a bias", "head with a bias"])
def test_a_bias_of_lora_itself(bias: bool) -> None:
    peft = pytest.importorskip("peft")
    model: Any = make_model("llama", bias=bias)
    settings = peft.LoraConfig(target_modules=["lm_head"], r=2, lora_bias=bias is False, init_lora_weights=False)
    peft.get_peft_model(model, settings)
    model.to(torch.float64)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    loss, expected = (one(**make_batch(0)).loss for one in (model, reference))
    assert relative_error(loss, expected) < 1e-6
    loss.backward()
    expected.backward()
    assert max(gradient_errors(model, reference).values()) < 1e-6


def test_trained_rows_of_a_tied_head_stay_unfused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, trainable_token_indices=[1, 2, 3])
    model = peft.get_peft_model(make_model("llama", tied=True), settings)
    model.to(torch.float64)
    reference = copy.deepcopy(model)
    with pytest.warns(UserWarning, match=r"unfused: PEFT trains some rows .*modules_to_save"):
        liger_dist.wrap(model)
    loss, expected = model(**make_batch(0)).loss, reference(**make_batch(0)).loss
    assert relative_error(loss, expected) < 1e-6
    loss.backward()
    expected.backward()
    assert max(gradient_errors(model, reference).values()) < 1e-6
    assert "PEFT trains some rows" in str(liger_dist.explain(model.get_base_model()))


@pytest.mark.smoke
def test_rows_trained_after_wrapping_stay_unfused_and_unwrap() -> None:
    peft = pytest.importorskip("peft")
    model = liger_dist.wrap(make_model("llama", tied=True))
    settings = peft.LoraConfig(target_modules=["q_proj"], r=2, trainable_token_indices=[1, 2, 3])
    adapted = peft.get_peft_model(model, settings)
    adapted.to(torch.float64)
    with pytest.warns(UserWarning, match="unfused: PEFT trains some rows"):
        loss = adapted(**make_batch(0)).loss
    liger_dist.unwrap(adapted)
    assert type(model.lm_head.token_adapter.base_layer) is nn.Linear
    assert relative_error(loss, adapted(**make_batch(0)).loss) < 1e-6
    with pytest.warns(UserWarning, match="unfused: PEFT trains some rows"):
        liger_dist.wrap(adapted)
