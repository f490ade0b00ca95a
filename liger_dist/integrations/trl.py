"""TRL's trainers: ``with fused_heads(): trainer = SFTTrainer(…)``.

TRL 1.x patches lm_head of its models (``add_fused_lm_head``), and gets per-token log-probabilities by ``model(...,
labels=labels, fused_lm_head=True)``. A wrapped model answers those calls (:mod:`liger_dist.hosts.trl`), so each model
that TRL patches only needs to be wrapped.
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
from trl import SFTTrainer
from trl.trainer import utils

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.record import is_wrapped, record_of
from liger_dist.sharding.fsdp2.strategy import LMHead
from liger_dist.wrap import unwrap

from .accelerate import wrap_for
from .patches import models_wrapped_for, patched, refuse_packing, warn_of_newer
from .trl_distillation import fused_divergences

ADD = "add_fused_lm_head"
WITHOUT_A_HEAD = {"cpo": "CPOTrainer", "orpo": "ORPOTrainer", "online_dpo": "OnlineDPOTrainer"}
"""experimental trainers, by their folder, that compute log-probabilities from full logits"""


@contextmanager
def fused_heads(config: WrapConfig | None = None, *, lm_head: LMHead = "gather") -> Iterator[None]:
    """Patches TRL within the context. Trainers that are built there (SFT, DPO, KTO, GRPO, RLOO, Distillation, and of
    ``trl.experimental`` CPO, ORPO, OnlineDPO, GKD, GOLD) score their tokens with this library's lm_head, and so do
    their reference models and teachers. The trainers' settings may be one process, DDP, FSDP1, FSDP2 or DeepSpeed.
    Models that are wrapped already keep their config.

    Args:
        lm_head: see :class:`liger_dist.FSDP2`; for FSDP2 settings only.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`; from the trainer's constructor.
    """
    original = utils.add_fused_lm_head
    warn_of_newer("trl")
    wraps = partial(_wrap, config=config, lm_head=lm_head)

    @functools.wraps(original)
    def add_fused_lm_head(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        wraps(model)
        original(model, *args, **kwargs)

    _put(add_fused_lm_head, instead_of=original)
    try:
        with ExitStack() as stack:
            stack.enter_context(_packing_checked(SFTTrainer))
            for folder, name in WITHOUT_A_HEAD.items():
                trainer = getattr(import_module(f"trl.experimental.{folder}"), name)
                stack.enter_context(models_wrapped_for(trainer, config, lm_head))
            stack.enter_context(fused_divergences(config, lm_head))
            yield
    finally:
        # Also in modules of TRL that were first imported within the context.
        _put(original, instead_of=add_fused_lm_head)


@contextmanager
def _packing_checked(trainer: Any) -> Iterator[None]:
    """Patches a trainer class within the context to refuse packed rows of models that would mix documents, before it
    reads data; a model that it loads by name after its constructor."""
    original = trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature(original).bind(self, *args, **kwargs).arguments
        model, settings = given.get("model"), given.get("args")
        if isinstance(model, nn.Module) and settings is not None:
            packs = settings.packing and settings.packing_strategy != "wrapped"
            if packs or settings.padding_free:
                refuse_packing(model, "packing" if packs else "padding_free")
        original(self, *args, **kwargs)
        if self.padding_free:
            refuse_packing(self.model, "packing" if self.args.packing else "padding_free")

    with patched(trainer, "__init__", init):
        yield


def _wrap(model: nn.Module, *, config: WrapConfig | None, lm_head: LMHead) -> None:
    if is_wrapped(model):
        return
    wrap_for(AcceleratorState(), model, config, lm_head)
    reason = record_of(model).found.unfused_reason
    if reason is not None:
        unwrap(model)
        raise LigerDistError(
            f"the loss of {type(model).__name__} is not fused: {reason}. Make its trainer outside of fused_heads(); "
            "TRL then scores it with its own head."
        )


def _put(function: Any, *, instead_of: Any) -> None:
    for name, module in sys.modules.copy().items():
        if name.startswith("trl.") and vars(module).get(ADD) is instead_of:
            setattr(module, ADD, function)
