"""SkyRL's models on CPUs under FSDP2 over gloo, with and without liger_dist's plug. flash-attn is a stand-in."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from hosts import watched
from models import VOCAB_SIZE, full, gradients
from openrlhf_actors import ANSWER, add_stand_ins, make_samples
from policies import ROWS
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import liger_dist

STEPS = 3
CLASSES = 6
"""of the largest support"""


def model_class(fused: bool) -> Any:
    """The class that makes policies, as the module of the FSDP workers has it."""
    add_stand_ins()
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

    from liger_dist.integrations import skyrl as plug

    fsdp_worker.HFModelWrapper = HFModelWrapper
    if fused:
        plug.patch(liger_dist.WrapConfig(memory_budget=ROWS * VOCAB_SIZE * 4))
    return fsdp_worker.HFModelWrapper


def make_policy(folder: Path, *, fused: bool, packed: bool = False, shards: int = 1, **options: Any) -> Any:
    """Loads a policy as SkyRL's worker: ranks other than the first have no weights before FSDP2 shards them.

    Args:
        shards: of the sequences, over all ranks. Attention sees its own shard alone, with the plug and without it.
    """
    made = model_class(fused)
    from skyrl.backends.skyrl_train.distributed.ulysses import utils

    torch.manual_seed(3)
    policy = made(str(folder), bf16=False, sequence_parallel_size=shards, **options)
    utils.set_ulysses_sequence_parallel_group(torch.distributed.group.WORLD if shards > 1 else None)
    # Its flag needs flash attention, and says only that padding is removed.
    policy.remove_microbatch_padding = packed
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer)
    fully_shard(policy.model)
    return policy


def add_supports(samples: dict[str, Tensor], rank: int) -> dict[str, Any]:
    """Makes padding of the answers tokens, because SkyRL aligns supports by padding on the left, and returns the
    keywords of a call with replay: supports of 1 to :data:`CLASSES` classes, without one where the loss reads none, one
    without the sampled token, one with a class twice."""
    from skyrl.backends.skyrl_train.utils.packed_tensor import PackedTensor

    samples["attention_mask"][:, -ANSWER:] = 1
    answers = samples["sequences"][:, -ANSWER:]
    answers[answers == 0] = 9
    generator = torch.Generator().manual_seed(17 + rank)
    segments = []
    for row, (answer, mask) in enumerate(zip(answers, samples["action_mask"], strict=True)):
        supports = torch.full((ANSWER, CLASSES), -1, dtype=torch.int32)
        for place, token in enumerate(answer.tolist()):
            others = torch.randperm(VOCAB_SIZE, generator=generator)
            size = 1 + (row + place) % CLASSES
            kept = torch.cat([torch.tensor([token]), others[others != token]])[:size]
            supports[place, :size] = kept[torch.randperm(size, generator=generator)].int()
        supports[mask == 0] = -1
        segments.append(supports)
    segments[1][0] = segments[1][0].where(segments[1][0] != answers[1, 0], (answers[1, 0] + 1) % VOCAB_SIZE)
    segments[2][1, :2] = answers[2, 1]
    return {
        "sample_support": PackedTensor.from_segments(segments),
        "loss_mask": samples["action_mask"],
        "enable_sample_support_replay": True,
    }


def run_updates(folder: Path, fused: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Scores the samples, and makes :data:`STEPS` updates. Returns everything as full tensors."""
    options = dict(options)
    rank = torch.distributed.get_rank() if options.get("shards", 1) == 1 else 0
    samples = make_samples(rank)
    mask = samples["action_mask"]
    replayed = add_supports(samples, rank) if options.pop("replay", False) else {}
    # Tokens without a support are 0.
    read = torch.ones_like(mask) if replayed else mask
    policy = make_policy(folder, fused=fused, **options)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    asked = replayed | {"temperature": 0.7}
    ask = partial(policy, samples["sequences"], ANSWER, samples["attention_mask"], **asked)
    found: dict[str, Any] = {"class": type(policy).__qualname__, "steps": []}
    with watched() as seen:
        with torch.no_grad():
            found["scored"] = ask() * read
        for step in range(STEPS):
            log_probs, output = ask(return_output=True, compute_entropy=True, entropy_requires_grad=step < 2)
            ratio = (log_probs - samples["old"]).exp()
            gains = torch.minimum(ratio * samples["advantages"], ratio.clamp(0.8, 1.2) * samples["advantages"])
            entropy = (output["entropy"][:, -ANSWER - 1 : -1] * mask).sum() / mask.sum()
            loss = -(gains * mask).sum() / mask.sum() - 0.1 * entropy
            loss.backward()
            found["steps"].append(
                {
                    "log_probs": log_probs.detach() * read,
                    "entropy": entropy.detach(),
                    "entropies": output["entropy"].detach() if replayed else entropy.detach(),
                    "loss": loss.detach(),
                    "gradients": {name: full(grad) for name, grad in gradients(policy.model).items()},
                }
            )
            optimizer.step()
            optimizer.zero_grad()
    found |= {"calls": seen.fused_calls, "logits": seen.most_logits}
    found["weights"] = {name: full(weight).detach().clone() for name, weight in policy.model.state_dict().items()}
    return found


def replay_refusals_of(folder: Path) -> list[str]:
    """What a policy with the plug says of calls that SkyRL refuses, too, which is asserted."""
    samples = make_samples(0)
    given = add_supports(samples, 0)
    unread = given | {"loss_mask": torch.ones_like(given["loss_mask"])}
    calls = [given | {"sample_support": None}, given | {"loss_mask": None}, unread]
    said = []
    for fused in (False, True):
        policy = make_policy(folder, fused=fused)
        for call in calls:
            try:
                policy(samples["sequences"], ANSWER, samples["attention_mask"], **call)
            except ValueError as error:
                said.append(str(error))
    assert len(said) == 2 * len(calls)
    return said[len(calls) :]
