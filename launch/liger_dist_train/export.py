"""From a checkpoint of any strategy to one folder that transformers loads."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from liger_dist import LigerDistError
from liger_dist.model.quantized import dequantized, four_bit_layers, four_bit_stacks
from liger_dist.mtp import MultiTokenPrediction, has_prediction

from .bases import FOUR_BIT, format_of, keep_left_out
from .checkpoint import (
    FOUR_BIT_EXPERTS,
    MODEL,
    MTP_DEPTH,
    damage_of,
    describe_base,
    difference,
    difference_of_bases,
    read_description,
    reason_of,
    refuse_pickles,
    settings_of,
    steps_in,
)
from .config import TrainConfig
from .model import add_lora, read_config, read_weights, weights_dtype
from .model_card import card_of
from .optimizer import decays, kinds_of
from .output_folder import set_usual_modes
from .safe_pickle import deepspeed_names
from .state_files import load_state
from .tokenization import load_tokenizer

DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str]) -> None:
    """Runs ``liger-dist export``."""
    what = (
        "Writes a checkpoint as safetensors that AutoModelForCausalLM.from_pretrained and liger-dist train --model "
        "read. One process, no GPU; it needs memory for the weights in fp32."
    )
    parser = argparse.ArgumentParser(prog="liger-dist export", description=what)
    parser.add_argument("run", type=Path, help="what --output_dir was")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--step", type=int, help="of the checkpoint; default: the newest complete one")
    chosen.add_argument("--best", action="store_true", help="the checkpoint with the lowest held-out loss")
    parser.add_argument("--to", type=Path, help="folder to make; default: exported, in the run's folder")
    parser.add_argument("--base", type=Path, help="LoRA: where the pretrained model is now; default: where it was")
    parser.add_argument("--ema", action="store_true", help="the moving average of the weights, by --ema_decay")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="LoRA: the LoRA layers alone, in the files of PEFT (adapter_model.safetensors)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights; default: %(default)s")
    options = parser.parse_args(arguments)
    to = options.to or options.run / "exported"
    settings = {name: getattr(options, name) for name in ("step", "best", "dtype", "base", "ema", "adapter")}
    step = export(options.run, to, **settings)
    print(f"written to {to}: step {step} of {options.run}, in {options.dtype}")


def export(
    run: Path,
    to: Path,
    *,
    step: int | None,
    best: bool = False,
    dtype: str = "float32",
    base: Path | None = None,
    ema: bool = False,
    adapter: bool = False,
) -> int:
    """Writes config, weights and tokenizer of a run's checkpoint into ``to``, LoRA layers merged; returns its step.

    LoRA layers of a 4-bit base are merged into the dequantized weights, on which they were trained.

    Args:
        best: the checkpoint with the lowest held-out loss, instead of the newest one.
        base: folder of the pretrained model under LoRA layers; default: that of the run.
        ema: the moving average of the weights instead of the weights.
        adapter: the LoRA layers alone, as PEFT's files, which ``PeftModel.from_pretrained`` reads.

    Raises:
        LigerDistError: there is no such complete checkpoint, ``to`` exists, or the base is not that of the run.
    """
    if to.exists():
        raise LigerDistError(f"{to} exists; give another folder with --to, or remove it.")
    path = _checkpoint(run, step, best=best)
    description = read_description(path)
    refuse_pickles(path, description)
    if ema and not description.get("ema"):
        raise LigerDistError(f"--ema is given and {path} has no moving average; train with --ema_decay 0.999.")
    if adapter and description["lora"] is None:
        raise LigerDistError(f"--adapter is given and {path} has no LoRA layers; leave it out.")
    if adapter and MTP_DEPTH in description["model"]:
        raise LigerDistError(
            f"--adapter is given and {path} has trained layers that predict further tokens, which PEFT's files do not "
            "hold; leave it out, and export the merged model."
        )
    model = _empty_model(path, description, base, merge=not adapter)
    try:
        weights = _weights(path, description, model, "ema" if ema else "model")
    except LigerDistError:
        raise
    except (Exception, CheckpointException) as error:
        raise LigerDistError(
            f"the checkpoint {path} cannot be read: {reason_of(error)}; choose another --step."
        ) from error
    model = _filled(model, weights, path, has_lora=description["lora"] is not None, merge=not adapter)
    _to_dtype(model, getattr(torch, dtype))
    if not adapter:
        _let_it_end(model, load_tokenizer(path / MODEL))
    kept_from = None if adapter or description["lora"] is None else base or Path(description["lora"]["model"])
    found: int = description["step"]
    card = None if adapter else card_of(run, found, dtype)
    _write(model, path / MODEL, to, adapter=adapter, kept_from=kept_from, card=card)
    return found


def _to_dtype(model: Any, dtype: torch.dtype) -> None:
    """Converts a model, but for what transformers keeps in fp32 when it loads a model in that dtype, such as the
    biases that correct routers."""
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_kept = dtype != torch.float32 and any(f".{part}." in f".{name}." for part in kept)
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if is_kept else dtype)


def _write(model: Any, beside: Path, to: Path, *, adapter: bool, kept_from: Path | None, card: str | None) -> None:
    """Writes the model and the files of ``beside``, such as the tokenizer's, into ``to``, which appears complete.

    Args:
        kept_from: folder of pretrained weights, of which those that the model has no parameters for are kept.
        card: text of README.md; None for what PEFT writes.

    Raises:
        LigerDistError: the files cannot be written, or those of an export that was cut off are in the way.
    """
    partial = to.with_name(f"{to.name}.partial")
    if partial.exists():
        raise LigerDistError(f"{partial} is in the way, perhaps of an export that was cut off; remove it.")
    if not adapter and (beside / GENERATION_CONFIG_NAME).is_file():
        # That file is copied as it is: transformers reads settings that it refuses to write.
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(partial, **({} if adapter else {"max_shard_size": "5GB"}))
        if kept_from is not None:
            kept = keep_left_out(kept_from, model, partial)
            print(f"kept as {kept_from} has them: {len(kept)} tensors" if kept else "", end="\n" * bool(kept))
        shutil.copytree(
            beside,
            partial,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("config.json", *([GENERATION_CONFIG_NAME] if adapter else [])),
        )
        if card is not None:
            (partial / "README.md").write_text(card)
        set_usual_modes(partial)
        partial.rename(to)
    except BaseException as error:
        # It would take the room that is missing, and be in the way of the next one.
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        raise LigerDistError(
            f"{to} cannot be written: {error}; make room, or give another folder with --to."
        ) from error


def _filled(model: Any, weights: dict[str, Any], path: Path, *, has_lora: bool, merge: bool) -> Any:
    """Loads ``weights``, and merges LoRA layers into the base if ``merge`` is true.

    Raises:
        LigerDistError: parameters without a value.
    """
    missing = set(model.load_state_dict(weights, strict=False).missing_keys)
    if has_lora:
        # The base has all else.
        missing &= {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if missing:
        raise LigerDistError(
            f"the checkpoint {path} has no values for {', '.join(sorted(missing)[:5])}; it is of another model."
        )
    if not has_lora or not merge:
        return model
    _untie(model.get_base_model())
    return model.merge_and_unload()


def _untie(model: Any) -> None:
    """Gives lm_head a separate weight where it is tied to the embedding and either has a LoRA layer, which would be
    merged into both."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    has_lora = any(hasattr(module, "get_base_layer") for module in (head, embedding))
    if not has_lora or head.weight is not embedding.weight:
        return
    base: Any = head.get_base_layer() if hasattr(head, "get_base_layer") else head
    base.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    for settings in (model.config, model.config.get_text_config()):
        settings.tie_word_embeddings = False


def _read_base(path: Path, lora: dict[str, Any], base: Path | None, *, merge: bool) -> Any:
    """Reads the pretrained model of a checkpoint, and adds LoRA layers without values of the checkpoint. To ``merge``
    them, a base of 4 bits is dequantized.

    Raises:
        LigerDistError: its folder is not there, or has other weights or settings than those that were trained on.
    """
    folder = Path(lora["model"]) if base is None else base
    if not folder.is_dir():
        raise LigerDistError(
            f"the pretrained model of the LoRA checkpoint {path} is not at {folder}; say where it is with --base "
            "FOLDER."
        )
    # Checkpoints of earlier versions know the folder alone.
    written = lora.get("weights")
    found = describe_base(folder)
    other_weights = None if written is None else difference_of_bases(written, found["weights"])
    if other_weights is not None:
        raise LigerDistError(
            f"{folder} is not the base of the LoRA checkpoint {path}: {other_weights}. Give the folder with those "
            "weights with --base FOLDER."
        )
    # Both are read by one version of transformers.
    found_settings, expected = (settings_of(read_config(one)) for one in (folder, path / MODEL))
    if found_settings != expected:
        raise LigerDistError(
            f"{folder} is not the base of the LoRA checkpoint {path}: its config.json is of "
            f"{difference('model', found_settings, expected)}. Give the folder that the LoRA layers were trained on "
            "with --base FOLDER."
        )
    settings = {name: value for name, value in lora.items() if name not in ("weights", FOUR_BIT_EXPERTS)}
    config, experts = TrainConfig(**(settings | {"model": str(folder)})), merge and FOUR_BIT_EXPERTS in lora
    reading: dict[str, Any] = {"dtype": weights_dtype(config), "four_bit_on": torch.device("cpu"), "experts": experts}
    if format_of(folder) == FOUR_BIT:
        model = read_weights(folder, None, **reading)
        return add_lora(_dequantized(model) if merge else model, config, has_weights=True)
    model = read_weights(folder, None)
    if config.load_in_4bit and merge:
        quantised = read_weights(folder, None, **reading)
        error = _round_to_four_bits(model, quantised)
        print(
            f"the base is the dequantized 4-bit one that the LoRA layers were trained on: its weights differ by "
            f"{error:.2%} (relative L2) from the pretrained ones",
            flush=True,
        )
    return add_lora(model, config, has_weights=True)


def _dequantized(quantised: Any) -> Any:
    """Makes the model in fp32 of one that was read in 4 bits."""
    model: Any = type(quantised)(quantised.config)
    layers = dict(four_bit_layers(quantised))
    stacks = {name: (module, stack.name) for name, module, stack in four_bit_stacks(quantised)}
    kept = {
        name: tensor
        for name, tensor in quantised.state_dict().items()
        if name.rpartition(".weight")[0] not in layers and not any(f"{name}.".startswith(f"{one}.") for one in stacks)
    }
    model.float().load_state_dict(kept, strict=False)
    with torch.no_grad():
        for name, layer in layers.items():
            values = dequantized(layer.weight, layer.weight.quant_state, torch.float32)
            original = model.get_submodule(name)
            original.weight.copy_(values if isinstance(original, nn.Linear) else values.T)
        for name, (module, parameter) in stacks.items():
            model.get_parameter(name).copy_(getattr(module, parameter))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    # How its names are written, without the format's part of it.
    conversions = getattr(quantised, "_weight_conversions", None) or []
    model._weight_conversions = [one for one in conversions if _can_be_undone(one)] or None
    return model.requires_grad_(False)


def _can_be_undone(conversion: Any) -> bool:
    try:
        conversion.reverse_transform()
    except NotImplementedError:
        return False
    return True


def _round_to_four_bits(model: Any, quantised: Any) -> float:
    """Gives ``model`` the weights that those of ``quantised`` stand for; returns their relative L2 error."""
    errors, sizes = 0.0, 0.0
    for name, layer in four_bit_layers(quantised):
        original = model.get_submodule(name)
        weight = original.weight.detach()
        values = dequantized(layer.weight, layer.weight.quant_state, torch.float32)
        values = values if isinstance(original, nn.Linear) else values.T  # GPT-2's Conv1D is quantised transposed.
        errors += float((values - weight).double().square().sum())
        sizes += float(weight.double().square().sum())
        weight.copy_(values)
    for name, module, stack in four_bit_stacks(quantised):
        weight, values = model.get_parameter(name).detach(), getattr(module, stack.name).float()
        errors += float((values - weight).double().square().sum())
        sizes += float(weight.double().square().sum())
        weight.copy_(values)
    return float((errors / sizes) ** 0.5)


def _empty_model(path: Path, description: dict[str, Any], base: Path | None, *, merge: bool) -> Any:
    """Makes the model of a checkpoint, without values; with LoRA layers the pretrained one, whose weights the
    checkpoint lacks.

    Raises:
        LigerDistError: see :func:`_read_base`; or ``base`` is given and the checkpoint has no LoRA layers.
    """
    lora = description["lora"]
    if lora is not None:
        model = _read_base(path, lora, base, merge=merge)
        folder = Path(lora["model"]) if base is None else base
        if MTP_DEPTH in description["model"] and has_prediction(model, folder):
            # Their buffers are the base's.
            MultiTokenPrediction.from_pretrained(model, str(folder)).float()
        elif MTP_DEPTH in description["model"]:
            MultiTokenPrediction(model, description["model"][MTP_DEPTH])
        return model
    if base is not None:
        raise LigerDistError(
            f"--base is {base} but the checkpoint {path} has all weights of its model, no LoRA layers; leave it out."
        )
    config = AutoConfig.from_pretrained(path / MODEL, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if MTP_DEPTH in description["model"]:
            MultiTokenPrediction(model, description["model"][MTP_DEPTH])
    # What is computed from the config is not stored, and not exported either.
    model.to_empty(device="cpu")
    model.tie_weights()
    if (path / MODEL / GENERATION_CONFIG_NAME).is_file():
        model.generation_config = GenerationConfig.from_pretrained(path / MODEL, local_files_only=True)
    return model


def _let_it_end(model: Any, tokenizer: Any) -> None:
    """Sets the tokenizer's end-of-sequence token, at which ``generate`` stops, where the model's config has none."""
    for settings in (model.config.get_text_config(), model.generation_config):
        if settings.eos_token_id is None:
            settings.eos_token_id = tokenizer.eos_token_id
    if model.generation_config.pad_token_id is None:
        # Not in the config, where it would take the token's row of the embedding out of training.
        model.generation_config.pad_token_id = (
            tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        )


def _checkpoint(run: Path, step: int | None, *, best: bool) -> Path:
    folder = run / "checkpoints"
    listed = steps_in(folder)
    if not listed:
        raise LigerDistError(f"{run} has no complete checkpoint; expected the --output_dir of a run that wrote one.")
    if step is None:
        newest = _newest_complete(folder, listed)
        if not best:
            return newest
        step = read_description(newest)["progress"]["progress"]["best_step"]
        if step is None:
            raise LigerDistError(f"{run} was never evaluated, so no checkpoint is the best; leave --best out.")
    path: Path = folder / f"step-{step:08d}"
    if path.name not in listed:
        keeping = " (--keep_best true keeps the best one)" if best else ""
        raise LigerDistError(f"{run} has no checkpoint of step {step}; there are {', '.join(listed)}{keeping}.")
    damage = damage_of(path)
    if damage is not None:
        raise LigerDistError(f"{path} is not complete ({damage}); choose another --step of {', '.join(listed)}.")
    return path


def _newest_complete(folder: Path, listed: list[str]) -> Path:
    damages = []
    for name in reversed(listed):
        damage = damage_of(folder / name)
        if damage is None:
            return folder / name
        damages.append(damage)
        print(f"{folder / name} is not complete ({damage}); it is skipped", flush=True)
    raise LigerDistError(f"no checkpoint in {folder} is complete, the newest {listed[-1]} ({damages[0]}). Repair one.")


def _weights(path: Path, description: dict[str, Any], model: Any, entry: str) -> dict[str, Any]:
    """Reads the weights by parameter name, in fp32."""
    format = description["format"]
    if not format.startswith("DeepSpeed"):
        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        wanted: dict[str, Any] = model.state_dict()
        if description["lora"] is not None:
            wanted = {name: value for name, value in wanted.items() if name in trained}
        # An average has one name of tied weights, and what is trained alone.
        names = {n for n, p in model.named_parameters() if p.requires_grad} if entry == "ema" else wanted.keys()
        written = _names_in_run(model) if FOUR_BIT_EXPERTS in (description["lora"] or ()) else {}
        entries = {entry: {written.get(n, n): value for n, value in wanted.items() if n in names}}
        # Buffers and frozen parameters, such as the biases of routers.
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad} | dict(model.named_buffers()).keys()
        entries |= {"model": {n: value for n, value in wanted.items() if n in frozen}} if entry == "ema" else {}
        load_state({name: values for name, values in entries.items() if values}, path)
        return wanted
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    if "stage 0" in format:
        file = path / "state" / "mp_rank_00_model_states.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        module: dict[str, Any] = state["module"]
        masters = (state["optimizer"] or {}).get("fp32_groups")
        return module if masters is None else module | _named_masters(model, masters, description)
    with deepspeed_names(path):
        found: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(path), tag="state")
    return found


def _names_in_run(model: Any) -> dict[str, str]:
    """Returns the names of LoRA's matrices on experts in a run whose experts are of 4 bits, by those in ``model``. PEFT
    nests its modules around quantised parameters in the order of their names, and around others in the module's."""
    found = {}
    for prefix, module in model.named_modules():
        if not hasattr(module, "parameter_name") or prefix.endswith(".base_layer"):
            continue
        nested = [module]
        while hasattr(nested[-1].base_layer, "parameter_name"):
            nested.append(nested[-1].base_layer)
        in_run = sorted(nested, key=lambda one: one.parameter_name, reverse=True)
        for depth, one in enumerate(nested):
            here, there = (prefix + ".base_layer" * index for index in (depth, in_run.index(one)))
            for name, _ in one.named_parameters():
                if name.startswith("lora_"):
                    found[f"{here}.{name}"] = f"{there}.{name}"
    return found


def _named_masters(
    model: Any, masters: list[list[torch.Tensor]], description: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Names the fp32 masters of DeepSpeed without ZeRO in bf16, which are in the order of the optimizer's groups: with
    weight decay and without, or the other way round, as the model begins."""
    excluded, kinds = description["progress"]["no_weight_decay"], kinds_of(model)
    groups: dict[bool, list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(decays(name, kinds[name], excluded), []).append((name, parameter))
    found = {}
    for group, values in zip(groups.values(), masters, strict=True):
        for (name, parameter), value in zip(group, values, strict=True):
            if value.shape != parameter.shape:
                raise LigerDistError(f"{name} is {list(parameter.shape)} and its fp32 master {list(value.shape)}")
            found[parameter] = value
    # Under both names of one that is tied.
    names = model.named_parameters(remove_duplicate=False)
    return {name: found[parameter] for name, parameter in names if parameter in found}
