"""OpenRLHF: ``python -m liger_dist.integrations.openrlhf …`` instead of ``python -m openrlhf.cli.train_ppo_ray …``.

Policies and references of PPO (also REINFORCE++, RLOO, GRPO) are made by the class ``Actor``. :func:`patch` replaces it
in the two modules that make them by :class:`.openrlhf_actor.FusedActor`, in every process: the command has Ray call it
when a worker starts. SFT, DPO, reward models and critics stay.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError

from .startup.after_import import AfterImport

MAKERS = ("openrlhf.trainer.ray.launcher", "openrlhf.trainer.ray.ppo_actor")
"""modules that make references and policies"""
NAME = "liger_dist.integrations.openrlhf"
"""of this module, also where it runs as a program"""
TRAINING = "openrlhf.cli.train_ppo_ray"


def patch(config: WrapConfig | None = None) -> None:
    """Has OpenRLHF make policies and references whose log-probabilities need no logits, in this process, from now on.
    Imports nothing of OpenRLHF before it is used.

    Raises:
        LigerDistError: another release of OpenRLHF; when it is imported.
    """
    for name in MAKERS:
        action = functools.partial(_replace, name, WrapConfig() if config is None else config)
        if name in sys.modules:
            action()
        else:
            sys.meta_path.insert(0, AfterImport(name, action))


def _replace(name: str, config: WrapConfig) -> None:
    from .openrlhf_actor import TRIED, make_class

    module: Any = sys.modules[name]
    if not hasattr(module, "Actor"):
        raise LigerDistError(
            f"{name} of OpenRLHF has no Actor; expected one, as in {TRIED}, which this release of liger_dist was tried "
            f"with. Install {TRIED}, or train without liger_dist."
        )
    module.Actor = make_class(config)


def train_ppo_ray(config: WrapConfig | None = None) -> None:
    """Runs ``openrlhf.cli.train_ppo_ray`` with the arguments of this process; all of its workers call :func:`patch`.

    Raises:
        LigerDistError: Ray has been initialized already.
    """
    from .ray_workers import run_patched

    run_patched(TRAINING, NAME, config)


if __name__ == "__main__":
    train_ppo_ray()
