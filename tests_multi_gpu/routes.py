"""Experts that an inference engine might have chosen, and routers that take them, written by hand: the truth of routing
replay."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Router = Callable[..., Any]


def routers_of(model: nn.Module) -> list[Any]:
    """In the order of their layers."""
    return [module for module in model.modules() if type(module).__name__ in BY_HAND]


def routes_for(batch: dict[str, Tensor], model: nn.Module, *, unknown: bool = True) -> Tensor:
    """Experts ``[layers, tokens, k]`` that depend on the tokens alone, with -1 for the last token of each row."""
    tokens, routers = batch["input_ids"].cpu(), routers_of(model)
    generator = torch.Generator().manual_seed(int(tokens.sum()) % 983)
    shape = (len(routers), *tokens.shape, routers[0].num_experts)
    routes = torch.rand(shape, generator=generator, device="cpu").argsort(-1)[..., : routers[0].top_k]
    if unknown:
        routes[:, :, -1] = -1
    return routes.flatten(1, 2)


@contextmanager
def by_hand(model: nn.Module, routes: Tensor) -> Iterator[None]:
    """Within, the routers of ``model`` take these experts, by the code of this file; calls with documents one after
    another take theirs in this order."""
    with ExitStack() as stack:
        for router, of_layer in zip(routers_of(model), routes, strict=True):
            rule = BY_HAND[type(router).__name__]

            forward = partial(_forward, rule, router, deque(of_layer))
            stack.enter_context(mock.patch.object(router, "forward", forward))
        yield


def _forward(rule: Router, router: Any, routes: deque[Tensor], hidden: Tensor, *args: Any) -> Any:
    rows = hidden.reshape(-1, hidden.shape[-1])
    chosen = torch.stack([routes[row] for row in range(len(rows))])
    routes.rotate(-len(rows))
    return rule(router, chosen, rows, *args)


def _taken(routes: Tensor, choice: Tensor, k: int) -> Tensor:
    own = choice.topk(k, dim=-1).indices
    return torch.where(routes.to(own.device) < 0, own, routes.to(own.device))


def _softmax_of_all(router: Any, routes: Tensor, hidden: Tensor) -> Any:
    logits = F.linear(hidden, router.weight)
    probs = logits.softmax(-1, dtype=torch.float)
    experts = _taken(routes, probs, router.top_k)
    scores = probs.gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        scores = scores / scores.sum(-1, keepdim=True)
    return logits, scores.to(logits.dtype), experts


def _softmax_of_chosen(router: Any, routes: Tensor, hidden: Tensor) -> Any:
    logits = F.linear(hidden, router.weight, router.bias)
    experts = _taken(routes, logits, router.top_k)
    return logits, logits.gather(1, experts).softmax(-1), experts


def _sigmoid_with_groups(router: Any, routes: Tensor, hidden: Tensor) -> Any:
    logits = F.linear(hidden.float(), router.weight.float())
    scores = logits.sigmoid()
    choice = scores + router.e_score_correction_bias
    groups = choice.view(len(choice), router.num_group, -1).topk(2, -1).values.sum(-1)
    allowed = torch.zeros_like(groups).scatter(1, groups.topk(router.topk_group, -1).indices, 1.0) > 0
    choice = choice.masked_fill(~allowed.repeat_interleave(choice.shape[1] // groups.shape[1], 1), -torch.inf)
    experts = _taken(routes, choice, router.top_k)
    weights = scores.gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return logits, weights * router.routed_scaling_factor, experts


def _softmax_with_groups(router: Any, routes: Tensor, hidden: Tensor) -> Any:
    logits = F.linear(hidden.float(), router.weight.float())
    scores = logits.softmax(-1)
    groups = scores.view(len(scores), router.num_group, -1).max(-1).values
    allowed = torch.zeros_like(groups).scatter(1, groups.topk(router.topk_group, -1).indices, 1.0) > 0
    choice = scores.masked_fill(~allowed.repeat_interleave(scores.shape[1] // groups.shape[1], 1), 0.0)
    experts = _taken(routes, choice, router.top_k)
    return logits, scores.gather(1, experts) * router.routed_scaling_factor, experts


def _sigmoid_in_place(router: Any, routes: Tensor, hidden: Tensor) -> Any:
    logits = F.linear(hidden, router.weight)
    experts = _taken(routes, logits, router.top_k)
    chosen = torch.full_like(logits, -torch.inf).scatter(1, experts, logits.gather(1, experts))
    return chosen.float().sigmoid().to(logits.dtype), logits


BY_HAND: dict[str, Router] = {
    "Qwen3MoeTopKRouter": _softmax_of_all,
    "MixtralTopKRouter": _softmax_of_all,
    "GptOssTopKRouter": _softmax_of_chosen,
    "DeepseekV2TopkRouter": _softmax_with_groups,
    "DeepseekV3TopkRouter": _sigmoid_with_groups,
    "Llama4Router": _sigmoid_in_place,
}
