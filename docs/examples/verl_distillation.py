"""On-policy distillation over the whole vocabulary in verl: a trainer that adds hidden states of a teacher to batches.
A module for VERL_USE_EXTERNAL_MODULES, after liger_dist.integrations.verl, with trainer.use_v1=False."""

from functools import partial
from typing import Any

import torch
from transformers import AutoModel
from verl.trainer import main_ppo_v0
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.config import omega_conf_to_dataclass


class DistillingTrainer(RayPPOTrainer):
    """verl's trainer with a teacher in its own process. A larger teacher belongs into an actor of Ray, or a server."""

    def init_workers(self) -> None:
        super().init_workers()
        distillation = omega_conf_to_dataclass(self.config.distillation)
        path = self.config.distillation.teacher_models.teacher_model.model_path
        self.teacher = AutoModel.from_pretrained(path, dtype="auto").eval()
        actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        loss = partial(distillation_ppo_loss, config=actor, distillation_config=distillation)
        self.actor_rollout_wg.set_loss_fn(loss)

    @torch.no_grad()
    def _update_actor(self, batch: Any) -> Any:
        inputs = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        batch.batch["teacher_hidden"] = self.teacher(**inputs).last_hidden_state  # [B, S, E]
        return super()._update_actor(batch)


main_ppo_v0.RayPPOTrainer = DistillingTrainer
