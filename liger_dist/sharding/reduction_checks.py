"""Refuses trained parameters whose gradients no framework averages."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from liger_dist.errors import LigerDistError
from liger_dist.model.peft import adapters_of, peft_parameters
from liger_dist.model.torch_modes import untraced

from .ddp import DDP, averaged_parameters
from .fsdp1 import FSDP1, is_flat, is_stored_by_fsdp1
from .fsdp2.forward import param_groups
from .fsdp2.strategy import FSDP2, managed_parameters
from .optimizer_steps import BeforeStep, call_before_steps
from .process_groups import world_size
from .vocab_parallel import row_shards_of

AVERAGING = (DDP, FSDP1, FSDP2)
"""Strategies under which a framework averages gradients of the parameters that it wraps. Tensor-parallel ranks have the
same tokens; hosts and user strategies average gradients themselves."""
ORDER = (
    "Make PEFT's adapters first (get_peft_model, PeftModel.from_pretrained, add_adapter), then call liger_dist.wrap on "
    "the result."
)
_CHECKS = "_liger_dist_unreduced_checks"


def refuse_unreduced(root: nn.Module, strategy: str) -> None:
    """Refuses trained parameters of ``root`` whose gradients DDP, FSDP1 or FSDP2 does not reduce.

    Raises:
        LigerDistError: with the names.
    """
    names = unreduced_parameters(root)
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LigerDistError(
            f"nothing averages the gradients of {names[0]}{more} over the ranks: {strategy!r} averages those of "
            f"parameters that were trained when liger_dist.wrap was called. {ORDER}"
        )


def unreduced_parameters(root: nn.Module, *, with_frozen: bool = False) -> list[str]:
    """Lists the names of trained parameters of ``root`` whose gradients neither DDP nor FSDP reduces."""
    averaged = set(averaged_parameters(root))
    managed = managed_parameters(root)
    return [
        f"{module_name}.{name}".lstrip(".")
        for module_name, module in root.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if (parameter.requires_grad or with_frozen)
        and parameter not in averaged
        and (module, name) not in managed
        and row_shards_of(module) is None
        and not (is_flat(name) or is_stored_by_fsdp1(parameter))
    ]


def refuse_unreduced_later(root: nn.Module, outer: nn.Module, model: nn.Module, strategy: str) -> None:
    """Hooks forwards with gradients to refuse parameters that were added to the sharded ``root`` or unfrozen, and steps
    of optimizers to refuse parameters that were exchanged. Only the first forward, and the first after a change of
    PEFT's adapters, walks over the model."""
    check = _Check(adapters_of(root, outer, model), strategy, ref(root), ref(outer), ref(model))
    called = dict.fromkeys((outer, model))
    call_before_steps(check)
    vars(model)[_CHECKS] = [
        module.register_forward_pre_hook(check, with_kwargs=True, prepend=True) for module in called
    ]


def refuse_adapters_later(root: nn.Module, outer: nn.Module, model: nn.Module) -> None:
    """Hooks forwards with gradients of a model that other code shards by FSDP2, before ``wrap`` or before the first
    forward, to refuse PEFT's adapters that are added after that."""
    check = _AdapterCheck(ref(root), ref(outer), ref(model))
    if next(param_groups(root), None) is not None:
        check.note()
    vars(model)[_CHECKS] = [
        module.register_forward_pre_hook(check, prepend=True) for module in dict.fromkeys((outer, model))
    ]


def refuse_late_adapters(outer: nn.Module, model: nn.Module) -> None:
    """Refuses PEFT's adapters on a ``model`` that transformers sharded by FSDP2 while it was loaded.

    Raises:
        LigerDistError: with the names.
    """
    if getattr(model, "fsdp_size", None) is None or next(param_groups(model), None) is None:
        return
    of_peft = {id(parameter) for parameter in peft_parameters(outer)}
    trained = dict(outer.named_parameters(remove_duplicate=False))
    names = [name for name in unreduced_parameters(outer) if id(trained[name]) in of_peft]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LigerDistError(
            f"nothing averages the gradients of {names[0]}{more} over the ranks: PEFT added them after transformers "
            "has sharded the model by FSDP2 (fsdp_size); load it without distributed_config, add the adapters, and "
            "call liger_dist.wrap(model, 'fsdp2')."
        )


def allow_unreduced(model: nn.Module) -> None:
    """Undoes :func:`refuse_unreduced_later`."""
    for handle in vars(model).pop(_CHECKS, ()):
        handle.remove()


def _warn_of_parameters_outside(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], strategy: str) -> None:
    """Warns of parameters outside ``root`` that get gradients through its arguments. No error, because other code may
    average them."""
    if world_size() == 1:
        return
    inside = set(root.parameters())
    for name, value in (*((f"argument {place}", value) for place, value in enumerate(args)), *kwargs.items()):
        count = sum(1 for parameter in _trained_leaves(value) if parameter not in inside)
        if count:
            warnings.warn(
                f"{count} parameters outside of the model that {strategy!r} shards get gradients through {name}, such "
                "as those of a prompt or a prefix that PEFT has put around it. Nothing that liger_dist knows averages "
                "them over the ranks: make the PeftModel first and call liger_dist.wrap on it, or average them before "
                "each step of the optimizer.",
                stacklevel=2,
            )


def _trained_leaves(value: Any) -> Iterator[nn.Parameter]:
    """Yields the parameters that a backward through the tensors in ``value``, an argument of a model, would reach and
    that no framework of torch shards."""
    layers = getattr(value, "layers", None)  # of a key-value cache
    tensors = [
        leaf
        for tree in (value, *(vars(layer) for layer in layers or () if hasattr(layer, "__dict__")))
        for leaf in tree_leaves(tree)
        if isinstance(leaf, Tensor)
    ]
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and not isinstance(leaf.data, DTensor):
            yield leaf
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        waiting.extend(following)


class _Check(BeforeStep):
    """Forward pre-hook; its copies, with a copy of the model, do nothing."""

    def __init__(self, at_wrap: tuple[object, ...], strategy: str, *modules: ref[nn.Module]) -> None:
        self._at_wrap, self._strategy, self._modules = at_wrap, strategy, modules
        self._checked: tuple[object, ...] | None = None
        self._frozen: tuple[nn.Parameter, ...] = ()
        self._known: dict[int, ref[Tensor]] = {}
        """parameters that optimizers may update, by id"""

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuses parameters of the model that were exchanged or added after its first forward.

        Raises:
            LigerDistError: before the step, with the names.
        """
        root = self._modules[0]() if self._modules else None
        given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        unknown = [p for p in given if (known := self._known.get(id(p))) is None or known() is not p]
        if root is None or self._checked is None or not unknown:
            return
        of_model = {id(parameter) for parameter in root.parameters()}
        if any(id(parameter) in of_model for parameter in unknown):
            refuse_unreduced(root, self._strategy)
        self._known |= {id(parameter): ref(parameter) for parameter in unknown}

    @untraced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        modules = [referred for reference in self._modules if (referred := reference()) is not None]
        if not (modules and torch.is_grad_enabled()):
            return
        adapters = adapters_of(*modules)
        if adapters == self._checked and not any(parameter.requires_grad for parameter in self._frozen):
            return
        root, model = modules[0], modules[-1]
        refuse_unreduced(root, self._strategy)
        _warn_of_parameters_outside(root, args, kwargs, self._strategy)
        is_new = adapters[: len(modules)] != self._at_wrap[: len(modules)]
        if model.training and is_new and not any(p.requires_grad for p in root.parameters()):
            # PEFT freezes what it does not find under the names of FSDP1's units.
            raise LigerDistError(
                f"no parameter trains since PEFT has changed the model that {self._strategy!r} shards. {ORDER}"
            )
        self._checked = adapters
        self._frozen = tuple(parameter for parameter in root.parameters() if not parameter.requires_grad)

    def __reduce__(self) -> Any:
        return _Check, ((), "")


class _AdapterCheck:
    """Forward pre-hook; its copies, with a copy of the model, do nothing."""

    def __init__(self, *modules: ref[nn.Module]) -> None:
        self._references = modules
        self._checked: tuple[object, ...] | None = None
        self._unsharded: frozenset[str] | None = None
        """parameters that FSDP2 has never sharded, whose gradients other code may average; None before it shards"""

    def _modules(self) -> list[nn.Module]:
        return [module for reference in self._references if (module := reference()) is not None]

    def note(self) -> None:
        """Notes the adapters and parameters of now."""
        modules = self._modules()
        self._checked = adapters_of(*modules)
        if next(param_groups(modules[0]), None) is not None:
            self._unsharded = frozenset(unreduced_parameters(modules[0], with_frozen=True))

    @untraced
    def __call__(self, module: nn.Module, args: Any) -> None:
        modules = self._modules()
        if not (modules and torch.is_grad_enabled()) or adapters_of(*modules) == self._checked:
            return
        names = [] if self._unsharded is None else unreduced_parameters(modules[0])
        added = [name for name in names if name not in (self._unsharded or ())]
        if added:
            more = f" and {len(added) - 1} more" if len(added) > 1 else ""
            raise LigerDistError(
                f"nothing averages the gradients of {added[0]}{more} over the ranks: FSDP2 reduces those of "
                "parameters that the model had when fully_shard was called. Make PEFT's adapters first "
                "(get_peft_model, PeftModel.from_pretrained, add_adapter), then call fully_shard."
            )
        if self._unsharded is None:
            self.note()
        self._checked = adapters_of(*modules)

    def __reduce__(self) -> Any:
        return _AdapterCheck, ()
