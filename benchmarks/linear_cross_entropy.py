"""The fused linear cross entropy, forward and backward, against three bare GEMMs and against other libraries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.spec import LossSpec

from . import peers
from .harness import Candidate, Row, arguments, measure, products, save, show

SHAPES = (
    (2048, 4096, 128256),
    (8192, 2048, 128256),
    (8192, 4096, 128256),
    (16384, 4096, 128256),
    (8192, 8192, 128256),
    (16384, 2304, 256000),
    (8192, 4096, 151936),
    (16384, 2048, 248320),
)
BUDGETS_MIB = (1024, 512, 256, 128)
CHECKED = 256
"""rows of the weight's gradient, and tokens of the hidden states' gradient, that are compared with fp64"""


@dataclass
class Inputs:
    """bf16 hidden states and weight with logits of deviation 1, or ``peaked``: half of the labels likely."""

    hidden_TD: Tensor
    weight_VD: Tensor
    labels_T: Tensor

    @staticmethod
    def random(T: int, D: int, V: int, *, peaked: bool = False, masked: float = 0.0, frozen: bool = False) -> Inputs:
        torch.manual_seed(0)
        hidden = torch.randn(T, D, device="cuda")
        weight = torch.randn(V, D, device="cuda") / D**0.5
        labels = torch.randint(0, V, (T,), device="cuda")
        if peaked:
            # Adds log(V) + 2 to the label's logit of every second token, whose probability is then about 0.9.
            gain = (torch.log(torch.tensor(float(V))) + 2.0).item()
            hidden[::2] += gain * weight[labels[::2]] / weight[labels[::2]].square().sum(-1, keepdim=True)
        if masked:
            labels[torch.rand(T, device="cuda") < masked] = -100
        return Inputs(hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(not frozen), labels)


def step(inputs: Inputs, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Tensor]:
    """A call with fresh gradients."""

    def run() -> Tensor:
        inputs.hidden_TD.grad = inputs.weight_VD.grad = None
        value = loss(inputs.hidden_TD, inputs.weight_VD, inputs.labels_T)
        value.backward()
        return value.detach()

    return run


def ours(budget_mib: int, labels: Tensor | None = None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    execution = Execution(memory_budget=budget_mib * 2**20)

    def loss(hidden: Tensor, weight: Tensor, labels_T: Tensor) -> Tensor:
        y = labels_T if labels is None else labels
        return fused_linear_cross_entropy(hidden, weight, None, y, spec=LossSpec(), execution=execution).loss

    return loss


def bare_gemms(inputs: Inputs) -> Callable[[], None]:
    """The products alone, three or with a frozen weight two, on buffers that are there already."""
    x, w = inputs.hidden_TD.detach(), inputs.weight_VD.detach()
    logits = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    d_logits = torch.randn_like(logits)
    d_x, d_w = torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(x, w.T, out=logits)
        torch.mm(d_logits, w, out=d_x)
        if inputs.weight_VD.requires_grad:
            torch.mm(d_logits.T, x, out=d_w)

    return run


def checked_rows(inputs: Inputs) -> Tensor:
    """Rows of the weight: labels, and others."""
    y, half = inputs.labels_T, CHECKED // 2
    return torch.cat([y[y >= 0][:half], torch.randint(0, len(inputs.weight_VD), (half,), device=y.device)])


class Truth:
    """Loss and some rows of both gradients in fp64."""

    def __init__(self, inputs: Inputs, rows_V: Tensor | None = None) -> None:
        x, w, y = inputs.hidden_TD.detach().double(), inputs.weight_VD.detach().double(), inputs.labels_T
        valid = y >= 0
        self.rows_V = checked_rows(inputs) if rows_V is None else rows_V
        self.rows_T = torch.arange(0, len(x), max(len(x) // CHECKED, 1), device=y.device)[:CHECKED]
        losses, p_rows = [], []
        for rows in torch.arange(len(x), device=y.device).split(1024):
            logits = x[rows] @ w.T
            lse = logits.logsumexp(-1)
            losses.append(lse - logits.gather(1, y[rows].clamp_min(0)[:, None])[:, 0])
            p_rows.append((logits[:, self.rows_V] - lse[:, None]).exp())
        count = valid.sum()
        self.loss = torch.cat(losses)[valid].sum() / count
        p = torch.cat(p_rows) - (y[:, None] == self.rows_V).double()
        self.d_weight = (p * valid[:, None] / count).T @ x
        p = (x[self.rows_T] @ w.T).softmax(-1)
        p[torch.arange(len(p), device=p.device), y[self.rows_T].clamp_min(0)] -= 1
        self.d_hidden = (p * valid[self.rows_T, None] / count) @ w

    def errors(self, loss: Tensor, inputs: Inputs) -> dict[str, float]:
        assert inputs.hidden_TD.grad is not None
        found = {
            "loss error": relative(loss, self.loss),
            "dX error": relative(inputs.hidden_TD.grad[self.rows_T], self.d_hidden),
        }
        if inputs.weight_VD.grad is not None:
            found["dW error"] = relative(inputs.weight_VD.grad[self.rows_V], self.d_weight)
        return found


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def run(name: str, inputs: Inputs, candidates: list[tuple[str, Callable[..., Tensor], str]], rounds: int) -> list[Row]:
    """Rows of all candidates with errors, ratios and memory beyond the two gradients."""
    steps = {label: step(inputs, loss) for label, loss, _ in candidates}
    truth = Truth(inputs)
    torch.cuda.empty_cache()
    number = "three" if inputs.weight_VD.requires_grad else "two"
    gemms = Candidate(f"{number} GEMMs", bare_gemms(inputs), "")
    rows = measure(
        name,
        [gemms, *(Candidate(label, steps[label], accuracy) for label, _, accuracy in candidates)],
        rounds=rounds,
        before=products(),
    )
    for row in rows:
        if row.failure:
            continue
        row.figures["ratio"] = row.median_ms / rows[0].median_ms
        if row.name in steps:
            row.figures |= truth.errors(steps[row.name](), inputs)
            # The gradients of the call before were there when it began: these are beside its own.
            row.figures["extra MiB"] = row.extra_mib
    inputs.hidden_TD.grad = inputs.weight_VD.grad = None
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--no-peers", action="store_true", help="only this library and the GEMMs")
    parser.add_argument("--without", default="", help="implementations to leave out, comma-separated")
    parser.add_argument("--peaked", action="store_true", help="labels likely for half of the tokens")
    parser.add_argument("--frozen", action="store_true", help="without the weight's gradient, as with LoRA")
    parser.add_argument("--masked", type=float, default=0.0, help="share of tokens without a target")
    given = parser.parse_args()
    suffix = (
        (", frozen" if given.frozen else "")
        + (", peaked" if given.peaked else "")
        + (f", {given.masked:.0%} masked" if given.masked else "")
    )
    for shape in SHAPES:
        name = "x".join(map(str, shape)) + suffix
        if given.only not in name:
            continue
        inputs = Inputs.random(*shape, peaked=given.peaked, masked=given.masked, frozen=given.frozen)
        known = inputs.labels_T.cpu() if given.masked else None
        candidates = [(f"liger_dist {b} MiB", ours(b, known), "fp32 sum") for b in BUDGETS_MIB]
        if not given.no_peers:
            candidates += [c for c in peers.linear_cross_entropies() if c[0] not in given.without.split(",")]
        rows = run(name, inputs, candidates, given.rounds)
        print(name)
        show(rows, ("ratio", "extra MiB", "dW error", "dX error", "loss error"))
        save("linear_cross_entropy", rows, given.results)
        del inputs, known
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
