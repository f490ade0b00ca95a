"""Pipelines of ``torch.distributed.pipelining``: stages of a Hugging Face model, and steps of a schedule.

[Note: one mean over the micro-batches]
A schedule calls the last stage once for each micro-batch, and these have different numbers of labels: the mean of their
means is not the mean of the batch. So :func:`pipeline_step` counts the labels of all micro-batches first, and each
micro-batch divides its sum by that number, as ``num_items_in_batch`` of transformers does. The losses add up to that of
the uncut model, and so do the gradients, which the schedule must then not divide (``scale_grads=False``).
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from .errors import LigerDistError
from .fused_layers.recompute import outputs_are_saved
from .model.compile import compiled_call
from .model.peft import peft_parameters
from .model.quantized import four_bit_stacks
from .model.stages import Absent, AbsentCall, AbsentEmbedding, AbsentHead, Stage, as_stage, stage_of
from .model.structure import PREDICTION, Structure, embedding_of, find_structure
from .mtp.modules import note_embeddings, template_layer
from .record import is_wrapped, record_of
from .sharding.process_groups import gathered
from .versions import numbers

_SENDS_EVERY_GRADIENT = numbers(torch.__version__)[:2] == (2, 12)
"""torch 2.12 expects a gradient to send from each stage, also to frozen ones, which need none"""


def pipeline_stage(
    model: nn.Module, index: int, num_stages: int, *, layers: tuple[int, int] | None = None
) -> nn.Module:
    """Returns a stage of ``model`` for ``torch.distributed.pipelining.PipelineStage``: a copy without the modules of
    other stages, with the same parameters under the same names.

    The first stage has the input embedding, the last one final norm, lm_head and the modules of
    :class:`~liger_dist.mtp.MultiTokenPrediction`, for which the embeddings of the tokens go through all stages beside
    the hidden states. Wrap each stage by :func:`liger_dist.wrap` before it goes into a ``PipelineStage``.

    Args:
        model: a causal language model of Hugging Face with values, not wrapped. It is left as it is.
        index: of the stage, from 0.
        num_stages: of the pipeline.
        layers: index of the stage's first layer, and one more than that of its last one; by default the layers are
            divided evenly, and the first stages get one more.

    Raises:
        LigerDistError: the stages would not compute what the model computes: lm_head is tied to the embedding, layers
            share state other than hidden states, the decoder does something outside of its layers, or the last stage
            lacks the layer whose arguments the layers of further tokens get.
    """
    _check_arguments(model, index, num_stages)
    structure = find_structure(model)
    _check_structure(model, structure)
    first, end = _divided(len(structure.layers), index, num_stages) if layers is None else layers
    if num_stages > len(structure.layers) or not 0 <= first < end <= len(structure.layers):
        raise LigerDistError(
            f"stage {index} of {num_stages} would have the layers {first} to {end - 1} of {len(structure.layers)}; "
            "expected at least one layer in each stage."
        )
    decoder = _name_of(model, structure.decoder)
    predicts_further = bool(structure.prediction_layers)
    stage = Stage(
        index=index,
        num_stages=num_stages,
        first_layer=first,
        end_layer=end,
        decoder=decoder,
        passes_embeddings=predicts_further,
    )
    if predicts_further:
        _check_further_tokens(model, structure, stage, divides=layers is None)
    _check_decoder(model, structure)
    absent: dict[nn.Module, nn.Module] = {
        layer: Absent() for number, layer in enumerate(structure.layers) if not first <= number < end
    }
    if not stage.is_first:
        absent[_embedding_of(model)] = AbsentEmbedding(structure.hidden_size)
    if not stage.is_last:
        absent[model.get_submodule(structure.head_name)] = AbsentHead(structure.vocab_size, structure.hidden_size)
        absent |= {} if structure.final_norm is None else {structure.final_norm: Absent()}
        absent |= {model.get_submodule(PREDICTION): Absent()} if predicts_further else {}
    return as_stage(_copy(model, absent), stage)


def _check_arguments(model: nn.Module, index: int, num_stages: int) -> None:
    from transformers import PreTrainedModel

    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise LigerDistError(
            f"model is a {name}; expected a causal language model of transformers. Cut it before other code wraps it: "
            "PEFT, torch.compile, DDP or FSDP."
        )
    if is_wrapped(model) or stage_of(model) is not None:
        raise LigerDistError(
            f"this {name} is wrapped, or a stage, already; cut the model that from_pretrained builds, and wrap the "
            "stages."
        )
    if not (isinstance(index, int) and isinstance(num_stages, int) and 0 <= index < num_stages):
        raise LigerDistError(f"index is {index!r} and num_stages is {num_stages!r}; expected 0 <= index < num_stages.")
    is_quantized = getattr(model, "is_quantized", False) or next(four_bit_stacks(model), None) is not None
    if peft_parameters(model) or is_quantized:
        raise LigerDistError(
            f"this {name} has {'adapters of PEFT' if peft_parameters(model) else 'quantised weights'}, which are not "
            "supported in pipelines; train it with strategy='fsdp2'."
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise LigerDistError(
            f"this {name} is on the meta device, where each stage would get other initial values than the uncut model; "
            "load it on the CPU (from_pretrained maps its files) and cut it there."
        )


def _check_structure(model: Any, structure: Structure) -> None:
    name = type(model).__name__
    has_others = getattr(model.config, "is_encoder_decoder", False) or structure.other_stacks
    if has_others or not structure.layers or structure.decoder is model:
        raise LigerDistError(f"{name} is not one stack of decoder layers; expected a causal language model of text.")
    if structure.tied:
        raise LigerDistError(
            f"lm_head of this {name} is tied to its embedding, and the two would be in different stages, which nothing "
            "keeps equal. Give lm_head a weight: model.config.tie_word_embeddings = False; model.lm_head.weight = "
            "torch.nn.Parameter(model.lm_head.weight.detach().clone()). They then train apart."
        )
    parameters = [parameter for layer in structure.layers for parameter in layer.parameters()]
    if len(set(parameters)) < len(parameters):
        raise LigerDistError(
            f"layers of this {name} share parameters, and the stages of a pipeline would train copies of them apart; "
            "such a model cannot be cut."
        )
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise LigerDistError(
            f"output_router_logits of this {name} is True, and the loss of the routers needs those of all stages; set "
            "model.config.output_router_logits = False."
        )


def _embedding_of(model: nn.Module) -> nn.Module:
    embedding = embedding_of(model)
    if embedding is None:
        raise LigerDistError(f"{type(model).__name__} has no single input embedding (get_input_embeddings()).")
    return embedding


def _divided(num_layers: int, index: int, num_stages: int) -> tuple[int, int]:
    size, more = divmod(num_layers, num_stages)
    first = index * size + min(index, more)
    return first, first + size + (index < more)


def _copy(model: nn.Module, absent: dict[nn.Module, nn.Module]) -> nn.Module:
    """Copies ``model`` with ``absent`` modules instead of those of other stages. Parameters are not copied."""
    memo: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    memo |= {id(module): instead for module, instead in absent.items()}
    # deepcopy keeps what it has copied, by the id of this list: parameters must live as long as the memo.
    copied = copy.deepcopy(model, memo)
    if isinstance(copied._modules.get(PREDICTION), Absent):
        delattr(copied, PREDICTION)  # The forward takes whatever has this name for modules of further tokens.
    return copied


def _check_further_tokens(model: nn.Module, structure: Structure, stage: Stage, *, divides: bool) -> None:
    """Checks that the embeddings of the tokens are noted, and that the last stage has the layer whose arguments the
    layers of further tokens get.

    Args:
        divides: True if the layers are divided evenly, so that each rank knows those of the last stage.

    Raises:
        LigerDistError: another stage has it, or the embedding was replaced.
    """
    if note_embeddings not in _embedding_of(model)._forward_hooks.values():
        raise LigerDistError(
            f"the input embedding of this {type(model).__name__} was replaced after MultiTokenPrediction was added, "
            "which reads its results; replace it before."
        )
    index, layer = template_layer(structure)
    begin = stage.first_layer if stage.is_last else 0
    if divides:
        begin = _divided(len(structure.layers), stage.num_stages - 1, stage.num_stages)[0]
    if index < begin:
        raise LigerDistError(
            f"the layers of further tokens get the arguments of layer {index}, the last {type(layer).__name__} with "
            f"softmax attention, but the last stage begins with layer {begin}; let it begin with layer {index} at most "
            f"(layers=({index}, {len(structure.layers)})), or leave mtp out."
        )


def _check_decoder(model: nn.Module, structure: Structure) -> None:
    """Runs model and decoder without embedding, layers, norm and lm_head, on two made-up inputs.

    Raises:
        LigerDistError: the decoder changes hidden states, or gives its layers something that is made of them.
    """
    name, calls = type(structure.decoder).__name__, list[AbsentCall]()
    absent: dict[nn.Module, nn.Module] = {layer: Absent(calls) for layer in structure.layers}
    absent |= {} if structure.final_norm is None else {structure.final_norm: Absent(calls)}
    expected = list(absent.values())
    absent[_embedding_of(model)] = AbsentEmbedding(structure.hidden_size)
    absent[model.get_submodule(structure.head_name)] = Absent()
    absent |= {model.get_submodule(PREDICTION): Absent()} if structure.prediction_layers else {}
    empty: Any = _copy(model, absent).cpu()
    parameter = next((name for name, _ in empty.named_parameters()), None)
    if parameter is not None:
        raise LigerDistError(
            f"{type(model).__name__} has the parameter {parameter} outside of its embedding, layers, final norm and "
            "lm_head, which no stage would have; such a model cannot be cut."
        )
    decoder = empty.get_submodule(_name_of(model, structure.decoder))
    further: list[list[Any]] = []
    for inputs in torch.randn(2, 2, 3, structure.hidden_size, device="cpu", generator=torch.Generator()):
        try:
            with torch.no_grad():
                empty(inputs_embeds=inputs, use_cache=False)
                calls.clear()
                output = decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
        except Exception as error:
            raise LigerDistError(
                f"{name} does not run without its layers ({type(error).__name__}: {error}); such a model cannot be cut."
            ) from error
        is_same = all(torch.equal(given, inputs) for given in (output, *(hidden for _, hidden, _ in calls)))
        if [module for module, *_ in calls] != expected or not is_same:
            raise LigerDistError(
                f"{name} does not only call its layers in order and then its final norm, with the hidden states "
                "unchanged in between; such a model cannot be cut."
            )
        arguments = [rest for _, _, rest in calls]
        further.append(tree_leaves(arguments, is_leaf=lambda value: isinstance(value, dict)))
    for one, other in zip(*further, strict=True):
        is_same = torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
        if not (isinstance(one, Tensor | bool | int | float | str | None) and is_same):
            raise LigerDistError(
                f"layers of {name} share more than hidden states (a {type(one).__name__}), which the stages of a "
                "pipeline do not exchange; such a model cannot be cut."
            )


def _name_of(model: nn.Module, part: nn.Module) -> str:
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[part]


def pipeline_loss(output: Tensor, target: Tensor) -> Tensor:
    """Returns the loss that the last stage has computed: the ``loss_fn`` of a schedule.

    Args:
        output: of the last stage, ``[1]``.
        target: the labels of the micro-batch, which the last stage has read.
    """
    if output.numel() != 1:
        raise LigerDistError(
            f"the last stage returned a tensor of the shape {tuple(output.shape)}; expected the loss of its labels. "
            "Call liger_dist.pipeline_step instead of the schedule's step."
        )
    return output.sum()


def pipeline_step(
    schedule: Any,
    input_ids: Tensor,
    *,
    labels: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor | None:
    """Runs one step of a schedule of ``torch.distributed.pipelining`` on a batch, and its backward where gradients are
    enabled. Returns the loss (0-d) on ranks with the last stage, and None elsewhere.

    The loss is that of the uncut model on the full batch, whatever the numbers of labels of its micro-batches. The
    losses of further tokens are divided by the number of labels of the next token, as in a model that gets
    ``num_items_in_batch``. All ranks of the process group call it together: they first exchange what they would refuse.
    Ranks of one pipeline give the same batch, ranks of data parallelism different ones.

    Args:
        schedule: made with stages of :func:`pipeline_stage`, ``loss_fn=liger_dist.pipeline_loss`` and
            ``scale_grads=False``.
        input_ids: ``[B, S]``; the micro-batches are its rows, in order.
        labels: ``[B, S]``, not shifted.
        num_items_in_batch: divisor of the sum of token losses; by default the number of valid labels of the batch,
            with ``token_mean="global"`` of the batches of all data-parallel ranks.
        attention_mask: ``[B, S]``, for every stage.
        position_ids: ``[B, S]``, for every stage; they restart where a document begins.

    Raises:
        LigerDistError: on all ranks, before the schedule begins: a batch or a schedule that does not fit on one of
            them.
    """
    tensors = {"attention_mask": attention_mask, "position_ids": position_ids}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    stages: list[Any] = []
    refusal, batch, items = None, "", None
    trained: dict[int, bool] = {}
    splits = False
    try:
        stages = _stages_of(schedule)
        splits = _splits_backward(schedule)
        trained = _trained_stages(stages) if splits or _SENDS_EVERY_GRADIENT else {}
        batch = _checked(schedule, stages, {"input_ids": input_ids, "labels": labels} | given)
        items = None if num_items_in_batch is None else _one_number(num_items_in_batch, labels.device)
    except Exception as error:
        refusal = error
    group = stages[0].group if stages else None
    _agree(refusal, group, batch, _described(stages, has_items=num_items_in_batch is not None), trained, splits=splits)
    is_first = any(stage.is_first for stage in stages)
    last = next((stage.submod for stage in stages if stage.is_last), None)
    count = schedule._n_microbatches
    if last is not None:
        items = _number_of_items(last, input_ids, labels, given) if items is None else items
        given |= {"labels": labels, "num_items_in_batch": items.expand(count)}
    target = None if last is None else labels
    losses: list[Tensor] = []
    run = schedule.eval
    if torch.is_grad_enabled():
        run = schedule.step
        _let_inputs_require_gradients(stages)
    with outputs_are_saved() if _splits_backward(schedule) else nullcontext():
        run(*((input_ids,) if is_first else ()), target=target, losses=losses, **given)
    return None if last is None else torch.stack(losses).sum().detach()


def _described(stages: list[Any], *, has_items: bool) -> str:
    """Describes what a step does, for a comparison over all ranks."""
    passes = "forward and backward" if torch.is_grad_enabled() else "a forward"
    counted = f"num_items_in_batch {'given' if has_items else 'left out'}"
    predict = {place.passes_embeddings for stage in stages if (place := stage_of(stage.submod)) is not None}
    further = ["with" if one else "without" for one in sorted(predict)]
    return f"{passes}, {counted}, stages {' and '.join(further)} modules of further tokens"


def _stages_of(schedule: Any) -> list[Any]:
    """Returns the stages of a schedule that are on this rank.

    Raises:
        LigerDistError: it is no schedule of wrapped stages.
    """
    stages: list[Any] = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    for stage in stages:
        module = getattr(stage, "submod", None)
        if not isinstance(module, nn.Module) or stage_of(module) is None or not is_wrapped(module):
            raise LigerDistError(
                f"the schedule is a {type(schedule).__name__} with a stage of {type(module).__name__}; expected a "
                "schedule of torch.distributed.pipelining whose PipelineStages have stages of "
                "liger_dist.pipeline_stage that are wrapped."
            )
        place = stage_of(module)
        if place is not None and (place.index, place.num_stages) != (stage.stage_index, stage.num_stages):
            raise LigerDistError(
                f"a PipelineStage with stage_index={stage.stage_index} and num_stages={stage.num_stages} has {place} "
                "of liger_dist.pipeline_stage; expected the same index and number."
            )
    if schedule._loss_fn is not pipeline_loss or schedule.scale_grads:
        raise LigerDistError(
            f"the schedule has loss_fn={schedule._loss_fn!r} and scale_grads={schedule.scale_grads}; expected "
            "loss_fn=liger_dist.pipeline_loss and scale_grads=False: the losses of the micro-batches are parts of one "
            "mean, and their gradients add up."
        )
    _check_passes(schedule, stages)
    return stages


def _check_passes(schedule: Any, stages: list[Any]) -> None:
    """Refuses a backward that would lose gradients, and an evaluation that torch does not have.

    Raises:
        LigerDistError: with the way out.
    """
    name, records = type(schedule).__name__, [record_of(stage.submod) for stage in stages]
    splits = _splits_backward(schedule)
    if splits and torch.is_grad_enabled() and not _keeps_custom_nodes():
        raise LigerDistError(
            f"{name} runs the backward of weights after that of inputs, and torch {torch.__version__} frees the nodes "
            "of custom autograd functions in between; expected a newer torch (2.13 works), or a schedule that runs "
            "both in one: Schedule1F1B or ScheduleInterleaved1F1B."
        )
    if splits and any(map(_may_reshard, stages)):
        raise LigerDistError(
            f"{name} runs the backward of weights after that of inputs, for which FSDP2 would lose gradients of layers "
            "that are sharded in between; wrap the stages with FSDP2(reshard_after_forward=False)."
        )
    layers = [layer for record in records for layer in record.found.structure.layers]
    if splits and any(compiled_call(layer) is not None for layer in layers):
        raise LigerDistError(
            f"{name} runs the backward of weights after that of inputs, which compiled layers do in one; wrap the "
            "stages with FSDP2(compile_layers=False), or choose Schedule1F1B."
        )
    indices = sorted(stage.stage_index for stage in stages)
    if not torch.is_grad_enabled() and any(one + 1 == other for one, other in pairwise(indices)):
        raise LigerDistError(
            f"{name} has consecutive stages on one rank, which torch does not evaluate; evaluate with Schedule1F1B, or "
            "with ScheduleInterleaved1F1B and stages in loops."
        )


class _Doubled(torch.autograd.Function):
    """A custom autograd function for :func:`_keeps_custom_nodes`."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return 2 * given

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@cache
def _keeps_custom_nodes() -> bool:
    """True if a backward can begin at the node of a custom autograd function whose output has been freed, as that of
    weights does in a schedule that splits the backward."""
    given = torch.ones(1, device="cpu", requires_grad=True)
    node: Any = _Doubled.apply(given).grad_fn  # type: ignore[no-untyped-call]
    try:
        torch.autograd.grad(GradientEdge(node, 0), given, grad_outputs=torch.ones(1, device="cpu"))
    except RuntimeError:
        return False
    return True


def _may_reshard(stage: Any) -> bool:
    """True if FSDP2 reshards layers between their forward and their backward, as far as is known: the caller may have
    called ``fully_shard``."""
    by_caller = any(isinstance(module, FSDPModule) for module in stage.submod.modules())
    return bool(getattr(record_of(stage.submod).strategy, "reshard_after_forward", by_caller))


def _checked(schedule: Any, stages: list[Any], given: dict[str, Any]) -> str:
    """Checks a batch, and describes it for a comparison over the ranks of a pipeline."""
    ids, count = given["input_ids"], schedule._n_microbatches
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor) or tensor.is_floating_point() or tensor.shape != ids.shape or ids.dim() != 2:
            found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise LigerDistError(f"{name} is {found}; expected integers [B, S], with the shape of input_ids.")
    if len(ids) % count != 0:
        raise LigerDistError(
            f"input_ids have {len(ids)} rows and the schedule has n_microbatches={count}; expected a multiple of it."
        )
    for stage in stages:
        record_of(stage.submod).loss.check_early(stage.submod, (), dict(given))
    named = sorted(given.items())
    # The host waits once.
    checksums = torch.stack([_checksum(tensor).to(ids.device) for _, tensor in named]).tolist()
    by_name = dict(zip([name for name, _ in named], checksums, strict=True))
    return f"{tuple(ids.shape)} in {count} micro-batches, with checksums {by_name}"


def _one_number(items: Tensor | float, device: torch.device) -> Tensor:
    found = torch.as_tensor(items, device=device)
    if found.numel() != 1:
        raise LigerDistError(f"num_items_in_batch has the shape {tuple(found.shape)}; expected one number.")
    return found.reshape(())


def _checksum(tensor: Tensor) -> Tensor:
    numbers = tensor.flatten().to(torch.int64)
    total: Tensor = (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()
    return total


def _trained_stages(stages: list[Any]) -> dict[int, bool]:
    """Says of the stages of this rank if any parameter trains; empty without gradients."""
    if not torch.is_grad_enabled():
        return {}
    return {stage.stage_index: any(p.requires_grad for p in stage.submod.parameters()) for stage in stages}


def _agree(
    refusal: Exception | None,
    group: dist.ProcessGroup | None,
    batch: str,
    step: str,
    trained: dict[int, bool],
    *,
    splits: bool,
) -> None:
    """Exchanges refusals, and descriptions of batches and steps, over all ranks.

    Args:
        group: of the ranks of a pipeline, which have the same batch.
        step: same on all ranks.
        trained: of :func:`_trained_stages`; empty where it makes no difference.
        splits: True if the schedule splits the backward.

    Raises:
        LigerDistError: on all ranks, if one refuses, if ranks of a pipeline have different batches, or if their
            schedule would lose gradients.
    """
    sentence = None if refusal is None else str(refusal)
    all_ranks = gathered((sentence, dist.get_process_group_ranks(group), batch, step, trained))
    if refusal is not None:
        raise refusal
    refusals = dict.fromkeys(sentence for sentence, *_ in all_ranks if sentence is not None)
    if refusals:
        raise LigerDistError(f"another rank refused a step of the pipeline: {' '.join(refusals)}")
    steps = dict.fromkeys(other for *_, other, _ in all_ranks)
    if len(steps) > 1:
        raise LigerDistError(f"ranks called pipeline_step for different steps: {'; '.join(steps)}; expected one.")
    for _, ranks, *_ in all_ranks:
        different = dict.fromkeys(all_ranks[rank][2] for rank in ranks)
        if len(different) > 1:
            raise LigerDistError(
                f"the ranks {ranks} of a pipeline called pipeline_step with different batches: {'; '.join(different)}. "
                "Give all of them the same batch."
            )
        of_pipeline = {index: trains for rank in ranks for index, trains in all_ranks[rank][4].items()}
        first = min((index for index, trains in of_pipeline.items() if trains), default=0)
        # torch finds the products of weights on the way from the loss to the input of a stage, if it has a gradient.
        if first > 0:
            why = _of_frozen_stages(first, splits=splits)
            raise LigerDistError(f"stage {first} trains and all stages before it are frozen, but {why}.")


def _of_frozen_stages(first: int, *, splits: bool) -> str:
    """Says what becomes of a step whose stages before ``first`` are frozen, and the way out."""
    if splits:
        return (
            "the schedule runs the backward of weights after that of inputs, and would lose the gradients of stage "
            f"{first}; choose Schedule1F1B or ScheduleInterleaved1F1B"
        )
    return (
        f"torch {torch.__version__} ends such a step with an error in the middle of the schedule; install torch 2.13, "
        "or let a parameter of the first stage train"
    )


def _number_of_items(last: nn.Module, input_ids: Tensor, labels: Tensor, given: dict[str, Tensor]) -> Tensor:
    """Counts the labels of a batch that the last stage scores, 0-d: those of all data-parallel ranks, divided as FSDP2
    divides gradients, with ``token_mean="global"``. Collectives: one all-reduce of one value for each axis then."""
    loss = record_of(last).loss
    aligned, ignore_index = loss.scored_labels(last, {"input_ids": input_ids, "labels": labels} | given)
    count = (aligned != ignore_index).sum(dtype=torch.float64)
    mean_over = loss.mean_over(last, loss.head.in_use(last))
    for group in mean_over.groups:
        dist.all_reduce(count, group=group)
    count = count / mean_over.divide_factor
    return torch.where(count == 0, 1.0, count)


def _let_inputs_require_gradients(stages: list[Any]) -> None:
    """Reallocates the receive buffers of hidden states that require no gradients: torch 2.11 allocates them in the
    first step of a schedule, which may be an evaluation. A torch that notes ``tensor_meta`` decides in each step."""
    for stage in stages:
        for one in (one for received in stage.args_recv_info.values() for one in received):
            buffer = getattr(one, "buffer", None)
            if isinstance(buffer, Tensor) and not (buffer.requires_grad or hasattr(one, "tensor_meta")):
                # Memory of an evaluation in inference mode cannot be set to require gradients.
                one.buffer = torch.empty_like(buffer, requires_grad=True)


def _splits_backward(schedule: Any) -> bool:
    """True for a schedule that runs the backward of weights after that of inputs, as zero-bubble schedules do."""
    orders: dict[int, list[Any]] = getattr(schedule, "pipeline_order", None) or {}
    actions = (action for order in orders.values() for action in order if action is not None)
    return any(action.computation_type.name == "BACKWARD_WEIGHT" for action in actions)
