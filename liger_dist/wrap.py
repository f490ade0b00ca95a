"""The verbs wrap and unwrap, and what other modules read off a wrapped model."""

from __future__ import annotations

import functools
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from .checks import RefusesPrepare, check_model, check_strategy
from .config import Strategy, WrapConfig
from .errors import LigerDistError
from .head_choice import choose_head
from .losses.arguments import as_output_names
from .patching.call import LOGITS, check_outputs
from .patching.head import precede_installed_forward
from .patching.layers import LayerReport, replace_layers, restore_layers
from .patching.plan import LossPlan, NotFusableError
from .patching.probe import probe_plan
from .patching.redirect import Wrapper
from .patching.seam import Seam
from .patching.structure import (
    Structure,
    active_head,
    find_structure,
    heads_at,
    initializer_of,
    input_embedding,
)
from .patching.unfused import UnfusedCalls
from .sharding import fsdp1, fsdp2, optional_encoders
from .sharding.agreement import gathered
from .sharding.devices import compute_device
from .sharding.materialize import Initializer, is_meta, materialize
from .sharding.mesh import Mesh, make_mesh, split_axes
from .sharding.replicated import replicate
from .sharding.split_head import release_communicators, rows_mesh, split_heads
from .sharding.tensor_parallel import parallelize_heads

_RECORD = "_liger_dist"
_PREPARED = "_is_accelerate_prepared"
_FAILED = "_liger_dist_failed"
"""on a model that a failed :func:`wrap` has left sharded: the sentence that says so"""


@dataclass(frozen=True, kw_only=True)
class _Wrapped:
    """What :func:`wrap` did to a model; kept on the instance."""

    structure: Structure
    strategy: Strategy
    config: WrapConfig
    seam: Seam | None
    plan: LossPlan | None
    unfused_reason: str | None
    unfused: UnfusedCalls | None
    """refuses options of the loss where it is not fused"""
    head_reason: str | None
    """which way to the head was chosen under "fsdp2", and why"""
    layers: LayerReport
    owner: str
    """by which replaced layers are told from those of other wrapped models inside this one"""


def wrap(
    model: nn.Module, strategy: Strategy = "auto", *, mesh: Mesh | None = None, config: WrapConfig | None = None
) -> Any:
    """Makes ``model`` compute its loss fused, and shards it when the strategy says so.

    The model is changed in place, once, and keeps its parameter names. A model on the meta device is given storage
    and initial values by its own rule, layer by layer; rank 0's random numbers count. "fsdp2" and "tp" shard it before
    that; under "fsdp1" and "deepspeed" every process holds the whole of it for a moment, which very large models
    avoid by "fsdp2" or by being built under ``deepspeed.zero.Init``.

    Args:
        model: a Hugging Face causal language model.
        strategy: what is done besides fusing.

            - "none": nothing; for one process.
            - "auto": nothing; whoever shards does so afterwards, before the first forward.
            - "deepspeed": nothing; the model is ready for ``deepspeed.initialize``, at any ZeRO stage.
            - "ddp", "fsdp1", "fsdp2": replicated or sharded by torch. A loss asked of the model inside DDP or FSDP1 is
              redirected through the wrapper.
            - "tp": the head's rows are split over all processes, which see the same tokens; the layers stay whole, or
              keep the plan that the model was loaded with. Rank 0's values count. Torch's optimisers update many
              tensors at once and do not mix DTensors with others there: give the split parameters a group of their own,
              or ``foreach=False``.
        mesh: "fsdp1", "fsdp2": a DeviceMesh or its shape, ``(shard,)`` or ``(replicate, shard)``; all processes in one
            shard group by default. "fsdp2": a last axis named "tp" is tensor-parallel. "tp": one axis.
        config: see :class:`WrapConfig`.

    Returns:
        ``model`` itself, or for "ddp" and "fsdp1" the wrapper around it.

    Raises:
        LigerDistError: unknown strategy, wrapped already, no output embedding, a mesh that does not fit, options
            that the strategy does not have. Nothing has been changed then, and under the strategies of torch every
            rank raises: they exchange their refusals before any other collective.
    """
    config = config or WrapConfig()
    outer, model = model, _without_adapters(model)
    found = _agreed(strategy, functools.partial(_inspect, outer, strategy, mesh, config))
    device_mesh, head_reason = None, None
    if strategy in ("fsdp1", "fsdp2", "tp"):
        device_mesh = make_mesh(mesh, dist.get_world_size(), device_type=compute_device().type, strategy=strategy)
    if strategy == "fsdp2" and device_mesh is not None:
        config, head_reason = choose_head(model, found.structure, found.plan, mesh=device_mesh, config=config)
    seam = None if found.plan is None else Seam(model, found.structure, found.plan, strategy=strategy, config=config)
    if seam is not None and strategy == "auto":
        seam.check_storage()
    owner = uuid.uuid4().hex
    with ExitStack() as undo:
        layers = LayerReport()
        undo.callback(restore_layers, model, owner=owner)
        if config.layer_kernels:
            layers = replace_layers(model, found.structure.layers, backend=config.kernels, owner=owner)
        record = _Wrapped(
            structure=found.structure,
            strategy=strategy,
            config=config,
            seam=seam,
            plan=found.plan,
            unfused_reason=found.unfused_reason,
            unfused=None if found.unfused_reason is None else UnfusedCalls(model, found.unfused_reason),
            head_reason=head_reason,
            layers=layers,
            owner=owner,
        )
        setattr(model, _RECORD, record)
        undo.callback(_take_off, model, record)
        if seam is not None:
            seam.fuse()
        undo.push(functools.partial(_refuse_if_sharded, model, _sharded_parts(model)))
        wrapped = _shard(outer, model, record, device_mesh, found.initialize, undo)
        if seam is not None and isinstance(wrapped, Wrapper):
            seam.redirect_through(wrapped)
        undo.pop_all()
    if strategy in ("fsdp1", "fsdp2", "tp"):
        vars(wrapped)[_PREPARED] = RefusesPrepare(strategy)
    _call_with_hooks(outer, model)
    return wrapped


@dataclass(frozen=True)
class _Inspected:
    """What :func:`wrap` reads off a model before it changes anything."""

    structure: Structure
    initialize: Initializer | None
    """None for a model with storage"""
    plan: LossPlan | None
    unfused_reason: str | None


def _inspect(outer: nn.Module, strategy: Strategy, mesh: Mesh | None, config: WrapConfig) -> _Inspected:
    check_strategy(strategy, mesh, config)
    model = _without_adapters(outer)
    if is_wrapped(outer):
        raise LigerDistError(
            f"this {type(model).__name__} has been wrapped already; call liger_dist.unwrap(model) first."
        )
    if isinstance(model, Wrapper):
        raise LigerDistError(
            f"the model is inside a {type(model).__name__} already; wrap the model itself, with strategy='auto' before "
            "the wrapper is made, or with 'ddp' or 'fsdp1', which make it."
        )
    if _FAILED in vars(model):
        raise LigerDistError(vars(model)[_FAILED])
    outputs = as_output_names(config.outputs)
    check_outputs(outputs)
    structure = find_structure(model)
    without_storage = is_meta(model)
    check_model(model, structure, strategy, config, without_storage=without_storage)
    initialize = initializer_of(model) if without_storage else None
    plan, reason = _probe(model, structure, config)
    if plan is None and config.token_mean == "global":
        raise LigerDistError(
            f"token_mean is 'global' but the loss of {type(model).__name__} is not fused ({reason}) and keeps its own "
            "mean; leave it out, and pass num_items_in_batch to the model."
        )
    if plan is None and outputs not in ((), (LOGITS,)):
        raise LigerDistError(
            f"outputs is {outputs} but the loss of {type(model).__name__} is not fused ({reason}), and only a fused "
            "one has them; leave them out."
        )
    return _Inspected(structure, initialize, plan, reason)


def _agreed(strategy: Strategy, inspect: Callable[[], _Inspected]) -> _Inspected:
    """What ``inspect`` returns. Where all ranks are about to call collectives, they exchange what they found: one
    rank's refusal is every rank's.

    Raises:
        LigerDistError: of this rank, or that of another one; or some ranks would fuse the loss and others not.
    """
    if strategy not in ("ddp", "fsdp1", "fsdp2", "tp") or not dist.is_initialized():
        return inspect()
    found, refusal = None, None
    try:
        found = inspect()
    except Exception as error:
        refusal = error
    reason = None if found is None else found.unfused_reason or "it can be fused"
    findings = gathered((None if refusal is None else str(refusal), reason))
    if refusal is not None:
        raise refusal
    refusals = dict.fromkeys(sentence for sentence, _ in findings if sentence is not None)
    if refusals:
        raise LigerDistError(f"another rank refused to wrap its model: {' '.join(refusals)}")
    assert found is not None
    reasons = dict.fromkeys(str(theirs) for _, theirs in findings)
    if len(reasons) > 1:
        raise LigerDistError(
            f"ranks do not agree whether the loss is fused: {'; '.join(reasons)}. Give all of them the same model."
        )
    return found


def _take_off(model: nn.Module, record: _Wrapped) -> None:
    """Removes hooks, the fused head and the record."""
    if record.seam is not None:
        record.seam.remove()
    if record.unfused is not None:
        record.unfused.remove()
    delattr(model, _RECORD)


def _sharded_parts(model: nn.Module) -> tuple[int, int]:
    """How many FSDP units and DTensors a model has."""
    units = sum(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    return units, sum(isinstance(parameter, DTensor) for parameter in model.parameters())


def _refuse_if_sharded(
    model: nn.Module, before: tuple[int, int], kind: object, error: BaseException | None, trace: object
) -> None:
    """After a failure in the middle of sharding: the units that are sharded cannot be restored without their full
    parameters, so the model refuses to be wrapped or called."""
    if _sharded_parts(model) == before:
        return
    sentence = (
        f"liger_dist.wrap failed while it sharded this {type(model).__name__} ({type(error).__name__}: {error}), and "
        "some of its parameters are sharded already; build the model anew."
    )

    def refuse(*_: Any) -> None:
        raise LigerDistError(sentence)

    vars(model)[_FAILED] = sentence
    model.register_forward_pre_hook(refuse, prepend=True)


def _without_adapters(model: nn.Module) -> nn.Module:
    """The base model inside PEFT's, which has the adapters in it; what is changed is changed there."""
    get_base_model = getattr(model, "get_base_model", None)
    base = get_base_model() if callable(get_base_model) else model
    return base if isinstance(base, nn.Module) else model


def _call_with_hooks(outer: nn.Module, model: nn.Module) -> None:
    """Older releases of PEFT call the forward of the model inside them, around its hooks; newer ones the model."""
    tuner: Any = getattr(outer, "base_model", None)
    is_around = isinstance(tuner, nn.Module) and getattr(tuner, "model", None) is model
    code = getattr(type(tuner).forward, "__code__", None) if is_around else None
    if code is not None and "forward" in code.co_names:
        tuner.forward = functools.partial(model)


def _shard(
    outer: nn.Module,
    model: nn.Module,
    record: _Wrapped,
    mesh: DeviceMesh | None,
    initialize: Initializer | None,
    undo: ExitStack,
) -> nn.Module:
    """Everything that :func:`wrap` does after the head has its new class; ``outer`` is ``model``, or PEFT's around
    it."""
    structure, config, device = record.structure, record.config, compute_device()
    place = model.get_submodule(structure.head_name)
    if config.activation_checkpointing and not _has_checkpointing(model):
        undo.callback(model.gradient_checkpointing_disable)  # type: ignore[arg-type]
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    data_parallel: DeviceMesh | None = None
    if mesh is not None:
        data_parallel, tensor_parallel = split_axes(mesh, strategy=record.strategy)
        if tensor_parallel is not None and not isinstance(structure.head.weight, DTensor):
            if initialize is None:
                model.to(device)
            heads = [head for head in heads_at(place) if isinstance(head, nn.Linear)]
            parallelize_heads(model, heads, structure.tied_to, mesh=tensor_parallel)
    if record.strategy == "fsdp2" and data_parallel is not None:
        _shard_by_fsdp2(model, record, data_parallel, undo)
    if record.seam is not None:
        # After FSDP2's own hooks were set, so that these come first and a wrong label is refused before any collective.
        record.seam.listen()
    if initialize is not None:
        at = torch.device("cpu") if config.cpu_offload else device
        materialize(model, initialize, layers=(*structure.layers, *chain(*structure.other_stacks)), device=at)
    if record.strategy == "fsdp1" and data_parallel is not None:
        own_unit = None if structure.tied else active_head(place)
        layers = (*structure.layers, *chain(*structure.other_stacks))
        outer = fsdp1.shard(outer, layers, own_unit, mesh=data_parallel, device=device, config=config)
    if record.strategy in ("fsdp1", "fsdp2") and data_parallel is not None:
        undo.callback(optional_encoders.uninstall, model)
        optional_encoders.install(
            model,
            structure.other_stacks,
            decoder=structure.decoder,
            embedding=input_embedding(model),
            mesh=data_parallel,
            root=outer if record.strategy == "fsdp1" else model,
        )
    return replicate(outer.to(device)) if record.strategy == "ddp" else outer


def _shard_by_fsdp2(model: nn.Module, record: _Wrapped, mesh: DeviceMesh, undo: ExitStack) -> None:
    structure, config = record.structure, record.config
    place = model.get_submodule(structure.head_name)
    tail = [module for module in (structure.final_norm, place) if module is not None]
    left_alone: frozenset[nn.Parameter] = frozenset()
    if config.head == "vocab_parallel":
        heads = [head for head in heads_at(place) if isinstance(head, nn.Linear)]
        left_alone, restore = split_heads(
            model,
            heads,
            mesh=rows_mesh(mesh, config.head_shard_size),
            device=compute_device(),
            compute_dtype=config.param_dtype,
            reduce_dtype=config.reduce_dtype,
            peer_copies=config.peer_copies,
        )
        undo.callback(restore)
        for head in heads if record.seam is not None else ():
            precede_installed_forward(head)
    in_root = structure.tied or bool(left_alone) or _shares_parameters(model, tail)
    units = fsdp2.ShardingUnits(
        layers=structure.layers,
        other_stacks=structure.other_stacks,
        embedding=input_embedding(model),
        tail=() if in_root else tail,
    )
    fsdp2.shard(model, units, mesh=mesh, config=config, left_alone=left_alone)


def _shares_parameters(model: nn.Module, tail: list[nn.Module]) -> bool:
    """True if a module outside of ``tail`` holds one of its parameters, such as an embedding that is tied to the
    original of a head which PEFT saves."""
    inside = {module for top in tail for module in top.modules()}
    own = {parameter for top in tail for parameter in top.parameters()}
    return any(p in own for module in model.modules() if module not in inside for p in module.parameters(recurse=False))


def _has_checkpointing(model: nn.Module) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def unwrap(model: nn.Module) -> nn.Module:
    """Restores the instance: classes, loss function and hooks are as before :func:`wrap`. DDP is taken off; sharding,
    tensor parallelism and activation checkpointing stay, and with them FSDP1's wrapper.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    inner = inner_model(model)
    record = record_of(inner)
    if isinstance(vars(model).get(_PREPARED), RefusesPrepare):
        del vars(model)[_PREPARED]
    _take_off(inner, record)
    restore_layers(inner, owner=record.owner)
    release_communicators(inner)
    optional_encoders.uninstall(inner)
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, functools.partial) and forward.func is inner:
            del module.forward
    if isinstance(model, FullyShardedDataParallel):
        return model
    outer = model.module if isinstance(model, Wrapper) else model
    return outer if _without_adapters(outer) is inner else inner


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """For a while a wrapped model computes its own loss on whole logits, and returns both.

    Raises:
        LigerDistError: the model is not wrapped.
    """
    seam = record_of(inner_model(model)).seam
    with nullcontext() if seam is None else seam.paused():
        yield


def is_wrapped(model: nn.Module) -> bool:
    """Whether :func:`wrap` has been called on the model, also inside DDP, FSDP1 or a DeepSpeed engine."""
    return isinstance(getattr(inner_model(model), _RECORD, None), _Wrapped)


def inner_model(model: nn.Module) -> nn.Module:
    """The wrapped model, also inside DDP, FSDP1 or a DeepSpeed engine, which all call it ``module``, and inside PEFT's
    model."""
    while _RECORD not in vars(model):
        get_base_model = getattr(model, "get_base_model", None)
        inner = get_base_model() if callable(get_base_model) else getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or inner is model:
            break
        model = inner
    return model


def record_of(inner: nn.Module) -> _Wrapped:
    record = getattr(inner, _RECORD, None)
    if not isinstance(record, _Wrapped):
        raise LigerDistError(f"this {type(inner).__name__} is not wrapped; call liger_dist.wrap(model) first.")
    return record


def _probe(model: nn.Module, structure: Structure, config: WrapConfig) -> tuple[LossPlan | None, str | None]:
    if not config.fused_loss:
        return None, "WrapConfig(fused_loss=False)"
    try:
        if structure.unfusable is not None:
            raise NotFusableError(structure.unfusable)
        return probe_plan(model, structure), None
    except NotFusableError as error:
        warnings.warn(
            f"liger_dist leaves the loss of {type(model).__name__} unfused: {error}. The model trains as it did "
            "before; liger_dist.explain(model) says so as well.",
            stacklevel=3,
        )
        return None, str(error)
