"""LLaMA-Factory: ``torchrun --nproc-per-node 8 -m liger_dist.integrations.llamafactory train.yaml`` instead of
``llamafactory-cli train train.yaml``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from llamafactory.model import loader
from llamafactory.train import tuner
from llamafactory.train.pt.trainer import CustomTrainer
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.record import inner_model, record_of
from liger_dist.sharding.fsdp2.strategy import LMHead

from .patches import models_wrapped_for, patched, warn_of_newer
from .trainer import fuse

TOKEN_LOSSES = {"pt": CustomTrainer, "sft": CustomSeq2SeqTrainer}
PREFERENCES = {"dpo": "CustomDPOTrainer", "kto": "CustomKTOTrainer"}
OTHER_STAGES = ("rm", "ppo")


def run_exp(
    args: dict[str, Any] | None = None,
    callbacks: list[Any] | None = None,
    *,
    lm_head: LMHead = "gather",
    **options: Any,
) -> None:
    """Runs ``llamafactory.train.tuner.run_exp`` under :func:`fused_trainers`; ``options`` are fields of
    :class:`liger_dist.WrapConfig`."""
    with fused_trainers(WrapConfig(**options), lm_head=lm_head):
        tuner.run_exp(args, callbacks)


@contextmanager
def fused_trainers(config: WrapConfig | None = None, *, lm_head: LMHead = "gather") -> Iterator[None]:
    """Patches LLaMA-Factory's trainers within the context: their models compute the loss fused (stages pt and sft), or
    the log-probabilities of policy and reference (dpo with all its losses, kto), under DDP, FSDP1, FSDP2 or DeepSpeed.

    Args:
        lm_head: see :class:`liger_dist.FSDP2`; for FSDP2 settings, and token losses, only.

    Raises:
        LigerDistError: another stage, or Liger's loss; before a model is loaded.
    """
    with ExitStack() as stack:
        for trainer in TOKEN_LOSSES.values():
            stack.enter_context(patched(trainer, "__init__", _fusing(trainer.__init__, config, lm_head)))
        for stage in PREFERENCES:
            run = _wrapping(stage, getattr(tuner, f"run_{stage}"), config, lm_head)
            stack.enter_context(patched(tuner, f"run_{stage}", run))
        for stage in OTHER_STAGES:
            stack.enter_context(patched(tuner, f"run_{stage}", functools.partial(_refuse, stage)))
        original = loader.apply_liger_kernel
        stack.enter_context(patched(loader, "apply_liger_kernel", functools.partial(_without_liger, original)))
        warn_of_newer("llamafactory")
        yield


def _fusing(original: Callable[..., None], config: WrapConfig | None, lm_head: LMHead) -> Callable[..., None]:
    @functools.wraps(original)
    def make_and_fuse(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        fuse(self, config, lm_head=lm_head)
        if getattr(self.data_collator, "block_diag_attn", False) and _separates_documents(self.model):
            self.data_collator = _without_dense_mask(self.data_collator)

    return make_and_fuse


def _wrapping(
    stage: str, original: Callable[..., None], config: WrapConfig | None, lm_head: LMHead
) -> Callable[..., None]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> None:
        # LLaMA-Factory imports it here too: not every release of TRL has the names that its module needs.
        trainer = getattr(import_module(f"llamafactory.train.{stage}.trainer"), PREFERENCES[stage])
        with models_wrapped_for(trainer, config, lm_head):
            original(*args, **kwargs)

    return run


def _separates_documents(model: Any) -> bool:
    return record_of(inner_model(model)).found.packing.objection() is None


def _without_dense_mask(collator: Any) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """Wraps the collator of ``neat_packing`` to return positions that restart at each document instead of a 4-D
    mask."""
    collator.block_diag_attn = False

    @functools.wraps(collator.__call__)
    def collate(features: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = collator(features)
        # LLaMA-Factory numbers the documents of a row: 1, 1, 1, 2, 2, 3; padding is 0.
        document = batch.pop("attention_mask")
        begins = document.diff(dim=1, prepend=document[:, :1] - 1) != 0
        position = torch.arange(document.shape[1]).expand_as(document)
        batch["position_ids"] = position - torch.where(begins, position, 0).cummax(1).values
        return batch

    return collate


def _refuse(stage: str, *_: Any) -> None:
    raise LigerDistError(
        f"stage is {stage!r}, which needs a value for each token; expected one of "
        f"{', '.join((*TOKEN_LOSSES, *PREFERENCES))}. Run it with llamafactory-cli."
    )


def _without_liger(original: Callable[..., None], config: Any, model_args: Any, *args: Any, **kwargs: Any) -> None:
    if model_args.enable_liger_kernel:
        raise LigerDistError(
            "enable_liger_kernel is true and replaces the model's forward, with its loss; leave it out."
        )
    original(config, model_args, *args, **kwargs)


if __name__ == "__main__":
    run_exp()
