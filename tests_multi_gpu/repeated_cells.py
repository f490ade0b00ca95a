"""Cells of the conformance suite that repeat others: ``make test-all`` and ``make matrix`` run them, ``make test`` does
not."""

from __future__ import annotations

from dataclasses import replace

from cells import EXPERTS, FURTHER, GRID, HSDP, MTP, PRECISION, PRINCIPAL, USUAL, Cell, _fsdp1, _fsdp2, _zero

REPEATS = [
    _fsdp1(use_orig_params=False),
    _fsdp2(head="own"),
    _fsdp2(axes=HSDP),
    _fsdp2(rows=True, axes=HSDP),
    _fsdp1(own_unit=True),
    _zero(0),
    _zero(1),
    _zero(2),
]
"""Principal layouts whose lm_head is stored as in another one, as seen from the loss: FSDP1's flat parameters and unit
of the head, a group of the head alone, replicas of shards, and DeepSpeed's stages without sharded parameters."""


def repeats(cell: Cell) -> bool:
    """True if other cells have each part of this one: an exact one that ``make test-all`` and ``make matrix`` run."""
    if cell.refused:
        return False
    layout = {name: value for name, value in cell.layout.items() if name != "bf16"}
    usual = (cell.model, cell.data, cell.use) == USUAL and cell.accumulation == 1
    if "frozen" in layout:
        is_simple = (cell.data, cell.use) == USUAL[1:] and cell.accumulation == 1
        if cell.engine == "fsdp2" and cell.world == 2 and "rows" not in layout:
            return not is_simple and cell.model != "LoRA on the head"
        return not is_simple or cell.model not in ("frozen head", "LoRA on the head", "saved head")
    if cell.model in (*FURTHER, *MTP):
        is_plain = (cell.data, cell.use) == USUAL[1:] and cell.accumulation == 1
        is_principal = cell.engine == "none" or (cell.engine == "fsdp2" and not layout)
        return not (is_principal or (is_plain and cell.model in (FURTHER[0], MTP[0])))
    if cell.model in EXPERTS:
        is_plain = (cell.data, cell.use) == USUAL[1:] and cell.accumulation == 1
        is_principal = cell.engine == "none" or (cell.engine == "fsdp2" and not layout)
        is_stored_otherwise = not any((cell.engine, layout) == (other.engine, other.layout) for other in REPEATS)
        return not (is_principal or (is_plain and is_stored_otherwise and "tied" not in cell.model))
    if any((cell.engine, layout) == (other.engine, other.layout) for other in REPEATS):
        return not (usual or cell.model == "tied" or cell.data == "empty rank")
    is_usual_use = cell.use in (USUAL[2], "num_items_in_batch", "global mean")
    if cell.engine == "ddp" and not cell.layout and cell.data != "empty rank":
        # DDP's weight is that of one process.
        return not is_usual_use or cell.data != USUAL[1]
    if (cell.layout.get("axes") == GRID or cell.engine == "tp") and cell.accumulation == 1 and cell.world == 4:
        # Rows of the head's shard as without FSDP on two ranks, and tokens as under FSDP2.
        return not is_usual_use or (cell.data not in (USUAL[1], "empty rank"))
    if cell.accumulation > 1 and cell.engine in ("fsdp1", "fsdp2") and cell.by_others:
        return layout.get("head") != "own" or "axes" in layout or "reshard" in layout
    if cell.world == 4 and any(replace(cell, world=2).where == other.where for other in PRINCIPAL if other.world == 2):
        # The same on two ranks.
        return not (usual or cell.data == "empty rank")
    if cell in PRECISION and cell.use.startswith("fp32") and cell.engine != "fsdp2":
        return True
    # Of FSDP1's sharding strategies, with and without original parameters.
    return cell.engine == "fsdp1" and layout.get("use_orig_params") is False and not usual
