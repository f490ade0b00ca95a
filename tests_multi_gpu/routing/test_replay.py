"""Routing replay and recording, beside routers that take the same experts by hand, in fp64 and without wrap."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import on_device
import pytest
import torch
from models import VOCAB_SIZE, documents_of, make_batch, relative_errors, true_loss_sum
from routes import by_hand, routers_of, routes_for
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import liger_dist
from liger_dist.sharding.process_groups import compute_device

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPED = {
    **MLA,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 1,
    "moe_intermediate_size": 12,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 12, "head_dim": 8, "norm_topk_prob": True},
    "qwen3_moe, not normalised": {"num_experts": 8, "moe_intermediate_size": 12, "head_dim": 8},
    "mixtral": {"num_local_experts": 8, "head_dim": 8},
    "gpt_oss": {"num_local_experts": 8, "head_dim": 8, "layer_types": ["full_attention"] * 3},
    "deepseek_v2": {**GROUPED, "topk_method": "group_limited_greedy", "first_k_dense_replace": 0},
    "deepseek_v3": {**GROUPED, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
    "llama4_text": {"num_local_experts": 8, "head_dim": 8, "intermediate_size_mlp": 24, "interleave_moe_layer_step": 1},
}
LAYERS = SIZES["num_hidden_layers"]


def model_of(family: str, dtype: torch.dtype = torch.float64) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split(",")[0], **{**SIZES, **FAMILIES[family]}, experts_implementation="eager")
    model: Any = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for router in routers_of(model):
            # Zeros at first; and a bias that decides some choices.
            router.weight.normal_(0, 0.5)
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias.normal_(0, 0.3)
    return model.to(compute_device())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_exact(model: Any, loss: Tensor, reference: Any, truth: Tensor, tolerance: float = 1e-5) -> None:
    assert abs(float(loss) - float(truth)) < tolerance * abs(float(truth))
    found = relative_errors(gradients_of(model), gradients_of(reference), floor=1e-4)
    assert found
    assert max(found.values()) < 10 * tolerance, found


@pytest.mark.smoke
@pytest.mark.parametrize("known", ["all tokens", "but the last one of each row"])
@pytest.mark.parametrize("family", FAMILIES)
def test_given_experts(family: str, known: str) -> None:
    reference = model_of(family)
    model = liger_dist.wrap(copy.deepcopy(reference).float())
    batch = make_batch(0)
    routes = routes_for(batch, reference, unknown=known != "all tokens")
    with by_hand(reference, routes):
        total, count = true_loss_sum(reference, batch)
    (truth := total / count).backward()
    with liger_dist.replay_routing(model, routes):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert_exact(model, loss, reference, truth)
    # A choice of another model, and not the own one.
    assert abs(float(model(**batch, use_cache=False).loss) - float(truth)) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_forward_is_repeated_to_the_bit(family: str) -> None:
    model = liger_dist.wrap(model_of(family, torch.bfloat16))
    batch = make_batch(0)
    with torch.no_grad(), liger_dist.record_routing(model) as routes:
        recorded = model(**batch, use_cache=False, outputs=("log_prob",))
    with liger_dist.replay_routing(model, routes):
        replayed = model(**batch, use_cache=False, outputs=("log_prob",))
    assert torch.equal(recorded.log_prob, replayed.log_prob)
    assert routes.indices.shape == (len(routers_of(model)), batch["input_ids"].numel(), routers_of(model)[0].top_k)
    assert len(routes.layers) == len(routers_of(model))
    with torch.no_grad():
        for router in routers_of(model):
            router.weight.normal_(0, 2.0)
    with torch.no_grad(), liger_dist.record_routing(model) as others:
        model(**batch, use_cache=False)
    assert not torch.equal(others.indices, routes.indices)
    with torch.no_grad(), liger_dist.replay_routing(model, routes):
        moved = model(**batch, use_cache=False, outputs=("log_prob",))
    assert not torch.equal(moved.log_prob, recorded.log_prob)


CHECKPOINTS: dict[str, bool | None] = {"no checkpoint": None, "reentrant": True, "not reentrant": False}


@pytest.mark.parametrize("where", ["within", "afterwards", "in the next one"])
@pytest.mark.parametrize("of_layers", CHECKPOINTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_recomputed_layers_take_the_same_experts(family: str, of_layers: str, where: str) -> None:
    """Two micro-batches; the backward runs within its context, after all, or within that of the next micro-batch."""
    reference = model_of(family)
    model = liger_dist.wrap(copy.deepcopy(reference).float())
    model.train()
    if CHECKPOINTS[of_layers] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": CHECKPOINTS[of_layers]})
    batches = [make_batch(0), make_batch(1)]
    routes = [routes_for(batch, reference) for batch in batches]
    truth, losses = 0.0, []
    for batch, given in zip(batches, routes, strict=True):
        with by_hand(reference, given):
            total, count = true_loss_sum(reference, batch)
            (total / count).backward()
        truth += float(total) / count
    for batch, given in zip(batches, routes, strict=True):
        with liger_dist.replay_routing(model, given):
            loss = model(**batch, use_cache=False).loss
            if where == "within":
                loss.backward()
            elif where == "in the next one" and losses:
                losses[0].backward()
        losses.append(loss)
    for loss in losses[{"within": 2, "afterwards": 0, "in the next one": 1}[where] :]:
        loss.backward()
    assert_exact(model, sum(losses), reference, torch.tensor(truth))  # type: ignore[arg-type]
    # Nothing of it stays.
    plain = copy.deepcopy(reference)
    plain.zero_grad()
    expected = plain(**batches[0], use_cache=False).loss
    assert abs(float(model(**batches[0], use_cache=False).loss) - float(expected)) < 1e-5 * float(expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_lora_on_all_linear_layers_and_experts(compiled: bool) -> None:
    from peft import LoraConfig, get_peft_model

    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(r=4, target_modules="all-linear", target_parameters=parameters, init_lora_weights=False)
    torch.manual_seed(0)
    reference = get_peft_model(model_of("qwen3_moe"), lora)
    model: Any = copy.deepcopy(reference).float()
    if compiled:
        liger_dist.compile_layers(model)
    model = liger_dist.wrap(model)
    batch = make_batch(0)
    if compiled:
        # Its graphs exist before.
        model(**batch, use_cache=False).loss.backward()
        model.zero_grad()
    replayed(model, reference, batch)


def test_packed_documents() -> None:
    reference = model_of("qwen3_moe")
    model = liger_dist.wrap(copy.deepcopy(reference).float())
    batch = make_batch(0, rows="packed")
    routes = routes_for(batch, reference, unknown=False)
    total, count, start = on_device.tensor(0.0), 0, 0
    for document in documents_of(batch):
        tokens = document["input_ids"].numel()
        with by_hand(reference, routes[:, start : start + tokens]):
            one, number = true_loss_sum(reference, document)
        total, count, start = total + one, count + number, start + tokens
    (truth := total / count).backward()
    with liger_dist.replay_routing(model, routes):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    assert_exact(model, loss, reference, truth)


def test_one_entry_for_each_decoder_layer() -> None:
    """As engines answer: layers without experts have some, too."""
    model = liger_dist.wrap(model_of("deepseek_v3", torch.float32))
    batch = make_batch(0)
    routes = routes_for(batch, model)
    of_layers = torch.cat([torch.full_like(routes[:1], 5), routes])
    losses = []
    for given in (routes, of_layers, of_layers.to(torch.int16)):
        with torch.no_grad(), liger_dist.replay_routing(model, given):
            losses.append(model(**batch, use_cache=False).loss)
    assert float(losses[0]) == float(losses[1]) == float(losses[2])


def test_a_call_that_was_not_replayed_is_as_before() -> None:
    model = liger_dist.wrap(model_of("qwen3_moe", torch.float32))
    batch = make_batch(0)
    before = model(**batch, use_cache=False).loss
    routes = routes_for(batch, model)

    def fail() -> None:
        with liger_dist.replay_routing(model, routes):
            model(**batch, use_cache=False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert float(model(**batch, use_cache=False).loss) == float(before)
    assert not any("forward" in vars(module) for module in routers_of(model))


def _with(value: int, place: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    def change(routes: Tensor) -> Tensor:
        routes[place] = value
        return routes

    return change


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "fewer tokens": (lambda routes: routes[:, :-1], "are replayed in a call of"),
    "fewer layers": (lambda routes: routes[:-1], "routes of 2 layers for Qwen3MoeForCausalLM, which has 3 routers"),
    "fewer experts": (lambda routes: routes[..., :1], "which chooses 2 experts of each"),
    "an unknown expert": (_with(8, (0, 0, 0)), "routes name an expert that a router does not have"),
    "an expert twice": (lambda routes: torch.zeros_like(routes), "an expert twice for one token"),
    "some experts": (_with(-1, (1, 2, 1)), "only some of its experts"),
    "floats": (lambda routes: routes.float(), "expected integers"),
    "a list": (lambda routes: routes.tolist(), "routes are list; expected integers"),
    "two dimensions": (lambda routes: routes[0], "expected integers"),
}


@pytest.mark.skipif(compute_device().type == "cuda", reason="values on a GPU are checked by device-side assertions")
@pytest.mark.parametrize("reason", REFUSED)
def test_routes_that_do_not_fit(reason: str) -> None:
    change, words = REFUSED[reason]
    model = liger_dist.wrap(model_of("qwen3_moe", torch.float32))
    batch = make_batch(0)
    given = change(routes_for(batch, model, unknown=False))
    with pytest.raises(liger_dist.LigerDistError, match=words), liger_dist.replay_routing(model, given):
        model(**batch, use_cache=False)


def test_contexts_that_are_refused() -> None:
    model = liger_dist.wrap(model_of("qwen3_moe", torch.float32))
    batch = make_batch(0)
    routes = routes_for(batch, model)
    with pytest.raises(liger_dist.LigerDistError, match="3 of 3 routers"), liger_dist.replay_routing(model, routes):
        pass
    with liger_dist.record_routing(model), pytest.raises(liger_dist.LigerDistError, match="within another one"):
        liger_dist.replay_routing(model, routes).__enter__()
    with liger_dist.record_routing(model):
        model(**batch, use_cache=False)
        with pytest.raises(liger_dist.LigerDistError, match="was called twice within record_routing"):
            model(**batch, use_cache=False)
    with liger_dist.record_routing(model) as recorded:
        model(**batch, use_cache=False)
    other = liger_dist.wrap(model_of("deepseek_v3", torch.float32))
    with pytest.raises(liger_dist.LigerDistError, match="Record and replay the same model"), nullcontext():
        liger_dist.replay_routing(other, recorded).__enter__()


def test_models_without_experts() -> None:
    from models import make_model

    model = liger_dist.wrap(make_model("llama"))
    with pytest.raises(liger_dist.LigerDistError, match="has no experts whose routing"):
        liger_dist.record_routing(model).__enter__()


class OrderedRouter(nn.Module):
    """A score depends on the place of an expert."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.top_k, self.num_experts = router.weight, router.top_k, router.num_experts

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        experts = torch.topk(logits, self.top_k).indices
        return logits, torch.tensor([0.7, 0.3], dtype=logits.dtype).to(logits.device).expand(experts.shape), experts


class ClippedRouter(OrderedRouter):
    """Experts that it would not choose have no score."""

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        scores = logits.softmax(-1)
        scores = torch.where(scores >= scores.topk(3).values[:, -1:], scores, 0)
        weights, experts = scores.topk(self.top_k)
        return logits, weights, experts


class ArgmaxRouter(OrderedRouter):
    def forward(self, hidden: Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        experts = logits.argsort(-1)[:, -self.top_k :]
        # topk: a word of the code alone.
        return logits, logits.gather(1, experts).softmax(-1), experts if self.top_k else logits.topk(1)


UNKNOWN = {
    OrderedRouter: "the score of an expert depends on its place",
    ClippedRouter: "experts that it would not choose have no score",
    ArgmaxRouter: "it does not choose them by torch.topk",
}


@pytest.mark.parametrize("kind", UNKNOWN, ids=lambda kind: kind.__name__)
def test_routers_that_are_not_understood_are_named(kind: Any) -> None:
    model = model_of("qwen3_moe", torch.float32)
    model.model.layers[1].mlp.gate = kind(model.model.layers[1].mlp.gate)
    model = liger_dist.wrap(model)
    with (
        pytest.raises(
            liger_dist.LigerDistError, match=rf"model.layers.1.mlp.gate \({kind.__name__}\).*{UNKNOWN[kind]}"
        ),
        liger_dist.record_routing(model),
    ):
        model(**make_batch(0), use_cache=False)


def test_layers_that_share_a_router_are_refused() -> None:
    model = liger_dist.wrap(model_of("qwen3_moe", torch.float32))
    batch = make_batch(0)
    model.model.layers[1].mlp.gate = model.model.layers[0].mlp.gate
    routes = routes_for(batch, model)
    with (
        pytest.raises(liger_dist.LigerDistError, match="was called twice in a forward"),
        liger_dist.replay_routing(model, routes),
    ):
        model(**batch, use_cache=False)


def test_a_layer_that_was_exchanged_is_found() -> None:
    model = liger_dist.wrap(model_of("qwen3_moe", torch.float32))
    batch = make_batch(0)
    routes = routes_for(batch, model)
    with torch.no_grad(), liger_dist.replay_routing(model, routes):
        before = model(**batch, use_cache=False).loss
    model.model.layers[1].mlp.gate = copy.deepcopy(model.model.layers[1].mlp.gate)
    with torch.no_grad(), liger_dist.replay_routing(model, routes):
        assert float(model(**batch, use_cache=False).loss) == float(before)


class NoisyRouter(OrderedRouter):
    """Chooses twice in training."""

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        scores, experts = logits.topk(self.top_k)
        if self.training:
            scores, experts = (logits + torch.rand_like(logits)).topk(self.top_k)
        return logits, scores.softmax(-1), experts


def test_router_with_other_code_in_training_is_refused() -> None:
    model = model_of("qwen3_moe", torch.float32)
    model.model.layers[1].mlp.gate = NoisyRouter(model.model.layers[1].mlp.gate)
    with (
        pytest.raises(liger_dist.LigerDistError, match="2 times in a call, and 1 times when it was tried"),
        liger_dist.record_routing(model.train()),
    ):
        model(**make_batch(0), use_cache=False)


def replayed(model: Any, reference: Any, batch: dict[str, Tensor], **options: Any) -> None:
    """Compares a replay with routers that take the same experts by hand."""
    routes = routes_for(batch, reference)
    with by_hand(reference, routes):
        total, count = true_loss_sum(reference, batch)
    (truth := total / count).backward()
    with liger_dist.replay_routing(model, routes):
        loss = model(**batch, use_cache=False, **options).loss
    loss.backward()
    assert_exact(model, loss, reference, truth)


def test_a_router_that_was_changed_is_tried_again() -> None:
    """With one group there are none to allow."""
    reference = model_of("deepseek_v2")
    model = liger_dist.wrap(copy.deepcopy(reference).float())
    for router in routers_of(model):
        router.num_group = 1
    with torch.no_grad(), liger_dist.record_routing(model):
        model(**make_batch(0), use_cache=False)
    for router in routers_of(model):
        router.num_group = 4
    replayed(model, reference, make_batch(0))


def test_a_first_call_of_one_token_finds_the_groups() -> None:
    reference = model_of("deepseek_v2")
    for router in routers_of(reference):
        router.topk_group = 3
    model = liger_dist.wrap(copy.deepcopy(reference).float())
    with torch.no_grad(), liger_dist.record_routing(model):
        model(input_ids=make_batch(0)["input_ids"][:1, :1], use_cache=False)
    replayed(model, reference, make_batch(0))


def _saving(*operators: Any) -> Callable[[], Any]:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


@pytest.mark.parametrize("rows", [2, 3])
def test_selective_checkpoint_saves_no_results_of_a_trial(rows: int) -> None:
    """With two rows, those of a trial had the shape of the call's."""
    reference = model_of("qwen3_moe")
    model = liger_dist.wrap(copy.deepcopy(reference).float()).train()
    aten = torch.ops.aten
    saving = _saving(aten.mm.default, aten.addmm.default)
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": saving})
    replayed(model, reference, {name: value[:rows] for name, value in make_batch(0).items()})


@pytest.mark.parametrize("inner", CHECKPOINTS)
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_within_a_checkpoint(outer: bool, inner: str) -> None:
    """The outer one is recomputed within the context of another number of tokens."""
    reference = model_of("qwen3_moe")
    model: Any = copy.deepcopy(reference).float().train()
    if CHECKPOINTS[inner] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": CHECKPOINTS[inner]})
    batch, other = make_batch(0), {name: value[:1] for name, value in make_batch(1).items()}
    routes, zero = routes_for(batch, reference), on_device.zeros(()).requires_grad_()
    with by_hand(reference, routes):
        total, count = true_loss_sum(reference, batch)
    (truth := total / count).backward()
    with liger_dist.replay_routing(model, routes):
        loss = checkpoint(lambda more: model(**batch, use_cache=False).loss + more, zero, use_reentrant=outer)
    with liger_dist.replay_routing(model, routes_for(other, reference)):
        model(**other, use_cache=False)
        loss.backward()
    assert_exact(model, loss, reference, truth)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_two_models_in_one_checkpoint(is_reentrant: bool) -> None:
    references = [model_of("qwen3_moe"), model_of("mixtral")]
    models = [copy.deepcopy(reference).float() for reference in references]
    batch, zero = make_batch(0), on_device.zeros(()).requires_grad_()
    routes, truths = [routes_for(batch, reference) for reference in references], []
    for reference, given in zip(references, routes, strict=True):
        with by_hand(reference, given):
            total, count = true_loss_sum(reference, batch)
        truths.append(total / count)
        truths[-1].backward()

    def losses(more: Tensor) -> Any:
        return tuple(model(**batch, use_cache=False).loss + more for model in models)

    with liger_dist.replay_routing(models[0], routes[0]), liger_dist.replay_routing(models[1], routes[1]):
        found = checkpoint(losses, zero, use_reentrant=is_reentrant)
    sum(found).backward()
    for model, loss, reference, truth in zip(models, found, references, truths, strict=True):
        assert_exact(model, loss, reference, truth)


def test_a_copy_within_a_context_is_refused() -> None:
    model = liger_dist.wrap(model_of("qwen3_moe", torch.float32))
    routes = routes_for(make_batch(0), model)
    with liger_dist.record_routing(model), pytest.raises(liger_dist.LigerDistError, match="copied or pickled within"):
        copy.deepcopy(model)
    with (
        pytest.raises(liger_dist.LigerDistError, match="copied or pickled within"),
        liger_dist.replay_routing(model, routes),
    ):
        pickle.dumps(routers_of(model)[0])
    assert float(copy.deepcopy(model)(**make_batch(0)).loss) == float(model(**make_batch(0)).loss)


def test_contexts_that_end_in_another_order_compile_again_afterwards() -> None:
    first, second = (liger_dist.record_routing(model_of("qwen3_moe", torch.float32)) for _ in range(2))
    compiled: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    double = torch.compile(lambda values: values * 2, backend=backend)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    double(torch.ones(2))
    assert not compiled
    second.__exit__(None, None, None)
    double(torch.ones(2))
    assert len(compiled) == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_routers_that_peft_saves(enabled: bool) -> None:
    from peft import LoraConfig, get_peft_model

    plain = model_of("qwen3_moe")
    batch = make_batch(0)
    routes = routes_for(batch, plain)
    reference = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["gate"]))
    for router in routers_of(reference)[1::2]:
        nn.init.normal_(router.weight, std=0.5)
    model: Any = liger_dist.wrap(copy.deepcopy(reference).float())
    with by_hand(reference, routes.repeat_interleave(2, 0)), nullcontext() if enabled else reference.disable_adapter():
        total, count = true_loss_sum(reference, batch)
    with liger_dist.replay_routing(model, routes), nullcontext() if enabled else model.disable_adapter():
        loss = model(**batch, use_cache=False).loss
    assert abs(float(loss) - float(total / count)) < 1e-5 * float(loss)


class Engine(nn.Module):
    """Keeps the model as DDP and DeepSpeed do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, **inputs: Any) -> Any:
        return self.module(**inputs)


def test_names_of_routers_are_those_of_the_model_within_an_engine() -> None:
    model = model_of("qwen3_moe", torch.float32)
    with torch.no_grad(), liger_dist.record_routing(Engine(model)) as routes:
        Engine(model)(**make_batch(0), use_cache=False)
    assert routes.layers[0] == "model.layers.0.mlp.gate"
    with liger_dist.replay_routing(model, routes):
        model(**make_batch(0), use_cache=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_experts_whose_scores_underflow(dtype: torch.dtype) -> None:
    model = model_of("qwen3_moe, not normalised", torch.float32)
    for router in routers_of(model):
        nn.init.normal_(router.weight, std=4.0 if dtype is torch.float16 else 20.0)
    model = model.to(dtype)
    routes = routes_for(make_batch(0), model)
    with torch.no_grad(), liger_dist.replay_routing(model, routes):
        model(**make_batch(0), use_cache=False)


def test_tables_of_experts_by_token() -> None:
    """For more tokens than a trial has."""
    import families

    family = next(one for one in families.families_with_options() if str(one).startswith("causal deepseek_v4, tied"))
    model: Any = families.build(family).eval()
    tokens = on_device.tensor(range(3, 45)).view(3, 14) % 20
    with torch.no_grad(), liger_dist.record_routing(model) as routes:
        recorded = model(input_ids=tokens).logits
    with torch.no_grad(), liger_dist.replay_routing(model, routes):
        assert torch.equal(model(input_ids=tokens).logits, recorded)


def test_routes_that_may_be_those_of_layers_or_of_routers() -> None:
    """A first layer without experts, and a module of multi-token prediction with some."""
    from liger_dist.mtp import MultiTokenPrediction

    model = model_of("deepseek_v3", torch.float32)
    MultiTokenPrediction(model)
    model = liger_dist.wrap(model).train()
    with torch.no_grad(), liger_dist.record_routing(model) as routes:
        loss = model(**make_batch(0), use_cache=False).loss
    assert len(routes.layers) == LAYERS
    with pytest.raises(liger_dist.LigerDistError, match="pass those of the 2 decoder layers with a router"):
        liger_dist.replay_routing(model, routes.indices).__enter__()
    for given in (routes, routes.indices[:2]):
        with torch.no_grad(), liger_dist.replay_routing(model, given):
            assert float(model(**make_batch(0), use_cache=False).loss) == float(loss)


def test_another_default_device() -> None:
    model = model_of("qwen3_moe", torch.float32)
    batch = {name: value.clone() for name, value in make_batch(0).items()}
    inputs = model.get_input_embeddings()(batch["input_ids"])[:1]
    with torch.device("meta"), liger_dist.record_routing(model):
        model.model.layers[0].mlp(inputs)


@pytest.mark.parametrize("change", [lambda experts: experts.float(), lambda experts: experts[None]])
def test_routes_of_other_kinds(change: Any) -> None:
    model = model_of("qwen3_moe", torch.float32)
    with torch.no_grad(), liger_dist.record_routing(model) as routes:
        model(**make_batch(0), use_cache=False)
    routes.experts.update({name: experts.int() for name, experts in routes.experts.items()})
    with torch.no_grad(), liger_dist.replay_routing(model, routes):
        model(**make_batch(0), use_cache=False)
    routes.experts.update({name: change(experts) for name, experts in routes.experts.items()})
    with pytest.raises(liger_dist.LigerDistError, match=r"expected integers \[tokens, experts\]"):
        liger_dist.replay_routing(model, routes).__enter__()
