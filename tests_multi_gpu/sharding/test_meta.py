"""Models on the meta device: sharded first, initialised afterwards, with the values of one process. And what bf16
compute leaves in fp32."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from full_tensors import full_parameters, own_name
from harness import Workers
from models import full, make_batch, make_config, make_model, true_loss_sum
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import liger_dist
from liger_dist.sharding.process_groups import compute_device

GRID = ("shard", "tp")


@pytest.mark.cover("values")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [("ddp", None), ("fsdp1", None), ("fsdp2", None), ("fsdp2", (2, 1)), ("tp", None)],
)
def test_a_meta_model_gets_the_values_of_one_process(
    strategy: str, mesh: tuple[int, ...] | None, tied: bool, workers_2: Workers
) -> None:
    expected = {name: tensor.cpu() for name, tensor in built_on_meta("none", None, tied).items()}
    assert_same_parameters(workers_2.run(built_on_meta, strategy, mesh, tied), expected)


@pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="GPUs draw other numbers than the CPUs of four ranks")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_meta_model_on_a_grid(tied: bool, workers_4: Workers) -> None:
    expected = {name: tensor.cpu() for name, tensor in built_on_meta("none", None, tied).items()}
    assert_same_parameters(workers_4.run(built_on_meta, "fsdp2", GRID, tied), expected)


def test_a_meta_model_may_be_wrapped_where_it_is_made() -> None:
    """Inside ``with torch.device("meta")``, as outside."""
    assert_same_parameters(
        [built_on_meta("none", None, tied=False, inside=True)], built_on_meta("none", None, tied=False)
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "tp"])
def test_all_ranks_get_the_values_of_rank_0_if_only_it_has_any(strategy: str, tied: bool, workers_2: Workers) -> None:
    expected = {name: tensor.cpu() for name, tensor in make_model("llama", tied=tied).state_dict().items()}
    for found, buffers_differ in workers_2.run(wrapped_from_rank_0, strategy, tied):
        assert not buffers_differ
        assert found.keys() <= expected.keys()
        assert all(torch.equal(value.cpu(), expected[name]) for name, value in found.items())


def wrapped_from_rank_0(strategy: str, tied: bool) -> tuple[dict[str, Tensor], bool]:
    """Every full parameter, and whether a buffer is not the one that the model's code computes."""
    truth = make_model("llama", tied=tied)
    with nullcontext() if dist.get_rank() == 0 else torch.device("meta"):
        model = LlamaForCausalLM(make_config("llama", tied=tied)).double()
    if dist.get_rank() == 0:
        model.load_state_dict(truth.state_dict())
        model.to(truth.device)  # type: ignore[arg-type]
    root = liger_dist.wrap(model, strategy)
    assert float(root(**make_batch(0 if strategy == "tp" else dist.get_rank())).loss) > 0
    buffers = dict(truth.named_buffers())
    differ = any(not torch.allclose(b.double(), buffers[own_name(name)].double()) for name, b in root.named_buffers())
    return full_parameters(root), differ


@pytest.mark.parametrize("on_meta", [0, 1])
def test_other_ranks_on_the_meta_device_are_refused(on_meta: int, workers_4: Workers) -> None:
    for message in workers_4.run(refused_on_meta, on_meta):
        assert f"the model is on the meta device on the ranks [{on_meta}] alone" in message


def refused_on_meta(on_meta: int) -> str:
    with torch.device("meta") if dist.get_rank() == on_meta else nullcontext():
        model = LlamaForCausalLM(make_config("llama"))
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, "fsdp2")
    return str(caught.value)


def test_ranks_whose_models_differ_in_dtype_are_refused(workers_2: Workers) -> None:
    for message in workers_2.run(refused_for_dtypes):
        assert "ranks call wrap with different settings" in message


def refused_for_dtypes() -> str:
    model = make_model("llama", dtype=torch.float32 if dist.get_rank() == 0 else torch.bfloat16)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.wrap(model, "fsdp2")
    return str(caught.value)


def assert_same_parameters(results: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for parameters in results:
        assert parameters.keys() == expected.keys()
        for name, values in parameters.items():
            assert torch.isfinite(values).all(), name
            # A loss over row shards is summed in another order.
            tolerance = 1e-6 if name == "loss" else 0.0
            assert torch.allclose(values, expected[name], rtol=tolerance, atol=0.0), name


def built_on_meta(
    strategy: str, mesh: tuple[Any, ...] | None, tied: bool, *, inside: bool = False
) -> dict[str, Tensor]:
    """All parameters and buffers of a model that was built on the meta device, wrapped and run once."""
    from models import make_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config("gemma2", tied=tied))
    # Ranks disagree on purpose: rank 0's generator decides.
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    grid = init_device_mesh(compute_device().type, (2, 2), mesh_dim_names=GRID) if mesh == GRID else mesh
    with torch.device("meta") if inside else nullcontext():
        wrapped: nn.Module = liger_dist.wrap(model, strategy, mesh=grid)  # type: ignore[arg-type]
    loss = wrapped(**make_batch(0)).loss
    loss.backward()
    inner = wrapped.module if isinstance(wrapped, DistributedDataParallel | FullyShardedDataParallel) else wrapped
    assert isinstance(inner, nn.Module)
    if strategy == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(wrapped):
            tensors = [*inner.named_parameters(), *inner.named_buffers()]
            values = {
                name.replace("_fsdp_wrapped_module.", ""): tensor.detach().cpu().clone() for name, tensor in tensors
            }
        return values | {"loss": loss.detach().cpu()}
    values = {name: full(tensor).cpu() for name, tensor in [*inner.named_parameters(), *inner.named_buffers()]}
    return values | {"loss": loss.detach().cpu()}


def test_bf16_compute_with_fp32_masters(workers_2: Workers) -> None:
    for dtypes in workers_2.run(precision_of_a_step):
        assert dtypes == {
            "loss": "torch.float32",
            "master": "torch.float32",
            "gradient": "torch.float32",
            "close": "True",
        }


def precision_of_a_step() -> dict[str, str]:
    model = make_model("llama", dtype=torch.float32)
    reference = copy.deepcopy(model)
    wrapped = liger_dist.wrap(model, liger_dist.FSDP2(param_dtype=torch.bfloat16))
    batch = make_batch(dist.get_rank())
    loss = wrapped(**batch).loss
    loss.backward()
    total, count = true_loss_sum(reference, batch)
    head = wrapped.lm_head.weight
    return {
        "loss": str(loss.dtype),
        "master": str(head.dtype),
        "gradient": str(head.grad.dtype),
        "close": str(bool(abs(loss - total / count) < 0.1)),
    }


class WithFlags(LlamaForCausalLM):
    """Has a mask that its own rule may leave out."""

    writes = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("flags", on_device.arange(4) % 2 == 0)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self:
            # A rule that writes into a child.
            nn.init.normal_(self.model.layers[0].mlp.down_proj.weight)
        if module is self and self.writes:
            self.flags.copy_(on_device.arange(4) % 2 == 0)


def on_meta(writes: bool) -> Any:
    with torch.device("meta"):
        model = WithFlags(make_config("llama"))
    model.writes = writes
    return model


@pytest.mark.smoke
def test_bool_buffers_of_a_meta_model_get_their_values_or_refuse() -> None:
    torch.manual_seed(3)
    model = on_meta(True)
    liger_dist.wrap(model, "none")
    torch.manual_seed(3)
    again = on_meta(True)
    again.flags = None
    again.writes = False
    liger_dist.wrap(again, "none")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert model.flags.tolist() == [True, False, True, False]
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
    with pytest.raises(liger_dist.LigerDistError, match=r"leaves flags without values"):
        liger_dist.wrap(on_meta(False), "none")
