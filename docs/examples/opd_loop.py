"""On-policy distillation in a plain loop: the student samples, and learns the teacher's distribution over the whole
vocabulary at each of its tokens, from the teacher's hidden states. On two GPUs:
torchrun --nproc-per-node 2 docs/examples/opd_loop.py"""

import os

import torch
import torch.distributed as dist
from tiny import VOCAB_SIZE, make_model
from torch.distributed.fsdp import fully_shard

import liger_dist

PROMPTS, PROMPT, ANSWER, STEPS = 16, 4, 16, 6


def make_teacher() -> torch.nn.Module:
    """Stands in for a larger model with the same tokens: a random one that prefers some of them."""
    teacher = make_model().requires_grad_(False).eval()
    for parameter in teacher.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.1)
    teacher.model.embed_tokens.weight.add_(1.0)
    return teacher


device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()

student = liger_dist.wrap(make_model().to(device), "fsdp2")
teacher = make_teacher().to(device)
layers, lm_head = fully_shard(teacher.model), fully_shard(teacher.lm_head)  # the layers may run in another job
optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3)

torch.manual_seed(rank)
for _ in range(STEPS):
    prompts = torch.randint(VOCAB_SIZE, (PROMPTS, PROMPT), device=device)
    with torch.no_grad():
        # Answers of one length, so that all ranks run the sharded model equally often.
        ids = student.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            pad_token_id=0,
            do_sample=True,
            top_k=0,
            min_new_tokens=ANSWER,
            max_new_tokens=ANSWER,
        )
        hidden = layers(input_ids=ids).last_hidden_state  # [B, S, E]; its logits [B, S, V] never exist
    labels = ids.clone()
    labels[:, :PROMPT] = -100
    output = liger_dist.distillation_loss(
        student, lm_head, input_ids=ids, labels=labels, teacher_hidden=hidden, divergence="reverse_kl"
    )
    output.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        entropy = output.entropy[:, PROMPT - 1 : -1].mean().item()
        print(f"divergence {output.loss.item():.4f} nats, entropy of the student {entropy:.4f}")
dist.destroy_process_group()
