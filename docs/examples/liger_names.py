"""Code that was written for Liger-Kernel: only the import has changed."""

import torch

from liger_dist.integrations.liger import LigerFusedLinearCrossEntropyLoss

head = torch.nn.Linear(64, 1000, bias=False)
hidden_states = torch.randn(128, 64, requires_grad=True)
labels = torch.randint(1000, (128,))
loss = LigerFusedLinearCrossEntropyLoss()(head.weight, hidden_states, labels)
loss.backward()
print(float(loss))
