"""What a host is about to do with a call, from its running functions."""

from __future__ import annotations

import sys
from types import FrameType


def returns_logits() -> bool:
    """True inside a ``prediction_step`` of a Trainer that returns logits, for ``compute_metrics`` and ``predict``.

    The model is called with the same arguments as for the loss alone; what the step is for is one of its arguments.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "prediction_step" and "prediction_loss_only" in frame.f_code.co_varnames:
            trainer = frame.f_locals.get("self")
            if any(cls.__module__ == "transformers.trainer" for cls in type(trainer).__mro__):
                return not frame.f_locals["prediction_loss_only"]
        frame = frame.f_back
    return False


READERS = {
    "trl.experimental.cpo.cpo_trainer": "concatenated_forward",
    "trl.experimental.orpo.orpo_trainer": "concatenated_forward",
    "trl.experimental.online_dpo.online_dpo_trainer": "_forward",
}
"""By module: the function of a trainer that calls its model without labels, and reads of the logits nothing but
log-probabilities of the call's own input ids, and means."""


def reads_log_probs_of_its_input() -> bool:
    """True inside one of :data:`READERS`."""
    if not READERS.keys() & sys.modules.keys():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if READERS.get(frame.f_globals.get("__name__", "")) == frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False
