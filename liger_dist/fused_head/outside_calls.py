"""What ``verify`` and ``distillation_loss`` ask of a model's loss outside of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from liger_dist.errors import LigerDistError
from liger_dist.losses.labels import AlignedLabels
from liger_dist.losses.normalization import denominator

from .call import IGNORE_INDEX, Call
from .model_loss import FusedLoss


def check_distilled(
    loss: FusedLoss, model: nn.Module, kwargs: dict[str, Any], check_teacher: Callable[[], None]
) -> None:
    """Refuses what is wrong with a student's call, or with its teacher, before the teacher runs. The ranks of a
    vocab-parallel lm_head agree whether one refuses it.

    Raises:
        LigerDistError: as :meth:`.model_loss.FusedLoss.begin`.
    """
    shards = loss.row_shards()
    try:
        unknown = loss.signature.unknown(kwargs)
        if unknown:
            raise LigerDistError(
                f"distillation_loss was called with {unknown[0]!r}, which {type(model).__name__} does not "
                "take; expected arguments of the student's forward."
            )
        call = loss.signature.read(model, (), kwargs)
        loss.documents(model, call)
        call.check_distilled()
        reason = loss.unfused_reason_now(model)
        if reason is not None:
            loss.refuse_distillation(reason)
        loss.checked(model, call, loss.head.in_use(model))
        check_teacher()
    except Exception as error:
        if shards is not None:
            shards.agree_on_call(f"nothing, and refuse it: {error}")
        raise
    if shards is not None:
        shards.agree_on_call("a distillation loss")


def checked_call(loss: FusedLoss, model: nn.Module, batch: dict[str, Any]) -> tuple[Call, AlignedLabels]:
    """Reads ``batch`` as the arguments of a call with labels, and checks them as a call does.

    Raises:
        LigerDistError: as :meth:`.model_loss.FusedLoss.begin`.
    """
    call = loss.signature.read(model, (), batch)
    return call, loss.checked(model, call, loss.head.in_use(model))[0]


def aligned_labels(loss: FusedLoss, model: nn.Module, batch: dict[str, Any]) -> AlignedLabels:
    """Returns the labels of ``batch``, aligned to the logits."""
    assert loss.recipe is not None
    call = loss.signature.read(model, (), batch)
    return call.aligned_labels(loss.recipe, is_encoder_decoder=loss.is_encoder_decoder)


def shared_mean(loss: FusedLoss, model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the ``num_items_in_batch`` that gives the model's original loss the mean of ``token_mean="global"``;
    empty for a local mean. One all-reduce per group of the mean."""
    if loss.config.token_mean == "local" or batch.get("num_items_in_batch") is not None:
        return {}
    in_use = loss.head.in_use(model)
    mean_over = loss.mean_over(model, in_use)
    labels = aligned_labels(loss, model, batch).labels
    items = denominator(
        None,
        torch.where(labels == batch.get("ignore_index", IGNORE_INDEX), -1, labels).to(
            cast(nn.Linear, in_use.base).weight.device
        ),
        reduction="mean",
        num_items_in_batch=None,
        dtype=torch.float32,
        groups=mean_over.groups,
        divide_factor=mean_over.divide_factor,
    )
    return {"num_items_in_batch": items}
