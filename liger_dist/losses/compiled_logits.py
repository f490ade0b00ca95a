"""Registers the passes over full logits as custom ops, opaque to torch.compile.

Legend: T tokens, V vocabulary.

Inductor regenerates a kernel's source, without the named tuples that these kernels pass to device functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_dist_kernels import (
    GradientCoefficients,
    RowOptions,
    SoftmaxStatistics,
    TokenGradients,
    TokenOutputs,
    TokenTargets,
    cross_entropy_bwd,
    cross_entropy_fwd,
    cross_entropy_fwd_bwd,
    statistics_dtype,
)

from .compiled import pack_options, unpack_options

_ROWS = "Tensor?[] targets, Tensor? class_weight, float[] numbers, float? softcap, bool[] flags, str backend"


def _pack(rows: RowOptions) -> tuple[Any, ...]:
    """Returns the record as arguments of an op."""
    outputs = rows.outputs
    flags = [outputs.entropy, outputs.sum_sq_prob, outputs.mean_logit]
    return rows.class_weight_V, *pack_options(rows.options), flags, rows.backend


def _unpack(logits: Tensor, packed: tuple[Any, ...]) -> RowOptions:
    """Rebuilds the record from :func:`_pack`."""
    class_weight, numbers, softcap, (entropy, sum_sq_prob, mean_logit), backend = packed
    return RowOptions(
        vocab_size=logits.shape[1],
        options=unpack_options(numbers, softcap),
        outputs=TokenOutputs(entropy=entropy, sum_sq_prob=sum_sq_prob, mean_logit=mean_logit),
        class_weight_V=class_weight,
        backend=backend,
    )


def _present(rows: RowOptions) -> list[bool]:
    """Returns flags of the statistics that are computed."""
    return [True, True, True, rows.outputs.entropy, rows.sums_logits, rows.outputs.sum_sq_prob]


def _packed_statistics(statistics: SoftmaxStatistics) -> Tensor:
    """Stacks the statistics that are not None in a new tensor ``[F, T]``."""
    return torch.stack([field for field in statistics if field is not None])


def _statistics(fields_FT: Tensor, rows: RowOptions) -> SoftmaxStatistics:
    """Rebuilds the statistics from :func:`_packed_statistics`."""
    fields = iter(fields_FT)
    return SoftmaxStatistics(*[next(fields) if present else None for present in _present(rows)])  # type: ignore[arg-type]


def _empty_fields(logits: Tensor, rows: RowOptions) -> Tensor:
    return logits.new_empty((sum(_present(rows)), logits.shape[0]), dtype=statistics_dtype(logits.dtype))


@torch.library.custom_op("liger_dist::cross_entropy_fwd", mutates_args=(), schema=f"(Tensor logits, {_ROWS}) -> Tensor")
def _fwd(logits: Tensor, targets: list[Tensor | None], *packed: Any) -> Tensor:
    return _packed_statistics(cross_entropy_fwd(logits, TokenTargets(*targets), _unpack(logits, packed)))  # type: ignore[arg-type]


@_fwd.register_fake
def _(logits: Tensor, targets: list[Tensor | None], *packed: Any) -> Tensor:
    return _empty_fields(logits, _unpack(logits, packed))


_FWD_BWD = f"Tensor?[] upstream, Tensor? token_logits, {_ROWS}"


def _fwd_bwd(
    logits: Tensor,
    upstream: list[Tensor | None],
    token_logits: Tensor | None,
    targets: list[Tensor | None],
    packed: tuple[Any, ...],
    out: Tensor,
) -> Tensor:
    statistics = cross_entropy_fwd_bwd(
        logits,
        TokenTargets(*targets),  # type: ignore[arg-type]
        TokenGradients(*upstream),
        _unpack(logits, packed),
        token_logits_TK=token_logits,
        out_TV=out,
    )
    return _packed_statistics(statistics)


@torch.library.custom_op(
    "liger_dist::cross_entropy_fwd_bwd", mutates_args=(), schema=f"(Tensor logits, {_FWD_BWD}) -> Tensor[]"
)
def _out_of_place(
    logits: Tensor,
    upstream: list[Tensor | None],
    token_logits: Tensor | None,
    targets: list[Tensor | None],
    *packed: Any,
) -> list[Tensor]:
    d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return [_fwd_bwd(logits, upstream, token_logits, targets, packed, d_logits), d_logits]


@_out_of_place.register_fake
def _(logits: Tensor, *rest: Any) -> list[Tensor]:
    return [_fields_of_fwd_bwd(logits, *rest), torch.empty_like(logits, memory_format=torch.contiguous_format)]


@torch.library.custom_op(
    "liger_dist::cross_entropy_fwd_bwd_", mutates_args=("logits",), schema=f"(Tensor(a!) logits, {_FWD_BWD}) -> Tensor"
)
def _in_place(
    logits: Tensor,
    upstream: list[Tensor | None],
    token_logits: Tensor | None,
    targets: list[Tensor | None],
    *packed: Any,
) -> Tensor:
    return _fwd_bwd(logits, upstream, token_logits, targets, packed, logits)


def _fields_of_fwd_bwd(logits: Tensor, upstream: Any, token_logits: Any, targets: Any, *packed: Any) -> Tensor:
    return _empty_fields(logits, _unpack(logits, packed))


_in_place.register_fake(_fields_of_fwd_bwd)


@torch.library.custom_op(
    "liger_dist::cross_entropy_bwd",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor?[] coefficients, {_ROWS}) -> Tensor",
)
def _bwd(logits: Tensor, coefficients: list[Tensor | None], targets: list[Tensor | None], *packed: Any) -> Tensor:
    known = GradientCoefficients(*coefficients)  # type: ignore[arg-type]
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return cross_entropy_bwd(logits, TokenTargets(*targets), known, _unpack(logits, packed), out_TV=out)  # type: ignore[arg-type]


@_bwd.register_fake
def _(logits: Tensor, coefficients: list[Tensor | None], targets: list[Tensor | None], *packed: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def compiled_fwd(logits_TV: Tensor, targets: TokenTargets, rows: RowOptions) -> SoftmaxStatistics:
    """Calls the op of :func:`.cross_entropy_fwd`."""
    return _statistics(torch.ops.liger_dist.cross_entropy_fwd(logits_TV, [*targets], *_pack(rows)), rows)


def compiled_fwd_bwd(
    logits_TV: Tensor,
    targets: TokenTargets,
    upstream: TokenGradients,
    rows: RowOptions,
    *,
    token_logits_TK: Tensor | None,
    overwrites: bool,
) -> tuple[SoftmaxStatistics, Tensor]:
    """Calls the op of :func:`.cross_entropy_fwd_bwd`; returns the gradient too."""
    arguments = logits_TV, [*upstream], token_logits_TK, [*targets], *_pack(rows)
    if overwrites:
        return _statistics(torch.ops.liger_dist.cross_entropy_fwd_bwd_(*arguments), rows), logits_TV
    fields_FT, d_logits_TV = torch.ops.liger_dist.cross_entropy_fwd_bwd(*arguments)
    return _statistics(fields_FT, rows), d_logits_TV


def compiled_bwd(
    logits_TV: Tensor, targets: TokenTargets, coefficients: GradientCoefficients, rows: RowOptions
) -> Tensor:
    """Calls the op of :func:`.cross_entropy_bwd`."""
    result: Tensor = torch.ops.liger_dist.cross_entropy_bwd(logits_TV, [*coefficients], [*targets], *_pack(rows))
    return result
