"""Sequence and context parallelism of the hosts, with a wrapped model: losses, weights and held-out losses of one
process in fp64 that trains on full sequences."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from hosts import watched
from layouts import zero_settings
from models import assert_below, make_model
from torch.utils.data import Dataset
from trainers import forget_earlier_trainers, full_weights, logged_losses, pretended_gpus, sgd_arguments
from truth import relative_error

import liger_dist

pytest.importorskip("deepspeed")
LENGTH, MICRO_BATCHES, STEPS, LEARNING_RATE = 128, 2, 2, 0.05
"""ring attention wants 32 tokens in each of its shards"""
Host = Literal["cp_size", "sp_size"]
HEADS = 4
"""of keys, too: in fp32 no fused attention of torch shares them between queries, and ring attention needs one"""
TOLERANCE: dict[Host, float] = {"sp_size": 2e-5, "cp_size": 2e-3}
"""GPUs multiply fp32 in attention with fewer bits"""


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Rows of which some have labels in the first quarter or the last alone, so that one rank has none: DeepSpeed's
    second rank has the last two quarters, Accelerate's the middle ones."""

    def __init__(self, packed: bool = False) -> None:
        self.rows = []
        for number in range(8):
            ids = torch.randint(1, 61, (LENGTH,), generator=torch.Generator().manual_seed(number))
            labels = ids.clone()
            if number % 3 == 1:
                labels[: 3 * LENGTH // 4 + 1] = -100
            if number % 3 == 2:
                labels[LENGTH // 4 - 2 :] = -100
            positions = torch.arange(LENGTH)
            if packed:
                positions[LENGTH // 2 + 2 :] -= LENGTH // 2 + 2
            self.rows.append({"input_ids": ids, "labels": labels, "position_ids": positions})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


HOWS = ("fuse", "wrapped first")
BOTH = ("sp_size", pytest.param("cp_size", marks=pytest.mark.gpu(n=2)))


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("host", "how"),
    [
        *(pytest.param("sp_size", how, id=f"sp_size, {how}") for how in HOWS),
        *(pytest.param("cp_size", how, id=f"cp_size, {how}", marks=pytest.mark.gpu(n=2)) for how in HOWS),
    ],
)
def test_in_the_trainer(host: Host, how: str, workers_2: Workers) -> None:
    """DeepSpeed's Ulysses with ZeRO-3 and torch's ring attention with FSDP2, with gradient accumulation, sequences of
    which one rank has no label, and evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = workers_2.run(trained, host, 3, how, folder)
    sequences = full_sequences(ranks)
    assert len(sequences) == MICRO_BATCHES * STEPS
    assert has_a_shard_without_labels(ranks)
    # DeepSpeed's loss is the mean of micro-batches' means, the Trainer's that over all of their tokens.
    expected = trained_alone(sequences, by_tokens=host == "cp_size")
    for found in ranks:
        assert found["fused"] == len(sequences) + found["evaluations"]
        assert_as_alone(found, expected, TOLERANCE[host])
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=TOLERANCE[host])


@pytest.mark.parametrize("host", BOTH)
def test_in_accelerates_own_loop(host: Host, workers_2: Workers) -> None:
    """The mean over the labels of all ranks: gradients are averaged over them, so each divides by a rank's share."""
    ranks = workers_2.run(trained_in_a_loop, host)
    assert has_a_shard_without_labels(ranks)
    expected = trained_alone(full_sequences(ranks), by_tokens=False)
    for found in ranks:
        assert found["fused"] == MICRO_BATCHES * STEPS
        assert_as_alone(found, expected, TOLERANCE[host])


def full_sequences(ranks: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Ids, shifted labels and positions ``[3, S]`` of each call, from the shards of all ranks, in order."""
    found = []
    for shards in zip(*(rank["inputs"] for rank in ranks), strict=True):
        together = torch.cat(shards, 1)
        found.append(together[:, together[2].argsort()])
        assert found[-1][2].tolist() == list(range(LENGTH))
    return found


def has_a_shard_without_labels(ranks: list[dict[str, Any]]) -> bool:
    return any((inputs[1] == -100).all() for rank in ranks for inputs in rank["inputs"])


def assert_as_alone(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    errors = {name: relative_error(found["weights"][name], weight) for name, weight in expected["weights"].items()}
    assert_below(errors, tolerance)


def test_zero_2_whose_gradients_are_too_large(workers_2: Workers) -> None:
    """Without liger_dist a step of ZeRO-2 is twice as long as it should be; with it the call is refused."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = workers_2.run(trained, "sp_size", 2, "as before", folder, 1)
        messages = workers_2.run(refused, "sp_size", 2, folder, False)
    expected = trained_alone(full_sequences(ranks), by_tokens=False)
    before = dict(make_model("llama", dtype=torch.float32, heads=HEADS).cpu().named_parameters())
    for name, after in expected["weights"].items():
        change = ranks[0]["weights"][name].double() - before[name].detach()
        assert relative_error(change, 2 * (after - before[name].detach())) < 1e-4, name
    assert all("sp_size is 2 with a ZeRO stage below 3" in message for message in messages)


@pytest.mark.parametrize("host", BOTH)
def test_packed_documents_are_refused(host: Host, workers_2: Workers) -> None:
    """On all ranks, though the second document begins on the second rank's tokens alone."""
    with tempfile.TemporaryDirectory() as folder:
        for message in workers_2.run(refused, host, 3, folder, True):
            assert f"position_ids start again within a sequence under {host}" in message


def refused(host: Host, stage: int, folder: str, packed: bool) -> str:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        trained(host, stage, "fuse", folder, 1, packed)
    return str(caught.value)


def trained(host: Host, stage: int, how: str, folder: str, steps: int = STEPS, packed: bool = False) -> dict[str, Any]:
    from liger_dist.integrations.trainer import fuse

    with fresh_host():
        model: Any = make_model("llama", dtype=torch.float32, heads=HEADS).cpu()
        if how == "wrapped first":
            model = liger_dist.wrap(model, config=liger_dist.WrapConfig(varlen_attention=False))
        trainer = make_parallel_trainer(host, model, stage, folder, steps, Sequences(packed))
        if how == "fuse":
            fuse(trainer)
        with watched(logits=host == "sp_size") as seen:
            with noted(trainer.model) as inputs:
                trainer.train()
            eval_loss = trainer.evaluate()["eval_loss"]
        # Accelerate's sp_size does not shard evaluation: the ranks have different rows.
        ranks = dist.get_world_size() if host == "sp_size" else 1
        return {
            "inputs": inputs,
            "losses": logged_losses(trainer),
            "eval_loss": eval_loss,
            "evaluations": len(Sequences()) // ranks,
            "weights": full_weights(trainer.model),
            "fused": seen.fused_calls,
        }


def trained_in_a_loop(host: Host) -> dict[str, Any]:
    """With the loss of the model's own call."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    with fresh_host():
        config = liger_dist.WrapConfig(varlen_attention=False)
        model: Any = liger_dist.wrap(make_model("llama", dtype=torch.float32, heads=HEADS).cpu(), config=config)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, **plugins(host))
        loader: Any = DataLoader(Sequences(), batch_size=1)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        with watched(logits=host == "sp_size") as seen, noted(model) as inputs:
            for number, batch in enumerate(loader):
                if number == MICRO_BATCHES * STEPS:
                    break
                batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
                with accelerator.accumulate(model), sharded_by(accelerator, host, batch):
                    labels = batch["shift_labels"]
                    share = accelerator.reduce((labels != -100).sum(), "sum") / accelerator.num_processes
                    loss = model(**batch, labels=labels, num_items_in_batch=share, use_cache=False).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        by_step = [losses[first : first + MICRO_BATCHES] for first in range(0, len(losses), MICRO_BATCHES)]
        return {
            "inputs": inputs,
            "losses": [sum(step) / MICRO_BATCHES for step in by_step],
            "weights": full_weights(model),
            "fused": seen.fused_calls,
        }


@contextmanager
def sharded_by(accelerator: Any, host: Host, batch: dict[str, torch.Tensor]) -> Iterator[None]:
    """DeepSpeed's loader has sharded the batch and shifted its labels."""
    if host == "sp_size":
        yield
        return
    batch["shift_labels"] = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()
    buffers = list(batch.values())
    with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), set(buffers)):
        yield


@contextmanager
def fresh_host() -> Iterator[None]:
    """Removes what earlier trainers have left in this process, and afterwards what this one leaves."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    forget_earlier_trainers()
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        with pretended_gpus():
            yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
        forget_earlier_trainers()
        forget_sequence_groups()


@contextmanager
def noted(model: Any) -> Iterator[list[torch.Tensor]]:
    """Ids, shifted labels and positions ``[3, s]`` of each call."""
    inputs: list[torch.Tensor] = []

    def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        names = ("input_ids", "shift_labels", "position_ids")
        inputs.append(torch.stack([kwargs[name][0] for name in names]).cpu())

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield inputs
    finally:
        hook.remove()


def plugins(host: Host, stage: int = 3) -> dict[str, Any]:
    """Makes the arguments of an ``Accelerator``."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DeepSpeedPlugin

    if host == "sp_size":
        settings = zero_settings({"stage": stage, "accumulation": MICRO_BATCHES})
        settings["train_micro_batch_size_per_gpu"] = 1
        return {"deepspeed_plugin": DeepSpeedPlugin(settings), "parallelism_config": parallelism(host)}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    return {"fsdp_plugin": plugin, "parallelism_config": parallelism(host)}


def parallelism(host: Host) -> Any:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    if host == "cp_size":
        return ParallelismConfig(cp_size=2)
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler)


def make_parallel_trainer(host: Host, model: Any, stage: int, folder: str, steps: int, data: Sequences) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = sgd_arguments(
        folder,
        "fsdp2" if host == "cp_size" else f"zero{stage}",
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=MICRO_BATCHES,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        parallelism_config=parallelism(host),
    )
    return Trainer(model=model, args=TrainingArguments(**arguments), train_dataset=data, eval_dataset=Sequences())


def forget_sequence_groups() -> None:
    """DeepSpeed makes them once in a process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    groups.mpu = None
    for name in vars(parallel_state_sp):
        if name.startswith("_SEQUENCE"):
            setattr(parallel_state_sp, name, None)


def trained_alone(sequences: list[torch.Tensor], *, by_tokens: bool) -> dict[str, Any]:
    """Steps on the same sequences, in fp64. The loss of a step is the mean over the labels of all of its micro-batches,
    or the mean of their means."""
    model: Any = make_model("llama", dtype=torch.float32, heads=HEADS).cpu().double()
    losses = []
    for first in range(0, len(sequences), MICRO_BATCHES):
        micro_batches = sequences[first : first + MICRO_BATCHES]
        counts = [int((labels != -100).sum()) for _, labels, _ in micro_batches]
        loss = 0.0
        for (ids, labels, _), count in zip(micro_batches, counts, strict=True):
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            total = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            share = total / (sum(counts) if by_tokens else count * MICRO_BATCHES)
            share.backward()
            loss += float(share.detach())
        losses.append(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LEARNING_RATE * parameter.grad
                parameter.grad = None
    held_out = []
    with torch.no_grad():
        for row in Sequences().rows:
            batch = {name: value[None] for name, value in row.items()}
            held_out.append(float(model(**batch, use_cache=False).loss))
    return {
        "losses": losses,
        "eval_loss": sum(held_out) / len(held_out),
        "weights": {name: parameter.detach() for name, parameter in model.named_parameters()},
    }
