"""FSDP2 (``fully_shard``): strategy, sharding adapters, and its private names.

With a gathered lm_head its hooks all-gather the weight for lm_head's forward. Collectives of a step for the group that
holds it are those of FSDP2: one all-gather before the forward, one reduce-scatter after the backward (and one
all-reduce under HSDP), one more all-gather in the backward if the group is resharded after its forward. The loss adds
none, or one all-reduce of one value for ``token_mean="global"``. For a vocab-parallel lm_head see
:mod:`liger_dist.sharding.vocab_parallel`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any, ClassVar, Literal, get_args
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from liger_dist.config import WrapConfig, check_choice
from liger_dist.errors import LigerDistError
from liger_dist.model.peft import needs_own_root
from liger_dist.model.structure import Structure, input_embedding, stored_parameter
from liger_dist.sharding import encoders
from liger_dist.sharding.base import DataParallel, Facts, FullWeight, Initializer, ShardingAdapter, Storage
from liger_dist.sharding.float8 import Recipe, check_float8, convert, numbers_of_experts, precompute_scales
from liger_dist.sharding.fsdp_options import FullySharded, cast_inputs, shares_parameters
from liger_dist.sharding.materialize import materialize
from liger_dist.sharding.mesh import SEQUENCE, TENSOR_PARALLEL, fold_sequence_axis, make_mesh, shape_of, split_axes
from liger_dist.sharding.process_groups import compute_device
from liger_dist.sharding.sequence_parallel import SequenceAxis, attach, detach
from liger_dist.sharding.tensor_parallel import (
    TensorParallelAdapter,
    linear_heads,
    parallelize_heads,
    row_shard_reasons,
)
from liger_dist.sharding.vocab_parallel import check_row_shards, row_shards_of, shard_rows

from .expert_parallel import (
    ExpertMesh,
    RanksOfExperts,
    average_over_all_ranks,
    check_divides,
    check_expert_parallel,
    check_experts,
    experts_of,
    keep_own_experts,
    ranks_of_experts,
    reduce_each_pass,
)
from .forward import ROOT, param_groups, unreduced_gradients, unshard_in_backward
from .loading import LoadedShards
from .packed_bytes import pack_four_bits
from .units import (
    LayersPerUnit,
    Units,
    bytes_of,
    check_layers_per_unit,
    describe,
    reason_against_units,
    units_of,
    unshard_inside,
)

LMHead = Literal["gather", "vocab_parallel"]
CPU = torch.device("cpu")

TIED_APART = (
    "lm_head is tied to the embedding but FSDP2 stores them in two groups, so each gets one of the two gradients; put "
    "both into one group with fully_shard([embedding, norm, head]), or leave both to the root"
)
TIED_AND_PADDED = (
    "lm_head is tied to the embedding, the two are in different FSDP2 groups, and the ranks do not divide the rows: "
    "each group keeps a padded copy of the shard, and the optimizer updates only one of the copies; pad the vocabulary "
    "to a multiple of the ranks that shard it (model.resize_token_embeddings(pad_to_multiple_of=…) before saving the "
    "checkpoint), or put both into one group with fully_shard([embedding, norm, head])"
)


@dataclass(frozen=True, kw_only=True)
class FSDP2(FullySharded):
    """Shards a model by FSDP2: one group for each unit of layers, one for final norm and lm_head, and the root. A last
    mesh axis
    named "tp" is tensor-parallel. The ranks of a last axis named "sp" hold the sequence shards of
    :func:`liger_dist.shard_sequence`; parameters are sharded over it too."""

    name: ClassVar[str] = "fsdp2"

    lm_head: LMHead = "gather"
    """"gather": FSDP2 all-gathers lm_head's weight for the loss. "vocab_parallel": every rank keeps its row shard and
    the tokens are exchanged, so that neither the full weight nor its full gradient exists; all ranks then have to scale
    their losses alike, and call the model at the same time. docs/vocab_parallel.md lists communication and memory of
    both."""

    layers_per_unit: LayersPerUnit = "auto"
    """Consecutive decoder layers that are all-gathered and reduced together. "auto": as many as have 192 MiB in
    ``param_dtype``, which is one from 100M parameters a layer on in bf16; at least four units. The parameters' names
    and checkpoints do not depend on it."""

    expert_parallel: int = 1
    """Ranks that share the experts of each layer of a mixture; a divisor of the ranks that shard a parameter. Each has
    some of the experts, and tokens are sent to them and back by all-to-alls, in place of all-gathers of the experts;
    all ranks then have to call the model at the same time. Ranks of other groups that have the same experts shard them
    as under FSDP2. docs/experts.md has figures."""

    float8: Recipe | None = None
    """Compute the decoder's linear layers in float8 by torchao: "tensorwise" (the fastest; float8 all-gathers) or
    "rowwise" (a scale for each row). Parameters keep their dtype, and lm_head is unchanged. The layers are compiled,
    because float8 is slower than bf16 otherwise. CPUs emulate it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("lm_head", self.lm_head, get_args(LMHead))
        check_layers_per_unit(self.layers_per_unit)
        check_expert_parallel(self.expert_parallel)
        if self.float8 is not None:
            check_choice("float8", self.float8, get_args(Recipe))

    @property
    def compiles_layers(self) -> bool:
        return super().compiles_layers or self.float8 is not None

    def units(self, structure: Structure, sizes: Sequence[int] | None = None) -> Units:
        """Returns the units of decoder layers that have a group separate from the root's. Call it before anything is
        sharded, packed or converted, which changes the layers' sizes.

        Args:
            sizes: bytes of each layer's full parameters; None to count them.
        """
        layers = list(dict.fromkeys(structure.layers))
        apart = self.experts_apart(structure)
        sizes = [bytes_of(layer, self.param_dtype, apart) for layer in layers] if sizes is None else sizes
        reason = reason_against_units(structure.layers, structure.decoder.config)
        wanted = 1 if self.layers_per_unit == "auto" and reason is not None else self.layers_per_unit
        units: Units = []
        # A layer whose parameters are in the root's group ends a unit.
        for has_group, run in groupby(zip(layers, sizes, strict=False), lambda pair: self.has_own_group(pair[0])):
            pairs = list(run)
            if has_group:
                units += units_of([layer for layer, _ in pairs], [size for _, size in pairs], wanted)
        return units

    def rows(self, outer: nn.Module, structure: Structure) -> dict[str, str]:
        apart = self.experts_apart(structure)
        units = describe(self.units(structure), self.param_dtype, apart)
        return super().rows(outer, structure) | ({} if units is None else {"units": units})

    def ranks_that_share(self, structure: Structure) -> Mapping[Tensor, int]:
        apart = self.experts_apart(structure)
        return {parameter: self.expert_parallel for module in apart for parameter in module.parameters(recurse=False)}

    def experts_apart(self, structure: Structure) -> tuple[nn.Module, ...]:
        """Returns the modules of experts that are in groups apart from those of their layers."""
        return tuple(experts_of(structure)) if self.expert_parallel > 1 else ()

    @property
    def shards_sequences(self) -> bool:
        """True if the mesh has an axis "sp"."""
        return isinstance(self.mesh, DeviceMesh) and SEQUENCE in (self.mesh.mesh_dim_names or ())

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        super().check(config, world_size=world_size)
        check_divides(self.expert_parallel, self.mesh, world_size or 1)
        if self.expert_parallel > 1 and not config.layer_kernels:
            raise LigerDistError(
                f"expert_parallel is {self.expert_parallel} but layer_kernels is False, and only the layers of this "
                "library send tokens to experts on other ranks; leave one of them out."
            )
        if self.shards_sequences and not (config.fused_loss and config.varlen_attention):
            raise LigerDistError(
                f"the mesh has an axis {SEQUENCE!r} but fused_loss is {config.fused_loss} and varlen_attention is "
                f"{config.varlen_attention}; parts of sequences need both, leave them out."
            )
        if self.float8 is not None:
            check_float8()
            if self.frozen == "replicate":
                raise LigerDistError(
                    f"float8 is {self.float8!r} but frozen is 'replicate', with which no weight is all-gathered in "
                    "float8 and each is cast anew in every layer; leave one of them out."
                )
            if self.cpu_offload:
                raise LigerDistError(
                    f"float8 is {self.float8!r} but cpu_offload is True, which would cast on the CPU; leave one of "
                    "them out."
                )
        if self.lm_head == "gather":
            return
        if isinstance(self.mesh, DeviceMesh) and TENSOR_PARALLEL in (self.mesh.mesh_dim_names or ()):
            raise LigerDistError(
                "lm_head is 'vocab_parallel' but the mesh has a tensor-parallel axis, which shards its rows already; "
                "leave lm_head out."
            )
        if self.cpu_offload:
            raise LigerDistError(
                "lm_head is 'vocab_parallel' but cpu_offload is True, and row shards stay on the device where they are "
                "used; leave one of them out."
            )

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        super().check_model(outer, model, structure, unfused=unfused, on_meta=on_meta)
        full = self.full_parameters(outer)
        for name, parameter in outer.named_parameters():
            if not parameter.is_contiguous() and parameter not in full:
                raise LigerDistError(
                    f"{name} has the strides {parameter.stride()} for the shape {tuple(parameter.shape)}, and FSDP2 "
                    "shards contiguous parameters only; make it contiguous (parameter.data = "
                    "parameter.data.contiguous())."
                )
        if self.expert_parallel > 1:
            check_experts(model, structure, self.expert_parallel)
        reason = reason_against_units(structure.layers, structure.decoder.config)
        if reason is not None and self.layers_per_unit not in ("auto", 1):
            raise LigerDistError(f"layers_per_unit is {self.layers_per_unit} but {reason}; leave it out.")
        if self.lm_head == "vocab_parallel":
            check_row_shards(model, structure, unfused=unfused)
            heads = {weight for head in linear_heads(model, structure) for weight in head.parameters()}
            trained = {parameter for parameter in outer.parameters() if parameter.requires_grad}
            if self.frozen == "replicate" and trained <= heads:
                raise LigerDistError(
                    "frozen is 'replicate' and lm_head is 'vocab_parallel' but only lm_head trains, so that FSDP2 has "
                    "nothing to shard; leave one of them out."
                )

    def shard(
        self,
        outer: nn.Module,
        model: nn.Module,
        structure: Structure,
        *,
        initialize: Initializer | None,
        undo: ExitStack,
    ) -> nn.Module:
        device, units = compute_device(), self.units(structure)
        is_flat = len(shape_of(self.mesh, dist.get_world_size())) == 1
        # PEFT treats a mesh of one axis as tensor-parallel unless that is named "fsdp".
        names = ("fsdp",) if is_flat else ("replicate", "shard")
        made = make_mesh(self.mesh, dist.get_world_size(), device_type=device.type, names=names)
        mesh, tensor_parallel = split_axes(made)
        if self.shards_sequences:
            attach(structure.layers, SequenceAxis.of(mesh))
            undo.callback(detach, structure.layers)
        mesh = fold_sequence_axis(mesh)
        loaded = LoadedShards(outer)
        if self.frozen == "replicate" or self.float8 is not None:
            loaded.gather(outer, packs=self.frozen == "shard")
        if tensor_parallel is not None or self.lm_head == "vocab_parallel":
            loaded.gather(*linear_heads(model, structure))
        if tensor_parallel is not None:
            parallelize_heads(outer, model, structure, mesh=tensor_parallel, has_storage=initialize is None)
        row_shards = self._row_shards(model, structure, mesh, device, undo)
        if self.float8 is not None:
            shards, experts = mesh.size(mesh.ndim - 1), numbers_of_experts(structure.decoder.config)
            convert(structure.layers, self.float8, shards=shards, numbers_of_experts=experts, undo=undo)
        self.compile(structure, undo)
        if self.expert_parallel > 1:
            self._shard_experts(structure, ExpertMesh.of(made, self.expert_parallel), loaded, undo)
        root = outer if needs_own_root(outer, model) else model
        if root is not model:
            vars(model)[ROOT] = ref(root)
            undo.callback(vars(model).pop, ROOT, None)
        full = self.full_parameters(root) - row_shards
        kept = [name for name, parameter in root.named_parameters() if parameter in full]
        pack_four_bits(root, full, device, undo)
        options = self._options(mesh, {*row_shards, *full})
        self._fully_shard(root, model, structure, units, row_shards, loaded, options)
        if self.float8 == "tensorwise":
            precompute_scales(structure.decoder, undo)
        if initialize is not None:
            materialize(model, initialize, layers=structure.all_layers, device=CPU if self.cpu_offload else device)
        # By name: those on the meta device have been replaced.
        self.keep_full(root, map(root.get_parameter, kept))
        encoders.install(model, structure, mesh=mesh, root=root, undo=undo)
        return outer

    def _options(self, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> dict[str, Any]:
        """Returns arguments of ``fully_shard``. Masters keep their dtype. ``output_dtype`` stays None, because FSDP2
        would round the loss to it."""
        return {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype),
            "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
            if self.cpu_offload
            else OffloadPolicy(),
            "ignored_params": ignored or None,
        }

    def _row_shards(
        self, model: nn.Module, structure: Structure, mesh: DeviceMesh, device: torch.device, undo: ExitStack
    ) -> frozenset[nn.Parameter]:
        """Shards the rows of a vocab-parallel lm_head; returns its parameters, which FSDP2 leaves alone."""
        if self.lm_head != "vocab_parallel":
            return frozenset()
        return shard_rows(
            model,
            linear_heads(model, structure),
            mesh=mesh,
            device=device,
            compute_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            divide_factor=partial(divide_factor, model),
            syncs_replicas=partial(reduces_over_replicas, model),
            undo=undo,
        )

    def _shard_experts(self, structure: Structure, mesh: ExpertMesh, loaded: LoadedShards, undo: ExitStack) -> None:
        """Shards each module of experts, by experts in a group of ranks, and over the groups by FSDP2."""
        for module in self.experts_apart(structure):
            loaded.gather(module)
            keep_own_experts(module, mesh, undo)
            full = self.full_parameters(module)
            if full < {*module.parameters(recurse=False)}:
                options = self._options(mesh.data, {*full})
                # The router's weights stay as they are.
                options["mp_policy"] = replace(options["mp_policy"], cast_forward_inputs=False)
                fully_shard(module, reshard_after_forward=self.reshard_after_forward, **options)
                average_over_all_ranks(module, self.expert_parallel)
                reduce_each_pass(module)

    def _fully_shard(
        self,
        root: nn.Module,
        model: nn.Module,
        structure: Structure,
        units: Units,
        row_shards: frozenset[nn.Parameter],
        loaded: LoadedShards,
        options: dict[str, Any],
    ) -> None:
        """Applies ``fully_shard`` to layers, tail and root, with the options of :meth:`_options`."""
        trained = {name: parameter.requires_grad for name, parameter in root.named_parameters()}
        layers = (*chain(*structure.other_stacks), *structure.prediction_layers)
        alone = [(layer,) for layer in dict.fromkeys(layers) if self.has_own_group(layer)]
        embedding = [(one,) for one in filter(None, [input_embedding(model)]) if self.has_own_group(one)]
        for unit in (*alone, *units, *embedding):
            loaded.gather(*unit)
            together = list(unit) if len(unit) > 1 else unit[0]
            fully_shard(together, reshard_after_forward=self.reshard_after_forward, **options)
            unshard_inside(unit)
        tail = [m for m in (structure.final_norm, model.get_submodule(structure.head_name)) if m is not None]
        # A group that ran twice would be reduced twice, and not end its second forward, which the norm is not part of.
        is_apart = not (structure.tied or structure.repeats_head or row_shards or shares_parameters(model, tail))
        if is_apart and self.has_own_group(*tail):
            # Its backward follows its forward immediately: resharding in between would only all-gather it twice.
            loaded.gather(*tail)
            fully_shard(tail, reshard_after_forward=False, **options)
            tail[0].register_forward_hook(unshard_in_backward)
        # The root's inputs are cast by a hook instead, which leaves the arguments of the loss alone.
        options["mp_policy"] = replace(options["mp_policy"], cast_forward_inputs=False)
        loaded.gather(root)
        fully_shard(root, **options)
        if self.param_dtype is not None:
            root.register_forward_pre_hook(partial(cast_inputs, self.param_dtype), with_kwargs=True)
        if root is not model:
            # PEFT calls ``generate`` of the base model, not the root's forward.
            register_fsdp_forward_method(root, "generate")
        for name, parameter in root.named_parameters():
            # A frozen tensor subclass (of float8) that FSDP2 moves to the GPU comes back trainable.
            parameter.requires_grad_(trained[name])


class FSDP2Gathered(FullWeight):
    """FSDP2's hooks all-gather the weight for lm_head's forward; the loss runs inside it on the full weight."""

    name: ClassVar[str] = "fsdp2-gathered"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        found = stored_weight(self, head, model)
        return found if found is None or found.tensor_parallel is None else None

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        return _tied_weight_reasons(facts)

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        return _data_parallel(head, model)

    def check_unsharded(self, weight: Tensor) -> None:
        if isinstance(weight, DTensor):
            raise LigerDistError(
                f"lm_head.weight is still sharded ({weight.placements}) in its own forward, so FSDP2's hooks have not "
                "run. Call the wrapped model itself rather than its parts."
            )


class FSDP2Frozen(FullWeight):
    """A frozen weight that every rank has in full, inside a model whose trained parameters FSDP2 shards. Collectives in
    the loss: those of the global mean."""

    name: ClassVar[str] = "fsdp2-frozen"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        weight = stored_parameter(head)
        if isinstance(weight, DTensor) or not _is_frozen_inside(weight, model):
            return None
        return Storage.of(self, head, weight, "every rank has the full, frozen weight")

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        return []

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        return _data_parallel(head, model)


def _is_frozen_inside(weight: Tensor, model: nn.Module) -> bool:
    """True for a frozen weight in a model of which FSDP2 shards some parameters."""
    return not weight.requires_grad and next(param_groups(model), None) is not None


class FSDP2TensorParallel(TensorParallelAdapter):
    """Adapter for an lm_head whose rows are sharded over a tensor-parallel axis, with FSDP2 over the data-parallel
    axes, or frozen and replicated over them."""

    name: ClassVar[str] = "fsdp2-tensor-parallel"

    def storage(self, head: nn.Linear, model: nn.Module, tied_to: tuple[nn.Module, ...]) -> Storage | None:
        found, weight = stored_weight(self, head, model), stored_parameter(head)
        if found is None and isinstance(weight, DTensor) and _is_frozen_inside(weight, model):
            return Storage.of(self, head, weight, "every FSDP2 rank has the frozen row shard")
        return found if found is None or found.tensor_parallel is not None else None

    def not_supported_reasons(self, facts: Facts) -> list[str]:
        return row_shard_reasons(facts) + _tied_weight_reasons(facts)

    def data_parallel(self, head: nn.Module, model: nn.Module) -> DataParallel:
        return _data_parallel(head, model)


def _data_parallel(head: nn.Module, model: nn.Module) -> DataParallel:
    found = _find_param(head, model)
    if found is None and _is_frozen_inside(stored_parameter(head), model):
        return _data_parallel_of(next(param_groups(model)))
    if found is None:
        raise LigerDistError("lm_head is not part of an FSDP2 group; shard the model before its forward.")
    return _data_parallel_of(found[0])


def _data_parallel_of(group: Any) -> DataParallel:
    """Returns the ranks of an FSDP2 group, and of the ranks that share experts, if these are all that it has."""
    mesh: DeviceMesh = group.mesh_info.mesh
    groups, ranks = [mesh.get_group(axis) for axis in range(mesh.ndim)], _ranks_of(group)
    return DataParallel(
        groups=(*groups, *([] if ranks is None else [ranks.group])), divide_factor=_divide_factor(group)
    )


def _ranks_of(group: Any) -> RanksOfExperts | None:
    return next(filter(None, map(ranks_of_experts, group.modules)), None)


def _tied_weight_reasons(facts: Facts) -> list[str]:
    """Lists the reasons why FSDP2 does not keep lm_head and its tied embedding one parameter."""
    storage = facts.storage
    if facts.tied and storage.apart_from_embedding:
        return [TIED_APART]
    return [TIED_AND_PADDED] if storage.padded_in_two_groups and storage.trains else []


def divide_factor(model: nn.Module) -> float:
    """Returns the divisor that FSDP2 applies to summed gradients, read from the first of the model's groups."""
    return _divide_factor(next(param_groups(model)))


def _divide_factor(group: Any) -> float:
    ranks = _ranks_of(group)
    sharing = 1 if ranks is None else ranks.group.size()
    return float(group.gradient_divide_factor or group.mesh_info.mesh.size() * sharing)


def reduces_over_replicas(model: nn.Module) -> bool:
    """True if a backward that runs now reduces gradients over all ranks: neither ``set_requires_gradient_sync(False)``
    nor ``set_requires_all_reduce(False)`` is on."""
    group = next(param_groups(model))
    return bool(group.reduce_grads and group.all_reduce_grads)


def unfinished_reduction(model: nn.Module) -> str | None:
    """Says why gradients are not fully reduced (gradient accumulation or no-sync), as a clause; None if they are."""
    if any(shards is not None and shards.unreduced for shards in map(row_shards_of, model.modules())):
        return "lm_head's row shards hold gradients that have not been summed over the replicas yet"
    for group in param_groups(model):
        if any(unreduced_gradients([group])):
            return "FSDP2 holds gradients that it has not reduced yet"
        if not group.reduce_grads:
            return "FSDP2's gradient reduction is turned off (set_requires_gradient_sync(False))"
    return None


def stored_weight(adapter: ShardingAdapter, head: nn.Module, model: nn.Module) -> Storage | None:
    """Reads FSDP2's records of ``head.weight``; None when FSDP2 does not store it. No collectives.

    [Note: One parameter in two FSDP2 groups] transformers shards before it ties, so embedding and lm_head end in
    different groups, and tying gives both modules one sharded parameter. Each group then all-gathers it for its module
    and adds its gradient to the same ``.grad``, which is exact. But a group all-gathers from the local tensor of its
    first forward, and a shard with fewer rows than those of other ranks is replaced there by a padded copy, once in
    each group: the parameter is a view of the last copy, and the first is never updated.
    """
    found = _find_param(head, model)
    if found is None:
        return None
    group, fsdp_param = found
    weight = _sharded_parameter(group, fsdp_param)
    records = [p for g in param_groups(model) for p in g.fsdp_params if _sharded_parameter(g, p) is weight]
    return Storage.of(
        adapter,
        head,
        weight,
        "FSDP2 shards the weight",
        data_parallel_axes=group.mesh_info.mesh.ndim,
        apart_from_embedding=len(records) == 1 and not fsdp_param._module_info.shared_modules,
        padded_in_two_groups=len(records) > 1 and weight.shape[0] % _num_shards(weight) != 0,
    )


def _find_param(head: nn.Module, model: nn.Module) -> tuple[Any, Any] | None:
    """Finds FSDP2's parameter group of ``head.weight`` and its record there; None when FSDP2 does not store it."""
    for group in param_groups(model):
        for fsdp_param in group.fsdp_params:
            if (head, "weight") in _owners(fsdp_param):
                return group, fsdp_param
    return None


def _owners(fsdp_param: Any) -> list[tuple[nn.Module, str]]:
    info = fsdp_param._module_info
    return list(zip((info.module, *info.shared_modules), (info.param_name, *info.shared_param_names), strict=True))


def managed_parameters(root: nn.Module) -> set[tuple[nn.Module, str]]:
    """Returns module and name of each parameter that FSDP2 shards and reduces the gradient of."""
    return {owner for group in param_groups(root) for record in group.fsdp_params for owner in _owners(record)}


def _sharded_parameter(group: Any, fsdp_param: Any) -> Any:
    """Returns the sharded parameter: FSDP2 reads it from the module in its first forward, and keeps it from then on."""
    info = fsdp_param._module_info
    return fsdp_param.sharded_param if group._reset_sharded_params else getattr(info.module, info.param_name)


def _num_shards(weight: DTensor) -> int:
    sizes = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())
