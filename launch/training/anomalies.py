"""Losses and gradients that are no numbers: found before anything of them is kept, and named."""

from __future__ import annotations

import math

import torch.distributed as dist

from liger_dist import LigerDistError

from .process import world_size
from .run import Run


def check_numbers(run: Run, step: int, loss: float, norm: float) -> None:
    """Refuses, on every rank alike, a loss or a gradient norm that is not finite. Call it before gradients are cleared.

    Args:
        step: counted from 1.
        loss, norm: of all ranks together, and therefore the same everywhere.

    Raises:
        LigerDistError: with the ranks, the sequences they read and the parameters, as far as they are known.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    assert run.own_loss is not None
    own = float(run.own_loss)
    mine = (own, run.sequences(step - 1), run.engine.broken_gradients())
    everyone = [mine]
    if dist.is_initialized():
        everyone = [mine] * world_size()
        dist.all_gather_object(everyone, mine)
    broken = {rank: theirs for rank, theirs in enumerate(everyone) if not math.isfinite(theirs[0])}
    said = [f"the {'loss' if not math.isfinite(loss) else 'gradient norm'} of step {step} is not finite"]
    said += [f"rank {rank} has loss {own} from sequences {places}" for rank, (own, places, _) in broken.items()]
    names = list(dict.fromkeys(name for _, _, theirs in everyone for name in theirs))
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
    mine = run.engine.broken_weights()
    everyone = [mine]
    if dist.is_initialized():
        everyone = [mine] * world_size()
        dist.all_gather_object(everyone, mine)
    names = list(dict.fromkeys(name for theirs in everyone for name in theirs))
    is_known = held_out_loss is None or math.isfinite(held_out_loss)
    if names or not is_known:
        what = (
            f"weights after step {step} are not finite: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"
        )
        raise LigerDistError(
            f"{what if names else f'the held-out loss of step {step} is not finite'}. No checkpoint was written of it; "
            "go on from the newest one with --resume true and a lower --learning_rate."
        )
