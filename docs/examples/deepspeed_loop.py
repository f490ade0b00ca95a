"""A training loop with DeepSpeed: torchrun --standalone --nproc-per-node 2 docs/examples/deepspeed_loop.py"""

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))

from tiny import Sequences, make_model
from torch.utils.data import DataLoader

from liger_dist.integrations.deepspeed import initialize  # instead of deepspeed.initialize

settings = Path(__file__).with_name("deepspeed.json")  # has a "liger_dist" section
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = initialize(model=model, optimizer=optimizer, config=str(settings))
for batch in DataLoader(Sequences(), batch_size=4):
    loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
    engine.backward(loss)
    engine.step()
if engine.global_rank == 0:
    print(loss.item(), flush=True)
torch.distributed.barrier()
if not torch.cuda.is_available():
    # DeepSpeed keeps gloo's threads alive, and they abort if they free the last step's tensors while Python shuts down.
    os._exit(0)
torch.distributed.destroy_process_group()
