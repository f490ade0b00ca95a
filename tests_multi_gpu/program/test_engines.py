"""The training program under every strategy: norms, checkpoints that any of them reads, exports that plain transformers
loads, and a plan of the memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_programs import run_command, run_program
from harness import Workers
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from training_runs import LAUNCH, ROOT, config_for, losses_of, metrics_of, published
from transformers import AutoModelForCausalLM

import liger_dist
from liger_dist.fused_layers.recompute import MIN_BYTES
from liger_dist_train.config import parse
from liger_dist_train.data_loader import collate, find_tokenization, load_data
from liger_dist_train.export import export
from liger_dist_train.generation import main as generate
from liger_dist_train.memory_plan import RECOMPUTED_BYTES, plan
from liger_dist_train.model import add_lora, check_wrap, find_config, shell
from liger_dist_train.options import PRESETS
from liger_dist_train.parallel_dims import parallel_dims_of
from liger_dist_train.run import train
from liger_dist_train.tokenization import load_tokenizer

DEEPSPEED = LAUNCH / "deepspeed"
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp1": {"strategy": "fsdp1"},
    "zero2": {"strategy": "deepspeed", "deepspeed": str(DEEPSPEED / "zero2.json")},
    "zero3": {"strategy": "deepspeed", "deepspeed": str(DEEPSPEED / "zero3.json")},
}


@pytest.mark.nightly
def test_the_norm_is_known_without_clipping(
    trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """DeepSpeed computes no norm at stage 0 in fp32 without clipping."""
    (tmp_path / "zero0.json").write_text("{}")
    ways = {"zero0": {"strategy": "deepspeed", "deepspeed": str(tmp_path / "zero0.json")}}
    ways |= {name: WAYS[name] for name in ("zero2", "zero3", "fsdp1", "ddp")}
    expected = metrics_of(trained)[0]["grad_norm"]
    for name, way in ways.items():
        config = config_for(data, cache, tmp_path / name, steps=1, checkpoint_every=0, max_grad_norm=0.0, **way)
        workers_2.run(train, config)
        assert metrics_of(tmp_path / name)[0]["grad_norm"] == pytest.approx(expected, rel=1e-4), name


def test_ranks_of_one_group_read_what_one_process_reads(
    workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """Of rows that they do not share evenly."""
    way: dict[str, Any] = {"strategy": "fsdp2", "sp": 2}
    settings: dict[str, Any] = {"steps": 3, "eval_every": 1, "sequence_length": 63}
    train(config_for(data, cache, tmp_path / "none", strategy="none", **settings))
    workers_2.run(train, config_for(data, cache, tmp_path / "group", **settings, **way))
    names = ("loss", "grad_norm", "eval_loss", "tokens")
    seen = [[[row[name] for name in names] for row in metrics_of(tmp_path / run)] for run in ("group", "none")]
    np.testing.assert_allclose(*seen, rtol=1e-4)


@pytest.fixture(scope="module")
def on_four(workers_on_all: Workers, data: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FSDP2 on four shards (two where there are two GPUs), stopped at step 6, written in the background."""
    output = tmp_path_factory.mktemp("four")
    changes = {"stop_at_step": 6, "checkpoint_every": 3, "async_checkpoints": True}
    workers_on_all.run(train, config_for(data, cache, output, strategy="fsdp2", **changes))
    assert published(output) == ["step-00000003", "step-00000006"]
    return output


@pytest.mark.nightly(way=["fsdp1", "ddp", "tp"])
@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "ddp", "tp", "none"])
def test_a_checkpoint_of_four_ranks_goes_on_elsewhere(
    way: str, on_four: Path, trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(on_four, tmp_path / "run")
    config = config_for(data, cache, tmp_path / "run", strategy=way, resume=True, stop_at_step=9)
    train(config) if way == "none" else workers_2.run(train, config)
    assert losses_of(tmp_path / "run") == pytest.approx(losses_of(trained)[:9], rel=2e-5)


def test_an_export_is_the_model(on_four: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path) -> None:
    """Its held-out loss in plain transformers is what the run saw, its logits are those of the weights as torch's own
    tool reads them, and other strategies start from it."""
    assert export(on_four, tmp_path / "model", step=6, dtype="float32") == 6
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    other: Any = AutoModelForCausalLM.from_config(model.config)
    shards = on_four / "checkpoints" / "step-00000006"
    names = {name: 1 for file in shards.glob("*.safetensors") for name in load_file(file)}
    (tmp_path / "whole").mkdir()
    consolidate_safetensors_files(str(shards), str(tmp_path / "whole"), names)
    whole = load_file(tmp_path / "whole" / "model-00001-of-00001.safetensors")
    other.load_state_dict({n.removeprefix("model."): v for n, v in whole.items() if n.startswith("model.")})
    batch = torch.arange(3, 67)[None]
    assert torch.equal(model(batch).logits, other(batch).logits)
    settings = {"model": str(tmp_path / "model"), "tokenizer": None, "steps": 1, "learning_rate": 1e-30}
    losses: list[float] = []
    for way in ("fsdp1", "zero3"):
        workers_2.run(train, config_for(data, cache, tmp_path / way, **settings | WAYS[way]))
        losses.append(metrics_of(tmp_path / way)[0]["eval_loss"])
    config = config_for(data, cache, tmp_path / "fsdp1", **settings)
    tokenization = replace(find_tokenization(config), vocab_size=601)
    _, held_out = load_data(config, tokenization, parallel_dims_of(config, 1))
    sums, count = 0.0, 0
    with torch.no_grad():
        for sequence in held_out.in_order(0, 8):
            alone = collate([sequence], 1, 64, 0, restart=True)
            learned = int((alone["labels"][:, 1:] >= 0).sum())
            sums += float(model(**alone).loss) * learned
            count += learned
    assert losses == pytest.approx([sums / count] * 2, rel=1e-5)


def test_an_export_of_zero_3(workers_2: Workers, data: Path, cache: Path, tmp_path: Path, trained: Path) -> None:
    config = config_for(data, cache, tmp_path / "run", steps=12, stop_at_step=6, **WAYS["zero3"])
    workers_2.run(train, config)
    command = ["liger-dist", "export", str(tmp_path / "run")]
    assert "step 6 of" in run_command(command, tmp_path)
    export(trained, tmp_path / "fsdp2", step=6, dtype="float32")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "run" / "exported", tmp_path / "fsdp2")
    )
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, atol=1e-4), name
    again = run_program(command, tmp_path)
    assert again.codes == [1]
    assert "exported exists; give another folder" in again.all_said
    resumed = config_for(data, cache, tmp_path / "run", resume=True, strategy="none")
    with pytest.raises(
        liger_dist.LigerDistError, match="ZeRO stage 3, 2 ranks, float32, and this run reads safetensors"
    ):
        train(resumed)
    for step, words in ((7, "no checkpoint of step 7"), (None, "has no complete checkpoint")):
        with pytest.raises(liger_dist.LigerDistError, match=words):
            export(tmp_path / ("run" if step else "absent"), tmp_path / "other", step=step, dtype="float32")


@pytest.mark.parametrize("tied", [False, True])
def test_masters_of_stage_0_are_exported(
    tied: bool, trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    """In bf16 DeepSpeed's own weights are rounded; what was trained are the optimiser's."""
    (tmp_path / "zero0.json").write_text("{}")
    shape = json.loads((trained / "checkpoints" / "step-00000012" / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"tie_word_embeddings": tied}))
    way = {"strategy": "deepspeed", "deepspeed": str(tmp_path / "zero0.json"), "dtype": "bfloat16"}
    way |= {"model": str(tmp_path / "config.json")}
    workers_2.run(train, config_for(data, cache, tmp_path / "run", steps=2, checkpoint_every=2, **way))
    export(tmp_path / "run", tmp_path / "model", step=2, dtype="float32")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (file,) = (tmp_path / "run" / "checkpoints" / "step-00000002").rglob("mp_rank_00_model_states.pt")
    rounded = torch.load(file, map_location="cpu", weights_only=False)["module"]
    for name, weight in model.state_dict().items():
        if name in rounded:
            assert torch.equal(weight.bfloat16(), rounded[name]), name
    assert any(not torch.equal(weight, rounded[name].float()) for name, weight in model.named_parameters())


@pytest.mark.smoke
def test_an_export_ends_its_texts(on_four: Path, tmp_path: Path) -> None:
    export(on_four, tmp_path / "model", step=6, dtype="float32")
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    end = load_tokenizer(tmp_path / "model").eos_token_id
    assert model.config.eos_token_id == model.generation_config.eos_token_id == end
    assert model.generation_config.pad_token_id == end
    # A row of the embedding that the config names for padding is not trained.
    assert model.config.pad_token_id is None


def test_an_export_generates_as_the_pretrained_model_does(
    on_four: Path, data: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(on_four, tmp_path / "base", step=6, dtype="float32")
    file = tmp_path / "base" / "generation_config.json"
    settings = json.loads(file.read_text()) | {
        "eos_token_id": [0, 2],
        "temperature": 0.7,
        "do_sample": True,
        "top_p": 0.8,
    }
    file.write_text(json.dumps(settings))
    config = config_for(data, cache, tmp_path / "run", model=str(tmp_path / "base"), steps=1, strategy="none")
    train(replace(config, tokenizer=None, checkpoint_every=1, eval_fraction=0.0))
    export(tmp_path / "run", tmp_path / "model", step=1, dtype="float32")
    found = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    for name in ("eos_token_id", "temperature", "do_sample", "top_p"):
        assert found[name] == settings[name]
    # The command draws and penalizes only where it is told to.
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(found | {"repetition_penalty": 1.9}))
    capsys.readouterr()
    generate([str(tmp_path / "model"), "def ", "--tokens", "12"])
    tokenizer: Any = load_tokenizer(tmp_path / "model")
    ids: list[int] = tokenizer("def ")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in (0, 2):
            break
    assert capsys.readouterr().out == tokenizer.decode(ids, skip_special_tokens=True) + "\n"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train_batch_size": 7}, "sets train_batch_size to 7 but the options make it 8"),
        ({"bf16": {"enabled": True}}, "sets bf16.enabled to true but --dtype is float32"),
        ({"optimizer": {"type": "Adam"}}, "section 'optimizer'"),
        ([1], "holds a list; expected an object"),
        ({"bf16": True}, "sets bf16 to true; expected an object"),
        ({"zero_optimization": {"stage": 7}}, "ZeRO stage to 7; expected 0, 1, 2 or 3"),
        ({"fp16": {"enabled": True}}, "enables fp16"),
        ({}, "no launcher started this process"),
        # As transformers' examples have it.
        ({"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"}}, "no launcher started"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "has the name 'stage' twice"),
        (None, "cannot be read"),
    ],
)
def test_a_deepspeed_json_that_says_otherwise(
    settings: Any, words: str, data: Path, cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "deepspeed.json"
    if settings is not None:
        file.write_text(settings if isinstance(settings, str) else json.dumps(settings))
    config = config_for(data, cache, tmp_path, strategy="deepspeed", deepspeed=str(file))
    with pytest.raises(liger_dist.LigerDistError, match=words):
        train(config)


ZERO = ("--async_checkpoints", "false", "--strategy", "deepspeed", "--deepspeed")
POSITIONS = {"max_position_embeddings": 131072}
LONG = {"num_hidden_layers": 4} | POSITIONS
STATES_OF_8_BITS = ("--optimizer", "adamw_8bit", "--sequence_length", "4096", "--batch_size", "2")
LEAN = ("--activation_checkpointing", "true", "--mlp_tile_tokens", "8192")
SHAPE_NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
OF_160M = dict(zip(SHAPE_NAMES, PRESETS["160m"], strict=True)) | {"vocab_size": 2000, "head_dim": 64}
MICRO = ("--strategy", "fsdp2", "--sequence_length", "4096")
SIXTEEN = ("--global_batch_size", "32")
"""16 micro-batches on two ranks"""
LORA = ("--lora_rank", "16")
SMALL = {"num_hidden_layers": 8, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}


def with_folder(option: str) -> str:
    """The path of a file of DeepSpeed's settings; other options as they are."""
    return str(DEEPSPEED / option) if option.endswith(".json") else option


@pytest.mark.parametrize(
    ("shape", "world_size", "options", "peak"),
    [
        ({}, 4, ("--strategy", "fsdp2", "--lm_head", "vocab_parallel"), 48.0),
        ({}, 4, ("--strategy", "fsdp2"), 49.7),
        ({}, 4, ("--strategy", "fsdp2", "--lm_head", "vocab_parallel", "--activation_checkpointing", "true"), 33.2),
        ({}, 4, (*ZERO, "zero3.json"), 60.9),
        ({}, 2, ("--strategy", "fsdp2", "--lm_head", "vocab_parallel"), 71.1),
        ({}, 2, ("--strategy", "fsdp2"), 72.5),
        ({}, 2, ("--strategy", "fsdp2", "--lm_head", "vocab_parallel", "--activation_checkpointing", "true"), 62.8),
        ({}, 2, (*ZERO, "zero3.json"), 90.8),
        (SMALL, 2, (*ZERO, "zero2.json"), 13.4),
        (SMALL, 2, (*ZERO, "zero1.json"), 13.4),
        (SMALL, 2, ("--strategy", "ddp"), 23.5),
        (SMALL, 2, ("--strategy", "fsdp1"), 11.7),
        (SMALL, 2, ("--strategy", "fsdp2", "--lm_head", "vocab_parallel", "--layer_kernels", "false"), 14.4),
        (SMALL, 2, ("--strategy", "fsdp2", "--lm_head", "vocab_parallel", "--attention", "sdpa"), 12.1),
        (SMALL, 2, ("--strategy", "fsdp2", "--lm_head", "vocab_parallel", "--dtype", "float32"), 57.4),
        ({"num_hidden_layers": 16}, 1, ("--strategy", "fsdp2"), 69.7),
        ({"num_hidden_layers": 16}, 1, ("--strategy", "fsdp2", "--compile", "true"), 69.7),
        (LONG, 1, ("--strategy", "fsdp2", "--sequence_length", "65536", *LEAN), 33.8),
        (LONG, 1, ("--strategy", "fsdp2", "--sequence_length", "65536", *LEAN, "--offload_checkpoints", "true"), 33.6),
        (LONG, 1, ("--strategy", "fsdp2", "--sequence_length", "16384", "--mlp_tile_tokens", "4096"), 30.7),
        ({}, 2, ("--strategy", "fsdp2", *STATES_OF_8_BITS), 50.0),
        ({}, 2, ("--strategy", "fsdp2", *STATES_OF_8_BITS, "--float8", "tensorwise"), 49.9),
        ({"num_hidden_layers": 16}, 2, ("--strategy", "fsdp2", "--float8", "tensorwise"), 42.4),
        ({"num_hidden_layers": 12}, 2, MICRO, 30.3),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *SIXTEEN), 36.1),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *SIXTEEN, "--accumulate_unsharded", "true"), 42.6),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *SIXTEEN, "--activation_checkpointing", "true"), 32.1),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *SIXTEEN, "--strategy", "fsdp1"), 37.1),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *LORA), 10.5),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *LORA, *SIXTEEN), 10.5),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *LORA, *SIXTEEN, "--strategy", "fsdp1"), 18.9),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *LORA, *SIXTEEN, "--activation_checkpointing", "true"), 6.4),
        ({"num_hidden_layers": 12}, 2, (*MICRO, *LORA, *SIXTEEN, "--strategy", "ddp"), 15.6),
        (OF_160M, 2, ("--strategy", "fsdp2", "--sequence_length", "1024", "--batch_size", "8"), 2.67),
        (POSITIONS, 2, ("--strategy", "fsdp2", "--sp", "2", "--sequence_length", "65536"), 42.9),
        (POSITIONS, 2, ("--strategy", "fsdp2", "--sp", "2", "--sequence_length", "131072"), 48.8),
    ],
    ids=str,
)
def test_a_dry_run_knows_what_was_measured(
    shape: dict[str, int], world_size: int, options: tuple[str, ...], peak: float, tmp_path: Path
) -> None:
    """GiB at the peak of steps on H200s and H100s, by ``torch.cuda.max_memory_allocated``."""
    file = LAUNCH / "models" / "llama_8b.json"
    (tmp_path / "config.json").write_text(json.dumps(json.loads(file.read_text()) | shape))
    settings = LAUNCH / ("llama_8b_long.yaml" if "--sp" in options else "llama_8b.yaml")
    config = parse([str(settings), "--model", str(tmp_path / "config.json"), *map(with_folder, options)])
    model_config = find_config(config, 1)
    model = shell(config, model_config)
    model = add_lora(model, config, has_weights=True) if config.lora_rank else model
    plans = plan(config, parallel_dims_of(config, world_size), model, model_config).plans
    assert [p.head for p in plans] == (
        ["gather", "vocab_parallel"] if config.strategy == "fsdp2" and world_size > 1 else ["gather"]
    )
    found = plans[0] if config.lm_head == "gather" else plans[-1]
    assert found.peak / 2**30 == pytest.approx(peak, rel=0.03 if "--sp" in options else 0.08)


def test_a_dry_run_knows_what_is_recomputed() -> None:
    assert RECOMPUTED_BYTES == MIN_BYTES


def test_a_dry_run_knows_what_accumulation_holds() -> None:
    """A rank's shard of the gradients, whatever the batch; with --accumulate_unsharded all 8.03e9 numbers of them."""
    for sequences, unsharded, gib in ((8, "false", 3.74), (512, "false", 3.74), (8, "true", 3.74), (512, "true", 29.9)):
        options = ["--dry_run", "true", "--world_size", "8", "--batch_size", "1", "--global_batch_size", str(sequences)]
        config = parse([str(LAUNCH / "llama_8b.yaml"), *options, "--accumulate_unsharded", unsharded])
        model_config = find_config(config, 1)
        dims = parallel_dims_of(config, 8)
        for found in plan(config, dims, shell(config, model_config), model_config).plans:
            assert found.gradients / 2**30 == pytest.approx(gib, rel=0.01)
    alone = replace(config, strategy="ddp")
    with pytest.raises(liger_dist.LigerDistError, match="ddp has no sharded gradients to reduce in each micro-batch"):
        check_wrap(alone, parallel_dims_of(alone, 8))
    # FSDP1 does not add gradients that it has moved to the CPU; FSDP2 does.
    for strategy, gib in (("fsdp1", 29.9), ("fsdp2", 0.0)):
        offloaded = replace(config, strategy=strategy, cpu_offload=True, accumulate_unsharded=False)
        dims = parallel_dims_of(offloaded, 8)
        (found, *_) = plan(offloaded, dims, shell(offloaded, model_config), model_config).plans
        assert found.gradients / 2**30 == pytest.approx(gib, rel=0.01)


@pytest.mark.nightly
def test_a_dry_run_allocates_nothing(cache: Path) -> None:
    command = [sys.executable, "-m", "liger_dist_train", "launch/llama_8b.yaml", "--dry_run", "--world_size", "4"]
    command += ["--tokenizer", str(cache / "tokenizer")]
    program = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); "
    program += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    finished = subprocess.run(
        [sys.executable, "-c", program, *command], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    *table, kib = finished.stdout.splitlines()
    assert table[0] == "fsdp2 on 4 shards"
    assert {line.split("  ")[0] for line in table} >= {"parameters", "optimizer", "gradients", "activations", "peak"}
    assert int(kib) < 3 * 2**20
