"""The predicted time of a step: measured steps that its rates were not fitted to, and what the model of time says."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from training_runs import LAUNCH, ROOT

import liger_dist
from benchmarks.fit_time_plan import errors, loss
from benchmarks.scaling import LAYOUTS, PAGE, TABLES, compared, error_of, row
from benchmarks.time_settings import SETTINGS, Setting
from liger_dist_train.config import parse
from liger_dist_train.layer_work import Work
from liger_dist_train.model import add_lora, find_config, shell
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train
from liger_dist_train.time_plan import (
    CARDS,
    MEASURED,
    RATES,
    Clock,
    StepShape,
    TimePlan,
    describe_time,
    limit_of,
    predict,
    step_shape,
)

HELD_OUT = [setting for setting in SETTINGS if not setting.fits]
OFF = {
    "FSDP2 on 2 GPUs: liger_dist": 0.22,
    "Gemma3-270M, 8192": 0.17,
    "Gemma3-270M, 4096 tokens, on one GPU: ": 0.35,
    "Llama-3.2-1B, 4096 tokens, on one GPU: ": 0.19,
    "LoRA on 8 layers": 0.31,
    "layers compiled, H100, on 2": 0.19,
    "gpt-oss": 0.23,
    "8192 tokens a GPU, balanced routers, on 2: ep": 0.23,
    "32768 tokens a GPU, balanced routers, on 2: fsdp2, layers compiled, weights stay gathered": 0.11,
}
"""bounds of the held-out settings that are not predicted within 10 %, by a part of their names; docs/scaling.md says
why"""
DENSE, MIXTURE = "llama_8b", "qwen3_30b_a3b"


@cache
def shape_of(name: str, world_size: int, *options: str) -> StepShape:
    config = parse([str(LAUNCH / f"{name}.yaml"), "--model", str(LAUNCH / "models" / f"{name}.json"), *options])
    model_config = find_config(config, 1)
    model = shell(config, model_config)
    model = add_lora(model, config, has_weights=True) if config.lora_rank else model
    return step_shape(config, parallel_dims_of(config, world_size), model, model_config)


def time_of(name: str, world_size: int, *options: str, card: str = "H100") -> TimePlan:
    return predict(shape_of(name, world_size, *options), CARDS[card])


def bound(setting: Setting) -> float:
    if setting.file == "small_models" and setting.shape.get("num_hidden_layers") == 16 and setting.ranks > 1:
        return 0.1
    return next((value for part, value in OFF.items() if part in setting.name), 0.1)


@pytest.mark.parametrize("setting", HELD_OUT, ids=lambda setting: setting.name)
def test_a_measured_step_is_predicted(setting: Setting) -> None:
    assert abs(error_of(setting)) < bound(setting)


def test_most_steps_of_two_gpus_are_predicted_within_ten_percent() -> None:
    found = [abs(error_of(setting)) for setting in HELD_OUT if setting.ranks == 2]
    assert sum(error < 0.1 for error in found) >= 20
    assert statistics.median(found) < 0.06
    assert statistics.median(abs(error_of(setting)) for setting in HELD_OUT if setting.ranks == 4) < 0.05


def test_the_rates_are_the_fitted_ones() -> None:
    """No rate is better when it is changed by 2 %."""
    for name in vars(RATES):
        for factor in (0.98, 1.02):
            value = getattr(RATES, name) * factor
            if value < 0.95 or name not in ("memory",):
                assert loss(replace(RATES, **{name: value})) > loss(RATES) - 2e-4, name
    assert math.sqrt(loss(RATES) / len(list(errors(RATES)))) < 0.07


@pytest.mark.parametrize("name", TABLES[1:])
def test_the_page_of_scaling_has_the_computed_errors(name: str) -> None:
    table = PAGE.read_text().split(f"<!-- {name} -->\n\n")[1].split("\n\n")[0]
    assert table.splitlines() == compared(fits=name == "fitted"), "run python -m benchmarks.scaling"


def test_the_page_of_scaling_has_a_computed_row() -> None:
    assert row("Qwen3-30B-A3B", LAYOUTS[0], 64) in PAGE.read_text(), "run python -m benchmarks.scaling"


@pytest.mark.parametrize(("name", "world_size"), [(DENSE, 1), (DENSE, 8), (MIXTURE, 64)])
def test_more_tokens_take_longer(name: str, world_size: int) -> None:
    steps = [time_of(name, world_size, "--sequence_length", str(length)).step for length in (1024, 2048, 4096, 8192)]
    assert steps == sorted(steps)
    twice = time_of(name, world_size, "--batch_size", "2")
    assert twice.step > time_of(name, world_size).step
    assert twice.tokens == 2 * 8192


def test_checkpointing_takes_longer_and_lora_less() -> None:
    full = time_of(DENSE, 8)
    assert 1.1 < time_of(DENSE, 8, "--activation_checkpointing", "true").step / full.step < 1.35
    lora = time_of(DENSE, 8, "--lora_rank", "16")
    assert lora.computing < 0.8 * full.computing
    assert lora.step < full.step


def test_packed_weights_and_eager_layers_take_the_host_longer() -> None:
    lora, packed = (time_of(DENSE, 1, "--lora_rank", "16", *more) for more in ((), ("--load_in_4bit", "true")))
    assert packed.host > 2 * lora.host
    assert packed.computing > lora.computing
    assert time_of(DENSE, 8, "--compile", "false").host > time_of(DENSE, 8).host


def test_one_gpu_has_no_collectives() -> None:
    for options in (("--strategy", "none"), ("--strategy", "fsdp2"), ("--strategy", "ddp")):
        assert time_of(DENSE, 1, *options).exposed == 0.0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_and_ddp_communicate(stage: int) -> None:
    settings = str(LAUNCH / "deepspeed" / f"zero{stage}.json")
    shape = shape_of(DENSE, 8, "--strategy", "deepspeed", "--deepspeed", settings, "--async_checkpoints", "false")
    found = predict(shape, CARDS["H100"])
    assert shape.stage == stage
    assert found.exposed > 0.0
    assert found.host > (0.5 if stage == 3 else 0.0)
    assert time_of(DENSE, 8, "--strategy", "ddp").exposed > 0.0


def test_experts_on_several_ranks_move_bytes_from_all_gather_to_all_to_all() -> None:
    plain, routed = shape_of(MIXTURE, 8), shape_of(MIXTURE, 8, "--ep", "8")
    assert plain.units[0].routed_bytes == 0.0
    # 8192 tokens to the ranks of 8 experts, 2048 numbers of bf16 each.
    of_a_layer = sum(unit.routed_bytes for unit in routed.units) / routed.layers
    assert of_a_layer == pytest.approx(8192 * 8 * (1 - (7 / 8) ** 8) * 2048 * 2)
    experts = 128 * 3 * 2048 * 768
    of_plain, of_routed = (sum(unit.trained for unit in shape.units) for shape in (plain, routed))
    assert of_plain - of_routed == plain.layers * experts
    assert sum(unit.shared_experts for unit in routed.units) == plain.layers * experts / 8
    # Without its experts a layer shares a unit with others.
    assert len(routed.units) < len(plain.units) == plain.layers
    before, after = (predict(shape, CARDS["H100"]) for shape in (plain, routed))
    assert before.routed == 0.0
    assert after.routed > 0.5 * after.exposed
    assert after.exposed < before.exposed
    assert plain.update_bytes == pytest.approx(routed.update_bytes)
    assert limit_of(routed, CARDS["H100"]) == "the exchange of tokens with experts"


def test_collectives_of_a_node_and_between_nodes() -> None:
    clock = Clock(CARDS["H100"], RATES)
    assert clock.ring(1e9, 1) == clock.exchange(1e9, 1) == 0.0
    assert clock.ring(1e9, 2) == pytest.approx(0.5e9 / (450e9 * RATES.links) + 50e-6)
    # One rank of each of eight nodes: all bytes but an eighth go through one adapter.
    assert clock.ring(1e9, 8, 8) == pytest.approx(0.875e9 / 40e9 + 120e-6)
    assert clock.ring(1e9, 64) < clock.ring(1e9, 8, 8)
    assert clock.exchange(1e9, 16) > clock.exchange(1e9, 8)


def test_hsdp_sends_as_many_bytes_between_nodes() -> None:
    sharded = shape_of(DENSE, 64)
    replicated = shape_of(DENSE, 64, "--dp_replicate", "8", "--dp_shard", "8")
    assert replicated.update_bytes == pytest.approx(8 * sharded.update_bytes)
    slow = replace(CARDS["H100"], network=1e9)
    # fp32 to be all-reduced is as many bytes as bf16 twice and fp32 once.
    assert predict(replicated, slow).exposed == pytest.approx(predict(sharded, slow).exposed, rel=0.15)
    assert limit_of(sharded, slow) == "all-gather and reduce-scatter between nodes"


def test_micro_batches_and_units() -> None:
    once, twice = time_of(DENSE, 8), time_of(DENSE, 8, "--global_batch_size", "16")
    assert once.step < twice.step < 2 * once.step
    assert twice.tokens == 2 * once.tokens
    assert len(shape_of(DENSE, 8, "--layers_per_unit", "8").units) == 4
    assert time_of(DENSE, 8, "--layers_per_unit", "8").host < once.host


def test_work_adds_and_a_faster_card_is_faster() -> None:
    assert Work(1.0, 2.0, 3.0) + Work(1.0, 0.0, 1.0) * 2 == Work(3.0, 2.0, 5.0)
    assert time_of(DENSE, 8, card="B200").step < time_of(DENSE, 8).step < time_of(DENSE, 8, card="A100").step


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--float8", "tensorwise"), "not predicted: --float8 tensorwise was not measured"),
        (("--optimizer", "muon"), "not predicted: --optimizer muon was not measured"),
        (("--tp", "2"), "not predicted: --tp was not measured"),
        (("--dtype", "float32", "--sp", "2"), "not predicted: --sp, --dtype float32 was not measured"),
    ],
)
def test_what_was_not_measured_is_not_predicted(options: tuple[str, ...], sentence: str) -> None:
    assert described(*options, gpu="H100") == sentence


def described(*options: str, gpu: str | None) -> str:
    config = parse([str(LAUNCH / "llama_8b.yaml"), "--model", str(LAUNCH / "models" / "llama_8b.json"), *options])
    model_config = find_config(config, 1)
    return describe_time(config, parallel_dims_of(config, 8), shell(config, model_config), model_config, gpu)


def test_an_unknown_card_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    expected = "not predicted: the bandwidths of NVIDIA L40S are not known; those of H100, H200, A100, B200 are"
    assert described(gpu=None) == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert described(gpu=None).startswith("predicted for H100: a step of ")
    assert "no step was measured" in described(gpu="B200")
    assert set(MEASURED) < set(CARDS)


def test_a_dry_run_prints_the_predicted_step(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    options = ["launch/llama_8b.yaml", "--dry_run", "--world_size", "64", "--strategy", "fsdp2"]
    train(parse([*options, "--gpu", "H100"]))
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("predicted for H100: a step of ")
    assert "tokens/s on each GPU; computation " in line
    train(parse(options))
    expected = "not predicted: this machine has no GPU; name one by --gpu, H100, H200, A100, B200"
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_a_card_is_for_dry_runs_and_one_of_the_list() -> None:
    with pytest.raises(liger_dist.LigerDistError, match="--gpu is H100; it is for --dry_run"):
        parse([str(LAUNCH / "llama_8b.yaml"), "--gpu", "H100"])
    with pytest.raises(liger_dist.LigerDistError, match="expected one of H100, H200, A100, B200"):
        parse([str(LAUNCH / "llama_8b.yaml"), "--dry_run", "--gpu", "L40"])
