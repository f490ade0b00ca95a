"""Sequence parallelism of the hosts, with a wrapped model: losses, weights and held-out losses of one process in fp64
that trains on whole sequences."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from hosts import watched
from layouts import zero_settings
from models import make_model
from test_trainer import forget_earlier_trainers, pretended_gpus
from torch.utils.data import Dataset
from truth import relative_error

import liger_dist

pytest.importorskip("deepspeed")
LENGTH, MICRO_BATCHES, STEPS, LEARNING_RATE = 24, 2, 2, 0.05


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Of some, only the first half or the second has labels, so that one rank has none."""

    def __init__(self, packed: bool = False) -> None:
        self.rows = []
        for number in range(8):
            ids = torch.randint(1, 61, (LENGTH,), generator=torch.Generator().manual_seed(number))
            labels = ids.clone()
            if number % 3 == 1:
                labels[: LENGTH // 2 + 1] = -100
            if number % 3 == 2:
                labels[LENGTH // 2 - 2 :] = -100
            positions = torch.arange(LENGTH)
            if packed:
                positions[LENGTH // 2 + 2 :] -= LENGTH // 2 + 2
            self.rows.append({"input_ids": ids, "labels": labels, "position_ids": positions})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


@pytest.mark.parametrize("how", ["fuse", "wrapped first"])
def test_ulysses_of_deepspeed_in_the_trainer(how: str, workers_2: Workers) -> None:
    """ZeRO-3, with gradient accumulation, sequences of which one rank has no label, and evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = workers_2.run(trained, 3, how, folder)
    # Both ranks hold halves of the same sequences: one process sees them whole.
    whole = [torch.cat(halves, 1) for halves in zip(first["inputs"], second["inputs"], strict=True)]
    assert len(whole) == MICRO_BATCHES * STEPS
    labelled = [[int((halves["inputs"][i][1] != -100).sum()) for halves in (first, second)] for i in range(len(whole))]
    assert any(0 in counts for counts in labelled), "no rank is without labels"
    expected = trained_alone(whole)
    for found in (first, second):
        assert found["fused"] == len(whole) + found["evaluations"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-5)
        assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=2e-5)
        errors = {name: relative_error(found["weights"][name], w) for name, w in expected["weights"].items()}
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < 2e-5, (worst, errors[worst])


def test_zero_2_whose_gradients_are_too_large(workers_2: Workers) -> None:
    """Without liger_dist a step of ZeRO-2 is twice as long as it should be; with it the call is refused."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = workers_2.run(trained, 2, "as before", folder, 1)
        messages = workers_2.run(refused, 2, folder, False)
    whole = [torch.cat(halves, 1) for halves in zip(first["inputs"], second["inputs"], strict=True)]
    expected = trained_alone(whole)
    before = dict(make_model("llama", dtype=torch.float32).cpu().named_parameters())
    for name, after in expected["weights"].items():
        change = first["weights"][name].double() - before[name].detach()
        assert relative_error(change, 2 * (after - before[name].detach())) < 1e-4, name
    assert all("sp_size is 2 with a ZeRO stage below 3" in message for message in messages)


def test_packed_documents_are_refused(workers_2: Workers) -> None:
    """On all ranks, though the second document begins on the second rank's tokens alone."""
    with tempfile.TemporaryDirectory() as folder:
        for message in workers_2.run(refused, 3, folder, True):
            assert "position_ids start again within a sequence under sp_size" in message


def refused(stage: int, folder: str, packed: bool) -> str:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        trained(stage, "fuse", folder, 1, packed)
    return str(caught.value)


def trained(stage: int, how: str, folder: str, steps: int = STEPS, packed: bool = False) -> dict[str, Any]:
    import deepspeed
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from liger_dist.integrations.trainer import fuse

    forget_earlier_trainers()
    model: Any = make_model("llama", dtype=torch.float32).cpu()
    if how == "wrapped first":
        model = liger_dist.wrap(model, config=liger_dist.WrapConfig(varlen_attention=False))
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        with pretended_gpus():
            trainer = make_trainer(model, stage, folder, steps, Sequences(packed))
            if how == "fuse":
                fuse(trainer)
            inputs: list[torch.Tensor] = []

            def note(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
                inputs.append(torch.stack([kwargs["input_ids"][0], kwargs["shift_labels"][0]]).cpu())

            hook = trainer.model.register_forward_pre_hook(note, with_kwargs=True)
            with watched() as seen:
                trainer.train()
                hook.remove()
                eval_loss = trainer.evaluate()["eval_loss"]
        weights = {}
        for name, parameter in trainer.model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
                weights[name] = parameter.detach().clone()
        return {
            "inputs": inputs,
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "eval_loss": eval_loss,
            "evaluations": len(Sequences()) // dist.get_world_size(),
            "weights": weights,
            "fused": seen.fused_calls,
        }
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
        forget_earlier_trainers()
        forget_sequence_groups()


def make_trainer(model: Any, stage: int, folder: str, steps: int, data: Sequences) -> Any:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers import Trainer, TrainingArguments

    sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=steps,
            learning_rate=LEARNING_RATE,
            optim="sgd",
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            deepspeed=zero_settings({"stage": stage}) | dict.fromkeys(sizes, "auto"),
            parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler),
        ),
        train_dataset=data,
        eval_dataset=Sequences(),
    )


def forget_sequence_groups() -> None:
    """DeepSpeed makes them once in a process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.utils import groups

    groups.mpu = None
    for name in vars(parallel_state_sp):
        if name.startswith("_SEQUENCE"):
            setattr(parallel_state_sp, name, None)


def trained_alone(whole: list[torch.Tensor]) -> dict[str, Any]:
    """Steps on the same sequences, in fp64."""
    model: Any = make_model("llama", dtype=torch.float32).cpu().double()
    losses = []
    for step in range(len(whole) // MICRO_BATCHES):
        step_losses = []
        for ids, labels in whole[step * MICRO_BATCHES : (step + 1) * MICRO_BATCHES]:
            logits = model(input_ids=ids[None], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[0], labels)
            (loss / MICRO_BATCHES).backward()
            step_losses.append(float(loss.detach()))
        losses.append(sum(step_losses) / MICRO_BATCHES)
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
