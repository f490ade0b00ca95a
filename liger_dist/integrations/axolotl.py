"""Axolotl: ``plugins: [liger_dist.integrations.axolotl.LigerDistPlugin]`` in its YAML."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from liger_dist.errors import LigerDistError

from .deepspeed_section import Section
from .trainer import fuse

OTHER_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")
OTHER_LOSSES = (
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "use_eaft",
    "orpo_alpha",
)


class LigerDistArgs(BaseModel):
    """The section of Axolotl's configuration, with the keys of a DeepSpeed JSON's."""

    liger_dist: Section | None = None


class LigerDistPlugin(BasePlugin):  # type: ignore[misc]
    """The model of Axolotl's trainer computes its loss fused, under DDP, FSDP1, FSDP2 or DeepSpeed."""

    def get_input_args(self) -> str:
        return f"{__name__}.{LigerDistArgs.__name__}"

    def register(self, cfg: dict[str, Any]) -> None:
        """
        Raises:
            LigerDistError: the configuration lets other code compute the loss. No model has been loaded then.
        """
        if (cfg.get("liger_dist") or {}).get("enabled", True):
            for objection in _objections(cfg):
                raise LigerDistError(f"{objection}, or set liger_dist.enabled to false.")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        section = Section.model_validate(dict(cfg.liger_dist or {}))
        if section.enabled:
            fuse(trainer, section.wrap_config())


def _objections(cfg: dict[str, Any]) -> list[str]:
    found = [
        f"plugins has {plugin!r}, which replaces the model's loss; leave it out"
        for plugin in cfg.get("plugins") or ()
        if str(plugin).rsplit(".", 1)[-1] in OTHER_PLUGINS
    ]
    found += [f"{key} is {cfg[key]!r} and computes another loss; leave it out" for key in OTHER_LOSSES if cfg.get(key)]
    if cfg.get("rl"):
        found.append(f"rl is {cfg['rl']!r}, whose loss is TRL's; train without this plugin")
    return found
