"""OpenRLHF: ``python -m liger_dist.integrations.openrlhf …`` instead of ``python -m openrlhf.cli.train_ppo_ray …``.

Policies and references of PPO (also REINFORCE++, RLOO, GRPO) are made by the class ``Actor``. :func:`patch` sets it to
:class:`.openrlhf_actor.FusedActor` in the two modules that make them, in every process: the command has Ray call it
when a worker starts. SFT, DPO, reward models and critics are not patched.
"""

from __future__ import annotations

from torch import nn

from liger_dist.config import WrapConfig

from .patches import patch_class

NAME = "liger_dist.integrations.openrlhf"
"""of this module, also where it runs as a program"""
MAKERS = ("openrlhf.trainer.ray.launcher", "openrlhf.trainer.ray.ppo_actor")
"""modules that make references and policies"""
TRAINING = "openrlhf.cli.train_ppo_ray"


def patch(config: WrapConfig | None = None) -> None:
    """Has OpenRLHF make policies and references whose log-probabilities need no logits, in this process, from now on.
    Imports nothing of OpenRLHF before it is used.

    Raises:
        LigerDistError: OpenRLHF's class is missing or has other parameters; when it is imported.
    """

    def make() -> type[nn.Module]:
        # It imports DeepSpeed, which processes of vLLM must not.
        from .openrlhf_actor import make_class

        return make_class(config)

    for name in MAKERS:
        patch_class(name, "Actor", make, host="openrlhf")


def train_ppo_ray(config: WrapConfig | None = None) -> None:
    """Runs ``openrlhf.cli.train_ppo_ray`` with the arguments of this process; all of its workers call :func:`patch`.

    Raises:
        LigerDistError: Ray has been initialized already.
    """
    from .ray_workers import run_patched

    run_patched(TRAINING, NAME, config)


if __name__ == "__main__":
    train_ppo_ray()
