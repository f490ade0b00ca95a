"""The run itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from liger_dist import LigerDistError
from liger_dist.sharding.mesh import check_mesh

from .arguments import TrainArguments
from .checkpoint import Checkpoints, describe_run
from .corpus import Columns, find_corpus
from .meter import LargestTensor, measured
from .metrics import Metrics, peak_memory_bytes
from .model import autocast, build, find_config, inner_model, strategy_of
from .packing import Blocks, Order, load, prepare
from .process import Interruption, device, on_rank_zero, rank, total, total_on_device, world_size
from .tokens import fingerprint, load_tokenizer, train_tokenizer


@dataclass
class Run:
    """Everything that a step needs."""

    arguments: TrainArguments
    model: nn.Module
    optimizer: Optimizer
    schedule: Any
    train: Blocks
    held_out: Blocks
    order: Order

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """This rank's micro-batches of an optimiser step."""
        a = self.arguments
        batches = []
        for micro in range(a.accumulation_steps):
            first = ((step * a.accumulation_steps + micro) * world_size() + rank()) * a.batch_size
            batches.append(self.train.batch([self.order[first + i] for i in range(a.batch_size)]))
        return batches

    def loss(self, batch: dict[str, Tensor], num_items: Tensor) -> Tensor:
        """Mean over ``num_items`` tokens, this rank's part; labels stay on the CPU, where counting them is free."""
        on_device = {name: tensor.to(device(), non_blocking=True) for name, tensor in batch.items()}
        if self.arguments.fused_loss:
            on_device["labels"] = batch["labels"]
        with autocast(self.arguments):
            output = self.model(**on_device, num_items_in_batch=num_items, use_cache=False)
        loss: Tensor = output.loss
        return loss

    def step(self, step: int) -> tuple[Tensor, Tensor | None, int]:
        """One optimiser step: loss over all ranks' tokens, gradient norm, number of tokens."""
        batches = self.batches(step)
        # Dropout draws the same numbers in a resumed run, and others on each rank.
        torch.manual_seed((self.arguments.seed * 1_000_003 + step) * world_size() + rank())
        learnt, read = total(count_learnt(batches), sum(batch["input_ids"].numel() for batch in batches))
        # Data parallelism averages gradients over ranks: dividing by tokens per rank gives the mean over all tokens.
        num_items = torch.tensor(max(learnt, 1.0) / world_size(), device=device())
        losses = []
        for index, batch in enumerate(batches):
            with reduction_at(self.model, is_last=index == len(batches) - 1):
                loss = self.loss(batch, num_items)
                loss.backward()
            losses.append(loss.detach())
        norm = clip(self.model, self.arguments.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total_on_device(torch.stack(losses).sum()) / world_size(), norm, int(read)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on held-out text, with the same loss as training; alike on every rank."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=device())
        for index in range(self.arguments.eval_batches):
            first = (index * world_size() + rank()) * self.arguments.batch_size
            places = [(first + i) % len(self.held_out) for i in range(self.arguments.batch_size)]
            batch = self.held_out.batch(places)
            count = count_learnt([batch])
            sums[0] += self.loss(batch, torch.tensor(1.0, device=device()))
            sums[1] += count
        self.model.train()
        total_on_device(sums)
        return float(sums[0] / sums[1].clamp_min(1))

    @torch.no_grad()
    def sample(self, tokenizer: Any) -> str:
        """Text continued from the prompt; every rank draws the same, for all take part when the model is sharded."""
        self.model.eval()
        torch.manual_seed(self.arguments.seed)
        model = inner_model(self.model)
        prompt = tokenizer(self.arguments.sample_prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        room = self.arguments.sequence_length - prompt.shape[1]
        with autocast(self.arguments):
            ids = model.generate(
                prompt.to(device()),
                attention_mask=torch.ones_like(prompt, device=device()),
                max_new_tokens=max(1, min(self.arguments.sample_tokens, room)),
                do_sample=True,
                temperature=0.8,
                top_k=50,
                pad_token_id=tokenizer.eos_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        self.model.train()
        text: str = tokenizer.decode(ids[0], skip_special_tokens=True)
        return text


@contextmanager
def reduction_at(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Lets gradients be reduced over ranks in the last micro-batch of a step only."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last)
    with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
        yield


def count_learnt(batches: list[dict[str, Tensor]]) -> int:
    """Labels that count; the first of a sequence is never predicted."""
    return sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)


def clip(model: nn.Module, max_norm: float) -> Tensor | None:
    """Clips the gradient of the whole model; returns its norm before."""
    if max_norm <= 0:
        return None
    # Torch adds up norms on one mesh; rows of a vocab-parallel head may lie on another than the rest.
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in by_mesh.values()]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = nn.utils.get_total_norm(norms)
    for kind in by_mesh.values():
        nn.utils.clip_grads_with_norm_(kind, max_norm, total)
    return total


def make_folder(folder: Path) -> None:
    """Refuses a place where nothing can be written, before anything is computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LigerDistError(f"nothing can be written to {folder}: {error}; choose another --output_dir.") from error


def make_optimizer(model: nn.Module, arguments: TrainArguments) -> tuple[Optimizer, Any]:
    """AdamW with decay of matrices only, and its schedule."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": arguments.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=arguments.learning_rate, betas=(0.9, arguments.adam_beta2))
    schedule = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, arguments.warmup_steps, arguments.steps, min_lr_rate=arguments.min_learning_rate_ratio
    )
    return optimizer, schedule


def train(arguments: TrainArguments) -> None:
    """Trains as the arguments say and leaves everything in ``output_dir``."""
    if arguments.mesh:
        check_mesh(tuple(arguments.mesh), world_size(), strategy="fsdp2")
    folder = Path(arguments.output_dir)
    on_rank_zero(lambda: make_folder(folder / "checkpoints"))
    columns = Columns(arguments.text_column, arguments.messages_column)
    cache = Path(arguments.cache_dir)

    def prepare_tokenizer() -> Path:
        if arguments.tokenizer is not None:
            load_tokenizer(Path(arguments.tokenizer))
            return Path(arguments.tokenizer)
        corpus = find_corpus(arguments.data, columns)
        trained = cache / f"tokenizer-{corpus.fingerprint()}-{arguments.vocab_size}"
        if not trained.is_dir():
            print(f"training a tokenizer of {arguments.vocab_size} entries", flush=True)
            train_tokenizer(corpus.texts(), arguments.vocab_size, trained)
        return trained

    tokenizer = load_tokenizer(on_rank_zero(prepare_tokenizer))
    if not tokenizer(arguments.sample_prompt, add_special_tokens=False)["input_ids"]:
        raise LigerDistError(f"--sample_prompt {arguments.sample_prompt!r} has no token; give some text.")
    config = find_config(arguments, len(tokenizer))
    mark = fingerprint(tokenizer)
    vocab_size = config.get_text_config().vocab_size
    tokens = on_rank_zero(
        lambda: prepare(find_corpus(arguments.data, columns), tokenizer, mark, columns, vocab_size, cache)
    )
    blocks = {split: Blocks(load(tokens, split), arguments.sequence_length) for split in ("train", "held_out")}
    for split, cut in blocks.items():
        if len(cut) == 0:
            raise LigerDistError(
                f"the {split.replace('_', '-')} part of the data is shorter than one sequence of "
                f"{arguments.sequence_length} tokens; lower --sequence_length or give more data."
            )
    model = build(arguments, config)
    optimizer, schedule = make_optimizer(model, arguments)
    run = Run(
        arguments,
        model.train(),
        optimizer,
        schedule,
        blocks["train"],
        blocks["held_out"],
        Order(len(blocks["train"]), arguments.seed),
    )
    checkpoints = Checkpoints(folder / "checkpoints", describe_run(config, mark, arguments.seed))
    first_step = (checkpoints.latest() if arguments.resume else None) or 0
    if first_step > 0:
        checkpoints.load(first_step, model, optimizer)
        for _ in range(first_step):
            schedule.step()
    metrics = Metrics(folder, total_steps=arguments.steps, first_step=first_step, is_writer=rank() == 0)
    largest, last_step, was_stopped = _steps(run, checkpoints, metrics, first_step)
    metrics.close()
    text = None if was_stopped else run.sample(tokenizer)
    if rank() == 0:
        _report(run, folder, metrics, largest, last_step, text)


def _steps(
    run: Run, checkpoints: Checkpoints, metrics: Metrics, first_step: int
) -> tuple[LargestTensor | None, int, bool]:
    """All steps; the head's largest tensor in the first one, the last step, and whether the run was stopped before
    its end."""
    a = run.arguments
    largest: LargestTensor | None = None
    step = saved = first_step
    stopped = a.stop_at_step is not None and step >= a.stop_at_step
    with Interruption().watched() as interruption:
        while step < a.steps and not stopped:
            began = time.perf_counter()
            if largest is None:
                with measured(inner_model(run.model).get_output_embeddings()) as largest:
                    loss, norm, num_tokens = run.step(step)
            else:
                loss, norm, num_tokens = run.step(step)
            step += 1
            # Reading the loss waits for the step; the same exchange tells everyone of an interruption.
            (asked,) = total(float(interruption.requested))
            row: dict[str, Any] = {"step": step, "loss": float(loss)}
            if norm is not None:
                row["grad_norm"] = float(norm)
            seconds = time.perf_counter() - began
            stopped = asked > 0 or (a.stop_at_step is not None and step >= a.stop_at_step)
            if step == 1 or step % a.eval_every == 0 or step == a.steps:
                row["eval_loss"] = run.evaluate()
            row |= {"tokens_per_second": num_tokens / seconds, "peak_memory_bytes": peak_memory_bytes()}
            row["learning_rate"] = run.schedule.get_last_lr()[0]
            metrics.add(row)
            if stopped or step % a.checkpoint_every == 0 or step == a.steps:
                checkpoints.save(step, run.model, run.optimizer)
                saved = step
    assert saved == step
    return largest, step, stopped and step < a.steps


def _report(
    run: Run, folder: Path, metrics: Metrics, largest: LargestTensor | None, last_step: int, text: str | None
) -> None:
    if text is None:
        print(f"stopped after step {last_step}; continue with --resume true --output_dir {folder}")
        return
    (folder / "sample.txt").write_text(text + "\n")
    print(f"written to {folder}: metrics.jsonl, loss.png, sample.txt, checkpoints/step-{last_step:08d}")
    a = run.arguments
    line = f"strategy {strategy_of(a)}, world size {world_size()}"
    losses = [row["eval_loss"] for row in metrics.rows if "eval_loss" in row]
    if losses:
        line += f", held-out loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    if largest is not None:
        tokens, vocab_size = (
            a.batch_size * a.sequence_length,
            inner_model(run.model).get_output_embeddings().out_features,
        )
        rows = largest.rows_of_width.get(vocab_size, 0)
        # Inside the head, logits are as wide as the vocabulary; all of them have a row for each token.
        seen = f"at most {rows} of {tokens} rows of {vocab_size} at once" if rows else f"not one row of {vocab_size}"
        line += (
            f", {'no' if rows < tokens else 'all'} logits were materialised: {seen}, the head's largest tensor was "
            f"{list(largest.shape)}, {largest.num_bytes / 2**20:.2f} MiB"
        )
    print(line)
