"""verl's own engines on CPUs: policies of tiny models over gloo, with and without liger_dist's plug."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from distilled import divergences
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
    set_platform()
    with mock.patch.dict(os.environ, {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}):
        __import__(PLUG)
    patch_verl()
    sys.modules[PLUG].configure(liger_dist.WrapConfig(memory_budget=ROWS * VOCAB_SIZE * 4))


def set_platform() -> None:
    """Gives verl a platform of CPUs and gloo, if there are no GPUs. Ray schedules its workers by GPUs that it is told
    of."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_base import PlatformBase

    if torch.cuda.is_available() or platform_manager.get_platform().device_name == "cpu":
        return
    members: dict[str, Any] = {name: lambda self, *args: None for name in PlatformBase.__abstractmethods__}
    members |= {
        "device_name": "cpu",
        "vendor_name": "none",
        "device_module": DeviceOfCPU("cpu"),
        "nvtx_range": lambda self, message: contextlib.nullcontext(),
        "get_device_capability": lambda self, index=0: (None, None),
        "communication_backend_name": lambda self: "gloo",
        "current_device": lambda self: "cpu",
        "device_count": lambda self: 1,
        "ray_resource_name": lambda self: "GPU",
        "ray_noset_envvars": lambda self: [],
        "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
    }
    platform_manager.set_platform(type("OnCPU", (PlatformBase,), members)())


class DeviceOfCPU(ModuleType):
    """torch.cpu with the functions of torch.cuda that measure and free memory."""

    def __getattr__(self, name: str) -> Any:
        if name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
            return lambda *_: 0
        if name == "mem_get_info":
            return lambda *_: (0, 0)
        if name == "get_device_name":
            return lambda *_: "CPU"
        if name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats"):
            return lambda *_: None
        return getattr(torch.cpu, name)


def patch_verl() -> None:
    """Has verl run on CPUs, with the installed TRL."""
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


def distil_over_the_vocabulary(folder: Path, teacher_folder: Path, mode: str, case: dict[str, Any]) -> dict[str, Any]:
    """Makes :data:`STEPS` updates from a teacher's hidden states in fp64. Returns losses, gradients and
    weights, and with ``"truth"`` those of the unwrapped models with full logits."""
    from transformers import AutoModelForCausalLM

    case, in_fp64 = dict(case), {"param_dtype": "fp64", "reduce_dtype": "fp64", "buffer_dtype": "fp64"}
    options = {"model_dtype": "fp64", "mixed_precision": in_fp64, **case.pop("engine", {})}
    with precision_of_64_bits():
        engine = make_engine(folder, fused=True, settings=case.pop("model", {}), engine=options)
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float64).eval()
    student = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)
    loss_function = make_full_loss(teacher_folder, mode, **case.pop("loss", {}))
    aggregation, options = loss_function.args[0].loss_agg_mode, case.pop("data", {})
    found: dict[str, Any] = {"steps": [], "truth": []}
    for _ in range(STEPS):
        data = make_full_data(engine.get_data_parallel_rank(), teacher, **options)
        with watched() as seen, engine.train_mode(zero_grad_on_exit=False):
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(data, loss_function)
            computed = {name: full(grad) for name, grad in gradients(engine.module).items()}
            # Without verl's clipping, which FSDP1 computes in fp32.
            engine.optimizer.step()
            weights = {name: full(weight).clone() for name, weight in engine.module.state_dict().items()}
        metric = output["metrics"]["distillation/loss"].aggregate()
        step = {"loss": sum(output["loss"]), "metric": metric, "gradients": computed, "weights": weights}
        found["steps"].append(step)
        found |= {"calls": seen.fused_calls, "logits": seen.most_logits}
        losses = [true_full_loss(student, teacher, rank, mode, aggregation, options) for rank in range(2)]
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        truth = {"loss": losses[engine.get_data_parallel_rank()].detach(), "gradients": gradients(student)}
        optimizer.step()
        found["truth"].append(truth | {"weights": {name: w.clone() for name, w in student.state_dict().items()}})
    return found


@contextlib.contextmanager
def precision_of_64_bits() -> Iterator[None]:
    """Has verl's settings of dtypes know "fp64"."""
    from verl.utils.torch_dtypes import PrecisionType

    original = PrecisionType.to_dtype
    known = staticmethod(lambda precision: torch.float64 if precision == "fp64" else original(precision))
    with mock.patch.object(PrecisionType, "to_dtype", known):
        yield


def make_full_data(rank: int, teacher: Any, *, dense: bool = False, **options: Any) -> Any:
    """Samples of one rank with the teacher's hidden states, as a nested tensor or padded on both sides."""
    data = make_data(rank, **{"temperature": 0.7, "distillation_use_topk": True, "distillation_only": True, **options})
    with torch.no_grad():
        rows = [teacher.model(ids[None]).last_hidden_state[0] for ids in data["input_ids"].unbind()]
    if dense:
        mask = torch.zeros(len(rows), 20, dtype=torch.int64)
        hidden = torch.full((len(rows), 20, rows[0].shape[-1]), float("nan"), dtype=torch.float64)
        for row, states, prompt in zip(range(len(rows)), rows, PROMPTS[rank], strict=True):
            mask[row, 6 - prompt : 6 - prompt + len(states)] = 1
            hidden[row, mask[row].bool()] = states
        data["attention_mask"], data["teacher_hidden"] = mask, hidden
    else:
        data["teacher_hidden"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return data


def make_full_loss(
    teacher: Path, mode: str, *, loss_agg_mode: str = "token-mean", teachers: int = 1, **settings: Any
) -> Any:
    """verl's loss of a policy's distillation, in a mode of the plug."""
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.workers.config import (
        ActorConfig,
        DistillationConfig,
        DistillationLossConfig,
        DistillationTeacherModelConfig,
    )

    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        ppo_mini_batch_size=4,
        loss_agg_mode=loss_agg_mode,
    )
    own = {"use_task_rewards": False, "use_policy_gradient": False, "loss_max_clamp": None, **settings}
    made = {f"teacher_{i}": DistillationTeacherModelConfig(model_path=str(teacher)) for i in range(teachers)}
    loss = DistillationLossConfig(loss_mode=mode, **own)
    return partial(distillation_ppo_loss, config, DistillationConfig(distillation_loss=loss, teacher_models=made))


def true_full_loss(
    student: Any, teacher: Any, rank: int, mode: str, aggregation: str, options: dict[str, Any]
) -> Tensor:
    """The loss of a rank with full logits: the mean over the tokens of all answers, or of each answer and then over
    answers, times the number of ranks."""
    data, total = make_data(rank, temperature=1.0), torch.zeros((), dtype=torch.float64)
    tokens = sum(sum(lengths) - sum(prompts) for lengths, prompts in zip(LENGTHS, PROMPTS, strict=True))
    for ids, prompt in zip(data["input_ids"].unbind(), PROMPTS[rank], strict=True):
        with torch.no_grad():
            expected = teacher(ids[None]).logits[0, prompt - 1 : -1]
        logits = student(ids[None]).logits[0, prompt - 1 : -1]
        divergence = mode.removesuffix("_full")
        each = divergences(logits, expected, divergence=divergence, temperature=options.get("temperature", 0.7))
        total = total + (each.sum() / tokens if aggregation == "token-mean" else each.mean() / 8)
    return 2 * total


def refusals_of_distillation(folder: Path, teacher: Path, cases: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns the sentence with which each case is refused: its settings of the loss, changes of the data, or verl's
    own engine."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float64)
    engines = {fused: make_engine(folder, fused=fused, settings={}, engine={}) for fused in (True, False)}
    found = {}
    for name, case in cases.items():
        engine = engines[case.get("fused", True)]
        data = make_full_data(engine.get_data_parallel_rank(), model)
        for key, value in case.get("data", {}).items():
            if value is None:
                del data[key]
            else:
                data[key] = value
        try:
            with engine.train_mode():
                engine.forward_backward_batch(data, make_full_loss(teacher, "reverse_kl_full", **case.get("loss", {})))
        except liger_dist.LigerDistError as error:
            found[name] = str(error)
    return found


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
