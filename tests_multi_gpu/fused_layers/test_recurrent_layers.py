"""Recurrent and convolution layers on rows of single documents: which documents a call has, when a layer is computed
again, and what else happens to a model."""

from __future__ import annotations

import copy
import pickle
import random
from functools import partial
from typing import Any, get_args

import on_device
import pytest
import torch
from documents import TOLERANCE, alone, assert_equal, gradients_of, packed, trained, wrapped
from documents import quiet as quiet
from harness import Workers
from models import HYBRIDS, gradient_errors, make_model
from torch import Tensor, nn

import liger_dist
from liger_dist.fused_layers.packed_calls import is_recurrent, packing_objection
from liger_dist.model.document_rows import MOST_PADDING, DocumentRows, Layout, grouped, rounded_up, rows_of
from liger_dist.model.documents import read_documents
from liger_dist.sharding.process_groups import compute_device

FAMILIES = tuple(HYBRIDS)


@pytest.mark.smoke
@pytest.mark.cover("values")
@pytest.mark.parametrize("lengths", [[5, 1, 13, 9], [28], [1, 1, 1, 2], [3] * 24, [2, 60, 1, 1, 30]], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_all_lengths(family: str, lengths: list[int]) -> None:
    batch = packed(lengths)
    want = alone(make_model(family), batch)
    # Rounding of fp32 sums over a long document: 5.1e-6 was seen on one kind of processor.
    tolerance = 2 * TOLERANCE if max(lengths) >= 60 else TOLERANCE
    assert_equal(trained(wrapped(make_model(family)), batch), want, tolerance)


@pytest.mark.cover("values")
@pytest.mark.parametrize("reentrant", [False, True, None])
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "mamba2"])
def test_recomputed_layers_have_the_documents_of_their_call(family: str, reentrant: bool | None) -> None:
    """Also after another call: two calls before one backward, packed in other ways, and one that is not packed."""
    batches = [packed([5, 1, 13, 9]), packed([20, 8], seed=1), packed([28], seed=2)]
    want = alone(make_model(family), *batches)
    model: Any = make_model(family)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    assert_equal(trained(wrapped(model), *batches), want)


def test_a_loss_of_hidden_states_recomputes_with_the_documents_of_its_call() -> None:
    """Its backward does not begin at the decoder's last output."""
    batch = packed([5, 1, 13, 9])
    del batch["labels"]
    results = []
    for checkpointing in (False, True):
        model: Any = make_model("qwen3_5_text")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        wrapped(model).train()
        model(**batch, output_hidden_states=True).hidden_states[1].square().sum().backward()
        results.append(([0.0], gradients_of(model)))
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("family", ["qwen3_5_text", "granitemoehybrid"])
def test_lora_on_the_projections_of_recurrent_layers(family: str) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> Any:
        model = get_peft_model(make_model(family), LoraConfig(target_modules="all-linear", r=2))  # type: ignore[arg-type]
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator(parameter.device).manual_seed(len(name)))
        return model.double()

    batch = packed([5, 1, 13, 9])
    assert_equal(trained(wrapped(adapted()), batch), alone(adapted(), batch))


@pytest.mark.parametrize(
    "options", [{"mlp_tile_tokens": 7}, {"fused_loss": False}, {"varlen_attention": False}], ids=str
)
def test_documents_are_apart_with_every_option(options: dict[str, Any]) -> None:
    batch = packed([5, 1, 13, 9])
    want = alone(make_model("qwen3_5_text"), batch)
    assert_equal(trained(wrapped(make_model("qwen3_5_text"), **options), batch), want)


@pytest.mark.nightly
def test_documents_are_apart_in_compiled_layers() -> None:
    """Also those of other lengths, in the graphs of the first."""
    batches = [packed([5, 1, 13, 9]), packed([20, 8], seed=1)]
    want = alone(make_model("lfm2"), *batches)
    model: Any = make_model("lfm2")
    liger_dist.compile_layers(model)
    assert_equal(trained(wrapped(model), *batches), want)


def test_evaluation_without_labels_and_caches() -> None:
    model: Any = make_model("qwen3_5_text").eval()
    batch = packed([5, 1, 13, 9])
    del batch["labels"]
    with torch.no_grad():
        parts = batch["input_ids"].split([5, 1, 13, 9], 1)
        want = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
        padded = on_device.ones(2, 9, dtype=torch.long)
        padded[0, :4] = 0
        prompts = {"input_ids": batch["input_ids"][0, :18].view(2, 9), "attention_mask": padded}
        generated = model.generate(**prompts, max_new_tokens=5, do_sample=False)
        wrapped(model)
        assert torch.allclose(model(**batch).logits, want, atol=1e-5)
        assert torch.equal(model.generate(**prompts, max_new_tokens=5, do_sample=False), generated)
        with pytest.raises(liger_dist.LigerDistError, match=r"and use_cache, .* pass use_cache=False"):
            model(**batch, use_cache=True)


def test_unpacked_rows_run_the_models_own_code() -> None:
    """A mask of ones makes a row one text, as in transformers; so do positions that restart nowhere."""
    rows: dict[str, dict[str, Any]] = {
        "a 2-D mask": {**packed([5, 7]), "attention_mask": on_device.ones(1, 12, dtype=torch.long)},
        "positions": packed([12]) | {"position_ids": on_device.arange(3, 15)[None]},
        "one length": packed([12])
        | {"cu_seq_lens_q": on_device.tensor([0, 12]), "cu_seq_lens_k": on_device.tensor([0, 12])},
        "padding after the text": {
            **{name: value.repeat(2, 1) for name, value in packed([12]).items()},
            "attention_mask": (on_device.arange(12) < on_device.tensor([[12], [7]])).long(),
        },
    }
    for name, row in rows.items():
        own, model = make_model("lfm2"), wrapped(make_model("lfm2"), layer_kernels=False, varlen_attention=False)
        got, want = trained(model, row), trained(own, row)
        assert got[0] == pytest.approx(want[0], abs=1e-6), name


def test_unwrap_restores_the_layers() -> None:
    model: Any = make_model("mamba2")
    before = [type(module) for module in model.modules()]
    batch = packed([5, 7])
    leaking, _ = trained(model, batch)
    separated, _ = trained(wrapped(model), batch)
    liger_dist.unwrap(model)
    assert trained(model, batch)[0] == pytest.approx(leaking, rel=1e-6)
    assert abs(separated[0] - leaking[0]) > 1e-3
    assert [type(module) for module in model.modules()] == before
    assert not any(module._forward_hooks for module in model.modules())


def test_verify_compares_packed_documents_with_each_alone() -> None:
    batch = packed([5, 1, 13, 9])
    ends = on_device.tensor([0, 5, 6, 19, 28], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 13, "max_length_k": 13}
    padded = on_device.ones(2, 9, dtype=torch.long)
    padded[0, :4] = 0
    ids = batch["input_ids"][0, :18].view(2, 9)
    of_texts = {"input_ids": ids, "labels": ids.masked_fill(padded == 0, -100), "attention_mask": padded}
    model = wrapped(make_model("qwen3_5_text"))
    for rows in (batch, batch | lengths, of_texts):
        verification = liger_dist.verify(model, rows)
        assert verification.ok, verification
        # The state of the model's own layers runs over padding before a text.
        assert len(verification.kept) == ("attention_mask" in rows)
    # What the model's own code does with a row of two documents is a problem of any wrapped model.
    leaking = wrapped(make_model("qwen3_5_text"), varlen_attention=False)
    for module in leaking.modules():
        if type(module).__name__ == "Qwen3_5GatedDeltaNet":
            module.forward = partial(super(type(module), module).forward)
    problems = liger_dist.verify(leaking, batch).problems
    assert any("the model as it was before wrap" in problem for problem in problems)


def test_copies_and_pickles_of_a_wrapped_model_keep_documents_apart() -> None:
    batch = packed([5, 1, 13, 9])
    want = alone(make_model("lfm2"), batch)
    model = wrapped(make_model("lfm2"))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert_equal(trained(other, batch), want)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("family", ["falcon_h1", "lfm2"])
def test_a_copied_layer_keeps_documents_apart(family: str, checkpointed: bool) -> None:
    """As PEFT's ``modules_to_save`` copies one, of a model that is wrapped already."""
    batch = packed([5, 1, 13, 9])
    models: list[Any] = [make_model(family), make_model(family)]
    wrapped(models[1])
    for model in models:
        model.model.layers[1 if family == "falcon_h1" else 0] = copy.deepcopy(model.model.layers[0])
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(trained(models[1], batch), alone(models[0], batch))


def test_an_exchanged_layer_that_would_mix_documents_is_refused() -> None:
    model: Any = wrapped(make_model("falcon_h1"))
    model.model.layers[0].mamba = copy.deepcopy(make_model("falcon_h1").model.layers[0].mamba)  # type: ignore[union-attr, operator, index]
    with pytest.raises(liger_dist.LigerDistError, match=r"layers\.0\.mamba has been exchanged since liger_dist.wrap"):
        model(**packed([5, 1, 13, 9]))


def test_explain_shows_how_documents_are_kept_apart() -> None:
    model = wrapped(make_model("qwen3_5_text"))
    assert "packed documents      Qwen3_5GatedDeltaNet: one row per document" in str(liger_dist.explain(model))
    assert is_recurrent(make_model("qwen3_5_text"))
    assert packing_objection(make_model("qwen3_5_text")) is None
    assert not is_recurrent(make_model("llama"))
    assert liger_dist.explain(wrapped(make_model("llama"))).packing == "attention: by their lengths"


def test_projections_sharded_one_by_one_are_called_as_often_on_every_rank(workers_2: Workers) -> None:
    """By other code, after wrap: each call all-gathers its weight."""
    for got, want in workers_2.run(of_ranks):
        assert_equal(got, want)


def of_ranks() -> tuple[Any, Any]:
    """This rank's loss and gradients of all ranks, whose documents have one length and several."""
    import torch.distributed as dist
    from models import full
    from torch.distributed.fsdp import fully_shard

    batches = [packed([9, 9]), packed([1, 2, 4, 8, 16, 32], seed=1)]
    losses, gradients = alone(make_model("qwen3_5_text"), *batches)
    want = [losses[dist.get_rank()]], {name: gradient / 2 for name, gradient in gradients.items()}
    model: Any = liger_dist.wrap(make_model("qwen3_5_text"), "auto")
    for layer in model.model.layers:
        for part in (*getattr(layer, "linear_attn", nn.Module()).children(), layer.mlp):
            if isinstance(part, nn.Linear):
                fully_shard(part)
        fully_shard(layer)
    fully_shard(model)
    loss = model(**batches[dist.get_rank()]).loss
    loss.backward()
    return ([float(loss.detach())], {name: full(p.grad).double() for name, p in model.named_parameters()}), want


def test_distillation_of_packed_documents() -> None:
    batch = packed([5, 1, 13, 9])
    pairs: list[tuple[Any, Any]] = [(make_model("lfm2"), make_model("lfm2", seed=7).eval()) for _ in range(2)]
    model, teacher = pairs[0]
    loss = liger_dist.distillation_loss(wrapped(model), wrapped(teacher), **batch).loss
    model, teacher = pairs[1]
    total, count = 0.0, int((batch["labels"] != -100).sum())
    wrapped(model)
    wrapped(teacher)
    for ids, labels in zip(
        batch["input_ids"].split([5, 1, 13, 9], 1), batch["labels"].split([5, 1, 13, 9], 1), strict=True
    ):
        valid = int((labels != -100).sum())
        if valid:
            one = liger_dist.distillation_loss(model, teacher, input_ids=ids, labels=labels).loss
            total += float(one.detach()) * valid / count
    assert float(loss.detach()) == pytest.approx(total, abs=TOLERANCE)


def documents_of(named: dict[str, Any]) -> DocumentRows | None:
    documents = read_documents(named)
    assert documents is not None
    return rows_of(documents)


def places(**named: Any) -> list[list[int]] | None:
    documents = documents_of({"input_ids": on_device.zeros(2, 6, dtype=torch.long), **named})
    if documents is None:
        return None
    tokens = on_device.arange(12).view(2, 6)
    calls = documents.calls(tokens.device, "one call")
    rows = calls.into_rows(tokens)[0]
    return [row[:length].tolist() for row, length in zip(rows, sorted(documents.lengths, reverse=True), strict=True)]


@pytest.mark.smoke
def test_the_documents_of_a_call() -> None:
    restarting = on_device.tensor([[0, 1, 2, 3, 0, 1]])
    first = [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5], [10, 11]]
    assert places(position_ids=restarting) == places(position_ids=restarting.expand(2, -1)) == first
    assert places(position_ids=torch.stack([restarting[0], on_device.arange(6)])) == [[6, 7, 8, 9, 10, 11], *first[::2]]
    assert places(position_ids=restarting.expand(4, 2, -1)) == first
    assert places(position_ids=restarting, attention_mask=on_device.ones(2, 6)) is None
    assert places(position_ids=on_device.arange(6)[None]) is None
    assert places(seq_idx=on_device.tensor([[0, 0, 0, 0, 1, 1]])) == first
    assert places(cu_seq_lens_q=on_device.tensor([0, 4, 6, 6, 10, 12])) == first
    # A length that goes on in the next row ends there.
    assert places(cu_seq_lens_q=on_device.tensor([0, 4, 10, 12])) == first
    assert places(cu_seq_lens_q=on_device.tensor([0, 6, 12, 12])) is None
    assert places(cu_seq_lens_q=on_device.tensor([0, 4, 12])) == [[6, 7, 8, 9, 10, 11], [0, 1, 2, 3], [4, 5]]
    assert places(seq_idx=on_device.tensor([0, 0, 0, 0, 1, 1])) == first
    mask = on_device.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]])
    assert places(attention_mask=mask) == [[2, 3, 4, 5], [6, 7, 9]]
    assert places(attention_mask=mask, position_ids=restarting) == [[2, 3, 4, 5], [6, 7, 9]]
    assert places(attention_mask=mask.flip(1)[:1].expand(2, -1)) is None
    assert places(attention_mask=on_device.zeros(2, 6)) is None
    with pytest.raises(liger_dist.LigerDistError, match="ends at 11 but the micro-batch has 12 tokens"):
        places(cu_seq_lens_q=on_device.tensor([0, 4, 6, 11]))
    # The three positions of images may jump within a text, and do not go back.
    image = on_device.tensor([[0, 1, 1, 1, 3, 4], [0, 1, 1, 2, 3, 4], [0, 1, 2, 1, 3, 4]])[:, None]
    assert places(position_ids=image.expand(3, 2, -1)) is None
    assert places(position_ids=restarting.expand(3, 2, -1)) == first


CONTRADICTIONS: dict[str, dict[str, Any]] = {
    "seq_idx, cu_seq_lens_q": {"seq_idx": [[0, 0, 0, 0, 1, 1]], "cu_seq_lens_q": [0, 3, 6, 9, 12]},
    "cu_seq_lens_q, position_ids": {"cu_seq_lens_q": [0, 3, 6, 9, 12], "position_ids": [[0, 1, 2, 3, 0, 1]]},
    "cu_seq_lens_q of whole rows, position_ids": {"cu_seq_lens_q": [0, 6, 12], "position_ids": [[0, 1, 2, 3, 0, 1]]},
    "seq_idx, position_ids": {"seq_idx": [[0, 0, 0, 1, 1, 1]], "position_ids": [[0, 1, 2, 3, 0, 1]]},
    "attention_mask, position_ids": {"attention_mask": [[1, 1, 2, 2, 2, 0]] * 2, "position_ids": [[0, 1, 2, 0, 1, 0]]},
    "seq_idx, padding": {"seq_idx": [[0, 0, 0, 0, 1, 1]], "attention_mask": [[0, 1, 1, 1, 1, 1]] * 2},
    "cu_seq_lens_q, padding": {"cu_seq_lens_q": [0, 3, 6, 9, 12], "attention_mask": [[1, 1, 1, 1, 1, 0]] * 2},
}


@pytest.mark.smoke
@pytest.mark.parametrize("named", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused(named: dict[str, Any]) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=r"same documents|beside a 2-D attention_mask"):
        places(**{name: on_device.tensor(value) for name, value in named.items()})


def test_what_agrees_is_taken() -> None:
    """Positions that run on beside lengths, or are 0 in padding; lengths that count the padding of a mask."""
    first = [[0, 1, 2, 3], [6, 7, 8, 9], [4, 5], [10, 11]]
    lengths = on_device.tensor([0, 4, 6, 10, 12])
    assert places(cu_seq_lens_q=lengths, position_ids=on_device.arange(6)[None]) == first
    positions = on_device.tensor([[0, 1, 2, 3, 0, 0]])
    assert places(cu_seq_lens_q=lengths, position_ids=positions) == first
    assert places(cu_seq_lens_q=lengths, attention_mask=on_device.tensor([[1, 1, 1, 1, 0, 0]] * 2)) is None
    assert places(cu_seq_lens_q=lengths, attention_mask=on_device.ones(2, 6)) == first
    # As hosts number documents; padding is one more.
    numbers = on_device.tensor([[1, 1, 1, 1, 2, 0], [1, 1, 1, 1, 2, 2]])
    positions = on_device.tensor([[0, 1, 2, 3, 0, 0], [0, 1, 2, 3, 0, 1]])
    assert places(attention_mask=numbers, position_ids=positions) == [*first[:2], [10, 11], [4], [5]]


def test_tensors_that_are_written_to_are_read_again() -> None:
    """Without a version to show it: in inference mode, by numpy."""
    model = wrapped(make_model("mamba2")).eval()
    one, other = packed([5, 7]), packed([9, 3])
    ids = one["input_ids"]
    with torch.inference_mode():
        want = model(input_ids=ids, position_ids=other["position_ids"].clone(), use_cache=False).logits
        positions = one["position_ids"].clone()
        model(input_ids=ids, position_ids=positions, use_cache=False)
        positions.copy_(other["position_ids"])
        assert torch.equal(model(input_ids=ids, position_ids=positions, use_cache=False).logits, want)
    if ids.is_cuda:
        return
    array = one["position_ids"].numpy().copy()
    positions = torch.from_numpy(array)
    model(input_ids=ids, position_ids=positions, use_cache=False)
    array[:] = other["position_ids"].numpy()
    assert torch.equal(model(input_ids=ids, position_ids=positions, use_cache=False).logits, want)


@pytest.mark.smoke
def test_what_would_leak_is_refused() -> None:
    """A call of the decoder alone, and a recomputation that does not know its call."""
    batch = packed([5, 7])
    model: Any = make_model("falcon_h1")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seen: list[Tensor] = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output[0]))
    wrapped(model).train()
    del batch["labels"]
    with pytest.raises(liger_dist.LigerDistError, match="FalconH1Model was called by itself with packed documents"):
        model.model(**batch)
    for valid in ([1] * 10 + [0] * 2, [0] * 2 + [1] * 10):
        padded = {"input_ids": batch["input_ids"], "attention_mask": on_device.tensor([valid])}
        with pytest.raises(liger_dist.LigerDistError, match=r"seq_idx separates documents .* beside a 2-D"):
            model(**padded, seq_idx=(batch["position_ids"] == 0).cumsum(1))
    model(**batch)
    with pytest.raises(liger_dist.LigerDistError, match="did not pass the decoder's outputs"):
        seen[-1].square().sum().backward()


def test_layers_shared_with_another_wrapped_model_stay_its_own() -> None:
    batch = packed([5, 7])
    first, second = make_model("lfm2"), make_model("lfm2", seed=5)
    second.model = first.model
    want = alone(make_model("lfm2"), batch)
    wrapped(first)
    wrapped(second, layer_kernels=False)
    assert_equal(trained(first, batch), want)
    with pytest.raises(liger_dist.LigerDistError, match="swapped by the wrap of another model"):
        second(**batch)


def test_rows_come_back_in_their_places_and_their_padding_has_no_gradient() -> None:
    generator = random.Random(0)
    for _ in range(30):
        length = generator.randint(2, 40)
        positions = torch.cat([on_device.arange(generator.randint(1, 9)) for _ in range(length)])[: 2 * length]
        batch = {"input_ids": positions.new_zeros(2, length), "position_ids": positions.view(2, length)}
        documents = documents_of(batch)
        if documents is None:
            continue
        x = on_device.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
        for layout in get_args(Layout):
            calls = documents.calls(x.device, layout)
            rows = calls.into_rows(x)
            assert [tuple(row.shape[:2]) for row in rows] == calls.shapes
            y = calls.from_rows(rows, (2, length))
            assert torch.equal(y, x)
            upstream = torch.randn_like(y)
            assert torch.equal(torch.autograd.grad(y, x, upstream)[0], upstream)


def test_calls_are_few_and_their_padding_is_bounded() -> None:
    generator = random.Random(0)
    for _ in range(200):
        most = generator.choice([1, 8, 100, 3000])
        lengths = [generator.randint(1, most) for _ in range(generator.randint(1, 60))]
        calls = grouped(lengths)
        assert sum(rows for rows, _ in calls) == len(lengths)
        assert sum(rows * length for rows, length in calls) <= MOST_PADDING * sum(lengths)
        ordered = iter(sorted(lengths, reverse=True))
        assert all(next(ordered) <= length for rows, length in calls for _ in range(rows))
    assert grouped([700] * 12) == [(12, 704)]
    assert len(grouped([644, 812, 591, 730, 705, 688, 1010, 402, 777, 653, 720, 460])) <= 3
    assert len({rounded_up(length) for length in range(1, 100_000)}) < 240


class Unread(Tensor):
    """Raises where the host would wait for its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__bool__, Tensor.__int__, Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero):
            raise AssertionError(f"the host reads a tensor: {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_call_reads_only_what_may_separate_documents() -> None:
    ids, positions = on_device.zeros(2, 12, dtype=torch.long), on_device.arange(12).repeat(2, 1)
    unread = ids.as_subclass(Unread)
    read_documents({"input_ids": unread, "labels": unread, "attention_mask": unread})
    for name, value in (
        ("position_ids", positions),
        ("cu_seq_lens_q", on_device.tensor([0, 12, 24])),
        ("seq_idx", ids),
    ):
        with pytest.raises(AssertionError, match="the host reads"):
            read_documents({"input_ids": ids, name: value.as_subclass(Unread)})


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("way", ["lengths", "seq_idx", "both"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_one_document_each_by_every_way_of_saying_so(family: str, rows: int, way: str) -> None:
    """A packed loader has such batches as well; without other packages the layers refuse these keywords."""
    model: Any = make_model(family, dtype=torch.float32)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, "none")
    ids = on_device.randint(1, 100, (rows, 9), generator=torch.Generator().manual_seed(0)).to(compute_device())
    ends = on_device.arange(0, 9 * rows + 1, 9, dtype=torch.int32)
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
    numbers = {"seq_idx": torch.zeros(rows, 9, dtype=torch.int32, device=ids.device)}
    given = {"lengths": lengths, "seq_idx": numbers, "both": lengths | numbers}[way]
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(9, device=ids.device).expand(rows, -1)}
    model(**batch, **given).loss.backward()
    reference(**batch, use_cache=False).loss.backward()
    errors = gradient_errors(model, reference)
    assert max(errors.values()) < 1e-4, errors


def test_lengths_after_another_attention_is_set() -> None:
    """ "liger_dist" attention reads them; to the model's own, positions that restart say the same."""
    batch = packed([5, 7])
    ends = on_device.tensor([0, 5, 12]).int()
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    given = {name: batch[name] for name in ("input_ids", "labels")} | lengths
    model: Any = wrapped(make_model("qwen3_5_text"))
    expected, _ = alone(make_model("qwen3_5_text"), batch)
    run_on = {"position_ids": on_device.arange(12)[None]}
    for more in ({}, run_on):
        assert float(model(**given, **more).loss) == pytest.approx(expected[0], rel=1e-5)
    model.set_attn_implementation("sdpa")
    assert float(model(**given).loss) == pytest.approx(expected[0], rel=1e-5)
    with pytest.raises(liger_dist.LigerDistError, match="reads position_ids, which do not restart"):
        model(**given, **run_on)
    model.set_attn_implementation("liger_dist")
    assert float(model(**given).loss) == pytest.approx(expected[0], rel=1e-5)
    model = wrapped(make_model("llama"))
    model.set_attn_implementation("flex_attention")
    with pytest.raises(liger_dist.LigerDistError, match="set to 'flex_attention' after liger_dist"):
        model(**given)
