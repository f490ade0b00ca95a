"""Training with a vocab-parallel lm_head: optimizers, clipping, checkpoints, memory, bytes sent."""

from __future__ import annotations

import gc
import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE, full, make_batch, make_config, make_model
from row_shards import shard_of
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_dist
from liger_dist.fused_layers import recompute
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist.losses.token_exchange import numbers_of_token
from liger_dist.sharding.fsdp2 import strategy as fsdp2
from liger_dist.sharding.process_groups import compute_device

HEADS = ("gather", "vocab_parallel")


def wrapped(head: str, *, tied: bool = False, mesh: tuple[int, ...] | None = None, **options: Any) -> Any:
    strategy = liger_dist.FSDP2(lm_head=head, mesh=mesh, reduce_dtype=torch.float64, **options)  # type: ignore[arg-type]
    return liger_dist.wrap(make_model("llama", tied=tied), strategy)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_it_trains_as_the_gathered_head_does(tied: bool, workers_2: Workers) -> None:
    """AdamW on all parameters at once, clipped gradients, and the other head's checkpoint in the middle."""
    with tempfile.TemporaryDirectory() as folder:
        for results in workers_2.run(trained_with_checkpoints, tied, folder):
            straight = results["gather"]
            assert max(abs(a - b) for a, b in zip(straight[1:], straight, strict=False)) > 1e-3
            for name, losses in results.items():
                assert losses == pytest.approx(straight[-len(losses) :], abs=1e-9), name


def trained_with_checkpoints(tied: bool, folder: str) -> dict[str, list[float]]:
    """Losses and norms of five steps; and of the last three, after a checkpoint of the other lm_head's first two."""
    found = {}
    for head in HEADS:
        model = wrapped(head, tied=tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found[head] = steps(model, optimizer, range(2))
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=Path(folder) / head)
        found[head] += steps(model, optimizer, range(2, 5))
    for head, other in (HEADS, HEADS[::-1]):
        model = wrapped(head, tied=tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=Path(folder) / other)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        found[f"{head} from {other}"] = steps(model, optimizer, range(2, 5))
    return found


def steps(model: Any, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    seen = []
    for number in numbers:
        loss = model(**make_batch(dist.get_rank(), seed=number)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [float(loss.detach()), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)]
    return seen


@pytest.mark.smoke
def test_nothing_has_the_size_of_the_weight(workers_2: Workers) -> None:
    """By what operations return on one process; of a tied head, because FSDP2 gathers an embedding that is another
    parameter. The gathered head shows that whole weights would be seen."""
    for shapes in workers_2.run(shapes_of_a_step):
        whole = {(VOCAB_SIZE, HIDDEN_SIZE), (VOCAB_SIZE + 1, HIDDEN_SIZE)}
        assert whole & shapes["gather"]
        assert not whole & shapes["vocab_parallel"]
        assert not [shape for shape in shapes["vocab_parallel"] if shape[-1:] == (VOCAB_SIZE,)]
        assert [shape for shape in shapes["gather"] if shape[-1:] == (VOCAB_SIZE,)]


class LocalShapes(TorchDispatchMode):
    """Shapes of the local floating tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.is_floating_point():
                self.seen.add(tuple(tensor.shape))
        return result


def shapes_of_a_step() -> dict[str, set[tuple[int, ...]]]:
    found = {}
    for head in HEADS:
        model = wrapped(head, tied=True)
        with LocalShapes() as shapes:
            model(**make_batch(dist.get_rank())).loss.backward()
        found[head] = shapes.seen
    return found


def test_a_step_leaves_nothing_to_the_garbage_collector(workers_2: Workers) -> None:
    """Which would come late: what waits for it holds hidden states and their gradients."""
    for garbage in workers_2.run(garbage_of_a_step):
        assert not any(garbage.values()), garbage


def garbage_of_a_step() -> dict[str, list[tuple[int, ...]]]:
    """Shapes of its tensors; torch 2.11 leaves some small functions there."""
    found = {}
    for head in HEADS:
        model = make_model("llama", tied=True, dtype=torch.float32)
        strategy = liger_dist.FSDP2(lm_head=head)  # type: ignore[arg-type]
        model = liger_dist.wrap(model, strategy, config=liger_dist.WrapConfig(memory_budget=4000))
        with mock.patch.object(recompute, "MIN_BYTES", 1):
            for _ in range(2):
                model(**make_batch(dist.get_rank())).loss.backward()
            # What earlier calls left may take several passes.
            while gc.collect() > 0:
                pass
            gc.disable()
            gc.set_debug(gc.DEBUG_SAVEALL)
            try:
                model(**make_batch(dist.get_rank())).loss.backward()
                gc.collect()
                found[head] = [tuple(thing.shape) for thing in gc.garbage if isinstance(thing, Tensor)]
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()
    return found


def test_bytes_sent(workers_on_all: Workers) -> None:
    """As the docstring of the exchange has it: hidden states there and back, nothing else that grows with D."""
    T, D, V, G = 40, 64, 101, workers_on_all.world_size
    for sent in workers_on_all.run(bytes_of_a_loss, T, D, V):
        there, back, hidden = sent.pop("all_gather"), sent.pop("all_to_all"), T * D * 8 * (G - 1)
        assert back == hidden
        # Labels (8), upstream gradients (two of 8), statistics of all tokens (three of 8); counts, the upstream scale.
        assert hidden < there <= hidden + (G - 1) * (T * (8 + 16) + G * T * 24 + 64)
        assert not sent


class BytesSent(TorchDispatchMode):
    """Bytes that this rank sends, by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, others = str(func.name()), dist.get_world_size() - 1
            if "_allgather_base" in name:
                self.sent["all_gather"] += args[1].nbytes * others
            elif "alltoall_base" in name:
                self.sent["all_to_all"] += args[1].nbytes * others // (others + 1)
            else:
                self.sent[name] += 1
        return func(*args, **(kwargs or {}))


def bytes_of_a_loss(T: int, D: int, V: int) -> dict[str, int]:
    shard, own = shard_of(V, divide_factor=4.0)
    device, G = compute_device(), dist.get_world_size()
    hidden = torch.randn(T, D, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(own.stop - own.start, D, dtype=torch.float64, device=device, requires_grad=True)
    labels = torch.randint(V, (T,), device=device)
    with BytesSent() as seen:
        output = fused_linear_cross_entropy(
            hidden,
            weight,
            None,
            labels,
            spec=LossSpec(),
            execution=Execution(memory_budget=T // 2 * G * numbers_of_token(math.ceil(V / G), D) * 8),
            rows=shard,
        )
        output.loss.backward()
    return dict(seen.sent)


@pytest.mark.cover("values")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("mesh", [(2,), (2, 1)], ids=str)
def test_a_meta_model(mesh: tuple[int, ...], tied: bool, workers_2: Workers) -> None:
    for loss, expected in workers_2.run(losses_of_meta_models, mesh, tied):
        assert loss == pytest.approx(expected, rel=1e-6)


def losses_of_meta_models(mesh: tuple[int, ...], tied: bool) -> tuple[float, float]:
    from transformers import AutoModelForCausalLM

    losses = []
    for head in HEADS[::-1]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(make_config("gemma2", tied=tied))
        torch.manual_seed(7 + dist.get_rank())
        built: Any = liger_dist.wrap(model, liger_dist.FSDP2(lm_head=head, mesh=mesh))  # type: ignore[arg-type]
        loss = built(**make_batch(0)).loss
        loss.backward()
        losses.append(float(loss.detach()))
    return losses[0], losses[1]


def test_an_embedding_that_adds_something_of_its_own(workers_2: Workers) -> None:
    """Gemma 3 scales what it looks up."""
    for errors in workers_2.run(scaled_embedding):
        assert max(errors.values()) < 1e-9, errors


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


def scaled_embedding() -> dict[str, float]:
    gradients = {}
    for head in HEADS:
        model = make_model("llama", tied=True)
        model.model.embed_tokens.__class__ = Scaled  # type: ignore[union-attr]
        strategy = liger_dist.FSDP2(lm_head=head, reduce_dtype=torch.float64)  # type: ignore[arg-type]
        built: Any = liger_dist.wrap(model, strategy)
        assert type(built.model.embed_tokens).__name__ == "Scaled"
        built(**make_batch(dist.get_rank())).loss.backward()
        gradients[head] = {name: full(parameter.grad) for name, parameter in built.named_parameters()}
    return {
        name: float((gradient - gradients["gather"][name]).abs().max())
        for name, gradient in gradients["vocab_parallel"].items()
    }


def test_row_shards_stay_after_unwrap(workers_2: Workers) -> None:
    for difference in workers_2.run(unwrapped_logits):
        assert difference < 1e-9


def unwrapped_logits() -> float:
    ids = make_batch(0)["input_ids"]
    expected = make_model("llama")(input_ids=ids).logits
    model = liger_dist.unwrap(wrapped("vocab_parallel"))
    return float((model(input_ids=ids).logits - expected).abs().max())


def test_what_does_not_go_with_it(workers_2: Workers) -> None:
    for sentences in workers_2.run(refusals):
        assert "cpu_offload is True" in sentences["cpu_offload"]
        assert "tensor-parallel axis" in sentences["mesh"]
        assert "has max_norm=0.1" in sentences["max_norm"]
        assert "the loss of LlamaForCausalLM is not fused (fused_loss=False)" in sentences["unfused"]
        assert "is sharded by FSDP already" in sentences["gather after all"]
        assert "lm_head is 'gathered'; expected one of 'gather', 'vocab_parallel'" in sentences["name"]


def refusals() -> dict[str, str]:
    grid = init_device_mesh(compute_device().type, (1, 2), mesh_dim_names=("shard", "tp"))
    cases: dict[str, Any] = {
        "cpu_offload": lambda: wrapped("vocab_parallel", cpu_offload=True),
        "mesh": lambda: wrapped("vocab_parallel", mesh=grid),  # type: ignore[arg-type]
        "name": lambda: wrapped("gathered"),
        "unfused": lambda: unfused(),
        "max_norm": lambda: limited(),
        "gather after all": lambda: gathered_after_all(),
    }
    sentences = {}
    for name, case in cases.items():
        with pytest.raises(liger_dist.LigerDistError) as caught:
            case()
        sentences[name] = str(caught.value)
    return sentences


@pytest.mark.skipif(compute_device().type == "cuda", reason="assertions on the device end the process")
def test_ids_outside_the_vocabulary(workers_2: Workers) -> None:
    assert all(f"ids go from 1 to {VOCAB_SIZE}" in sentence for sentence in workers_2.run(outside))


def outside() -> str:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        wrapped("vocab_parallel", tied=True)(input_ids=on_device.tensor([[1, VOCAB_SIZE]]))
    return str(caught.value)


def limited() -> None:
    model: Any = make_model("llama", tied=True)
    model.model.embed_tokens.max_norm = 0.1
    liger_dist.wrap(model, liger_dist.FSDP2(lm_head="vocab_parallel"))


def unfused() -> None:
    strategy = liger_dist.FSDP2(lm_head="vocab_parallel")
    liger_dist.wrap(make_model("llama"), strategy, config=liger_dist.WrapConfig(fused_loss=False))


def gathered_after_all() -> None:
    model = liger_dist.unwrap(wrapped("vocab_parallel"))
    liger_dist.wrap(model, liger_dist.FSDP2(lm_head="gather"))


DIFFERENT: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "z-loss": {"z_loss": 0.1},
    "an output": {"outputs": ("entropy",)},
    "logits": {"outputs": ("logits",)},
    "no labels": {"labels": None},
    "class weights": {"class_weight": True},
    "other class weights": {"class_weight": 2.0},
}


@pytest.mark.skipif(compute_device().type == "cuda", reason="assertions on the device end the process")
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_arguments_are_refused_on_all_ranks(name: str, workers_2: Workers) -> None:
    """On all of them, without a collective that half of them never enter."""
    for sentence in workers_2.run(asked_on_one, name):
        assert "ranks of the vocab-parallel lm_head" in sentence
        assert (
            "have different class weights"
            if name == "other class weights"
            else "called the model with different arguments"
        ) in sentence


def asked_on_one(name: str) -> str:
    model = wrapped("vocab_parallel")
    weight = on_device.ones(VOCAB_SIZE, dtype=torch.float64)
    usual: dict[str, Any] = {"class_weight": weight} if name == "other class weights" else {}
    changed = {key: weight * float(value) if key == "class_weight" else value for key, value in DIFFERENT[name].items()}
    arguments = make_batch(dist.get_rank()) | usual | (changed if dist.get_rank() == 0 else {})
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(**arguments)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["fsdp2", "tp"])
def test_a_head_that_peft_saves_stays_tied(strategy: str, workers_2: Workers) -> None:
    pytest.importorskip("peft")
    assert all(workers_2.run(saved_and_tied, strategy))


def saved_and_tied(strategy: str) -> bool:
    from peft import LoraConfig, get_peft_model

    peft: Any = get_peft_model(
        make_model("llama", tied=True),  # type: ignore[arg-type]
        LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True),
    )
    liger_dist.wrap(peft, liger_dist.FSDP2(lm_head="vocab_parallel") if strategy == "fsdp2" else strategy)
    model = peft.get_base_model()
    peft(**make_batch(0)).loss.backward()
    saved = model.lm_head.modules_to_save.default.weight
    return model.model.embed_tokens.modules_to_save.default.weight is saved and saved.grad is not None


def test_a_wrap_that_fails_leaves_the_model_unsharded(workers_2: Workers) -> None:
    # The model's own loss goes through fp32.
    for difference in workers_2.run(failed_half_way):
        assert difference < 1e-5


def failed_half_way() -> float:
    model: Any = make_model("llama", tied=True)
    before = {name: type(module) for name, module in model.named_modules()}
    failure = RuntimeError("out of memory")
    with mock.patch.object(fsdp2, "fully_shard", side_effect=failure), pytest.raises(RuntimeError, match="memory"):
        liger_dist.wrap(model, liger_dist.FSDP2(lm_head="vocab_parallel"))
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.lm_head.weight is model.model.embed_tokens.weight
    batch = make_batch(dist.get_rank())
    expected = make_model("llama", tied=True)(**batch).loss
    return float((liger_dist.wrap(model, "fsdp2")(**batch).loss - expected).abs())


def test_a_forward_put_on_the_head_afterwards_still_computes_the_loss(workers_2: Workers) -> None:
    assert all(workers_2.run(hooked_by_hand))


def hooked_by_hand() -> bool:
    model = wrapped("vocab_parallel")
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden_states: own(hidden_states)
    output = model(**make_batch(dist.get_rank()))
    return not hasattr(output, "logits")


def test_gemma3_in_bf16(workers_2: Workers) -> None:
    """Its embedding is scaled by a number in the dtype of the weight, which is that of computing."""
    for gathered, split in workers_2.run(losses_of_gemma3):
        assert split == pytest.approx(gathered, rel=1e-4)


def losses_of_gemma3() -> tuple[float, float]:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    losses = []
    for head in HEADS:
        torch.manual_seed(0)
        config = Gemma3TextConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=40,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.3,
        )
        model = Gemma3ForCausalLM(config).to(compute_device())
        options: Any = {"lm_head": head, "param_dtype": torch.bfloat16}
        model = liger_dist.wrap(model, liger_dist.FSDP2(**options))
        losses.append(float(model(**make_batch(0)).loss.detach()))
    return losses[0], losses[1]


def test_it_is_explained_and_verified(workers_2: Workers) -> None:
    for text, verified in workers_2.run(explained):
        assert re.search(r"^adapter +fsdp2-vocab-parallel$", text, re.MULTILINE)
        assert "never all-gathered for the loss" in text
        assert verified, text


def explained() -> tuple[str, bool]:
    model = wrapped("vocab_parallel")
    result = liger_dist.verify(model, make_batch(dist.get_rank()))
    return str(liger_dist.explain(model)), result.ok
