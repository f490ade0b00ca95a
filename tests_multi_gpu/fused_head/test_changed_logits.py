"""Logits that a model's code changes in another way than when it was wrapped: through views and aliases, and by tensors
of other values. The loss is the model's own, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import on_device
import pytest
import torch
from models import VOCAB_SIZE, make_batch, make_config, make_model
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device


class Changed(LlamaForCausalLM):  # type: ignore[misc]
    """Changes its logits by a function."""

    change: Callable[[Any, Tensor], Tensor] = staticmethod(lambda model, z: z)  # type: ignore[assignment]

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        logits = self.change(self, self.lm_head(self.model(input_ids=input_ids).last_hidden_state))  # type: ignore[call-arg, arg-type]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=VOCAB_SIZE)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def build(change: Any = None) -> Any:
    torch.manual_seed(0)
    model = Changed(make_config("llama")).to(compute_device())
    if change is not None:
        model.change = change
    return model


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda z: z.view(-1, VOCAB_SIZE),
    "flatten": lambda z: z.flatten(0, 1),
    "slice of all": lambda z: z[..., :],
    "slice": lambda z: z[:, -3:],
    "narrow": lambda z: z.narrow(-1, 0, 50),
    "transpose": lambda z: z.transpose(0, 1),
    "T of a view": lambda z: z.view(-1, VOCAB_SIZE).T,
    "unsqueeze": lambda z: z.unsqueeze(0),
    "view of a view": lambda z: z.view(-1, VOCAB_SIZE).view(z.shape),
    "detach": lambda z: z.detach(),
    "data": lambda z: z.data,
    "view_as": lambda z: z.view_as(z),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda z: z.mul_(2),
    "div_": lambda z: z.div_(0.5),
    "imul": lambda z: z.__imul__(2),
    "torch.Tensor.mul_": lambda z: torch.Tensor.mul_(z, 2),
    "tanh_": lambda z: z.tanh_(),
    "out": lambda z: torch.mul(z, 2, out=z),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_writes_through_a_view_that_begin_after_wrap_are_refused(view: str, write: str) -> None:
    def change(model: Any, z: Tensor) -> Tensor:
        WRITES[write](VIEWS[view](z))
        return z

    model = build()
    liger_dist.wrap(model, "none")
    model(**make_batch(0))
    model.change = change
    with pytest.raises(liger_dist.LigerDistError):
        model(**make_batch(0))


@pytest.mark.parametrize("view", ["view", "flatten", "slice of all", "transpose", "unsqueeze", "detach", "data"])
def test_writes_before_and_after_a_view_are_those_of_both(view: str) -> None:
    """Of the tensor when its view is scored, and of the view."""

    def change(model: Any, z: Tensor) -> Tensor:
        seen = VIEWS[view](z)
        z.mul_(2)
        return seen.view(z.shape) if view not in ("transpose", "unsqueeze") else z

    model = build()
    liger_dist.wrap(model, "none")
    model.change = change
    with pytest.raises(liger_dist.LigerDistError, match="mul"):
        model(**make_batch(0))


def test_data_of_logits_is_not_assigned() -> None:
    model = build()
    liger_dist.wrap(model, "none")
    model.change = lambda model, z: setattr(z, "data", z.data * 2) or z
    with pytest.raises(liger_dist.LigerDistError, match="data of fused logits was assigned"):
        model(**make_batch(0))


def scaled(model: Any, z: Tensor) -> Tensor:
    return z * torch.tensor(model.config.logit_scale, device=z.device)


def capped(model: Any, z: Tensor) -> Tensor:
    cap = torch.tensor(model.config.final_logit_softcapping, device=z.device)
    return cap * torch.tanh(z / cap)


def tempered(model: Any, z: Tensor) -> Tensor:
    return z / model.temperature  # type: ignore[no-any-return]


def shifted(model: Any, z: Tensor) -> Tensor:
    return z + model.shift * model.factor  # type: ignore[no-any-return]


def shifted_by_one_of_two(model: Any, z: Tensor) -> Tensor:
    return z + (model.shift if model.factor == 1.0 else model.other)  # type: ignore[no-any-return]


def prepared(change: Any) -> Any:
    model = build(change)
    device = compute_device()
    model.config.logit_scale, model.config.final_logit_softcapping = 0.5, 5.0
    model.temperature, model.factor = torch.tensor(1.0, device=device), 1.0
    model.register_buffer("shift", torch.linspace(-1, 1, VOCAB_SIZE, device=device))
    model.register_buffer("other", torch.linspace(2, -2, VOCAB_SIZE, device=device))
    return model


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda owner: setattr(owner, name, value)


OTHERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "scale of the config": (scaled, lambda model: set_to("logit_scale", 2.0)(model.config)),
    "softcap of the config": (capped, lambda model: set_to("final_logit_softcapping", 2.0)(model.config)),
    "another temperature": (tempered, lambda model: set_to("temperature", 2 * model.temperature)(model)),
    "a temperature in place": (tempered, lambda model: model.temperature.fill_(2.0)),
    "a temperature that trains": (tempered, lambda model: model.temperature.requires_grad_()),
    "a temperature of each token": (
        tempered,
        lambda model: set_to("temperature", torch.linspace(1, 3, 12, device=compute_device())[None, :, None])(model),
    ),
    "a factor of a buffer": (shifted, set_to("factor", 2.0)),
    "another buffer": (shifted_by_one_of_two, set_to("factor", 2.0)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_tensor_of_other_values_is_refused(what: str) -> None:
    change, alter = OTHERS[what]
    own = prepared(change)
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none")
    if torch.cuda.is_available() and "fused linear cross entropy" not in str(liger_dist.explain(wrapped)):
        pytest.skip("unfused: the probe computes on the CPU, and this model's tensor is on a GPU")
    assert "fused linear cross entropy" in str(liger_dist.explain(wrapped))
    for _ in range(2):
        losses = [model(**make_batch(0)).loss for model in (wrapped, own)]
        assert relative_error(*losses) < 1e-5
    alter(wrapped)
    with pytest.raises(liger_dist.LigerDistError, match="tensor"):
        wrapped(**make_batch(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [scaled, capped, tempered, shifted])
def test_a_tensor_of_the_same_values_is_computed(change: Any, dtype: torch.dtype) -> None:
    """A buffer's new values too, which the loss reads in each call."""
    own = prepared(change).to(dtype)
    wrapped: Any = liger_dist.wrap(copy.deepcopy(own), "none")
    for step in range(3):
        for model in (wrapped, own):
            model.shift.mul_(2.0)
            model.temperature = model.temperature.clone()
        losses = [model(**make_batch(step)).loss.float() for model in (wrapped, own)]
        assert relative_error(*losses) < (1e-5 if dtype == torch.float32 else 2e-2)
    assert isinstance(wrapped.lm_head, nn.Linear)


BACK = on_device.arange(100, -1, -1)
SELECTIONS_BY_HOOKS: dict[str, Any] = {
    "classes permuted": lambda logits: logits[..., BACK],
    "classes by index_select": lambda logits: logits.index_select(-1, BACK),
    "classes by a mask": lambda logits: logits[..., BACK < 90],
    "classes cut": lambda logits: logits[..., :90],
    "first class cut": lambda logits: logits[..., 1:],
    "tokens reversed": lambda logits: logits[:, BACK[-12:]],
}


@pytest.mark.parametrize("name", SELECTIONS_BY_HOOKS)
def test_selections_of_a_hook_after_wrap_are_refused(name: str) -> None:
    model: Any = liger_dist.wrap(make_model("llama"), "none")
    assert model(**make_batch(0)).loss > 0
    model.lm_head.register_forward_hook(lambda module, args, output: SELECTIONS_BY_HOOKS[name](output))
    with pytest.raises(liger_dist.LigerDistError, match=r"did (getitem|index_select)"):
        model(**make_batch(0))
