"""Loads and shards a teacher model, and computes the distillation loss of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist import LigerDistError, WrapConfig, distillation_loss, wrap

from .config import TrainConfig
from .distributed import world_size
from .model import check_packing, find_config, has_weights_at, load_pretrained, read_weights, shell, wrap_config

TEACHER_DEFAULTS: dict[str, Any] = {
    "divergence": "forward_kl",
    "hard_weight": 0.0,
    "distillation_beta": 0.5,
    "distillation_temperature": 1.0,
    "compile": False,
    "float8": None,
    "mlp_tile_tokens": None,
}


def load_frozen(config: TrainConfig, model_config: Any, wrapping: WrapConfig | None = None) -> nn.Module:
    """Loads ``--model`` without gradients, in the compute dtype, in evaluation mode; sharded by FSDP2 over all ranks.

    Args:
        wrapping: what the configuration is added to; default: WrapConfig's defaults.
    """
    dtype: torch.dtype = getattr(torch, str(config.dtype))
    # Cast as a whole, its rotary frequencies would be in the compute dtype, too.
    model = shell(config, model_config, dtype).requires_grad_(False).eval()
    torch.manual_seed(config.seed)
    wrapped = wrap(model, "fsdp2" if world_size() > 1 else "none", config=wrap_config(config, wrapping or WrapConfig()))
    if has_weights_at(config.model):
        load_pretrained(wrapped, lambda: read_weights(Path(config.model), None, dtype))
    return wrapped


class Teacher:
    """A model to distil from, under every strategy of the student."""

    def __init__(self, config: TrainConfig, vocab_size: int) -> None:
        self._model = load_frozen(config_of_teacher(config), find_teacher_config(config, vocab_size))
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


def check_teacher(config: TrainConfig, vocab_size: int) -> Any:
    """Finds the teacher's config, and refuses a teacher that would mix packed documents.

    Raises:
        LigerDistError: see :func:`find_teacher_config` and :func:`.model.check_packing`.
    """
    of_teacher, found = config_of_teacher(config), find_teacher_config(config, vocab_size)
    check_packing(of_teacher, shell(of_teacher, found))
    return found


def find_teacher_config(config: TrainConfig, vocab_size: int) -> Any:
    """Finds the teacher's config, as :func:`find_config` does the model's.

    Raises:
        LigerDistError: there is none, or it does not fit the tokenizer or the sequence length.
    """
    try:
        return find_config(config_of_teacher(config), vocab_size)
    except LigerDistError as error:
        raise LigerDistError(f"--teacher {config.teacher}: {error}") from error
