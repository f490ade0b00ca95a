"""What a folder of pretrained weights has beside the parameters of the model that is trained: layers of multi-token
prediction, vision, formats of fewer bits. It is counted before a run, and kept by exports of LoRA."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from liger_dist import LigerDistError
from liger_dist.model.four_bit_experts import is_experts

from .optimizer import kinds_of

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64},
}
"""of safetensors files, by their names there"""
FROM_FORMATS = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""formats of weights that transformers converts to floating point where it reads them, with the class that asks it"""
FOUR_BIT = "bitsandbytes"
COMPUTED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|inv_freq|position_ids|masked_bias|cos_cached|sin_cached|attn\.bias|attention\.bias)$"
)
"""buffers of earlier versions, which classes compute now"""
FURTHER = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""entries of configs that declare layers of multi-token prediction"""
OF_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""files of models that read more than text"""
MOST_IN_A_FILE = 5 * 10**9


@dataclass(frozen=True)
class Base:
    """A folder of pretrained weights, beside the model that is made of it."""

    folder: Path
    format: str | None
    """of its weights (``quant_method``); None for floating point"""
    left_out: dict[str, int]
    """bytes of the tensors that the model has no parameters for"""
    has_prediction: bool
    """layers of multi-token prediction are among its tensors"""
    in_four_bits: int = 0
    in_stacks: int = 0
    """parameters of linear layers without lm_head, which 4 bits reach, and of stacks of matrices, such as experts"""

    def described(self) -> str:
        """Names what is left out, by groups, with its size."""
        groups: dict[str, int] = {}
        for name, size in self.left_out.items():
            found = re.match(r"(.*?layers\.\d+|model\.\w+|\w+)\.", name)
            group = name if found is None else found[1]
            groups[group] = groups.get(group, 0) + size
        listed = [f"{group} ({_bytes(size)})" for group, size in sorted(groups.items())]
        more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
        return f"{len(self.left_out)} tensors: {', '.join(listed[:4])}{more}"


def format_of(folder: Path) -> str | None:
    """Returns the format of a folder's weights, as its config.json declares it; None for floating point."""
    path = folder / "config.json"
    settings = json.loads(path.read_text()).get("quantization_config") if path.is_file() else None
    return None if settings is None else str(settings.get("quant_method", "unknown"))


def reading_options(folder: Path, four_bit: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Returns how transformers shall read the weights of a folder.

    Args:
        four_bit: format to quantise linear layers to; None to read floating point.

    Raises:
        LigerDistError: they have a format that is not trained on.
    """
    import transformers

    found = format_of(folder)
    if found is None:
        return {} if four_bit is None else {"quantization_config": four_bit}
    if found == FOUR_BIT and four_bit is not None:
        return {}
    if found == FOUR_BIT:
        raise LigerDistError(
            f"the weights in {folder} are in {FOUR_BIT}'s format, which does not train; give --lora_rank and "
            "--load_in_4bit true to train LoRA layers on them, or the folder of the model in floating point."
        )
    if found not in FROM_FORMATS:
        raise LigerDistError(
            f"the weights in {folder} are in the format {found!r}; expected floating point, or one of "
            f"{', '.join((*FROM_FORMATS, FOUR_BIT))}. Give the folder of the model in floating point."
        )
    if four_bit is not None:
        raise LigerDistError(
            f"--load_in_4bit is true and the weights in {folder} are in the format {found!r} already; leave it out, "
            f"which reads them in {str(dtype).removeprefix('torch.')}, or give the folder of the model in floating "
            "point."
        )
    return {"quantization_config": getattr(transformers, FROM_FORMATS[found])(dequantize=True)}


def look_at(folder: Path, model: nn.Module, *, takes_prediction: bool) -> Base:
    """Compares the tensors of a folder with the parameters of ``model``, which has no storage; reads no values.

    Args:
        takes_prediction: layers of multi-token prediction are read, too.

    Raises:
        LigerDistError: the files cannot be read.
    """
    held = tensors_in(folder)
    # Converted as when it is loaded: experts one by one, other prefixes.
    inner: Any = model
    stand_in: Any = type(inner).from_pretrained(
        None, config=inner.config, state_dict=dict(held), device_map="meta", ignore_mismatched_sizes=True
    )
    left = left_out(held, stand_in, is_quantised=format_of(folder) is not None)
    further = {name for name in left if is_prediction(name, inner.config.get_text_config())}
    if takes_prediction:
        left = {name: tensor for name, tensor in left.items() if name not in further}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in left.items()}
    linear, stacks = reach_of_four_bits(model)
    return Base(folder, format_of(folder), sizes, bool(further), linear, stacks)


def reach_of_four_bits(model: nn.Module) -> tuple[int, int]:
    """Counts the parameters that ``--load_in_4bit`` quantises, and those of stacks of matrices that it leaves."""
    reached = list(quantisable(model))
    kinds, ids = kinds_of(model), set(map(id, reached))
    left = (p for name, p in model.named_parameters() if kinds[name] == "matrices" and id(p) not in ids)
    return sum(weight.numel() for weight in reached), sum(p.numel() for p in left)


def quantisable(module: nn.Module) -> Iterator[Tensor]:
    """Yields the weights that ``--load_in_4bit`` quantises: of linear layers under LoRA or without it, but for lm_head,
    and of transformers' experts."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and ".lora_" not in name and "lm_head" not in name:
            yield part.weight
        if is_experts(part):
            yield from (p for p in part.parameters(recurse=False) if p.dim() == 3)


def left_out(held: dict[str, Tensor], model: Any, *, is_quantised: bool) -> dict[str, Tensor]:
    """Returns those of a checkpoint's tensors that ``model`` has no parameters for. Its parameters are compared by the
    names that transformers writes; in a quantised one scales and the like are of the parameter whose name they
    continue."""
    from transformers.core_model_loading import revert_weight_conversion

    names = set(revert_weight_conversion(model, {n: t.to("meta") for n, t in model.state_dict().items()}))

    def is_of_model(name: str) -> bool:
        if not is_quantised:
            return name in names or COMPUTED.search(name) is not None
        cuts = [name[: match.start()] for match in re.finditer(r"[._]", name)]
        if name.endswith(("_scale", "_scale_inv")):
            cuts.append(f"{name.rpartition('.')[0]}.weight")
        return name in names or any(cut in names for cut in cuts) or COMPUTED.search(name) is not None

    return {name: tensor for name, tensor in held.items() if not is_of_model(name)}


def is_prediction(name: str, text_config: Any) -> bool:
    """True for a tensor of multi-token prediction: below ``mtp``, or in a layer after the last one."""
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    is_further = layer is not None and int(layer[1]) >= getattr(text_config, "num_hidden_layers", 0)
    return re.search(r"(^|\.)mtp[._]", name) is not None or is_further


def without_prediction(model_config: Any) -> None:
    """Takes layers of multi-token prediction out of a config, which would declare them."""
    for settings in (model_config, model_config.get_text_config()):
        for name in FURTHER:
            if getattr(settings, name, 0):
                setattr(settings, name, 0)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Returns the tensors that transformers reads of a folder, without storage, by their names there.

    Raises:
        LigerDistError: a file cannot be read.
    """
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - it is no dict
                        part = file.get_slice(name)
                        dtype = DTYPES.get(part.get_dtype(), torch.uint8)
                        found[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
            else:
                found |= torch.load(path, map_location="meta", weights_only=True, mmap=True)
        except Exception as error:  # Damaged files raise anything.
            raise LigerDistError(f"the weights in {path} cannot be read: {error}; get its files again.") from error
    return found


def weight_files(folder: Path) -> list[Path]:
    """Lists the files of weights that transformers reads of a folder."""
    for name, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / index).is_file():
            names = json.loads((folder / index).read_text())["weight_map"].values()
            return [folder / file for file in dict.fromkeys(names)]
    return []


def keep_left_out(base: Path, model: Any, written: Path) -> list[str]:
    """Adds the tensors of ``base`` that ``model`` has no parameters for, byte for byte, to the files of ``model`` in
    the folder ``written``, which declare them again; returns their names.

    Args:
        model: loaded from ``base``, and written by its ``save_pretrained``.
    """
    missing = left_out(tensors_in(base), model, is_quantised=format_of(base) is not None)
    present = tensors_in(written)
    names = [name for name in missing if name not in present]
    if not names:
        return []
    _add_files(base, names, written)
    exported, whole = (json.loads((folder / "config.json").read_text()) for folder in (written, base))
    if exported["model_type"] != whole["model_type"]:
        # Of the language model alone.
        whole.pop("quantization_config", None)
        whole |= {name: exported[name] for name in ("dtype", "transformers_version") if name in exported}
        if whole.get("eos_token_id") is None and whole.get("text_config", {}).get("eos_token_id") is None:
            whole["eos_token_id"] = exported.get("eos_token_id")
        for settings in (whole, whole.get("text_config", {})):
            settings["tie_word_embeddings"] = exported.get("tie_word_embeddings", False)
            if "dtype" in exported:
                settings["dtype"] = exported["dtype"]
                settings.pop("torch_dtype", None)
        (written / "config.json").write_text(json.dumps(whole, indent=2) + "\n")
        for name in OF_PROCESSORS:
            if (base / name).is_file():
                shutil.copyfile(base / name, written / name)
    return names


def _add_files(base: Path, names: list[str], written: Path) -> None:
    """Writes tensors into further files of ``written``, and names them in its index."""
    index = written / SAFE_WEIGHTS_INDEX_NAME
    files = weight_files(written)
    settings = json.loads(index.read_text()) if index.is_file() else {"metadata": {}, "weight_map": {}}
    placed: dict[str, str] = settings["weight_map"] or dict.fromkeys(tensors_in(written), files[0].name)
    count = 0
    batch: dict[str, Tensor] = {}
    # One after another: together they may be larger than the memory that is left.
    for name, tensor in itertools.chain(_tensors(base, names), [("", None)]):
        if batch and (tensor is None or sum(t.nbytes for t in batch.values()) + tensor.nbytes > MOST_IN_A_FILE):
            count += 1
            path = written / f"kept-{count:05d}.safetensors"
            save_file(batch, path, {"format": "pt"})
            placed |= dict.fromkeys(batch, path.name)
            batch = {}
        if tensor is not None:
            batch[name] = tensor
    total = sum(path.stat().st_size for path in written.glob("*.safetensors"))
    if files[0].name == SAFE_WEIGHTS_NAME:
        # Where that file is, transformers reads no index.
        renamed = "model-00001-of-00001.safetensors"
        files[0].rename(written / renamed)
        placed = {name: renamed if file == SAFE_WEIGHTS_NAME else file for name, file in placed.items()}
    settings["metadata"] = settings.get("metadata", {}) | {"total_size": total}
    index.write_text(json.dumps(settings | {"weight_map": dict(sorted(placed.items()))}, indent=2) + "\n")


def _tensors(folder: Path, names: list[str]) -> Any:
    """Yields tensors of a folder with their names."""
    wanted = set(names)
    for path in weight_files(folder):
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in wanted.intersection(file.keys()):
                    yield name, file.get_tensor(name)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            for name in wanted.intersection(loaded):
                yield name, loaded[name].contiguous()


def _bytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size > 2**27 else f"{size / 2**20:.2f} MiB"
