"""Sharded models beside the usual loop: ranks that weigh their losses, refuse alone, skip reductions, or save while
another thread computes."""

from __future__ import annotations

import copy
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE, full, make_batch, make_model, true_loss_sum
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import liger_dist
from liger_dist.sharding.process_groups import compute_device


def row_shards(mesh: Any = None) -> liger_dist.FSDP2:
    return liger_dist.FSDP2(lm_head="vocab_parallel", mesh=mesh, reduce_dtype=torch.float64)


def test_a_rank_may_scale_its_loss_by_its_own_tokens(workers_2: Workers) -> None:
    """As loops do that want the mean over all tokens; with the default configuration."""
    for errors in workers_2.run(weighed_by_tokens):
        assert max(errors.values()) < 1e-6


def weighed_by_tokens() -> dict[str, float]:
    model, world = make_model("llama"), dist.get_world_size()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, liger_dist.FSDP2(reduce_dtype=torch.float64))
    assert liger_dist.FSDP2().lm_head == "gather"
    batches = [make_batch(rank) for rank in range(world)]
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    mine = batches[dist.get_rank()]
    share = counts[dist.get_rank()] * world / sum(counts)
    (model(**mine).loss * share).backward()
    for batch in batches:
        (true_loss_sum(reference, batch)[0] / sum(counts)).backward()
    truths = dict(reference.named_parameters())
    return {
        name: float((full(p.grad) - truths[name].grad).abs().max() / truths[name].grad.abs().max())
        for name, p in model.named_parameters()
        if p.grad is not None
    }


ON_DEVICE = pytest.mark.skipif(compute_device().type == "cuda", reason="assertions on the device end the process")


@pytest.mark.smoke
@ON_DEVICE
@pytest.mark.parametrize("what", ["an id of the embedding", "a label", "an option"])
def test_what_one_rank_of_a_vocab_parallel_head_refuses_is_refused_by_all(what: str, workers_2: Workers) -> None:
    """Before a collective that the other one would wait in; afterwards both go on."""
    for sentence, loss in workers_2.run(refused_by_one, what, time_limit=60):
        assert (
            "ids go from" if "id of" in what else "a label is" if "label" in what else "label_smoothing is 2"
        ) in sentence
        assert loss > 0


@ON_DEVICE
def test_a_label_that_one_rank_refuses_is_refused_by_all_replicas(workers_4: Workers) -> None:
    for sentence, _ in workers_4.run(refused_by_one, "a label", (2, 2), time_limit=60):
        assert "a label is" in sentence


def refused_by_one(what: str, mesh: tuple[int, ...] | None = None) -> tuple[str, float]:
    model = liger_dist.wrap(make_model("llama", tied=True), row_shards(mesh))
    batch: dict[str, Any] = make_batch(dist.get_rank())
    wrong = copy.deepcopy(batch)
    if dist.get_rank() == 1 and what == "an id of the embedding":
        wrong["input_ids"][0, 0] = VOCAB_SIZE
    if dist.get_rank() == 1 and what == "a label":
        wrong["labels"][0, -1] = VOCAB_SIZE
    if dist.get_rank() == 1 and what == "an option":
        wrong["label_smoothing"] = 2.0
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(**wrong)
    return str(caught.value), float(model(**batch).loss)


@pytest.mark.smoke
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_replicas_of_rows_reduce_once_in_an_accumulation(tied: bool, workers_4: Workers) -> None:
    for reduces, error in workers_4.run(accumulated, tied):
        assert reduces[0] == reduces[1] == 0
        assert reduces[2] > 0
        assert error < 1e-6


@pytest.mark.parametrize("strategy", [liger_dist.FSDP1, liger_dist.FSDP2])
def test_a_saved_head_whose_original_is_tied(strategy: Any, workers_2: Workers) -> None:
    pytest.importorskip("peft")
    for error in workers_2.run(saved_beside_a_tied_original, strategy):
        assert error < 1e-6


def saved_beside_a_tied_original(strategy: Any) -> float:
    import peft

    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2)
    model = peft.get_peft_model(make_model("llama", tied=True), settings)
    model.to(torch.float64)
    expected = float(model(**make_batch(dist.get_rank())).loss)
    root = liger_dist.wrap(model, strategy(reduce_dtype=torch.float64))
    output = root(**make_batch(dist.get_rank()))
    output.loss.backward()
    return abs(float(output.loss) - expected)


class Collectives(TorchDispatchMode):
    """Notes the collectives of torch's functional and ordinary interface, with the dtype of what they send."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")):
            flat = [x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            if flat:
                self.seen.append((name, flat[-1].dtype, flat[-1].numel()))
        return func(*args, **(kwargs or {}))


def accumulated(tied: bool) -> tuple[list[int], float]:
    """All-reduces as large as the rows in the backward of each of three micro-batches, and the gradient's error."""
    from unittest import mock

    model: Any = make_model("llama", tied=tied)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, row_shards((2, 2)))
    rows = full(model.lm_head.weight).shape[0] // 2
    counts = []
    own = dist.all_reduce
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        loss = model(**make_batch(dist.get_rank(), seed=micro)).loss / 3
        sizes: list[int] = []

        def counted(tensor: Tensor, *args: Any, sizes: list[int] = sizes, **kwargs: Any) -> Any:
            sizes.append(tensor.numel())
            return own(tensor, *args, **kwargs)

        with mock.patch.object(dist, "all_reduce", counted):
            loss.backward()
        counts.append(sum(size >= rows * HIDDEN_SIZE for size in sizes))
    for micro in range(3):
        for rank in range(4):
            total, count = true_loss_sum(reference, make_batch(rank, seed=micro))
            (total / count / 12).backward()
    truth = reference.get_output_embeddings().weight.grad  # type: ignore[operator]
    return counts, float((full(model.lm_head.weight.grad) - truth).abs().max() / truth.abs().max())


def test_logits_on_request_send_the_compute_dtype(workers_2: Workers) -> None:
    """Half of the bytes of fp32 masters, for every generated token."""
    for dtypes in workers_2.run(dtypes_of_gathered_rows):
        assert dtypes == {torch.bfloat16}


def dtypes_of_gathered_rows() -> set[torch.dtype]:
    model: Any = make_model("llama", dtype=torch.float32)
    liger_dist.wrap(model, liger_dist.FSDP2(lm_head="vocab_parallel", param_dtype=torch.bfloat16))
    rows = -(-VOCAB_SIZE // 2)
    with torch.no_grad(), Collectives() as collectives:
        logits = model(input_ids=make_batch(0)["input_ids"]).logits
    assert logits.shape == (3, 12, VOCAB_SIZE)
    # The rows alone are as large as that; layers are gathered as FSDP2 has them.
    return {dtype for name, dtype, size in collectives.seen if size == rows * HIDDEN_SIZE and "gather" in name}


def test_a_state_dict_taken_during_a_forward_has_full_shapes(workers_2: Workers) -> None:
    for shapes in workers_2.run(saved_during_a_forward):
        assert shapes == [(VOCAB_SIZE, HIDDEN_SIZE)]


def saved_during_a_forward() -> list[tuple[int, ...]]:
    """Gemma's embedding has a separate class, which reads the dtype of the weight."""
    model: Any = make_model("gemma2", tied=True, dtype=torch.float32)
    embedding = model.model.embed_tokens
    scaled = type(embedding)
    seen: set[tuple[int, ...]] = set()

    class Watched(scaled):  # type: ignore[misc,valid-type]
        def forward(self, input: Tensor) -> Tensor:
            assert self.weight.dtype == torch.bfloat16
            # The embedding's alone: FSDP2 reshards the whole model for its state dict, in the middle of the forward.
            saver = threading.Thread(target=lambda: seen.add(tuple(embedding.state_dict()["weight"].shape)))
            saver.start()
            saver.join()
            return super().forward(input)

    embedding.__class__ = Watched
    liger_dist.wrap(model, liger_dist.FSDP2(lm_head="vocab_parallel", param_dtype=torch.bfloat16))
    model(**make_batch(dist.get_rank())).loss.backward()
    return sorted(seen)


@pytest.mark.gpu(n=2)
def test_unwrapping_destroys_the_communicators_of_a_wrap(workers_2: Workers) -> None:
    for before, during, after, difference in workers_2.run(numbers_of_communicators):
        assert during > before
        assert after == before
        assert difference < 1e-5


def numbers_of_communicators() -> tuple[int, int, int, float]:
    """Of this process; and how far logits after unwrapping are from those before."""
    groups = dist.distributed_c10d._world.pg_map
    mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (2,), mesh_dim_names=("shard",))
    before = len(groups)
    model: Any = liger_dist.wrap(make_model("llama"), row_shards(mesh))
    during = len(groups)
    ids = make_batch(0)["input_ids"]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        liger_dist.unwrap(model)
        difference = float((model(input_ids=ids).logits - logits).abs().max())
    return before, during, len(groups), difference


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1", "tp"])
def test_accelerate_is_told_not_to_prepare_what_wrap_has_sharded(strategy: str, workers_2: Workers) -> None:
    pytest.importorskip("accelerate")
    for sentence in workers_2.run(prepared, strategy):
        assert "prepare the optimizer and the data loader alone" in sentence


def prepared(strategy: Any) -> str:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    # Earlier tests of these processes have asked for FSDP and DeepSpeed.
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    for state in (AcceleratorState, GradientState, PartialState):
        state._shared_state.clear()
    accelerator = Accelerator(cpu=compute_device().type == "cpu")
    try:
        model = liger_dist.wrap(make_model("llama", dtype=torch.float32), strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert accelerator.prepare(optimizer) is not None
        with pytest.raises(liger_dist.LigerDistError) as caught:
            accelerator.prepare(model, optimizer)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()
    return str(caught.value)
