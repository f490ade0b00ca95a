"""Distillation of two models in any pair of layouts, every gradient against full logits in fp64; options, models and
refusals."""

from __future__ import annotations

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cells import DDP as DDP_CELL
from cells import GRID, HSDP, ONE, Cell
from distilled import Pair, divergences, errors_of, make_teacher
from harness import InThisProcess, Workers
from loss_inputs import BACKENDS, make_inputs
from models import assert_below, make_batch, make_model
from torch import Tensor, nn
from truth import relative_error

import liger_dist
from liger_dist.losses.distillation import Distillation, Teacher
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist.sharding.process_groups import compute_device
from liger_dist_kernels.divergence import DIVERGENCES

JSD = {"divergence": "jsd", "beta": 0.3, "temperature": 1.5, "hard_weight": 0.25}
OPTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"divergence": "reverse_kl"},
    "forward, hard, temperature": {"hard_weight": 0.4, "temperature": 2.0},
    "reverse, temperature": {"divergence": "reverse_kl", "temperature": 0.7},
    "jsd": {"divergence": "jsd", "beta": 0.9},
    "total variation, hard, temperature": {"divergence": "total_variation", "hard_weight": 0.4, "temperature": 2.0},
    "jsd, hard, temperature": JSD,
}
LAYOUTS = {
    "plain": replace(ONE, world=2),
    "DDP": DDP_CELL,
    "FSDP1": Cell(engine="fsdp1", layout={"by_others": False}),
    "FSDP1, flat parameters": Cell(engine="fsdp1", layout={"use_orig_params": False}),
    "FSDP2": Cell(engine="fsdp2"),
    "FSDP2, head alone": Cell(engine="fsdp2", layout={"head": "own"}),
    "FSDP2, vocab-parallel": Cell(engine="fsdp2", layout={"rows": True}),
    "TP": Cell(engine="tp"),
    "ZeRO-1": Cell(engine="zero", layout={"stage": 1}),
    "ZeRO-3": Cell(engine="zero", layout={"stage": 3}),
}
STUDENTS = [name for name in LAYOUTS if name != "plain"]
LAYOUTS_4 = {
    "FSDP2": Cell(engine="fsdp2", world=4),
    "HSDP": Cell(engine="fsdp2", layout={"axes": HSDP}, world=4),
    "HSDP, vocab-parallel": Cell(engine="fsdp2", layout={"axes": HSDP, "rows": True}, world=4),
    "FSDP2 x TP": Cell(engine="fsdp2", layout={"axes": GRID}, world=4),
    "ZeRO-3": Cell(engine="zero", layout={"stage": 3}, world=4),
}


def assert_pair_is_exact(pair: Pair, results: list[dict[str, float]]) -> None:
    for rank, errors in enumerate(results):
        assert_below(errors, pair.tolerance, f"{pair}, rank {rank}")


REPEATS = ("FSDP1, flat parameters", "FSDP2, head alone", "ZeRO-1")
"""models that are stored as another one, as seen from lm_head"""


PAIRS = (("ZeRO-3", "FSDP2"), ("FSDP2", "ZeRO-3"), ("TP", "plain"), ("FSDP1", "FSDP1"))
"""student and teacher that ``make test`` compares, beside those of a vocab-parallel student"""


def nightly_where(is_nightly: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=[pytest.mark.nightly] * is_nightly)


@pytest.mark.cover("values")
@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        nightly_where(t in REPEATS or not (s == "FSDP2, vocab-parallel" or (s, t) in PAIRS), s, t)
        for s in STUDENTS
        for t in LAYOUTS
    ],
)
def test_every_pair_of_layouts(student: str, teacher: str, workers_2: Workers) -> None:
    pair = Pair(
        student=LAYOUTS[student],
        teacher=LAYOUTS[teacher],
        options=JSD,
        # A tensor-parallel teacher has one batch for all ranks.
        same_tokens=teacher == "TP" and student != "TP",
    )
    skip_without(pair)
    assert_pair_is_exact(pair, workers_2.run(errors_of, pair))


@pytest.mark.cover("values")
@pytest.mark.nightly(student=["FSDP2", "ZeRO-3"])
@pytest.mark.parametrize(
    ("student", "teacher"),
    [nightly_where("HSDP" in s and t == "ZeRO-3", s, t) for s in LAYOUTS_4 for t in ("FSDP2", "ZeRO-3")],
)
def test_four_ranks(student: str, teacher: str, workers_4: Workers) -> None:
    pair = Pair(student=LAYOUTS_4[student], teacher=LAYOUTS_4[teacher], options={"divergence": "reverse_kl"})
    skip_without(pair)
    assert_pair_is_exact(pair, workers_4.run(errors_of, pair))


def test_the_page_has_every_pair() -> None:
    """The page's table has the students and the teachers of the test above and no others."""
    page = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text()
    for role, layouts in (("students", STUDENTS), ("teachers", list(LAYOUTS))):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {role} | "))
        assert row.strip("| ").split(" | ")[1].split("; ") == layouts


def skip_without(pair: Pair) -> None:
    for cell in (pair.student, pair.teacher):
        if cell.obstacle() is not None:
            pytest.skip(str(cell.obstacle()))


@pytest.mark.cover("values")
@pytest.mark.nightly(layout=["FSDP2", "ZeRO-3"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        nightly_where(
            layout in ("TP", "ZeRO-3") and options not in ("forward", "jsd, hard, temperature"), layout, options
        )
        for layout in ("FSDP2", "FSDP2, vocab-parallel", "TP", "ZeRO-3")
        for options in OPTIONS
    ],
)
def test_every_divergence(options: str, layout: str, workers_2: Workers) -> None:
    pair = Pair(student=replace(LAYOUTS[layout], use="many chunks"), teacher=LAYOUTS["FSDP2"], options=OPTIONS[options])
    skip_without(pair)
    assert_pair_is_exact(pair, workers_2.run(errors_of, pair))


MODELS: dict[str, dict[str, Any]] = {
    "tied student": {"model": "tied"},
    "head with bias": {"model": "bias"},
    "LoRA on the head": {"model": "LoRA on the head"},
    "soft-capped student": {"model": "gemma2"},
    "soft-capped teacher": {"teacher_family": "gemma2"},
    "frozen teacher": {"trains_teacher": False},
    "accumulation": {"accumulation": 2},
    "num_items_in_batch": {"passes_items": True},
    "checkpointing": {"use": "checkpointing"},
}


@pytest.mark.smoke
@pytest.mark.nightly(layout=["DDP", "FSDP1", "FSDP2", "TP"])
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2", "FSDP2, vocab-parallel", "TP"])
@pytest.mark.parametrize("name", MODELS)
def test_models_and_steps(name: str, layout: str, workers_2: Workers) -> None:
    given = dict(MODELS[name])
    of_student = {key: given.pop(key) for key in ("model", "accumulation", "use") if key in given}
    if "LoRA" in name and layout in ("TP", "FSDP2, vocab-parallel"):
        pytest.skip("LoRA on an lm_head of row shards is refused")
    pair = Pair(student=replace(LAYOUTS[layout], **of_student), teacher=LAYOUTS["FSDP2"], options=JSD, **given)
    skip_without(pair)
    assert_pair_is_exact(pair, workers_2.run(errors_of, pair))


@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "FSDP2, vocab-parallel", "TP", "ZeRO-3"])
def test_evaluation_saved_hidden_states_and_other_inputs(layout: str, workers_2: Workers) -> None:
    cell = LAYOUTS[layout]
    if cell.obstacle() is not None:
        pytest.skip(str(cell.obstacle()))
    for errors in workers_2.run(other_teachers, cell):
        for name, error in errors.items():
            assert error < 1e-5, f"{name}: {error:.2e}"


def other_teachers(cell: Cell) -> dict[str, float]:
    """Relative errors of losses that are evaluated, with other inputs for the teacher, and with its hidden states and
    its lm_head alone: plain, and sharded by FSDP2."""
    from distilled import session_of
    from torch.distributed.fsdp import fully_shard

    model = cell.build()
    dtype = next(model.parameters()).dtype
    teacher = make_teacher(dtype=dtype).eval()
    session, batch = session_of(cell, copy.deepcopy(model)), make_batch(session_rank(cell))
    inputs, other = batch["input_ids"], (batch["input_ids"] + 1) % 101
    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        output = teacher(input_ids=other, use_cache=False, output_hidden_states=True)
        valid = batch["labels"][:, 1:].flatten() != -100
        truth = divergences(logits.double(), output.logits[:, :-1].flatten(0, 1).double())[valid].mean()
    head = copy.deepcopy(teacher.lm_head)
    sharded = fully_shard(copy.deepcopy(head))
    wrapped = liger_dist.wrap(teacher, "auto")
    found = {}
    with torch.no_grad():
        evaluated = liger_dist.distillation_loss(session.root, wrapped, **batch, teacher_inputs={"input_ids": other})
    assert not evaluated.loss.requires_grad
    found["evaluated"] = evaluated.loss
    hidden = output.hidden_states[-1]
    for name, module in (("hidden states", head), ("hidden states, FSDP2", sharded)):
        given = liger_dist.distillation_loss(session.root, module, **batch, teacher_hidden=hidden)
        session.backward(given.loss)
        found[name] = given.loss.detach()
    liger_dist.unwrap(wrapped)
    assert "forward" not in vars(head)
    session.close()
    return {name: relative_error(value, truth) for name, value in found.items()}


def session_rank(cell: Cell) -> int:
    return 0 if cell.engine == "tp" else dist.get_rank()


@pytest.mark.nightly(teacher_vocab=[30, 41])
@pytest.mark.nightly(name=["forward", "reverse, temperature", "jsd"], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("teacher_vocab", "name"),
    [
        nightly_where(vocab != 37 and name not in ("reverse", "jsd, hard, temperature"), vocab, name)
        for vocab in (37, 30, 41)
        for name in OPTIONS
    ],
)
def test_the_op(teacher_vocab: int, name: str, backend: str) -> None:
    """Several chunks; vocabularies of which one is longer; soft-caps and scales of both; ignored tokens."""
    hidden, weight, bias, labels = make_inputs()
    generator = torch.Generator().manual_seed(3)
    teacher_hidden = on_device.randn(len(hidden), 14, generator=generator)
    teacher_weight = on_device.randn(teacher_vocab, 14, generator=generator) / 2
    teacher_bias = on_device.randn(teacher_vocab, generator=generator)
    options = dict(OPTIONS[name])
    distillation = Distillation(
        teacher=Teacher(hidden=teacher_hidden, weight=teacher_weight, bias=teacher_bias, softcap=3.0), **options
    )
    loss = LossSpec(softcap=4.0, logit_scale=0.7, distillation=distillation)
    execution = Execution(backend=backend, memory_budget=5 * 37 * 8)  # type: ignore[arg-type]
    result = fused_linear_cross_entropy(hidden, weight, bias, labels, spec=loss, execution=execution)
    leaves = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias) if tensor is not None]
    logits = 4.0 * torch.tanh(0.7 * (leaves[0] @ leaves[1].T + leaves[2]) / 4.0)
    raw = teacher_hidden.double() @ teacher_weight.double().T + teacher_bias.double()
    hard_weight = options.pop("hard_weight", 0.0)
    each = divergences(logits, 3.0 * torch.tanh(raw / 3.0), **options)
    valid = labels != -100
    hard = nn.functional.cross_entropy(logits, labels)
    truth = (1.0 - hard_weight) * each[valid].mean() + hard_weight * hard
    assert relative_error(result.loss, truth) < 1e-5
    assert relative_error(result.divergence, each[valid].mean()) < 1e-5  # type: ignore[arg-type]
    common = logits[:, :teacher_vocab] / options.get("temperature", 1.0)
    entropy = torch.distributions.Categorical(logits=common).entropy().where(valid, 0.0)
    assert relative_error(result.entropy, entropy) < 1e-5  # type: ignore[arg-type]
    for got, want in zip(
        torch.autograd.grad(result.loss, [hidden, weight, bias]), torch.autograd.grad(truth, leaves), strict=True
    ):  # type: ignore[arg-type]
        assert relative_error(got, want) < 1e-5


@pytest.mark.nightly(backend=["triton"])
@pytest.mark.smoke
@pytest.mark.nightly(divergence=["reverse_kl"])
@pytest.mark.nightly(logits_dtype=[torch.float32, "fp32_operands"], backend=["triton"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("divergence", "logits_dtype"),
    [
        nightly_where(logits_dtype is not None and divergence != "jsd", divergence, logits_dtype)
        for divergence in DIVERGENCES
        for logits_dtype in (None, torch.float32, "fp32_operands")
    ],
    ids=str,
)
def test_16_bits(divergence: Any, logits_dtype: Any, backend: str) -> None:
    """No worse than products of torch in bf16 and a softmax in fp32; fp32 logits are closer."""
    hidden, weight, _, labels = make_inputs(64, 32, 331, bias=False, dtype=torch.bfloat16)
    teacher_hidden = (hidden.detach() + 0.3 * torch.randn_like(hidden)).detach()
    teacher = Teacher(hidden=teacher_hidden, weight=weight.detach())
    loss = LossSpec(distillation=Distillation(teacher=teacher, divergence=divergence))
    execution = Execution(backend=backend, logits_dtype=logits_dtype)  # type: ignore[arg-type]
    result = fused_linear_cross_entropy(hidden, weight, None, labels, spec=loss, execution=execution)
    got = torch.autograd.grad(result.loss, [hidden, weight])
    valid = labels != -100

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (hidden, weight)]
        logits = leaves[0] @ leaves[1].T
        other = teacher_hidden.to(dtype) @ weight.detach().to(dtype).T
        wide = torch.promote_types(dtype, torch.float32)
        each = divergences(logits.to(wide), other.to(wide), divergence=divergence)
        return torch.autograd.grad(each[valid].mean(), leaves)

    for g, want, own in zip(got, gradients(torch.float64), gradients(torch.bfloat16), strict=True):
        factor = 1.5 if logits_dtype is None else 0.7
        assert relative_error(g, want) < factor * relative_error(own, want)


def test_memory_and_teacher_after_the_loss() -> None:
    """Nothing of the teacher is held for the backward, and its forward is the module's own again."""
    with InThisProcess() as here:
        here.run(nothing_is_held)


def nothing_is_held() -> None:
    student, teacher = liger_dist.wrap(make_model("llama"), "none"), liger_dist.wrap(make_teacher().eval(), "none")
    seen: list[Any] = [weakref.ref(teacher.lm_head.weight)]
    teacher.model.norm.register_forward_hook(lambda _, __, output: seen.append(weakref.ref(output)))
    output = liger_dist.distillation_loss(student, teacher, **make_batch(0))
    liger_dist.unwrap(teacher)
    assert "forward" not in vars(teacher.lm_head)
    del teacher
    gc.collect()
    assert [reference() for reference in seen] == [None, None]
    output.loss.backward()
    assert student.lm_head.weight.grad is not None


@pytest.mark.smoke
def test_a_failing_student_leaves_the_teacher_as_it_was() -> None:
    student, teacher = liger_dist.wrap(make_model("llama"), "none"), liger_dist.wrap(make_teacher().eval(), "none")

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    student.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        liger_dist.distillation_loss(student, teacher, **make_batch(0))
    assert "forward" not in vars(teacher.lm_head)
    assert teacher(input_ids=make_batch(0)["input_ids"]).logits.shape[-1] == 107
    assert torch.is_grad_enabled()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "divergence": (
        {"divergence": "kl"},
        "divergence is 'kl'; expected one of 'forward_kl', 'reverse_kl', 'jsd', 'total",
    ),
    "beta": ({"divergence": "jsd", "beta": 0.0}, "beta is 0.0; expected a number between 0 and 1 for 'jsd'"),
    "temperature": ({"temperature": 0.0}, "temperature is 0.0; expected a finite number above 0"),
    "a tensor": ({"temperature": torch.ones(3, device="cpu")}, "temperature is tensor.*expected a number"),
    "tiny": ({"temperature": 1e-300}, "temperature is 1e-300; expected at least 1e-06"),
    "beta of no jsd": ({"beta": 0.3}, "beta is 0.3 and divergence is 'forward_kl'; beta is of 'jsd' alone"),
    "no labels": ({"labels": None}, "labels are None; expected a tensor of token ids"),
    "tuple": ({"return_dict": False}, "return_dict is False, and a tuple has no place for a divergence"),
    "softcap": ({"teacher_softcap": 3.0}, "teacher_softcap or teacher_logit_scale was given without teacher_hidden"),
    "hard_weight": ({"hard_weight": 1.5}, r"hard_weight is 1.5; expected a number in \[0, 1\]"),
    "label_smoothing": ({"label_smoothing": 0.1}, "label_smoothing was given to a distillation loss"),
    "outputs": ({"outputs": ("log_prob",)}, "outputs was given to a distillation loss"),
    "unknown": ({"labls": 1}, "distillation_loss was called with 'labls'"),
    "label": ({"labels": torch.full((3, 12), 101, device="cpu")}, "a label is 101 but lm_head has 101 rows"),
    "shape": ({"labels": torch.zeros(3, 11, dtype=torch.int64, device="cpu")}, r"labels have shape \(3, 11\)"),
    "teacher_inputs": (
        {"teacher_inputs": {"input_ids": torch.ones(3, 9, dtype=torch.int64, device="cpu")}},
        r"the teacher's inputs have shape \(3, 9\) and labels have shape \(3, 12\)",
    ),
    "teacher_hidden": (
        {"teacher_hidden": torch.ones(3, 12, 24, device="cpu")},
        "expected an lm_head, a torch.nn.Linear with its own forward",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_runs(name: str) -> None:
    given, sentence = REFUSED[name]
    student, teacher = liger_dist.wrap(make_model("llama"), "none"), liger_dist.wrap(make_teacher().eval(), "none")
    calls: list[str] = []
    for role, model in (("student", student), ("teacher", teacher)):
        model.model.register_forward_pre_hook(lambda *_, role=role: calls.append(role))
    # Labels on the CPU are checked there; on a GPU an assertion on the device would be.
    is_moved = {key: isinstance(value, Tensor) and key != "labels" for key, value in given.items()}
    moved = {key: value.to(compute_device()) if is_moved[key] else value for key, value in given.items()}
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        liger_dist.distillation_loss(student, teacher, **(make_batch(0) | moved))
    assert calls == []


class Tripled(nn.Linear):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 3.0 * super().forward(hidden_states)


class InAThread(nn.Module):
    """Calls its module in another thread, as ``nn.DataParallel`` does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **given: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.module, **given).result()


@pytest.mark.smoke
def test_refused_models() -> None:
    student = liger_dist.wrap(make_model("llama"), "none")
    batch = make_batch(0)
    unwrapped = make_teacher().eval()
    with pytest.raises(liger_dist.LigerDistError, match=r"is not wrapped; call liger_dist.wrap"):
        liger_dist.distillation_loss(student, unwrapped, **batch)
    teacher = liger_dist.wrap(unwrapped, "none")
    with pytest.raises(liger_dist.LigerDistError, match=r"is not wrapped; call liger_dist.wrap"):
        liger_dist.distillation_loss(make_model("llama"), teacher, **batch)
    with pytest.raises(liger_dist.LigerDistError, match="student and teacher are one model"):
        liger_dist.distillation_loss(teacher, teacher, **batch)
    with pytest.raises(liger_dist.LigerDistError, match=r"training mode.*call teacher.eval"):
        liger_dist.distillation_loss(student, teacher.train(), **batch)
    unfused = liger_dist.wrap(make_model("llama"), "none", config=liger_dist.WrapConfig(fused_loss=False))
    with pytest.raises(liger_dist.LigerDistError, match="the loss of the student LlamaForCausalLM is not fused"):
        liger_dist.distillation_loss(unfused, teacher.eval(), **batch)
    heads = {
        r"teacher_hidden has shape \(3, 9, 24\)": (nn.Linear(24, 107), on_device.ones(3, 9, 24)),
        "teacher_hidden has 20 features and the teacher's lm_head takes 24": (
            nn.Linear(24, 107),
            on_device.ones(3, 12, 20),
        ),
        "is a Tripled; expected an lm_head, a torch.nn.Linear with its own forward": (
            Tripled(24, 107),
            on_device.ones(3, 12, 24),
        ),
        "is a module of the student; pass a copy": (student.lm_head, on_device.ones(3, 12, 16)),
    }
    for sentence, (head, hidden) in heads.items():
        with pytest.raises(liger_dist.LigerDistError, match=sentence):
            liger_dist.distillation_loss(student, head, **batch, teacher_hidden=hidden)
    teacher.model.train()
    with pytest.raises(liger_dist.LigerDistError, match=r"training mode \(.* of its modules\)"):
        liger_dist.distillation_loss(student, teacher, **batch)
    teacher.eval()
    with pytest.raises(liger_dist.LigerDistError, match="did not call its lm_head in the thread"):
        liger_dist.distillation_loss(InAThread(student), teacher, **batch)

    def whole() -> Tensor:
        return liger_dist.distillation_loss(student, teacher, **batch).loss  # type: ignore[no-any-return]

    with pytest.raises(
        liger_dist.LigerDistError, match=r"inside torch.utils.checkpoint.*Checkpoint the student's layers"
    ):
        torch.utils.checkpoint.checkpoint(whole, use_reentrant=False)


@pytest.mark.smoke
def test_a_tensor_parallel_teacher_and_other_tokens(workers_2: Workers) -> None:
    """Ranks whose student has other tokens cannot share a teacher's rows."""
    if torch.cuda.is_available():
        pytest.skip("an assertion on the device ends the program, and with it the pool")
    for message in workers_2.run(other_tokens):
        assert "ranks of the tensor-parallel group of lm_head see different tokens" in message


def other_tokens() -> str:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        errors_of(Pair(student=LAYOUTS["DDP"], teacher=LAYOUTS["TP"]))
    return str(caught.value)


@pytest.mark.smoke
@pytest.mark.parametrize("layout", ["DDP", "FSDP1", "FSDP2", "FSDP2, vocab-parallel", "TP", "ZeRO-3"])
def test_verify(layout: str, workers_2: Workers) -> None:
    cell = LAYOUTS[layout]
    if cell.obstacle() is not None:
        pytest.skip(str(cell.obstacle()))
    for right, wrong in workers_2.run(verified, cell):
        assert right == ()
        assert any("gradient" in sentence for sentence in wrong)


def verified(cell: Cell) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What verify says of the loss as it is, and of one whose teacher's temperature is lost."""
    from unittest import mock

    from distilled import session_of

    model = cell.build()
    teacher = liger_dist.wrap(make_teacher(dtype=next(model.parameters()).dtype).eval(), "auto")
    session = session_of(cell, model)
    batch = make_batch(session_rank(cell)) | JSD
    batch["token_weight"] = on_device.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(0)).to(
        batch["labels"].device
    )
    right = liger_dist.verify(session.root, batch, teacher=teacher).problems
    own = Distillation.options
    with mock.patch.object(Distillation, "options", lambda self, student: own(replace(self, temperature=1.0), student)):
        wrong = liger_dist.verify(session.root, batch, teacher=teacher).problems
    session.close()
    return right, wrong


def test_collectives_of_one_step(workers_2: Workers) -> None:
    """Those of the student's own loss, the gathers of the teacher's weights, and nothing for the divergence."""
    fsdp2, tp = LAYOUTS["FSDP2"], LAYOUTS["TP"]
    for counts in workers_2.run(collectives, Pair(student=fsdp2, teacher=LAYOUTS["plain"])):
        # As test_of_the_group_that_holds_the_head.
        assert counts == {"all_gather": 7, "reduce_scatter": 4}
    for counts in workers_2.run(collectives, Pair(student=fsdp2, teacher=fsdp2)):
        # One layer, the embedding, the head with its norm.
        assert counts == {"all_gather": 7 + 3, "reduce_scatter": 4}
    for counts in workers_2.run(collectives, Pair(student=tp, teacher=LAYOUTS["plain"])):
        # Comparing tokens; statistics; the hidden states' gradient.
        assert counts == {"all_gather": 2, "all_reduce": 1}
    for counts in workers_2.run(collectives, Pair(student=tp, teacher=LAYOUTS["plain"], options=JSD)):
        # The mixture needs a second sum over the rows, and the labels their own statistics.
        assert counts == {"all_gather": 4, "all_reduce": 1}


def collectives(pair: Pair) -> dict[str, int]:
    """Of the second step, by kind."""
    from distilled import session_of
    from test_collectives import kinds_of
    from torch.distributed.tensor.debug import CommDebugMode

    session, other = session_of(pair.student, pair.student.build()), session_of(pair.teacher, make_teacher().eval())
    batch = make_batch(session.data_rank)

    def step() -> None:
        liger_dist.distillation_loss(session.root, other.root, **batch, **pair.options).loss.backward()

    step()
    session.optimizer.zero_grad()
    with CommDebugMode() as mode:
        step()
    return kinds_of(mode)


def test_one_rank_of_a_vocab_parallel_student_refuses(workers_2: Workers) -> None:
    """No hang: both ranks raise before the teacher runs."""
    messages = workers_2.run(refusal_of_one_rank)
    assert all("a label is 101" in message for message in messages)


def refusal_of_one_rank() -> str:
    from distilled import session_of

    session = session_of(LAYOUTS["FSDP2, vocab-parallel"], make_model("llama"))
    teacher = liger_dist.wrap(make_teacher().eval(), "fsdp2")
    batch = make_batch(dist.get_rank())
    batch["labels"] = batch["labels"].cpu()
    if dist.get_rank() == 1:
        batch["labels"][0, 5] = 101
    with pytest.raises(liger_dist.LigerDistError) as caught:
        liger_dist.distillation_loss(session.root, teacher, **batch)
    return str(caught.value)


def test_an_encoder_decoder_and_its_divisor() -> None:
    """Models whose own loss takes no num_items_in_batch, and whose inputs are of another length."""
    student, teacher = (liger_dist.wrap(make_model("t5", seed=seed).eval(), "none") for seed in (0, 1))
    ids, labels = on_device.randint(1, 101, (2, 3, 9)), on_device.randint(1, 101, (3, 12))
    given = {"input_ids": ids[0], "labels": labels, "decoder_input_ids": labels.roll(1, 1)}
    given = {name: value.to(compute_device()) for name, value in given.items()}
    inputs = {name: value for name, value in given.items() if name != "labels"}
    with torch.no_grad():
        logits, other = (model(**inputs, use_cache=False).logits.flatten(0, 1) for model in (student, teacher))
    total = divergences(logits, other).sum()
    output = liger_dist.distillation_loss(student, teacher, **given, num_items_in_batch=1000.0)
    assert relative_error(output.loss, total / 1000.0) < 1e-6
    del given["decoder_input_ids"]
    with pytest.raises(
        liger_dist.LigerDistError, match="is an encoder-decoder and gets no labels; pass decoder_input_ids"
    ):
        liger_dist.distillation_loss(student, teacher, **given)


def test_the_models_own_label_smoothing_is_not_in_the_hard_loss() -> None:
    class Smoothing(type(make_model("llama"))):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            from transformers.modeling_outputs import CausalLMOutput

            logits = self.lm_head(self.model(input_ids).last_hidden_state)
            loss = None
            if labels is not None:
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.2)
            return CausalLMOutput(loss=loss, logits=logits)

    student: nn.Module = make_model("llama").to(compute_device())
    student.__class__ = Smoothing
    liger_dist.wrap(student, "none")
    teacher = liger_dist.wrap(make_teacher(dtype=torch.float32).eval(), "none")
    batch = {name: make_batch(0)[name] for name in ("input_ids", "labels")}
    output = liger_dist.distillation_loss(student, teacher, **batch, hard_weight=1.0)
    with torch.no_grad():
        logits = student(batch["input_ids"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert relative_error(output.loss, expected) < 1e-5
    assert relative_error(student(**batch).loss, expected) > 1e-3


BACK = on_device.arange(100, -1, -1)


def selected(index: Any, sentence: str) -> tuple[str, Any, str]:
    def change(model: Any) -> None:
        model.lm_head.register_forward_hook(lambda module, args, output: output[index])

    return "llama", change, sentence


def scaled_output(model: Any) -> None:
    own = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits * 0.3
        return output

    model.forward = forward


def scaled_by_a_hook(head: nn.Module) -> None:
    head.register_forward_hook(lambda module, args, output: output * 0.3)


def masked_by_a_hook(head: nn.Module) -> None:
    head.register_forward_hook(
        lambda module, args, output: torch.cat([output[..., :33], torch.full_like(output[..., 33:], -30.0)], -1)
    )


def patched_head(head: Any) -> None:
    own = head.forward
    head.forward = lambda hidden_states: own(hidden_states) * 0.3


TEACHERS: dict[str, tuple[str, Any, str]] = {
    "softcap": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", 2.0), "did div 2"),
    "no softcap": ("gemma2", lambda model: setattr(model.config, "final_logit_softcapping", None), "did nothing to"),
    "a hook scales": ("llama", lambda model: scaled_by_a_hook(model.lm_head), "did mul 0.3 to its logits, but nothing"),
    "a hook masks": ("llama", lambda model: masked_by_a_hook(model.lm_head), "reads its logits, or a hook does"),
    "a hook cuts classes": selected((..., slice(60)), "did getitem"),
    "a hook cuts the first class": selected((..., slice(1, None)), "did getitem"),
    "a hook permutes classes": selected((..., BACK), "indices to its logits"),
    "a hook permutes tokens": selected((slice(None), BACK[-12:]), "indices to its logits"),
    "patched head": ("llama", lambda model: patched_head(model.lm_head), "lm_head of the teacher .* has been patched"),
    "patched model": ("llama", scaled_output, "did mul 0.3 to its logits"),
    "a hook of a saved copy": ("saved", lambda model: scaled_by_a_hook(model.lm_head), "did mul 0.3 to its logits"),
    "a hook of LoRA": ("lora", lambda model: scaled_by_a_hook(model.lm_head), "did mul 0.3 to its logits"),
}


@pytest.mark.parametrize("name", TEACHERS)
def test_logits_of_a_teacher_that_are_others_since_wrap_are_refused(name: str) -> None:
    family, change, sentence = TEACHERS[name]
    adapters = {"saved": {"modules_to_save": ["lm_head"]}, "lora": {"target_modules": ["q_proj", "lm_head"]}}
    student, teacher = make_model("llama"), make_model("llama" if family in adapters else family, seed=2).eval()
    base: Any = teacher
    if family in adapters:
        import peft

        settings: dict[str, Any] = {"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
        teacher = peft.get_peft_model(teacher, peft.LoraConfig(**(settings | adapters[family]))).eval()
    liger_dist.wrap(student, "none")
    liger_dist.wrap(teacher, "none")
    liger_dist.distillation_loss(student, teacher, **make_batch(0))
    change(base)
    with pytest.raises(liger_dist.LigerDistError, match=sentence):
        liger_dist.distillation_loss(student, teacher, **make_batch(0))


def test_a_hook_of_the_lm_head_of_saved_hidden_states_is_refused() -> None:
    student, head = liger_dist.wrap(make_model("llama"), "none"), nn.Linear(16, 101, bias=False)
    head = head.to(next(student.parameters()))
    scaled_by_a_hook(head)
    hidden = on_device.randn(3, 12, 16, dtype=torch.float64)
    with pytest.raises(liger_dist.LigerDistError, match=r"did mul 0\.3 to its logits, expected nothing"):
        liger_dist.distillation_loss(student, head, teacher_hidden=hidden, **make_batch(0))
