"""Computes the loss of a call from full logits, with its options and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist.losses.cross_entropy import fused_cross_entropy

from .loss_call import LossCall, PendingLoss, detached


def score(
    call: LossCall,
    logits: Tensor,
    targets: Tensor,
    shifted: Tensor | None,
    original_loss_function: Callable[..., Tensor],
) -> Tensor:
    """Computes the loss of full logits ``[..., V]``, which the model's code has transformed.

    Args:
        targets: those that the model gives its loss function, which shifts them as ``original_loss_function`` does.
        shifted: targets that belong to the logits at their positions; None for none.

    Raises:
        LigerDistError: the model scores other tokens than it was given labels for.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    aligned = targets
    if original_loss_function is ForCausalLMLoss:
        ignored = call.spec.options.ignore_index
        aligned = F.pad(targets[..., 1:], (0, 1), value=ignored) if shifted is None else shifted
    rows = logits.numel() // logits.shape[-1]
    if not aligned.numel() == rows == call.labels.numel():
        raise LigerDistError(
            f"{call.model_name} scores {rows} tokens of {call.labels.numel()} labels, so that "
            f"{', '.join(call.spec.outputs) or 'options of the loss'} cannot be assigned to tokens; leave them out "
            "of calls whose loss is not fused."
        )
    spec = replace(call.spec, softcap=None, logit_scale=1.0, logit_bias=None)
    output = call.nan_if_empty(
        fused_cross_entropy(
            logits.reshape(*call.labels.shape, logits.shape[-1]),
            aligned.reshape(call.labels.shape),
            spec=spec,
            execution=replace(call.execution, label_summary=None),
        )
    )
    further_outputs = {name: getattr(output, name) for name in call.spec.differentiable_outputs}
    call.pending = PendingLoss(call, output=detached(output), further_outputs=further_outputs, delivered=True)
    return output.loss
