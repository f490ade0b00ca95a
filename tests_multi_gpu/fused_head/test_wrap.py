"""wrap, unwrap and explain on one process: what they change, what they leave alone, what they refuse."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Workers
from models import make_batch, make_config, make_model, true_loss_sum
from torch import nn
from transformers import LlamaForCausalLM
from truth import relative_error

import liger_dist
from liger_dist.fused_head.lm_head import FusedLMHead
from liger_dist.sharding.process_groups import compute_device


def test_names_state_dict_and_globals_stay() -> None:
    import transformers
    from transformers.models.llama import modeling_llama

    watched = [
        *((torch.nn.functional, name) for name in dir(torch.nn.functional)),
        *((modeling_llama, name) for name in dir(modeling_llama)),
        *((modeling_llama.LlamaForCausalLM, name) for name in ("forward", "loss_function", "__call__", "__init__")),
        (nn.Linear, "forward"),
        (transformers.loss.loss_utils, "ForCausalLMLoss"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    model = make_model("llama", tied=True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    same = liger_dist.wrap(model, "none")
    model(**make_batch(0)).loss.backward()
    assert same is model
    assert isinstance(model.get_output_embeddings(), nn.Linear)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    after = [getattr(owner, name) for owner, name in watched]
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_unwrap_restores_the_instance() -> None:
    model = make_model("llama")
    attributes, hooks = set(vars(model)), (dict(model._forward_pre_hooks), dict(model._forward_hooks))
    head = set(vars(model.lm_head))
    liger_dist.wrap(model)
    assert liger_dist.unwrap(model) is model
    assert type(model.lm_head) is nn.Linear
    assert set(vars(model)) == attributes
    assert set(vars(model.lm_head)) == head
    assert (dict(model._forward_pre_hooks), dict(model._forward_hooks)) == hooks
    assert model(**make_batch(0)).logits.shape[-1] == 101
    liger_dist.wrap(model)
    assert not hasattr(model(**make_batch(0)), "logits")


def test_without_labels_ordinary_logits_and_a_cache() -> None:
    model = make_model("qwen2")
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    ids = make_batch(0)["input_ids"]
    assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)
    assert model(input_ids=ids, use_cache=True).past_key_values is not None
    assert model(**make_batch(0)).past_key_values is None


def test_positional_labels_tuples_and_hidden_states() -> None:
    model = make_model("llama")
    batch = make_batch(0)
    expected = model(**batch).loss
    hidden = model(**batch, output_hidden_states=True).hidden_states
    liger_dist.wrap(model)
    assert relative_error(model(batch["input_ids"], None, None, None, None, batch["labels"]).loss, expected) < 1e-6
    assert relative_error(model(**batch, return_dict=False)[0], expected) < 1e-6
    for ours, theirs in zip(model(**batch, output_hidden_states=True).hidden_states, hidden, strict=True):
        assert torch.equal(ours, theirs)


def test_labels_on_the_cpu_and_another_ignore_index() -> None:
    model = make_model("llama")
    batch = make_batch(0)
    total, count = true_loss_sum(model, batch)
    liger_dist.wrap(model)
    labels = batch["labels"].cpu()
    assert relative_error(model(input_ids=batch["input_ids"], labels=labels).loss, total / count) < 1e-7
    other = labels.masked_fill(labels == -100, 0)
    assert relative_error(model(input_ids=batch["input_ids"], labels=other, ignore_index=0).loss, total / count) < 1e-7


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (torch.zeros(3, 11, dtype=torch.long, device="cpu"), ("(3, 11)", "(3, 12)", "Pad or cut")),
        (torch.full((3, 12), 101, device="cpu"), ("a label is 101", "101 rows", "resize_token_embeddings")),
        (torch.zeros(3, 12, device="cpu"), ("torch.float32", "labels.long()")),
    ],
    ids=["short", "too large", "float"],
)
def test_wrong_labels_are_refused_before_the_model_runs_and_nothing_is_lost(
    labels: torch.Tensor, words: tuple[str, ...]
) -> None:
    model = make_model("llama")
    batch = make_batch(0)
    liger_dist.wrap(model)
    expected = model(**batch).loss
    ran: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(input_ids=batch["input_ids"], labels=labels)
    assert all(word in str(caught.value) for word in words)
    assert not ran
    assert torch.equal(model(**batch).loss, expected)


def test_an_exception_inside_the_model_leaves_no_request_behind() -> None:
    model = make_model("llama")
    liger_dist.wrap(model)
    with pytest.raises(AttributeError):
        model(**make_batch(0), attention_mask="wrong")
    ids = make_batch(0)["input_ids"]
    assert model(input_ids=ids).logits.shape[-1] == 101


def test_a_transform_that_nothing_explains_stays_unfused_with_a_reason() -> None:
    from transformers import LlamaForCausalLM

    class Odd(LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state) * 3
            items = kwargs.pop("num_items_in_batch", None)
            loss = None
            if labels is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=101, num_items_in_batch=items)
            return type("Output", (), {"loss": loss, "logits": logits})()

    torch.manual_seed(0)
    model = Odd(make_config("llama")).double().to(compute_device())
    expected = model(**make_batch(0)).loss
    with pytest.warns(UserWarning, match="unfused: its forward changes the logits"):
        liger_dist.wrap(model)
    assert torch.equal(model(**make_batch(0)).loss, expected)
    assert "not supported" in str(liger_dist.explain(model))


def test_a_loss_function_of_the_users_own_is_kept() -> None:
    model = make_model("llama")
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()  # type: ignore[assignment]
    expected = model(**make_batch(0)).loss
    with pytest.warns(UserWarning, match="loss_function is .*lambda"):
        liger_dist.wrap(model)
    assert torch.equal(model(**make_batch(0)).loss, expected)


@pytest.mark.parametrize(("family", "scale"), [("granite", 1 / 4.0), ("cohere", 0.0625)])
def test_a_logit_scale_is_found_in_the_config_and_confirmed(family: str, scale: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = make_config("llama").to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    extra = {"logits_scaling": 4.0} if family == "granite" else {"logit_scale": 0.0625}
    config = AutoConfig.for_model(
        family, **{name: settings[name] for name in names}, num_key_value_heads=1, pad_token_id=0, **extra
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().to(compute_device())
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    assert f"logit scale {scale:g}" in str(liger_dist.explain(model))
    batch = make_batch(0)
    loss = model(**batch).loss
    total, count = true_loss_sum(reference, batch)
    assert relative_error(loss, total / count) < 1e-7
    loss.backward()
    (total / count).backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(parameter.grad, other.grad) < 1e-5, name


def test_a_head_with_bias() -> None:
    model = make_model("llama")
    model.lm_head = nn.Linear(16, 101).double().to(compute_device())
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    batch = make_batch(0)
    total, count = true_loss_sum(reference, batch)
    (total / count).backward()
    model(**batch).loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert relative_error(parameter.grad, other.grad) < 1e-6, name


class Quantised(nn.Linear):
    """Stands for a head whose weight is not what its forward uses."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.round())


def with_quantised_head() -> nn.Module:
    model = make_model("llama")
    model.lm_head = Quantised(16, 101)
    return model


def without_head() -> nn.Module:
    model = make_model("llama").model
    assert isinstance(model, nn.Module)
    return model


def wrapped_already() -> nn.Module:
    model: nn.Module = liger_dist.wrap(make_model("llama"))
    return model


def on_meta() -> nn.Module:
    return make_model("llama").to("meta")


@pytest.mark.parametrize(
    ("make", "call", "words"),
    [
        (lambda: make_model("llama"), {"strategy": "fsdp3"}, ("'fsdp3'", "'fsdp2'")),
        (wrapped_already, {}, ("wrapped already", "unwrap")),
        (without_head, {}, ("LlamaModel", "no lm_head", "AutoModelForCausalLM")),
        (lambda: nn.Linear(2, 2), {}, ("no lm_head",)),
        (with_quantised_head, {}, ("Quantised", "modules_to_not_convert")),
        (lambda: make_model("llama"), {"strategy": "fsdp2"}, ("torchrun", "init_process_group")),
        (lambda: make_model("llama"), {"strategy": "ddp"}, ("torchrun",)),
        (lambda: make_model("llama"), {"strategy": "none", "mesh": (1,)}, ("takes none",)),
        (on_meta, {}, ("meta device", "materialise")),
        (lambda: make_model("llama"), {"strategy": liger_dist.FSDP1()}, ("torchrun", "init_process_group")),
        (lambda: make_model("llama"), {"strategy": liger_dist.FSDP2(), "mesh": (1,)}, ("FSDP2(mesh=...)",)),
        (
            lambda: make_model("llama"),
            {"config": liger_dist.WrapConfig(outputs=("loss",))},
            ("outputs contains 'loss'", "expected names among", "entropy"),
        ),
    ],
    ids=[
        "strategy",
        "twice",
        "base",
        "linear",
        "quantised",
        "no group",
        "no group ddp",
        "mesh",
        "meta",
        "no group fsdp1",
        "mesh beside an object",
        "outputs",
    ],
)
def test_refusals_change_nothing(make: Any, call: dict[str, Any], words: tuple[str, ...]) -> None:
    model = make()
    attributes, classes = set(vars(model)), [type(module) for module in model.modules()]
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, **call)
    assert all(word in str(caught.value) for word in words), caught.value
    assert set(vars(model)) == attributes
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "cuda"}, "'cuda'"),
        ({"token_mean": "mean"}, "'mean'"),
        ({"memory_budget": 0}, "memory_budget is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        liger_dist.WrapConfig(**options)


@pytest.mark.parametrize("strategy", [liger_dist.FSDP1, liger_dist.FSDP2])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"param_dtype": "bf16"}, "param_dtype is 'bf16'"),
        ({"reduce_dtype": torch.int32}, "torch.int32"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sharding_strategies_refuse(strategy: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        strategy(**options)


def test_fsdp2_refuses_an_unknown_lm_head() -> None:
    with pytest.raises(liger_dist.LigerDistError, match="lm_head is 'split'; expected one of 'gather'"):
        liger_dist.FSDP2(lm_head="split")  # type: ignore[arg-type]


def test_unwrap_and_explain_refuse_a_model_that_is_not_wrapped() -> None:
    for verb in (liger_dist.unwrap, liger_dist.explain):
        with pytest.raises(liger_dist.LigerDistError, match=r"is not wrapped; call liger_dist\.wrap"):
            verb(make_model("llama"))


def test_explain_is_a_table() -> None:
    text = str(liger_dist.explain(liger_dist.wrap(make_model("gemma2"), "none")))
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in text.splitlines())
    assert lines["storage"] == "every rank has the full weight"
    assert lines["weight_shape"] == "(101, 16)"
    assert lines["adapter"] == "replicated"
    assert "softcap 30.0" in lines["loss"]
    assert "refused" not in lines


@pytest.mark.parametrize(
    ("mesh", "words"), [((4,), "needs 4 ranks but 2"), ((1, 1, 2), "expected \\(shard,\\)"), ((0, 2), "above 0")]
)
def test_a_mesh_that_does_not_fit_is_refused_on_every_rank(
    mesh: tuple[int, ...], words: str, workers_2: Workers
) -> None:
    import re

    for message in workers_2.run(refusal_of_mesh, mesh):
        assert re.search(words, message)


def refusal_of_mesh(mesh: tuple[int, ...]) -> str:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_model("llama"), "fsdp2", mesh=mesh)
    return str(caught.value)


def test_other_refusals_with_two_processes(workers_2: Workers) -> None:
    for messages in workers_2.run(refusals_of_two):
        assert "gradients would not be averaged" in messages["none"]
        assert "no sharding adapter can compute the loss" in messages["columns"]
        assert "the weight is placed S(1)" in messages["columns"]
        assert "storage=the weight is a DTensor that no framework unshards" in messages["columns"]
        assert "see different tokens" in messages["different tokens"]
        assert "strategy='ddp'" in messages["global mean"]


def refusals_of_two() -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    messages = {}
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_model("llama"), "none")
    messages["none"] = str(caught.value)
    model = liger_dist.wrap(make_model("llama"))
    parallelize_module(model.lm_head, init_device_mesh(compute_device().type, (2,)), RowwiseParallel())
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(**make_batch(0))
    messages["columns"] = str(caught.value)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(make_model("llama"), "tp")(**make_batch(dist.get_rank()))
    messages["different tokens"] = str(caught.value)
    model = liger_dist.wrap(make_model("llama"), config=liger_dist.WrapConfig(token_mean="global"))
    with pytest.raises(liger_dist.LigerDistError) as caught:
        model(**make_batch(0))
    messages["global mean"] = str(caught.value)
    return messages


def test_unwrap_under_every_strategy(workers_2: Workers) -> None:
    for results in workers_2.run(unwrapped):
        assert results == {
            "ddp": ("LlamaForCausalLM", 101),
            "fsdp1": ("FullyShardedDataParallel", 101),
            "fsdp2": ("FSDPLlamaForCausalLM", 101),
            "tp": ("LlamaForCausalLM", 101),
            "deepspeed": ("LlamaForCausalLM", 101),
        }


def unwrapped() -> dict[str, tuple[str, int]]:
    results = {}
    for strategy in ("ddp", "fsdp1", "fsdp2", "tp", "deepspeed"):
        wrapped: nn.Module = liger_dist.wrap(make_model("llama"), strategy)  # type: ignore[arg-type]
        wrapped(**make_batch(0)).loss.backward()
        left: Any = liger_dist.unwrap(wrapped)
        assert not any(isinstance(module, FusedLMHead) for module in left.modules())
        assert "forward" not in vars(getattr(left, "module", left))
        results[strategy] = (type(left).__name__, left(**make_batch(0)).logits.shape[-1])
    return results


@pytest.mark.smoke
def test_a_copy_of_a_model_inside_ddp_stands_alone(workers_2: Workers) -> None:
    for differences in workers_2.run(copied_out_of_ddp):
        assert differences == (0.0, 0.0)


def copied_out_of_ddp() -> tuple[float, float]:
    wrapped = liger_dist.wrap(make_model("llama"), "ddp")
    twin: Any = copy.deepcopy(wrapped.module)
    batch = make_batch(dist.get_rank())
    with torch.no_grad():
        twin.lm_head.weight.mul_(2.0)
        loss = float(twin(**batch).loss)
        own = float(wrapped(**batch).loss)
        twin.lm_head.weight.div_(2.0)
    assert loss != own
    return abs(float(twin(**batch).loss) - own), abs(float(wrapped.module(**batch).loss) - own)


def test_a_mixture_of_experts_keeps_its_router_loss() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = make_config("llama").to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = MixtralConfig(
        **{name: settings[name] for name in names},
        num_key_value_heads=1,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).to(compute_device())
    reference = copy.deepcopy(model)
    liger_dist.wrap(model)
    output, expected = model(**make_batch(0)), reference(**make_batch(0))
    assert not hasattr(output, "logits")
    assert expected.aux_loss > 0.1
    assert relative_error(output.loss, expected.loss) < 1e-6
    output.loss.backward()
    expected.loss.backward()
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        if other.grad is not None:
            assert relative_error(parameter.grad, other.grad) < 1e-4, name


class NoStrategy:
    """Has the methods of a strategy and not its attributes."""

    def check(self, *_: Any, **__: Any) -> None: ...

    def check_model(self, *_: Any, **__: Any) -> None: ...

    def shard(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("strategy", "words"),
    [(liger_dist.FSDP2, "not a class"), (NoStrategy(), "that has name, has_collectives"), (3, "is 3")],
)
def test_what_is_no_strategy_is_refused(strategy: Any, words: str) -> None:
    model = make_model("llama")
    with pytest.raises(liger_dist.LigerDistError, match=words):
        liger_dist.wrap(model, strategy)
    assert not liger_dist.is_wrapped(model)


def test_a_model_that_was_not_initialised_is_not_wrapped_again() -> None:
    config = make_model("llama").config
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    own = model._init_weights
    model._init_weights = lambda module: None if isinstance(module, torch.nn.Linear) else own(module)
    with pytest.raises(liger_dist.LigerDistError, match="without values"):
        liger_dist.wrap(model, "none")
    with pytest.raises(liger_dist.LigerDistError, match="sharded or initialised already"):
        liger_dist.wrap(model, "none")
