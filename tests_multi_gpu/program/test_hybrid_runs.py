"""The training program with hybrid models: packed by default, and each document as if it were alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import LAUNCH, config_for, metrics_of

import liger_dist
from liger_dist_train import run, scoring
from liger_dist_train.config import parse
from liger_dist_train.export import export
from liger_dist_train.memory_plan import plan
from liger_dist_train.model import check_packing, find_config, shell
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train


@pytest.mark.nightly
def test_a_preset_trains_on_packed_documents(data: Path, cache: Path, tmp_path: Path) -> None:
    """Also as its own teacher and for its scores; without documents the loss is another one."""
    lines = [line for file in sorted(data.glob("*0.txt")) for line in file.read_text().splitlines() if len(line) > 40]
    data = tmp_path / "lines"
    data.mkdir()
    for number, line in enumerate(lines[:400]):
        (data / f"{number}.txt").write_text(line)
    losses = []
    for across in (False, True):
        output = tmp_path / f"across-{across}"
        changes: dict[str, Any] = {"model": "qwen3_5_tiny", "attend_across_documents": across, "steps": 3}
        train(config_for(data, cache, output, global_batch_size=2, eval_every=3, checkpoint_every=3, **changes))
        losses.append([row["loss"] for row in metrics_of(output)])
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    trained = str(tmp_path / "trained")
    export(tmp_path / "across-False", Path(trained), step=None)
    config = config_for(data, cache, tmp_path / "student", model="qwen3_5_tiny", teacher=trained, global_batch_size=2)
    train(replace(config, steps=1, eval_every=1, checkpoint_every=1))
    shared = {name: getattr(config, name) for name in ("data", "tokenizer", "cache_dir", "num_proc")}
    scoring.score(scoring.ScoreConfig(**shared, model=trained, output_dir=str(tmp_path / "scores"), sequence_length=64))


def test_the_shape_of_qwen3_5_4b_has_its_size() -> None:
    config = parse([str(LAUNCH / "qwen3_5_4b.yaml"), "--model", str(LAUNCH / "models" / "qwen3_5_4b.json")])
    model = shell(config, find_config(config, 1))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(4.2e9, rel=0.01)
    check_packing(config, model)


@pytest.mark.smoke
@pytest.mark.parametrize("program", ["train", "plan", "teacher", "score"])
def test_documents_that_would_mix_are_refused_before_data_is_read(
    program: str, data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    def read(*args: Any) -> Any:
        raise AssertionError("data was read")

    def anticausal(mixer: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return hidden_states.flip(1).cumsum(1)

    monkeypatch.setattr(MambaMixer, "forward", anticausal)
    path = tmp_path / "config.json"
    MambaConfig(vocab_size=700, hidden_size=32, num_hidden_layers=2).to_json_file(path)
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


@pytest.mark.nightly
def test_a_dry_run_knows_what_was_measured(tmp_path: Path) -> None:
    """54.46 GiB on each of two H200 (torch 2.11, fla 0.6, Triton 3.7.1, 2026-11-27). Other recurrent layers are
    refused, rather than planned as if all were attention."""
    shape = [str(LAUNCH / "qwen3_5_4b.yaml"), "--model", str(LAUNCH / "models" / "qwen3_5_4b.json"), "--dry_run"]
    config = parse(shape)
    model_config = find_config(config, 1)
    plans = plan(config, parallel_dims_of(config, 2), shell(config, model_config), model_config)
    gathered = plans.plans[0]
    assert gathered.peak / 2**30 == pytest.approx(54.46, rel=0.1)
    checkpointed = replace(config, activation_checkpointing=True)
    fewer = plan(checkpointed, parallel_dims_of(config, 2), shell(config, model_config), model_config).plans[0]
    assert fewer.activations < gathered.activations / 4
    fp32_stream = replace(config, strategy="ddp")
    wider = plan(fp32_stream, parallel_dims_of(fp32_stream, 2), shell(config, model_config), model_config).plans[0]
    of_each_layer = 4 * 2560 * 8192 * 2
    assert wider.activations - gathered.activations == 32 * of_each_layer
    from transformers import Lfm2Config, OlmoHybridConfig

    path = tmp_path / "olmo.json"
    OlmoHybridConfig(num_hidden_layers=4, vocab_size=700, pad_token_id=None).to_json_file(path)
    olmo = replace(config, model=str(path))
    olmo_config = find_config(olmo, 1)
    assert plan(olmo, parallel_dims_of(olmo, 2), shell(olmo, olmo_config), olmo_config).plans[0].activations > 0
    path = tmp_path / "config.json"
    Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2, vocab_size=700).to_json_file(path)
    config = replace(config, model=str(path))
    model_config = find_config(config, 1)
    with pytest.raises(liger_dist.LigerDistError, match="--dry_run knows decoder layers of attention"):
        plan(config, parallel_dims_of(config, 8), shell(config, model_config), model_config)
