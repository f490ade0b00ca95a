"""Imports DeepSpeed without its all-reduce through shared memory: that compiles for 40 seconds on a machine and is
looked for in every process for 4. Without it all-reduces run over gloo, as on several machines."""

from __future__ import annotations

import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
