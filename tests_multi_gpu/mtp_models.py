"""Models with multi-token prediction, and the truth they are held to: own loops over single documents, on full
logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import documents_of, make_model
from torch import Tensor, nn

from liger_dist.mtp import MultiTokenPrediction


def make_mtp(
    family: str = "llama", *, depth: int = 2, dtype: torch.dtype = torch.float64, seed: int = 1, **options: Any
) -> Any:
    """The same weights on every rank."""
    made = {name: options.pop(name) for name in ("tied", "bias", "heads") if name in options}
    return add_mtp(make_model(family, dtype=dtype, **made), depth=depth, dtype=dtype, seed=seed, **options)


def add_mtp(model: Any, *, depth: int, dtype: torch.dtype, seed: int = 1, **options: Any) -> Any:
    """Adds modules with the same weights on every rank."""
    torch.manual_seed(seed)
    MultiTokenPrediction(model, depth, **options)
    model.mtp.to(dtype)
    for name, parameter in model.mtp.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


def parts_of(modules: Any, depth: int) -> tuple[nn.Module, ...]:
    """Norm of embeddings, norm of hidden states, projection, decoder layer and norm of a depth."""
    layer = modules.layers[depth]
    if modules.is_flat:
        return modules.pre_fc_norm_embedding, modules.pre_fc_norm_hidden, modules.fc, layer, modules.norm
    return layer.enorm, layer.hnorm, layer.eh_proj, layer.mtp_block, layer.post_norm


def true_mtp_losses(model: Any, batch: dict[str, Any]) -> list[tuple[Tensor, int]]:
    """Sum over tokens and number of labels of the loss of the next token and of each depth, each document alone."""
    if "position_ids" in batch or "attention_mask" in batch:
        found = [true_mtp_losses(model, document) for document in documents_of(batch)]
        return [(torch.stack([t for t, _ in one]).sum(), sum(n for _, n in one)) for one in zip(*found, strict=True)]
    ids, labels, decoder = batch["input_ids"], batch["labels"], model.get_decoder()
    hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    embeddings = model.get_input_embeddings()(ids)
    losses = [_loss(model, hidden, labels, 1)]
    for depth in range(model.mtp.depth):
        embedding_norm, hidden_norm, projection, layer, norm = parts_of(model.mtp, depth)
        tokens = hidden.shape[1] - 1
        if tokens > 0:
            both = torch.cat([embedding_norm(embeddings[:, depth + 1 :]), hidden_norm(hidden[:, :-1])], -1)
            states = projection(both)
            positions = torch.arange(tokens, device=ids.device)[None]
            mask = torch.full((tokens, tokens), float("-inf"), dtype=states.dtype, device=ids.device).triu(1)
            output = layer(
                states,
                attention_mask=mask[None, None].expand(len(ids), 1, -1, -1),
                position_embeddings=decoder.rotary_emb(states, positions),
                position_ids=positions,
            )
            hidden = norm(output[0] if isinstance(output, tuple) else output)
        else:
            hidden = hidden[:, :0]
        losses.append(_loss(model, hidden, labels, depth + 2))
    return losses


def _loss(model: Any, hidden: Tensor, labels: Tensor, ahead: int) -> tuple[Tensor, int]:
    targets = labels[:, ahead:]
    count = int((targets != -100).sum())
    logits = model.lm_head(hidden[:, : targets.shape[1]])
    cap = getattr(model.config, "final_logit_softcapping", None)
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, count
