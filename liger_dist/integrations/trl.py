"""TRL's trainers: ``with fused_heads(): trainer = SFTTrainer(…)``.

TRL 1.x gives its models another lm_head (``add_fused_lm_head``), which is asked for per-token log-probabilities by
``model(..., labels=labels, fused_lm_head=True)``. A wrapped model answers those calls (``fused_head/trl_calls.py``), so
all there is to do is to wrap each model that a trainer gives that head.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

from accelerate.state import AcceleratorState
from torch import nn
from trl.trainer import utils

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.sharding.fsdp2 import LMHead
from liger_dist.wrap import is_wrapped, record_of, unwrap, wrap

from .accelerate import wrap_for

ADD = "add_fused_lm_head"
WITHOUT_A_HEAD = {"cpo": "CPOTrainer", "orpo": "ORPOTrainer", "online_dpo": "OnlineDPOTrainer"}
"""experimental trainers, by their folder, that compute log-probabilities from full logits"""


@contextmanager
def fused_heads(config: WrapConfig | None = None, *, lm_head: LMHead = "gather") -> Iterator[None]:
    """Trainers that are made within (SFT, DPO, KTO, GRPO, RLOO, and of ``trl.experimental`` CPO, ORPO, OnlineDPO) score
    their tokens with this library's lm_head, and so do their reference models, under the trainers' own settings: one
    process, DDP, FSDP1, FSDP2 or DeepSpeed. Models that are wrapped already keep their own config.

    Args:
        lm_head: see :class:`liger_dist.FSDP2`; for FSDP2 settings only.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`; from the trainer's constructor.
    """
    own = utils.add_fused_lm_head
    wraps = partial(_wrap, config=config, lm_head=lm_head)

    @functools.wraps(own)
    def add_fused_lm_head(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        wraps(model)
        own(model, *args, **kwargs)

    _put(add_fused_lm_head, instead_of=own)
    try:
        with ExitStack() as stack:
            for folder, name in WITHOUT_A_HEAD.items():
                trainer = getattr(import_module(f"trl.experimental.{folder}"), name)
                stack.enter_context(_wrapping(trainer, config, lm_head))
            yield
    finally:
        # Also where TRL's modules were first imported within.
        _put(own, instead_of=add_fused_lm_head)


def _wrap(model: nn.Module, *, config: WrapConfig | None, lm_head: LMHead) -> None:
    if is_wrapped(model):
        return
    wrap_for(AcceleratorState(), model, config, lm_head)
    reason = record_of(model).unfused_reason
    if reason is not None:
        unwrap(model)
        raise LigerDistError(
            f"the loss of {type(model).__name__} is not fused: {reason}. Make its trainer outside of fused_heads(); "
            "TRL then scores it with its own head."
        )


@contextmanager
def _wrapping(trainer: Any, config: WrapConfig | None, lm_head: LMHead) -> Iterator[None]:
    """Within, a trainer of this class gets wrapped models. Its constructor copies and shards reference models, so they
    are wrapped before it runs."""
    own = trainer.__init__

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if lm_head != "gather":
            raise LigerDistError(
                f"lm_head is {lm_head!r}, which fused_heads() does not have for {trainer.__name__}; leave it out."
            )
        given = signature(own).bind(self, *args, **kwargs)
        for name in ("model", "ref_model"):
            model = given.arguments.get(name)
            if isinstance(model, str):
                raise LigerDistError(
                    f"{name} is {model!r}, which {trainer.__name__} would load unwrapped; load it and pass the model."
                )
            if isinstance(model, nn.Module) and not is_wrapped(model):
                wrap(model, config=config)
        own(*given.args, **given.kwargs)

    trainer.__init__ = init
    try:
        yield
    finally:
        trainer.__init__ = own


def _put(function: Any, *, instead_of: Any) -> None:
    for name, module in sys.modules.copy().items():
        if name.startswith("trl.") and vars(module).get(ADD) is instead_of:
            setattr(module, ADD, function)
