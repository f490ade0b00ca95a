"""A masked diffusion model after LLaDA (arXiv:2502.09992): a small Llama with attention in both directions predicts
masked tokens of packed texts, weighted by 1/t. Prints the loss beside that of full logits, and losses of training."""

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import liger_dist

VOCAB, MASK, LENGTHS = 128, 127, (20, 7, 12, 25)  # packed texts of a row
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # for tiny products
torch.manual_seed(0)
positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
documents = torch.repeat_interleave(torch.tensor(LENGTHS)).to(device)


def texts(rows: int) -> torch.Tensor:
    """Each text counts up from a random token, by a random step."""
    first, step = torch.randint(MASK, (rows, len(LENGTHS))), torch.randint(1, 4, (rows, len(LENGTHS)))
    return (first.to(device)[:, documents] + step.to(device)[:, documents] * positions) % MASK


def masked(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Masks each token of a text with the probability t of the text. The loss is the sum over the masked tokens of
    their cross entropies / t, divided by the number of all tokens: a bound of the negative log-likelihood."""
    t = torch.rand(len(ids), len(LENGTHS), device=device).clamp(min=0.05)[:, documents]
    is_masked = torch.rand(ids.shape, device=device) < t
    labels = torch.where(is_masked, ids, -100)
    return {
        "input_ids": torch.where(is_masked, MASK, ids),
        "position_ids": positions.expand(ids.shape),  # documents begin at 0
        "labels": labels,
        "shift_labels": labels,  # at their own positions: a causal class would shift labels
        "token_weight": 1 / t,
        "num_items_in_batch": ids.numel(),
    }


def loss_of_full_logits(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each text alone."""
    columns = torch.arange(len(documents), device=device).split(LENGTHS)
    logits = torch.cat([model(input_ids=batch["input_ids"][:, column]).logits for column in columns], 1)
    each = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return (each * batch["token_weight"].flatten()).sum() / batch["num_items_in_batch"]


sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).to(device)
model.config.is_causal = False  # before wrap: transformers' masks are then of both directions
batch = masked(texts(4))
truth = loss_of_full_logits(model, batch)
model = liger_dist.wrap(model, "none")
print(f"packed {model(**batch).loss.item():.5f}, full logits of each text {truth.item():.5f}")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(151):
    loss = model(**masked(texts(4))).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
