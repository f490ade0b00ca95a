"""Trainer of transformers: ``trainer = fuse(Trainer(…))``."""

from __future__ import annotations

from typing import TypeVar

from transformers import DataCollatorWithFlattening, Trainer

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.sharding.fsdp2.strategy import LMHead

from .accelerate import wrap_for
from .patches import refuse_packing

PACKS = ("packing", "padding_free", "sample_packing")
"""settings of trainers that pack several documents into a row"""
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def fuse(trainer: AnyTrainer, config: WrapConfig | None = None, *, lm_head: LMHead = "gather") -> AnyTrainer:
    """Makes the trainer's model compute its loss fused, under the trainer's settings: one process, DDP, FSDP1,
    FSDP2 or DeepSpeed. Evaluation that returns only the loss computes no logits; for metrics and ``predict`` it
    computes full ones, as before.

    Args:
        trainer: a Trainer that has not trained yet.
        lm_head: see :class:`liger_dist.FSDP2`; for FSDP2 settings only.

    Returns:
        The same trainer.

    Raises:
        LigerDistError: its arguments let other code compute the loss or pack documents that the model
            would mix, or see :func:`liger_dist.wrap`. Nothing is
            changed then.
    """
    for objection in _objections(trainer):
        raise LigerDistError(objection)
    packs = [name for name in PACKS if getattr(trainer.args, name, False)]
    packs += ["data_collator"] if isinstance(trainer.data_collator, DataCollatorWithFlattening) else []
    for setting in packs[:1]:
        refuse_packing(trainer.model, setting)
    wrap_for(trainer.accelerator.state, trainer.model, config, lm_head)
    return trainer


def _objections(trainer: Trainer) -> list[str]:
    arguments, found = trainer.args, []
    if type(trainer).__module__.startswith("trl."):
        found.append(
            f"a {type(trainer).__name__} of TRL has been given TRL's own head; make it within "
            "liger_dist.integrations.trl.fused_heads() instead."
        )
    liger = arguments.liger_kernel_config or {}
    if arguments.use_liger_kernel and not (
        liger.get("fused_linear_cross_entropy") is False and liger.get("cross_entropy", False) is False
    ):
        found.append(
            "use_liger_kernel is True and replaces the model's forward, with its loss; leave it out, or set "
            "liger_kernel_config={'fused_linear_cross_entropy': False, 'cross_entropy': False}."
        )
    if trainer.compute_loss_func is not None:
        found.append(
            "compute_loss_func is given and computes the loss from full logits; leave it out, and give options of the "
            "loss (label_smoothing, z_loss, class_weight …) to the model's call."
        )
    if arguments.label_smoothing_factor != 0:
        found.append(
            f"label_smoothing_factor is {arguments.label_smoothing_factor}, with which Trainer computes the loss "
            "from full logits; leave it out, and add label_smoothing to the model's inputs (in your data collator)."
        )
    if trainer.model_init is not None:
        found.append("model_init is given and makes another model for every run; give the model itself.")
    return found
