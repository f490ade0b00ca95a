"""Lightning: ``self.model = wrap_in(self, model)`` in ``configure_model``, and for Fabric ``parallelize``."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.record import is_wrapped
from liger_dist.sharding.fsdp2.strategy import FSDP2
from liger_dist.wrap import wrap

DEFAULTS = FSDP2()


def wrap_in(
    module: LightningModule, model: nn.Module, config: WrapConfig | None = None, *, fsdp2: FSDP2 = DEFAULTS
) -> nn.Module:
    """Wraps ``model`` for the strategy of ``module``'s trainer: one device, DDP, FSDP (``FSDPStrategy``), FSDP2
    (``ModelParallelStrategy``, sharded here) or DeepSpeed. Lightning calls ``configure_model`` more than once; the
    second call does nothing.

    Args:
        fsdp2: options for ``ModelParallelStrategy``; its mesh is Lightning's.

    Raises:
        LigerDistError: see :func:`liger_dist.wrap`.
    """
    if is_wrapped(model):
        return model
    strategy = module.trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        assert module.device_mesh is not None
        return parallelize(model, module.device_mesh, config, fsdp2=fsdp2)
    wrap(model, "deepspeed" if isinstance(strategy, DeepSpeedStrategy) else "auto", config=config)
    return model


def parallelize(
    model: nn.Module, mesh: DeviceMesh, config: WrapConfig | None = None, *, fsdp2: FSDP2 = DEFAULTS
) -> nn.Module:
    """Wraps ``model`` by FSDP2 over the data-parallel axis of Lightning's mesh: the ``parallelize_fn`` of Fabric's
    ``ModelParallelStrategy``.

    Raises:
        LigerDistError: the mesh has a tensor-parallel axis of more than one rank.
    """
    if mesh["tensor_parallel"].size() > 1:
        raise LigerDistError(
            f"tensor_parallel_size is {mesh['tensor_parallel'].size()}; expected 1. For both axes make a mesh whose "
            "last one is named 'tp', and call liger_dist.wrap(model, 'fsdp2', mesh=...) yourself."
        )
    return wrap(model, replace(fsdp2, mesh=mesh["data_parallel"]), config=config)
