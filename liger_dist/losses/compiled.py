"""Registers scoring and recomputation of a full lm_head as custom ops, opaque to torch.compile.

Legend: T tokens, D hidden, V vocabulary, K chosen classes of each token.

The loops over chunks of tokens and tiles of the vocabulary would be unrolled into the graph, which would then be valid
for one number of them: a graph for every few hundred tokens. An op supports any number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liger_dist_kernels import (
    SMALLEST_TILE,
    ChosenLogProbs,
    GradientCoefficients,
    GradientNeeds,
    HeadSlice,
    LinearCrossEntropyResult,
    LocalTokens,
    LossOptions,
    Scoring,
    TokenGradients,
    TokenOutputs,
    TokenTargets,
    TokenTerms,
    gradients_of_logits,
    recompute_gradients,
    score_rows,
    statistics_dtype,
)
from liger_dist_kernels.products import row_stride

_SCORE_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? class_weight, bool keeps_logits, Tensor?[] targets, "
    "Tensor?[] upstream, float[] numbers, float? softcap, bool[] flags, int top_k, int? memory_budget, str backend) "
    "-> Tensor[]"
)
_RECOMPUTE_SCHEMA = (
    "(Tensor hidden, Tensor weight, Tensor? bias, Tensor? class_weight, Tensor? logits, Tensor?[] targets, "
    "Tensor?[] coefficients, float[] numbers, float? softcap, bool[] flags, int top_k, int? memory_budget, "
    "str backend) -> Tensor[]"
)


def pack_options(options: LossOptions) -> tuple[list[float], float | None]:
    """Returns the options of the loss, and the soft-cap, as arguments of an op."""
    numbers = [options.label_smoothing, options.z_loss, options.logit_scale, options.temperature, options.soft_weight]
    return numbers, options.softcap


def unpack_options(numbers: list[float], softcap: float | None) -> LossOptions:
    """Rebuilds the options from :func:`pack_options`."""
    smoothing, z_loss, scale, temperature, soft_weight = numbers
    return LossOptions(
        label_smoothing=smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=scale,
        temperature=temperature,
        soft_weight=soft_weight,
    )


def _pack_scoring(scoring: Scoring, needs: GradientNeeds) -> tuple[Any, ...]:
    """Returns the records as arguments of an op, without the class weights."""
    outputs = scoring.outputs
    flags = [outputs.entropy, outputs.sum_sq_prob, outputs.mean_logit, needs.hidden, needs.weight, needs.bias]
    flags.append(scoring.logits_dtype == torch.float32)
    return *pack_options(scoring.options), flags, scoring.top_k, scoring.memory_budget, scoring.backend


def _unpack_scoring(class_weight: Tensor | None, packed: tuple[Any, ...]) -> tuple[Scoring, GradientNeeds]:
    """Rebuilds the records from :func:`_pack_scoring`."""
    numbers, softcap, flags, top_k, memory_budget, backend = packed
    entropy, sum_sq_prob, mean_logit, hidden, weight, bias, is_fp32 = flags
    scoring = Scoring(
        options=unpack_options(numbers, softcap),
        outputs=TokenOutputs(entropy=entropy, sum_sq_prob=sum_sq_prob, mean_logit=mean_logit),
        top_k=top_k,
        class_weight_V=class_weight,
        logits_dtype=torch.float32 if is_fp32 else None,
        memory_budget=memory_budget,
        backend=backend,
    )
    return scoring, GradientNeeds(hidden=hidden, weight=weight, bias=bias)


def _gradient_names(needs: GradientNeeds) -> list[str]:
    """Returns the gradients that an op computes, in order."""
    named = {"d_hidden_TD": needs.hidden, "d_weight_VD": needs.weight, "d_bias_V": needs.bias}
    return [name for name, is_needed in named.items() if is_needed]


def _names(scoring: Scoring, needs: GradientNeeds, targets: TokenTargets, *, with_gradients: bool) -> list[str]:
    """Returns the fields of a result that are tensors, in order."""
    is_present = {
        "entropy_T": scoring.outputs.entropy,
        "mean_logit_T": scoring.outputs.sums_logits(scoring.options),
        "sum_sq_prob_T": scoring.outputs.sum_sq_prob,
        "at_TK": targets.asked_ids_TK is not None,
        **dict.fromkeys(("top_Tk", "top_ids_Tk", "remainder_T"), scoring.top_k > 0),
    }
    fields = (*TokenTerms._fields, *ChosenLogProbs._fields)
    return [name for name in fields if is_present.get(name, True)] + (_gradient_names(needs) if with_gradients else [])


def _without_aliases(tensors: list[Tensor]) -> list[Tensor]:
    """Clones tensors that share memory with an earlier one, which an op may not return."""
    seen: set[int] = set()
    returned = []
    for tensor in tensors:
        pointer = tensor.untyped_storage().data_ptr()
        returned.append(tensor.clone() if pointer in seen else tensor)
        seen.add(pointer)
    return returned


@torch.library.custom_op(
    "liger_dist::score",
    mutates_args=(),
    schema=_SCORE_SCHEMA,
)
def _score(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    keeps_logits: bool,
    targets: list[Tensor | None],
    upstream: list[Tensor | None],
    *packed: Any,
) -> list[Tensor]:
    scoring, needs = _unpack_scoring(class_weight, packed)
    head, scored = HeadSlice.full(weight, bias), TokenTargets(*targets)  # type: ignore[arg-type]
    tokens = LocalTokens.planned(
        hidden,
        scored,
        TokenGradients(*upstream) if upstream else None,
        scoring.memory_budget,
        len(weight),
        trains=needs.weight,
    )
    result, logits = score_rows(
        hidden,
        head,
        tokens,
        scored,
        scoring=scoring,
        needs=needs,
        keeps_logits=keeps_logits,
        has_upstream=bool(upstream),
    )
    fields = result.terms._asdict() | result.chosen._asdict() | result._asdict()
    names = _names(scoring, needs, scored, with_gradients=bool(upstream))
    returned = _without_aliases([fields[name] for name in names])
    if logits is None:
        return returned
    # Includes the columns between its rows, whose values are not initialised: an op may not return a view.
    return [logits.as_strided((len(hidden), row_stride(len(weight))), logits.stride()), *returned]


@_score.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    keeps_logits: bool,
    targets: list[Tensor | None],
    upstream: list[Tensor | None],
    *packed: Any,
) -> list[Tensor]:
    scoring, needs = _unpack_scoring(class_weight, packed)
    scored = TokenTargets(*targets)  # type: ignore[arg-type]
    names = _names(scoring, needs, scored, with_gradients=bool(upstream))
    kept = []
    if keeps_logits:
        dtype = torch.float32 if scoring.keeps_fp32(hidden) else hidden.dtype
        kept.append(hidden.new_empty((hidden.shape[0], row_stride(weight.shape[0])), dtype=dtype))
    return kept + [_empty(name, hidden, weight, scored, scoring.top_k) for name in names]


def _empty(name: str, hidden: Tensor, weight: Tensor, targets: TokenTargets, top_k: int) -> Tensor:
    """Allocates a tensor of the shape and dtype of a field."""
    # len() would fix the number of tokens.
    T, dtype = hidden.shape[0], statistics_dtype(hidden.dtype)
    if name == "d_hidden_TD":
        return torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if name == "d_weight_VD":
        return weight.new_empty(weight.shape, dtype=torch.float32 if weight.dtype == torch.float16 else weight.dtype)
    if name == "d_bias_V":
        return weight.new_empty(weight.shape[0], dtype=statistics_dtype(weight.dtype))
    if name == "at_TK":
        assert targets.asked_ids_TK is not None
        return hidden.new_empty((T, targets.asked_ids_TK.shape[1]), dtype=dtype)
    if name in ("top_Tk", "top_ids_Tk"):
        return hidden.new_empty((T, top_k), dtype=dtype if name == "top_Tk" else torch.int64)
    return hidden.new_empty(T, dtype=torch.bool if name == "is_top1_T" else dtype)


@torch.library.custom_op(
    "liger_dist::recompute",
    mutates_args=(),
    schema=_RECOMPUTE_SCHEMA,
)
def _recompute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    logits: Tensor | None,
    targets: list[Tensor | None],
    coefficients: list[Tensor | None],
    *packed: Any,
) -> list[Tensor]:
    scoring, needs = _unpack_scoring(class_weight, packed)
    head, scored = HeadSlice.full(weight, bias), TokenTargets(*targets)  # type: ignore[arg-type]
    known = GradientCoefficients(*coefficients)  # type: ignore[arg-type]
    if logits is not None:
        # A compiled graph decides itself which tensors it keeps.
        gradients = gradients_of_logits(
            logits, hidden, head, scored, known, scoring=scoring, needs=needs, overwrite=False
        )
    else:
        columns = min(len(weight), SMALLEST_TILE)
        tokens = LocalTokens.planned(hidden, scored, known, scoring.memory_budget, columns, trains=needs.weight)
        gradients = recompute_gradients(tokens, head, scoring=scoring, needs=needs)
    return [gradient for gradient in gradients if gradient is not None]


@_recompute.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    logits: Tensor | None,
    targets: list[Tensor | None],
    coefficients: list[Tensor | None],
    *packed: Any,
) -> list[Tensor]:
    scoring, needs = _unpack_scoring(class_weight, packed)
    scored = TokenTargets(*targets)  # type: ignore[arg-type]
    return [_empty(name, hidden, weight, scored, scoring.top_k) for name in _gradient_names(needs)]


def compiled_score(
    hidden_TD: Tensor,
    head: HeadSlice,
    targets: TokenTargets,
    upstream: TokenGradients | None,
    scoring: Scoring,
    needs: GradientNeeds,
    *,
    keeps_logits: bool,
) -> tuple[LinearCrossEntropyResult, Tensor | None]:
    """Calls the op of :meth:`.rows.HeadRows.score` for a full head."""
    gradients = [] if upstream is None else [*upstream]
    tensors = hidden_TD, head.weight_VD, head.bias_V, scoring.class_weight_V, keeps_logits, [*targets], gradients
    found = torch.ops.liger_dist.score(*tensors, *_pack_scoring(scoring, needs))
    logits_TV = None
    if keeps_logits:
        logits_TV, found = found[0][:, : head.vocab_size], found[1:]
    named = dict(zip(_names(scoring, needs, targets, with_gradients=upstream is not None), found, strict=True))
    result = LinearCrossEntropyResult(
        TokenTerms(*[named.get(name) for name in TokenTerms._fields]),  # type: ignore[arg-type]
        ChosenLogProbs(*[named.get(name) for name in ChosenLogProbs._fields]),
        named.get("d_hidden_TD"),
        named.get("d_weight_VD"),
        named.get("d_bias_V"),
    )
    return result, logits_TV


def compiled_recompute(
    hidden_TD: Tensor,
    head: HeadSlice,
    targets: TokenTargets,
    coefficients: GradientCoefficients,
    logits_TV: Tensor | None,
    scoring: Scoring,
    needs: GradientNeeds,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Calls the op of :meth:`.rows.HeadRows.recompute` for a full head."""
    tensors = hidden_TD, head.weight_VD, head.bias_V, scoring.class_weight_V, logits_TV, [*targets], [*coefficients]
    found = torch.ops.liger_dist.recompute(*tensors, *_pack_scoring(scoring, needs))
    named = dict(zip(_gradient_names(needs), found, strict=True))
    return named.get("d_hidden_TD"), named.get("d_weight_VD"), named.get("d_bias_V")
