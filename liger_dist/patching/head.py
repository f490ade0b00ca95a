"""The output embedding that can compute its own loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from .untraced import untraced

if TYPE_CHECKING:
    from .seam import Seam


class FusedLMHead(nn.Linear):
    """An ``nn.Linear`` whose forward returns the loss, in the shape of logits without width, when its model was called
    with labels, and logits otherwise.

    An existing head becomes one by a change of its class: same parameters, same names, same state dict. The loss runs
    inside this module's own call, where every wrapper has gathered the weight and will reduce its gradient.
    """

    _liger_dist_seam: Seam

    @untraced
    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., D]`` to ``[..., V]`` logits, or to ``[..., 0]`` carrying the loss."""
        request = self._liger_dist_seam.take()
        if request is None:
            return super().forward(hidden_states)
        return request.compute(self, hidden_states)


def fuse_head(head: nn.Linear, seam: Seam) -> None:
    """Changes the class of ``head`` in place; a class that a wrapper put on top (FSDP2's) stays on top."""
    head._liger_dist_seam = seam  # type: ignore[assignment]
    head.__class__ = _with_base(type(head), nn.Linear, FusedLMHead)


def restore_head(head: nn.Linear) -> None:
    """Undoes :func:`fuse_head`."""
    head.__class__ = _with_base(type(head), FusedLMHead, nn.Linear)
    del head._liger_dist_seam


def _with_base(cls: type, old: type, new: type) -> type:
    if cls is old:
        return new
    bases = tuple(new if base is old else base for base in cls.__bases__)
    return type(cls.__name__, bases, dict(vars(cls)))
