"""Axolotl: ``plugins: [liger_dist.integrations.axolotl.LigerDistPlugin]`` in its YAML.

Since 0.21 Axolotl loads the plugin of every installed package with an entry point of the group "axolotl.plugins", and
calls it in every run. So :class:`LigerDistPlugin` reads first whether the configuration asks for it.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.record import is_wrapped
from liger_dist.wrap import wrap

from .axolotl_distillation import distil, objections
from .deepspeed_section import as_config
from .patches import check_members
from .trainer import fuse

MEMBERS = {
    "get_input_args": ("self",),
    "register": ("self", "cfg"),
    "post_model_load": ("self", "cfg", "model"),
    "post_trainer_create": ("self", "cfg", "trainer"),
}
"""methods of Axolotl's plugins that :class:`LigerDistPlugin` overrides, and their parameters"""
OTHER_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin")
OTHER_LOSSES = (
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
    "cut_cross_entropy",
    "chunked_cross_entropy",
    "use_eaft",
    "use_dft",
)
SEQUENCE_SHARDS = ("context_parallel_size", "sequence_parallel_degree")
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")


class LigerDistArgs(BaseModel):
    """Section of Axolotl's configuration, with the keys of the section in a DeepSpeed JSON."""

    liger_dist: dict[str, Any] | None = None


class LigerDistPlugin(BasePlugin):  # type: ignore[misc]
    """Plugin with which the model of Axolotl's trainer computes its loss fused, or the log-probabilities of policy and
    reference (rl: dpo, ipo, kto, orpo, simpo), or the loss of soft labels (KDPlugin), under DDP, FSDP1, FSDP2 or
    DeepSpeed. Does nothing in a run whose configuration neither lists it nor has its section."""

    def get_input_args(self) -> str:
        return f"{__name__}.{LigerDistArgs.__name__}"

    def register(self, cfg: dict[str, Any]) -> None:
        """Checks Axolotl's configuration.

        Raises:
            LigerDistError: the configuration lets other code compute the loss, or Axolotl's plugins have other methods
                than the tested releases'. No model has been loaded then.
        """
        if not self._is_asked(cfg) or not (cfg.get("liger_dist") or {}).get("enabled", True):
            return
        check_members(BasePlugin, MEMBERS, host="axolotl")
        for objection in _objections(cfg):
            raise LigerDistError(f"{objection}, or set liger_dist.enabled to false.")

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Wraps the policy and the reference: TRL's trainers shard a reference as soon as they get it."""
        config = self._config(cfg)
        if config is not None and cfg.rl:
            wrap(model, config=config)

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        config = self._config(cfg)
        if config is None:
            return
        if not cfg.rl:
            fuse(trainer, config)
            if cfg.kd_trainer:
                distil(trainer)
            return
        # KTO has loaded its reference itself.
        reference = getattr(trainer, "ref_model", None)
        if reference is not None and not is_wrapped(reference):
            wrap(reference, config=config)

    def _is_asked(self, cfg: Any) -> bool:
        """True if the configuration lists this plugin, or has a section ``liger_dist``."""
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        listed = [str(plugin).replace(":", ".") for plugin in cfg.get("plugins") or ()]
        return name in listed or cfg.get("liger_dist") is not None

    def _config(self, cfg: Any) -> WrapConfig | None:
        return as_config(dict(cfg.liger_dist or {})) if self._is_asked(cfg) else None


def _objections(cfg: dict[str, Any]) -> list[str]:
    found = [
        f"plugins has {plugin!r}, which replaces the model's loss; leave it out"
        for plugin in cfg.get("plugins") or ()
        if str(plugin).replace(":", ".").rsplit(".", 1)[-1] in OTHER_PLUGINS
    ]
    found += [f"{key} is {cfg[key]!r} and computes another loss; leave it out" for key in OTHER_LOSSES if cfg.get(key)]
    rl = cfg.get("rl")
    if rl and str(rl) not in PREFERENCES:
        found.append(
            f"rl is {rl!r}, which reads more of its logits than log-probabilities; expected one of "
            f"{', '.join(PREFERENCES)}. Train without this plugin"
        )
    if cfg.get("orpo_alpha") and not rl:
        found.append(f"orpo_alpha is {cfg['orpo_alpha']!r} and computes another loss; set rl to orpo")
    shards = {key: cfg.get(key) for key in SEQUENCE_SHARDS}
    shards["context_parallel.size"] = (cfg.get("context_parallel") or {}).get("size")
    for key, size in shards.items():
        if (size or 1) > 1:
            found.append(
                f"{key} is {size!r}, under which Axolotl shards labels in its hooks, which was not tested (0.19 "
                "does not shift them, so that the last token of every shard is not learnt); leave it out (a mesh axis "
                '"sp" under FSDP2 shards sequences exactly)'
            )
    if (cfg.get("expert_parallel_size") or 1) > 1:
        found.append(
            f"expert_parallel_size is {cfg['expert_parallel_size']!r}, under which Axolotl replaces the experts and "
            "reduces their gradients in its hooks, which was not tested; leave it out"
        )
    if cfg.get("kd_trainer"):
        found += objections(cfg)
    return found
