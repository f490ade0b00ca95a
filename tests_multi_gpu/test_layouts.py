"""Models that other frameworks sharded after ``wrap(model)``: FSDP1 and DeepSpeed ZeRO, exact or refused."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import make_batch, make_model, true_loss_sum
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy

import liger_dist
from liger_dist.sharding.devices import compute_device

LEARNING_RATE = 0.5


@dataclass(frozen=True, kw_only=True)
class FSDP1Cell:
    """One way to wrap a model in FSDP1."""

    strategy: str = "FULL_SHARD"
    own_unit: bool = False
    tied: bool = False
    use_orig_params: bool = True
    accumulation: int = 1
    cpu_offload: bool = False
    global_mean: bool = False
    frozen_backbone: bool = False

    def __str__(self) -> str:
        return " ".join(
            name if value is True else str(value)
            for name, value in vars(self).items()
            if value != getattr(FSDP1Cell(), name) or name == "strategy"
        ) + ("" if self.use_orig_params else " flat")


CELLS = [
    *(
        FSDP1Cell(strategy=s, own_unit=own, use_orig_params=orig)
        for s in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        for own in (False, True)
        for orig in (False, True)
    ),
    *(
        FSDP1Cell(strategy=s, tied=True, use_orig_params=o)
        for s in ("FULL_SHARD", "SHARD_GRAD_OP")
        for o in (False, True)
    ),
    *(FSDP1Cell(accumulation=2, own_unit=own, use_orig_params=o) for own in (False, True) for o in (False, True)),
    *(FSDP1Cell(cpu_offload=True, own_unit=own) for own in (False, True)),
    *(FSDP1Cell(global_mean=True, own_unit=own) for own in (False, True)),
    FSDP1Cell(frozen_backbone=True, own_unit=True),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_fsdp1_two_ranks(cell: FSDP1Cell, workers_2: Workers) -> None:
    if cell.cpu_offload and not torch.cuda.is_available():
        pytest.skip("FSDP1 pins offloaded memory, which needs an accelerator")
    assert_close(workers_2.run(run_fsdp1, cell), 1e-6)


@pytest.mark.parametrize("own_unit", [False, True])
def test_fsdp1_hybrid_four_ranks(own_unit: bool, workers_4: Workers) -> None:
    cell = FSDP1Cell(strategy="HYBRID_SHARD", own_unit=own_unit, global_mean=True)
    assert_close(workers_4.run(run_fsdp1, cell), 1e-6)


def assert_close(results: list[dict[str, float]], tolerance: float) -> None:
    for rank, errors in enumerate(results):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < tolerance, f"rank {rank}: {worst} is off by {errors[worst]:.2e}"


def wrap_in_fsdp1(model: nn.Module, cell: FSDP1Cell, **options: Any) -> FullyShardedDataParallel:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    units = {type(model.model.layers[0]), *({type(model.lm_head)} if cell.own_unit else ())}  # type: ignore[index,union-attr]
    if cell.strategy == "HYBRID_SHARD":
        options["device_mesh"] = init_device_mesh(compute_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[cell.strategy],
        auto_wrap_policy=ModuleWrapPolicy(units),
        use_orig_params=cell.use_orig_params,
        cpu_offload=CPUOffload(offload_params=cell.cpu_offload),
        device_id=compute_device(),
        **options,
    )


def run_fsdp1(cell: FSDP1Cell) -> dict[str, float]:
    """Two steps of SGD; a gradient is what the parameter moved by: FSDP1 shows gradients in few of its modes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model("llama", tied=cell.tied)
    if cell.frozen_backbone:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lm_head" in name)
    reference = copy.deepcopy(model)
    config = liger_dist.WrapConfig(token_mean="global" if cell.global_mean else "local")
    wrapped = wrap_in_fsdp1(liger_dist.wrap(model, config=config), cell)
    assert liger_dist.explain(model).adapter == "fsdp1"
    optimizers = [torch.optim.SGD(m.parameters(), lr=LEARNING_RATE) for m in (wrapped, reference)]
    errors: dict[str, float] = {}
    for step in range(2):
        before = whole_parameters(wrapped)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(cell.accumulation):
            batches = [make_batch(r, seed=10 * step + micro) for r in range(world_size)]
            is_last = micro == cell.accumulation - 1
            with nullcontext() if is_last else wrapped.no_sync():
                loss = wrapped(**batches[rank]).loss
                (loss / cell.accumulation).backward()
            sums = [true_loss_sum(reference, batch) for batch in batches]
            everyone = sum(count for _, count in sums)
            truths = [total * world_size / everyone if cell.global_mean else total / count for total, count in sums]
            (sum(truths) / world_size / cell.accumulation).backward()  # type: ignore[union-attr]
            errors[f"step {step} loss {micro}"] = float((loss - truths[rank]).abs())
        for optimizer in optimizers:
            optimizer.step()
        after = whole_parameters(wrapped)
        truth = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in truth.values())
        for name, gradient in truth.items():
            moved = (before[name] - after[name]) / LEARNING_RATE
            errors[f"step {step} gradient of {name}"] = float((moved - gradient).abs().max()) / largest
        for name, parameter in reference.named_parameters():
            errors[f"step {step} value of {name}"] = float((after[name] - parameter).abs().max())
    return errors


def whole_parameters(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
        return {name: parameter.detach().clone().to(compute_device()) for name, parameter in named.items()}


def test_fsdp1_bf16_keeps_the_loss_in_fp32(workers_2: Workers) -> None:
    for dtype, difference in workers_2.run(fsdp1_in_bf16):
        assert dtype == "torch.float32"
        assert difference < 0.1


def fsdp1_in_bf16() -> tuple[str, float]:
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrapped = wrap_in_fsdp1(liger_dist.wrap(model), FSDP1Cell(), mixed_precision=precision)
    batch = make_batch(dist.get_rank())
    loss = wrapped(**batch).loss
    loss.backward()
    total, count = true_loss_sum(reference, batch)
    return str(loss.dtype), float((loss - total / count).abs())


def test_fsdp1_evaluation_between_training_steps(workers_2: Workers) -> None:
    for errors in workers_2.run(evaluate_under_fsdp1):
        assert max(errors) < 1e-6


def evaluate_under_fsdp1() -> list[float]:
    model = make_model("llama")
    reference = copy.deepcopy(model)
    wrapped = wrap_in_fsdp1(liger_dist.wrap(model), FSDP1Cell(own_unit=True))
    batch = make_batch(dist.get_rank())
    errors = []
    total, count = true_loss_sum(reference, batch)
    for _ in range(2):
        wrapped(**batch).loss.backward()
        with torch.no_grad():
            errors.append(float((wrapped(**batch).loss - total / count).abs()))
            logits = wrapped(input_ids=batch["input_ids"]).logits
            errors.append(float((logits - reference(input_ids=batch["input_ids"]).logits).abs().max()))
    return errors


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1_refuses_a_tied_head_in_its_own_unit(use_orig_params: bool, workers_2: Workers) -> None:
    for message in workers_2.run(tied_in_own_unit, use_orig_params):
        assert "tied to the embedding" in message
        assert "leave the head out of the wrapping policy" in message


def tied_in_own_unit(use_orig_params: bool) -> str:
    cell = FSDP1Cell(own_unit=True, tied=True, use_orig_params=use_orig_params)
    wrapped = wrap_in_fsdp1(liger_dist.wrap(make_model("llama", tied=True)), cell)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        wrapped(**make_batch(0))
    return str(caught.value)


@dataclass(frozen=True, kw_only=True)
class ZeroCell:
    """One way to run a model under DeepSpeed."""

    stage: int
    tied: bool = False
    accumulation: int = 1
    bf16: bool = False
    plain_backward: bool = False
    offload: bool = False
    zero_init: bool = False

    def __str__(self) -> str:
        named = [name for name, value in vars(self).items() if value is True]
        return " ".join([f"stage {self.stage}", *named, *(["accumulation"] if self.accumulation > 1 else [])])


ZERO_CELLS = [
    *(ZeroCell(stage=stage, tied=tied) for stage in range(4) for tied in (False, True)),
    *(ZeroCell(stage=stage, accumulation=2) for stage in range(4)),
    *(ZeroCell(stage=stage, bf16=True) for stage in range(4)),
    *(ZeroCell(stage=stage, plain_backward=True) for stage in (1, 2, 3)),
    *(ZeroCell(stage=stage, offload=True) for stage in (1, 2, 3)),
    *(ZeroCell(stage=3, zero_init=True, tied=tied) for tied in (False, True)),
]


@pytest.mark.parametrize("cell", ZERO_CELLS, ids=str)
def test_zero_two_ranks(cell: ZeroCell, workers_2: Workers) -> None:
    pytest.importorskip("deepspeed")
    if torch.cuda.is_available() and cell.offload:
        pytest.skip("DeepSpeed's CPU optimiser is not built here")
    # bf16 is held to its own rounding: the unfused model in bf16 differs from fp64 by as much.
    assert_close(workers_2.run(run_zero, cell), 8e-2 if cell.bf16 else 1e-5)


def run_zero(cell: ZeroCell) -> dict[str, float]:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": cell.accumulation,
        "zero_optimization": {"stage": cell.stage},
        # Its default is 1.
        "gradient_clipping": 0.0,
        "bf16": {"enabled": cell.bf16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if cell.offload:
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    # An embedding row for padding is zeroed by code that cannot reach a partitioned weight.
    options: dict[str, Any] = {"tied": cell.tied, "padded": not cell.zero_init, "dtype": torch.float32}
    reference = make_model("llama", **options).double()
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=cell.zero_init):
        model = make_model("llama", **options)
    if cell.zero_init:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if rank == 0:
                for parameter, truth in zip(model.parameters(), reference.parameters(), strict=True):
                    parameter.data.copy_(truth.data)
    if cell.bf16:
        model.to(torch.bfloat16)
        reference = copy.deepcopy(model).double()
    liger_dist.wrap(model)
    # A large step would turn the rounding of bf16 into another model.
    learning_rate = 0.01 if cell.bf16 else LEARNING_RATE
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    assert liger_dist.explain(engine).adapter == ("zero3" if cell.stage == 3 else "replicated")
    true_optimizer = torch.optim.SGD(reference.parameters(), lr=learning_rate)
    errors: dict[str, float] = {}
    for step in range(2):
        true_optimizer.zero_grad()
        for micro in range(cell.accumulation):
            batches = [make_batch(r, seed=10 * step + micro) for r in range(world_size)]
            output = engine(**batches[rank])
            assert output.logits.shape[-1] == 0
            sums = [true_loss_sum(reference, batch) for batch in batches]
            truths = [total / count for total, count in sums]
            (sum(truths) / world_size / cell.accumulation).backward()  # type: ignore[union-attr]
            errors[f"step {step} loss {micro}"] = float((output.loss - truths[rank]).abs())
            if cell.plain_backward:
                output.loss.backward()
            else:
                engine.backward(output.loss)
            if micro == cell.accumulation - 1:
                truth = {name: p.grad for name, p in reference.named_parameters()}
                largest = max(float(g.abs().max()) for g in truth.values() if g is not None)
                for name, parameter in model.named_parameters():
                    gradient = safe_get_full_grad(parameter)
                    assert gradient is not None, name
                    assert truth[name] is not None
                    errors[f"step {step} gradient of {name}"] = (
                        float((gradient.double() - truth[name]).abs().max()) / largest
                    )
            engine.step()
        true_optimizer.step()
    engine.destroy()
    return errors
