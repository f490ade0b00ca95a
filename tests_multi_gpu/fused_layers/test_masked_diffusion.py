"""Masked diffusion models: labels that are not shifted, weights 1/t, and attention in both directions within packed
documents, every gradient against the unwrapped model on each document alone in fp64."""

from __future__ import annotations

import copy
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import deepspeed_step, full_gradients
from harness import Workers
from models import VOCAB_SIZE, assert_below, documents_of, make_batch, make_model, relative_errors
from torch import Tensor, nn

import liger_dist
from liger_dist.fused_layers import document_mask
from liger_dist.record import record_of
from liger_dist.sharding.base import Strategy
from liger_dist.sharding.process_groups import compute_device

MASK = 100
"""token id of a masked token"""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MASKED_LM: dict[str, dict[str, Any]] = {
    "eurobert": {"num_key_value_heads": 2},
    "modernbert": SPECIAL | {"local_attention": 4, "global_attn_every_n_layers": 2},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "nomic_bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "head_dim": 8},
}
TAKE_MEANS = ("BertForMaskedLM", "NomicBertForMaskedLM")
"""classes whose losses take no number of items"""


def make_bidirectional(family: str, *, attention: str = "sdpa", dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model whose attention is in both directions: a decoder, as transformers makes one from its config, or a
    masked language model."""
    if family not in MASKED_LM:
        model: Any = make_model(family, dtype=dtype)
        model.config.is_causal = False
    else:
        from transformers import AutoModelForMaskedLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        torch.manual_seed(0)
        config = CONFIG_MAPPING[family](**SIZES, **MASKED_LM[family])
        config.is_causal = False
        model = AutoModelForMaskedLM.from_config(config).to(compute_device(), dtype)
    model.set_attn_implementation(attention)
    return model


def make_noised(rank: int, rows: str) -> dict[str, Any]:
    """Tokens of which some are masked, as labels these, and as weights 1/t of a t for each token's row."""
    batch: dict[str, Any] = make_batch(rank, rows=rows, num_ignored=0)
    generator = torch.Generator().manual_seed(40 + rank)
    ids, t = batch["input_ids"], on_device.rand(len(batch["input_ids"]), 1, generator=generator).clamp(min=0.2)
    is_masked = on_device.rand(*ids.shape, generator=generator) < t
    is_masked &= batch.get("attention_mask", torch.ones_like(ids)) != 0
    weight = (1.0 / t).expand(ids.shape).contiguous()
    return batch | {
        "input_ids": ids.where(~is_masked, MASK),
        "labels": ids.where(is_masked, -100),
        "token_weight": weight,
        "num_items_in_batch": float(ids.numel()),
    }


def given_to(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call: a causal class shifts its labels unless they are ``shift_labels``."""
    shifted = {"shift_labels": batch["labels"]} if "Causal" in type(model).__name__ else {}
    means = {"num_items_in_batch"} if type(model).__name__ in TAKE_MEANS else set()
    return {name: value for name, value in batch.items() if name not in means} | shifted


def true_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """From the logits of each document, or of each text without its padding, alone."""
    weights = {**batch, "labels": batch["token_weight"]}
    parts, of_weights = [batch], [weights]
    if "position_ids" in batch or "attention_mask" in batch:
        parts, of_weights = documents_of(batch), documents_of(weights)
    total: Any = 0.0
    for part, weight in zip(parts, of_weights, strict=True):
        logits = model(input_ids=part["input_ids"]).logits
        each = nn.functional.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="none")
        total = total + (each * weight["labels"].flatten()).sum()
    assert isinstance(total, Tensor)
    is_mean = type(model).__name__ in TAKE_MEANS
    return total / ((batch["labels"] != -100).sum() if is_mean else batch["num_items_in_batch"])


ROWS = ("texts", "packed", "packed, by lengths", "padded")


@pytest.mark.smoke
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", *MASKED_LM])
def test_both_directions_within_documents(family: str, attention: str, rows: str) -> None:
    if family == "bert" and rows == "padded":
        pytest.skip("its positions count padding before a text")
    model = make_bidirectional(family, attention=attention)
    reference, batch = copy.deepcopy(model), make_noised(0, rows)
    truth = true_loss(reference, batch)
    truth.backward()
    wrapped = liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
    loss = wrapped(**given_to(model, batch)).loss
    loss.backward()
    # Eager attention computes its softmax in fp32, and rotary embeddings are fp32: positions of padded texts differ.
    tolerance = 1e-5 if attention == "eager" or family == "qwen3_moe" else 1e-7 if rows == "padded" else 1e-9
    assert abs(float(loss) / float(truth) - 1) < tolerance
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert_below(relative_errors(gradients_of(wrapped), truths), 100 * tolerance)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "eurobert"])
def test_packed_by_lengths(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a dense mask; and a fault in the lengths is seen."""
    model = make_bidirectional(family)
    batch = make_noised(0, "packed")
    truth = true_loss(model, batch)
    wrapped = liger_dist.wrap(model, "none")
    assert str(record_of(wrapped).attention).startswith("liger_dist: packed")
    assert "attention: by their lengths" in str(liger_dist.explain(wrapped))
    monkeypatch.setattr(document_mask.DocumentMask, "dense", lambda _: pytest.fail("a dense mask was made"))
    given = given_to(model, batch)
    assert abs(float(wrapped(**given).loss) / float(truth) - 1) < 1e-9
    of_model = {name: value for name, value in given.items() if name != "token_weight"}
    assert liger_dist.verify(wrapped, of_model).problems == ()
    own = document_mask._of_call
    monkeypatch.setattr(document_mask, "_of_call", lambda *args, is_causal: own(*args))
    assert abs(float(wrapped(**given).loss) / float(truth) - 1) > 1e-3


def test_a_call_in_both_directions_of_a_causal_model() -> None:
    """Of a keyword of transformers for one call: packed documents stay apart."""
    model: Any = make_model("llama")
    batch = make_noised(0, "packed")
    reference = copy.deepcopy(model)
    reference.config.is_causal = False
    truth = true_loss(reference, batch)
    wrapped = liger_dist.wrap(model, "none")
    loss = wrapped(**given_to(model, batch), is_causal=False).loss
    assert abs(float(loss) / float(truth) - 1) < 1e-9


def test_masked_language_models_without_the_setting_refuse_packed_documents() -> None:
    model = make_bidirectional("eurobert")
    del model.config.is_causal
    wrapped = liger_dist.wrap(model, "none")
    with pytest.raises(liger_dist.LigerDistError, match="makes no mask of packed documents"):
        wrapped(**make_noised(0, "packed"))


def test_sequence_parallelism_refuses_both_directions(workers_2: Workers) -> None:
    for message in workers_2.run(over_sequences):
        assert "its attention is not causal" in message


def over_sequences() -> str:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(compute_device().type, (1, 2), mesh_dim_names=("dp", "sp"))
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_bidirectional("llama", dtype=torch.float32), liger_dist.FSDP2(mesh=mesh))
    return str(caught.value)


STRATEGIES = ("ddp", "fsdp1", "fsdp2", "fsdp2, vocab-parallel", "tp", "ZeRO-3")


@pytest.mark.parametrize("rows", ["texts", "packed", "padded"])
@pytest.mark.parametrize("family", ["llama", "eurobert"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_layout(name: str, family: str, rows: str, workers_2: Workers) -> None:
    if name == "ZeRO-3":
        pytest.importorskip("deepspeed")
    for errors in workers_2.run(errors_in, name, family, rows):
        assert_below(errors, 1e-5 if name == "ZeRO-3" else 1e-6, f"{name}, {family}, {rows}")


def errors_in(name: str, family: str, rows: str) -> dict[str, float]:
    """One step of masked tokens on this rank's rows; runs on every rank."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = make_bidirectional(family, dtype=torch.float32 if name == "ZeRO-3" else torch.float64)
    reference = copy.deepcopy(model).double()
    ranks, mine = ([0], 0) if name == "tp" else (range(world), rank)
    truths = {}
    for one in ranks:
        truths[one] = true_loss(reference, make_noised(one, rows))
        (truths[one] / len(ranks)).backward()
    given = given_to(model, make_noised(mine, rows))
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    if name == "ZeRO-3":
        (loss,), found = deepspeed_step(liger_dist.wrap(model, "deepspeed"), [given], stage=3)
    else:
        strategies: dict[str, str | Strategy] = {
            "fsdp1": liger_dist.FSDP1(reduce_dtype=torch.float64),
            "fsdp2": liger_dist.FSDP2(reduce_dtype=torch.float64),
            "fsdp2, vocab-parallel": liger_dist.FSDP2(lm_head="vocab_parallel", reduce_dtype=torch.float64),
        }
        wrapped = liger_dist.wrap(model, strategies.get(name, name))
        output = wrapped(**given).loss
        output.backward()
        loss, found = float(output.detach()), full_gradients(wrapped)
    return {"loss": abs(loss / float(truths[mine]) - 1)} | relative_errors(found, gradients)


def test_a_model_that_computes_no_loss() -> None:
    """DiffusionGemma, whose forward takes no labels: the loss of its soft-capped lm_head alone."""
    modeling = pytest.importorskip("transformers.models.diffusion_gemma.modeling_diffusion_gemma")
    from families import Family, build

    model: Any = build(Family("image-text", "diffusion_gemma", modeling.DiffusionGemmaForBlockDiffusion.__name__))
    model = model.float().eval()
    model.final_logit_softcapping = 0.3  # of the tiny model's logits
    generator = torch.Generator().manual_seed(1)
    prompt, canvas = (on_device.randint(3, 80, (2, size), generator=generator) for size in (5, 8))
    labels = canvas.where(on_device.rand(2, 8, generator=generator) < 0.5, -100)
    weight = on_device.rand(2, 8, generator=generator)
    given = {"input_ids": prompt, "decoder_input_ids": canvas.where(labels == -100, 95)}
    logits = model(**given).logits.flatten(0, 1)
    each = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    truth = (each * weight.flatten()).sum() / labels.numel()
    hidden = model.model(**given).last_hidden_state
    loss = liger_dist.lm_head_loss(
        model.lm_head,
        hidden,
        labels,
        softcap=model.final_logit_softcapping,
        token_weight=weight,
        num_items_in_batch=labels.numel(),
    ).loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    found, wanted = (torch.autograd.grad(one, parameters, allow_unused=True) for one in (loss, truth))
    assert abs(float(loss) / float(truth) - 1) < 1e-5
    errors = relative_errors(
        {str(place): gradient for place, gradient in enumerate(found) if gradient is not None},
        {str(place): gradient for place, gradient in enumerate(wanted) if gradient is not None},
    )
    assert_below(errors, 1e-3)
