"""A step of training, an evaluation, a sample of text: what a run does between its files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from .arguments import TrainArguments
from .engine import Engine
from .layout import Layout
from .model import autocast, inner_model
from .packing import Blocks, Order
from .process import device, rank, total, total_on_device, world_size
from .watchdog import Watchdog


class Run:
    """Everything that a step needs."""

    def __init__(
        self, arguments: TrainArguments, layout: Layout, engine: Engine, train: Blocks, held_out: Blocks
    ) -> None:
        self.arguments = arguments
        self.layout = layout
        self.engine = engine
        self.schedule = get_cosine_with_min_lr_schedule_with_warmup(
            engine.optimizer, arguments.warmup_steps, arguments.steps, min_lr_rate=arguments.min_learning_rate_ratio
        )
        self.own_loss: Tensor | None = None
        """of the last step: this rank's part of the mean"""
        self._train, self._held_out = train, held_out
        self._order = Order(len(train), arguments.seed)
        self._data_rank, self._data_size = layout.data_rank(rank()), layout.data_size
        head = inner_model(engine.model).get_output_embeddings()
        self.vocab_size: int = head.out_features
        # The logits of rows that stay are as wide as these; what is gathered has no DTensor in the call.
        weight = head.weight
        self.own_rows = weight.to_local().shape[0] if isinstance(weight, DTensor) else head.out_features
        if self.own_rows == head.in_features:
            # As wide as hidden states: not to be told from them.
            self.own_rows = head.out_features
        engine.model.train()

    def sequences(self, step: int) -> list[list[int]]:
        """Which sequences of the data this rank reads in each micro-batch of a step."""
        a, places = self.arguments, []
        for micro in range(a.accumulation_steps):
            first = ((step * a.accumulation_steps + micro) * self._data_size + self._data_rank) * a.batch_size
            places.append([self._order[first + i] for i in range(a.batch_size)])
        return places

    def step(self, step: int, watchdog: Watchdog) -> tuple[Tensor, Tensor, int]:
        """One optimiser step: loss over all ranks' tokens, gradient norm, number of tokens. Gradients stay."""
        watchdog.at(step + 1, "reading data")
        batches = [self._train.batch(places) for places in self.sequences(step)]
        # Dropout draws the same numbers in a resumed run, and others on each rank.
        torch.manual_seed((self.arguments.seed * 1_000_003 + step) * self._data_size + self._data_rank)
        learnt, read = total(count_learnt(batches), sum(batch["input_ids"].numel() for batch in batches))
        # Data parallelism averages gradients over ranks: dividing by tokens per rank gives the mean over all tokens.
        # Every process of a tensor-parallel group has counted the same ones.
        num_items = torch.tensor(max(learnt, 1.0) / self.layout.world_size, device=device())
        losses = []
        for index, batch in enumerate(batches):
            watchdog.at(step + 1, "computing")
            with self.engine.micro_batch(is_last=index == len(batches) - 1):
                loss = self._loss(batch, num_items)
                self.engine.backward(loss)
            losses.append(loss.detach())
        norm = self.engine.update()
        self.schedule.step()
        self.own_loss = torch.stack(losses).sum()
        mean = total_on_device(self.own_loss.clone()) / self.layout.world_size
        return mean, norm, int(read) // self.layout.tensor_parallel

    @torch.no_grad()
    def evaluate(self, step: int, watchdog: Watchdog) -> float:
        """Mean loss on held-out text, with the same loss as training; alike on every rank."""
        a = self.arguments
        self.engine.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device())
        for index in range(a.eval_batches):
            watchdog.at(step, "evaluating")
            first = (index * self._data_size + self._data_rank) * a.batch_size
            batch = self._held_out.batch([(first + i) % len(self._held_out) for i in range(a.batch_size)])
            sums[0] += self._loss(batch, torch.tensor(1.0, device=device()))
            sums[1] += count_learnt([batch])
        self.engine.model.train()
        total_on_device(sums)
        return float(sums[0] / sums[1].clamp_min(1))

    @torch.no_grad()
    def sample(self, tokenizer: Any) -> str:
        """Text continued from the prompt; every rank draws the same, for all take part when the model is sharded."""
        a = self.arguments
        self.engine.model.eval()
        torch.manual_seed(a.seed)
        prompt = tokenizer(a.sample_prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        room = a.sequence_length - prompt.shape[1]
        with autocast(a, self.layout.strategy), self.engine.generating():
            ids = inner_model(self.engine.model).generate(
                prompt.to(device()),
                attention_mask=torch.ones_like(prompt, device=device()),
                max_new_tokens=max(1, min(a.sample_tokens, room)),
                do_sample=True,
                temperature=0.8,
                top_k=50,
                pad_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                # All go on until the last has ended, in case that they draw differently after all.
                synced_gpus=world_size() > 1,
            )
        self.engine.model.train()
        text: str = tokenizer.decode(ids[0], skip_special_tokens=True)
        return text

    def _loss(self, batch: dict[str, Tensor], num_items: Tensor) -> Tensor:
        """Mean over ``num_items`` tokens, this rank's part; labels stay on the CPU, where counting them is free."""
        on_device = {name: tensor.to(device(), non_blocking=True) for name, tensor in batch.items()}
        if self.arguments.fused_loss:
            on_device["labels"] = batch["labels"]
        with autocast(self.arguments, self.layout.strategy):
            output = self.engine.model(**on_device, num_items_in_batch=num_items, use_cache=False)
        loss: Tensor = output.loss
        return loss


def count_learnt(batches: list[dict[str, Tensor]]) -> int:
    """Labels that count; the first of a sequence is never predicted."""
    return sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
