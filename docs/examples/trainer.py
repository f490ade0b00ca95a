"""Trainer of transformers. On several GPUs: torchrun --nproc-per-node 4 docs/examples/trainer.py --fsdp"""

import sys

import torch
from tiny import Sequences, make_model
from transformers import Trainer, TrainingArguments

from liger_dist.integrations.trainer import fuse

arguments = TrainingArguments(
    output_dir="runs/trainer",
    per_device_train_batch_size=4,
    max_steps=3,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
    fsdp=True if "--fsdp" in sys.argv else None,
    fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]} if "--fsdp" in sys.argv else None,
)
data = Sequences()
trainer = fuse(Trainer(model=make_model(), args=arguments, train_dataset=data, eval_dataset=data))  # the one line
trainer.train()
print(trainer.evaluate()["eval_loss"])
