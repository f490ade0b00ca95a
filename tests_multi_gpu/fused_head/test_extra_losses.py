"""Models whose forward adds a loss of its logits to that of its labels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import make_batch, make_config
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

import liger_dist
from liger_dist.sharding.process_groups import compute_device

EXTRA: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy of the token after the next": lambda logits, labels: F.cross_entropy(
        logits[:, :-2].flatten(0, 1), labels[:, 2:].flatten()
    ),
    "z-loss": lambda logits, labels: logits.logsumexp(-1).square().mean(),
    "entropy": lambda logits, labels: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(),
    "penalty": lambda logits, labels: logits.square().mean(),
    "penalty of a list": lambda logits, labels: torch.stack([logits, logits]).mean(),
}


class WithExtraLoss(LlamaForCausalLM):
    extra: str | None = None
    """a key of :data:`EXTRA`"""
    extra_first = False

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        logits = self.lm_head(self.model(input_ids=input_ids, use_cache=False).last_hidden_state)
        loss = None
        if labels is not None:
            terms = [lambda: self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)]
            if self.extra is not None:
                terms.insert(0 if self.extra_first else 1, lambda: 0.1 * EXTRA[self.extra](logits, labels))
            loss = torch.stack([term() for term in terms]).sum()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def build(extra: str | None, *, extra_first: bool) -> Any:
    torch.manual_seed(0)
    model = WithExtraLoss(make_config("llama")).double().to(compute_device())
    model.extra, model.extra_first = extra, extra_first
    return model


@pytest.mark.smoke
@pytest.mark.parametrize("extra_first", [False, True])
@pytest.mark.parametrize("extra", EXTRA)
def test_an_extra_loss_leaves_the_loss_unfused_and_says_why(extra: str, extra_first: bool) -> None:
    expected = build(extra, extra_first=extra_first)(**make_batch(0)).loss
    model = build(extra, extra_first=extra_first)
    with pytest.warns(UserWarning, match="leaves the loss of WithExtraLoss unfused") as caught:
        liger_dist.wrap(model, "none")
    (sentence,) = {str(warning.message) for warning in caught if "unfused" in str(warning.message)}
    assert "computes 2 losses from its logits" in sentence or "reads its logits beside its loss" in sentence
    assert "outputs=" not in sentence
    assert abs(float(model(**make_batch(0)).loss) - float(expected)) < 1e-6


@pytest.mark.parametrize("extra_first", [False, True])
@pytest.mark.parametrize("extra", EXTRA)
def test_an_extra_loss_that_comes_after_wrap_is_refused(extra: str, extra_first: bool) -> None:
    """The refusal names no option that was not given, and its way out helps."""
    expected = build(extra, extra_first=extra_first)(**make_batch(0)).loss
    model = build(None, extra_first=extra_first)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        liger_dist.wrap(model, "none")
    model.extra = extra
    with pytest.raises(liger_dist.LigerDistError, match="never computed") as refusal:
        model(**make_batch(0))
    assert "fused_loss=False" in str(refusal.value)
    assert "weight" not in str(refusal.value)
    own = build(extra, extra_first=extra_first)
    liger_dist.wrap(own, "none", config=liger_dist.WrapConfig(fused_loss=False))
    assert abs(float(own(**make_batch(0)).loss) - float(expected)) < 1e-6
