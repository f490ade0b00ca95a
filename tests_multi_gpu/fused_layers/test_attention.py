"""Attention without a dense mask: equal to documents one by one and to the unwrapped model, selected where it may be,
and nothing changes for other models."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import on_device
import pytest
import torch
import torch.nn.functional as F
from allocations import LargestTensor
from models import documents_of, gradient_errors, make_batch, make_model, true_loss_sum
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device

TOLERANCE = 1e-6
"""of fp64 models, whose norms round to fp32 inside"""
SHAPE = {
    "vocab_size": 101,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
SHARED_KEYS = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "global_head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 101,
    "pad_token_id": 0,
}
"""the last two layers of Gemma 4 with the keys and values of those before"""
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4},
    "qwen3": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "llama4_text": {
        "attention_chunk_size": 5,
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 2,
        "intermediate_size_mlp": 24,
    },
    "gpt_neox": {},
    "phi3": {"sliding_window": 4, "pad_token_id": 0},
    "gemma4_text": SHARED_KEYS,
}
WINDOWED = {family: options for family, options in WINDOWED.items() if family in CONFIG_MAPPING}
"""without those that the installed transformers does not have"""


def model_of(family: str, attention: str = "sdpa", **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **WINDOWED.get(family, {}), **options})
    config._attn_implementation = attention
    return AutoModelForCausalLM.from_config(config).to(compute_device(), torch.float64)


def pair(family: str, **options: Any) -> tuple[Any, Any]:
    """A wrapped model, and the same unwrapped."""
    model, reference = model_of(family, **options), model_of(family, **options)
    liger_dist.wrap(model, "none")
    assert liger_dist.explain(model).attention.startswith("liger_dist")
    return model, reference


def assert_equal_gradients(model: Any, reference: Any, batch: dict[str, Any]) -> None:
    loss = model(**batch).loss
    loss.backward()
    total, count = true_loss_sum(reference, batch)
    (total / count).backward()
    assert float(loss) == pytest.approx(float(total / count), rel=TOLERANCE)
    errors = gradient_errors(model, reference)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.cover("values")
@pytest.mark.parametrize("rows", ["packed", "packed, by lengths", "padded"])
@pytest.mark.parametrize("family", WINDOWED)
def test_windows_chunks_and_fewer_key_heads(family: str, rows: str) -> None:
    model, reference = pair(family)
    batch = make_batch(0, rows=rows)
    if family == "llama4_text" and rows != "padded" and mixes_documents(reference, batch):
        pytest.skip("this transformers computes packed documents of Llama 4 in another way than each by itself")
    assert_equal_gradients(model, reference, batch)


def mixes_documents(model: Any, batch: dict[str, Any]) -> bool:
    """True if the unwrapped model gives packed documents other logits than each by itself."""
    packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    alone = [model(input_ids=document["input_ids"], use_cache=False).logits[0] for document in documents_of(batch)]
    return relative_error(packed.flatten(0, 1), torch.cat(alone)) > TOLERANCE


@pytest.mark.cover("values")
@pytest.mark.skipif("gemma4_text" not in WINDOWED, reason="this transformers has no Gemma 4")
@pytest.mark.parametrize("fused_loss", [True, False])
@pytest.mark.parametrize("rows", ["texts", "packed", "padded"])
def test_layers_with_shared_keys_get_the_rows_of_the_mask_of_their_tokens(rows: str, fused_loss: bool) -> None:
    """With ``logits_to_keep`` those layers compute the last tokens alone; without it, all of them."""
    model, reference = (model_of("gemma4_text", use_cache=False) for _ in range(2))
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(fused_loss=fused_loss))
    assert liger_dist.explain(model).attention.startswith("liger_dist")
    batch = make_batch(0, rows=rows)
    assert_equal_gradients(model, reference, batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    valid = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    for kept, use_cache in product((0, 1, 2, 6, torch.tensor([3, 7], device=compute_device())), (False, True)):
        logits = model(**inputs, logits_to_keep=kept, use_cache=use_cache).logits
        # With a cache transformers takes packed documents for one text.
        is_cached = use_cache and rows != "packed"
        expected = reference(**inputs, logits_to_keep=kept, use_cache=is_cached).logits
        assert logits.shape == expected.shape
        counts = valid[:, -kept:] if isinstance(kept, int) else valid[:, kept]
        assert relative_error(logits[counts], expected[counts]) < TOLERANCE, (kept, use_cache)


@pytest.mark.smoke
@pytest.mark.skipif("gemma4_text" not in WINDOWED, reason="this transformers has no Gemma 4")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("rows", ["texts", "padded"])
def test_generation_with_shared_keys(rows: str, cache: str | None) -> None:
    model, reference = pair("gemma4_text")
    inputs = {name: value for name, value in make_batch(0, rows=rows).items() if name != "labels"}
    options = {} if cache is None else {"cache_implementation": cache, "disable_compile": True}
    generated = [one.generate(**inputs, max_new_tokens=8, do_sample=False, **options) for one in (model, reference)]
    assert torch.equal(*generated)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_lengths_in_a_buffer_that_a_second_call_rewrites(trains: bool, use_reentrant: bool) -> None:
    """The backward of the first call computes its layers again, with the documents of the first call."""
    model, reference = pair("llama")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    ids = on_device.randint(1, 100, (1, 12), generator=torch.Generator().manual_seed(0))
    ends = on_device.tensor([0, 5, 12], dtype=torch.int32)
    buffer = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 12, "max_length_k": 12}
    losses = []
    for lengths, with_gradients in (([0, 5, 12], True), ([0, 8, 12], trains)):
        ends.copy_(on_device.tensor(lengths, dtype=torch.int32))
        positions = torch.cat([on_device.arange(lengths[1]), on_device.arange(12 - lengths[1])])[None]
        with torch.set_grad_enabled(with_gradients):
            losses.append(model(input_ids=ids, labels=ids, **buffer).loss)
            expected = reference(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
        assert float(losses[-1].detach()) == pytest.approx(float(expected.detach()), rel=TOLERANCE)
        if with_gradients:
            expected.backward()
    torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()
    errors = gradient_errors(model, reference)
    assert max(errors.values()) < TOLERANCE, errors


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("rows", ["packed", "packed, by lengths", "padded"])
def test_under_activation_checkpointing(rows: str, use_reentrant: bool) -> None:
    model, reference = pair("mistral")
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    assert_equal_gradients(model, reference, make_batch(0, rows=rows))


def test_many_micro_batches_of_other_lengths() -> None:
    model, reference = pair("mistral")
    for seed in range(5):
        assert_equal_gradients(model, reference, make_batch(0, seed=seed, rows="packed"))
        model.zero_grad()
        reference.zero_grad()


def test_compiled_layers_are_not_compiled_again_for_other_lengths() -> None:
    model, reference = make_model("llama"), make_model("llama")
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.compile(backend="aot_eager")
    liger_dist.wrap(model, "none")
    torch._dynamo.utils.counters.clear()
    for seed in range(4):
        assert_equal_gradients(model, reference, make_batch(0, seed=seed, rows="packed"))
        model.zero_grad()
        reference.zero_grad()
        frames = torch._dynamo.utils.counters["frames"]["total"]
        if seed == 1:
            compiled = frames
    assert frames == compiled


def test_no_tensor_grows_with_the_square_of_a_row() -> None:
    length = 2048
    positions = on_device.arange(length)[None] % 16
    padding = (on_device.arange(length) < length // 2)[None].long()
    ids = on_device.arange(length)[None] % 101
    # The reference on CPUs has a mask for each document that is longer than its window.
    padded = {"attention_mask": padding, "labels": ids.masked_fill(padding == 0, -100)}
    for family, given in (("mistral", {"position_ids": positions}), ("llama", padded)):
        model, _ = pair(family, max_position_embeddings=length)
        # In fp32 on GPUs scaled_dot_product_attention keeps the scores of fewer key heads.
        model.to(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
        batch = {"input_ids": ids, "labels": ids, **given}
        with LargestTensor() as largest:
            model(**{name: value.to(compute_device()) for name, value in batch.items()}).loss.backward()
        assert largest.bytes < length * length


def test_padding_on_the_left_predicts_as_with_a_dense_mask() -> None:
    """The first token of a text may have a label: its prediction comes from padding, whose attention is zero."""
    model, reference = pair("mistral")
    batch = make_batch(0, rows="padded")
    batch["labels"][0, 3] = batch["input_ids"][0, 3]
    assert_equal_gradients(model, reference, batch)


def test_padding_inside_a_text_keeps_the_dense_mask() -> None:
    model, reference = pair("mistral")
    batch = make_batch(0, rows="padded")
    batch["attention_mask"][2, 4:6] = 0
    batch["labels"][2, 4:7] = -100
    assert_equal_gradients(model, reference, batch)


def test_a_4d_mask_is_used_as_it_is() -> None:
    model, reference = pair("llama")
    batch = make_batch(0)
    mask = torch.ones(3, 1, 12, 12, dtype=torch.bool, device=compute_device()).tril()
    mask[:, :, 6:, :3] = False
    assert_equal_gradients(model, reference, {**batch, "attention_mask": mask})


def test_positions_that_restart_under_a_mask_are_warned_of() -> None:
    model, reference = pair("llama")
    batch = make_batch(0, rows="packed")
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    with pytest.warns(UserWarning, match="position_ids restart inside a row"):
        loss = model(**batch).loss
    # transformers takes each row for one text, and so does this.
    assert float(loss) == pytest.approx(float(reference(**batch, use_cache=False).loss), rel=1e-5)
    padded = make_batch(0, rows="padded")
    positions = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**padded, position_ids=positions)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_lengths_alone_and_beside_a_mask_without_padding(family: str, with_mask: bool) -> None:
    """Positions run on, as in a model without them: documents are shifted against their own run, and stay apart."""
    model, reference = pair(family)
    batch = make_batch(0, rows="packed, by lengths")
    positions = torch.arange(12, device=compute_device()).expand(3, -1)
    ends = batch["cu_seq_lens_q"]
    total = 0.0
    for start, end in pairwise(ends.tolist()):
        tokens = {name: batch[name].flatten()[None, start:end] for name in ("input_ids", "labels")}
        shifted = positions.flatten()[None, start:end]
        logits = reference(input_ids=tokens["input_ids"], position_ids=shifted, use_cache=False).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, tokens["labels"][0, 1:], reduction="sum")  # type: ignore[assignment]
    loss = total / (batch["labels"] != -100).sum()
    loss.backward()  # type: ignore[attr-defined]
    given: dict[str, Any] = {**batch, "position_ids": positions}
    if with_mask:
        given["attention_mask"] = torch.ones_like(batch["input_ids"])
    model(**given).loss.backward()
    assert max(gradient_errors(model, reference).values()) < TOLERANCE


def test_lengths_in_a_buffer_that_is_used_again() -> None:
    model, _ = pair("llama")
    batch = make_batch(0, rows="packed, by lengths")
    buffer = batch["cu_seq_lens_q"].clone()
    del batch["position_ids"]
    batch["labels"][:] = batch["input_ids"]
    losses = []
    for ends in (batch["cu_seq_lens_q"], on_device.tensor([0, 12, 24, 30, 36]).int().to(buffer.device)):
        padded = torch.cat([ends, ends.new_full((max(0, len(buffer) - len(ends)),), 36)])
        buffer.copy_(padded)
        reused = model(**{**batch, "cu_seq_lens_q": buffer}).loss
        assert torch.equal(reused, model(**{**batch, "cu_seq_lens_q": padded}).loss)
        losses.append(float(reused))
    assert losses[0] != losses[1]


def test_lengths_that_do_not_fit_are_refused() -> None:
    model, _ = pair("llama")
    batch = make_batch(0, rows="packed, by lengths")
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"][:-1]
    del batch["position_ids"]
    with pytest.raises(liger_dist.LigerDistError, match=r"cu_seq_lens_q ends at \d+ but the micro-batch has 36 tokens"):
        model(**batch)


@pytest.mark.smoke
def test_attention_weights_come_from_the_eager_function() -> None:
    model, reference = model_of("mistral", "eager"), model_of("mistral", "eager")
    liger_dist.wrap(model, "none")
    for rows in ("texts", "packed"):
        batch = {k: v for k, v in make_batch(0, rows=rows).items() if k != "labels"}
        got = model(**batch, output_attentions=True, use_cache=False).attentions
        want = reference(**batch, output_attentions=True, use_cache=False).attentions
        assert len(got) == len(want) == 2
        for ours, own in zip(got, want, strict=True):
            torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("cache", ["dynamic", "static", None])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_generation_is_equal_token_by_token(family: str, cache: str | None) -> None:
    model, reference = pair(family)
    model.eval()
    reference.eval()
    batch = make_batch(0, rows="padded")
    mask = batch["attention_mask"].sort(1).values
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": cache} if cache else {"use_cache": False}
    texts = [m.generate(batch["input_ids"], attention_mask=mask, **options) for m in (model, reference)]
    assert texts[0].shape[1] > 12
    assert torch.equal(*texts)


def test_evaluation_and_scoring_without_labels() -> None:
    model, reference = pair("mistral")
    model.eval()
    for rows in ("texts", "packed", "padded"):
        batch = make_batch(0, rows=rows)
        kept = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        with torch.no_grad():
            got, want = (m(**inputs, use_cache=False).logits[kept] for m in (model, reference))
        torch.testing.assert_close(got, want)


def test_under_autocast_and_in_bf16() -> None:
    """No worse than twice the error of the dense mask in bf16."""
    batch = make_batch(0, rows="packed")
    truth = model_of("mistral")
    true_loss, count = true_loss_sum(truth, batch)
    (true_loss / count).backward()
    for casts in (False, True):
        errors = []
        for varlen in (True, False):
            model = model_of("mistral").to(torch.float32 if casts else torch.bfloat16)
            liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(varlen_attention=varlen))
            with torch.autocast(compute_device().type, dtype=torch.bfloat16, enabled=casts):
                loss = model(**batch).loss
            loss.backward()
            pairs = zip(model.parameters(), truth.parameters(), strict=True)
            errors.append(sum(float((own.grad.double() - true.grad).square().sum()) for own, true in pairs) ** 0.5)
        assert errors[0] <= 2 * errors[1]


def test_another_function_for_sdpa_computes_every_call() -> None:
    """DeepSpeed's sequence parallelism replaces that entry."""
    model, _ = pair("llama")
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    masks = []

    def other(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        masks.append(attention_mask)
        return own(module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = other
    try:
        for rows in ("texts", "packed", "packed, by lengths", "padded"):
            model(**make_batch(0, rows=rows))
        late = model_of("llama")
        liger_dist.wrap(late, "none")
        assert "has replaced" in liger_dist.explain(late).attention
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is own
    assert len(masks) == 8
    assert all(mask is None or isinstance(mask, Tensor) for mask in masks)


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma2", {"attention": "eager"}, "soft-capped"),
        ("llama", {"attention_dropout": 0.1}, r"dropout \(attention_dropout\)"),
        ("deepseek_v3", {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "kv_lora_rank": 8}, "head sizes"),
        ("llama", {"attention": "flex_attention"}, "it is 'flex_attention'"),
        ("bloom", {"n_head": 4, "attention": "eager"}, "AttentionInterface|tensors"),
    ],
)
def test_other_attention_is_kept(family: str, options: dict[str, Any], reason: str) -> None:
    model = model_of(family, **options)
    before = model.config
    liger_dist.wrap(model, "none")
    assert model.config is before
    assert re.search(reason, liger_dist.explain(model).attention)


@pytest.mark.parametrize("name", ["cp_size", "sp_size"])
def test_sequences_over_ranks_of_accelerate_keep_their_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.state import AcceleratorState
    from accelerate.utils import ParallelismConfig

    sizes = ParallelismConfig(**{name: 2})
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", sizes)
    model = model_of("llama")
    liger_dist.wrap(model, "none")
    assert liger_dist.explain(model).attention == f"its own: Accelerate's {name} is 2"


def test_switched_off() -> None:
    model = model_of("llama")
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(varlen_attention=False))
    assert model.config._attn_implementation == "sdpa"
    assert "varlen_attention=False" in liger_dist.explain(model).attention


def test_unwrap_restores_the_implementation_and_keeps_the_config() -> None:
    model, reference = pair("llama")
    config = model.config
    assert config._attn_implementation == "liger_dist"
    assert "_attn_implementation" not in config.to_json_string()
    twin = copy.deepcopy(model)
    model.resize_token_embeddings(120)
    config.bos_token_id = 7
    for wrapped in (model, twin):
        liger_dist.unwrap(wrapped)
        assert wrapped.config._attn_implementation == "sdpa"
    assert model.config is config
    assert (config.vocab_size, config.bos_token_id) == (120, 7)
    assert_equal_gradients(liger_dist.wrap(twin, "none"), reference, make_batch(0, rows="packed"))
    twin.set_attn_implementation("eager")
    assert "was set to 'eager' after wrap" in liger_dist.explain(twin).attention
    assert liger_dist.unwrap(twin).config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_models_that_share_a_config() -> None:
    first = model_of("mistral")
    second = type(first)(first.config).double().to(compute_device())
    second.load_state_dict(first.state_dict())
    for model in (first, second):
        liger_dist.wrap(model, "none")
    liger_dist.unwrap(first)
    batch = make_batch(0, rows="packed")
    assert_equal_gradients(second, model_of("mistral"), batch)


@pytest.mark.nightly
def test_a_model_loaded_into_another_program(tmp_path: Path) -> None:
    model, _ = pair("llama")
    torch.save(model.cpu(), tmp_path / "model.pt")
    program = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "ids = torch.arange(12)[None]\n"
        "print(float(model(input_ids=ids, labels=ids).loss.detach()))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "model.pt")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    ids = torch.arange(12, device="cpu")[None]
    assert float(printed) == pytest.approx(float(model(input_ids=ids, labels=ids).loss), rel=1e-6)


def test_a_model_can_be_built_with_it() -> None:
    liger_dist.register_attention()
    model = model_of("mistral", "liger_dist")
    reference = model_of("mistral")
    for rows in ("packed", "packed, by lengths", "padded"):
        batch = make_batch(0, rows=rows)
        total, count = true_loss_sum(reference, batch)
        (total / count).backward()
        model(**batch, use_cache=False).loss.backward()
        assert max(gradient_errors(model, reference).values()) < 1e-5  # its own loss goes through fp32
        model.zero_grad()
        reference.zero_grad()


def test_a_mask_that_is_wider_than_the_keys_is_cut() -> None:
    """As eager functions do: some decoders of transformers 5.0 make a mask with room for the next token."""
    liger_dist.register_attention()
    query, key, value = on_device.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    mask = on_device.zeros(2, 1, 5, 6, dtype=torch.float64).masked_fill(on_device.ones(5, 6).triu(1).bool(), -torch.inf)
    output, _ = ALL_ATTENTION_FUNCTIONS["liger_dist"](torch.nn.Module(), query, key, value, mask)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[..., :5])
    assert relative_error(output, expected.transpose(1, 2)) < TOLERANCE


WRITES: dict[str, Callable[[Tensor, list[int]], None]] = {
    "in place": lambda ends, new: ends.copy_(torch.tensor(new, device="cpu")),
    "by data": lambda ends, new: ends.data.copy_(torch.tensor(new, device="cpu")),
    "by numpy": lambda ends, new: np.copyto(ends.numpy(), new),
    "by dlpack": lambda ends, new: torch.from_dlpack(ends).data.copy_(torch.tensor(new, device="cpu")),
}


@pytest.mark.parametrize("where", ["the same call", "evaluation between"])
@pytest.mark.parametrize("write", WRITES)
def test_lengths_that_are_rewritten_are_read_anew(write: str, where: str) -> None:
    """A data loader may keep one buffer."""
    model: Any = liger_dist.wrap(make_model("llama", dtype=torch.float32), "none")
    ids = on_device.randint(1, 100, (1, 12), generator=torch.Generator().manual_seed(0)).to(compute_device())
    buffer = torch.tensor([0, 5, 12], dtype=torch.int32, device="cpu")

    def loss(ends: Tensor) -> float:
        lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
        return float(model(input_ids=ids, labels=ids, **lengths).loss)

    expected = [loss(torch.tensor(ends, dtype=torch.int32, device="cpu")) for ends in ([0, 5, 12], [0, 9, 12])]
    assert abs(expected[0] - expected[1]) > 1e-3
    found = [loss(buffer)]
    if where == "evaluation between":
        with torch.no_grad():
            loss(buffer)
    WRITES[write](buffer, [0, 9, 12])
    found.append(loss(buffer))
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("padding", [0, 4])
def test_chunks_shorter_than_a_row_with_a_mask(padding: int) -> None:
    """Llama 4's chunks are no sliding window."""
    from families import build, families

    family = next(one for one in families() if one.mapping == "causal" and one.name == "llama4_text")
    model: Any = build(family).to(compute_device()).double()
    chunk = model.config.attention_chunk_size
    ids = on_device.randint(1, 60, (2, 3 * chunk), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padding:
        mask[0, -padding:] = 0
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    found = []
    for is_wrapped in (False, True):
        one = copy.deepcopy(model)
        one = liger_dist.wrap(one, "none") if is_wrapped else one
        loss = one(**batch, use_cache=False).loss
        loss.backward()
        found.append([float(loss.detach()), *(float(p.grad.norm()) for p in one.parameters() if p.grad is not None)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_causal_attention_has_no_mask_while_a_graph_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dense mask gives the same losses, and takes two thirds of the time more."""
    model = liger_dist.wrap(make_model("llama", dtype=torch.float32), "none").train()
    batch = {name: value for name, value in make_batch(0).items() if name != "attention_mask"}
    masks: list[Any] = []
    attend = F.scaled_dot_product_attention

    def note(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        masks.append(attn_mask)
        return attend(query, key, value, attn_mask, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", note)
    losses = []
    for is_recording in (False, True):
        # As on a GPU, whose graphs cannot be recorded here.
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda found=is_recording: found)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda found=is_recording: found)
        losses.append(float(model(**batch).loss.detach()))
    assert losses[0] == losses[1]
    assert len(masks) == 2 * model.config.num_hidden_layers
    assert masks == [None] * len(masks)
