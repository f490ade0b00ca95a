"""TRL's SFTTrainer, learning what the assistant says. On several GPUs: accelerate launch docs/examples/trl_sft.py"""

import torch
from datasets import Dataset
from tiny import make_model, make_tokenizer
from trl import SFTConfig, SFTTrainer

from liger_dist.integrations.trl import fused_heads

chat = [{"role": "user", "content": "How much is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
arguments = SFTConfig(
    output_dir="runs/trl_sft",
    per_device_train_batch_size=4,
    max_steps=3,
    logging_steps=1,
    assistant_only_loss=True,
    save_strategy="no",
    report_to=[],
    use_cpu=not torch.cuda.is_available(),
    bf16=torch.cuda.is_available(),
)
with fused_heads():  # the one line
    trainer = SFTTrainer(
        make_model(),
        arguments,
        train_dataset=Dataset.from_list([{"messages": chat}] * 64),
        processing_class=make_tokenizer(),
    )
trainer.train()
print(trainer.state.log_history[0]["loss"])
