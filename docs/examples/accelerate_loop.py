"""A custom training loop with Accelerate. On several GPUs: accelerate launch docs/examples/accelerate_loop.py"""

import torch
from accelerate import Accelerator
from tiny import Sequences, make_model
from torch.utils.data import DataLoader

from liger_dist.integrations.accelerate import prepare

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = make_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Sequences(), batch_size=4)
model, optimizer, loader = prepare(accelerator, model, optimizer, loader)  # instead of accelerator.prepare(...)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(loss.item())
