"""The ways a model is stored in the conformance suite: each is one :class:`Session`, as a training loop sees it."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from cells import LEARNING_RATE, Cell
from models import full, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor

import liger_dist
from liger_dist.sharding.base import Strategy
from liger_dist.sharding.process_groups import compute_device


class Session:
    """A wrapped model, its optimiser, and which tokens this process sees."""

    def __init__(self, cell: Cell, inner: nn.Module) -> None:
        self.cell = cell
        self.inner = inner
        self.root: nn.Module = inner
        self.data_rank, self.data_world = _rank_and_world()
        self.shard()
        # Torch's updates of many tensors at once do not mix plain ones with DTensors, or DTensors of two meshes.
        by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in self.root.parameters():
            by_mesh.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        groups = [{"params": parameters} for parameters in by_mesh.values()]
        self.optimizer: Any = torch.optim.SGD(groups, lr=LEARNING_RATE)

    def wrap(self, strategy: str | Strategy) -> Any:
        if self.cell.used.checkpointing:
            self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        return liger_dist.wrap(self.inner, strategy, config=liger_dist.WrapConfig(**self.cell.options))

    def shard(self) -> None:
        self.root = self.wrap("none")

    def without_reduction(self) -> AbstractContextManager[Any]:
        """Around the micro-batches of an accumulation before the last."""
        return nullcontext()

    def forward(self, batch: dict[str, Tensor], *, outside: bool = False, **extra: Any) -> Any:
        return (self.inner if outside else self.root)(**batch, **extra)

    def whole_weights(self) -> AbstractContextManager[Any]:
        """What the engine asks for around ``generate``."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> dict[str, Tensor]:
        """Steps the optimiser; every parameter's whole gradient, by its name in the inner model."""
        gradients = self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients

    def gradients(self) -> dict[str, Tensor]:
        return {name: full(p.grad) for name, p in self.inner.named_parameters() if p.grad is not None}

    def parameters(self) -> dict[str, Tensor]:
        """Packed weights of 4 bits are frozen, and left out."""
        is_left_out = bool(self.cell.built.four_bits)
        return {name: full(p) for name, p in self.inner.named_parameters() if p.requires_grad or not is_left_out}

    def close(self) -> None:
        pass


def _rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class DDP(Session):
    def shard(self) -> None:
        if self.cell.layout.get("by_others"):
            self.root = nn.parallel.DistributedDataParallel(self.wrap("auto"))
        elif self.cell.used.unused_parameters:
            self.root = nn.parallel.DistributedDataParallel(self.wrap("auto"), find_unused_parameters=True)
        else:
            self.root = self.wrap("ddp")

    def without_reduction(self) -> AbstractContextManager[Any]:
        assert isinstance(self.root, nn.parallel.DistributedDataParallel)
        return self.root.no_sync()


@functools.cache
def _grid(*names: str) -> DeviceMesh:
    return init_device_mesh(compute_device().type, (2, 2), mesh_dim_names=names)


class FSDP1(Session):
    """A gradient is what SGD moved a parameter by: FSDP1 shows gradients in few of its modes."""

    def shard(self) -> None:
        layout = self.cell.layout
        strategy = layout.get("sharding", "FULL_SHARD")
        mesh = _grid("replicate", "shard") if strategy.startswith("HYBRID") else None
        if not self.cell.by_others:
            options: dict[str, Any] = {
                "cpu_offload": bool(layout.get("offload")),
                "frozen": layout.get("frozen", "shard"),
            }
            if strategy == "SHARD_GRAD_OP":
                options["reshard_after_forward"] = False
            self.root = self.wrap(liger_dist.FSDP1(mesh=mesh, **_precision(layout), **options))
            return
        model = self.wrap("auto")
        units = {*_layers(model)}
        if layout.get("own_unit"):
            units |= {*_head_modules(model, self.cell)}
        precision = _precision(layout)
        self.root = FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=CustomPolicy(lambda module: module in units),
            use_orig_params=layout.get("use_orig_params", True),
            cpu_offload=CPUOffload(offload_params=bool(layout.get("offload"))),
            mixed_precision=MixedPrecision(**precision) if precision.get("param_dtype") else None,
            device_mesh=mesh,
            device_id=compute_device(),
        )

    def without_reduction(self) -> AbstractContextManager[Any]:
        assert isinstance(self.root, FullyShardedDataParallel)
        return self.root.no_sync()

    def whole_weights(self) -> AbstractContextManager[Any]:
        if not self.cell.by_others:
            return nullcontext()  # redirected through the root
        return FullyShardedDataParallel.summon_full_params(self.root, writeback=False, recurse=False)

    def step(self) -> dict[str, Tensor]:
        before = self.parameters()
        self.optimizer.step()
        self.optimizer.zero_grad()
        after = self.parameters()
        return {name: (before[name] - after[name]) / LEARNING_RATE for name in before}

    def parameters(self) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(self.root):
            named = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in self.root.named_parameters()}
            return {name: p.detach().clone().to(compute_device()) for name, p in named.items()}


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def _precision(layout: Any) -> dict[str, Any]:
    if layout.get("bf16"):
        return {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    return {"reduce_dtype": torch.float64}


class FSDP2(Session):
    def shard(self) -> None:
        layout = self.cell.layout
        axes = layout.get("axes")
        mesh = _grid(*axes) if axes else None
        if axes and axes[-1] == "tp":
            assert mesh is not None
            self.data_rank, self.data_world = mesh.get_local_rank(axes[0]), 2
        reshard = layout.get("reshard", True)
        if not layout.get("head"):
            strategy = liger_dist.FSDP2(
                mesh=mesh,
                reshard_after_forward=reshard,
                cpu_offload=bool(layout.get("offload")),
                lm_head="vocab_parallel" if layout.get("rows") and self.cell.fused else "gather",
                frozen=layout.get("frozen", "shard"),
                layers_per_unit=layout.get("units", "auto"),
                expert_parallel=layout.get("ep", 1),
                **_precision(layout),
            )
            self.root = self.wrap(strategy)
            return
        model = self.wrap("auto")
        options = {
            "mesh": mesh,
            "reshard_after_forward": reshard,
            "mp_policy": MixedPrecisionPolicy(**_precision(layout)) if layout.get("bf16") else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy(pin_memory=False) if layout.get("offload") else OffloadPolicy(),
        }
        for layer in _layers(model):
            fully_shard(layer, **options)
        heads = _head_modules(model, self.cell)
        if layout["head"] == "tail":
            fully_shard([model.get_submodule("model.norm"), *heads], **options)
        elif layout["head"] == "own":
            for head in heads:
                fully_shard(head, **options)
        fully_shard(model, **options)
        self.root = model

    def without_reduction(self) -> AbstractContextManager[Any]:
        return self._reduction(False)

    @contextmanager
    def _reduction(self, is_on: bool) -> Iterator[None]:
        self.root.set_requires_gradient_sync(is_on)  # type: ignore[operator]
        yield
        self.root.set_requires_gradient_sync(True)  # type: ignore[operator]


def _layers(model: nn.Module) -> list[nn.Module]:
    """What the model says must not be split."""
    return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]  # type: ignore[operator]


def _head_modules(model: nn.Module, cell: Cell) -> list[nn.Module]:
    """The parts of lm_head that become separate FSDP units. DoRA's parts read each other's weights, so it is one."""
    modules = [(name, module) for name, module in model.named_modules() if "lm_head" in name]
    if cell.built.lora == "DoRA":
        return [modules[0][1]]
    return [module for _, module in modules if _is_linear(module)]


class TensorParallel(Session):
    """All processes see the tokens of the first."""

    def shard(self) -> None:
        self.data_rank, self.data_world = 0, 1
        plan = self.cell.layout.get("plan")
        if plan is None:
            self.root = self.wrap("tp")
            return
        if plan == "transformers":
            self.inner = loaded(self.inner, tp_plan="auto")
            self.root = self.wrap("tp")
        else:
            self.root = self.wrap("auto")
            mesh = init_device_mesh(compute_device().type, (dist.get_world_size(),), mesh_dim_names=("tp",))
            parallelize_sequences(self.inner, mesh)


class ShardedByTransformers(Session):
    """Loaded with a ``DistributedConfig``: experts on the ranks of a group, all else sharded or replicated."""

    def shard(self) -> None:
        from transformers.distributed import DistributedConfig

        sizes = dict(self.cell.layout)
        ranks_of_a_batch = sizes.get("tp_size", 1)
        self.data_rank, self.data_world = self.data_rank // ranks_of_a_batch, self.data_world // ranks_of_a_batch
        if "ep_implementation" in sizes:
            liger_dist.register_expert_parallelism()
        if "tp_size" in sizes:
            sizes["tp_plan"] = {"lm_head": "replicate", "model.embed_tokens": "replicate"}
        options = {"distributed_config": DistributedConfig(**sizes), "experts_implementation": "eager"}
        self.inner = loaded(self.inner, **options)
        self.root = self.wrap("auto")


def loaded(model: Any, **options: Any) -> nn.Module:
    """The same weights, read from a checkpoint by transformers."""
    from transformers import AutoModelForCausalLM

    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, src=0)
    if dist.get_rank() == 0:
        model.save_pretrained(folders[0])
    dist.barrier()
    found = AutoModelForCausalLM.from_pretrained(
        folders[0], dtype=next(model.parameters()).dtype, attn_implementation="eager", **options
    )
    assert isinstance(found, nn.Module)
    return found


def parallelize_sequences(model: Any, mesh: DeviceMesh) -> None:
    """The final norm works on its part of each sequence, as sequence parallelism has it, and the head gathers."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        SequenceParallel,
        parallelize_module,
    )

    parallelize_module(
        model.model,
        mesh,
        {"norm": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))},
    )
    parallelize_module(model, mesh, {"model.norm": SequenceParallel()})
    parallelize_module(model, mesh, {"lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})


class Zero(Session):
    """DeepSpeed in fp32, or bf16 with its own fp32 masters."""

    def shard(self) -> None:
        import deepspeed

        layout = self.cell.layout
        if layout.get("zero_init"):
            self.inner = built_partitioned(self.inner, tied=self.cell.tied, settings=zero_settings(layout))
        model = self.wrap("deepspeed")
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        self.root, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_settings(layout))

    def backward(self, loss: Tensor) -> None:
        if self.cell.layout.get("plain_backward"):
            loss.backward()
        else:
            self.root.backward(loss)  # type: ignore[operator]
        if not self.root.is_gradient_accumulation_boundary():  # type: ignore[operator]
            self.root.step()  # type: ignore[operator]

    def step(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_grad

        gradients = {n: safe_get_full_grad(p) for n, p in self.inner.named_parameters() if p.requires_grad}
        self.root.step()  # type: ignore[operator]
        return {name: gradient.to(compute_device()) for name, gradient in gradients.items() if gradient is not None}

    def parameters(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        wholes = {n: safe_get_full_fp32_param(p) for n, p in self.inner.named_parameters() if p.requires_grad}
        return {name: whole.to(compute_device()) for name, whole in wholes.items() if whole is not None}

    def close(self) -> None:
        self.root.destroy()  # type: ignore[operator]


def built_partitioned(model: nn.Module, *, tied: bool, settings: dict[str, Any]) -> nn.Module:
    """The same weights in a model that was partitioned while it was built."""
    import deepspeed

    with deepspeed.zero.Init(config_dict_or_path=settings):
        # An embedding row for padding is zeroed by code that cannot reach a partitioned weight.
        partitioned = make_model("llama", tied=tied, padded=False, dtype=torch.float32)
    with deepspeed.zero.GatheredParameters(list(partitioned.parameters()), modifier_rank=0):
        if dist.get_rank() == 0:
            for parameter, truth in zip(partitioned.parameters(), model.parameters(), strict=True):
                parameter.data.copy_(truth.data)
    return partitioned


def zero_settings(layout: Any) -> dict[str, Any]:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])
    # Otherwise DeepSpeed keeps all parameters of a tiny model whole.
    zero: dict[str, Any] = {"stage": layout["stage"], "stage3_param_persistence_threshold": 0}
    if layout.get("quantized_gradients"):
        zero["zero_quantized_gradients"] = True
    if layout.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": layout.get("accumulation", 1),
        "zero_optimization": zero,
        # Its default is 1.
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bool(layout.get("bf16"))},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


SESSIONS: dict[str, type[Session]] = {
    "none": Session,
    "ddp": DDP,
    "fsdp1": FSDP1,
    "fsdp2": FSDP2,
    "tp": TensorParallel,
    "zero": Zero,
    "transformers": ShardedByTransformers,
}
