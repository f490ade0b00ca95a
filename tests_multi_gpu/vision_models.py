"""Tiny vision-language models, batches with images and videos, and their loss in fp64."""

from __future__ import annotations

from typing import Any

import on_device
import torch
import torch.nn.functional as F
from models import HIDDEN_SIZE, VOCAB_SIZE
from torch import Tensor, nn

from liger_dist.sharding.process_groups import compute_device

TEXT_LAYERS, VISION_LAYERS = 2, 4
START_TOKEN, END_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN = 95, 96, 97, 98

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": TEXT_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": VISION_LAYERS,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
    "image_size": 16,
    "patch_size": 8,
}
QWEN_VISION: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": HIDDEN_SIZE,
    "initializer_range": 0.3,
}


def make_config(family: str, *, vision_layers: int = VISION_LAYERS) -> Any:
    """Makes the config of a family, of which ``vision_layers`` is for those of Qwen."""
    from transformers import Gemma3Config, LlavaConfig, Qwen2_5_VLConfig, VideoLlavaConfig

    if family == "video_llava":
        encoder = {"model_type": "clip_vision_model", "projection_dim": HIDDEN_SIZE, **VISION}
        return VideoLlavaConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config=encoder,
            image_token_index=IMAGE_TOKEN,
            video_token_index=VIDEO_TOKEN,
        )
    if family == "llava":
        return LlavaConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config={"model_type": "clip_vision_model", "projection_dim": HIDDEN_SIZE, **VISION},
            # The last two layers run, and nothing depends on them.
            vision_feature_layer=-3,
            image_token_index=IMAGE_TOKEN,
        )
    if family == "gemma3":
        return Gemma3Config(
            text_config=TEXT | {"sliding_window": 8, "query_pre_attn_scalar": 8},
            vision_config={"model_type": "siglip_vision_model", **VISION},
            image_token_index=IMAGE_TOKEN,
            boi_token_index=START_TOKEN,
            eoi_token_index=END_TOKEN,
            mm_tokens_per_image=4,
        )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = TEXT | {"rope_parameters": rope, "max_position_embeddings": 64}
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN}
    tokens |= {"vision_start_token_id": START_TOKEN, "vision_end_token_id": END_TOKEN}
    vision = QWEN_VISION | {"depth": vision_layers}
    if family == "qwen3_vl":
        from transformers import Qwen3VLConfig

        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)


def make_model(family: str, *, dtype: torch.dtype = torch.float64, vision_layers: int = VISION_LAYERS) -> Any:
    """Makes a model with the same weights on every rank."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    config = make_config(family, vision_layers=vision_layers)
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config)
    if family == "llava":
        add_unused_parameter(model.model.vision_tower.encoder.layers[0])
    return model.to(compute_device(), dtype)


def add_unused_parameter(layer: nn.Module) -> None:
    """Adds a parameter without a gradient to a layer whose other parameters have gradients."""
    layer.register_parameter("unused", nn.Parameter(on_device.ones(3, dtype=next(layer.parameters()).dtype)))


def make_batch(
    family: str, rank: int, *, seed: int, inputs: tuple[str, ...], dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Draws two sequences of one rank, each with the encoder inputs named: "image", "video" (of one frame) or both."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    is_qwen = family.startswith("qwen")

    def random(*shape: int) -> Tensor:
        return on_device.randn(*shape, generator=generator, dtype=dtype)

    ids = on_device.randint(1, 90, (2, 16), generator=generator)
    batch: dict[str, Tensor] = {}
    if "image" in inputs:
        ids[:, 1], ids[:, 2:6], ids[:, 6] = START_TOKEN, IMAGE_TOKEN, END_TOKEN
        batch["pixel_values"] = random(2 * 16, 3 * 2 * 4 * 4) if is_qwen else random(2, 3, 16, 16)
    if "video" in inputs and is_qwen:
        ids[:, 7], ids[:, 8:12], ids[:, 12] = START_TOKEN, VIDEO_TOKEN, END_TOKEN
        batch["pixel_values_videos"] = random(2 * 16, 3 * 2 * 4 * 4)
    elif "video" in inputs:
        ids[:, 7:12] = VIDEO_TOKEN
        batch["pixel_values_videos"] = random(2, 1, 3, 16, 16)
    if family == "gemma3":
        batch["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    if is_qwen:
        batch |= {f"{name}_grid_thw": on_device.tensor([[1, 4, 4]] * 2) for name in inputs}
        batch["mm_token_type_ids"] = (ids == IMAGE_TOKEN).int() + 2 * (ids == VIDEO_TOKEN).int()
    labels = ids.clone()
    labels[:, : 12 + rank] = -100
    batch |= {"input_ids": ids, "labels": labels}
    return {name: tensor.to(compute_device()) for name, tensor in batch.items()}


def true_loss(reference: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Computes the mean over this batch's tokens from full logits in fp64."""
    inputs = {name: t.double() if t.is_floating_point() else t for name, t in batch.items() if name != "labels"}
    logits = reference(**inputs, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), batch["labels"][:, 1:].reshape(-1))
