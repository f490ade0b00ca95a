"""Sequences whose parts several ranks hold: loss and every gradient against the unwrapped model on whole sequences."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
import torch.distributed as dist
from distilled import divergences
from harness import Workers
from models import VOCAB_SIZE, assert_below, full, make_batch
from mtp_models import add_mtp
from torch.distributed.device_mesh import init_device_mesh
from truth import relative_error

import liger_dist
from liger_dist.sharding.process_groups import compute_device
from liger_dist.wrap import full_logits

LENGTH = 12
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama, one key head": {"model_type": "llama", "num_key_value_heads": 1},
    "Qwen2, two key heads": {"model_type": "qwen2", "num_key_value_heads": 2},
    "Mistral, windows": {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 4},
    "Qwen3-MoE, experts": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "experts_implementation": "eager",
    },
}
FURTHER: dict[str, dict[str, Any]] = {
    "Qwen3, norms of heads": {"model_type": "qwen3", "num_key_value_heads": 2},
    "OLMo 2, norms after layers": {"model_type": "olmo2", "num_key_value_heads": 4},
    "SmolLM3, layers without positions": {
        "model_type": "smollm3",
        "num_key_value_heads": 2,
        "no_rope_layers": [1, 0],
        "pad_token_id": 0,
    },
    "Granite, scaled logits": {"model_type": "granite", "num_key_value_heads": 2, "logits_scaling": 4.0},
}
"""of packed rows alone"""
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "sp 2": ((2,), ("sp",)),
    "sp 4": ((4,), ("sp",)),
    "shard 2, sp 2": ((2, 2), ("shard", "sp")),
    "replicate 2, shard 1, sp 2": ((2, 1, 2), ("replicate", "shard", "sp")),
}


def build(family: str, *, tied: bool = False) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        **(FAMILIES | FURTHER)[family],
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).to(
        compute_device()
    )


def mesh_of(name: str) -> Any:
    shape, names = MESHES[name]
    return init_device_mesh(compute_device().type, shape, mesh_dim_names=names)


def batches(mesh: Any, rows: str) -> list[dict[str, Any]]:
    """One for each group of ranks that share sequences; "uneven": no number of ranks divides their length; "prompt":
    labels at the end alone, so that some ranks have none."""
    groups = dist.get_world_size() // mesh["sp"].size()
    found = [
        make_batch(group, rows=rows if rows in ("packed", "packed, by lengths", "padded") else "texts")
        for group in range(groups)
    ]
    for batch in found:
        if rows == "uneven":
            batch |= {name: value[:, : LENGTH - 1] for name, value in batch.items()}
        if rows == "prompt":
            batch["labels"][:, : LENGTH - 2] = -100
    return found


def errors_of_a_step(mesh_name: str, family: str, rows: str, options: dict[str, Any] | None = None) -> dict[str, float]:
    """Of the loss, averaged over ranks, and of every gradient."""
    options = dict(options or {})
    mesh = mesh_of(mesh_name)
    model, reference = with_reference(family, options)
    if options.pop("checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    micro_batches, gives_items = options.pop("micro_batches", 1), options.pop("gives_items", False)
    config = liger_dist.WrapConfig(mlp_tile_tokens=options.pop("mlp_tile_tokens", None))
    wrapped = liger_dist.wrap(model, liger_dist.FSDP2(mesh=mesh, **options), config=config)
    own = dist.get_rank() // mesh["sp"].size()
    errors: dict[str, float] = {}
    for _ in range(micro_batches):
        given = batches(mesh, rows)
        items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in given)
        expected = sum(reference(**batch, num_items_in_batch=items, use_cache=False).loss for batch in given)
        expected.backward()
        shard = liger_dist.shard_sequence(given[own], mesh)
        if gives_items:
            shard["num_items_in_batch"] = items / dist.get_world_size()
        loss = wrapped(**shard, use_cache=False).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        errors["loss"] = relative_error(mean / dist.get_world_size(), expected)
    got = {name: full(p.grad) for name, p in wrapped.named_parameters() if p.requires_grad}
    trained = {name: parameter for name, parameter in reference.named_parameters() if parameter.requires_grad}
    return errors | {name: relative_error(got[name], parameter.grad) for name, parameter in trained.items()}


def with_reference(family: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Returns a model with ``tied``, ``lora`` and ``four_bits`` of ``options``, and the same in fp64."""
    if options.pop("four_bits", False):
        from quantized import adapted, in_fp64

        model = adapted({}, {}).train()
        return model, in_fp64(model, {}, {})
    model = build(family, tied=options.pop("tied", False))
    lora = options.pop("lora", None)
    if lora is not None:
        model = with_adapters(model, **lora)
    return model, copy.deepcopy(model).double()


def with_adapters(model: Any, **options: Any) -> Any:
    """On all linear layers, with products that are not zero."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights="gaussian", **options
    )
    model = get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def assert_exact(results: list[dict[str, float]]) -> None:
    for errors in results:
        assert_below(errors, 2e-5)


ROWS = ("texts", "packed", "packed, by lengths", "padded", "uneven", "prompt")


@pytest.mark.cover("values")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_parts(family: str, rows: str, workers_2: Workers) -> None:
    assert_exact(workers_2.run(errors_of_a_step, "sp 2", family, rows))


@pytest.mark.cover("values")
@pytest.mark.nightly(family=list(FURTHER)[1:])
@pytest.mark.parametrize("rows", ["packed", "packed, by lengths"])
@pytest.mark.parametrize("family", FURTHER)
def test_packed_rows_of_further_families(family: str, rows: str, workers_2: Workers) -> None:
    assert_exact(workers_2.run(errors_of_a_step, "sp 2", family, rows))


@pytest.mark.parametrize("rows", ["packed", "prompt"])
@pytest.mark.parametrize("mesh", ["sp 4", "shard 2, sp 2", "replicate 2, shard 1, sp 2"])
def test_four_ranks(mesh: str, rows: str, workers_4: Workers) -> None:
    assert_exact(workers_4.run(errors_of_a_step, mesh, "Llama, one key head", rows))


OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "vocab-parallel": {"lm_head": "vocab_parallel"},
    "tied, vocab-parallel, checkpointing": {"tied": True, "lm_head": "vocab_parallel", "checkpointing": True},
    "tiles under checkpointing": {"checkpointing": True, "mlp_tile_tokens": 4},
    "two micro-batches": {"micro_batches": 2},
    "num_items_in_batch": {"gives_items": True},
    "compiled layers": {"compile_layers": True},
    "LoRA": {"lora": {}},
    "LoRA, frozen weights replicated": {"lora": {}, "frozen": "replicate"},
    "DoRA": {"lora": {"use_dora": True}},
    "LoRA on 4 bits": {"four_bits": True},
    "CPU offload": {"cpu_offload": True},
    "units of two layers": {"layers_per_unit": 2},
}


@pytest.mark.nightly(name=["compiled layers"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, workers_2: Workers) -> None:
    if name == "LoRA on 4 bits":
        pytest.importorskip("bitsandbytes")
    assert_exact(workers_2.run(errors_of_a_step, "sp 2", "Llama, one key head", "packed", OPTIONS[name]))


@pytest.mark.parametrize("lm_head", ["gather", "vocab_parallel"])
@pytest.mark.parametrize("objective", ["outputs", "distillation"])
def test_other_objectives(objective: str, lm_head: str, workers_2: Workers) -> None:
    assert_exact(workers_2.run(errors_of_objective, objective, lm_head))


def errors_of_objective(objective: str, lm_head: Any) -> dict[str, float]:
    """Of every gradient: log-probabilities and entropies in an objective of the caller, or a teacher."""
    mesh = mesh_of("sp 2")
    model, teacher = build("Llama, one key head"), build("Qwen2, two key heads").eval()
    reference, true_teacher = copy.deepcopy(model).double(), copy.deepcopy(teacher).double()
    wrapped = liger_dist.wrap(model, liger_dist.FSDP2(mesh=mesh, lm_head=lm_head))
    (batch,) = batches(mesh, "texts")
    shard, inputs = liger_dist.shard_sequence(batch, mesh), {"input_ids": batch["input_ids"], "use_cache": False}
    labels, logits = batch["labels"][:, 1:].flatten(), reference(**inputs).logits[:, :-1].flatten(0, 1)
    valid = labels != -100
    if objective == "outputs":
        output = wrapped(**shard, use_cache=False, outputs=("log_prob", "entropy"), differentiable=True)
        # FSDP2 averages gradients over the ranks.
        (dist.get_world_size() * (output.log_prob.sum() + 0.3 * output.entropy.sum())).backward()
        log_probs = logits.log_softmax(-1)
        of_labels = log_probs.gather(-1, labels.clamp_min(0)[:, None])[:, 0]
        (of_labels - 0.3 * (log_probs.exp() * log_probs).sum(-1))[valid].sum().backward()
    else:
        teacher = liger_dist.wrap(teacher, liger_dist.FSDP2(mesh=mesh))
        liger_dist.distillation_loss(wrapped, teacher, **shard, use_cache=False).loss.backward()
        with torch.no_grad():
            teacher_logits = true_teacher(**inputs).logits[:, :-1].flatten(0, 1)
        divergences(logits, teacher_logits)[valid].mean().backward()
    got = {name: full(parameter.grad) for name, parameter in wrapped.named_parameters()}
    return {name: relative_error(got[name], parameter.grad) for name, parameter in reference.named_parameters()}


def evaluated(mesh_name: str) -> dict[str, float]:
    """Loss, log-probabilities and logits without gradients, joined over the ranks."""
    mesh = mesh_of(mesh_name)
    model = build("Llama, one key head")
    reference = copy.deepcopy(model).double().eval()
    wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(mesh=mesh)).eval()
    (batch,) = batches(mesh, "uneven")
    with torch.no_grad():
        expected = reference(**batch, use_cache=False)
        shard = liger_dist.shard_sequence(batch, mesh)
        scored = wrapped(**shard, use_cache=False, outputs=("log_prob",))
        with full_logits(wrapped):
            logits = wrapped(**shard, use_cache=False).logits
    loss = scored.loss.clone()
    dist.all_reduce(loss)
    length = batch["input_ids"].shape[1]
    log_prob = liger_dist.gather_sequence(scored.log_prob, mesh)[:, :length]
    truth = torch.log_softmax(expected.logits[:, :-1], -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    valid = batch["labels"][:, 1:] != -100
    return {
        "loss": relative_error(loss / dist.get_world_size(), expected.loss),
        "logits": relative_error(liger_dist.gather_sequence(logits, mesh)[:, :length], expected.logits),
        "log_prob": relative_error(log_prob[:, :-1][valid], truth[valid]),
    }


def test_evaluation(workers_2: Workers) -> None:
    assert_exact(workers_2.run(evaluated, "sp 2"))


def verified(mesh_name: str, rows: str, options: dict[str, Any]) -> Any:
    mesh = mesh_of(mesh_name)
    wrapped: Any = liger_dist.wrap(build("Qwen2, two key heads"), liger_dist.FSDP2(mesh=mesh, **options))
    batch = batches(mesh, rows)[dist.get_rank() // mesh["sp"].size()]
    shard = liger_dist.shard_sequence(batch, mesh) | {"use_cache": False}
    before = {name: full(parameter).clone() for name, parameter in wrapped.named_parameters()}
    verification = liger_dist.verify(wrapped, shard)
    assert all(torch.equal(full(p), before[name]) and p.grad is None for name, p in wrapped.named_parameters())
    # The exchanges are there again.
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as called:
        wrapped(**shard)
    assert called.call_count >= 4
    return verification


def with_a_broken_exchange() -> Any:
    """Each rank gets its own blocks back."""
    mesh = mesh_of("sp 2")
    wrapped: Any = liger_dist.wrap(build("Qwen2, two key heads"), liger_dist.FSDP2(mesh=mesh))
    (batch,) = batches(mesh, "texts")
    shard = liger_dist.shard_sequence(batch, mesh) | {"use_cache": False}
    with mock.patch.object(dist, "all_to_all_single", lambda received, blocks, group: received.copy_(blocks)):
        return liger_dist.verify(wrapped, shard)


@pytest.mark.smoke
def test_verify_finds_a_broken_exchange(workers_2: Workers) -> None:
    for seen in workers_2.run(with_a_broken_exchange):
        assert any("the fused loss is" in problem for problem in seen.problems), seen


@pytest.mark.parametrize(("rows", "options"), [("packed", {}), ("prompt", {"lm_head": "vocab_parallel"})])
def test_verify_compares_with_full_sequences(rows: str, options: dict[str, Any], workers_2: Workers) -> None:
    for seen in workers_2.run(verified, "sp 2", rows, options):
        assert seen.ok, seen
        assert seen.gradient_error < 1e-5
        assert seen.loss == pytest.approx(seen.reference_loss, rel=1e-5)


def test_verify_over_two_groups(workers_4: Workers) -> None:
    for seen in workers_4.run(verified, "shard 2, sp 2", "packed", {}):
        assert seen.ok, seen


def losses_in_float8(mesh_name: str | None) -> list[float]:
    """Of four steps of AdamW, over all ranks; None: each rank has one of the two sequences."""
    model = build("Qwen2, two key heads")
    mesh = None if mesh_name is None else mesh_of(mesh_name)
    torch.compiler.set_stance("force_eager")
    wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(mesh=mesh, float8="tensorwise"))
    assert any(type(module).__name__.endswith("Float8Linear") for module in wrapped.modules())
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        rows = make_batch(0)
        if mesh is None:
            rows = {name: value[dist.get_rank() :][:1] for name, value in rows.items()}
        else:
            rows = liger_dist.shard_sequence({name: value[:2] for name, value in rows.items()}, mesh)
        loss = wrapped(**rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    torch.compiler.set_stance("default")
    return losses


def test_float8(workers_2: Workers) -> None:
    """Its scales are of a rank's tokens, so that losses differ from those of data parallelism by its rounding."""
    pytest.importorskip("torchao")
    for ours, data_parallel in zip(
        workers_2.run(losses_in_float8, "sp 2"), workers_2.run(losses_in_float8, None), strict=True
    ):
        assert ours == pytest.approx(data_parallel, rel=0.02)
        assert ours[-1] < ours[0]


def collectives_of_a_step(layers: int) -> tuple[int, int]:
    """All-to-alls of the forward and of the backward."""
    mesh = mesh_of("sp 2")
    model = build("Llama, one key head")
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    wrapped: Any = liger_dist.wrap(model, liger_dist.FSDP2(mesh=mesh))
    (batch,) = batches(mesh, "texts")
    counts = []
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as called:
        loss = wrapped(**liger_dist.shard_sequence(batch, mesh), use_cache=False).loss
        counts.append(called.call_count)
        loss.backward()
        counts.append(called.call_count - counts[0])
    return counts[0], counts[1]


@pytest.mark.parametrize("layers", [1, 2])
def test_two_exchanges_for_each_layer_and_direction(layers: int, workers_2: Workers) -> None:
    assert workers_2.run(collectives_of_a_step, layers) == [(2 * layers, 2 * layers)] * 2


def refused(case: str) -> str:
    """The sentence."""
    mesh = mesh_of("sp 2")
    config = liger_dist.WrapConfig()
    model: Any = build("Llama, one key head")
    strategy: Any = liger_dist.FSDP2(mesh=mesh)
    if case == "Mamba":
        from transformers import MambaConfig, MambaForCausalLM

        model = MambaForCausalLM(MambaConfig(vocab_size=101, hidden_size=16, num_hidden_layers=1))
    if case == "convolutions":
        from transformers import Lfm2Config, Lfm2ForCausalLM

        kinds = ["conv", "full_attention"]
        settings = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = Lfm2ForCausalLM(Lfm2Config(vocab_size=101, num_hidden_layers=2, layer_types=kinds, **settings))
    if case == "positions":
        from transformers import RobertaConfig, RobertaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
        model = RobertaForCausalLM(RobertaConfig(vocab_size=101, is_decoder=True, **sizes))
    if case == "windows in the mask":
        from transformers import PhimoeConfig, PhimoeForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        sizes |= {"num_hidden_layers": 1, "num_local_experts": 2, "sliding_window": 4}
        model = PhimoeForCausalLM(PhimoeConfig(vocab_size=101, **sizes))
    if case == "both directions":
        model.config.use_bidirectional_attention = True
    if case == "further tokens":
        model = add_mtp(model, depth=1, dtype=torch.float32)
    if case == "prompts":
        from peft import PromptTuningConfig, get_peft_model

        model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    if case == "dynamic":
        model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    if case == "dense":
        config = liger_dist.WrapConfig(varlen_attention=False)
    if case == "tensor parallel":
        names = ("shard", "sp", "tp")
        strategy = liger_dist.FSDP2(mesh=init_device_mesh(compute_device().type, (1, 2, 1), mesh_dim_names=names))
    if case == "fsdp1":
        strategy = liger_dist.FSDP1(mesh=mesh)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        wrap_and_call(case, model, strategy, config)
    return str(caught.value)


def wrap_and_call(case: str, model: Any, strategy: Any, config: liger_dist.WrapConfig) -> None:
    wrapped: Any = liger_dist.wrap(model, strategy, config=config)
    (batch,) = batches(strategy.mesh, "texts")
    if case != "whole":
        batch = liger_dist.shard_sequence(batch, strategy.mesh)
    if case == "another attention":
        wrapped.set_attn_implementation("sdpa")
    wrapped(**batch, use_cache=False, output_attentions=case == "attention weights")


REFUSED = {
    "Mamba": "it keeps its own attention",
    "convolutions": "conv",
    "positions": "it does not compute positions from position_ids alone",
    "windows in the mask": "its layers do not pass sliding_window",
    "both directions": "its attention is not causal",
    "further tokens": "predicts further tokens, which other ranks hold; leave out the axis",
    "prompts": "PEFT puts prompt tokens before",
    "another attention": "was set to 'sdpa' after wrap",
    "dynamic": "depends on the sequence length",
    "dense": "varlen_attention is False",
    "fsdp1": "is for strategy='fsdp2'",
    "tensor parallel": "none of them 'tp'",
    "whole": "shard the batch by liger_dist.shard_sequence",
    "attention weights": "attention weights",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str, workers_2: Workers) -> None:
    for sentence in workers_2.run(refused, case):
        assert REFUSED[case] in sentence


def cut(case: str) -> str:
    mesh = mesh_of("sp 2")
    ids = on_device.arange(12).view(2, 6)
    batch: dict[str, Any] = {"input_ids": ids}
    if case == "shape":
        batch["labels"] = ids[:, :3]
    if case == "unknown":
        batch["token_type_ids"] = ids
    if case == "tuple":
        batch["soft_labels"] = (ids[..., None], ids[..., None].float())
    if case == "inside":
        batch["attention_mask"] = on_device.tensor([[1, 1, 0, 0, 1, 1]] * 2)
    if case == "ends":
        batch["cu_seq_lens_q"] = on_device.tensor([0, 5])
    if case == "embeddings":
        batch = {"inputs_embeds": on_device.zeros(2, 6, 4)}
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.shard_sequence(batch, mesh)
    return str(caught.value)


BATCHES = {
    "shape": "labels has the shape (2, 3); expected (2, 6)",
    "unknown": "token_type_ids of shape (2, 6)",
    "tuple": "soft_labels holds tensors",
    "inside": "zeros between the tokens of a row",
    "ends": "ends at 5 but the micro-batch has 12 tokens",
    "embeddings": "input_ids is NoneType",
}


@pytest.mark.parametrize("case", BATCHES)
def test_batches_that_are_refused(case: str, workers_2: Workers) -> None:
    for sentence in workers_2.run(cut, case):
        assert BATCHES[case] in sentence


def with_another_ignored_label() -> Any:
    mesh = mesh_of("sp 2")
    ids = on_device.arange(1, 11).view(2, 5)
    return liger_dist.shard_sequence({"input_ids": ids, "labels": ids, "ignore_index": -1}, mesh)


def test_the_label_that_is_ignored_is_that_of_the_call(workers_2: Workers) -> None:
    first, second = workers_2.run(with_another_ignored_label)
    assert torch.cat([first["labels"], second["labels"]], 1)[0].tolist() == [2, 3, 4, 5, -1, -1]
    assert second["ignore_index"] == -1


def parts() -> dict[str, Any]:
    mesh = mesh_of("sp 2")
    ids = on_device.arange(1, 11).view(2, 5)
    weight = on_device.arange(10.0).view(2, 5)
    return liger_dist.shard_sequence(
        {"input_ids": ids, "labels": ids, "token_weight": weight, "use_cache": False}, mesh
    )


def weights_of_shifted_labels() -> Any:
    mesh = mesh_of("sp 2")
    ids = on_device.arange(1, 11).view(2, 5)
    weight = on_device.arange(10.0).view(2, 5)
    return liger_dist.shard_sequence({"input_ids": ids, "shift_labels": ids, "token_weight": weight}, mesh)


def test_weights_are_aligned_with_shifted_labels(workers_2: Workers) -> None:
    first, second = workers_2.run(weights_of_shifted_labels)
    assert torch.cat([first["labels"], second["labels"]], 1)[0].tolist() == [1, 2, 3, 4, 5, -100]
    assert torch.cat([first["token_weight"], second["token_weight"]], 1)[0].tolist() == [0, 1, 2, 3, 4, 0]


def test_the_parts_of_a_batch(workers_2: Workers) -> None:
    """Every token once, labels shifted before the cut, padding in separate documents."""
    first, second = workers_2.run(parts)
    assert torch.cat([first["input_ids"], second["input_ids"]], 1).tolist() == [[1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 0]]
    labels = torch.cat([first["labels"], second["labels"]], 1)
    assert labels.tolist() == [[2, 3, 4, 5, -100, -100], [7, 8, 9, 10, -100, -100]]
    assert torch.equal(first["shift_labels"], first["labels"])
    assert torch.cat([first["token_weight"], second["token_weight"]], 1)[0].tolist() == [1, 2, 3, 4, 0, 0]
    assert second["position_ids"].tolist() == [[3, 4, 0]] * 2
    for part in (first, second):
        assert part["cu_seq_lens_q"].tolist() == [0, 5, 6, 11, 12]
        assert part["max_length_q"] == 5
        assert part["use_cache"] is False
