"""Detects by stack inspection what a trainer will read from logits."""

from __future__ import annotations

import sys
from types import FrameType


def returns_logits() -> bool:
    """True inside a ``prediction_step`` of a Trainer that returns logits, for ``compute_metrics`` and ``predict``.

    The model's arguments are the same as for the loss alone; an argument of the step says what it returns.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "prediction_step" and "prediction_loss_only" in frame.f_code.co_varnames:
            trainer = frame.f_locals.get("self")
            if any(cls.__module__ == "transformers.trainer" for cls in type(trainer).__mro__):
                return not frame.f_locals["prediction_loss_only"]
        frame = frame.f_back
    return False


_SUMS = ("log_prob", "mean_logit")
_METRICS = (*_SUMS, "entropy", "is_top1", "sum_sq_prob")
READERS: dict[tuple[str, str], tuple[str, ...]] = {
    ("trl.experimental.cpo.cpo_trainer", "concatenated_forward"): _SUMS,
    ("trl.experimental.orpo.orpo_trainer", "concatenated_forward"): _SUMS,
    ("trl.experimental.online_dpo.online_dpo_trainer", "_forward"): _SUMS,
    # TRL before 1.16, which Axolotl requires.
    ("trl.trainer.dpo_trainer", "_compute_loss"): _METRICS,
    ("trl.trainer.dpo_trainer", "compute_ref_log_probs"): _SUMS,
    ("trl.trainer.dpo_trainer", "_compute_ref_log_probs"): _SUMS,
    ("trl.trainer.kto_trainer", "_compute_loss"): _METRICS,
    ("trl.trainer.kto_trainer", "_compute_kl_logps"): _SUMS,
    ("trl.trainer.kto_trainer", "compute_ref_log_probs"): _SUMS,
    ("trl.trainer.kto_trainer", "_compute_ref_log_probs"): _SUMS,
    ("llamafactory.train.dpo.trainer", "concatenated_forward"): _SUMS,
    ("llamafactory.train.kto.trainer", "forward"): _SUMS,
}
"""Functions of trainers, by module and name, that call their model without labels, and the values of the next input
tokens that they read from the logits, named as outputs of a wrapped model."""
_MODULES = {module for module, _ in READERS}
_BETWEEN = ("torch", "transformers", "accelerate", "deepspeed", "peft", "contextlib", "functools", "liger_dist")
"""packages that wrap a model or its forward: their frames may lie between a trainer's and the model's"""


def outputs_read_of_logits() -> tuple[str, ...] | None:
    """Returns the outputs that the calling trainer will read from its logits; None for callers outside :data:`READERS`,
    and where a Trainer returns logits."""
    if not _MODULES & sys.modules.keys():
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        outputs = READERS.get((module, frame.f_code.co_name))
        if outputs is not None:
            return None if returns_logits() else outputs
        if module.partition(".")[0] not in _BETWEEN:
            return None
        frame = frame.f_back
    return None
