"""Packed documents in models with recurrent or convolution layers: refused where the layers would mix them, in every
family of the causal-LM mapping; every other call is as without wrap."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import families
import pytest
import torch
import torch.nn.functional as F
import transformers
from families import FAMILIES, Family, Hints, batch_for, build
from harness import Workers
from torch import Tensor, nn
from training_runs import config_for

import liger_dist
from liger_dist.fused_layers import recurrent
from liger_dist.fused_layers.recurrent import find_leaks, packed_by, packing_objection
from liger_dist.model.structure import find_structure

LENGTHS = (5, 7)
TOKENS = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
ENDS = torch.tensor([0, LENGTHS[0], TOKENS], dtype=torch.int32)
BY_LENGTHS = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 7, "max_length_k": 7}
SEQ_IDX = torch.tensor([[0] * LENGTHS[0] + [1] * LENGTHS[1]], dtype=torch.int32)
OF_ZAMBA = {"attention_hidden_size": 64, "attention_head_dim": 16}
MORE_HINTS = {
    "lfm2": Hints(config={"layer_types": ["conv", "full_attention"] * 2}),
    "zamba": Hints(config={"layer_types": ["linear_attention", "hybrid"] * 2, **OF_ZAMBA}),
    "zamba2": Hints(
        config={
            "layer_types": ["linear_attention", "hybrid"] * 2,
            "hybrid_layer_ids": [1, 3],
            "num_key_value_heads": 4,
            **OF_ZAMBA,
        }
    ),
}
"""what the default config lacks to have such a layer, or to be built"""
HYBRID_NAMES = """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_loop_text inkling2_text inkling_text jamba
    kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe
    qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma rwkv xlstm zamba zamba2 zaya
"""
HYBRIDS = frozenset(HYBRID_NAMES.split())
"""of transformers 5.24"""
OTHER_MIXERS = frozenset({"deepseek_v4", "reformer"})
"""compressed keys, attention within chunks: no softmax over one key of each token; documents are mixed as well"""
UNAWARE_NAMES = """
    afmoe bart bert bert-generation big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom camembert cpmant
    data2vec-text electra ernie gpt_oss granitemoe granitemoe_swa granitemoeshared marian mbart megatron-bert
    moss_transcribe_diarize mpt mvp openai-gpt opt pegasus plbart prophetnet rembert roberta roberta-prelayernorm
    roc_bert roformer trocr xglm xlm xlm-roberta xlm-roberta-xl xlnet xmod
"""
UNAWARE = frozenset(UNAWARE_NAMES.split())
"""attention masks that transformers 5.24 makes without position_ids: attention alone mixes what they pack"""
NOT_FINITE = {("lfm3", "padded"), ("recurrent_gemma", "padded")}
"""whose own gradients are NaN in transformers 5.24"""
OTHER_RELEASE = not transformers.__version__.startswith("5.24.")
ATTENTION_ALONE = 149
"""families that are wrapped and not refused, with transformers 5.24"""


def causal_families() -> list[Family]:
    return [family for family in families.families() if family.mapping == "causal"]


@pytest.fixture(scope="module")
def refused() -> dict[str, bool]:
    """Of every family that could be built and wrapped: whether packed documents are refused."""
    return {}


@pytest.fixture(autouse=True)
def hints(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, more in MORE_HINTS.items():
        monkeypatch.setitem(FAMILIES, name, more)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def made(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """A tiny model of a family in evaluation mode, and a batch."""
    family = next(family for family in causal_families() if family.name == name)
    model: Any = build(family).eval().to(dtype).cpu()
    return model, batch_for(family, model)


@pytest.mark.parametrize("family", causal_families(), ids=str)
def test_packed_documents_are_refused_where_they_would_mix(family: Family, refused: dict[str, bool]) -> None:
    try:
        # An index that the family's own code does not have ends a process that uses a GPU.
        model: Any = build(family).eval().cpu()
        batch = batch_for(family, model)
        model = in_fp64(model, batch)
        model(**batch)
    except Exception as error:
        pytest.skip(f"not built by the generic shrinking: {type(error).__name__}: {error}"[:200])
    mixed = {name: packed_differs(model, batch, how) for name, how in WAYS.items()}
    is_read = first_document_is_read(model, batch)
    try:
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
    except liger_dist.LigerDistError as refusal:
        pytest.skip(str(refusal)[:200])
    refused[family.name] = liger_dist.explain(model).packing is not None
    if not refused[family.name]:
        assert not any(is_refused(model, batch, how) for how in WAYS.values())
        assert OTHER_RELEASE or is_read == (family.name in UNAWARE), "documents are mixed, and not refused"
        return
    assert mixed["positions"], "documents are apart, and refused"
    assert is_read, "documents are apart, and refused"
    if family.name == "reformer":
        return  # It trains on rows of 64 tokens.
    for name, how in WAYS.items():
        # None: the model's own code raises.
        assert is_refused(model, batch, how) == (mixed[name] is not False), name
    results = trained_on_rows(model, batch)
    liger_dist.unwrap(model)
    for rows, (own_loss, own_gradients) in trained_on_rows(model, batch).items():
        loss, gradients = results[rows]
        assert loss == pytest.approx(own_loss, rel=1e-5), rows
        if (family.name, rows) not in NOT_FINITE:
            assert relative_error(gradients, own_gradients) < 1e-4, rows


def test_these_families_are_refused_and_no_others(refused: dict[str, bool]) -> None:
    if len(refused) < len(causal_families()) // 2 or OTHER_RELEASE:
        pytest.skip("only a part of the families was run, or they are of another transformers")
    names = {name for name, is_so in refused.items() if is_so}
    assert names == HYBRIDS | OTHER_MIXERS
    assert (len(names), len(refused) - len(names)) == (32, ATTENTION_ALONE)


WAYS: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": POSITIONS},
    "lengths": {"position_ids": POSITIONS, **BY_LENGTHS},
    "lengths alone": BY_LENGTHS,
}


def in_fp64(model: Any, batch: dict[str, Any]) -> Any:
    """The model in fp64 if its code lets fp64 through."""
    try:
        model.double()(**batch)
    except RuntimeError:
        return model.float()
    return model


def one_row(batch: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """The first row of a batch, packed."""
    rest = {name: value for name, value in batch.items() if name != "labels"}
    return {name: value[:1] if isinstance(value, Tensor) else value for name, value in rest.items()} | how


@torch.no_grad()
def packed_differs(model: Any, batch: dict[str, Any], how: dict[str, Any]) -> bool | None:
    """True if the logits of packed documents are not those of each alone: the truth, of the unwrapped model. None if
    its code raises."""
    row = one_row(batch, {})
    ids = row.pop("input_ids")
    try:
        packed = model(input_ids=ids, **row, **one_row({}, how)).logits
        alone = torch.cat([model(input_ids=part, **row).logits for part in ids.split(LENGTHS, 1)], 1)
        return not bool((packed - alone).abs().max() < 1e-4 * alone.abs().max())
    except (ValueError, TypeError, IndexError, RuntimeError):
        return None


@torch.no_grad()
def first_document_is_read(model: Any, batch: dict[str, Any]) -> bool:
    """True if the logits of the second of two documents, packed by positions, change with the tokens of the first."""
    row = one_row(batch, WAYS["positions"])
    other = row["input_ids"].clone()
    other[:, : LENGTHS[0]] = (other[:, : LENGTHS[0]] + 11) % 70 + 4
    try:
        one, two = (model(**row | {"input_ids": ids}).logits[:, -LENGTHS[1] :] for ids in (row["input_ids"], other))
    except (ValueError, TypeError, IndexError, RuntimeError):
        return False
    return not bool((one - two).abs().max() < 1e-4 * one.abs().max())


def is_refused(model: Any, batch: dict[str, Any], how: dict[str, Any]) -> bool:
    row = one_row(batch, how)
    try:
        model(**row, labels=row["input_ids"].clone())
    except liger_dist.LigerDistError as refusal:
        # Otherwise of an argument that the model does not have.
        return "packed documents" in str(refusal) and "a separate row" in str(refusal)
    except (ValueError, TypeError, IndexError, RuntimeError):
        return False
    return False


def trained_on_rows(model: Any, batch: dict[str, Any]) -> dict[str, tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of rows that are not packed."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 9:] = mask[1, 4:] = 0
    padded = batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    results = {}
    was_training = model.training
    model.train()
    for name, rows in {"one text": batch, "padded": padded}.items():
        model.zero_grad()
        loss = model(**rows).loss
        loss.backward()
        gradients = {key: p.grad.double() for key, p in model.named_parameters() if p.grad is not None}
        results[name] = float(loss.detach()), gradients
    model.train(was_training)
    return results


def relative_error(gradients: dict[str, Tensor], own: dict[str, Tensor]) -> float:
    assert gradients.keys() == own.keys()
    total = float(torch.stack([gradient.norm() for gradient in own.values()]).norm())
    return max(float((gradients[key] - own[key]).norm() / (own[key].norm() + 1e-3 * total)) for key in own)


@pytest.mark.parametrize("options", [{}, {"fused_loss": False}, {"varlen_attention": False}], ids=str)
@pytest.mark.parametrize("name", ["lfm2_moe", "granitemoehybrid"])
def test_hybrids_are_refused_with_every_option_and_in_evaluation(name: str, options: dict[str, Any]) -> None:
    model, batch = made(name)
    own = trained_on_rows(model, batch)
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False, **options))
    for training in (True, False):
        model.train(training)
        assert all(is_refused(model, batch, how) for how in WAYS.values())
        with torch.no_grad():
            assert all(is_refused(model, batch, how) for how in WAYS.values())
        with pytest.raises(liger_dist.LigerDistError, match="packed documents"):
            model(batch["input_ids"][:1], None, POSITIONS)  # by position, without labels
    for rows, (loss, gradients) in trained_on_rows(model, batch).items():
        assert loss == pytest.approx(own[rows][0], rel=1e-5)
        assert relative_error(gradients, own[rows][1]) < 1e-4
    liger_dist.unwrap(model)
    assert not is_refused(model, batch, WAYS["positions"])


def test_a_mask_restarting_nowhere_or_one_length_per_row_is_no_packing() -> None:
    """As for transformers, which takes a row with a 2-D mask for one text."""
    model, batch = made("lfm2_moe")
    rows = {
        "a 2-D mask": {"position_ids": POSITIONS, "attention_mask": torch.ones(1, TOKENS, dtype=torch.long)},
        "positions": {"position_ids": torch.arange(3, 3 + TOKENS)[None]},
        "one length": {"cu_seq_lens_q": ENDS[[0, 2]], "cu_seq_lens_k": ENDS[[0, 2]]},
        "an empty document": {"cu_seq_lens_q": ENDS[[0, 2, 2]], "cu_seq_lens_k": ENDS[[0, 2, 2]]},
    }
    own = {name: float(model(**row, labels=row["input_ids"]).loss) for name, row in packed_rows(batch, rows).items()}
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
    for name, row in packed_rows(batch, rows).items():
        assert float(model(**row, labels=row["input_ids"]).loss) == pytest.approx(own[name], rel=1e-5), name
    four_d = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    assert is_refused(model, batch, {"position_ids": POSITIONS, "attention_mask": four_d})
    of_images = POSITIONS.expand(4, 1, -1)
    assert packed_by({"input_ids": batch["input_ids"][:1], "position_ids": of_images}) == ("position_ids",)


def packed_rows(batch: dict[str, Any], rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: one_row(batch, how) for name, how in rows.items()}


class Unread(Tensor):
    """Raises where the host would wait for its values."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__bool__, Tensor.__int__, Tensor.item, Tensor.tolist, Tensor.cpu):
            raise AssertionError(f"the host reads a tensor: {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


def test_calls_without_packed_documents_read_no_tensor() -> None:
    ids = torch.zeros(2, TOKENS, dtype=torch.long).as_subclass(Unread)
    positions = POSITIONS.expand(2, -1).as_subclass(Unread)
    ends = torch.tensor([0, TOKENS, 2 * TOKENS]).as_subclass(Unread)
    assert packed_by({"input_ids": ids, "labels": ids, "attention_mask": ids, "position_ids": positions}) == ()
    assert packed_by({"input_ids": ids, "labels": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}) == ()
    with pytest.raises(AssertionError, match="the host reads"):
        packed_by({"input_ids": ids, "position_ids": positions})


def causal_conv(x: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **kwargs: Any) -> Tensor:
    """A causal convolution ``[B, D, S]`` that keeps documents apart by ``seq_idx``, as the package causal_conv1d."""
    size, documents = weight.shape[-1], kwargs.get("seq_idx")
    past = F.pad(x, (size - 1, 0)).unfold(-1, size, 1)
    if documents is not None:
        of_past = F.pad(documents, (size - 1, 0), value=-1).unfold(-1, size, 1)
        past = past * (of_past == documents[..., None])[:, None]
    result = (past * weight[:, None]).sum(-1)
    result = result if bias is None else result + bias[:, None]
    return F.silu(result) if activation in ("silu", "swish") else result


def test_what_the_models_own_code_keeps_apart_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the package for it is installed: here a function in its place, which takes ``seq_idx``."""
    from transformers.models.lfm2_moe import modeling_lfm2_moe

    monkeypatch.setattr(modeling_lfm2_moe, "causal_conv1d_fn", causal_conv)
    model, batch = made("lfm2_moe")
    apart = {"position_ids": POSITIONS, "seq_idx": SEQ_IDX}
    assert packed_differs(model, batch, {"position_ids": POSITIONS})
    assert packed_differs(model, batch, apart) is False
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
    assert not is_refused(model, batch, apart)
    assert not is_refused(model, batch, apart | BY_LENGTHS)
    assert is_refused(model, batch, BY_LENGTHS)
    row = one_row(batch, {"position_ids": POSITIONS})
    with pytest.raises(liger_dist.LigerDistError, match=r"Lfm2MoeShortConv .* Tell documents apart by seq_idx, which"):
        model(**row, labels=row["input_ids"])
    assert "seq_idx" not in str(liger_dist.explain(model).packing)


@pytest.mark.parametrize("name", ["lfm2_moe", "big_bird", "mamba2", "llama"])
def test_the_probe_leaves_a_model_as_it_was(name: str) -> None:
    model, _ = made(name)
    before = [dict(vars(module)) for module in model.modules()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    config, generator = model.config.to_dict(), torch.get_rng_state()
    find_leaks(model, find_structure(model))
    after = [dict(vars(module)) for module in model.modules()]
    assert [state.keys() for state in after] == [state.keys() for state in before]
    assert all(state[key] is own[key] for state, own in zip(after, before, strict=True) for key in own)
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("name", ["bamba", "qwen3_next", "llama", "qwen3_moe"])
def test_the_probe_of_a_large_model_without_storage(name: str) -> None:
    """Of the sizes of the default config: 7B to 80B."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name]())
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    leaks = find_leaks(model, find_structure(model))
    assert (leaks is not None) == (name in HYBRIDS)
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("raises", [True, False])
def test_a_hybrid_with_a_patched_forward_is_refused_also_where_it_cannot_be_run(raises: bool) -> None:
    for name in ("lfm2_moe", "llama"):
        model, batch = made(name)
        layer = model.model.layers[0]
        layer.forward = patched(layer.forward, raises=raises)
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
        assert is_refused(model, batch, WAYS["positions"]) == (name in HYBRIDS)
        if name in HYBRIDS:
            assert ("could not be probed (ValueError: 12 tokens" in str(liger_dist.explain(model).packing)) == raises
        assert layer.forward.__qualname__.startswith("patched")


def patched(forward: Any, *, raises: bool) -> Any:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if raises and x.shape[1] != TOKENS:
            raise ValueError(f"{TOKENS} tokens, please")
        return forward(x, *args, **kwargs)

    return call


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
    assert packed_differs(model, batch, WAYS["positions"]) is False
    assert packing_objection(model) is None
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False, varlen_attention=False))
    assert not is_refused(model, batch, WAYS["positions"])


def test_the_student_of_a_distillation_loss_is_refused_before_its_teacher_runs() -> None:
    model, batch = made("lfm2_moe")
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
    row = one_row(batch, WAYS["positions"])
    with pytest.raises(liger_dist.LigerDistError, match="packed documents"), never_called() as teacher:
        liger_dist.distillation_loss(model, teacher, **row, labels=row["input_ids"])


@contextmanager
def never_called() -> Iterator[nn.Module]:
    teacher, _ = made("lfm2_moe")
    calls: list[object] = []
    teacher.register_forward_pre_hook(lambda *_: calls.append(None))
    try:
        yield teacher
    finally:
        assert calls == []


def test_adapters_and_shards_change_nothing_and_the_probe_has_no_collective(workers_2: Workers) -> None:
    from peft import LoraConfig, get_peft_model

    model, _ = made("lfm2_moe")
    objection = packing_objection(model)
    assert objection == "its Lfm2MoeShortConv carries state from one document of a row into the next"
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.1))
    assert packing_objection(adapted) == objection
    assert workers_2.run(objection_of_one_rank) == [objection, None]


def objection_of_one_rank() -> str | None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model, _ = made("lfm2_moe")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return packing_objection(model) if dist.get_rank() == 0 else None


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
    wrapped = liger_dist.wrap(model, liger_dist.FSDP2(lm_head=head), config=liger_dist.WrapConfig(layer_kernels=False))
    refusals = []
    for everywhere in (True, False):
        if not everywhere and head == "gather":
            continue  # One rank's refusal ends the program, as that of a wrong label.
        packed = everywhere or dist.get_rank() == 1
        row = one_row(batch, WAYS["positions"] if packed else {})
        with pytest.raises(liger_dist.LigerDistError) as caught:
            wrapped(**row, labels=row["input_ids"])
        refusals.append(str(caught.value))
    loss = wrapped(**batch).loss
    loss.backward()
    return refusals, float(loss.detach()), own


@pytest.mark.parametrize("program", ["train", "plan", "teacher", "score"])
def test_the_program_refuses_a_hybrid_before_it_reads_data(
    program: str, data: Any, cache: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from liger_dist_train import run, scoring
    from liger_dist_train.model import check_packing, find_config, shell

    def read(*args: Any) -> Any:
        raise AssertionError("data was read")

    model, _ = made("mamba")
    model.config.vocab_size, model.config.hidden_size = 700, 32
    path = tmp_path / "config.json"
    model.config.to_json_file(path)
    monkeypatch.setattr(run, "load_data", read)
    monkeypatch.setattr(scoring, "load_data", read)
    changes = {"teacher": str(path)} if program == "teacher" else {"model": str(path)}
    config = config_for(data, cache, tmp_path / "out", dry_run=program == "plan", attention="eager", **changes)
    shared = {name: getattr(config, name) for name in ("model", "data", "tokenizer", "cache_dir", "num_proc")}
    of_scores = scoring.ScoreConfig(**shared, output_dir=str(tmp_path / "scores"))
    with pytest.raises(liger_dist.LigerDistError, match="MambaMixer") as caught:
        scoring.score(of_scores) if program == "score" else run.train(config)
    assert ("--attend_across_documents true" in str(caught.value)) == (program != "score")
    across = config_for(data, cache, tmp_path / "out", attend_across_documents=True, attention="eager", model=str(path))
    check_packing(across, shell(across, find_config(across, 601)))


def test_packed_documents_of_a_model_with_attention_alone_pass() -> None:
    model, batch = made("llama")
    assert recurrent.find_leaks(model, find_structure(model)) is None
    liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))
    assert liger_dist.explain(model).packing is None
    assert "packed documents" not in str(liger_dist.explain(model))
    assert not any(is_refused(model, batch, how) for how in WAYS.values())
