"""Axolotl's KDPlugin: the teacher's probabilities in its batches become soft labels of the model's call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from liger_dist.fused_head.call import IGNORE_INDEX

COLUMNS = ("target_token_ids", "target_logprobs", "target_mask")


def soft_labels_of(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Reads the columns of Axolotl's KD collators as ``soft_labels`` of a call.

    Args:
        batch: ``target_token_ids``, ``target_logprobs`` and ``target_mask``, ``[B, S, K]``. Row p is the distribution
            that token p was drawn from; the logits at p - 1 predict it.

    Returns:
        Ids, negative for none, and fp32 probabilities, ``[B, S, K]``, of the token after each position.
    """
    ids, log_probs, mask = (batch[name] for name in COLUMNS)
    is_none = mask == 0
    is_none[:, 0] = True
    ids, probs = ids.masked_fill(is_none, -1), log_probs.float().exp().masked_fill(is_none, 0.0)
    return ids.roll(-1, 1), probs.roll(-1, 1)


def distil(trainer: Any) -> None:
    """Makes a trainer of Axolotl's KDPlugin with a fused model compute ``kd_alpha`` times the forward KL divergence
    of the K classes plus ``kd_ce_alpha`` times the cross entropy in one call of the model."""
    weight, hard_weight = trainer.args.kd_alpha or 0.0, trainer.args.kd_ce_alpha or 0.0
    temperature = trainer.args.kd_temperature or 1.0

    def compute_loss(
        model: Any, inputs: Mapping[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        given = {name: value for name, value in inputs.items() if name not in (*COLUMNS, "num_items_in_batch")}
        labels = given["labels"]
        ids, probs = soft_labels_of({name: inputs[name] for name in COLUMNS})
        items = (labels != IGNORE_INDEX).sum() if num_items_in_batch is None else num_items_in_batch
        output = model(
            **given,
            soft_labels=(ids, probs),
            soft_weight=weight / (weight + hard_weight),
            temperature=temperature,
            num_items_in_batch=items,
        )
        # The cross entropy is the divergence plus the entropy of the probabilities.
        has_label = labels.roll(-1, 1) != IGNORE_INDEX
        entropy = torch.special.entr(probs).sum(-1)[has_label].sum() / items
        loss = temperature**2 * ((weight + hard_weight) * output.loss - weight * entropy)
        return (loss, output) if return_outputs else loss

    trainer.compute_loss = compute_loss


def objections(cfg: Mapping[str, Any]) -> list[str]:
    """Lists the settings of a configuration with ``kd_trainer`` that soft labels do not compute."""
    found = []
    if cfg.get("kd_online_server_base_url"):
        found.append(
            f"kd_online_server_base_url is {cfg['kd_online_server_base_url']!r}; expected probabilities in the "
            "dataset, because the servers' are aligned differently (vLLM's row p is of the logits at p)"
        )
    if cfg.get("kd_temperature") is not None and not cfg["kd_temperature"] > 0:
        found.append(f"kd_temperature is {cfg['kd_temperature']!r}; expected a number above 0")
    for name in ("kd_alpha", "kd_ce_alpha"):
        if (cfg.get(name) or 0.0) < 0:
            found.append(f"{name} is {cfg[name]!r}; expected 0 or more")
    if cfg.get("kd_beta"):
        found.append(f"kd_beta is {cfg['kd_beta']!r}; expected 0, the forward KL divergence")
    if cfg.get("kd_normalize_topk"):
        found.append("kd_normalize_topk is true and leaves most classes out of the student's softmax; set it to false")
    if (cfg.get("kd_temperature") or 1.0) != 1.0 and cfg.get("kd_ce_alpha"):
        found.append(
            f"kd_temperature is {cfg['kd_temperature']!r} and kd_ce_alpha {cfg['kd_ce_alpha']!r}; expected one of 1.0 "
            "and 0, because both losses are computed from the same logits"
        )
    if not (cfg.get("kd_alpha") or 0.0) + (cfg.get("kd_ce_alpha") or 0.0) > 0:
        found.append("kd_alpha and kd_ce_alpha are 0 or not given; expected a weight above 0")
    return found
