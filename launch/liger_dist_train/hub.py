"""Models and datasets that are named as on the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from liger_dist import LigerDistError

from .config import TrainConfig
from .distributed import gathered, on_rank_zero
from .options import PRESETS, is_hub_name
from .output_folder import write_folder

FILES_OF_A_MODEL = ["*.json", "*.model", "*.txt", "*.jinja"]
WEIGHTS = "*.safetensors"
DATASET = re.compile(r"(?P<path>[^:,]+?)(@(?P<revision>[\w.-]+))?(,(?P<subset>[^:,]+))?(:(?P<split>[^:,]+))?")
OPTIONS = ("model", "tokenizer", "teacher")


class DatasetName(NamedTuple):
    """A dataset as ``datasets.load_dataset`` takes it."""

    path: str
    """of the hub, or a folder"""
    revision: str | None
    subset: str | None
    split: str


def dataset_name(text: str) -> DatasetName | None:
    """Reads ``NAME[@REVISION][,SUBSET][:SPLIT]``, where NAME is ``org/name`` or, with a subset or a split, a folder;
    None for a path."""
    found = DATASET.fullmatch(text)
    if Path(text).exists() or found is None:
        return None
    path, subset, split = found["path"], found["subset"], found["split"]
    is_folder = Path(path).is_dir() and bool(subset or split)
    if not is_folder and (Path(path).exists() or not is_hub_name(path)):
        return None
    return DatasetName(path, found["revision"], subset, split or "train")


@cache
def load_split(name: DatasetName, folder: Path) -> Path:
    """Loads a split by ``datasets``, which downloads it, and leaves it in ``folder`` as a saved dataset; once in a
    process, which asks for it before the model is built and after.

    Raises:
        LigerDistError: there is none of this name, or no way to get it.
    """
    import datasets

    try:
        rows: Any = datasets.load_dataset(name.path, name.subset, split=name.split, revision=name.revision)
    except Exception as error:  # Of the hub, the network, files and splits.
        raise LigerDistError(
            f"--data {name.path} (subset {name.subset}, split {name.split}) cannot be loaded: {error} Expected a "
            "folder, or a dataset of the hub as NAME[@REVISION][,SUBSET][:SPLIT], such as org/chats:train_sft."
        ) from error
    words = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, (name.path, name.subset, name.split))))
    saved = folder / "hub" / f"{words[-100:]}-{rows._fingerprint}"
    if not saved.is_dir():
        write_folder(saved, lambda to: rows.save_to_disk(str(to)))
    return saved


def with_local_models(config: TrainConfig) -> TrainConfig:
    """Replaces names of the hub in ``--model``, ``--tokenizer`` and ``--teacher`` by the folders of their snapshots,
    which rank 0 downloads where the cache of the hub does not have them.

    Raises:
        LigerDistError: on every rank: there is no such model, no network, or a rank does not see the cache; or an
            option names a folder of that cache instead of a snapshot in it.
    """
    names = {option: getattr(config, option) for option in OPTIONS}
    on_rank_zero(lambda: _refuse_caches({option: name for option, name in names.items() if name is not None}))
    named = {option: name for option, name in names.items() if name not in (None, *PRESETS) and is_hub_name(name)}
    named = on_rank_zero(lambda: {option: name for option, name in named.items() if not Path(name).exists()})
    with_weights = () if config.dry_run else ("model", "teacher")
    folders = on_rank_zero(
        lambda: {option: str(_snapshot(option, name, option in with_weights)) for option, name in named.items()}
    )
    unseen = [rank for rank, seen in enumerate(gathered([Path(f).is_dir() for f in folders.values()])) if not all(seen)]
    if unseen:
        raise LigerDistError(
            f"rank {', '.join(map(str, unseen))} does not see {', '.join(folders.values())}, which rank 0 has "
            "downloaded; set HF_HOME to a folder that all machines share, or give folders."
        )
    return replace(config, **cast(dict[str, Any], folders))


def _snapshot(option: str, name: str, has_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    path, _, revision = name.partition("@")
    files = [*FILES_OF_A_MODEL, *([WEIGHTS] if has_weights else [])]
    try:
        folder = Path(snapshot_download(path, revision=revision or None, allow_patterns=files))
    except Exception as error:  # Of the hub and the network.
        raise LigerDistError(
            f"--{option} is {name!r}, which is no folder here and cannot be downloaded: {error} Give a folder, a name "
            f"of the hub as NAME[@REVISION], or get it where there is a network: hf download {path}."
        ) from error
    if has_weights and not any(folder.glob(WEIGHTS)):
        raise LigerDistError(
            f"--{option} {name} has no safetensors on the hub, and other weights are not downloaded; get them by "
            f"hf download {path} --local-dir FOLDER, and give --{option} FOLDER."
        )
    return folder


def _refuse_caches(names: dict[str, str]) -> None:
    for option, name in names.items():
        found = [] if name in PRESETS else sorted(map(str, Path(name).glob("snapshots/*")))
        if found:
            raise LigerDistError(
                f"--{option} {name} is a folder of a hub's cache; give the snapshot in it, such as {found[0]}."
            )
