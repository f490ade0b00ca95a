"""Losses and gradients that are no numbers: found before anything of them is kept, and named."""

from __future__ import annotations

import math
from typing import NoReturn

from liger_dist import LigerDistError

from .run import Run
from .together import gathered


def refuse_numbers(run: Run, step: int, loss: float) -> NoReturn:
    """Where the loss or the gradient norm of a rank is not finite: called by every rank, before gradients are cleared.

    Args:
        step: counted from 1.
        loss: of all ranks together.

    Raises:
        LigerDistError: alike everywhere, with the ranks, the sequences they read and the parameters, as far as they are
            known.
    """
    assert run.own_loss is not None
    everyone = gathered((loss, float(run.own_loss), run.sequences(step - 1), run.engine.broken_gradients()))
    broken = {rank: theirs for rank, theirs in enumerate(everyone) if not math.isfinite(theirs[1])}
    is_loss = not all(math.isfinite(theirs[0]) for theirs in everyone)
    said = [f"the {'loss' if is_loss else 'gradient norm'} of step {step} is not finite"]
    said += [f"rank {rank} has loss {own} from sequences {places}" for rank, (_, own, places, _) in broken.items()]
    names = list(dict.fromkeys(name for *_, theirs in everyone for name in theirs))
    if names:
        said.append(f"gradients that are not: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}")
    raise LigerDistError(
        f"{'; '.join(said)}. No checkpoint was written of it; go on from the newest one with --resume true and a lower "
        "--learning_rate or --max_grad_norm, or without the data that does it."
    )


def check_weights(run: Run, step: int, held_out_loss: float | None) -> None:
    """Refuses, on every rank alike, weights that are not finite after a step whose loss and gradient were: before they
    are written over the last ones that are.

    Raises:
        LigerDistError: with the parameters.
    """
    names = list(dict.fromkeys(name for theirs in gathered(run.engine.broken_weights()) for name in theirs))
    is_known = held_out_loss is None or math.isfinite(held_out_loss)
    if names or not is_known:
        what = (
            f"weights after step {step} are not finite: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"
        )
        raise LigerDistError(
            f"{what if names else f'the held-out loss of step {step} is not finite'}. No checkpoint was written of it; "
            "go on from the newest one with --resume true and a lower --learning_rate."
        )
