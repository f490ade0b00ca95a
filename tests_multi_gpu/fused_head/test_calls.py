"""What a call of a wrapped model takes and gives: keywords, reports, logits, encoder-decoders, odd losses."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from models import gradient_errors, make_batch, make_model, true_loss_sum
from torch import Tensor, nn
from truth import relative_error

import liger_dist
from liger_dist.model.keywords import renamed_keywords
from liger_dist.sharding.process_groups import compute_device


def targets(batch: dict[str, Tensor]) -> Tensor:
    return F.pad(batch["labels"][:, 1:], (0, 1), value=-100)


def test_reports_come_without_logits_and_without_changing_the_gradient() -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    batch = make_batch(0)
    names = ("token_accuracy", "is_top1", "entropy", "log_prob", "z_loss")
    output = model(**batch, outputs=names)
    logits = reference(input_ids=batch["input_ids"]).logits
    log_probs, valid = logits.log_softmax(-1), targets(batch) != -100
    entropy = -(log_probs.exp() * log_probs).sum(-1).where(valid, 0.0)
    log_prob = log_probs.gather(-1, targets(batch).clamp_min(0)[..., None])[..., 0].where(valid, 0.0)
    is_top1 = (logits.argmax(-1) == targets(batch)) & valid
    assert relative_error(output.entropy, entropy) < 1e-6
    assert relative_error(output.log_prob, log_prob) < 1e-6
    assert torch.equal(output.is_top1, is_top1)
    assert relative_error(output.token_accuracy, is_top1.sum() / valid.sum()) < 1e-6
    assert list(output) == ["loss", *names]
    assert not any(getattr(output, name).requires_grad for name in names)
    output.loss.backward()
    total, count = true_loss_sum(reference, batch)
    (total / count).backward()
    assert max(gradient_errors(model, reference).values()) < 1e-5


def test_reports_may_be_asked_for_once_and_in_evaluation() -> None:
    model = make_model("llama")
    liger_dist.wrap(model, config=liger_dist.WrapConfig(outputs=("token_accuracy",)))
    model.eval()
    with torch.no_grad():
        output = model(**make_batch(0))
        assert 0 <= float(output.token_accuracy) <= 1
        # The key stays in evaluation, so that no metrics are computed from what is left.
        assert list(model(**make_batch(0), outputs=())) == ["loss", "logits"]
        assert model(input_ids=make_batch(0)["input_ids"]).logits.shape[-1] == 101
    with_logits = make_model("llama")
    liger_dist.wrap(with_logits, config=liger_dist.WrapConfig(outputs=("logits",)))
    assert not hasattr(with_logits(**make_batch(0)), "logits")
    assert with_logits.eval()(**make_batch(0)).logits.shape == (3, 12, 101)
    for wrong in ("accuracy", ("logits", "entropy")):
        with pytest.raises(liger_dist.LigerDistError, match="outputs"):
            liger_dist.wrap(make_model("llama"), config=liger_dist.WrapConfig(outputs=wrong))  # type: ignore[arg-type]


@pytest.mark.smoke
def test_logits_that_were_never_computed_say_how_to_get_them() -> None:
    model = make_model("llama")
    liger_dist.wrap(model)
    batch = make_batch(0)
    output = model(**batch)
    for read in (lambda: output.logits, lambda: output["logits"]):
        with pytest.raises(liger_dist.LigerDistError, match=r"never computed.*without labels"):
            read()
    assert not hasattr(output, "logits")
    assert getattr(output, "logits", None) is None
    assert "logits" not in output
    loss, logits, *_ = model(**batch, return_dict=False)
    assert torch.equal(loss, output.loss)
    for name in ("argmax", "softmax", "sum", "logsumexp"):
        with pytest.raises(liger_dist.LigerDistError, match="never computed"):
            getattr(logits, name)(-1)
    both = model(**batch, outputs=("logits",))
    assert both.logits.shape == (3, 12, 101)
    assert relative_error(both.loss, output.loss) < 1e-6
    again = pickle.loads(pickle.dumps(model.eval()(**batch, outputs=("is_top1",))))
    assert torch.equal(again.is_top1, model(**batch, outputs="is_top1").is_top1)
    with pytest.raises(liger_dist.LigerDistError, match="never computed"):
        _ = again.logits


def test_reports_with_a_tuple_are_refused() -> None:
    model = make_model("llama")
    liger_dist.wrap(model)
    with pytest.raises(liger_dist.LigerDistError, match="return_dict=True"):
        model(**make_batch(0), outputs=("entropy",), return_dict=False)


def test_options_of_the_loss_reach_the_loss() -> None:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    batch = make_batch(0)
    logits = reference(input_ids=batch["input_ids"]).logits.flatten(0, 1)
    weight = torch.linspace(0.5, 2.0, 101, dtype=torch.float64, device=compute_device())
    expected = F.cross_entropy(logits / 1.5, targets(batch).flatten(), weight=weight, label_smoothing=0.1)
    loss = model(**batch, label_smoothing=0.1, temperature=1.5, class_weight=weight).loss
    assert relative_error(loss, expected) < 1e-6
    items = model(**batch, token_weight=on_device.full((3, 12), 3.0), num_items_in_batch=7).loss
    total, _ = true_loss_sum(reference, batch)
    assert relative_error(items, 3 * total / 7) < 1e-6


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"label_smoothing": 2.0}, r"label_smoothing is 2\.0"),
        ({"token_weight": on_device.ones(5)}, "one weight for each label"),
        ({"outputs": ("perplexity",)}, "outputs contains 'perplexity'"),
        ({"labels": None, "z_loss": 0.1}, "without labels"),
    ],
    ids=["value", "shape", "output", "no labels"],
)
def test_wrong_options_are_refused_before_the_model_runs(keywords: dict[str, Any], words: str) -> None:
    model: Any = make_model("llama")
    liger_dist.wrap(model)
    ran: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(liger_dist.LigerDistError, match=words):
        model(**(make_batch(0) | keywords))
    assert not ran
    assert model(**make_batch(0)).loss.isfinite()


@pytest.mark.parametrize("name", ["labels", "shift_labels"])
def test_labels_of_a_single_sequence_may_have_one_dimension(name: str) -> None:
    model, reference = make_model("llama"), make_model("llama")
    liger_dist.wrap(model, "none")
    batch = {key: value[:1] for key, value in make_batch(0, num_ignored=2).items()}
    batch |= {"labels": batch["labels"][0]} if name == "labels" else {"shift_labels": batch["labels"][0].roll(-1)}
    for one in (model, reference):
        one(**batch).loss.backward()
    for (path, parameter), own in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, own.grad, rtol=1e-5, atol=1e-6, msg=path)
    two_rows = make_batch(0) | {"labels": make_batch(0)["labels"].flatten()}
    with pytest.raises(liger_dist.LigerDistError, match="expected one label for each token"):
        model(**two_rows)


def test_a_keyword_of_an_attention_function_of_the_users_own_is_the_attentions() -> None:
    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    seen: list[Any] = []

    def attention(*args: Any, temperature_of_mine: float = 1.0, **kwargs: Any) -> Any:
        seen.append(temperature_of_mine)
        return eager_attention_forward(*args, **kwargs)

    AttentionInterface.register("of mine", attention)
    model: Any = make_model("llama")
    model.config._attn_implementation = "of mine"
    liger_dist.wrap(model)
    model(**make_batch(0), temperature_of_mine=2.0)
    assert seen == [2.0, 2.0]


def tiny_encoder_decoder(family: str, *, bias: bool = False) -> Any:
    import transformers

    torch.manual_seed(0)
    if family == "t5":
        config: Any = transformers.T5Config(
            vocab_size=99, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0,
            decoder_start_token_id=0, tie_word_embeddings=False,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
    else:
        config = transformers.BartConfig(
            vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0.0, max_position_embeddings=32,
            pad_token_id=1,
        )  # fmt: skip
        model = transformers.BartForConditionalGeneration(config)
    if bias:
        model.final_logits_bias.copy_(on_device.randn(1, 99))
    return model.double().to(compute_device())


@pytest.mark.parametrize("family", ["t5", "bart", "bart with a bias of its logits"])
def test_encoder_decoders_and_their_own_cross_entropy(family: str) -> None:
    model = tiny_encoder_decoder(family.split()[0], bias="bias" in family)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    batch = {"input_ids": on_device.arange(2, 22).reshape(2, 10), "labels": on_device.arange(4, 18).reshape(2, 7)}
    batch["labels"][0, 5:] = -100
    batch = {name: tensor.to(compute_device()) for name, tensor in batch.items()}
    output, expected = model(**batch, outputs=("token_accuracy",)), reference(**batch)
    assert not hasattr(output, "logits")
    assert relative_error(output.loss, expected.loss) < 1e-6
    output.loss.backward()
    expected.loss.backward()
    assert max(gradient_errors(model, reference).values()) < 1e-5
    if "bias" in family:
        with torch.no_grad():
            for one in (model, reference):
                one.final_logits_bias.mul_(-2)
            assert relative_error(model(**batch).loss, reference(**batch).loss) < 1e-6
    assert model.generate(batch["input_ids"], max_new_tokens=3, do_sample=False).shape[1] == 4


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_a_model_with_its_own_cross_entropy(backend: str) -> None:
    model = tiny_encoder_decoder("bart").float()
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    batch = {"input_ids": on_device.arange(2, 22).reshape(2, 10), "labels": on_device.arange(4, 18).reshape(2, 7)}
    batch = {name: tensor.to(compute_device()) for name, tensor in batch.items()}
    loss, expected = torch.compile(model, backend=backend)(**batch).loss, reference(**batch).loss
    assert relative_error(loss, expected) < 1e-6
    loss.backward()
    expected.backward()
    for (name, parameter), own in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(parameter.grad, own.grad) < 1e-4 or float(own.grad.norm()) < 1e-6, name


def test_a_loss_function_set_by_the_user_is_respected() -> None:
    """Unfused, and said so, whether it was set before wrapping or after."""

    def smoothed(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
        shifted = F.pad(labels[..., 1:], (0, 1), value=-100)
        return F.cross_entropy(logits.view(-1, vocab_size), shifted.view(-1), label_smoothing=0.1)

    model: Any = make_model("llama")
    model.loss_function = smoothed
    expected = model(**make_batch(0)).loss
    with pytest.warns(UserWarning, match=r"loss_function is .*smoothed"):
        liger_dist.wrap(model)
    assert torch.equal(model(**make_batch(0)).loss, expected)
    late: Any = make_model("llama")
    liger_dist.wrap(late)
    late.loss_function = smoothed
    with pytest.warns(UserWarning, match=r"loss_function is .*smoothed"):
        output = late(**make_batch(0))
    assert torch.equal(output.loss, expected)
    liger_dist.unwrap(late)
    assert late.loss_function is smoothed


def test_a_loss_without_a_plain_mean_stays_the_models_own() -> None:
    class Summing(type(make_model("llama"))):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            from transformers.modeling_outputs import CausalLMOutput

            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = None
            if labels is not None:
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") + logits.square().mean()
            return CausalLMOutput(loss=loss, logits=logits)

    model: nn.Module = make_model("llama")
    model.__class__ = Summing
    expected = model(**make_batch(0)).loss
    with pytest.warns(UserWarning, match="passes another reduction to its loss"):
        liger_dist.wrap(model)
    assert torch.equal(model(**make_batch(0)).loss, expected)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_deprecated_keyword_of_the_forward_is_an_argument(name: str) -> None:
    """transformers 5.24 renames ``past_key_values`` to ``cache``, and takes the old name with a warning."""
    from transformers import DynamicCache

    model: Any = make_model("llama")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    known = {*inspect.signature(type(reference).forward).parameters, *renamed_keywords(type(reference).forward)}
    if name not in known:
        pytest.skip(f"this transformers has no {name}")
    for cache in (DynamicCache(config=model.config), None):
        expected = reference(**make_batch(0), **{name: copy.deepcopy(cache)})
        output = model(**make_batch(0), **{name: cache})
        assert relative_error(output.loss, expected.loss) < 1e-6
    with pytest.warns(UserWarning, match="neither its modules nor its attention"):
        model(**make_batch(0), **{f"{name}_": None})


def test_arguments_of_flash_attention_reach_the_attention() -> None:
    model: Any = make_model("llama")
    batch = make_batch(0, rows="packed, by lengths")
    total, count = true_loss_sum(model, batch)
    liger_dist.wrap(model)
    seen: list[dict[str, Any]] = []
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    output = model(**batch)
    assert not hasattr(output, "logits")
    assert relative_error(output.loss, total / count) < 1e-6
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        assert seen[0][name] is batch[name]


def test_evaluation_with_right_padding_builds_no_cache() -> None:
    """With a cache, FlashAttention-2 refuses right padding in a batch of more than one sequence."""
    model: Any = make_model("qwen2").eval()
    batch = make_batch(0)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, 7:] = 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    assert model(**batch, attention_mask=mask).past_key_values is not None, "the model itself builds one"
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    with torch.no_grad():
        output = model(**batch, attention_mask=mask)
        assert output.past_key_values is None
        alone = [
            true_loss_sum(reference, {"input_ids": ids[None, :length], "labels": labels[None, :length]})
            for ids, labels, length in zip(batch["input_ids"], batch["labels"], (12, 7, 12), strict=True)
        ]
    total, count = sum(loss for loss, _ in alone), sum(number for _, number in alone)
    assert relative_error(output.loss, torch.as_tensor(total / count)) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_5_text", "gpt_oss"])
def test_a_text_in_parts_has_the_cache_of_the_parts_before(family: str) -> None:
    """Losses of long texts, and backpropagation through time."""
    losses = []
    for is_wrapped in (True, False):
        model: Any = make_model(family)
        model = liger_dist.wrap(model, "none") if is_wrapped else model
        past, found = None, []
        for part in make_batch(0)["input_ids"].split(4, 1):
            output = model(input_ids=part, labels=part, past_key_values=past)
            past = output.past_key_values
            found.append(output.loss)
        if family != "qwen3_5_text":  # Its own cache is written to in place.
            sum(found).backward()
        losses.append([float(loss.detach()) for loss in found])
        losses.append([0.0 if p.grad is None else float(p.grad.norm()) for p in model.parameters()])
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
    assert losses[1] == pytest.approx(losses[3], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("kind", ["reads", "halves"])
def test_backward_hooks_of_the_module_that_peft_puts_around_lm_head(kind: str) -> None:
    peft = pytest.importorskip("peft")
    seen: list[list[Tensor]] = []
    for is_wrapped in (True, False):
        options = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(make_model("llama"), options)
        model = liger_dist.wrap(model, "none") if is_wrapped else model
        found: list[Tensor] = []
        head = model.get_base_model().lm_head
        if kind == "reads":
            head.register_full_backward_hook(lambda module, into, out, found=found: found.append(out[0].norm()))
        else:
            head.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**make_batch(0)).loss.backward()
        seen.append([*found, head.modules_to_save["default"].weight.grad.norm()])
    torch.testing.assert_close(*seen)
