"""Lets torch.compile recompute transposed float8 weights in the backward instead of saving them.

[Note: float8 weights in compiled layers]
The backward multiplies by a float8 weight in another memory layout. torch's partitioner counts parameters as free to
keep, but not tensors inside a tensor subclass: its indices of parameters date from before subclasses are unwrapped. So
it kept copies in the other layout instead of the weights, 172 MiB for a layer of Llama 8B's shape, and FSDP2 does not
reshard copies. Here float8 inputs of a graph are free to keep too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files

_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz})


class KeepFloat8Weights(CustomPartitionerFn):
    """Partitioner that counts float8 inputs as free to keep; see [Note: float8 weights in compiled layers]."""

    def __call__(
        self, gm: Any, joint_inputs: Any, *, static_lifetime_input_indices: list[int] | None = None, **options: Any
    ) -> tuple[Any, Any]:
        inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
        weights = {i for i, node in inputs if getattr(node.meta.get("val"), "dtype", None) in _FLOAT8}
        free = sorted(weights.union(static_lifetime_input_indices or ()))
        return min_cut_rematerialization_partition(gm, joint_inputs, static_lifetime_input_indices=free, **options)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))
