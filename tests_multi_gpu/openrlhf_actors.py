"""OpenRLHF's actors on CPUs, under DeepSpeed over gloo, with and without liger_dist's plug. flash-attn, which has no
wheel for CPUs, and vLLM are stand-ins."""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from hosts import watched
from layouts import zero_settings
from models import VOCAB_SIZE
from policies import ROWS
from torch import Tensor

import liger_dist

STEPS = 3
SAMPLES, LENGTH, ANSWER = 4, 14, 6


def add_stand_ins() -> None:
    """Adds the functions of flash-attn that remove and add padding, and an empty vLLM."""
    if "flash_attn" in sys.modules:
        return
    # transformers looks for flash-attn in its imports, and would find these.
    import_module("transformers.modeling_utils")
    functions = {
        "bert_padding": (index_first_axis, pad_input, rearrange, unpad_input),
        "utils": (),
        "utils.distributed": (all_gather,),
    }
    flash_attn = ModuleType("flash_attn")
    flash_attn.__path__ = []
    sys.modules["flash_attn"] = flash_attn
    for name, members in functions.items():
        module = ModuleType(f"flash_attn.{name}")
        module.__path__ = []
        vars(module).update({function.__name__: function for function in members})
        sys.modules[module.__name__] = module
    sys.modules["vllm"] = mock.MagicMock(__version__="0.29.0", __spec__=None, __path__=[])
    for name in ("inputs", "utils"):
        sys.modules[f"vllm.{name}"] = mock.MagicMock()


def index_first_axis(values: Tensor, indices: Tensor) -> Tensor:
    return values[indices]


def rearrange(values: Tensor, _: str) -> Tensor:
    return values.flatten(0, 1)


def unpad_input(values: Tensor, attention_mask: Tensor) -> tuple[Any, ...]:
    indices = attention_mask.flatten().nonzero().flatten()
    lengths = attention_mask.sum(1)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return values.flatten(0, 1)[indices], indices, offsets, int(lengths.max()), lengths


def pad_input(values: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    padded = values.new_zeros(batch * seqlen, *values.shape[1:])
    return padded.index_copy(0, indices, values).reshape(batch, seqlen, *values.shape[1:])


def all_gather(*_: Any) -> Tensor:
    raise NotImplementedError


def actor_class(fused: bool) -> Any:
    """The class that makes policies, as the modules of the trainer have it."""
    add_stand_ins()
    import openrlhf.models
    from openrlhf.trainer.ray import launcher, ppo_actor

    from liger_dist.integrations import openrlhf as plug

    own = openrlhf.models.Actor
    launcher.Actor = ppo_actor.Actor = own
    if fused:
        plug.patch(liger_dist.WrapConfig(memory_budget=ROWS * VOCAB_SIZE * 4))
        assert all(issubclass(made, own) and made is not own for made in (launcher.Actor, ppo_actor.Actor))
    # It expects what transformers 5.15 returned there.
    sys.modules[own.__module__]._patch_zero3_weight_mapping = lambda: None  # type: ignore[attr-defined]
    # SFT, DPO and others import it from here.
    assert openrlhf.models.Actor is own
    return ppo_actor.Actor


def make_actor(folder: Path, *, fused: bool, stage: int, **options: Any) -> Any:
    actor = actor_class(fused)
    from openrlhf.utils import utils

    settings = zero_settings({"stage": stage}) | {"train_micro_batch_size_per_gpu": SAMPLES}
    torch.manual_seed(3)
    given = {"attn_implementation": "sdpa", "temperature": 0.7, **options}
    # It knows 16-bit dtypes only.
    with mock.patch.object(utils, "convert_to_torch_dtype", return_value=torch.float32):
        return actor(str(folder), ds_config=settings, **given), settings


def make_samples(rank: int) -> dict[str, Tensor]:
    """Prompts are padded on the left, answers on the right, as OpenRLHF's."""
    generator = torch.Generator().manual_seed(11 + rank)
    draw = partial(torch.randn, SAMPLES, ANSWER, generator=generator)
    sequences = torch.randint(5, VOCAB_SIZE, (SAMPLES, LENGTH), generator=generator)
    attended, action_mask = torch.ones(SAMPLES, LENGTH, dtype=torch.int64), torch.ones(SAMPLES, ANSWER)
    for row in range(SAMPLES):
        attended[row, : row + rank] = 0
        ends = ANSWER - (row + rank) % 3
        attended[row, LENGTH - ANSWER + ends :] = 0
        # The last token of an answer is not predicted from; its own prediction counts.
        action_mask[row, ends:] = 0
    sequences[attended == 0] = 0
    return {
        "sequences": sequences,
        "attention_mask": attended,
        "action_mask": action_mask,
        "old": draw() * 0.1 - 4,
        "advantages": draw(),
    }


def run_ppo(folder: Path, fused: bool, stage: int, options: dict[str, Any]) -> dict[str, Any]:
    """Scores the samples, and makes :data:`STEPS` updates. Returns everything as full tensors."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    rank = torch.distributed.get_rank()
    samples = make_samples(rank)
    actor, settings = make_actor(folder, fused=fused, stage=stage, **options)
    from openrlhf.models import PolicyLoss
    from openrlhf.models.utils import masked_mean

    trained = {name: p for name, p in actor.model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.05)
    actor.model, *_ = deepspeed.initialize(model=actor.model, optimizer=optimizer, config=settings)
    ask = {"attention_mask": samples["attention_mask"], "return_output": True, "return_entropy": True}
    found: dict[str, Any] = {"class": type(actor).__qualname__, "steps": []}
    with watched() as seen:
        with torch.no_grad():
            found["scored"] = actor(samples["sequences"], samples["action_mask"], samples["attention_mask"])
            asked = ask | {"return_entropy": False, "return_logprobs": True}
            # Of SFT and DPO, which score the prompts too; padding is undefined.
            scores, _ = actor(samples["sequences"], **asked)
            found["all scores"] = scores * samples["attention_mask"][:, 1:] * samples["attention_mask"][:, :-1]
        for _ in range(STEPS):
            log_probs, output = actor(samples["sequences"], samples["action_mask"], **ask)
            loss, *_ = PolicyLoss()(log_probs, samples["old"], samples["advantages"], samples["action_mask"])
            entropy = masked_mean(output.entropy[:, -ANSWER:], samples["action_mask"])
            loss = loss - 0.1 * entropy + getattr(output, "aux_loss", 0.0)
            actor.model.backward(loss)
            gradients = {name: safe_get_full_grad(p).clone() for name, p in trained.items()}
            scores = {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "loss": loss.detach()}
            found["steps"].append(scores | {"gradients": gradients})
            actor.model.step()
    found |= {"calls": seen.fused_calls, "logits": seen.most_logits}
    found["weights"] = {name: safe_get_full_fp32_param(p).clone() for name, p in trained.items()}
    actor.model.destroy()
    return found


def refusals_of(folder: Path, folder_of_bloom: Path) -> list[str]:
    """Returns the sentences of calls and settings that the plug refuses, and the shape of logits that are asked for."""
    made, _ = make_actor(folder, fused=True, stage=2)
    samples = make_samples(0)
    given = samples["sequences"], samples["action_mask"], samples["attention_mask"]
    found = []
    for refused in (
        lambda: made(*given, ring_attn_group=torch.distributed.group.WORLD),
        lambda: make_actor(folder, fused=True, stage=2, use_liger_kernel=True),
        lambda: make_actor(folder_of_bloom, fused=True, stage=2, packing_samples=True, attn_implementation="eager"),
    ):
        try:
            refused()
        except liger_dist.LigerDistError as error:
            found.append(str(error))
    with torch.no_grad():
        output = made(samples["sequences"], attention_mask=samples["attention_mask"], return_output=True)
    return [*found, str(tuple(output["logits"].shape))]
