"""The verb distillation_loss: a student's divergence from a teacher, without full logits of either, under any pair of
shardings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_dist_kernels import Divergence, DivergenceOptions, LossOptions

from .errors import LigerDistError, LogitsNotComputedError
from .fused_head.call import IGNORE_INDEX
from .fused_head.distilled import check_logits, intercepted
from .fused_head.lm_head import ComputesLoss
from .fused_head.model_loss import FusedLoss
from .fused_head.outside_calls import aligned_labels, check_distilled, shared_mean
from .fused_head.recipe import LogitTransform
from .fused_layers.swap import is_of_framework
from .losses.distillation import Distillation, Teacher
from .losses.draft_vocabulary import check_rows
from .losses.spec import CALL_KEYWORDS, KEYWORDS_OF_MODELS, SMALLEST_TEMPERATURE
from .model.peft import without_fsdp1
from .model.stages import stage_of
from .model.structure import is_linear_forward
from .record import Wrapped, inner_model, record_of
from .sharding.base import FullHead, Head
from .sharding.fsdp2 import forward as fsdp2_forward
from .sharding.process_groups import compute_device
from .sharding.single import Replicated
from .sharding.tensor_parallel import TensorParallelAdapter
from .sharding.vocab_parallel import VocabParallel, row_shards_of


class DistillationOutput(Protocol):
    """The output of a student's call, with its further fields."""

    loss: Tensor
    """0-d, fp32 (fp64 for fp64 models)"""
    divergence: Tensor
    """the part of the teacher, reduced as ``loss``, without gradient"""
    hard_loss: Tensor
    """the cross entropy of the labels, reduced as ``loss``, without gradient; 0 for a ``hard_weight`` of 0"""
    entropy: Tensor
    """``[B, S]`` in nats, of the student at the divergence's temperature, without gradient"""


def distillation_loss(
    student: nn.Module,
    teacher: nn.Module,
    *,
    labels: Tensor,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    teacher_inputs: Mapping[str, Any] | None = None,
    teacher_hidden: Tensor | None = None,
    teacher_softcap: float | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_rows: Tensor | None = None,
    num_items_in_batch: Tensor | float | None = None,
    **inputs: Any,
) -> DistillationOutput:
    """Runs teacher and student on one batch and returns the student's output, whose ``loss`` is
    ``(1 - hard_weight) * divergence + hard_weight * cross entropy of the labels``, averaged over the tokens with a
    label.

    The teacher runs without gradients, and the student inside the call of the teacher's lm_head, where both weights are
    unsharded; the student's gradients are made there (four products for each chunk of tokens), so that the backward
    needs no teacher. Both may be sharded differently, as long as every rank gives both the same tokens.

    Args:
        student: a model on which :func:`wrap` was called, or the wrapper or engine around it.
        teacher: a wrapped model in evaluation mode, or the wrapper or engine around it; with ``teacher_hidden`` its
            lm_head alone, an ``nn.Linear`` or the FSDP unit around one.
        labels: ``[B, S]`` token ids, ``-100`` where a token has no part in the loss. As for any call of the student
            they are shifted: the divergence at position s counts if ``labels[:, s + 1]`` is a token.
        divergence: "forward_kl" (of the student from the teacher, Hinton et al. 2015, arXiv:1503.02531), "reverse_kl"
            (arXiv:2306.08543), "jsd" (arXiv:2306.13649, equation 1) or "total_variation" (half of the sum of absolute
            differences), over the classes that both vocabularies have.
        beta: weight of the teacher in the mixture of "jsd", between 0 and 1.
        temperature: divisor of the logits of both in the divergence, which is not multiplied by its square.
        hard_weight: weight of the cross entropy of the labels, in [0, 1], at temperature 1.
        teacher_inputs: the teacher's inputs instead of ``inputs``, of the same shape: position s of both predicts the
            same token.
        teacher_hidden: ``[B, S, E]``, hidden states of the teacher's last layer, after its final norm.
        teacher_softcap: with ``teacher_hidden``, bound of the teacher's logits.
        teacher_logit_scale: with ``teacher_hidden``, factor of the teacher's logits.
        teacher_rows: ``[C]``, for a student whose lm_head has C rows of the teacher's vocabulary (a draft head): the
            teacher's token id of each, in any order. The teacher's distribution is then the softmax over these rows.
            ``labels`` are classes of the student: :func:`draft_labels` makes them of token ids.
        num_items_in_batch: divisor of the loss instead of the number of tokens with a label.
        inputs: ``input_ids``, ``attention_mask`` and other arguments that both models take (encoder-decoders:
            ``decoder_input_ids`` too); ``token_weight``, ``shift_labels`` and ``ignore_index`` go to the student
            alone.

    Returns:
        The output of the student's call with the fields of :class:`DistillationOutput`.

    Raises:
        LigerDistError: a model that is not wrapped, options out of their range, a teacher in training mode, inputs that
            do not fit; before anything is computed.
    """
    call = inputs | {"labels": labels}
    if num_items_in_batch is not None:
        call["num_items_in_batch"] = num_items_in_batch
    options = {"divergence": divergence, "beta": beta, "temperature": temperature, "hard_weight": hard_weight}
    transform = LogitTransform(softcap=teacher_softcap, scale=teacher_logit_scale)
    loss = _loss_of(student, "student")

    def check_teacher() -> None:
        check_divergence(options)
        check_transform(transform, teacher_hidden, teacher_inputs)
        _check_teacher(student, teacher, labels, teacher_hidden)
        if teacher_rows is not None:
            num_classes = loss.structure.vocab_size
            check_rows(teacher_rows, vocab_size=_classes(teacher), name="teacher_rows", num_classes=num_classes)

    check_distilled(loss, inner_model(student), call, check_teacher)
    running = _StudentCall(student, call, loss, options, teacher_rows)
    given = dict(inputs if teacher_inputs is None else teacher_inputs)
    given = {name: value for name, value in given.items() if name not in _STUDENT_KEYWORDS}
    try:
        with ExitStack() as stack:
            if teacher_hidden is None:
                stack.enter_context(_intercepted(teacher, running, given, labels))
            else:
                stack.enter_context(intercepted(without_fsdp1(teacher), running, full_linear, transform))
            stack.enter_context(torch.no_grad())
            output = teacher(**given) if teacher_hidden is None else teacher(teacher_hidden)
    except LogitsNotComputedError as error:
        raise LigerDistError(
            f"the teacher {type(inner_model(teacher)).__name__} reads its logits, or a hook does, which "
            f"distillation_loss does not compute ({str(error).split(':')[0]}); remove the hook, or distil from full "
            "logits without distillation_loss."
        ) from error
    finally:
        fsdp2_forward.reshard(teacher)
    if teacher_hidden is not None:
        head: Any = without_fsdp1(teacher)
        check_logits(output, head, None, running.vocab_size)
    elif running.has_run:
        logits = output.get("logits") if isinstance(output, dict) else output[0]
        check_logits(logits, inner_model(teacher), _loss_of(teacher, "teacher").recipe, running.vocab_size)
    return running.result(teacher)


_STUDENT_KEYWORDS = (*CALL_KEYWORDS, *KEYWORDS_OF_MODELS)


def _classes(teacher: nn.Module) -> int:
    """Returns the number of rows of the lm_head of ``teacher``, a wrapped model or an lm_head alone."""
    head = without_fsdp1(teacher)
    return head.out_features if isinstance(head, nn.Linear) else _loss_of(teacher, "teacher").structure.vocab_size


class CallerModes:
    """Gradient and autocast modes of the caller, while a teacher runs in different ones."""

    def __init__(self) -> None:
        self._computes_gradients = torch.is_grad_enabled()
        types = ("cpu", compute_device().type)
        self._autocast = {t: (torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Within, the modes are those of the caller."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._computes_gradients))
            for device_type, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(device_type, enabled=enabled, dtype=dtype))
            yield


class _StudentCall:
    """Runs the student when the teacher's lm_head is called; see [Note: The student runs inside the teacher's
    lm_head]. In the caller's modes: a teacher's engine may have set different ones."""

    def __init__(
        self, student: nn.Module, call: dict[str, Any], loss: FusedLoss, options: dict[str, Any], rows: Tensor | None
    ) -> None:
        self._student, self._call, self._loss, self._options = student, call, loss, options
        self._rows, self._modes = rows, CallerModes()
        self._output: Any = None
        self.vocab_size = 0
        """of the teacher, once it has called its lm_head"""

    def __call__(self, teacher: Teacher) -> None:
        self.vocab_size = len(teacher.weight)
        mode = Distillation(teacher=replace(teacher, rows=self._rows), **self._options)
        with self._loss.mode(mode), self._modes.restored():
            self._output = self._student(**self._call)

    def result(self, teacher: nn.Module) -> DistillationOutput:
        """Returns the student's output.

        Raises:
            LigerDistError: the teacher has not called its lm_head, or the student has computed another loss.
        """
        for model, is_missing in ((teacher, self._output is None), (self._student, self._has_another_loss())):
            if is_missing:
                raise LigerDistError(
                    f"{type(inner_model(model)).__name__} did not call its lm_head in the thread of distillation_loss; "
                    "expected one process for each device (DDP instead of nn.DataParallel), and a forward that "
                    "computes logits."
                )
        return cast(DistillationOutput, self._output)

    @property
    def has_run(self) -> bool:
        """True once the student has been called."""
        return self._output is not None

    def _has_another_loss(self) -> bool:
        return getattr(self._output, "divergence", None) is None


@contextmanager
def _intercepted(
    teacher: nn.Module, then: Callable[[Teacher], None], given: dict[str, Any], labels: Tensor
) -> Iterator[None]:
    """Within, the lm_head of a wrapped model calls ``then`` instead of computing logits."""
    loss, model = _loss_of(teacher, "teacher"), inner_model(teacher)
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    name = "decoder_input_ids" if is_encoder_decoder else "input_ids"
    ids = given.get(name, given.get("decoder_inputs_embeds" if is_encoder_decoder else "inputs_embeds"))
    if is_encoder_decoder and ids is None:
        raise LigerDistError(
            f"the teacher {type(model).__name__} is an encoder-decoder and gets no labels; pass "
            "decoder_input_ids, which both models take."
        )
    if ids is not None and ids.shape[:2] != labels.shape:
        raise LigerDistError(
            f"the teacher's inputs have shape {tuple(ids.shape)} and labels have shape {tuple(labels.shape)}; expected "
            "one shape. Pad the teacher's inputs so that the same position of both predicts the same token."
        )
    if "use_cache" in loss.signature.names:
        given.setdefault("use_cache", False)
    in_use = loss.head.in_use(model)
    if in_use.adapter is None:
        raise LigerDistError(f"the loss of the teacher {type(model).__name__} is not fused here: {in_use.unfusable}.")
    assert loss.recipe is not None
    if "forward" in vars(in_use.head) and not is_of_framework(vars(in_use.head)["forward"]):
        raise LigerDistError(
            f"the forward of lm_head of the teacher {type(model).__name__} has been patched; restore it, or distil "
            "from full logits without distillation_loss."
        )
    transform = loss.recipe.transform
    bias = None if transform.bias is None else model.get_buffer(transform.bias)
    with intercepted(in_use.head, then, in_use.adapter.full_head, transform, bias):
        yield


def full_linear(hidden_states: Tensor, head: Head) -> FullHead:
    """Returns input, weight and bias of an lm_head without a model, inside its forward."""
    if row_shards_of(head) is not None:
        return VocabParallel().full_head(hidden_states, head)
    if isinstance(head.weight, DTensor):
        return TensorParallelAdapter().full_head(hidden_states, head)
    return Replicated().full_head(hidden_states, head)


def _loss_of(model: nn.Module, role: str) -> FusedLoss:
    """Raises:
    LigerDistError: the model is not wrapped, or its loss is not fused.
    """
    record: Wrapped = record_of(inner_model(model))
    stage = stage_of(inner_model(model))
    if stage is not None:
        raise LigerDistError(
            f"the {role} is {stage} of a pipeline, which has the loss of its labels only; expected a whole model."
        )
    if record.found.recipe is None:
        raise LigerDistError(
            f"the loss of the {role} {type(inner_model(model)).__name__} is not fused ({record.found.unfused_reason}), "
            "so that a divergence cannot be computed in its lm_head."
        )
    return record.loss


def check_divergence(options: dict[str, Any]) -> None:
    """Refuses options of the divergence that are out of their range."""
    for name in ("beta", "temperature", "hard_weight"):
        if not isinstance(options[name], Real):
            raise LigerDistError(f"{name} is {options[name]!r}; expected a number.")
    beta, temperature, hard_weight = (options[name] for name in ("beta", "temperature", "hard_weight"))
    try:
        DivergenceOptions(divergence=options["divergence"], beta=beta, student=LossOptions(temperature=temperature))
    except (ValueError, TypeError) as error:
        raise LigerDistError(str(error)) from error
    if temperature < SMALLEST_TEMPERATURE:
        raise LigerDistError(f"temperature is {temperature!r}; expected at least {SMALLEST_TEMPERATURE}.")
    if not 0.0 <= hard_weight <= 1.0:
        raise LigerDistError(f"hard_weight is {hard_weight!r}; expected a number in [0, 1].")
    if beta != 0.5 and options["divergence"] != "jsd":
        raise LigerDistError(f"beta is {beta} and divergence is {options['divergence']!r}; beta is of 'jsd' alone.")


def check_transform(
    transform: LogitTransform, teacher_hidden: Tensor | None, teacher_inputs: Mapping[str, Any] | None
) -> None:
    """Refuses arguments that another one makes meaningless."""
    if teacher_hidden is None and transform != LogitTransform():
        raise LigerDistError(
            "teacher_softcap or teacher_logit_scale was given without teacher_hidden; those of a teacher are read from "
            "its code. Leave them out."
        )
    if teacher_hidden is not None and teacher_inputs is not None:
        raise LigerDistError("teacher_inputs and teacher_hidden were given; expected one of them.")
    try:
        LossOptions(softcap=transform.softcap, logit_scale=transform.scale)
    except (ValueError, TypeError) as error:
        raise LigerDistError(f"of the teacher, {error}") from error


def _check_teacher(student: nn.Module, teacher: nn.Module, labels: Tensor, teacher_hidden: Tensor | None) -> None:
    """Refuses a teacher whose distribution cannot be read."""
    if teacher_hidden is not None:
        _check_lm_head(student, teacher, labels, teacher_hidden)
        return
    inner = inner_model(teacher)
    _loss_of(teacher, "teacher")
    if inner_model(student) is inner:
        raise LigerDistError(
            "student and teacher are one model; expected two, because the weights of both are unsharded at once. For "
            "the model without its adapters as a teacher, save its hidden states first and pass teacher_hidden and a "
            "copy of its lm_head."
        )
    training = [name for name, module in inner.named_modules() if module.training]
    if training:
        raise LigerDistError(
            f"the teacher is in training mode ({len(training)} of its modules), with dropout if it has any; call "
            "teacher.eval()."
        )


def _check_lm_head(student: nn.Module, teacher: nn.Module, labels: Tensor, teacher_hidden: Tensor) -> None:
    head = check_lone_head(without_fsdp1(teacher), "teacher_hidden was given and the teacher is")
    if any(module is head for module in student.modules()):
        raise LigerDistError("the teacher's lm_head is a module of the student; pass a copy of it.")
    if teacher_hidden.shape[:-1] != labels.shape:
        raise LigerDistError(
            f"teacher_hidden has shape {tuple(teacher_hidden.shape)} and labels have shape {tuple(labels.shape)}; "
            "expected one hidden state for each label, [B, S, E]."
        )
    if teacher_hidden.shape[-1] != head.in_features:
        raise LigerDistError(
            f"teacher_hidden has {teacher_hidden.shape[-1]} features and the teacher's lm_head takes "
            f"{head.in_features}; expected the states of its last layer."
        )


def check_lone_head(head: nn.Module, given: str) -> nn.Linear:
    """Returns ``head``, an lm_head without its model.

    Args:
        given: start of the message, up to its class.

    Raises:
        LigerDistError: it is not an ``nn.Linear`` with the original forward.
    """
    forward = vars(head).get("forward", type(head).forward)
    is_own = forward is nn.Linear.forward or isinstance(head, ComputesLoss) or is_linear_forward(forward)
    if not isinstance(head, nn.Linear) or not is_own:
        raise LigerDistError(
            f"{given} a {type(head).__name__}; expected an lm_head, a torch.nn.Linear with its own forward, or the "
            "FSDP unit around one. Pass a copy of the model's get_output_embeddings()."
        )
    return head


def loss_of_full_logits(student: nn.Module, teacher: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Computes the loss of :func:`distillation_loss` with the arguments ``batch``, by torch from full logits of both in
    fp32 (or fp64): to compare with."""
    given = dict(batch)
    options: dict[str, Any] = {name: given.pop(name) for name in OPTIONS if name in given}
    loss, model = _loss_of(student, "student"), inner_model(student)
    items = given.get("num_items_in_batch")
    if items is None:
        items = shared_mean(loss, model, given).get("num_items_in_batch")
    aligned = aligned_labels(loss, model, given)
    labels = aligned.labels
    inputs = {name: value for name, value in given.items() if name not in _STUDENT_KEYWORDS}
    of_teacher = inputs if options.get("teacher_inputs") is None else dict(options["teacher_inputs"])
    with torch.no_grad():
        if options.get("teacher_hidden") is None:
            other = teacher(**of_teacher).logits
        else:
            other = teacher(options["teacher_hidden"])
    if options.get("teacher_rows") is not None:
        other = other.index_select(-1, options["teacher_rows"].to(other.device))
    logits = student(**inputs).logits
    dtype = torch.promote_types(logits.dtype, torch.float32)
    valid = labels != given.get("ignore_index", IGNORE_INDEX)
    logits, other, labels = logits[valid].to(dtype), other[valid].to(dtype), labels[valid]
    hard_weight = options.get("hard_weight", 0.0)
    each = (1.0 - hard_weight) * _divergence_of_logits(logits, other, options)
    each = each + hard_weight * nn.functional.cross_entropy(logits, labels, reduction="none")
    if given.get("token_weight") is not None:
        each = each * aligned.shift(given["token_weight"])[valid]
    total: Tensor = each.sum() / (len(each) if items is None else torch.as_tensor(items, device=each.device))
    return total


OPTIONS = (
    "divergence",
    "beta",
    "temperature",
    "hard_weight",
    "teacher_inputs",
    "teacher_hidden",
    "teacher_softcap",
    "teacher_logit_scale",
    "teacher_rows",
)
"""arguments of :func:`distillation_loss` that are not the student's"""


def _divergence_of_logits(logits: Tensor, other: Tensor, options: dict[str, Any]) -> Tensor:
    """Computes ``[T]``, over the classes that both have."""
    common, temperature = min(logits.shape[-1], other.shape[-1]), options.get("temperature", 1.0)
    if options.get("teacher_hidden") is not None:
        transform = LogitTransform(
            softcap=options.get("teacher_softcap"), scale=options.get("teacher_logit_scale", 1.0)
        )
        other = transform(other)
    log_q = (logits[:, :common] / temperature).log_softmax(-1)
    log_p = (other[:, :common] / temperature).log_softmax(-1)

    def kl(log_of: Tensor, log_from: Tensor) -> Tensor:
        return torch.sum(nn.functional.kl_div(log_from, log_of, reduction="none", log_target=True), -1)

    divergence: Divergence = options.get("divergence", "forward_kl")
    beta: float = options.get("beta", 0.5)
    if divergence == "forward_kl":
        return kl(log_p, log_q)
    if divergence == "reverse_kl":
        return kl(log_q, log_p)
    if divergence == "total_variation":
        return 0.5 * torch.sum((log_p.exp() - log_q.exp()).abs(), -1)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1.0 - beta))
    of_student = (1.0 - beta) * kl(log_q, log_m)
    return of_student + beta * kl(log_p, log_m)
