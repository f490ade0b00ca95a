"""Folders of pretrained weights: every tensor of theirs is trained, kept in the export, or named before a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Workers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training_runs import LAUNCH, config_for, metrics_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from liger_dist import LigerDistError
from liger_dist.mtp import MultiTokenPrediction
from liger_dist_train.export import export
from liger_dist_train.run import train

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 601,
    "max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
ROUTED: dict[str, Any] = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT: dict[str, Any] = {
    **{"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16, "num_key_value_heads": 2},
}
DELTA: dict[str, Any] = {
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "layer_types": ["linear_attention", "full_attention"],
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
GEMMA_VISION: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}


def language_model(kind: str, *, further: int = 0, **sizes: Any) -> Any:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | sizes))
    if further:
        MultiTokenPrediction(model, depth=further)
    return model


def vision_model(kind: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Any:
    config = AutoConfig.for_model(kind)
    for settings, changes in ((config.text_config, SMALL | text), (config.vision_config, vision), (config, more)):
        for name, value in changes.items():
            setattr(settings, name, value)
    return AutoModelForImageTextToText.from_config(config)


def gpt2() -> Any:
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 601}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))


def mtp_weights(folder: Path) -> None:
    """Below ``mtp.``, as Qwen3.5's checkpoints have them."""
    weights = load_file(folder / "model.safetensors")
    found = {"mtp.fc.weight": torch.randn(64, 128), "mtp.norm.weight": torch.randn(64)}
    save_file(weights | found, folder / "model.safetensors", {"format": "pt"})


def eight_bit(folder: Path) -> None:
    """Weights of linear layers in float8 with scales of blocks, as DeepSeek has them."""
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "proj" not in name:
            found[name] = weight.bfloat16()
            continue
        scale = weight.abs().max() / 448
        found[name] = (weight / scale).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = scale.reshape(1, 1).clone()
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    quantised = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    declare(folder, quantization_config=quantised | {"modules_to_not_convert": ["lm_head"]})


def four_bit_experts(folder: Path) -> None:
    """Experts in MXFP4, as gpt-oss has them."""
    found = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = weight.bfloat16()
            continue
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        found[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, device="cpu")
        found[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, device="cpu")
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    names = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    declare(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": names})


def four_bit(folder: Path) -> None:
    """As bitsandbytes writes it."""
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, device_map={"": "cpu"})
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)


def declare(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


BASES: dict[str, tuple[Callable[[], Any], Callable[[Path], None] | None]] = {
    "llama": (lambda: language_model("llama"), None),
    "gpt2": (gpt2, None),
    "gemma3_text": (lambda: language_model("gemma3_text"), None),
    "qwen3_moe": (lambda: language_model("qwen3_moe", num_experts=4, **EXPERTS), None),
    "gpt_oss": (lambda: language_model("gpt_oss", num_local_experts=4, num_experts_per_tok=2), None),
    "gemma3": (
        lambda: vision_model("gemma3", {"layer_types": ["full_attention"] * 2}, GEMMA_VISION, mm_tokens_per_image=4),
        None,
    ),
    "qwen3_5": (lambda: vision_model("qwen3_5", DELTA | {"vocab_size": 608}, QWEN_VISION), mtp_weights),
    "glm4_moe": (lambda: language_model("glm4_moe", further=1, num_nextn_predict_layers=1, **ROUTED), None),
    "deepseek_v3": (
        lambda: language_model("deepseek_v3", further=1, num_nextn_predict_layers=1, **ROUTED | LATENT),
        None,
    ),
    "gpt_oss_mxfp4": (
        lambda: language_model("gpt_oss", num_local_experts=4, num_experts_per_tok=2),
        four_bit_experts,
    ),
    "llama_fp8": (lambda: language_model("llama"), eight_bit),
    "llama_4bit": (lambda: language_model("llama"), four_bit),
}
LEFT_OUT = {"qwen3_5": "model.visual", "glm4_moe": r"model.layers.2 \(", "deepseek_v3": r"model.layers.2 \("}
"""what models of these folders have no parameters for"""
USUAL = ("qwen3_5", "glm4_moe", "gpt_oss_mxfp4")


def sizes_in(folder: Path) -> dict[str, list[int]]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    return found


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def expected_sizes(name: str, folder: Path) -> dict[str, list[int]]:
    """Of the tensors in floating point."""
    make, change = BASES[name]
    make().save_pretrained(folder)
    if change is mtp_weights:
        change(folder)
    return sizes_in(folder)


@pytest.fixture
def base(request: pytest.FixtureRequest, cache: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    make, change = BASES[request.param]
    torch.manual_seed(0)
    make().save_pretrained(folder)
    if change is not None:
        change(folder)
    AutoTokenizer.from_pretrained(cache / "tokenizer").save_pretrained(folder)
    return folder


def changes_for(name: str, base: Path, *, lora: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"model": str(base), "tokenizer": None, "strategy": "none", "steps": 1, "batch_size": 1}
    found |= {"global_batch_size": 1, "eval_fraction": 0.0, "checkpoint_every": 1, "warmup_steps": 0}
    found |= {"attend_across_documents": True}
    if lora:
        found |= {"lora_rank": 2, "load_in_4bit": name == "llama_4bit"}
    return found


@pytest.mark.nightly(base=[name for name in BASES if name not in USUAL])
@pytest.mark.parametrize("base", BASES, indirect=True)
def test_an_export_of_lora_has_all_tensors_of_its_base(
    base: Path, request: pytest.FixtureRequest, data: Path, cache: Path, tmp_path: Path
) -> None:
    name = request.node.callspec.params["base"]
    train(config_for(data, cache, tmp_path / "run", **changes_for(name, base, lora=True)))
    export(tmp_path / "run", tmp_path / "exported", step=None)
    exported, before = tensors_in(tmp_path / "exported"), tensors_in(base)
    assert {n: list(t.shape) for n, t in exported.items()} == expected_sizes(name, tmp_path / "float")
    further = [n for n in before if n.startswith(("mtp.", "model.visual.", "model.layers.2."))]
    assert bool(further) == (name in LEFT_OUT)
    for one in further:
        assert exported[one].dtype == before[one].dtype, one
        assert torch.equal(exported[one], before[one]), one
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["model_type"] == json.loads((base / "config.json").read_text())["model_type"]
    assert {config["dtype"], config.get("text_config", config).get("dtype", "float32")} == {"float32"}
    kind: Any = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model, report = kind.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"]
    assert torch.isfinite(model(input_ids=torch.arange(3, 20)[None]).logits).all()


@pytest.mark.nightly(base=[name for name in BASES if name not in USUAL])
@pytest.mark.parametrize("base", [name for name in BASES if name != "llama_4bit"], indirect=True)
def test_full_fine_tuning_names_what_it_leaves_out(
    base: Path,
    request: pytest.FixtureRequest,
    data: Path,
    cache: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = request.node.callspec.params["base"]
    config = changes_for(name, base, lora=False)
    if name in LEFT_OUT:
        with pytest.raises(LigerDistError, match=f"has no parameters for.*{LEFT_OUT[name]}"):
            train(config_for(data, cache, tmp_path / "run", **config))
        config["allow_left_out_weights"] = True
    train(config_for(data, cache, tmp_path / "run", **config))
    said = capsys.readouterr().out
    assert ("left out, of exports too" in said) == (name in LEFT_OUT)
    assert ("exported in floating point" in said) == (name in ("gpt_oss_mxfp4", "llama_fp8"))
    export(tmp_path / "run", tmp_path / "exported", step=None)
    written = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert "quantization_config" not in written
    assert not written.get("num_nextn_predict_layers")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    found = sizes_in(tmp_path / "exported")
    expected = expected_sizes(name, tmp_path / "float")
    further = {n for n in expected if n.startswith(("mtp.", "model.visual.", "model.layers.2."))}
    plain = {n.replace("language_model.", "") if name == "qwen3_5" else n for n in expected.keys() - further}
    assert found.keys() == plain
    assert sum(p.numel() for p in model.parameters()) > 0
    assert all(row["loss"] > 0 for row in metrics_of(tmp_path / "run"))
    shutil.rmtree(tmp_path / "run")


@pytest.mark.nightly(strategy=["ddp", "zero3"])
@pytest.mark.parametrize("strategy", ["none", "fsdp2", "ddp", "zero3"])
@pytest.mark.parametrize("base", ["glm4_moe"], indirect=True)
def test_lora_trains_beside_layers_of_further_tokens(
    strategy: str, base: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """They are those of the base, train in full, and are exported under its names."""
    config = changes_for("glm4_moe", base, lora=True) | {"mtp": '{"depth": 1}', "global_batch_size": 2, "steps": 2}
    config |= {"strategy": strategy, "learning_rate": 1e-3}
    if strategy == "zero3":
        config |= {"strategy": "deepspeed", "deepspeed": str(LAUNCH / "deepspeed" / "zero3.json")}
    made = config_for(data, cache, tmp_path / "run", **config)
    train(made) if strategy == "none" else workers_2.run(train, made)
    export(tmp_path / "run", tmp_path / "exported", step=None)
    exported, before = tensors_in(tmp_path / "exported"), tensors_in(base)
    assert exported.keys() == before.keys()
    for name, tensor in before.items():
        is_trained = name.startswith("model.layers.2.") and "bias" not in name and "shared_head.head" not in name
        is_merged = "self_attn" in name or ".mlp." in name
        if is_trained:
            assert not torch.equal(exported[name], tensor), name
            assert torch.allclose(exported[name], tensor, atol=1e-2), name
        elif not is_merged:
            assert torch.equal(exported[name], tensor), name
    assert metrics_of(tmp_path / "run")[0]["mtp_loss/1"] > 0
    with pytest.raises(LigerDistError, match="which PEFT's files do not hold"):
        export(tmp_path / "run", tmp_path / "adapter", step=None, adapter=True)
