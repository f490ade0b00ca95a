"""A user's training loop whose data fails on the last rank in its third step. Started by torchrun in a test."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from cells import Cell
from layouts import SESSIONS
from models import make_batch, make_model


def main() -> None:
    name = sys.argv[1]
    engine = name.split()[0]
    on_gpu = torch.cuda.device_count() >= 2
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    dtype = torch.float32 if engine == "zero" else torch.float64
    layouts = {"zero": {"stage": 3}, "fsdp1": {"by_others": False}, "fsdp2 rows": {"rows": True}}
    session = SESSIONS[engine](Cell(engine=engine, layout=layouts.get(name, {})), make_model("llama", dtype=dtype))
    for step in range(100):
        batch = make_batch(session.data_rank, seed=step)
        if step == 2 and dist.get_rank() == 1:
            raise OSError("shard 7 of the data set cannot be read")
        session.backward(session.forward(batch).loss)
        session.step()


main()
