"""The conformance suite as data: every layout, model, kind of data and use that is exact or refused."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

LEARNING_RATE = 0.1


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination. ``refused`` holds words of the refusal; empty for an exact one."""

    engine: str
    layout: dict[str, Any] = field(default_factory=dict)
    world: int = 2
    model: str = "untied"
    data: str = "uneven"
    use: str = "training"
    accumulation: int = 1
    refused: str = ""
    fused: bool = True

    @property
    def where(self) -> str:
        """The layout in words, a row of the support matrix."""
        words = [WORDS.get((name, value), f"{name.replace('_', ' ')} {value}") for name, value in self.layout.items()]
        if self.engine in ("fsdp1", "fsdp2") and not self.by_others:
            words.insert(0, "by wrap")
        return ", ".join([NAMES[self.engine], *filter(None, words)])

    @property
    def by_others(self) -> bool:
        """Whether the test shards in the place of a framework that knows nothing of this library."""
        return bool(self.layout.get("by_others", self.engine == "fsdp1" or "head" in self.layout))

    def __str__(self) -> str:
        changed = [value for value in (self.model, self.data, self.use) if value not in USUAL]
        if self.accumulation > 1:
            changed.append("accumulation")
        return f"{self.where} on {self.world}" + (f": {', '.join(changed)}" if changed else "")

    @property
    def options(self) -> dict[str, Any]:
        """Options of the WrapConfig."""
        options: dict[str, Any] = {"fused_loss": self.fused}
        if self.data == "global mean":
            options["token_mean"] = "global"
        if self.use == "many chunks":
            options["memory_budget"] = 3 * 101 * 8
        return options

    @property
    def tied(self) -> bool:
        return "tied" in self.model.split() or self.model == "encoder-decoder"

    @property
    def tolerance(self) -> float:
        """The models' own norms and softmax round to fp32 inside, alike in both; DeepSpeed keeps fp32 masters."""
        return 1e-5 if self.engine == "zero" or self.model == "fp32" else 1e-6


USUAL = ("untied", "uneven", "training")
NAMES = {"none": "one process", "ddp": "DDP", "fsdp1": "FSDP1", "fsdp2": "FSDP2", "tp": "TP", "zero": "ZeRO"}
WORDS: dict[tuple[str, Any], str] = {
    ("by_others", True): "by others",
    ("by_others", False): "",
    ("own_unit", True): "head in its own unit",
    ("use_orig_params", True): "use_orig_params",
    ("use_orig_params", False): "flat parameters",
    ("head", "root"): "head in the root",
    ("head", "tail"): "head with the norm",
    ("head", "own"): "head alone",
    ("rows", True): "vocab-parallel head",
    ("reshard", True): "",
    ("reshard", False): "no reshard",
    ("offload", True): "CPU offload",
    ("bf16", True): "bf16",
    ("accumulation", 2): "accumulation",
    ("axes", ("replicate", "shard")): "HSDP",
    ("axes", ("shard", "tp")): "x TP",
    ("zero_init", True): "zero.Init",
    ("plain_backward", True): "loss.backward()",
    ("quantized_gradients", True): "quantised gradients",
    ("plan", "transformers"): "the model's own plan",
    ("plan", "sequence"): "sequence-parallel input",
}


def _fsdp1(**layout: Any) -> Cell:
    return Cell(engine="fsdp1", layout=layout, world=4 if str(layout.get("sharding")).startswith("HYBRID") else 2)


def _fsdp2(**layout: Any) -> Cell:
    return Cell(engine="fsdp2", layout=layout, world=4 if "axes" in layout else 2)


def _zero(stage: int, **layout: Any) -> Cell:
    return Cell(engine="zero", layout={"stage": stage, **layout})


ONE = Cell(engine="none", world=1)
DDP = Cell(engine="ddp")
HSDP, GRID = ("replicate", "shard"), ("shard", "tp")

FSDP1 = [
    _fsdp1(sharding=sharding, **({"own_unit": True} if own else {}), use_orig_params=orig)
    for sharding in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    for own in (False, True)
    for orig in (False, True)
]
FSDP1 += [_fsdp1(offload=True), _fsdp1(offload=True, use_orig_params=False), _fsdp1(offload=True, own_unit=True)]
FSDP2 = [
    *(_fsdp2(head=head, reshard=reshard) for head in ("root", "tail", "own") for reshard in (True, False)),
    *(_fsdp2(head=head, axes=HSDP) for head in ("root", "tail", "own")),
    *(_fsdp2(head=head, offload=True) for head in ("root", "tail", "own")),
]
OURS = [
    _fsdp1(by_others=False),
    _fsdp1(by_others=False, sharding="SHARD_GRAD_OP"),
    _fsdp1(by_others=False, sharding="HYBRID_SHARD"),
    _fsdp1(by_others=False, offload=True),
    _fsdp2(),
    _fsdp2(reshard=False),
    _fsdp2(offload=True),
    _fsdp2(axes=HSDP),
    _fsdp2(rows=True),
    _fsdp2(rows=True, axes=HSDP),
    _fsdp2(axes=GRID),
    _fsdp2(axes=GRID, head="root"),
]
ZERO = [
    *(_zero(stage, **variant) for stage in range(4) for variant in ({}, {"accumulation": 2})),
    *(_zero(stage, plain_backward=True) for stage in (1, 2, 3)),
    *(_zero(stage, plain_backward=True, accumulation=2) for stage in (1, 2, 3)),
    *(_zero(stage, offload=True) for stage in (1, 2, 3)),
    _zero(3, zero_init=True),
]
TP = [
    Cell(engine="tp"),
    Cell(engine="tp", world=4),
    *(
        Cell(engine="tp", layout={"plan": plan}, world=world)
        for plan in ("transformers", "sequence")
        for world in (2, 4)
    ),
]

PRINCIPAL = [
    DDP,
    _fsdp1(by_others=False),
    _fsdp1(use_orig_params=False),
    _fsdp1(own_unit=True),
    _fsdp2(),
    _fsdp2(head="own"),
    _fsdp2(axes=HSDP),
    _fsdp2(rows=True),
    _fsdp2(rows=True, axes=HSDP),
    _fsdp2(axes=GRID),
    *(_zero(stage) for stage in range(4)),
    Cell(engine="tp", world=4),
]
"""One layout of each kind: these meet every model, kind of data and use."""

ADAPTED = ("LoRA on the head", "DoRA on the head", "LoRA on the tied head", "LoRA on the biased head")
OTHERS = ("fp32", "encoder-decoder")
"""layers computed by kernels, which fp64 ones are not; two stacks, tied, with a cross entropy of the forward's own"""
MODELS = (
    "tied",
    "bias",
    "frozen backbone",
    "frozen head",
    "saved head",
    "saved head, named adapter",
    *OTHERS,
    *ADAPTED,
)
REFUSED_MODELS = ("quantised head",)
DATA = ("empty rank", "num_items_in_batch", "shift_labels", "global mean")
USES = ("evaluation", "generation", "outside the root", "checkpointing", "many chunks", "two forwards")


def _cells() -> list[Cell]:
    cells = [ONE, DDP, replace(DDP, layout={"by_others": True}), *FSDP1, *OURS, *FSDP2, *ZERO, *TP]
    cells += [
        replace(cell, accumulation=2) for cell in (DDP, *FSDP1, *OURS, *FSDP2, *TP) if not cell.layout.get("offload")
    ]
    cells += [replace(c, model="tied") for c in (ONE, *FSDP1, *OURS, *FSDP2, *ZERO, *TP) if "plan" not in c.layout]
    cells += [replace(c, model="tied") for c in TP if c.layout.get("plan") == "transformers"]
    for cell in PRINCIPAL:
        # FSDP1 itself refuses frozen and trained parameters in one flat one.
        is_flat = cell.layout.get("use_orig_params") is False
        cells += [replace(cell, model=model) for model in (("tied", "bias") if is_flat else MODELS)]
        cells += [replace(cell, data=data) for data in DATA]
        cells += [replace(cell, use=use) for use in USES]
        cells += [replace(cell, model=model) for model in REFUSED_MODELS]
    for cell in (replace(cell, world=4) for cell in PRINCIPAL if cell.world == 2):
        cells += [cell, replace(cell, model="tied"), replace(cell, use="two forwards")]
        cells += [replace(cell, data=data) for data in ("empty rank", "num_items_in_batch")]
        if cell.engine != "zero":
            cells.append(replace(cell, accumulation=2))
    cells += [replace(DDP, use="unused parameters")]
    cells += [_zero(3, quantized_gradients=True)]
    cells.append(replace(_fsdp1(own_unit=True, use_orig_params=False), model="frozen backbone"))
    families = ("qwen2", "gemma2", "tied qwen2", "tied gemma2")
    cells += [replace(c, model=m) for c in (ONE, DDP, _fsdp2(), _fsdp2(rows=True), Cell(engine="tp")) for m in families]
    return list({str(cell): replace(cell, refused=_refusal(cell)) for cell in cells}.values())


def _refusal(cell: Cell) -> str:
    """Words of the sentence that refuses the cell; empty for one that is exact."""
    if cell.tied and cell.engine == "fsdp1" and cell.layout.get("own_unit"):
        return "leave lm_head out of the wrapping policy"
    if cell.tied and cell.layout.get("head") in ("own", "tail"):
        return "fully_shard"
    if cell.use == "outside the root" and cell.engine == "fsdp1" and cell.by_others:
        return "outside the wrapper's forward"
    if cell.data == "global mean" and cell.engine == "zero":
        return "pass num_items_in_batch to the model"
    if cell.layout.get("quantized_gradients"):
        return "turn them off"
    if cell.model in ADAPTED and (cell.engine == "tp" or cell.layout.get("axes") == GRID):
        return "leave the head out of its target_modules"
    if cell.model in ADAPTED and cell.layout.get("rows"):
        return "leave the head out of its target_modules"
    if cell.model == "quantised head":
        return "expected an unmodified torch.nn.Linear"
    return ""


CELLS = _cells()

PRECISION = [
    _fsdp1(by_others=False, bf16=True),
    _fsdp1(use_orig_params=False, bf16=True),
    _fsdp1(own_unit=True, bf16=True),
    *(_fsdp2(head=head, bf16=True) for head in ("root", "tail", "own")),
    _fsdp2(bf16=True),
    _fsdp2(rows=True, bf16=True),
    _fsdp2(axes=GRID, bf16=True),
    *(_zero(stage, bf16=True) for stage in range(4)),
]
"""bf16 compute: held to 1.5 times the error of the same layout unfused."""


def by_world(cells: list[Cell], world: int) -> list[Cell]:
    return [cell for cell in cells if cell.world == world]
