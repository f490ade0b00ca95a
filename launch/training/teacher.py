"""Loads and shards a teacher model, and computes the distillation loss of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist import LigerDistError, WrapConfig, distillation_loss, wrap

from .config import TrainConfig
from .model import find_config, has_weights_at, load_pretrained, shell, wrap_config
from .parallel_dims import ParallelDims

TEACHER_DEFAULTS: dict[str, Any] = {
    "divergence": "forward_kl",
    "hard_weight": 0.0,
    "distillation_beta": 0.5,
    "distillation_temperature": 1.0,
    "compile": False,
    "mlp_tile_tokens": None,
}


class Teacher:
    """A model without gradients, in the compute dtype; sharded by FSDP2 over all ranks, under every strategy of the
    student."""

    def __init__(self, config: TrainConfig, dims: ParallelDims, vocab_size: int) -> None:
        of_teacher = config_of_teacher(config)
        dtype: torch.dtype = getattr(torch, config.dtype)
        model = shell(of_teacher, find_teacher_config(config, vocab_size))
        model.to(dtype).requires_grad_(False).eval()
        torch.manual_seed(config.seed)
        wrapping = wrap_config(of_teacher, WrapConfig())
        self._model = wrap(model, "fsdp2" if dims.world_size > 1 else "none", config=wrapping)
        if has_weights_at(of_teacher.model):
            load_pretrained(self._model, Path(of_teacher.model), dtype)
        self._options: dict[str, Any] = {
            "divergence": config.divergence,
            "temperature": config.distillation_temperature,
            "hard_weight": config.hard_weight,
        }
        if config.divergence == "jsd":
            self._options["beta"] = config.distillation_beta

    def loss(self, student: nn.Module, batch: dict[str, Tensor], num_items: Tensor) -> Tensor:
        """Computes this rank's part of the mean over ``num_items`` tokens."""
        given: dict[str, Any] = batch | self._options | {"num_items_in_batch": num_items, "use_cache": False}
        return distillation_loss(student, self._model, **given).loss


def config_of_teacher(config: TrainConfig) -> TrainConfig:
    """The configuration as if the teacher were the model."""
    assert config.teacher is not None
    return replace(config, model=config.teacher, teacher=None, **TEACHER_DEFAULTS)


def find_teacher_config(config: TrainConfig, vocab_size: int) -> Any:
    """Finds the teacher's config, as :func:`find_config` does the model's.

    Raises:
        LigerDistError: there is none, or it does not fit the tokenizer or the sequence length.
    """
    try:
        return find_config(config_of_teacher(config), vocab_size)
    except LigerDistError as error:
        raise LigerDistError(f"--teacher {config.teacher}: {error}") from error
