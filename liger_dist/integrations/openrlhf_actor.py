"""OpenRLHF's actor without logits. Apart from :mod:`.openrlhf`, because this module imports DeepSpeed, which processes
of vLLM must not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from openrlhf.models import Actor
from openrlhf.models.ring_attn_utils import gather_and_pad_tensor, get_ring_attn_group, unpad_and_slice_tensor
from torch import Tensor, nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.fused_head.call import IGNORE_INDEX

from .openrlhf import TRAINING
from .patches import check_members, refuse_liger_kernel, with_config, wrap_policy

MEMBERS = {
    "forward": (
        "self",
        "sequences",
        "action_mask",
        "attention_mask",
        "return_output",
        "allgather_logits",
        "return_logprobs",
        "ring_attn_group",
        "packed_seq_lens",
        "return_entropy",
        "mm_inputs",
    ),
}
RING = (
    "ring attention shards the tokens of a sequence, which liger_dist does not support in OpenRLHF. Set "
    f"ds.ring_attn_size to 1, or train by python -m {TRAINING}."
)


class FusedActor(Actor):  # type: ignore[misc]
    """OpenRLHF's actor with a wrapped model, whose log-probabilities and entropies are computed without logits."""

    wrap_config: ClassVar[WrapConfig] = WrapConfig()

    def __init__(self, pretrain_or_model: Any, *args: Any, **kwargs: Any) -> None:
        """Makes the model and wraps it, before DeepSpeed shards it.

        Raises:
            LigerDistError: ``use_liger_kernel``, ring attention, tensor parallelism of DeepSpeed, or a model whose loss
                is not fused or that would mix packed samples.
        """
        refuse_liger_kernel(kwargs)
        if get_ring_attn_group() is not None:
            raise LigerDistError(f"a group for ring attention has been set: {RING}")
        tensor_parallel = ((kwargs.get("ds_config") or {}).get("tensor_parallel") or {}).get("autotp_size", 1)
        if tensor_parallel > 1:
            raise LigerDistError(
                f"tensor_parallel.autotp_size is {tensor_parallel} in the DeepSpeed configuration, which replaces "
                "lm_head; set ds.tensor_parallel_size to 1."
            )
        super().__init__(pretrain_or_model, *args, **kwargs)
        packs = "packing_samples" if getattr(self, "packing_samples", False) else None
        way_out = f"Train it by python -m {TRAINING}."
        wrap_policy(self.model, "deepspeed", self.wrap_config, way_out=way_out, packs=packs)

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: list[int] | None = None,
        return_entropy: bool = False,
        **mm_inputs: Any,
    ) -> Any:
        """Computes log-probabilities ``[B, S - 1]`` of the next tokens, or ``[B, A]`` of the actions, as OpenRLHF's
        forward. A call that asks for neither gets its logits.

        Raises:
            LigerDistError: ring attention.
        """
        if ring_attn_group is not None:
            raise LigerDistError(f"ring_attn_group was given: {RING}")
        if action_mask is None and not return_logprobs:
            return super().forward(
                sequences,
                attention_mask=attention_mask,
                return_output=return_output,
                allgather_logits=allgather_logits,
                packed_seq_lens=packed_seq_lens,
                return_entropy=return_entropy,
                **mm_inputs,
            )
        if return_entropy and not return_output:
            raise LigerDistError("return_entropy is True and return_output is False, so nothing returns it; set both.")
        inputs, labels, unpack = self._inputs(sequences, attention_mask, mm_inputs)
        output = self.model(
            **inputs,
            labels=labels,
            shift_labels=labels,
            outputs=("log_prob", "entropy") if return_entropy else ("log_prob",),
            temperature=self.temperature,
            differentiable=torch.is_grad_enabled(),
        )
        if return_entropy:
            output["entropy"] = unpack(output.entropy)[:, :-1]
        log_probs = unpack(output.log_prob)[:, :-1]
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output else log_probs

    def _inputs(
        self, sequences: Tensor, attention_mask: Any, mm_inputs: dict[str, Any]
    ) -> tuple[dict[str, Any], Tensor, Callable[[Tensor], Tensor]]:
        """Returns keywords of the model, its labels, and a function from values of its tokens to ``[B, S]``."""
        rows, length = sequences.shape
        if getattr(self, "packing_samples", False):
            ids, positions, labels, padding, indices = unpad_and_slice_tensor(sequences, attention_mask, None)
            unpack = functools.partial(
                gather_and_pad_tensor,
                ring_attn_group=None,
                ring_attn_pad_len=padding,
                indices=indices,
                batch=rows,
                seqlen=length,
            )
            return {"input_ids": ids, "attention_mask": None, "position_ids": positions, **mm_inputs}, labels, unpack
        # Padding is scored in OpenRLHF, and left out afterwards.
        labels = sequences.roll(-1, 1).masked_fill(attention_mask == 0, IGNORE_INDEX)
        inputs = {"input_ids": sequences, "attention_mask": attention_mask, **mm_inputs}
        if not getattr(self, "is_vlm", False):
            positions = attention_mask.long().cumsum(-1) - 1
            inputs["position_ids"] = positions.masked_fill(attention_mask == 0, 1)
        elif mm_inputs:
            inputs |= self._kinds_of_tokens(sequences, mm_inputs)
        return inputs, labels, lambda values: values

    def _kinds_of_tokens(self, sequences: Tensor, mm_inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Marks the tokens of images (1) and videos (2), also in the answers."""
        config = self._vlm_config
        kinds = (sequences == config.image_token_id).int()
        video = getattr(config, "video_token_id", None)
        if video is not None:
            kinds = kinds.masked_fill(sequences == video, 2)
        return {"mm_token_type_ids" if "image_grid_thw" in mm_inputs else "token_type_ids": kinds}


def make_class(config: WrapConfig | None = None) -> type[nn.Module]:
    """Makes a class of fused actors whose models are wrapped with ``config``.

    Raises:
        LigerDistError: OpenRLHF's actor has other parameters than the tested releases'.
    """
    check_members(Actor, MEMBERS, host="openrlhf")
    return with_config(FusedActor, config)
