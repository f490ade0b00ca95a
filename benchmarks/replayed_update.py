"""Times the update of a mixture's policy with replay of the sampler's classes and of its experts, under FSDP2.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.replayed_update

Four layers of Qwen3-30B-A3B, random weights in fp32, bf16 compute, 2 sequences of 4096 tokens on each GPU; the gradient
of the clipped objective of GRPO, clipping, and fused AdamW with a learning rate of 0. All ways share the model and take
turns. ``policy ratio error``: the largest distance from 1 of the ratio between an update's policy and that of a forward
before it at equal weights, the routing of which is replayed (or not). Every label is in its support of 50 classes.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import liger_dist
from liger_dist_train.optimizer import ShardedAdamW

from .experts import QWEN, QWEN_SIZES
from .harness import Row, arguments, save, show

SHAPE, CLASSES = (2, 4096), 50
WAYS = ("plain", "sampling replay", "routing replay", "both")


class Update:
    """A model with its stored texts; updates it in one of the ways."""

    def __init__(self) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        with torch.device("cuda"):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN_SIZES))
        self.model: Any = liger_dist.wrap(model, liger_dist.FSDP2(param_dtype=torch.bfloat16))
        generator = torch.Generator("cuda").manual_seed(dist.get_rank())
        vocab_size = QWEN_SIZES["vocab_size"]
        self.ids = torch.randint(vocab_size, SHAPE, device="cuda", generator=generator)
        following = self.ids.roll(-1, 1)
        # Different ids, none of them the label.
        steps = torch.arange(1, CLASSES, device="cuda") * 2999
        self.support = torch.cat([following[..., None], (following[..., None] + steps) % vocab_size], -1)
        self.advantages = torch.randn(SHAPE[0], 1, device="cuda", generator=generator)
        self.optimizer = ShardedAdamW(self.model.parameters(), lr=0.0, fused=True)
        with torch.no_grad():
            with liger_dist.record_routing(self.model) as self.routes:
                without = self._log_probs(replays_sampling=False)
            self.old = {False: without, True: self._log_probs(replays_sampling=True)}

    def _log_probs(self, *, replays_sampling: bool) -> Tensor:
        support = {"support_ids": self.support} if replays_sampling else {}
        asked = {"outputs": ("log_prob",), "differentiable": torch.is_grad_enabled(), **support}
        output = self.model(input_ids=self.ids, labels=self.ids, use_cache=False, **asked)
        found: Tensor = output.log_prob
        return found

    def step(self, way: str) -> Tensor:
        """Makes an update; returns the ratios of the policies."""
        replays_sampling, replays_routing = way in WAYS[1::2], way in WAYS[2:]
        old = self.old[replays_sampling]
        with liger_dist.replay_routing(self.model, self.routes) if replays_routing else nullcontext():
            ratio = (self._log_probs(replays_sampling=replays_sampling) - old).exp()
        gains = torch.minimum(ratio * self.advantages, ratio.clamp(0.8, 1.2) * self.advantages)
        (-gains.mean()).backward()
        liger_dist.clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return ratio.detach()


def timed(step: Callable[[], object]) -> float:
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    update = Update()
    problem = f"{QWEN}, 4 layers, 8192 tokens a GPU, FSDP2 on {dist.get_world_size()}"
    rows = {way: Row(problem, way, "") for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for way, row in rows.items():
        for _ in range(3):
            ratio = update.step(way)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        update.step(way)
        torch.cuda.synchronize()
        row.figures = {
            "policy ratio error": float((ratio - 1).abs().max()),
            "peak GiB": torch.cuda.max_memory_allocated() / 2**30,
        }
    draw = random.Random(0)
    for _ in tqdm(range(given.rounds), desc=problem, disable=dist.get_rank() != 0):
        for way in draw.sample(WAYS, len(WAYS)):
            times[way].append(timed(lambda way=way: update.step(way)))  # type: ignore[misc]
    for way, row in rows.items():
        seen = sorted(times[way])
        row.median_ms, row.p20_ms, row.p80_ms = statistics.median(seen), seen[len(seen) // 5], seen[-1 - len(seen) // 5]
        row.figures["of plain"] = row.median_ms / statistics.median(times["plain"])
    if dist.get_rank() == 0:
        print(problem)
        show(list(rows.values()), ("of plain", "policy ratio error", "peak GiB"))
        save("replayed_update", list(rows.values()), given.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
