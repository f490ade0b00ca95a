"""verify: silent on what is right, one sentence for what is wrong, and nothing changed by it."""

from __future__ import annotations

import copy
import sys
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
import torch.distributed as dist
from cells import PRINCIPAL, Cell, _zero
from harness import Workers
from layouts import SESSIONS
from models import HIDDEN_SIZE, VOCAB_SIZE, full, make_batch, make_model
from peft_methods import adapted, batch_of
from test_conformance import build, run_micro_batches, skip_without
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma3nTextConfig

import liger_dist
from liger_dist.fused_layers import norm
from liger_dist.fused_layers.swap import Swapped
from liger_dist.losses import linear_cross_entropy
from liger_dist.sharding.process_groups import compute_device
from liger_dist_kernels import norm_fwd


@pytest.mark.nightly(
    cell=[
        "FSDP1, head in its own unit on 2",
        "FSDP2, head alone on 2",
        "FSDP2, by wrap, vocab-parallel head, HSDP on 4",
        "ZeRO, stage 0 on 2",
        "ZeRO, stage 1 on 2",
        "ZeRO, stage 2 on 2",
    ]
)
@pytest.mark.parametrize("cell", PRINCIPAL, ids=str)
def test_it_finds_nothing_in_what_is_right_and_leaves_no_trace(
    cell: Cell, workers_2: Workers, workers_4: Workers
) -> None:
    skip_without(cell)
    workers = workers_2 if cell.world == 2 else workers_4
    plain, verified = (workers.run(train_around_verify, cell, how_often) for how_often in (0, 1))
    for before, after in zip(plain, verified, strict=True):
        assert after.pop("problems") == before.pop("problems") == ()
        assert after == before


def train_around_verify(cell: Cell, how_often: int) -> dict[str, Any]:
    """Two steps with dropout and momentum; everything they leave behind, exactly."""
    model: Any = build(cell)
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    session = SESSIONS[cell.engine](cell, model)
    session.root.train()
    torch.manual_seed(5)
    left: dict[str, Any] = {"problems": ()}
    for step in range(2):
        batches = [[make_batch(r, seed=step)] for r in range(session.data_world)]
        for _ in range(how_often):
            left["problems"] += liger_dist.verify(session.root, batches[session.data_rank][0]).problems
        left[f"losses {step}"] = run_micro_batches(session, batches)
        session.step()
        left[f"state {step}"] = torch.get_rng_state().double().sum().item()
    left |= {name: value.double().sum().item() for name, value in session.parameters().items()}
    session.close()
    return left


def test_it_finds_each_planted_fault(workers_2: Workers) -> None:
    for found in workers_2.run(faults):
        assert "twice the loss does not give twice" in found["stale scale"]
        assert "gradient differs" in found["lost gradient"]
        assert "the fused loss is" in found["wrong loss"]
        assert "torch.bfloat16" in found["bf16 loss"]
        assert "should be alike on several ranks" in found["divergence"]
        assert found["nothing"] == ""


def faults() -> dict[str, str]:
    found = {}
    batch = make_batch(dist.get_rank())
    own_backward = linear_cross_entropy._LinearCrossEntropy.backward
    own_compute = linear_cross_entropy.fused_linear_cross_entropy

    def stale(ctx: Any, d_loss: Any, *rest: Any) -> Any:
        return own_backward(ctx, torch.ones_like(d_loss), *rest)

    def lost(ctx: Any, *upstream: Any) -> Any:
        d_hidden, d_weight, *rest = own_backward(ctx, *upstream)
        return d_hidden, torch.zeros_like(d_weight), *rest

    def wrong(*args: Any, **kwargs: Any) -> Any:
        output = own_compute(*args, **kwargs)
        object.__setattr__(output, "loss", output.loss * 1.5)
        return output

    from liger_dist.sharding import base

    for name, place, attribute, fault in (
        ("stale scale", linear_cross_entropy._LinearCrossEntropy, "backward", staticmethod(stale)),
        ("lost gradient", linear_cross_entropy._LinearCrossEntropy, "backward", staticmethod(lost)),
        ("wrong loss", base, "fused_linear_cross_entropy", wrong),
        ("nothing", base, "fused_linear_cross_entropy", own_compute),
    ):
        own = vars(place)[attribute]
        setattr(place, attribute, fault)
        try:
            found[name] = str(liger_dist.verify(liger_dist.wrap(make_model("llama"), "ddp"), batch).problems or "")
        finally:
            setattr(place, attribute, own)
    found["bf16 loss"] = str(liger_dist.verify(with_bf16_outputs(), batch).problems)
    wrapped = liger_dist.wrap(make_model("llama"), "ddp")
    with torch.no_grad():
        wrapped.module.model.norm.weight[0] += dist.get_rank()
    found["divergence"] = str(liger_dist.verify(wrapped, batch).problems)
    return found


def with_bf16_outputs() -> Any:
    """As a framework's default policy shards it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = liger_dist.wrap(make_model("llama", dtype=torch.float32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16))
    return model


def test_global_mean_and_one_process() -> None:
    model = liger_dist.wrap(make_model("gemma2"), "none", config=liger_dist.WrapConfig(token_mean="global"))
    verification = liger_dist.verify(model, make_batch(0))
    assert verification.ok, verification
    assert "verdict" in str(verification)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_refusals_are_agreed_on(workers_2: Workers) -> None:
    for sentences in workers_2.run(refused):
        assert "all labels of the batch are ignored" in sentences[0]
        assert "waiting for an optimizer step" in sentences[1]
        assert "the loss is not fused: WrapConfig(fused_loss=False)" in sentences[2]


def refused() -> list[str]:
    wrapped = liger_dist.wrap(make_model("llama"), "fsdp2")
    batch = make_batch(dist.get_rank())
    sentences = []

    def attempt(model: Any, arguments: Any) -> None:
        with pytest.raises(liger_dist.LigerDistError) as caught:
            liger_dist.verify(model, arguments)
        sentences.append(str(caught.value))

    # Only one rank has the fault; both say so.
    attempt(wrapped, make_batch(0, num_ignored=12) if dist.get_rank() == 1 else batch)
    wrapped(**batch).loss.backward()
    before = copy.deepcopy({name: full(p.grad) for name, p in wrapped.named_parameters()})
    attempt(wrapped, batch)
    assert all(torch.equal(full(p.grad), before[name]) for name, p in wrapped.named_parameters())
    unfused = liger_dist.wrap(make_model("llama"), "fsdp2", config=liger_dist.WrapConfig(fused_loss=False))
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.verify(unfused, batch, teacher=make_model("llama"))
    return [*sentences, str(caught.value)]


@pytest.mark.smoke
@pytest.mark.parametrize("stage", range(4))
def test_a_step_of_deepspeed_that_has_begun_is_left_alone(stage: int, workers_2: Workers) -> None:
    pytest.importorskip("deepspeed")
    plain, refused = (workers_2.run(step_of_deepspeed, stage, between) for between in (False, True))
    assert plain == refused


def step_of_deepspeed(stage: int, between: bool) -> dict[str, float]:
    session: Any = SESSIONS["zero"](_zero(stage), make_model("llama", dtype=torch.float32))
    batch = make_batch(dist.get_rank())
    session.backward(session.forward(batch).loss)
    if between:
        with pytest.raises(liger_dist.LigerDistError, match=r"call its step\(\) and zero_grad\(\) first"):
            liger_dist.verify(session.root, batch)
    gradients = session.step()
    values = session.parameters() | {f"gradient of {name}": gradient for name, gradient in gradients.items()}
    session.close()
    return {name: value.double().sum().item() for name, value in values.items()}


def test_put_off_reductions_and_faults_of_one_rank_are_refused_on_all(workers_2: Workers) -> None:
    for sentences in workers_2.run(not_ready):
        assert "has not reduced yet" in sentences["accumulated"]
        assert "turned off" in sentences["off"]
        assert "lm_head has 101 rows" in sentences["label of one rank"]
        assert "no parameter requires one" in sentences["frozen"]


def not_ready() -> dict[str, str]:
    batch = make_batch(dist.get_rank())
    sentences = {}

    def attempt(name: str, model: Any, arguments: Any) -> None:
        with pytest.raises(liger_dist.LigerDistError) as caught:
            liger_dist.verify(model, arguments)
        sentences[name] = str(caught.value)

    wrapped = liger_dist.wrap(make_model("llama"), "fsdp2")
    wrapped.set_requires_gradient_sync(False)
    attempt("off", wrapped, batch)
    wrapped(**batch).loss.backward()
    attempt("accumulated", wrapped, batch)
    wrapped = liger_dist.wrap(make_model("llama"), "fsdp2")
    wrong = batch["labels"].clone()
    wrong[0, -1] = 100 + dist.get_rank()
    attempt("label of one rank", wrapped, batch | {"labels": wrong})
    frozen = make_model("llama").requires_grad_(False)
    attempt("frozen", liger_dist.wrap(frozen, "fsdp2"), batch)
    return sentences


def test_tolerance_follows_the_dtype_of_the_head(workers_2: Workers) -> None:
    for verdicts in workers_2.run(verified_in_bf16):
        assert verdicts == [(), (), ()]


def verified_in_bf16() -> list[tuple[str, ...]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    batch = make_batch(dist.get_rank())
    verdicts = []
    model = liger_dist.wrap(make_model("llama", dtype=torch.float32))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    verdicts.append(liger_dist.verify(model, batch).problems)
    for strategy in (liger_dist.FSDP1, liger_dist.FSDP2):
        model = liger_dist.wrap(make_model("llama", dtype=torch.float32), strategy(param_dtype=torch.bfloat16))
        verdicts.append(liger_dist.verify(model, batch).problems)
    return verdicts


@pytest.mark.smoke
def test_it_finds_faults_beside_the_loss() -> None:
    """Layers and attention: the same on both sides of a comparison of the head alone."""
    model: Any = make_model("llama")
    model.config._attn_implementation = "eager"
    wrapped: Any = liger_dist.wrap(model, "none")
    assert liger_dist.verify(wrapped, make_batch(0)).ok
    own = copy.deepcopy(wrapped.config)
    own._attn_implementation = "eager"
    for layer in wrapped.model.layers:
        layer.self_attn.config = own
    assert "as it was before wrap" in str(liger_dist.verify(wrapped, make_batch(0)).problems)

    wrapped = liger_dist.wrap(make_model("llama", dtype=torch.float32), "none")
    with mock.patch.object(norm, "norm_fwd", wrong_norm):
        assert "own layers and attention" in str(liger_dist.verify(wrapped, make_batch(0)).problems)
    assert liger_dist.verify(wrapped, make_batch(0, rows="packed")).ok
    by_lengths = liger_dist.verify(wrapped, make_batch(0, rows="packed, by lengths"))
    assert by_lengths.ok
    assert by_lengths.kept == ()
    assert isinstance(wrapped.model.norm, Swapped)
    assert "liger_dist" in liger_dist.explain(wrapped).attention


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "bloom", "qwen3_5_text"])
def test_texts_run_in_other_rows_too(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded texts in one row, and packed ones in separate rows; a border that is forgotten is a problem of packing."""
    wrapped = liger_dist.wrap(make_model(family), "none")
    ids = on_device.randint(1, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (on_device.arange(9) < on_device.tensor([[9], [5], [7]])).long()
    padded = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    packed = make_batch(0, rows="packed")
    for batch, other_rows in ((padded, "one row"), (packed, "separate rows")):
        right = liger_dist.verify(wrapped, batch)
        assert right.ok, right
        assert (right.other_rows, right.other_rows_error is None) == (other_rows, False)
    documents = sys.modules["liger_dist.model.documents"].Documents
    own = documents.__init__

    def forget(self: Any, begins: Tensor, *args: Any, **kwargs: Any) -> None:
        begins = begins.clone()
        begins[:, 1:] = False
        own(self, begins, *args, **kwargs)

    if family in ("llama", "gemma2", "qwen3_5_text"):
        return  # Their own masks still see the positions.
    monkeypatch.setattr(documents, "__init__", forget)
    problems = str(liger_dist.verify(wrapped, padded).problems)
    assert "with the texts of the batch in one row the gradients differ" in problems
    assert "The documents of a packed row mix" in problems


NOT_IN_OTHER_ROWS = {
    "one text": ("no two texts", lambda batch: {name: value[:1] for name, value in batch.items()}),
    "padding first": ("before a text", lambda batch: batch | {"attention_mask": batch["attention_mask"].flip(1)}),
    "a dense mask": ("dense attention_mask", lambda batch: batch | {"attention_mask": on_device.ones(3, 1, 9, 9)}),
    "positions from 1": ("from 0", lambda batch: batch | {"position_ids": 1 + on_device.arange(9).expand(3, -1)}),
}


@pytest.mark.parametrize("name", NOT_IN_OTHER_ROWS)
def test_texts_that_do_not_run_in_other_rows(name: str) -> None:
    reason, change = NOT_IN_OTHER_ROWS[name]
    wrapped = liger_dist.wrap(make_model("llama"), "none")
    ids = on_device.randint(1, VOCAB_SIZE, (3, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    if name == "padding first":
        batch["attention_mask"][0, 7:] = 0
        batch["labels"] = ids.masked_fill(batch["attention_mask"].flip(1) == 0, -100)
    verification = liger_dist.verify(wrapped, change(batch))
    assert verification.ok, verification
    assert verification.other_rows_error is None
    assert f"not compared: {verification.other_rows}" in str(verification)
    assert reason in verification.other_rows


def test_ranks_agree_on_texts_in_other_rows(workers_2: Workers) -> None:
    assert workers_2.run(other_rows_of_ranks) == ["the batch has no two texts"] * 2


def other_rows_of_ranks() -> str:
    """One rank has a single text, and none computes others than its batch."""
    wrapped = liger_dist.wrap(make_model("llama"), "fsdp2")
    rows = 3 if dist.get_rank() else 1
    ids = on_device.randint(1, VOCAB_SIZE, (rows, 9), generator=torch.Generator().manual_seed(0))
    verification = liger_dist.verify(wrapped, {"input_ids": ids, "labels": ids})
    assert verification.ok, verification
    return verification.other_rows


def test_packed_rows_with_dropout_stay_together() -> None:
    """Other rows would get other random numbers."""
    model: Any = make_model("gemma2")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    wrapped = liger_dist.wrap(model, "none")
    for rows in ("packed", "texts"):
        verification = liger_dist.verify(wrapped, make_batch(0, rows=rows))
        assert verification.ok, verification
        assert verification.other_rows == "the model draws random numbers"


UNFUSED = {
    "llama": lambda: make_model("llama", dtype=torch.float32),
    "ADALORA": lambda: adapted("ADALORA"),
    "CPT": lambda: adapted("CPT"),
}


@pytest.mark.parametrize("name", UNFUSED)
@pytest.mark.filterwarnings("ignore:liger_dist leaves the loss", "ignore:a loss of .* was computed from full logits")
def test_it_finds_faults_where_the_loss_is_not_fused(name: str) -> None:
    """The layers and attention are swapped all the same."""
    if name != "llama":
        pytest.importorskip("peft")
    batch = make_batch(0) if name == "llama" else batch_of(name, 0)
    wrapped = liger_dist.wrap(UNFUSED[name](), "none", config=liger_dist.WrapConfig(fused_loss=name != "llama"))
    right = liger_dist.verify(wrapped, batch)
    assert right.ok, right
    with mock.patch.object(norm, "norm_fwd", wrong_norm):
        assert "own layers and attention" in str(liger_dist.verify(wrapped, batch).problems)


def wrong_norm(x: Tensor, *args: Any, **kwargs: Any) -> Any:
    right = norm_fwd(x, *args, **kwargs)
    return right._replace(y=right.y * on_device.linspace(0.5, 1.5, x.shape[-1]).to(x))


def test_it_finds_gradients_that_ranks_do_not_share(workers_2: Workers) -> None:
    for found in workers_2.run(unshared_gradients):
        assert "differ between ranks that should share them, such as module.model.norm.extra" in found["not reduced"]
        assert "get a gradient on some ranks and none on others" in found["experts"]
        assert found["all experts"] == ""


def unshared_gradients() -> dict[str, str]:
    found = {}
    batch = make_batch(dist.get_rank())
    wrapped: Any = liger_dist.wrap(make_model("llama"), "ddp")
    # The first forward with gradients refuses parameters that came after wrap; later ones do not look.
    wrapped(**batch).loss.backward()
    wrapped.zero_grad()
    final = wrapped.module.model.norm
    final.extra = nn.Parameter(torch.ones(HIDDEN_SIZE, dtype=torch.float64, device=batch["labels"].device))
    final.register_forward_hook(lambda module, args, output: output * module.extra)
    found["not reduced"] = str(liger_dist.verify(wrapped, batch).problems or "")
    for name, runs_all in (("experts", False), ("all experts", True)):
        model: Any = make_model("llama")
        for layer in model.model.layers:
            layer.mlp = Experts(layer.mlp, runs_all=runs_all)
        found[name] = str(liger_dist.verify(liger_dist.wrap(model, "fsdp2"), batch).problems or "")
    return found


class Experts(nn.Module):
    """As modules, of which a rank calls the one that has its tokens."""

    def __init__(self, mlp: nn.Module, *, runs_all: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList([copy.deepcopy(mlp), copy.deepcopy(mlp)])
        self.runs_all = runs_all

    def forward(self, hidden_states: Tensor) -> Tensor:
        rank = dist.get_rank()
        output: Tensor = self.experts[rank](hidden_states)
        if self.runs_all:
            output = output + 0.0 * self.experts[1 - rank](hidden_states)
        return output


@pytest.mark.smoke
def test_verify_counts_labels_by_the_batchs_own_ignore_index() -> None:
    model = make_model("llama")
    liger_dist.wrap(model)
    batch: dict[str, Any] = make_batch(0)
    batch["labels"] = torch.full_like(batch["labels"], 3)
    with pytest.raises(liger_dist.LigerDistError, match="all labels of the batch are ignored"):
        liger_dist.verify(model, batch | {"ignore_index": 3})
    assert liger_dist.verify(model, batch | {"ignore_index": 4}).ok
    shifted = make_batch(0)
    shifted["shift_labels"] = torch.full_like(shifted["labels"], -100)
    with pytest.raises(liger_dist.LigerDistError, match="all labels of the batch are ignored"):
        liger_dist.verify(model, shifted)


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "lfm2"])
def test_lengths_beside_a_padding_mask_are_refused(name: str) -> None:
    """As in calls of the model: transformers takes a row with a mask for one text."""
    model, batch = liger_dist.wrap(make_model(name)), make_batch(0)
    batch = {key: batch[key][:1, :12] for key in ("input_ids", "labels")}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][:, 9:] = 0
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    ends = on_device.tensor([0, 5, 9, 12], dtype=torch.int32)
    batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 5, "max_length_k": 5}
    for refused in (lambda: liger_dist.verify(model, batch), lambda: model(**batch)):
        with pytest.raises(liger_dist.LigerDistError, match="beside a 2-D attention_mask with padding"):
            refused()


def test_an_optimizer_that_holds_other_parameters_is_a_problem(workers_2: Workers) -> None:
    for problems in workers_2.run(problems_of_optimizers):
        assert problems["its own"] == ()
        assert "the optimizer does not hold model.embed_tokens.weight and" in problems["of another model"][0]
        assert "parameters of the optimizer are not those of the model" in problems["of another model"][1]
        assert problems["without lm_head"] == (
            "the optimizer does not hold lm_head.weight; build it from model.parameters() after wrap, or freeze what "
            "it leaves out",
        )
        # Built while the last group was unsharded, which the model reshards where it is asked for its parameters.
        assert problems["after a loss"] == ()


def problems_of_optimizers() -> dict[str, tuple[str, ...]]:
    model: Any = liger_dist.wrap(make_model("llama"), "fsdp2")
    batch = make_batch(dist.get_rank())
    optimizers = {
        "its own": torch.optim.SGD(model.parameters(), lr=0.1),
        "of another model": torch.optim.SGD(make_model("llama").parameters(), lr=0.1),
        "without lm_head": torch.optim.SGD([p for n, p in model.named_parameters() if n != "lm_head.weight"], lr=0.1),
    }
    assert float(model(**batch).loss) > 0
    optimizers["after a loss"] = torch.optim.SGD(model.parameters(), lr=0.1)
    return {name: liger_dist.verify(model, batch, optimizer=one).problems for name, one in optimizers.items()}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_shared_keys_under_reentrant_checkpoints_are_a_problem(use_reentrant: bool) -> None:
    model: Any = AutoModelForCausalLM.from_config(
        Gemma3nTextConfig(
            vocab_size=101,
            vocab_size_per_layer_input=101,
            hidden_size=16,
            hidden_size_per_layer_input=8,
            intermediate_size=24,
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=4,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
            pad_token_id=0,
        )
    ).to(compute_device())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    wrapped = liger_dist.wrap(model.train(), "none")
    problems = liger_dist.verify(wrapped, make_batch(0)).problems
    assert any("share keys and values" in problem for problem in problems) == use_reentrant
