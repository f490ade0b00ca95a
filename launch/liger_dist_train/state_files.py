"""The state of torch's strategies as safetensors: each rank writes the shards that it holds, any ranks read them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from liger_dist import LigerDistError

from .distributed import checkpoint_group, world_size

FORMAT = "safetensors of torch.distributed.checkpoint"
FILE_SIZE = 2**28
"""bytes of a rank's state in one file, which torch holds in memory once more as it writes it"""
PARTS = ("codes", "scale")
"""of torchao's states in 8 bits, a tensor subclass; its third one is a constant"""
BLOCK_SIZE = 256
"""of AdamW8bit: so many codes have one scale"""


def save_state(state: dict[str, Any], folder: Path, *, in_background: bool) -> Future[Any] | None:
    """Starts to write nested dicts of tensors, which may change once this returns. None where they are written."""
    found = {name: part for key, value in _named(state) for name, part in _parts(key, value).items()}
    files, size, places = {}, 0, set()
    for name, value in found.items():
        local = _local(value)
        is_shared = local.is_cpu and local.numel() > 0 and local.data_ptr() in places
        if is_shared or not local.is_contiguous():
            # Safetensors refuses memory that has two names, as tied weights do, and values that are not in its order.
            found[name] = value.clone(memory_format=torch.contiguous_format)
        places.add(local.data_ptr())
        # Copies are written once, by ranks in turn: as many bytes on each rank as if they were sharded.
        files[name] = 1 + size // (FILE_SIZE * world_size())
        size += value.numel() * value.element_size()
    options: dict[str, Any] = {
        "storage_writer": HuggingFaceStorageWriter(str(folder), files, save_distributed=True),
        "no_dist": not dist.is_initialized(),
    }
    if not in_background:
        state_dict_saver.save(found, **options)
        return None
    # Another process group than that of the training, whose collectives run at the same time.
    writing = state_dict_saver.async_save(found, process_group=checkpoint_group(), **options)
    assert isinstance(writing, Future)
    return writing


def load_state(state: dict[str, Any], folder: Path) -> None:
    """Restores nested dicts of tensors in place. States in 8 bits are read as fp32 and the other way round: torchao
    chooses by the size of a shard, which depends on the number of ranks.

    Raises:
        LigerDistError: a part of a tensor is in no file, or shards cut through the blocks of 8-bit states.
    """
    reader = HuggingFaceStorageReader(str(folder))
    # The headers of all files, which torch would read again.
    reader.read_metadata = cache(reader.read_metadata)  # type: ignore[method-assign]
    stored: dict[str, Any] = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Any] = {}
    read: list[tuple[Tensor, Tensor]] = []
    for name, value in _named(state):
        local, is_stored = _local(value), f"{name}.{PARTS[0]}" in stored
        like = local if is_stored == _is_in_8_bits(local) else _of_other_kind(name, local)
        parts = _parts(name, value if like is local else _placed_as(value, like))
        wanted |= parts
        if _is_in_8_bits(like):
            # Copies where parameters are offloaded to the CPU.
            read += [(getattr(like, part), _local(parts[f"{name}.{part}"])) for part in PARTS]
        if like is not local:
            read.append((local, like))
    for name in wanted.keys() & stored.keys():
        # Torch leaves what no file has as it was.
        if sum(chunk.sizes.numel() for chunk in stored[name].chunks) != stored[name].size.numel():
            raise LigerDistError(f"the files in {folder} lack a part of {name}; move it away to continue from another.")
    state_dict_loader.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    for local, found in read:
        local.copy_(found)


def _named(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _named(value, f"{prefix}{key}.")
        else:
            # Torch would put a pickle of anything else before the tensors of a file.
            assert isinstance(value, Tensor), f"{prefix}{key} is {type(value)}"
            yield f"{prefix}{key}", value


def _parts(name: str, value: Tensor) -> dict[str, Tensor]:
    """Takes a state in 8 bits apart: a code for each number, and a scale for each block of them, in the same order.
    Both are sharded alike, as all shards are of rows and of one size."""
    local = _local(value)
    if not _is_in_8_bits(local):
        return {name: value}
    return {f"{name}.{part}": _placed_as(value, getattr(local, part)) for part in PARTS}


def _is_in_8_bits(local: Tensor) -> bool:
    return hasattr(local, PARTS[0])


def _of_other_kind(name: str, local: Tensor) -> Any:
    if _is_in_8_bits(local):
        return torch.zeros(local.shape, dtype=local.dtype, device=local.device)
    if local.numel() % BLOCK_SIZE:
        raise LigerDistError(
            f"the checkpoint has {name} in blocks of 8-bit states, which shards of {list(local.shape)} cut through; "
            "resume with fewer ranks."
        )
    from torchao.optim.subclass_8bit import OptimState8bit

    is_signed = name.endswith(".exp_avg")
    return OptimState8bit.zeros(local.shape, is_signed, BLOCK_SIZE, local.device, local.dtype)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _placed_as(value: Tensor, local: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return local
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False)
