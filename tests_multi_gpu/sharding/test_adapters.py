"""Which sharding adapter serves a storage of lm_head, and what is said where none does."""

from __future__ import annotations

import pytest


@pytest.mark.smoke
def test_the_reason_comes_first_when_no_adapter_serves() -> None:
    from matrix import SITUATIONS

    from liger_dist.errors import NoAdapterError
    from liger_dist.sharding import choose

    for situation, words in (
        (
            "FSDP2, tied, apart from the embedding",
            "lm_head is tied to the embedding but FSDP2 stores them in two groups",
        ),
        ("ZeRO-3, quantised", "DeepSpeed sends weights or gradients quantised"),
        ("a DTensor sharded by columns", "the weight is placed S(1)"),
        ("the same, global mean, averaged by nothing that is known", "token_mean='global' needs to know"),
    ):
        with pytest.raises(NoAdapterError) as caught:
            choose(SITUATIONS[situation])
        first = str(caught.value).splitlines()[0]
        assert first.startswith(f"no sharding adapter can compute the loss of this lm_head: {words}")
        assert "engine=" not in first
