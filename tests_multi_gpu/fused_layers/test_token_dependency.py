"""The run without weights that finds recurrent layers: it changes nothing, has no collective, and what it does not
explain is refused under packing."""

from __future__ import annotations

import resource
import time
from typing import Any

import on_device
import pytest
import torch
from documents import quiet as quiet
from families import batch_for, build, families
from harness import Workers
from torch import Tensor

import liger_dist
from liger_dist.fused_layers.packed_calls import is_recurrent, packing_objection

POSITIONS = on_device.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
TOKENS = 12


def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A tiny model of a family in evaluation mode, and a batch."""
    family = next(family for family in families() if family.name == name)
    model: Any = build(family).eval()
    return model, batch_for(family, model)


def is_refused(model: Any, batch: dict[str, Any]) -> bool:
    """True if a row of two documents is."""
    ids = batch["input_ids"][:1]
    try:
        model(input_ids=ids, labels=ids, position_ids=POSITIONS)
    except liger_dist.LigerDistError as refusal:
        return "packed documents" in str(refusal) and "a separate row" in str(refusal)
    return False


@pytest.mark.parametrize("name", ["lfm2_moe", "big_bird", "mamba2", "llama"])
def test_the_probe_leaves_a_model_as_it_was(name: str) -> None:
    model, _ = made(name)
    before = [dict(vars(module)) for module in model.modules()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    config, generator = model.config.to_dict(), torch.get_rng_state()
    packing_objection(model)
    after = [dict(vars(module)) for module in model.modules()]
    assert [state.keys() for state in after] == [state.keys() for state in before]
    assert all(state[key] is own[key] for state, own in zip(after, before, strict=True) for key in own)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.nightly(name=["qwen3_next"])
@pytest.mark.parametrize("name", ["bamba", "qwen3_next", "llama", "qwen3_moe"])
def test_the_probe_of_a_large_model_without_storage(name: str) -> None:
    """Of the sizes of the default config: 7B to 80B."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name]())
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert is_recurrent(model) == (name in ("bamba", "qwen3_next"))
    assert packing_objection(model) is None
    assert time.process_time() - began < (40 if torch.cuda.is_available() else 10)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.smoke
@pytest.mark.parametrize("raises", [True, False])
def test_a_patched_layer_is_refused_where_it_cannot_be_run(raises: bool) -> None:
    for name in ("lfm2_moe", "llama"):
        model, batch = made(name)
        layer = model.model.layers[0]
        layer.forward = patched(layer.forward, raises=raises)
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
        assert is_refused(model, batch) == raises
        assert ("(ValueError: 12 tokens" in liger_dist.explain(model).packing) == raises
        assert layer.forward.__qualname__.startswith("patched")


def patched(forward: Any, *, raises: bool) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["hidden_states"]
        if raises and x.shape[1] != TOKENS:
            raise ValueError(f"{TOKENS} tokens, please")
        return forward(*args, **kwargs)

    return call


def patch_mixers(model: Any) -> None:
    """Patches the forwards of the recurrent layers, which rows of single documents would replace."""
    for module in model.modules():
        if type(module).__name__ == "Lfm2MoeShortConv":
            module.forward = patched(module.forward, raises=False)


def test_an_attention_that_is_not_recognised_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask keeps documents apart, although it has no softmax to recognise it by."""
    from transformers.models.llama import modeling_llama

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        groups = module.num_key_value_groups
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * module.scaling
        shares = ((scores + mask) - (scores + mask).amax(-1, keepdim=True)).exp()
        weights = shares / shares.sum(-1, keepdim=True)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attention)
    model, batch = made("llama")
    assert packing_objection(model) is None
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False, varlen_attention=False))
    assert not is_refused(model, batch)


def test_adapters_and_shards_change_nothing_and_the_probe_has_no_collective(workers_2: Workers) -> None:
    from peft import LoraConfig, get_peft_model

    model, _ = made("lfm2_moe")
    patch_mixers(model)
    objection = packing_objection(model)
    assert objection is not None
    assert objection.endswith("into the next, and its forward has been patched on the instance")
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.1))
    assert packing_objection(adapted) == objection
    assert workers_2.run(objection_of_one_rank) == [objection, None]


def objection_of_one_rank() -> str | None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, _ = made("lfm2_moe")
    patch_mixers(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return packing_objection(model) if dist.get_rank() == 0 else None


@pytest.mark.smoke
@pytest.mark.parametrize("head", ["gather", "vocab_parallel"])
def test_fsdp2_ranks_refuse_before_any_collective(head: str, workers_2: Workers) -> None:
    for refusals, loss, own in workers_2.run(of_ranks, head):
        assert all("Lfm2MoeShortConv" in refusal for refusal in refusals)
        assert loss == pytest.approx(own, rel=1e-5)


def of_ranks(head: str) -> tuple[list[str], float, float]:
    """Sentences that this rank raises; then its loss of a row that is one text, and that of the unwrapped model."""
    import torch.distributed as dist

    model, batch = made("lfm2_moe")
    own = float(model(**batch).loss)
    patch_mixers(model)
    wrapped = liger_dist.wrap(model, liger_dist.FSDP2(lm_head=head), config=liger_dist.WrapConfig(layer_kernels=False))
    refusals = []
    for everywhere in (True, False):
        if not everywhere and head == "gather":
            continue  # One rank's refusal ends the program, as that of a wrong label.
        packed = everywhere or dist.get_rank() == 1
        row = {"input_ids": batch["input_ids"][:1]} | ({"position_ids": POSITIONS} if packed else {})
        with pytest.raises(liger_dist.LigerDistError) as caught:
            wrapped(**row, labels=row["input_ids"])
        refusals.append(str(caught.value))
    loss = wrapped(**batch).loss
    loss.backward()
    return refusals, float(loss.detach()), own
