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
from torch.distributed.fsdp import fully_shard

import liger_dist

STEPS = 3


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


def make_policy(folder: Path, *, fused: bool, packed: bool = False, **options: Any) -> Any:
    """Loads a policy as SkyRL's worker: ranks other than the first have no weights before FSDP2 shards them."""
    made = model_class(fused)
    torch.manual_seed(3)
    policy = made(str(folder), bf16=False, **options)
    # Its flag needs flash attention, and says only that padding is removed.
    policy.remove_microbatch_padding = packed
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer)
    fully_shard(policy.model)
    return policy


def run_updates(folder: Path, fused: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Scores the samples, and makes :data:`STEPS` updates. Returns everything as full tensors."""
    samples = make_samples(torch.distributed.get_rank())
    policy = make_policy(folder, fused=fused, **options)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    ask = partial(policy, samples["sequences"], ANSWER, samples["attention_mask"], temperature=0.7)
    mask = samples["action_mask"]
    found: dict[str, Any] = {"class": type(policy).__qualname__, "steps": []}
    with watched() as seen:
        with torch.no_grad():
            found["scored"] = ask() * mask
        for step in range(STEPS):
            log_probs, output = ask(return_output=True, compute_entropy=True, entropy_requires_grad=step < 2)
            ratio = (log_probs - samples["old"]).exp()
            gains = torch.minimum(ratio * samples["advantages"], ratio.clamp(0.8, 1.2) * samples["advantages"])
            entropy = (output["entropy"][:, -ANSWER - 1 : -1] * mask).sum() / mask.sum()
            loss = -(gains * mask).sum() / mask.sum() - 0.1 * entropy
            loss.backward()
            found["steps"].append(
                {
                    "log_probs": log_probs.detach() * mask,
                    "entropy": entropy.detach(),
                    "loss": loss.detach(),
                    "gradients": {name: full(grad) for name, grad in gradients(policy.model).items()},
                }
            )
            optimizer.step()
            optimizer.zero_grad()
    found |= {"calls": seen.fused_calls, "logits": seen.most_logits}
    found["weights"] = {name: full(weight).detach().clone() for name, weight in policy.model.state_dict().items()}
    return found
