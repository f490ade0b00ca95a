"""The run itself: from arguments to files."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_dist import LigerDistError

from .anomalies import check_numbers
from .arguments import TrainArguments
from .checkpoint import Checkpoints, describe_run
from .data import find_blocks, find_tokenizer
from .engine import make_engine
from .flops import Flops
from .layout import layout_of
from .memory import plan
from .meter import LargestTensor, measured, traced
from .metrics import Metrics, peak_memory_bytes
from .model import find_config, inner_model, shell
from .process import Interruption, on_rank_zero, rank, total, world_size
from .run import Run
from .tokens import fingerprint
from .watchdog import Watchdog


def train(arguments: TrainArguments) -> None:
    """Trains as the arguments say and leaves everything in ``output_dir``."""
    if arguments.dry_run:
        _plan(arguments)
    else:
        _train(arguments)


def _train(arguments: TrainArguments) -> None:
    layout = layout_of(arguments, world_size())
    if rank() == 0:
        print(f"{layout}, {arguments.dtype}, {arguments.batch_size} x {arguments.sequence_length} tokens", flush=True)
    folder = Path(arguments.output_dir)
    on_rank_zero(lambda: make_folder(folder / "checkpoints"))
    tokenizer = find_tokenizer(arguments)
    config = find_config(arguments, len(tokenizer))
    blocks = find_blocks(arguments, tokenizer, config.get_text_config().vocab_size)
    on_rank_zero(lambda: _keep_for_export(folder / "model", config, tokenizer))
    model = shell(arguments, config)
    flops = Flops.of(model, config, arguments)
    engine = make_engine(arguments, layout, model)
    run = Run(arguments, layout, engine, blocks["train"], blocks["held_out"])
    checkpoints = Checkpoints(
        folder / "checkpoints",
        describe_run(config, fingerprint(tokenizer), arguments.seed, engine.format),
        keep=arguments.keep_checkpoints,
        anew=not arguments.resume,
    )
    checkpoints.clear_partial()
    first_step = checkpoints.newest() or 0
    if first_step > 0:
        checkpoints.load(first_step, engine)
        for _ in range(first_step):
            run.schedule.step()
        if rank() == 0:
            print(f"continues after step {first_step}", flush=True)
    metrics = Metrics(folder, total_steps=arguments.steps, first_step=first_step, is_writer=rank() == 0)
    done = _steps(run, checkpoints, metrics, flops, first_step)
    metrics.close()
    text = run.sample(tokenizer) if arguments.sample_tokens > 0 and not done.was_stopped else None
    if rank() == 0:
        _report(run, folder, metrics, flops, done, text)


@dataclass
class Done:
    """What the steps came to."""

    largest: LargestTensor | None
    """of the head's tensors in the first step"""
    last_step: int
    was_stopped: bool
    """before its end"""


def _steps(run: Run, checkpoints: Checkpoints, metrics: Metrics, flops: Flops, first_step: int) -> Done:
    a = run.arguments
    largest: LargestTensor | None = None
    step = saved = first_step
    stopped = a.stop_at_step is not None and step >= a.stop_at_step
    watchdog = Watchdog(a.stall_timeout)
    head = inner_model(run.engine.model).get_output_embeddings()
    with Interruption().watched() as interruption, watchdog.watching():
        while step < a.steps and not stopped:
            began = time.perf_counter()
            is_traced = step + 1 == a.profile_step
            with (
                measured(head) if largest is None else nullcontext(largest) as largest,
                traced(Path(a.output_dir)) if is_traced else nullcontext(),
            ):
                loss, norm, num_tokens = run.step(step, watchdog)
            step += 1
            # Reading the loss waits for the step; the same exchange tells everyone of an interruption, and of a
            # checkpoint that all ranks have written.
            asked, writers = total(float(interruption.requested), float(checkpoints.is_written()))
            if writers == world_size():
                checkpoints.finish()
            row: dict[str, Any] = {"step": step, "loss": float(loss)}
            if norm is not None:
                row["grad_norm"] = float(norm)
            check_numbers(run, step, row["loss"], row.get("grad_norm"))
            run.engine.clear()
            seconds = time.perf_counter() - began
            stopped = asked > 0 or (a.stop_at_step is not None and step >= a.stop_at_step)
            row |= {"tokens_per_second": num_tokens / seconds, "peak_memory_bytes": peak_memory_bytes()}
            row |= flops.utilisation(num_tokens / seconds / world_size())
            if step == 1 or step % a.eval_every == 0 or step == a.steps:
                watchdog.at(step, "evaluating")
                row["eval_loss"] = run.evaluate()
            row["learning_rate"] = run.schedule.get_last_lr()[0]
            metrics.add(row)
            if a.checkpoint_every and (stopped or step % a.checkpoint_every == 0 or step == a.steps):
                watchdog.at(step, "writing a checkpoint")
                checkpoints.save(step, run.engine, in_background=a.async_checkpoints)
                saved = step
        checkpoints.finish()
    assert saved == step or not a.checkpoint_every
    return Done(largest, step, stopped and step < a.steps)


def make_folder(folder: Path) -> None:
    """Refuses a place where nothing can be written, before anything is computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LigerDistError(f"nothing can be written to {folder}: {error}; choose another --output_dir.") from error


def _keep_for_export(folder: Path, config: Any, tokenizer: Any) -> None:
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _plan(arguments: TrainArguments) -> None:
    layout = layout_of(arguments, arguments.world_size or world_size())
    if rank() == 0:
        config = find_config(arguments, arguments.vocab_size)
        print(plan(arguments, layout, shell(arguments, config), config))


def _report(run: Run, folder: Path, metrics: Metrics, flops: Flops, done: Done, text: str | None) -> None:
    if done.was_stopped:
        print(f"stopped after step {done.last_step}; continue with --resume true --output_dir {folder}")
        return
    files = ["metrics.jsonl", "loss.png"]
    if text is not None:
        (folder / "sample.txt").write_text(text + "\n")
        files.append("sample.txt")
    if run.arguments.checkpoint_every:
        files.append(f"checkpoints/step-{done.last_step:08d}")
    print(f"written to {folder}: {', '.join(files)}")
    a = run.arguments
    line = f"strategy {run.layout.strategy}, world size {world_size()}"
    losses = [row["eval_loss"] for row in metrics.rows if "eval_loss" in row]
    if losses:
        line += f", held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    if done.largest is not None:
        line += f", {done.largest.in_words(a.batch_size * a.sequence_length, run.vocab_size)}"
    print(line)
    speeds = metrics.usual_speed()
    if speeds is not None:
        print(f"{speeds:.0f} tokens/s (median of the steps after the third){flops.in_words(speeds / world_size())}")
