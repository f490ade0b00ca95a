"""Calls whose loss is not fused: options of the loss count in them, or are refused; nothing is dropped."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import on_device
import pytest
import torch
import torch.nn.functional as F
from models import VOCAB_SIZE, assert_same, gradient_errors, make_batch, make_model
from torch import Tensor, nn
from trainers import forget_earlier_trainers
from truth import cross_entropy_truth

import liger_dist
from liger_dist.sharding.process_groups import compute_device

OPTIONS: dict[str, dict[str, Any]] = {
    "label smoothing": {"label_smoothing": 0.3},
    "temperature": {"temperature": 2.0},
    "z-loss": {"z_loss": 0.1},
    "token weight": {"token_weight": on_device.linspace(0.1, 2.0, 36, dtype=torch.float64).reshape(3, 12)},
    "class weight": {"class_weight": on_device.linspace(0.5, 1.5, VOCAB_SIZE, dtype=torch.float64)},
    "all": {
        "label_smoothing": 0.3,
        "temperature": 2.0,
        "z_loss": 0.1,
        "token_weight": on_device.linspace(0.1, 2.0, 36, dtype=torch.float64).reshape(3, 12),
        "class_weight": on_device.linspace(0.5, 1.5, VOCAB_SIZE, dtype=torch.float64),
    },
}


def moved(options: dict[str, Any]) -> dict[str, Any]:
    return {name: v.to(compute_device()) if isinstance(v, Tensor) else v for name, v in options.items()}


def truth_of_call(logits: Tensor, batch: dict[str, Tensor], **options: Any) -> Any:
    """Of logits for every token: those of the last one have no target."""
    options = moved(options)
    weight = options.pop("token_weight", None)
    return cross_entropy_truth(
        logits[:, :-1].reshape(-1, VOCAB_SIZE).double(),
        batch["labels"][:, 1:].reshape(-1),
        token_weight=None if weight is None else weight[:, 1:].reshape(-1),
        **options,
    )


@pytest.fixture(autouse=True)
def without_unfused_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*unfused.*")
        yield


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("asks", ["nothing", "the call", "the config", "the config, globally"])
def test_options_count_beside_full_logits(name: str, asks: str) -> None:
    """Fused, with ``outputs=("logits",)`` of the call, and in evaluation with that of the config."""
    model = make_model("llama")
    reference = copy.deepcopy(model)
    mean = "global" if "globally" in asks else "local"
    outputs = ("logits",) if "config" in asks else ()
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(outputs=outputs, token_mean=mean))
    batch, options = make_batch(0), moved(OPTIONS[name])
    extra = {"outputs": ("logits",)} if asks == "the call" else {}
    model.train("config" not in asks)
    output = model(**batch, **options, **extra)
    assert asks == "nothing" or output.logits.shape == (3, 12, VOCAB_SIZE)
    logits = reference(input_ids=batch["input_ids"]).logits
    expected = truth_of_call(logits, batch, **options).loss
    assert abs(float(output.loss) - float(expected)) < 1e-6
    output.loss.backward()
    expected.backward()
    assert max(gradient_errors(model, reference).values()) < 1e-6


@pytest.mark.smoke
def test_outputs_count_where_dropout_of_lora_keeps_the_head_unfused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["q_proj", "lm_head"], r=2, lora_dropout=0.3, init_lora_weights=False)
    model = peft.get_peft_model(make_model("llama"), settings)
    model.to(torch.float64)
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    batch, options = make_batch(0), moved(OPTIONS["all"])
    torch.manual_seed(1)
    output = model(**batch, **options, outputs=("entropy", "log_prob", "token_accuracy"))
    torch.manual_seed(1)
    logits = reference(input_ids=batch["input_ids"]).logits
    truth = truth_of_call(logits, batch, **options)
    assert abs(float(output.loss) - float(truth.loss)) < 1e-6
    counted = batch["labels"][:, 1:].reshape(-1) != -100
    for field in ("entropy", "log_prob"):
        mine = getattr(output, field)[:, :-1].reshape(-1)
        assert (mine - getattr(truth, field))[counted].abs().max() < 1e-6
    assert abs(float(output.token_accuracy) - float(truth.is_top1[counted].double().mean())) < 1e-6
    assert output.logits.shape == (3, 12, VOCAB_SIZE)
    output.loss.backward()
    truth.loss.backward()
    assert max(gradient_errors(model, reference).values()) < 1e-6


def mine(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def mine_smoothed(logits: Tensor, labels: Tensor, vocab_size: int, label_smoothing: float = 0.0, **_: Any) -> Tensor:
    flat = logits[:, :-1].reshape(-1, vocab_size)
    return F.cross_entropy(flat, labels[:, 1:].reshape(-1), label_smoothing=label_smoothing)


@pytest.mark.smoke
def test_a_loss_function_of_the_users_own_gets_the_options_it_names() -> None:
    batch = make_batch(0)
    for config in (liger_dist.WrapConfig(), liger_dist.WrapConfig(fused_loss=False)):
        model: Any = make_model("llama")
        logits = model(input_ids=batch["input_ids"]).logits
        liger_dist.wrap(model, config=config)
        model.loss_function = mine
        with pytest.raises(liger_dist.LigerDistError, match=r"label_smoothing was given.*mine has no label_smoothing"):
            model(**batch, label_smoothing=0.3)
        assert abs(float(model(**batch).loss) - float(mine(logits, batch["labels"], VOCAB_SIZE))) < 1e-6
        model.loss_function = mine_smoothed
        expected = truth_of_call(logits, batch, label_smoothing=0.3).loss
        assert abs(float(model(**batch, label_smoothing=0.3).loss) - float(expected)) < 1e-6
        with pytest.raises(liger_dist.LigerDistError, match="entropy was given"):
            model(**batch, outputs=("entropy",))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("label_smoothing", {"label_smoothing": 0.1}),
        ("temperature", {"temperature": 2.0}),
        ("token_weight", {"token_weight": on_device.ones(3, 12)}),
        ("entropy", {"outputs": ("entropy",)}),
    ],
    ids=["label smoothing", "temperature", "token weight", "output"],
)
def test_a_loss_that_is_not_fused_at_all_refuses_options(name: str, options: dict[str, Any]) -> None:
    model = make_model("llama")
    liger_dist.wrap(model, config=liger_dist.WrapConfig(fused_loss=False))
    with pytest.raises(liger_dist.LigerDistError, match=f"{name} was given"):
        model(**make_batch(0), **options)
    assert model(**make_batch(0), outputs=("logits",), temperature=1.0).logits.shape == (3, 12, VOCAB_SIZE)
    liger_dist.unwrap(model)
    model(**make_batch(0), **options)  # The model's own business again.


class Outer(type(make_model("llama"))):  # type: ignore[misc]
    """A subclass of the user's, whose forward names nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("forward", ["a subclass", "accelerate"])
def test_a_forward_that_is_not_transformers_own_refuses_options(forward: str) -> None:
    model: Any = make_model("llama")
    if forward == "a subclass":
        model.__class__ = Outer
    liger_dist.wrap(model, config=liger_dist.WrapConfig(fused_loss=False))
    if forward == "accelerate":
        accelerate = pytest.importorskip("accelerate")
        forget_earlier_trainers()
        model = accelerate.Accelerator(mixed_precision="bf16", cpu=compute_device().type == "cpu").prepare(model)
    try:
        with pytest.raises(liger_dist.LigerDistError, match="label_smoothing was given"):
            model(**make_batch(0), label_smoothing=0.1)
    finally:
        if forward == "accelerate":
            forget_earlier_trainers()


@pytest.mark.smoke
def test_no_smoothing_is_another_loss_for_a_model_that_smooths() -> None:
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

    torch.manual_seed(0)
    config = BlipTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        encoder_hidden_size=16,
        is_decoder=True,
        label_smoothing=0.2,
    )
    model: Any = BlipTextLMHeadModel(config).to(compute_device()).eval()
    batch = make_batch(0)
    logits = model(input_ids=batch["input_ids"]).logits
    liger_dist.wrap(model)
    expected = truth_of_call(logits, batch).loss
    assert abs(float(model(**batch, label_smoothing=0.0).loss) - float(expected)) < 1e-4
    with pytest.raises(liger_dist.LigerDistError, match="label_smoothing was asked"):
        model(**batch, label_smoothing=0.0, outputs=("logits",))


@pytest.mark.smoke
def test_logits_of_a_part_of_the_tokens_refuse_options() -> None:
    model = make_model("llama")
    liger_dist.wrap(model)
    with pytest.raises(liger_dist.LigerDistError, match="scores 9 tokens of 36 labels"):
        model(**make_batch(0), label_smoothing=0.1, outputs=("logits",), logits_to_keep=3)


def test_an_output_of_evaluation_keeps_the_key_where_it_is_made_anew() -> None:
    """As DDP and FSDP2 do with outputs; and it can be shown, and holds nothing of the call."""
    import gc
    import weakref

    model: Any = make_model("llama")
    liger_dist.wrap(model)
    with torch.no_grad():
        output = model(**make_batch(0))
    rebuilt = torch.utils._pytree.tree_map(lambda value: value, output)
    for one in (output, rebuilt):
        assert list(one) == ["loss", "logits"]
        assert "loss" in repr(one)
        with pytest.raises(liger_dist.LigerDistError, match="never computed"):
            one["logits"].argmax(-1)
    assert "loss" in repr(model(**make_batch(0)))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_torch_func_refuses_options() -> None:
    model = make_model("llama")
    liger_dist.wrap(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: Any) -> Tensor:
        out = torch.func.functional_call(model, given, (), {**make_batch(0), "label_smoothing": 0.1})
        return out.loss  # type: ignore[no-any-return]

    with pytest.raises(liger_dist.LigerDistError, match=r"label_smoothing was asked.*torch\.func"):
        torch.func.grad(loss)(parameters)


@pytest.mark.smoke
def test_a_configuration_that_an_unfused_loss_does_not_have_is_refused() -> None:
    for options, words in (
        ({"token_mean": "global"}, "token_mean is 'global'"),
        ({"outputs": ("entropy",)}, "outputs"),
    ):
        with pytest.raises(liger_dist.LigerDistError, match="fused_loss is False"):
            liger_dist.wrap(make_model("llama"), config=liger_dist.WrapConfig(fused_loss=False, **options))  # type: ignore[arg-type]
        model: Any = make_model("llama")
        model.loss_function = mine
        with pytest.raises(liger_dist.LigerDistError, match=rf"{words}.* but the loss .* is not fused"):
            liger_dist.wrap(model, config=liger_dist.WrapConfig(**options))  # type: ignore[arg-type]


def test_a_forward_of_before_wrap_is_warned_of() -> None:
    """Code that has kept the model's forward calls past the one that is swapped in."""
    model = make_model("llama")
    batch = make_batch(0)
    kept = type(model).forward
    expected = float(model(**batch).loss)
    liger_dist.wrap(model)
    with pytest.warns(UserWarning, match=r"outside of the forward that liger_dist\.wrap has given the Llama"):
        assert abs(float(kept(model, **batch).loss) - expected) < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in (model, model.forward):
            output = call(**batch, outputs=("entropy",))
            assert abs(float(output.loss) - expected) < 1e-6
            assert not hasattr(output, "logits")


def test_pausing_one_thread_does_not_change_another() -> None:
    import threading

    from liger_dist.wrap import full_logits

    model = make_model("llama")
    liger_dist.wrap(model)
    seen: list[bool] = []

    def train() -> None:
        seen.append(hasattr(model(**make_batch(0)), "logits"))

    with full_logits(model):
        assert hasattr(model(**make_batch(0)), "logits")
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert seen == [False]
    assert not hasattr(model(**make_batch(0)), "logits")


def test_a_nested_call_that_fails_early_leaves_the_outer_one_alone() -> None:
    """A hook of the user's that raises before this package's own has its turn."""
    model: Any = make_model("llama")
    expected = float(model(**make_batch(0)).loss)
    liger_dist.wrap(model)
    failures: list[str] = []

    def refuse(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "labels" not in kwargs:
            raise RuntimeError("not without labels")

    model.register_forward_pre_hook(refuse, with_kwargs=True, prepend=True)

    def ask_again(module: nn.Module, args: Any, output: Any) -> None:
        if not failures:
            try:
                model(input_ids=make_batch(0)["input_ids"])
            except RuntimeError as error:
                failures.append(str(error))

    model.lm_head.register_forward_hook(ask_again)
    assert abs(float(model(**make_batch(0)).loss) - expected) < 1e-6
    assert failures == ["not without labels"]


def replica(model: nn.Module) -> nn.Module:
    """What nn.DataParallel makes of a model for another device, with parameters three times as large."""
    made = [module._replicate_for_data_parallel() for module in model.modules()]  # type: ignore[operator]
    index = {id(module): i for i, module in enumerate(model.modules())}
    for module, twin in zip(model.modules(), made, strict=True):
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else made[index[id(child)]]
        for name, parameter in module._parameters.items():
            setattr(twin, name, None if parameter is None else parameter.detach().clone() * 3.0)
        for name, buffer in module._buffers.items():
            twin._buffers[name] = buffer
    return made[0]


def test_a_replica_of_data_parallel_runs_on_its_own_weights() -> None:
    model = make_model("llama")
    batch = make_batch(0)
    expected = [one(**batch).loss for one in (model, replica(model))]
    liger_dist.wrap(model)
    losses = [one(**batch).loss for one in (model, replica(model))]
    assert abs(float(expected[0]) - float(expected[1])) > 0.1
    for mine, truth in zip(losses, expected, strict=True):
        assert abs(float(mine) - float(truth)) < 1e-6 * float(truth)


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """A dataset, on the CPU."""
    return [{name: tensor[row].cpu() for name, tensor in batch.items()} for row in range(3)]


def metrics(seen: Any) -> dict[str, float]:
    return {"mean": float(np.mean(seen.predictions))}


@pytest.mark.parametrize("ask", ["as it is", "outputs in the config", "fuse"])
def test_wrapped_first_then_a_trainer_with_metrics(ask: str, tmp_path: Any) -> None:
    """Metrics are those of the logits, with one GPU and with several, on which Trainer uses nn.DataParallel."""
    from transformers import Trainer, TrainingArguments

    from liger_dist.integrations.trainer import fuse

    batch = make_batch(0)
    rows = rows_of(batch)
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=not torch.cuda.is_available())

    def trainer_of(model: Any) -> Any:
        return Trainer(model, arguments, eval_dataset=rows, compute_metrics=metrics)  # type: ignore[arg-type]

    plain = trainer_of(make_model("llama", dtype=torch.float32))
    expected = plain.evaluate()["eval_mean"]
    model = make_model("llama", dtype=torch.float32)
    if ask == "fuse":
        trainer = fuse(trainer_of(model))
    else:
        outputs = ("logits",) if "config" in ask else ()
        trainer = trainer_of(liger_dist.wrap(model, config=liger_dist.WrapConfig(outputs=outputs)))
    assert abs(trainer.evaluate()["eval_mean"] - expected) < 1e-5
    assert trainer.predict(rows).predictions.shape == (3, 12, VOCAB_SIZE)


@pytest.mark.gpu(n=2)
def test_a_trainer_on_two_gpus_without_torchrun_trains_as_before(tmp_path: Any) -> None:
    """transformers uses nn.DataParallel there."""
    from transformers import Trainer, TrainingArguments

    from liger_dist.integrations.trainer import fuse

    rows = [row for seed in range(8) for row in rows_of(make_batch(0, seed=seed))]
    histories = []
    for fused in (False, True):
        arguments = TrainingArguments(
            tmp_path,
            report_to=[],
            per_device_train_batch_size=3,
            max_steps=4,
            logging_steps=1,
            learning_rate=1e-2,
            save_strategy="no",
        )
        assert arguments.n_gpu == torch.cuda.device_count()
        trainer = Trainer(make_model("llama", dtype=torch.float32), arguments, train_dataset=rows)  # type: ignore[arg-type]
        (fuse(trainer) if fused else trainer).train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(histories[0]) == 4
    assert max(abs(a - b) for a, b in zip(*histories, strict=True)) < 1e-3


@pytest.mark.parametrize("with_metrics", [False, True])
def test_a_batch_without_labels_leaves_the_mean_over_batches_alone(with_metrics: bool, tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments

    from liger_dist.integrations.trainer import fuse

    rows = [*rows_of(make_batch(0)), *rows_of(make_batch(0, num_ignored=12))]
    arguments = TrainingArguments(
        tmp_path, report_to=[], use_cpu=not torch.cuda.is_available(), per_device_eval_batch_size=3
    )
    found = []
    for fused in (False, True):
        model: Any = make_model("llama", dtype=torch.float32)
        trainer = Trainer(model, arguments, eval_dataset=rows, compute_metrics=metrics if with_metrics else None)  # type: ignore[arg-type]
        found.append((fuse(trainer) if fused else trainer).evaluate()["eval_loss"])
    if math.isnan(found[0]):
        pytest.skip("the mean over batches of this transformers is NaN where one has no labels")
    assert found[0] > 1
    assert abs(found[0] - found[1]) < 1e-5 * found[0]


def test_documents_stay_apart_whether_the_loss_is_fused_or_not() -> None:
    model = make_model("llama")
    batch = make_batch(0) | {"position_ids": on_device.tensor([*range(5), *range(7)]).expand(3, -1)}
    expected = float(model(**batch, use_cache=False).loss)
    across = float(model(**batch).loss)
    assert abs(expected - across) > 1e-3
    liger_dist.wrap(model)
    for extra in ({}, {"outputs": ("logits",)}, {"outputs": ("logits",), "label_smoothing": 0.0}):
        assert abs(float(model(**batch, **extra).loss) - expected) < 1e-6


@pytest.mark.smoke
def test_options_of_the_collator_count_in_predict(tmp_path: Any) -> None:
    from transformers import Trainer, TrainingArguments
    from transformers.data.data_collator import default_data_collator

    from liger_dist.integrations.trainer import fuse

    batch = make_batch(0)
    rows = rows_of(batch)
    model = make_model("llama", dtype=torch.float32)
    expected = truth_of_call(model(input_ids=batch["input_ids"]).logits, batch, label_smoothing=0.3).loss
    arguments = TrainingArguments(tmp_path, report_to=[], use_cpu=not torch.cuda.is_available())
    trainer = Trainer(
        model, arguments, data_collator=lambda rows: default_data_collator(rows) | {"label_smoothing": 0.3}
    )
    result = fuse(trainer).predict(rows)  # type: ignore[arg-type]
    assert result.predictions.shape == (3, 12, VOCAB_SIZE)  # type: ignore[union-attr]
    assert abs(result.metrics["test_loss"] - float(expected)) < 1e-5  # type: ignore[index]


def clipping_model(low: float | None, high: float | None) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Clipping(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids, use_cache=False).last_hidden_state)
            logits = logits.clamp(low, high)
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    source = make_model("llama")
    model = Clipping(source.config).double()  # type: ignore[arg-type]
    model.load_state_dict(source.state_dict())
    with torch.no_grad():
        model.lm_head.weight *= 1e6
    return model.to(compute_device())


BOUNDS = [(low, high) for low in (None, -100.0, -65504.0) for high in (None, 100.0, 65504.0) if low or high]


@pytest.mark.parametrize(("low", "high"), BOUNDS)
def test_logits_that_are_clipped_leave_the_loss_unfused(low: float | None, high: float | None) -> None:
    model = clipping_model(low, high)
    with pytest.warns(UserWarning, match="changes the logits before the loss"):
        liger_dist.wrap(model, "none")
    assert_same(model, clipping_model(low, high), make_batch(0))
