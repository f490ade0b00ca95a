"""Whether a head that "fsdp2" shards is gathered, or its rows stay where they are and the tokens travel."""

from __future__ import annotations

import socket
from dataclasses import replace

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .config import WrapConfig
from .errors import LigerDistError
from .patching.adapted import is_adapted
from .patching.plan import LossPlan
from .patching.structure import Structure, active_head
from .sharding.head_cost import HeadShapes, head_costs
from .sharding.mesh import TENSOR_PARALLEL, Mesh
from .sharding.nodes import gathered_digests, neighbours_on_a_node
from .sharding.split_head import embedding_objection


def check_head_options(strategy: str, mesh: Mesh | None, config: WrapConfig) -> None:
    """Refuses options that do not go with rows that stay.

    Raises:
        LigerDistError: with the way out.
    """
    if config.head_shard_size is not None and config.head != "vocab_parallel":
        raise LigerDistError(
            f"head_shard_size is {config.head_shard_size} but head is {config.head!r}; it is for head='vocab_parallel'."
        )
    if config.head != "vocab_parallel":
        return
    objection = _option_objection(strategy, mesh, config)
    if objection is not None:
        raise LigerDistError(f"head is 'vocab_parallel' but {objection}.")
    axis = _shard_axis(mesh)
    if config.head_shard_size is not None and axis % config.head_shard_size != 0:
        raise LigerDistError(
            f"head_shard_size is {config.head_shard_size}; expected a divisor of the shard axis, {axis}."
        )


def check_head_of(model: nn.Module, structure: Structure, config: WrapConfig) -> None:
    """Refuses a model whose rows cannot stay.

    Raises:
        LigerDistError: with the way out.
    """
    objection = _model_objection(model, structure) if config.head == "vocab_parallel" else None
    if objection is not None:
        raise LigerDistError(f"head is 'vocab_parallel' but {objection}.")


def choose_head(
    model: nn.Module, structure: Structure, plan: LossPlan | None, *, mesh: DeviceMesh, config: WrapConfig
) -> tuple[WrapConfig, str]:
    """The choice for ``head="auto"`` under "fsdp2", and why: rows stay where they can, on one node, and where by their
    shapes less is sent and less is held. A collective in which all processes compare what they would choose.

    Args:
        mesh: FSDP2's own, with a tensor-parallel axis if there is one.

    Raises:
        LigerDistError: on every process alike, where they would choose differently.
    """
    if config.head == "auto":
        why = _against_rows(model, structure, plan, mesh, config)
        choice = "vocab_parallel: it sends less and holds less" if why is None else f"gather: {why}"
    else:
        choice = f"{config.head}, as asked for"
    everyone = gathered_digests(socket.gethostname(), choice)
    if len({theirs for _, theirs in everyone}) > 1:
        answers: list[str] = [""] * len(everyone)
        dist.all_gather_object(answers, choice)
        choices = "; ".join(f"rank {rank} {answer}" for rank, answer in enumerate(answers))
        raise LigerDistError(
            f"the processes would reach the output embedding in different ways: {choices}. Give all of them the same "
            "model and WrapConfig (head, expected_tokens, memory_budget, param_dtype)."
        )
    if config.head != "auto":
        return config, choice
    if why is None and neighbours_on_a_node(mesh, [host for host, _ in everyone]) != mesh.shape[-1]:
        why = "the shard axis goes beyond a node (vocab_parallel keeps replicas of the rows there)"
        choice = f"gather: {why}"
    return replace(config, head="gather" if why else "vocab_parallel"), choice


def _against_rows(
    model: nn.Module, structure: Structure, plan: LossPlan | None, mesh: DeviceMesh, config: WrapConfig
) -> str | None:
    """By what this process knows."""
    if plan is None:
        return "the loss is not fused"
    objection = _option_objection("fsdp2", mesh, config) or _model_objection(model, structure)
    if objection is not None:
        return objection
    size, head = mesh.shape[-1], structure.head
    if size == 1:
        return "the shard axis has one process"
    shapes = HeadShapes(
        tokens=config.expected_tokens,
        hidden_size=head.in_features,
        vocab_size=head.out_features,
        processes=size,
        tied=structure.tied,
        trains=head.weight.requires_grad,
        itemsize=(config.param_dtype or head.weight.dtype).itemsize,
        memory_budget=config.memory_budget,
    )
    costs = head_costs(shapes)
    if costs["vocab_parallel"].sent_bytes >= costs["gather"].sent_bytes:
        return "vocab_parallel would send more"
    if costs["vocab_parallel"].held_bytes >= costs["gather"].held_bytes:
        return "vocab_parallel would hold more"
    return None


def _option_objection(strategy: str, mesh: Mesh | None, config: WrapConfig) -> str | None:
    if strategy != "fsdp2":
        return f"strategy={strategy!r} does not split its rows so; use strategy='fsdp2'"
    if isinstance(mesh, DeviceMesh) and TENSOR_PARALLEL in (mesh.mesh_dim_names or ()):
        return "the mesh has a tensor-parallel axis, which splits its rows already; leave head='auto'"
    if config.cpu_offload:
        return "cpu_offload is True, and rows are computed with where they lie; leave one of them out"
    return None


def _model_objection(model: nn.Module, structure: Structure) -> str | None:
    if structure.unfusable is not None:
        return structure.unfusable
    if is_adapted(active_head(model.get_submodule(structure.head_name))):
        return (
            "an adapter (LoRA) is on the output embedding; leave the head out of its target_modules, or use "
            "head='gather'"
        )
    for module in structure.tied_to:
        objection = embedding_objection(module)
        if objection is not None:
            return f"what shares its weight {objection}; use head='gather'"
    return None


def _shard_axis(mesh: Mesh | None) -> int:
    return dist.get_world_size() if mesh is None else tuple(mesh.shape if isinstance(mesh, DeviceMesh) else mesh)[-1]
