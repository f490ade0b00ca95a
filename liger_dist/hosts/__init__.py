"""Recognises calls that TRL's and transformers' trainers make of a wrapped model with further keywords;
:func:`liger_dist.wrap` passes these readers to the swapped forward. Entry points of hosts are in ``integrations``."""

from __future__ import annotations

from liger_dist.fused_head.call import Hosts

from .trainer_frames import returns_logits
from .trl import FLAG, read_call, read_scored_call

HOSTS = Hosts(keywords=frozenset({FLAG}), readers=(read_call, read_scored_call), returns_logits=returns_logits)
