"""Divergences of a draft's lm_head from some rows of its target's, forward and backward: against bare GEMMs, and
against losses of full logits as trainers of drafts write them. --check compares gradients of a tiny problem with fp64
without a GPU, and times nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import liger_dist
from liger_dist_kernels import Divergence

from .harness import Candidate, Row, arguments, measure, products, save, show

SHAPE = (8192, 4096, 32000, 128256)
"""tokens of all depths, hidden size, classes of the draft, vocabulary of the target: EAGLE-3 for Llama-3.1-8B"""
TINY = (24, 16, 40, 64)
DIVERGENCES: tuple[Divergence, ...] = ("forward_kl", "total_variation")
CHECKED = 256
"""rows of the weight's gradient, and tokens of the hidden states' gradient, that are compared with fp64"""

Loss = Callable[[], Tensor]


@dataclass
class Problem:
    """Hidden states and lm_heads of a draft and of its target, whose logits are the draft's and as much noise."""

    hidden_TD: Tensor
    draft: nn.Linear
    target_TE: Tensor
    target: nn.Linear
    rows_C: Tensor
    labels_T: Tensor

    @staticmethod
    def random(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> Problem:
        torch.manual_seed(0)
        T, D, C, V = shape
        rows = torch.randperm(V, device=device)[:C].sort().values
        target = nn.Linear(D, V, bias=False, device=device, dtype=dtype).requires_grad_(False)
        target.weight.copy_(torch.randn_like(target.weight) * 2.0 / D**0.5)
        draft = nn.Linear(D, C, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            draft.weight.copy_(target.weight[rows] + 0.5 * torch.randn_like(draft.weight) / D**0.5)
        hidden = torch.randn(T, D, device=device, dtype=dtype)
        other = (hidden + 0.3 * torch.randn_like(hidden)).detach()
        labels = torch.randint(0, C, (T,), device=device)
        return Problem(hidden.requires_grad_(), draft, other, target, rows, labels)

    def step(self, loss: Loss) -> Callable[[], Tensor]:
        """A call with fresh gradients."""

        def run() -> Tensor:
            self.hidden_TD.grad = self.draft.weight.grad = None
            value = loss()
            value.backward()
            return value.detach()

        return run

    def ours(self, divergence: Divergence) -> Loss:
        given = {"teacher": self.target, "teacher_hidden": self.target_TE, "teacher_rows": self.rows_C}
        return lambda: (
            liger_dist.lm_head_loss(
                self.draft,
                self.hidden_TD,
                self.labels_T,
                divergence=divergence,
                **given,  # type: ignore[arg-type]
            ).loss
        )

    def of_all_logits(self, divergence: Divergence, of: Callable[..., Tensor]) -> Loss:
        """From the target's logits of its vocabulary, of which the draft's classes are taken."""

        def loss() -> Tensor:
            with torch.no_grad():
                logits = self.target(self.target_TE)
            return of(self.draft(self.hidden_TD), logits[:, self.rows_C], divergence)

        return loss

    def of_selected_rows(self, divergence: Divergence, of: Callable[..., Tensor]) -> Loss:
        """From the target's logits of the draft's classes, by a copy of these rows of its lm_head."""
        weight = self.target.weight[self.rows_C]

        def loss() -> Tensor:
            with torch.no_grad():
                logits = self.target_TE @ weight.T
            return of(self.draft(self.hidden_TD), logits, divergence)

        return loss

    def four_gemms(self) -> Callable[[], None]:
        """The draft's three products, and the target's logits of the draft's classes."""
        x, w = self.hidden_TD.detach(), self.draft.weight.detach()
        logits = torch.empty(len(x), len(w), dtype=x.dtype, device=x.device)
        d_x, d_w, weight = torch.empty_like(x), torch.empty_like(w), self.target.weight[self.rows_C]

        def run() -> None:
            torch.mm(self.target_TE, weight.T, out=logits)
            torch.mm(x, w.T, out=logits)
            torch.mm(logits, w, out=d_x)
            torch.mm(logits.T, x, out=d_w)

        return run


def plain(draft_TC: Tensor, target_TC: Tensor, divergence: Divergence) -> Tensor:
    """The mean over tokens, with softmaxes in fp32 (fp64 of fp64 logits)."""
    dtype = torch.promote_types(draft_TC.dtype, torch.float32)
    if divergence == "total_variation":
        return 0.5 * (target_TC.to(dtype).softmax(-1) - draft_TC.to(dtype).softmax(-1)).abs().sum(-1).mean()
    log_q, log_p = draft_TC.to(dtype).log_softmax(-1), target_TC.to(dtype).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


class Truth:
    """The divergence, and some rows of both gradients, in fp64."""

    def __init__(self, problem: Problem, divergence: Divergence) -> None:
        x, w = problem.hidden_TD.detach().double(), problem.draft.weight.detach().double()
        e, u = problem.target_TE.double(), problem.target.weight[problem.rows_C].double()
        T = len(x)
        self.rows_T, self.rows_C = (
            torch.arange(0, n, max(n // CHECKED, 1), device=x.device)[:CHECKED] for n in (T, len(w))
        )
        self.loss, columns = torch.zeros((), device=x.device, dtype=torch.float64), []
        d_hidden = torch.empty_like(x)
        for rows in torch.arange(T, device=x.device).split(512):
            logits = (x[rows] @ w.T).requires_grad_()
            value = plain(logits, e[rows] @ u.T, divergence) * len(rows) / T
            (gradient,) = torch.autograd.grad(value, logits)
            self.loss += value.detach()
            columns.append(gradient[:, self.rows_C])
            d_hidden[rows] = gradient @ w
        self.d_weight, self.d_hidden = torch.cat(columns).T @ x, d_hidden[self.rows_T]

    def errors(self, loss: Tensor, problem: Problem) -> dict[str, float]:
        assert problem.hidden_TD.grad is not None
        assert problem.draft.weight.grad is not None
        found = {
            "loss error": (loss, self.loss),
            "dW error": (problem.draft.weight.grad[self.rows_C], self.d_weight),
            "dX error": (problem.hidden_TD.grad[self.rows_T], self.d_hidden),
        }
        return {name: float((got.double() - want).norm() / want.norm()) for name, (got, want) in found.items()}


def candidates_of(problem: Problem, divergence: Divergence, *, compiles: bool) -> list[Candidate]:
    losses = {"liger_dist": problem.ours(divergence)}
    ways = {"all logits of the target": problem.of_all_logits, "its selected rows": problem.of_selected_rows}
    for name, way in ways.items():
        losses[f"torch, {name}"] = way(divergence, plain)
        if compiles:
            losses[f"torch.compile, {name}"] = way(divergence, torch.compile(plain))
    return [Candidate(name, problem.step(loss)) for name, loss in losses.items()]


def table(divergence: Divergence, rounds: int) -> list[Row]:
    problem = Problem.random(SHAPE, "cuda", torch.bfloat16)
    truth = Truth(problem, divergence)
    torch.cuda.empty_cache()
    candidates = [
        Candidate("bare GEMMs", problem.four_gemms()),
        *candidates_of(problem, divergence, compiles=True),
    ]
    name = f"{divergence} {'x'.join(map(str, SHAPE))}"
    rows = measure(name, candidates, rounds=rounds, before=products())
    for row, candidate in zip(rows, candidates, strict=True):
        if row.failure:
            continue
        row.figures = {"ratio": row.median_ms / rows[0].median_ms}
        if row.name != "bare GEMMs":
            row.figures |= {"extra MiB": row.extra_mib, **truth.errors(candidate.run(), problem)}  # type: ignore[arg-type]
    return rows


def check() -> None:
    """Prints errors of a tiny problem in fp32 on the CPU."""
    problem = Problem.random(TINY, "cpu", torch.float32)
    for divergence in DIVERGENCES:
        truth = Truth(problem, divergence)
        problem.four_gemms()()
        for candidate in candidates_of(problem, divergence, compiles=False):
            errors = truth.errors(candidate.run(), problem)  # type: ignore[arg-type]
            print(divergence, candidate.name, *(f"{name} {value:.1e}" for name, value in errors.items()), sep=", ")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--check", action="store_true", help="errors of a tiny problem on the CPU; nothing is timed")
    given = parser.parse_args()
    if given.check:
        check()
        return
    for divergence in DIVERGENCES:
        if given.only not in divergence:
            continue
        rows = table(divergence, given.rounds)
        print(rows[0].problem)
        show(rows, ("ratio", "extra MiB", "loss error", "dW error", "dX error"))
        save("draft_heads", rows, given.results)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
