"""Device meshes: their shape, checked before any collective, and the meaning of their axes."""

from __future__ import annotations

import math

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from liger_dist.errors import LigerDistError

Mesh = DeviceMesh | tuple[int, ...]
TENSOR_PARALLEL = "tp"
"""name of a tensor-parallel axis; all further axes are data-parallel"""
SEQUENCE = "sp"
"""name of an axis over which sequences are sharded; parameters are sharded over it too"""


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, or the tensor itself; call it without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_process_group(strategy: str, world_size: int | None) -> int:
    """Returns the number of ranks.

    Raises:
        LigerDistError: there is no process group.
    """
    if world_size is None:
        raise LigerDistError(
            f"strategy={strategy!r} needs a process group and none is initialised; start the program with torchrun "
            "and call torch.distributed.init_process_group(), or use strategy='none'."
        )
    return world_size


def check_mesh(mesh: Mesh | None, world_size: int, *, strategy: str) -> None:
    """Refuses a mesh that the strategy cannot use. No collectives.

    Raises:
        LigerDistError: axes that the strategy does not have, or sizes that do not multiply to ``world_size``.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh | tuple | list):
        raise LigerDistError(f"the mesh is {mesh!r}; expected a DeviceMesh or its shape, such as ({world_size},).")
    shape = shape_of(mesh, world_size)
    if any(not isinstance(size, int) or size < 1 for size in shape):
        raise LigerDistError(f"the mesh has shape {shape}; expected sizes above 0.")
    names = (isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names) or ()
    _check_axes(shape, names, strategy=strategy)
    if isinstance(mesh, DeviceMesh) and len(shape) == 2 and not names:
        raise LigerDistError(
            f"the mesh of shape {shape} has no names for its axes, which torch's sharding needs; make it with "
            "mesh_dim_names=('replicate', 'shard'), or give its shape."
        )
    if strategy == "fsdp1" and len(shape) == 2 and shape[0] > 1 and shape[1] == 1:
        raise LigerDistError(
            f"the mesh has shape {shape}: FSDP1 does not average gradients over replicas of one rank (shard size 1); "
            "use strategy='ddp', or 'fsdp2' with this mesh."
        )
    if strategy == "tp" and math.prod(shape) < world_size and world_size % math.prod(shape) == 0:
        raise LigerDistError(
            f"strategy='tp' was given a mesh of {math.prod(shape)} of {world_size} ranks, and nothing would average "
            "the gradients of its replicas; use strategy='fsdp2' with a mesh of all ranks whose last axis is named "
            f"{TENSOR_PARALLEL!r}."
        )
    if math.prod(shape) != world_size:
        raise LigerDistError(
            f"a mesh of shape {shape} needs {math.prod(shape)} ranks but {world_size} are running; choose sizes whose "
            f"product is {world_size}, or start {math.prod(shape)} ranks."
        )


def _check_axes(shape: tuple[int, ...], names: tuple[str, ...], *, strategy: str) -> None:
    if strategy == "tp":
        if len(shape) != 1:
            raise LigerDistError(
                f"the mesh has shape {shape} but strategy='tp' has one axis; with strategy='fsdp2' an axis named "
                f"{TENSOR_PARALLEL!r} is tensor-parallel and the others are data-parallel."
            )
        return
    is_tensor_parallel = [name == TENSOR_PARALLEL for name in names]
    if any(is_tensor_parallel) and (strategy != "fsdp2" or not is_tensor_parallel[-1] or len(shape) == 1):
        raise LigerDistError(
            f"the mesh has axes {names}; an axis named {TENSOR_PARALLEL!r} is for strategy='fsdp2' and comes last, "
            "after the data-parallel ones; for tensor parallelism alone use strategy='tp'."
        )
    if SEQUENCE in names:
        _check_sequence_axis(names, strategy=strategy)
        return
    if len(shape) - sum(is_tensor_parallel) not in (1, 2):
        raise LigerDistError(
            f"the mesh has shape {shape}; expected (shard,) or (replicate, shard) of sizes above 0"
            + (f", and an axis named {TENSOR_PARALLEL!r} after them." if strategy == "fsdp2" else ".")
        )


def _check_sequence_axis(names: tuple[str, ...], *, strategy: str) -> None:
    if strategy != "fsdp2" or names[-1] != SEQUENCE or TENSOR_PARALLEL in names or len(names) > 3:
        raise LigerDistError(
            f"strategy={strategy!r} was given a mesh with the axes {names}; an axis named {SEQUENCE!r} is for "
            "strategy='fsdp2', comes last, and has at most the axes (replicate, shard) before it, none of them "
            f"{TENSOR_PARALLEL!r}."
        )


def make_mesh(mesh: Mesh | None, world_size: int, *, device_type: str, names: tuple[str, ...]) -> DeviceMesh:
    """Returns the mesh itself, or builds it from its shape with the last of ``names``."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    shape = shape_of(mesh, world_size)
    return init_device_mesh(device_type, shape, mesh_dim_names=names[-len(shape) :])


def split_axes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Splits the mesh into the data-parallel axes and the tensor-parallel one after them (None without one)."""
    names = mesh.mesh_dim_names or ()
    if TENSOR_PARALLEL not in names:
        return mesh, None
    return mesh[names[:-1]], mesh[TENSOR_PARALLEL]


def fold_sequence_axis(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh over which parameters are sharded: an axis "sp" becomes a part of the shard axis before it."""
    if SEQUENCE not in (mesh.mesh_dim_names or ()):
        return mesh
    ranks, names = ranks_of_parameters(mesh)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)


def ranks_of_parameters(mesh: DeviceMesh) -> tuple[Tensor, tuple[str, ...]]:
    """Returns the ranks of a mesh and the names of its axes: "shard", "replicate" before it and "tp" after it, where
    the mesh has them; an axis "sp" is a part of "shard"."""
    names, ranks = mesh.mesh_dim_names or (), mesh.mesh
    if SEQUENCE in names and ranks.ndim > 1:
        ranks = ranks.flatten(-2)
    last = tuple(name for name in names if name == TENSOR_PARALLEL)
    first = ("replicate", "shard")[len(last) - ranks.ndim :]
    return ranks, (*first, *last)


def num_shards(mesh: Mesh | None, world_size: int) -> int:
    """Returns the number of ranks over which data parallelism shards a parameter."""
    shape, names = shape_of(mesh, world_size), (isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names) or ()
    if TENSOR_PARALLEL in names:
        shape = shape[:-1]
    return math.prod(shape[-2:]) if SEQUENCE in names else shape[-1]


def shape_of(mesh: Mesh | None, world_size: int) -> tuple[int, ...]:
    """Returns the shape of a mesh; one axis of all ranks for None."""
    return (world_size,) if mesh is None else tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)
