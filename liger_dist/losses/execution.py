"""How a loss is computed: backend, memory budget, dtype of the logits, groups of the mean. What is computed is in
:mod:`.spec`."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from liger_dist.config import LogitsDtype
from liger_dist_kernels import Backend

from .labels import LabelSummary
from .shared_gradient import SharedGradient
from .spec import PendingGradients


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Options for computing a loss. None of them changes the result beyond rounding, except the groups of the mean."""

    backend: Backend = "auto"
    memory_budget: int | None = None
    overwrite_logits: bool = False
    """True to allow writing the gradient of the logits into their memory"""
    label_summary: LabelSummary | None = None
    pending: PendingGradients | None = None
    """losses of one model that may hold gradients; None for a single loss"""
    shared: SharedGradient | None = None
    """gradient of the weight over all losses of a call; None for a call with one loss"""
    coefficient: float | None = None
    """with ``shared``: factor of this loss in the only loss of the call that carries gradients; None if only the
    backward knows it"""
    max_valid_tokens: int | None = None
    """number of tokens to compute when the host does not know how many have a label; None for all tokens"""
    logits_dtype: LogitsDtype = None
    is_first: bool = False
    """True for the first loss of a model: checks over ranks are read at once instead of asserted on the device"""
    has_real_hidden: bool = True
    """False if the hidden states may be uninitialised memory, of which a stage of a pipeline infers shapes: they are
    not compared over ranks then"""
    mean_groups: tuple[dist.ProcessGroup, ...] = ()
    """groups of the ranks whose tokens share one mean, one group for each mesh axis; empty for this rank alone"""
    divide_factor: float = 1.0
    """divisor that the framework applies to the gradients summed over ``mean_groups``"""
