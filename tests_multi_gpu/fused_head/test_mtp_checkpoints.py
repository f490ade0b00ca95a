"""Checkpoints with the modules of multi-token prediction: loaded, trained, saved and loaded again, in their families'
names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import gradient_errors, make_batch, make_config, make_model
from mtp_models import make_mtp, true_mtp_losses
from safetensors.torch import load_file, save_file
from truth import relative_error

import liger_dist
from liger_dist.mtp import MultiTokenPrediction
from liger_dist.sharding.process_groups import compute_device

QWEN = ("fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


def make_qwen() -> Any:
    """A Qwen3.5 with the modules of its checkpoints."""
    model = make_model("qwen3_5_text", dtype=torch.float32)
    MultiTokenPrediction(model)
    return model


def same(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of a checkpoint, which are those of ``model``."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    for name, value in model.mtp.state_dict().items():
        assert torch.equal(found[f"mtp.{name}"], value.cpu()), name
    return found


def test_qwen3_5_checkpoint_is_loaded_trained_and_saved_again(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = make_qwen()
    source.save_pretrained(tmp_path / "first")
    names = same(source, tmp_path / "first")
    assert all(f"mtp.{name}" in names for name in QWEN)
    assert "mtp.layers.0.self_attn.q_proj.weight" in names
    # transformers drops them, without a warning.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first", dtype=torch.float32).to(compute_device())
    assert not hasattr(model, "mtp")
    modules = MultiTokenPrediction.from_pretrained(model)
    assert model.mtp is modules
    assert modules.depth == 1
    for (name, mine), theirs in zip(modules.named_parameters(), source.mtp.parameters(), strict=True):
        assert torch.equal(mine.cpu(), theirs.cpu()), name
    liger_dist.wrap(model, "none").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        output = model(**make_batch(0))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output.mtp_loss[0]))
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "second")
    same(model, tmp_path / "second")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second", dtype=torch.float32).to(compute_device())
    MultiTokenPrediction.from_pretrained(again)
    with torch.no_grad():
        assert relative_error(again(**make_batch(0)).mtp_loss, model(**make_batch(0)).mtp_loss) < 1e-5


@pytest.mark.smoke
@pytest.mark.parametrize("depth", [1, 2])
def test_plain_checkpoint_gains_further_tokens(tmp_path: Path, depth: int) -> None:
    from transformers import AutoModelForCausalLM

    make_model("llama", dtype=torch.float32).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).to(compute_device())
    with pytest.raises(liger_dist.LigerDistError, match=r"has no parameters of multi-token prediction \(mtp"):
        MultiTokenPrediction.from_pretrained(model)
    assert not hasattr(model, "mtp")
    MultiTokenPrediction(model, depth)
    model.save_pretrained(tmp_path / "with")
    same(model, tmp_path / "with")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "with", dtype=torch.float32).to(compute_device())
    assert MultiTokenPrediction.from_pretrained(again).depth == depth
    with torch.no_grad():
        assert relative_error(again(**make_batch(0)).mtp_loss, model(**make_batch(0)).mtp_loss) < 1e-6


@pytest.mark.smoke
def test_other_parameters_in_a_checkpoint_are_refused(tmp_path: Path) -> None:
    model = make_mtp(depth=1, dtype=torch.float32)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    tensors["mtp.layers.0.other"] = tensors.pop("mtp.layers.0.eh_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    plain = make_model("llama", dtype=torch.float32)
    with pytest.raises(liger_dist.LigerDistError, match=r"without layers\.0\.eh_proj\.weight, with layers\.0\.other"):
        MultiTokenPrediction.from_pretrained(plain, str(tmp_path))


def deepseek() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8}
    config = DeepseekV3Config(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        num_nextn_predict_layers=1,
        pad_token_id=0,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.mark.smoke
def test_modules_of_transformers_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after the layers of DeepSeek-V3, which transformers' ``MtpModel`` reads."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(modeling_layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    model = deepseek()
    # The class names the layer that its models leave out by number, 61 for DeepSeek-V3.
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    made = modeling_layers.MtpModel(model, 1)
    for parameter in made.layers.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    state = {}
    for name, value in made.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        state[f"model.layers.2.{name}"] = value.clone()
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    save_file(load_file(file) | _as_checkpoint(state), file, metadata={"format": "pt"})
    first = type(model)
    model = first.from_pretrained(tmp_path).to(compute_device())
    modules = MultiTokenPrediction.from_pretrained(model)
    layer = modules.layers[0]
    for name, value in made.layers[0].state_dict().items():
        assert torch.equal(layer.state_dict()[name].cpu(), value.cpu()), name
    model.save_pretrained(tmp_path / "again")
    (saved,) = (tmp_path / "again").glob("*.safetensors")
    assert load_file(saved).keys() == load_file(file).keys()
    # A folder that is given counts, not the one of the model.
    first(model.config).save_pretrained(tmp_path / "plain")
    other = first.from_pretrained(tmp_path)
    with pytest.raises(liger_dist.LigerDistError, match="has no complete modules of multi-token prediction"):
        MultiTokenPrediction.from_pretrained(other, str(tmp_path / "plain"))
    assert other.config.name_or_path == str(tmp_path)
    again = first.from_pretrained(tmp_path / "again")
    for (name, mine), theirs in zip(
        MultiTokenPrediction.from_pretrained(again).named_parameters(), modules.parameters(), strict=True
    ):
        assert torch.equal(mine.cpu(), theirs.cpu()), name
    reference = copy.deepcopy(model)
    liger_dist.wrap(model, "none").train()
    output, batch = model(**make_batch(0)), make_batch(0)
    main, further = [total / count for total, count in true_mtp_losses(reference, batch)]
    assert relative_error(output.mtp_loss[0], further) < 1e-5
    output.loss.backward()
    (main + reference.mtp.weights[0] * further).backward()
    assert max(gradient_errors(model, reference).values()) < 1e-3


def _as_checkpoint(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one by one, as in checkpoints."""
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(value):
                for part, rows in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    found[name.replace("experts.gate_up_proj", f"experts.{expert}.{part}.weight")] = rows.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, rows in enumerate(value):
                found[name.replace("experts.down_proj", f"experts.{expert}.down_proj.weight")] = rows.contiguous()
        else:
            found[name] = value
    return found


@pytest.mark.smoke
def test_configs_of_tests_have_further_names() -> None:
    assert make_qwen().mtp.is_flat
    assert not make_mtp(depth=1).mtp.is_flat
    assert make_config("llama").vocab_size == 101


@pytest.mark.smoke
def test_experts_are_saved_one_by_one_and_loaded_again(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3MoeConfig(vocab_size=101, num_experts=4, num_experts_per_tok=2, pad_token_id=0, **sizes, **heads)
    torch.manual_seed(0)
    source = AutoModelForCausalLM.from_config(config)
    MultiTokenPrediction(source, 2)
    source.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    MultiTokenPrediction.from_pretrained(model)
    for (name, mine), theirs in zip(model.named_parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
