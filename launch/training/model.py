"""Models: a preset, a config file or a folder; built without storage, sharded, then given values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from liger_dist import LigerDistError, WrapConfig, wrap

from .arguments import TrainArguments
from .process import device, rank, world_size

# hidden size, MLP size, layers, heads, key-value heads
PRESETS = {
    "tiny": (128, 352, 4, 4, 2),
    "small": (384, 1024, 6, 6, 2),
    "160m": (768, 2048, 12, 12, 4),
    "1b": (2048, 8192, 16, 32, 8),
    "8b": (4096, 14336, 32, 32, 8),
}


def find_config(arguments: TrainArguments, vocab_size: int) -> Any:
    """The model's config. A preset takes ``vocab_size``; others must have room for it.

    Raises:
        LigerDistError: unknown preset, a folder or file that does not exist, a vocabulary smaller than the tokenizer's.
    """
    if arguments.model in PRESETS:
        hidden_size, intermediate_size, layers, heads, key_value_heads = PRESETS[arguments.model]
        return LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            max_position_embeddings=arguments.sequence_length,
            bos_token_id=None,
            eos_token_id=None,
        )
    path = Path(arguments.model)
    if not path.exists():
        raise LigerDistError(
            f"--model is {arguments.model!r}, which is neither a preset ({', '.join(PRESETS)}) nor a folder or "
            "config.json that exists."
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise LigerDistError(f"no model config can be read from {path}: {error}") from error
    available = config.get_text_config().vocab_size
    if available < vocab_size:
        raise LigerDistError(
            f"the tokenizer has {vocab_size} entries but the model {path} has only {available}; use the model's own "
            "tokenizer (--tokenizer), or resize its embeddings first."
        )
    return config


def strategy_of(arguments: TrainArguments) -> str:
    return arguments.strategy or ("fsdp2" if world_size() > 1 else "none")


def build(arguments: TrainArguments, config: Any) -> nn.Module:
    """The wrapped model, with pretrained weights when ``--model`` is a folder that has them."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    strategy = strategy_of(arguments)
    torch.manual_seed(arguments.seed)
    wrapped: nn.Module = wrap(
        model,
        strategy,  # type: ignore[arg-type]
        mesh=tuple(arguments.mesh) or None,
        config=WrapConfig(
            fused_loss=arguments.fused_loss,
            head=arguments.head,
            memory_budget=arguments.memory_budget,
            param_dtype=torch.bfloat16 if strategy == "fsdp2" and arguments.dtype == "bfloat16" else None,
            activation_checkpointing=arguments.activation_checkpointing,
            reshard_after_forward=arguments.reshard_after_forward,
            cpu_offload=arguments.cpu_offload,
        ),
    )
    folder = Path(arguments.model)
    if any(path for suffix in ("safetensors", "bin") for path in folder.glob(f"*.{suffix}")):
        _load_pretrained(wrapped, folder)
    return wrapped


def _load_pretrained(model: nn.Module, folder: Path) -> None:
    """Rank 0 reads the folder, in whatever format transformers reads, and every rank takes its shards."""
    weights: dict[str, Any] = {}
    if rank() == 0:
        weights = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world_size() > 1)
    set_model_state_dict(model, weights, options=options)


def inner_model(model: nn.Module) -> Any:
    """The transformers model, without the wrapper that DDP puts around it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def autocast(arguments: TrainArguments) -> Any:
    """bf16 compute where the strategy does not bring it itself."""
    needed = arguments.dtype == "bfloat16" and strategy_of(arguments) != "fsdp2"
    return torch.autocast(device().type, dtype=torch.bfloat16, enabled=needed)
