"""Wrapped models in the hands of other code: compilers, copies, threads, hooks, adapters, odd loss calls."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import on_device
import pytest
import torch
from harness import Workers
from models import VOCAB_SIZE, gradient_errors, make_batch, make_config, make_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from truth import relative_error

import liger_dist
from liger_dist.fused_layers.rotary import _convention_of
from liger_dist.sharding.process_groups import compute_device


def assert_same_training(model: nn.Module, reference: nn.Module, call: Any = None) -> None:
    """Loss and every gradient equal those of an unwrapped copy."""
    batch = make_batch(0)
    loss, expected = (model if call is None else call)(**batch).loss, reference(**batch).loss
    assert relative_error(loss, expected) < 1e-6
    loss.backward()
    expected.backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None), name
        if other.grad is not None:
            assert relative_error(parameter.grad, other.grad) < 1e-4, name


@pytest.mark.nightly(backend=["eager"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_the_whole_model_keeps_the_gradients(backend: str) -> None:
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    assert_same_training(model, reference, torch.compile(model, backend=backend))


def test_compiling_layer_by_layer_keeps_the_gradients() -> None:
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")
    assert_same_training(model, reference)


class NamedLinear(torch.nn.Linear):
    """An lm_head of a user's class."""


@pytest.mark.smoke
@pytest.mark.parametrize("of_a_users_class", [False, True], ids=["linear", "a user's class"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_wrapped_and_independent(way: str, of_a_users_class: bool) -> None:
    model: Any = make_model("llama")
    if of_a_users_class:
        model.lm_head.__class__ = NamedLinear
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    model(**make_batch(1)).loss.backward()
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    twin.zero_grad()
    assert not hasattr(twin(**make_batch(0)), "logits")
    assert_same_training(twin, reference)
    liger_dist.unwrap(twin)
    assert twin(**make_batch(0)).logits.shape[-1] == VOCAB_SIZE
    assert not hasattr(model(**make_batch(0)), "logits")


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_wrapped_model_is_saved_and_loaded_as_any_other(family: str, tmp_path: Any) -> None:
    model: Any = make_model(family, dtype=torch.float32)
    liger_dist.wrap(model)
    model(**make_batch(0)).loss.backward()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).to(compute_device())
    assert type(loaded) is type(model)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    liger_dist.wrap(loaded)
    # On a GPU not to the bit: cuBLAS chooses its kernels by the addresses of weights, too.
    tolerance = 0.0 if compute_device().type == "cpu" else 1e-6
    torch.testing.assert_close(loaded(**make_batch(0)).loss, model(**make_batch(0)).loss, rtol=tolerance, atol=0.0)
    model.load_state_dict(loaded.state_dict())


def test_threads_do_not_mix_their_labels() -> None:
    model = make_model("llama")
    liger_dist.wrap(model)
    expected = [float(model(**make_batch(index)).loss) for index in range(3)]
    seen: dict[int, set[float]] = {index: set() for index in range(3)}

    def work(index: int) -> None:
        for _ in range(10):
            seen[index].add(float(model(**make_batch(index)).loss))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {index: {value} for index, value in enumerate(expected)}


def test_a_gradient_of_nothing_is_nothing() -> None:
    """The logits without width carry the loss only when the loss asked for a gradient."""
    model = make_model("llama")
    liger_dist.wrap(model)
    carried: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda head, inputs, output: carried.append(output))  # type: ignore[union-attr]
    model(**make_batch(0)).loss.backward(retain_graph=True)
    model.zero_grad()
    carried[0].as_subclass(Tensor).sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_second_order_gradients_are_refused() -> None:
    hidden = on_device.randn(4, 8, requires_grad=True)
    weight = on_device.randn(10, 8, requires_grad=True)
    labels = on_device.tensor([1, 2, 3, 4])
    for loss in (
        liger_dist.linear_cross_entropy(hidden.tanh(), weight, labels),
        liger_dist.cross_entropy(hidden.tanh(), labels),
    ):
        assert isinstance(loss, Tensor)
        with pytest.raises(liger_dist.LigerDistError, match="second-order"):
            torch.autograd.grad(loss, hidden, create_graph=True)


def change_loss(name: str) -> Any:
    """A Llama whose forward hands its loss function something else than was given."""

    class Odd(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids, attention_mask, use_cache=False).last_hidden_state)
            arguments: dict[str, Any] = {"logits": logits, "labels": labels, "vocab_size": VOCAB_SIZE, **kwargs}
            if name == "shift_labels":
                arguments["shift_labels"] = labels
            if name == "ignore_index":
                arguments["ignore_index"] = 0
            if name == "vocabulary":
                arguments |= {"logits": logits[..., :100], "vocab_size": 100, "labels": labels.clamp_max(99)}
            if name == "items":
                arguments.pop("num_items_in_batch", None)
            if name == "mask" and attention_mask is not None:
                arguments["labels"] = labels.masked_fill(attention_mask == 0, -100)
            if name == "training" and self.training:
                arguments["logits"] = logits / 2
            if name == "twice" and labels is not None:
                self.loss_function(**arguments)
            loss = self.loss_function(**arguments) if labels is not None else None
            return type("Output", (), {"loss": loss, "logits": logits})()

    torch.manual_seed(0)
    return Odd(make_config("llama")).double().to(compute_device())


@pytest.mark.parametrize("name", ["shift_labels", "items", "mask"])
def test_an_unusual_loss_call_that_is_understood_is_fused(name: str) -> None:
    model = change_loss(name)
    reference = copy.deepcopy(model)
    batch: dict[str, Any] = make_batch(0)
    if name == "items":
        batch["num_items_in_batch"] = 7
    if name == "mask":
        batch["attention_mask"] = (on_device.arange(12) < 8).expand(3, 12).long().to(compute_device())
    liger_dist.wrap(model)
    # It is dropped by the model's forward.
    with pytest.warns(UserWarning, match="num_items_in_batch was given") if name == "items" else nullcontext():
        output = model(**batch)
    expected = reference(**batch)
    with pytest.raises(liger_dist.LigerDistError, match="never computed"):
        output.logits.sum()
    assert relative_error(output.loss, expected.loss) < 1e-6
    output.loss.backward()
    expected.loss.backward()
    assert max(gradient_errors(model, reference).values()) < 1e-5
    if name == "mask":
        with pytest.raises(liger_dist.LigerDistError, match=r"attention_mask has shape \(3, 11\)"):
            model(**batch | {"attention_mask": batch["attention_mask"][:, 1:]})


@pytest.mark.parametrize("name", ["ignore_index", "vocabulary", "training", "twice"])
def test_a_loss_call_that_is_not_understood_stays_as_it_was(name: str) -> None:
    model = change_loss(name)
    batch = make_batch(0)
    if name == "ignore_index":
        batch["labels"] = batch["labels"].clamp_min(0)
    expected = model(**batch).loss
    with pytest.warns(UserWarning, match="unfused"):
        liger_dist.wrap(model)
    assert torch.equal(model(**batch).loss, expected)


@pytest.mark.smoke
def test_a_hook_on_the_head_is_kept() -> None:
    model = make_model("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, output: 2 * output)  # type: ignore[union-attr]
    expected = model(**make_batch(0)).loss
    with pytest.warns(UserWarning, match="forward hooks"):
        liger_dist.wrap(model)
    assert torch.equal(model(**make_batch(0)).loss, expected)


def test_a_head_that_was_replaced_after_wrapping_is_refused() -> None:
    model: Any = make_model("llama")
    liger_dist.wrap(model)
    model.resize_token_embeddings(110)
    with pytest.raises(liger_dist.LigerDistError, match="not the one that was wrapped"):
        model(**make_batch(0))


def test_saved_modules_work() -> None:
    peft = pytest.importorskip("peft")
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], r=2))
    loss = model(**make_batch(0)).loss
    assert relative_error(loss, reference(**make_batch(0)).loss) < 1e-6
    loss.backward()
    reference(**make_batch(0)).loss.backward()
    trained = model.lm_head.modules_to_save["default"].weight  # type: ignore[union-attr]
    assert relative_error(trained.grad, reference.lm_head.weight.grad) < 1e-4  # type: ignore[union-attr]


def test_positional_use_cache_and_small_label_types() -> None:
    model = make_model("llama")
    batch = make_batch(0)
    liger_dist.wrap(model)
    expected = model(**batch).loss
    assert torch.equal(model(batch["input_ids"], None, None, None, None, batch["labels"], None).loss, expected)
    assert torch.equal(model(input_ids=batch["input_ids"], labels=batch["labels"].int()).loss, expected)
    unsigned = batch["labels"].clamp_min(0).to(torch.uint8)
    assert torch.isfinite(model(input_ids=batch["input_ids"], labels=unsigned).loss)
    with pytest.raises(liger_dist.LigerDistError, match="labels are a list"):
        model(input_ids=batch["input_ids"], labels=batch["labels"].tolist())


def test_a_given_count_of_zero_is_not_a_count_of_one() -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    items = on_device.tensor(0)
    assert torch.isinf(reference(**make_batch(0), num_items_in_batch=items).loss)
    assert not torch.isfinite(model(**make_batch(0), num_items_in_batch=items).loss)
    with pytest.raises(liger_dist.LigerDistError, match="num_items_in_batch is 0; expected a count above 0"):
        model(**make_batch(0), num_items_in_batch=0)
    numbers = (16, 16.0, np.int64(16), np.float32(16), on_device.tensor(16))
    assert len({float(model(**make_batch(0), num_items_in_batch=number).loss) for number in numbers}) == 1


@pytest.mark.smoke
def test_meta_models_without_complete_rules_are_refused() -> None:
    model: Any = make_model("llama")
    model.model.layers[0].to("meta")
    weight = model.lm_head.weight.clone()
    with pytest.raises(liger_dist.LigerDistError, match=r"is on the meta device and .* is not"):
        liger_dist.wrap(model, "none")
    assert torch.equal(model.lm_head.weight, weight)

    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        forgetful = LlamaForCausalLM(make_config("llama"))
        forgetful.model.register_buffer("forgotten", on_device.zeros(3))
    with pytest.raises(liger_dist.LigerDistError, match=r"leaves model\.forgotten without values"):
        liger_dist.wrap(forgetful, "none")
    assert type(forgetful.lm_head) is nn.Linear


def test_a_model_that_is_sharded_already(workers_2: Workers) -> None:
    for results in workers_2.run(wrap_after_sharding):
        assert results["error"] < 1e-6
        for strategy in ("fsdp2", "fsdp1", "tp", "ddp"):
            assert "sharded by FSDP already" in results[f"{strategy} once more"]
        assert "nothing for DDP to average" in results["ddp"]
        assert "does not average gradients over replicas of one rank" in results["fsdp1"]
        assert results["restored"] == "Linear"


def wrap_after_sharding() -> dict[str, Any]:
    import torch.distributed as dist
    from models import full, true_loss_sum
    from torch.distributed.fsdp import fully_shard

    def sharded() -> nn.Module:
        model: Any = make_model("llama")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model  # type: ignore[no-any-return]

    reference: Any = make_model("llama")
    model = liger_dist.wrap(sharded())
    model(**make_batch(dist.get_rank())).loss.backward()
    for rank in range(2):
        total, count = true_loss_sum(reference, make_batch(rank))
        (total / count / 2).backward()
    gradient = full(model.lm_head.weight.grad)
    results: dict[str, Any] = {"error": relative_error(gradient, reference.lm_head.weight.grad)}
    for strategy in ("fsdp2", "fsdp1", "tp", "ddp"):
        with pytest.raises(liger_dist.LigerDistError) as caught:
            liger_dist.wrap(sharded(), strategy)
        results[f"{strategy} once more"] = str(caught.value)
    frozen: Any = make_model("llama").requires_grad_(False)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(frozen, "ddp")
    results["ddp"] = str(caught.value)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_model("llama"), "fsdp1", mesh=(2, 1))
    results["fsdp1"] = str(caught.value)
    results["restored"] = type(frozen.lm_head).__name__
    return results


@pytest.mark.smoke
def test_fp16_with_a_loss_scale_keeps_its_gradient() -> None:
    torch.manual_seed(0)
    T, V, D, items, scale = 256, 8000, 64, 65536, 65536.0
    hidden = torch.randn(T, D, device=compute_device()).half().requires_grad_()
    weight = (0.1 * torch.randn(V, D, device=compute_device())).half().requires_grad_()
    labels = torch.randint(0, V, (T,), device=compute_device())
    loss = liger_dist.linear_cross_entropy(hidden, weight, labels, num_items_in_batch=items)
    assert isinstance(loss, Tensor)
    ours = torch.autograd.grad(loss * scale, (hidden, weight))
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = torch.nn.functional.cross_entropy(leaves[0] @ leaves[1].T, labels, reduction="sum") / items * scale
    for got, want in zip(ours, torch.autograd.grad(truth, leaves), strict=True):
        assert relative_error(got, want) < 2e-3


def test_a_model_with_a_device_map_is_refused() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = make_model("llama")
    add_hook_to_module(model.lm_head, ModelHook())
    with pytest.raises(liger_dist.LigerDistError, match="device_map=None"):
        liger_dist.wrap(model)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.device("meta"),
        lambda: default_dtype(torch.bfloat16),
        lambda: torch.inference_mode(),
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["device", "dtype", "inference mode", "autocast"],
)
def test_settings_at_the_time_of_wrapping_change_nothing(setting: Any) -> None:
    _convention_of.cache_clear()
    model = make_model("llama")
    with setting():
        liger_dist.wrap(model)
    _convention_of.cache_clear()
    expected = liger_dist.wrap(make_model("llama"))
    assert str(liger_dist.explain(model)) == str(liger_dist.explain(expected))


@pytest.mark.smoke
def test_a_head_in_another_thread_drops_nothing_silently() -> None:
    model: Any = make_model("llama")
    own = float(model(**make_batch(0)).loss)
    liger_dist.wrap(model)
    computed = model.lm_head.forward

    def in_a_thread(hidden_states: Tensor) -> Tensor:
        logits: list[Tensor] = []
        thread = threading.Thread(target=lambda: logits.append(computed(hidden_states)))
        thread.start()
        thread.join()
        return logits[0]

    model.lm_head.forward = in_a_thread
    with pytest.warns(UserWarning, match="leaves the loss"):
        assert float(model(**make_batch(0)).loss) == pytest.approx(own)
    for options in ({"outputs": ("entropy",)}, {"label_smoothing": 0.1}):
        with pytest.raises(liger_dist.LigerDistError, match=r"was asked of .* but its lm_head was not called"):
            model(**make_batch(0), **options)


def test_a_compiled_whole_graph_is_refused_by_torch_with_a_page_that_says_so() -> None:
    page = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
    assert "fullgraph=True" in page.read_text()
    model = AutoModelForCausalLM.from_config(make_config("llama"))
    liger_dist.wrap(model)
    # What other tests have compiled counts towards a limit, from which on code runs as it is.
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch\.compiler\.disable|fullgraph"):
        torch.compile(model, backend="eager", fullgraph=True)(**{n: t.cpu() for n, t in make_batch(0).items()})
