"""A DPO and a GRPO step of a model of Llama-8B's shape, on stored completions: this library's head and layers beside
TRL's own head, under FSDP2 or ZeRO-3.

Run by ``torchrun --nproc-per-node=N -m benchmarks.policy_step``. The model has random weights, bf16 parameters under
FSDP2 and bf16 with fp32 masters under ZeRO-3; both heads are called as TRL's trainers call them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import liger_dist

from .harness import Row, arguments, save, show

VOCAB_SIZE = 128256
SEQUENCES, LENGTH, PROMPT = 8, 1024, 128
"""of each rank and step: 8192 tokens"""


@dataclass
class Stored:
    """Sequences with stored log-probabilities of their completions."""

    input_ids: Tensor
    labels: Tensor
    log_probs: Tensor
    """``[B, S - 1]`` of the reference (DPO) or of the policy that generated them (GRPO)"""
    advantages: Tensor

    @staticmethod
    def random() -> Stored:
        generator = torch.Generator("cuda").manual_seed(dist.get_rank())
        ids = torch.randint(VOCAB_SIZE, (SEQUENCES, LENGTH), generator=generator, device="cuda")
        labels = ids.clone()
        labels[:, :PROMPT] = -100
        return Stored(
            input_ids=ids,
            labels=labels,
            log_probs=-torch.log(torch.tensor(float(VOCAB_SIZE))).expand(SEQUENCES, LENGTH - 1).cuda(),
            advantages=torch.randn(SEQUENCES, 1, generator=generator, device="cuda"),
        )


def dpo(model: Callable[..., Any], stored: Stored) -> Tensor:
    """Half of the sequences are chosen, half rejected (Rafailov et al. 2023, equation 7)."""
    scored = model(input_ids=stored.input_ids, labels=stored.labels, fused_lm_head=True)
    ratios = ((scored.log_probs - stored.log_probs) * scored.label_mask).sum(1)
    chosen, rejected = ratios.chunk(2)
    loss: Tensor = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
    return loss


def grpo(model: Callable[..., Any], stored: Stored) -> Tensor:
    """Scores the stored completions, then one clipped step (Shao et al. 2024, equation 3, without a reference)."""
    with torch.no_grad():
        old = model(input_ids=stored.input_ids, labels=stored.labels, fused_lm_head=True).log_probs
    scored = model(input_ids=stored.input_ids, labels=stored.labels, fused_lm_head=True)
    ratio = (scored.log_probs - old).exp()
    gains = torch.minimum(ratio * stored.advantages, ratio.clamp(0.8, 1.2) * stored.advantages)
    entropy = (scored.entropy.detach() * scored.label_mask).sum() / scored.label_mask.sum()
    loss: Tensor = -(gains * scored.label_mask).sum() / scored.label_mask.sum() + 0.0 * entropy
    return loss


OBJECTIVES: dict[str, Callable[[Callable[..., Any], Stored], Tensor]] = {"DPO": dpo, "GRPO": grpo}


def make_model(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        rope_theta=500000.0,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    return model


def steps(engine: str, head: str, objective: str, layers: int) -> tuple[Callable[[], Tensor], object]:
    """A function that trains one step, and what has to be kept alive."""
    from trl.trainer.utils import add_fused_lm_head

    model = make_model(layers)
    if head == "liger_dist":
        liger_dist.wrap(model, "deepspeed" if engine == "zero3" else "auto")
    add_fused_lm_head(model, outputs=("log_probs", "entropy") if objective == "GRPO" else ("log_probs",))
    stored, loss_of = Stored.random(), OBJECTIVES[objective]
    if engine == "zero3":
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": SEQUENCES,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        }
        deepspeed_engine, *_ = deepspeed.initialize(model=model, config=settings)

        def step() -> Tensor:
            loss = loss_of(deepspeed_engine, stored)
            deepspeed_engine.backward(loss)
            deepspeed_engine.step()
            return loss.detach()

        return step, deepspeed_engine
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def sharded_step() -> Tensor:
        loss = loss_of(model, stored)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return sharded_step, model


def measured(engine: str, head: str, objective: str, layers: int, rounds: int) -> Row:
    row = Row(f"{objective} under {engine}, {layers} layers, {dist.get_world_size()} GPUs", head, "")
    step, _kept = steps(engine, head, objective, layers)
    losses = [float(step()) for _ in range(3)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    times.sort()
    row.median_ms, row.p20_ms, row.p80_ms = times[rounds // 2], times[rounds // 5], times[-1 - rounds // 5]
    row.figures = {"peak GiB": torch.cuda.max_memory_allocated() / 2**30, "first loss": losses[0]}
    return row


def work(results: Any, port: int, candidate: tuple[str, str, str, int, int]) -> None:
    """One candidate, in a separate process: DeepSpeed frees an engine's memory only with its process."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    address = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
    dist.init_process_group("nccl", init_method=address, rank=rank, world_size=world_size)
    results.put(measured(*candidate))
    dist.barrier()
    dist.destroy_process_group()


def measured_alone(port: int, candidate: tuple[str, str, str, int, int]) -> Row:
    context = torch.multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(results, port, candidate))
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"{candidate} ended with exit code {process.exitcode}; its output is above.")
    row: Row = results.get()
    return row


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--engines", default="fsdp2,zero3", help="comma-separated")
    given = parser.parse_args()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    port = int(os.environ["MASTER_PORT"])
    for engine in given.engines.split(","):
        for objective in OBJECTIVES:
            rows = []
            for head in ("TRL", "liger_dist"):
                port += 1
                rows.append(measured_alone(port, (engine, head, objective, given.layers, given.rounds)))
            for row in rows:
                row.figures["ratio"] = row.median_ms / rows[0].median_ms
                row.figures["peak ratio"] = row.figures["peak GiB"] / rows[0].figures["peak GiB"]
            if os.environ["RANK"] == "0":
                print(rows[0].problem)
                show(rows, ("ratio", "peak GiB", "peak ratio", "first loss"))
                save("policy_step", rows, given.results)


if __name__ == "__main__":
    main()
