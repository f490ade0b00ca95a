"""Numbers of a run: ``metrics.jsonl``, trackers, a progress bar, ``loss.png``, a profile, and the model's FLOPs."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from tqdm import tqdm

from liger_dist import LigerDistError
from liger_dist.model.structure import find_structure

from .config import TrainConfig
from .distributed import on_rank_zero, rank
from .output_folder import write_text

METRICS = "metrics.jsonl"
SHOWN = {"loss": "{:.3f}", "eval_loss": "{:.3f}", "tokens_per_second": "{:.0f}", "mfu": "{:.1%}"}
"""of the newest row, in the progress bar"""
IN_LINES = SHOWN | {"grad_norm": "{:.3g}", "epoch": "{:.2f}", "tokens": "{:.3g}"}
"""of the newest row, in the lines that a file gets instead"""


class Metrics:
    """Writes one object a step to ``metrics.jsonl`` (a resumed run continues the file from its step), shows a progress
    bar, and hands numbers to trackers. On ranks other than 0 it does nothing.

    Raises:
        LigerDistError: a row cannot be written, or a tracker cannot be started.
    """

    def __init__(self, folder: Path, config: TrainConfig, num_steps: int, first_step: int) -> None:
        self._path = folder / METRICS
        self._every, self._num_steps = config.log_every, num_steps
        self._is_writer = rank() == 0
        self.rows: list[dict[str, Any]] = []
        self._trackers: list[Any] = []
        self._newest: dict[str, Any] = {}
        """last value of everything that a row had"""
        self._began, self._num_rows = time.perf_counter(), 0
        on_rank_zero(lambda: self._start(config, first_step))
        if self._is_writer:
            # A file gets lines; what a bar draws over itself would be one line of megabytes.
            self._bar = tqdm(
                total=num_steps,
                initial=first_step,
                desc="training",
                unit=" steps",
                mininterval=1,
                disable=not sys.stderr.isatty(),
            )

    def _start(self, config: TrainConfig, first_step: int) -> None:
        if first_step > 0 and self._path.is_file():
            # What was written after the checkpoint is written again.
            self.rows = [row for row in complete_rows(self._path) if row["step"] <= first_step]
        partial = self._path.with_suffix(".partial")
        with self._refusing(first_step):
            partial.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
            os.replace(partial, self._path)
            # Unbuffered: what a full disk refuses would be tried again when the file is closed, and hide the reason.
            self._file = self._path.open("ab", buffering=0)
        self._trackers = start_trackers(config, goes_on=first_step > 0)

    def add(self, row: dict[str, Any]) -> None:
        """Writes one step's numbers and shows them."""
        if not self._is_writer:
            return
        self.rows.append(row)
        step = row["step"]
        is_special = "eval_loss" in row or "skipped_steps" in row or step in (1, self._num_steps)
        is_written = step % self._every == 0 or is_special
        if is_written:
            with self._refusing(step):
                rest = (json.dumps(row) + "\n").encode()
                while rest:
                    rest = rest[self._file.write(rest) :]
            self._track(row)
        self._newest |= row
        self._num_rows += 1
        if not self._bar.disable:
            self._bar.set_postfix(self._shown(SHOWN), refresh=False)
            self._bar.update(1)
        elif is_written:
            shown = self._shown({name: form for name, form in IN_LINES.items() if name in row})
            words = ", ".join(f"{name} {value}" for name, value in shown.items())
            seconds = (time.perf_counter() - self._began) / self._num_rows
            left = tqdm.format_interval(seconds * (self._num_steps - step))
            print(f"step {step}/{self._num_steps}: {words}, {seconds:.3g} s a step, {left} left", file=sys.stderr)

    def _shown(self, forms: dict[str, str]) -> dict[str, str]:
        newest = self._newest
        shown = {name: form.format(newest[name]) for name, form in forms.items() if name in newest}
        return shown | {"peak": f"{newest['peak_memory_bytes'] / 2**30:.2f} GiB"}

    def _track(self, row: dict[str, Any]) -> None:
        """Gives the trackers a step's numbers; one that fails is left out from then on."""
        for tracker in [*self._trackers]:
            with self._leaving_out(tracker):
                tracker.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    @contextmanager
    def _leaving_out(self, tracker: Any) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Each service raises different errors.
            self._trackers = [other for other in self._trackers if other is not tracker]
            words = (
                f"the tracker {tracker.name} failed: {error!r}. The run goes on without it; {self._path} has all steps."
            )
            warnings.warn(words, RuntimeWarning, stacklevel=4)

    @contextmanager
    def _refusing(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LigerDistError(
                f"step {step} cannot be written to {self._path}: {error}. Make room and go on with --resume true."
            ) from error

    def usual(self, name: str) -> float | None:
        """Computes the median of the steps after the third, which compile and warm up; None without any."""
        values = [row[name] for row in self.rows if row["step"] > 3 and name in row]
        return median(values) if values else None

    def close(self) -> None:
        """Ends the bar, the file and the trackers."""
        if self._is_writer:
            self._bar.close()
            self._file.close()
            for tracker in self._trackers:
                with self._leaving_out(tracker):
                    tracker.finish()

    def plot(self) -> None:
        """Draws the losses of all steps; no file where there were none."""
        if not self.rows:
            return
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        trained = [r for r in self.rows if "loss" in r]
        axes.plot([r["step"] for r in trained], [r["loss"] for r in trained], linewidth=1, label="training")
        for name in sorted({name for r in self.rows for name in r if name.startswith("mtp_loss/")}):
            rows = [r for r in self.rows if name in r]
            label = f"{int(name.rpartition('/')[2]) + 1} tokens ahead"
            axes.plot([r["step"] for r in rows], [r[name] for r in rows], linewidth=0.7, label=label)
        evaluated = [r for r in self.rows if "eval_loss" in r]
        axes.plot([r["step"] for r in evaluated], [r["eval_loss"] for r in evaluated], "o-", label="held out")
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(self._path.with_name("loss.png"), dpi=120)
        pyplot.close(figure)

    def report(self, step: int, why: str | None, flops: Flops, *, has_checkpoint: bool) -> None:
        """Prints what the run came to, and draws the plot.

        Args:
            why: the run ended before its last step.
        """
        folder, files = self._path.parent, [METRICS]
        try:
            self.plot()
            files.append("loss.png")
        except (OSError, ImportError) as error:
            # What counts is written.
            print(f"loss.png is not written to {folder}: {error}", file=sys.stderr)
        if why is not None:
            way_on = f"continue with --resume true --output_dir {folder}"
            print(f"{why} after step {step}; {way_on if has_checkpoint else 'no checkpoint, by --checkpoint_every 0'}")
            return
        if has_checkpoint:
            files.append(f"checkpoints/step-{step:08d}")
        print(f"written to {folder}: {', '.join(files)}")
        losses = [row["eval_loss"] for row in self.rows if "eval_loss" in row]
        if losses:
            print(f"held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}")
        speed = self.usual("tokens_per_second")
        if speed is not None:
            said = f"{speed:.0f} tokens/s (median of the steps after the third)"
            print(f"{said}{flops.in_words(self.usual('mfu'))}")


def _wandb_options(folder: Path, *, goes_on: bool) -> dict[str, str]:
    """Names the run as its folder, and continues its row; a file in the folder keeps the row's id."""
    file = folder / "wandb-id"
    if not goes_on or not file.is_file():
        write_text(file, uuid4().hex)
    return {"name": folder.name, "id": file.read_text(), "resume": "allow"}


def start_trackers(config: TrainConfig, *, goes_on: bool) -> list[Any]:
    """Starts Accelerate's trackers that ``--trackers`` names, in ``output_dir``.

    Args:
        goes_on: the run continues an earlier one, as its row at wandb does.

    Raises:
        LigerDistError: one cannot be started.
    """
    if not config.trackers:
        return []
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()
    known = {str(name): kind for name, kind in LOGGER_TYPE_TO_CLASS.items()}
    started = []
    for name in config.trackers:
        kind = known[name]
        options = {"logging_dir": config.output_dir} if kind.requires_logging_directory else {}
        if name == "wandb":
            options = _wandb_options(Path(config.output_dir), goes_on=goes_on)
        try:
            tracker = kind(config.run_name, **options)
            tracker.start()
            values = vars(config).items()
            tracker.store_init_configuration({k: v if isinstance(v, int | float | str) else str(v) for k, v in values})
        except Exception as error:  # Each service raises different errors.
            raise LigerDistError(
                f"the tracker {name} cannot be started: {error!r}; install and configure it."
            ) from error
        started.append(tracker)
    return started


@contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Writes ``trace-rank*.json`` into ``folder``, for Perfetto or chrome://tracing."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / f"trace-rank{rank()}.json"))


def complete_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines that were not cut off."""
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # Bytes that are no text, too.
            continue
        if isinstance(row, dict) and "step" in row:
            yield row


def peak_memory_bytes() -> int:
    """Returns the largest memory of this process so far: the GPU allocator's, or the resident set on a CPU machine."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""dense bf16 operations per second by the vendor's data sheets, by a part of the device's name"""


@dataclass(frozen=True)
class Flops:
    """As in the appendix of PaLM (Chowdhery et al. 2022): six for each weight that a token is multiplied with, four for
    a frozen one, which has no gradient, and those of attention over the keys of each token's document. Of experts
    the ones that a token is sent to count. What is computed again for activation checkpointing does not."""

    per_token: float
    per_pair: float
    """for each pair of a token and one that it attends to, itself included"""
    peak: float | None
    """of one device; None where it or the operations of a token are not known, and in fp32"""

    @classmethod
    def of(cls, model: nn.Module, model_config: Any, config: TrainConfig) -> Flops:
        text = model_config.get_text_config()
        heads = getattr(text, "num_attention_heads", 0)
        width = heads * (getattr(text, "head_dim", None) or text.hidden_size // max(heads, 1))
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        known = [peak for part, peak in PEAKS.items() if part in name and config.dtype == "bfloat16"]
        # Scores and their product with the values: two operations each, and twice as many in the backward.
        # Each further token of multi-token prediction takes a layer and lm_head once more.
        depth = len(find_structure(model).prediction_layers)
        attention = 12.0 * (getattr(text, "num_hidden_layers", 0) + depth) * width
        per_token = _operations(model, text)
        if per_token is not None:
            per_token += 6.0 * depth * model.get_output_embeddings().weight.numel()  # type: ignore[operator]
        return cls(per_token or 0.0, attention, known[0] if known and per_token is not None else None)

    def of_step(self, tokens: int, pairs: int) -> float:
        """Computes the operations of a step."""
        return self.per_token * tokens + self.per_pair * pairs

    def utilization(self, flops_per_second: float) -> dict[str, float]:
        """Computes the entry of ``metrics.jsonl`` from the operations per second of one device."""
        return {} if self.peak is None else {"mfu": flops_per_second / self.peak}

    def in_words(self, utilization: float | None) -> str:
        if self.peak is None or utilization is None:
            return ""
        share = f"utilisation {utilization:.1%} of the {self.peak / 1e12:.0f} of bf16"
        return f", {utilization * self.peak / 1e12:.0f} TFLOP/s of the model on each GPU, {share}"


def _operations(model: nn.Module, text: Any) -> float | None:
    """Counts the operations of a token with the weights of linear layers, routers and experts; None for experts of
    which the config does not say how many a token is sent to."""
    of_a_token = next((n for name in EXPERTS_OF_A_TOKEN if isinstance(n := getattr(text, name, None), int)), None)
    counts = [getattr(text, name, None) for name in NUMBERS_OF_EXPERTS]
    experts = next((count for count in counts if isinstance(count, int) and count > 1), None)
    found = 0.0
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            # Of transformers 5: a router's weight [E, D], and those of all experts in one parameter [E, ..., ...].
            is_router = key == "weight" and parameter.dim() == 2 and not isinstance(module, nn.Embedding)
            is_stacked = parameter.shape[0] == experts and (parameter.dim() == 3 or is_router)
            if parameter.dim() < 2 or not (isinstance(module, nn.Linear) or is_stacked):
                continue
            is_expert = parameter.dim() == 3 or ".experts." in name
            if is_expert and experts and of_a_token is None:
                return None
            share = of_a_token / experts if is_expert and experts and of_a_token else 1.0
            found += (6.0 if parameter.requires_grad else 4.0) * share * parameter.numel()
    return found
