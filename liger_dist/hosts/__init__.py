"""Loss calls of host frameworks: the readers that :func:`liger_dist.wrap` passes to a model's swapped forward."""

from __future__ import annotations

from liger_dist.fused_head.call import Hosts

from .trainer_frames import returns_logits
from .trl import FLAG, read_call, read_scored_call

HOSTS = Hosts(keywords=frozenset({FLAG}), readers=(read_call, read_scored_call), returns_logits=returns_logits)
