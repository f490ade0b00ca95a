"""Loads DeepSpeed's checkpoints, whose pickles may only name tensors and their metadata: one from an unknown origin
runs no command.

By itself, DeepSpeed reads its files by ``torch.load(weights_only=False)``, which calls whatever a pickle names.
"""

from __future__ import annotations

import glob
import os
import pathlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from liger_dist import LigerDistError

FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def _enum_member(kind: Any, name: str) -> Any:
    """Replaces ``getattr``, which Python 3.11.0 to 3.11.3 use to pickle members of an enum."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    if kind is not ZeroStageEnum:
        raise pickle.UnpicklingError(f"getattr of {kind}")
    return kind[name]


@contextmanager
def deepspeed_names(folder: pathlib.Path) -> Iterator[None]:
    """Lets ``torch.load`` read tensors and the three classes that DeepSpeed stores, and refuses all else, though
    DeepSpeed asks for ``weights_only=False``.

    Raises:
        LigerDistError: a file in ``folder`` asks for something else, or DeepSpeed would read another folder.
    """
    if glob.escape(str(folder)) != str(folder):
        raise LigerDistError(f"DeepSpeed takes the folder {folder} for a pattern; rename it, without any of *?[.")
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    before = os.environ.get(FORCE_WEIGHTS_ONLY)
    os.environ[FORCE_WEIGHTS_ONLY] = "1"
    names: list[Any] = [LossScaler, ZeroStageEnum, fragment_address, (_enum_member, "builtins.getattr")]
    try:
        with torch.serialization.safe_globals(names):
            yield
    except pickle.UnpicklingError as error:
        said = [line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line]
        raise LigerDistError(
            f"a file of {folder} is a pickle that no checkpoint of this program has ({(said or [str(error)])[0]}); it "
            "is not loaded. Find out where the file comes from."
        ) from error
    finally:
        if before is None:
            del os.environ[FORCE_WEIGHTS_ONLY]
        else:
            os.environ[FORCE_WEIGHTS_ONLY] = before
