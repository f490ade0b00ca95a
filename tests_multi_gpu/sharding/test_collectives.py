"""What the adapters' docstrings say about collectives, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from cells import PRINCIPAL, Cell, _fsdp1, _fsdp2, by_world
from harness import Workers
from layouts import SESSIONS
from test_conformance import batches_of, build, run_micro_batches, skip_without
from torch.utils._python_dispatch import TorchDispatchMode

CHUNKS = 6
"""30 tokens of the first rank count, and five rows of 51 logits fit the budget"""

LOCAL = [cell for cell in (*by_world(PRINCIPAL, 2), _fsdp2(head="root")) if not cell.layout.get("rows")]


@pytest.mark.nightly(
    cell=[
        "FSDP1, flat parameters on 2",
        "FSDP2, head alone on 2",
        "ZeRO, stage 0 on 2",
        "ZeRO, stage 1 on 2",
        "ZeRO, stage 2 on 2",
    ]
)
@pytest.mark.parametrize("cell", LOCAL, ids=str)
def test_the_loss_adds_no_collective_to_the_engine(cell: Cell, workers_2: Workers) -> None:
    skip_without(cell)
    for fused, unfused in zip(*(workers_2.run(count, replace(cell, fused=f)) for f in (True, False)), strict=True):
        assert fused == unfused
        assert sum(fused.values()) > 0


@pytest.mark.smoke
@pytest.mark.nightly(cell=["FSDP1, flat parameters on 2", "FSDP2, head alone on 2", "FSDP2, head in the root on 2"])
@pytest.mark.parametrize("cell", [c for c in LOCAL if c.engine != "zero"], ids=str)
def test_a_global_mean_adds_one(cell: Cell, workers_2: Workers) -> None:
    both = (workers_2.run(count, replace(cell, data=data)) for data in ("global mean", "uneven"))
    for counts, local in zip(*both, strict=True):
        assert Counter(counts) - Counter(local) == Counter({"all_reduce": 1})


def test_of_the_group_that_holds_the_head(workers_2: Workers) -> None:
    """Two layers, the head's group and the embedding's (in FSDP1 the root): each gathers before its forward and reduces
    after its backward; the layers, and FSDP2's embedding, gather once more in between."""
    for counts in workers_2.run(count, _fsdp2()):
        assert counts == {"all_gather": 7, "reduce_scatter": 4}
    for counts in workers_2.run(count, _fsdp1(by_others=False)):
        assert counts == {"all_gather": 6, "reduce_scatter": 4}


def test_further_losses_gather_the_head_once(workers_2: Workers) -> None:
    """Two depths of multi-token prediction have the collectives of two layers more: lm_head, in the root's group, is
    gathered and reduced once for all losses, and the embedding is not looked up again."""
    for counts in workers_2.run(count_operations, replace(_fsdp2(), model="multi-token prediction")):
        assert counts == {"all_gather": 7 + 2 * 2, "reduce_scatter": 4 + 2}
    for counts in workers_2.run(count_operations, replace(_fsdp1(by_others=False), model="multi-token prediction")):
        # The root has the head as well as the embedding.
        assert counts == {"all_gather": 6 - 1 + 2 * 2, "reduce_scatter": 4 - 1 + 2}


@pytest.mark.parametrize("model", ["LoRA on the head", "frozen head", "saved head"])
def test_frozen_weights_on_every_rank_are_not_gathered(model: str, workers_2: Workers) -> None:
    """Adapters are one group. A saved head has its own with the norm; without a frozen head, layers and embedding."""
    expected = {"LoRA on the head": (1, 1), "saved head": (2, 2), "frozen head": (7, 4)}[model]
    for counts in workers_2.run(count, replace(_fsdp2(frozen="replicate"), model=model)):
        assert (counts["all_gather"], counts["reduce_scatter"]) == expected
    for counts in workers_2.run(count, replace(_fsdp1(by_others=False, frozen="replicate"), model="LoRA on the head")):
        assert counts == {"all_gather": 1, "reduce_scatter": 1}


def test_of_tensor_parallelism(workers_2: Workers) -> None:
    """One all-gather to compare tokens, one of statistics for each chunk; one all-reduce of the hidden states'
    gradient."""
    for counts in workers_2.run(count, Cell(engine="tp", use="many chunks")):
        assert counts == {"all_gather": 1 + CHUNKS, "all_reduce": 1}
    for counts in workers_2.run(count, Cell(engine="tp", model="tied", use="many chunks")):
        # The embedding's lookup is summed as well.
        assert counts == {"all_gather": 1 + CHUNKS, "all_reduce": 2}


class Operations(TorchDispatchMode):
    """Counts collectives by kind. ``CommDebugMode`` fails where a module is called twice by one parent."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).replace("allgather", "all_gather").replace("allreduce", "all_reduce")
        if name.startswith("c10d."):
            self.kinds.update(kind for kind in KINDS if kind in name)
        return func(*args, **(kwargs or {}))


def count_operations(cell: Cell) -> dict[str, int]:
    """As :func:`count`."""
    session: Any = SESSIONS[cell.engine](cell, build(cell))
    batches = batches_of(cell, session, 0)
    run_micro_batches(session, batches)
    session.optimizer.zero_grad()
    with Operations() as mode:
        run_micro_batches(session, batches)
    session.close()
    return dict(mode.kinds)


def count(cell: Cell) -> dict[str, int]:
    """Collectives of the second micro-batch, forward and backward, by kind."""
    from torch.distributed.tensor.debug import CommDebugMode

    session: Any = SESSIONS[cell.engine](cell, build(cell))
    batches = batches_of(cell, session, 0)
    run_micro_batches(session, batches)
    session.optimizer.zero_grad()
    if cell.engine == "zero":
        session.root.step()
    mode = CommDebugMode()
    with mode:
        run_micro_batches(session, batches)
    session.close()
    return kinds_of(mode)


def kinds_of(mode: Any) -> dict[str, int]:
    """Collectives that a ``CommDebugMode`` has seen, by kind."""
    kinds: Counter[str] = Counter()
    for operation, number in mode.get_comm_counts().items():
        name = str(operation).replace("allgather", "all_gather").replace("allreduce", "all_reduce")
        kinds[next(kind for kind in KINDS if kind in name)] += number
    return dict(kinds)


KINDS = ("reduce_scatter", "all_gather", "all_reduce", "broadcast", "all_to_all", "barrier")
