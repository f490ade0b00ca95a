"""Tensor parallelism beside what the conformance suite holds: different tokens, divergence, clipping, checkpoints."""

from __future__ import annotations

from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from matrix import stored
from models import full, make_batch, make_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import liger_dist
from liger_dist.sharding.base import Strategy
from liger_dist.sharding.process_groups import compute_device


def test_different_tokens_are_refused_at_any_step(workers_2: Workers) -> None:
    if torch.cuda.is_available():
        pytest.skip("after the first step an assertion on the device ends the program, and with it the pool")
    for sentences in workers_2.run(with_different_tokens):
        for name, sentence in sentences.items():
            assert "see different tokens" in sentence, name
        assert "hidden states do not" in sentences["inputs"]
        assert "hidden states do not" in sentences["dropout"]
        assert len(sentences) == 9
        for name in list(sentences)[3:]:
            assert "their temperature, token_ids, soft_labels or outputs do not" in sentences[name], name


def with_different_tokens() -> dict[str, str]:
    sentences = {}
    rank = dist.get_rank()

    def attempt(name: str, model: Any, batch: Any) -> None:
        with pytest.raises(liger_dist.LigerDistError) as caught:
            model(**batch)
        sentences[name] = str(caught.value)

    batch = make_batch(0)
    attempt("inputs", liger_dist.wrap(make_model("llama"), "tp"), batch | {"input_ids": make_batch(rank)["input_ids"]})
    model = liger_dist.wrap(make_model("llama"), "tp")
    model(**batch).loss.backward()
    attempt("later", model, make_batch(rank))
    model = make_model("llama")
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    model = liger_dist.wrap(model, "tp").train()
    torch.manual_seed(rank)
    attempt("dropout", model, batch)
    model = liger_dist.wrap(make_model("llama"), "tp")
    ids = on_device.randint(100, (*batch["labels"].shape, 3), generator=torch.Generator().manual_seed(rank))
    ids = ids.to(batch["labels"].device)
    at = batch | {"outputs": ("log_prob_at",)}
    attempt("other ids", model, at | {"token_ids": ids})
    attempt("more ids", model, at | {"token_ids": ids[..., : rank + 1]})
    attempt("temperature", model, batch | {"temperature": 0.7 + rank})
    attempt("temperatures", model, batch | {"temperature": [0.7 + rank, 1.0, 1.0]})
    attempt("outputs", model, batch | {"outputs": ("entropy", "log_prob")[rank:]})
    attempt("classes", model, batch | {"outputs": ("top_k",), "top_k": rank + 1})
    return sentences


def test_rows_sharded_over_two_axes_are_declined_from_the_facts() -> None:
    for placement, words in (("S(0)", []), ("S(0) S(0)", ["placed S(0) S(0)"])):
        facts = stored("tensor-parallel", tensor_parallel=placement, tensor_parallel_size=4)
        reasons = facts.storage.adapter.not_supported_reasons(facts)
        assert [word in reason for word, reason in zip(words, reasons, strict=True)] == [True] * len(words)


def test_verify_sees_layers_that_differ_over_the_axis(workers_4: Workers) -> None:
    for problems in workers_4.run(diverged_on_a_grid):
        assert problems[0] == ()
        assert "should be alike on several ranks" in str(problems[1])


def diverged_on_a_grid() -> list[tuple[str, ...]]:
    mesh = init_device_mesh(compute_device().type, (2, 2), mesh_dim_names=("shard", "tp"))
    model = liger_dist.wrap(make_model("llama", dtype=torch.float32), "fsdp2", mesh=mesh)
    batch = make_batch(mesh.get_local_rank("shard"))
    found = [liger_dist.verify(model, batch).problems]
    with torch.no_grad():
        # Too little to show in the hidden states.
        model.model.layers[0].mlp.up_proj.weight.to_local().mul_(1.0 + 1e-5 * mesh.get_local_rank("tp"))
    found.append(liger_dist.verify(model, batch).problems)
    return found


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["tp", "fsdp2"])
def test_the_documented_way_to_clip(strategy: str, workers_4: Workers) -> None:
    for error in workers_4.run(error_of_clipping, strategy):
        assert error < 1e-6


def error_of_clipping(strategy: str) -> float:
    """As docs/how_it_works.md has it."""
    chosen: Strategy = liger_dist.TensorParallel()
    if strategy == "fsdp2":
        mesh = init_device_mesh(compute_device().type, (2, 2), mesh_dim_names=("shard", "tp"))
        chosen = liger_dist.FSDP2(mesh=mesh, reduce_dtype=torch.float64)
    model = liger_dist.wrap(make_model("llama"), chosen)
    reference = make_model("llama")
    for each in (model, reference):
        each(**make_batch(0)).loss.backward()

    kinds: dict[Any, list[Any]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            of = parameter.device_mesh if isinstance(parameter, DTensor) else None
            kinds.setdefault(of, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in kind]) for kind in kinds.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(kind, max_norm=1.0, total_norm=total)

    torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((full(ours.grad) - theirs.grad).abs().max()) for ours, theirs in pairs)


def test_full_weights_are_saved_and_loaded(workers_2: Workers) -> None:
    for difference in workers_2.run(through_a_state_dict):
        assert difference == 0.0


def through_a_state_dict() -> float:
    options = StateDictOptions(full_state_dict=True)
    model, other = (liger_dist.wrap(make_model("llama", tied=True, seed=seed), "tp") for seed in (0, 1))
    whole = get_model_state_dict(model, options=options)
    assert whole["lm_head.weight"].shape == (101, 16)
    set_model_state_dict(other, whole, options=options)
    batch = make_batch(0)
    return abs(float(model(**batch).loss) - float(other(**batch).loss))


def test_a_plan_for_the_layers_alone(workers_2: Workers) -> None:
    """Gate and up give local tensors, down takes DTensors."""
    for error in workers_2.run(error_of_a_plan):
        assert error < 1e-6


def error_of_a_plan() -> float:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model: Any = make_model("llama")
    expected = model(**make_batch(0)).loss
    mesh = init_device_mesh(compute_device().type, (2,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        parallelize_module(layer.mlp, mesh, plan)
    loss = liger_dist.wrap(model, "auto")(**make_batch(0)).loss
    loss.backward()
    return float((loss - expected).abs() / expected.abs())
