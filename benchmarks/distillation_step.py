"""A training step of a student of Llama-8B's shape from a teacher of 14 billion parameters, both under FSDP2: beside
the student's own step and the teacher's forward, and the peak beside the plan of ``liger-dist train --dry_run``.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.distillation_step

Random weights, bf16 compute, fp32 masters and AdamW of the student, a bf16 teacher, 8192 tokens of one sequence on each
GPU. The three run in turn, round after round, on the same models.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

import liger_dist

from .harness import Row, arguments, save, show

ROOT = Path(__file__).parent.parent
STUDENT = json.loads((ROOT / "launch" / "models" / "llama_8b.json").read_text())
TEACHER = STUDENT | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
}
LENGTH = 8192


def make_model(shape: dict[str, Any], layers: int | None, strategy: liger_dist.FSDP2, dtype: torch.dtype) -> Any:
    """Shards a model without storage, then draws its weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**shape)
    config.num_hidden_layers = layers or config.num_hidden_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return liger_dist.wrap(model, strategy)


class Steps:
    """The models, and the three things that are timed."""

    def __init__(self, layers: int | None, teacher_layers: int | None) -> None:
        torch.manual_seed(0)
        self.teacher = make_model(TEACHER, teacher_layers, liger_dist.FSDP2(), torch.bfloat16)
        self.teacher.requires_grad_(False).eval()
        self.student = make_model(STUDENT, layers, liger_dist.FSDP2(param_dtype=torch.bfloat16), torch.float32)
        self._optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-5, fused=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        # Labels stay on the CPU, as in liger-dist train.
        self._labels = torch.randint(STUDENT["vocab_size"], (1, LENGTH), generator=generator)
        self._inputs: dict[str, Any] = {"input_ids": self._labels.cuda(), "use_cache": False}

    def student_step(self) -> Tensor:
        return self._update(self.student(**self._inputs, labels=self._labels).loss)

    @torch.no_grad()
    def teacher_forward(self) -> Tensor:
        logits: Tensor = self.teacher(**self._inputs).logits
        return logits[0, 0, 0]

    def distillation_step(self, **options: Any) -> Tensor:
        output = liger_dist.distillation_loss(
            self.student, self.teacher, **self._inputs, labels=self._labels, **options
        )
        return self._update(output.loss)

    def _update(self, loss: Tensor) -> Tensor:
        loss.backward()
        liger_dist.clip_grad_norm_(self.student, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def timed(run: Callable[[], Tensor]) -> tuple[float, float]:
    """Milliseconds of the slowest rank and the largest peak of one call."""
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    found = torch.tensor([(time.perf_counter() - began) * 1e3, torch.cuda.max_memory_allocated() / 2**30]).cuda()
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def planned_gib(layers: int | None, teacher_layers: int | None) -> float:
    """The peak by ``liger-dist train --dry_run``."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, shape, count in (("student", STUDENT, layers), ("teacher", TEACHER, teacher_layers)):
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(shape | {"num_hidden_layers": count or shape["num_hidden_layers"]}))
            paths.append(path)
        options = ["launch/llama_8b.yaml", "--model", str(paths[0]), "--teacher", str(paths[1])]
        options += ["--dry_run", "true", "--strategy", "fsdp2", "--world_size", os.environ["WORLD_SIZE"]]
        plan = subprocess.run(
            [sys.executable, "-m", "liger_dist_train", *options],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
    return float(next(line.split()[1] for line in plan.stdout.splitlines() if line.startswith("peak")))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, help="of the student; default: 32")
    parser.add_argument("--teacher_layers", type=int, help="default: 48")
    given = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    steps = Steps(given.layers, given.teacher_layers)
    named: dict[str, Callable[[], Tensor]] = {
        "student's step": steps.student_step,
        "teacher's forward": steps.teacher_forward,
        "distillation, forward KL": steps.distillation_step,
        "distillation, JSD": lambda: steps.distillation_step(divergence="jsd", hard_weight=0.1),
    }
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in named}
    is_first = dist.get_rank() == 0
    for count in tqdm(range(2 + given.rounds), desc="rounds", disable=not is_first):
        for name, run in named.items():
            found = timed(run)
            if count >= 2:
                seen[name].append(found)
    rows = []
    for name, found_of in seen.items():
        times = sorted(time_ms for time_ms, _ in found_of)
        row = Row(f"8B from 14B, on {dist.get_world_size()} GPUs", name, "")
        row.median_ms = statistics.median(times)
        row.p20_ms, row.p80_ms = times[len(times) // 5], times[-1 - len(times) // 5]
        row.figures = {"peak GiB": max(peak for _, peak in found_of)}
        rows.append(row)
    if is_first:
        both = rows[0].median_ms + rows[1].median_ms
        planned = planned_gib(given.layers, given.teacher_layers)
        for row in rows[2:]:
            row.figures |= {"ratio": row.median_ms / both, "planned GiB": planned}
        print(rows[0].problem)
        show(rows, ("ratio", "peak GiB", "planned GiB"))
        save("distillation_step", rows, given.results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
