"""SkyRL's model for policies and references without logits."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from flash_attn.bert_padding import pad_input, unpad_input
from skyrl.backends.skyrl_train.distributed.ulysses.utils import gather_outputs_and_unpad, ulysses_pad_and_slice_inputs
from skyrl.backends.skyrl_train.training_batch import TensorList
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from torch import Tensor, nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.fused_head.call import IGNORE_INDEX
from liger_dist.sharding.single import LoadedByHost

from .patches import check_members, refuse_liger_kernel, with_config, wrap_policy

MEMBERS = {
    "forward": (
        "self",
        "sequences",
        "num_actions",
        "attention_mask",
        "temperature",
        "return_output",
        "compute_entropy",
        "entropy_requires_grad",
        "pixel_values",
        "image_grid_thw",
        "mm_token_type_ids",
    ),
}


class FusedModelWrapper(HFModelWrapper):  # type: ignore[misc]
    """SkyRL's wrapper of a model, with a wrapped model inside, whose log-probabilities and entropies are computed
    without logits."""

    wrap_config: ClassVar[WrapConfig] = WrapConfig()

    def __init__(self, pretrain_or_model: Any, *args: Any, **kwargs: Any) -> None:
        """Makes the model and wraps it, before FSDP2 shards it.

        Raises:
            LigerDistError: ``use_liger_kernel``, a vision-language model whose padding is removed or whose sequences
                are sharded, or a model whose loss is not fused or that would mix packed samples.
        """
        refuse_liger_kernel(kwargs)
        super().__init__(pretrain_or_model, *args, **kwargs)
        for setting, is_set in (
            ("remove_microbatch_padding", self.remove_microbatch_padding),
            ("sequence_parallel_size", self.sequence_parallel_size > 1),
        ):
            if self.is_vlm and is_set:
                raise LigerDistError(
                    f"{setting} is {getattr(self, setting)} for a vision-language model, which SkyRL does not support; "
                    "leave it out."
                )
        packs = "remove_microbatch_padding" if self.remove_microbatch_padding else None
        way_out = "Run SkyRL's own entry point for this model."
        # Ranks other than the first have no weights yet.
        wrap_policy(self.model, LoadedByHost(), self.wrap_config, way_out=way_out, packs=packs)

    def forward(
        self,
        sequences: Tensor,
        num_actions: int | list[int],
        attention_mask: Tensor | None = None,
        temperature: float = 1.0,
        return_output: bool = False,
        compute_entropy: bool = False,
        entropy_requires_grad: bool = True,
        pixel_values: Any = None,
        image_grid_thw: Any = None,
        mm_token_type_ids: Tensor | None = None,
    ) -> Any:
        """Computes log-probabilities ``[B, A]`` of the last actions, as SkyRL's own forward; entropies ``[B, S]`` are
        in the output."""
        assert attention_mask is not None
        if self.is_vlm:
            inputs = self._image_inputs(sequences, attention_mask, pixel_values, image_grid_thw, mm_token_type_ids)
            labels, padding, indices = sequences.roll(-1, 1).masked_fill(attention_mask == 0, IGNORE_INDEX), 0, None
        else:
            inputs, labels, padding, indices = self._inputs(sequences, attention_mask)
        output = self.model(
            **inputs,
            labels=labels,
            shift_labels=labels,
            outputs=("log_prob", "entropy") if compute_entropy else ("log_prob",),
            temperature=temperature,
            differentiable=torch.is_grad_enabled(),
        )

        def unpacked(values: Tensor) -> Tensor:
            if self.sequence_parallel_size > 1:
                values = gather_outputs_and_unpad(values, gather_dim=1, unpad_dim=1, padding_size=padding)
            if indices is None:
                return values
            rows, length = attention_mask.shape
            padded: Tensor = pad_input(values.transpose(0, 1), indices=indices, batch=rows, seqlen=length)
            return padded.squeeze(-1)

        if compute_entropy:
            entropy = unpacked(output.entropy)
            output["entropy"] = entropy if entropy_requires_grad else entropy.detach()
        log_probs = unpacked(output.log_prob)
        last: Any = num_actions
        if isinstance(num_actions, list):
            last = num_actions[0] if len(num_actions) == 1 else np.array(num_actions)
        action_log_probs = log_probs[:, -last - 1 : -1]
        return (action_log_probs, output) if return_output else action_log_probs

    def _inputs(self, sequences: Tensor, attention_mask: Tensor) -> tuple[dict[str, Any], Tensor, int, Tensor | None]:
        """Returns keywords of the model, its labels, the number of tokens that fill the last sequence shard, and the
        indices of the tokens that are left when padding is removed (None if it stays)."""
        mask: Tensor | None = attention_mask
        positions = (attention_mask.long().cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        padding, indices = 0, None
        if self.remove_microbatch_padding:
            ids, indices, *_ = unpad_input(sequences.unsqueeze(-1), attention_mask)
            positions, *_ = unpad_input(positions.unsqueeze(-1), attention_mask)
            sequences, positions, mask = ids.transpose(0, 1), positions.transpose(0, 1), None
        labels = sequences.roll(-1, 1)
        if mask is not None:
            # Padding is scored in SkyRL, and left out afterwards.
            labels = labels.masked_fill(mask == 0, IGNORE_INDEX)
        if self.sequence_parallel_size > 1:
            size = self.sequence_parallel_size
            sequences, positions, mask, padding = ulysses_pad_and_slice_inputs(sequences, positions, mask, size)
            labels, *_ = ulysses_pad_and_slice_inputs(labels, None, None, size)
        return {"input_ids": sequences, "attention_mask": mask, "position_ids": positions}, labels, padding, indices

    def _image_inputs(
        self, sequences: Tensor, attention_mask: Tensor, pixel_values: Any, grid: Any, kinds: Tensor | None
    ) -> dict[str, Any]:
        """Returns keywords of a vision-language model, which computes its positions itself."""
        if isinstance(pixel_values, TensorList):
            pixel_values = torch.cat(pixel_values.tensors)
        if isinstance(grid, TensorList):
            grid = torch.cat(grid.tensors)
        if grid is not None and kinds is None:
            kinds = (sequences == self.model.config.image_token_id).long()
        inputs = {
            "input_ids": sequences,
            "attention_mask": attention_mask,
            "pixel_values": pixel_values,
            "image_grid_thw": grid,
        }
        return inputs if kinds is None else inputs | {"mm_token_type_ids": kinds}


def make_class(config: WrapConfig | None = None) -> type[nn.Module]:
    """Makes a class of fused wrappers whose models are wrapped with ``config``.

    Raises:
        LigerDistError: SkyRL's functions have other parameters than the tested releases'.
    """
    check_members(HFModelWrapper, MEMBERS, host="skyrl")
    return with_config(FusedModelWrapper, config)
