"""The run itself: from arguments to files."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liger_dist import LigerDistError

from .anomalies import check_weights, refuse_numbers
from .arguments import TrainArguments
from .checkpoint import Checkpoints, describe_run, refuse_earlier
from .data import find_blocks, find_tokenizer, given_tokenizer
from .ending import Interruption
from .engine import make_engine
from .flops import Flops
from .folder import begin, check_shared, goes_on, held
from .layout import Layout, layout_of
from .memory import plan
from .meter import LargestTensor, measured, traced
from .metrics import Metrics, peak_memory_bytes
from .model import check_wrap, find_config, inner_model, shell
from .process import rank, total, world_size
from .run import Run
from .together import on_rank_zero
from .tokens import fingerprint, load_tokenizer
from .watchdog import Watchdog


def train(arguments: TrainArguments) -> None:
    """Trains as the arguments say and leaves everything in ``output_dir``."""
    if arguments.dry_run:
        _plan(arguments)
        return
    layout = layout_of(arguments, world_size())
    if rank() == 0:
        print(f"{layout}, {arguments.dtype}, {arguments.batch_size} x {arguments.sequence_length} tokens", flush=True)
    watchdog, folder = Watchdog(arguments.stall_timeout), Path(arguments.output_dir)
    with watchdog.watching(), held(folder):
        _train(arguments, layout, folder, watchdog)


def _train(arguments: TrainArguments, layout: Layout, folder: Path, watchdog: Watchdog) -> None:
    resume = goes_on(folder) or arguments.resume
    if not resume and not arguments.overwrite:
        on_rank_zero(lambda: refuse_earlier(folder / "checkpoints"))
    check_shared(Path(arguments.cache_dir))
    tokenizer = find_tokenizer(arguments)
    config = find_config(arguments, len(tokenizer))
    watchdog.at(0, "preparing")
    model = shell(arguments, config)
    flops = Flops.of(model, config, arguments)
    engine = make_engine(arguments, layout, model)
    checkpoints = Checkpoints(
        folder / "checkpoints",
        describe_run(config, fingerprint(tokenizer), arguments.seed, engine.format),
        lambda to: _write_model(to, config, tokenizer),
        keep=arguments.keep_checkpoints,
    )
    first_step = (checkpoints.newest() or 0) if resume else 0
    if first_step >= arguments.steps:
        if rank() == 0:
            print(
                f"nothing is left to do: {folder} has a checkpoint of step {first_step}, --steps is {arguments.steps}"
            )
        return
    # Last of what can be refused: it may take hours.
    blocks = find_blocks(arguments, tokenizer, config.get_text_config().vocab_size)
    run = Run(arguments, layout, engine, blocks["train"], blocks["held_out"])
    if first_step > 0:
        watchdog.at(first_step, "loading a checkpoint")
        checkpoints.load(first_step, engine)
        for _ in range(first_step):
            run.schedule.step()
        if rank() == 0:
            print(f"continues after step {first_step}", flush=True)
    checkpoints.clear(first_step)
    begin(folder)
    metrics = Metrics(folder, total_steps=arguments.steps, first_step=first_step, is_writer=rank() == 0)
    with closing(metrics):
        done = _steps(run, checkpoints, metrics, flops, first_step, watchdog)
    watchdog.at(done.last_step, "sampling")
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


def _steps(
    run: Run, checkpoints: Checkpoints, metrics: Metrics, flops: Flops, first_step: int, watchdog: Watchdog
) -> Done:
    a = run.arguments
    largest: LargestTensor | None = None
    step = saved = first_step
    stopped = a.stop_at_step is not None and step >= a.stop_at_step
    head = inner_model(run.engine.model).get_output_embeddings()
    with Interruption().watched() as interruption:
        while step < a.steps and not stopped:
            began = time.perf_counter()
            is_traced = step + 1 == a.profile_step
            with (
                measured(head) if largest is None else nullcontext(largest) as largest,
                traced(Path(a.output_dir)) if is_traced else nullcontext(),
            ):
                loss, norm, num_tokens = run.step(step, watchdog)
            step += 1
            row: dict[str, Any] = {"step": step, "loss": float(loss), "grad_norm": float(norm)}
            # Reading the loss has waited for the step. One exchange tells everyone of an interruption, of a checkpoint
            # that all ranks have written, and of numbers, which a bad device spoils on its own rank alone.
            is_broken = not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))
            asked, writers, broken = total(interruption.requested, checkpoints.is_written(), is_broken)
            if writers == world_size():
                checkpoints.finish()
            if broken > 0:
                with _published_first(checkpoints):
                    refuse_numbers(run, step, row["loss"])
            run.engine.clear()
            seconds = time.perf_counter() - began
            stopped = asked > 0 or (a.stop_at_step is not None and step >= a.stop_at_step)
            row |= {"tokens_per_second": num_tokens / seconds, "peak_memory_bytes": peak_memory_bytes()}
            row |= flops.utilisation(num_tokens / seconds / world_size())
            if step == 1 or step % a.eval_every == 0 or step == a.steps:
                row["eval_loss"] = run.evaluate(step, watchdog)
            row["learning_rate"] = run.schedule.get_last_lr()[0]
            is_due = a.checkpoint_every and (stopped or step % a.checkpoint_every == 0 or step == a.steps)
            if is_due or "eval_loss" in row:
                with _published_first(checkpoints):
                    check_weights(run, step, row.get("eval_loss"))
            metrics.add(row)
            if is_due:
                watchdog.at(step, "writing a checkpoint")
                checkpoints.save(step, run.engine, in_background=a.async_checkpoints)
                saved = step
        checkpoints.finish()
    assert saved == step or not a.checkpoint_every
    return Done(largest, step, stopped and step < a.steps)


@contextmanager
def _published_first(checkpoints: Checkpoints) -> Iterator[None]:
    """What is written in the background is published before all ranks refuse to go on."""
    try:
        yield
    except LigerDistError:
        checkpoints.finish()
        raise


def _write_model(folder: Path, config: Any, tokenizer: Any) -> None:
    config.save_pretrained(folder)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # So general by the tokenizers library.
        raise OSError(f"{folder}: {error}") from error


def _plan(arguments: TrainArguments) -> None:
    layout = layout_of(arguments, arguments.world_size or world_size())
    if rank() == 0:
        given = given_tokenizer(arguments)
        config = find_config(arguments, arguments.vocab_size if given is None else len(load_tokenizer(given)))
        check_wrap(arguments, layout)
        print(plan(arguments, layout, shell(arguments, config), config))


def _report(run: Run, folder: Path, metrics: Metrics, flops: Flops, done: Done, text: str | None) -> None:
    files = ["metrics.jsonl"]
    try:
        metrics.plot()
        files.append("loss.png")
        if text is not None:
            (folder / "sample.txt").write_text(text + "\n")
            files.append("sample.txt")
    except (OSError, ImportError) as error:
        # What counts is written.
        print(f"loss.png and sample.txt are not all written to {folder}: {error}", file=sys.stderr)
    if done.was_stopped:
        way_on = f"continue with --resume true --output_dir {folder}"
        print(
            f"stopped after step {done.last_step}; "
            + (way_on if run.arguments.checkpoint_every else "no checkpoint of it, by --checkpoint_every 0")
        )
        return
    if run.arguments.checkpoint_every:
        files.append(f"checkpoints/step-{done.last_step:08d}")
    print(f"written to {folder}: {', '.join(files)}")
    a = run.arguments
    line = f"strategy {run.layout.strategy}, world size {world_size()}"
    losses = [row["eval_loss"] for row in metrics.rows if "eval_loss" in row]
    if losses:
        line += f", held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    if done.largest is not None:
        tokens = a.batch_size * a.sequence_length
        line += f"; {done.largest.in_words(tokens, run.vocab_size, run.own_rows, is_fused=a.fused_loss)}"
    print(line)
    speeds = metrics.usual_speed()
    if speeds is not None:
        print(f"{speeds:.0f} tokens/s (median of the steps after the third){flops.in_words(speeds / world_size())}")
