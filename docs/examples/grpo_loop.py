"""GRPO in a plain loop: an actor under FSDP2, a frozen reference, and rollouts from a file. On two GPUs:
torchrun --nproc-per-node 2 docs/examples/grpo_loop.py"""

import os

import torch
import torch.distributed as dist
from tiny import VOCAB_SIZE, make_model

import liger_dist

GROUPS, SAMPLES, LENGTH, PROMPT = 4, 4, 24, 8
CLIP, KL, TEMPERATURE, EPOCHS = 0.2, 0.05, 0.7, 3


def store_rollouts(path: str, rank: int) -> None:
    """Stands in for an inference server: prompts, answers of different lengths, and their rewards."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(VOCAB_SIZE, (GROUPS, SAMPLES, LENGTH), generator=generator)
    ids[:, :, :PROMPT] = ids[:, :1, :PROMPT]
    lengths = torch.randint(PROMPT + 4, LENGTH + 1, (GROUPS, SAMPLES), generator=generator)
    torch.save({"ids": ids, "lengths": lengths, "rewards": torch.rand(GROUPS, SAMPLES, generator=generator)}, path)


def log_probs(model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: object) -> torch.Tensor:
    """Log-probability of each token of the answers, [B, S]; 0 elsewhere. No logits [B, S, V] exist."""
    return model(**batch, outputs=("log_prob",), temperature=TEMPERATURE, **options).log_prob


device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
rank = dist.get_rank()
store_rollouts(f"rollouts.{rank}.pt", rank)
rollouts = torch.load(f"rollouts.{rank}.pt", map_location=device)

actor = liger_dist.wrap(make_model().to(device), "fsdp2")
reference = liger_dist.wrap(make_model().to(device).requires_grad_(False).eval(), "fsdp2")
optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)

ids, rewards, position = rollouts["ids"].flatten(0, 1), rollouts["rewards"], torch.arange(LENGTH, device=device)
attended = position < rollouts["lengths"].flatten()[:, None]
labels = ids.masked_fill(~attended | (position < PROMPT), -100)
batch = {"input_ids": ids, "attention_mask": attended.long(), "labels": labels}
scored = torch.nn.functional.pad(labels[:, 1:] != -100, (0, 1))
tokens = scored.sum()
dist.all_reduce(tokens)  # of all ranks, whose gradients FSDP2 averages
# Advantages are relative to the other answers to the same prompt (Shao et al. 2024, arXiv:2402.03300).
advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()[:, None]

with torch.no_grad():
    old, expected = log_probs(actor, batch), log_probs(reference, batch)
for _ in range(EPOCHS):
    new = log_probs(actor, batch, differentiable=True)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    kl = (expected - new).exp() - (expected - new) - 1
    loss = -((gain - KL * kl) * scored).sum() * dist.get_world_size() / tokens
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"loss {loss.item():.4f}, nats per token of the answers {-new.sum().item() / scored.sum().item():.4f}")
dist.destroy_process_group()
