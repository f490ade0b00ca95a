"""The update of a policy in verl's own engine on stored rollouts: verl's logits, its fused kernels, and this library.

    python -m benchmarks.verl_actor [--layers 12] [--tokens 16384]

A model of Llama-8B's shape and fewer layers, random bf16 weights, one GPU, activation checkpointing (verl's default),
one packed micro-batch; verl's PPO loss with an entropy bonus, AdamW. All use this library's attention to documents, so
that the rest is compared. verl computes log-probabilities by flash-attn's cross entropy where that is installed. Its
fused kernels read lm_head's weight outside of lm_head, where FSDP2 has sharded it: only FSDP1 runs them. "with all":
temperatures per sample and sums of squared probabilities, which verl's fused kernels refuse. Each candidate runs in a
separate process.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import liger_dist

from .harness import Row, arguments, save, show
from .policy_step import make_model

VOCAB_SIZE = 128256
SAMPLE, PROMPT = 2048, 512
CANDIDATES: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl, with all": {"all": True},
    "use_fused_kernels, torch": {"backend": "torch"},
    "use_fused_kernels, triton": {"backend": "triton"},
    "use_fused_kernels, liger": {"backend": "liger"},
    "liger_dist": {"plug": True},
    "liger_dist, with all": {"plug": True, "all": True},
    "liger_dist, head alone, with all": {"plug": True, "all": True, "layer_kernels": False},
}


def make_engine(layers: int, strategy: str, candidate: dict[str, Any]) -> Any:
    """Builds verl's engine; the weights are drawn on the GPU instead of read."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    if candidate.get("plug"):
        from liger_dist.integrations import verl as plug

        plug.configure(liger_dist.WrapConfig(layer_kernels=candidate.get("layer_kernels", True)))
    backend = candidate.get("backend")
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        model_config = HFModelConfig(
            path=folder,
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            use_fused_kernels=backend is not None,
            fused_kernel_options={"impl_backend": backend or "torch"},
        )
    engine_config = FSDPEngineConfig(strategy=strategy, model_dtype="bf16")
    made = EngineRegistry.new(
        model_type="language_model",
        backend=strategy,
        model_config=model_config,
        engine_config=engine_config,
        # Without it AdamW holds as much as the weights once more for a moment, more than anything before.
        optimizer_config=FSDPOptimizerConfig(lr=1e-6, override_optimizer_config={"fused": True}),
        checkpoint_config=CheckpointConfig(),
    )

    def build(*_: Any, **__: Any) -> Any:
        model = make_model(layers)
        model.set_attn_implementation("liger_dist")
        return model

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", build):
        made.initialize()
    return made


def make_rollouts(tokens: int, *, has_all: bool) -> Any:
    """Draws samples with stored log-probabilities and advantages of their answers."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    samples, answer = tokens // SAMPLE, SAMPLE - PROMPT
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (tokens,), generator=generator, device="cuda")

    def nested(values: Tensor, length: int) -> Tensor:
        offsets = torch.arange(samples + 1, device="cuda") * length
        return torch.nested.nested_tensor_from_jagged(values.reshape(-1), offsets)

    rows = ids.reshape(samples, SAMPLE)
    ones = torch.ones(samples * answer, device="cuda")
    values: dict[str, Any] = {
        "input_ids": nested(ids, SAMPLE),
        "prompts": nested(rows[:, :PROMPT].contiguous(), PROMPT),
        "responses": nested(rows[:, PROMPT:].contiguous(), answer),
        "position_ids": nested(torch.arange(SAMPLE, device="cuda").repeat(samples), SAMPLE),
        "loss_mask": nested(ones, answer),
        "response_mask": nested(ones.long(), answer),
        "old_log_probs": nested(ones * -12.0, answer),
        "advantages": nested(torch.randn(len(ones), generator=generator, device="cuda"), answer),
    }
    if has_all:
        values["temperature"] = torch.linspace(0.7, 1.3, samples, device="cuda")
    data = TensorDict(values, batch_size=samples)
    options: dict[str, Any] = {} if has_all else {"temperature": 0.7}
    options |= {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": samples, "global_batch_size": samples}
    tensordict_utils.assign_non_tensor(data, calculate_entropy=True, calculate_sum_pi_squared=has_all, **options)
    return data


def measured(name: str, strategy: str, layers: int, tokens: int, rounds: int) -> Row:
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    candidate = CANDIDATES[name]
    engine = make_engine(layers, strategy, candidate)
    config = ActorConfig(strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=8, entropy_coeff=0.01)
    rollouts = make_rollouts(tokens, has_all=candidate.get("all", False))
    tensordict_utils.assign_non_tensor(rollouts, use_fused_kernels="backend" in candidate)

    def update() -> float:
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(rollouts, partial(ppo_loss, config))
        engine.optimizer_step()
        return float(output["loss"][0])

    def score() -> None:
        engine.forward_backward_batch(rollouts, None, forward_only=True)

    row = Row(f"{strategy}, {layers} layers, {tokens} tokens", name, "")
    with engine.train_mode():
        losses = [update() for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        times = sorted(_elapsed(update) for _ in range(rounds))
        peak = torch.cuda.max_memory_allocated() / 2**30
        score()
        torch.cuda.reset_peak_memory_stats()
        scoring = sorted(_elapsed(score) for _ in range(rounds))
        row.figures["scoring GiB"] = torch.cuda.max_memory_allocated() / 2**30
        largest = _largest_allocation(update)
    row.median_ms, row.p20_ms, row.p80_ms = times[rounds // 2], times[rounds // 5], times[-1 - rounds // 5]
    row.figures |= {"peak GiB": peak, "scoring ms": scoring[rounds // 2], "largest MiB": largest / 2**20}
    row.figures |= {"loss": losses[0], "third loss": losses[2]}
    return row


def _elapsed(call: Any) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _largest_allocation(call: Any) -> int:
    """Bytes of the largest tensor that is allocated within a call."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=200_000)
    call()
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return max(int(event["size"]) for event in events if event["action"] == "alloc")


def work(results: Any, candidate: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    os.environ.setdefault("LOCAL_RANK", "0")
    torch.cuda.set_device(0)
    liger_dist.register_attention()
    dist.init_process_group("cpu:gloo,cuda:nccl")
    results.put(measured(*candidate))
    dist.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--strategy", default="fsdp2", help="fsdp2 or fsdp (FSDP1)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16384)
    given = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    rows: list[Row] = []
    for name in CANDIDATES:
        if given.only and name not in given.only.split(";"):
            continue
        results = context.SimpleQueue()
        asked = name, given.strategy, given.layers, given.tokens, given.rounds
        process = context.Process(target=work, args=(results, asked))
        process.start()
        process.join()
        if process.exitcode != 0:
            # Another library's failure is a result of the table.
            print(f"{name} ended with exit code {process.exitcode}; its output is above.", file=sys.stderr)
            continue
        rows.append(results.get())
        for row in rows:
            row.figures["ratio"] = row.median_ms / rows[0].median_ms
        names = "ratio", "peak GiB", "scoring ms", "scoring GiB", "largest MiB", "loss", "third loss"
        show(rows, names)
    if rows:
        save("verl_actor", rows, given.results)


if __name__ == "__main__":
    main()
