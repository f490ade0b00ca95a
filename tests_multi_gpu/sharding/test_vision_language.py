"""Vision-language models: which layers are sharded, and gradients with images on all ranks or on some."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import Counter
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cells import LEARNING_RATE, Cell
from collectives import recorded_collectives
from harness import Workers
from layouts import SESSIONS, Session
from models import assert_below, full, relative_errors
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import VideoLlavaForConditionalGeneration
from vision_models import TEXT_LAYERS, VISION_LAYERS, make_batch, make_config, make_model, true_loss

import liger_dist
from liger_dist.model.structure import find_structure
from liger_dist.sharding import STRATEGIES

TIME_LIMIT, LONG_LIMIT = 100.0, 150.0
"""seconds; DeepSpeed compiles an extension in its first call on a machine"""

FAMILIES = ("qwen2_5_vl", "llava", "gemma3")


IMAGE, IMAGE_AND_VIDEO = ("image",), ("image", "video")


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_decoder_is_told_from_the_vision_encoder(family: str) -> None:
    structure = find_structure(make_model(family))
    assert len(structure.layers) == TEXT_LAYERS
    assert all("Decoder" in type(layer).__name__ for layer in structure.layers)
    assert structure.final_norm is structure.decoder.norm
    (encoder,) = structure.other_stacks
    assert len(encoder) == VISION_LAYERS


@pytest.mark.cover("values")
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_a_unit(family: str, strategy: str, workers_2: Workers) -> None:
    for units, in_root in workers_2.run(names_of_units, family, strategy, time_limit=TIME_LIMIT):
        layers = [name for name in units if name.rpartition(".")[2].isdecimal()]
        assert sum("language_model" in name for name in layers) == TEXT_LAYERS
        assert sum("vis" in name for name in layers) == VISION_LAYERS
        assert not [name for name in in_root if any(name.startswith(f"{unit}.") for unit in layers)]


def names_of_units(family: str, strategy: Any) -> tuple[list[str], list[str]]:
    """FSDP's units inside the root, and the parameters that the root keeps for itself."""
    model = make_model(family)
    wrapped = liger_dist.wrap(model, strategy)
    if strategy == "fsdp2":
        state = model._get_fsdp_state()
        # torch 2.13 keeps a list, earlier releases one group.
        (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        kept = {parameter.sharded_param for parameter in group.fsdp_params}
        in_root = [name for name, parameter in model.named_parameters() if parameter in kept]
        return [name for name, module in model.named_modules() if name and isinstance(module, FSDPModule)], in_root
    prefix = "_fsdp_wrapped_module."
    units = [n for n, module in wrapped.named_modules() if n and isinstance(module, FullyShardedDataParallel)]
    in_root = [name.replace(prefix, "") for name in wrapped._handle.flat_param._fqns]
    return [name.replace(prefix, "") for name in units], in_root


@dataclass(frozen=True, kw_only=True)
class Case:
    cell: Cell
    images: tuple[tuple[bool, ...], ...]
    """for each step, which ranks have images"""
    trains: str = "all"

    def __str__(self) -> str:
        where = {(True, True): "images", (True, False): "images on rank 0", (False, True): "images on rank 1"}
        step = self.images[0]
        words = [str(self.cell), where.get(step, "images on some of four ranks")]
        return ", ".join([*words, *([f"trains {self.trains}"] if self.trains != "all" else [])])


FSDP1, FSDP2 = (Cell(engine=engine, layout={"by_others": False}) for engine in ("fsdp1", "fsdp2"))
ZERO3 = Cell(engine="zero", layout={"stage": 3})
ALL, FIRST, SECOND = (True, True), (True, False), (False, True)
HSDP, GRID = (
    Cell(engine="fsdp2", layout={"axes": axes}, world=4) for axes in (("replicate", "shard"), ("shard", "tp"))
)


def _case(cell: Cell, model: str, *steps: tuple[bool, ...], trains: str = "all", **changes: Any) -> Case:
    return Case(cell=replace(cell, model=model, **changes), images=steps, trains=trains)


CASES = [
    *(_case(cell, family, ALL, ALL) for family in FAMILIES for cell in (FSDP1, FSDP2, ZERO3)),
    *(_case(cell, family, FIRST, SECOND, use="evaluation") for family in FAMILIES for cell in (FSDP1, FSDP2)),
    *(_case(cell, "video_llava", FIRST, SECOND) for cell in (FSDP1, FSDP2)),
    _case(FSDP2, "llava", SECOND, (False, False)),
    _case(replace(FSDP2, layout={"reshard": False}), "llava", FIRST, SECOND),
    _case(replace(FSDP1, layout=FSDP1.layout | {"sharding": "SHARD_GRAD_OP"}), "llava", FIRST, SECOND),
    _case(replace(FSDP2, layout={"rows": True}), "qwen2_5_vl", FIRST, SECOND),
    _case(HSDP, "llava", (True, False, False, False), (False, True, True, False)),
    _case(GRID, "llava", FIRST, SECOND),
    _case(replace(FSDP2, layout={"offload": True}), "llava", FIRST, SECOND),
    *(
        _case(cell, "qwen2_5_vl", FIRST, SECOND, **changes)
        for cell in (FSDP1, FSDP2)
        for changes in ({"accumulation": 2}, {"use": "checkpointing"})
    ),
    *(
        _case(cell, "llava", FIRST, SECOND, trains=trains)
        for cell in (FSDP1, FSDP2)
        for trains in ("decoder", "projector", "encoder layers", "all but the patch embedding", "last encoder layers")
    ),
    *(
        _case(replace(FSDP2, layout={"frozen": "replicate"}), "llava", FIRST, SECOND, trains=trains)
        for trains in ("one projection of each layer", "encoder layers", "last encoder layers", "projector")
    ),
]


def _as_parameter(case: Case) -> Any:
    """``make test`` has every model under FSDP2, and one of them in two other layouts."""
    is_usual = case.cell.where == FSDP2.where or case.cell.where == HSDP.where
    is_kept = is_usual or (case.cell.where == ZERO3.where and case.cell.model == "llava")
    return pytest.param(case, marks=[] if is_kept else [pytest.mark.nightly], id=str(case))


@pytest.mark.parametrize("case", map(_as_parameter, CASES))
def test_gradients_are_those_of_all_ranks_data(case: Case, request: pytest.FixtureRequest) -> None:
    workers: Workers = request.getfixturevalue(f"workers_{case.cell.world}")
    results = workers.run(train_with_images, case, time_limit=LONG_LIMIT if case.cell.engine == "zero" else TIME_LIMIT)
    # fp32 beside fp64, through twice as many layers as the text models of the other cells have; the convolution of the
    # patches is TF32 on GPUs.
    in_fp32 = 2e-2 if torch.cuda.is_available() else 1e-4
    tolerance = in_fp32 if case.cell.engine == "zero" else 1e-6
    for rank, (errors, collectives) in enumerate(results):
        assert_below(errors, tolerance, f"rank {rank}")
        # Ranks of a tensor-parallel axis hold different parts of the head.
        beside = rank % 2 if case.cell.layout == GRID.layout else 0
        assert collectives == results[beside][1]
        assert case.cell.engine == "zero" or any("reduce_scatter" in name for name, _ in collectives)


def train_with_images(case: Case) -> tuple[dict[str, float], list[tuple[str, int]]]:
    """Trains a few steps beside the unwrapped fp64 model: every error, and the collectives of this rank in order."""
    cell = case.cell
    dtype = torch.float32 if cell.engine == "zero" else torch.float64
    model = make_model(cell.model, dtype=dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in TRAINED[case.trains]))
    reference = copy.deepcopy(model).double()
    session = SESSIONS[cell.engine](cell, model)
    errors: dict[str, float] = {}
    with recorded_collectives() as collectives:
        for step, images in enumerate(case.images):
            found = step_with_images(session, reference, step, images)
            errors |= {f"step {step}: {name}": error for name, error in found.items()}
        if cell.used.then == "evaluate":
            errors |= evaluate_with_images(session, reference, case.images[0])
    session.close()
    return errors, collectives


TRAINED = {
    "all": ("",),
    "decoder": ("language_model", "lm_head"),
    "projector": ("projector",),
    "encoder layers": ("encoder.layers",),
    "all but the patch embedding": ("encoder.layers", "projector", "language_model", "lm_head"),
    "last encoder layers": ("encoder.layers.1", "projector"),
    "one projection of each layer": ("q_proj",),
}
"""parts of the names of parameters that require gradients"""


def micro_batches(cell: Cell, rank: int, step: int, has_image: bool) -> list[dict[str, Tensor]]:
    """Of an accumulation, one micro-batch has the image: the first, whose gradients wait for a call without an encoder;
    under FSDP1, which does not reduce those, the last."""
    dtype = torch.float32 if cell.engine == "zero" else torch.float64
    with_image = cell.accumulation - 1 if cell.engine == "fsdp1" else 0
    inputs = (IMAGE_AND_VIDEO if cell.model == "video_llava" else IMAGE) if has_image else ()
    return [
        make_batch(cell.model, rank, seed=10 * step + micro, inputs=inputs if micro == with_image else (), dtype=dtype)
        for micro in range(cell.accumulation)
    ]


def step_with_images(session: Session, reference: nn.Module, step: int, images: tuple[bool, ...]) -> dict[str, float]:
    cell, errors = session.cell, {}
    for rank, has_image in enumerate(images):
        batches = micro_batches(cell, rank, step, has_image)
        for micro, batch in enumerate(batches):
            truth = true_loss(reference, batch)
            if truth.requires_grad:
                (truth / len(batches) / len(images)).backward()
            if rank != session.data_rank:
                continue
            is_last = micro == len(batches) - 1
            with contextlib.nullcontext() if is_last else session.without_reduction():
                loss = session.forward(batch).loss
                session.backward(loss / len(batches))
            errors[f"loss {micro}"] = abs(float(loss.detach()) - float(truth.detach())) / float(truth.detach())
    gradients = session.step()
    truths = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    found = relative_errors(gradients, truths, floor=1e-2 if cell.engine == "zero" else 1e-4)
    errors |= {f"gradient of {name}": error for name, error in found.items()}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter -= LEARNING_RATE * truths.get(name, 0.0)
            parameter.grad = None
    return errors


@torch.no_grad()
def evaluate_with_images(session: Session, reference: nn.Module, images: tuple[bool, ...]) -> dict[str, float]:
    session.root.eval()
    rank = session.data_rank
    (batch,) = micro_batches(session.cell, rank, 7, images[rank])
    truth = float(true_loss(reference, batch))
    return {"evaluated loss": abs(float(session.forward(batch).loss) - truth) / truth}


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_bf16_compute_with_images_on_one_rank(family: str, workers_2: Workers) -> None:
    """Against fp64: at most 1.1 times the error of the model's own layers and loss under the same sharding."""
    results, own_results = (
        workers_2.run(bf16_step, family, config, time_limit=TIME_LIMIT)
        for config in (
            liger_dist.WrapConfig(),
            liger_dist.WrapConfig(fused_loss=False, layer_kernels=False),
        )
    )
    for (error, dtypes, collectives), (own_error, *_) in zip(results, own_results, strict=True):
        assert error <= 1.1 * own_error < 0.1
        assert dtypes == {torch.float32}
        assert collectives == results[0][2] != []


def bf16_step(family: str, config: liger_dist.WrapConfig) -> tuple[float, set[torch.dtype], list[tuple[str, int]]]:
    """Relative L2 error of all gradients, their dtypes, and the collectives."""
    model = make_model(family, dtype=torch.float32)
    reference = copy.deepcopy(model).double()
    liger_dist.wrap(model, liger_dist.FSDP2(param_dtype=torch.bfloat16), config=config)
    for rank, has_image in enumerate(FIRST):
        batch = make_batch(family, rank, seed=0, inputs=IMAGE if has_image else (), dtype=torch.float32)
        (true_loss(reference, batch) / len(FIRST)).backward()
        if rank == dist.get_rank():
            mine = batch
    with recorded_collectives() as collectives:
        model(**mine).loss.backward()
    gradients = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert gradients.keys() == truths.keys()
    wrong = sum(float((gradients[name] - truth).square().sum()) for name, truth in truths.items())
    right = sum(float(truth.square().sum()) for truth in truths.values())
    return (wrong / right) ** 0.5, {gradient.dtype for gradient in gradients.values()}, collectives


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_ranks_with_different_kinds_of_input_are_refused_together(strategy: str, workers_2: Workers) -> None:
    if "pixel_values" not in inspect.signature(VideoLlavaForConditionalGeneration.forward).parameters:
        pytest.skip("this transformers calls the images of VideoLlava pixel_values_images")
    results = workers_2.run(call_with_an_image_or_a_video, strategy, time_limit=TIME_LIMIT)
    for message, loss in results:
        assert "rank 0: pixel_values; rank 1: pixel_values_videos" in message
        assert "Group the data by kind of input" in message
        assert message == results[0][0]
        assert loss > 0.0


def call_with_an_image_or_a_video(strategy: Any) -> tuple[str, float]:
    """The refusal, and the loss of a call that follows it."""
    wrapped = liger_dist.wrap(make_model("video_llava"), strategy)
    batch = make_batch("video_llava", dist.get_rank(), seed=0, inputs=IMAGE_AND_VIDEO)
    other = "pixel_values_videos" if dist.get_rank() == 0 else "pixel_values"
    with pytest.raises(liger_dist.LigerDistError) as refusal:
        wrapped(**{name: tensor for name, tensor in batch.items() if name != other})
    return str(refusal.value), float(wrapped(**batch).loss.detach())


def test_a_poisoned_encoder_does_not_reach_a_rank_without_images(workers_2: Workers) -> None:
    with_image, without = workers_2.run(loss_of_a_poisoned_model, time_limit=TIME_LIMIT)
    assert with_image != with_image
    assert without == without


def loss_of_a_poisoned_model() -> float:
    model = make_model("llava")
    nn.init.constant_(model.model.vision_tower.encoder.layers[0].layer_norm1.weight, float("inf"))
    wrapped = liger_dist.wrap(model, "fsdp2")
    batch = make_batch("llava", dist.get_rank(), seed=0, inputs=IMAGE if dist.get_rank() == 0 else ())
    loss = wrapped(**batch).loss
    loss.backward()
    return float(loss.detach())


def test_unwrap_removes_the_exchange(workers_2: Workers) -> None:
    assert workers_2.run(exchanges_after_unwrap, time_limit=TIME_LIMIT) == [(1, 0)] * 2


def exchanges_after_unwrap() -> tuple[int, int]:
    model = make_model("llava")
    liger_dist.wrap(model, "fsdp2")
    batch = make_batch("llava", dist.get_rank(), seed=0, inputs=IMAGE)
    with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as exchange:
        model(**batch)
        wrapped_calls = exchange.call_count
        liger_dist.unwrap(model)(**batch)
        return wrapped_calls, exchange.call_count - wrapped_calls


def test_a_second_wrap_after_unwrapping_exchanges_again(workers_2: Workers) -> None:
    for losses in workers_2.run(wrapped_twice, time_limit=TIME_LIMIT):
        assert all(loss > 0 for loss in losses)


def wrapped_twice() -> list[float]:
    """The exchange has a separate process group, which unwrapping destroys."""
    losses = []
    for _ in range(3):
        wrapped = liger_dist.wrap(make_model("llava"), "fsdp2")
        batch = make_batch("llava", dist.get_rank(), seed=0, inputs=IMAGE if dist.get_rank() == 0 else ())
        losses.append(float(wrapped(**batch).loss.detach()))
        liger_dist.unwrap(wrapped)
    return losses


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_a_meta_model_gets_its_values_layer_by_layer(strategy: str, workers_2: Workers) -> None:
    _, expected = materialised("none")
    for layers, values in workers_2.run(materialised, strategy, time_limit=TIME_LIMIT):
        assert layers == {"Qwen2_5_VLDecoderLayer": TEXT_LAYERS, "Qwen2_5_VLVisionBlock": VISION_LAYERS}
        assert values == pytest.approx(expected, rel=1e-5)


def materialised(strategy: Any) -> tuple[dict[str, int], float]:
    """How many layers of each class were made whole one by one, and the loss with the values that they got."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(make_config("qwen2_5_vl"))
    torch.manual_seed(7)
    module = import_module(type(STRATEGIES[strategy]).__module__)
    with mock.patch.object(module, "materialize", wraps=module.materialize) as materialize:
        wrapped = liger_dist.wrap(model, strategy)
    layers = Counter(type(layer).__name__.removeprefix("FSDP") for layer in materialize.call_args.kwargs["layers"])
    batch = make_batch("qwen2_5_vl", 0, seed=0, inputs=IMAGE, dtype=torch.float32)
    return dict(layers), float(wrapped(**batch).loss.detach())
