"""The verbs wrap and unwrap: check, probe, fuse, shard."""

from __future__ import annotations

import functools
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.hooks import RemovableHandle

from .config import WrapConfig
from .fused_head.fused_model import restore_model, swap_model
from .fused_head.model_loss import FULL_LOGITS, FusedLoss
from .fused_head.wrapper_redirect import WrapperRedirect
from .fused_layers import LayerReport, refuse_merged_weights, restore_layers, swap_layers
from .fused_layers.attention_selection import AttentionSelection, select_attention
from .fused_layers.experts import (
    EXPERTS,
    LOW_RANK_EXPERTS,
    allow_merges,
    correct_peft,
    has_lora_on_four_bits,
    needs_grouped_lora,
    needs_its_ranks,
    refuse_merges_of_ranks,
    refuse_unswapped_experts,
    remove_leftover_lora,
    warn_of_missing_lora,
)
from .fused_layers.recurrent import RECURRENT
from .fused_layers.swap import suspended_forwards
from .hosts import HOSTS
from .inspection import inspect_model, refused_by_all_ranks, shards_sequences
from .model.compile import compiled_call
from .model.four_bit_experts import keep_scales_in_state_dict
from .model.peft import base_model_of
from .model.quantized import keep_order_of_bytes
from .model.stages import stage_of
from .model.structure import Structure
from .model.undo import Undo
from .record import RECORD, Findings, Wrapped, inner_model, record_of
from .sequences import guard_decoder
from .sharding import encoders, resharding
from .sharding.accelerate import mark_sharded, unmark_sharded
from .sharding.base import Strategy, Wrapper
from .sharding.failed_sharding import refuse_half_sharded, storage_state
from .sharding.fsdp2.strategy import FSDP2
from .sharding.fsdp_options import FullySharded
from .sharding.materialize import values_of_rank_0
from .sharding.mesh import Mesh
from .sharding.reduction_checks import (
    AVERAGING,
    allow_unreduced,
    refuse_adapters_later,
    refuse_unreduced,
    refuse_unreduced_later,
)
from .sharding.sequence_parallel import detach
from .sharding.single import Auto
from .sharding.vocab_parallel import release_communicators


def wrap(
    model: nn.Module, strategy: str | Strategy = "auto", *, mesh: Mesh | None = None, config: WrapConfig | None = None
) -> nn.Module:
    """Makes ``model`` compute its loss fused, and shards it if the strategy does.

    The model is changed in place, once, and keeps its parameter names. A model on the meta device gets storage and
    initial values by its initializer, layer by layer, from rank 0's random numbers. "fsdp2" and "tp" shard it before
    that; under "fsdp1" and "deepspeed" every rank holds the full model for a moment, which very large models avoid by
    "fsdp2" or by being built under ``deepspeed.zero.Init``. If only rank 0's model is on a real device, all ranks get
    its values. Other threads may run other models meanwhile, and not this one.

    Args:
        model: a Hugging Face causal language model, a ``PeftModel`` of one, or a stage of one that
            :func:`liger_dist.pipeline_stage` has cut.
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
            ``(shard,)`` or ``(replicate, shard)``; all ranks in one shard group by default. Under "fsdp2" a
            last axis named "tp" is tensor-parallel, and one named "sp" shards sequences.
        config: what is fused; see :class:`WrapConfig`.

    Returns:
        ``model`` itself, or for "ddp" and "fsdp1" the wrapper around it.

    Raises:
        LigerDistError: unknown strategy, wrapped already, no lm_head, a mesh or options that do not fit. Nothing has
            been changed then, and under the strategies of torch every rank raises: the ranks exchange their refusals
            before any other collective.
    """
    config, outer, model = WrapConfig() if config is None else config, model, base_model_of(model)
    if isinstance(model, nn.Module):  # Anything else is refused below.
        remove_leftover_lora(model)
    chosen, found, origin = inspect_model(outer, strategy, mesh, config)
    if shards_sequences(chosen):
        # The tokens of a sequence are on several ranks, so that a mean over one of them would be of a part.
        config = replace(config, token_mean="global")
    undo = Undo()
    with ExitStack() as failure:
        failure.callback(undo.run, model)
        with refused_by_all_ranks(chosen):
            record = _fuse(outer, model, chosen, found, config, undo)
        keep_order_of_bytes(model, failure)
        keep_scales_in_state_dict(model, failure)
        failure.push(functools.partial(refuse_half_sharded, model, storage_state(model)))
        initialize = values_of_rank_0(model, failure) if origin.is_rank_0 else origin.initialize
        wrapped = chosen.shard(outer, model, found.structure, initialize=initialize, undo=failure)
        refuse_merges_of_ranks(model)
        if found.recipe is not None:
            record.loss.head.install_hook(model)
            if isinstance(wrapped, Wrapper):
                record.loss.wrapper_redirect = WrapperRedirect(wrapped)
        if isinstance(chosen, AVERAGING):
            refuse_unreduced(wrapped, chosen.name)
        _watch(wrapped, outer, model, record)
        failure.pop_all()
    return wrapped


def _fuse(
    outer: nn.Module, model: nn.Module, strategy: Strategy, found: Findings, config: WrapConfig, undo: Undo
) -> Wrapped:
    """Swaps lm_head and layers, and leaves a record on the model. Adds to ``undo`` what takes each of them back."""
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
    undo.add(restore_layers, owner=owner)
    if config.layer_kernels:
        layers = swap_layers(
            model,
            backend=config.backend,
            owner=owner,
            mlp_tile_tokens=config.mlp_tile_tokens,
            layers=found.structure.layers,
            compiled=_compiled_layers(found.structure, strategy),
        )
    _check_experts(outer, model, strategy, found.structure, layers)
    packing, decoder = found.packing, found.structure.decoder
    attention = select_attention(decoder, packing.wanted, packing.attention_reason)
    undo.add(_restore_attention, attention)
    hooks = correct_peft(model)
    undo.add(_remove_hooks, hooks)
    hooks += packing.install(outer, model, found.structure, attention)
    if packing.recurrent is not None:
        backend = config.backend if config.layer_kernels else None
        hooks.append(packing.recurrent.install(model, found.structure, owner=owner, backend=backend))
        convolutions, left = packing.recurrent.convolutions(model)
        layers = replace(layers, swapped=(*layers.swapped, *convolutions.items()), left=(*layers.left, *left.items()))
    if shards_sequences(strategy):
        hooks.append(guard_decoder(decoder))
    loss.warnings.replaced_attention = attention.original
    record = Wrapped(
        found=found,
        strategy=strategy,
        config=config,
        loss=loss,
        layers=layers,
        attention=attention,
        owner=owner,
        undo=undo,
    )
    setattr(model, RECORD, record)
    undo.add(delattr, RECORD)
    undo.add(restore_model)
    swap_model(outer, model, loss)
    undo.add(_remove_loss, loss)
    loss.install(model)
    return record


def _check_experts(
    outer: nn.Module, model: nn.Module, strategy: Strategy, structure: Structure, layers: LayerReport
) -> None:
    """Refuses experts, and LoRA on them, that the strategy's layers do not compute."""
    refuse_merged_weights(model, strategy.name)
    if isinstance(strategy, FSDP2):
        refuse_unswapped_experts(model, strategy.experts_apart(structure), dict(layers.left))
    warn_of_missing_lora(outer, model)


def _compiled_layers(structure: Structure, strategy: Strategy) -> list[nn.Module]:
    """Returns layers that are compiled, or will be by the strategy."""
    if isinstance(strategy, FullySharded) and strategy.compiles_layers:
        return list(structure.layers)
    return [layer for layer in structure.layers if compiled_call(layer) is not None]


def _watch(wrapped: nn.Module, outer: nn.Module, model: nn.Module, record: Wrapped) -> None:
    """Installs what checks later steps: that every trained parameter is reduced, and that FSDP2's groups are sharded
    again; and adds what ``unwrap`` takes back of the strategy's."""
    strategy, structure, undo = record.strategy, record.found.structure, record.undo
    for uninstall in (_detach_sequence_axis, release_communicators, encoders.uninstall):
        undo.add(uninstall)
    undo.add(allow_unreduced)
    if isinstance(strategy, AVERAGING):
        refuse_unreduced_later(wrapped, outer, model, strategy.name)
    elif isinstance(strategy, Auto):
        refuse_adapters_later(wrapped, outer, model)
    undo.add(resharding.uninstall)
    if stage_of(model) is None:  # The schedule of a pipeline unshards and reshards.
        resharding.install(wrapped, outer, model, structure.decoder, may_shard_later=isinstance(strategy, Auto))
    if strategy.shards_parameters:
        mark_sharded(wrapped, strategy.name)


def _restore_attention(model: nn.Module, attention: AttentionSelection) -> None:
    attention.restore()


def _remove_hooks(model: nn.Module, hooks: Sequence[RemovableHandle]) -> None:
    allow_merges(model)
    for hook in hooks:
        hook.remove()


def _remove_loss(model: nn.Module, loss: FusedLoss) -> None:
    loss.remove(model)


def _detach_sequence_axis(model: nn.Module) -> None:
    detach([model])


def unwrap(model: nn.Module) -> nn.Module:
    """Restores the instance: classes, loss function and hooks are as before :func:`wrap`. DDP is removed; sharding,
    tensor parallelism, compiled layers and float8 stay, and with them FSDP1's wrapper and the forward of experts that
    are on several ranks.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    inner = inner_model(model)
    record = record_of(inner)
    if has_lora_on_four_bits(inner):
        warnings.warn(
            "this model has LoRA on experts of 4 bits, which PEFT's own forward computes otherwise: it reads the "
            "second of two parameters without its LoRA, and adds that of one parameter once more in each call. Wrap "
            "it again before you call it.",
            stacklevel=2,
        )
    unmark_sharded(model)
    record.undo.run(inner)
    if isinstance(model, FullyShardedDataParallel):
        return model
    outer = model.module if isinstance(model, Wrapper) else model
    return outer if base_model_of(outer) is inner else inner


@contextmanager
def full_logits(model: nn.Module) -> Iterator[None]:
    """Within, a wrapped model computes its original loss on full logits, and returns both.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    with record_of(inner_model(model)).loss.mode(FULL_LOGITS):
        yield


@contextmanager
def original_layers(
    model: nn.Module, *, keeps_attention: bool = False, keeps_rows: bool = False
) -> Iterator[tuple[str, ...]]:
    """Within, a wrapped model has its original layers and attention, as before :func:`wrap`. Yields what it keeps of
    this library's, as clauses.

    Args:
        keeps_attention: for calls that the model's original attention does not know.
        keeps_rows: for packed documents, which its original recurrent layers do not separate.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    inner = inner_model(model)
    record = record_of(inner)
    kept = []
    with ExitStack() as stack:
        if any(compiled_call(layer) is not None for layer in record.found.structure.layers):
            kept.append("compiled layers, which run their own code")
        else:
            keeps_rows = keeps_rows and record.found.packing.recurrent is not None
            kept += ["recurrent layers on rows of single documents, which its own mix"] if keeps_rows else []
            keeps = [RECURRENT] if keeps_rows else []
            if needs_grouped_lora(inner):
                kept.append("LoRA on experts of 4 bits, of which PEFT's own forward reads one parameter without it")
                keeps += [LOW_RANK_EXPERTS, EXPERTS]
            if any(map(needs_its_ranks, inner.modules())):
                kept.append("experts on several ranks, which the model's own code does not reach")
                keeps += [LOW_RANK_EXPERTS, EXPERTS]
            stack.enter_context(suspended_forwards(inner, owner=record.owner, keeps=keeps))
        if keeps_attention and record.attention.selected is not None:
            kept.append("attention within documents, which the model's own does not separate")
        else:
            stack.enter_context(record.attention.suspended())
        yield tuple(kept)
