"""TRL's trainers: ``with fused_heads(): trainer = SFTTrainer(…)``.

TRL 1.x gives its models another lm_head (``add_fused_lm_head``), which is asked for per-token log-probabilities by
``model(..., labels=labels, fused_lm_head=True)``. Here a wrapped model answers those calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from trl.trainer import utils
from trl.trainer.utils import FusedCausalLMOutput

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.sharding.fsdp2 import LMHead
from liger_dist.wrap import is_wrapped, record_of, unwrap

from .accelerate import wrap_for

ADD = "add_fused_lm_head"
FLAG = "fused_lm_head"
NAMES = {"log_probs": "log_prob", "entropy": "entropy", "mean_logits": "mean_logit", "is_top1": "is_top1"}
"""TRL's fields, and the outputs of a wrapped model"""


@contextmanager
def fused_heads(config: WrapConfig | None = None, *, lm_head: LMHead = "gather") -> Iterator[None]:
    """Trainers that are made within (SFT, DPO, KTO, GRPO, RLOO) score their tokens with this library's lm_head, and so
    do their reference models, under the trainers' own settings: one process, DDP, FSDP1, FSDP2 or DeepSpeed.

    Args:
        lm_head: see :class:`liger_dist.FSDP2`; for FSDP2 settings only.

    Raises:
        LigerDistError: a trainer asks for what this head does not have, or see :func:`liger_dist.wrap`; from the
            trainer's constructor.
    """
    own = utils.add_fused_lm_head

    def add_fused_lm_head(
        model: nn.Module,
        temperature: float = 1.0,
        cast_lm_head_to_fp32: bool = False,
        outputs: Sequence[str] = ("log_probs",),
    ) -> None:
        if is_wrapped(model):
            raise LigerDistError(
                f"the {type(model).__name__} given to a trainer within fused_heads() is wrapped already; fused_heads() "
                "wraps the trainer's models itself: pass it unwrapped (liger_dist.unwrap)."
            )
        _check(model, cast_lm_head_to_fp32, outputs)
        wrap_for(AcceleratorState(), model, config, lm_head)
        reason = record_of(model).unfused_reason
        if reason is not None:
            unwrap(model)
            raise LigerDistError(
                f"the loss of {type(model).__name__} is not fused: {reason}. Make its trainer outside of "
                "fused_heads(); TRL then scores it with its own head."
            )
        _Scoring(model, temperature, outputs)

    _put(add_fused_lm_head, instead_of=own)
    try:
        yield
    finally:
        # Also where TRL's modules were first imported within.
        _put(own, instead_of=add_fused_lm_head)


def _put(function: Any, *, instead_of: Any) -> None:
    for name, module in sys.modules.copy().items():
        if name.startswith("trl.") and vars(module).get(ADD) is instead_of:
            setattr(module, ADD, function)


def _check(model: nn.Module, cast_lm_head_to_fp32: bool, outputs: Sequence[str]) -> None:
    name = type(model).__name__
    if cast_lm_head_to_fp32:
        raise LigerDistError(
            f"cast_lm_head_to_fp32 is True, which this lm_head of {name} does not do: its products have 16-bit "
            "operands and are accumulated, like the softmax, in fp32. Leave it out."
        )
    unknown = [output for output in outputs if output not in NAMES]
    if unknown:
        raise LigerDistError(
            f"the trainer asks {name} for {unknown[0]!r} (use_weighting, WPO), which this lm_head does not compute; "
            "leave use_weighting out, or make the trainer outside of fused_heads()."
        )


@dataclass(frozen=True)
class _Asked:
    """One call with ``fused_lm_head=True``."""

    mask: Tensor
    is_aligned: bool


_CALLS: ContextVar[tuple[tuple[object, _Asked | None], ...]] = ContextVar("liger_dist_trl_calls", default=())
"""the running calls of this context, each with its :class:`_Scoring`"""


class _Scoring:
    """Translates TRL's calls of a wrapped model, and what it returns."""

    def __init__(self, model: nn.Module, temperature: float, outputs: Sequence[str]) -> None:
        self._temperature, self._fields = temperature, ("log_probs", *(o for o in outputs if o != "log_probs"))
        # Before the hooks of the wrapped model, and after them.
        model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        outer = _CALLS.get()
        _CALLS.set((*outer, (self, None)))
        if FLAG not in kwargs:
            return None
        kwargs = dict(kwargs)
        if not kwargs.pop(FLAG):
            return args, kwargs
        if not is_wrapped(model):
            raise LigerDistError(
                f"{FLAG}=True was given to a {type(model).__name__} that has been unwrapped since its trainer was "
                "made; make the trainer again."
            )
        labels: Any = kwargs.get("labels")
        shifted = kwargs.get("shift_labels")
        if labels is None and shifted is not None:
            kwargs["labels"] = shifted
        elif labels is None:
            raise LigerDistError(f"{FLAG}=True was given to {type(model).__name__} without labels; pass labels.")
        asked = _Asked((labels[:, 1:] if shifted is None else shifted) != -100, shifted is not None)
        _CALLS.set((*outer, (self, asked)))
        config: Any = model.config
        if getattr(config.get_text_config(), "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        kwargs |= {
            "outputs": tuple(NAMES[field] for field in self._fields),
            "differentiable": torch.is_grad_enabled(),
            "use_cache": False,
            "return_dict": True,
        }
        if self._temperature != 1.0:
            kwargs["temperature"] = self._temperature
        return args, kwargs

    def _after(self, model: nn.Module, args: Any, output: Any) -> Any:
        calls = _CALLS.get()
        if not calls or calls[-1][0] is not self:
            return None  # An earlier hook raised before this one ran.
        asked = calls[-1][1]
        _CALLS.set(calls[:-1])
        if asked is None or output is None:
            return None
        fields = {field: getattr(output, NAMES[field]) for field in self._fields}
        return FusedCausalLMOutput(
            loss=output.loss,
            label_mask=asked.mask,
            aux_loss=getattr(output, "aux_loss", None),
            **{field: value if asked.is_aligned else value[:, :-1] for field, value in fields.items()},
        )
