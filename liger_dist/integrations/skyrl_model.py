"""SkyRL's model for policies and references without logits."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
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
from liger_dist.losses.support import on_support
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
REPLAY = {"forward": ("sample_support", "loss_mask", "enable_sample_support_replay")}
"""parameters of releases with replay of supports, from 0.4.0 on"""
OF_REPLAY: dict[str, dict[str, tuple[str, ...]]] = {
    "skyrl.backends.skyrl_train.distributed.megatron.token_metadata": {
        "canonical_token_metadata_layout": ("attention_mask",)
    },
    "skyrl.backends.skyrl_train.utils.sample_support_replay": {
        "missing_sample_support_message": ("backend",),
        "sample_support_row_ids_in_batch_positions": ("sample_support", "layout"),
    },
}
"""functions of these releases that the replay of supports calls, by module"""


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
        sample_support: Any = None,
        loss_mask: Tensor | None = None,
        enable_sample_support_replay: bool = False,
    ) -> Any:
        """Computes log-probabilities ``[B, A]`` of the last actions, as SkyRL's forward; entropies ``[B, S]`` are
        in the output.

        Args:
            sample_support: SkyRL's packed rows of classes that the sampler kept, one for each token of the responses.
            loss_mask: ``[B, A]``, the tokens that the loss reads.
            enable_sample_support_replay: True computes both values of the distribution over the support. They are 0 at
                tokens without one.

        Raises:
            LigerDistError: replay without ``sample_support`` or ``loss_mask``, or a token that the loss reads has no
                support.
        """
        assert attention_mask is not None
        if self.is_vlm:
            inputs = self._image_inputs(sequences, attention_mask, pixel_values, image_grid_thw, mm_token_type_ids)
            labels, padding, indices = sequences.roll(-1, 1).masked_fill(attention_mask == 0, IGNORE_INDEX), 0, None
        else:
            inputs, labels, padding, indices = self._inputs(sequences, attention_mask)
        support = None
        if enable_sample_support_replay:
            support = self._support(sequences, attention_mask, indices, sample_support, loss_mask)
            labels = labels.masked_fill((support < 0).all(-1), IGNORE_INDEX)
        output = self._score(inputs, labels, support, temperature, with_entropy=compute_entropy)

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

    def _score(
        self, inputs: dict[str, Any], labels: Tensor, support: Tensor | None, temperature: float, *, with_entropy: bool
    ) -> Any:
        """Calls the model for log-probabilities of the labels, and entropies; over the classes ``support`` ``[..., K]``
        if there are any."""
        call = inputs | {
            "labels": labels,
            "shift_labels": labels,
            "temperature": temperature,
            "differentiable": torch.is_grad_enabled(),
        }
        if support is None:
            return self.model(**call, outputs=("log_prob", "entropy") if with_entropy else ("log_prob",))
        output = self.model(**call, outputs=("log_prob", "log_prob_at"), token_ids=support)
        # Not support_ids, which refuse a label outside of its support and a class that stands in one twice: SkyRL
        # scores the first and counts the second twice.
        of_vocabulary = {"log_prob": output.log_prob, "log_prob_at": output.log_prob_at}
        if with_entropy:
            of_vocabulary["entropy"] = torch.zeros_like(output.log_prob)
        for name, values in on_support(of_vocabulary, support, labels != IGNORE_INDEX).items():
            output[name] = values
        return output

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

    def _support(
        self, sequences: Tensor, attention_mask: Tensor, indices: Tensor | None, sample_support: Any, loss_mask: Any
    ) -> Tensor:
        """Returns the classes that the sampler kept at the positions of the model's logits, ``[..., K]``, -1 for none.

        Args:
            indices: of the tokens that are left when padding is removed; None if it stays.

        Raises:
            LigerDistError: see :meth:`forward`.
        """
        metadata, replay = (import_module(name) for name in OF_REPLAY)
        if sample_support is None:
            raise LigerDistError(replay.missing_sample_support_message("FSDP"))
        if loss_mask is None:
            raise LigerDistError("sample-support replay is enabled and loss_mask is None; expected a mask [B, A].")
        layout = metadata.canonical_token_metadata_layout(attention_mask)
        rows = replay.sample_support_row_ids_in_batch_positions(sample_support, layout)
        is_read = torch.zeros_like(sequences, dtype=torch.bool)
        is_read[:, sequences.shape[1] - loss_mask.shape[1] :] = loss_mask.bool()
        if indices is not None:
            rows, is_read = (values.flatten()[indices][None] for values in (rows, is_read))
        # Row -1 is the last one.
        no_row = sample_support.values.new_full((1, sample_support.values.shape[1]), -1)
        supports = torch.cat([sample_support.values, no_row]).long()
        # All sequence shards see the same tokens here, so that their ranks raise together.
        is_missing = is_read.roll(-1, 1) & (supports < 0).all(-1)[rows]
        if is_missing.any():
            raise LigerDistError(
                f"{int(is_missing.sum())} tokens that the loss reads have no support; expected the classes that the "
                "sampler kept for each of them. Mask these tokens, or set enable_sample_support_replay to false."
            )
        if self.sequence_parallel_size > 1:
            # Tokens that fill the last shard get the first row; nothing reads them.
            rows, *_ = ulysses_pad_and_slice_inputs(rows, None, None, self.sequence_parallel_size)
        return supports[rows]

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
    if len(signature(HFModelWrapper.forward).parameters) > len(MEMBERS["forward"]):
        for module, members in OF_REPLAY.items():
            check_members(import_module(module), members, host="skyrl")
    check_members(HFModelWrapper, MEMBERS, host="skyrl", optional=REPLAY)
    return with_config(FusedModelWrapper, config)
