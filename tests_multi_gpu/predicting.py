"""Own models that call lm_head and their loss several times, as those with multi-token prediction do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import on_device
import torch
import torch.nn.functional as F
from models import make_config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from liger_dist.sharding.process_groups import compute_device

Way = Literal["cut labels", "shifted labels", "inline", "documents", "every token"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How a model predicts further tokens."""

    depth: int = 1
    """number of further losses"""
    way: Way = "cut labels"
    """how labels get to the losses"""
    weight: float = 0.3
    checkpointed: bool = False
    unused: Literal["", "first", "last"] = ""
    """position of a call of lm_head whose logits no loss takes"""
    in_training_only: bool = False
    first_last: bool = False
    """True if the first loss is computed after the further ones"""


class Predicting(LlamaForCausalLM):
    """A Llama with a projection and a norm for each further token."""

    prediction = Prediction()

    def add(self, prediction: Prediction) -> None:
        """Adds the modules; before the model is wrapped."""
        self.prediction = prediction
        size, weight = self.config.hidden_size, self.lm_head.weight
        projections = [nn.Linear(2 * size, size, bias=False) for _ in range(prediction.depth)]
        norms = [nn.LayerNorm(size) for _ in range(prediction.depth)]
        self.projections = nn.ModuleList(projections).to(weight.device, weight.dtype)
        self.norms = nn.ModuleList(norms).to(weight.device, weight.dtype)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        p = self.prediction
        if p.unused == "first":
            self.lm_head(self.model.embed_tokens(input_ids)).sum()
        hidden = self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, use_cache=False
        ).last_hidden_state
        if labels is None:
            return CausalLMOutputWithPast(logits=self.lm_head(hidden))
        logits = self.lm_head(hidden)
        loss = None if p.first_last else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        further, depths = [], range(p.depth if self.training or not p.in_training_only else 0)
        for k in depths:
            step = self._step(k, position_ids, kwargs)
            if p.checkpointed:
                one, hidden = checkpoint(step, hidden, input_ids, labels, use_reentrant=False)
            else:
                one, hidden = step(hidden, input_ids, labels)
            further.append(one)
        if p.unused == "last":
            self.lm_head(hidden[:, -1:]).argmax(-1)
        if p.first_last:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        if further:
            loss = loss + p.weight / p.depth * torch.stack(further).sum()
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _step(self, k: int, position_ids: Tensor | None, kwargs: dict[str, Any]) -> Any:
        p = self.prediction
        ahead = k + 1

        def step(hidden: Tensor, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            if p.way in ("cut labels", "inline"):
                ids, before = input_ids[:, ahead:], hidden[:, :-1]
            else:
                ids, before = F.pad(input_ids[:, ahead:], (0, ahead)), hidden
            both = torch.cat([self.norms[k](before), self.model.embed_tokens(ids)], -1)
            hidden = before + self.projections[k](both)
            logits = self.lm_head(hidden)
            size = self.config.vocab_size
            if p.way == "cut labels":
                return self.loss_function(logits, labels[:, ahead:], size, **kwargs), hidden
            if p.way == "inline":
                scored, targets = logits[:, :-1].float(), labels[:, ahead + 1 :]
                if logits.dtype == torch.float64:
                    scored = logits[:, :-1]
                return F.cross_entropy(scored.reshape(-1, size), targets.reshape(-1)), hidden
            if p.way == "every token":
                return self.loss_function(logits, labels, size, **kwargs), hidden
            shifted = F.pad(labels[:, ahead + 1 :], (0, ahead + 1), value=-100)
            if p.way == "documents" and position_ids is not None:
                document = (position_ids == 0).cumsum(-1)
                later = F.pad(document[:, ahead + 1 :], (0, ahead + 1), value=-1)
                shifted = torch.where(later == document, shifted, -100)
            return self.loss_function(logits, None, size, shift_labels=shifted, **kwargs), hidden

        return step


def make_predicting(
    prediction: Prediction, *, tied: bool = False, dtype: torch.dtype = torch.float64, bias: bool = False
) -> Any:
    """The same weights on every rank."""
    torch.manual_seed(0)
    model: Any = Predicting(make_config("llama", tied=tied)).to(dtype)
    model.add(prediction)
    if bias:
        model.lm_head.bias = nn.Parameter(on_device.randn(model.config.vocab_size, dtype=dtype))
    return model.to(compute_device())


def exact_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The loss of transformers' causal language models in the dtype of the logits, where theirs is fp32."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    flat, targets = logits.reshape(-1, vocab_size), shift_labels.reshape(-1)
    total = F.cross_entropy(flat, targets, ignore_index=ignore_index, reduction="sum")
    count = (targets != ignore_index).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    return total / count


def true_losses(model: Any, batch: dict[str, Tensor]) -> list[tuple[float, Tensor, int]]:
    """Weight, sum over tokens, and number of labels of each loss of the unwrapped ``model``, the first loss first."""
    found: list[tuple[Tensor, int]] = []

    def noted(logits: Tensor, labels: Tensor | None, vocab_size: int, shift_labels: Any = None, **_: Any) -> Tensor:
        total = exact_loss(logits, labels, vocab_size, 1, shift_labels=shift_labels)
        targets = labels[:, 1:] if shift_labels is None and labels is not None else shift_labels
        found.append((total, int((targets != -100).sum())))
        return total

    # It stays: a checkpoint calls it in the backward.
    model.loss_function = noted
    model(**batch)
    found = list(found)
    p = model.prediction
    return [(p.weight / p.depth if number else 1.0, *loss) for number, loss in enumerate(found)]


def as_truth(model: Any) -> Any:
    """``model``, which computes its losses exactly."""
    model.loss_function = exact_loss
    return model
