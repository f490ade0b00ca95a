"""The training program: what it writes, fused and unfused, stopped and resumed, and its errors."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Workers
from models import make_batch, make_model
from torch.distributed.device_mesh import init_device_mesh
from training.arguments import parse
from training.corpus import Columns, find_corpus, tokenize
from training.data import find_tokenizer
from training.ending import run
from training.engine import clip
from training.loop import train
from training.meter import measured
from training.packing import Blocks, Order, Stream
from training.tokens import load_tokenizer, train_tokenizer
from training_runs import LAUNCH, arguments_for, as_options, ends_within, losses_of, metrics_of, published, torchrun

import liger_dist
from liger_dist.sharding.process_groups import compute_device


def test_a_run_leaves_what_it_promises(trained: Path) -> None:
    rows = metrics_of(trained)
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row in rows:
        assert {"step", "loss", "tokens_per_second", "peak_memory_bytes"} <= row.keys()
    assert [row["step"] for row in rows if "eval_loss" in row] == [1, 5, 10, 12]
    assert rows[-1]["eval_loss"] < rows[0]["eval_loss"] - 0.5
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (trained / "sample.txt").read_text().startswith("def ")
    assert sorted(p.name for p in (trained / "checkpoints").iterdir()) == [
        "begun",
        "lock",
        "step-00000006",
        "step-00000012",
    ]
    assert published(trained) == ["step-00000006", "step-00000012"]


@pytest.mark.parametrize(("strategy", "dtype", "tolerance"), [("fsdp2", "float32", 1e-5), ("ddp", "bfloat16", 2e-2)])
def test_fused_and_unfused_losses_agree_at_every_step(
    strategy: str, dtype: str, tolerance: float, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    losses = []
    for fused in (True, False):
        output = tmp_path / str(fused)
        changes = {"fused_loss": fused, "dtype": dtype, "strategy": strategy, "learning_rate": 3e-3}
        workers_2.run(train, arguments_for(data, cache, output, **changes))
        losses.append(losses_of(output))
    assert len(losses[0]) == 12
    # AdamW's first steps have the size of the sign: on GPUs, sums in another order show in the second.
    assert np.abs(np.subtract(*losses)).max() < (tolerance if not torch.cuda.is_available() else max(tolerance, 1e-3))


def test_a_stopped_and_resumed_run_equals_the_uninterrupted_one(
    trained: Path, workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    workers_2.run(train, arguments_for(data, cache, tmp_path, stop_at_step=7))
    assert len(metrics_of(tmp_path)) == 7
    assert not (tmp_path / "sample.txt").exists()
    workers_2.run(train, arguments_for(data, cache, tmp_path, resume=True))
    assert losses_of(tmp_path) == losses_of(trained)
    assert (tmp_path / "sample.txt").read_text() == (trained / "sample.txt").read_text()


def test_one_process_sees_the_loss_of_two(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    """Same weights for one seed under every strategy; the same tokens in a step, arranged otherwise."""
    alone = arguments_for(data, cache, tmp_path, accumulation_steps=1, batch_size=4, strategy="none", steps=1)
    train(alone)
    two_ranks = losses_of(trained)[0]
    assert abs(losses_of(tmp_path)[0] - two_ranks) < 0.05


def test_a_checkpoint_cut_off_half_way_is_not_taken(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-00000012").rename(folder / "step-00000012.partial")
    train(arguments_for(data, cache, tmp_path / "run", resume=True, strategy="none", accumulation_steps=4))
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 13))


def test_a_run_with_dropout_resumes_exactly(data: Path, cache: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=601, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.save_pretrained(tmp_path / "model")
    settings: dict[str, Any] = {"model": str(tmp_path / "model" / "config.json"), "strategy": "none", "steps": 6}
    train(arguments_for(data, cache, tmp_path / "whole", **settings))
    train(arguments_for(data, cache, tmp_path / "parts", stop_at_step=3, **settings))
    train(arguments_for(data, cache, tmp_path / "parts", resume=True, stop_at_step=3, **settings))
    assert len(metrics_of(tmp_path / "parts")) == 3
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    train(arguments_for(data, cache, tmp_path / "parts", resume=True, **settings))
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


def test_a_finished_run_is_resumed_without_harm(data: Path, cache: Path, trained: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    train(arguments_for(data, cache, tmp_path / "run", resume=True, strategy="none"))
    assert (tmp_path / "run" / "sample.txt").is_file()


def test_weights_of_a_folder_are_loaded_under_fsdp2(
    workers_2: Workers, data: Path, cache: Path, tmp_path: Path
) -> None:
    model: Any = make_model("llama", dtype=torch.float32)
    model.resize_token_embeddings(601)
    model.save_pretrained(tmp_path / "model")
    find_tokenizer(arguments_for(data, cache, tmp_path)).save_pretrained(tmp_path / "model")
    losses = []
    for strategy, run_with in (("none", None), ("fsdp2", workers_2)):
        output = tmp_path / strategy
        settings: dict[str, Any] = {"model": str(tmp_path / "model"), "strategy": strategy, "steps": 1}
        if run_with is None:
            train(arguments_for(data, cache, output, accumulation_steps=1, batch_size=4, **settings))
        else:
            run_with.run(train, arguments_for(data, cache, output, accumulation_steps=1, **settings))
        losses.append(losses_of(output)[0])
    assert abs(losses[0] - losses[1]) < 1e-5


def test_a_checkpoint_of_another_model_is_refused(data: Path, cache: Path, trained: Path) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=r"another model: .*hidden_size 128 instead of 384"):
        train(arguments_for(data, cache, trained, resume=True, model="small", strategy="none"))


def test_errors_of_a_new_user_in_one_process(data: Path, cache: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    cases = [
        ({"data": [str(empty)]}, "is empty"),
        ({"data": [str(tmp_path / "absent.txt")]}, "does not exist"),
        ({"data": [str(tmp_path)]}, "holds no data"),
        ({"tokenizer": str(tmp_path / "absent")}, "tokenizer folder"),
        ({"tokenizer": str(tmp_path)}, "no tokenizer can be loaded"),
        ({"model": "7b"}, "neither a preset"),
        ({"sequence_length": 10**7}, "shorter than one sequence"),
        ({"output_dir": str(empty)}, "nothing can be written"),
        ({"model": str(tmp_path)}, "no model config can be read"),
        ({"dp_shard": 1}, "--dp_shard is 1 but the strategy is none"),
        ({"strategy": "fsdp2", "dp_replicate": 2, "dp_shard": 2}, "needs 4 processes but 1"),
        ({"strategy": "fsdp1", "tp": 2}, "--tp is 2 but the strategy is fsdp1"),
        ({"strategy": "fsdp2"}, "torchrun"),
        ({"attention": "flash"}, "--attention flash"),
    ]
    for changes, words in cases:
        settings = {"data": [str(data)], "strategy": "none"} | changes
        arguments = dataclasses.replace(arguments_for(data, cache, tmp_path / "out"), **settings)
        with pytest.raises(liger_dist.LigerDistError, match=words):
            train(arguments)


def test_a_mesh_of_four_on_three_processes_is_one_sentence_and_no_hang(data: Path, cache: Path, tmp_path: Path) -> None:
    options = as_options(arguments_for(data, cache, tmp_path, strategy="fsdp2", dp_shard=4))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = torchrun(*options, processes=3, env=environment)
    with ends_within(50, tmp_path):
        _, errors = process.communicate()
        print(errors)
    assert process.returncode != 0
    said = [line for line in errors.splitlines() if "error: " in line]
    assert len(said) == 1, errors
    assert said[0].startswith("[rank 0] error: --dp_replicate 1 x --dp_shard 4 x --tp 1 needs 4 processes but 3")
    # What follows is torchrun's own report of its children.
    assert "liger_dist" not in errors


def test_a_fault_of_one_rank_ends_all(data: Path, cache: Path, tmp_path: Path) -> None:
    """Rank 1 fails in its data while rank 0 waits in a collective."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(LAUNCH)!r})\n"
        "from training.ending import run\n"
        "from training.process import rank, start, total\n"
        "from liger_dist import LigerDistError\n"
        "def main():\n"
        "    start()\n"
        "    if rank() == 1:\n"
        "        raise LigerDistError('row 7 of this rank is broken')\n"
        "    total(1.0)\n"
        "run(main)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert finished.returncode != 0
    assert finished.stderr.count("[rank 1] error: row 7 of this rank is broken") == 1


def test_ctrl_c_saves_a_checkpoint_and_ends_cleanly(data: Path, cache: Path, tmp_path: Path) -> None:
    options = as_options(arguments_for(data, cache, tmp_path, steps=100_000, eval_every=1000))
    process = subprocess.Popen(
        [sys.executable, str(LAUNCH / "train.py"), *options],
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


def test_only_the_assistant_is_learnt(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    train_tokenizer(["hello there, how are you? I am fine."], 300, folder)
    tokenizer = load_tokenizer(folder)
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I am fine."},
        {"role": "user", "content": "how?"},
        {"role": "assistant", "content": "you are"},
    ]
    ids, labels = tokenize("here", {"messages": turns}, tokenizer, Columns("text", "messages"), 300)
    learnt = [i for i, label in zip(ids, labels, strict=True) if label != -100]
    assert tokenizer.decode(learnt) == "I am fine.<|end|>you are<|end|>"
    first = [{"role": "assistant", "content": "I am"}]
    assert tokenize("here", {"messages": first}, tokenizer, Columns("text", "messages"), 300)[1][0] >= 0
    text = "<|user|>hello<|end|><|assistant|>I am fine.<|end|><|user|>how?<|end|><|assistant|>you are<|end|>"
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1, 2, 3], "labels": [1, 2]}, "2 labels for 3 input_ids"),
        ({"input_ids": [1, 2, 3], "labels": [1, 2, 300]}, "300 in labels"),
        ({"input_ids": [1, 2, 3], "labels": [1.0, 2.0, 3.0]}, "labels of type float"),
        ({"input_ids": [1, -1], "labels": [1, 1]}, "-1 in input_ids"),
        ({"body": "text"}, "its columns: body"),
        ({"messages": "hello"}, "has str for its turns"),
        ({"messages": [{"role": "user"}]}, "turn 0 is .* expected a role and a content"),
    ],
    ids=["short", "too large", "float", "negative", "columns", "no list", "no content"],
)
def test_wrong_rows_are_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(liger_dist.LigerDistError, match=words):
        tokenize("row 0", row, None, Columns("text", "messages"), 300)


def test_all_kinds_of_data_are_read(tmp_path: Path) -> None:
    Dataset = pytest.importorskip("datasets").Dataset
    columns = Columns("text", "messages")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_text('{"text": "line"}\n{"text": "other"}\n')
    Dataset.from_dict({"text": ["parquet"]}).to_parquet(str(tmp_path / "c.parquet"))
    assert list(find_corpus([str(tmp_path)], columns).texts()) == ["text", "line", "other", "parquet"]
    Dataset.from_dict({"text": ["saved"]}).save_to_disk(str(tmp_path / "saved"))
    assert list(find_corpus([str(tmp_path / "saved")], columns).texts()) == ["saved"]
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    assert list(find_corpus([str(tmp_path / "chat.jsonl")], columns).texts()) == ["hi"]
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    with pytest.raises(liger_dist.LigerDistError, match="cannot be read as json"):
        list(find_corpus([str(tmp_path / "broken.jsonl")], columns).texts())


def test_packed_documents_do_not_see_each_other() -> None:
    """Logits of a document do not change with the document packed before it."""
    ids = np.arange(1, 25, dtype=np.int32)
    blocks = Blocks(Stream(ids, ids, np.array([0, 5, 9])), 12)
    batch = blocks.batch([0, 1])
    assert batch["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch["position_ids"][1].tolist() == list(range(12))
    assert [i for i, label in enumerate(batch["labels"][0].tolist()) if label == -100] == [0, 5, 9]
    model = make_model("llama").cpu()
    model.config._attn_implementation = "sdpa"
    packed = model(input_ids=batch["input_ids"][:1], position_ids=batch["position_ids"][:1], use_cache=False).logits[
        0, 5:9
    ]
    alone = model(input_ids=batch["input_ids"][:1, 5:9], use_cache=False).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-6, atol=1e-6)


def test_the_order_of_data_is_a_function_of_seed_and_step() -> None:
    first, second = Order(10, seed=3), Order(10, seed=3)
    assert [first[i] for i in range(25)] == [second[i] for i in range(25)]
    assert sorted(first[i] for i in range(10, 20)) == list(range(10))
    assert second[24] == first[24]
    assert [Order(10, seed=4)[i] for i in range(10)] != [first[i] for i in range(10)]


def test_the_meter_sees_full_logits_and_their_absence() -> None:
    head = torch.nn.Linear(4, 50, bias=False)
    with measured(head) as largest:
        head(torch.zeros(3, 4))
    assert largest.shape == (3, 50)
    assert largest.num_bytes == 3 * 50 * 4
    assert largest.numbers_of_width == {50: 3 * 50}
    model = liger_dist.wrap(make_model("llama"), config=liger_dist.WrapConfig(memory_budget=5 * 101 * 8))
    with measured(model.lm_head) as largest:
        model(**make_batch(0)).loss.backward()
    assert largest.numbers_of_width[101] == 5 * 101
    # Rows of 10 tokens against half of 100 entries, as where a head is split; then against all of them.
    for width, rows, words in ((50, 6, "at most 30.0% of"), (100, 10, "at most 100.0% of")):
        largest.numbers_of_width = {width: rows * width}
        said = largest.in_words(10, 100, 50, is_fused=True)
        assert said.startswith(words)
        assert ("a smaller --memory_budget holds less" in said) == (width == 100)


def test_command_line_and_yaml(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 5\ndata: [a, b]\nfused_loss: false\nlearning_rate: 0.5\n")
    arguments = parse([str(file), "--steps", "7", "--strategy", "fsdp2"])
    assert (arguments.steps, arguments.data, arguments.fused_loss) == (7, ["a", "b"], False)
    assert (arguments.learning_rate, arguments.strategy) == (0.5, "fsdp2")
    for text, words in (
        ("data: d.txt\n", None),
        ("- a list\n", "holds a list"),
        ("a: [\n", "is not YAML"),
        ("learning_rate: -1\n", "--learning_rate is -1"),
        ("sample_prompt: ''\n", "--sample_prompt"),
        ("tp: 0\n", "--tp is 0"),
        ("world_size: 2\n", "--world_size is 2"),
        ("strategy: deepspeed\n", "expected both or none"),
        ("vocab_size: 100\n", "--vocab_size is 100"),
        ("profile_step: 2000\n", "--profile_step is 2000"),
        ("learning_rate: .nan\n", "--learning_rate is nan"),
        ("memory_budget: 0\n", "--memory_budget is 0"),
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
    file.write_text("dtype: bf16\n")
    with pytest.raises(SystemExit):
        parse([str(file)])
    file.write_text("step: 5\n")
    with pytest.raises(liger_dist.LigerDistError, match="sets 'step'"):
        parse([str(file)])
    with pytest.raises(liger_dist.LigerDistError, match="--stepz is no option"):
        parse(["--stepz", "5"])
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
            before = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()  # type: ignore[attr-defined]
            torch.nn.utils.clip_grad_norm_(model.parameters(), float(found[0][0]) / 2)
        else:
            norm = clip(model, 1e9)
            assert norm is not None
            before = norm
            clip(model, float(before) / 2)
        after = clip(model, 1e9)
        assert after is not None
        found.append([float(before), float(after)])
    return found[0], found[1]
