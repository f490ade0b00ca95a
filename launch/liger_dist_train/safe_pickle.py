"""Loads checkpoints whose pickles may only name tensors and their metadata: one from an unknown origin runs no command.

By themselves, torch.distributed.checkpoint reads ``.metadata`` by ``pickle.load`` and DeepSpeed its files by
``torch.load(weights_only=False)``, and both call whatever a pickle names.
"""

from __future__ import annotations

import glob
import os
import pathlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from liger_dist import LigerDistError

DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


def _enum_member(kind: Any, name: str) -> Any:
    """Replaces ``getattr``, which Python 3.11.0 to 3.11.3 use to pickle members of an enum."""
    if kind not in _enums():
        raise pickle.UnpicklingError(f"getattr of {kind}")
    return kind[name]


def _enums() -> list[Any]:
    """Lists the enums that checkpoints hold; DeepSpeed's where it was imported."""
    zero = sys.modules.get("deepspeed.runtime.zero.config")
    return [metadata._MEM_FORMAT_ENCODING, *([] if zero is None else [zero.ZeroStageEnum])]


NAMES: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _enum_member,
    ("pathlib", "PosixPath"): pathlib.PosixPath,
    ("pathlib._local", "PosixPath"): pathlib.PosixPath,
    ("torch", "Size"): torch.Size,
    **{("torch", name): getattr(torch, name) for name in DTYPES},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    **{
        ("torch.distributed.checkpoint.metadata", name): getattr(metadata, name)
        for name in (
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
}
"""all that ``.metadata`` of our checkpoints names; no pickled objects (BytesStorageMetadata) among them"""


class TensorReader(FileSystemReader):
    """Reads the metadata of a torch.distributed.checkpoint with the names of :data:`NAMES` alone."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        """Raises:
        LigerDistError: it names something else, or tensors outside of the checkpoint.
        """
        file = pathlib.Path(self.path) / ".metadata"
        with file.open("rb") as stream:
            found: metadata.Metadata = _Unpickler(stream, file).load()
        for info in (found.storage_data or {}).values():
            if pathlib.Path(info.relative_path).name != info.relative_path:
                raise LigerDistError(f"{file} names the file {info.relative_path}; expected one in its own folder.")
        return found


class TensorPlanner(DefaultLoadPlanner):
    """Loads tensors, and refuses items that are pickled objects."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Raises:
        LigerDistError: always.
        """
        raise LigerDistError(
            f"the checkpoint holds a pickled object for {read_item.dest_index.fqn}; expected a tensor."
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: Any, file: pathlib.Path) -> None:
        super().__init__(stream)
        self._file = file

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NAMES:
            raise LigerDistError(
                f"{self._file} is a pickle that asks for {module}.{name}, which no checkpoint of this program does; it "
                "is not loaded. Find out where the file comes from."
            )
        return NAMES[module, name]


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
