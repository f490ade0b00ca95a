"""The ``"liger_dist"`` section of a DeepSpeed JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError

NAME = "liger_dist"
Output = Literal[
    "token_accuracy", "is_top1", "entropy", "sum_sq_prob", "log_prob", "mean_logit", "log_sum_exp", "z_loss", "logits"
]


class Section(BaseModel):
    """Every key, its type and its default. Precision, sharding, offload and activation checkpointing are in DeepSpeed's
    own sections."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enabled: bool = Field(True, description="false leaves everything as it was")
    fused_loss: bool = Field(True, description="compute the loss inside lm_head")
    layer_kernels: bool = Field(True, description="compute norms, gated MLPs and rotary embeddings by kernels")
    mlp_tile_tokens: int | None = Field(None, gt=0, description="tokens that a gated MLP computes at a time; null: all")
    varlen_attention: bool = Field(True, description="packed, padded and windowed attention without a dense mask")
    backend: Literal["auto", "triton", "reference"] = Field(
        "auto", description="triton, reference (plain torch), or auto: Triton on GPUs, the reference elsewhere"
    )
    memory_budget: int | None = Field(
        None, gt=0, description="bytes of the buffer for a chunk of logits; null: 1 GiB, frozen 256 MiB"
    )
    logits_dtype: Literal["float32", "fp32_operands"] | None = Field(
        None,
        description="float32: fp32 logits of 16-bit operands; fp32_operands: those too; null: the operands' own",
    )
    max_valid_tokens: int | None = Field(
        None, gt=0, description="inside a CUDA graph: tokens with a label that the loss computes; null: all"
    )
    outputs: list[Output] = Field(
        [], description="what a call with labels returns beside its loss: token_accuracy, is_top1, entropy, "
        "sum_sq_prob, log_prob, mean_logit, log_sum_exp, z_loss, or logits alone"
    )  # fmt: skip

    def wrap_config(self) -> WrapConfig:
        options = self.model_dump(exclude={"enabled"})
        logits_dtype = torch.float32 if self.logits_dtype == "float32" else self.logits_dtype
        return WrapConfig(**options | {"outputs": tuple(self.outputs), "logits_dtype": logits_dtype})


def read_section(config: Mapping[str, Any]) -> Section | None:
    """The section of a DeepSpeed configuration; None when it has none or is not enabled.

    Raises:
        LigerDistError: unknown keys, wrong types, or parts of DeepSpeed that compute the loss themselves. The message
            has the path in the JSON, what stands there and what was expected.
    """
    if NAME not in config:
        return None
    try:
        section = Section.model_validate(config[NAME])
    except ValidationError as error:
        raise LigerDistError("; ".join(_sentence(fault) for fault in error.errors())) from None
    if not section.enabled:
        return None
    for path, value in _conflicts(config):
        raise LigerDistError(
            f"{path} is {value!r} in the DeepSpeed configuration, which computes the loss or lm_head "
            f"itself; leave it out, or set {NAME}.enabled to false."
        )
    return section


def _sentence(fault: Any) -> str:
    path = ".".join(map(str, (NAME, *fault["loc"])))
    if fault["type"] == "extra_forbidden":
        return f"{path} is no key of the DeepSpeed configuration; expected one of {', '.join(Section.model_fields)}."
    return f"{path} is {fault['input']!r} in the DeepSpeed configuration; {_lowered(fault['msg'])}."


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _conflicts(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Paths and values that would compute the loss elsewhere."""
    tensor_parallel = config.get("tensor_parallel") or {}
    found = []
    for key, usual in (("autotp_size", (0, 1)), ("vocab_parallel_lm_head", (False,))):
        value = tensor_parallel.get(key)
        if value is not None and value not in usual:
            found.append((f"tensor_parallel.{key}", value))
    if (config.get("hybrid_engine") or {}).get("enabled"):
        found.append(("hybrid_engine.enabled", True))
    return found
