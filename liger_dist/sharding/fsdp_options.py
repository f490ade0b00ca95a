"""Options and refusals that FSDP1 and FSDP2 share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils._pytree import tree_map

from liger_dist.config import WrapConfig, check_choice, check_dtype
from liger_dist.errors import LigerDistError
from liger_dist.losses.spec import CALL_KEYWORDS, KEYWORDS_OF_MODELS
from liger_dist.model.compile import compile_each, compiled_call, reason_against_compiling, restore_call
from liger_dist.model.peft import peft_parameters, reads_sharded_weights
from liger_dist.model.quantized import bytes_of_scales, four_bit_stacks, is_four_bit, move, move_stack, unsharded_kind
from liger_dist.model.structure import Structure

from .fsdp2.loading import loaded_shards
from .gradient_checks import check_hooks, warn_of_experts
from .mesh import Mesh, check_mesh, local_shard, num_shards, require_process_group
from .process_groups import compute_device

Frozen = Literal["shard", "replicate"]


@dataclass(frozen=True, kw_only=True)
class FullySharded:
    """Options of :class:`FSDP1` and :class:`FSDP2`.

    Raises:
        LigerDistError: a dtype that is not floating.
    """

    name: ClassVar[str]
    has_collectives: ClassVar[bool] = True
    shards_parameters: ClassVar[bool] = True

    mesh: Mesh | None = None
    """A DeviceMesh or its shape, ``(shard,)`` or ``(replicate, shard)``; None: all ranks in one shard group. The
    last axis of a DeviceMesh of :class:`FSDP2` may be named "tp" (row shards of lm_head) or "sp" (sequence shards)."""
    param_dtype: torch.dtype | None = None
    """Compute dtype, while masters keep theirs (``torch.bfloat16`` is usual); None for the masters' dtype."""
    reduce_dtype: torch.dtype = torch.float32
    """Dtype of gradient reduction; a lower one than fp32 loses small gradients as ranks grow."""
    reshard_after_forward: bool = True
    """True to free a decoder layer's full weights between its forward and its backward."""
    cpu_offload: bool = False
    """True to keep shards, gradients and optimizer state in host memory."""
    compile_layers: bool | Literal["auto"] = False
    """True to compile each decoder layer, as :func:`liger_dist.compile_layers`. "auto": on GPUs, except for layers that
    are recurrent or quantized, and with ``mlp_tile_tokens``; ``explain`` shows the decision."""
    frozen: Frozen = "shard"
    """"shard": frozen parameters are sharded and all-gathered as trained ones. "replicate": every rank keeps the full
    frozen parameters, in ``param_dtype``, and only trained ones and PEFT's are sharded. A layer, the embedding, or norm
    and lm_head have a separate group if more than a third of their parameters train; all other trained parameters,
    such as LoRA's, are in the root's group, with one all-gather and one reduce-scatter in a step."""

    def __post_init__(self) -> None:
        check_dtype("param_dtype", self.param_dtype)
        check_dtype("reduce_dtype", self.reduce_dtype)
        check_choice("compile_layers", self.compile_layers, (False, True, "auto"))
        check_choice("frozen", self.frozen, get_args(Frozen))

    @property
    def compiles_layers(self) -> bool:
        """True if an option requires compiled layers."""
        return self.compile_layers is True

    def reason_against_compiling(self, structure: Structure, config: WrapConfig, *, is_recurrent: bool) -> str | None:
        """Says why ``compile_layers="auto"`` does not compile these layers; None if it does."""
        if config.mlp_tile_tokens is not None:
            return f"mlp_tile_tokens is {config.mlp_tile_tokens}"
        return reason_against_compiling(structure.layers, device=compute_device(), is_recurrent=is_recurrent)

    def compile(self, structure: Structure, undo: ExitStack) -> None:
        """Compiles the decoder layers if an option requires it; call it before they are sharded."""
        if self.compiles_layers:
            for layer in structure.layers:
                undo.callback(restore_call, layer, compiled_call(layer))
            compile_each(structure.layers)

    def full_parameters(self, outer: nn.Module) -> frozenset[nn.Parameter]:
        """Returns the parameters that every rank keeps in full. Those of PEFT's layers are sharded, because a call of
        ``set_adapter`` may train them later."""
        return _frozen(outer) if self.frozen == "replicate" else frozenset()

    def has_own_group(self, *parts: nn.Module) -> bool:
        """True if the parameters of ``parts`` are in a group separate from the root's: under "replicate" where more
        than a third of them train. One half of an lm_head of ``modules_to_save`` is frozen."""
        if self.frozen == "shard":
            return True
        parameters = {parameter for part in parts for parameter in part.parameters()}
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        return 3 * trained > sum(parameter.numel() for parameter in parameters)

    def keep_full(self, root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        """Moves parameters of ``root`` to the device of this rank and casts them to the compute dtype."""
        device, parameters = compute_device(), list(parameters)
        for _, _, stack in four_bit_stacks(root):
            if any(stack.packed is parameter for parameter in parameters):
                move_stack(stack, device)
        for parameter in parameters:
            if is_four_bit(parameter):
                move(parameter, device)
                continue
            dtype = self.param_dtype if parameter.is_floating_point() else None
            data = parameter.data.to(device=device, dtype=dtype)
            if type(data) is Tensor:
                parameter.data = data
            else:
                # Tensors inside a subclass would keep their device and dtype.
                torch.utils.swap_tensors(parameter, nn.Parameter(data, requires_grad=False))

    def rows(self, outer: nn.Module, structure: Structure) -> dict[str, str]:
        """Returns rows for ``explain``, by name; call it before the model is sharded."""
        cost = self._cost_of_frozen(outer, self.ranks_that_share(structure))
        return {} if cost is None else {"frozen weights": cost}

    def ranks_that_share(self, structure: Structure) -> Mapping[Tensor, int]:
        """Returns the parameters of which a rank has a part in its forward, and how many parts there are."""
        return {}

    def _cost_of_frozen(self, outer: nn.Module, sharing: Mapping[Tensor, int]) -> str | None:
        """Says what frozen parameters cost sharded and replicated; None without any, or for shard groups of one
        rank."""
        frozen = _frozen(outer)
        shards = num_shards(self.mesh, dist.get_world_size())
        if not frozen or shards == 1:
            return None
        scales = bytes_of_scales(outer) / 2**30
        loaded = {module._parameters[name] for _, module, name in loaded_shards(outer)}
        parts = [sharing.get(parameter, 1) for parameter in frozen]
        held = [parameter if parameter in loaded else local_shard(parameter.data) for parameter in frozen]
        share = sum(local.numel() * local.element_size() for local in held) / shards / 2**30 + scales
        unchanged = [not p.is_floating_point() or is_four_bit(p) for p in frozen]
        compute = [p.dtype if keeps else self.param_dtype or p.dtype for p, keeps in zip(held, unchanged, strict=True)]
        sizes = (local.numel() * dtype.itemsize // n for local, dtype, n in zip(held, compute, parts, strict=True))
        full = sum(sizes) / 2**30 + scales
        passes = "forward and backward" if self.reshard_after_forward else "forward"
        if self.frozen == "replicate":
            return f"{full:.3g} GiB on each rank (sharded: {share:.3g}, all-gathered in {passes})"
        return f"{share:.3g} GiB on each rank, all-gathered in {passes} (replicated: {full:.3g})"

    def check(self, config: WrapConfig, *, world_size: int | None) -> None:
        check_mesh(self.mesh, require_process_group(self.name, world_size), strategy=self.name)
        if self.frozen == "replicate" and self.cpu_offload:
            raise LigerDistError(
                "frozen is 'replicate', which keeps full frozen parameters on every device, but cpu_offload is True; "
                "leave one of them out."
            )
        if self.compiles_layers and config.mlp_tile_tokens is not None:
            raise LigerDistError(
                f"mlp_tile_tokens is {config.mlp_tile_tokens} but the layers are compiled, which computes the MLP at "
                "once; leave one of them out."
            )

    def check_model(
        self, outer: nn.Module, model: nn.Module, structure: Structure, *, unfused: str | None, on_meta: bool
    ) -> None:
        refuse_sharded(outer)
        refuse_overlaps(outer, self.name)
        refuse_shared_by_layers(outer, list(filter(self.has_own_group, structure.all_layers)), self.name)
        if not structure.layers:
            raise LigerDistError(
                f"{type(model).__name__} has no list of decoder layers that could be sharded one by one; shard it "
                "yourself and wrap with strategy='auto'."
            )
        if self.frozen == "replicate":
            _check_some_train(outer)
        reads = reads_sharded_weights(outer)
        if reads is not None:
            raise LigerDistError(f"{reads}, where {self.name!r} has sharded them; use strategy='ddp'.")
        full = self.full_parameters(outer)
        if self.frozen == "shard":
            _refuse_quantized(outer, self.name)
        for name, parameter in outer.named_parameters():
            if parameter.dim() == 0 and parameter not in full:
                raise LigerDistError(
                    f"{name} has no dimension and {self.name!r} shards the first one of every parameter; make it a "
                    "parameter of shape (1,), or a buffer."
                )
        check_hooks(outer.named_parameters(), self.name)
        if self.name == "fsdp2":
            warn_of_experts(model, structure)


def _frozen(outer: nn.Module) -> frozenset[nn.Parameter]:
    """Returns the frozen parameters that are not PEFT's."""
    return frozenset(p for p in outer.parameters() if not p.requires_grad) - peft_parameters(outer)


def _refuse_quantized(outer: nn.Module, strategy: str) -> None:
    """Refuses quantised weights that FSDP cannot shard.

    Raises:
        LigerDistError: with the name of the first one.
    """
    stacks = {stack.packed for _, _, stack in four_bit_stacks(outer)}
    for prefix, module in outer.named_modules():
        for name, weight in (("", None), *module.named_parameters(recurse=False)):
            kind = unsharded_kind(module, weight)
            has_four_bits = is_four_bit(weight) or (weight is not None and weight in stacks)
            if has_four_bits and strategy == "fsdp1":
                kind = "a 4-bit weight, which FSDP1 would flatten and cast with others"
            if kind is not None:
                way_out = "frozen='replicate' (each rank keeps the full frozen weights) or strategy='ddp'"
                other = ", or strategy='fsdp2'" if has_four_bits else ", or a base of 4 bits (load_in_4bit)"
                where = f"{prefix}.{name}".strip(".")
                raise LigerDistError(f"{where} is {kind}, which {strategy!r} does not shard; use {way_out}{other}.")


def _check_some_train(outer: nn.Module) -> None:
    """Refuses a model for "replicate" in which no parameter trains, or every one.

    Raises:
        LigerDistError: with the way out.
    """
    trained = [name for name, parameter in outer.named_parameters() if parameter.requires_grad]
    if not trained:
        raise LigerDistError(
            f"frozen is 'replicate' but no parameter of this {type(outer).__name__} trains, so that there is nothing "
            "to shard; make PEFT's layers before wrap, or use strategy='auto' for evaluation."
        )
    if all(parameter.requires_grad for parameter in outer.parameters()):
        raise LigerDistError(
            f"frozen is 'replicate' but every parameter of this {type(outer).__name__} trains ({trained[0]} and "
            f"{len(trained) - 1} more); freeze the base (get_peft_model) before wrap, or leave the option out."
        )


def cast_inputs(
    dtype: torch.dtype, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Casts floating arguments to ``dtype``, as FSDP2 does for its root, except those of the loss: 16 bits would round
    a number of items, soft labels and temperatures. A forward pre-hook."""

    def cast(value: Any) -> Any:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating else value

    kept = {name: kwargs[name] for name in (*CALL_KEYWORDS, *KEYWORDS_OF_MODELS) if name in kwargs}
    return tree_map(cast, args), tree_map(cast, kwargs) | kept


def refuse_sharded(model: nn.Module) -> None:
    """Refuses a model with FSDP units."""
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise LigerDistError(
            f"this {type(model).__name__} is sharded by FSDP already; wrap it with strategy='auto', or wrap a model "
            "that is not sharded yet."
        )


def shares_parameters(model: nn.Module, parts: list[nn.Module]) -> bool:
    """True if a module outside of ``parts`` holds one of their parameters, such as an embedding tied to the original
    lm_head that PEFT keeps."""
    inside = {module for part in parts for module in part.modules()}
    held = {parameter for part in parts for parameter in part.parameters()}
    outside = (module for module in model.modules() if module not in inside)
    return any(p in held for module in outside for p in module.parameters(recurse=False))


def refuse_shared_by_layers(outer: nn.Module, layers: Sequence[nn.Module], strategy: str) -> None:
    """Refuses a parameter that one of ``layers`` shares with another one or with a module outside of them: each is
    sharded alone.

    Raises:
        LigerDistError: with the names of both.
    """
    names = {module: name for name, module in outer.named_modules()}
    in_layers = [(module, layer) for layer in layers for module in layer.modules()]
    elsewhere = names.keys() - {module for module, _ in in_layers}
    first: dict[nn.Parameter, tuple[str, nn.Module | None]] = {}
    for module, layer in (*in_layers, *((module, None) for module in names if module in elsewhere)):
        for name, parameter in module.named_parameters(recurse=False):
            there, its_layer = first.setdefault(parameter, (f"{names[module]}.{name}", layer))
            if its_layer is not layer:
                holders = [names[holder] for holder in (its_layer, layer or module) if holder is not None]
                raise LigerDistError(
                    f"{there} is a parameter of {' and of '.join(holders)}, and {strategy!r} shards each layer by "
                    "itself; use strategy='ddp', or a model whose layers share no parameters."
                )


def refuse_overlaps(outer: nn.Module, strategy: str, way_out: str = "use strategy='ddp', which does not") -> None:
    """Refuses two parameters in the same memory, as PEFT's ``ensure_weight_tying`` creates them for LoRA on a tied
    embedding. A strategy that moves parameters gives each separate memory, so that they would train independently.

    Raises:
        LigerDistError: with the names of both.
    """
    spans: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for name, parameter in outer.named_parameters():
        if type(parameter.data) is not Tensor or parameter.is_meta or parameter.numel() == 0:
            continue
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        start = parameter.data_ptr()
        spans.setdefault(parameter.untyped_storage().data_ptr(), []).append(
            (start, start + (last + 1) * parameter.element_size(), name, parameter.data)
        )
    for in_storage in spans.values():
        in_storage.sort(key=lambda span: span[:3])
        shared = _shared(in_storage) if any(b[0] < a[1] for a, b in pairwise(in_storage)) else None
        if shared is not None:
            raise LigerDistError(
                f"{shared[0]} and {shared[1]} are two parameters in the same memory, and {strategy!r} gives each its "
                f"own, with which they train apart; {way_out}, or leave out the tying (ensure_weight_tying of PEFT)."
            )


def _shared(in_storage: list[tuple[int, int, str, Tensor]]) -> tuple[str, str] | None:
    """Returns the names of two tensors of one storage that have a byte in common; columns of one tensor have none."""
    first = in_storage[0][0]
    # For each byte the index of its tensor.
    owners = torch.full((max(end for _, end, _, _ in in_storage) - first,), -1, dtype=torch.int16, device="cpu")
    for place, (start, _, name, tensor) in enumerate(in_storage):
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        bytes_of_tensor = owners.as_strided((*tensor.shape, size), (*strides, 1), start - first)
        owner = int(bytes_of_tensor.max())
        if owner >= 0:
            return in_storage[owner][2], name
        bytes_of_tensor.fill_(place)
    return None
