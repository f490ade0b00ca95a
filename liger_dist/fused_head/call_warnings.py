"""Warnings of the calls of one model, each given once, and the refusal of a loss outside of an FSDP1 wrapper."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.losses.labels import AlignedLabels
from liger_dist.losses.spec import CALL_KEYWORDS
from liger_dist.model.structure import embedding_of
from liger_dist.model.torch_modes import in_backward, is_captured
from liger_dist.sharding import ddp, deepspeed
from liger_dist.sharding.base import ShardingAdapter
from liger_dist.sharding.fsdp1 import is_outside_forward
from liger_dist.sharding.process_groups import world_size

from .call import Call, Signature
from .recipe import LossRecipe


class CallWarnings:
    """What the calls of one model have been warned of."""

    def __init__(self, *, wrapped_by_caller: bool) -> None:
        self.wrapped_by_caller = wrapped_by_caller
        """True if other code than :func:`liger_dist.wrap` may wrap the model in DDP or FSDP1"""
        self.replaced_attention: str | None = None
        """implementation of the model's original attention where another one is selected, whose hidden states of
        padding differ; None where it was kept"""
        self._has_looked_at_padding = False
        self._warned: set[str] = set()

    def _once(self, sentence: str) -> None:
        """Warns with a sentence, the first time."""
        if sentence not in self._warned:
            self._warned.add(sentence)
            warnings.warn(sentence, stacklevel=2)

    def of_unfused(self, model_name: str, reason: str, *, runs_original: bool = False) -> None:
        """Warns of a loss that is not fused.

        Args:
            reason: a clause.
            runs_original: adds that the model's original loss is computed, for a reason that does not say so.
        """
        addition = " The loss is the model's own." if runs_original else ""
        self._once(f"liger_dist leaves the loss of {model_name} unfused: {reason}.{addition}")

    def of_earlier_forward(self, signature: Signature, config: WrapConfig, keywords: dict[str, Any]) -> None:
        """Warns of a loss outside of the swapped forward, which other code calls past.

        Args:
            keywords: of the loss function.

        Raises:
            LigerDistError: it has options of the loss, which nothing would compute.
        """
        where = f"outside of the forward that liger_dist.wrap has given the {signature.model_name}"
        way_out = "other code calls an earlier forward. Wrap the model after that code"
        asked = [name for name in CALL_KEYWORDS if keywords.get(name) is not None and name not in signature.names]
        asked += ["token_mean='global'"] if config.token_mean == "global" else []
        if asked:
            raise LigerDistError(
                f"{asked[0]} was asked of a loss {where}, where nothing computes it: {way_out}, or leave it out."
            )
        self._once(f"a loss was computed from full logits, {where}, and is not fused: {way_out}.")

    def check_wrapper(self, model: nn.Module, adapter: ShardingAdapter) -> None:
        """Refuses a loss outside of the forward of an FSDP1 wrapper that other code has made, and warns of one whose
        gradients nothing averages."""
        name = type(model).__name__
        if is_outside_forward(model, embedding_of(model)):
            raise LigerDistError(
                f"a loss was asked of the {name} inside FullyShardedDataParallel, outside the wrapper's forward, which "
                "unshards weights and reduces gradients. Call the wrapper, or wrap the model itself with "
                "strategy='fsdp1'."
            )
        is_replicated = adapter.name == "replicated"
        is_averaged = world_size() == 1 or ddp.may_be_running() or deepspeed.has_started()
        # A checkpoint of the whole model is recomputed in the backward, outside of every forward.
        if torch.is_grad_enabled() and is_replicated and not is_averaged and not in_backward():
            self._once(
                f"a loss of {name} was asked for on {dist.get_world_size()} ranks outside the forward of "
                "DistributedDataParallel, so that nothing averages its gradients. Call the wrapper instead of the "
                "model inside it, wrap with strategy='ddp' (or 'deepspeed'), or average them yourself."
            )

    def of_scored_padding(self, call: Call, aligned: AlignedLabels) -> None:
        """Warns, once, of labels that are scored by the logits of padding. On a GPU only the first batch with a mask is
        looked at: that waits."""
        mask, labels = call.named.get("attention_mask"), aligned.labels
        is_known = self._has_looked_at_padding or self.replaced_attention is None
        if is_known or not isinstance(mask, Tensor) or mask.shape != labels.shape:
            return
        if labels.is_cuda:
            if is_captured():
                return
            self._has_looked_at_padding = True
        differs = (mask == 0) & (labels.to(mask.device) != call.ignore_index)
        if self.replaced_attention != "eager":
            # Left padding attends to no key; its output is 0 here and in scaled_dot_product_attention.
            differs &= mask.cumsum(-1) > 0
        if bool(differs.any()):
            self._has_looked_at_padding = True
            self._once(
                f"labels of {call.model_name} score logits of padding, whose attention_mask is 0. They differ from "
                "those of the model's own attention, and so does the loss. Give padding, and the token after padding "
                f"on the left, the label {call.ignore_index}, or wrap with WrapConfig(varlen_attention=False)."
            )

    def of_ignored_items(self, call: Call, recipe: LossRecipe) -> None:
        if torch.is_grad_enabled() and not recipe.takes_num_items:
            self._once(
                f"num_items_in_batch was given to {call.model_name}, whose forward computes the mean over the tokens "
                "of the call and ignores it. A Trainer that passes it does not divide the loss itself: loss and "
                "gradients are too large by the number of micro-batches of a step, and by that of ranks. Set "
                "model.accepts_loss_kwargs = False before the Trainer is made; in a loop leave it out, and divide the "
                "loss by the number of micro-batches."
            )
