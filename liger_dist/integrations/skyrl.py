"""SkyRL: ``python -m liger_dist.integrations.skyrl skyrl.train.entrypoints.main_base …`` instead of ``python -m
skyrl.train.entrypoints.main_base …``.

The FSDP workers of policies and references make their models by the class ``HFModelWrapper``. :func:`patch` sets it
there to :class:`.skyrl_model.FusedModelWrapper`, in every process: the command has Ray call it when a worker starts.
Critics and Megatron's workers are not patched.
"""

from __future__ import annotations

import sys

from torch import nn

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError

from .patches import patch_class

NAME = "liger_dist.integrations.skyrl"
"""of this module, also where it runs as a program"""
MAKER = "skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker"
"""module that makes policies and references"""


def patch(config: WrapConfig | None = None) -> None:
    """Has SkyRL make policies and references whose log-probabilities need no logits, in this process, from now on.
    Imports nothing of SkyRL before it is used.

    Raises:
        LigerDistError: SkyRL's class is missing or has other parameters; when it is imported.
    """

    def make() -> type[nn.Module]:
        from .skyrl_model import make_class

        return make_class(config)

    patch_class(MAKER, "HFModelWrapper", make, host="skyrl")


def main() -> None:
    """Runs the module that the first argument names, with the remaining arguments.

    Raises:
        LigerDistError: there is no first argument.
    """
    from .ray_workers import run_patched

    if len(sys.argv) < 2:
        raise LigerDistError(
            f"python -m {NAME} was called without arguments; expected the module that trains, such as "
            "skyrl.train.entrypoints.main_base, and its arguments."
        )
    run_patched(sys.argv.pop(1), NAME)


if __name__ == "__main__":
    main()
