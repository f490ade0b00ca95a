"""The sizes of data, shard, replica and tensor parallelism, from the configuration and the world size alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from liger_dist import LigerDistError

from .config import TrainConfig

SIZES = ("dp_replicate", "dp_shard", "tp", "sp")
OPTIONS = {"fsdp1": ("dp_replicate", "dp_shard"), "fsdp2": SIZES, "tp": ("tp",)}
"""the sizes that a strategy has; all remaining strategies have none"""


@dataclass(frozen=True)
class ParallelDims:
    """Sizes of the mesh. Ranks of one tensor-parallel or sequence-parallel group read the same data; data ranks read
    different data."""

    strategy: str
    world_size: int
    replicate: int
    shard: int
    tensor_parallel: int
    sequence_parallel: int = 1
    expert_parallel: int = 1
    """ranks that share the experts of a layer; they read different data"""

    @property
    def same_data(self) -> int:
        """Number of ranks that read the same data."""
        return self.tensor_parallel * self.sequence_parallel

    @property
    def data_size(self) -> int:
        """Number of data ranks."""
        return self.world_size // self.same_data

    @property
    def parameter_shards(self) -> int:
        """Number of ranks that share a replica of the parameters."""
        return self.shard * self.sequence_parallel

    def data_rank(self, rank: int) -> int:
        """Returns the data rank of a rank."""
        return rank // self.same_data

    def global_batch_size(self, config: TrainConfig) -> int:
        """Computes the sequences of one optimizer step.

        Raises:
            LigerDistError: fewer than there are data ranks.
        """
        tokens = config.global_batch_tokens
        given = config.global_batch_size if tokens is None else tokens // config.sequence_length
        found = config.batch_size * self.data_size if given is None else given
        if found < self.data_size:
            raise LigerDistError(
                f"one optimizer step is of {found} sequences (--global_batch_size or --global_batch_tokens) but "
                f"{self.data_size} ranks read different ones; expected at least one for each."
            )
        return found

    def micro_batches(self, config: TrainConfig, global_batch_size: int) -> int:
        """Computes the micro-batches of one optimizer step on each rank; the last ones may have fewer sequences."""
        return -(-global_batch_size // (self.data_size * config.batch_size))

    def holds_unsharded_gradients(self, config: TrainConfig) -> bool:
        """True if FSDP reduces the gradients of a step in its last micro-batch alone: by ``accumulate_unsharded``, and
        under FSDP1 with CPU offload, which does not add gradients that it has moved to the CPU."""
        if self.strategy not in ("fsdp1", "fsdp2") or self.micro_batches(config, self.global_batch_size(config)) == 1:
            return False
        return config.accumulate_unsharded or (self.strategy == "fsdp1" and config.cpu_offload)

    def mesh(self, device_type: str) -> Any:
        """Makes the mesh that ``liger_dist.wrap`` takes."""
        if self.strategy == "tp":
            return (self.tensor_parallel,)
        if self.strategy not in OPTIONS:
            return None
        sizes = {
            "replicate": self.replicate,
            "shard": self.shard,
            "tp": self.tensor_parallel,
            "sp": self.sequence_parallel,
        }
        axes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        if self.same_data == 1:
            return tuple(axes.values())
        return _device_mesh(device_type, tuple(axes.values()), tuple(axes))

    def __str__(self) -> str:
        if self.strategy not in OPTIONS:
            return f"{self.strategy} on {self.world_size}"
        sizes = {
            "replicas": self.replicate,
            "shards": self.shard,
            "tensor-parallel": self.tensor_parallel,
            "sequence-parallel": self.sequence_parallel,
        }
        experts = f", experts on {self.expert_parallel}" if self.expert_parallel > 1 else ""
        return f"{self.strategy} on {' x '.join(f'{n} {name}' for name, n in sizes.items() if n > 1) or 1}{experts}"


@cache
def _device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """One mesh, with one set of process groups, for the model and the data."""
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def parallel_dims_of(config: TrainConfig, world_size: int) -> ParallelDims:
    """Raises:
    LigerDistError: sizes that the strategy does not have, or that do not multiply to ``world_size``.
    """
    strategy = config.strategy or ("fsdp2" if world_size > 1 else "none")
    given = {name: getattr(config, name) for name in SIZES}
    for name, size in given.items():
        if size is not None and name not in OPTIONS.get(strategy, ()):
            raise LigerDistError(
                f"--{name} is {size} but the strategy is {strategy}, which has no such size; expected one of "
                f"{', '.join(s for s, names in OPTIONS.items() if name in names)}, or leave it out."
            )
    if strategy == "none" and world_size > 1:
        raise LigerDistError(
            f"--strategy is none but {world_size} processes are running; choose another, or start one process."
        )
    replicate, tensor_parallel = given["dp_replicate"] or 1, given["tp"] or (world_size if strategy == "tp" else 1)
    sequence_parallel = given["sp"] or 1
    if tensor_parallel > 1 and sequence_parallel > 1:
        raise LigerDistError(
            f"--tp is {tensor_parallel} and --sp {sequence_parallel}; expected one of them: the mesh has one axis of "
            "ranks that read the same data."
        )
    same_data = tensor_parallel * sequence_parallel
    shard = given["dp_shard"] or (max(1, world_size // (replicate * same_data)) if "fsdp" in strategy else 1)
    if strategy in OPTIONS and replicate * shard * same_data != world_size:
        sizes = {"dp_replicate": replicate, "dp_shard": shard, "tp": tensor_parallel, "sp": sequence_parallel}
        shown = " x ".join(f"--{name} {size}" for name, size in sizes.items() if name in OPTIONS[strategy])
        raise LigerDistError(
            f"{shown} needs {replicate * shard * same_data} processes but {world_size} are running; choose sizes "
            f"whose product is {world_size}, or start other processes."
        )
    expert_parallel = _expert_parallel(config, strategy, shard * sequence_parallel)
    return ParallelDims(strategy, world_size, replicate, shard, tensor_parallel, sequence_parallel, expert_parallel)


def _expert_parallel(config: TrainConfig, strategy: str, shard: int) -> int:
    """Raises:
    LigerDistError: ``--ep`` does not fit the strategy, or the ranks ``shard`` that share the parameters.
    """
    size = config.ep or 1
    if size > 1 and strategy != "fsdp2":
        raise LigerDistError(f"--ep is {size} with --strategy {strategy}; expected fsdp2.")
    if shard % size:
        raise LigerDistError(
            f"--ep is {size} but {shard} ranks share the parameters; choose one of their divisors, or start other "
            "processes."
        )
    return size
