"""LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-4)(head.weight, hidden_states, labels), by liger_dist."""

import torch

from liger_dist import linear_cross_entropy

head = torch.nn.Linear(64, 1000, bias=False)
hidden_states = torch.randn(128, 64, requires_grad=True)
labels = torch.randint(1000, (128,))
loss = linear_cross_entropy(hidden_states, head.weight, labels, z_loss=1e-4)
loss.backward()
print(loss.item())
