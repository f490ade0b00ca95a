"""Models: a preset, a config file or a folder; built without storage, sharded, then given values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from liger_dist import (
    LigerDistError,
    WrapConfig,
    compile_layers,
    explain,
    four_bit_experts,
    register_attention,
    sharded_loading,
    wrap,
)
from liger_dist.fused_layers.packed_calls import is_recurrent, packing_objection
from liger_dist.model.compile import reason_against_compiling as compile_is_no_gain
from liger_dist.model.four_bit_experts import is_experts
from liger_dist.model.quantized import four_bit_stacks
from liger_dist.model.structure import find_structure
from liger_dist.mtp import MultiTokenPrediction, has_prediction
from liger_dist.sharding import STRATEGIES
from liger_dist.sharding.base import Strategy

from .bases import Base, look_at, reading_options, without_prediction
from .config import TrainConfig
from .distributed import device, on_rank_zero, rank, world_size
from .optimizer import clean
from .options import HEAD_SIZES, MIXTURES, PRESETS, TIED
from .parallel_dims import ParallelDims

LOADED_AT_ONCE = 2**30
FULL_FIRST = ("fsdp1", "deepspeed")
"""strategies that take pretrained weights as a full model, which every rank reads in fp32, the frozen base of LoRA
included: FSDP1 puts frozen and trained parameters of a layer into one tensor of one dtype, and DeepSpeed casts them
itself"""


def find_config(config: TrainConfig, vocab_size: int) -> Any:
    """Finds the model's config. A preset takes ``vocab_size``; any other model must have room for it.

    Raises:
        LigerDistError: unknown preset, a folder or file that does not exist, a vocabulary smaller than the tokenizer's.
    """
    if config.model in PRESETS:
        return _config_of_preset(config, vocab_size)
    path = Path(config.model)
    found = read_config(path)
    available = found.get_text_config().vocab_size
    if available < vocab_size:
        raise LigerDistError(
            f"the tokenizer has {vocab_size} entries but the model {path} has only {available}; use the tokenizer that "
            "the model was trained with (--tokenizer), or resize its embeddings first."
        )
    # MPT's name is the second one.
    for name in ("max_position_embeddings", "max_seq_len"):
        positions = getattr(found.get_text_config(), name, None)
        if isinstance(positions, int) and config.sequence_length > positions:
            raise LigerDistError(
                f"--sequence_length is {config.sequence_length} but the model {path} has {positions} positions "
                f"({name}); lower it, or change the model's config."
            )
    return found


def _config_of_preset(config: TrainConfig, vocab_size: int) -> Any:
    """Makes the config of a Llama, of Qwen3, of Gemma 3, of Qwen3.5 (three gated delta nets for each attention), or of
    Qwen3's mixtures."""
    hidden_size, intermediate_size, layers, heads, key_value_heads = PRESETS[config.model]
    kind, more = "llama", dict[str, Any]()
    family = config.model.split("_")[0]
    if family in HEAD_SIZES:
        kind = "qwen3" if family == "qwen3" else "gemma3_text"
        more = {"head_dim": HEAD_SIZES[family], "tie_word_embeddings": config.model in TIED}
    if config.model.startswith("qwen3_5"):
        kind = "qwen3_5_text"
        more = {
            "head_dim": hidden_size // heads,
            "linear_num_key_heads": key_value_heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": hidden_size // heads,
            "linear_value_head_dim": hidden_size // heads,
        }
    if config.model in MIXTURES:
        kind, names = "qwen3_moe", ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "head_dim")
        more = dict(zip(names, MIXTURES[config.model], strict=True)) | {"norm_topk_prob": True}
    return CONFIG_MAPPING[kind](
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=config.sequence_length,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )


def read_config(path: Path) -> Any:
    """Reads the config of a pretrained folder or of a config.json.

    Raises:
        LigerDistError: there is none.
    """
    if not path.exists():
        raise LigerDistError(
            f"--model is {str(path)!r}, which is neither a preset ({', '.join(PRESETS)}) nor a folder or config.json "
            "that exists."
        )
    try:
        found = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise LigerDistError(f"no model config can be read from {path}: {error}") from error
    if hasattr(found, "quantization_config"):
        # What is trained and written is in floating point.
        del found.quantization_config
    return found


def weights_dtype(config: TrainConfig) -> torch.dtype:
    """Returns the dtype of weights that are read: fp32, the optimizer's masters; ``--dtype`` for the frozen base of
    LoRA, whose parameters PEFT keeps in fp32."""
    found: torch.dtype = getattr(torch, str(config.dtype)) if config.lora_rank else torch.float32
    return found


def shell(config: TrainConfig, model_config: Any, dtype: torch.dtype | None = None) -> nn.Module:
    """Makes the model without storage, and without LoRA layers.

    Args:
        dtype: of the parameters; default: :func:`weights_dtype`.

    Raises:
        LigerDistError: an implementation of attention that transformers does not have here.
    """
    if config.attention == "liger_dist":
        register_attention()
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(
                model_config, dtype=dtype or weights_dtype(config), attn_implementation=config.attention
            )
    except (ImportError, ValueError) as error:
        raise LigerDistError(
            f"no model can be built from the config with --attention {config.attention}: {error}"
        ) from error
    return model


def build(config: TrainConfig, dims: ParallelDims, model: nn.Module, wrapping: WrapConfig | None = None) -> nn.Module:
    """Wraps ``model``, and loads pretrained weights when ``--model`` is a folder that has them.

    Args:
        model: without storage; with ``--lora_rank`` it has its LoRA layers.
        wrapping: what the configuration is added to; default: WrapConfig's defaults.
    """
    torch.manual_seed(config.seed)
    has_weights = has_weights_at(config.model)
    is_full_first = has_weights and (dims.strategy in FULL_FIRST or config.load_in_4bit)
    if is_full_first:
        # DoRA's magnitudes are computed from the full weights.
        in_shards = config.load_in_4bit and dims.strategy == "fsdp2" and config.frozen == "shard" and not config.dora
        dtype = weights_dtype(config) if config.load_in_4bit else torch.float32
        model = read_model(config, dtype, in_shards=in_shards)
    reason = reason_against_compiling(config, dims.strategy, model)
    if reason is None:
        compile_layers(model)
    if config.activation_checkpointing:
        _checkpoint_activations(model, offload=config.offload_checkpoints)
    strategy = strategy_of(config, dims, dims.mesh(device().type))
    with _zeros_in_lora_layers(model):
        wrapped = wrap(model, strategy, config=wrap_config(config, wrapping or WrapConfig()))
    check_loss(wrapped)
    if has_weights and not is_full_first:
        load_pretrained(wrapped, lambda: read_model(config, weights_dtype(config)))
    if rank() == 0:
        explanation = explain(wrapped)
        print(f"lm_head: {explanation.adapter or 'its own'} ({explanation.fused})", flush=True)
        print(f"layers: {'compiled, in the first step' if reason is None else f'not compiled ({reason})'}", flush=True)
    return wrapped


def check_loss(wrapped: nn.Module) -> None:
    """Refuses a model whose loss is another one than the mean over the labels of a whole step.

    Raises:
        LigerDistError: its forward ignores the number of labels, so that micro-batches would multiply the loss, or does
            not shift labels, so that each token would predict itself.
    """
    objection = explain(wrapped).labels
    if objection is not None:
        raise LigerDistError(
            f"the loss of {type(wrapped).__name__} is no mean over all labels of a step, of the next token each: "
            f"{objection}. Train it in your own loop with liger_dist.wrap, or choose another model."
        )


def reason_against_compiling(config: TrainConfig, strategy: str, model: nn.Module) -> str | None:
    """Says why the layers are not compiled, as a clause; None where they are. The model is not wrapped, and may have no
    storage."""
    if config.load_in_4bit:
        return "weights are quantized"
    if config.compile is not None:
        return None if config.compile else "--compile false"
    if (config.ep or 1) > 1:
        return "a layer with experts on several ranks waits for the numbers of tokens, compiled or not"
    if strategy == "deepspeed":
        return "DeepSpeed's hooks split a layer into many graphs"
    if config.mlp_tile_tokens is not None:
        return f"--mlp_tile_tokens {config.mlp_tile_tokens}"
    if not config.layer_kernels:
        return "--layer_kernels false"
    layers = find_structure(model).layers
    reads_earlier_tokens = device().type == "cuda" and is_recurrent(model)
    return compile_is_no_gain(layers, device=device(), is_recurrent=reads_earlier_tokens)


def strategy_of(config: TrainConfig, dims: ParallelDims, mesh: Any) -> Strategy:
    """Makes the strategy with the options of the configuration.

    Raises:
        LigerDistError: options that the strategy does not have.
    """
    strategy = STRATEGIES[dims.strategy]
    names = {field.name for field in fields(strategy)}  # type: ignore[arg-type]
    options = {
        "mesh": mesh,
        "param_dtype": torch.bfloat16 if config.dtype == "bfloat16" and "param_dtype" in names else None,
        "reshard_after_forward": config.reshard_after_forward,
        "cpu_offload": config.cpu_offload,
        "frozen": config.frozen,
        "lm_head": config.lm_head,
        "layers_per_unit": config.layers_per_unit or "auto",
        "expert_parallel": dims.expert_parallel,
        "float8": config.float8,
    }
    usual = {"reshard_after_forward": True, "cpu_offload": False, "frozen": "shard", "lm_head": "gather"}
    usual |= {"layers_per_unit": "auto", "expert_parallel": 1}
    for name, value in options.items():
        if name not in names and value != usual.get(name):
            raise LigerDistError(
                f"{name} is {value} but strategy={dims.strategy!r} does not have it; leave it out, or use fsdp2."
            )
    if config.accumulate_unsharded and dims.strategy not in ("fsdp1", "fsdp2"):
        raise LigerDistError(
            f"--accumulate_unsharded is true but --strategy {dims.strategy} has no sharded gradients to reduce in each "
            "micro-batch; leave it out, or use fsdp2."
        )
    if config.lm_head == "vocab_parallel" and dims.tensor_parallel > 1:
        raise LigerDistError(
            f"--lm_head is vocab_parallel but --tp is {dims.tensor_parallel}, which shards its rows already; leave "
            "one of them out."
        )
    given = {name: value for name, value in options.items() if name in names}
    return replace(strategy, **given)  # type: ignore[type-var]


def check_wrap(config: TrainConfig, dims: ParallelDims) -> None:
    """Refuses what ``liger_dist.wrap`` would refuse, without a process group.

    Raises:
        LigerDistError: options or sizes that the strategy does not have.
    """
    sizes = (dims.replicate, dims.shard) if dims.replicate > 1 else (dims.shard,)
    mesh = sizes if "fsdp" in dims.strategy and dims.same_data == 1 else None
    strategy = strategy_of(config, dims, mesh)
    strategy.check(wrap_config(config, WrapConfig()), world_size=dims.world_size)


def check_packing(
    config: TrainConfig, model: nn.Module, *, way_out: str = "pass --attend_across_documents true: a row is one text"
) -> None:
    """Refuses packed documents for a model whose layers would mix them; the model may have no storage.

    Raises:
        LigerDistError: positions restart at each document, and layers other than attention run on.
    """
    objection = None if config.attend_across_documents else packing_objection(model)
    if objection is not None:
        raise LigerDistError(
            f"{type(model).__name__} ({config.model}) cannot be given packed documents: {objection}; {way_out}."
        )


def _checkpoint_activations(model: Any, *, offload: bool) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise LigerDistError(
            f"--activation_checkpointing is true but {type(model).__name__} does not support it; leave it out."
        )
    if hasattr(model, "activation_checkpointing_enable"):
        # Without an accelerator they are in host memory anyway, and there is no pinned memory to copy them to.
        model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload and device().type != "cpu")
    elif offload:
        raise LigerDistError(
            f"--offload_checkpoints is true but transformers {transformers.__version__} cannot; update it to 5.23."
        )
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def has_weights_at(name: str) -> bool:
    """True on every rank for a ``--model`` that is a folder with weights, as rank 0 sees it: the folder may be there
    for some machines only. A preset's name may be that of another folder."""
    return name not in PRESETS and on_rank_zero(lambda: _has_weights(Path(name)))


def _has_weights(folder: Path) -> bool:
    """True for a folder with weights; False for a config.json."""
    found = any(file.suffix in (".safetensors", ".bin") for file in folder.glob("*"))
    if folder.is_dir() and not found:
        raise LigerDistError(
            f"--model is the folder {folder}, which has no weights; for random ones give its config: "
            f"--model {folder / 'config.json'}"
        )
    return found


def read_weights(
    folder: Path,
    attention: str | None,
    dtype: torch.dtype = torch.float32,
    *,
    four_bit_on: torch.device | None = None,
    experts: bool = True,
    in_shards: bool = False,
) -> nn.Module:
    """Reads pretrained weights in ``dtype``, from any format that transformers reads.

    Args:
        four_bit_on: device on which linear layers are quantised to 4 bits; None to leave them in ``dtype``.
        experts: with ``four_bit_on``, True to quantise stacks of experts as well.
        in_shards: True to keep this rank's shards alone.

    Raises:
        LigerDistError: files that cannot be read, that lack parameters, or in a format that is not trained on;
            bitsandbytes is not installed.
    """
    options = reading_options(folder, None if four_bit_on is None else quantization(dtype), dtype)
    reading = ExitStack()
    if four_bit_on is not None:
        options["device_map"] = {"": four_bit_on}
        reading.enter_context(four_bit_experts(quantization(dtype)) if experts else nullcontext())
    reading.enter_context(sharded_loading() if in_shards else nullcontext())
    try:
        with reading:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                **options,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise LigerDistError(f"the weights in {folder} cannot be read: {error}; get its files again.") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise LigerDistError(
            f"{folder} has no weights for {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}; get its "
            f"files again, or give --model {folder / 'config.json'} for random ones."
        )
    found: nn.Module = model
    return found


def check_base(config: TrainConfig, model: nn.Module, model_config: Any) -> None:
    """Compares the folder ``--model`` with the model, which has no storage and no LoRA layers, and says on rank 0 what
    of it is not trained; ``model_config`` declares it no more. Nothing where there are no pretrained weights.

    Raises:
        LigerDistError: on every rank: a format that is not trained on, or tensors that the model has no parameters for
            and that an export would lack.
    """
    if not has_weights_at(config.model):
        return

    base = on_rank_zero(lambda: checked_base(config, model))
    if base.left_out and not config.lora_rank:
        without_prediction(model_config)
    if rank() == 0:
        print("".join(f"{line}\n" for line in _sentences(config, base)), end="", flush=True)


def checked_base(config: TrainConfig, model: nn.Module) -> Base:
    """Compares the folder ``--model`` with the model, as :func:`check_base`, on this rank."""
    folder, dtype = Path(config.model), weights_dtype(config)
    reading_options(folder, quantization(dtype) if config.load_in_4bit else None, dtype)
    found = look_at(folder, model, takes_prediction=config.mtp is not None)
    is_allowed = config.lora_rank or config.allow_left_out_weights or config.eval_only
    if found.left_out and not is_allowed:
        raise LigerDistError(
            f"{folder} has weights that {type(model).__name__} has no parameters for, {found.described()}, which would "
            "be neither trained nor exported. Give --mtp for layers that predict further tokens, --lora_rank to keep "
            "all of them in the export, or --allow_left_out_weights true to go on without them."
        )
    return found


def _sentences(config: TrainConfig, base: Base) -> list[str]:
    """Says what of a base is read in another way than as parameters that train."""
    found = []
    if base.format is not None and not config.load_in_4bit:
        dtype = str(weights_dtype(config)).removeprefix("torch.")
        found.append(f"weights: {base.folder} has them in {base.format}; read in {dtype}, exported in floating point")
    if config.load_in_4bit:
        found += four_bit_sentences(base.in_four_bits, base.in_stacks, config)
    if base.left_out:
        what = "kept in merged exports as they are" if config.lora_rank else "left out, of exports too"
        what = "not evaluated" if config.eval_only else what
        found.append(f"weights: not of the model, {what}: {base.described()}")
    if config.mtp is not None:
        which = f"those of {base.folder}" if base.has_prediction else f"new and random, {base.folder} has none"
        found.append(f"modules that predict further tokens: {which}")
    return found


def four_bit_sentences(in_four_bits: int, in_stacks: int, config: TrainConfig) -> list[str]:
    """Says what ``--load_in_4bit`` does not reach: nothing for a model without such stacks of experts."""
    if not in_stacks:
        return []
    size = in_stacks * weights_dtype(config).itemsize / 2**30
    return [
        f"--load_in_4bit: {in_four_bits / 1e9:.2f} billion parameters are in 4 bits, {in_stacks / 1e9:.2f} billion of "
        f"stacked experts that transformers has no interface for are not, and take {size:.1f} GiB"
    ]


def quantization(dtype: torch.dtype) -> Any:
    """Makes the format of 4-bit weights: nf4 with quantised scales, as QLoRA has it, and products in ``dtype``.

    Raises:
        LigerDistError: bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise LigerDistError("--load_in_4bit needs bitsandbytes, which is not installed; pip install bitsandbytes.")
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def wrap_config(config: TrainConfig, wrapping: WrapConfig) -> WrapConfig:
    """Adds the options of the configuration to ``wrapping``."""
    return replace(
        wrapping,
        fused_loss=wrapping.fused_loss and config.fused_loss,
        layer_kernels=wrapping.layer_kernels and config.layer_kernels,
        mlp_tile_tokens=config.mlp_tile_tokens,
        # An implementation that was named stays.
        varlen_attention=wrapping.varlen_attention and config.attention in (None, "liger_dist"),
        memory_budget=config.memory_budget or wrapping.memory_budget,
    )


def read_model(config: TrainConfig, dtype: torch.dtype, *, in_shards: bool = False) -> nn.Module:
    """Reads ``--model`` in ``dtype``, and adds LoRA layers with PEFT's initial values, which depend on ``--seed``
    alone. DoRA's magnitudes are those of the weights that were read."""
    on = device() if config.load_in_4bit else None
    model = read_weights(Path(config.model), config.attention, dtype, four_bit_on=on, in_shards=in_shards)
    if config.lora_rank:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = add_lora(model, config, has_weights=True)
    add_mtp(model, config, Path(config.model))
    return model


def load_pretrained(model: nn.Module, read: Callable[[], nn.Module]) -> None:
    """Calls ``read`` on rank 0, and copies the state of the model that it returns to the shards of every rank.

    Torch holds the shards of all that it is given a second time: it gets :data:`LOADED_AT_ONCE` bytes after another.

    Raises:
        LigerDistError: the model that was read has no value for a parameter.
    """
    weights: dict[str, Any] = {}

    def names() -> list[list[str]]:
        weights.update(read().state_dict())
        groups, size = [list[str]()], 0
        for name, value in weights.items():
            if size > LOADED_AT_ONCE:
                groups, size = [*groups, []], 0
            groups[-1].append(name)
            size += value.numel() * value.element_size()
        return groups

    groups = on_rank_zero(names)
    missing = {clean(name) for name, _ in model.named_parameters()}.difference(*groups)
    if missing:
        raise LigerDistError(f"the weights that were read have no {min(missing)}; report this with the model.")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world_size() > 1, strict=False)
    for group in groups:
        set_model_state_dict(model, {name: weights.pop(name) for name in group if name in weights}, options=options)


@contextmanager
def _zeros_in_lora_layers(model: nn.Module) -> Iterator[None]:
    """Within, ``wrap`` gives zeros to parameters of LoRA layers for which a model without storage has no rule (DoRA's
    magnitudes, LoRA of an embedding). :func:`load_pretrained` replaces them with PEFT's values."""
    without_rule = [
        module
        for name, module in model.named_modules()
        if ".lora_" in name and not isinstance(module, nn.Linear) and module._parameters
    ]
    for module in without_rule:
        module._init_weights = _fill_with_zeros
    try:
        yield
    finally:
        for module in without_rule:
            del module._init_weights


def _fill_with_zeros(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.zero_()


def add_mtp(model: nn.Module, config: TrainConfig, folder: Path | None = None) -> None:
    """Adds modules of multi-token prediction to the model, which may be without storage.

    Args:
        folder: checkpoint of the model, whose modules are read where it has some; None for new ones.

    Raises:
        LigerDistError: the checkpoint has another depth, or the model predicts no next token.
    """
    options = config.mtp_options
    if options is None:
        return
    if folder is None or not has_prediction(model, folder):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            # In fp32 they train, also beside the frozen base of LoRA.
            MultiTokenPrediction(model, **options).float()
        return
    depth = options.pop("depth")
    made = MultiTokenPrediction.from_pretrained(model, str(folder), **options).float()
    found = made.depth
    if found != depth:
        raise LigerDistError(
            f"--mtp has depth {depth}, and the checkpoint {folder} predicts {found} further tokens; give that depth."
        )


def add_lora(model: nn.Module, config: TrainConfig, *, has_weights: bool) -> nn.Module:
    """Adds PEFT's LoRA layers to the model, which may be without storage, and freezes all else.

    Raises:
        LigerDistError: the model has no pretrained weights, PEFT is not installed, or no layer has such a name.
    """
    if not has_weights:
        raise LigerDistError(
            f"--lora_rank is {config.lora_rank} but --model {config.model} has no pretrained weights, which LoRA keeps "
            "as they are; give the folder of a pretrained model."
        )
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise LigerDistError(
            f"--lora_rank needs PEFT, which cannot be imported ({error}); pip install peft."
        ) from error
    targets: Any = config.lora_targets[0] if config.lora_targets == ["all-linear"] else config.lora_targets
    # PEFT matches ends of names of parameters, but full names of quantised ones.
    stacks = [name for name, _, stack in four_bit_stacks(model) if targets == "all-linear" or stack.name in targets]
    # PEFT takes names of modules for those of parameters in part: gate_up_proj not.
    stacks += [] if targets == "all-linear" else [name for name in _names_of_stacks(model) if name in targets]
    try:
        found: nn.Module = get_peft_model(
            model,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=config.lora_rank,
                lora_alpha=config.lora_alpha,
                lora_dropout=config.lora_dropout,
                target_modules=targets,
                target_parameters=stacks or None,
                use_dora=config.dora,
            ),
        )
    except ValueError as error:
        raise LigerDistError(f"--lora_targets is {config.lora_targets}: {error}") from error
    if targets != "all-linear":
        _check_targets(found, targets)
    return found


def _names_of_stacks(model: nn.Module) -> list[str]:
    """Returns the names of parameters that are stacks of experts, such as "gate_up_proj"."""
    found = (module._parameters.items() for module in model.modules() if is_experts(module))
    return sorted({name for named in found for name, value in named if value is not None and value.dim() == 3})


def _check_targets(model: Any, targets: list[str]) -> None:
    """
    Raises:
        LigerDistError: a target of which PEFT has made no layer.
    """
    around = [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]
    parts = {part for name, _ in around for part in name.split(".")}
    parts |= {module.parameter_name for _, module in around if hasattr(module, "parameter_name")}
    # PEFT has moved the names of parameters, and of what they are made of, out of target_modules.
    left = [target for target in targets if target in model.peft_config["default"].target_modules]
    unused = [target for target in left if target.rpartition(".")[2] not in parts]
    if unused:
        raise LigerDistError(
            f"--lora_targets has {', '.join(unused)}, of which PEFT makes no LoRA layer here; leave it out, or name "
            "layers of the model, or all-linear."
        )


def autocast(config: TrainConfig, strategy: str) -> Any:
    """Makes the context of bf16 compute, where the strategy does not bring it itself."""
    needed = config.dtype == "bfloat16" and strategy in ("none", "ddp", "tp")
    return torch.autocast(device().type, dtype=torch.bfloat16, enabled=needed)
