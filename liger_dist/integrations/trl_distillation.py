"""TRL's trainers with a teacher: DistillationTrainer, and of ``trl.experimental`` GKDTrainer and GOLDTrainer.

Their ``compute_loss`` calls student and teacher one after the other and compares full logits, or reads the weight of
both lm_heads from outside. Here one call of :func:`liger_dist.distillation_loss` replaces it. Under FSDP2 the teacher
is sharded as
well: Accelerate leaves a model that is prepared for evaluation on every rank in full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from inspect import signature
from types import MethodType
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from liger_dist.config import WrapConfig
from liger_dist.distillation import DistillationOutput, distillation_loss
from liger_dist.errors import LigerDistError
from liger_dist.record import is_wrapped
from liger_dist.sharding.fsdp2.strategy import FSDP2, LMHead
from liger_dist.wrap import wrap

from .accelerate import wrap_for
from .patches import patched

IMAGES = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""inputs of vision-language models that DistillationTrainer passes to both models"""


def _divergence(beta: float) -> dict[str, Any]:
    """Converts TRL's beta: 0 is the forward KL divergence, 1 the reverse one."""
    if beta in (0.0, 1.0):
        return {"divergence": "reverse_kl" if beta else "forward_kl"}
    return {"divergence": "jsd", "beta": beta}


def _on_policy_loss(
    trainer: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Computes the loss of ``DistillationTrainer.compute_loss``, over completions that the student has generated."""
    if trainer.model.training and inputs.get("num_items_in_batch") is not None:
        num_items_in_batch = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    counts = inputs["completion_mask"]
    if "tool_mask" in inputs:
        counts = counts * inputs["tool_mask"]
    completions = inputs["completion_ids"].masked_fill(counts == 0, -100)
    output = _distil(
        trainer,
        model,
        input_ids=torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1),
        attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1),
        labels=torch.cat([torch.full_like(inputs["prompt_ids"], -100), completions], 1),
        num_items_in_batch=num_items_in_batch,
        temperature=trainer.temperature,
        **{name: inputs[name] for name in IMAGES if name in inputs},
    )
    number, entropy = trainer.accelerator.gather_for_metrics(
        torch.stack([(completions != -100).sum(), output.entropy.sum()])[None]
    ).sum(0)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    metrics["entropy"].append(float(entropy / number) if number > 0 else 0.0)
    return (output.loss, None) if return_outputs else output.loss


def _gkd_loss(
    trainer: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Computes the loss of ``GKDTrainer.compute_loss``; its temperature is that of generation alone."""
    return _offline_loss(trainer, model, inputs, return_outputs, num_items_in_batch, temperature=1.0)


def _gold_loss(
    trainer: Any, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Computes the loss of ``GOLDTrainer.compute_loss`` for models with one tokenizer; with two, calls TRL's on full
    logits."""
    if trainer.use_uld_loss and trainer.teacher_tokenizer is not None:
        return type(trainer).compute_loss(trainer, model, inputs, return_outputs, num_items_in_batch)
    images = trainer._get_model_forward_kwargs(inputs)
    return _offline_loss(
        trainer, model, inputs, return_outputs, num_items_in_batch, temperature=trainer.temperature, **images
    )


def _offline_loss(
    trainer: Any,
    model: nn.Module,
    inputs: Any,
    return_outputs: bool,
    num_items_in_batch: Any,
    **options: Any,
) -> Any:
    given = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
    output = _distil(trainer, model, num_items_in_batch=num_items_in_batch, **given, **options)
    return (output.loss, output) if return_outputs else output.loss


def _distil(trainer: Any, model: nn.Module, *, num_items_in_batch: Any, **given: Any) -> DistillationOutput:
    trainer.teacher_model.eval()
    if isinstance(num_items_in_batch, Tensor):
        given["num_items_in_batch"] = num_items_in_batch.to(trainer.accelerator.device)
    elif num_items_in_batch is not None:
        given["num_items_in_batch"] = num_items_in_batch
    return distillation_loss(model, trainer.teacher_model, **_divergence(trainer.beta), **given)


DISTILLERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "trl.trainer.distillation_trainer": ("DistillationTrainer", _on_policy_loss),
    "trl.experimental.gkd.gkd_trainer": ("GKDTrainer", _gkd_loss),
    "trl.experimental.gold.gold_trainer": ("GOLDTrainer", _gold_loss),
}
"""trainers by module, and the functions that compute their loss"""


@contextmanager
def fused_divergences(config: WrapConfig | None, lm_head: LMHead) -> Iterator[None]:
    """Patches the trainers of :data:`DISTILLERS` within the context: they wrap both models and compute their loss by
    :func:`liger_dist.distillation_loss`."""
    with ExitStack() as stack:
        for module_name, (name, compute_loss) in DISTILLERS.items():
            module = import_module(module_name)
            trainer = getattr(module, name)
            init = _wrapping(trainer, module, compute_loss, config, lm_head)
            stack.enter_context(patched(trainer, "__init__", init))
        yield


def _wrapping(
    trainer: Any, module: Any, compute_loss: Callable[..., Any], config: WrapConfig | None, lm_head: LMHead
) -> Callable[..., None]:
    """Returns the constructor of ``trainer`` that wraps both models before they are prepared."""
    original = trainer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not trainer:
            original(self, *args, **kwargs)
            return
        if lm_head != "gather":
            raise LigerDistError(f"lm_head is {lm_head!r}, which {trainer.__name__} does not have; leave it out.")
        given = signature(original).bind(self, *args, **kwargs)
        model = given.arguments.get("model")
        if not isinstance(model, nn.Module):
            raise LigerDistError(
                f"model is {model!r}, which {trainer.__name__} would load unwrapped; load it and pass the model."
            )
        if not is_wrapped(model):
            wrap(model, config=config)
        with ExitStack() as stack:
            prepare, prepare_deepspeed = Accelerator.prepare_model, module.prepare_deepspeed
            stack.enter_context(patched(Accelerator, "prepare_model", _preparing_teachers(prepare, config)))
            stack.enter_context(
                patched(module, "prepare_deepspeed", _preparing_for_deepspeed(prepare_deepspeed, config))
            )
            original(*given.args, **given.kwargs)
        self.compute_loss = MethodType(compute_loss, self)

    return init


def _preparing_teachers(original: Callable[..., Any], config: WrapConfig | None) -> Callable[..., Any]:
    """Returns ``Accelerator.prepare_model`` that wraps a model prepared for evaluation, and shards it under FSDP2."""

    @functools.wraps(original)
    def prepare_model(
        self: Accelerator, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        if evaluation_mode and not is_wrapped(model):
            model.requires_grad_(False)
            if self.is_fsdp2:
                plugin: Any = self.state.fsdp_plugin
                policy = plugin.mixed_precision_policy
                wrap(model, FSDP2(param_dtype=None if policy is None else policy.param_dtype), config=config)
            else:
                wrap_for(self.state, model, config)
        return original(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    return prepare_model


def _preparing_for_deepspeed(original: Callable[..., Any], config: WrapConfig | None) -> Callable[..., Any]:
    """Returns TRL's ``prepare_deepspeed`` that wraps the teacher."""

    @functools.wraps(original)
    def prepare_deepspeed(model: nn.Module, accelerator: Accelerator) -> Any:
        if not is_wrapped(model):
            wrap_for(accelerator.state, model, config)
        return original(model, accelerator)

    return prepare_deepspeed
