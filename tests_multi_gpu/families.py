"""A tiny random model of every family in transformers' language-model mappings, from its own default config shrunk by
the names of its numbers, and again with each option of released checkpoints that its default config leaves out."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import on_device
import torch
from torch import Tensor, nn

from liger_dist.sharding.process_groups import compute_device

VOCAB_SIZE = 99
TOKENS = (2, 12)

NAMES_BY_SIZE = {
    32: """
        hidden_size d_model n_embd dim embed_dim emb_dim embedding_size out_hidden_size projection_dim hidden_dim
        encoder_hidden_size text_hidden_size image_text_hidden_size attention_hidden_size lru_width embedding_dim
        input_size hidden_size_global projector_hidden_size output_dim word_embed_proj_dim backbone_hidden_size
        input_embedding_size output_embedding_size ple_embed_dim vision_output_dim image_size resolution
        codebook_size num_embeddings pronunciation_vocab_size shape_vocab_size unit_hifi_gan_vocab_size
    """,
    4: """
        num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads
        num_encoder_attention_heads num_decoder_attention_heads attention_heads swa_num_attention_heads
        conf_num_attention_heads speech_encoder_attention_heads t2u_encoder_attention_heads
        t2u_decoder_attention_heads resampler_heads resampler_n_heads linear_num_heads index_n_heads
        linear_num_value_heads mamba_num_heads mamba_n_heads n_mamba_heads num_experts n_routed_experts
        num_local_experts moe_num_experts
        num_layers n_layer n_layers layers num_hidden_layers encoder_layers decoder_layers num_encoder_layers
        num_decoder_layers depth conf_num_hidden_layers speech_encoder_layers t2u_encoder_layers t2u_decoder_layers
        num_blocks resampler_depth num_layers_per_stack
    """,
    48: """
        intermediate_size ffn_dim d_ff dff dim_ff d_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim mlp_dim
        moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size intermediate_size_mlp
        feed_forward_size moe_shared_expert_intermediate_size shared_experts_intermediate_size
        expert_ffn_hidden_size dense_intermediate_size speech_encoder_intermediate_size t2u_encoder_ffn_dim
        t2u_decoder_ffn_dim alignment_intermediate_size projection_intermediate_size
    """,
    8: """
        head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim linear_head_dim linear_key_head_dim
        linear_value_head_dim kv_channels swa_head_dim index_head_dim dim_head rotary_dim d_head attention_head_size
        resampler_head_dim resampler_dim_head query_pre_attn_scalar attention_head_dim patch_size sliding_window
        window_size sliding_window_size attention_window_size attention_chunk_size
    """,
    16: """
        kv_lora_rank q_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input adapter_rank
        router_hidden_size gated_norm_rank mamba_d_head mamba_head_dim mamba_headdim qk_head_dim num_image_tokens
    """,
    64: """
        max_position_embeddings n_positions n_ctx max_seq_len context_length max_source_positions mamba_d_ssm
        max_target_positions t2u_max_position_embeddings max_sequence_length expert_capacity t2u_vocab_size
    """,
    2: """
        num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups num_filters
        num_experts_per_tok num_experts_per_token moe_k moe_topk index_topk num_kv_shared_layers
    """,
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups mamba_ngroups n_shared_experts",
    97: "ngram_vocab_size_base",
    100: "encoder_hash_byte_group_vocab",
    VOCAB_SIZE: "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size",
}
SIZES = {name: size for size, names in NAMES_BY_SIZE.items() for name in names.split()}
LAYERS = 4
"""enough for every kind of layer that usual patterns alternate"""
LAYER_COUNTS = frozenset(
    name for name in SIZES if "layer" in name or name in ("depth", "num_blocks", "resampler_depth")
)
RANDOM = ("dropout", "pdrop", "layerdrop", "drop_rate", "drop_path", "jitter")
SPECIAL_TOKEN = 95


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a family needs beside shrinking."""

    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, tuple[int, ...] | Tensor] = field(default_factory=dict)
    """further inputs: tensors, or shapes of random ones"""


IMAGE = {"pixel_values": (2, 3, 32, 32)}
FAMILIES: dict[str, Hints] = {
    "bamba": Hints(config={"attn_layer_indices": [1]}),
    "blip": Hints(inputs=IMAGE),
    "deepseek_v2": Hints(config={"num_experts_per_tok": 2}),
    "diffusion_gemma": Hints(
        config={"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}}
    ),
    "dots1": Hints(config={"n_routed_experts": 4, "num_experts_per_tok": 2}),
    "encoder-decoder": Hints(config={"pad_token_id": 0}),
    "falcon_h1": Hints(config={"mamba_d_ssm": 64, "mamba_d_head": 16}),
    "florence2": Hints(
        config={"vision_config": {"embed_dim": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4), "num_groups": (1, 2, 2, 4)}}
    ),
    "git": Hints(inputs=IMAGE),
    "granitemoehybrid": Hints(config={"layer_types": ["linear_attention", "full_attention"] * 2}),
    "jamba": Hints(config={"attn_layer_period": 2, "attn_layer_offset": 1}),
    "janus": Hints(config={"vq_config": {"base_channels": 32}}),
    "led": Hints(config={"attention_window": [4] * LAYERS}),
    "lfm2_moe": Hints(config={"layer_types": ["conv", "full_attention"] * 2}),
    "mamba2": Hints(config={"num_heads": 4, "head_dim": 16}),
    "molmo2": Hints(inputs={"mm_token_type_ids": on_device.zeros(TOKENS, dtype=torch.long)}),
    "muse_spark": Hints(config={"audio_config": {"hidden_sizes": (8, 16, 16, 32)}}),
    "reformer": Hints(config={"is_decoder": True, "axial_pos_shape": (8, 8), "axial_pos_embds_dim": (16, 16)}),
    "udop": Hints(inputs={"bbox": on_device.zeros(*TOKENS, 4)}),
    "xmod": Hints(config={"default_language": "en_XX"}),
}


WINDOWS_FIRST = ["sliding_attention", "full_attention"] * 2
OPTIONS: dict[str, dict[str, Any]] = {
    "shared keys": {"num_kv_shared_layers": 2, "attention_k_eq_v": False, "layer_types": WINDOWS_FIRST},
    "shared keys, wide MLPs": {
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "layer_types": WINDOWS_FIRST,
    },
    "keys as values": {"attention_k_eq_v": True},
    "experts beside MLPs": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 48,
    },
    "soft-capped scores": {"attn_logit_softcapping": 50.0},
    "soft-capped logits": {"final_logit_softcapping": 30.0},
    "windows in some layers": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 2,
        "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 2,
    },
    "a window": {"sliding_window": 8},
    "both directions": {"use_bidirectional_attention": True},
    "both directions of images": {"use_bidirectional_attention": "vision"},
    "next tokens": {"num_nextn_predict_layers": 1},
    "MTP layers": {"num_mtp_layers": 1},
    "query norms": {"use_qk_norm": True},
    "query layer norms": {"qk_layernorm": True},
    "clipped projections": {"clip_qkv": 0.5},
    "multipliers": {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "multipliers of heads": {"lm_head_multiplier": 0.04, "key_multiplier": 0.4, "embedding_multiplier": 5.6},
    "muP": {"mup_enabled": True},
    "head bias": {"lm_head_bias": True},
    "biases": {"use_bias": True},
    "biases of queries": {"use_qkv_bias": True},
    "biases of MLPs": {"mlp_bias": True},
    "biases of attention": {"attention_bias": True},
    "ALiBi": {"alibi": True},
    "new decoder": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "serial residuals": {"use_parallel_residual": False},
    "parallel residuals": {"use_parallel_residual": True},
    "norms after blocks": {"do_layer_norm_before": False},
    "narrow embeddings": {"word_embed_proj_dim": 16},
    "residuals after norms": {"apply_residual_connection_post_layernorm": True},
    "gated MLPs": {"is_gated_act": True, "dense_act_fn": "gelu_new"},
    "scores by layer": {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
    "norms of Mamba": {"mamba_rms_norm": True},
    "router losses": {"output_router_logits": True},
    "normalised experts": {"norm_topk_prob": True},
    "YaRN": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
    "tied": {"tie_word_embeddings": True},
}
"""What released checkpoints set and default configs do not, by its words in the page: an option applies to families
whose text config has all of its fields, some of them with another value."""
QUICK_OPTIONS = (
    *("query norms", "clipped projections", "muP", "head bias", "biases of queries", "ALiBi"),
    *("new decoder", "serial residuals", "parallel residuals", "norms after blocks", "narrow embeddings"),
    *("residuals after norms", "scores by layer"),
)
"""options of few families, which ``make test`` runs; ``make families`` runs all"""
BY_MODULE = ("both directions", "both directions of images")
"""options that set a flag of attention modules, which transformers reads for "sdpa" and not for "eager" """


@dataclass(frozen=True)
class Family:
    """One entry of a mapping."""

    mapping: str
    name: str
    model_class: str
    option: str = ""
    """key of :data:`OPTIONS`; empty for the default config"""

    def __str__(self) -> str:
        return f"{self.mapping} {self.name}" + (f", {self.option}" if self.option else "")


def families() -> list[Family]:
    """Every entry of the causal-LM, image-text-to-text and seq2seq mappings of the installed transformers."""
    from transformers.models.auto import modeling_auto

    mappings = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return [
        Family(mapping, name, model_class)
        for mapping, entries in mappings.items()
        for name, model_class in entries.items()
    ]


def masked_families() -> list[Family]:
    """Every entry of the masked-LM mapping, whose labels are not shifted."""
    from transformers.models.auto import modeling_auto

    return [Family("masked", *entry) for entry in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()]


@cache
def families_with_options() -> list[Family]:
    """Every class of models with every option that applies to it."""
    cases: dict[tuple[str, str], Family] = {}
    for family in families():
        for option in _options_of(family.name):
            cases.setdefault((family.model_class, option), replace(family, option=option))
    return sorted(cases.values(), key=lambda family: list(OPTIONS).index(family.option))


def _options_of(name: str) -> Iterator[str]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[name]()
    except Exception:
        return  # Not built without options either.
    for option, values in OPTIONS.items():
        if _config_with(config, values) is None:
            continue
        given = copy.deepcopy(config)
        with suppress(Exception):  # Some configs refuse the value of another family's field by the same name.
            _give(_config_with(given, values), values)
            yield option


def _give(config: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(config, name, value)


def _config_with(config: Any, values: dict[str, Any]) -> Any:
    """``config``, or its text config, that has all fields of ``values`` and not all of the values; None if neither
    does."""
    for one in (config, getattr(config, "text_config", None)):
        has = {} if one is None else vars(one)
        if values.keys() <= has.keys() and any(has[name] != value for name, value in values.items()):
            rope = has.get("rope_parameters")
            is_plain = isinstance(rope, dict) and rope.get("rope_type") == "default"
            is_window = values.keys() == {"sliding_window"}
            if (is_plain or "rope_parameters" not in values) and not (is_window and has["sliding_window"] is not None):
                return one
    return None


def build(family: Family) -> nn.Module:
    """A tiny random model. Whatever transformers raises, passes."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    model_class: Any = getattr(transformers, family.model_class)
    config = CONFIG_MAPPING[family.name]()
    optional = _config_with(config, OPTIONS[family.option]) if family.option else None
    if any(type(part) is model_class.config_class for part in vars(config).values()):
        # As AutoModelForCausalLM does with the config of a larger model.
        config = config.get_text_config()
    shrink(config, FAMILIES.get(family.name, Hints()).config)
    if optional is not None:
        _give(optional, OPTIONS[family.option])
    if family.option == "tied":
        config.tie_word_embeddings = True
    config._attn_implementation = "sdpa" if family.option in BY_MODULE and model_class._supports_sdpa else "eager"
    # transformers' grouped products take no fp64.
    config._experts_implementation = "eager"
    model = model_class(config)
    assert isinstance(model, nn.Module)
    return model.to(compute_device())


def batch_for(family: Family, model: nn.Module) -> dict[str, Any]:
    """Tokens and labels, and what else the family needs, on the device of ``model``."""
    generator = torch.Generator().manual_seed(0)
    ids = on_device.randint(3, 80, TOKENS, generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    for name, given in FAMILIES.get(family.name, Hints()).inputs.items():
        batch[name] = given if isinstance(given, Tensor) else on_device.randn(given, generator=generator)
    if "use_cache" in inspect.signature(model.forward).parameters:
        batch["use_cache"] = False
    device = next(model.parameters()).device
    return {name: item.to(device) if isinstance(item, Tensor) else item for name, item in batch.items()}


def shrink(config: Any, hints: dict[str, Any]) -> None:
    """Makes ``config`` and the configs inside it small, in place."""
    from transformers import PretrainedConfig

    before = dict(vars(config))
    depths = {value for name, value in before.items() if name in LAYER_COUNTS and isinstance(value, int)}
    for name, value in before.items():
        if isinstance(value, PretrainedConfig):
            shrink(value, hints.get(name, {}))
        elif isinstance(value, bool):
            continue
        elif name in SIZES and isinstance(value, int):
            setattr(
                config, name, SIZES[name] if name in ("head_dim", "num_key_value_heads") else min(value, SIZES[name])
            )
        elif isinstance(value, list | tuple) and len(value) in depths and len(value) > LAYERS:
            setattr(config, name, type(value)(_shortened(list(value))))
        elif isinstance(value, float) and any(part in name for part in RANDOM):
            setattr(config, name, 0.0)
        elif name.endswith("_token_id") and isinstance(value, int) and value >= SPECIAL_TOKEN:
            setattr(config, name, SPECIAL_TOKEN)
        elif name.endswith("_token_id") and isinstance(value, list):
            setattr(config, name, 2)
    _fit_together(config)
    for name, value in hints.items():
        if not isinstance(before.get(name), PretrainedConfig):
            setattr(config, name, value)


def _shortened(values: list[Any]) -> list[Any]:
    """The first ones; kinds of layers that come later take the last places."""
    kept = values[:LAYERS]
    if all(isinstance(value, str) for value in values):
        missing = [kind for kind in dict.fromkeys(values) if kind not in kept]
        kept = kept[: LAYERS - len(missing)] + missing[:LAYERS]
    return kept


def _fit_together(config: Any) -> None:
    """Numbers that have to agree with others."""
    has = {name: value for name, value in vars(config).items() if value is not None}
    if "kv_lora_rank" in has and "num_attention_heads" in has:
        config.num_key_value_heads = config.num_attention_heads
    elif "head_dim" in vars(config) and "head_dim" not in has:
        config.head_dim = 8
    if "num_key_value_heads" in vars(config) and "num_key_value_heads" not in has:
        config.num_key_value_heads = 2
    if has.get("is_encoder_decoder") and "decoder_start_token_id" not in has:
        config.decoder_start_token_id = 0
    rope = has.get("rope_parameters")
    if isinstance(rope, dict):
        half = int(has.get("head_dim", 8) * rope.get("partial_rotary_factor", 1.0)) // 2
        third = max(half // 3, 1)
        for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            parameters["mrope_section"] = [half - 2 * third, third, third]
