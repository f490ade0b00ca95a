"""The update of a policy by OpenRLHF's own actor under ZeRO-3 on stored rollouts: its logits, and this library.

    python -m benchmarks.openrlhf_actor [--layers 6]

A model of Llama-8B's shape and fewer layers, random weights in bf16 with fp32 masters, one GPU, activation
checkpointing, rows of equal lengths; OpenRLHF's PPO loss with an entropy bonus and a temperature. Both use this
library's attention. Each candidate runs in a separate process.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import liger_dist

from .harness import Row, arguments, save, show
from .policy_step import make_model

VOCAB_SIZE = 128256
SAMPLES, LENGTH, PROMPT = 8, 1024, 256
TEMPERATURE = 0.7


def make_actor(layers: int, *, is_fused: bool) -> Any:
    import deepspeed
    from openrlhf.models import Actor

    from liger_dist.integrations.openrlhf_actor import make_class

    model = make_model(layers)
    model.set_attn_implementation("liger_dist")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kind = make_class(liger_dist.WrapConfig()) if is_fused else Actor
    actor = kind(model, temperature=TEMPERATURE)
    actor.packing_samples = False
    settings = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
    }
    actor.model, *_ = deepspeed.initialize(model=actor.model, config=settings)
    return actor.train()


def measured(name: str, layers: int, rounds: int) -> Row:
    from openrlhf.models import PolicyLoss
    from openrlhf.models.utils import masked_mean

    actor = make_actor(layers, is_fused=name == "liger_dist")
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (SAMPLES, LENGTH), generator=generator, device="cuda")
    attended = torch.ones_like(ids)
    answers = torch.ones(SAMPLES, LENGTH - PROMPT, device="cuda")
    advantages = torch.randn(answers.shape, generator=generator, device="cuda")
    policy_loss = PolicyLoss()

    def update() -> float:
        log_probs, output = actor(ids, answers, attention_mask=attended, return_output=True, return_entropy=True)
        loss, *_ = policy_loss(log_probs, answers * -12.0, advantages, answers)
        loss = loss - 0.01 * masked_mean(output.entropy[:, -answers.shape[1] :], answers)
        actor.model.backward(loss)
        actor.model.step()
        return float(loss)

    row = Row(f"ZeRO-3, {layers} layers, {ids.numel()} tokens", name, "")
    losses = [update() for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        update()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    times.sort()
    row.median_ms, row.p20_ms, row.p80_ms = times[rounds // 2], times[rounds // 5], times[-1 - rounds // 5]
    peak = torch.cuda.max_memory_allocated() / 2**30
    row.figures = {"peak GiB": peak, "loss": losses[0], "third loss": losses[2]}
    return row


def work(results: Any, candidate: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29512", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("LOCAL_RANK", "0")
    torch.cuda.set_device(0)
    liger_dist.register_attention()
    dist.init_process_group("nccl")
    results.put(measured(*candidate))
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=6)
    given = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    rows: list[Row] = []
    for name in ("OpenRLHF", "liger_dist"):
        results = context.SimpleQueue()
        process = context.Process(target=work, args=(results, (name, given.layers, given.rounds)))
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"{name} ended with exit code {process.exitcode}; its output is above.")
        rows.append(results.get())
    for row in rows:
        row.figures["ratio"] = row.median_ms / rows[0].median_ms
    show(rows, ("ratio", "peak GiB", "loss", "third loss"))
    save("openrlhf_actor", rows, given.results)


if __name__ == "__main__":
    main()
