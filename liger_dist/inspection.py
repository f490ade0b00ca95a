"""What :func:`liger_dist.wrap` finds out about a model before it changes anything, agreed by all ranks."""

from __future__ import annotations

import logging
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import NoneType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .config import LOGITS, WrapConfig
from .errors import LigerDistError
from .fused_head.call import check_outputs
from .fused_head.probe import probe_recipe
from .fused_head.recipe import LossRecipe, NotFusableError
from .fused_layers.packed_calls import find_packing
from .losses.spec import as_output_names
from .model.compile import compiled_call
from .model.peft import base_model_of, loss_objection
from .model.stages import Stage, stage_of
from .model.structure import Structure, find_structure, full_shape, initializer_of
from .record import Findings, is_wrapped
from .sequences import check_sequence_parallel
from .sharding import as_strategy, has_collectives
from .sharding.base import Initializer, Strategy, Wrapper
from .sharding.failed_sharding import check_not_failed
from .sharding.fsdp2.loading import refuse_loaded_shards
from .sharding.fsdp2.strategy import FSDP2
from .sharding.fsdp_options import FullySharded
from .sharding.materialize import is_meta
from .sharding.mesh import Mesh
from .sharding.process_groups import gathered, sentences_of_all_ranks
from .sharding.reduction_checks import refuse_late_adapters
from .sharding.sequence_parallel import check_losses
from .sharding.single import Auto, LoadedByHost
from .trials.isolated import torch_defaults

PIPELINE_MODULE = ("deepspeed.runtime.pipe.module", "PipelineModule")
IN_LAST_STAGE = "{} of a pipeline, whose loss is in the last one"
_LOGGER = logging.getLogger(__name__)
_COMPARED = (bool, int, float, str, torch.dtype, NoneType)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where the values of a model's parameters come from."""

    device: str
    """"meta" or "real", or "host" where a host loads them"""
    parameters: str
    """number of trained parameters, and a checksum of names, shapes and dtypes of all"""
    initialize: Initializer | None
    """None for a model with storage"""
    is_rank_0: bool = False
    """True if rank 0 has values and the model of all other ranks is on the meta device"""


Inspected = tuple[Strategy, Findings, Origin]


def inspect_model(outer: nn.Module, strategy: str | Strategy, mesh: Mesh | None, config: WrapConfig) -> Inspected:
    """Checks and probes a model; changes nothing. Where all ranks are about to call collectives, they exchange the
    result first: a refusal of one rank is raised on all.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`: of this rank, or that of another one; or the ranks have different
            settings.
    """
    if not (dist.is_initialized() and has_collectives(strategy)):
        return _inspect(outer, strategy, mesh, config)
    found, refusal = None, None
    try:
        found = _inspect(outer, strategy, mesh, config)
    except Exception as error:
        refusal = error
    settings = (None, "") if found is None else (stage_of(base_model_of(outer)), _settings(*found, config))
    device = "" if found is None else found[2].device
    all_ranks = gathered((None if refusal is None else str(refusal), settings, device))
    if refusal is not None:
        raise refusal
    refusals = dict.fromkeys(sentence for sentence, _, _ in all_ranks if sentence is not None)
    if refusals:
        raise LigerDistError(f"another rank refused to wrap its model: {' '.join(refusals)}")
    assert found is not None
    for place in dict.fromkeys(place for _, (place, _), _ in all_ranks):
        # Ranks of other stages of a pipeline have other models.
        different = dict.fromkeys(other for _, (there, other), _ in all_ranks if there == place)
        if len(different) > 1:
            raise LigerDistError(
                f"ranks call wrap with different settings: {'; '.join(different)}. Give all of them the same model, "
                "strategy and WrapConfig."
            )
    chosen, findings, origin = found
    return chosen, findings, _with_values_of_rank_0(origin, [device for *_, device in all_ranks])


@contextmanager
def refused_by_all_ranks(strategy: Strategy) -> Iterator[None]:
    """Raises a refusal of one rank on all of them, where they are about to call collectives. One collective itself."""
    refusal = None
    try:
        yield
    except Exception as error:
        refusal = error
    if dist.is_initialized() and strategy.has_collectives:
        refusals = sentences_of_all_ranks([] if refusal is None else [str(refusal)])
        if refusals and refusal is None:
            raise LigerDistError(f"another rank refused to wrap its model: {' '.join(refusals)}")
    if refusal is not None:
        raise refusal


def _inspect(outer: nn.Module, strategy: str | Strategy, mesh: Mesh | None, config: WrapConfig) -> Inspected:
    _check_arguments(outer, config)
    chosen = as_strategy(strategy, mesh)
    model = base_model_of(outer)
    stage = stage_of(model)
    check_stage(outer, model, chosen, config)
    chosen.check(config, world_size=_number_of_ranks(chosen, stage))
    if is_wrapped(outer):
        raise LigerDistError(f"this {type(model).__name__} is wrapped already; call liger_dist.unwrap(model) first.")
    if isinstance(model, Wrapper):
        raise LigerDistError(
            f"the model is inside a {type(model).__name__} already; wrap the model itself, with strategy='auto' before "
            "the wrapper is made, or with 'ddp' or 'fsdp1', which make it."
        )
    check_not_failed(model)
    refuse_loaded_shards(model, chosen.name)
    refuse_late_adapters(outer, model)
    outputs = as_output_names(config.outputs)
    check_outputs(outputs)
    structure = find_structure(model, fused_loss=config.fused_loss and (stage is None or stage.is_last))
    if config.mlp_tile_tokens is not None and any(compiled_call(layer) is not None for layer in structure.layers):
        raise LigerDistError(
            f"mlp_tile_tokens is {config.mlp_tile_tokens} but the layers are compiled, which computes the MLP at once; "
            "leave it out, or do not compile them."
        )
    on_meta = is_meta(outer) and not isinstance(chosen, LoadedByHost)
    if on_meta and len(list(outer.parameters())) > len(list(model.parameters())):
        raise LigerDistError(
            f"this {type(outer).__name__} has further parameters on the meta device, where PEFT's initial values are "
            "lost; make the adapter of a model on a real device."
        )
    unfused = None if config.fused_loss else "fused_loss=False"
    unfused = unfused if stage is None or stage.is_last else IN_LAST_STAGE.format(stage)
    chosen.check_model(outer, model, structure, unfused=unfused, on_meta=on_meta)
    if shards_sequences(chosen):
        check_sequence_parallel(outer, model, structure.decoder, structure.layers)
    initialize = initializer_of(model) if on_meta else None
    recipe, reason = _probe(outer, model, structure, config)
    if stage is not None:
        check_loss_of_stage(stage, recipe, reason)
    elif reason is not None and config.fused_loss:
        chosen.check_model(outer, model, structure, unfused=reason, on_meta=on_meta)
        if not shards_sequences(chosen):
            _check_unfused(model, config, outputs, reason)
    structure = structure.with_calls(repeats_head=recipe is not None and recipe.repeats_head)
    if shards_sequences(chosen):
        check_losses(model, reason, repeats_head=structure.repeats_head)
    packing = find_packing(model, structure, varlen_attention=config.varlen_attention)
    is_recurrent = packing.recurrent is not None
    chosen, not_compiled = _decide_compilation(chosen, structure, config, is_recurrent=is_recurrent)
    findings = Findings(
        structure=structure,
        recipe=recipe,
        unfused_reason=reason,
        packing=packing,
        not_compiled=not_compiled,
        rows=chosen.rows(outer, structure) if isinstance(chosen, FullySharded) else {},
    )
    device = "host" if isinstance(chosen, LoadedByHost) else "meta" if on_meta else "real"
    return chosen, findings, Origin(device=device, parameters=_parameters_of(outer), initialize=initialize)


def _number_of_ranks(strategy: Strategy, stage: Stage | None) -> int | None:
    """Returns the number of ranks that shard the model; None without a process group."""
    if stage is not None and isinstance(strategy, FSDP2) and isinstance(strategy.mesh, DeviceMesh):
        return strategy.mesh.size()
    return dist.get_world_size() if dist.is_initialized() else None


def check_stage(outer: nn.Module, model: nn.Module, strategy: Strategy, config: WrapConfig) -> None:
    """Refuses what a stage of a pipeline cannot have; passes any other model.

    Raises:
        LigerDistError: with the way out.
    """
    stage = stage_of(model)
    if stage is None:
        return
    if outer is not model or any(parameter.is_meta for parameter in model.parameters()):
        where = "on the meta device" if outer is model else f"inside a {type(outer).__name__}"
        raise LigerDistError(
            f"{stage} is {where}; expected the stage itself, with its values. Adapters are not supported in pipelines."
        )
    if not isinstance(strategy, FSDP2) and type(strategy) is not Auto:
        raise LigerDistError(
            f"{stage} was wrapped with strategy={strategy.name!r}; expected 'auto', which shards nothing, or "
            "FSDP2(mesh=...) with the mesh of the ranks that have the stage."
        )
    if isinstance(strategy, FSDP2):
        if not isinstance(strategy.mesh, DeviceMesh):
            raise LigerDistError(
                f"{stage} was wrapped with FSDP2(mesh={strategy.mesh!r}); expected a DeviceMesh of the ranks that have "
                "this stage: mesh=init_device_mesh(..., mesh_dim_names=('pp', 'dp'))['dp']."
            )
        if strategy.lm_head != "gather" or strategy.shards_sequences or strategy.expert_parallel > 1:
            what = "an axis 'sp'" if strategy.shards_sequences else f"lm_head={strategy.lm_head!r}"
            if strategy.expert_parallel > 1:
                what = f"expert_parallel={strategy.expert_parallel}"
            raise LigerDistError(
                f"{stage} was wrapped with FSDP2 and {what}, whose collectives a schedule does not know; leave it out, "
                "or shard the rows of lm_head by a last mesh axis named 'tp'."
            )
    if not config.fused_loss or config.outputs:
        given = f"outputs={config.outputs!r}" if config.outputs else "fused_loss=False"
        raise LigerDistError(f"{stage} was wrapped with WrapConfig({given}); leave it out: a pipeline has a loss only.")


def check_loss_of_stage(stage: Stage, recipe: LossRecipe | None, reason: str | None) -> None:
    """Refuses a last stage whose loss cannot be a part of a mean over all micro-batches.

    Raises:
        LigerDistError: it is not fused, or ignores ``num_items_in_batch``.
    """
    if stage.is_last and recipe is None:
        raise LigerDistError(f"the loss of {stage} is not fused: {reason}; a pipeline of this model is not supported.")
    if recipe is not None and not recipe.takes_num_items:
        raise LigerDistError(
            f"the forward of {stage} ignores num_items_in_batch, so that its loss would be a mean over one "
            "micro-batch; a pipeline of this model is not supported."
        )


def _parameters_of(outer: nn.Module) -> str:
    """Describes the parameters of a model, for a comparison over the ranks."""
    named = sorted((name, tuple(full_shape(p)), str(p.dtype), p.requires_grad) for name, p in outer.named_parameters())
    trained = sum(is_trained for *_, is_trained in named)
    return f"{trained} (checksum {zlib.crc32(repr(named).encode()):08x})"


COMPILED_GAIN = (
    "compile_layers is False; with 'auto' a step of 0.6B to 1B parameters on two H200 takes 0.64 to 0.92 of its time "
    "(docs/strategy_options.md#compiled-layers)"
)


def _decide_compilation(
    strategy: Strategy, structure: Structure, config: WrapConfig, *, is_recurrent: bool
) -> tuple[Strategy, str | None]:
    """Decides ``compile_layers="auto"``; returns the strategy with True or False, and why layers are not compiled that
    could be."""
    if not isinstance(strategy, FullySharded) or strategy.compiles_layers:
        return strategy, None
    reason = strategy.reason_against_compiling(structure, config, is_recurrent=is_recurrent)
    if strategy.compile_layers == "auto":
        return replace(strategy, compile_layers=reason is None), reason
    if reason is not None:
        return strategy, None
    if not dist.is_initialized() or dist.get_rank() == 0:
        _LOGGER.info(COMPILED_GAIN)
    return strategy, COMPILED_GAIN


def _check_arguments(outer: object, config: object) -> None:
    if not isinstance(outer, nn.Module):
        raise LigerDistError(
            f"model is {outer!r}; expected a torch.nn.Module, such as AutoModelForCausalLM.from_pretrained(...) builds."
        )
    if not isinstance(config, WrapConfig):
        raise LigerDistError(f"config is {config!r}; expected a liger_dist.WrapConfig(...).")
    if any((cls.__module__, cls.__name__) == PIPELINE_MODULE for cls in type(outer).__mro__):
        raise LigerDistError(
            "the model is a PipelineModule of DeepSpeed, whose layers are functions of a list without a lm_head that "
            "computes its own loss; use torch.distributed.pipelining with stages of liger_dist.pipeline_stage "
            "(docs/pipelines.md), or strategy='deepspeed' with ZeRO."
        )
    if "_orig_mod" in outer._modules:
        raise LigerDistError(
            f"the model is a {type(outer).__name__} that torch.compile has made; wrap the model first and compile the "
            "result: torch.compile(liger_dist.wrap(model)). model.compile() and compiled layers may come before."
        )


def shards_sequences(strategy: Strategy) -> bool:
    """True if the tokens of a sequence are on several ranks."""
    return isinstance(strategy, FSDP2) and strategy.shards_sequences


def _check_unfused(model: nn.Module, config: WrapConfig, outputs: tuple[str, ...], reason: str) -> None:
    """Refuses options that a loss which is not fused does not have."""
    name = type(model).__name__
    if config.token_mean == "global":
        raise LigerDistError(
            f"token_mean is 'global' but the loss of {name} is not fused ({reason}) and keeps its own mean; leave it "
            "out, and pass num_items_in_batch to the model."
        )
    if outputs not in ((), (LOGITS,)):
        raise LigerDistError(
            f"outputs is {outputs} but the loss of {name} is not fused ({reason}), and only a fused one has them; "
            "leave them out."
        )


def _probe(
    outer: nn.Module, model: nn.Module, structure: Structure, config: WrapConfig
) -> tuple[LossRecipe | None, str | None]:
    stage = stage_of(model)
    if stage is not None and not stage.is_last:
        return None, IN_LAST_STAGE.format(stage)
    if not config.fused_loss:
        return None, "WrapConfig(fused_loss=False)"
    try:
        unfusable = structure.unfusable or loss_objection(outer)
        if unfusable is not None:
            raise NotFusableError(unfusable)
        with torch_defaults():
            return probe_recipe(model, structure), None
    except NotFusableError as error:
        warnings.warn(
            f"liger_dist leaves the loss of {type(model).__name__} unfused: {error}. The model trains as it did "
            "before; liger_dist.explain(model) says so as well.",
            stacklevel=5,  # the caller of wrap
        )
        return None, str(error)


def _with_values_of_rank_0(found: Origin, devices: Sequence[str]) -> Origin:
    """Decides whose values a model gets that is on the meta device on some ranks alone.

    Raises:
        LigerDistError: rank 0 has no values, or another rank has some.
    """
    if len(set(devices)) == 1:
        return found
    on_meta = [rank for rank, device in enumerate(devices) if device == "meta"]
    if len(on_meta) < len(devices) - 1 or 0 in on_meta:
        raise LigerDistError(
            f"the model is on the meta device on the ranks {on_meta} alone; expected all ranks, none, or all but rank "
            "0, whose values the others then get."
        )
    return replace(found, is_rank_0=True)


def _settings(strategy: Strategy, found: Findings, origin: Origin, config: WrapConfig) -> str:
    """Returns what has to be the same on all ranks."""
    # Other options, such as functions and policies, have no value to compare; budgets may differ.
    options = {name: value for name, value in getattr(strategy, "__dict__", {}).items() if isinstance(value, _COMPARED)}
    return (
        f"{strategy.name} {options}, token_mean={config.token_mean!r}, fused: {found.unfused_reason or 'yes'}, "
        f"trained parameters: {origin.parameters}"
    )
