"""Reads the modules of multi-token prediction from checkpoints, in the names of the model families."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from liger_dist.errors import LigerDistError
from liger_dist.model.class_swap import swapped
from liger_dist.model.structure import PREDICTION, Structure

from .modules import Parts, PredictionModules, make_parts

_FLAT = "fc.weight"
"""a parameter of modules under the names of Qwen3-Next and Qwen3.5"""


FLAT_FAMILIES = ("qwen3_next", "qwen3_5", "mellum")
"""model types, without suffixes, whose checkpoints have ``mtp.fc`` and so on for one depth"""


def has_flat_names(model: nn.Module) -> bool:
    """True for a model of :data:`FLAT_FAMILIES`."""
    config: Any = model.config
    return str(config.model_type).startswith(FLAT_FAMILIES)


def name_in_checkpoint(model: nn.Module, name: str) -> str:
    """Returns the name that the parameter ``name`` of ``model`` has in checkpoints of its family: modules of families
    that transformers reads by its ``MtpModel`` are layers after the last one."""
    layer = re.match(rf"(.*\b){PREDICTION}\.layers\.(\d+)\.(.+)", name)
    config: Any = model.config
    text = config.get_text_config()
    if layer is None or not getattr(text, "num_mtp_layers", None):
        return name
    inner = layer[3].removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
    return f"{layer[1]}model.layers.{text.num_hidden_layers + int(layer[2])}.{inner}"


def has_prediction(model: nn.Module, folder: Path) -> bool:
    """True for a checkpoint of ``model`` with modules of multi-token prediction."""
    config: Any = model.config
    text = config.get_text_config()
    layer = f"model.layers.{getattr(text, 'num_hidden_layers', 0)}."
    is_layer = bool(getattr(text, "num_mtp_layers", None))
    return any((layer if is_layer else f"{PREDICTION}.") in name for name in _names(folder))


def _names(folder: Path) -> Iterator[str]:
    """Yields the names of all parameters of a checkpoint."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield from file.keys()


def read_parts(model: nn.Module, structure: Structure, folder: str | None) -> tuple[list[Parts], bool]:
    """Reads the modules of each depth, and whether they have the names of one depth.

    Raises:
        LigerDistError: the checkpoint has none, or other parameters.
    """
    config: Any = model.config
    folder = config.name_or_path if folder is None else folder
    text = config.get_text_config()
    if getattr(text, "num_mtp_layers", None):
        return _from_transformers(model, structure, folder), False
    found = dict(_tensors(_local(folder)))
    if not found:
        raise LigerDistError(
            f"the checkpoint {folder!r} has no parameters of multi-token prediction (mtp.*); make new modules by "
            "MultiTokenPrediction(model, depth=…)."
        )
    is_flat = _FLAT in found
    depth = 1 + max((int(name.split(".")[1]) for name in found if name.startswith("layers.")), default=-1)
    if depth == 0:
        raise LigerDistError(
            f"the checkpoint {folder!r} has parameters of multi-token prediction ({', '.join(sorted(found)[:3])}) and "
            "none of its layers (mtp.layers.*); get its files again, or make new modules by "
            "MultiTokenPrediction(model, depth=…)."
        )
    parts = make_parts(model, structure, depth)
    modules = PredictionModules(parts, is_flat=is_flat and depth == 1)
    unexpected = _load(model, modules, found)
    if unexpected:
        raise LigerDistError(
            f"the checkpoint {folder!r} has parameters of multi-token prediction {', '.join(unexpected[:4])}; expected "
            f"those of a {type(parts[0].block).__name__} for each depth."
        )
    return parts, modules.is_flat


def _load(model: nn.Module, modules: PredictionModules, found: dict[str, Tensor]) -> list[str]:
    """Loads the tensors of a checkpoint; names that differ are converted as transformers does for ``model``, such as
    experts one by one. Returns what is missing or too much, as clauses."""
    missing, unexpected = modules.load_state_dict(found, strict=False)
    if missing or unexpected:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import convert_and_load_state_dict_in_model
            from transformers.modeling_utils import LoadStateDictConfig
        except ImportError:
            return _clauses(missing, unexpected)
        dtype = next(modules.parameters()).dtype
        settings = LoadStateDictConfig(weight_mapping=get_model_conversion_mapping(model), dtype=dtype)
        named = {f"{PREDICTION}.{name}": tensor for name, tensor in found.items()}
        with swapped(model._modules, PREDICTION, modules):
            report, *_ = convert_and_load_state_dict_in_model(model=model, state_dict=named, load_config=settings)
        prefix = f"{PREDICTION}."
        missing = [name.removeprefix(prefix) for name in report.missing_keys if name.startswith(prefix)]
        unexpected = [name.removeprefix(prefix) for name in report.unexpected_keys]
    return _clauses(missing, unexpected)


def _clauses(missing: Iterable[str], unexpected: Iterable[str]) -> list[str]:
    return [f"without {name}" for name in sorted(missing)] + [f"with {name}" for name in sorted(unexpected)]


def _local(name: str) -> Path:
    """Returns the folder of a checkpoint, which may be the name of one of the hub that was loaded from there."""
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils.hub import cached_file

    for file in ("model.safetensors.index.json", "model.safetensors"):
        path = cached_file(
            name,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            return Path(path).parent
    raise LigerDistError(
        f"the checkpoint {name!r} has no safetensors files here; give the folder with them: "
        "MultiTokenPrediction.from_pretrained(model, folder)."
    )


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters below ``mtp`` in a checkpoint, by their names there."""
    from safetensors import safe_open

    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                below = re.match(rf"(?:.*\.)?{PREDICTION}\.(.+)", name)
                if below:
                    yield below[1], file.get_tensor(name)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        return [folder / file for file in dict.fromkeys(names[name] for name in names if f"{PREDICTION}." in name)]
    return sorted(folder.glob("*.safetensors"))


def _from_transformers(model: nn.Module, structure: Structure, folder: str) -> list[Parts]:
    """Reads the modules in ``folder`` by transformers' ``MtpModel``; they read the decoder's config from now on.

    Raises:
        LigerDistError: this transformers has none, the checkpoint lacks parameters, or the modules have other parts.
    """
    from transformers import modeling_layers

    cls: Any = getattr(modeling_layers, "MtpModel", None)
    if cls is None:
        raise LigerDistError(
            f"{type(model).__name__} has parameters of multi-token prediction that this transformers does not read; "
            "install transformers>=5.23."
        )
    config: Any = model.config
    text = config.get_text_config()
    first = text.num_hidden_layers
    # It looks for the layers of published sizes, which the class lists as those to leave out.
    usual = set(model._keys_to_ignore_on_load_unexpected or ())  # type: ignore[arg-type]
    layers = {rf"layers\.{first + depth}\." for depth in range(text.num_mtp_layers)}
    loaded_from, config.name_or_path = config.name_or_path, folder
    try:
        with swapped(vars(model), "_keys_to_ignore_on_load_unexpected", usual | layers):
            loaded = cls.from_pretrained(model)
    except (RuntimeError, OSError) as error:
        raise LigerDistError(
            f"the checkpoint {folder!r} has no complete modules of multi-token prediction ({error}); give the folder "
            "with them, or make new ones by MultiTokenPrediction(model, depth=…)."
        ) from error
    finally:
        config.name_or_path = loaded_from
    parts = []
    for layer in loaded.layers:
        if layer.post_norm is None or getattr(loaded.config, "mtp_hidden_states_first", False):
            raise LigerDistError(
                f"{type(model).__name__} has parts of multi-token prediction that are not supported: a norm shared by "
                "all depths, or hidden states before embeddings."
            )
        parts.append(Parts(layer.enorm, layer.hnorm, layer.eh_proj, layer.mtp_block, layer.post_norm))
    like = next(structure.decoder.parameters())
    for one in parts:
        for part in one:
            part.to(like.device)
        for module in one.block.modules():
            if hasattr(module, "config"):
                module.config = structure.decoder.config
    return parts
