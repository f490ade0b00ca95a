"""How a loss is computed (:class:`Execution`), and which losses of a model hold gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from liger_dist.config import LogitsDtype
from liger_dist_kernels import Backend

from .labels import LabelSummary


class PendingGradients:
    """Numbers the losses of one model. The first after a backward makes its gradients in its forward and holds them
    until its own backward; those that follow recompute their logits in the backward, which costs a fourth product and
    holds nothing.

    A holder that never sees its backward is given up when a later loss has had its own; until its graph is freed, a
    second gradient may then be held. All of this follows from the
    order of calls, which is the same on every rank; nothing depends on what the garbage collector has freed.
    """

    def __init__(self) -> None:
        self._last = 0
        self._holder: int | None = None

    def begin(self) -> tuple[int, bool]:
        """The number of a new loss, and True if it may hold a gradient."""
        self._last += 1
        may_hold = self._holder is None
        if may_hold:
            self._holder = self._last
        return self._last, may_hold

    def has_begun_backward(self, number: int) -> None:
        """The backward of a loss runs."""
        if self._holder is not None and number >= self._holder:
            self._holder = None


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How a loss is computed. Nothing here changes the result beyond rounding, except the groups of the mean."""

    backend: Backend = "auto"
    memory_budget: int | None = None
    overwrite_logits: bool = False
    """True if the gradient of given logits may be written into their memory"""
    label_summary: LabelSummary | None = None
    pending: PendingGradients | None = None
    """the losses of one model; None for a loss of its own"""
    max_valid_tokens: int | None = None
    """number of tokens to compute when the host does not know how many have a label; None for all"""
    logits_dtype: LogitsDtype = None
    is_first: bool = False
    """True for the first loss of a model: checks over ranks are read at once instead of asserted on the device"""
    mean_groups: tuple[dist.ProcessGroup, ...] = ()
    """groups of the ranks whose tokens share one mean, one group for each mesh axis; empty for this rank alone"""
    divide_factor: float = 1.0
    """divisor that the framework applies to the gradients summed over ``mean_groups``"""
