"""LoRA by PEFT, with the head. On several GPUs: torchrun --nproc-per-node 4 docs/examples/peft_lora.py"""

import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny import Sequences, make_model

import liger_dist

if "RANK" in os.environ:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
device = "cuda" if torch.cuda.is_available() else "cpu"
model = get_peft_model(make_model(), LoraConfig(target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM"))
model = liger_dist.wrap(model, strategy="fsdp2" if dist.is_initialized() else "none")  # the one line
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
data = Sequences()
for step in range(3):
    batch = {name: torch.stack([data[4 * step + i][name] for i in range(4)]).to(device) for name in data[0]}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
value = loss.item()  # on every rank: it waits for the GPU, which still works on the last step
if int(os.environ.get("RANK", 0)) == 0:
    print(value)
if dist.is_initialized():
    dist.barrier()  # a rank that leaves first closes connections that the other one still uses
    dist.destroy_process_group()
