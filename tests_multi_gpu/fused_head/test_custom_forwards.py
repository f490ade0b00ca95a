"""Models whose forward does more than the probe saw, or is called in unusual ways: against the unwrapped model, with
every parameter's gradient."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Workers
from models import HIDDEN_SIZE, VOCAB_SIZE, assert_same, full, gradients, make_batch, make_config, make_model
from torch import Tensor, nn

import liger_dist
from liger_dist.sharding.process_groups import compute_device

# Forwards that select or shift by an argument of the call.


def selecting_model() -> Any:
    from transformers import LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Selecting(LlamaForCausalLM):
        """As remote code does: selects tokens by a mask, and shifts by a number."""

        def forward(
            self, input_ids: Any = None, labels: Any = None, loss_mask: Any = None, offset: int = 1, **_: Any
        ) -> Any:
            hidden = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
            logits = self.lm_head(hidden)
            loss = None
            if labels is not None:
                scored, targets = logits[:, :-offset], labels[:, offset:]
                if loss_mask is not None:
                    keep = loss_mask[:, offset:].bool()
                    scored, targets = scored[keep], targets[keep]
                loss = F.cross_entropy(scored.reshape(-1, scored.shape[-1]), targets.reshape(-1))
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    source = make_model("llama")
    model = Selecting(source.config).double()  # type: ignore[arg-type]
    model.load_state_dict(source.state_dict())
    return model.to(compute_device())


@pytest.mark.smoke
def test_a_selection_that_the_probe_did_not_see_is_refused() -> None:
    wrapped = liger_dist.wrap(selecting_model(), "none")
    batch = make_batch(0, num_ignored=0)
    mask = torch.zeros_like(batch["labels"])
    mask[:, 5:] = 1
    refused = {"getitem : :-2": {"offset": 2}, "leaves labels out of its loss": {"loss_mask": mask}}
    if compute_device().type == "cuda":
        del refused["leaves labels out of its loss"]  # An assertion on the device ends the process.
    for operation, further in refused.items():
        with pytest.raises(liger_dist.LigerDistError, match=re.escape(operation)):
            wrapped(**batch, **further)
    # A mask that leaves out tokens without a label changes nothing.
    assert_same(
        wrapped, selecting_model(), batch | {"labels": batch["labels"].where(mask > 0, -100), "loss_mask": mask}
    )
    assert_same(wrapped, selecting_model(), batch)
    assert_same(wrapped, selecting_model(), {name: value[:, :7] for name, value in batch.items()})


# Positions of outputs.


@pytest.mark.smoke
@pytest.mark.parametrize("evaluates", [False, True])
def test_positions_of_outputs_are_those_of_the_model(evaluates: bool) -> None:
    wrapped = liger_dist.wrap(make_model("llama"), "none")
    batch = make_batch(0)
    with torch.set_grad_enabled(not evaluates):
        loss, logits = wrapped(**batch, output_hidden_states=True)[:2]
        short = wrapped(**batch)
    assert loss.dim() == 0
    for refusing in (logits, short[1], wrapped(**batch).to_tuple()[1]):
        with pytest.raises(liger_dist.LigerDistError, match="never computed"):
            refusing.sum()
    hidden = make_model("llama")(**batch, output_hidden_states=True, use_cache=False)[2]
    assert len(hidden) == len(wrapped(**batch, output_hidden_states=True)[2]) == 3


# Arguments of wrap and of calls.


@pytest.mark.smoke
def test_wrong_arguments_of_wrap_are_refused() -> None:
    model = make_model("llama")
    for given, sentence in (
        (("gpt2",), "model is 'gpt2'; expected a torch.nn.Module"),
        ((None,), "model is None; expected a torch.nn.Module"),
    ):
        with pytest.raises(liger_dist.LigerDistError, match=sentence):
            liger_dist.wrap(*given)  # type: ignore[arg-type]
    for config in ({}, {"outputs": ()}, liger_dist.WrapConfig):
        with pytest.raises(liger_dist.LigerDistError, match=r"expected a liger_dist.WrapConfig\(...\)"):
            liger_dist.wrap(model, "none", config=config)  # type: ignore[arg-type]
    with pytest.raises(liger_dist.LigerDistError, match="wrap the model first and compile the result"):
        liger_dist.wrap(torch.compile(model), "none")  # type: ignore[arg-type]
    assert_same(liger_dist.wrap(model, "none"), make_model("llama"), make_batch(0))


@pytest.mark.smoke
def test_an_unknown_keyword_warns_once_and_has_no_effect() -> None:
    wrapped = liger_dist.wrap(make_model("llama"), "none")
    batch = make_batch(0)
    with pytest.warns(UserWarning, match="called with 'token_type_ids', which neither"):
        wrapped(**batch, token_type_ids=batch["input_ids"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(wrapped, make_model("llama"), batch | {"token_type_ids": batch["input_ids"]})


def test_a_module_whose_forward_is_no_function() -> None:
    class Odd(nn.Module):
        forward = property(lambda self: self.call)

        def call(self, x: Tensor) -> Tensor:
            return x

    model: Any = make_model("llama")
    model.model.odd = Odd()
    assert_same(liger_dist.wrap(model, "none"), make_model("llama"), make_batch(0))


# Padding that is scored.


@pytest.mark.smoke
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_labels_that_are_scored_by_padding_warn_once(side: str, attention: str) -> None:
    """Padding on the left sees nothing; its hidden states are those of scaled_dot_product_attention, not of eager."""

    def made() -> Any:
        model: Any = make_model("llama")
        model.config._attn_implementation = attention
        return model

    batch = make_batch(0, num_ignored=0)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -4:] = 0
    if side == "left":
        mask = mask.flip(-1)
    batch |= {"attention_mask": mask, "labels": batch["labels"].where(mask > 0, -100)}
    if side == "right":
        batch["labels"][0, -3] = 5
    wrapped = liger_dist.wrap(made(), "none")
    if (side, attention) == ("left", "sdpa"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same(wrapped, made(), batch)
        return
    with pytest.warns(UserWarning, match="score logits of padding"):
        wrapped(**batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(**batch)
        own = liger_dist.wrap(made(), "none", config=liger_dist.WrapConfig(varlen_attention=False))
        if side == "right":  # Eager attention makes NaN of rows that see nothing.
            assert_same(own, made(), batch)


# A vocabulary that has grown since.


@pytest.mark.smoke
@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_has_grown(tied: bool) -> None:
    wrapped: Any = liger_dist.wrap(make_model("llama", tied=tied), "none")
    torch.manual_seed(1)
    wrapped.resize_token_embeddings(VOCAB_SIZE + 8, mean_resizing=False)
    batch = make_batch(0)
    batch["labels"][0, -1] = VOCAB_SIZE + 3
    if not tied:  # It is another module, which has to be wrapped.
        with pytest.raises(liger_dist.LigerDistError, match=r"liger_dist.unwrap\(model\) and wrap it again"):
            wrapped(**batch)
        return
    own: Any = make_model("llama", tied=tied)
    own.resize_token_embeddings(VOCAB_SIZE + 8, mean_resizing=False)
    own.load_state_dict(wrapped.state_dict())
    assert_same(wrapped, own, batch)


# Without gradients nothing is reduced over ranks with full weights.


def test_evaluation_of_one_rank_under_ddp_with_a_global_mean(workers_2: Workers) -> None:
    for mine, own in workers_2.run(evaluate_alone):
        assert mine == pytest.approx(own, rel=1e-6)


def evaluate_alone() -> tuple[list[float], list[float]]:
    wrapped = liger_dist.wrap(make_model("llama"), "ddp", config=liger_dist.WrapConfig(token_mean="global"))
    batch, mine, own = make_batch(dist.get_rank()), [], []
    with torch.no_grad():
        # As many batches as the rank has.
        for seed in range(3 * dist.get_rank()):
            for model in (wrapped, wrapped.module):
                mine.append(float(model(**make_batch(0, seed=seed)).loss))
                own.append(float(make_model("llama")(**make_batch(0, seed=seed)).loss))
    wrapped(**batch).loss.backward()
    return mine, own


# AdaLoRA's own forward adds to the loss.


def adalora() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.AdaLoraConfig(
        target_modules=["q_proj"], init_r=6, target_r=2, tinit=0, tfinal=2, total_step=10, orth_reg_weight=0.5,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(make_model("llama"), settings).double()


def test_adalora_keeps_its_regularizer() -> None:
    """AdaLoRA calls ``model.forward(...)``, which runs no hooks, and adds to the loss that it returns."""
    wrapped = liger_dist.wrap(adalora(), "none")
    assert_same(wrapped, adalora(), make_batch(0))
    assert float(wrapped(**make_batch(0), outputs=("entropy",)).entropy.sum()) > 0


# The swapped forward of the model sees the final arguments, and every exception.


@pytest.mark.skipif(compute_device().type == "cuda", reason="assertions on the device end the process")
@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("changes", ["items", "labels"])
def test_a_hook_that_changes_the_arguments_of_the_loss(changes: str, registered: str) -> None:
    def change(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if changes == "items":
            return args, kwargs | {"num_items_in_batch": 2 * kwargs["num_items_in_batch"]}
        hidden = torch.arange(kwargs["labels"].shape[1], device=kwargs["labels"].device) < 5
        return args, kwargs | {"labels": kwargs["labels"].masked_fill(hidden, -100)}

    wrapped, own = make_model("llama"), make_model("llama")
    own.register_forward_pre_hook(change, with_kwargs=True)
    if registered == "before":
        wrapped.register_forward_pre_hook(change, with_kwargs=True)
    wrapped = liger_dist.wrap(wrapped, "none")
    if registered == "after":
        wrapped.register_forward_pre_hook(change, with_kwargs=True)
    assert_same(wrapped, own, make_batch(0) | {"num_items_in_batch": 7})


def test_an_interrupted_call_is_over() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    wrapped: Any = liger_dist.wrap(make_model("llama"), "none")
    hook = wrapped.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        wrapped(**make_batch(0))
    hook.remove()
    hidden = torch.randn(3, 5, HIDDEN_SIZE, dtype=torch.float64, device=compute_device())
    assert wrapped.lm_head(hidden).shape == (3, 5, VOCAB_SIZE)


@pytest.mark.parametrize("state", ["wrapped", "unwrapped", "unfused"])
def test_a_model_is_freed_with_its_last_reference(state: str) -> None:
    config = liger_dist.WrapConfig(fused_loss=state != "unfused")
    model: Any = liger_dist.wrap(make_model("llama"), "none", config=config)
    model(**make_batch(0)).loss.backward()
    if state == "unwrapped":
        liger_dist.unwrap(model)
    collects = gc.isenabled()
    gc.disable()
    try:
        seen = [ref(part) for part in (model, model.lm_head.weight, model.model.layers[0].mlp.up_proj.weight)]
        del model
        assert [reference() for reference in seen] == [None, None, None]
    finally:
        if collects:
            gc.enable()


# Without a fused loss any model is sharded.


class HalfHead(nn.Linear):
    """A head that a loss cannot be fused into."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 0.5


def own_head() -> Any:
    model: Any = make_model("llama")
    torch.manual_seed(2)
    model.lm_head = HalfHead(HIDDEN_SIZE, VOCAB_SIZE, bias=False).double().to(compute_device())
    return model


def classifier() -> Any:
    from transformers import LlamaForSequenceClassification

    config: Any = make_config("llama")
    torch.manual_seed(2)
    return LlamaForSequenceClassification(config).double().to(compute_device())


MODELS: dict[str, Callable[[], Any]] = {"own head": own_head, "classifier": classifier}


@pytest.mark.parametrize("name", MODELS)
def test_any_head_without_a_fused_loss(name: str, workers_2: Workers) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=r"WrapConfig\(fused_loss=False\)"):
        liger_dist.wrap(MODELS[name](), "none")
    for error in (error for errors in workers_2.run(shard_any_head, name) for error in errors.values()):
        assert error < 1e-6


def shard_any_head(name: str) -> dict[str, float]:
    """The largest relative error of a gradient under each strategy, against the mean over both ranks' batches."""
    batches = [make_batch(rank) for rank in range(2)]
    if name == "classifier":
        batches = [batch | {"labels": batch["input_ids"][:, 0] % 2} for batch in batches]
    own = MODELS[name]()
    for batch in batches:
        (own(**batch).loss / 2).backward()
    wanted = gradients(own)
    found = {}
    for strategy in ("ddp", "fsdp2"):
        wrapped = liger_dist.wrap(MODELS[name](), strategy, config=liger_dist.WrapConfig(fused_loss=False))
        wrapped(**batches[dist.get_rank()]).loss.backward()
        mine = {
            key.removeprefix("module."): full(p.grad) for key, p in wrapped.named_parameters() if p.grad is not None
        }
        assert mine.keys() == wanted.keys()
        found[strategy] = max(
            float((mine[key] - wanted[key]).norm() / wanted[key].norm().clamp_min(1e-9)) for key in wanted
        )
    return found


def test_ddp_with_parameters_that_a_forward_leaves_unused(workers_2: Workers) -> None:
    for losses, mine, wanted in workers_2.run(train_on_embeddings):
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        assert mine == pytest.approx(wanted, rel=1e-6)


def train_on_embeddings() -> tuple[list[float], list[float], list[float]]:
    """Two steps from ``inputs_embeds``, which leave the embedding without a gradient."""
    batches = [make_batch(rank) for rank in range(2)]
    own: Any = make_model("llama")
    inputs = [own.get_input_embeddings()(batch["input_ids"]).detach() for batch in batches]
    total = [own(inputs_embeds=x, labels=b["labels"]).loss for x, b in zip(inputs, batches, strict=True)]
    (sum(total) / 2).backward()
    wrapped = liger_dist.wrap(make_model("llama"), liger_dist.DDP(find_unused_parameters=True))
    rank, losses = dist.get_rank(), []
    for _ in range(2):
        wrapped.zero_grad()
        loss = wrapped(inputs_embeds=inputs[rank], labels=batches[rank]["labels"]).loss
        loss.backward()
        losses.append(float(loss.detach()))
    norms = [
        [
            float(p.grad.norm())
            for name, p in model.named_parameters()
            if p.grad is not None and "embed_tokens" not in name
        ]
        for model in (wrapped, own)
    ]
    return losses, norms[0], norms[1]


# Forwards of which one row of six tokens, or their values alone, show nothing.


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 0.5


def flat(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.shape[-1])


def tripled(logits: Tensor) -> Tensor:
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient * 3)
    return logits


def probabilities(labels: Tensor, logits: Tensor) -> Tensor:
    return F.one_hot(labels.clamp_min(0), VOCAB_SIZE).to(logits.dtype).flatten(0, 1)


def loss_of_row(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:-1], labels[1:])


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "its own": lambda m, z, y: m.loss_function(logits=z, labels=y, vocab_size=VOCAB_SIZE),
    "its own number of items": lambda m, z, y: m.loss_function(z, y, VOCAB_SIZE, 9),
    "shifted across rows": lambda m, z, y: F.cross_entropy(flat(z)[:-1], y.reshape(-1)[1:]),
    "the first row": lambda m, z, y: F.cross_entropy(z[0, :-1], y[0, 1:]),
    "half the gradient": lambda m, z, y: F.cross_entropy(flat(Halved.apply(z)[:, :-1]), y[:, 1:].reshape(-1)),
    "a hook": lambda m, z, y: F.cross_entropy(flat(tripled(z)[:, :-1]), y[:, 1:].reshape(-1)),
    "times the classes": lambda m, z, y: F.cross_entropy(flat(z[:, :-1]), y[:, 1:].reshape(-1)) * z.shape[-1],
    "times the tokens": lambda m, z, y: F.cross_entropy(flat(z[:, :-1]), y[:, 1:].reshape(-1)) * flat(z).size(0),
    "times all logits": lambda m, z, y: m.loss_function(logits=z, labels=y, vocab_size=VOCAB_SIZE) * z.numel(),
    "times the rows": lambda m, z, y: m.loss_function(logits=z, labels=y, vocab_size=VOCAB_SIZE) * len(z),
    "times the stride": lambda m, z, y: m.loss_function(logits=z, labels=y, vocab_size=VOCAB_SIZE) * z.mT.stride(-1),
    "times the picked": lambda m, z, y: m.loss_function(z, y, VOCAB_SIZE) * z[y > 5].shape[0],
    "times the masked": lambda m, z, y: m.loss_function(z, y, VOCAB_SIZE) * z.masked_select((y > 5)[..., None]).numel(),
    "times the indexed": lambda m, z, y: m.loss_function(z, y, VOCAB_SIZE) * z.index_select(1, y[0, :3] * 0).numel(),
    "times the dimensions": lambda m, z, y: m.loss_function(z, y, VOCAB_SIZE) * flat(z).unsqueeze(0)[None].dim(),
    "the last eight": lambda m, z, y: F.cross_entropy(flat(z[:, -9:-1]), y[:, -8:].reshape(-1)),
    "labels that are not shifted": lambda m, z, y: F.cross_entropy(flat(z[:, :-1]), y[:, :-1].reshape(-1)),
    "labels of the first row": lambda m, z, y: F.cross_entropy(flat(z), y[:1].expand(len(y), -1).reshape(-1)),
    "labels above 20 left out": lambda m, z, y: m.loss_function(z, y.masked_fill(y > 20, -100), VOCAB_SIZE),
    "probabilities": lambda m, z, y: F.cross_entropy(flat(z), probabilities(y, z)),
    "a sum by an old option": lambda m, z, y: F.cross_entropy(flat(z[:, :-1]), y[:, 1:].flatten(), size_average=False),
    "a row after the other": lambda m, z, y: sum(map(loss_of_row, z, y)) / len(y),
}  # fmt: skip


SIZES_OF_LOGITS = ("times all logits", "times the rows", "times the stride", "times the dimensions")
"""what is known of logits that were never computed"""


def model_with(name: str) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.modeling_outputs import CausalLMOutputWithPast

    class Remote(LlamaForCausalLM):
        """The loss may be exchanged later, as by an argument."""

        def forward(self, input_ids: Any = None, labels: Any = None, **_: Any) -> Any:
            logits = self.lm_head(self.model(input_ids=input_ids, use_cache=False).last_hidden_state)
            loss = None if labels is None else LOSSES[self.loss_name](self, logits, labels)
            return CausalLMOutputWithPast(loss=loss, logits=logits)

    source = make_model("llama")
    model = Remote(source.config).double()  # type: ignore[arg-type]
    model.load_state_dict(source.state_dict())
    model.loss_name = name
    return model.to(compute_device())


@pytest.mark.cover("values")
@pytest.mark.skipif(compute_device().type == "cuda", reason="assertions on the device end the process")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:liger_dist leaves the loss", "ignore:size_average and reduce")
def test_a_loss_of_the_forwards_own_is_the_same_or_refused(name: str, when: str) -> None:
    """Unfused where the probe sees it, refused where the code changes later; never another number."""
    batch = make_batch(0, num_ignored=0)
    own = model_with(name)
    refused: list[str] = []
    for first in ("its own", "the usual code") if when == "after" else (name,):
        wrapped = model_with(name if when == "before" else "its own")
        LOSSES["the usual code"] = lambda m, z, y: F.cross_entropy(flat(z[:, :-1]), y[:, 1:].reshape(-1))
        wrapped.loss_name = first
        liger_dist.wrap(wrapped, "none")
        wrapped.loss_name = name
        try:
            wrapped(**batch)
        except liger_dist.LigerDistError:
            assert when == "after"
            refused.append(first)
            continue
        assert_same(wrapped, own, batch)
    LOSSES.pop("the usual code", None)
    if name in SIZES_OF_LOGITS:
        assert "its own" not in refused


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["times the tokens", "times all logits", "times the picked"])
def test_a_compiled_forward_reads_the_sizes_of_its_logits(name: str) -> None:
    batch = make_batch(0, num_ignored=0)
    torch.compiler.reset()
    wrapped: Any = liger_dist.wrap(model_with(name), "none")
    wrapped.compile(backend="aot_eager")
    assert_same(wrapped, model_with(name), batch)
