"""A training program that knows DeepSpeed alone: argv is its JSON."""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])

import deepspeed
from attributes import make_model

model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=sys.argv[1])
ids = torch.arange(24, device=engine.device).reshape(2, 12)
for _ in range(2):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
print(f"wrapped: {'_liger_dist' in vars(engine.module)}", flush=True)
torch.distributed.destroy_process_group()
