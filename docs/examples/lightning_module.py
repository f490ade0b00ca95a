"""Lightning. On several GPUs: give Trainer a strategy, such as FSDPStrategy() or "deepspeed_stage_3"."""

import torch
from lightning.pytorch import LightningModule, Trainer
from tiny import Sequences, make_model
from torch.utils.data import DataLoader

from liger_dist.integrations.lightning import wrap_in


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def configure_model(self) -> None:
        self.model = wrap_in(self, self.model)  # the one line

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        self.loss = self.model(**batch).loss
        return self.loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


module = Module()
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
Trainer(max_steps=3, devices=1, **quiet).fit(module, DataLoader(Sequences(), batch_size=4))
print(module.loss.item())
