"""Definition of a loss (:class:`LossSpec`), and the losses of one model that hold gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Literal, TypedDict

import torch
from torch import Tensor

from liger_dist.config import check_count
from liger_dist.errors import LigerDistError
from liger_dist_kernels import LossOptions, TokenOutputs, TokenTargets

from .collectives import require
from .distillation import Distillation
from .labels import Targets
from .soft_labels import Remainder, SoftLabels
from .support import OF_SUPPORT

Reduction = Literal["mean", "sum", "none"]

OUTPUTS: tuple[str, ...] = (
    "log_prob",
    "log_prob_at",
    "top_k",
    "entropy",
    "sum_sq_prob",
    "is_top1",
    "z_loss",
    "mean_logit",
    "log_sum_exp",
)
DIFFERENTIABLE_OUTPUTS = frozenset({"log_prob", "log_prob_at", "entropy", "sum_sq_prob"})


class LossKeywords(TypedDict, total=False):
    """Keywords of a loss: fields of :class:`LossSpec` up to ``differentiable``, which documents them."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    temperature: Tensor | Sequence[float] | float
    class_weight: Tensor | None
    token_weight: Tensor | None
    reduction: Reduction
    num_items_in_batch: Tensor | float | None
    outputs: Sequence[str]
    token_ids: Tensor | None
    support_ids: Tensor | None
    top_k: int | None
    soft_labels: tuple[Tensor, Tensor] | None
    soft_weight: float | None
    remainder: Remainder | None
    differentiable: bool


KEYWORDS_OF_MODELS = ("labels", "num_items_in_batch", "ignore_index", "shift_labels")
"""keywords that transformers' models pass to their losses"""
CALL_KEYWORDS = (
    "label_smoothing",
    "z_loss",
    "temperature",
    "class_weight",
    "token_weight",
    "soft_labels",
    "soft_weight",
    "remainder",
    "outputs",
    "token_ids",
    "support_ids",
    "top_k",
    "differentiable",
    "logits_dtype",
)
"""options of :func:`liger_dist.linear_cross_entropy` that a call of a model may have in addition"""


class Uncast:
    """Holds a tensor argument of a model's loss, so that nothing around the model casts it: FSDP and DeepSpeed cast the
    floating tensors that a model is called with to 16 bits, in which a temperature of 0.7 is 0.6992. As
    ``model(..., temperature=Uncast(temperature))``.

    Args:
        tensor: on the device of the labels.
    """

    def __init__(self, tensor: Tensor) -> None:
        if not isinstance(tensor, Tensor):
            raise LigerDistError(f"Uncast was given a {type(tensor).__name__}; expected a torch.Tensor.")
        self.tensor = tensor


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """Definition of a loss: its checked keywords, and the options that a model adds. Every field changes the result.

    Raises:
        LigerDistError: a keyword out of its range; :meth:`check` compares them with the tensors of a call.
    """

    ignore_index: int = -100
    """label of tokens that are ignored"""
    label_smoothing: float = 0.0
    """mass of the uniform distribution, in [0, 1], as :func:`torch.nn.functional.cross_entropy`"""
    z_loss: float = 0.0
    """factor of the squared log-sum-exp added to each token's loss (PaLM, arXiv:2204.02311)"""
    softcap: float | None = None
    """bound of the logits' magnitude (Gemma 2, arXiv:2408.00118)"""
    logit_scale: float = 1.0
    """factor of the raw logits"""
    temperature: Tensor | Sequence[float] | float = 1.0
    """divisor of the transformed logits, above 0: a number, or an fp32 or fp64 tensor of the labels' shape or of its
    first dimensions, without gradient. A list of numbers becomes such a tensor"""
    class_weight: Tensor | None = None
    """``[V]``; weighs each token by its label, and the mean with it"""
    token_weight: Tensor | None = None
    """``[...]``, the labels' shape; multiplies each token's loss, not the divisor"""
    reduction: Reduction = "mean"
    """"none" (each token's loss), "sum", or "mean": divided by ``num_items_in_batch`` or the number of valid tokens
    (the sum of their class weights); the mean of no token is 0"""
    num_items_in_batch: Tensor | float | None = None
    """divisor of the mean, a number or a tensor of one element (the host never reads it)"""
    outputs: Sequence[str] = ()
    """names among :data:`OUTPUTS` to return with the loss"""
    token_ids: Tensor | None = None
    """``[..., K]``, the labels' shape and K class indices, negative for none; for the output ``log_prob_at``"""
    support_ids: Tensor | None = None
    """``[..., K]``, the labels' shape and K different class indices, negative for none: the classes of which each label
    was sampled (:mod:`.support`). ``log_prob``, ``entropy`` and ``sum_sq_prob`` are those of the distribution over
    them, and ``log_prob_at`` has their log-probabilities. A token without any has the whole vocabulary"""
    top_k: int | None = None
    """number of classes of the output ``top_k``"""
    soft_labels: tuple[Tensor, Tensor] | None = None
    """``(ids, probs)``, both ``[..., K]`` (the labels' shape and K), integers and fp32 or fp64: probabilities of some
    classes of each token, for the cross entropy ``sum_k probs_k * (lse - z_k)`` (Hinton et al. 2015, arXiv:1503.02531).
    A negative id means none; probabilities of one id are summed. Tokens with ``ignore_index`` have none"""
    soft_weight: float | None = None
    """weight of this cross entropy, in [0, 1]; that of the labels has ``1 - soft_weight``. None for 1"""
    remainder: Remainder | None = None
    """how the probability mass that a token's ``probs`` leave is treated: "drop" (None) drops it, "renormalize" divides
    by the sum, "spread" spreads it evenly over all classes without an id"""
    differentiable: bool = True
    """False if ``outputs`` carry no gradients, and cost no recomputation"""

    logit_bias: Tensor | None = None
    """``[V]``, added to the logits besides lm_head's bias; a constant"""
    distillation: Distillation | None = None
    """divergence from a teacher instead of the cross entropy; None without a teacher"""

    options: LossOptions = field(init=False)
    """scalar options of the kernels"""
    token_temperature: Tensor | None = field(init=False)
    """temperature, if it is a tensor"""
    soft: SoftLabels | None = field(init=False)
    """soft labels with their options"""
    differentiable_outputs: tuple[str, ...] = field(init=False)
    """outputs that carry gradients, in alphabetical order"""

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns the tensors of options that a backward reads again."""
        options = (self.temperature, self.class_weight, self.token_ids, *(self.soft_labels or ()))
        return tuple(option for option in options if isinstance(option, Tensor))

    def __post_init__(self) -> None:
        for name in ("class_weight", "token_weight", "token_ids", "support_ids"):
            tensor = getattr(self, name)
            if tensor is not None and not isinstance(tensor, Tensor):
                raise LigerDistError(f"{name} is of type {type(tensor).__name__}; expected a torch.Tensor or None.")
        temperature = _as_temperature(self.temperature)
        soft = _as_soft_labels(self.soft_labels, self.soft_weight, self.remainder)
        try:
            options = LossOptions(
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
                softcap=self.softcap,
                logit_scale=self.logit_scale,
                temperature=1.0 if isinstance(temperature, Tensor) else temperature,
                soft_weight=0.0 if soft is None else soft.weight,
            )
        except (ValueError, TypeError) as error:
            raise LigerDistError(str(error)) from error
        outputs = self._with_support(as_output_names(self.outputs))
        carrying = DIFFERENTIABLE_OUTPUTS.intersection(outputs) if self.differentiable else ()
        found = {
            "outputs": outputs,
            "differentiable_outputs": tuple(sorted(carrying)),
            "temperature": temperature,
            "token_temperature": temperature if isinstance(temperature, Tensor) else None,
            "soft": soft,
            "options": options,
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def _with_support(self, outputs: tuple[str, ...]) -> tuple[str, ...]:
        """Asks for the log-probabilities of the support; returns the outputs with them."""
        if self.support_ids is None:
            return outputs
        if self.token_ids is not None and self.token_ids is not self.support_ids:
            raise LigerDistError(
                "token_ids and support_ids were given; expected one of them. log_prob_at has the log-probabilities of "
                "the support."
            )
        if not set(OF_SUPPORT).intersection(outputs):
            raise LigerDistError(
                f"support_ids were given and outputs is {outputs}, so nothing reads them; add one of "
                f"{', '.join(OF_SUPPORT)} to outputs."
            )
        object.__setattr__(self, "token_ids", self.support_ids)
        return outputs if "log_prob_at" in outputs else (*outputs, "log_prob_at")

    @property
    def token_outputs(self) -> TokenOutputs:
        """Outputs that need a further sum over the vocabulary."""
        names, spreads = self.outputs, self.soft is not None and self.soft.remainder == "spread"
        return TokenOutputs(
            entropy="entropy" in names, sum_sq_prob="sum_sq_prob" in names, mean_logit=spreads or "mean_logit" in names
        )

    def token_targets(
        self, targets: Targets, shape: torch.Size, *, vocab_size: int, dtype: torch.dtype
    ) -> TokenTargets:
        """Builds the targets of each token of ``targets``, for labels of ``shape`` and statistics of ``dtype``."""
        ids_TK, soft_TK, uniform_T, temperature_T = self.token_ids, None, None, self.token_temperature
        if temperature_T is not None:
            missing = len(shape) - temperature_T.dim()
            expanded = temperature_T.reshape(*temperature_T.shape, *[1] * missing).expand(shape)
            temperature_T = targets.of_tokens(expanded, shape)
        if ids_TK is not None:
            ids_TK = targets.of_tokens(ids_TK.long(), shape)
        if self.soft is not None:
            soft_ids_TK = targets.of_tokens(self.soft.ids.long(), shape)
            probs_TK = targets.of_tokens(self.soft.probs, shape)
            soft_TK, uniform_T = self.soft.factors(soft_ids_TK, probs_TK, vocab_size=vocab_size, dtype=dtype)
            ids_TK = soft_ids_TK if ids_TK is None else torch.cat([ids_TK, soft_ids_TK], 1)
        return TokenTargets(targets.labels_T, temperature_T, ids_TK, soft_TK, uniform_T)

    def check(self, *, vocab_size: int, labels_shape: torch.Size) -> None:
        """Refuses arguments that contradict each other or the tensors.

        Raises:
            LigerDistError: with the value, what was expected and the way out.
        """
        _check_reduction(self.reduction, self.num_items_in_batch)
        unknown = [name for name in self.outputs if name not in OUTPUTS]
        if unknown:
            raise LigerDistError(f"outputs contains {unknown[0]!r}; expected names among {', '.join(OUTPUTS)}.")
        if "mean_logit" in self.outputs and self.class_weight is not None:
            raise LigerDistError(
                "outputs contains 'mean_logit' and class_weight is given, which changes the sum over the vocabulary; "
                "leave one of them out."
            )
        check_temperature(self.token_temperature, labels_shape)
        check_token_ids(self.token_ids, labels_shape, vocab_size)
        _check_given_with("token_ids", self.token_ids is not None, "log_prob_at", tuple(self.outputs))
        _check_given_with("top_k", self.top_k is not None, "top_k", tuple(self.outputs))
        if self.top_k is not None:
            check_count("top_k", self.top_k, "classes")
        if self.top_k is not None and self.top_k > vocab_size:
            raise LigerDistError(f"top_k is {self.top_k} but lm_head has {vocab_size} rows; ask for at most as many.")
        if self.soft is not None:
            self.soft.check(vocab_size=vocab_size, labels_shape=labels_shape)
            if self.class_weight is not None:
                raise LigerDistError(
                    "soft_labels and class_weight were given; expected one of them. Multiply the probabilities by the "
                    "weights of their classes instead."
                )
        _check_weight("logit_bias", self.logit_bias, torch.Size([vocab_size]), "one number for each class")
        _check_weight("class_weight", self.class_weight, torch.Size([vocab_size]), "one weight for each class")
        _check_weight("token_weight", self.token_weight, labels_shape, "one weight for each label")


class PendingGradients:
    """Numbers the losses of one model. The first loss after a backward computes its gradients in its forward and holds
    them until its backward. Those that follow recompute their logits in the backward, which costs a fourth product and
    holds nothing.

    A holder without a backward stops counting when a later loss runs its backward; until its graph is freed, a second
    gradient may then be held. All of this depends on the order of calls, which is the same on every rank, and not on
    the garbage collector.
    """

    def __init__(self) -> None:
        self._last = 0
        self._holder: int | None = None

    def begin(self) -> tuple[int, bool]:
        """Starts a loss; returns its number, and True if it may hold a gradient."""
        self._last += 1
        may_hold = self._holder is None
        if may_hold:
            self._holder = self._last
        return self._last, may_hold

    def has_begun_backward(self, number: int) -> None:
        """Records that the backward of a loss runs."""
        if self._holder is not None and number >= self._holder:
            self._holder = None


def _as_soft_labels(
    soft_labels: tuple[Tensor, Tensor] | None, weight: float | None, remainder: Remainder | None
) -> SoftLabels | None:
    """Builds soft labels with the defaults of their options.

    Raises:
        LigerDistError: options without soft labels, or soft labels that are not two tensors.
    """
    if soft_labels is None:
        for name, value in (("soft_weight", weight), ("remainder", remainder)):
            if value is not None:
                raise LigerDistError(f"{name} is {value!r} and soft_labels are missing; pass soft_labels=(ids, probs).")
        return None
    is_pair = isinstance(soft_labels, Sequence) and len(soft_labels) == 2
    if not is_pair or not all(isinstance(tensor, Tensor) for tensor in soft_labels):
        found = [type(item).__name__ for item in (soft_labels if isinstance(soft_labels, Sequence) else [soft_labels])]
        raise LigerDistError(
            f"soft_labels are {', '.join(found)}; expected two tensors (ids, probs): class indices and their "
            "probabilities, the labels' shape and K."
        )
    given = {"weight": weight, "remainder": remainder}
    ids, probs = soft_labels
    return SoftLabels(ids=ids, probs=probs, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


SMALLEST_TEMPERATURE = 1e-6
"""below it scaled logits overflow"""


def _as_temperature(temperature: Tensor | Sequence[float] | float) -> Tensor | float:
    """Converts a list of numbers to an fp32 tensor; returns tensors and numbers as they are.

    Raises:
        LigerDistError: it is none of these, or a number that is too small.
    """
    expected = (
        "expected a number above 0, a list of numbers, or an fp32 tensor: one for the call, each sequence or token"
    )
    if isinstance(temperature, Sequence) and not isinstance(temperature, str):
        try:
            return torch.tensor(temperature, dtype=torch.float32)
        except (ValueError, TypeError) as error:
            raise LigerDistError(f"temperature is {temperature!r}; {expected}.") from error
    if isinstance(temperature, Tensor):
        return temperature
    if not isinstance(temperature, Real):
        raise LigerDistError(f"temperature is {temperature!r}; {expected}.")
    if 0 < temperature < SMALLEST_TEMPERATURE:
        raise LigerDistError(
            f"temperature is {temperature!r}; expected at least {SMALLEST_TEMPERATURE}, because smaller ones overflow."
        )
    return temperature


def as_output_names(outputs: Sequence[str]) -> tuple[str, ...]:
    """Converts ``outputs`` to a tuple; a single string counts as one name."""
    if not isinstance(outputs, Sequence):
        raise LigerDistError(f"outputs is {outputs!r}; expected a sequence of names among {', '.join(OUTPUTS)}.")
    return (outputs,) if isinstance(outputs, str) else tuple(outputs)


def _check_weight(name: str, weight: Tensor | None, shape: torch.Size, meaning: str) -> None:
    if weight is None:
        return
    if weight.shape != shape:
        raise LigerDistError(
            f"{name} has shape {tuple(weight.shape)}; expected {meaning}, shape {tuple(shape)}. Expand or gather it "
            "first."
        )
    _check_constant(name, weight)


def _check_constant(name: str, values: Tensor) -> None:
    """Refuses values that are not floating, or that require a gradient."""
    if not values.is_floating_point():
        raise LigerDistError(f"{name} has dtype {values.dtype}; expected a floating dtype. Convert it with .float().")
    if values.requires_grad:
        raise LigerDistError(
            f"{name} requires a gradient, which this loss does not compute. Detach it, or ask for reduction='none' (or "
            "outputs=('log_prob',)) and multiply yourself."
        )


def check_temperature(temperature: Tensor | None, labels_shape: torch.Size) -> None:
    """Refuses a temperature that is not one number above 0 for each token, sequence or call; on a GPU, a device-side
    assertion checks its values."""
    if temperature is None:
        return
    _check_constant("temperature", temperature)
    if temperature.shape != labels_shape[: temperature.dim()]:
        raise LigerDistError(
            f"temperature has shape {tuple(temperature.shape)} and labels have shape {tuple(labels_shape)}; expected "
            "one number for each token or each sequence, the labels' shape or its first dimensions."
        )
    if temperature.element_size() < 4:
        raise LigerDistError(
            f"temperature has dtype {temperature.dtype}, in which 0.7 is {torch.tensor(0.7, dtype=temperature.dtype)}; "
            "expected fp32 or fp64. FSDP with mixed precision casts floating arguments of a model that it wraps: give "
            "liger_dist.Uncast(temperature), a number, or a list of numbers, one for each sequence."
        )
    if torch.compiler.is_compiling():
        return
    is_valid = (torch.isfinite(temperature) & (temperature >= SMALLEST_TEMPERATURE)).all()
    sentence = (
        f"temperature has a number that is not finite or not above 0 by at least {SMALLEST_TEMPERATURE}; expected "
        "divisors of logits"
    )
    require(is_valid, sentence, lambda: f"The smallest is {temperature.min().item()}.")


def check_token_ids(token_ids: Tensor | None, labels_shape: torch.Size, vocab_size: int) -> None:
    """Refuses ids that are not K classes for each token; on a GPU, a device-side assertion checks their range."""
    if token_ids is None:
        return
    has_ids = token_ids.dim() > 0 and token_ids.shape[-1] > 0 and token_ids.shape[:-1] == labels_shape
    if token_ids.dtype not in (torch.int64, torch.int32) or not has_ids:
        raise LigerDistError(
            f"token_ids have shape {tuple(token_ids.shape)} and dtype {token_ids.dtype}; expected K > 0 class indices "
            f"of dtype torch.int64 or torch.int32 for each label, shape {(*labels_shape, 'K')}, negative for none."
        )
    if torch.compiler.is_compiling():
        return
    in_range = (token_ids < vocab_size).all()
    sentence = f"token_ids has an id of {vocab_size} or more; expected ids in [0, {vocab_size}), or negative for none"
    require(in_range, sentence, lambda: f"The largest is {token_ids.max().item()}.")


def _check_given_with(name: str, is_given: bool, output: str, outputs: tuple[str, ...]) -> None:
    """Refuses an argument of an output without the output, and the reverse."""
    if is_given and output not in outputs:
        raise LigerDistError(
            f"{name} was given and outputs is {outputs}, so nothing reads it; add {output!r} to outputs."
        )
    if output in outputs and not is_given:
        raise LigerDistError(f"outputs contains {output!r} and {name} is missing; pass {name} along with it.")


def _check_reduction(reduction: str, num_items_in_batch: Tensor | float | None) -> None:
    """Refuses an unknown reduction, and a number of items that the reduction does not use."""
    if reduction not in ("mean", "sum", "none"):
        raise LigerDistError(f"reduction is {reduction!r}; expected 'mean', 'sum' or 'none'.")
    if num_items_in_batch is None:
        return
    if reduction != "mean":
        raise LigerDistError(
            f"num_items_in_batch was given with reduction={reduction!r}, which divides by nothing. Use "
            "reduction='mean', which divides by num_items_in_batch, or leave it out."
        )
    if isinstance(num_items_in_batch, Tensor):
        if num_items_in_batch.numel() != 1:
            raise LigerDistError(
                f"num_items_in_batch has shape {tuple(num_items_in_batch.shape)}; expected one number. Sum it over "
                "ranks or micro-batches first."
            )
    elif not (isinstance(num_items_in_batch, Real) or getattr(num_items_in_batch, "shape", None) == ()) or (
        not num_items_in_batch > 0
    ):
        raise LigerDistError(
            f"num_items_in_batch is {num_items_in_batch!r}; expected a count above 0, a number or a tensor of one "
            "element. A batch without any token that counts has no mean: leave it out, or divide by 1."
        )
