"""verl: ``VERL_USE_EXTERNAL_MODULES=liger_dist.integrations.verl``, or ``actor_rollout_ref.model.external_lib``.

verl imports this module in each of its processes. It registers :class:`FusedEngine` for language models (policies,
references and SFT) under the strategies "fsdp" and "fsdp2". The engine wraps the model before verl shards it, and asks
it for log-probabilities, entropies and sums of squared probabilities instead of logits. Other engines, critics and
reward models are not patched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.utils.ulysses import slice_input_tensor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from liger_dist.config import WrapConfig
from liger_dist.distillation import distillation_loss
from liger_dist.errors import LigerDistError
from liger_dist.fused_head.call import IGNORE_INDEX
from liger_dist.hosts.scored_logits import ScoredLogits
from liger_dist.losses.spec import Uncast
from liger_dist.model.peft import base_model_of
from liger_dist.record import inner_model, record_of
from liger_dist.sharding.single import LoadedByHost

from .patches import check_members, wrap_policy
from .verl_distillation import (
    MODES,
    TeacherHead,
    full_distillation,
    loss_metric,
    packed_hidden,
    register_modes,
    teacher_path,
    token_weights,
)

MEMBERS = {
    "_build_fsdp_module": ("self", "module"),
    "forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "prepare_model_inputs": ("self", "micro_batch"),
    "prepare_model_outputs": ("self", "output", "output_args", "micro_batch", "logits_processor_func"),
    "_gather_and_unpad_packed": ("self", "tensor", "pad_size"),
}
"""methods of verl's engine that :class:`FusedEngine` overrides or calls, and their parameters"""
BACKENDS = ["fsdp", "fsdp2"]


class FusedEngine(FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP engine for language models, with a wrapped model and without logits."""

    wrap_config = WrapConfig()
    teacher_head: TeacherHead | None = None
    """lm_head of the teacher, once a batch has been distilled over the full vocabulary"""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        """Checks the settings; nothing is loaded before.

        Raises:
            LigerDistError: settings under which verl computes the log-probabilities elsewhere.
        """
        if model_config.use_fused_kernels:
            raise LigerDistError(
                "model.use_fused_kernels is True, with which verl replaces the model's forward and has neither "
                "temperatures per sample nor sums of squared probabilities; leave it out: liger_dist computes both."
            )
        sequence_shards = engine_config.ulysses_sequence_parallel_size
        if sequence_shards > 1 and hasattr(model_config.hf_config, "vision_config"):
            raise LigerDistError(
                f"ulysses_sequence_parallel_size is {sequence_shards} for a vision-language model, whose embeddings "
                "verl slices inside of the model, so that the labels are not those of its inputs; set it to 1."
            )
        super().__init__(model_config, engine_config, *args, **kwargs)

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        model: Any = base_model_of(module)
        if type(model).forward.__module__.startswith("verl."):
            model.forward = MethodType(_with_loss(type(model).forward), model)
        # Ranks other than the first of a shard group have no weights yet.
        way_out = f"Take {__name__} out of VERL_USE_EXTERNAL_MODULES and model.external_lib for this model."
        packs = "model.use_remove_padding" if self.use_remove_padding else None
        wrap_policy(module, LoadedByHost(), self.wrap_config, way_out=way_out, packs=packs)
        sharded: nn.Module = super()._build_fsdp_module(module)
        return sharded

    def forward_step(
        self, micro_batch: TensorDict, loss_function: Any, forward_only: bool
    ) -> tuple[Tensor, dict[str, Any]]:
        """Computes verl's loss of a micro-batch; in the modes :data:`.verl_distillation.MODES` as the divergence from
        the teacher's hidden states, without logits of either model."""
        config = full_distillation(loss_function)
        if config is None:
            computed: tuple[Tensor, dict[str, Any]] = super().forward_step(micro_batch, loss_function, forward_only)
            return computed
        micro_batch = micro_batch.to(get_device_id())
        temperature = micro_batch["temperature"]
        if isinstance(temperature, Tensor) or self.use_ulysses_sp:
            raise LigerDistError(
                f"loss_mode is {config.distillation_loss.loss_mode!r} with the temperature {temperature} and "
                f"ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size}; expected a number for all "
                "samples, and 1. Set both, or loss_mode=forward_kl_topk."
            )
        hidden = packed_hidden(micro_batch)
        weights = token_weights(loss_function, micro_batch, self.get_data_parallel_group())
        if self.teacher_head is None or self.teacher_head.path != teacher_path(config):
            mesh = self.device_mesh if self.engine_config.strategy == "fsdp2" else None
            self.teacher_head = TeacherHead.load(config, device=get_device_id(), mesh=mesh)
        inputs, arguments = super().prepare_model_inputs(micro_batch=micro_batch)
        labels = arguments["input_ids_rmpad_rolled"].masked_fill(weights == 0, IGNORE_INDEX)
        fills = ((labels, IGNORE_INDEX), (weights, 0), (hidden, 0))
        labels, weights, hidden = (self._in_rows(values, micro_batch, fill=fill) for values, fill in fills)
        # verl computes losses under autocast to the 16-bit dtype of the parameters.
        dtype = getattr(self, "_autocast_dtype", torch.bfloat16)
        with nullcontext() if dtype.itemsize > 2 else torch.autocast(get_device_name(), dtype=dtype):
            output: Any = distillation_loss(
                self.module,
                self.teacher_head.module,
                **inputs,
                labels=labels,
                shift_labels=labels,
                token_weight=Uncast(weights),
                num_items_in_batch=1,
                divergence=MODES[config.distillation_loss.loss_mode],
                temperature=temperature,
                teacher_hidden=hidden,
                teacher_softcap=self.teacher_head.transform.softcap,
                teacher_logit_scale=self.teacher_head.transform.scale,
                use_cache=False,
            )
        found = {}
        if _option(micro_batch, "calculate_entropy", False):
            entropy = self._as_packed(output.entropy, micro_batch)
            found["entropy"] = torch.nested.nested_tensor_from_jagged(entropy, micro_batch["input_ids"].offsets())
        loss = output.loss
        # A number, as verl's engine returns it.
        return loss, {"model_output": found, "loss": loss.item(), "metrics": loss_metric(loss)}

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Adds labels, outputs and temperatures to the keywords of verl's call of the model."""
        inputs, arguments = super().prepare_model_inputs(micro_batch=micro_batch)
        if _option(micro_batch, "use_remove_padding", True):
            labels = arguments["input_ids_rmpad_rolled"][None]
            temperature = arguments["temperature_rmpad"][None]
        else:
            labels = _padded(arguments["input_ids_rmpad_rolled"], micro_batch, fill=IGNORE_INDEX)
            temperature = arguments["temperature"]
        given = micro_batch["temperature"]
        inputs |= {
            "labels": labels,
            "shift_labels": labels,
            "temperature": Uncast(temperature) if isinstance(given, Tensor) else given,
            "outputs": tuple(_outputs(micro_batch).values()),
            "differentiable": torch.is_grad_enabled(),
        }
        if _option(micro_batch, "distillation_use_topk", False):
            arguments["teacher_ids"] = self._teacher_ids(micro_batch)
            inputs |= {"token_ids": arguments["teacher_ids"], "top_k": arguments["teacher_ids"].shape[-1]}
            inputs["outputs"] += ("log_prob_at", "log_sum_exp", "top_k")
        return inputs, arguments

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Callable[..., dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        """Converts outputs of the wrapped model to verl's: nested tensors with a row for each sample."""
        found = {name: getattr(output, field) for name, field in _outputs(micro_batch).items()}
        values = {name: self._as_packed(value, micro_batch) for name, value in found.items()}
        if "teacher_ids" in output_args:
            student = self._student(output, output_args, micro_batch)
            losses = logits_processor_func(student_logits=student, data=micro_batch)
            values |= {name: value.squeeze(0) for name, value in losses.items()}
        if _option(micro_batch, "distillation_only", False):
            del values["log_probs"]
        offsets = micro_batch["input_ids"].offsets()
        pad_size = output_args.get("pad_size", 0)
        return {
            name: torch.nested.nested_tensor_from_jagged(self._gather_and_unpad_packed(value, pad_size), offsets)
            for name, value in values.items()
        }

    def _teacher_ids(self, micro_batch: TensorDict) -> Tensor:
        """Returns the teacher's classes in the layout of the labels, ``[..., K]``."""
        ids: Tensor = micro_batch["teacher_ids"].values()
        if not _option(micro_batch, "use_remove_padding", True):
            return _padded(ids, micro_batch, fill=-1)
        return slice_input_tensor(ids[None], dim=1) if self.use_ulysses_sp else ids[None]

    def _student(self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict) -> ScoredLogits:
        """Makes the stand-in for logits ``[1, T, V]`` that verl's distillation loss reads."""
        values = {name: getattr(output, name) for name in ("log_prob", "log_sum_exp", "log_prob_at")}
        values |= {"token_ids": output_args["teacher_ids"], "top_k_ids": output.top_k.ids}
        values = {name: self._as_packed(value, micro_batch)[None] for name, value in values.items()}
        vocab_size = record_of(inner_model(self.module)).found.structure.vocab_size
        return ScoredLogits.of(output_args["input_ids_rmpad_rolled"].reshape(1, -1), values, vocab_size)

    def _in_rows(self, values: Tensor, micro_batch: TensorDict, *, fill: int) -> Tensor:
        """Converts values of the tokens without padding, ``[T, ...]``, to those of the model's rows."""
        if _option(micro_batch, "use_remove_padding", True):
            return values[None]
        return _padded(values, micro_batch, fill=fill)

    def _as_packed(self, values: Tensor, micro_batch: TensorDict) -> Tensor:
        """Converts values of the model's rows to those of its tokens without padding, ``[T, ...]``."""
        if _option(micro_batch, "use_remove_padding", True):
            return values.squeeze(0)
        lengths = micro_batch["input_ids"].offsets().diff().tolist()
        return torch.cat([row[:length] for row, length in zip(values, lengths, strict=True)])


def configure(config: WrapConfig) -> None:
    """Sets the options of models that verl's engines wrap from now on. Call it in a module of yours, and give that to
    ``VERL_USE_EXTERNAL_MODULES``.

    Raises:
        LigerDistError: ``config`` is no :class:`liger_dist.WrapConfig`.
    """
    if not isinstance(config, WrapConfig):
        raise LigerDistError(f"config is {config!r}; expected a liger_dist.WrapConfig(...).")
    FusedEngine.wrap_config = config


def _option(micro_batch: TensorDict, name: str, default: bool) -> bool:
    return bool(tensordict_utils.get_non_tensor_data(data=micro_batch, key=name, default=default))


def _outputs(micro_batch: TensorDict) -> dict[str, str]:
    """Returns verl's names of the values that a micro-batch asks for, and those of a wrapped model."""
    asked = {"log_probs": "log_prob"}
    if _option(micro_batch, "calculate_entropy", False):
        asked["entropy"] = "entropy"
    if _option(micro_batch, "calculate_sum_pi_squared", False):
        asked["sum_pi_squared"] = "sum_sq_prob"
    return asked


def _padded(values: Tensor, micro_batch: TensorDict, *, fill: int) -> Tensor:
    """Pads values of tokens ``[T, ...]`` to the rows ``[B, S, ...]`` in which verl calls the model."""
    offsets = micro_batch["input_ids"].offsets()
    shape = len(offsets) - 1, int(offsets.diff().max()), *values.shape[1:]
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    padded: Tensor = torch.nested.to_padded_tensor(nested, padding=fill, output_size=shape)
    return padded


def _with_loss(original_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the loss to a forward that verl has put on a class of vision-language models, and that returns logits
    alone."""

    def forward(
        self: Any,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if position_ids is None:
            # Of text alone, as the forwards that verl has replaced compute them: one for the text, three for images.
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand(4, *input_ids.shape)
        output = original_forward(self, input_ids, position_ids=position_ids, **kwargs)
        if labels is not None:
            output["loss"] = self.loss_function(
                logits=output.logits,
                labels=labels,
                shift_labels=shift_labels,
                vocab_size=self.config.get_text_config().vocab_size,
            )
        return output

    return forward


def _register() -> None:
    """Registers :class:`FusedEngine` for this process's device and vendor, which verl looks for first.

    Raises:
        LigerDistError: verl's engine has other methods than the tested releases', or an engine of another package is in
            that place.
    """
    check_members(FSDPEngineWithLMHead, MEMBERS, host="verl")
    device = os.getenv("VERL_ENGINE_DEVICE") or get_device_name()
    vendor = os.getenv("VERL_ENGINE_VENDOR") or get_vendor()
    for backend in BACKENDS:
        taken = EngineRegistry._engines.get("language_model", {}).get(backend, {}).get((device, vendor))
        if taken is not None:
            raise LigerDistError(
                f"{taken.__module__}.{taken.__qualname__} is registered for {backend} on {device} of {vendor} already; "
                "leave out the module that registers it, or liger_dist.integrations.verl."
            )
    EngineRegistry.register("language_model", BACKENDS, device, vendor)(FusedEngine)
    register_modes()


_register()
