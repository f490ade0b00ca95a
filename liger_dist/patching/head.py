"""The output embedding that can compute its own loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.sharding.split_head import PlainLogits

from .replaced import below_wrappers, with_base
from .untraced import untraced

if TYPE_CHECKING:
    from .seam import Seam


class ComputesLoss(nn.Module):
    """Mixed into the class of an output embedding: its forward returns the loss, in the shape of logits without width,
    when its model was called with labels, and logits otherwise. The loss runs inside the module's own call, where every
    wrapper has gathered the weight and will reduce its gradient.
    """

    _liger_dist_seam: Seam

    @untraced
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[..., D]`` to ``[..., V]`` logits, or to ``[..., 0]`` carrying the loss."""
        if not isinstance(self, ComputesLoss):
            # Restored; somebody has kept this forward.
            return type(self).forward(self, hidden_states, *args, **kwargs)
        own: Callable[..., Tensor] = super().forward
        seam: Seam | None = vars(self).get("_liger_dist_seam")
        request = None if seam is None else seam.take()
        if request is None:
            return own(hidden_states, *args, **kwargs)
        if args or kwargs:
            raise LigerDistError(
                f"the output embedding was called with {', '.join(kwargs) or 'further arguments'}, by which tokens are "
                "treated differently; such a call cannot be fused. Pass outputs=('logits',) along with the labels."
            )
        return request.compute(self, hidden_states, own)


class FusedLMHead(ComputesLoss, nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` that can compute its own loss. An existing head becomes one by a change of its class: same
    parameters, same names, same state dict."""


def fuse_head(head: nn.Module, seam: Seam) -> None:
    """Changes the class of ``head`` in place; a class that a wrapper put on top (FSDP2's) stays on top."""
    if isinstance(head, ComputesLoss):
        head._liger_dist_seam = seam
        return
    head._liger_dist_seam = seam  # type: ignore[assignment]
    own = below_wrappers(type(head))
    head.__class__ = with_base(type(head), own, _fused(own))


def restore_head(head: nn.Module) -> None:
    """Undoes :func:`fuse_head` and :func:`precede_installed_forward`."""
    if isinstance(vars(head).get("forward"), _Preceding):
        head.forward = vars(head)["forward"].installed
    fused = next(cls for cls in type(head).__mro__ if ComputesLoss in cls.__bases__)
    head.__class__ = with_base(type(head), fused, fused.__bases__[1])
    del head._liger_dist_seam


@cache
def _fused(cls: Any) -> Any:
    return FusedLMHead if cls is nn.Linear else type(cls.__name__, (ComputesLoss, cls), {"__module__": cls.__module__})


def is_sharding_forward(forward: object) -> bool:
    """Whether a forward on an instance is there because the weight's rows are split, by transformers' tensor
    parallelism or by this package: around them it only moves and gathers."""
    module = getattr(forward, "__module__", "")
    return isinstance(forward, PlainLogits) or (
        module.startswith("transformers.") and module.endswith(".tensor_parallel")
    )


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
        return request.compute(self.head, hidden_states, self.installed)


def precede_installed_forward(head: nn.Module) -> None:
    """Gives the loss precedence over a forward for split rows that has been installed on the head."""
    installed = vars(head).get("forward")
    if installed is not None and is_sharding_forward(installed):
        head.forward = _Preceding(head, installed)  # type: ignore[arg-type]
