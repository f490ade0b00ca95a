"""Calls the kernels for the rows of lm_head on a rank (:class:`HeadRows`): forward, recomputation, divergence.

Legend: T tokens with a label, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_dist.errors import LigerDistError
from liger_dist.model.torch_modes import keeps_graph
from liger_dist_kernels import (
    DEFAULT_MEMORY_BUDGET,
    SMALLEST_TILE,
    GradientCoefficients,
    GradientNeeds,
    HeadSlice,
    LinearCrossEntropyResult,
    LinearDivergenceResult,
    LocalTokens,
    Scoring,
    TokenChunks,
    TokenGradients,
    TokenTargets,
    TokenTerms,
    WeightSum,
    bytes_of_class,
    default_budget,
    gradient_coefficients,
    gradients_of_logits,
    linear_divergence,
    plan_chunks,
    plan_pairs,
    recompute_gradients,
    score_rows,
)

from .compiled import compiled_recompute, compiled_score
from .distillation import Distillation
from .execution import Execution
from .normalization import Scales, scaled
from .shared_gradient import SharedGradient
from .spec import LossSpec

Gradients = TokenGradients | GradientCoefficients


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows of lm_head on a rank: here all of them. Subclasses share them over a process group."""

    vocab_size: int
    """rows of the full lm_head"""
    start: int = 0
    """vocabulary index of this rank's first row"""

    def with_dtype(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None, hidden_states: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Casts weight and bias for the products to ``dtype`` if it is not None.

        Raises:
            LigerDistError: they and ``hidden_states`` differ in dtype.
        """
        if dtype is not None:
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        check_dtypes(hidden_states, weight, bias)
        return weight, bias

    @property
    def is_full(self) -> bool:
        """True if these are all rows, so that no other rank participates"""
        return True

    @property
    def largest(self) -> int:
        """Largest number of rows on a rank, from which all ranks derive the same chunks."""
        return self.vocab_size

    def head(self, weight_VD: Tensor, bias_V: Tensor | None, problem: Problem) -> HeadSlice:
        """Wraps the rows for the kernels."""
        return HeadSlice.full(weight_VD, bias_V, problem.weight_sum)

    def tokens(self, hidden_TD: Tensor, problem: Problem, gradients: Gradients | None) -> TokenChunks:
        """Returns the tokens to score against these rows."""
        if gradients is None:
            return LocalTokens(hidden_TD, problem.targets)
        # Recomputation has all tokens of a chunk in a tile of a few classes.
        columns = self.largest if isinstance(gradients, TokenGradients) else min(self.largest, SMALLEST_TILE)
        budget, trains = problem.execution.memory_budget, problem.needs.weight
        return LocalTokens.planned(hidden_TD, problem.targets, gradients, budget, columns, trains=trains)

    def keeps_logits(self, hidden_TD: Tensor, weight_VD: Tensor, problem: Problem) -> bool:
        """True if all logits are kept, so that the backward need not recompute them: if they fit the memory budget."""
        if not problem.may_keep_logits or len(hidden_TD) == 0:
            return False
        # fp32 logits need another buffer for their gradient.
        itemsize = hidden_TD.element_size() + (4 if problem.scoring.keeps_fp32(hidden_TD) else 0)
        budget = problem.execution.memory_budget
        budget = default_budget(problem.needs.weight) if budget is None else budget
        return len(hidden_TD) * len(weight_VD) * itemsize <= budget

    def score(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        problem: Problem,
        upstream: TokenGradients | None = None,
    ) -> tuple[LinearCrossEntropyResult, Tensor | None]:
        """Computes the terms of this rank's tokens, with ``upstream`` gradients of a scalar loss also gradients of the
        inputs. Also returns all logits if :meth:`keeps_logits`."""
        targets, scoring, needs = problem.targets, problem.scoring, problem.needs
        keeps_logits = self.keeps_logits(hidden_TD, weight_VD, problem)
        if torch.compiler.is_compiling() and self.is_full:
            head = self.head(weight_VD, bias_V, problem)
            return compiled_score(hidden_TD, head, targets, upstream, scoring, needs, keeps_logits=keeps_logits)
        tokens = self.tokens(hidden_TD, problem, upstream)
        return score_rows(
            hidden_TD,
            self.head(weight_VD, bias_V, problem),
            tokens,
            targets,
            scoring=scoring,
            needs=needs,
            keeps_logits=keeps_logits,
            has_upstream=upstream is not None,
        )

    def recompute(
        self,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        problem: Problem,
        coefficients: GradientCoefficients,
        logits_TV: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Computes gradients of hidden states, weight and bias for known ``coefficients`` of the logits' gradient.
        ``logits_TV`` of :meth:`score` are overwritten unless the graph is retained."""
        head, targets = self.head(weight_VD, bias_V, problem), problem.targets
        scoring, needs = problem.scoring, problem.needs
        if torch.compiler.is_compiling() and self.is_full:
            return compiled_recompute(hidden_TD, head, targets, coefficients, logits_TV, scoring, needs)
        if logits_TV is None:
            tokens = self.tokens(hidden_TD, problem, coefficients)
            return recompute_gradients(tokens, head, scoring=scoring, needs=needs)
        return gradients_of_logits(
            logits_TV,
            hidden_TD,
            head,
            targets,
            coefficients,
            scoring=scoring,
            needs=needs,
            overwrite=not (torch.compiler.is_compiling() or keeps_graph()),
        )

    def diverge(
        self, hidden_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, problem: Problem
    ) -> LinearDivergenceResult:
        """Computes the divergence of this rank's tokens from their teacher, and the gradients of the inputs."""
        distillation = problem.distillation
        assert distillation is not None
        upstream = problem.scales.upstream(problem.targets.labels_T) if problem.needs.any else None
        tokens, teacher_tokens = self.token_pairs(hidden_TD, distillation.teacher.hidden, problem, upstream)
        return linear_divergence(
            tokens,
            teacher_tokens,
            self.head(weight_VD, bias_V, problem),
            distillation.teacher.head(),
            options=distillation.options(problem.spec.options),
            hard_weight=distillation.hard_weight,
            scoring=problem.scoring,
            needs=problem.needs,
        )

    def token_pairs(
        self, hidden_TD: Tensor, teacher_TE: Tensor, problem: Problem, gradients: TokenGradients | None
    ) -> tuple[TokenChunks, TokenChunks]:
        """Returns the student's tokens and the teacher's, in the same chunks."""
        itemsize = bytes_of_class(hidden_TD.dtype, teacher_TE.dtype, problem.scoring)
        budget = problem.execution.memory_budget
        if problem.needs.any:
            plan = plan_pairs(len(hidden_TD), (self.largest, hidden_TD.shape[1]), itemsize, budget)
        else:
            plan = plan_chunks(len(hidden_TD), self.largest, itemsize, budget or DEFAULT_MEMORY_BUDGET // 2)
        return (
            LocalTokens(hidden_TD, problem.targets, gradients, plan.rows),
            LocalTokens(teacher_TE, problem.targets, None, plan.rows),
        )

    def common_divisor(self, num_tokens: int) -> float | None:
        """Returns a divisor that is equal on all ranks, if the gradients of several ranks' tokens are summed; None if
        ranks may have different ones."""
        return None

    def check_upstream(self, gradient: Tensor) -> None:
        """Refuses an upstream gradient of a scalar loss that the gradients of :meth:`score` do not allow."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Inputs of the autograd function that carry no gradient."""

    targets: TokenTargets
    scales: Scales
    spec: LossSpec
    execution: Execution
    scoring: Scoring
    needs: GradientNeeds
    rows: HeadRows
    number: int
    """index of the loss among those of its model"""
    gradients_in_forward: bool
    """True for a scalar loss that computes its gradients in the forward"""
    may_keep_logits: bool = False
    """True if the backward may read logits that the forward has kept"""
    distillation: Distillation | None = None
    """distillation of these tokens; None without a teacher"""
    shared: SharedGradient | None = None
    """gradient over the losses of a call that this loss adds its weight gradient to; None for a single loss"""
    coefficient: float | None = None
    """factor of the loss in the gradients that the forward adds to ``shared``; None for 1"""

    @property
    def weight_sum(self) -> WeightSum | None:
        """The sum of :attr:`shared`."""
        return None if self.shared is None else self.shared.sum

    def coefficients(self, terms: TokenTerms, upstream: TokenGradients) -> GradientCoefficients:
        """Computes coefficients of the logits' gradient for upstream gradients of the terms."""
        return gradient_coefficients(terms, upstream, self.targets, self.scoring.row_options(self.rows.vocab_size))


def scaled_gradients(
    problem: Problem, saved: Sequence[Tensor | None], d_loss: Tensor | None, dtypes: Sequence[torch.dtype | None]
) -> list[Tensor | None]:
    """Multiplies gradients of the forward by the upstream gradient of the loss (0-d, or None), in ``dtypes``."""
    if d_loss is None:
        return [None] * len(saved)
    if problem.scales.factor is not None:
        d_loss = d_loss * problem.scales.factor
    problem.rows.check_upstream(d_loss)
    backend = problem.execution.backend
    return [
        None if made is None or dtype is None else scaled(made, d_loss, dtype, backend=backend)
        for made, dtype in zip(saved, dtypes, strict=True)
    ]


def operand_dtype(hidden_states: Tensor, execution: Execution) -> torch.dtype | None:
    """Returns the dtype that operands are cast to: fp32 for "fp32_operands", or autocast's; None to keep their
    dtype."""
    if execution.logits_dtype == "fp32_operands" and hidden_states.dtype != torch.float64:
        return torch.float32
    return _autocast_dtype(hidden_states)


def _autocast_dtype(hidden_states: Tensor) -> torch.dtype | None:
    """Returns the dtype of products under autocast; None without it and for fp64."""
    device_type = hidden_states.device.type
    if not torch.is_autocast_enabled(device_type) or hidden_states.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device_type)


def check_tensors(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuses tensors that are not full hidden states, weight and bias on one device.

    Raises:
        LigerDistError: with the shapes or devices.
    """
    for name, tensor in (("hidden_states", hidden_states), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_not_dtensor(name, tensor)
    if weight.dim() != 2 or hidden_states.dim() < 1 or hidden_states.shape[-1] != weight.shape[1]:
        raise LigerDistError(
            f"hidden_states have shape {tuple(hidden_states.shape)} and weight has shape {tuple(weight.shape)}; "
            "expected [..., D] and [V, D]. A weight of one dimension or size 0 is sharded: wrap the model with "
            "liger_dist.wrap."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise LigerDistError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), one for each class.")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != hidden_states.device:
            raise LigerDistError(
                f"{name} is on {tensor.device} but hidden_states are on {hidden_states.device}; move them to one "
                "device."
            )


def check_dtypes(hidden_states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    dtypes = {tensor.dtype for tensor in (hidden_states, weight, bias) if tensor is not None}
    if len(dtypes) > 1 or not hidden_states.is_floating_point():
        raise LigerDistError(
            f"hidden_states have dtype {hidden_states.dtype} and weight has dtype {weight.dtype}"
            + ("" if bias is None else f" and bias has dtype {bias.dtype}")
            + "; expected one floating dtype. Convert them, or run under torch.autocast."
        )


def check_not_dtensor(name: str, tensor: Tensor) -> None:
    """Refuses a DTensor: each rank holds a different part of it."""
    if hasattr(tensor, "placements"):
        raise LigerDistError(
            f"{name} is a DTensor with placements {tensor.placements}; expected a full local tensor. Wrap the model "
            "with liger_dist.wrap, which computes the loss inside lm_head."
        )
