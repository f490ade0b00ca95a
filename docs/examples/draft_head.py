"""A draft for speculative sampling, after EAGLE-3: one layer and an lm_head of a quarter of the vocabulary, trained on
hidden states of a small Llama. Prints how many tokens a run of the Llama gives, before and after."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import liger_dist

VOCAB, CLASSES, WIDTH, LENGTH, BATCH, DEPTHS, DECAY, PROPOSED = 256, 64, 64, 24, 16, 3, 0.8, 4
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)  # for tiny products
torch.manual_seed(0)
transitions = (3 * torch.randn(VOCAB, VOCAB) - 0.1 * torch.arange(VOCAB)).softmax(-1).to(device)


SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 4}


def texts(rows: int, length: int) -> torch.Tensor:
    """Text of a Markov chain, with some frequent tokens."""
    ids = [torch.randint(16, (rows, 1), device=device)]
    while len(ids) < length:
        ids.append(transitions[ids[-1][:, 0]].multinomial(1))
    return torch.cat(ids, 1)


class Draft(nn.Module):
    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(target.model.embed_tokens.weight)
        self.join = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.layer = LlamaModel(LlamaConfig(num_hidden_layers=1, **SIZES))
        self.lm_head = nn.Linear(WIDTH, CLASSES, bias=False)

    def step(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, S, D] for the token after each of ids, from features of the token before it."""
        return self.layer(inputs_embeds=self.join(torch.cat([self.embed(ids), features], -1))).last_hidden_state

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, labels: torch.Tensor, head: nn.Linear) -> torch.Tensor:
        """hidden [B, S, D] of the target; labels [B, S - 1]: tokens 2 to S in classes of the draft."""
        depths, features = [], hidden[:, :-1]
        for _ in range(DEPTHS):
            depths.append(self.step(ids[:, 1:], features))
            features = depths[-1].roll(1, 1)  # the next depth reads the draft's own hidden states, one token later
        place, depth = (torch.arange(size, device=device) for size in (labels.shape[-1], DEPTHS))
        labels = torch.where(place < depth[:, None, None], -100, labels)  # no text before these tokens
        weight = DECAY**depth / (labels != -100).sum((1, 2)).clamp(min=1)  # a mean for each depth, times its weight
        return liger_dist.lm_head_loss(
            self.lm_head,
            torch.stack(depths),
            labels,
            teacher=head,
            teacher_hidden=hidden[:, 1:].expand(DEPTHS, -1, -1, -1),
            teacher_rows=rows,
            token_weight=weight[:, None, None].expand(labels.shape),
            num_items_in_batch=1,
        ).loss


@torch.no_grad()
def acceptance_length(target: LlamaForCausalLM, draft: Draft, runs: int = 40) -> float:
    """Tokens for each run of the target by speculative sampling (Leviathan et al. 2023), which changes nothing else."""
    ids, total = texts(1, 3), 0
    for _ in range(runs):
        ids = tokens = ids[:, -LENGTH + PROPOSED :]
        features, guesses = target.model(ids).last_hidden_state[:, :-1], []
        for _ in range(PROPOSED):
            hidden = draft.step(tokens[:, 1:], features)
            q = torch.zeros(VOCAB, device=device).index_copy(0, rows, draft.lm_head(hidden[0, -1]).softmax(-1))
            tokens, guesses = torch.cat([tokens, q.multinomial(1)[None]], 1), [*guesses, q]
            features = torch.cat([features, hidden[:, -1:]], 1)
        probs = target.lm_head(target.model(tokens).last_hidden_state[0]).softmax(-1)
        for place, q in enumerate([*guesses, torch.zeros(VOCAB, device=device)], ids.shape[1]):
            p, guess, total = probs[place - 1], tokens[0, place : place + 1], total + 1
            if not len(guess) or torch.rand(()).item() > p[guess] / q[guess]:
                token = (p - q).clamp(min=0).multinomial(1)  # of what the draft has too little of
                ids = torch.cat([tokens[:, :place], token[None]], 1)
                break
    return total / runs


target = liger_dist.wrap(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES)).to(device), "none")
optimizer = torch.optim.AdamW(target.parameters(), lr=3e-3)
for _ in range(150):
    optimizer.zero_grad()
    ids = texts(BATCH, LENGTH)
    target(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
target.eval().requires_grad_(False)
rows = texts(512, LENGTH).flatten().bincount(minlength=VOCAB).topk(CLASSES).indices  # EAGLE-3: d2t + arange(len(d2t))
draft = Draft(target).to(device)
print(f"before training: {acceptance_length(target, draft):.2f} tokens for each run of the target")
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, draft.parameters()), lr=3e-3)
for _ in range(150):
    optimizer.zero_grad()
    ids = texts(BATCH, LENGTH + 1)
    hidden = target.model(ids[:, :-1]).last_hidden_state
    draft(ids[:, :-1], hidden, liger_dist.draft_labels(ids[:, 2:], rows, VOCAB), target.lm_head).backward()
    optimizer.step()
print(f"after training: {acceptance_length(target, draft):.2f} tokens for each run of the target")
