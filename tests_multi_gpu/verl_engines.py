"""verl's own engines on CPUs: policies of tiny models over gloo, with and without liger_dist's plug."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hosts import watched
from models import VOCAB_SIZE, full, gradients
from policies import ROWS
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

import liger_dist

PLUG = "liger_dist.integrations.verl"
STEPS = 3
PROMPTS, LENGTHS = ((3, 2, 4, 1), (1, 3, 2, 2)), ((9, 5, 12, 4), (3, 11, 7, 6))
"""tokens of the prompts, and of the samples, by rank"""


def import_verl() -> None:
    """Imports verl and the plug on a platform without GPUs. verl's own engine stays for other vendors."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    if not torch.cuda.is_available() and platform_manager.get_platform().device_name != "cpu":
        members: dict[str, Any] = {name: lambda self, *args: None for name in PlatformBase.__abstractmethods__}
        members |= {
            "device_name": "cpu",
            "vendor_name": "none",
            "device_module": torch.cpu,
            "nvtx_range": lambda self, message: contextlib.nullcontext(),
            "get_device_capability": lambda self, index=0: (None, None),
            "communication_backend_name": lambda self: "gloo",
            "current_device": lambda self: "cpu",
            "device_count": lambda self: 1,
        }
        platform_manager.set_platform(type("OnCPU", (PlatformBase,), members)())
    with mock.patch.dict(os.environ, {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}):
        __import__(PLUG)
    from verl.models.transformers import monkey_patch
    from verl.utils import fsdp_utils

    # verl patches a class that TRL has no longer.
    monkey_patch.is_trl_available = lambda: False
    # With its own, FSDP2 cannot shard a LoRA layer on lm_head: Python refuses the class ("object layout differs").
    fsdp_utils.maybe_patch_fsdp_module = lambda module: contextlib.nullcontext()
    _add_flash_attention()
    if not torch.cuda.is_available():
        from verl.workers.engine.fsdp import transformer_impl

        transformer_impl.FSDP = FSDPOnCPU
    sys.modules[PLUG].configure(liger_dist.WrapConfig(memory_budget=ROWS * VOCAB_SIZE * 4))


class FSDPOnCPU(FullyShardedDataParallel):
    """Without the broadcast of rank 0's values, which torch refuses for parameters on CPUs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"sync_module_states": False, "device_id": torch.device("cpu")})


ULYSSES = "attention for Ulysses"
"""attn_implementation of transformers' flash attention, which verl patches, without the kernels"""


def _add_flash_attention() -> None:
    """Puts attention by torch where verl calls flash-attn, which has no wheel for CPUs."""
    from transformers.integrations.flash_attention import flash_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.qwen2_vl import modeling_qwen2_vl
    from verl.models.transformers import monkey_patch

    ALL_ATTENTION_FUNCTIONS.register(ULYSSES, flash_attention_forward)
    monkey_patch._flash_attention_forward = _attention_to_documents
    if hasattr(modeling_qwen2_vl, "Qwen2VLCausalLMOutputWithPast"):
        from verl.models.transformers import qwen2_vl

        names = "window_size", "deterministic"
        vars(qwen2_vl).update({f"_flash_supports_{name}": False for name in names}, _flash_use_top_left_mask=False)
        qwen2_vl.flash_attn_varlen_func = _varlen_attention
        qwen2_vl._flash_attention_forward = _attention_to_documents
        # It casts to 16 bits, which the kernels need.
        qwen2_vl.fa_peft_integration_check = lambda *states, target_dtype: states


def _attention_to_documents(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, position_ids: Tensor | None = None, **__: Any
) -> Tensor:
    """Causal attention ``[B, S, H, D]`` to the documents that begin where the positions are 0."""
    documents = torch.zeros(query.shape[:2]) if position_ids is None else (position_ids == 0).cumsum(1)
    mask = (documents[:, :, None] == documents[:, None]).tril()[:, None]
    states = (states.transpose(1, 2) for states in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(*states, attn_mask=mask, enable_gqa=True)
    return attended.transpose(1, 2)


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **_: Any) -> Tensor:
    lengths = cu_seqlens_q.diff().tolist()
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    return _attention_to_documents(q[None], k[None], v[None], position_ids=position_ids)[0]


def make_engine(folder: Path, *, fused: bool, settings: dict[str, Any], engine: dict[str, Any]) -> Any:
    """Makes the engine that verl's registry has for a strategy."""
    import_verl()
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    model_config = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        override_config={"attn_implementation": settings.pop("attn_implementation", "sdpa")},
        **{"enable_gradient_checkpointing": False, **settings},
    )
    options: dict[str, Any] = {"strategy": "fsdp2", "mixed_precision": None, **engine}
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
    options["mixed_precision"] = options["mixed_precision"] or dtypes
    engine_config = FSDPEngineConfig(use_torch_compile=False, **options)
    optimizer_config = FSDPOptimizerConfig(lr=0.05, optimizer="SGD", weight_decay=0.0, clip_grad=1e9)
    device = {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia" if fused else "another"}
    with mock.patch.dict(os.environ, device):
        made = EngineRegistry.new(
            model_type="language_model",
            backend=engine_config.strategy,
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optimizer_config,
            checkpoint_config=CheckpointConfig(),
        )
    torch.manual_seed(3)
    made.initialize()
    return made


def make_data(rank: int, *, temperature: Any, images: bool = False, **options: Any) -> Any:
    """Samples of one rank, as verl's trainer gives them to an engine."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(5 + rank)
    lengths, prompts = LENGTHS[rank], PROMPTS[rank]
    nested = partial(torch.nested.nested_tensor, layout=torch.jagged)
    rows = [torch.randint(5, VOCAB_SIZE, (n,), generator=generator) for n in lengths]
    multi_modal_inputs = _images(rows, generator) if images else None
    positions: list[Tensor] = [torch.arange(n) for n in lengths]
    answers = [n - p for n, p in zip(lengths, prompts, strict=True)]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    old = nested([torch.randn(n, generator=generator) * 0.1 - 4 for n in answers])
    values: dict[str, Any] = {
        "input_ids": nested(rows),
        "prompts": nested([row[:p] for row, p in zip(rows, prompts, strict=True)]),
        "responses": nested([row[p:] for row, p in zip(rows, prompts, strict=True)]),
        "position_ids": torch.nested.nested_tensor_from_jagged(
            torch.cat(positions).expand(4, -1), offsets, jagged_dim=2
        )
        if images
        else nested(positions),
        "loss_mask": nested([torch.ones(n) for n in answers]),
        "response_mask": nested([torch.ones(n, dtype=torch.int64) for n in answers]),
        "old_log_probs": old,
        "advantages": nested([torch.randn(n, generator=generator) for n in answers]),
        "teacher_ids": nested([torch.randint(0, VOCAB_SIZE, (n, 3), generator=generator) for n in lengths]),
        "teacher_logprobs": nested([torch.rand(n, 3, generator=generator).neg() - 1 for n in lengths]),
    }
    if isinstance(temperature, Tensor):
        values["temperature"] = temperature
    data = TensorDict(values, batch_size=len(lengths))
    if images:
        data["multi_modal_inputs"] = multi_modal_inputs
    given = {
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "global_batch_size": 2 * len(lengths),
        "calculate_entropy": True,
        "calculate_sum_pi_squared": True,
        "use_remove_padding": True,
        "pad_token_id": 0,
        **({} if isinstance(temperature, Tensor) else {"temperature": temperature}),
        **options,
    }
    tensordict_utils.assign_non_tensor(data, **given)
    return data


def _images(rows: list[Tensor], generator: torch.Generator) -> Any:
    """An image of four tokens in the samples that are long enough, none in the others. verl 0.9.1 fails in
    micro-batches without any."""
    from tensordict import NonTensorData, NonTensorStack
    from vision_models import IMAGE_TOKEN

    inputs: list[dict[str, Tensor]] = []
    for row in rows:
        inputs.append({})
        if len(row) > 6:
            row[1], row[2:6], row[6] = 95, IMAGE_TOKEN, 96
            inputs[-1]["pixel_values"] = torch.randn(16, 3 * 2 * 4 * 4, generator=generator)
            inputs[-1]["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    return NonTensorStack(*(NonTensorData(one) for one in inputs))


def run_updates(folder: Path, fused: bool, case: dict[str, Any]) -> dict[str, Any]:
    """Scores the samples, and makes :data:`STEPS` updates of the policy. Returns everything as full tensors."""
    case = dict(case)
    engine = make_engine(folder, fused=fused, settings=case.pop("model", {}), engine=case.pop("engine", {}))
    loss_function = make_loss(case.pop("distillation", None), is_sft=case.pop("sft", False))
    options, rank = case.pop("data", {}), engine.get_data_parallel_rank()
    found: dict[str, Any] = {"class": type(engine).__qualname__}
    steps, passes = [], mock.patch.object(engine, "forward_step", wraps=engine.forward_step)
    with passes as counted, watched() as seen, engine.train_mode(zero_grad_on_exit=False):
        if loss_function is not None and "distillation_use_topk" not in options:
            scored = engine.forward_backward_batch(make_data(rank, **options), None, forward_only=True)
            found["scored"] = {name: _values(value) for name, value in scored["model_output"].items()}
        for _ in range(STEPS):
            engine.optimizer_zero_grad()
            data = make_data(rank, return_model_output=True, **options)
            output = engine.forward_backward_batch(data, loss_function)
            steps.append(
                {
                    "outputs": {name: _values(value) for name, value in output["model_output"].items()},
                    "loss": torch.tensor(output["loss"]),
                    "gradients": {name: full(grad) for name, grad in gradients(engine.module).items()},
                }
            )
            engine.optimizer_step()
    found |= {"steps": steps, "passes": counted.call_count, "calls": seen.fused_calls, "logits": seen.most_logits}
    found["weights"] = {name: full(weight).detach().clone() for name, weight in engine.module.state_dict().items()}
    return found


def make_loss(distillation: dict[str, Any] | None, *, is_sft: bool = False) -> Callable[..., Any]:
    """verl's loss of the policy, of its distillation from the K classes of a teacher, or of supervised fine-tuning."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss

    config = ActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.1, ppo_mini_batch_size=4
    )
    if is_sft:
        return partial(_with_mask, partial(sft_loss, config))
    if distillation is None:
        return partial(_with_sum_pi_squared, partial(ppo_loss, config))
    options = {"use_policy_gradient": False, **distillation}
    loss = DistillationLossConfig(loss_mode="forward_kl_topk", topk=3, **options)
    return partial(distillation_ppo_loss, config, DistillationConfig(distillation_loss=loss))


def _with_mask(own: Callable[..., Any], model_output: dict[str, Tensor], data: Any, dp_group: Any) -> Any:
    """Gives the loss a mask of all tokens but the first, as the data of verl's SFT trainer has it."""
    offsets = data["input_ids"].offsets()
    mask = torch.ones(int(offsets[-1]))
    mask[offsets[:-1]] = 0
    data["loss_mask"] = torch.nested.nested_tensor_from_jagged(mask, offsets)
    return own(model_output=model_output, data=data, dp_group=dp_group)


def _with_sum_pi_squared(own: Callable[..., Any], model_output: dict[str, Tensor], data: Any, dp_group: Any) -> Any:
    """Adds the sums of squared probabilities, so that their gradients are compared."""
    loss, metrics = own(model_output=model_output, data=data, dp_group=dp_group)
    values = model_output["sum_pi_squared"].values()
    return loss + 0.1 * (values * torch.linspace(-1, 1, len(values))).mean(), metrics


def _values(value: Any) -> Tensor:
    values = value if isinstance(value, list) else [value]
    return torch.cat([x.values() if x.is_nested else x for x in values]).detach().clone()


def error_of_fused_kernels(folder: Path, temperature: Any, options: dict[str, Any]) -> str:
    """Returns the error of verl's own fused kernels."""
    import transformers

    settings = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
    kinds: list[Any] = [transformers.LlamaForCausalLM, transformers.Qwen3ForCausalLM]
    own_forwards = [kind.forward for kind in kinds]
    try:
        engine = make_engine(folder, fused=False, settings=settings, engine={})
        data = make_data(
            engine.get_data_parallel_rank(), temperature=temperature, **{"use_fused_kernels": True, **options}
        )
        with engine.train_mode():
            engine.forward_backward_batch(data, make_loss(None))
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        return str(error)
    finally:
        # verl has replaced it on the class.
        for kind, own_forward in zip(kinds, own_forwards, strict=True):
            kind.forward = own_forward
    return ""


def refusal_of(folder: Path, settings: dict[str, Any], engine: dict[str, Any]) -> str:
    """Returns the sentence with which the plug refuses to make an engine."""
    try:
        make_engine(folder, fused=True, settings=dict(settings), engine=engine)
    except liger_dist.LigerDistError as error:
        return str(error)
    return ""


def score_in_16_bits(folder: Path, fused: bool) -> Tensor:
    """Log-probabilities of an engine whose parameters and inputs FSDP2 casts to bf16."""
    dtypes = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = make_engine(folder, fused=fused, settings={}, engine={"mixed_precision": dtypes})
    temperature = torch.full((4,), 0.7)
    data = make_data(engine.get_data_parallel_rank(), temperature=temperature, calculate_entropy=False)
    with engine.eval_mode():
        output = engine.forward_backward_batch(data, None, forward_only=True)
    return _values(output["model_output"]["log_probs"])
