"""Draft heads: the loss of an lm_head on a draft vocabulary, and divergences from some rows of a target's lm_head:
every gradient against full logits in fp64, in every layout of both."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
import torch.distributed as dist
from allocations import LargestTensor
from distilled import TEACHER_VOCAB, Pair, divergences, errors_of, make_teacher
from full_tensors import full_gradients
from harness import InThisProcess, Workers
from layouts import zero_settings
from models import assert_below, make_batch, make_model, relative_errors
from test_distillation import LAYOUTS, REPEATS, STUDENTS, nightly_where, skip_without
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from truth import relative_error

import liger_dist
from liger_dist.losses.distillation import Teacher
from liger_dist.sharding.process_groups import compute_device
from liger_dist_kernels.divergence import DIVERGENCES

C, V, D, E = 37, 61, 10, 14
"""classes of the draft, vocabulary of the target, hidden sizes of draft and target"""


def make_rows(*, vocab_size: int = V, classes: int = C, seed: int = 5) -> Tensor:
    """Draws different token ids of the target, in no order."""
    return on_device.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:classes]


class Draft(nn.Module):
    """A layer and an lm_head, whose forward returns the loss."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer, self.lm_head = nn.Linear(D, D), nn.Linear(D, C, bias=bias)

    def forward(self, inputs: Tensor, labels: Tensor, noted: dict[str, Tensor], **given: Any) -> Tensor:
        """``inputs`` ``[..., D]``; notes the other outputs."""
        output = liger_dist.lm_head_loss(self.lm_head, torch.tanh(self.layer(inputs)), labels, **given)
        if output.divergence is not None:
            assert output.hard_loss is not None
            assert output.entropy is not None
            assert not output.divergence.requires_grad
            assert not output.entropy.requires_grad
            noted |= {"divergence": output.divergence, "hard": output.hard_loss, "entropy": output.entropy}
        return output.loss


def make_draft(dtype: torch.dtype, *, bias: bool = True) -> tuple[Draft, nn.Linear]:
    """The draft and the target's lm_head, the same on every rank."""
    torch.manual_seed(4)
    draft, head = Draft(bias), nn.Linear(E, V, bias=bias)
    with torch.no_grad():
        draft.lm_head.weight *= 5.0
        head.weight *= 5.0
    return draft.to(compute_device(), dtype), head.to(compute_device(), dtype).requires_grad_(False)


def make_tokens(rank: int, dtype: torch.dtype, *, shape: tuple[int, ...] = (3, 7), labelled: bool = True) -> Any:
    """Inputs ``[..., D]``, hidden states of the target ``[..., E]``, token ids of the target, token weights."""
    generator = torch.Generator().manual_seed(20 + rank)
    inputs, hidden = (on_device.randn(*shape, size, generator=generator).to(dtype) for size in (D, E))
    ids = on_device.randint(0, V, shape, generator=generator)
    ids[on_device.rand(*shape, generator=generator) < (0.2 if labelled else 2.0)] = -100
    return inputs, hidden, ids, on_device.rand(*shape, generator=generator)


def true_loss(
    draft: nn.Module, head: nn.Linear, tokens: Any, rows: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its parts by hand, from full logits of both, and the classes by a loop."""
    inputs, hidden, ids, weight = tokens
    given = dict(options)
    hard_weight, items = given.pop("hard_weight", 0.0), given.pop("num_items_in_batch", None)
    weight = weight.flatten() if given.pop("weighted", False) else torch.ones_like(weight).flatten()
    logits = draft.lm_head(torch.tanh(draft.layer(inputs))).flatten(0, -2)
    full_logits = (hidden.to(head.weight.dtype) @ head.weight.T + (0 if head.bias is None else head.bias)).flatten(
        0, -2
    )
    classes = {int(row): place for place, row in enumerate(range(C) if rows is None else rows)}
    mapped = on_device.tensor([classes.get(int(one), -100) for one in ids.flatten()], dtype=torch.int64)
    valid = mapped != -100
    restricted = full_logits[:, :C] if rows is None else full_logits[:, rows]
    each = divergences(logits, restricted, **given)
    hard = nn.functional.cross_entropy(logits, mapped, reduction="none")
    count = items if items is not None else max(int(valid.sum()), 1)
    parts = {name: (weight * values)[valid].sum() / count for name, values in (("divergence", each), ("hard", hard))}
    return (1.0 - hard_weight) * parts["divergence"] + hard_weight * parts["hard"], parts


OPTIONS: dict[str, dict[str, Any]] = {
    "cross entropy": {"hard_weight": 1.0},
    "forward": {},
    "reverse, hard": {"divergence": "reverse_kl", "hard_weight": 0.3},
    "jsd, temperature": {"divergence": "jsd", "beta": 0.3, "temperature": 1.7},
    "total variation": {"divergence": "total_variation"},
    "total variation, everything": {
        "divergence": "total_variation",
        "hard_weight": 0.4,
        "temperature": 0.8,
        "weighted": True,
        "num_items_in_batch": 9.0,
    },
}
DRAFTS = ("plain", "DDP", "FSDP1", "FSDP1, head alone", "FSDP2", "FSDP2, head alone", "TP", "ZeRO-1", "ZeRO-3")
TARGETS = ("plain", "FSDP1", "FSDP2", "TP")


def shard_target(head: nn.Linear, layout: str) -> nn.Module:
    if layout == "FSDP1":
        return FullyShardedDataParallel(head, use_orig_params=True, device_id=compute_device())
    if layout == "FSDP2":
        return fully_shard(head)
    if layout == "TP":
        return parallelize_module(head, init_device_mesh(compute_device().type, (2,)), ColwiseParallel())
    return head


def shard_draft(draft: Draft, layout: str) -> nn.Module:
    """In a loop of the user's own, without :func:`liger_dist.wrap`."""
    if layout == "DDP":
        return nn.parallel.DistributedDataParallel(draft)
    options: dict[str, Any] = {"use_orig_params": True, "device_id": compute_device()}
    if layout == "FSDP1, head alone":
        draft.lm_head = FullyShardedDataParallel(draft.lm_head, **options)  # type: ignore[assignment]
    if layout.startswith("FSDP1"):
        return FullyShardedDataParallel(draft, **options)
    if layout == "FSDP2, head alone":
        fully_shard(draft.lm_head)
    if layout.startswith("FSDP2"):
        return fully_shard(draft)
    if layout == "TP":
        mesh = init_device_mesh(compute_device().type, (2,))
        parallelize_module(draft.lm_head, mesh, ColwiseParallel())
    if layout.startswith("ZeRO"):
        import deepspeed

        settings = zero_settings({"stage": int(layout[-1])})
        engine, *_ = deepspeed.initialize(
            model=draft, optimizer=torch.optim.SGD(draft.parameters(), lr=0.1), config=settings
        )
        return engine  # type: ignore[no-any-return]
    return draft


def gradients_of(root: nn.Module, draft: Draft, loss: Tensor, layout: str) -> dict[str, Tensor]:
    if not layout.startswith("ZeRO"):
        loss.backward()
        return full_gradients(root)
    from deepspeed.utils import safe_get_full_grad

    root.backward(loss)  # type: ignore[operator]
    found = {name: safe_get_full_grad(p) for name, p in draft.named_parameters()}
    root.destroy()  # type: ignore[operator]
    return {name: gradient.to(compute_device()) for name, gradient in found.items()}


def errors_in(layout: str, target: str, name: str, bias: bool) -> dict[str, float]:
    """One step on this rank's tokens beside the truth; a rank without labels takes part. Runs on every rank."""
    dtype = torch.float32 if layout.startswith("ZeRO") else torch.float64
    draft, head = make_draft(dtype, bias=bias)
    reference, true_head = copy.deepcopy(draft).double(), copy.deepcopy(head).double()
    rows, options, errors = make_rows(), dict(OPTIONS[name]), dict[str, float]()
    is_same = "TP" in (layout, target)
    ranks = [0] if is_same or layout == "plain" else range(dist.get_world_size())
    mine = 0 if is_same else dist.get_rank()
    reports = {}
    for rank in [mine] if layout == "plain" else ranks:
        tokens = make_tokens(rank, torch.float64, labelled=is_same or rank == 0 or name != "forward")
        loss, parts = true_loss(reference, true_head, tokens, rows, options)
        (loss / len(ranks)).backward()
        reports[rank] = loss.detach(), parts
    teacher, root = shard_target(head, target), shard_draft(draft, layout)
    inputs, hidden, ids, weight = make_tokens(mine, dtype, labelled=is_same or mine == 0 or name != "forward")
    if options.pop("weighted", False):
        options["token_weight"] = weight
    noted: dict[str, Tensor] = {}
    labels = liger_dist.draft_labels(ids, rows, V)
    given = {"teacher": teacher, "teacher_hidden": hidden, "teacher_rows": rows}
    loss = root(inputs, labels, noted, **given, **options)
    assert loss.dtype == dtype
    truth, parts = reports[mine]
    errors["loss"] = float((loss.detach() - truth).abs())
    errors["divergence"] = float((noted["divergence"] - parts["divergence"]).abs())
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = gradients_of(root, draft, loss, layout)
    assert {one.grad for one in teacher.parameters()} == {None}
    assert "forward" not in {**vars(draft.lm_head), **vars(head)}
    return errors | relative_errors(found, truths)


@pytest.mark.smoke
@pytest.mark.cover("pairs")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("layout", DRAFTS)
def test_every_layout_of_draft_and_target(layout: str, target: str, name: str, bias: bool, workers_2: Workers) -> None:
    if layout.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    for rank, errors in enumerate(workers_2.run(errors_in, layout, target, name, bias)):
        tolerance = 1e-5 if layout.startswith("ZeRO") else 1e-10
        assert_below(errors, tolerance, f"{layout} from {target}, {name}, rank {rank}")


ALL = "every class of the target"


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 5), (21,), (0, 7)], ids=str)
@pytest.mark.parametrize("rows", ["unsorted", "sorted", ALL])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("hard_weight", [0.0, 0.3, 1.0])
def test_one_process(
    hard_weight: float, divergence: Any, rows: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Many chunks; no worse than products of torch in this dtype and a softmax in fp32; an empty batch has zeros."""
    draft, head = make_draft(dtype)
    ids = {"unsorted": make_rows(), "sorted": make_rows().sort().values, ALL: None}[rows]
    options = {"divergence": divergence, "hard_weight": hard_weight}
    inputs, hidden, tokens, weight = make_tokens(0, dtype, shape=shape)
    if ids is None:
        tokens = tokens.where(tokens < C, -100)
    labels = tokens if ids is None else liger_dist.draft_labels(tokens, ids, V)
    given = {
        "teacher": head,
        "teacher_hidden": hidden,
        "teacher_rows": ids,
        "memory_budget": 5 * C * 2 * dtype.itemsize,
    }
    leaf = inputs.clone().requires_grad_()
    loss = draft(leaf, labels, {}, **given, **options)
    got = torch.autograd.grad(loss, [leaf, *draft.parameters()])
    truths = []
    for wide in (torch.float64, dtype):
        leaf = inputs.to(wide).requires_grad_()
        other = copy.deepcopy(draft).to(wide)
        total, _ = true_loss(other, copy.deepcopy(head).to(wide), (leaf, hidden, tokens, weight), ids, options)
        truths.append((total, torch.autograd.grad(total, [leaf, *other.parameters()])))
    (truth, wanted), (_, torchs) = truths
    bound = {torch.float64: 1e-11, torch.float32: 1e-4}.get(dtype)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    if 0 in shape:
        assert float(loss) == 0.0
        assert not any(gradient.any() for gradient in got)
        return
    assert abs(float(loss) / float(truth) - 1) < (bound or 3e-2)
    for g, want, own in zip(got, wanted, torchs, strict=True):
        assert relative_error(g, want) < (bound or max(3.0 * relative_error(own, want), 2.0 * torch.finfo(dtype).eps))


def with_rows(pair: Pair) -> dict[str, float]:
    """Errors of a wrapped student whose classes are some rows of a wrapped teacher; runs on every rank."""
    rows = make_rows(vocab_size=TEACHER_VOCAB, classes=101)
    return errors_of(replace(pair, options={**pair.options, "teacher_rows": rows}))


SOME = (("ZeRO-3", "FSDP2"), ("FSDP2", "ZeRO-3"), ("TP", "TP"), ("FSDP1", "FSDP1"), ("DDP", "FSDP2, vocab-parallel"))
"""pairs that ``make test`` compares, beside those of a vocab-parallel student"""
WRAPPED = {"total variation": {"divergence": "total_variation", "hard_weight": 0.3}, "forward": {}}


@pytest.mark.cover("values")
@pytest.mark.parametrize("options", WRAPPED)
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        nightly_where(t in REPEATS or not (s == "FSDP2, vocab-parallel" or (s, t) in SOME), s, t)
        for s in STUDENTS
        for t in LAYOUTS
    ],
)
def test_every_pair_of_wrapped_models(student: str, teacher: str, options: str, workers_2: Workers) -> None:
    pair = Pair(
        student=LAYOUTS[student],
        teacher=LAYOUTS[teacher],
        options=WRAPPED[options],
        same_tokens=teacher == "TP" and student != "TP",
    )
    skip_without(pair)
    for rank, errors in enumerate(workers_2.run(with_rows, pair)):
        assert_below(errors, pair.tolerance, f"{pair}, rank {rank}")


def test_vocab_parallel_heads_alone(workers_2: Workers) -> None:
    for errors in workers_2.run(vocab_parallel_heads):
        assert_below(errors, 1e-10)


def vocab_parallel_heads() -> dict[str, float]:
    """The loss of the row-sharded lm_head of a wrapped model, from that of another one: each rank has other tokens, and
    one has no label."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, target = make_model("llama", dtype=torch.float64), make_teacher()
    weight, other = (one.lm_head.weight.detach().double().clone().requires_grad_() for one in (model, target))
    strategy = liger_dist.FSDP2(lm_head="vocab_parallel", reduce_dtype=torch.float64)
    rows = make_rows(vocab_size=TEACHER_VOCAB, classes=101)
    generator = torch.Generator().manual_seed(3)
    draws = [[on_device.randn(2, 5, size, generator=generator).double() for size in (16, 24)] for _ in range(world)]
    labels = [on_device.randint(0, 101, (2, 5), generator=generator) * (1 - one) - 100 * one for one in range(world)]
    leaves = [draw[0].clone().requires_grad_() for draw in draws]
    truths = []
    for leaf, (_, hidden), own in zip(leaves, draws, labels, strict=True):
        each = divergences(leaf @ weight.T, (hidden @ other.T)[..., rows], divergence="total_variation")
        truths.append((each * (own != -100)).sum() / max(int((own != -100).sum()), 1))
        (truths[-1] / world).backward(retain_graph=True)
    draft, teacher = liger_dist.wrap(model, strategy), liger_dist.wrap(target, strategy)
    given = {"teacher_hidden": draws[rank][1], "teacher_rows": rows, "divergence": "total_variation"}
    leaf = draws[rank][0].clone().requires_grad_()
    output = liger_dist.lm_head_loss(draft.lm_head, leaf, labels[rank], teacher=teacher.lm_head, **given)
    output.loss.backward()
    gradients = {"weight": draft.lm_head.weight.grad.full_tensor(), "input": leaf.grad / world}
    truth = {"weight": weight.grad, "input": leaves[rank].grad}
    return {"loss": float((output.loss - truths[rank]).abs().detach())} | relative_errors(gradients, truth)


def test_depths_are_one_loss() -> None:
    """Depths with a decay and their own means, as one call with token weights, and by hand."""
    draft, head = make_draft(torch.float64)
    inputs, hidden, ids, _ = make_tokens(0, torch.float64, shape=(3, 2, 7))
    rows, decay = make_rows(), 0.8
    labels = liger_dist.draft_labels(ids, rows, V)
    counts = (labels != -100).sum((1, 2)).clamp(min=1)
    weight = (decay ** on_device.arange(3) / counts)[:, None, None].expand(labels.shape)
    given = {"teacher": head, "teacher_hidden": hidden, "teacher_rows": rows}
    loss = draft(inputs, labels, {}, **given, token_weight=weight, num_items_in_batch=1)
    truth = sum(
        decay**k * true_loss(draft, head, (inputs[k], hidden[k], ids[k], weight[k]), rows, {})[0] for k in range(3)
    )
    found, wanted = (torch.autograd.grad(one, list(draft.parameters())) for one in (loss, truth))
    assert abs(float(loss) - float(truth)) < 1e-6  # The weights are fp32.
    assert all(relative_error(g, want) < 1e-6 for g, want in zip(found, wanted, strict=True))


class Unrolled(Draft):
    """A call of the loss for each depth."""

    def forward(self, inputs: Tensor, labels: Tensor, noted: dict[str, Tensor], **given: Any) -> Tensor:
        losses, hidden = [], inputs
        for depth in range(3):
            hidden = torch.tanh(self.layer(hidden))
            losses.append(0.8**depth * liger_dist.lm_head_loss(self.lm_head, hidden, labels, **given).loss)
        return torch.stack(losses).sum()


@pytest.mark.parametrize("layout", DRAFTS)
def test_a_call_for_each_depth(layout: str, workers_2: Workers) -> None:
    if layout.startswith("ZeRO"):
        pytest.importorskip("deepspeed")
    for errors in workers_2.run(errors_of_depths, layout):
        assert_below(errors, 1e-5 if layout.startswith("ZeRO") else 1e-10, layout)


def errors_of_depths(layout: str) -> dict[str, float]:
    dtype = torch.float32 if layout.startswith("ZeRO") else torch.float64
    draft, head = make_draft(dtype)
    reference, true_head = copy.deepcopy(draft).double(), copy.deepcopy(head).double()
    draft.__class__ = Unrolled
    inputs, hidden, ids, _ = make_tokens(0, torch.float64)  # One batch for all ranks.
    rows, features, truth = make_rows(), inputs, torch.zeros((), dtype=torch.float64, device=inputs.device)
    labels = liger_dist.draft_labels(ids, rows, V)
    target = (hidden @ true_head.weight.T + true_head.bias)[..., rows]
    for depth in range(3):
        features = torch.tanh(reference.layer(features))
        each = divergences(reference.lm_head(features), target, divergence="total_variation")
        truth = truth + 0.8**depth * each[labels != -100].mean()
    truth.backward()
    given = {"teacher": head, "teacher_hidden": hidden.to(dtype), "teacher_rows": rows, "divergence": "total_variation"}
    root = shard_draft(draft, layout)
    loss = root(inputs.to(dtype), labels, {}, **given)
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = gradients_of(root, draft, loss, layout)
    return {"loss": float((loss - truth).abs().detach())} | relative_errors(found, truths)


def test_a_compiled_draft() -> None:
    """The graph ends at the loss, and begins again after it."""
    draft, head = make_draft(torch.float64)
    inputs, hidden, ids, _ = make_tokens(0, torch.float64)
    rows = make_rows()
    given = {"teacher": head, "teacher_hidden": hidden, "teacher_rows": rows}
    labels = liger_dist.draft_labels(ids, rows, V)
    found = []
    for forward in (draft, torch.compile(draft, backend="aot_eager")):
        loss = 2.0 * forward(inputs, labels, {}, **given)
        found.append([loss, *torch.autograd.grad(loss, list(draft.parameters()))])
    assert all(relative_error(one, other) < 1e-12 for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("divergence", [None, *DIVERGENCES])
def test_no_logits_are_kept(divergence: Any) -> None:
    """No tensor of the step has the logits' size, of the target's vocabulary or of the draft's, and the lm_head of the
    target is copied for the draft's rows alone."""
    tokens, vocab, classes = 2048, 4096, 1024
    draft_head, head = (nn.Linear(8, size, bias=False).to(compute_device()) for size in (classes, vocab))
    hidden, target_hidden = on_device.randn(tokens, 8, requires_grad=True), on_device.randn(tokens, 8)
    labels = on_device.randint(0, classes, (tokens,))
    given: dict[str, Any] = {}
    if divergence is not None:
        rows = make_rows(vocab_size=vocab, classes=classes)
        given = {"teacher": head, "teacher_hidden": target_hidden, "teacher_rows": rows, "divergence": divergence}
    budget = 2 * 64 * classes * 4
    with LargestTensor() as largest:
        liger_dist.lm_head_loss(draft_head, hidden, labels, **given, memory_budget=budget).loss.backward()
    assert largest.bytes <= budget < tokens * classes * 4
    assert draft_head.weight.grad is not None


def test_nothing_is_held_after_the_loss() -> None:
    """The loss holds no tensor of the target, and is freed without the garbage collector."""
    gc.disable()
    try:
        draft, head = make_draft(torch.float32)
        inputs, hidden, ids, _ = make_tokens(0, torch.float32)
        labels = liger_dist.draft_labels(ids, make_rows(), V)
        given = {"teacher": head, "teacher_hidden": hidden, "teacher_rows": make_rows()}
        loss = draft(inputs, labels, {}, **given)
        seen = [weakref.ref(one) for one in (head.weight, hidden)]
        del head, hidden, given
        assert [one() for one in seen] == [None, None]
        graph = weakref.ref(loss.grad_fn)
        loss.backward()
        del loss
        assert graph() is None
    finally:
        gc.enable()


def test_evaluation_and_autocast() -> None:
    draft, head = make_draft(torch.float32)
    inputs, hidden, ids, _ = make_tokens(0, torch.float32)
    rows = make_rows()
    labels = liger_dist.draft_labels(ids, rows, V)
    given = {"teacher": head, "teacher_hidden": hidden, "teacher_rows": rows}
    with torch.no_grad():
        evaluated = draft(inputs, labels, {}, **given)
    trained = draft(inputs, labels, {}, **given)
    assert not evaluated.requires_grad
    assert abs(float(evaluated) - float(trained)) < 1e-6
    with torch.autocast(compute_device().type, dtype=torch.bfloat16):
        rounded = draft(inputs, labels, {}, **given)
    assert rounded.requires_grad
    assert 0 < abs(float(rounded) - float(trained)) < 2e-2


def test_cross_entropy_alone() -> None:
    """Without a teacher the loss is that of :func:`liger_dist.linear_cross_entropy` on mapped labels."""
    draft, _ = make_draft(torch.float64)
    inputs, _, ids, weight = make_tokens(0, torch.float64)
    labels = liger_dist.draft_labels(ids, make_rows(), V)
    loss = draft(inputs, labels, {}, token_weight=weight)
    hidden = torch.tanh(draft.layer(inputs))
    truth = liger_dist.linear_cross_entropy(
        hidden, draft.lm_head.weight, labels, bias=draft.lm_head.bias, token_weight=weight
    )
    found, wanted = (torch.autograd.grad(one, list(draft.parameters())) for one in (loss, truth))
    assert torch.equal(loss, truth)
    assert all(map(torch.equal, found, wanted))


def test_draft_labels() -> None:
    rows = on_device.tensor([7, 2, 5])
    ids = on_device.tensor([[2, 5, 7], [0, -100, 9]])
    assert liger_dist.draft_labels(ids, rows, 10).tolist() == [[1, 2, 0], [-100, -100, -100]]
    assert liger_dist.draft_labels(ids.where(ids >= 0, -1), rows, 10, ignore_index=-1).tolist()[1] == [-1, -1, -1]
    # EAGLE-3's d2t holds offsets.
    t2d = on_device.tensor([False, True, False, True, True])
    d2t = t2d.nonzero()[:, 0] - on_device.arange(3)
    assert (d2t + on_device.arange(3)).tolist() == [1, 3, 4]
    assert liger_dist.draft_labels(on_device.arange(5), d2t + on_device.arange(3), 5).tolist() == [-100, 0, -100, 1, 2]


def on_cpu(*values: Any) -> Tensor:
    """Labels and rows of the CPU are checked there; on a GPU an assertion on the device would end the program."""
    return torch.tensor(*values, device="cpu")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "row out of range": (
        {"teacher_rows": on_cpu([*range(C - 1), V])},
        rf"teacher_rows has a token id outside \[0, {V}\).* and the largest {V}. Pass the mask t2d as",
    ),
    "negative row": ({"teacher_rows": on_cpu([*range(C - 1), -3])}, "The smallest is -3 and the largest"),
    "row twice": (
        {"teacher_rows": on_cpu([*range(C - 1), 4])},
        "teacher_rows has a token id twice; expected different rows.*The first one is 4.*d2t as d2t",
    ),
    "too few rows": ({"teacher_rows": on_cpu([1, 2])}, f"teacher_rows has 2 token ids and .* has {C} rows"),
    "a mask": (
        {"teacher_rows": on_cpu([True] * V)},
        rf"teacher_rows has shape \({V},\) and dtype torch.bool; expected one token id",
    ),
    "divergence": ({"divergence": "kl"}, "divergence is 'kl'; expected one of 'forward_kl'"),
    "beta": ({"divergence": "total_variation", "beta": 0.3}, "beta is of 'jsd' alone"),
    "hard_weight": ({"hard_weight": -0.1}, r"hard_weight is -0.1; expected a number in \[0, 1\]"),
    "softcap": ({"teacher_softcap": 0.0}, "of the teacher, softcap is 0.0"),
    "label": ({"labels": torch.full((3, 7), C, device="cpu")}, f"a label is {C} but lm_head has {C} rows"),
    "labels": ({"labels": torch.zeros(3, 6, dtype=torch.int64, device="cpu")}, r"labels have shape \(3, 6\)"),
    "weights": ({"token_weight": torch.ones(3, 6, device="cpu")}, r"token_weight has shape \(3, 6\)"),
    "items": ({"num_items_in_batch": 0}, "num_items_in_batch is 0; expected a count above 0"),
    "budget": ({"memory_budget": 0}, "memory_budget is 0"),
    "hidden states": (
        {"hidden_states": torch.ones(3, 7, D + 1, device="cpu")},
        rf"hidden_states have shape \(3, 7, {D + 1}\) and lm_head takes {D} features",
    ),
    "teacher_hidden": (
        {"teacher_hidden": torch.ones(3, 6, E, device="cpu")},
        rf"teacher_hidden has shape \(3, 6, {E}\); expected \(3, 7, {E}\)",
    ),
    "no hidden states": ({"teacher_hidden": None}, "teacher was given without teacher_hidden"),
    "no teacher": ({"teacher": None}, "teacher_hidden was given without a teacher, so nothing reads it"),
    "a model": (
        {"lm_head": nn.Embedding(3, 4, device="cpu")},
        "lm_head_loss was given as lm_head a Embedding",
    ),
    "a sequence": ({"teacher": nn.Sequential()}, "was given as teacher a Sequential; expected an lm_head"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(name: str) -> None:
    changed, sentence = REFUSED[name]
    draft, head = make_draft(torch.float32)
    inputs, hidden, *_ = make_tokens(0, torch.float32)
    calls: list[str] = []
    for module in (draft.lm_head, head):
        module.register_forward_pre_hook(lambda *_: calls.append("called"))
    given: dict[str, Any] = {
        "lm_head": draft.lm_head,
        "hidden_states": inputs,
        "labels": torch.zeros(3, 7, dtype=torch.int64, device="cpu"),
        "teacher": head,
        "teacher_hidden": hidden,
        "teacher_rows": make_rows(),
    }
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        liger_dist.lm_head_loss(**(given | changed))
    assert calls == []


def test_refused_heads_and_labels() -> None:
    draft, head = make_draft(torch.float32)
    inputs, hidden, ids, _ = make_tokens(0, torch.float32)
    labels = liger_dist.draft_labels(ids, make_rows(), V)
    rows = on_cpu([3, 4])
    with pytest.raises(liger_dist.LigerDistError, match=r"a label lies outside \[0, 10\).*The smallest is -1"):
        liger_dist.draft_labels(on_cpu([-1, 10]), rows, 10)
    with pytest.raises(liger_dist.LigerDistError, match=r"rows has a token id outside \[0, 4\)"):
        liger_dist.draft_labels(on_cpu([1]), rows, 4)
    with pytest.raises(liger_dist.LigerDistError, match=r"labels have dtype torch.float32; expected token ids"):
        liger_dist.draft_labels(on_cpu([1.0]), rows, 10)
    with pytest.raises(liger_dist.LigerDistError, match="lm_head and teacher are one module"):
        liger_dist.lm_head_loss(draft.lm_head, inputs, labels, teacher=draft.lm_head, teacher_hidden=inputs)
    hook = draft.lm_head.register_forward_hook(lambda *_: None)
    with pytest.raises(liger_dist.LigerDistError, match="has a forward hook, which reads logits"):
        liger_dist.lm_head_loss(draft.lm_head, inputs, labels)
    hook.remove()

    def whole() -> Tensor:
        return liger_dist.lm_head_loss(
            draft.lm_head, inputs, labels.clamp(max=10), teacher=head, teacher_hidden=hidden
        ).loss

    with pytest.raises(liger_dist.LigerDistError, match=r"inside torch.utils.checkpoint"):
        torch.utils.checkpoint.checkpoint(whole, use_reentrant=False)
    assert "forward" not in {**vars(draft.lm_head), **vars(head)}


def test_rows_of_wrapped_models_are_checked() -> None:
    with InThisProcess() as here:
        here.run(refused_rows)


def refused_rows() -> None:
    student, teacher = liger_dist.wrap(make_model("llama"), "none"), liger_dist.wrap(make_teacher().eval(), "none")
    student.model.register_forward_pre_hook(lambda *_: pytest.fail("the student ran"))
    teacher.model.register_forward_pre_hook(lambda *_: pytest.fail("the teacher ran"))
    wrong = {
        f"outside \\[0, {TEACHER_VOCAB}\\)": on_cpu([*range(100), TEACHER_VOCAB]),
        "has 100 token ids and the draft's lm_head has 101 rows": on_cpu([*range(100)]),
        "a token id twice": on_cpu([*range(100), 7]),
    }
    for sentence, rows in wrong.items():
        with pytest.raises(liger_dist.LigerDistError, match=sentence):
            liger_dist.distillation_loss(student, teacher, **make_batch(0), teacher_rows=rows)


def test_verify_compares_rows() -> None:
    with InThisProcess() as here:
        here.run(verified_rows)


def verified_rows() -> None:
    student, teacher = liger_dist.wrap(make_model("llama"), "none"), liger_dist.wrap(make_teacher().eval(), "none")
    rows = make_rows(vocab_size=TEACHER_VOCAB, classes=101)
    batch = make_batch(0) | {"teacher_rows": rows, "divergence": "total_variation"}
    assert liger_dist.verify(student, batch, teacher=teacher).problems == ()
    own = Teacher.with_operands
    with mock.patch.object(Teacher, "with_operands", lambda self, *args: own(replace(self, rows=rows.flip(0)), *args)):
        assert liger_dist.verify(student, batch, teacher=teacher).problems != ()


def test_ranks_that_refuse_rows_end_together(workers_2: Workers) -> None:
    """One rank of a vocab-parallel lm_head has rows out of range: both raise, and no collective waits."""
    for message in workers_2.run(rows_of_one_rank):
        assert "token id outside" in message


def rows_of_one_rank() -> str:
    strategy = liger_dist.FSDP2(lm_head="vocab_parallel")
    draft, target = liger_dist.wrap(make_model("llama"), strategy), make_teacher(dtype=torch.float32)
    rows = on_cpu([*range(100), TEACHER_VOCAB if dist.get_rank() == 1 else 101])
    given = {"teacher": target.lm_head, "teacher_hidden": on_device.ones(2, 5, 24), "teacher_rows": rows}
    labels = on_device.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.lm_head_loss(draft.lm_head, on_device.ones(2, 5, 16), labels, **given)
    return str(caught.value)


def test_a_sharded_head_outside_of_its_model_is_refused(workers_2: Workers) -> None:
    for message in workers_2.run(outside_of_the_model):
        assert "is still sharded in its own forward; call lm_head_loss in the forward of" in message


def outside_of_the_model() -> str:
    draft, _ = make_draft(torch.float32)
    fully_shard(draft)
    inputs, _, ids, _ = make_tokens(0, torch.float32)
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.lm_head_loss(draft.lm_head, inputs, liger_dist.draft_labels(ids, make_rows(), V))
    return str(caught.value)


def test_a_cast_of_outputs_does_not_round_the_loss(workers_2: Workers) -> None:
    for losses in workers_2.run(with_outputs_in_bf16):
        assert losses[0] == losses[1]


def with_outputs_in_bf16() -> list[float]:
    found = []
    for dtype in (None, torch.bfloat16):
        draft, _ = make_draft(torch.float32)
        fully_shard(draft.lm_head, mp_policy=MixedPrecisionPolicy(output_dtype=dtype))
        inputs, _, ids, _ = make_tokens(0, torch.float32)
        loss = draft(inputs, liger_dist.draft_labels(ids, make_rows(), V), {})
        assert loss.dtype == torch.float32
        loss.backward()
        found.append(float(loss))
    return found
