"""Tiny random models, data that differs between ranks, and the truth a sharded model is held to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import on_device
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from truth import cross_entropy_truth

from liger_dist.sharding.process_groups import compute_device

VOCAB_SIZE = 101
"""prime: no world size divides it"""
HIDDEN_SIZE = 16
SEQUENCE_LENGTH = 12
BATCH_SIZE = 3


FAMILIES = ("llama", "qwen2", "gemma2")
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "falcon_h1": {"head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "granitemoehybrid": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "num_local_experts": 0,
        "shared_intermediate_size": 24,
        "embedding_multiplier": 1.0,
    },
    "mamba2": {"num_heads": 4, "head_dim": 8, "state_size": 8, "n_groups": 1},
}
"""families with recurrent or convolution layers, and what their tiny configs have beside the usual sizes"""


OWN_ATTENTION: dict[str, dict[str, Any]] = {
    "bloom": {"n_layer": 2, "n_head": 2},
    "gpt2": {"n_layer": 2, "n_head": 2, "n_embd": HIDDEN_SIZE, "n_positions": 64}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": HIDDEN_SIZE, "max_position_embeddings": 64, "dropout": 0.0}
    | {"enable_bias": False},
    "mpt": {"d_model": HIDDEN_SIZE, "n_layers": 2, "n_heads": 2, "max_seq_len": 64},
}
"""families with attention or masks of their own, and what their tiny configs have beside the usual sizes"""


MIXING: dict[str, dict[str, Any]] = {
    "ernie": {"intermediate_size": 24, "max_position_embeddings": 64}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    # verl reads it of every config.
    | {"num_key_value_heads": 2},
}
"""families whose attention mixes packed documents, and what their tiny configs have beside the usual sizes"""


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 8, "num_experts": 6, "moe_intermediate_size": 8, "norm_topk_prob": True},
    "qwen3_moe, 8 experts": {"head_dim": 8, "num_experts": 8, "moe_intermediate_size": 8, "norm_topk_prob": True},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 6, "sliding_window": 4, "attn_implementation": "eager"},
}
"""families with experts, and what their tiny configs have beside the usual sizes"""


def make_config(family: str, *, tied: bool = False, padded: bool = True, heads: int = 2) -> Any:
    from transformers import Gemma2Config, LlamaConfig, Qwen2Config, T5Config

    if family == "t5":
        return T5Config(
            vocab_size=VOCAB_SIZE,
            d_model=HIDDEN_SIZE,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=heads,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            initializer_factor=0.3,
            tie_word_embeddings=tied,
            decoder_start_token_id=0,
            attn_implementation="eager",
        )
    if family in HYBRIDS:
        return _make_hybrid(family, tied)
    if family in MIXTURES:
        return _make_mixture(family, tied, heads)
    if family in OWN_ATTENTION or family in MIXING:
        return _make_own_attention(family, tied)
    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "gemma2": Gemma2Config}
    extra: dict[str, Any] = {"head_dim": 8} if family == "gemma2" else {}
    return classes[family](
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads if heads > 2 else 1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        # Larger than usual, so that gradients are not all alike.
        initializer_range=0.3,
        # Eager attention computes its softmax in fp32, in fp64 models too; only it has soft-capped scores.
        attn_implementation="eager" if family == "gemma2" else "sdpa",
        pad_token_id=0 if padded else None,
        **extra,
    )


def _make_hybrid(family: str, tied: bool) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "num_hidden_layers": 2, "initializer_range": 0.3}
    if family != "mamba2":
        sizes |= {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return CONFIG_MAPPING[family](**sizes, tie_word_embeddings=tied, pad_token_id=0, **HYBRIDS[family])


def _make_own_attention(family: str, tied: bool) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    sizes: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.3, "attn_implementation": "eager"}
    if family in ("bloom", "opt", "ernie"):
        sizes |= {"hidden_size": HIDDEN_SIZE, "num_hidden_layers": 2, "num_attention_heads": 2}
    more: dict[str, Any] = {"init_std": 0.3} if family == "opt" else {}
    more |= (OWN_ATTENTION | MIXING)[family]
    return CONFIG_MAPPING[family](**sizes, tie_word_embeddings=tied, pad_token_id=0, **more)


def _make_mixture(family: str, tied: bool, heads: int) -> Any:
    """The experts are the model's own, one after the other: the truth."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[family.partition(",")[0]](
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=heads if heads > 2 else 1,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        pad_token_id=0,
        experts_implementation="eager",
        **MIXTURES[family],
    )


def make_model(
    family: str,
    *,
    tied: bool = False,
    padded: bool = True,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    heads: int = 2,
    bias: bool = False,
) -> nn.Module:
    """The same weights on every rank."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    torch.manual_seed(seed)
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model = auto.from_config(make_config(family, tied=tied, padded=padded, heads=heads)).to(dtype)
    if bias:
        model.lm_head.bias = nn.Parameter(on_device.randn(VOCAB_SIZE, dtype=dtype))
    assert isinstance(model, nn.Module)
    return model.to(compute_device())


def make_batch(rank: int, *, num_ignored: int | None = None, seed: int = 0, rows: str = "texts") -> dict[str, Tensor]:
    """Tokens of one rank. Ranks have different numbers of valid labels; ``num_ignored`` sets it for one sequence.

    Args:
        rows: a key of ``cells.Rows``.
    """
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    ids = on_device.randint(1, VOCAB_SIZE, (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, : (2 + 3 * rank) if num_ignored is None else num_ignored] = -100
    batch = {"input_ids": ids, "labels": labels}
    if rows.startswith("packed"):
        _pack(batch, generator, by_lengths=rows == "packed, by lengths")
    elif rows == "padded":
        _pad(batch)
    device = compute_device()
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def _pack(batch: dict[str, Any], generator: torch.Generator, *, by_lengths: bool) -> None:
    """Rows of several documents, cut at random; the first token of a document is predicted from nothing."""
    lengths: list[int] = []
    positions = []
    for _ in range(BATCH_SIZE):
        cuts = (1 + on_device.randperm(SEQUENCE_LENGTH - 1, generator=generator)[:2]).sort().values.tolist()
        row = [end - start for start, end in zip([0, *cuts], [*cuts, SEQUENCE_LENGTH], strict=True)]
        positions.append(torch.cat([on_device.arange(length) for length in row]))
        lengths += row
    batch["position_ids"] = torch.stack(positions)
    batch["labels"][batch["position_ids"] == 0] = -100
    if by_lengths:
        ends = on_device.tensor([0, *lengths]).cumsum(0).int()
        longest = max(lengths)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _pad(batch: dict[str, Any]) -> None:
    """One row padded on the left, one on the right, one not at all."""
    mask = torch.ones_like(batch["input_ids"])
    mask[0, :3] = 0
    mask[1, -5:] = 0
    batch["attention_mask"] = mask
    batch["labels"][mask == 0] = -100
    batch["labels"][0, 3] = -100


def documents_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The documents of a packed batch, or the texts of a padded one, each by itself."""
    if "attention_mask" in batch:
        return [
            {name: batch[name][row][mask.bool()][None] for name in ("input_ids", "labels")}
            for row, mask in enumerate(batch["attention_mask"])
        ]
    tokens = {name: batch[name].flatten() for name in ("input_ids", "labels")}
    starts = (batch["position_ids"].flatten() == 0).nonzero()[:, 0].tolist()
    spans = zip(starts, [*starts[1:], batch["input_ids"].numel()], strict=True)
    return [{name: value[None, start:end] for name, value in tokens.items()} for start, end in spans]


def true_loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """Sum of token losses of the unwrapped ``model`` in its own dtype, and the number of valid tokens.

    From its logits: the model's own loss goes through fp32 and would not be the truth.
    """
    is_encoder_decoder = model.config.is_encoder_decoder  # type: ignore[union-attr]
    # The state of a recurrent layer runs over padding before a text.
    is_hybrid = model.config.model_type in HYBRIDS  # type: ignore[union-attr]
    if "position_ids" in batch or ("attention_mask" in batch and is_hybrid):
        sums, counts = zip(*(true_loss_sum(model, document) for document in documents_of(batch)), strict=True)
        return torch.stack(sums).sum(), sum(counts)
    labels = batch["labels"]
    if is_encoder_decoder:
        started = model._shift_right(labels)  # type: ignore[operator]
        logits = model(input_ids=batch["input_ids"], decoder_input_ids=started, use_cache=False).logits
    else:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        logits, labels = model(**inputs, use_cache=False).logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), reduction="sum")
    return total, int((labels != -100).sum())


def true_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Logits ``[B, S, V]`` of the unwrapped ``model``, each document of packed rows alone."""
    if "position_ids" not in batch:
        return model(input_ids=batch["input_ids"], use_cache=False).logits  # type: ignore[no-any-return]
    alone = [model(input_ids=one["input_ids"], use_cache=False).logits for one in documents_of(batch)]
    return torch.cat(alone, 1).view(*batch["input_ids"].shape, -1)


def policy_arguments(batch: dict[str, Tensor], *, has_support: bool = False) -> dict[str, Any]:
    """Keywords of a call that asks for every differentiable output, with a temperature and three classes for each
    token: one of them twice, and none for some. With a support, the classes of which the next token was sampled."""
    generator = torch.Generator().manual_seed(int(batch["labels"].sum()) % 1000)
    shape = batch["labels"].shape
    ids = on_device.randint(VOCAB_SIZE, (*shape, 3), generator=generator)
    ids[..., 1] = ids[..., 0]
    ids[:, ::3, 2] = -1
    temperature = 0.5 + on_device.rand(shape, generator=generator, dtype=torch.float64)
    if has_support:
        ids = on_device.rand((*shape, VOCAB_SIZE), generator=generator).argsort(-1)[..., :9].cpu()
        following = F.pad(batch["labels"][:, 1:].cpu(), (0, 1), value=-100)[..., None]
        ids = torch.cat([ids.where(ids != following, -1), following.clamp_min(-1)], -1)
        ids[:, ::4] = -1
    return {
        "temperature": temperature.to(compute_device()),
        "support_ids" if has_support else "token_ids": ids.to(compute_device()),
        "outputs": POLICY_OUTPUTS,
        "differentiable": True,
    }


def policy_objective(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """A sum over the outputs of one rank's tokens, with factors of either sign for each."""
    generator = torch.Generator().manual_seed(int(batch["labels"].sum()) % 997)
    total = torch.zeros((), dtype=torch.float64, device=compute_device())
    for name in POLICY_OUTPUTS:
        values = getattr(output, name)
        total = total + (on_device.randn(values.shape, generator=generator).to(values) * values).sum()
    return total


POLICY_OUTPUTS = ("log_prob", "log_prob_at", "entropy", "sum_sq_prob")


def true_policy_sum(model: nn.Module, batch: dict[str, Tensor], *, has_support: bool = False) -> tuple[Tensor, int]:
    """The sum of token losses and of :func:`policy_objective`, from the logits of the unwrapped ``model``."""
    given, labels = policy_arguments(batch, has_support=has_support), F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    logits = true_logits(model, batch)
    truth = cross_entropy_truth(
        logits.flatten(0, 1),
        labels.flatten(),
        temperature=given["temperature"].flatten(),
        **{name: given[name].flatten(0, 1) for name in ("token_ids", "support_ids") if name in given},
        reduction="sum",
    )
    values = {name: getattr(truth, name).unflatten(0, labels.shape) for name in POLICY_OUTPUTS}
    output = SimpleNamespace(**values)
    return truth.loss + policy_objective(output, batch), int((labels != -100).sum())


def soft_arguments(batch: dict[str, Tensor]) -> dict[str, Any]:
    """Keywords of a call with probabilities of four classes of each token: one of them the next token, one of them
    twice, and none for some; the rest of the probability for all other classes."""
    generator = torch.Generator().manual_seed(int(batch["labels"].sum()) % 991)
    shape = batch["labels"].shape
    ids = on_device.randint(VOCAB_SIZE, (*shape, 4), generator=generator)
    ids[:, :-1, 0] = batch["labels"][:, 1:].clamp_min(0).cpu()
    ids[..., 2] = ids[..., 1]
    ids[:, ::3, 3] = -1
    probs = 0.8 * on_device.randn((*shape, 4), generator=generator, dtype=torch.float64).softmax(-1)
    return {
        "soft_labels": (ids.to(compute_device()), probs.to(compute_device())),
        "soft_weight": 0.6,
        "remainder": "spread",
    }


def true_soft_sum(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    """The sum of the token losses of :func:`soft_arguments`, from the logits of the unwrapped ``model``."""
    given, labels = soft_arguments(batch), F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    logits = true_logits(model, batch)
    given["soft_labels"] = tuple(values.flatten(0, 1) for values in given["soft_labels"])
    truth = cross_entropy_truth(logits.flatten(0, 1), labels.flatten(), reduction="sum", **given)
    return truth.loss, int((labels != -100).sum())


def full(tensor: Tensor) -> Tensor:
    """A whole tensor from a possibly sharded one (a collective when it is)."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().to(compute_device())


def relative_errors(
    gradients: dict[str, Tensor], truths: dict[str, Tensor], *, floor: float = 1e-4
) -> dict[str, float]:
    """Computes the largest difference of each gradient, relative to its largest true entry.

    Some gradients are zero in exact arithmetic (a key bias shifts all scores alike); they are held to ``floor`` of the
    largest entry of all. A gradient without a truth is compared with zero.

    Raises:
        KeyError: a truth without a gradient.
    """
    if not truths.keys() <= gradients.keys():
        raise KeyError(f"no gradients of {sorted(truths.keys() - gradients.keys())}")
    largest = max(float(truth.abs().max()) for truth in truths.values())
    errors = {}
    for name, gradient in gradients.items():
        truth = truths.get(name, torch.zeros_like(gradient))
        scale = max(float(truth.abs().max()), floor * largest) or 1.0
        errors[name] = float((gradient - truth).abs().max()) / scale
    return errors


def norm_errors(gradients: dict[str, Tensor], truths: dict[str, Tensor]) -> dict[str, float]:
    """Computes the error of each gradient relative to its true norm plus a thousandth of the norm of all: some are
    zero but for rounding."""
    assert gradients.keys() == truths.keys()
    total = float(torch.stack([truth.norm() for truth in truths.values()]).norm())
    return {
        name: float((gradients[name] - truth).norm() / (truth.norm() + 1e-3 * total)) for name, truth in truths.items()
    }


def assert_below(errors: dict[str, float], tolerance: float, where: str = "") -> None:
    """Asserts that there are errors, each below ``tolerance``, which NaN is not."""
    assert errors, where
    wrong = {name: f"{error:.2e}" for name, error in errors.items() if not error < tolerance}
    assert not wrong, f"{where}{': ' * bool(where)}expected errors below {tolerance:.0e}; found {wrong}"


def gradient_errors(model: nn.Module, reference: nn.Module) -> dict[str, float]:
    """Computes :func:`relative_errors` of a wrapped model; parameters without a true gradient have none."""
    inner = model.module if hasattr(model, "module") else model
    wrapped = dict(inner.named_parameters())
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert any(truth.any() for truth in truths.values())
    found = {}
    for name, _ in reference.named_parameters():
        gradient = wrapped[name].grad
        assert (gradient is None) == (name not in truths), name
        if gradient is not None:
            found[name] = full(gradient)
    return relative_errors(found, truths)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(wrapped: Any, own: Any, batch: dict[str, Any]) -> None:
    """One call of each: the loss and every gradient."""
    losses = []
    for model in (wrapped, own):
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        losses.append(float(loss.detach()))
    # transformers computes the loss, and eager attention its softmax, in fp32.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    mine, theirs = gradients(wrapped), gradients(own)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert torch.allclose(mine[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()) + 1e-12), name
