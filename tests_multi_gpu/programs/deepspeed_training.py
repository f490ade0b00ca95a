"""A training program that knows transformers and DeepSpeed alone: the last argument is its JSON."""

from __future__ import annotations

import os
import sys
from importlib import import_module

import torch
from accelerate.utils import is_deepspeed_available
from attributes import make_model

# As Trainer does, which looks for DeepSpeed before it imports it.
assert is_deepspeed_available()
if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))

deepspeed = import_module("deepspeed")
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=sys.argv[-1])
ids = torch.arange(24, device=engine.device).reshape(2, 12)
for _ in range(2):
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
print(f"wrapped: {'_liger_dist' in vars(engine.module)}", flush=True)
torch.distributed.barrier()
if not torch.cuda.is_available():
    # DeepSpeed keeps gloo's threads alive, and they abort if they free the last step's tensors while Python shuts down.
    os._exit(0)
torch.distributed.destroy_process_group()
