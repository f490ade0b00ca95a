"""What a user may choose, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from liger_dist_kernels import BACKENDS, Backend

from .errors import LigerDistError

Strategy = Literal["auto", "none", "ddp", "fsdp1", "fsdp2", "tp", "deepspeed"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
SHARDING_STRATEGIES: tuple[Strategy, ...] = ("fsdp1", "fsdp2")

SHARDING_OPTIONS = ("param_dtype", "reduce_dtype", "reshard_after_forward", "cpu_offload")
"""what only these strategies can do"""

Head = Literal["auto", "gather", "vocab_parallel"]
TokenMean = Literal["local", "global"]


@dataclass(frozen=True, kw_only=True)
class WrapConfig:
    """Options of :func:`liger_dist.wrap`. Everything has a default; nothing is read from the environment."""

    fused_loss: bool = True
    """Compute the loss inside the output embedding. False shards only, for comparison."""
    layer_kernels: bool = True
    """Compute norms, gated MLPs, rotary embedding and residual additions by kernels, where a probe of the model's own
    code agrees. Layers that are compiled, or that compute in fp64, keep their own code."""
    head: Head = "gather"
    """How the loss reaches a head that "fsdp2" shards: "gather" collects its weight; with "vocab_parallel" every
    process keeps its rows and the tokens travel to them, so that neither the whole weight nor its whole gradient
    exists anywhere; all processes then have to scale their losses alike, and to ask for the same at the same time
    ("gather", the default, lets each weigh its own). "auto" takes the second where it can, the shard axis is one node,
    and less is sent and held for micro-batches of ``expected_tokens``; ``explain`` says why."""
    head_shard_size: int | None = None
    """"vocab_parallel": how many neighbours on the shard axis share the rows, of which the others then have replicas;
    None for those on one node, because tokens travel for every loss."""
    peer_copies: bool = False
    """"vocab_parallel": let tokens travel by copies between the GPUs that share the rows, where these are on one node
    and can read each other's memory (torch's symmetric memory). Otherwise they travel by NCCL, whose kernels take
    multiprocessors from the products."""
    expected_tokens: int = 8192
    """Tokens with a label in one process's micro-batch, for which ``head="auto"`` compares what "gather" and
    "vocab_parallel" cost."""
    outputs: tuple[str, ...] = ()
    """What every call with labels returns beside its loss: names among "token_accuracy" (0-d), "is_top1", "entropy",
    "log_prob", "mean_logit" and "z_loss" (the labels' shape; all without gradient), or "logits" alone: then evaluation
    computes the model's own loss beside whole logits (for metrics of your own), and training stays fused. A call's own
    ``outputs=`` comes first."""
    kernels: Backend = "auto"
    """"triton", "reference" (plain torch), or "auto": Triton on GPUs, the reference elsewhere."""
    memory_budget: int | None = None
    """Bytes of the buffer that holds one chunk of logits (with "vocab_parallel", and of the hidden states that travel
    with it); None for 1 GiB. Three and more chunks need an fp32 sum of the
    weight's gradient beside it (four bytes for each of its numbers), so a smaller buffer may take more memory."""
    max_valid_tokens: int | None = None
    """How many tokens the loss computes inside a CUDA graph, where the host cannot count the ones with a label; more of
    them end the program by an assertion on the device. None for all. Elsewhere they are counted."""
    token_mean: TokenMean = "local"
    """What a mean loss without ``num_items_in_batch`` divides by: "local" for the tokens of this process (as the
    model does by itself), "global" for those of all data-parallel processes, so that the averaged gradient is that
    of one mean over all tokens. "global" costs an all-reduce of one number."""
    param_dtype: torch.dtype | None = None
    """Compute dtype under "fsdp1" and "fsdp2" while masters keep theirs (``torch.bfloat16`` is usual); None for the
    masters' own."""
    reduce_dtype: torch.dtype = torch.float32
    """Dtype of gradient reduction under "fsdp1" and "fsdp2"; a lower one than fp32 loses small gradients as ranks
    grow."""
    reshard_after_forward: bool = True
    """Under "fsdp1" and "fsdp2": free a decoder layer's weights between its forward and its backward."""
    cpu_offload: bool = False
    """Under "fsdp1" and "fsdp2": keep shards, gradients and optimiser state in host memory."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward instead of keeping its activations."""

    def __post_init__(self) -> None:
        _check_choice("head", self.head, get_args(Head))
        _check_choice("kernels", self.kernels, BACKENDS)
        _check_choice("token_mean", self.token_mean, get_args(TokenMean))
        check_count("memory_budget", self.memory_budget, "bytes")
        check_count("max_valid_tokens", self.max_valid_tokens, "tokens")
        check_count("head_shard_size", self.head_shard_size, "processes")
        check_count("expected_tokens", self.expected_tokens, "tokens")
        for name in ("param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise LigerDistError(f"{name} is {dtype!r}; expected a floating torch.dtype such as torch.bfloat16.")


def check_count(name: str, value: int | None, unit: str) -> None:
    """Refuses a number of ``unit`` that is not above 0, or None."""
    if value is not None and value < 1:
        raise LigerDistError(f"{name} is {value}; expected a number of {unit} above 0, or None.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise LigerDistError(f"{name} is {value!r}; expected one of {', '.join(map(repr, choices))}.")


def check_sharding_options(strategy: str, config: WrapConfig) -> None:
    """Refuses options that only strategies which shard have.

    Raises:
        LigerDistError: with the way out.
    """
    if strategy in SHARDING_STRATEGIES:
        return
    for name in SHARDING_OPTIONS:
        if getattr(config, name) != getattr(WrapConfig(), name):
            way_out = "use strategy='fsdp2'" + (
                ", or torch.autocast for mixed precision" if name == "param_dtype" else ""
            )
            raise LigerDistError(
                f"{name} is {getattr(config, name)} but strategy={strategy!r} does not have it; "
                f"{'set it in its own configuration' if strategy == 'deepspeed' else way_out}."
            )
