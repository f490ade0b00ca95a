"""Every private name of torch, transformers, PEFT, Accelerate and DeepSpeed that the library reads: a new release that
renames one fails here, with what stops working."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Workers
from torch import nn
from torch.distributed.fsdp import fully_shard

from liger_dist import doctor
from liger_dist.model.keywords import renamed_keywords
from liger_dist.sharding.process_groups import compute_device
from liger_dist.trials.functions import redecorated
from liger_dist.trials.model_run import _HOOKS, IMPLEMENTATIONS
from liger_dist.versions import CHECKED, newest_checked, numbers

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "liger_dist"

NAMES: dict[tuple[str, str], str] = {
    # module, attribute path: what breaks without it
    ("torch", "ops.aten._flash_attention_forward"): "sink_attention.py has no log-sum-exp to add sinks to",
    ("torch", "ops.aten._flash_attention_backward"): "sink_attention.py has no backward",
    ("torch.overrides", "_get_current_function_mode_stack"): "mlp_tiles.py cannot see modes of torch functions",
    ("torch.distributed", "_make_nccl_premul_sum"): "doctor cannot test NCCL's bf16 sums with a factor",
    (
        "torch.distributed.fsdp",
        "FSDPModule._get_fsdp_state",
    ): "no adapter finds FSDP2's groups",
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param_group",
        "FSDPParamGroup._init_mp_dtypes",
    ): "FSDP2's parameter groups have moved: fsdp2/strategy.py reads fsdp_params, mesh_info and reduce_grads of them",
    (
        "torch.distributed.fsdp._fully_shard._fsdp_param",
        "ParamModuleInfo",
    ): "fsdp2/strategy.py cannot tell which modules share lm_head's weight, so tied models are refused",
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel._is_using_optim_input",
    ): "FSDP1 has been rewritten: fsdp1.py reads its divide factors and flat parameters",
    (
        "torch.distributed.fsdp",
        "ShardingStrategy._HYBRID_SHARD_ZERO2",
    ): "fsdp1.py cannot use HSDP",
    (
        "torch.distributed.fsdp._runtime_utils",
        "_reshard",
    ): "fsdp1_forward.py cannot reshard after a forward without a backward: steps read old weights",
    (
        "torch.distributed.fsdp._runtime_utils",
        "_post_backward_hook",
    ): "fsdp1_forward.py cannot reduce the gradient of a forward after one without a backward, in 16 bits",
    ("torch", "_C._will_engine_execute_node"): "fsdp1_forward.py cannot tell which forwards a backward goes through",
    (
        "torch.distributed.fsdp._runtime_utils",
        "_lazy_init",
    ): "fsdp1_forward.py cannot make parameters that train before a first forward in inference mode",
    (
        "torch.distributed.fsdp._common_utils",
        "HandleTrainingState",
    ): "fsdp1_forward.py cannot end a forward that has raised",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "CheckpointImpl.REENTRANT",
    ): "reentrant_layers.py does not refuse reentrant checkpoints around FSDP units: images on some ranks hang",
    (
        "torch.nn.parallel",
        "DistributedDataParallel._get_active_ddp_module",
    ): "ddp.py takes every loss for averaged: no warning of a loss outside of DDP",
    (
        "torch._C._autograd",
        "_get_current_graph_task_keep_graph",
    ): "losses copy the gradient in every backward: 1 GiB more memory for a weight of 128256 x 4096",
    (
        "torch._C._autograd",
        "_top_saved_tensors_default_hooks",
    ): "recompute.py saves outputs of norms and activations instead of recomputing them; tracing.py does not see "
    "checkpoints, in which a second loss before a backward then fails",
    (
        "torch._C._autograd",
        "_pop_saved_tensors_default_hooks",
    ): "torch_modes.py does not find checkpoints around others: they recompute layers without routing replay",
    (
        "torch._C._autograd",
        "_push_saved_tensors_default_hooks",
    ): "torch_modes.py does not find checkpoints around others: they recompute layers without routing replay",
    (
        "torch.utils._python_dispatch",
        "_disable_current_modes",
    ): "selective checkpoints save what a trial of a router computes, and take it for what its call has computed",
    (
        "torch.utils.checkpoint",
        "_CheckpointFrame",
    ): "torch_modes.py does not find the checkpoint that calls lm_head: recomputed, it makes full logits",
    ("torch._C", "_storage_Use_Count"): "gated_mlp.py allocates the gradients of gate and up beside them",
    ("torch", "Tensor._use_count"): "gated_mlp.py allocates the gradients of gate and up beside them",
    (
        "torch._functorch.config",
        "ban_recompute_materialized_backward",
    ): "compile.py: compiled layers keep inputs of products, a third of their activations",
    (
        "torch._functorch.config",
        "ban_recompute_reductions",
    ): "compile.py: compiled layers keep outputs of norms",
    (
        "torch._functorch.partitioners",
        "min_cut_rematerialization_partition",
    ): "partitioner.py: compiled float8 layers keep copies of their weights, 172 MiB each in Llama 8B",
    ("torch._inductor.custom_graph_pass", "CustomPartitionerFn"): "partitioner.py: the same",
    ("torch._inductor.custom_graph_pass", "get_hash_for_files"): "partitioner.py: the same",
    ("torch._inductor.config", "custom_partitioner_fn"): "partitioner.py: the same",
    ("torch._dynamo", "lookup_backend"): "compile.py cannot compile layers",
    (
        "torch._C",
        "_current_graph_task_id",
    ): "torch_modes.py warns of a loss that a checkpoint of the model recomputes",
    (
        "torch._C",
        "_are_functorch_transforms_active",
    ): "torch_modes.py does not see torch.func: kernels run where they are not defined",
    (
        "torch._guards",
        "CompileContext.current_compile_id",
    ): "logits.py tells torch.compile the sizes of logits that it then does not find, under torch 2.11",
    ("torch.autograd.forward_ad", "_current_level"): "torch_modes.py does not see forward-mode differentiation",
    ("triton.compiler", "CompiledKernel.__getitem__"): "_triton_utils.py cannot launch a compiled kernel",
    ("torch.optim.adam", "Adam._init_group"): "optimizer.py updates DTensors one operator of DTensor after the other",
    ("torch", "_assert_async"): "collectives.py cannot check labels on a GPU without waiting for it",
    ("torch", "Tensor._make_subclass"): "logits.py cannot make zero-width logits",
    ("torch", "Tensor._make_wrapper_subclass"): "packed_bytes.py cannot shard weights of 4 bits under FSDP2",
    ("transformers.modeling_utils", "caching_allocator_warmup"): "loading.py: a rank allocates the full model once",
    ("torch.distributed.distributed_c10d", "_world"): "vocab_parallel.py cannot tell which groups were destroyed",
    (
        "torch.distributed.distributed_c10d",
        "get_backend_config",
    ): "no device for collectives",
    ("torch.multiprocessing.reductions", "StorageWeakRef"): "recompute.py cannot recognise outputs among saved tensors",
    ("torch.nn.modules.module", "_global_forward_hooks"): "swap.py does not see global hooks on layers",
    (
        "transformers.loss.loss_utils",
        "ForCausalLMLoss",
    ): "probe.py knows no loss function of transformers: every loss stays unfused",
    ("transformers.loss.loss_utils", "ForMaskedLMLoss"): "probe.py leaves masked language models unfused",
    (
        "transformers.modeling_utils",
        "PreTrainedModel.loss_function",
    ): "losses stay unfused",
    ("transformers.modeling_utils", "PreTrainedModel._init_weights"): "structure.py cannot initialise meta models",
    (
        "transformers.modeling_utils",
        "PreTrainedModel._no_split_modules",
    ): "decoder layers are guessed",
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"): "call.py refuses keywords of attention functions",
    (
        "transformers.masking_utils",
        "ALL_MASK_ATTENTION_FUNCTIONS",
    ): "attention.py cannot make transformers' own mask where it has none",
    (
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward",
    ): "attention.py takes transformers' attention for another package's, and packed documents get a dense mask",
    (
        "transformers.modeling_utils",
        "PreTrainedModel._supports_flex_attn",
    ): "attention_selection.py selects the attention for no model",
    ("transformers.modeling_outputs", "BaseModelOutputWithPast"): "trials/isolated.py cannot probe a model",
    ("transformers.utils", "ModelOutput"): "output.py cannot remove logits from outputs",
    (
        "transformers.utils.deprecation",
        "deprecate_kwarg",
    ): "decorators.py does not know deprecated names of arguments, which call.py then refuses",
    (
        "accelerate.state",
        "AcceleratorState._shared_state",
    ): "accelerate.py does not refuse wrappers around sharded models",
    ("transformers.integrations.moe", "ExpertsInterface.register"): "experts.py computes no experts",
    ("peft.tuners.lora.layer", "ParamWrapper"): "experts.py adds no LoRA on experts: PEFT merges it in each forward",
    ("peft.tuners.lora", "LoraLayer.get_base_layer"): "peft.py takes a LoRA layer for a quantised lm_head",
    ("peft.utils.other", "ModulesToSaveWrapper"): "peft.py does not find the lm_head that PEFT trains",
    ("peft.tuners.lora.dora", "DoraLinearLayer"): "peft.py cannot tell DoRA from other variants",
    ("deepspeed.comm.comm", "cdb"): "deepspeed.py warns of DDP in programs that DeepSpeed averages",
    ("deepspeed.utils", "safe_get_full_grad"): "verify cannot compare gradients under DeepSpeed",
    (
        "deepspeed.runtime.engine",
        "DeepSpeedEngine.set_gradient_accumulation_boundary",
    ): "verify takes DeepSpeed's engine for a plain model",
}
"""Names of modules and classes."""

ATTRIBUTES: dict[str, tuple[tuple[str, ...], str]] = {
    # module whose source sets them on instances: the attributes, and what breaks without them
    "torch.distributed.pipelining": (
        (
            *("_stage", "_stages", "_n_microbatches", "_loss_fn", "scale_grads", "pipeline_order", "BACKWARD_WEIGHT"),
            *("args_recv_info", "buffer"),
        ),
        "pipeline.py cannot check a schedule, nor tell the zero-bubble ones, whose recomputed outputs would be gone",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state": (
        (
            "_fsdp_param_group",
            "_mp_policy",
            "_state_ctx",
            "all_states",
            "iter_forward_root",
            "_modules_to_run_forward",
            "_training_state",
            "post_backward_final_callback_queued",
        ),
        "fsdp2/forward.py finds no groups: no adapter serves FSDP2; under Accelerate losses are rounded to 16 bits",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group": (
        (
            "fsdp_params",
            "mesh_info",
            "gradient_divide_factor",
            "reduce_grads",
            "all_reduce_grads",
            "_reset_sharded_params",
            "_orig_dtype",
            "_post_forward_indices",
            "_partial_reduce_output",
            "post_forward_order",
        ),
        "fsdp2/strategy.py cannot read mesh, divide factor and no-sync of a group",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param": (
        (
            "_module_info",
            "sharded_param",
            "_unsharded_param",
            "unsharded_accumulated_grad",
            "shared_modules",
            "shared_param_names",
        ),
        "fsdp2/strategy.py cannot tell which modules share lm_head's weight: tied models are refused or wrong",
    ),
    "torch.distributed.fsdp._init_utils": (
        ("_gradient_predivide_factor", "_gradient_postdivide_factor", "_inter_node_pg"),
        "fsdp1.py cannot compute a global token mean",
    ),
    "torch.distributed.fsdp._flat_param": (
        (
            *("_fsdp_flattened", "_is_flat_param", "flat_param", "_params", "_local_shard", "_full_param_padded"),
            *("_needs_pre_backward_unshard", "_training_state"),
        ),
        "fsdp1.py does not recognise FSDP1's storage, or what of it is unsharded",
    ),
    "torch.distributed.fsdp._runtime_utils": (
        ("_post_backward_hook_state", "training_state"),
        "fsdp1_forward.py does not reshard after a forward without a backward",
    ),
    "torch.distributed.fsdp._common_utils": (("_handle",), "encoders under FSDP1 with images on some ranks fail"),
    "accelerate.accelerator": (
        ("_is_accelerate_prepared",),
        "accelerate.py does not refuse wrappers around sharded models",
    ),
    "deepspeed.utils": (
        ("_z3_leaf", "_hp_mapping"),
        "tiles of an MLP read weights that ZeRO-3 has not gathered; clip_grad_norm_ clips nothing under ZeRO-1 and 2",
    ),
    "transformers.utils": (("_local_mapping",), "attention_selection.py does not see a file's own functions"),
    "deepspeed.runtime.zero.partition_parameters": (
        ("ds_id", "ds_shape"),
        "deepspeed.py does not recognise ZeRO-3's storage",
    ),
    "deepspeed.runtime.zero.stage3": (
        ("parameter_offload", "micro_step_id", "averaged_gradients", "_epilogue_ran_this_backward"),
        "verify cannot run under ZeRO-3",
    ),
    "deepspeed.runtime.bf16_optimizer": (("_hp_grad", "clear_hp_grads"), "verify cannot run with DeepSpeed's bf16"),
    "deepspeed.runtime.engine": (("_is_gradient_accumulation_boundary",), "verify cannot run under DeepSpeed"),
    "transformers.modeling_utils": (
        ("_loss_function",),
        "model_loss.py cannot install its loss function on an instance",
    ),
    "torch._tensor": (
        ("_backward_hooks", "_post_accumulate_grad_hooks"),
        "gradient_checks.py does not warn of hooks that sharding drops",
    ),
    "transformers.modeling_layers": (
        ("_gradient_checkpointing_func",),
        "reentrant_layers.py does not refuse FSDP1 with reentrant checkpointing: ranks call different collectives",
    ),
    "transformers.configuration_utils": (
        ("_attn_implementation", "_experts_implementation"),
        "attention_selection.py and experts.py cannot select an implementation for one model instance",
    ),
    "transformers.integrations.moe": (
        ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel", "_apply_gate"),
        "experts.py does not know what a module of experts computes",
    ),
    "peft.peft_model": (
        ("active_peft_config", "is_prompt_learning", "base_model"),
        "peft.py does not know CPT and AdaLoRA: raw errors in their first forward under FSDP",
    ),
    "peft.tuners.adalora": (("orth_reg_weight",), "AdaLoRA fails in its first forward under FSDP"),
    "peft.tuners": (
        ("peft_config", "active_adapter"),
        "reduction_checks.py does not see adapters that are added to a sharded model: nothing averages them",
    ),
    "peft.tuners.lora.layer": (
        ("lora_A", "lora_variant", "parameter_name", "num_experts"),
        "peft.py cannot tell LoRA from other tuners, and experts.py not on which parameter it is",
    ),
    "peft.utils.other": (
        ("modules_to_save", "original_module", "token_adapter", "get_merged_weights"),
        "peft.py does not find the lm_head that PEFT trains",
    ),
}
"""Names on instances."""

SINCE = {"_epilogue_ran_this_backward": ("deepspeed", "0.18.5")}
"""the release that brought a name; what reads it does without in older ones"""


@pytest.mark.parametrize(("module", "path"), NAMES, ids=lambda value: str(value))
def test_a_private_name_still_exists(module: str, path: str) -> None:
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(found, name), f"{module}.{path} is gone: {NAMES[module, path]}"
        found = getattr(found, name)


def test_a_product_tells_its_saved_operands() -> None:
    node: Any = (torch.ones(2, 2, requires_grad=True) @ torch.ones(2, 2)).grad_fn
    assert any(name.startswith("_raw_saved_") for name in dir(node)), (
        "autograd's nodes hide their saved tensors: recompute.py saves outputs instead of recomputing them"
    )
    assert type(node).__name__ == "MmBackward0", "products have another name: recompute.py does not find them"
    total: Any = torch.ones(2, requires_grad=True) + 1.0
    total.grad_fn.metadata["note"] = True
    is_marked = "note" in total.grad_fn.metadata and type(total.grad_fn).__name__ == "AddBackward0"
    assert is_marked, "sums cannot be marked: recompute.py walks the whole residual stream"


def test_a_decorator_of_transformers_tells_which_keyword_it_renames() -> None:
    from transformers.utils.deprecation import deprecate_kwarg

    def forward(self: Any, cache: Any = None) -> Any:
        return cache

    decorated = deprecate_kwarg("past", "99.0.0", new_name="cache")(forward)
    assert renamed_keywords(decorated) == {"past": "cache"}, NAMES["transformers.utils.deprecation", "deprecate_kwarg"]
    copy = redecorated(decorated, forward)
    assert copy is not decorated
    assert copy(None, past=3) == 3, "rotary.py leaves alone every attention whose forward transformers decorates"


@pytest.mark.parametrize("module", ATTRIBUTES)
def test_instances_still_have_a_private_name(module: str) -> None:
    package = module.split(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(importlib.import_module(module).__file__ or "").parent
    names, what_breaks = ATTRIBUTES[module]
    source = "".join(file.read_text() for file in folder.glob("*.py"))
    for name in names:
        distribution, release = SINCE.get(name, (package, "0"))
        if numbers(metadata.version(distribution)) < numbers(release):
            continue
        assert re.search(rf"\b{name}\b", source), f"{name} is gone from {module}: {what_breaks}"


def test_a_module_keeps_its_hooks_and_its_compiled_call_under_these_names() -> None:
    """Or token_dependency.py would run them on the numbers that it makes up."""
    module = nn.Linear(2, 2)
    names = {name for name in dir(module) if re.fullmatch(r"_(forward|backward)(_pre)?_hooks(_\w+)?", name)}
    assert names == set(_HOOKS)
    assert "_compiled_call_impl" in dir(module)


def test_a_config_takes_implementations_for_one_model_alone() -> None:
    """token_dependency.py sets and restores them."""
    from transformers import Qwen3MoeConfig

    config: Any = Qwen3MoeConfig()
    for name in IMPLEMENTATIONS:
        setattr(config, name, {"": "eager"})
        assert getattr(config, name) == "eager"


@pytest.mark.parametrize("name", ["ForCausalLM", "ForConditionalGeneration"])
def test_transformers_fuses_no_loss_with_lm_head(name: str) -> None:
    """``use_kernels`` maps this loss to a kernel of the hub, but replaces modules alone. Once the loss is a module, or
    takes hidden states, ``wrap`` and the kernel must not fuse twice."""
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    losses = importlib.import_module("transformers.loss.loss_utils")
    loss = losses.LOSS_MAPPING[name]
    assert loss is losses.ForCausalLMLoss
    assert inspect.isfunction(loss)
    assert not hasattr(loss, "kernel_layer_name")
    assert next(iter(inspect.signature(loss).parameters)) == "logits"
    source = inspect.getsource(hub_kernels)
    assert "lm_head" not in source
    assert not re.search(r"fused_?linear|linear_?cross_?entropy", source, re.IGNORECASE)


def test_fully_shard_puts_its_class_first(workers_2: Workers) -> None:
    for bases in workers_2.run(bases_of_a_sharded_module):
        assert bases == ["FSDPModule", "Linear"], (
            "fully_shard makes its classes in another way: swap.below_wrappers takes FSDP2's class for the model's own"
        )


def bases_of_a_sharded_module() -> list[str]:
    module = nn.Linear(4, 4).to(compute_device())
    fully_shard(module)
    return [base.__name__ for base in type(module).__bases__]


def test_every_underscored_torch_call_is_listed_here() -> None:
    """Names such as ``torch._C._x`` or ``dist.distributed_c10d._x`` in the library."""
    here = Path(__file__).read_text()
    used: set[str] = set()
    for file in LIBRARY.rglob("*.py"):
        used |= set(re.findall(r"\b(?:torch|dist|fwAD)(?:\.\w+)*\.(_[a-zA-Z]\w+)", file.read_text()))
    missing = sorted(
        name for name in used - {"_C", "_dynamo", "_pytree"} if f'{name}"' not in here and f".{name}" not in here
    )
    assert not missing, f"add {missing} to NAMES, with what breaks without each"


def installed_releases() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in CHECKED:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def test_no_installed_release_is_newer_than_those_checked() -> None:
    """The upper bound of the private names: a new release is added to the list after this file has passed with it."""
    for package, release in installed_releases().items():
        print(f"{package} {release}; checked: {', '.join(CHECKED[package])}")
    newer = {package: release for package, release in installed_releases().items() if newest_checked(package, release)}
    assert not newer, (
        f"{newer} are newer than CHECKED of liger_dist/versions.py: if all else in this file passes, add them there "
        "and to docs/versions.md"
    )


def test_the_pinned_releases_are_checked() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    pins = re.findall(r"^(\S+)==([\d.]+)(?:$|; python_version >=)", constraints, re.MULTILINE)
    pinned = {name: release for name, release in pins if name in CHECKED}
    assert pinned.keys() == CHECKED.keys()
    missing = {name: release for name, release in pinned.items() if release not in CHECKED[name]}
    assert not missing, f"constraints.txt pins {missing}, which CHECKED of liger_dist/versions.py does not have"


def test_the_oldest_releases_are_one_list() -> None:
    """Of the package's requirements, of the doctor, of ``make test-oldest`` and of the page."""
    setup, makefile = (ROOT / "setup.cfg").read_text(), (ROOT / "Makefile").read_text()
    page = (ROOT / "docs" / "versions.md").read_text()
    for package, releases in CHECKED.items():
        assert list(releases) == sorted(releases, key=numbers)
        oldest, least = releases[0], (doctor.NEEDED | doctor.OPTIONAL)[package]
        assert re.search(rf"^    {package}[>=]=({least}|{oldest})\b", setup, re.MULTILINE), package
        assert numbers(oldest)[:2] == numbers(least)[:2]
        assert f"{package}=={oldest}" in makefile.split(), f"make test-oldest does not install {package}=={oldest}"
        assert f"| {package} | {least} | {', '.join(releases)} |" in page


@pytest.mark.smoke
@pytest.mark.parametrize("is_newer", [True, False])
def test_the_doctor_tells_of_a_release_that_is_newer_than_those_checked(
    is_newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = ".".join(map(str, numbers(torch.__version__)))
    major, minor, micro = numbers(release)
    newest = f"{major}.{minor - 1}.{micro}" if is_newer else release
    monkeypatch.setitem(CHECKED, "torch", (newest,))
    (finding,) = (finding for finding in doctor.versions() if finding.what == "torch")
    assert finding.verdict == ("note" if is_newer else "ok")
    if is_newer:
        assert f"{metadata.version('torch')} is newer than {newest}, the newest that the private names" in finding.found
        assert "liger_dist.verify" in finding.remedy
    assert doctor.Diagnosis((finding,)).ok
