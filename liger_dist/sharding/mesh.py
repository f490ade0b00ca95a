"""The shape of a mesh, checked before any collective, and its axes by what they are for."""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from liger_dist.errors import LigerDistError

Mesh = DeviceMesh | tuple[int, ...]
TENSOR_PARALLEL = "tp"
"""the name that tells a tensor-parallel axis from a data-parallel one"""


def check_mesh(mesh: Mesh | None, world_size: int, *, strategy: str) -> None:
    """Refuses a mesh that the strategy cannot use. No collectives.

    Raises:
        LigerDistError: axes that the strategy does not have, or sizes that do not multiply to ``world_size``.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh | tuple | list):
        raise LigerDistError(f"the mesh is {mesh!r}; expected a DeviceMesh or its shape, such as ({world_size},).")
    shape = _shape(mesh, world_size)
    if any(not isinstance(size, int) or size < 1 for size in shape):
        raise LigerDistError(f"the mesh has shape {shape}; expected sizes above 0.")
    names = (isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names) or ()
    if strategy == "tp":
        if len(shape) != 1:
            raise LigerDistError(
                f"the mesh has shape {shape} but strategy='tp' has one axis; with strategy='fsdp2' an axis named "
                f"{TENSOR_PARALLEL!r} is tensor-parallel and the others are data-parallel."
            )
    else:
        is_tensor_parallel = [name == TENSOR_PARALLEL for name in names]
        if any(is_tensor_parallel) and (strategy != "fsdp2" or not is_tensor_parallel[-1] or len(shape) == 1):
            raise LigerDistError(
                f"the mesh has axes {names}; an axis named {TENSOR_PARALLEL!r} is for strategy='fsdp2' and comes last, "
                "behind the data-parallel ones; for tensor parallelism alone use strategy='tp'."
            )
        if len(shape) - sum(is_tensor_parallel) not in (1, 2):
            raise LigerDistError(
                f"the mesh has shape {shape}; expected (shard,) or (replicate, shard) of sizes above 0"
                + (f", and an axis named {TENSOR_PARALLEL!r} behind them." if strategy == "fsdp2" else ".")
            )
    if isinstance(mesh, DeviceMesh) and len(shape) == 2 and not names:
        raise LigerDistError(
            f"the mesh of shape {tuple(shape)} has no names for its axes, which torch's sharding asks for; make it "
            f"with mesh_dim_names=('replicate', 'shard'), or give its shape."
        )
    if strategy == "fsdp1" and len(shape) == 2 and shape[0] > 1 and shape[1] == 1:
        raise LigerDistError(
            f"the mesh has shape {tuple(shape)}: FSDP1 averages no gradients over replicas of one process each; use "
            "strategy='ddp', or 'fsdp2' with this mesh."
        )
    if strategy == "tp" and math.prod(shape) < world_size and world_size % math.prod(shape) == 0:
        raise LigerDistError(
            f"strategy='tp' was given a mesh of {math.prod(shape)} of {world_size} processes, and nobody would average "
            "the gradients of the others; use strategy='fsdp2' with a mesh of all processes whose last axis is named "
            f"{TENSOR_PARALLEL!r}."
        )
    if math.prod(shape) != world_size:
        raise LigerDistError(
            f"a mesh of shape {shape} needs {math.prod(shape)} processes but {world_size} are running; choose sizes "
            f"whose product is {world_size}, or start {math.prod(shape)} processes."
        )


def make_mesh(mesh: Mesh | None, world_size: int, *, device_type: str, strategy: str) -> DeviceMesh:
    """The mesh itself, made when only its shape was given."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    shape = _shape(mesh, world_size)
    names = (TENSOR_PARALLEL,) if strategy == "tp" else ("replicate", "shard")[-len(shape) :]
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def split_axes(mesh: DeviceMesh, *, strategy: str) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The data-parallel axes, and the tensor-parallel one behind them; None for what there is not."""
    names = mesh.mesh_dim_names or ()
    if strategy == "tp":
        return None, mesh
    if TENSOR_PARALLEL not in names:
        return mesh, None
    return mesh[names[:-1]], mesh[TENSOR_PARALLEL]


def _shape(mesh: Mesh | None, world_size: int) -> tuple[int, ...]:
    return (world_size,) if mesh is None else tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)
