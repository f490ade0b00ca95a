"""Several losses of one model before one backward: one at a time holds the full gradient of lm_head's weight."""

from __future__ import annotations


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
