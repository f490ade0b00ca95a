"""The training program: what it writes, fused and unfused, stopped and resumed, and its errors."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked_programs import TORCHRUN, TWO_RANKS, run_program
from harness import Workers
from models import make_batch, make_model
from torch.distributed.device_mesh import init_device_mesh
from training_runs import (
    LAUNCH,
    ROOT,
    SOURCES,
    as_options,
    config_for,
    losses_of,
    metrics_of,
    published,
)

import liger_dist
from liger_dist.sharding.process_groups import compute_device
from liger_dist_train.config import parse
from liger_dist_train.data_loader import Order, collate
from liger_dist_train.dataset import Piece
from liger_dist_train.fault_tolerance import run
from liger_dist_train.parser import to_yaml
from liger_dist_train.run import train
from liger_dist_train.tokenization import load_tokenizer


def test_a_run_leaves_what_it_promises(trained: Path) -> None:
    rows = metrics_of(trained)
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert {"step", "loss", "tokens_per_second", "peak_memory_bytes"} <= row.keys()
    assert [row["step"] for row in rows if "eval_loss" in row] == [1, 5, 10, 12]
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"] - 0.5
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    written = parse([str(trained / "config.yaml")])
    assert (written.strategy, written.global_batch_size, written.steps) == ("fsdp2", 8, 12)
    (source,) = json.loads((trained / "data.json").read_text())["sources"]
    assert source["documents_read"] == source["documents"] == 2 * len(SOURCES)
    assert source["tokens"] == sum(split["tokens"] for split in source["splits"].values())
    assert source["splits"].keys() == {"train", "held_out"}
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == [
        "begun",
        "lock",
        "step-00000006",
        "step-00000012",
    ]
    assert published(trained) == ["step-00000006", "step-00000012"]


def test_the_page_has_the_files_of_a_run_and_the_keys_of_its_metrics(trained: Path) -> None:
    page = (ROOT / "docs" / "training.md").read_text().split("## Files in `--output_dir`")[1].split("\n## ")[0]
    for path in trained.iterdir():
        assert f"`{path.name}{'/' * path.is_dir()}`" in page, path.name
    for name in {name for row in metrics_of(trained) for name in row}:
        assert f"`{name}`" in page, name


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    workers_2.run(train, config_for(data, cache, tmp_path, stop_at_step=7))
    assert len(metrics_of(tmp_path)) == 7
    workers_2.run(train, config_for(data, cache, tmp_path, resume=True))
    assert losses_of(tmp_path) == losses_of(trained)
    ours, theirs = (
        [row["eval_loss"] for row in metrics_of(folder) if "eval_loss" in row] for folder in (tmp_path, trained)
    )
    assert ours == theirs


@pytest.mark.nightly(batch_size=[2, 8])
@pytest.mark.parametrize("batch_size", [2, 3, 8])
def test_one_process_sees_the_losses_of_two(
    batch_size: int, data: Path, cache: Path, trained: Path, tmp_path: Path
) -> None:
    """Same weights for one seed under every strategy; the same sequences in a step, in other micro-batches."""
    train(config_for(data, cache, tmp_path, batch_size=batch_size, strategy="none", stop_at_step=4))
    assert losses_of(tmp_path) == pytest.approx(losses_of(trained)[:4], rel=1e-5)


def test_a_checkpoint_cut_off_half_way_is_not_taken(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-00000012").rename(folder / "step-00000012.partial")
    train(config_for(data, cache, tmp_path / "run", resume=True, strategy="none"))
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 13))


@pytest.mark.nightly
def test_a_run_with_dropout_resumes_exactly(data: Path, cache: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=601, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(tmp_path / "model" / "config.json"), "strategy": "none", "steps": 6}
    train(config_for(data, cache, tmp_path / "whole", **settings))
    train(config_for(data, cache, tmp_path / "parts", stop_at_step=3, **settings))
    train(config_for(data, cache, tmp_path / "parts", resume=True, stop_at_step=3, **settings))
    assert len(metrics_of(tmp_path / "parts")) == 3
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    train(config_for(data, cache, tmp_path / "parts", resume=True, **settings))
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


def test_a_finished_run_is_resumed_without_harm(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    before = contents_of(tmp_path / "run")
    train(config_for(data, cache, tmp_path / "run", resume=True, strategy="none"))
    assert contents_of(tmp_path / "run") == before


def contents_of(run: Path) -> dict[str, bytes]:
    """All files but those that every start writes."""
    files = [file for file in run.rglob("*") if file.is_file() and file.name not in ("config.yaml", "lock")]
    return {str(file.relative_to(run)): file.read_bytes() for file in files}


def test_weights_of_a_folder_are_loaded_under_fsdp2(
    workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    model.resize_token_embeddings(601)
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(cache / "tokenizer").save_pretrained(tmp_path / "model")
    losses = []
    for strategy, run_with in (("none", None), ("fsdp2", workers_2)):
        output = tmp_path / strategy
        settings = {"model": str(tmp_path / "model"), "tokenizer": None, "strategy": strategy, "steps": 1}
        config = config_for(data, cache, output, **settings)
        train(config) if run_with is None else run_with.run(train, config)
        losses.append(losses_of(output)[0])
    assert abs(losses[0] - losses[1]) < 1e-5


@pytest.mark.smoke
def test_a_checkpoint_of_another_model_is_refused(data: Path, cache: Path, trained: Path) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=r"another model: .*hidden_size 128 instead of 384"):
        train(config_for(data, cache, trained, resume=True, model="small", strategy="none"))


@pytest.mark.smoke
def test_errors_of_a_new_user_in_one_process(data: Path, cache: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    folder = tmp_path / "folder"
    folder.mkdir()
    cases = [
        ({"data": [str(empty)]}, "is empty"),
        ({"data": [str(tmp_path / "absent.txt")]}, "does not exist"),
        ({"data": [str(folder)]}, "holds no data"),
        ({"data": []}, "--data names nothing"),
        ({"tokenizer": None}, r"--model \S+model\.json has no tokenizer; name one with --tokenizer"),
        ({"tokenizer": str(tmp_path / "absent")}, "tokenizer folder"),
        ({"tokenizer": str(folder)}, "no tokenizer can be loaded"),
        ({"model": "7b"}, "neither a preset"),
        ({"output_dir": str(empty)}, "nothing can be written"),
        ({"model": str(folder)}, "no model config can be read"),
        ({"dp_shard": 1}, "--dp_shard is 1 but the strategy is none"),
        ({"strategy": "fsdp2", "dp_replicate": 2, "dp_shard": 2}, "needs 4 processes but 1"),
        ({"strategy": "fsdp1", "tp": 2}, "--tp is 2 but the strategy is fsdp1"),
        ({"strategy": "fsdp2"}, "torchrun"),
        ({"attention": "flash"}, "--attention flash"),
    ]
    for changes, words in cases:
        settings = {"data": [str(data)], "strategy": "none"} | changes
        config = dataclasses.replace(config_for(data, cache, tmp_path / "out"), **settings)
        with pytest.raises(liger_dist.LigerDistError, match=words):
            train(config)


def test_a_mesh_of_four_on_three_processes_is_one_sentence_and_no_hang(data: Path, cache: Path, tmp_path: Path) -> None:
    options = as_options(config_for(data, cache, tmp_path, strategy="fsdp2", dp_shard=4))
    words = [TORCHRUN, "--nproc-per-node", "3", "-m", "liger_dist_train", *options]
    ended = run_program(words, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert ended.failed
    errors = ended.all_said
    said = [line for line in errors.splitlines() if "error: " in line]
    assert len(said) == 1, errors
    assert said[0].startswith(
        "[rank 0] error: --dp_replicate 1 x --dp_shard 4 x --tp 1 x --sp 1 needs 4 processes but 3"
    )
    assert "Traceback" not in errors


def test_a_fault_of_one_rank_ends_all(data: Path, cache: Path, tmp_path: Path) -> None:
    """Rank 1 fails in its data while rank 0 waits in a collective."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(LAUNCH)!r})\n"
        "from liger_dist_train.fault_tolerance import run\n"
        "from liger_dist_train.distributed import rank, start, total\n"
        "from liger_dist import LigerDistError\n"
        "def main():\n"
        "    start()\n"
        "    if rank() == 1:\n"
        "        raise LigerDistError('row 7 of this rank is broken')\n"
        "    total(1.0)\n"
        "run(main)\n"
    )
    ended = run_program([*TWO_RANKS, str(program)], tmp_path, CUDA_VISIBLE_DEVICES="")
    assert ended.failed
    assert ended.all_said.count("[rank 1] error: row 7 of this rank is broken") == 1


def test_ctrl_c_saves_a_checkpoint_and_ends_cleanly(data: Path, cache: Path, tmp_path: Path) -> None:
    options = as_options(config_for(data, cache, tmp_path, steps=100_000, eval_every=1000))
    process = subprocess.Popen(
        [sys.executable, "-m", "liger_dist_train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").is_file() or not metrics_of(tmp_path):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    step = len(metrics_of(tmp_path))
    assert f"stopped after step {step}" in output
    assert published(tmp_path) == [f"step-{step:08d}"]


def test_packed_documents_do_not_see_each_other() -> None:
    """Logits of a document do not change with the document packed before it."""
    ids = np.arange(1, 25, dtype=np.int32)
    documents = [Piece(part, part) for part in np.split(ids, [5, 9, 12])]
    batch = collate([documents[:3], documents[3:], documents[:2]], 4, 12, 77, restart=True)
    assert batch["input_ids"].tolist() == [
        [*range(1, 13)],
        [*range(13, 25)],
        [*range(1, 10), 77, 77, 77],
        [77] * 12,
    ]
    assert batch["position_ids"].tolist() == [
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],
        [*range(12)],
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],
        [*range(12)],
    ]
    unlabelled = [[i for i, label in enumerate(row) if label == -100] for row in batch["labels"].tolist()]
    assert unlabelled == [[0, 5, 9], [0], [0, 5, 9, 10, 11], [*range(12)]]
    shown = batch["labels"] != -100
    assert torch.equal(batch["labels"][shown], batch["input_ids"][shown])
    assert "position_ids" not in collate([documents[:3]], 1, 12, 77, restart=False)
    model = make_model("llama").cpu()
    model.config._attn_implementation = "sdpa"
    packed = model(input_ids=batch["input_ids"][:1], position_ids=batch["position_ids"][:1], use_cache=False).logits[
        0, 5:9
    ]
    alone = model(input_ids=batch["input_ids"][:1, 5:9], use_cache=False).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)


def test_the_order_of_data_is_a_function_of_seed_and_step() -> None:
    first, second = Order([4, 6], seed=3, weights=None), Order([4, 6], seed=3, weights=None)
    assert second[24] == first[24]
    assert [first[i] for i in range(25)] == [second[i] for i in range(25)]
    everything = [(source, index) for source, size in enumerate((4, 6)) for index in range(size)]
    for epoch in range(2):
        assert sorted(first[epoch * 10 + i] for i in range(10)) == everything
    assert [first[i] for i in range(10)] != [first[10 + i] for i in range(10)]
    other = Order([4, 6], seed=4, weights=None)
    assert [other[i] for i in range(10)] != [first[i] for i in range(10)]


@pytest.mark.smoke
def test_sections_nulls_and_numbers_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "batch: {steps: 1e3, epochs: null}\noptimizer: {name: adamw, learning_rate: 1e-5}\ndata: {sources: a.txt}\n"
        "run:\n"
    )
    config = parse([str(file)])
    assert (config.steps, config.epochs, config.learning_rate, config.data) == (1000, None, 1e-5, ["a.txt"])
    config = parse([str(file), "--steps", "null", "--epochs", "2", "--data=~/b.txt"])
    assert (config.steps, config.epochs, config.data) == (None, 2.0, [str(Path.home() / "b.txt")])
    file.write_text(to_yaml(config))
    assert parse([str(file)]) == config
    file.write_text("steps: 5\n")
    with pytest.raises(liger_dist.LigerDistError, match=r"'other\.yaml' stands where an option is expected"):
        parse([str(file), "other.yaml"])
    with pytest.raises(liger_dist.LigerDistError, match=r"--steps is 1\.5; expected a whole number"):
        parse(["--steps", "1.5"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 1\nsteps: 2\n", "'steps' is there twice"),
        ("batch: {batch_size: 1, batch_size: 2}\n", "'batch_size' is there twice"),
        ("steps: 1\nbatch: {steps: 2}\n", "sets 'steps' twice, in a section and outside"),
    ],
)
def test_an_option_is_set_once(text: str, words: str, tmp_path: Path) -> None:
    """Readers of YAML keep the last of two, and sources of a second --data would replace the first."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(liger_dist.LigerDistError, match=words):
        parse([str(file)])
    with pytest.raises(liger_dist.LigerDistError, match="--data is given twice; expected all of its values after one"):
        parse(["--data", "a", "--data", "b"])
    assert parse(["--steps", "1", "--steps", "2"]).steps == 2, "a script's option and the user's"


@pytest.mark.smoke
def test_command_line_and_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 5\ndata: [a, b]\nfused_loss: false\nlearning_rate: 0.5\n")
    config = parse([str(file), "--steps", "7", "--strategy", "fsdp2"])
    assert (config.steps, config.data, config.fused_loss) == (7, ["a", "b"], False)
    assert (config.learning_rate, config.strategy) == (0.5, "fsdp2")
    for text, words in (
        ("data: d.txt\n", None),
        ("- a list\n", "holds a list"),
        ("a: [\n", "is not YAML"),
        ("learning_rate: -1\n", "--learning_rate is -1"),
        ("global_batch_size: 0\n", "--global_batch_size is 0"),
        ("tp: 0\n", "--tp is 0"),
        ("world_size: 2\n", "--world_size is 2"),
        ("strategy: deepspeed\n", "expected both or none"),
        ("shuffle_window: 20\n", "--shuffle_window is 20 but --streaming is false"),
        ("lora_dropout: 1.0\n", "--lora_dropout is 1.0; expected less than 1"),
        ("lora_alpha: 32.0\n", "--lora_targets is given but --lora_rank is 0"),
        ("steps: 10\nepochs: 1\n", "--steps is 10 and --epochs 1"),
        ("global_batch_size: 8\nglobal_batch_tokens: 4096\n", "--global_batch_size is 8 and --global_batch_tokens"),
        ("global_batch_tokens: 4095\n", "expected a multiple of --sequence_length, 512"),
        ("data: [a, b]\ndata_weights: [1]\n", "--data_weights has 1 numbers and --data 2 sources"),
        ("lr_scheduler: greedy\n", "--lr_scheduler is 'greedy'"),
        ("learning_rate: .nan\n", "--learning_rate is nan"),
        ("memory_budget: 0\n", "--memory_budget is 0"),
        ("mlp_tile_tokens: 0\n", "--mlp_tile_tokens is 0"),
        ("mlp_tile_tokens: 8192\ncompile: true\n", "--mlp_tile_tokens is 8192 but the layers keep their own code"),
        ("offload_checkpoints: true\n", "--offload_checkpoints is true but --activation_checkpointing false"),
        ("adam_beta2: 1.0\n", "--adam_beta2 is 1.0"),
        ("stop_at_step: -1\n", "--stop_at_step is -1"),
        ("resume: true\noverwrite: true\n", "are both true"),
    ):
        file.write_text(text)
        if words is None:
            assert parse([str(file)]).data == ["d.txt"]
            continue
        with pytest.raises(liger_dist.LigerDistError, match=words):
            parse([str(file)])
    file.write_text("batch: {stepz: 1}\n")
    with pytest.raises(liger_dist.LigerDistError, match="sets 'stepz', which is no option; the nearest is --steps"):
        parse([str(file)])
    file.write_text("dtype: bf16\n")
    with pytest.raises(liger_dist.LigerDistError, match="--dtype is 'bf16'; expected one of float32, bfloat16"):
        parse([str(file)])
    file.write_text("step: 5\n")
    with pytest.raises(liger_dist.LigerDistError, match="sets 'step', which is no option; the nearest is --steps"):
        parse([str(file)])
    with pytest.raises(liger_dist.LigerDistError, match="--stepz is no option; the nearest is --steps"):
        parse(["--stepz", "5"])
    for name in ("accumulation_steps", "vocab_size", "sample_count"):
        with pytest.raises(liger_dist.LigerDistError, match=f"--{name} is no option"):
            parse([f"--{name}", "5"])
    with pytest.raises(liger_dist.LigerDistError, match="--data has no values; expected one"):
        parse(["--data", "--steps", "5"])
    with pytest.raises(liger_dist.LigerDistError, match=r"absent\.yaml does not exist"):
        parse(["absent.yaml"])
    with pytest.raises(liger_dist.LigerDistError, match="--steps is 0"):
        parse(["--steps", "0"])


def test_run_is_the_programs_entry() -> None:
    seen: list[int] = []
    run(lambda: seen.append(1))
    assert seen == [1]


def test_clipping_adds_up_norms_on_two_meshes(workers_4: Workers) -> None:
    """Under FSDP2 x TP lm_head is on another mesh than the layers; torch's own clipping on one mesh is the truth."""
    for grid, line in workers_4.run(clipped_norms):
        assert grid == pytest.approx(line, rel=1e-9)


def clipped_norms() -> tuple[list[float], list[float]]:
    """Norms before and after clipping to half of them."""
    found = []
    device_type = compute_device().type
    for mesh in (init_device_mesh(device_type, (2, 2), mesh_dim_names=("shard", "tp")), None):
        strategy = liger_dist.FSDP2(mesh=mesh, reduce_dtype=torch.float64)
        model: Any = liger_dist.wrap(make_model("llama"), strategy)
        model(**make_batch(torch.distributed.get_rank() // 2)).loss.backward()
        if mesh is None:
            gradients = [parameter.grad for parameter in model.parameters()]
            before = torch.nn.utils.get_total_norm(gradients).full_tensor()  # type: ignore[attr-defined]
            torch.nn.utils.clip_grad_norm_(model.parameters(), float(found[0][0]) / 2)
        else:
            before = liger_dist.clip_grad_norm_(model, 1e9)
            liger_dist.clip_grad_norm_(model, float(before) / 2)
        after = liger_dist.clip_grad_norm_(model, 1e9)
        found.append([float(before), float(after)])
    return found[0], found[1]
