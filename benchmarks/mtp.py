"""Times steps with multi-token prediction on one GPU, and the memory of their losses.

    python -m benchmarks.mtp

Llama-3.2-1B's shape, tied, with random weights in bf16, 2 x 4096 tokens, forward and backward without an optimizer, for
depths 0, 1 and 2. ``full logits``: the same model and layers, where each loss is torch's cross entropy of full logits
in fp32, as torchtitan computes those of DeepSeek-V3. ``no losses``: the same without lm_head and losses; the memory of
the losses is what a peak is above it. All of them share one GPU and take turns.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import liger_dist
from liger_dist.mtp import MultiTokenPrediction
from liger_dist.mtp.modules import SEEN, Seen

from .harness import Candidate, arguments, measure, save, show
from .training_ways import SHAPES, VOCAB_SIZE

SHAPE = "Llama-3.2-1B, tied"
TOKENS = (2, 4096)
DEPTHS = (0, 1, 2)


def make_model(depth: int, *, layers: int | None = None, fused: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[SHAPE] | ({} if layers is None else {"num_hidden_layers": layers})
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = LlamaForCausalLM._from_config(LlamaConfig(vocab_size=VOCAB_SIZE, **shape), dtype=torch.bfloat16)
    if depth:
        MultiTokenPrediction(model, depth, weight=0.1)
    model.train()
    return liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(fused_loss=fused))


def without_losses(model: Any, ids: Tensor) -> Tensor:
    """The hidden states that lm_head would get, as a sum."""
    seen = Seen(ids.shape)
    token = SEEN.set(seen)
    try:
        states = model.model(input_ids=ids, use_cache=False).last_hidden_state
        total: Tensor = states.sum()
        for depth in range(model.mtp.depth if hasattr(model, "mtp") else 0):
            states = model.mtp.next_hidden_states(depth, seen, states)
            total = total + states.sum()
    finally:
        SEEN.reset(token)
    return total


def step(model: Any, loss_of: Callable[[], Tensor]) -> None:
    loss_of().backward()
    for parameter in model.parameters():
        parameter.grad = None


def main() -> None:
    parser = arguments(__doc__ or "")
    given = parser.parse_args()
    ids = torch.randint(VOCAB_SIZE, TOKENS, device="cuda")
    candidates = []
    for depth in DEPTHS:
        fused, unfused = make_model(depth), make_model(depth, fused=False)
        ways: dict[str, tuple[Any, Callable[[], Tensor]]] = {
            "liger_dist": (fused, lambda model=fused: model(input_ids=ids, labels=ids).loss),  # type: ignore[misc]
            "full logits": (unfused, lambda model=unfused: model(input_ids=ids, labels=ids).loss),  # type: ignore[misc]
            "no losses": (fused, partial(without_losses, fused, ids)),
        }
        for way, (model, loss_of) in ways.items():
            candidates.append(Candidate(f"depth {depth}, {way}", partial(step, model, loss_of)))
        with torch.no_grad():
            print(depth, float(fused(input_ids=ids, labels=ids).loss), float(unfused(input_ids=ids, labels=ids).loss))
    longer = make_model(0, layers=17)
    candidates.append(
        Candidate("depth 0, no losses, a layer more", partial(step, longer, partial(without_losses, longer, ids)))
    )
    gc.collect()
    torch.cuda.empty_cache()
    rows = measure(f"{SHAPE}, {TOKENS[0]} x {TOKENS[1]} tokens", candidates, rounds=given.rounds)
    by_name = {row.name: row for row in rows}
    plain = by_name["depth 0, no losses"]
    layer = by_name["depth 0, no losses, a layer more"].median_ms - plain.median_ms
    for row in rows:
        start = row.name.split(",")[0]
        row.figures["losses MiB"] = row.extra_mib - by_name[f"{start}, no losses"].extra_mib
        row.figures["GiB"] = row.extra_mib / 1024
        depth, way = int(start.split()[1]), row.name.split(", ", 1)[1]
        if depth and way != "no losses":
            first, before = by_name[f"depth 0, {way}"], by_name[f"depth {depth - 1}, {way}"]
            expected = layer + first.median_ms - plain.median_ms
            row.figures["ms of this depth"] = row.median_ms - before.median_ms
            row.figures["layer and loss ms"] = expected
            row.figures["ratio"] = row.figures["ms of this depth"] / expected
    show(rows, ("losses MiB", "GiB", "ms of this depth", "layer and loss ms", "ratio"))
    save("mtp", rows, given.results)


if __name__ == "__main__":
    main()
