"""The verb verify: one micro-batch through the wrapped model, and through the model as it was before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from liger_dist.model.document_rows import DocumentRows, as_packed_row, as_padded_rows, rows_of

from .config import LOGITS
from .distillation import OPTIONS, distillation_loss, loss_of_full_logits
from .errors import LigerDistError
from .explain import explain
from .fused_head.call import IGNORE_INDEX, noted_losses
from .fused_head.model_loss import FusedLoss
from .fused_head.outside_calls import checked_call, shared_mean
from .model.documents import LENGTHS, read_documents
from .model.peft import active_head
from .model.stages import stage_of
from .rank_agreement import GradientErrors, disagreements, disagreements_of_gradients
from .record import Wrapped, inner_model, record_of
from .sequences import gather_batch
from .sharding import deepspeed, fsdp1, fsdp1_forward, resharding
from .sharding.fsdp2.strategy import unfinished_reduction
from .sharding.process_groups import sentences_of_all_ranks
from .sharding.reentrant_layers import is_reentrant
from .sharding.sequence_parallel import SequenceAxis, detached, sequence_axis_of
from .wrap import full_logits, original_layers

TOLERANCES: dict[torch.dtype | None, float] = {torch.float64: 1e-5, torch.float32: 1e-4}
"""of gradients, relative L2; 16-bit dtypes are held to 2e-2"""
SINGLE = 5.0
"""how many tolerances a single parameter may differ by, against its norm or, if that is tiny, against a thousandth
of the largest"""
OF_LAYERS = 5.0
"""how many tolerances all gradients may differ by from those of the model's original layers, which round elsewhere"""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What :func:`verify` saw. ``print(verification)`` shows it as a table; every number but the losses is the
    same on all ranks."""

    adapter: str
    """"none" where the loss is not fused"""
    loss: float
    """of this rank, fused if it is; on an axis "sp" the mean of the ranks that share its sequences"""
    reference_loss: float
    """of this rank, by the model's original loss on full logits"""
    loss_dtype: torch.dtype
    """of the loss as it leaves the outermost wrapper"""
    head_gradient_error: float
    """of lm_head's parameters: relative L2 against the model's original loss, over all ranks"""
    gradient_error: float
    """the same of all parameters together"""
    worst_parameter: tuple[str, float]
    """the parameter with the largest error, against its norm, or a thousandth of the largest where that is more"""
    linearity_error: float
    """relative L2 between lm_head's gradient of twice the loss and twice its gradient"""
    own_loss: float
    """of this rank, by the model as it was before :func:`wrap`: original loss, layers and attention"""
    own_gradient_error: float
    """of all parameters together: relative L2 against the model as it was before :func:`wrap`"""
    kept: tuple[str, ...]
    """what that model kept of this library's, as clauses"""
    other_rows: str
    """where the texts of the batch were computed a second time: "one row" for a batch with a text in each row,
    "separate rows" for a packed one; otherwise why they were not, as a clause"""
    other_rows_error: float | None
    """of all parameters together, computed there: relative L2 against the model as it was before :func:`wrap`; None if
    they were not"""
    losses: tuple[tuple[float, float], ...]
    """of this rank, fused and unfused: each loss of a model that computes several, as for multi-token prediction; empty
    for one loss"""
    tolerance: float
    problems: tuple[str, ...]
    """sentences; empty when everything agrees"""

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return not self.problems

    def _of_other_rows(self) -> str:
        return f"texts in {self.other_rows}, gradient error {self.other_rows_error:.1e}"

    def __str__(self) -> str:
        rows = [
            ("adapter", self.adapter),
            ("loss", f"{self.loss:.6f}, unfused {self.reference_loss:.6f}, {self.loss_dtype}"),
            *((f"loss {n}", f"{a:.6f}, unfused {b:.6f}") for n, (a, b) in enumerate(self.losses, 1)),
            ("gradient error", f"head {self.head_gradient_error:.1e}, all {self.gradient_error:.1e}"),
            ("worst parameter", f"{self.worst_parameter[0]} {self.worst_parameter[1]:.1e}"),
            ("linearity error", f"{self.linearity_error:.1e}"),
            ("before wrap", f"loss {self.own_loss:.6f}, gradient error {self.own_gradient_error:.1e}"),
            ("packed", f"not compared: {self.other_rows}" if self.other_rows_error is None else self._of_other_rows()),
            *(("not compared", clause) for clause in self.kept),
            ("tolerance", f"{self.tolerance:.0e}"),
            ("verdict", "ok" if self.ok else f"{len(self.problems)} problems"),
            *(("problem", sentence) for sentence in self.problems),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@dataclass(frozen=True)
class _Pass:
    loss: Tensor
    dtype: torch.dtype | None
    """dtype in which lm_head computed"""
    gradients: dict[str, Tensor | None]
    disagreements: tuple[str, ...] = ()
    """differences between ranks in gradients, as sentences"""
    losses: tuple[float, ...] = ()
    """all that were computed, in their order"""
    draws: bool = False
    """True if the forward has drawn random numbers"""


@dataclass(frozen=True)
class _Passes:
    fused: _Pass
    doubled: _Pass
    """fused, with twice the loss"""
    unfused: _Pass
    """on full logits"""
    original: _Pass
    """on full logits, with the model's original layers and attention"""
    other: _Pass | None
    """fused, with the texts in other rows"""
    kept: tuple[str, ...]
    other_rows: str
    """see :class:`Verification`"""


def verify(
    model: nn.Module, batch: dict[str, Any], *, teacher: nn.Module | None = None, optimizer: Any = None
) -> Verification:
    """Runs one micro-batch through the wrapped ``model`` and compares it with the model's original loss, or with a
    ``teacher`` the distillation loss with that of full logits; and with the model as it was before :func:`wrap`.

    Packed documents run apart in that model, one in each row, so that nothing can read another document there; and a
    batch with one text in each row runs in one packed row as well, where the model may be packed and draws no random
    numbers.

    Five passes forward and backward with the same random numbers: fused, fused with twice the loss, unfused, unfused
    with the model's original layers and attention, and fused with the texts in other rows. Those without fusion
    materialise the logits: choose a batch that fits. On a mesh with an axis "sp" they compute the full sequences on
    every rank, without exchanges. Gradients are compared over the ranks too: each trained parameter of ``model`` has
    one on all ranks or on none, and ranks that share a parameter have the same. What other code had done to the model
    before :func:`wrap`, its sharding included, is on both sides of the comparison. Where the loss is not fused, layers,
    attention and ranks are compared as well.

    Every rank has to call it, between optimiser steps. Parameters, buffers, optimiser and random number generators are
    as before afterwards, and no gradient is left.

    Args:
        model: the result of :func:`wrap`, or the engine that DeepSpeed made of it.
        batch: this rank's arguments of the model, of which at least one label is not ignored; with a teacher, those of
            :func:`distillation_loss` beside the two models.
        teacher: the teacher of :func:`distillation_loss`; None for the model's original loss.
        optimizer: the optimizer that will update the model, with ``param_groups``: it has to hold all trained
            parameters that the next forward reads, and no further ones. None to leave that out; under DeepSpeed the
            engine has one.

    Raises:
        LigerDistError: on every rank alike; the model is not wrapped, gradients are waiting for an optimiser step, a
            rank has no labels, or there is a teacher and the loss is not fused. On a rank whose memory is too small for
            the full sequences of an axis "sp".
    """
    inner = inner_model(model)
    record = record_of(inner)
    axis = _sequence_axis(record)
    _agree(_objection(model, record, batch, with_teacher=teacher is not None, shares_sequences=axis is not None))
    chosen = explain(model)
    if chosen.adapter is None and record.found.recipe is not None:
        raise LigerDistError(f"no adapter computes the loss of this model:\n{chosen}")
    with _kept(inner):
        passes = _passes(model, batch, teacher, axis)
    fused, doubled, unfused = passes.fused, passes.doubled, passes.unfused
    errors = GradientErrors(fused.gradients, unfused.gradients)
    heads = _parameters_of_the_head(model, inner.get_submodule(record.found.structure.head_name))
    twice = {name: None if gradient is None else 2 * gradient for name, gradient in fused.gradients.items()}
    linearity = GradientErrors(doubled.gradients, twice)
    verification = Verification(
        adapter=chosen.adapter or "none",
        loss=float(fused.loss),
        reference_loss=float(unfused.loss),
        loss_dtype=fused.loss.dtype,
        head_gradient_error=errors.of(heads),
        gradient_error=errors.of(list(fused.gradients)),
        worst_parameter=errors.worst(),
        linearity_error=linearity.of(heads if errors.reach(heads) else list(fused.gradients)),
        own_loss=float(passes.original.loss),
        own_gradient_error=GradientErrors(fused.gradients, passes.original.gradients).of(list(fused.gradients)),
        kept=passes.kept,
        other_rows=passes.other_rows,
        other_rows_error=None
        if passes.other is None
        else GradientErrors(passes.other.gradients, passes.original.gradients).of(list(fused.gradients)),
        losses=tuple(zip(fused.losses, unfused.losses, strict=False)),
        tolerance=_tolerance(fused),
        problems=(),
    )
    problems = [*_problems(verification), *disagreements(chosen, model), *fused.disagreements]
    problems += [] if optimizer is None else _problems_of_optimizer(model, optimizer)
    problems += _problems_of_checkpoints(inner)
    if not errors.reach(list(fused.gradients)):
        problems.append("no gradient reached any parameter in any pass, so nothing has been compared")
    return replace(verification, problems=tuple(sentences_of_all_ranks(problems)))


def _run(
    model: nn.Module, loss_of: Callable[[], Tensor], *, factor: float = 1.0, compares_ranks: bool = False
) -> _Pass:
    """Runs one forward, ``loss_of``, and backward; the random number generators are restored."""
    inner = inner_model(model)
    head = active_head(inner.get_submodule(record_of(inner).found.structure.head_name))
    dtypes: list[torch.dtype | None] = []
    # After the hooks of FSDP, which cast inputs.
    hook = head.register_forward_pre_hook(lambda _, args: dtypes.extend(map(_compute_dtype, args[:1])))
    try:
        with (
            torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []),
            noted_losses() as losses,
        ):
            before = _random_state()
            loss = loss_of()
            draws = not torch.equal(before, _random_state())
            several = tuple(map(float, losses)) if len(losses) > 1 else ()
            if deepspeed.is_engine(model):
                deepspeed.backward(model, loss * factor)
            else:
                (loss * factor).backward()
            gradients = _local_gradients(model)
            disagreements = disagreements_of_gradients(model) if compares_ranks else []
    finally:
        hook.remove()
        _clear_gradients(model)
    return _Pass(loss.detach(), dtypes[-1] if dtypes else None, gradients, tuple(disagreements), several, draws)


def _random_state() -> Tensor:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _passes(model: nn.Module, batch: dict[str, Any], teacher: nn.Module | None, axis: SequenceAxis | None) -> _Passes:
    def loss_of_wrapped() -> Tensor:
        output = model(**batch) if teacher is None else distillation_loss(model, teacher, **batch)
        loss: Tensor = output.loss
        return loss

    fused = _run(model, loss_of_wrapped, compares_ranks=True)
    doubled = _run(model, loss_of_wrapped, factor=2.0)
    if axis is not None and teacher is None:
        fused = replace(fused, loss=_mean(fused.loss, axis))
    unfused = _run_unfused(model, batch, teacher, axis)
    is_whole = teacher is not None or axis is not None or record_of(inner_model(model)).loss.is_encoder_decoder
    original_batch, other_batch, reason = _in_other_rows(model, batch, is_whole=is_whole, draws=fused.draws)
    with _original_layers(model, original_batch, is_whole=is_whole) as kept:
        original = _run_unfused(model, original_batch, teacher, axis)
    # On every rank: a collective.
    agrees = _agrees(fused, original)
    if original_batch is batch and not agrees:
        reason = reason or "the batch itself has another gradient before wrap"
    reasons = sentences_of_all_ranks([reason] if reason else [])
    if reasons or other_batch is None:
        return _Passes(fused, doubled, unfused, original, None, kept, reasons[0])
    other = _run(model, lambda: model(**other_batch).loss)
    return _Passes(
        fused, doubled, unfused, original, other, kept, "one row" if original_batch is batch else "separate rows"
    )


def _agrees(fused: _Pass, original: _Pass) -> bool:
    error = GradientErrors(fused.gradients, original.gradients).of(list(fused.gradients))
    return error <= OF_LAYERS * _tolerance(fused)


def _tolerance(fused: _Pass) -> float:
    return TOLERANCES.get(fused.dtype, 2e-2)


def _splits_alike(batch: dict[str, Any], documents: DocumentRows) -> bool:
    """True if rows of single documents have the losses of the batch: it has no dense mask, and no document's first
    token has a label, which the document before would predict."""
    mask = batch.get("attention_mask")
    ignore_index = batch.get("ignore_index", IGNORE_INDEX)
    first = documents.padded(batch["labels"].reshape(documents.shape), ignore_index)[:, 0]
    return (mask is None or mask.dim() == 2) and (
        batch.get("shift_labels") is not None or bool((first == ignore_index).all())
    )


def _in_other_rows(
    model: nn.Module, batch: dict[str, Any], *, is_whole: bool, draws: bool
) -> tuple[dict[str, Any], dict[str, Any] | None, str]:
    """Returns the batch with each of its texts in a separate row, if it can be; the texts in other rows than those of
    the batch; and why there are none of those, as a clause.

    Args:
        is_whole: True if the texts have to stay in their rows.
        draws: True if the model draws random numbers, of which other rows get different ones.
    """
    if is_whole or draws:
        return batch, None, "rows stay as they are" if is_whole else "the model draws random numbers"
    found = read_documents(batch)
    ignore_index = batch.get("ignore_index", IGNORE_INDEX)
    if found is not None and found.is_packed:
        documents = rows_of(found)
        if documents is None or not _splits_alike(batch, documents):
            return batch, None, "a label or mask of the batch joins documents"
        rows = as_padded_rows(batch, documents, ignore_index)
        return rows, rows, ""
    objection = record_of(inner_model(model)).found.packing.objection()
    if objection is not None:
        return batch, None, f"refused: {objection}"
    if any(getattr(getattr(module, "config", None), "index_topk", None) for module in inner_model(model).modules()):
        return batch, None, "its sparse attention breaks ties by the length of a row"
    if _predicts_across(record_of(inner_model(model))):
        return batch, None, "its further losses predict tokens of the next document"
    if _counts_padding(model) and batch.get("attention_mask") is not None:
        return batch, None, "the loss of its router may count padding"
    return batch, *as_packed_row(batch, ignore_index)


def _predicts_across(record: Wrapped) -> bool:
    recipe = record.found.recipe
    return recipe is not None and any(one.cut is None for one in (*recipe.training.further, *recipe.evaluation.further))


def _counts_padding(model: nn.Module) -> bool:
    configs = (getattr(module, "config", None) for module in inner_model(model).modules())
    return any(getattr(config, "output_router_logits", False) for config in configs)


@contextmanager
def _original_layers(model: nn.Module, batch: dict[str, Any], *, is_whole: bool) -> Iterator[tuple[str, ...]]:
    """Within, the model is as it was before :func:`wrap`, for ``batch``. Yields what it keeps of this library's, which
    packed documents and rows with padding before their text need."""
    record = record_of(inner_model(model))
    is_recurrent = record.found.packing.recurrent is not None and _sequence_axis(record) is None
    found = read_documents(batch) if is_recurrent or not is_whole else None
    is_packed = batch.get(LENGTHS) is not None or (found is not None and found.is_packed)
    keeps_rows = is_recurrent and found is not None and rows_of(found) is not None
    with original_layers(model, keeps_attention=is_packed, keeps_rows=keeps_rows) as kept:
        yield kept


def _run_unfused(
    model: nn.Module, batch: dict[str, Any], teacher: nn.Module | None, axis: SequenceAxis | None
) -> _Pass:
    """Runs a pass on full logits."""
    if teacher is not None:
        return _run(model, lambda: loss_of_full_logits(model, teacher, batch))
    with full_logits(model):
        if axis is not None:
            return _run_full_sequences(model, batch, axis)
        return _run(model, lambda: model(**_with_shared_mean(model, batch)).loss)


def _with_shared_mean(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    inner = inner_model(model)
    record = record_of(inner)
    return batch if record.found.recipe is None else batch | shared_mean(record.loss, inner, batch)


def _sequence_axis(record: Wrapped) -> SequenceAxis | None:
    layers = record.found.structure.layers
    return sequence_axis_of(layers[0]) if layers else None


def _mean(loss: Tensor, axis: SequenceAxis) -> Tensor:
    """Averages over the ranks that share sequences, each of which has its tokens' contribution."""
    loss = loss.clone()
    dist.all_reduce(loss, group=axis.group)
    return loss / axis.size


def _run_full_sequences(model: nn.Module, shard: dict[str, Any], axis: SequenceAxis) -> _Pass:
    """Runs the unfused pass on the full sequences of which ``shard`` is this rank's."""
    record = record_of(inner_model(model))
    batch = gather_batch(shard, axis)
    if batch.get("num_items_in_batch") is not None:
        # Each rank of the axis has all labels of its sequences now.
        batch["num_items_in_batch"] = batch["num_items_in_batch"] * axis.size
    batch = _with_shared_mean(model, batch)
    try:
        with detached(record.found.structure.layers):
            return _run(model, lambda: model(**batch).loss)
    except torch.OutOfMemoryError as error:
        raise LigerDistError(
            f"the full sequences, {tuple(batch['input_ids'].shape)} tokens, do not fit one rank ({error}); verify with "
            "shorter ones."
        ) from error


def _compute_dtype(hidden_states: Tensor) -> torch.dtype:
    device_type = hidden_states.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_states.dtype


def _local_gradients(root: nn.Module) -> dict[str, Tensor | None]:
    """Copies every trained parameter's gradient, by its name: what this rank stores of it, None for nothing; or the
    full one under DeepSpeed (a collective under ZeRO)."""
    gradients: dict[str, Tensor | None] = {}
    is_engine = deepspeed.is_engine(root)
    for name, parameter in root.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = deepspeed.full_gradient(parameter) if is_engine else parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        gradients[name] = None if gradient is None else gradient.detach().clone()
    return gradients


def _clear_gradients(root: nn.Module) -> None:
    """Clears gradients as after an optimizer step, without the step."""
    for parameter in root.parameters():
        parameter.grad = None
    if deepspeed.is_engine(root):
        deepspeed.clear_gradients(root)


def _unfinished_step(root: nn.Module) -> str | None:
    """Returns which part of an optimizer step has begun and not ended, as a clause; None between steps."""
    if deepspeed.is_engine(root) and deepspeed.has_unfinished_step(root):
        return "DeepSpeed has gradients that wait for engine.step()"
    try:
        resharding.end_failed_backward(inner_model(root))
    except LigerDistError as error:
        return str(error).rstrip(".")
    if any(p.grad is not None and bool((p.grad != 0).any()) for p in root.parameters()):
        return "gradients are waiting for an optimizer step"
    if fsdp1_forward.awaits_backward(fsdp1_forward.units_of(root)):
        return (
            "a loss waits for its backward, which FSDP1 cannot run after another one (compute a loss without backward "
            "in torch.no_grad()), and an optimizer for its step"
        )
    return unfinished_reduction(root)


@contextmanager
def _kept(inner: nn.Module) -> Iterator[None]:
    """Within, buffers may change; they are restored afterwards. Some models count or average in them."""
    before = copy.deepcopy(dict(inner.named_buffers()))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, buffer in inner.named_buffers():
                buffer.copy_(before[name])


def _problems(seen: Verification) -> list[str]:
    problems = []
    # Written so that NaN is a problem.
    if not abs(seen.loss - seen.reference_loss) <= seen.tolerance * max(abs(seen.reference_loss), 1.0):
        problems.append(f"the fused loss is {seen.loss:.6f}, the model's own {seen.reference_loss:.6f}")
    for number, (fused, original) in enumerate(seen.losses, 1):
        if not abs(fused - original) <= seen.tolerance * max(abs(original), 1.0):
            problems.append(f"loss {number} of the call is {fused:.6f} fused, the model's own {original:.6f}")
    for error, what in (
        (seen.head_gradient_error, "lm_head's gradient differs from the model's own"),
        (seen.gradient_error, "the gradients differ from the model's own"),
        (seen.linearity_error, "twice the loss does not give twice lm_head's gradient"),
    ):
        if not error <= seen.tolerance:
            problems.append(f"{what}: relative error {error:.1e}, tolerance {seen.tolerance:.0e}")
    if not abs(seen.loss - seen.own_loss) <= OF_LAYERS * seen.tolerance * max(abs(seen.own_loss), 1.0):
        problems.append(f"the loss is {seen.loss:.6f}, that of the model as it was before wrap {seen.own_loss:.6f}")
    other = seen.other_rows_error
    if not seen.own_gradient_error <= OF_LAYERS * seen.tolerance:
        mixes = other is not None and other <= OF_LAYERS * seen.tolerance
        problems.append(
            "the gradients differ from those of the model as it was before wrap (own layers and attention): relative "
            f"error {seen.own_gradient_error:.1e}, tolerance {OF_LAYERS * seen.tolerance:.0e}. "
            + (
                "They agree with each document in a separate row: the documents of a packed row mix. Pad rows of "
                "single documents"
                if mixes
                else "Find the cause with WrapConfig(layer_kernels=False) and WrapConfig(varlen_attention=False)"
            )
        )
    elif other is not None and not other <= OF_LAYERS * seen.tolerance:
        problems.append(
            f"with the texts of the batch in {seen.other_rows} the gradients differ from those of the model as it was "
            f"before wrap: relative error {other:.1e}, tolerance {OF_LAYERS * seen.tolerance:.0e}. "
            + (
                "The documents of a packed row mix. Train without packing, on padded rows of single documents"
                if seen.other_rows == "one row"
                else "Find the cause with WrapConfig(layer_kernels=False)"
            )
        )
    name, error = seen.worst_parameter
    if not error <= SINGLE * seen.tolerance:
        problems.append(f"the gradient of {name} differs from the model's own: relative error {error:.1e}")
    if seen.loss_dtype in (torch.bfloat16, torch.float16):
        problems.append(
            f"the loss leaves the model as {seen.loss_dtype}, which keeps two or three digits of it: a wrapper "
            "casts its outputs. Under FSDP2 set MixedPrecisionPolicy(output_dtype=None)"
        )
    return problems


def _problems_of_checkpoints(inner: nn.Module) -> list[str]:
    """Finds checkpoints whose gradients are wrong with and without this library."""
    configs = [module.config for module in inner.modules() if hasattr(module, "config")]
    shares_keys = any(getattr(config, "num_kv_shared_layers", None) for config in configs)
    if not (shares_keys and any(map(is_reentrant, inner.modules()))):
        return []
    return [
        "the last layers share keys and values of earlier ones, and activation checkpointing has use_reentrant=True, "
        "under which the gradient through shared keys and values is lost; use "
        'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
    ]


def _problems_of_optimizer(model: nn.Module, optimizer: Any) -> list[str]:
    """Compares the parameters that an optimizer updates with those that the next forward reads."""
    named = dict(model.named_parameters())
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missing = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in held]
    unread = held - set(map(id, named.values()))
    problems = []
    if missing:
        problems.append(
            f"the optimizer does not hold {missing[0]}"
            + (f" and {len(missing) - 1} other parameters that require gradients" if len(missing) > 1 else "")
            + "; build it from model.parameters() after wrap, or freeze what it leaves out"
        )
    if unread:
        problems.append(
            f"{len(unread)} parameters of the optimizer are not those of the model, which no forward reads; build it "
            "from model.parameters() after wrap"
        )
    return problems


def _objection(
    model: nn.Module, record: Wrapped, batch: dict[str, Any], *, with_teacher: bool, shares_sequences: bool
) -> str | None:
    """Returns why this rank cannot take part, before any rank has begun."""
    labels, stage = batch.get("labels"), stage_of(inner_model(model))
    if stage is not None:
        return f"the model is {stage} of a pipeline; verify the uncut model, before liger_dist.pipeline_stage"
    if not isinstance(labels, Tensor):
        return "the batch has no labels; give every rank some with a target"
    if record.found.recipe is not None:
        ignores_all = shares_sequences and not with_teacher
        objection = _objection_to_call(model, record.loss, batch, labels, with_teacher, may_ignore_all=ignores_all)
    else:
        objection = f"the loss is not fused: {record.found.unfused_reason}" if with_teacher else None
    if objection is not None:
        return objection
    if not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in model.parameters()):
        return "there are no gradients to compare: no parameter requires one, or torch.no_grad() is on"
    unfinished = _unfinished_step(model)
    return None if unfinished is None else f"{unfinished}; call its step() and zero_grad() first"


def _objection_to_call(
    model: nn.Module,
    loss: FusedLoss,
    batch: dict[str, Any],
    labels: Tensor,
    with_teacher: bool,
    *,
    may_ignore_all: bool,
) -> str | None:
    """Returns why the fused loss refuses the batch."""
    batch = {name: value for name, value in batch.items() if not (with_teacher and name in OPTIONS)}
    try:
        call, aligned = checked_call(loss, inner_model(model), batch | {"labels": labels.cpu()})
        if with_teacher:
            call.check_distilled()
        elif call.keywords:
            return f"the batch has {next(iter(call.keywords))}, which the model's own loss does not have; leave it out"
        if loss.config.token_mean == "global" and loss.structure.repeats_head and "num_items_in_batch" not in batch:
            return (
                "token_mean='global' gives each of several losses its own divisor, which the model's own losses do not "
                "have; give the batch num_items_in_batch"
            )
        if LOGITS in call.outputs:
            return "outputs=('logits',) of its config leaves evaluation unfused; call train() first"
        if not may_ignore_all and not bool((aligned.labels != call.ignore_index).any()):
            return "all labels of the batch are ignored; give every rank one with a target"
    except LigerDistError as error:
        return str(error).rstrip(".")
    return None


def _parameters_of_the_head(model: nn.Module, outer_head: nn.Module) -> list[str]:
    """Names of lm_head's parameters, or of the flat ones in which FSDP1 stores them."""
    of_head = {id(parameter) for parameter in outer_head.parameters()}
    return [name for name, p in model.named_parameters() if id(p) in of_head or fsdp1.is_flat(name)]


def _agree(objection: str | None) -> None:
    """Raises the objections of one rank on every rank."""
    sentences = sentences_of_all_ranks([] if objection is None else [objection])
    if sentences:
        raise LigerDistError(f"verify cannot run: {'; '.join(sentences)}.")
