"""Routing replay of every mixture in transformers: its experts get what was recorded under other weights, or the family
is refused by name, as the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Family, batch_for, build, families
from torch import Tensor, nn

import liger_dist

PAGE = Path(__file__).parents[2] / "docs" / "routing_replay.md"
REFUSED = {
    "jetmoe": "it does not return the result of its last topk with a score of each expert",
    "phimoe": "no module beside the experts",
    "zaya": "it does not return the experts that it is given",
}
"""families by name, and words of the sentence"""
REFUSED_IN_REPLAY = {"diffusion_gemma": "routes of 512 tokens .* are replayed in a call of 2 x 12 tokens"}
QUICK = ("afmoe", "deepseek_v2", "deepseek_v4", "gemma4_text", "granitemoe", "lfm2_moe", "llama4_text", "zaya")


def built(family: Family) -> Any:
    """A model whose own forward runs, and its batch; None for others, of which the page of families has the reason."""
    try:
        model: Any = build(family)
        batch = batch_for(family, model)
        with torch.no_grad():
            model(**batch)
    except Exception:
        return None
    return model, batch


def cases() -> Iterator[Any]:
    for family in families():
        if family.mapping != "seq2seq":
            marks = [] if family.name in QUICK and family.mapping == "causal" else [pytest.mark.nightly]
            yield pytest.param(family, marks=marks, id=str(family))


def integers_of(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor) and not x.is_floating_point() and x.dtype != torch.bool]


@pytest.mark.parametrize("family", cases())
def test_experts_get_what_was_recorded(family: Family) -> None:
    found = built(family)
    if found is None:
        pytest.skip("it cannot be built or called")
    model, batch = found
    try:
        model = liger_dist.wrap(model)
    except liger_dist.LigerDistError:  # its lm_head is no linear map, which routing does not need
        model = liger_dist.wrap(model, config=liger_dist.WrapConfig(fused_loss=False))

    def record() -> liger_dist.Routes:
        with torch.no_grad(), liger_dist.record_routing(model) as routes:
            model(**batch)
        return routes

    if family.name in REFUSED:
        with pytest.raises(liger_dist.LigerDistError, match=REFUSED[family.name]):
            record()
        return
    if not any(re.search("expert|router|moe", name, re.IGNORECASE) for name, _ in model.named_modules()):
        with pytest.raises(liger_dist.LigerDistError, match="has no experts whose routing"):
            record()
        return
    try:
        routes = record()
    except liger_dist.LigerDistError as error:
        if "has no experts whose routing" not in str(error):
            raise
        pytest.skip("it has no experts")
    if family.name in REFUSED_IN_REPLAY:
        with (
            pytest.raises(liger_dist.LigerDistError, match=REFUSED_IN_REPLAY[family.name]),
            liger_dist.replay_routing(model, routes),
        ):
            model(**batch)
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search("gate|router", name):
                parameter.add_(torch.randn_like(parameter), alpha=3 * float(parameter.abs().mean()) + 0.1)
    seen: list[Tensor] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.extend(integers_of((*args, *kwargs.values()))[:1])

    hooks = [
        module.register_forward_pre_hook(partial(note), with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "is_transposed")
    ]
    with liger_dist.replay_routing(model, routes):
        model(**batch)[0].float().mean().backward()
    for hook in hooks:
        hook.remove()
    # Llama 4 gives its experts scores of all, with zeros.
    for given, recorded in zip(seen, routes.experts.values(), strict=bool(seen)):
        assert torch.equal(given.reshape(recorded.shape).long(), recorded)


def test_the_page_names_the_refused_families() -> None:
    sentence = re.search(r"Refused by name: ([^.]*)\.", PAGE.read_text())
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == {*REFUSED, *REFUSED_IN_REPLAY}
