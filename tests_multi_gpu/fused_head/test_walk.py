"""The way of one call through the library: how many files it enters, and what it leaves behind when it fails."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import VOCAB_SIZE, gradient_errors, make_batch, make_model
from torch import nn

import liger_dist
from liger_dist.sharding import fsdp2
from liger_dist.sharding.process_groups import compute_device

ROOT = Path(liger_dist.__file__).parent.parent
KERNELS = "kernels"
LAYER = "a layer"


def walked(call: Callable[[], Any]) -> list[str]:
    """Files of this library that ``call`` enters, in order, all kernels as one; and the layers of the model."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<"):
            return
        path = Path(code.co_filename)
        if path.name == "modeling_llama.py" and "DecoderLayer" in code.co_qualname:
            seen.append(LAYER)
        elif ROOT / "liger_dist" in path.parents:
            seen.append(str(path.relative_to(ROOT / "liger_dist")))
        elif ROOT / "kernels" in path.parents:
            seen.append(KERNELS)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return seen


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
def test_one_call_enters_few_files() -> None:
    config = liger_dist.WrapConfig(layer_kernels=False, varlen_attention=False)
    model = liger_dist.wrap(make_model("llama"), "none", config=config)
    batch = make_batch(0)
    for _ in range(2):
        model(**batch).loss.backward()
    seen = walked(lambda: model(**batch))
    entry = {file for file in seen[: seen.index(LAYER)] if file != KERNELS}
    files = [file for file in seen if file != LAYER]
    moves = sum(a != b for a, b in pairwise(files))
    assert len(set(files) - {KERNELS}) <= MOST_FILES, sorted(set(files))
    assert len(entry) <= MOST_FILES_AT_ENTRY, sorted(entry)
    assert moves <= MOST_MOVES, moves


MOST_FILES, MOST_FILES_AT_ENTRY, MOST_MOVES = 15, 8, 66


def test_fsdp2_leaves_the_arguments_of_a_loss_in_their_dtype(workers_2: Workers) -> None:
    for losses in workers_2.run(losses_in_bf16):
        assert losses["as a float"] == pytest.approx(losses["as an integer"], rel=1e-6)
        assert losses["soft"] == pytest.approx(losses["soft, of a full model"], rel=2e-2)


def losses_in_bf16() -> dict[str, float]:
    """Of one batch. In bf16 12345 items are 12352, and probabilities lose half of their digits, which is refused."""
    batch = make_batch(dist.get_rank())
    items = 12345
    ids = batch["labels"][..., None].clamp_min(0) % VOCAB_SIZE
    soft = (ids, torch.full(ids.shape, 0.999, device=ids.device))
    sharded = liger_dist.wrap(make_model("llama"), liger_dist.FSDP2(param_dtype=torch.bfloat16))
    full = liger_dist.wrap(make_model("llama"), "auto")
    calls: dict[str, tuple[nn.Module, dict[str, Any]]] = {
        "as an integer": (sharded, {"num_items_in_batch": items}),
        "as a float": (sharded, {"num_items_in_batch": torch.tensor(float(items), device=compute_device())}),
        "soft": (sharded, {"soft_labels": soft}),
        "soft, of a full model": (full, {"soft_labels": soft}),
    }
    with torch.no_grad():
        return {name: float(model(**batch, **options).loss) for name, (model, options) in calls.items()}


@pytest.mark.parametrize("fails", ["refused", "interrupted"])
def test_a_call_that_fails_under_fsdp2_leaves_nothing_behind(fails: str, workers_2: Workers) -> None:
    for is_over, error in workers_2.run(trained_after_a_failure, fails):
        assert is_over
        assert error < 1e-6


def trained_after_a_failure(fails: str) -> tuple[bool, float]:
    """True if FSDP2's forward has ended; the largest error of a gradient in the next call."""
    reference = make_model("llama")
    model: Any = liger_dist.wrap(make_model("llama"), "fsdp2")
    batch = make_batch(dist.get_rank())
    if fails == "refused":
        with pytest.raises(liger_dist.LigerDistError, match="outputs contains"):
            model(**batch, outputs=("perplexity",))
    else:

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        hook = model.model.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**batch)
        hook.remove()
    is_over = not fsdp2.is_in_forward(model)
    model(**batch).loss.backward()
    for rank in range(dist.get_world_size()):
        (reference(**make_batch(rank)).loss / dist.get_world_size()).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.full_tensor()
    return is_over, max(gradient_errors(model, reference).values())
