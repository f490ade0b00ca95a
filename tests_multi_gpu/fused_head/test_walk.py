"""The way of one call through the library: how many files it enters, and what it leaves behind when it fails."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import VOCAB_SIZE, gradient_errors, make_batch, make_model
from torch import nn
from trainers import forget_earlier_trainers

import liger_dist
from liger_dist.sharding.fsdp2 import forward as fsdp2_forward
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


HEAD_ALONE = liger_dist.WrapConfig(layer_kernels=False, varlen_attention=False)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names")
@pytest.mark.parametrize(
    ("config", "most_files", "most_files_at_entry", "most_moves"),
    [(HEAD_ALONE, 15, 8, 50), (None, 26, 8, 100)],
    ids=["the head alone", "all defaults, one layer"],
)
def test_one_call_enters_few_files(
    config: liger_dist.WrapConfig | None, most_files: int, most_files_at_entry: int, most_moves: int
) -> None:
    """Beside kernels, whose number depends on the device."""
    small = copy.deepcopy(make_model("llama").config)
    small.num_hidden_layers = 1
    model = liger_dist.wrap(type(make_model("llama"))(small).to(compute_device()), "none", config=config)
    batch = make_batch(0)
    for _ in range(2):
        model(**batch).loss.backward()
    seen = walked(lambda: model(**batch))
    entry = {file for file in seen[: seen.index(LAYER)] if file != KERNELS}
    files = [file for file in seen if file not in (LAYER, KERNELS)]
    moves = sum(a != b for a, b in pairwise(files))
    if config is not None:
        assert len(entry) <= most_files_at_entry, sorted(entry)
    assert len(set(files)) <= most_files, sorted(set(files))
    # Two of them ask whether a CUDA graph records the call. On a GPU labels are counted there, which is one visit more.
    assert moves <= most_moves + 2 * torch.cuda.is_available(), moves


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
    is_over = not fsdp2_forward.is_in_forward(model)
    model(**batch).loss.backward()
    for rank in range(dist.get_world_size()):
        (reference(**make_batch(rank)).loss / dist.get_world_size()).backward()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.full_tensor()
    return is_over, max(gradient_errors(model, reference).values())


def test_a_refused_micro_batch_leaves_the_next_step_exact(workers_2: Workers) -> None:
    """Of a tied model, whose root holds lm_head: after the refusal the optimizer steps."""
    for error in workers_2.run(step_after_a_refusal):
        assert error < 1e-6


def step_after_a_refusal() -> float:
    """The largest error of a gradient in the step after one whose second micro-batch was refused."""
    models: dict[str, Any] = {name: make_model("llama", tied=True) for name in ("sharded", "reference")}
    sharded, reference = liger_dist.wrap(models["sharded"], "fsdp2"), models["reference"]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, foreach=False) for model in (sharded, reference)]
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        sharded(**make_batch(rank, seed=step)).loss.backward()
        for other in range(world):
            (reference(**make_batch(other, seed=step)).loss / world).backward()
        if step == 0:
            wrong = make_batch(rank)
            wrong["labels"] = wrong["labels"].clone()
            wrong["labels"][0, 3] = VOCAB_SIZE
            with pytest.raises(liger_dist.LigerDistError, match="a label is"):
                sharded(**wrong)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for parameter in sharded.parameters():
        parameter.grad = parameter.grad.full_tensor()
    return max(gradient_errors(sharded, reference).values())


def test_one_rank_alone_is_refused_before_a_collective(workers_2: Workers) -> None:
    for total in workers_2.run(refused_alone):
        assert total == 1.0


def refused_alone() -> float:
    """Rank 0 makes a wrong call; then both ranks exchange a number."""
    model = liger_dist.wrap(make_model("llama", tied=True), "fsdp2")
    refused = torch.zeros(1, device=compute_device())
    if dist.get_rank() == 0:
        with pytest.raises(liger_dist.LigerDistError, match="outputs contains"):
            model(**make_batch(0), outputs=("perplexity",))
        refused += 1
    dist.all_reduce(refused)
    return float(refused)


@pytest.mark.smoke
def test_patches_of_the_forward_around_several_wraps() -> None:
    """Each calls the forward that it was put on."""
    model: Any = make_model("llama")
    batch = make_batch(0)
    expected = float(model(**batch).loss)
    calls: list[str] = []

    def patch(name: str) -> None:
        below = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return below(*args, **kwargs)

        model.forward = forward

    patch("first")
    liger_dist.wrap(model, "none")
    patch("second")
    liger_dist.unwrap(model)
    patch("third")
    liger_dist.wrap(model, "none")
    calls.clear()  # The probe of wrap called them, too.
    output = model(**batch, outputs=("entropy",))
    assert abs(float(output.loss) - expected) < 1e-6
    assert not hasattr(output, "logits")
    assert calls == ["third", "second", "first"]
    calls.clear()
    assert abs(float(liger_dist.unwrap(model)(**batch).loss) - expected) < 1e-6
    assert calls == ["third", "second", "first"]


@pytest.mark.smoke
def test_options_of_a_loss_that_an_earlier_forward_computes_are_refused() -> None:
    model: Any = make_model("llama")
    kept = model.forward
    liger_dist.wrap(model, "none")
    with pytest.raises(liger_dist.LigerDistError, match=r"z_loss was asked of a loss outside of the forward"):
        kept(**make_batch(0), z_loss=1.0)


def test_a_copy_is_another_model() -> None:
    from liger_dist.wrap import full_logits

    model: Any = liger_dist.wrap(make_model("llama"), "none")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with full_logits(model):
            assert hasattr(model(**make_batch(0)), "logits")
            assert not hasattr(twin(**make_batch(0)), "logits")
        # Inside a call of the original the head of the copy computes logits.
        shapes: list[torch.Size] = []
        hook = model.lm_head.register_forward_pre_hook(
            lambda _, args, twin=twin, shapes=shapes: shapes.append(twin.lm_head(*args).shape)  # type: ignore[misc]
        )
        model(**make_batch(0))
        hook.remove()
        assert [shape[-1] for shape in shapes] == [VOCAB_SIZE]


def test_accelerate_removes_its_patch_and_not_the_swap() -> None:
    accelerate = pytest.importorskip("accelerate")
    forget_earlier_trainers()
    try:
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model: Any = liger_dist.wrap(make_model("llama", dtype=torch.float32).cpu(), "none")
        batch = {name: value.cpu() for name, value in make_batch(0).items()}
        prepared = accelerator.prepare(model)
        assert "forward" in vars(model)
        assert not hasattr(prepared(**batch, outputs=("entropy",)), "logits")
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert not hasattr(unwrapped(**batch, outputs=("entropy",)), "logits")
    finally:
        forget_earlier_trainers()


class WithALock(type(make_model("llama"))):  # type: ignore[misc]
    """A model that cannot be copied but for its own ``__getstate__``."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


def test_a_copy_has_the_state_that_its_class_gives() -> None:
    model: Any = make_model("llama")
    model.__class__ = WithALock
    model.lock = threading.Lock()
    twin = copy.deepcopy(liger_dist.wrap(model, "none"))
    assert not hasattr(twin, "lock")
    assert not hasattr(twin(**make_batch(0)), "logits")


@pytest.mark.parametrize("name", ["logit_bias", "distillation", "ignore_idx"])
def test_functions_take_the_keywords_of_a_loss_alone(name: str) -> None:
    hidden, weight, labels = on_device.randn(4, 8), on_device.randn(16, 8), on_device.arange(4)
    with pytest.raises(TypeError, match=rf"^linear_cross_entropy\(\) got an unexpected keyword argument '{name}'"):
        liger_dist.linear_cross_entropy(hidden, weight, labels, **{name: 1})
    with pytest.raises(TypeError, match=rf"^cross_entropy\(\) got an unexpected keyword argument '{name}'"):
        liger_dist.cross_entropy(hidden @ weight.T, labels, **{name: 1})
    assert {"z_loss", "temperature"} <= inspect.signature(liger_dist.cross_entropy).parameters.keys()
