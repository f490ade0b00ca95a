"""An lm_head that computes its own loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from liger_dist.class_swap import below_wrappers, subclass_of, with_base
from liger_dist.errors import LigerDistError
from liger_dist.structure import is_fp32_forward, is_linear_forward
from liger_dist.tracing import untraced
from liger_dist.weak import WeakReference

from .loss_call import take_call

_SEAM = "_liger_dist_seam"
_INSTALLED = "_liger_dist_installed_forward"


class ComputesLoss(nn.Module):
    """Mixed into the class of an lm_head: its forward returns the loss, carried by zero-width logits, when its model
    was called with labels, and logits otherwise. The loss runs inside the module's own call, where the hooks of FSDP,
    ZeRO or TP have unsharded the weight and will reduce its gradient.
    """

    @untraced
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[..., D]`` to ``[..., V]`` logits, or to ``[..., 0]`` carrying the loss."""
        if not isinstance(self, ComputesLoss):
            # Called through a stale bound method after unwrap.
            return type(self).forward(self, hidden_states, *args, **kwargs)
        call = take_call(_seam_of(self))
        if call is None:
            return self._logits(hidden_states, *args, **kwargs)
        if args or kwargs:
            raise LigerDistError(
                f"lm_head was called with {', '.join(kwargs) or 'further arguments'}, which may change logits per "
                "token; such a call cannot be fused. Pass outputs=('logits',) along with the labels."
            )
        return call.compute(self, hidden_states, self._logits)

    @property
    def _logits(self) -> Callable[..., Tensor]:
        """The forward without a loss: one that other code has set, or that of the module's own class."""
        installed: Callable[..., Tensor] | None = vars(self).get(_INSTALLED)
        return super().forward if installed is None else installed


class FusedLMHead(ComputesLoss, nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` that can compute its own loss. An existing lm_head becomes one by a swap of its class: same
    parameters, same names, same state dict."""


def fuse_head(head: nn.Module, seam: object) -> None:
    """Swaps the class of ``head`` in place; FSDP2's class stays on top. A linear forward that other code has set on the
    instance becomes the one for logits."""
    if not isinstance(head, ComputesLoss):
        own = below_wrappers(type(head))
        fused = FusedLMHead if own is nn.Linear else subclass_of(own, ComputesLoss)
        head.__class__ = with_base(type(head), own, fused)
    # Also one that other code has set since: TRL's trainers do for an fp32 head.
    if is_linear_forward(vars(head).get("forward")):
        vars(head)[_INSTALLED] = vars(head).pop("forward")
    vars(head)[_SEAM] = WeakReference(seam)


def _seam_of(head: nn.Module) -> object:
    reference = vars(head).get(_SEAM)
    return None if reference is None else reference()


def computes_in_fp32(head: nn.Module) -> bool:
    """True for an lm_head that computes with operands in fp32, as TRL's ``cast_lm_head_to_fp32`` makes it."""
    return is_fp32_forward(vars(head).get(_INSTALLED))


def is_fused_by(head: nn.Module, seam: object) -> bool:
    """True if :func:`fuse_head` was called with this ``seam``."""
    return _seam_of(head) is seam


def restore_head(head: nn.Module) -> None:
    """Undoes :func:`fuse_head`."""
    fused = next(cls for cls in type(head).__mro__ if ComputesLoss in cls.__bases__)
    head.__class__ = with_base(type(head), fused, fused.__bases__[1])
    if _INSTALLED in vars(head):
        vars(head)["forward"] = vars(head).pop(_INSTALLED)
    del vars(head)[_SEAM]
