"""Divergence of a student from a teacher, forward and backward, and soft labels: against bare GEMMs and against other
libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_dist.losses.distillation import Distillation, Teacher
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec
from liger_dist_kernels import Divergence

from . import peers
from .harness import Candidate, Row, arguments, measure, products, save, show
from .linear_cross_entropy import CHECKED, Inputs, bare_gemms, relative, step

SHAPE = (8192, 4096, 128256)
CLASSES = 64
"""of each token's soft labels"""


@dataclass
class Pair:
    """A student's inputs, and a teacher of the same sizes whose logits are the student's and as much noise."""

    inputs: Inputs
    teacher_TE: Tensor
    teacher_VE: Tensor

    @staticmethod
    def random(T: int, D: int, V: int) -> Pair:
        inputs = Inputs.random(T, D, V, peaked=True)
        teacher = Inputs.random(T, D, V)
        hidden = (inputs.hidden_TD.detach() + 0.5 * torch.randn_like(teacher.hidden_TD)).detach()
        return Pair(inputs, hidden, (inputs.weight_VD.detach() + 0.2 * teacher.weight_VD.detach()).detach())


def ours(
    pair: Pair, divergence: Divergence, logits_dtype: torch.dtype | None = None, memory_budget: int | None = None
) -> peers.Loss:
    distillation = Distillation(
        teacher=Teacher(hidden=pair.teacher_TE, weight=pair.teacher_VE), divergence=divergence, beta=0.5
    )
    execution = Execution(logits_dtype=logits_dtype, memory_budget=memory_budget)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        arguments = LossSpec(distillation=distillation)
        return fused_linear_cross_entropy(hidden, weight, None, labels, spec=arguments, execution=execution).loss

    return loss


def four_gemms(pair: Pair) -> Callable[[], None]:
    """The student's three products, and the teacher's logits."""
    three = bare_gemms(pair.inputs)
    logits = torch.empty(len(pair.teacher_TE), len(pair.teacher_VE), dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        torch.mm(pair.teacher_TE, pair.teacher_VE.T, out=logits)
        three()

    return run


class Truth:
    """Divergence and some rows of both gradients in fp64."""

    def __init__(self, pair: Pair, divergence: Divergence) -> None:
        x, w = pair.inputs.hidden_TD.detach().double(), pair.inputs.weight_VD.detach().double()
        e, u = pair.teacher_TE.double(), pair.teacher_VE.double()
        T, V = len(x), len(w)
        self.rows_V = torch.randint(0, V, (CHECKED,), device="cuda")
        self.rows_V[: CHECKED // 2] = pair.inputs.labels_T[: CHECKED // 2]
        self.rows_T = torch.arange(0, T, T // CHECKED, device="cuda")[:CHECKED]
        losses, columns, self.d_hidden = [], [], torch.zeros(CHECKED, x.shape[1], device="cuda", dtype=torch.float64)
        for rows in torch.arange(T, device="cuda").split(512):
            log_q, log_p = (x[rows] @ w.T).log_softmax(-1), (e[rows] @ u.T).log_softmax(-1)
            value, gradient = self._of(log_q, log_p, divergence)
            losses.append(value)
            columns.append(gradient[:, self.rows_V])
            here = (self.rows_T >= rows[0]) & (self.rows_T <= rows[-1])
            self.d_hidden[here] = gradient[self.rows_T[here] - rows[0]] @ w / T
        self.loss = torch.cat(losses).mean()
        self.d_weight = torch.cat(columns).T @ x / T

    @staticmethod
    def _of(log_q: Tensor, log_p: Tensor, divergence: Divergence) -> tuple[Tensor, Tensor]:
        """The divergence of each token, and its gradient by the student's logits."""
        p, q = log_p.exp(), log_q.exp()
        if divergence == "forward_kl":
            return (p * (log_p - log_q)).sum(-1), q - p
        log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=torch.float64))
        of_student = (q * (log_q - log_m)).sum(-1)
        value = 0.5 * (p * (log_p - log_m)).sum(-1) + 0.5 * of_student
        return value, 0.5 * q * (log_q - log_m - of_student[:, None])

    def errors(self, loss: Tensor, inputs: Inputs) -> dict[str, float]:
        assert inputs.weight_VD.grad is not None
        assert inputs.hidden_TD.grad is not None
        return {
            "loss error": relative(loss, self.loss),
            "dW error": relative(inputs.weight_VD.grad[self.rows_V], self.d_weight),
            "dX error": relative(inputs.hidden_TD.grad[self.rows_T], self.d_hidden),
        }


def divergence_table(pair: Pair, divergence: Divergence, rounds: int) -> list[Row]:
    truth = Truth(pair, divergence)
    torch.cuda.empty_cache()
    found = [
        ("liger_dist", ours(pair, divergence), "bf16 sum of 4"),
        ("liger_dist, 2 GiB", ours(pair, divergence, memory_budget=2**31), "bf16 sum of 2"),
        ("liger_dist, fp32 logits", ours(pair, divergence, torch.float32), "bf16 sum of 4"),
        *peers.divergences(pair.teacher_TE, pair.teacher_VE, divergence),
    ]
    candidates = [Candidate("bare GEMMs", four_gemms(pair))]
    candidates += [Candidate(name, step(pair.inputs, loss), kind) for name, loss, kind in found]
    shape = "x".join(map(str, SHAPE))
    rows = measure(f"{divergence} {shape}", candidates, rounds=rounds, before=products())
    for row, candidate in zip(rows, candidates, strict=True):
        if row.failure:
            continue
        row.figures = {"ratio": row.median_ms / rows[0].median_ms}
        if row.name != "bare GEMMs":
            pair.inputs.hidden_TD.grad = pair.inputs.weight_VD.grad = None
            row.figures |= {"extra MiB": row.extra_mib, **truth.errors(candidate.run(), pair.inputs)}  # type: ignore[arg-type]
    pair.inputs.hidden_TD.grad = pair.inputs.weight_VD.grad = None
    return rows


def soft_label_table(pair: Pair, rounds: int) -> list[Row]:
    """The k likeliest classes of the teacher beside the label, to the loss of the label alone."""
    with torch.no_grad():
        tops = [(h @ pair.teacher_VE.T).float().softmax(-1).topk(CLASSES) for h in pair.teacher_TE.split(1024)]
    ids, probs = torch.cat([top.indices for top in tops]), torch.cat([top.values for top in tops])

    def loss(**options: object) -> peers.Loss:
        usual = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, "logit_scale": 1.0}
        none = {"temperature": 1.0, "class_weight": None, "token_weight": None, "num_items_in_batch": None}
        given = LossSpec(**(usual | none | {"outputs": ()} | options))  # type: ignore[arg-type]

        def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return fused_linear_cross_entropy(hidden, weight, None, labels, spec=given, execution=Execution()).loss

        return run

    soft = {"soft_labels": (ids, probs), "soft_weight": 0.5}
    named = {
        "labels": loss(),
        f"{CLASSES} soft labels": loss(**soft),
        f"{CLASSES} soft labels, spread": loss(**soft, remainder="spread"),
    }
    candidates = [Candidate(name, step(pair.inputs, run)) for name, run in named.items()]
    rows = measure(f"soft labels {'x'.join(map(str, SHAPE))}", candidates, rounds=rounds, before=products())
    for row in rows:
        row.figures = {"ratio": row.median_ms / rows[0].median_ms, "extra MiB": row.extra_mib}
    pair.inputs.hidden_TD.grad = pair.inputs.weight_VD.grad = None
    return rows


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    pair = Pair.random(*SHAPE)
    tables: dict[str, Callable[[], list[Row]]] = {
        "forward_kl": lambda: divergence_table(pair, "forward_kl", given.rounds),
        "jsd": lambda: divergence_table(pair, "jsd", given.rounds),
        "soft labels": lambda: soft_label_table(pair, given.rounds),
    }
    for name, table in tables.items():
        if given.only not in name:
            continue
        rows = table()
        print(rows[0].problem)
        show(rows, ("ratio", "extra MiB", "loss error", "dW error", "dX error"))
        save("distillation", rows, given.results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
