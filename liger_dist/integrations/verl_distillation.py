"""verl's on-policy distillation over the full vocabulary, from a teacher's hidden states and lm_head.

verl 0.9.1 distils from the K most likely classes of a teacher, or estimates the divergence from the sampled tokens.
The loss modes :data:`MODES` are the exact divergence. They need the key :data:`HIDDEN` in the batch, and the folder of
the teacher in ``distillation.teacher_models``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from verl.trainer.distillation.losses import DistillationLossSettings, register_distillation_loss
from verl.utils.fs import copy_to_local
from verl.utils.metric import AggregationType, Metric
from verl.workers.config import DistillationConfig
from verl.workers.utils.padding import no_padding_2_padding

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.fused_head.recipe import LogitTransform
from liger_dist.record import inner_model, record_of
from liger_dist.sharding.single import LoadedByHost
from liger_dist_kernels import Divergence

from .patches import wrap_policy

MODES: dict[str, Divergence] = {"forward_kl_full": "forward_kl", "reverse_kl_full": "reverse_kl"}
"""values of ``distillation.distillation_loss.loss_mode``, and their divergences"""
HIDDEN = "teacher_hidden"
"""key of the batch with the hidden states of the teacher's last layer, one for each token of ``input_ids``"""
LOSSES = "full_vocabulary_losses"
"""key of the model's output with the divergence of each token"""
SETTINGS = {"use_task_rewards": False, "use_policy_gradient": False, "loss_max_clamp": None}
"""settings of ``distillation.distillation_loss`` that the modes need"""


def register_modes() -> None:
    """Adds :data:`MODES` to verl's loss modes. verl handles them as top-k losses, which need no log-probabilities."""
    register_distillation_loss(DistillationLossSettings(names=list(MODES), use_topk=True))(_losses)


def _losses(config: Any, distillation_config: DistillationConfig, model_output: Any, data: TensorDict) -> Any:
    """Returns the divergences ``[B, R]`` of the responses, and no metrics.

    Raises:
        LigerDistError: an engine without these modes has computed other losses.
    """
    if LOSSES not in model_output:
        raise LigerDistError(
            f"loss_mode is {distillation_config.distillation_loss.loss_mode!r} under the strategy {config.strategy!r}, "
            "whose engine does not compute it; use the strategy fsdp or fsdp2, or loss_mode=forward_kl_topk."
        )
    return no_padding_2_padding(model_output[LOSSES], data), {}


def full_distillation(loss_function: Any) -> DistillationConfig | None:
    """Returns the configuration that verl has bound to a loss function, if its mode is one of :data:`MODES`.

    Raises:
        LigerDistError: settings with which the loss is not a weighted sum of divergences.
    """
    bound = (*getattr(loss_function, "args", ()), *getattr(loss_function, "keywords", {}).values())
    config = next((value for value in bound if isinstance(value, DistillationConfig)), None)
    if config is None or config.distillation_loss.loss_mode not in MODES:
        return None
    for name, expected in SETTINGS.items():
        found = getattr(config.distillation_loss, name)
        if found != expected:
            raise LigerDistError(
                f"distillation_loss.{name} is {found!r} with loss_mode={config.distillation_loss.loss_mode}; expected "
                f"{expected!r}, because the divergence is computed with its gradient, and without log-probabilities. "
                f"Set distillation.distillation_loss.{name}={'null' if expected is None else expected}."
            )
    return config


def token_weights(loss_function: Callable[..., Any], data: TensorDict, group: Any) -> Tensor:
    """Returns the weight ``[T]`` of each token's divergence in verl's loss.

    verl's loss is linear in the divergences: its mask and ``loss_agg_mode`` make the weights, which are its gradient.
    """
    offsets = data["input_ids"].offsets()
    with torch.enable_grad():
        zeros = torch.zeros(int(offsets[-1]), dtype=torch.float64, device=offsets.device, requires_grad=True)
        losses = torch.nested.nested_tensor_from_jagged(zeros, offsets)
        # Its metrics are the least and the largest divergence of a token, which are not computed.
        loss, _ = loss_function(model_output={LOSSES: losses}, data=data, dp_group=group)
        (weights,) = torch.autograd.grad(loss, zeros)
    return weights


def loss_metric(loss: Tensor) -> dict[str, Metric]:
    """Makes verl's metric of the distillation loss, which is summed over micro-batches."""
    return {"distillation/loss": Metric(value=loss.detach(), aggregation=AggregationType.SUM)}


def packed_hidden(data: TensorDict) -> Tensor:
    """Returns the teacher's hidden states of the tokens without padding, ``[T, E]``.

    Raises:
        LigerDistError: the batch has none, or not one for each token.
    """
    if HIDDEN not in data:
        raise LigerDistError(
            f"the batch has no {HIDDEN!r} ({', '.join(sorted(data.keys()))}); expected the hidden states of the "
            "teacher's last layer for each token of input_ids, a nested tensor [B, S, E], or padded like "
            "attention_mask. See docs/hosts/verl.md."
        )
    hidden, lengths = data[HIDDEN], data["input_ids"].offsets().diff()
    if hidden.is_nested:
        found = hidden.offsets().diff()
        if not torch.equal(found, lengths):
            raise LigerDistError(
                f"{HIDDEN} has {found.tolist()} tokens and input_ids has {lengths.tolist()}; expected one hidden state "
                "for each token. Run the teacher on the prompts and the responses."
            )
        packed: Tensor = hidden.values()
        return packed
    mask = data.get("attention_mask", None)
    shape = None if mask is None else tuple(mask.shape)
    if mask is None or hidden.shape[:2] != mask.shape or not torch.equal(mask.sum(1), lengths):
        raise LigerDistError(
            f"{HIDDEN} is padded to {tuple(hidden.shape)} and attention_mask has the shape {shape}; expected one "
            "hidden state for each entry of attention_mask, whose rows have the tokens of input_ids. Pass a nested "
            "tensor [B, S, E] instead."
        )
    unpadded: Tensor = hidden[mask.bool()]
    return unpadded


@dataclass(frozen=True, kw_only=True)
class TeacherHead:
    """The lm_head of a teacher, without its layers."""

    path: str
    module: nn.Linear
    """full, or sharded over the engine's mesh"""
    transform: LogitTransform
    """from its output to the teacher's logits"""

    @classmethod
    def load(cls, config: DistillationConfig, *, device: Any, mesh: DeviceMesh | None) -> TeacherHead:
        """Loads the lm_head of the teacher in ``config``, and nothing else of it, and shards it over ``mesh``.

        Raises:
            LigerDistError: several teachers or none, or a checkpoint without an lm_head.
        """
        path = teacher_path(config)
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = copy_to_local(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        way_out = "Distil by loss_mode=forward_kl_topk."
        wrap_policy(model, LoadedByHost(), WrapConfig(), way_out=way_out)
        recipe = record_of(inner_model(model)).found.recipe
        assert recipe is not None
        if recipe.transform.bias is not None:
            raise LigerDistError(
                f"{type(model).__name__} adds its buffer {recipe.transform.bias} to the logits, which is no part of "
                f"its lm_head. {way_out}"
            )
        stored = model.get_output_embeddings()
        tensors = {name: read_parameter(folder, model, getattr(stored, name)) for name in ("weight", "bias")}
        weight, bias = tensors["weight"], tensors["bias"]
        if weight is None:
            raise LigerDistError(
                f"the checkpoint {path!r} has no parameter of lm_head among its safetensors files; expected the names "
                f"of {type(model).__name__}. Save the teacher by save_pretrained."
            )
        with torch.device("meta"):
            head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        head.weight = nn.Parameter(weight.to(device), requires_grad=False)
        if bias is not None:
            head.bias = nn.Parameter(bias.to(device), requires_grad=False)
        if mesh is not None:
            fully_shard(head, mesh=mesh)
        return cls(path=path, module=head, transform=recipe.transform)


def teacher_path(config: DistillationConfig) -> str:
    """Returns the folder or the name of the only teacher.

    Raises:
        LigerDistError: there are several teachers, or none.
    """
    teachers = config.teacher_models.values()
    paths = [one.get("model_path") if isinstance(one, Mapping) else one.model_path for one in teachers]
    if len(paths) != 1 or not isinstance(paths[0], str):
        raise LigerDistError(
            f"distillation.teacher_models has the model paths {paths}; loss_mode={config.distillation_loss.loss_mode} "
            "expected one teacher. Set distillation.teacher_models.teacher_model.model_path alone."
        )
    return paths[0]


def read_parameter(folder: str, model: nn.Module, parameter: nn.Parameter | None) -> Tensor | None:
    """Reads a parameter of a checkpoint, by any of its names in ``model``; None if it is not stored."""
    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    names = [name for name, other in model.named_parameters(remove_duplicate=False) if other is parameter]
    index = cached_file(folder, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is None:
        files = dict.fromkeys(names, "model.safetensors")
    else:
        with open(index) as file:
            files = json.load(file)["weight_map"]
    for name in names:
        if name in files:
            with safe_open(cached_file(folder, files[name]), framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118 - it is no dict
                    found: Tensor = tensors.get_tensor(name)
                    return found
    return None
