"""Probe of what a model's code does between its lm_head and its loss.

The model's real ``forward`` runs with stand-ins for all modules but those on the path to its lm_head, on logits that
are followed until a loss function or a cross entropy gets them. Candidates are read from the config; the probe decides.
A second run carries a loss through the same code instead of logits, as training will.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from liger_dist.errors import LogitsNotComputedError
from liger_dist.model.class_swap import swapped
from liger_dist.model.peft import heads_at
from liger_dist.model.structure import Structure, full_shape
from liger_dist.trials.isolated import stand_ins

from .logits import HOW_TO_GET_LOGITS, FusedLogits, TensorOperand, with_operands
from .probe_matching import IGNORED, Arrival, Finished, FurtherLabels, alignments, candidates, further_labels
from .recipe import HeadCalls, LogitTransform, LossRecipe, NotFusableError, Targets

PROBE_ROWS, PROBE_TOKENS = 2, 6
PROBE_ITEMS = 7
"""an unusual number of items, to recognise it"""
PROBE_LOSS = 3.0
VOCABULARY_ELEMENTS = 2**25
"""elements of hidden states in a run that has many classes as labels"""


class _Head(nn.Module):
    """Stand-in for lm_head: returns the probe's logits, and has lm_head's attributes."""

    def __init__(self, real: nn.Module, labels: Tensor, logits_of: Callable[[int, torch.Size], Tensor]) -> None:
        """
        Args:
            logits_of: the index of a call, and the number of sequences and of their first tokens that it has.
        """
        super().__init__()
        vars(self).update(real=real, labels=labels, logits_of=logits_of, calls=[])

    def forward(self, hidden_states: Tensor) -> Tensor:
        (rows, length), shape = self.labels.shape, hidden_states.shape[:-1]
        is_flat = shape == (rows * length,)
        tokens = torch.Size((rows, length)) if is_flat else shape
        if len(tokens) != 2 or tokens[0] != rows or not 0 < tokens[1] <= length:
            raise NotFusableError("its lm_head is called with other tokens than the labels'")
        self.calls.append(tokens)
        logits: Tensor = self.logits_of(len(self.calls) - 1, tokens)
        return logits.reshape(-1, logits.shape[-1]) if is_flat else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["real"], name)


def probe_recipe(model: nn.Module, structure: Structure) -> LossRecipe:
    """Finds how the model gets from logits to its loss, the same in training and evaluation.

    Raises:
        NotFusableError: the model does something in between that is not supported.
    """
    outer_head = model.get_submodule(structure.head_name)
    hooks = [
        hook
        for head in heads_at(outer_head)
        for hook in (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    ]
    for hook in hooks:
        # Those of FSDP2 and of torch's tensor parallelism move tensors and change no number.
        if not (getattr(hook, "__module__", None) or "").startswith("torch.distributed."):
            raise NotFusableError("its lm_head has forward hooks, which could change the logits")
    (training, calls), (evaluation, calls_of_evaluation) = (
        _Probe(model, structure, training=mode).recipe() for mode in (True, False)
    )
    if training != evaluation:
        raise NotFusableError("its forward treats logits differently in training and in evaluation")
    return replace(training, training=calls, evaluation=calls_of_evaluation)


@dataclass(frozen=True)
class _Carried:
    """What the zero-width logits of a call of lm_head carry in a probe."""

    probe: _Probe
    call: int

    def inline_loss(self, logits: FusedLogits, targets: Any, options: dict[str, Any]) -> Tensor:
        """Computes the loss as :class:`.logits.CarriedLoss` does."""
        return self.finish(logits, targets, is_aligned=True)

    def finish(self, logits: FusedLogits, targets: Tensor, *, is_aligned: bool) -> Tensor:
        """Notes that a loss was called with ``logits``."""
        changes = with_operands(logits.changes, TensorOperand.kept)
        finished = Finished(self.call, logits, changes, targets.as_subclass(Tensor), is_aligned)
        self.probe.finished.append(finished)
        return torch.tensor(PROBE_LOSS)


LARGEST = 1e6
"""magnitude of the largest logits of the probe, above the largest number of fp16"""


class _Probe:
    """One mode of one model."""

    def __init__(self, model: nn.Module, structure: Structure, *, training: bool) -> None:
        self.model, self.structure, self.training = model, structure, training
        vocab_size = structure.vocab_size
        shape = PROBE_ROWS, PROBE_TOKENS
        count = math.prod(shape) * vocab_size
        self.logits = torch.linspace(-70.0, 70.0, count, dtype=torch.float64).reshape(*shape, vocab_size)
        # Bounds of a forward that clips its logits show in every token.
        self.logits[..., 0], self.logits[..., -1] = -LARGEST, LARGEST
        self.labels = (torch.arange(math.prod(shape)).reshape(shape) + 1) % vocab_size
        self.labels[0, 3] = IGNORED
        self.attention_mask = torch.ones(shape, dtype=torch.int64)
        self.attention_mask[0, -1:] = self.attention_mask[1, -2:] = 0
        self.added = torch.linspace(-3.0, 3.0, vocab_size, dtype=torch.float64)
        self.arrivals: list[Arrival] = []
        self.finished: list[Finished] = []
        self.calls: list[torch.Size] = []
        """sequences and tokens of each call of lm_head"""
        self.losses: list[float] = []
        """of the forward's output, where the loss of its logits is :data:`PROBE_LOSS`"""

    def recipe(self) -> tuple[LossRecipe, HeadCalls]:
        """Returns the first loss, and the other calls of lm_head."""
        arrivals = self._follow()
        first = arrivals[min(arrivals)]
        if self.calls[first.call] != self.labels.shape:
            raise NotFusableError("its lm_head is called with other tokens than the labels'")
        options = {call: self._options(arrival) for call, arrival in arrivals.items()}
        targets, rows = self._targets(first)
        further = self._further(arrivals, first)
        changes = self._changes()
        self._check_every_label(targets, further)
        before = self.logits_of(first.call).flatten(0, 1)[rows]
        losses = {
            call: LossRecipe(
                targets=labels.targets,
                transform=self._transform(arrivals[call].logits, self._scored(call, labels.num_scored)),
                changes=changes[call],
                ahead=labels.ahead,
                cut=labels.cut,
                missing_tokens=self.labels.shape[1] - self.calls[call][1],
                **options[call],
            )
            for call, labels in further.items()
        }
        recipe = LossRecipe(
            targets=targets,
            transform=self._transform(first.logits, before),
            changes=changes[first.call],
            **options[first.call],
        )
        after = tuple(losses.get(call) for call in range(first.call + 1, len(self.calls)))
        return recipe, HeadCalls(before=first.call, after=after, losses_before=list(arrivals).index(first.call))

    @property
    def takes_more(self) -> bool:
        """True if the forward takes any keyword."""
        parameters = signature(self.model.forward).parameters
        return any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())

    def takes(self, name: str) -> bool:
        return self.takes_more or name in signature(self.model.forward).parameters

    def _follow(self, position_ids: Tensor | None = None) -> dict[int, Arrival]:
        """Runs the model's code on logits; returns what arrived at its losses, by calls of lm_head."""
        self.arrivals = []
        self._run(self._followed_logits, self.labels, self.attention_mask, position_ids=position_ids)
        found: dict[int, Arrival] = {}
        for arrival in self.arrivals:
            if arrival.call in found:
                count = sum(other.call == arrival.call for other in self.arrivals)
                raise NotFusableError(f"its forward computes {count} losses from its logits")
            found[arrival.call] = arrival
        if not found:
            raise NotFusableError("its forward passes its logits to no loss function and no cross entropy")
        return found

    def _options(self, arrival: Arrival) -> dict[str, Any]:
        """Fields of a recipe from the options that a loss got."""
        options = dict(arrival.options)
        items = options.pop("num_items_in_batch", None)
        if items not in ((None, PROBE_ITEMS) if self.takes("num_items_in_batch") else (None,)):
            raise NotFusableError("its forward passes another num_items_in_batch to its loss function")
        smoothing = float(options.pop("label_smoothing", 0.0))
        for name, usual in (("ignore_index", IGNORED), ("reduction", "mean"), ("weight", None)):
            if options.pop(name, usual) != usual:
                raise NotFusableError(f"its forward passes another {name} to its loss")
        unknown = [name for name, value in options.items() if value is not None]
        if unknown:
            raise NotFusableError(f"its forward passes {unknown[0]} to its loss")
        return {"owner": arrival.owner, "takes_num_items": items is not None, "label_smoothing": smoothing}

    def _further(self, arrivals: dict[int, Arrival], first: Arrival) -> dict[int, FurtherLabels]:
        """Finds the labels of the losses after the first one; runs the code once more with restarting positions."""
        further = {call: arrival for call, arrival in arrivals.items() if call != first.call}
        if not further:
            return {}
        targets, _ = self._targets(first)
        alone = {call: list(self._labels_of(arrival, None, targets)) for call, arrival in further.items()}
        if not self.takes("position_ids"):
            return {call: self._only(found) for call, found in alone.items()}
        position_ids = (torch.arange(PROBE_TOKENS) % (PROBE_TOKENS // 2)).repeat(PROBE_ROWS, 1)
        packed = self._follow(position_ids)
        if list(packed) != list(arrivals) or self._targets(packed[first.call]) != self._targets(first):
            raise NotFusableError("its forward treats the labels of packed documents differently")
        return {
            call: self._only(
                [
                    labels
                    for labels in self._labels_of(packed[call], position_ids, targets)
                    if replace(labels, cut=None) in found
                ]
            )
            for call, found in alone.items()
        }

    def _labels_of(self, arrival: Arrival, position_ids: Tensor | None, first: Targets) -> Iterator[FurtherLabels]:
        vocab_size = self.logits.shape[-1]
        if arrival.logits.shape[-1] != vocab_size or arrival.logits.numel() != arrival.targets.numel() * vocab_size:
            return
        yield from further_labels(
            self.labels,
            self.attention_mask,
            position_ids,
            arrival.targets,
            first=first,
            is_aligned=arrival.is_aligned,
            num_tokens=self.calls[arrival.call][1],
        )

    def _only(self, found: list[FurtherLabels]) -> FurtherLabels:
        if not found:
            raise NotFusableError("its forward computes a further loss from labels that are not the call's, shifted")
        return found[0]

    def logits_of(self, call: int) -> Tensor:
        """Returns the probe's logits ``[B, S, V]`` of a call of lm_head, other than those of any other call."""
        return self.logits.roll(call, -1)

    def _scored(self, call: int, num_tokens: int) -> Tensor:
        return self.logits_of(call)[:, :num_tokens].flatten(0, 1)

    def _targets(self, arrival: Arrival) -> tuple[Targets, list[int]]:
        """Returns which labels arrived, and the indices of the tokens whose logits did."""
        vocab_size = self.logits.shape[-1]
        arrived_rows = arrival.logits.numel() // vocab_size
        for targets, rows in alignments(self.labels, self.attention_mask, arrival.targets, arrival.is_aligned):
            if arrived_rows == rows.numel():
                return targets, rows.reshape(-1).tolist()
        count = self.labels.numel()
        if arrived_rows not in (count, count - PROBE_ROWS) or arrival.logits.shape[-1] != vocab_size:
            before, after = tuple(self.logits.shape), tuple(arrival.logits.shape)
            raise NotFusableError(f"its forward changes the logits' shape from {before} to {after}")
        raise NotFusableError("its forward changes the labels before the loss")

    def _transform(self, arrived: Tensor, before: Tensor) -> LogitTransform:
        """Returns the transform that gives the ``arrived`` logits from those ``before``."""
        arrived = arrived.double().reshape(-1, self.logits.shape[-1])
        for transform in candidates(self.model):
            if torch.allclose(arrived, transform(before), rtol=1e-5, atol=1e-5):
                return transform
        for name in self._class_buffers():
            if torch.allclose(arrived, before + self.added, rtol=1e-5, atol=1e-5):
                return LogitTransform(bias=name)
        raise NotFusableError("its forward changes the logits before the loss by an operation that is not supported")

    def _class_buffers(self) -> Iterator[str]:
        """Names of the buffers on the path to lm_head that hold one number per class."""
        path = self.structure.head_name.split(".")
        for depth in range(len(path)):
            owner = ".".join(path[:depth])
            for name, buffer in self.model.get_submodule(owner)._buffers.items():
                if buffer is not None and buffer.numel() == self.logits.shape[-1]:
                    yield f"{owner}.{name}".lstrip(".")

    def _tensors_on_the_way(self) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        """Parameters and buffers of the modules on the path to lm_head, with values whose effect shows: a bias of 0 or
        a scale of 1 would not."""
        path = self.structure.head_name.split(".")
        class_buffers = set(self._class_buffers())
        for depth in range(len(path)):
            owner_name = ".".join(path[:depth])
            owner = self.model.get_submodule(owner_name)
            for tensors in (owner._parameters, owner._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or not tensor.is_floating_point():
                        continue
                    shape = full_shape(tensor)
                    numbers = torch.linspace(0.3, 0.7, max(math.prod(shape), 1), dtype=torch.float64).reshape(shape)
                    if f"{owner_name}.{name}".lstrip(".") in class_buffers:
                        numbers = self.added.reshape(shape)
                    yield tensors, name, numbers

    def _followed_logits(self, call: int, tokens: torch.Size) -> Tensor:
        """Makes the probe's logits; a cross entropy that gets a tensor computed from them is noted."""
        arrivals = self.arrivals

        class Followed(Tensor):
            head_call = call

            @classmethod
            def __torch_function__(
                cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
            ) -> Any:
                if func is not F.cross_entropy:
                    return super().__torch_function__(func, tuple(types), args, kwargs)  # type: ignore[no-untyped-call]
                given = dict(signature(F.cross_entropy).bind(*args, **(kwargs or {})).arguments)
                logits, targets = given.pop("input"), given.pop("target")
                plain = logits.as_subclass(Tensor).movedim(1, -1)
                arrivals.append(Arrival(None, call, plain, targets.as_subclass(Tensor), True, given))
                return torch.tensor(PROBE_LOSS)

        return self.logits_of(call)[:, : tokens[1]].clone().as_subclass(Followed)

    def _changes(self) -> dict[int, tuple[tuple[Any, ...], ...]]:
        """Records what the same code does to zero-width logits, which reach its losses, by calls of lm_head."""
        carried = self._carry(self.labels, self.attention_mask)
        for finished in carried.values():
            if not finished.logits.runs_only_frameworks():
                raise NotFusableError("its forward passes its logits through a custom autograd function")
            if finished.logits.is_clipped:
                raise NotFusableError(
                    f"its forward selects a number of tokens, which sequences of {PROBE_TOKENS} do not have"
                )
        if len(self.losses) >= 2 and not math.isclose(self.losses[0], self.losses[-1], rel_tol=1e-4):
            raise NotFusableError("its forward computes its loss from the shape of its logits")
        return {call: finished.changes for call, finished in carried.items()}

    def _check_every_label(self, targets: Targets, further: dict[int, FurtherLabels]) -> None:
        """Runs the same code on each class as a label: a forward may leave out those of images or of padding."""
        # Rows as long as in the other runs: decoders may limit them.
        length = PROBE_TOKENS - 1
        rows = max(VOCABULARY_ELEMENTS // self.structure.hidden_size // length, 1)
        for classes in torch.arange(self.logits.shape[-1]).split(rows * length):
            filled = F.pad(classes, (0, -len(classes) % length), value=IGNORED)
            labels = F.pad(filled.reshape(-1, length), (1, 0), value=IGNORED)
            mask = torch.ones_like(labels)
            carried = self._carry(labels, mask)
            for call, given in carried.items():
                if call in further:
                    found = further_labels(
                        labels,
                        mask,
                        None,
                        given.targets,
                        first=targets,
                        is_aligned=given.is_aligned,
                        num_tokens=self.calls[call][1],
                    )
                    is_same = replace(further[call], cut=None) in found
                else:
                    is_same = targets in dict(alignments(labels, mask, given.targets, given.is_aligned))
                if not is_same:
                    missing = classes[~torch.isin(classes, given.targets)].tolist() or classes[:1].tolist()
                    raise NotFusableError(f"its forward changes the label {missing[0]} before the loss")

    def _carry(self, labels: Tensor, attention_mask: Tensor) -> dict[int, Finished]:
        """Runs the model's code on zero-width logits for these labels; returns them at its losses, by calls of
        lm_head."""
        calls, losing = self.calls, {arrival.call for arrival in self.arrivals}

        def logits_of(call: int, tokens: torch.Size) -> Tensor:
            if call not in losing:
                return self.logits.new_zeros(()).expand(*tokens, self.logits.shape[-1])
            carried = self.logits.new_empty((*tokens, 0)).requires_grad_()
            return FusedLogits.carrying(carried, _Carried(self, call), vocab_size=self.logits.shape[-1])

        self._run(logits_of, labels, attention_mask, with_gradients=True)
        # They refer to this probe: the cycle would keep the model until the garbage collector runs.
        finished, self.finished = self.finished, []
        if len(self.calls) != len(calls) or sorted(one.call for one in finished) != sorted(losing):
            raise NotFusableError("its forward does not pass its logits to its loss a second time")
        return {one.call: one for one in finished}

    def _run(
        self,
        logits_of: Callable[[int, torch.Size], Tensor],
        labels: Tensor,
        attention_mask: Tensor,
        *,
        position_ids: Tensor | None = None,
        with_gradients: bool = False,
    ) -> None:
        structure, model = self.structure, self.model
        # One row for all tokens: with a large vocabulary's labels they would be gigabytes.
        hidden_states = torch.zeros(structure.hidden_size, dtype=self.logits.dtype).expand(*labels.shape, -1)
        outer_head = model.get_submodule(structure.head_name)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(with_gradients))
            for tensors, name, instead in list(self._tensors_on_the_way()):
                stack.enter_context(swapped(tensors, name, instead))
            for name, owner_module in _loss_owners(model, structure.head_name):
                stack.enter_context(swapped(vars(owner_module), "_loss_function", self._noting(name, owner_module)))
            head = _Head(outer_head, labels, logits_of)
            stack.enter_context(
                stand_ins(model, structure.head_name, head=head, hidden_states=hidden_states, training=self.training)
            )
            try:
                inputs = self._inputs(labels, attention_mask)
                inputs |= {} if position_ids is None else {"position_ids": position_ids}
                self._note_loss(model.forward(**inputs))
                self.calls = head.calls
            except NotFusableError:
                raise
            except LogitsNotComputedError as error:
                found = str(error).removesuffix(HOW_TO_GET_LOGITS).removesuffix(": ")
                raise NotFusableError(f"its forward reads its logits beside its loss ({found})") from error
            except Exception as error:
                raise NotFusableError(f"its forward cannot be probed ({type(error).__name__}: {error})") from error

    def _note_loss(self, output: Any) -> None:
        loss = output[0] if isinstance(output, tuple) and output else getattr(output, "loss", None)
        loss = output if isinstance(output, Tensor) else loss  # From the last stage of a pipeline.
        if isinstance(loss, Tensor) and loss.numel() == 1 and not isinstance(loss, FusedLogits):
            self.losses.append(float(loss))

    def _noting(self, name: str, owner: nn.Module) -> Callable[..., Tensor]:
        from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

        original_loss: Any = owner.loss_function
        if original_loss not in (ForCausalLMLoss, ForMaskedLMLoss):
            called = getattr(original_loss, "__qualname__", repr(original_loss))

            def refuse(*args: Any, **kwargs: Any) -> Tensor:
                raise NotFusableError(f"its loss_function is {called}, not one of transformers' token losses")

            return refuse

        def note(*args: Any, **kwargs: Any) -> Tensor:
            given = dict(signature(original_loss).bind(*args, **kwargs).arguments)
            given |= given.pop("kwargs", {})
            logits, targets = given["logits"], given["labels"]
            shift_labels = given.get("shift_labels") if original_loss is ForCausalLMLoss else None
            if shift_labels is not None:
                targets = shift_labels
            is_aligned = original_loss is ForMaskedLMLoss or shift_labels is not None
            if isinstance(logits, FusedLogits):
                assert isinstance(logits.carried, _Carried)
                return logits.carried.finish(logits, targets, is_aligned=is_aligned)
            if given["vocab_size"] != logits.shape[-1]:
                raise NotFusableError("its forward passes another vocab_size to its loss function")
            options: dict[str, Any] = {
                key: given[key] for key in ("num_items_in_batch", "ignore_index") if key in given
            }
            call = getattr(type(logits), "head_call", 0)
            self.arrivals.append(Arrival(name, call, logits.as_subclass(Tensor), targets, is_aligned, options))
            return torch.tensor(PROBE_LOSS)

        return note

    def _inputs(self, labels: Tensor, attention_mask: Tensor) -> dict[str, Any]:
        """Arguments of the model's forward that might change its loss."""
        parameters = signature(self.model.forward).parameters
        rows, tokens = labels.shape
        ids = (torch.arange(tokens) % self.logits.shape[-1]).flip(-1).repeat(rows, 1)
        # A copy, for some forwards change their labels in place.
        inputs: dict[str, Any] = {"labels": labels.clone()}
        if self.takes("num_items_in_batch"):
            inputs["num_items_in_batch"] = PROBE_ITEMS
        offered = {
            "input_ids": ids,
            "attention_mask": attention_mask,
            "decoder_input_ids": ids,
            # There are no router logits here to compute an auxiliary loss from.
            "output_router_logits": False,
            "use_cache": False,
            "return_dict": True,
        }
        for name, parameter in parameters.items():
            is_required = parameter.default is Parameter.empty
            if is_required and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD and name not in inputs:
                inputs[name] = offered.get(name, torch.zeros(rows, 3, 8, 8))
        return inputs | {name: value for name, value in offered.items() if name in parameters}


def _loss_owners(model: nn.Module, head_name: str) -> Iterator[tuple[str, nn.Module]]:
    """Lists the modules on the path to lm_head that have a ``loss_function`` property, as transformers' models do."""
    path = head_name.split(".")
    for depth in range(len(path)):
        name = ".".join(path[:depth])
        owner = model.get_submodule(name)
        if isinstance(getattr(type(owner), "loss_function", None), property):
            yield name, owner
