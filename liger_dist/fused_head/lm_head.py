"""lm_head of one model: the class that computes the loss, and which of its modules a call uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.fused_layers.swap import has_hooks, is_of_framework
from liger_dist.model.class_swap import MadeAtRunTime, below_wrappers, subclass_of, with_base
from liger_dist.model.peft import (
    TRAINED_ROWS,
    active_head,
    base_head,
    heads_at,
    lora_objection,
    parts_of,
    trains_copy,
    under_trained_rows,
)
from liger_dist.model.structure import (
    Structure,
    head_shape,
    is_fp32_forward,
    is_linear_forward,
    is_linear_map,
    tied_modules,
)
from liger_dist.model.torch_modes import checkpoint_frame, untraced
from liger_dist.sharding import choose, collect_facts
from liger_dist.sharding.base import Facts, ShardingAdapter

from .call import WrapId
from .logits import FusedLogits
from .loss_call import LossCall, current_call, none_further, running

_WRAP_ID = "_liger_dist_fused_by"
"""attribute of an lm_head: the :class:`.loss_call.WrapId` of its model"""
_INSTALLED = "_liger_dist_installed_forward"


class ComputesLoss(MadeAtRunTime, nn.Module):
    """Mixed into the class of an lm_head: its forward returns the loss, carried by zero-width logits, when its model
    was called with labels, and logits otherwise. The loss runs inside the module's call, where the hooks of FSDP,
    ZeRO or TP have unsharded the weight and will reduce its gradient.
    """

    @untraced
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Maps ``[..., D]`` to ``[..., V]`` logits, or to ``[..., 0]`` carrying the loss."""
        if not isinstance(self, ComputesLoss):
            # Called through a stale bound method after unwrap.
            return type(self).forward(self, hidden_states, *args, **kwargs)
        call = current_call(vars(self).get(_WRAP_ID))
        if call is None or call.is_in_head or call.on_logits:
            # A LoRA layer calls its base layer within its call.
            return self._logits(hidden_states, *args, **kwargs)
        if call.checkpoints is not None:
            _recompute_in(call)
        try:
            loss = call.begin_head_call()
            if loss is None:
                return self._logits(hidden_states, *args, **kwargs)
            if args or kwargs:
                raise LigerDistError(
                    f"lm_head was called with {', '.join(kwargs) or 'further arguments'}, which may change logits per "
                    "token; such a call cannot be fused. Pass outputs=('logits',) along with the labels."
                )
            return loss.compute(self, hidden_states, self._logits)
        finally:
            call.is_in_head = False

    def _logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs the forward without a loss: one that other code has set, or that of the module's class."""
        installed: Callable[..., Tensor] | None = vars(self).get(_INSTALLED)
        logits: Tensor = (super().forward if installed is None else installed)(*args, **kwargs)
        return logits


class FusedLMHead(ComputesLoss, nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` that can compute the loss. An existing lm_head becomes one by a swap of its class: same
    parameters, same names, same state dict."""


def fuse_head(head: nn.Module, wrap_id: WrapId) -> None:
    """Swaps the class of ``head`` in place; FSDP2's class stays on top. A linear forward that other code has set on the
    instance becomes the one for logits.

    Args:
        wrap_id: of the model. Copies of ``head`` that PEFT makes keep it.
    """
    if not isinstance(head, ComputesLoss):
        base = below_wrappers(type(head))
        head.__class__ = with_base(type(head), base, _class_for(base))
    # Also one that other code has set since: TRL's trainers do for an fp32 head.
    if is_linear_forward(vars(head).get("forward")):
        vars(head)[_INSTALLED] = vars(head).pop("forward")
    vars(head)[_WRAP_ID] = wrap_id


def _class_for(base: Any) -> Any:
    return FusedLMHead if base is nn.Linear else subclass_of(base, ComputesLoss, (_class_for, (base,)))


def _hook_objection(head: nn.Module, base: nn.Module, around: tuple[nn.Module, ...]) -> str | None:
    """Says which hook needs logits or hidden states of each token, as a clause; None if none does.

    Args:
        around: modules around ``head`` at its name, whose outputs are its logits.
    """
    everywhere = nn.modules.module
    hooks = [*everywhere._global_backward_pre_hooks.values(), *everywhere._global_backward_hooks.values()]
    for module in dict.fromkeys((*around, head, base)):
        hooks += (*module._backward_pre_hooks.values(), *module._backward_hooks.values())
    if hooks and not all(map(is_of_framework, hooks)):
        return "its lm_head has a backward hook, which reads the gradient of the logits; the loss is the model's own"
    if head is not base and any(map(has_hooks, parts_of(head))):
        return (
            "a part of the LoRA layer on its lm_head has hooks, which read the hidden states of each token; the loss "
            "is the model's own"
        )
    return None


def _around(outer: nn.Module, head: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the modules of ``outer`` that contain ``head``."""
    if outer is head:
        return ()
    return tuple(module for module in outer.modules() if module is not head and head in module.modules())


def computes_in_fp32(head: nn.Module) -> bool:
    """True for an lm_head that computes with operands in fp32, as TRL's ``cast_lm_head_to_fp32`` makes it."""
    return is_fp32_forward(vars(head).get(_INSTALLED))


def _restore_head(head: nn.Module) -> None:
    """Undoes :func:`fuse_head`."""
    fused = next(cls for cls in type(head).__mro__ if ComputesLoss in cls.__bases__)
    head.__class__ = with_base(type(head), fused, fused.__bases__[1])
    if _INSTALLED in vars(head):
        vars(head)["forward"] = vars(head).pop(_INSTALLED)
    del vars(head)[_WRAP_ID]


@dataclass(frozen=True)
class HeadInUse:
    """The lm_head that the next forward calls."""

    head: nn.Module
    """lm_head, or the LoRA layer around it"""
    base: nn.Module
    """lm_head itself"""
    adapter: ShardingAdapter | None
    """the sharding adapter for its weight; None where its loss cannot be fused"""
    vocab_size: int
    """rows of its full weight"""
    in_fp32: bool
    """True if it computes with operands in fp32"""
    unfusable: str | None = None
    """why its loss cannot be fused, as a clause; None if it can"""


class LMHead:
    """Finds lm_head in a model whose wrappers and PEFT layers may change after :func:`liger_dist.wrap`."""

    def __init__(self, structure: Structure, *, wrap_id: WrapId, strategy: str, config: WrapConfig) -> None:
        self._structure, self._wrap_id = structure, wrap_id
        self._strategy, self._config = strategy, config
        self._hook: RemovableHandle | None = None
        self._key: tuple[object, ...] | None = None
        self._found: HeadInUse | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Classes made at run time have no name in a pickle.
        return vars(self) | {"_key": None, "_found": None}

    def outer(self, model: nn.Module) -> nn.Module:
        """Returns the module at lm_head's name: lm_head itself, or FSDP1's or PEFT's around it."""
        return model.get_submodule(self._structure.head_name)

    def fuse(self, model: nn.Module) -> None:
        """Swaps the class of every module that may be called as lm_head."""
        for head in heads_at(self.outer(model)):
            fuse_head(head, self._wrap_id)

    def install_hook(self, model: nn.Module) -> None:
        """Hooks the outermost module at lm_head's name, after the model is sharded."""
        self._hook = self.outer(model).register_forward_hook(partial(_carry_again, self._wrap_id))

    def remove(self, model: nn.Module) -> None:
        """Undoes :meth:`fuse` and :meth:`install_hook`."""
        if self._hook is not None:
            self._hook.remove()
        for head in heads_at(self.outer(model)):
            if vars(head).get(_WRAP_ID) is self._wrap_id:
                _restore_head(head)

    def in_use(self, model: nn.Module) -> HeadInUse:
        """Returns the modules that a forward will call, and the adapter for the weight. They are looked up again if a
        module, or the way the weight is stored, has changed. A PEFT layer that was added after wrapping is fused now,
        and so is the new lm_head that ``modules_to_save`` makes of a tied one.

        Raises:
            LigerDistError: it is not the lm_head that was wrapped, or its PEFT layer is not linear.
            NoAdapterError: no adapter serves it.
        """
        outer = self.outer(model)
        weight = outer._parameters.get("weight", vars(outer).get("weight"))
        key: tuple[object, ...] | None = None
        if weight is not None and not outer._modules:
            # Frameworks mark the parameters that they store.
            key = (outer, type(outer), type(model), "forward" in vars(outer))
            key += (type(weight), weight.shape, weight.requires_grad, weight._base is None, *vars(weight))
        if key is None or key != self._key:
            self._key, self._found = None, None
            self._found = self._find(model, outer)
            self._key = key
        assert self._found is not None
        objection = _hook_objection(self._found.head, self._found.base, _around(outer, self._found.head))
        return self._found if objection is None else replace(self._found, unfusable=objection)

    def _find(self, model: nn.Module, outer: nn.Module) -> HeadInUse:
        head = active_head(outer)
        structure = self._structure
        if under_trained_rows(head) is not None:
            return HeadInUse(head, structure.head, None, structure.vocab_size, False, TRAINED_ROWS)
        objection = lora_objection(head)
        base = base_head(head)
        if objection is not None or not (
            vars(base).get(_WRAP_ID) is self._wrap_id or self._is_trained_copy(outer, base)
        ):
            raise LigerDistError(
                f"lm_head of {type(model).__name__} is a {type(outer).__name__} now"
                + (f", with {objection}" if objection else ", not the one that was wrapped. ")
                + "After resizing embeddings call liger_dist.unwrap(model) and wrap it again."
            )
        fuse_head(head, self._wrap_id)
        adapter = choose(self._facts(model, head))
        return HeadInUse(head, base, adapter, self._vocab_size(base), computes_in_fp32(base))

    def _is_trained_copy(self, outer: nn.Module, head: nn.Module) -> bool:
        """True for an lm_head of PEFT's ``modules_to_save`` that computes the same map as the one that was wrapped."""
        if not (trains_copy(outer) and isinstance(head, nn.Linear) and is_linear_map(head)):
            return False
        return head_shape(head) == (self._structure.vocab_size, self._structure.hidden_size)

    def _vocab_size(self, base: nn.Module) -> int:
        """Returns the number of rows of lm_head; it is larger than at :func:`liger_dist.wrap` if
        ``resize_token_embeddings`` has grown a tied one in place."""
        weight = base._parameters.get("weight")
        is_full = type(weight) is nn.Parameter and weight.shape[1:] == (self._structure.hidden_size,)
        return max(self._structure.vocab_size, len(weight)) if is_full else self._structure.vocab_size  # type: ignore[arg-type]

    def _facts(self, model: nn.Module, head: nn.Module) -> Facts:
        base = cast(nn.Linear, base_head(head))
        return collect_facts(
            model,
            base,
            strategy=self._strategy,
            tied_to=self._structure.tied_to if base is self._structure.head else tied_modules(model, base),
            has_lora=base is not head,
            config=self._config,
        )

    def check_storage(self, model: nn.Module) -> None:
        """Refuses an lm_head that is sharded already in a layout that no adapter serves. No collectives.

        Raises:
            NoAdapterError: no adapter serves it, whatever wraps the model later.
        """
        facts = self._facts(model, active_head(self.outer(model)))
        if facts.storage.adapter.name == "tensor-parallel":
            # DDP or FSDP2 may wrap a tensor-parallel model later and average over the replicas.
            facts = replace(facts, token_mean="local")
        if facts.storage.adapter.name != "replicated":
            choose(facts)


@untraced
def _carry_again(wrap_id: WrapId, head: nn.Module, args: Any, output: Any) -> Any:
    """Carries the loss again, as a forward hook. Tensor parallelism converts the output of lm_head from a DTensor to a
    tensor, which carries the loss again from here."""
    if type(output) is not Tensor or output.shape[-1] != 0:
        return None
    call = current_call(wrap_id)
    pending = None if call is None or call.on_logits else call.latest()
    return None if pending is None else FusedLogits.carrying(output, pending, vocab_size=pending.call.vocab_size)


def _recompute_in(first: LossCall) -> None:
    """Lets a checkpoint that the model's forward has begun around its lm_head find the call again, when it is
    recomputed in the backward, outside of the model's forward.

    Args:
        first: the first loss of the call, before lm_head is called.
    """
    frame, known = checkpoint_frame(), first.checkpoints or ()
    if frame is None or frame in known:
        return
    first.checkpoints = (*known, frame)
    recompute, wrap_id, number = frame.recompute_fn, first.wrap_id, first.num_head_calls
    unshared: dict[str, Any] = {"head_calls": (), "share": None, "further": none_further}
    calls = tuple(call and replace(call, pending=None, **unshared) for call in first.head_calls)
    again = next(call for call in calls if call is not None and not call.is_further)

    def recompute_again(*args: Any) -> None:
        loss = replace(again, head_calls=calls, num_head_calls=number, is_in_head=False, checkpoints=())
        try:
            with running(wrap_id, loss):
                recompute(*args)
        finally:
            loss.release()

    frame.recompute_fn = recompute_again
