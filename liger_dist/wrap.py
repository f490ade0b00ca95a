"""The verbs wrap and unwrap: check, probe, fuse, shard."""

from __future__ import annotations

import functools
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import NoneType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.hooks import RemovableHandle

from liger_dist.trials.isolated import torch_defaults

from .config import LOGITS, WrapConfig
from .errors import LigerDistError
from .fused_head.call import check_outputs
from .fused_head.fused_model import restore_model, swap_model
from .fused_head.model_loss import FULL_LOGITS, FusedLoss
from .fused_head.probe import probe_recipe
from .fused_head.recipe import LossRecipe, NotFusableError
from .fused_head.wrapper_redirect import WrapperRedirect
from .fused_layers import LayerReport, refuse_merged_weights, restore_layers, swap_layers
from .fused_layers.attention_selection import AttentionSelection, select_attention
from .fused_layers.packed_calls import PackedCalls, find_packing
from .fused_layers.recurrent import RECURRENT
from .fused_layers.swap import suspended_forwards
from .hosts import HOSTS
from .losses.spec import as_output_names
from .model.compile import compiled_call
from .model.peft import base_model_of, own_loss
from .model.quantized import keep_order_of_bytes
from .model.structure import Structure, find_structure, full_shape, initializer_of
from .sequences import check_sequence_parallel, guard_decoder
from .sharding import as_strategy, encoders, has_collectives, resharding
from .sharding.accelerate import mark_sharded, unmark_sharded
from .sharding.base import Initializer, Strategy, Wrapper
from .sharding.fsdp2.loading import refuse_loaded_shards
from .sharding.fsdp2.strategy import FSDP2
from .sharding.fsdp_options import FullySharded
from .sharding.half_sharded import check_not_failed, refuse_half_sharded, storage_state
from .sharding.materialize import is_meta, values_of_rank_0
from .sharding.mesh import Mesh
from .sharding.process_groups import gathered
from .sharding.sequence_parallel import check_losses, detach
from .sharding.single import Auto, LoadedByHost
from .sharding.unreduced import (
    AVERAGING,
    allow_unreduced,
    refuse_adapters_later,
    refuse_unreduced,
    refuse_unreduced_later,
)
from .sharding.vocab_parallel import release_communicators

_RECORD = "_liger_dist"
_COMPARED = (bool, int, float, str, torch.dtype, NoneType)


@dataclass(frozen=True, kw_only=True)
class Wrapped:
    """What :func:`wrap` did to a model; kept on the instance."""

    structure: Structure
    strategy: Strategy
    config: WrapConfig
    loss: FusedLoss
    recipe: LossRecipe | None
    """None if the loss is not fused"""
    unfused_reason: str | None
    layers: LayerReport
    attention: AttentionSelection
    packing: PackedCalls
    """how packed documents are kept apart"""
    not_compiled: str | None
    """why ``compile_layers="auto"`` compiles no layers"""
    frozen: str | None
    """what frozen parameters cost under FSDP; None without any"""
    hooks: tuple[RemovableHandle, ...]
    """of the decoder: of packed calls and recurrent layers; on a mesh with an axis "sp" one that refuses calls with
    whole sequences"""
    owner: str
    """id of this ``wrap`` call; ``unwrap`` restores only the layers swapped under it"""


def wrap(
    model: nn.Module, strategy: str | Strategy = "auto", *, mesh: Mesh | None = None, config: WrapConfig | None = None
) -> nn.Module:
    """Makes ``model`` compute its loss fused, and shards it if the strategy does.

    The model is changed in place, once, and keeps its parameter names. A model on the meta device gets storage and
    initial values by its own rule, layer by layer, from rank 0's random numbers. "fsdp2" and "tp" shard it before that;
    under "fsdp1" and "deepspeed" every rank holds the full model for a moment, which very large models avoid by "fsdp2"
    or by being built under ``deepspeed.zero.Init``. If only rank 0's model is on a real device, all ranks get its
    values. Other threads may run other models meanwhile, and not this one.

    Args:
        model: a Hugging Face causal language model, or a ``PeftModel`` of one.
        strategy: a name, or an object with options such as ``FSDP2(param_dtype=torch.bfloat16)``.

            - "none": fuses only, for one process.
            - "auto": fuses only; another framework shards the model afterwards, before the first forward.
            - "deepspeed": fuses only; the model is ready for ``deepspeed.initialize``, at any ZeRO stage.
            - "ddp", "fsdp1", "fsdp2": replicated or sharded by torch. A loss asked of the model inside DDP or FSDP1 is
              sent through the wrapper.
            - "tp": the rows of lm_head are sharded over all ranks, which see the same tokens; the layers stay full, or
              keep the plan that the model was loaded with. Rank 0's values count. Torch's optimizers do not mix
              DTensors with other tensors in one foreach update: give the DTensor parameters a separate group, or
              ``foreach=False``.
        mesh: shorthand for the option ``mesh`` of "fsdp1", "fsdp2" and "tp" given by name: a DeviceMesh or its shape,
            ``(shard,)`` or ``(replicate, shard)``; all ranks in one shard group by default. A last axis named "tp" is
            tensor-parallel under "fsdp2".
        config: what is fused; see :class:`WrapConfig`.

    Returns:
        ``model`` itself, or for "ddp" and "fsdp1" the wrapper around it.

    Raises:
        LigerDistError: unknown strategy, wrapped already, no lm_head, a mesh or options that do not fit. Nothing has
            been changed then, and under the strategies of torch every rank raises: the ranks exchange their refusals
            before any other collective.
    """
    config, outer, model = WrapConfig() if config is None else config, model, base_model_of(model)
    chosen, found = _agreed(strategy, config, functools.partial(_inspect, outer, strategy, mesh, config))
    if _shards_sequences(chosen):
        # The tokens of a sequence are on several ranks, so that a mean over one of them would be of a part.
        config = replace(config, token_mean="global")
    with ExitStack() as undo:
        record = _fuse(outer, model, chosen, found, config, undo)
        keep_order_of_bytes(model, undo)
        undo.push(functools.partial(refuse_half_sharded, model, storage_state(model)))
        if found.takes_rank_0:
            found = replace(found, initialize=values_of_rank_0(model, undo))
        wrapped = chosen.shard(outer, model, found.structure, initialize=found.initialize, undo=undo)
        if record.recipe is not None:
            record.loss.head.install_hook(model)
            if isinstance(wrapped, Wrapper):
                record.loss.wrapper_redirect = WrapperRedirect(wrapped)
        if isinstance(chosen, AVERAGING):
            refuse_unreduced(wrapped, chosen.name)
        undo.pop_all()
    if isinstance(chosen, AVERAGING):
        refuse_unreduced_later(wrapped, outer, model, chosen.name)
    elif isinstance(chosen, Auto):
        refuse_adapters_later(wrapped, outer, model)
    decoder = found.structure.decoder
    resharding.install(wrapped, outer, model, decoder, may_shard_later=isinstance(chosen, Auto))
    if chosen.shards_parameters:
        mark_sharded(wrapped, chosen.name)
    return wrapped


@dataclass(frozen=True)
class _Inspected:
    """What :func:`wrap` reads from a model before it changes anything."""

    structure: Structure
    initialize: Initializer | None
    """None for a model with storage"""
    recipe: LossRecipe | None
    unfused_reason: str | None
    packing: PackedCalls
    not_compiled: str | None
    """why ``compile_layers="auto"`` compiles no layers; None where it does, or is not asked"""
    frozen: str | None
    """what frozen parameters cost under FSDP; None without any"""
    parameters: str
    """number of trained parameters, and a checksum of names, shapes and dtypes of all"""
    placement: str
    """device of the parameters: "meta" or "real", or "host" where a host loads them"""
    takes_rank_0: bool = False
    """True if rank 0 has values and the model of all other ranks is on the meta device"""


def _inspect(
    outer: nn.Module, strategy: str | Strategy, mesh: Mesh | None, config: WrapConfig
) -> tuple[Strategy, _Inspected]:
    """Checks and probes; changes nothing.

    Raises:
        LigerDistError: see :func:`wrap`.
    """
    _check_arguments(outer, config)
    chosen = as_strategy(strategy, mesh)
    chosen.check(config, world_size=dist.get_world_size() if dist.is_initialized() else None)
    model = base_model_of(outer)
    if is_wrapped(outer):
        raise LigerDistError(f"this {type(model).__name__} is wrapped already; call liger_dist.unwrap(model) first.")
    if isinstance(model, Wrapper):
        raise LigerDistError(
            f"the model is inside a {type(model).__name__} already; wrap the model itself, with strategy='auto' before "
            "the wrapper is made, or with 'ddp' or 'fsdp1', which make it."
        )
    check_not_failed(model)
    refuse_loaded_shards(model, chosen.name)
    outputs = as_output_names(config.outputs)
    check_outputs(outputs)
    structure = find_structure(model, fused_loss=config.fused_loss)
    if config.mlp_tile_tokens is not None and any(compiled_call(layer) is not None for layer in structure.layers):
        raise LigerDistError(
            f"mlp_tile_tokens is {config.mlp_tile_tokens} but the layers are compiled, which computes the MLP at once; "
            "leave it out, or do not compile them."
        )
    on_meta = is_meta(outer) and not isinstance(chosen, LoadedByHost)
    if on_meta and len(list(outer.parameters())) > len(list(model.parameters())):
        raise LigerDistError(
            f"this {type(outer).__name__} has parameters of its own on the meta device, where PEFT's initial values "
            "are lost; make the adapter of a model on a real device."
        )
    unfused = None if config.fused_loss else "fused_loss=False"
    chosen.check_model(outer, model, structure, unfused=unfused, on_meta=on_meta)
    if _shards_sequences(chosen):
        check_sequence_parallel(outer, model, structure.decoder, structure.layers)
    initialize = initializer_of(model) if on_meta else None
    recipe, reason = _probe(outer, model, structure, config)
    if reason is not None and config.fused_loss:
        chosen.check_model(outer, model, structure, unfused=reason, on_meta=on_meta)
        if not _shards_sequences(chosen):
            _check_unfused(model, config, outputs, reason)
    structure = structure.with_calls(repeats_head=recipe is not None and recipe.repeats_head)
    if _shards_sequences(chosen):
        check_losses(model, reason, repeats_head=structure.repeats_head)
    packing = find_packing(model, structure, varlen_attention=config.varlen_attention)
    is_recurrent = packing.recurrent is not None
    chosen, not_compiled = _decide_compilation(chosen, structure, config, is_recurrent=is_recurrent)
    frozen = chosen.cost_of_frozen(outer) if isinstance(chosen, FullySharded) else None
    placement = "host" if isinstance(chosen, LoadedByHost) else "meta" if on_meta else "real"
    found = _Inspected(
        structure, initialize, recipe, reason, packing, not_compiled, frozen, _parameters_of(outer), placement
    )
    return chosen, found


def _parameters_of(outer: nn.Module) -> str:
    """Describes the parameters of a model, for a comparison over the ranks."""
    named = sorted((name, tuple(full_shape(p)), str(p.dtype), p.requires_grad) for name, p in outer.named_parameters())
    trained = sum(is_trained for *_, is_trained in named)
    return f"{trained} (checksum {zlib.crc32(repr(named).encode()):08x})"


def _decide_compilation(
    strategy: Strategy, structure: Structure, config: WrapConfig, *, is_recurrent: bool
) -> tuple[Strategy, str | None]:
    """Decides ``compile_layers="auto"``; returns the strategy with True or False, and the reason for False."""
    if not isinstance(strategy, FullySharded) or strategy.compile_layers != "auto":
        return strategy, None
    reason = strategy.reason_against_compiling(structure, config, is_recurrent=is_recurrent)
    return replace(strategy, compile_layers=reason is None), reason


def _check_arguments(outer: object, config: object) -> None:
    if not isinstance(outer, nn.Module):
        raise LigerDistError(
            f"model is {outer!r}; expected a torch.nn.Module, such as AutoModelForCausalLM.from_pretrained(...) builds."
        )
    if not isinstance(config, WrapConfig):
        raise LigerDistError(f"config is {config!r}; expected a liger_dist.WrapConfig(...).")
    if "_orig_mod" in outer._modules:
        raise LigerDistError(
            f"the model is a {type(outer).__name__} that torch.compile has made; wrap the model first and compile the "
            "result: torch.compile(liger_dist.wrap(model)). model.compile() and compiled layers may come before."
        )


def _shards_sequences(strategy: Strategy) -> bool:
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
    if not config.fused_loss:
        return None, "WrapConfig(fused_loss=False)"
    try:
        unfusable = structure.unfusable or own_loss(outer)
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


def _agreed(
    strategy: str | Strategy, config: WrapConfig, inspect: Callable[[], tuple[Strategy, _Inspected]]
) -> tuple[Strategy, _Inspected]:
    """The result of ``inspect``. Where all ranks are about to call collectives, they exchange it first: a refusal of
    one rank is raised on all.

    Raises:
        LigerDistError: of this rank, or that of another one; or the ranks have different settings.
    """
    if not (dist.is_initialized() and has_collectives(strategy)):
        return inspect()
    found, refusal = None, None
    try:
        found = inspect()
    except Exception as error:
        refusal = error
    settings = "" if found is None else _settings(*found, config)
    placement = "" if found is None else found[1].placement
    findings = gathered((None if refusal is None else str(refusal), settings, placement))
    if refusal is not None:
        raise refusal
    refusals = dict.fromkeys(sentence for sentence, _, _ in findings if sentence is not None)
    if refusals:
        raise LigerDistError(f"another rank refused to wrap its model: {' '.join(refusals)}")
    assert found is not None
    different = dict.fromkeys(settings for _, settings, _ in findings)
    if len(different) > 1:
        raise LigerDistError(
            f"ranks call wrap with different settings: {'; '.join(different)}. Give all of them the same model, "
            "strategy and WrapConfig."
        )
    return found[0], _with_values_of_rank_0(found[1], [placement for *_, placement in findings])


def _with_values_of_rank_0(found: _Inspected, placements: Sequence[str]) -> _Inspected:
    """Decides whose values a model gets that is on the meta device on some ranks alone.

    Raises:
        LigerDistError: rank 0 has no values, or another rank has some.
    """
    if len(set(placements)) == 1:
        return found
    on_meta = [rank for rank, placement in enumerate(placements) if placement == "meta"]
    if len(on_meta) < len(placements) - 1 or 0 in on_meta:
        raise LigerDistError(
            f"the model is on the meta device on the ranks {on_meta} alone; expected all ranks, none, or all but rank "
            "0, whose values the others then get."
        )
    return replace(found, takes_rank_0=True)


def _settings(strategy: Strategy, found: _Inspected, config: WrapConfig) -> str:
    """What has to be the same on all ranks."""
    # Other options, such as functions and policies, have no value to compare; budgets may differ.
    options = {name: value for name, value in getattr(strategy, "__dict__", {}).items() if isinstance(value, _COMPARED)}
    return (
        f"{strategy.name} {options}, token_mean={config.token_mean!r}, fused: {found.unfused_reason or 'yes'}, "
        f"trained parameters: {found.parameters}"
    )


def _fuse(
    outer: nn.Module, model: nn.Module, strategy: Strategy, found: _Inspected, config: WrapConfig, undo: ExitStack
) -> Wrapped:
    """Swaps lm_head and layers, and leaves a record on the model."""
    owner = uuid.uuid4().hex
    loss = FusedLoss(
        model,
        found.structure,
        found.recipe,
        unfused_reason=found.unfused_reason,
        strategy=strategy.name,
        config=config,
        hosts=HOSTS,
        packing=found.packing,
    )
    if found.recipe is not None and strategy.name == "auto":
        loss.head.check_storage(model)
    layers = LayerReport()
    undo.callback(restore_layers, model, owner=owner)
    if config.layer_kernels:
        layers = swap_layers(
            model,
            backend=config.backend,
            owner=owner,
            mlp_tile_tokens=config.mlp_tile_tokens,
            layers=found.structure.layers,
            compiled=_compiled_layers(found.structure, strategy),
        )
    refuse_merged_weights(model, strategy.name)
    packing, decoder = found.packing, found.structure.decoder
    attention = select_attention(decoder, packing.wanted, packing.attention_reason)
    undo.callback(attention.restore)
    hooks: list[RemovableHandle] = [*packing.install(outer, model, found.structure, attention)]
    if packing.recurrent is not None:
        backend = config.backend if config.layer_kernels else None
        hooks.append(packing.recurrent.install(model, found.structure, owner=owner, backend=backend))
        convolutions, left = packing.recurrent.convolutions(model)
        layers = replace(layers, swapped=(*layers.swapped, *convolutions.items()), left=(*layers.left, *left.items()))
    if _shards_sequences(strategy):
        hooks.append(guard_decoder(decoder))
    loss.warnings.replaced_attention = attention.own
    record = Wrapped(
        structure=found.structure,
        strategy=strategy,
        config=config,
        loss=loss,
        recipe=found.recipe,
        unfused_reason=found.unfused_reason,
        layers=layers,
        attention=attention,
        packing=packing,
        not_compiled=found.not_compiled,
        frozen=found.frozen,
        hooks=tuple(hooks),
        owner=owner,
    )
    setattr(model, _RECORD, record)
    undo.callback(_restore, model, record)
    swap_model(outer, model, loss)
    loss.install(model)
    return record


def _compiled_layers(structure: Structure, strategy: Strategy) -> list[nn.Module]:
    """Returns layers that are compiled, or will be by the strategy."""
    if isinstance(strategy, FullySharded) and strategy.compiles_layers:
        return list(structure.layers)
    return [layer for layer in structure.layers if compiled_call(layer) is not None]


def _restore(model: nn.Module, record: Wrapped) -> None:
    """Restores the classes of model and lm_head, and removes hooks and the record."""
    record.loss.remove(model)
    restore_model(model)
    for hook in record.hooks:
        hook.remove()
    delattr(model, _RECORD)


def unwrap(model: nn.Module) -> nn.Module:
    """Restores the instance: classes, loss function and hooks are as before :func:`wrap`. DDP is removed; sharding,
    tensor parallelism, compiled layers and float8 stay, and with them FSDP1's wrapper.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    inner = inner_model(model)
    record = record_of(inner)
    unmark_sharded(model)
    _restore(inner, record)
    restore_layers(inner, owner=record.owner)
    record.attention.restore()
    detach(record.structure.layers)
    release_communicators(inner)
    encoders.uninstall(inner)
    allow_unreduced(inner)
    resharding.uninstall(inner)
    if isinstance(model, FullyShardedDataParallel):
        return model
    outer = model.module if isinstance(model, Wrapper) else model
    return outer if base_model_of(outer) is inner else inner


@contextmanager
def full_logits(model: nn.Module) -> Iterator[None]:
    """Within, a wrapped model computes its own loss on full logits, and returns both.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    with record_of(inner_model(model)).loss.mode(FULL_LOGITS):
        yield


@contextmanager
def own_layers(
    model: nn.Module, *, keeps_attention: bool = False, keeps_rows: bool = False
) -> Iterator[tuple[str, ...]]:
    """Within, a wrapped model has its own layers and attention, as before :func:`wrap`. Yields what it keeps of this
    library's, as clauses.

    Args:
        keeps_attention: for calls that the model's own attention does not know.
        keeps_rows: for packed documents, which its own recurrent layers do not separate.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    inner = inner_model(model)
    record = record_of(inner)
    kept = []
    with ExitStack() as stack:
        if any(compiled_call(layer) is not None for layer in record.structure.layers):
            kept.append("compiled layers, which run their own code")
        else:
            keeps_rows = keeps_rows and record.packing.recurrent is not None
            kept += ["recurrent layers on rows of single documents, which its own mix"] if keeps_rows else []
            keeps = RECURRENT if keeps_rows else None
            stack.enter_context(suspended_forwards(inner, owner=record.owner, keeps=keeps))
        if keeps_attention and record.attention.selected is not None:
            kept.append("attention within documents, which the model's own does not separate")
        else:
            stack.enter_context(record.attention.suspended())
        yield tuple(kept)


def is_wrapped(model: nn.Module) -> bool:
    """True if :func:`wrap` has been called on the model, also inside DDP, FSDP1 or a DeepSpeed engine."""
    return isinstance(getattr(inner_model(model), _RECORD, None), Wrapped)


def inner_model(model: nn.Module) -> nn.Module:
    """The wrapped model, also inside DDP, FSDP1 or a DeepSpeed engine, which all call it ``module``, and inside a
    ``PeftModel``."""
    while _RECORD not in vars(model):
        inner = base_model_of(model)
        inner = getattr(model, "module", None) if inner is model else inner  # type: ignore[assignment]
        if not isinstance(inner, nn.Module) or inner is model:
            break
        model = inner
    return model


def record_of(inner: nn.Module) -> Wrapped:
    """The record that :func:`wrap` left on the model.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    record = getattr(inner, _RECORD, None)
    if not isinstance(record, Wrapped):
        raise LigerDistError(f"this {type(inner).__name__} is not wrapped; call liger_dist.wrap(model) first.")
    return record
