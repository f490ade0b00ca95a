"""Looks into pickles before a library loads them: a checkpoint that somebody hands over may only name tensors and what
describes them, and runs no command.

torch.distributed.checkpoint reads ``.metadata`` by ``pickle.load``, and DeepSpeed its files with
``torch.load(weights_only=False)``; both would call whatever a pickle names.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from liger_dist import LigerDistError

DCP_METADATA = frozenset(
    {
        "builtins.frozenset",
        "builtins.set",
        "collections.OrderedDict",
        "pathlib.PosixPath",
        "torch.Size",
        "torch.serialization._get_layout",
        *(f"torch.{name}" for name in ("float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool")),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *(
            f"torch.distributed.checkpoint.metadata.{name}"
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
DEEPSPEED = frozenset(
    {
        "builtins.set",
        "collections.OrderedDict",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "torch.Size",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_tensor_v2",
        "torch.device",
        "torch.float32",
        "torch.bfloat16",
        *(f"torch.{name}Storage" for name in ("Float", "BFloat16", "Double", "Half", "Int", "Long", "Byte", "Bool")),
    }
)


def check_dcp(folder: Path) -> None:
    """Checks the metadata of a torch.distributed.checkpoint; its tensors are read with ``weights_only``.

    Raises:
        LigerDistError: it names something that is not on the list.
    """
    metadata = folder / ".metadata"
    _check(metadata, metadata.read_bytes(), DCP_METADATA)


def check_deepspeed(folder: Path) -> None:
    """Checks every file of a DeepSpeed checkpoint that DeepSpeed unpickles.

    Raises:
        LigerDistError: it names something that is not on the list, or is of an older format of torch.
    """
    for file in sorted(folder.rglob("*.pt")):
        check_torch_file(file, DEEPSPEED)


def check_torch_file(file: Path, allowed: frozenset[str]) -> None:
    """Checks what ``torch.load`` unpickles of an archive that ``torch.save`` wrote.

    Raises:
        LigerDistError: as :func:`check_deepspeed`.
    """
    with file.open("rb") as stream:
        magic = stream.read(4)
    # torch.load goes by these bytes, and reads anything else as a bare pickle.
    if magic != b"PK\x03\x04" or not zipfile.is_zipfile(file):
        raise LigerDistError(f"{file} is no archive that torch.save writes; it is not loaded.")
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        pickles = [name for name in names if name.endswith(".pkl")]
        if len(set(names)) != len(names) or [name.rpartition("/")[2] for name in pickles] != ["data.pkl"]:
            raise LigerDistError(f"{file} holds {', '.join(pickles) or 'no pickle'}; expected one data.pkl.")
        _check(file, archive.read(pickles[0]), allowed)


class TensorsOnly(DefaultLoadPlanner):
    """Loads tensors, and refuses items that are pickles: torch would unpickle them without a list."""

    def create_local_plan(self) -> LoadPlan:
        plan: LoadPlan = super().create_local_plan()
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise LigerDistError(f"the checkpoint holds a pickle for {read_item.dest_index.fqn}; expected a tensor.")


class _Inert:
    """Stands for a class or function that a pickle names; takes what it is given and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> _Inert:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __hash__(self) -> int:
        return id(self)

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...

    def add(self, value: Any) -> None: ...


class _Scan(pickle.Unpickler):
    """Unpickles with inert stand-ins: nothing that the pickle names is imported or called."""

    def __init__(self, content: bytes, allowed: frozenset[str]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self._allowed:
            raise _ForbiddenError(f"{module}.{name}")
        return type(name, (_Inert,), {})

    def persistent_load(self, identifier: Any) -> Any:
        return _Inert()


class _ForbiddenError(Exception):
    """A name that is not on the list."""


def _check(file: Path, content: bytes, allowed: frozenset[str]) -> None:
    try:
        _Scan(content, allowed).load()
    except _ForbiddenError as error:
        raise LigerDistError(
            f"{file} is a pickle that asks for {error}, which no checkpoint of this program does; it is not loaded. "
            "Find out where the file comes from."
        ) from error
    except Exception as error:
        raise LigerDistError(f"{file} is no whole pickle ({error!r}); it is not loaded.") from error
