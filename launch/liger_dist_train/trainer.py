"""Optimizer steps and evaluations of a wrapped model on its data."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from liger_dist import LigerDistError, shard_sequence

from .config import TrainConfig
from .data_loader import CachedData, Data, collate, token_mask
from .dataset import Piece, describe_bad_rows
from .distributed import device, from_rank_zero, gathered, on_rank_zero, rank, total, total_on_device
from .engine import Engine
from .expert_biases import ExpertBiases
from .expert_loads import ExpertLoads
from .fault_tolerance import Interruption, Watchdog
from .model import autocast
from .optimizer import make_schedule
from .output_folder import write_text
from .parallel_dims import ParallelDims
from .teacher import Teacher


@dataclass
class Progress:
    """How far a run is; part of every checkpoint."""

    step: int = 0
    sequences: int = 0
    """taken from the data"""
    tokens: int = 0
    """of them, padding not counted"""
    best_step: int | None = None
    best_loss: float = math.inf
    """held-out loss of the step with the lowest one"""
    evaluations_since_best: int = 0
    skipped_steps: int = 0
    """whose loss or gradients were not finite"""


BALANCE = "load_balancing_loss_func"
"""of a model's module in transformers: the loss that balances its experts"""


class InterruptedStepError(Exception):
    """A signal came between two micro-batches: the step is given up."""


class Trainer:
    """A wrapped model, its data and its schedule; makes steps and evaluations."""

    def __init__(
        self,
        config: TrainConfig,
        dims: ParallelDims,
        engine: Engine,
        data: Data,
        held_out: CachedData | None,
        pad: int,
        teacher: Teacher | None = None,
        ends: Collection[int | None] = (),
    ) -> None:
        """``ends``: tokens that end what is generated."""
        self.config, self.dims, self.engine, self.data, self.held_out = config, dims, engine, data, held_out
        self._teacher, self.ends = teacher, ends
        self.progress = Progress()
        self.global_batch_size = dims.global_batch_size(config)
        self.num_steps = num_steps(config, data, self.global_batch_size)
        if (config.profile_step or 0) > self.num_steps and not config.eval_only:
            raise LigerDistError(f"--profile_step is {config.profile_step}; the run has {self.num_steps} steps.")
        self.schedule = make_schedule(engine.optimizer, config, self.num_steps)
        self._held_out = {} if held_out is None else {"": held_out}
        if held_out is not None and len(config.eval_data) > 1:
            self._held_out = held_out.by_source()
        self.was_skipped = False
        """the last step: its loss or gradients were not finite, and the weights stayed"""
        self._mtp_losses: list[Tensor] = []
        """of the micro-batches of the last step: this rank's sum of each depth, over the number of labels of the next
        token"""
        self._mtp_labels: list[int] = []
        """of the last step on all ranks: labels of the next token, and of each depth"""
        self._router_losses: list[Tensor] = []
        """of the micro-batches of the last step: what the balance of experts adds to the loss"""
        self._router_coefficient, self._of_router = router_coefficient(engine.model), 1.0
        self.loads = ExpertLoads(engine.model)
        rate = config.router_bias_rate
        self._biases = ExpertBiases(engine.model, self.loads, rate) if rate else None
        self.own_loss: Tensor | None = None
        """of the last step: this rank's part of the mean"""
        self.data_state: dict[str, Any] = {}
        """of this rank's stream, before what the running step takes"""
        self.pairs = 0
        """of the last step on all ranks: tokens with each one that they attend to"""
        self.learning_rate = 0.0
        """of the last step, of the first group of parameters"""
        self._pad = pad
        self._data_rank, self._data_size = dims.data_rank(rank()), dims.data_size
        engine.model.train()

    def step(self, watchdog: Watchdog, interruption: Interruption) -> tuple[Tensor, Tensor, int]:
        """Makes one optimizer step; returns loss over the tokens of all ranks, gradient norm, and number of tokens.
        Gradients stay.

        Raises:
            InterruptedStepError: on every rank, when one of them was asked to end.
            LigerDistError: on every rank, when one cannot read its data.
        """
        config, step = self.config, self.progress.step
        watchdog.at(step + 1, "reading data")
        self.data_state = self.data.state()
        batches, labels, read, pairs = self._read_batches()
        # Dropout draws the same numbers in a resumed run, and different ones for other tokens.
        ranks, shared = self.dims.world_size, self.dims.tensor_parallel
        torch.manual_seed((config.seed * 1_000_003 + step) * (ranks // shared) + rank() // shared)
        # Data parallelism averages gradients over ranks: dividing by tokens per rank gives the mean over all tokens.
        # Every rank of a tensor-parallel group has counted the same ones, and computes all of them; those of a
        # sequence-parallel group compute parts.
        labels /= self.dims.sequence_parallel
        # Filled on the device: a copy from the host would wait for it.
        num_items = torch.full((), max(labels, 1.0) / self.dims.world_size, device=device())
        losses, self._mtp_losses, self._router_losses = [], [], []
        if config.mtp_options is not None:
            depths = range(config.mtp_options["depth"] + 1)
            self._mtp_labels = [count_labels(batches, places=1 + depth) for depth in depths]
        self._of_router = 1 / len(batches)
        for index, batch in enumerate(batches):
            watchdog.at(step + 1, "computing")
            if index and total(interruption.requested)[0]:
                raise InterruptedStepError
            with self.engine.micro_batch(is_last=index == len(batches) - 1):
                loss = self._loss(batch, num_items, self._teacher)
                self.engine.backward(loss)
            losses.append(loss.detach())
        self.own_loss = torch.stack(losses).sum()
        mean = total_on_device(self.own_loss.clone()) / self.dims.world_size
        self.was_skipped = False
        norm = self.engine.update((lambda norm: self._accepts(mean, norm)) if config.max_skipped_steps else None)
        self.learning_rate = float(self.schedule.get_last_lr()[0])
        with warnings.catch_warnings():
            # Torch misses the optimizer's step where the first one was skipped.
            warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
            self.schedule.step()
        if self._biases is not None:
            self._biases.update(skipped=self.was_skipped)
        tokens = int(read) // self.dims.same_data
        self.progress.step += 1
        self.progress.sequences += self.global_batch_size
        self.progress.tokens += tokens
        self.pairs = int(pairs) // self.dims.same_data
        self.data_state = self.data.state()
        return mean, norm, tokens

    def mtp_losses(self) -> list[Tensor]:
        """Computes the mean loss of each depth of the last step, over the labels that it has on all ranks; two
        all-reduces, and none without multi-token prediction."""
        if not self._mtp_losses:
            return []
        first, *further = total(*self._mtp_labels)
        sums = total_on_device(torch.stack(self._mtp_losses).sum(0)) / self.dims.world_size
        return [loss * (first / max(count, 1.0)) for loss, count in zip(sums, further, strict=True)]

    def router_losses(self) -> list[Tensor]:
        """Computes what the balance of experts has added to the loss of the last step, the mean over micro-batches and
        ranks; one all-reduce, and none without it."""
        if not self._router_losses:
            return []
        return [total_on_device(torch.stack(self._router_losses).mean()) / self.dims.world_size]

    def _accepts(self, mean: Tensor, norm: Tensor) -> bool:
        """False on every rank for a step that is skipped: its loss or gradients are not finite on one of them."""
        is_broken = total(not bool(torch.isfinite(mean) & torch.isfinite(norm).to(mean.device)))[0] > 0
        self.was_skipped = is_broken and self.progress.skipped_steps < self.config.max_skipped_steps
        self.progress.skipped_steps += self.was_skipped
        return not is_broken

    def evaluate(self, watchdog: Watchdog, interruption: Interruption | None = None) -> dict[str, float]:
        """Computes the mean loss on held-out data, the same on every rank, as entries of ``metrics.jsonl``: over all
        labels, with several sources also of each, and with a moving average of the weights its loss, too.

        Raises:
            InterruptedStepError: a rank was asked to end.
        """
        found = self._losses("eval_loss", watchdog, interruption)
        averaged = self.engine.averaged()
        if averaged is not None:
            with averaged:
                found |= self._losses("ema_eval_loss", watchdog, interruption)
        return found

    def _losses(self, entry: str, watchdog: Watchdog, interruption: Interruption | None) -> dict[str, float]:
        sums = {name: self._sums(data, watchdog, interruption) for name, data in self._held_out.items()}
        by_entry = {entry: torch.stack(list(sums.values())).sum(0)}
        by_entry |= {f"{entry}/{name}": found for name, found in sums.items() if name}
        return {name: float(found[0] / found[1].clamp_min(1)) for name, found in by_entry.items()}

    @torch.no_grad()
    def _sums(self, held_out: CachedData, watchdog: Watchdog, interruption: Interruption | None) -> Tensor:
        """Sums the losses of all labels, and counts them: fp64 ``[2]``."""
        config = self.config
        rows = self._data_size * config.batch_size
        most = held_out.num_sequences if config.eval_batches == 0 else config.eval_batches * rows
        self.engine.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device())
        one = torch.ones((), device=device())
        for first in range(0, min(most, held_out.num_sequences), rows):
            watchdog.at(self.progress.step, "evaluating")
            if interruption is not None and total(interruption.requested)[0]:
                self.engine.model.train()
                raise InterruptedStepError
            mine = held_out.in_order(first, min(rows, most - first))[self._data_rank :: self._data_size]
            batch = self._collated(mine)
            sums[0] += self._loss(batch, one)
            sums[1] += count_labels([batch]) / self.dims.sequence_parallel
        self.engine.model.train()
        return total_on_device(sums)

    @torch.no_grad()
    def continued(
        self, prompts: list[list[int]], watchdog: Watchdog, interruption: Interruption | None = None
    ) -> list[list[int]]:
        """Continues token ids by the most likely ones, up to the end of a text or ``--sample_tokens``. Every rank
        computes all of them, for they gather weights together, with the tokens of rank 0.

        Raises:
            InterruptedStepError: a rank was asked to end.
        """
        self.engine.model.eval()
        found = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device=device())
            first = ids.shape[1]
            while ids.shape[1] < min(first + self.config.sample_tokens, self.config.sequence_length):
                watchdog.at(self.progress.step, "evaluating")
                if interruption is not None and total(interruption.requested)[0]:
                    self.engine.model.train()
                    raise InterruptedStepError
                # Compiled layers would be compiled again, for sequences of other lengths.
                with autocast(self.config, self.dims.strategy), torch.compiler.set_stance("force_eager"):
                    logits = self.engine.model(input_ids=ids, use_cache=False).logits
                newest = from_rank_zero(logits[:, -1:].argmax(-1))
                ids = torch.cat([ids, newest], 1)
                if int(newest) in self.ends:
                    break
            found.append(ids[0, first:].tolist())
        self.engine.model.train()
        return found

    def data_states(self) -> list[dict[str, Any]]:
        """All-gathers the positions of the streams of all data ranks, in their order."""
        return gathered(self.data_state)[:: self.dims.same_data]

    def places(self) -> list[str]:
        """Lists files that this rank's sequences of the last step come from, as far as they are known."""
        if not isinstance(self.data, CachedData):
            return []
        before = self.progress.sequences - self.global_batch_size
        return self.data.places(before, self.global_batch_size, self._data_rank, self._data_size)

    def _read_batches(self) -> tuple[list[dict[str, Tensor]], float, float, float]:
        """Makes the micro-batches of this rank, and counts labels, tokens and pairs that attend of all ranks."""
        config, problem, sequences = self.config, "", list[list[Piece]]()
        try:
            sequences = self.data.take(
                self.progress.sequences, self.global_batch_size, self._data_rank, self._data_size
            )
        except (LigerDistError, OSError) as error:
            problem = str(error)
        size = config.batch_size
        count = self.dims.micro_batches(config, self.global_batch_size)
        top_k = config.top_k
        batches = [self._collated(sequences[i * size : (i + 1) * size], top_k) for i in range(count)]
        read = sum(len(piece.ids) for sequence in sequences for piece in sequence)
        bad_rows = self.data.bad_rows()
        attended = count_pairs(sequences, across=config.attend_across_documents)
        labels, tokens, pairs, bad, failed = total(count_labels(batches), read, attended, len(bad_rows), bool(problem))
        are_too_many = bad / self.dims.same_data > config.max_bad_rows
        if are_too_many and bad_rows:
            problem = describe_bad_rows(bad_rows, config.max_bad_rows)
        if failed or are_too_many:
            raise LigerDistError(next(filter(None, gathered(problem))))
        return batches, labels, tokens, pairs

    def _collated(self, sequences: list[list[Piece]], top_k: int = 0) -> dict[str, Tensor]:
        config = self.config
        restart = not config.attend_across_documents
        batch = collate(sequences, config.batch_size, config.sequence_length, self._pad, restart=restart, top_k=top_k)
        mask = token_mask(sequences, config.batch_size, config.sequence_length)
        return batch if mask is None else batch | {"token_mask": mask}

    def _loss(self, batch: dict[str, Any], num_items: Tensor, teacher: Teacher | None = None) -> Tensor:
        """Computes this rank's part of the mean over ``num_items`` tokens, with a teacher of the distillation loss;
        labels stay on the CPU, where counting them is free."""
        batch = dict(batch)
        mask = batch.pop("token_mask", None)
        if self.dims.sequence_parallel > 1:
            mesh = self.dims.mesh(device().type)
            # As if it were the tokens.
            mask = None if mask is None else shard_sequence({"input_ids": mask.long()}, mesh)["input_ids"]
            batch = {**shard_sequence(batch, mesh)}
        on_device: dict[str, Any] = {
            name: part.to(device(), non_blocking=True) if isinstance(part, Tensor) else part
            for name, part in batch.items()
        }
        if self.config.fused_loss:
            on_device |= {name: batch[name] for name in ("labels", "shift_labels") if name in batch}
        if "top_k_ids" in batch:
            on_device["soft_labels"] = (on_device.pop("top_k_ids"), on_device.pop("top_k_probs"))
            on_device |= {"soft_weight": self.config.soft_weight, "remainder": self.config.remainder}
        if self.config.z_loss and torch.is_grad_enabled():
            # Not in evaluations, whose loss is that of the labels.
            on_device["z_loss"] = self.config.z_loss
        mask = None if mask is None else mask.to(device(), torch.bool, non_blocking=True)
        self.loads.token_mask = mask
        with autocast(self.config, self.dims.strategy):
            if teacher is not None:
                return teacher.loss(self.engine.model, on_device, num_items)
            output = self.engine.model(**on_device, num_items_in_batch=num_items, use_cache=False)
        loss: Tensor = output.loss
        balance = getattr(output, "aux_loss", None)
        if isinstance(balance, Tensor) and self._router_coefficient:
            # The model adds it whole in each of its calls; held-out losses are those of tokens.
            loss = loss - self._router_coefficient * balance.to(loss)
            if torch.is_grad_enabled():
                of_tokens = balance if mask is None else router_loss(self.engine.model, output, mask)
                added = self._router_coefficient * of_tokens.to(loss)
                loss = loss + self._of_router * added
                self._router_losses.append(added.detach())
        if self.config.mtp is not None and torch.is_grad_enabled():
            self._mtp_losses.append(output.mtp_loss)
        return loss


def router_coefficient(model: nn.Module) -> float:
    """Returns the factor with which a mixture adds the balance of its experts to its loss; 0 for other models.

    Raises:
        LigerDistError: the model adds it, and does not say with which factor.
    """
    inner = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    config = inner.config.get_text_config()
    if not getattr(config, "output_router_logits", False):
        return 0.0
    # JetMoe's name is the second one.
    factor = getattr(config, "router_aux_loss_coef", getattr(config, "aux_loss_coef", None))
    if not isinstance(factor, int | float):
        raise LigerDistError(
            f"{type(config).__name__} has output_router_logits and no router_aux_loss_coef (got {factor!r}), so that "
            "the term that the model adds to each micro-batch's loss cannot be divided; set output_router_logits to "
            "false in its config.json."
        )
    return float(factor)


def router_loss(model: nn.Module, output: Any, token_mask: Tensor) -> Tensor:
    """Computes the balance of a mixture's experts as the model does, over the tokens of ``token_mask`` (bool, as many
    as the model's) alone: a packed call has no attention mask that would say where padding is.

    Args:
        output: of the model, with ``router_logits``.
    """
    inner: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    text = inner.config.get_text_config()
    modules = (sys.modules.get(kind.__module__) for kind in type(inner).__mro__)
    compute = next(getattr(module, BALANCE) for module in modules if hasattr(module, BALANCE))
    sizes = [getattr(inner, name, getattr(text, name, None)) for name in ("num_experts", "num_experts_per_tok")]
    # A shard of a sequence may be padding altogether, for which the mean over no token is NaN.
    has_tokens = token_mask.any()
    found: Tensor = compute(output.router_logits, *sizes, token_mask | ~has_tokens)
    return found * has_tokens


def count_labels(batches: list[dict[str, Tensor]], places: int = 1) -> int:
    """Counts the labels that are predicted ``places`` earlier; the first ones of a document never are."""
    if places == 1:
        return sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
    found = 0
    for batch in batches:
        labels = batch["labels"][:, places:]
        positions = batch.get("position_ids")
        is_inside = True if positions is None else positions[:, places:] >= places
        found += int(((labels >= 0) & is_inside).sum())
    return found


def count_pairs(sequences: list[list[Piece]], *, across: bool) -> int:
    """Counts the tokens that each token attends to, itself included: those before it in its document, with ``across``
    in its sequence."""
    lengths = [[len(piece.ids) for piece in sequence] for sequence in sequences]
    return sum(n * (n + 1) // 2 for of in lengths for n in ([sum(of)] if across else of))


def num_steps(config: TrainConfig, data: Data, global_batch_size: int) -> int:
    """Returns ``--steps``, or as many as ``--epochs`` takes."""
    if config.steps is not None or config.eval_only:
        return config.steps or 1
    assert data.num_sequences is not None
    return max(1, math.ceil((config.epochs or 1) * data.num_sequences / global_batch_size))


def write_counts(trainer: Trainer, states: list[dict[str, Any]]) -> None:
    """Writes ``data.json``: all of cached data, of a stream what was read so far."""
    config, held_out = trainer.config, trainer.held_out
    found = {"streaming": config.streaming, **trainer.data.counts(states)}
    if config.eval_data and held_out is not None:
        sources = held_out.counts([])["sources"]
        found["eval_data"] = [source | {"splits": {"held_out": source["splits"]["train"]}} for source in sources]
    text = json.dumps(found, indent=1) + "\n"
    on_rank_zero(lambda: write_text(Path(config.output_dir) / "data.json", text))
