"""Clips gradients of several meshes, layouts and dtypes: the norm and the gradients of one process."""

from __future__ import annotations

import inspect
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import make_batch, true_loss_sum
from test_passes import FSDP1_OPTIONS, STRATEGIES, ZERO, build, initialized, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import liger_dist
from liger_dist.sharding.process_groups import compute_device


def clipped(rank: int, norm_type: float) -> None:
    """Norms over two meshes and a plain parameter, against one process."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flat = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    # Of the last two, one rank has an empty shard, and every rank all.
    full = [on_device.randn(*shape) for shape in ((8, 6), (12, 4), (5,), (7, 3), (3, 2), (4,))]
    grads = [torch.randn_like(value) * 3 for value in full]
    sharded: list[Any] = [
        distribute_tensor(full[0], grid, [Shard(0), Shard(1)]),
        distribute_tensor(full[1], flat, [Shard(0)]),
        full[2].clone(),
        distribute_tensor(full[3], flat, [Shard(0)]),
        distribute_tensor(full[4], flat, [Shard(0)]),
        distribute_tensor(full[5], grid, [Replicate(), Replicate()]),
    ]
    parameters = [nn.Parameter(value) for value in sharded]
    for parameter, gradient in zip(parameters, grads, strict=True):
        if isinstance(parameter, DTensor):
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = gradient.clone()
    plain = [nn.Parameter(value.clone()) for value in full]
    for parameter, gradient in zip(plain, grads, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(plain, 1.5, norm_type)
    assert torch.allclose(liger_dist.clip_grad_norm_(parameters, 0, norm_type), expected)
    assert torch.allclose(liger_dist.clip_grad_norm_(parameters, 1.5, norm_type), expected)
    for parameter, other in zip(parameters, plain, strict=True):
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(found, other.grad)
    assert torch.equal(liger_dist.clip_grad_norm_([], 1.0), on_device.zeros(()))
    gradient = parameters[2].grad
    assert gradient is not None
    gradient[0] = float("inf")
    kept = [p.grad.to_local().clone() for p in parameters if isinstance(p.grad, DTensor)]
    assert not liger_dist.clip_grad_norm_(parameters, 1.0, norm_type).isfinite()
    assert all(
        torch.equal(a, p.grad.to_local()) for a, p in zip(kept, [p for p in parameters if isinstance(p.grad, DTensor)])
    )


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_adds_up_norms_on_two_meshes(norm_type: float, workers_4: Workers) -> None:
    workers_4.run(clipped, 0, norm_type)


@pytest.mark.smoke
def test_clipping_refuses_what_it_cannot_add_up() -> None:
    parameter = nn.Parameter(on_device.zeros(2))
    with pytest.raises(liger_dist.LigerDistError, match="max_norm is -1"):
        liger_dist.clip_grad_norm_([parameter], -1)
    parameter.ds_id, parameter.ds_shape = 0, parameter.shape  # type: ignore[attr-defined]
    with pytest.raises(liger_dist.LigerDistError, match="DeepSpeed's, whose engine clips"):
        liger_dist.clip_grad_norm_([parameter], 1.0)


def with_gradients() -> nn.Linear:
    layer = nn.Linear(3, 2).to(compute_device())
    layer.weight.grad, layer.bias.grad = torch.ones_like(layer.weight), torch.ones_like(layer.bias)
    return layer


def test_the_signature_is_that_of_torch() -> None:
    """And a keyword of pipelines, which a call of torch's function does not have."""
    own = inspect.signature(torch.nn.utils.clip_grad_norm_).parameters
    ours = dict(inspect.signature(liger_dist.clip_grad_norm_).parameters)
    group = ours.pop("group")
    assert (group.kind, group.default) == (inspect.Parameter.KEYWORD_ONLY, None)
    assert list(ours) == list(own)
    assert [one.default for one in ours.values()] == [one.default for one in own.values()]


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("given", ["parameters", "named_parameters", "module"])
def test_what_may_be_clipped(given: str, foreach: bool | None) -> None:
    layer, reference = with_gradients(), with_gradients()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    found = layer if given == "module" else getattr(layer, given)()
    assert torch.equal(liger_dist.clip_grad_norm_(found, 1.0, foreach=foreach), norm)
    for parameter, true in zip(layer.parameters(), reference.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, true.grad)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_raises_if_asked(value: float) -> None:
    layer = with_gradients()
    assert layer.bias.grad is not None
    layer.bias.grad[0] = value
    before = layer.bias.grad.clone()
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        liger_dist.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
    assert torch.equal(layer.bias.grad.nan_to_num(), before.nan_to_num())
    assert not liger_dist.clip_grad_norm_(layer, 1.0).isfinite()
    layer.bias.grad[0] = 1.0
    assert liger_dist.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True).isfinite()


def test_gradients_of_several_dtypes() -> None:
    """Against fp64; each is multiplied by a factor of its dtype."""
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    parameters = [nn.Parameter(on_device.zeros(50, 3, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = on_device.randn(50, 3).to(parameter.dtype)
    true = [parameter.grad.double().clone() for parameter in parameters if parameter.grad is not None]
    norm = torch.cat(true).norm()
    assert float(liger_dist.clip_grad_norm_(parameters, 1.0)) == pytest.approx(float(norm), rel=1e-2)
    for parameter, gradient in zip(parameters, true, strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == parameter.dtype
        tolerance = 2e-2 if parameter.dtype.itemsize == 2 else 4e-3
        torch.testing.assert_close(parameter.grad.double(), gradient / norm, rtol=tolerance, atol=1e-6)


def test_a_norm_that_fp16_cannot_hold() -> None:
    """The factor of fp16 gradients is that of the largest fp16 number, not 0."""
    large, small = nn.Parameter(on_device.zeros(1)), nn.Parameter(on_device.zeros(1, dtype=torch.float16))
    large.grad, small.grad = on_device.tensor([1e6]), on_device.tensor([1.0]).half()
    assert float(liger_dist.clip_grad_norm_([large, small], 1e5)) == pytest.approx(1e6)
    assert large.grad is not None
    assert small.grad is not None
    assert float(large.grad) == pytest.approx(1e5)
    assert float(small.grad) > 0.0


# --- sharded models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["root", "inner module", "parameters", "named_parameters"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_norm_of_a_sharded_model_is_that_of_one_process_or_refused(
    strategy: str, given: str, workers_2: Workers
) -> None:
    """Flat shards of FSDP1, and gradients that an engine keeps, have no norm on one rank."""
    is_refused = (strategy in FSDP1_OPTIONS and given != "root") or strategy in ZERO
    for found, true in workers_2.run(norms, strategy, given):
        if is_refused:
            assert ("DeepSpeed" if strategy in ZERO else "FullyShardedDataParallel module") in str(found)
        else:
            assert found == pytest.approx(true, rel=1e-5 if strategy in FSDP1_OPTIONS else 1e-9)


def norms(strategy: str, given: str) -> tuple[float | str, float]:
    model, reference = build("LoRA" if strategy.endswith("frozen replicated") else "full", strategy)
    # FSDP1's own method has no norms of fp64.
    root = shard(model.float() if strategy in FSDP1_OPTIONS else model, strategy)
    if strategy in ZERO:
        root = initialized(root, torch.optim.SGD(root.parameters(), lr=0.1), ZERO[strategy])
    loss = root(**make_batch(dist.get_rank())).loss
    root.backward(loss) if strategy in ZERO else loss.backward()
    for rank in range(2):
        total, count = true_loss_sum(reference, make_batch(rank))
        (total / count / 2).backward()
    true = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
    argument: Any = getattr(root, "module", root) if given == "inner module" else root
    if given.endswith("parameters"):
        argument = getattr(root, given)()
    try:
        return float(liger_dist.clip_grad_norm_(argument, 1.0)), true
    except liger_dist.LigerDistError as error:
        return str(error), true
    finally:
        if strategy in ZERO:
            root.destroy()
