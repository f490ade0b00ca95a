"""QLoRA: LoRA layers on a base of 4 bits, read shard by shard, and saved in the files of PEFT. On several GPUs:
torchrun --nproc-per-node 4 docs/examples/qlora.py"""

import os
import tempfile
from contextlib import nullcontext

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from tiny import Sequences, make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import liger_dist

if "RANK" in os.environ:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
rank = int(os.environ.get("RANK", 0))
device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
folder = [tempfile.mkdtemp()]
if dist.is_initialized():
    dist.broadcast_object_list(folder)
make_model().save_pretrained(folder[0])  # stands for a pretrained model: rank 0 writes it
if dist.is_initialized():
    dist.barrier()

quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


def load_base():
    return AutoModelForCausalLM.from_pretrained(
        folder[0], quantization_config=quantization, dtype=torch.bfloat16, device_map={"": device}
    )


with liger_dist.sharded_loading() if dist.is_initialized() else nullcontext():
    base = load_base()
peft_model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
strategy = liger_dist.FSDP2(param_dtype=torch.bfloat16) if dist.is_initialized() else "none"
model = liger_dist.wrap(peft_model, strategy)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
data = Sequences()
for step in range(3):
    batch = {name: torch.stack([data[4 * step + i][name] for i in range(4)]).to(device) for name in data[0]}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
value = loss.item()

options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
state = get_model_state_dict(model, options=options)  # full tensors on every rank
if rank == 0:
    peft_model.save_pretrained(f"{folder[0]}/adapter", state_dict=state)
    loaded = PeftModel.from_pretrained(load_base(), f"{folder[0]}/adapter")
    with torch.no_grad():
        print(value, float(loaded(**batch).loss))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
