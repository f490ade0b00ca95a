"""Times packed training of a hybrid model: gated delta nets and attention, documents of about 700 tokens.

    python -m benchmarks.hybrids [--only "with fla"]

Eight layers of the shape of Qwen3.5-4B with lm_head, bf16, forward and backward of 8192 tokens. transformers lets
documents of a row run into each other in the recurrent layers; its time for "packed" is that of a wrong result, and
right are only "one by one" and "padded rows". With fla the delta rule is that of flash-linear-attention, which reads
the lengths of documents, otherwise torch's fallback in transformers. "in rows": one row for each document, with fla.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import liger_dist

from .harness import Candidate, arguments, measure, save, show

LENGTHS = (644, 812, 591, 730, 705, 688, 1010, 402, 777, 653, 720, 460)
"""8192 tokens"""
OTHER_LENGTHS = ((128,) * 64, (2048,) * 4, (6000, *(50, 61, 44, 73) * 9, 140), (*range(1, 127), 191))
"""8192 tokens each: short, long, mixed and all lengths"""
SHAPE: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "use_cache": False,
}


def build() -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING["qwen3_5_text"](**SHAPE)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def wrap_in_rows(model: nn.Module) -> nn.Module:
    """Wraps as if fla read no lengths."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    own = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def without_lengths(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    with mock.patch.object(modeling_qwen3_5, "torch_chunk_gated_delta_rule", without_lengths):
        return liger_dist.wrap(model, "none")


def batches(lengths: tuple[int, ...]) -> dict[str, list[dict[str, Tensor]]]:
    """Micro-batches of the same documents: packed, as one text, one by one and in padded rows."""
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(SHAPE["vocab_size"], (1, sum(lengths)), device="cuda", generator=generator)
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])[None]
    labels = ids.masked_fill(positions == 0, -100)
    documents = list(zip(ids.split(lengths, 1), labels.split(lengths, 1), strict=True))
    longest = max(lengths)
    padded = {
        "input_ids": torch.cat([nn.functional.pad(one, (0, longest - one.shape[1])) for one, _ in documents]),
        "labels": torch.cat([nn.functional.pad(one, (0, longest - one.shape[1]), value=-100) for _, one in documents]),
    }
    mask = torch.arange(longest, device="cuda") < torch.tensor(lengths, device="cuda")[:, None]
    return {
        "packed": [{"input_ids": ids, "labels": labels, "position_ids": positions}],
        "one text": [{"input_ids": ids, "labels": labels}],
        "one by one": [{"input_ids": one, "labels": two} for one, two in documents],
        "padded rows": [padded | {"attention_mask": mask.long()}],
    }


def step(model: nn.Module, micro_batches: list[dict[str, Tensor]]) -> Callable[[], None]:
    num_items = torch.stack([(batch["labels"] != -100).sum() for batch in micro_batches]).sum()

    def run() -> None:
        for batch in micro_batches:
            model(**batch, num_items_in_batch=num_items).loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    torch.cuda.set_device(0)
    own, ours, in_rows = build(), liger_dist.wrap(build(), "none"), wrap_in_rows(build())
    print(liger_dist.explain(ours))
    has_fla = "fla" in sys.modules
    for lengths in (LENGTHS, *(OTHER_LENGTHS if has_fla else ())):
        data = batches(lengths)
        candidates = [Candidate("liger_dist, packed", step(ours, data["packed"]))]
        if has_fla:
            candidates += [Candidate("liger_dist, packed, in rows", step(in_rows, data["packed"]))]
        candidates += [Candidate("liger_dist, one text", step(ours, data["one text"]))]
        if lengths is LENGTHS:
            candidates += [
                Candidate("Hugging Face, packed: documents mix", step(own, data["packed"])),
                Candidate("Hugging Face, one text", step(own, data["one text"])),
                Candidate("Hugging Face, one by one", step(own, data["one by one"])),
                Candidate("Hugging Face, padded rows", step(own, data["padded rows"])),
            ]
        with_fla = "with" if has_fla else "without"
        problem = f"8 layers of Qwen3.5-4B, 8192 tokens in {len(lengths)} documents, {with_fla} fla"
        rows = measure(problem, candidates, rounds=given.rounds)
        for row in rows:
            row.figures["GiB above the weights"] = row.extra_mib / 1024
        show(rows, ("GiB above the weights",))
        save("hybrids", rows, given.results)


if __name__ == "__main__":
    main()
