"""PEFT around sharded models: prompts in every layout, adapters that come after wrap, and tied ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients
from harness import Workers
from models import full, make_batch, make_model
from peft_methods import METHODS, adapted, batch_of, true_gradients
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

import liger_dist
from liger_dist.sharding.process_groups import compute_device

peft = pytest.importorskip("peft")

PROMPTS = {
    "ddp": "ddp",
    "fsdp1": "fsdp1",
    "fsdp1 without resharding": liger_dist.FSDP1(reshard_after_forward=False),
    "fsdp2": "fsdp2",
    "replicas": liger_dist.FSDP2(mesh=(2, 1)),
    "without resharding": liger_dist.FSDP2(reshard_after_forward=False),
    "vocab_parallel": liger_dist.FSDP2(lm_head="vocab_parallel"),
    "replicas, vocab_parallel": liger_dist.FSDP2(mesh=(2, 1), lm_head="vocab_parallel"),
    "tp": "tp",
}


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_prompts_are_averaged_in_every_layout(tied: bool, workers_2: Workers) -> None:
    for errors in workers_2.run(errors_of_prompts, tied):
        assert max(errors.values()) < 1e-4, errors


def errors_of_prompts(tied: bool) -> dict[str, float]:
    errors = {}
    for layout, strategy in PROMPTS.items():
        # Tensor-parallel ranks see the same tokens.
        rank, ranks = (0, 1) if layout == "tp" else (dist.get_rank(), 2)
        for method in ("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"):
            truth = true_gradients(method, ranks, tied=tied)
            model = adapted(method, tied=tied)
            if layout == "tp" and dist.get_rank() == 1:
                # Rank 0's values count, of prompts too.
                with torch.no_grad():
                    model.prompt_encoder.default.embedding.weight += 1.0
            root = liger_dist.wrap(model, strategy)
            for _ in range(2):
                root.zero_grad()
                torch.manual_seed(rank)
                root(**batch_of(method, rank)).loss.backward()
            gradients = full_gradients(root)
            assert gradients.keys() == truth.keys()
            errors[f"{method} {layout}"] = max(
                float((gradients[name] - true).abs().max() / true.abs().max()) for name, true in truth.items()
            )
    return errors


@pytest.mark.nightly(tied=[True])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_prompts_generate_under_fsdp2_as_alone(tied: bool, workers_2: Workers) -> None:
    """Before the first forward and after a training step."""
    assert workers_2.run(generated_under_fsdp2, tied) == [[]] * 2


def generated_under_fsdp2(tied: bool) -> list[str]:
    wrong = []
    ids = make_batch(0)["input_ids"][:, :5]
    for method in ("PROMPT_TUNING", "ADAPTION_PROMPT", "LORA"):
        expected = adapted(method, tied=tied).eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        for layout in ("fsdp2", "vocab_parallel"):
            model = liger_dist.wrap(adapted(method, tied=tied), PROMPTS[layout])
            for moment in ("first", "after a step"):
                tokens = model.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False)
                if not torch.equal(tokens, expected):
                    wrong.append(f"{method} {layout} {moment}")
                model.train()(**batch_of(method, dist.get_rank())).loss.backward()
    return wrong


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | settings)


def inside(root: Any) -> Any:
    return root.module if isinstance(root, DistributedDataParallel | FullyShardedDataParallel) else root


def around(strategy: Any, folder: str) -> Any:
    return peft.get_peft_model(liger_dist.wrap(make_model("llama", dtype=torch.float32), strategy), lora())


def loaded(strategy: Any, folder: str) -> Any:
    model = liger_dist.wrap(make_model("llama", dtype=torch.float32), strategy)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


def within(strategy: Any, folder: str) -> Any:
    root = liger_dist.wrap(make_model("llama", dtype=torch.float32), strategy)
    peft.get_peft_model(inside(root), lora())
    return root


def second(strategy: Any, folder: str) -> Any:
    model = peft.get_peft_model(make_model("llama", dtype=torch.float32), lora())
    root = liger_dist.wrap(model, strategy)
    root(**make_batch(dist.get_rank())).loss.backward()
    model.add_adapter("second", lora())
    model.set_adapter("second")
    return root


def unfrozen(strategy: Any, folder: str) -> Any:
    """An adapter that was there but not trained: DDP takes the parameters that are."""
    model = peft.get_peft_model(make_model("llama", dtype=torch.float32), lora())
    model.add_adapter("second", lora())
    root = liger_dist.wrap(model, strategy)
    model.set_adapter("second")
    return root


def unfrozen_later(strategy: Any, folder: str) -> Any:
    """By hand, after a step, without an adapter that changes."""
    root = liger_dist.wrap(peft.get_peft_model(make_model("llama", dtype=torch.float32), lora()), strategy)
    frozen = [name for name, _ in root.named_parameters() if "lora_A" in name and "layers.1" in name]
    for name in frozen:
        root.get_parameter(name).requires_grad_(False)
    root = liger_dist.wrap(liger_dist.unwrap(root), strategy)
    root(**make_batch(dist.get_rank())).loss.backward()
    for name in frozen:
        root.get_parameter(name).requires_grad_()
    return root


LATER: dict[Callable[..., Any], tuple[str, ...]] = {
    around: ("fsdp1", "fsdp2", "vocab_parallel", "ddp"),
    loaded: ("fsdp2", "vocab_parallel", "ddp"),
    within: ("ddp", "fsdp1"),
    second: ("ddp", "fsdp1", "fsdp2", "vocab_parallel"),
    unfrozen: ("ddp",),
    unfrozen_later: ("ddp",),
}


@pytest.mark.parametrize("order", LATER, ids=lambda order: order.__name__)
def test_adapters_after_wrap_are_refused_before_they_train(
    order: Callable[..., Any], workers_2: Workers, tmp_path: Path
) -> None:
    peft.get_peft_model(make_model("llama", dtype=torch.float32), lora()).save_pretrained(tmp_path)
    for sentences in workers_2.run(refused_later, order, str(tmp_path)):
        for strategy, sentence in sentences.items():
            assert "Make PEFT's adapters first" in sentence, (strategy, sentence)
            assert ("lora_" in sentence) or (strategy == "fsdp1" and "no parameter trains" in sentence)


def refused_later(order: Callable[..., Any], folder: str) -> dict[str, str]:
    sentences = {}
    for strategy in LATER[order]:
        torch.manual_seed(0)
        with pytest.raises(liger_dist.LigerDistError) as caught:
            order(PROMPTS[strategy], folder)(**make_batch(dist.get_rank()))
        sentences[strategy] = str(caught.value)
    return sentences


@pytest.mark.parametrize("method", ["PREFIX_TUNING", "CARTRIDGE"])
def test_prefixes_around_a_sharded_model_are_said(method: str, workers_2: Workers) -> None:
    for around, before in workers_2.run(warnings_of_prefixes, method):
        assert "outside of the model that 'fsdp2' shards get gradients through" in around
        assert not before


def warnings_of_prefixes(method: str) -> tuple[str, str]:
    said = []
    for is_around in (True, False):
        torch.manual_seed(0)
        model = make_model("llama", dtype=torch.float32)
        config = getattr(peft, METHODS[method].config)(**METHODS[method].settings)
        if is_around:
            model = peft.get_peft_model(liger_dist.wrap(model, "fsdp2"), config)
        else:
            model = liger_dist.wrap(peft.get_peft_model(model, config), "fsdp2")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(**make_batch(dist.get_rank())).loss.backward()
            model(**make_batch(dist.get_rank())).loss.backward()
        said.append(" ".join(str(w.message) for w in caught if "outside of the model" in str(w.message)))
    assert said[0].count("outside of the model") == 1
    return said[0], said[1]


def test_adapters_after_wrap_may_be_evaluated_and_train_after_unwrap(workers_2: Workers) -> None:
    for with_adapter, own in workers_2.run(evaluated_later):
        assert abs(with_adapter - own) < 1e-5


def evaluated_later() -> tuple[float, float]:
    torch.manual_seed(0)
    model = make_model("llama", dtype=torch.float32)
    reference = peft.get_peft_model(copy.deepcopy(model), lora())
    torch.manual_seed(0)
    later = peft.get_peft_model(liger_dist.wrap(model, "fsdp2"), lora())
    for (_, parameter), (_, true) in zip(_adapters(later), _adapters(reference), strict=True):
        parameter.data.copy_(true)
    with torch.no_grad():
        losses = float(later(**make_batch(0)).loss), float(reference(**make_batch(0)).loss)
    liger_dist.unwrap(model)
    assert later(**make_batch(0)).loss.requires_grad
    return losses


def _adapters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if "lora_" in name]


SAVED = (["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"])


def test_a_saved_tied_head_made_after_wrap_is_fused(workers_2: Workers) -> None:
    for errors in workers_2.run(errors_of_saved):
        assert max(errors.values()) < 1e-5, errors


def errors_of_saved() -> dict[str, float]:
    errors = {}
    for names in SAVED:
        settings = lora(modules_to_save=names, ensure_weight_tying=True)

        def made(wrapped: bool, settings: Any = settings) -> Any:
            model = make_model("qwen2", tied=True, dtype=torch.float32)
            torch.manual_seed(1)
            return peft.get_peft_model(liger_dist.wrap(model, "auto") if wrapped else model, settings)

        reference = made(wrapped=False)
        for rank in range(2):
            (reference(**make_batch(rank)).loss / 2).backward()
        truth = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        for host in ("ddp", "fsdp1", "fsdp2"):
            model = made(wrapped=True)
            output = _sharded_by(host, model)(**make_batch(dist.get_rank()))
            assert not hasattr(output, "logits")
            output.loss.backward()
            gradients = full_gradients(_ROOTS.pop())
            errors[f"{names} {host}"] = max(
                float((gradients[name] - true).abs().max() / true.abs().max()) for name, true in truth.items()
            )
            assert liger_dist.explain(model).facts.tied
    return errors


_ROOTS: list[nn.Module] = []


def _sharded_by(host: str, model: Any) -> nn.Module:
    """As a host does after wrap."""
    root: nn.Module = model
    layers = set(model.base_model.model.model.layers)
    if host == "ddp":
        root = DistributedDataParallel(model)
    elif host == "fsdp1":
        policy = CustomPolicy(lambda module: module in layers)
        device = compute_device()
        root = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device)
    else:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    _ROOTS.append(root)
    return root


def test_tied_lora_trains_as_one_or_is_refused(workers_2: Workers) -> None:
    """Two parameters in the same memory; both ways out of the sentence work."""
    for found in workers_2.run(tied_lora):
        on_gpu = compute_device().type == "cuda"
        assert found.pop("ddp") < (1e-5 if on_gpu else 1e-6)
        assert found.pop("fsdp2 without the tying") < (5e-4 if on_gpu else 1e-5)
        assert found.keys() == {"fsdp1", "fsdp2", "deepspeed", "tp"}
        for sentence in found.values():
            assert "in the same memory" in sentence
            assert "strategy='ddp'" in sentence


def tied_lora() -> dict[str, Any]:
    found: dict[str, Any] = {}

    def made(ties: bool) -> Any:
        model = make_model("qwen2", tied=True)
        settings = {"target_modules": ["embed_tokens"], "ensure_weight_tying": ties, "init_lora_weights": True}
        torch.manual_seed(1)
        return peft.get_peft_model(model, lora(**settings))

    for strategy in ("fsdp1", "fsdp2", "deepspeed", "tp"):
        with pytest.raises(liger_dist.LigerDistError) as caught:
            liger_dist.wrap(made(True), strategy)
        found[strategy] = str(caught.value)
    for name, strategy, ties in (("ddp", "ddp", True), ("fsdp2 without the tying", "fsdp2", False)):
        model, reference = made(ties), made(ties)
        root: Any = liger_dist.wrap(model, strategy)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, foreach=False) for m in (root, reference)]
        for seed in range(3):
            root(**make_batch(dist.get_rank(), seed=seed)).loss.backward()
            for rank in range(2):
                (reference(**make_batch(rank, seed=seed)).loss / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        truth = dict(reference.named_parameters())
        found[name] = max(float((full(p) - truth[n]).abs().max()) for n, p in model.named_parameters())
        if ties:
            a = model.base_model.model.model.embed_tokens.lora_embedding_A["default"]
            b = model.base_model.model.lm_head.lora_B["default"].weight
            assert a.abs().max() > 0
            assert torch.equal(a, b.T)
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_a_wrapper_takes_the_mode_of_the_model(strategy: str, workers_2: Workers) -> None:
    assert workers_2.run(modes, strategy) == [[]] * 2


def modes(strategy: str) -> list[str]:
    """Modules in another mode than before."""
    wrong = []
    for is_training in (True, False):
        model = make_model("llama").train(is_training)
        model.model.layers[0].train(not is_training)
        before = {name: module.training for name, module in model.named_modules()}
        root = liger_dist.wrap(model, strategy)
        wrong += [name for name, module in model.named_modules() if module.training != _mode_of(name, before)]
        wrong += ["root"] * (root.training != is_training)
    return wrong


def _mode_of(name: str, modes: dict[str, bool]) -> bool:
    parts = [part for part in name.split(".") if part != "_fsdp_wrapped_module"]
    return modes[".".join(parts)]


def test_what_is_not_averaged_is_named_and_undone(workers_2: Workers) -> None:
    """A strategy whose wrapper leaves a trained parameter out."""
    for sentence, still_wraps in workers_2.run(left_out):
        assert "nothing averages the gradients of module.lm_head.weight" in sentence
        assert still_wraps


def left_out() -> tuple[str, bool]:
    class LeavesOut(liger_dist.DDP):
        def shard(self, outer: nn.Module, *args: Any, **options: Any) -> nn.Module:
            outer.lm_head.requires_grad_(False)  # type: ignore[union-attr, operator]
            root = super().shard(outer, *args, **options)
            outer.lm_head.requires_grad_(True)  # type: ignore[union-attr, operator]
            return root

    model = make_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(liger_dist.LigerDistError) as caught:
            liger_dist.wrap(model, LeavesOut())
    liger_dist.wrap(model, "ddp")
    return str(caught.value), True
