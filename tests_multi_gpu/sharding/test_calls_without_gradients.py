"""All-gathers of evaluation and generate of a model that FSDP2 shards; test_passes has what they leave to training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from models import make_batch, make_model

import liger_dist


def evaluate(model: Any) -> None:
    assert model(**make_batch(dist.get_rank(), seed=7)).loss > 0


def generate(model: Any) -> None:
    ids = make_batch(dist.get_rank(), seed=7)["input_ids"]
    assert model.generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


@pytest.mark.smoke
def test_generate_gathers_what_stays_unsharded_once(workers_2: Workers) -> None:
    """Not once for each token: lm_head and final norm stay for the tokens of a call."""
    for gathers in workers_2.run(gathers_of_lm_head):
        assert gathers == {"for generate": 1, "for two evaluations": 2, "of a frozen model": 2}


def gathers_of_lm_head() -> dict[str, int]:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    counted: list[int] = []
    own = FSDPParamGroup.unshard

    def unshard(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not group.is_unsharded and any(p._module_info.module is head for p in group.fsdp_params):
            counted.append(1)
        return own(group, *args, **kwargs)

    FSDPParamGroup.unshard = unshard  # type: ignore[method-assign]
    found = {}
    try:
        model: Any = liger_dist.wrap(make_model("llama"), "fsdp2")
        head = model.lm_head
        with torch.no_grad():
            generate(model)
            found["for generate"] = len(counted)
            counted.clear()
            evaluate(model)
            evaluate(model)
            found["for two evaluations"] = len(counted)
            counted.clear()
            model.requires_grad_(False)
            evaluate(model)
            evaluate(model)
            found["of a frozen model"] = len(counted)
    finally:
        FSDPParamGroup.unshard = own  # type: ignore[method-assign]
    return found
