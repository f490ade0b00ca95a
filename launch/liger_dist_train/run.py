"""The run: from a configuration to checkpoints, metrics and their files."""

from __future__ import annotations

import gc
import json
import math
import shutil
import sys
import time
from contextlib import ExitStack, closing, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from liger_dist import LigerDistError, explain
from liger_dist.model.structure import find_structure
from liger_dist.sharding.fsdp2.expert_parallel import check_experts

from .bases import reach_of_four_bits
from .checkpoint import Checkpoints, Saved, describe_model, refuse_earlier
from .config import TrainConfig
from .data_loader import check_sources, find_tokenization, load_data
from .deepspeed_engine import DeepSpeedEngine
from .distributed import on_rank_zero, rank, total, world_size
from .engine import Engine, TorchEngine
from .fault_tolerance import (
    Interruption,
    Watchdog,
    check_weights,
    default_grace,
    describe_numbers,
    refuse_numbers,
)
from .hub import with_local_models
from .memory_plan import plan
from .metrics import Flops, Metrics, peak_memory_bytes, profiled
from .model import (
    add_lora,
    add_mtp,
    check_base,
    check_packing,
    check_wrap,
    checked_base,
    find_config,
    four_bit_sentences,
    has_weights_at,
    shell,
)
from .optimizer import check_no_weight_decay, check_schedule, rules_of
from .options import PRESETS
from .output_folder import begin, check_shared, goes_on, held, write_text
from .parallel_dims import ParallelDims, parallel_dims_of
from .parser import changes_text, to_yaml
from .samples import Samples
from .show import check_first_rows
from .stream import StreamedData
from .teacher import Teacher, check_teacher
from .time_plan import describe_time
from .trainer import InterruptedStepError, Progress, Trainer, write_counts


def train(config: TrainConfig) -> None:
    """Trains as the configuration says and leaves everything in ``output_dir``."""
    if config.dry_run:
        _plan(config)
        return
    dims, folder = parallel_dims_of(config, world_size()), Path(config.output_dir)
    torch.use_deterministic_algorithms(config.deterministic)
    torch.set_float32_matmul_precision(str(config.matmul_precision))
    watchdog = Watchdog(config.stall_timeout)
    with watchdog.watching(), held(folder / "checkpoints"):
        _train(config, dims, folder, watchdog)


def _train(config: TrainConfig, dims: ParallelDims, folder: Path, watchdog: Watchdog) -> None:
    is_restarted = goes_on(folder)
    resume = is_restarted or config.resume
    check_trackers(config)
    check_schedule(config)
    if not resume and not config.overwrite and not config.eval_only:
        on_rank_zero(lambda: refuse_earlier(folder / "checkpoints"))
    config = with_local_models(config)
    check_sources(config)
    check_shared(Path(config.cache_dir))
    tokenization = find_tokenization(config)
    tokenizer = tokenization.load_tokenizer()
    end_of_turn = tokenization.end_of_turn(tokenizer)
    if end_of_turn not in (None, tokenizer.eos_token_id):
        _say(
            f"an answer ends with {tokenizer.decode([end_of_turn])!r} and a text with {tokenizer.eos_token!r}: the "
            "checkpoints' generation config stops at both"
        )
    model_config = find_config(config, len(tokenizer))
    if config.teacher is not None:
        check_teacher(config, len(tokenizer))
    tokenization = replace(tokenization, vocab_size=model_config.get_text_config().vocab_size)
    check_first_rows(config, tokenization)
    samples = Samples(config, tokenization) if config.sample_prompts else None
    watchdog.at(0, "preparing")
    checkpoints = Checkpoints(
        folder / "checkpoints",
        lambda to: _write_model(to, model_config, tokenizer, Path(config.model), end_of_turn),
        keep=config.keep_checkpoints,
    )
    saved = checkpoints.newest(None if is_restarted else config.resume_step) if resume else None
    if config.eval_only and config.resume and saved is None:
        raise LigerDistError(f"--eval_only and --resume are true, but {folder} has no checkpoint; leave --resume out.")
    config = _resolved(config, dims, saved)
    model = _checked_shell(config, model_config)
    flops = Flops.of(model, model_config, config)
    engine = make_engine(config, dims, model)
    description = describe_model(model_config, tokenization.fingerprint(), config, engine.format)
    if saved is not None and config.eval_only and not config.ema_decay:
        # The average is left alone.
        description["ema"] = saved.description.get("ema")
    checkpoints.describe(description, saved)
    if saved is not None and config.steps is not None and saved.step >= config.steps and not config.eval_only:
        _say(f"nothing is left to do: {folder} has a checkpoint of step {saved.step}, --steps is {config.steps}")
        return
    # Last of what can be refused: it may take hours.
    data, held_out = load_data(config, tokenization, dims)
    teacher = None if config.teacher is None or config.eval_only else Teacher(config, len(tokenizer))
    ends = {tokenizer.eos_token_id, end_of_turn}
    trainer = Trainer(config, dims, engine, data, held_out, tokenizer.eos_token_id, teacher, ends)
    if saved is not None:
        watchdog.at(saved.step, "loading a checkpoint")
        restore(trainer, checkpoints, saved)
    if config.eval_only:
        _evaluate_only(trainer, folder, watchdog, samples)
        return
    _run(trainer, checkpoints, folder, flops, watchdog, samples)


def _checked_shell(config: TrainConfig, model_config: Any) -> Any:
    """Makes the model that is trained, without storage. What its folder has and it has not is taken out of
    ``model_config``."""
    model = shell(config, model_config)
    check_packing(config, model)
    check_base(config, model, model_config)
    model = add_lora(model, config, has_weights=has_weights_at(config.model)) if config.lora_rank else model
    add_mtp(model, config)
    check_no_weight_decay(config, model)
    if not config.eval_only:
        _say(f"optimizer: {rules_of(model, config)}")
    return model


def check_trackers(config: TrainConfig) -> None:
    """Raises:
    LigerDistError: on every rank: Accelerate does not know one of ``--trackers``, or its package is not installed.
    """

    def check() -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        known, installed = map(str, LOGGER_TYPE_TO_CLASS), [str(name) for name in get_available_trackers()]
        expected = f"expected some of {', '.join(known)}; installed are {', '.join(installed) or 'none of them'}"
        for name in config.trackers:
            if name not in installed:
                raise LigerDistError(f"--trackers names {name!r}; {expected}. Install its package, or leave it out.")

    if config.trackers:
        on_rank_zero(check)


def _run(
    trainer: Trainer,
    checkpoints: Checkpoints,
    folder: Path,
    flops: Flops,
    watchdog: Watchdog,
    samples: Samples | None,
) -> None:
    config, first_step = trainer.config, trainer.progress.step
    checkpoints.clear(first_step)
    begin(folder)
    trainer.data_state = trainer.data.state()
    on_rank_zero(lambda: write_text(folder / "config.yaml", to_yaml(config)))
    _say(f"all options: {folder / 'config.yaml'}")
    write_counts(trainer, trainer.data_states())
    metrics = Metrics(folder, config, trainer.num_steps, first_step)
    if samples is not None:
        samples.begin(first_step)
    with closing(metrics):
        loop = Loop(trainer, checkpoints, metrics, flops, watchdog, samples)
        why = loop.run()
    write_counts(trainer, trainer.data_states())
    if rank() == 0:
        metrics.report(trainer.progress.step, why, flops, has_checkpoint=config.checkpoint_every > 0)


def make_engine(config: TrainConfig, dims: ParallelDims, model: torch.nn.Module) -> Engine:
    """Makes the engine around a model without storage."""
    if dims.strategy == "deepspeed":
        return DeepSpeedEngine(config, dims, model)
    return TorchEngine(config, dims, model)


def restore(trainer: Trainer, checkpoints: Checkpoints, saved: Saved) -> None:
    """Loads weights, optimizer states, schedule and place in the data.

    Raises:
        LigerDistError: the data is not that of the checkpoint, or another number of ranks read its stream.
    """
    config, data = trainer.config, trainer.data
    if not config.eval_only:
        before = saved.progress["data"]
        streams = before["streams"]
        if isinstance(data, StreamedData) and len(streams) != trainer.dims.data_size:
            raise LigerDistError(
                f"{len(streams) or 'no'} ranks read the streams of the checkpoint of step {saved.step} and "
                f"{trainer.dims.data_size} would go on; start as many, or go on without --streaming and with "
                "--allow_changed_data true, which counts sequences from the beginning of the data."
            )
        if before["fingerprint"] != data.fingerprint and not config.allow_changed_data:
            raise LigerDistError(
                f"the data is not that of the checkpoint of step {saved.step} (fingerprint {data.fingerprint} instead "
                f"of {before['fingerprint']}: files, tokenizer, --sequence_length, --data_weights or --eval_fraction "
                "differ); go on with the same data, or with --allow_changed_data true."
            )
        if before["fingerprint"] != data.fingerprint:
            change = "its stream begins again" if isinstance(data, StreamedData) else "its sequences have another order"
            _say(f"the data is not that of the checkpoint: {change}")
        elif isinstance(data, StreamedData):
            data.load_state(streams[trainer.dims.data_rank(rank())])
        optimizer = saved.progress.get("optimizer", config.optimizer)
        if optimizer != config.optimizer:
            raise LigerDistError(
                f"the checkpoint of step {saved.step} has the states of --optimizer {optimizer} and --optimizer is "
                f"{config.optimizer}; go on with that one, or export the weights (liger-dist export) and start from "
                "them with --model."
            )
    progress = Progress(**saved.progress["progress"])
    if not config.eval_only:
        _compare_held_out(trainer, saved, progress)
    checkpoints.load(saved.step, trainer.engine, weights_only=config.eval_only)
    trainer.progress = progress
    for _ in range(saved.step if not config.eval_only else 0):
        trainer.schedule.step()
    _say(f"continues after step {saved.step}")


def _compare_held_out(trainer: Trainer, saved: Saved, progress: Progress) -> None:
    """Forgets the lowest held-out loss where it is of other data.

    Raises:
        LigerDistError: it decides which checkpoint stays or when the run ends, and the data may not change.
    """
    config, found = trainer.config, None if trainer.held_out is None else trainer.held_out.fingerprint
    # Checkpoints of earlier versions do not know theirs.
    before = saved.progress.get("held_out", found)
    if before in (None, found) or found is None or progress.best_step is None:
        return
    if (config.keep_best or config.early_stopping_patience) and not config.allow_changed_data:
        raise LigerDistError(
            f"the held-out data is not that of the checkpoint of step {saved.step}, whose lowest loss "
            f"({progress.best_loss:.4g} after step {progress.best_step}) cannot be compared with later ones; go on "
            "with the same --eval_data, or with --allow_changed_data true, which forgets that loss."
        )
    progress.best_step, progress.best_loss, progress.evaluations_since_best = None, math.inf, 0
    _say("the held-out data is not that of the checkpoint: the lowest loss so far is forgotten")


class Loop:
    """Steps until the end of the run, with what comes between them: evaluations, checkpoints, metrics."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        metrics: Metrics,
        flops: Flops,
        watchdog: Watchdog,
        samples: Samples | None = None,
    ) -> None:
        self._trainer, self._checkpoints, self._metrics, self._samples = trainer, checkpoints, metrics, samples
        self._flops, self._watchdog = flops, watchdog
        self._stops_early = False

    def run(self) -> str | None:
        """Trains; returns why it ended before the last step, or None."""
        trainer, config = self._trainer, self._trainer.config
        stop_at = math.inf if config.stop_at_step is None else config.stop_at_step
        grace = default_grace() if config.grace_seconds is None else config.grace_seconds
        interruption = Interruption(grace, lambda: self._checkpoints.published_step)
        with interruption.watched(), ExitStack() as at_end:
            is_asked = trainer.progress.step >= stop_at
            if config.gc_every and gc.isenabled():
                gc.disable()
                at_end.callback(gc.enable)
            first = trainer.progress.step
            while trainer.progress.step < trainer.num_steps and not is_asked and not self._stops_early:
                if config.gc_every and trainer.progress.step % config.gc_every == 0:
                    gc.collect()
                try:
                    began = time.perf_counter()
                    is_asked = self._step(interruption) or trainer.progress.step >= stop_at
                    if trainer.progress.step == first + 1:
                        self._settle(time.perf_counter() - began, at_end)
                except InterruptedStepError:
                    trainer.engine.clear()
                    is_asked = True
            self._checkpoints.finish()
            if config.checkpoint_every and self._checkpoints.published_step != trainer.progress.step:
                broken = trainer.engine.broken_weights()
                check_weights(trainer.progress.step, broken, None, self._published_step)
                self._save(in_background=False)
        if rank() == 0:
            self._write_loads(config.output_dir)
        if trainer.progress.step >= trainer.num_steps:
            return None
        return "stopped" if is_asked else "stopped early: the held-out loss is not better any more"

    def _write_loads(self, folder: str) -> None:
        try:
            if self._trainer.loads.write(Path(folder)):
                print(f"written to {folder}: experts.json, experts.png")
        except (LigerDistError, OSError, ImportError) as error:
            # What counts is written.
            print(f"the loads of experts are not written to {folder}: {error}", file=sys.stderr)

    def _settle(self, seconds: float, at_end: ExitStack) -> None:
        """After the first step: says how long it took with compilation, and leaves what is there to the end."""
        trainer = self._trainer
        compiled = None if trainer.dims.strategy == "deepspeed" else explain(trainer.engine.model).compiled
        if compiled is not None:
            _say(f"layers compiled: {compiled}; with the compilation the first step took {seconds:.1f} s")
        # Garbage collections would go through the model and its compiled code. A caller that has frozen what is there
        # keeps it so, and has left little for them to look at.
        if gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            at_end.callback(gc.unfreeze)

    def _step(self, interruption: Interruption) -> bool:
        """Makes a step and what follows it; True where a rank was asked to end."""
        trainer, config = self._trainer, self._trainer.config
        began = time.perf_counter()
        is_profiled = trainer.progress.step + 1 == config.profile_step
        with profiled(Path(config.output_dir)) if is_profiled else nullcontext():
            loss, norm, num_tokens = trainer.step(self._watchdog, interruption)
        step = trainer.progress.step
        routers = trainer.router_losses()
        numbers = _read(loss, norm, *routers, *trainer.mtp_losses())
        names = ["loss", "grad_norm", *(["router_loss"] if routers else [])]
        row: dict[str, Any] = {"step": step, **dict(zip(names, numbers, strict=False))}
        row |= {f"mtp_loss/{depth}": number for depth, number in enumerate(numbers[len(names) :], 1)}
        row |= trainer.loads.read()
        # Reading the loss has waited for the step. One all-reduce reports an interruption, a checkpoint that
        # all ranks have written, and NaN or Inf, which a bad device has on its rank alone.
        is_broken = not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]))
        asked, writers, broken = total(interruption.requested, self._checkpoints.is_written(), is_broken)
        if writers == world_size():
            self._checkpoints.finish()
        if broken > 0:
            self._meet_broken_numbers(row)
        trainer.engine.clear()
        seconds = time.perf_counter() - began
        row |= self._rates(num_tokens, seconds)
        is_last = step == trainer.num_steps
        has_held_out = trainer.held_out is not None and config.eval_every > 0
        if has_held_out and (step == 1 or step % config.eval_every == 0 or is_last):
            try:
                row |= trainer.evaluate(self._watchdog, interruption)
                if self._samples is not None:
                    self._samples.write(step, lambda ids: trainer.continued(ids, self._watchdog, interruption))
            except InterruptedStepError:
                # The step is made; without its held-out loss.
                asked = 1
        is_due = bool(config.checkpoint_every) and (asked > 0 or step % config.checkpoint_every == 0 or is_last)
        if is_due or "eval_loss" in row:
            check_weights(step, trainer.engine.broken_weights(), row.get("eval_loss"), self._published_step)
        is_best = self._note_loss(row["eval_loss"]) if "eval_loss" in row else False
        self._metrics.add(row)
        if is_due or (is_best and config.keep_best):
            self._save(in_background=config.async_checkpoints)
        return asked > 0

    def _meet_broken_numbers(self, row: dict[str, Any]) -> None:
        """Takes the numbers of a skipped step out of its row, and says why it was skipped.

        Raises:
            LigerDistError: the step was not skipped.
        """
        trainer, step = self._trainer, row["step"]
        loss = float(trainer.own_loss) if trainer.own_loss is not None else math.nan
        described = describe_numbers(step, row["loss"], loss, trainer.places(), trainer.engine.broken_gradients())
        if not trainer.was_skipped:
            refuse_numbers(described, self._published_step(), trainer.config.max_skipped_steps)
        del row["loss"], row["grad_norm"]
        row["skipped_steps"] = trainer.progress.skipped_steps
        _say(f"{described}. It is skipped, {row['skipped_steps']} of --max_skipped_steps")

    def _rates(self, num_tokens: int, seconds: float) -> dict[str, Any]:
        trainer = self._trainer
        speed = num_tokens / seconds
        row: dict[str, Any] = {"tokens_per_second": speed, "tokens": trainer.progress.tokens}
        if trainer.data.num_sequences is not None:
            row["epoch"] = trainer.progress.sequences / trainer.data.num_sequences
        row["peak_memory_bytes"] = peak_memory_bytes()
        row["learning_rate"] = trainer.learning_rate
        return row | self._flops.utilization(self._flops.of_step(num_tokens, trainer.pairs) / seconds / world_size())

    def _note_loss(self, loss: float) -> bool:
        """Notes a held-out loss; True for the best so far, the same on every rank."""
        progress, patience = self._trainer.progress, self._trainer.config.early_stopping_patience
        if loss < progress.best_loss:
            progress.best_step, progress.best_loss, progress.evaluations_since_best = progress.step, loss, 0
            return True
        progress.evaluations_since_best += 1
        self._stops_early = 0 < patience <= progress.evaluations_since_best
        return False

    def _save(self, *, in_background: bool) -> None:
        trainer = self._trainer
        step = trainer.progress.step
        self._watchdog.at(step, "writing a checkpoint", Path(trainer.config.output_dir) / "checkpoints")
        states = trainer.data_states()
        streams = states if isinstance(trainer.data, StreamedData) else []
        progress = {
            "progress": asdict(trainer.progress),
            "global_batch_size": trainer.global_batch_size,
            "no_weight_decay": trainer.config.no_weight_decay,
            "data": {"fingerprint": trainer.data.fingerprint, "streams": streams},
            "held_out": None if trainer.held_out is None else trainer.held_out.fingerprint,
            "optimizer": trainer.config.optimizer,
        }
        best = trainer.progress.best_step if trainer.config.keep_best else None
        self._checkpoints.save(step, trainer.engine, progress, in_background=in_background, best=best)
        write_counts(trainer, states)

    def _published_step(self) -> int:
        """Publishes what is written in the background, before all ranks refuse to go on; returns the newest step."""
        self._checkpoints.finish()
        return self._checkpoints.published_step


def _evaluate_only(trainer: Trainer, folder: Path, watchdog: Watchdog, samples: Samples | None) -> None:
    losses, step = trainer.evaluate(watchdog), trainer.progress.step
    text = json.dumps({"step": step, **losses}) + "\n"
    on_rank_zero(lambda: write_text(folder / "eval.json", text))
    for name, loss in losses.items():
        words = name.replace("ema_eval_loss", "average's held-out loss").replace("eval_loss", "held-out loss")
        _say(f"{words} {loss:.4f} (perplexity {math.exp(min(loss, 700.0)):.2f}) after step {step}")

    if samples is not None:
        samples.write(step, lambda prompts: trainer.continued(prompts, watchdog))


def _read(*values: torch.Tensor) -> list[float]:
    """Reads numbers of a device, waiting for it once."""
    found: list[float] = torch.stack([value.detach().to(values[0]) for value in values]).tolist()
    return found


def _resolved(config: TrainConfig, dims: ParallelDims, saved: Saved | None) -> TrainConfig:
    """Adds what a checkpoint decides to the configuration, and prints what is not a default."""
    if saved is not None and config.global_batch_size is None and config.global_batch_tokens is None:
        config = replace(config, global_batch_size=saved.progress["global_batch_size"])
    size = dims.global_batch_size(config)
    named: dict[str, Any] = {"strategy": dims.strategy}
    resolved = replace(config, global_batch_size=size, global_batch_tokens=None, **named)
    micro_batches = dims.micro_batches(config, size)
    batches = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)}"
    ranks = f"each of {dims.data_size} data ranks" if dims.data_size > 1 else "one data rank"
    _say(
        f"{changes_text(config)}\n{dims}, {config.dtype}; a step is {size} sequences of {config.sequence_length} "
        f"tokens: {batches} of {config.batch_size} on {ranks}"
    )
    return resolved


def _write_model(folder: Path, model_config: Any, tokenizer: Any, pretrained: Path, end_of_turn: int | None) -> None:
    model_config.save_pretrained(folder)
    if (pretrained / GENERATION_CONFIG_NAME).is_file():
        # How a pretrained model generates: tokens that end a text, temperature and the like.
        shutil.copyfile(pretrained / GENERATION_CONFIG_NAME, folder / GENERATION_CONFIG_NAME)
    if end_of_turn not in (None, tokenizer.eos_token_id):
        _stop_at(end_of_turn, folder, tokenizer)
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # So general by the tokenizers library.
        raise OSError(f"{folder}: {error}") from error


def _stop_at(end_of_turn: int | None, folder: Path, tokenizer: Any) -> None:
    """Adds the token that ends an answer to those that end what is generated. The other settings stay as they are:
    transformers reads some that it refuses to write, such as a temperature without do_sample."""
    path = folder / GENERATION_CONFIG_NAME
    settings = json.loads(path.read_text()) if path.is_file() else GenerationConfig().to_diff_dict()
    known = settings["eos_token_id"] if settings.get("eos_token_id") is not None else tokenizer.eos_token_id
    ends = [*known] if isinstance(known, list) else [known]
    settings["eos_token_id"] = ends if end_of_turn in ends else [*ends, end_of_turn]
    path.write_text(json.dumps(settings, indent=2) + "\n")


def _plan(config: TrainConfig) -> None:
    dims = parallel_dims_of(config, config.world_size or world_size())
    config = with_local_models(config)
    # A config.json says how large its vocabulary is.
    is_known = config.tokenizer is None and Path(config.model).is_file()
    vocab_size = 0 if is_known else len(find_tokenization(config).load_tokenizer())
    if rank() == 0:
        model_config = find_config(config, vocab_size)
        check_wrap(config, dims)
        teacher_config = None if config.teacher is None else check_teacher(config, vocab_size)
        model = shell(config, model_config)
        if dims.expert_parallel > 1:
            check_experts(model, find_structure(model), dims.expert_parallel)
        check_packing(config, model)
        reach = reach_of_four_bits(model)
        if config.model not in PRESETS and Path(config.model).is_dir():
            checked_base(config, model)
        if config.lora_rank:
            # A config.json is planned as the folder of a pretrained model.
            model = add_lora(model, config, has_weights=True)
        add_mtp(model, config)
        if config.load_in_4bit:
            print("".join(f"{line}\n" for line in four_bit_sentences(*reach, config)), end="")
        print(plan(config, dims, model, model_config, teacher_config))
        print(describe_time(config, dims, model, model_config, config.gpu))


def _say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)
