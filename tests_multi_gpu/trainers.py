"""What tests of transformers' and TRL's trainers share: data, a tokenizer, arguments of the engines, and a process that
forgets the trainers before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from full_tensors import full_parameters
from hosts import watched
from layouts import zero_settings
from models import make_batch
from torch.utils.data import Dataset


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Ranks get different numbers of valid labels."""

    def __init__(self) -> None:
        batches = [make_batch(number) for number in range(4)]
        self.rows = [
            {name: tensor[row].cpu() for name, tensor in batch.items()} for row in range(3) for batch in batches
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def forget_earlier_trainers() -> None:
    """In this process."""
    from accelerate.state import AcceleratorState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


@contextmanager
def pretended_gpus() -> Iterator[None]:
    """Accelerate looks for GPUs before it lets anything be sharded."""
    from accelerate import DistributedType
    from accelerate.state import PartialState

    if torch.cuda.is_available():
        yield
        return
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    with mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_GPU)):
        yield
    del os.environ["ACCELERATE_TORCH_DEVICE"]


def is_sharded(engine: str | None) -> bool:
    """True if parameters, gradients or optimizer states are sharded."""
    return engine is not None and engine.startswith(("fsdp", "zero"))


def gpus_for(engine: str | None) -> AbstractContextManager[None]:
    """Pretends GPUs while a trainer is made that shards."""
    return pretended_gpus() if is_sharded(engine) else nullcontext()


def sgd_arguments(
    folder: str, engine: str | None = None, layer: str = "LlamaDecoderLayer", **options: Any
) -> dict[str, Any]:
    """Makes keywords of training arguments: SGD at a constant rate, without clipping, every step logged."""
    return {
        "output_dir": folder,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available() and not is_sharded(engine),
        **arguments_of(engine, layer),
        **options,
    }


def logged_losses(trainer: Any) -> list[float]:
    """Reads the losses of the training steps that a trainer has logged."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_watched(trainer: Any) -> dict[str, Any]:
    """Trains; returns logged losses, the number of fused calls, and rows of the most logits."""
    with watched() as seen:
        trainer.train()
    return {"losses": logged_losses(trainer), "fused calls": seen.fused_calls, "most logits": seen.most_logits}


def full_weights(model: Any) -> dict[str, torch.Tensor]:
    """Copies every full parameter to the CPU, by its name in the unwrapped model."""
    return {name: parameter.cpu() for name, parameter in full_parameters(model).items()}


def assert_same_weights(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, atol: float, rtol: float = 1e-4
) -> None:
    """Compares every expected weight with the one of the same name."""
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=rtol, atol=atol), name


def arguments_of(engine: str | None, layer: str) -> dict[str, Any]:
    """What tells a trainer of transformers how to shard."""
    if engine is not None and engine.startswith("fsdp"):
        settings = {
            "version": int(engine[-1]),
            "transformer_layer_cls_to_wrap": [layer],
            "state_dict_type": "SHARDED_STATE_DICT",
            "sync_module_states": False,
        }
        return {"fsdp": True, "fsdp_config": settings}
    if engine is not None and engine.startswith("zero"):
        sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
        return {"deepspeed": zero_settings({"stage": int(engine[-1])}) | dict.fromkeys(sizes, "auto")}
    return {}


def make_tokenizer() -> Any:
    """One token for each printable character."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<bos>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", padding_side="right"
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}:{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}<eos>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    return fast
