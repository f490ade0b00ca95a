"""Prints how many attributes of torch and transformers there are, and which of them liger_dist changes."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WATCHED = ("torch", "transformers")
Snapshot = dict[tuple[str, str], Any]


def make_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(24, device=DEVICE).reshape(2, 12)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        model(input_ids=ids, labels=ids)
        model(input_ids=ids)


def snapshot() -> Snapshot:
    """Every attribute of every loaded module of the watched packages, and of the classes defined there."""
    found: Snapshot = {}
    for name, module in sys.modules.copy().items():
        if name.split(".")[0] not in WATCHED or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            found[name, attribute] = value
            if isinstance(value, type) and value.__module__.split(".")[0] in WATCHED:
                place = f"{value.__module__}.{value.__qualname__}"
                found.update({(place, member): item for member, item in list(vars(value).items())})
    return found


def is_bookkeeping(attribute: str, value: Any) -> bool:
    """What Python and torch count or remember by themselves while any program runs."""
    return isinstance(value, types.ModuleType) or attribute in ("_abc_impl", "__warningregistry__", "next_id")


def main() -> None:
    # Twice: whatever the packages set up at first use is there before the first snapshot.
    for _ in range(2):
        train(make_model())
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401
    import triton  # noqa: F401

    before = snapshot()
    import liger_dist

    model = liger_dist.wrap(make_model(), "none")
    train(model)
    liger_dist.unwrap(model)
    after = snapshot()
    changed = [
        ".".join(key)
        for key, value in before.items()
        if not is_bookkeeping(key[1], value) and (key not in after or after[key] is not value)
    ]
    loaded = {place for place, _ in before}
    added = [
        ".".join(key)
        for key, value in after.items()
        if key not in before and key[0] in loaded and not is_bookkeeping(key[1], value)
    ]
    print(f"{len(before)} attributes")
    print(f"changed: {changed + added}")


if __name__ == "__main__":
    main()
