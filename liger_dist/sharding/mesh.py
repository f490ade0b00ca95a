"""The shape of a data-parallel mesh, checked before any collective."""

from __future__ import annotations

import math

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from liger_dist.errors import LigerDistError

Mesh = DeviceMesh | tuple[int, ...]


def mesh_shape(mesh: Mesh | None, world_size: int) -> tuple[int, ...]:
    """``(shard,)`` or ``(replicate, shard)``; all processes in one shard group for None.

    Raises:
        LigerDistError: another number of axes, or sizes that do not multiply to ``world_size``.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh | tuple | list):
        raise LigerDistError(f"the mesh is {mesh!r}; expected a DeviceMesh or its shape, such as ({world_size},).")
    shape = (world_size,) if mesh is None else tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)
    if len(shape) not in (1, 2) or any(not isinstance(size, int) or size < 1 for size in shape):
        raise LigerDistError(f"the mesh has shape {shape}; expected (shard,) or (replicate, shard) of sizes above 0.")
    if math.prod(shape) != world_size:
        raise LigerDistError(
            f"a mesh of shape {shape} needs {math.prod(shape)} processes but {world_size} are running; choose sizes "
            f"whose product is {world_size}, or start {math.prod(shape)} processes."
        )
    return shape


def make_mesh(mesh: Mesh | None, world_size: int, device_type: str) -> DeviceMesh:
    """The mesh itself, made when only its shape was given."""
    shape = mesh_shape(mesh, world_size)
    if isinstance(mesh, DeviceMesh):
        return mesh
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
