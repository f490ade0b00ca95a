"""Bases of 4 bits with adapters: gradients under every strategy, refusals by name, and loading shard by shard."""

from __future__ import annotations

import io
import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full_gradients
from harness import Workers
from layouts import zero_settings
from models import make_batch, make_config, make_model, true_loss_sum
from quantized import STORAGES, STRATEGIES, adapted, by_parameter, folder, four_bit, in_fp64, outcomes
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist.model.quantized import four_bit_stacks
from liger_dist.sharding.process_groups import compute_device
from liger_dist.wrap import original_layers

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

LORA: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rsLoRA": {"use_rslora": True, "lora_alpha": 2},
    "a trained lm_head": {"modules_to_save": ["lm_head"]},
    "q and v": {"target_modules": ["q_proj", "v_proj"]},
}
USES: dict[str, dict[str, Any]] = {
    "": {},
    "checkpointing": {"checkpointing": True},
    "accumulation": {"accumulation": 2},
    "packed": {"rows": "packed"},
}


def cells_of(strategy: str) -> dict[str, tuple[Any, ...]]:
    """Every format of bitsandbytes, with adapters and uses in turn."""
    formats = itertools.product(STORAGES, (False, True), ("nf4", "fp4"))
    start = list(STRATEGIES).index(strategy)
    found = {}
    for index, (storage, double, kind) in enumerate(formats, start):
        lora, use = list(LORA)[index % len(LORA)], list(USES)[index % len(USES)]
        base = {"kind": kind, "double": double, "storage": storage, "tied": index % 3 == 0}
        if base["tied"] and lora == "a trained lm_head":
            base["tied"] = False
        parts = [strategy, kind, "double" * double, str(storage), lora, use, "tied" * base["tied"]]
        found[", ".join(filter(None, parts))] = (strategy, base, LORA[lora], USES[use])
    return found


def assert_exact_or_refused(found: dict[str, str], strategy: str) -> None:
    assert found
    for name, result in found.items():
        if strategy == "fsdp1":
            assert result.startswith("refused: "), name
            assert "is a 4-bit weight, which FSDP1 would flatten" in result
            assert "use frozen='replicate'" in result
        elif strategy == "ZeRO-3" and "DoRA" in name:
            # PEFT reads the partitioned weight, wrapped or not.
            assert "'Params4bit' object has no attribute 'ds_status'" in result, name
        else:
            assert result == "exact", name


@pytest.mark.nightly(strategy=["fsdp2, vocab-parallel"])
@pytest.mark.nightly(
    strategy=[
        "ddp",
        "fsdp2, replicated",
        "fsdp2, resharded late",
        "fsdp2, offloaded",
        "fsdp1, replicated",
        "ZeRO-2",
        "ZeRO-3",
    ]
)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "none"])
def test_gradients(strategy: str, workers_2: Workers) -> None:
    """Of each storage, kind, adapter and use; the slow test has all of them together."""
    cells = dict(list(cells_of(strategy).items())[::3])
    for found in workers_2.run(outcomes, cells):
        assert_exact_or_refused(found, strategy)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "none"])
def test_gradients_of_all_formats(strategy: str, workers_2: Workers) -> None:
    for found in workers_2.run(outcomes, cells_of(strategy), time_limit=600):
        assert len(found) == 16
        assert_exact_or_refused(found, strategy)


def test_gradients_of_three_ranks_whose_shards_differ_in_size() -> None:
    """The bytes of most weights are not divided by three."""
    with Workers(3) as workers:
        for found in workers.run(outcomes, dict(list(cells_of("fsdp2").items())[:2])):
            assert_exact_or_refused(found, "fsdp2")


def test_gradients_of_one_process() -> None:
    assert_exact_or_refused(outcomes(cells_of("none")), "none")


OF_EXPERTS = {
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": [
            f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in ("gate_up_proj", "down_proj")
        ],
    },
}
"""what LoRA is on; PEFT takes quantised parameters by their full names"""


def cells_of_experts(strategy: str, *, in_shards: bool = False) -> dict[str, tuple[Any, ...]]:
    """Mixtures of which the experts are of 4 bits: with and without biases and transposed weights."""
    found = {}
    for family, lora in itertools.product(("qwen3_moe", "gpt_oss"), OF_EXPERTS):
        for index, use in enumerate(USES):
            base = {"family": family, "experts": True, "double": index % 2 == 0, "kind": ("nf4", "fp4")[index // 2]}
            found[f"{family}, {lora}, {use}"] = (strategy, base, OF_EXPERTS[lora], USES[use], in_shards)
    return found


def assert_experts_are_exact(found: dict[str, str], strategy: str) -> None:
    if strategy == "ZeRO-3":
        # ZeRO-3 gathers all parameters of Qwen3's experts at once, so that grouped products add LoRA there.
        lost = {name: found.pop(name) for name in list(found) if name.startswith("gpt_oss, experts")}
        assert lost
        assert all("which PEFT's own forward reads the second one without its LoRA" in one for one in lost.values())
    assert_exact_or_refused(found, strategy)


@pytest.mark.parametrize("strategy", ["fsdp2", "ZeRO-3"])
def test_gradients_of_experts(strategy: str, workers_2: Workers) -> None:
    cells = dict(list(cells_of_experts(strategy).items())[::3])
    for found in workers_2.run(outcomes, cells, time_limit=300):
        assert_experts_are_exact(found, strategy)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "none"])
def test_gradients_of_experts_under_every_strategy(strategy: str, workers_2: Workers) -> None:
    for found in workers_2.run(outcomes, cells_of_experts(strategy), time_limit=600):
        assert len(found) == 16
        assert_experts_are_exact(found, strategy)


def test_gradients_of_experts_of_one_process() -> None:
    assert_exact_or_refused(outcomes(dict(list(cells_of_experts("none").items())[::3])), "none")


@pytest.mark.nightly(strategy=["fsdp2, replicated"])
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2, replicated"])
def test_experts_loaded_shard_by_shard(strategy: str, workers_2: Workers) -> None:
    cells = dict(list(cells_of_experts(strategy, in_shards=True).items())[1::3])
    for found in workers_2.run(outcomes, cells, time_limit=300):
        assert found == dict.fromkeys(cells, "exact")


@pytest.mark.parametrize("lora", OF_EXPERTS)
def test_no_dequantized_experts_are_kept_for_the_backward(lora: str) -> None:
    """Three quarters of the parameters of a mixture, or more."""
    base = {"family": "qwen3_moe", "experts": True}
    model = liger_dist.wrap(adapted(base, OF_EXPERTS[lora]).train(), "none")
    shapes = {tuple(one.state.shape) for _, _, one in four_bit_stacks(model)}
    assert len(shapes) == 2
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**make_batch(0)).loss
    assert kept
    assert not shapes & set(kept)
    loss.backward()


@pytest.mark.nightly
def test_compiled_layers_with_experts_of_4_bits() -> None:
    base, lora = {"family": "qwen3_moe", "experts": True}, OF_EXPERTS["experts"]
    gradients = []
    for compiled in (False, True):
        model = adapted(base, lora).train()
        if compiled:
            liger_dist.compile_layers(model)
        wrapped = liger_dist.wrap(model, "none")
        wrapped(**make_batch(0)).loss.backward()
        gradients.append({name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def quantised_experts(dtype: torch.dtype) -> Any:
    """A model that is built, of which the experts alone are of 4 bits."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    model: Any = make_model("qwen3_moe", dtype=torch.float32)
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            parameter = getattr(layer.mlp.experts, name)
            parameter.data = parameter.data.to(dtype)
            replace_parameter_4bit(layer.mlp.experts, name, compress_statistics=True)
    return model


def quantised_by_bitsandbytes() -> Any:
    model = quantised_experts(torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, **OF_EXPERTS["attention"]))


def test_experts_that_bitsandbytes_has_quantised(workers_2: Workers) -> None:
    for truth, loss, sentence in workers_2.run(losses_and_refusal):
        assert loss == pytest.approx(truth, rel=1e-5)
        assert "gate_up_proj.original is a 4-bit weight" in sentence or "down_proj.original is a 4-bit" in sentence


def losses_and_refusal() -> tuple[float, float, str]:
    # Both on one device: bitsandbytes 0.50.2 reads wrong scales on CPUs where a block ends within a row.
    batch = make_batch(dist.get_rank())
    truth = float(quantised_by_bitsandbytes()(**batch).loss.detach())
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(quantised_by_bitsandbytes(), "fsdp1")
    wrapped = liger_dist.wrap(quantised_by_bitsandbytes(), "fsdp2")
    return truth, float(wrapped(**batch).loss.detach()), str(caught.value)


def test_scales_of_experts_are_in_the_state_dict() -> None:
    """bitsandbytes names them as attributes of the parameter, which torch's checkpoints look for."""
    lora = OF_EXPERTS["attention"]
    for made in (quantised_by_bitsandbytes, lambda: adapted({"family": "qwen3_moe", "experts": True}, lora)):
        model = liger_dist.wrap(made(), "none")
        state = get_model_state_dict(model)
        scales = [name for name in state if name.endswith("_extra_state")]
        assert len(scales) == 4
        assert all(isinstance(value, Tensor) for value in state.values())
        values = [getattr(module, stack.name) for _, module, stack in four_bit_stacks(model)]
        for _, _, stack in four_bit_stacks(model):
            stack.state.absmax.zero_()
        # bitsandbytes does not read the scales of linear layers that are there.
        model.load_state_dict({name: value for name, value in state.items() if ".experts." in name}, strict=False)
        for value, (_, module, stack) in zip(values, four_bit_stacks(model), strict=True):
            assert torch.equal(getattr(module, stack.name), value)


@pytest.mark.parametrize("target", ["meta", torch.bfloat16])
def test_scales_of_experts_move_with_the_model(target: Any) -> None:
    """And keep their dtypes, which a cast of the model does not change."""
    model = liger_dist.wrap(quantised_by_bitsandbytes(), "none")
    before = [(stack.state.absmax.dtype, stack.state.state2.absmax.dtype) for _, _, stack in four_bit_stacks(model)]
    model.to(target)
    for (_, _, stack), dtypes in zip(four_bit_stacks(model), before, strict=True):
        state = stack.state
        assert state.absmax.device == state.state2.absmax.device == stack.packed.device
        assert (state.absmax.dtype, state.state2.absmax.dtype) == dtypes
    assert stack.packed.is_meta == (target == "meta")


def test_adapters_on_experts_are_saved(workers_2: Workers) -> None:
    for names in workers_2.run(names_of_trained):
        assert len([name for name in names if ".experts." in name]) == 8
        assert all(".lora_" in name for name in names)


def names_of_trained() -> list[str]:
    model = liger_dist.wrap(adapted({"family": "qwen3_moe", "experts": True}, OF_EXPERTS["experts"]), "fsdp2")
    options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    return [name for name in get_model_state_dict(model, options=options) if "_extra_state" not in name]


def test_experts_are_quantised_before_they_are_sharded(workers_2: Workers) -> None:
    for sentence in workers_2.run(refused_order):
        assert "enter four_bit_experts before sharded_loading" in sentence


def refused_order() -> str:
    with liger_dist.sharded_loading(), pytest.raises(liger_dist.LigerDistError) as caught:
        four_bit("qwen3_moe", experts=True)
    return str(caught.value)


def test_experts_that_a_folder_does_not_have_are_refused(tmp_path: Path) -> None:
    """transformers would give them random values, such as those whose names ``save_pretrained`` has written."""
    from transformers import BitsAndBytesConfig

    four_bit("qwen3_moe", experts=True).save_pretrained(tmp_path)
    with (
        pytest.raises(liger_dist.LigerDistError, match="was not read within four_bit_experts"),
        liger_dist.four_bit_experts(BitsAndBytesConfig(load_in_4bit=True)),
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_only_formats_of_4_bits_quantise_experts() -> None:
    from transformers import BitsAndBytesConfig

    with (
        pytest.raises(liger_dist.LigerDistError, match="BitsAndBytesConfig with load_in_4bit=True"),
        liger_dist.four_bit_experts(BitsAndBytesConfig(load_in_8bit=True)),
    ):
        pass


def test_two_experts_parameters_need_grouped_products() -> None:
    """PEFT's own forward reads the second one without its LoRA."""
    model = adapted({"family": "qwen3_moe", "experts": True}, OF_EXPERTS["experts"])
    with pytest.raises(liger_dist.LigerDistError, match="has LoRA on two parameters of experts of 4 bits"):
        liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=False))


def on_experts(*parameters: str) -> dict[str, Any]:
    names = [f"model.layers.{layer}.mlp.experts.{name}" for layer in range(2) for name in parameters]
    return {"target_modules": ["q_proj"], "target_parameters": names}


MIXTURE = {"family": "qwen3_moe", "experts": True}
BOTH = ("gate_up_proj", "down_proj")


def relative_error(model: Any, reference: Any) -> float:
    """Of the loss, against the dequantised model in fp64."""
    loss_sum, tokens = true_loss_sum(reference, make_batch(0))
    return abs(float(model(**make_batch(0)).loss.detach()) / float(loss_sum / tokens) - 1)


@pytest.mark.parametrize("kernels", [True, False])
def test_peft_does_not_add_lora_on_experts_twice(kernels: bool) -> None:
    """PEFT leaves its LoRA on quantised parameters after each forward of its modules."""
    lora = on_experts("down_proj")
    model = adapted(MIXTURE, lora).train()
    reference = in_fp64(model, MIXTURE, lora)
    with torch.no_grad():
        model(**make_batch(0))
    wrapped = liger_dist.wrap(model, "none", config=liger_dist.WrapConfig(layer_kernels=kernels))
    with torch.no_grad():
        for _ in range(2):
            assert relative_error(wrapped, reference) < 1e-5
        with original_layers(wrapped):
            for _ in range(2):
                assert relative_error(wrapped, reference) < 1e-5
    assert relative_error(wrapped, reference) < 1e-5


def test_lora_on_experts_of_a_base_in_bf16_is_not_rounded_beside_hidden_states_in_fp32() -> None:
    """As after PEFT's ``prepare_model_for_kbit_training``, which casts all but the 4 bits to fp32."""
    lora = on_experts(*BOTH) | {"target_modules": "none"}
    model = adapted({}, lora, quantised_experts(torch.bfloat16)).float()
    reference = in_fp64(model, MIXTURE, lora)
    wrapped = liger_dist.wrap(model, "none")
    loss_sum, tokens = true_loss_sum(reference, make_batch(0))
    (loss_sum / tokens).backward()
    wrapped(**make_batch(0)).loss.backward()
    names = by_parameter(reference)
    truth = {names[name]: p.grad for name, p in reference.named_parameters() if p.requires_grad}
    names = by_parameter(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            true = truth[names[name]]
            assert (parameter.grad - true).norm() < 1e-5 * true.norm(), name


def test_adapters_that_are_on_other_layers_leave_experts_of_4_bits_as_they_are() -> None:
    others = {"target_modules": ["o_proj"], "init_lora_weights": False}
    losses = []
    for both in (True, False):
        model = adapted(MIXTURE, on_experts(*BOTH) if both else {"target_modules": ["q_proj"]}).train()
        torch.manual_seed(2)
        model.add_adapter("other", peft.LoraConfig(r=2, **others))
        wrapped = liger_dist.wrap(model, "none")
        wrapped.set_adapter("other")
        losses.append(losses_of_two_calls(wrapped))
    assert losses[0] == losses[1]


@pytest.mark.nightly
def test_verify_of_two_experts_parameters_keeps_their_lora() -> None:
    lora = on_experts(*BOTH)
    model = adapted(MIXTURE, lora).train()
    reference = in_fp64(model, MIXTURE, lora)
    wrapped = liger_dist.wrap(model, "none")
    verification = liger_dist.verify(wrapped, make_batch(0))
    assert verification.ok
    assert "LoRA on experts of 4 bits" in str(verification)
    assert relative_error(wrapped, reference) < 1e-5
    with pytest.warns(UserWarning, match="LoRA on experts of 4 bits, which PEFT's own forward computes otherwise"):
        liger_dist.unwrap(wrapped)
    assert relative_error(liger_dist.wrap(model, "none"), reference) < 1e-5


def test_lora_on_experts_of_4_bits_is_not_merged() -> None:
    """PEFT would merge it into a dequantised copy, and drop it."""
    lora = on_experts(*BOTH)
    model = adapted(MIXTURE, lora).train()
    reference = in_fp64(model, MIXTURE, lora)
    wrapped = liger_dist.wrap(model, "none")
    for merge in (wrapped.merge_adapter, wrapped.merge_and_unload):
        with pytest.raises(liger_dist.LigerDistError, match="asked to merge LoRA into experts of 4 bits"):
            merge()
    assert relative_error(wrapped, reference) < 1e-5  # No layer has been merged.
    with warnings.catch_warnings(action="ignore"):
        model = liger_dist.unwrap(wrapped)
    model.merge_adapter()
    with pytest.raises(liger_dist.LigerDistError, match=r"the LoRA is lost; call model\.unmerge_adapter"):
        liger_dist.wrap(model, "none")


@pytest.mark.parametrize("parameters", [BOTH[1:], BOTH])
def test_lora_on_experts_of_4_bits_is_not_added_after_wrap(parameters: tuple[str, ...]) -> None:
    wrapped = liger_dist.wrap(adapted(MIXTURE, {"target_modules": ["q_proj"]}).train(), "none")
    wrapped.add_adapter("late", peft.LoraConfig(r=2, init_lora_weights=False, **on_experts(*parameters)))
    wrapped.set_adapter("late")
    with torch.no_grad(), pytest.raises(liger_dist.LigerDistError, match=r"put around them after liger_dist\.wrap"):
        losses_of_two_calls(wrapped)


def losses_of_two_calls(model: Any) -> list[float]:
    return [float(model(**make_batch(0)).loss) for _ in range(2)]


def test_experts_that_peft_does_not_match_are_named() -> None:
    """ "all-linear" has them in a model that is not quantised."""
    model = adapted({"family": "qwen3_moe", "experts": True}, {})
    with pytest.warns(
        UserWarning,
        match=r"PEFT has no LoRA of the adapter 'default' on .*experts\.down_proj and 3 more",
    ):
        liger_dist.wrap(model, "none")


def test_experts_that_a_second_adapter_does_not_match_are_named() -> None:
    """PEFT skips them silently."""
    model = adapted(MIXTURE, on_experts(*BOTH))
    model.add_adapter("second", peft.LoraConfig(r=2, **on_experts(*BOTH)))
    with pytest.warns(UserWarning, match="PEFT has no LoRA of the adapter 'second' on .*down_proj and 3 more"):
        liger_dist.wrap(model, "none")


def int8() -> Any:
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(load_in_8bit=True)
    return AutoModelForCausalLM.from_pretrained(
        folder("llama", False), quantization_config=quantization, dtype=torch.float32, device_map={"": compute_device()}
    )


def of_torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = make_model("llama", dtype=torch.float32)
    quantize_(model.get_submodule("model"), Int8WeightOnlyConfig())
    return model


class Packed(nn.Module):
    """A linear layer as GPTQ and AWQ have it: the weight is a buffer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("qweight", linear.weight.data.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.qweight.T


def gptq() -> Any:
    model: Any = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.up_proj = Packed(layer.mlp.up_proj)
    return model


BASES = {"int8": int8, "torchao": of_torchao, "gptq": gptq}
REFUSED = {
    ("int8", "fsdp2"): "q_proj.weight is a weight of 8 bits of bitsandbytes, which 'fsdp2' does not shard",
    ("int8", "fsdp1"): "q_proj.weight is a weight of 8 bits of bitsandbytes, which 'fsdp1' does not shard",
    ("torchao", "fsdp2"): "is a quantised Int8Tensor of torchao, which 'fsdp2' does not shard",
    ("gptq", "fsdp2"): "layers.0.mlp.up_proj is a Packed that keeps its weight in 'qweight'",
}


@pytest.mark.smoke
@pytest.mark.parametrize(("base", "strategy"), REFUSED)
def test_other_quantised_weights_are_refused_by_name(base: str, strategy: str, workers_2: Workers) -> None:
    if base == "torchao":
        pytest.importorskip("torchao.quantization")
    for sentence in workers_2.run(refusal, base, strategy):
        assert REFUSED[base, strategy] in sentence
        assert "frozen='replicate'" in sentence


def refusal(base: str, strategy: str) -> str:
    model = BASES[base]().requires_grad_(False)
    model.get_parameter("model.norm.weight").requires_grad_()
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, strategy)
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp1"])
def test_weights_of_8_bits_stay_full(strategy: str, workers_2: Workers) -> None:
    """Under DDP, and replicated under FSDP."""
    for error in workers_2.run(error_of_8_bits, strategy):
        assert error < 1e-5


def error_of_8_bits(strategy: str) -> float:
    """Of every gradient, against the same quantised model in one process."""

    def made() -> Any:
        base = int8()
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        return peft.get_peft_model(base, lora, autocast_adapter_dtype=False).train()

    reference, options = made(), {"frozen": "replicate"}
    for rank in range(2):
        (reference(**make_batch(rank)).loss / 2).backward()
    strategies = {"ddp": "ddp", "fsdp2": liger_dist.FSDP2(**options), "fsdp1": liger_dist.FSDP1(**options)}
    root = liger_dist.wrap(made(), strategies[strategy])
    root(**make_batch(dist.get_rank())).loss.backward()
    gradients = full_gradients(root)
    truth = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert gradients.keys() == truth.keys()
    return max(float((gradients[name] - true).norm() / true.norm()) for name, true in truth.items())


def test_wrap_does_not_call_kernels_of_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read packed weights by address, and a probe of the model has none."""
    models = [four_bit(), int8()]

    def forward(*_: Any) -> None:
        raise AssertionError("called")

    for kind in (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt):
        monkeypatch.setattr(kind, "forward", forward)
    for model in models:
        explained = str(liger_dist.explain(liger_dist.wrap(model, "none")))
        assert "liger_dist: packed, padded and windowed sequences" in explained


def test_evaluation_leaves_the_bytes_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes packs them for CPUs with AVX512-BF16, on which training then has no gradients."""
    model = adapted({}, {})
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = True
    wrapped = liger_dist.wrap(model, "none")

    def pack(*_: Any) -> None:
        raise AssertionError("packed")

    monkeypatch.setattr(bitsandbytes.nn.modules, "_convert_weight_packed_for_cpu", pack)
    with torch.no_grad():
        assert wrapped.eval()(**make_batch(0)).loss.isfinite()


def test_projections_of_one_input_are_computed_together() -> None:
    model = liger_dist.wrap(adapted({}, {}), "none")
    assert "14 x Linear4bit: LoRA (added in place)" in str(liger_dist.explain(model))
    assert model(**make_batch(0)).loss.isfinite()


@pytest.mark.parametrize("storage", [torch.uint8, torch.float32])
def test_deepspeed_in_bf16_does_not_cast_packed_weights(storage: torch.dtype, workers_2: Workers) -> None:
    for changed in workers_2.run(changed_by_deepspeed, storage):
        assert changed == []


def changed_by_deepspeed(storage: torch.dtype) -> list[str]:
    import deepspeed

    model = adapted({"storage": storage}, {})
    before = packed_bytes(model)
    root = liger_dist.wrap(model, "deepspeed")
    optimizer = torch.optim.SGD([p for p in root.parameters() if p.requires_grad], lr=0.1)
    settings = zero_settings({"stage": 2, "bf16": True})
    engine, *_ = deepspeed.initialize(model=root, optimizer=optimizer, config=settings)
    try:
        assert engine(**make_batch(dist.get_rank())).loss.isfinite()
        after = packed_bytes(root)
    finally:
        engine.destroy()
    return [name for name, values in before.items() if not torch.equal(values, after[name])]


def packed_bytes(model: nn.Module) -> dict[str, Tensor]:
    named = ((name, p) for name, p in model.named_parameters() if isinstance(p, bitsandbytes.nn.Params4bit))
    return {name: p.data.flatten().view(torch.uint8).clone() for name, p in named}


LOADED = {
    "4 bits": {"kind": "nf4", "double": True, "storage": torch.float32},
    "4 bits, tied": {"kind": "fp4", "tied": True},
    "fp32": {"quantised": False},
    "fp32, tied": {"quantised": False, "tied": True},
}


@pytest.mark.nightly(base=["4 bits, tied", "fp32", "fp32, tied"])
@pytest.mark.parametrize("base", LOADED)
def test_loading_shard_by_shard(base: str, workers_2: Workers) -> None:
    strategies = ("fsdp2", "fsdp2, replicated", "fsdp2, vocab-parallel", "fsdp2, resharded late")
    cells = {strategy: (strategy, LOADED[base], {}, {}, True) for strategy in strategies}
    for found in workers_2.run(outcomes, cells):
        assert found == dict.fromkeys(strategies, "exact")


def test_a_loaded_model_holds_its_shards_alone(workers_2: Workers) -> None:
    for shares in workers_2.run(shares_of_memory):
        # Rows that two ranks do not divide are a third of a small norm.
        assert shares == pytest.approx([0.5, 0.5, 0.5], abs=0.02)


def shares_of_memory() -> list[float]:
    """Bytes of the storages of parameters, over those of the full model: in 4 bits, with experts, and not quantised."""
    found = []
    for base in ({}, {"family": "qwen3_moe", "experts": True}, {"quantised": False}):
        model = four_bit(**base, in_shards=True)
        held = sum(p.to_local().untyped_storage().nbytes() for p in model.parameters() if isinstance(p, DTensor))
        found.append(held / sum(p.numel() * p.element_size() for p in model.parameters()))
    return found


def test_8_bits_loaded_in_shards_are_refused(workers_2: Workers) -> None:
    for sentence in workers_2.run(refused_8_bits):
        assert "is a weight of 8 bits of bitsandbytes, which 'fsdp2' does not shard" in sentence


def refused_8_bits() -> str:
    with liger_dist.sharded_loading():
        model = int8()
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, "fsdp2")
    return str(caught.value)


def test_shards_of_4_bits_are_not_saved(workers_2: Workers) -> None:
    for sentence in workers_2.run(refused_to_save):
        assert "leave frozen weights out (StateDictOptions(ignore_frozen_params=True))" in sentence


def refused_to_save() -> str:
    model = liger_dist.wrap(adapted({}, {}), "fsdp2")
    with pytest.raises(liger_dist.LigerDistError) as caught:
        torch.save(model.state_dict(), io.BytesIO())
    return str(caught.value)


@pytest.mark.smoke
def test_what_was_loaded_in_shards_needs_fsdp2(workers_2: Workers) -> None:
    for sentence in workers_2.run(refused_after_loading):
        assert "was sharded by liger_dist.sharded_loading(), whose models need strategy='fsdp2'" in sentence


def refused_after_loading() -> str:
    with liger_dist.sharded_loading():
        model = four_bit()
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, "ddp")
    return str(caught.value)


def test_weights_of_4_bits_are_not_initialised_from_the_meta_device() -> None:
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(make_config("llama"))
        model.model.layers[0].mlp.up_proj = bitsandbytes.nn.Linear4bit(16, 24, bias=False)
    with pytest.raises(liger_dist.LigerDistError, match="is a weight of 4 bits on the meta device"):
        liger_dist.wrap(model, "none")


def test_experts_of_4_bits_are_not_initialised_from_the_meta_device() -> None:
    model = quantised_by_bitsandbytes().to("meta")
    with pytest.raises(
        liger_dist.LigerDistError, match=r"experts\..*\.original is a weight of 4 bits on the meta device"
    ):
        liger_dist.wrap(model, "none")
