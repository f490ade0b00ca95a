"""Packed, padded and long sequences on one GPU: forward and backward of four layers of the shape of Llama 8B.

    python -m benchmarks.sequences

Documents of about 700 tokens in one row of 8192, as ``liger-dist train`` packs them: positions restart, no mask. The
same tokens with a dense mask, and as one text. Then one row of 65,536 and of 131,072 tokens under activation
checkpointing, with and without tiles of the MLP. Memory is the peak of a step above the weights.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import liger_dist

from .harness import Candidate, Row, arguments, measure, save, show
from .training_ways import SHAPES, VOCAB_SIZE

LAYERS, TOKENS, DOCUMENT = 4, 8192, 700
LONG = (65_536, 131_072)
TILE = 8192
Batch = dict[str, Any]


def build(*, checkpointing: bool = False, attention: str = "sdpa", length: int = TOKENS) -> Any:
    """A new model in bf16, always with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {**SHAPES["Llama 8B"], "num_hidden_layers": LAYERS, "max_position_embeddings": length}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB_SIZE, **shape)
    config._attn_implementation = attention
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def wrapped(model: Any, **options: Any) -> Any:
    return liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(**options))


def batch(rows: int, length: int) -> Batch:
    """One text in each row."""
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(VOCAB_SIZE, (rows, length), device="cuda", generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "use_cache": False}


def packed(rows: int = 1, length: int = TOKENS) -> Batch:
    """Documents of about :data:`DOCUMENT` tokens; labels of their first tokens are ignored."""
    draw = random.Random(0)
    found = batch(rows, length)
    positions = torch.empty(rows, length, dtype=torch.long)
    for row in positions:
        start = 0
        while start < length:
            end = min(start + draw.randint(DOCUMENT // 2, 3 * DOCUMENT // 2), length)
            row[start:end] = torch.arange(end - start)
            start = end
    found["position_ids"] = positions.cuda()
    found["labels"][found["position_ids"] == 0] = -100
    return found


def padded(length: int = TOKENS) -> Batch:
    """One row, of which the second half is padding."""
    found = batch(1, length)
    found["attention_mask"] = torch.ones(1, length, dtype=torch.long, device="cuda")
    found["attention_mask"][:, length // 2 :] = 0
    found["labels"][:, length // 2 :] = -100
    return found


def step(model: nn.Module, given: Batch) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(**given).loss.backward()

    return run


def of_documents(rounds: int) -> list[Row]:
    """Packed and padded rows."""
    ours, dense = wrapped(build()), wrapped(build(), varlen_attention=False)
    candidates = [
        Candidate("packed, liger_dist", step(ours, packed())),
        Candidate("packed, dense mask", step(dense, packed())),
        Candidate("one text", step(ours, batch(1, TOKENS))),
        Candidate("half padded, liger_dist", step(ours, padded())),
        Candidate("half padded, dense mask", step(dense, padded())),
        Candidate("4 x 2048 packed, liger_dist", step(ours, packed(4, 2048))),
        Candidate("4 x 2048 packed, dense mask", step(dense, packed(4, 2048))),
    ]
    rows = measured(f"{LAYERS} layers of 8B, {TOKENS} tokens", candidates, ours, rounds)
    errors = gradient_errors(ours, dense)
    for row in rows[:2]:
        row.figures["largest gradient error to dense"] = errors
    return rows


def measured(problem: str, candidates: list[Candidate], model: nn.Module, rounds: int) -> list[Row]:
    rows = measure(problem, candidates, rounds=rounds)
    # A call starts with the gradients of the one before.
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    for row in rows:
        row.figures["GiB above the weights"] = row.extra_mib / 1024 + gradients / 2**30
    return rows


def gradient_errors(ours: nn.Module, dense: nn.Module) -> float:
    """Largest relative L2 difference of a parameter's gradient for packed documents; both round to bf16."""
    step(ours, packed())()
    step(dense, packed())()
    pairs = zip(ours.parameters(), dense.parameters(), strict=True)
    return max(
        float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs if a.grad is not None and b.grad is not None
    )


def of_long_sequences(length: int, rounds: int) -> list[Row]:
    """One long text under activation checkpointing; each way by itself, for they fill the GPU."""
    from transformers.models.llama import modeling_llama

    ways: dict[str, Callable[[Any], Any]] = {
        f"liger_dist, tiles of {TILE}": lambda model: wrapped(model, mlp_tile_tokens=TILE),
        "liger_dist": wrapped,
    }
    if find_spec("liger_kernel"):
        ways["Liger"] = liger
    rows = []
    before = dict(vars(modeling_llama))
    for name, way in ways.items():
        model: Any = way(build(checkpointing=True, length=length))
        rows += measured(f"{length} tokens", [Candidate(name, step(model, batch(1, length)))], model, rounds)
        del model
        # Liger changes the module as well as the model.
        vars(modeling_llama).update(before)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def liger(model: Any) -> Any:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
    return model


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    columns = ("GiB above the weights", "largest gradient error to dense")
    problems: dict[str, Callable[[], list[Row]]] = {"documents": partial(of_documents, given.rounds)}
    problems |= {str(length): partial(of_long_sequences, length, max(given.rounds // 4, 3)) for length in LONG}
    for name, run in problems.items():
        if given.only not in name:
            continue
        rows = run()
        print(rows[0].problem)
        show(rows, columns)
        save("sequences", rows, given.results)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
