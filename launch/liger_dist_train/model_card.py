"""README.md of an export: what the model was trained from, on which data, with which losses and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml

import liger_dist

from .metrics import complete_rows

CARD = """---
{header}---

# {title}

Trained by liger_dist {version}, exported from step {step} in {dtype}.

| | |
|---|---|
{rows}

## Data

| source | documents | tokens | labels | skipped |
|---|---|---|---|---|
{sources}

## Options that differ from the defaults

```yaml
{options}```
"""
COUNTS = ("documents", "tokens", "labels", "skipped")
"""of a source in data.json"""


def card_of(run: Path, step: int, dtype: str) -> str:
    """Writes the card of a run's export as Markdown, from the files that the run has left in its folder."""
    options = _read_yaml(run / "config.yaml")
    flat = {name: value for section in options.values() for name, value in section.items()}
    base = str(options.get("model", {}).get("name", ""))
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["liger_dist"]}
    metrics = [row for row in complete_rows(run / "metrics.jsonl") if row["step"] <= step] if _has_metrics(run) else []
    facts = {
        "model": f"`{Path(base).name or base}`" + (" (LoRA, merged)" if flat.get("lora_rank") else ""),
        "training loss": _last(metrics, "loss"),
        "held-out loss": _last(metrics, "eval_loss"),
        "tokens": _last(metrics, "tokens", whole=True),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
    }
    data = json.loads((run / "data.json").read_text()) if (run / "data.json").is_file() else {"sources": []}
    sources = [
        " | ".join(["", Path(one["source"]).name, *(str(one.get(name, "")) for name in COUNTS), ""]).strip()
        for one in data["sources"]
    ]
    return CARD.format(
        header=yaml.safe_dump(header, sort_keys=False),
        title=run.resolve().name,
        version=liger_dist.__version__,
        step=step,
        dtype=dtype,
        rows="\n".join(f"| {name} | {value} |" for name, value in facts.items() if value),
        sources="\n".join(sources),
        options=yaml.safe_dump(_without_paths(options), sort_keys=False),
    )


def _read_yaml(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text()) if path.is_file() else {}
    return found


def _has_metrics(run: Path) -> bool:
    return (run / "metrics.jsonl").is_file()


def _last(rows: list[dict[str, Any]], name: str, *, whole: bool = False) -> str:
    found = next((row[name] for row in reversed(rows) if name in row), None)
    return "" if found is None else f"{found:,}" if whole else f"{found:.4f}"


def _without_paths(options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Leaves the last part of each path: folders of a machine are nothing for a card."""
    from .options import READ_PATHS, TrainOptions

    defaults = vars(TrainOptions())
    left_out = ("cache_dir", "output_dir", "num_proc", "trackers", "run_name")
    found: dict[str, dict[str, Any]] = {}
    for section, values in options.items():
        for key, value in values.items():
            name = section if key in ("name", "sources") else key
            if name in left_out or defaults.get(name) == value:
                continue
            if name in READ_PATHS:
                value = [Path(v).name for v in value] if isinstance(value, list) else Path(str(value)).name
            found.setdefault(section, {})[key] = value
    return found
