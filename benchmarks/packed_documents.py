"""Times packed training of models with attention that is the library's, and of models with attention of their own.

    python -m benchmarks.packed_documents [--only gpt-oss]

Four layers of each shape with lm_head, random weights in bf16, forward and backward of 8192 tokens in 12 documents:
packed, and each document in a padded row. "a dense mask": WrapConfig(varlen_attention=False), with the model's own
attention. transformers separates documents of a packed row by positions in models whose mask reads them; where it does
not, its time is that of a wrong result and left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import liger_dist

from .harness import Candidate, arguments, measure, save, show

LENGTHS = (644, 812, 591, 730, 705, 688, 1010, 402, 777, 653, 720, 460)
"""8192 tokens"""
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "max_position_embeddings": 8192,
    },
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 4, "attn_implementation": "eager"},
    "Bloom-7B1": {
        "model_type": "bloom",
        "vocab_size": 250880,
        "hidden_size": 4096,
        "n_layer": 4,
        "n_head": 32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attn_implementation": "eager",
    },
}
MASKS_BY_POSITIONS = ("Llama-3.1-8B",)
"""models whose own mask separates documents"""


def build(shape: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    shape = dict(shape)
    config = CONFIG_MAPPING[shape.pop("model_type")](**shape, use_cache=False)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def batches(vocab_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same documents packed, and in padded rows."""
    generator = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(vocab_size, (1, sum(LENGTHS)), device="cuda", generator=generator)
    positions = torch.cat([torch.arange(length, device="cuda") for length in LENGTHS])[None]
    labels = ids.masked_fill(positions == 0, -100)
    mask = torch.arange(max(LENGTHS), device="cuda") < torch.tensor(LENGTHS, device="cuda")[:, None]
    padded = {"input_ids": torch.zeros_like(mask, dtype=torch.long).masked_scatter(mask, ids)}
    padded["labels"] = torch.full_like(padded["input_ids"], -100).masked_scatter(mask, labels)
    padded["attention_mask"] = mask.long()
    return {"input_ids": ids, "labels": labels, "position_ids": positions}, padded


def step(model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    def run() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    torch.cuda.set_device(0)
    for name, shape in SHAPES.items():
        if given.only not in name:
            continue
        own, ours = build(shape), liger_dist.wrap(build(shape), "none")
        dense = liger_dist.wrap(build(shape), "none", config=liger_dist.WrapConfig(varlen_attention=False))
        packed, padded = batches(own.config.vocab_size)
        with torch.no_grad():
            losses = [float(model(**batch).loss) for model, batch in ((ours, packed), (ours, padded), (own, padded))]
        print(f"{name}: {liger_dist.explain(ours).packing}; losses {losses}")
        candidates = [
            Candidate("liger_dist, packed", step(ours, packed)),
            Candidate("liger_dist, padded rows", step(ours, padded)),
            Candidate("liger_dist, packed, a dense mask", step(dense, packed)),
            Candidate("Hugging Face, padded rows", step(own, padded)),
        ]
        if name in MASKS_BY_POSITIONS:
            candidates.append(Candidate("Hugging Face, packed", step(own, packed)))
        problem = f"4 layers of {name}, {sum(LENGTHS)} tokens in {len(LENGTHS)} documents"
        rows = measure(problem, candidates, rounds=given.rounds)
        for row in rows:
            row.figures["GiB above the weights"] = row.extra_mib / 1024
            row.figures["of padded rows"] = row.median_ms / rows[1].median_ms
        show(rows, ("GiB above the weights", "of padded rows"))
        save("packed_documents", rows, given.results)
        del own, ours, dense, candidates
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
