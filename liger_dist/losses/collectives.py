"""Collectives of torch whose names changed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The former where there is one, from torch 2.13 on; the latter warns there."""
