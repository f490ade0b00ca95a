"""Checks that a loss function got the labels and options that its loss was computed with."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist.losses.collectives import require

from .call import IGNORE_INDEX

CHANGED_LABELS = (
    "{} changed its labels before its loss, which it did not do when it was wrapped; the loss was computed with those "
    "of the call. Change them before the call, or use WrapConfig(fused_loss=False)."
)
OTHER_TOKENS = (
    "{} leaves labels out of its loss by a mask or by indices; the loss was computed with all labels of the call. Give "
    "tokens to ignore the ignored label before the call, or use WrapConfig(fused_loss=False)."
)


def check_further(targets: Tensor, labels: Tensor, ignore_index: int, *, is_aligned: bool, model_name: str) -> None:
    """Compares the ``targets`` of a further loss with its aligned ``labels`` ``[B, S]`` by their values: a model makes
    new ones for each of them.

    Args:
        is_aligned: True if each target is scored by the logits at its position.

    Raises:
        LigerDistError: they differ; on a GPU an assertion on the device fails.
    """
    given = targets.reshape(len(labels), -1) if targets.numel() % len(labels) == 0 else targets.reshape(1, -1)
    if not is_aligned:
        given = F.pad(given[:, 1:], (0, 1), value=ignore_index)
    if len(given) != len(labels) or given.shape[1] > labels.shape[1]:
        raise LigerDistError(CHANGED_LABELS.format(model_name))
    expected = F.pad(given, (0, labels.shape[1] - given.shape[1]), value=ignore_index).to(labels.device)
    require((expected == labels).all(), CHANGED_LABELS.format(model_name))


def check_options(options: dict[str, Any], label_smoothing: float, *, model_name: str) -> None:
    """Compares the other arguments of ``torch.nn.functional.cross_entropy`` with those that the probe saw.

    Raises:
        LigerDistError: they differ.
    """
    seen = {"ignore_index": IGNORE_INDEX, "label_smoothing": label_smoothing, "reduction": "mean"}
    changed = [option for option, value in seen.items() if options.get(option, value) != value]
    changed += [option for option in ("size_average", "reduce") if options.get(option) is not None]
    changed += ["weight"] if options.get("weight") is not None else []
    if changed:
        raise LigerDistError(
            f"{model_name} calls torch.nn.functional.cross_entropy with other options ({', '.join(changed)}) than "
            "when it was wrapped; the loss was computed already. Unwrap it and wrap it again, or use "
            "WrapConfig(fused_loss=False)."
        )
