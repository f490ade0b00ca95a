"""Log-probabilities and entropies, without and with gradients, sampling replay, and training with fp32 logits: against
bare GEMMs and against other libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from liger_dist.config import LogitsDtype
from liger_dist.functional import linear_cross_entropy
from liger_dist.losses.execution import Execution
from liger_dist.losses.linear_cross_entropy import fused_linear_cross_entropy
from liger_dist.losses.outputs import LossOutput
from liger_dist.losses.spec import LossKeywords, LossSpec

from . import peers
from .harness import Candidate, Row, arguments, measure, products, save, show
from .linear_cross_entropy import Inputs, bare_gemms, relative, step

SHAPES = ((8192, 4096, 128256), (8192, 2048, 128256))
REPLAYED, CLASSES = (8192, 4096, 151936), 50
"""shape of the sampling replay, and the classes that a sampler kept of each token"""
CHECKED = 512
"""tokens whose log-probabilities and gradients are compared with fp64"""
Outputs = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def ours(logits_dtype: LogitsDtype = None, memory_budget: int | None = None) -> Outputs:
    loss = LossSpec(outputs=("log_prob", "entropy"))
    execution = Execution(logits_dtype=logits_dtype, memory_budget=memory_budget)

    def outputs(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = fused_linear_cross_entropy(hidden, weight, None, labels, spec=loss, execution=execution)
        assert result.log_prob is not None
        assert result.entropy is not None
        return result.log_prob, result.entropy

    return outputs


def training(logits_dtype: LogitsDtype) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    execution = Execution(logits_dtype=logits_dtype)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return fused_linear_cross_entropy(hidden, weight, None, labels, spec=LossSpec(), execution=execution).loss

    return loss


def four_gemms(inputs: Inputs) -> Callable[[], None]:
    """One product for the logits, and those of the backward with the logits again."""
    three, one = bare_gemms(inputs), one_gemm(inputs)

    def run() -> None:
        one()
        three()

    return run


def one_gemm(inputs: Inputs) -> Callable[[], None]:
    x, w = inputs.hidden_TD.detach(), inputs.weight_VD.detach()
    logits = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)

    def run() -> None:
        torch.mm(x, w.T, out=logits)

    return run


class Truth:
    """Log-probabilities and entropies of some tokens in fp64, and the gradient of their hidden states."""

    def __init__(self, inputs: Inputs, upstream: tuple[Tensor, Tensor]) -> None:
        T = len(inputs.hidden_TD)
        self.rows = torch.arange(0, T, T // CHECKED, device="cuda")
        hidden = inputs.hidden_TD.detach()[self.rows].double().requires_grad_()
        log_probs = (hidden @ inputs.weight_VD.detach().double().T).log_softmax(-1)
        self.log_prob = log_probs.gather(1, inputs.labels_T[self.rows, None])[:, 0]
        self.entropy = -(log_probs.exp() * log_probs).sum(-1)
        u, v = (factors[self.rows].double() for factors in upstream)
        (self.d_hidden,) = torch.autograd.grad((u * self.log_prob + v * self.entropy).sum(), hidden)
        self.log_prob, self.entropy = self.log_prob.detach(), self.entropy.detach()

    def errors(self, outputs: tuple[Tensor, Tensor], inputs: Inputs) -> dict[str, float]:
        log_prob, entropy = (values.detach()[self.rows] for values in outputs)
        found = {
            "log_prob error": relative(log_prob, self.log_prob),
            "entropy error": relative(entropy, self.entropy),
        }
        if inputs.hidden_TD.grad is not None:
            found["dX error"] = relative(inputs.hidden_TD.grad[self.rows], self.d_hidden)
        return found


def scoring(inputs: Inputs, outputs: Outputs) -> Callable[[], tuple[Tensor, Tensor]]:
    @torch.no_grad()
    def run() -> tuple[Tensor, Tensor]:
        return outputs(inputs.hidden_TD.detach(), inputs.weight_VD.detach(), inputs.labels_T)

    return run


def both_ways(inputs: Inputs, outputs: Outputs, upstream: tuple[Tensor, Tensor]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward with fresh gradients."""

    def run() -> tuple[Tensor, Tensor]:
        inputs.hidden_TD.grad = inputs.weight_VD.grad = None
        log_prob, entropy = outputs(inputs.hidden_TD, inputs.weight_VD, inputs.labels_T)
        ((upstream[0] * log_prob).sum() + (upstream[1] * entropy).sum()).backward()
        return log_prob, entropy

    return run


def table(
    name: str,
    bare: Callable[[], None],
    runs: list[tuple[str, Callable[[], tuple[Tensor, Tensor]], str]],
    inputs: Inputs,
    truth: Truth,
    rounds: int,
) -> list[Row]:
    candidates = [Candidate("bare GEMMs", bare), *(Candidate(label, run, kind) for label, run, kind in runs)]
    rows = measure(name, candidates, rounds=rounds, before=products())
    for row, candidate in zip(rows, candidates, strict=True):
        if row.failure:
            continue
        row.figures["ratio"] = row.median_ms / rows[0].median_ms
        if row.name != "bare GEMMs":
            inputs.hidden_TD.grad = inputs.weight_VD.grad = None
            row.figures |= truth.errors(candidate.run(), inputs)  # type: ignore[arg-type]
            row.figures["extra MiB"] = row.extra_mib
    inputs.hidden_TD.grad = inputs.weight_VD.grad = None
    return rows


def replayed(inputs: Inputs, upstream: Tensor) -> dict[str, Callable[[], object]]:
    """Builds forward and backward of log-probabilities of the full vocabulary, and of the classes that a sampler
    kept."""
    labels, vocab_size = inputs.labels_T, inputs.weight_VD.shape[0]
    # Different ids, none of them the label.
    steps = torch.arange(1, CLASSES, device="cuda") * (vocab_size // (CLASSES + 1))
    support = torch.cat([labels[:, None], (labels[:, None] + steps) % vocab_size], 1)

    def run(support_ids: Tensor | None = None) -> None:
        inputs.hidden_TD.grad = inputs.weight_VD.grad = None
        asked: LossKeywords = {"outputs": ("log_prob",), "support_ids": support_ids}
        output = linear_cross_entropy(inputs.hidden_TD, inputs.weight_VD, labels, **asked)
        assert isinstance(output, LossOutput)
        assert output.log_prob is not None
        (upstream * output.log_prob).sum().backward()

    return {"full vocabulary": run, f"{CLASSES} classes": partial(run, support_ids=support)}


def replay_table(rounds: int) -> list[Row]:
    inputs = Inputs.random(*REPLAYED, peaked=True)
    ways = replayed(inputs, torch.randn(REPLAYED[0], device="cuda"))
    candidates = [Candidate("bare GEMMs", four_gemms(inputs)), *(Candidate(label, run) for label, run in ways.items())]
    rows = measure("sampling replay " + "x".join(map(str, REPLAYED)), candidates, rounds=rounds, before=products())
    plain = rows[1].median_ms
    for row in rows:
        row.figures |= {"ratio": row.median_ms / rows[0].median_ms, "of plain": row.median_ms / plain}
        row.figures["extra MiB"] = row.extra_mib
    return rows


def main() -> None:
    given = arguments(__doc__ or "").parse_args()
    if given.only in "sampling replay":
        rows = replay_table(given.rounds)
        print(rows[0].problem)
        show(rows, ("ratio", "of plain", "extra MiB"))
        save("log_probs", rows, given.results)
        torch.cuda.empty_cache()
    for shape in SHAPES:
        problem = "x".join(map(str, shape))
        if given.only not in problem:
            continue
        inputs = Inputs.random(*shape, peaked=True)
        upstream = (torch.randn(shape[0], device="cuda"), 0.1 * torch.randn(shape[0], device="cuda"))
        truth = Truth(inputs, upstream)
        found = [
            ("liger_dist", ours(), "bf16 logits"),
            ("liger_dist, 128 MiB", ours(memory_budget=2**27), "bf16 logits"),
            ("liger_dist, fp32 logits", ours(torch.float32), "fp32 logits"),
            *peers.log_probs(),
        ]
        scored = [(label, scoring(inputs, outputs), kind) for label, outputs, kind in found]
        trained = [(label, both_ways(inputs, outputs, upstream), kind) for label, outputs, kind in found]
        kept = [
            trained[0],
            ("liger_dist, logits kept", both_ways(inputs, ours(memory_budget=2**32), upstream), found[0][2]),
        ]
        tables = [
            table(f"scoring {problem}", one_gemm(inputs), scored, inputs, truth, given.rounds),
            table(f"forward and backward {problem}", four_gemms(inputs), trained, inputs, truth, given.rounds),
            table(f"kept logits {problem}", four_gemms(inputs), kept, inputs, truth, given.rounds),
        ]
        losses = [("bf16 logits", None), ("fp32 logits", torch.float32)]
        steps = [Candidate(label, step(inputs, training(dtype)), "fp32 sum") for label, dtype in losses]
        rows = measure(f"training {problem}", steps, rounds=given.rounds, before=products())
        for row in rows:
            row.figures |= {"ratio": row.median_ms / rows[0].median_ms, "extra MiB": row.extra_mib}
        inputs.hidden_TD.grad = inputs.weight_VD.grad = None
        for seen in (*tables, rows):
            print(seen[0].problem)
            show(seen, ("ratio", "extra MiB", "log_prob error", "entropy error", "dX error"))
            save("log_probs", seen, given.results)
        del inputs, truth
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
