"""lm_head of one model: the module that is called, how its weight is stored, and the sharding adapter for that."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from torch import nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.peft_layers import active_head, base_head, lora_objection, trains_copy, under_trained_rows
from liger_dist.sharding import choose, collect_facts
from liger_dist.sharding.base import DataParallel, Facts, ShardingAdapter
from liger_dist.sharding.deepspeed import is_stored_by_zero3
from liger_dist.sharding.fsdp1 import is_stored_by_fsdp1
from liger_dist.structure import Structure, head_shape, is_linear_map, stored_parameter, tied_modules
from liger_dist.weak import Weakly

from .lm_head import fuse_head, is_fused_by


class HeadAccess:
    """Finds lm_head in a model whose wrappers and PEFT layers may change after :func:`liger_dist.wrap`."""

    _model = Weakly()
    _seam = Weakly()

    def __init__(
        self, model: nn.Module, structure: Structure, *, seam: object, strategy: str, config: WrapConfig
    ) -> None:
        self._model, self._structure, self._seam = model, structure, seam
        self._strategy, self._config = strategy, config
        self._chosen: ShardingAdapter | None = None
        self._stored: tuple[object, ...] = ()

    @property
    def outer_head(self) -> nn.Module:
        """The module at lm_head's name: lm_head itself, or FSDP1's or PEFT's around it."""
        model: nn.Module = self._model
        return model.get_submodule(self._structure.head_name)

    def in_use(self) -> nn.Module:
        """The module that a forward will call, lm_head or a LoRA layer around it. A PEFT layer that was added after
        wrapping is fused now, and so is the new lm_head that ``modules_to_save`` makes of a tied one.

        Raises:
            LigerDistError: it is not the lm_head that was wrapped, or its PEFT layer is not linear.
        """
        head = active_head(self.outer_head)
        objection = lora_objection(head)
        base = base_head(head)
        if objection is not None or not (is_fused_by(base, self._seam) or self._is_trained_copy(base)):
            raise LigerDistError(
                f"lm_head of {type(self._model).__name__} is a {type(self.outer_head).__name__} now"
                + (f", with {objection}" if objection else ", not the one that was wrapped. ")
                + "After resizing embeddings call liger_dist.unwrap(model) and wrap it again."
            )
        fuse_head(head, self._seam)
        return head

    def _is_trained_copy(self, head: nn.Module) -> bool:
        """True for an lm_head of PEFT's ``modules_to_save`` that computes the same map as the one that was wrapped."""
        if not (trains_copy(self.outer_head) and isinstance(head, nn.Linear) and is_linear_map(head)):
            return False
        return head_shape(head) == (self._structure.vocab_size, self._structure.hidden_size)

    def has_trained_rows(self) -> bool:
        """True if PEFT has put a module on lm_head that trains some of its rows."""
        return under_trained_rows(active_head(self.outer_head)) is not None

    def adapter(self, head: nn.Module) -> ShardingAdapter:
        """The sharding adapter for ``head``; chosen again only when the weight is stored in another way.

        Raises:
            NoAdapterError: none serves it.
        """
        base = cast(nn.Linear, base_head(head))
        weight = stored_parameter(base)
        stored = (
            type(self._model),
            id(head),
            type(base),
            type(weight),
            is_stored_by_zero3(weight),
            is_stored_by_fsdp1(weight),
            weight.requires_grad,
        )
        if self._chosen is None or self._stored != stored:
            self._chosen, self._stored = choose(self.facts(head)), stored
        return self._chosen

    def data_parallel(self, head: nn.Module) -> DataParallel:
        """The ranks that share the token mean of the config."""
        if self._config.token_mean == "local":
            return DataParallel(groups=(), divide_factor=1.0)
        return self.adapter(head).data_parallel(base_head(head), self._model)

    def facts(self, head: nn.Module) -> Facts:
        """The facts of ``head``, which :meth:`in_use` returned."""
        base = cast(nn.Linear, base_head(head))
        return collect_facts(
            self._model,
            base,
            strategy=self._strategy,
            tied_to=self._structure.tied_to if base is self._structure.head else tied_modules(self._model, base),
            has_lora=base is not head,
            config=self._config,
        )

    def check_storage(self) -> None:
        """Refuses an lm_head that is sharded already in a layout that no adapter serves. No collectives.

        Raises:
            NoAdapterError: no adapter serves it, whatever wraps the model later.
        """
        facts = self.facts(active_head(self.outer_head))
        if facts.engine == "dtensor":
            # DDP or FSDP2 may wrap a tensor-parallel model later and average over the replicas.
            facts = replace(facts, token_mean="local")
        if facts.engine != "plain":
            choose(facts)
