"""The output embedding that can compute its own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
        seam: Seam | None = vars(self).get("_liger_dist_seam")
        request = None if seam is None else seam.take()
        if request is None:
            return super().forward(hidden_states)
        return request.compute(self, hidden_states)


def fuse_head(head: nn.Linear, seam: Seam) -> None:
    """Changes the class of ``head`` in place; a class that a wrapper put on top (FSDP2's) stays on top."""
    head._liger_dist_seam = seam  # type: ignore[assignment]
    head.__class__ = _with_base(type(head), nn.Linear, FusedLMHead)


def restore_head(head: nn.Linear) -> None:
    """Undoes :func:`fuse_head` and :func:`precede_installed_forward`."""
    if isinstance(vars(head).get("forward"), _Preceding):
        head.forward = vars(head)["forward"].installed  # type: ignore[method-assign]
    head.__class__ = _with_base(type(head), FusedLMHead, nn.Linear)
    del head._liger_dist_seam


def is_tensor_parallel_forward(forward: object) -> bool:
    """Whether a forward on an instance is the one that transformers' tensor parallelism puts there: it splits the
    weight's rows, and around them it only moves and gathers."""
    module = getattr(forward, "__module__", "")
    return module.startswith("transformers.") and module.endswith(".tensor_parallel")


class _Preceding:
    """Computes the loss when one is asked for, and runs the forward that is installed on the head otherwise."""

    def __init__(self, head: nn.Linear, installed: Callable[..., Tensor]) -> None:
        self.head = head
        self.installed = installed

    @untraced
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seam: Seam = vars(self.head)["_liger_dist_seam"]
        request = seam.take()
        if request is None:
            return self.installed(hidden_states, *args, **kwargs)
        return request.compute(self.head, hidden_states)


def precede_installed_forward(head: nn.Linear) -> None:
    """Gives the loss precedence over a tensor-parallel forward that has been installed on the head."""
    installed = vars(head).get("forward")
    if installed is not None and is_tensor_parallel_forward(installed):
        head.forward = _Preceding(head, installed)  # type: ignore[method-assign,assignment]


def _with_base(cls: type, old: type, new: type) -> type:
    if cls is old:
        return new
    bases = tuple(new if base is old else base for base in cls.__bases__)
    return type(cls.__name__, bases, dict(vars(cls)))
