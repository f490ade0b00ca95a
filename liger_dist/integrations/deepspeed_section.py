"""The ``"liger_dist"`` section of a DeepSpeed JSON file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from liger_dist.config import WrapConfig, check_choice
from liger_dist.errors import LigerDistError
from liger_dist.fused_head.call import check_usual_outputs
from liger_dist.losses.spec import as_output_names

NAME = "liger_dist"
KEYS = ("enabled", *(field.name for field in fields(WrapConfig) if field.name != "token_mean"))
"""keys of the section: the fields of :class:`WrapConfig` that DeepSpeed's engine does not compute itself"""


def read_section(config: Mapping[str, Any]) -> WrapConfig | None:
    """Reads the section of a DeepSpeed configuration; None when it has none or is not enabled.

    Raises:
        LigerDistError: unknown keys, values out of their range, or parts of DeepSpeed that compute the loss themselves.
            The message has the path in the JSON, the value there and what was expected.
    """
    if NAME not in config:
        return None
    options = as_config(config[NAME])
    for path, value in () if options is None else _conflicts(config):
        raise LigerDistError(
            f"{path} is {value!r} in the DeepSpeed configuration, which computes the loss or lm_head "
            f"itself; leave it out, or set {NAME}.enabled to false."
        )
    return options


def as_config(section: Any) -> WrapConfig | None:
    """Converts a section, whose keys are :data:`KEYS` ("float32" for ``torch.float32``); None if it is not enabled.

    Raises:
        LigerDistError: unknown keys, or values out of their range.
    """
    if not isinstance(section, Mapping):
        raise LigerDistError(
            f"in the DeepSpeed configuration, {NAME} is {section!r}; expected an object with keys among "
            f"{', '.join(KEYS)}."
        )
    unknown = [key for key in section if key not in KEYS]
    if unknown:
        raise LigerDistError(
            f"in the DeepSpeed configuration, {NAME}.{unknown[0]} is no key of the section; expected one of "
            f"{', '.join(KEYS)}."
        )
    options = dict(section)
    try:
        enabled = options.pop("enabled", True)
        if not isinstance(enabled, bool):
            raise LigerDistError(f"enabled is {enabled!r}; expected true or false.")
        check_choice("logits_dtype", options.get("logits_dtype"), (None, "float32", "fp32_operands"))
        if options.get("logits_dtype") == "float32":
            options["logits_dtype"] = torch.float32
        options["outputs"] = as_output_names(options.get("outputs", ()))
        check_usual_outputs(options["outputs"])
        config = WrapConfig(**options)
        return config if enabled else None
    except LigerDistError as error:
        raise LigerDistError(f"in the DeepSpeed configuration, {NAME}.{error}") from error


def _conflicts(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Lists paths and values with which DeepSpeed would compute the loss elsewhere."""
    tensor_parallel = config.get("tensor_parallel") or {}
    found = []
    for key, usual in (("autotp_size", (0, 1)), ("vocab_parallel_lm_head", (False,))):
        value = tensor_parallel.get(key)
        if value is not None and value not in usual:
            found.append((f"tensor_parallel.{key}", value))
    if (config.get("hybrid_engine") or {}).get("enabled"):
        found.append(("hybrid_engine.enabled", True))
    return found
