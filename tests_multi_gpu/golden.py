"""Losses of ten training steps, to the last digit: a change of the code that moves one of them shows it here.

    python tests_multi_gpu/golden.py            compare with golden.json
    python tests_multi_gpu/golden.py --write    write golden.json (make golden); the commit says why losses have moved
    python tests_multi_gpu/golden.py --print    print the losses as JSON

fp32 on the CPU, with vector instructions that every x86-64 processor has, one thread, and no kernel libraries that
choose by the processor. Curves of the unwrapped models tell a change of torch, transformers or the processor from one
of this library.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Before the first import of torch.
    os.environ.update(
        ATEN_CPU_CAPABILITY="default",
        MKL_CBWR="COMPATIBLE",
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    os.environ.pop("TRITON_INTERPRET", None)

import torch
import torch.distributed as dist
from models import make_batch, make_model

import liger_dist

FILE = Path(__file__).parent / "golden.json"
STEPS = 10
MODELS = {
    "llama": {"rows": "padded", "tied": True},
    "qwen3_moe": {"rows": "texts", "tied": False},
    "qwen3_5_text": {"rows": "packed", "tied": False},
}
"""a family, the rows of its batches, and whether its embeddings are tied; the mixture and the hybrid among them"""
UNWRAPPED, ONE_PROCESS, FSDP2 = "unwrapped", "one process", "FSDP2 on two ranks"


def curve(family: str, strategy: str, rank: int = 0) -> list[float]:
    """Losses ``[STEPS]`` of this rank's batches."""
    settings: Any = MODELS[family]
    torch.backends.mkldnn.set_flags(False)
    torch.set_num_threads(1)
    model: Any = make_model(family, tied=settings["tied"], dtype=torch.float32).train()
    # The unwrapped hybrid does not keep documents apart: it sees texts.
    rows = "texts" if strategy == UNWRAPPED and settings["rows"] == "packed" else settings["rows"]
    if strategy != UNWRAPPED:
        model = liger_dist.wrap(model, "none" if strategy == ONE_PROCESS else "fsdp2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        loss = model(**make_batch(rank, seed=step, rows=rows), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def curves() -> dict[str, dict[str, list[float]]]:
    """Losses by model and strategy; of rank 0 under FSDP2."""
    found = {family: {kind: curve(family, kind) for kind in (UNWRAPPED, ONE_PROCESS)} for family in MODELS}
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(100)
        assert not any(process.exitcode for process in ranks), [process.exitcode for process in ranks]
        for family, losses in json.loads((Path(folder) / "losses").read_text()).items():
            found[family][FSDP2] = losses
    return found


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    losses = {family: curve(family, FSDP2, rank) for family in MODELS}
    if rank == 0:
        (Path(folder) / "losses").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def differences(found: dict[str, Any], golden: dict[str, Any]) -> list[str]:
    """One sentence for each curve that has moved: the first step that differs, and both losses."""
    sentences = []
    for family, by_kind in golden.items():
        for kind, losses in by_kind.items():
            pairs = enumerate(zip(found[family][kind], losses, strict=True))
            moved = [f"loss of step {step} is {mine!r}, was {want!r}" for step, (mine, want) in pairs if mine != want]
            sentences += [f"{family}, {kind}: {first}" for first in moved[:1]]
    return sentences


def main() -> int:
    found = curves()
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        return 0
    if "--print" in sys.argv:
        print(json.dumps(found))
        return 0
    moved = differences(found, json.loads(FILE.read_text()))
    print("\n".join(moved) or "no loss has moved")
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main())
