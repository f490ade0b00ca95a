"""The conformance suite can fail: with one line of the library taken away, a cell of it does."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
from cells import DDP, Cell, _fsdp1, _fsdp2
from harness import Workers
from test_conformance import skip_without, train
from torch.distributed.tensor import Replicate

import liger_dist
from liger_dist.fused_head import loss_call, probe
from liger_dist.fused_head.wrapper_redirect import WrapperRedirect
from liger_dist.fused_layers import norm
from liger_dist.losses import embedding, rows
from liger_dist.losses import tensor_parallel as losses_of_row_shards
from liger_dist.losses.token_exchange import ExchangedTokens
from liger_dist.sharding import tensor_parallel
from liger_dist.sharding.base import DataParallel
from liger_dist.sharding.fsdp1 import FSDP1Adapter
from liger_dist.sharding.fsdp2 import strategy as fsdp2
from liger_dist.sharding.fsdp2.strategy import FSDP2Gathered
from liger_dist.sharding.single import Replicated
from liger_dist.sharding.vocab_parallel import RowSharding
from liger_dist.trials.kinds import Trial

TP = Cell(engine="tp", world=4)
PLANNED = Cell(engine="tp", layout={"plan": "transformers"})
TIED_APART = replace(_fsdp1(own_unit=True, use_orig_params=False), model="tied")


def no_reduction_of_the_hidden_gradient() -> Any:
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None

    return mock.patch.object(losses_of_row_shards.SumGradient, "backward", staticmethod(backward))


def gradient_taken_for_reduced() -> Any:
    return mock.patch.object(tensor_parallel, "Partial", Replicate)


def rows_counted_from_the_local_number() -> Any:
    def first_row(weight: Any) -> int:
        return int(weight.device_mesh.get_local_rank() * weight.to_local().shape[0])

    return mock.patch.object(tensor_parallel, "first_row", first_row)


def statistics_added_without_a_common_maximum() -> Any:
    own = losses_of_row_shards.merge_statistics

    def merge(slices: Any, backend: Any) -> Any:
        return own(slices, backend)._replace(sum_other_T=slices.sum_other_T.sum(0))

    return mock.patch.object(losses_of_row_shards, "merge_statistics", merge)


def no_divide_factor(adapter: type) -> Any:
    own = adapter.data_parallel  # type: ignore[attr-defined]

    def data_parallel(self: Any, head: Any, model: Any) -> DataParallel:
        return DataParallel(groups=own(self, head, model).groups, divide_factor=1.0)

    return mock.patch.object(adapter, "data_parallel", data_parallel)


def no_check_of_tied_weights() -> Any:
    return mock.patch.object(FSDP1Adapter, "not_supported_reasons", return_value=[])


def no_redirect() -> Any:
    return mock.patch.object(WrapperRedirect, "redirects", return_value=None)


def upstream_gradient_forgotten() -> Any:
    own = rows.scaled
    return mock.patch.object(
        rows,
        "scaled",
        lambda gradient, scale, dtype, *, backend: own(gradient, scale / scale, dtype, backend=backend),
    )


def lora_ignored() -> Any:
    return mock.patch.object(loss_call, "effective_head", lambda base, forward, hidden_states: base)


def every_label_taken_for_the_next_tokens() -> Any:
    return mock.patch.object(probe, "alignments", _next_tokens)


def _next_tokens(labels: torch.Tensor, *_: Any) -> Any:
    return [("next", on_device.arange(labels.numel()))]


def one_embedding_split_of_several() -> Any:
    own = tensor_parallel.parallelize_heads

    def parallelize(outer: Any, model: Any, structure: Any, **options: Any) -> None:
        own(outer, model, replace(structure, tied_to=structure.tied_to[:1]), **options)

    return mock.patch.object(tensor_parallel, "parallelize_heads", parallelize)


def norm_gradient_without_its_projection() -> Any:
    own = norm.norm_bwd

    def norm_bwd(d_y: Any, x: Any, mean: Any, rstd: Any, weight: Any, **options: Any) -> Any:
        gradients = own(d_y, x, mean, rstd, weight, **options)
        return gradients._replace(d_x=d_y * (1.0 if weight is None else weight) * rstd.view(*x.shape[:-1], 1))

    return mock.patch.object(norm, "norm_bwd", norm_bwd)


def trusting_every_probe() -> Any:
    """So that a wrong kernel is not simply left out by its probe."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(Trial, "agrees", return_value=True))
    return stack


def rows_not_averaged() -> Any:
    return mock.patch.object(fsdp2, "_divide_factor", return_value=1.0)


def rows_of_replicas_not_added_up() -> Any:
    return mock.patch.object(RowSharding, "local", lambda self, parameter: parameter.to_local())


def part_of_the_own_rows_taken_for_the_sum() -> Any:
    def add_received(self: Any) -> None:
        if self._sent is not None:
            self._leaving.wait()
            self._received_GmD[self._size // 2 :] = 0
        own(self)

    own = ExchangedTokens._add_received
    return mock.patch.object(ExchangedTokens, "_add_received", add_received)


def ids_of_others_not_looked_up() -> Any:
    original = embedding._Lookup.local_rows

    def local_rows(self: Any, ids_Gm: Any, num_rows: int) -> Any:
        rows, is_local = original(self, ids_Gm, num_rows)
        return rows, is_local & (torch.arange(len(rows), device=rows.device) % 5 > 0)

    return mock.patch.object(embedding._Lookup, "local_rows", local_rows)


FP32 = replace(DDP, model="fp32")
ROWS = _fsdp2(rows=True)
MUTATIONS = {
    "LoRA on the head": (lora_ignored, replace(_fsdp2(), model="LoRA on the head")),
    "labels of an encoder-decoder": (every_label_taken_for_the_next_tokens, replace(DDP, model="encoder-decoder")),
    "several tied embeddings": (one_embedding_split_of_several, replace(TP, model="encoder-decoder")),
    "norm gradient": (norm_gradient_without_its_projection, FP32),
    "gradient reduction": (no_reduction_of_the_hidden_gradient, PLANNED),
    "gradient reduction of DTensors": (gradient_taken_for_reduced, TP),
    "row offset": (rows_counted_from_the_local_number, TP),
    "common maximum": (statistics_added_without_a_common_maximum, TP),
    "divide factor of DDP": (lambda: no_divide_factor(Replicated), replace(DDP, data="global mean")),
    "divide factor of FSDP1": (
        lambda: no_divide_factor(FSDP1Adapter),
        replace(_fsdp1(own_unit=True), data="global mean"),
    ),
    "divide factor of FSDP2": (lambda: no_divide_factor(FSDP2Gathered), replace(_fsdp2(), data="global mean")),
    "divide factor of rows": (rows_not_averaged, ROWS),
    "replicas of rows": (rows_of_replicas_not_added_up, _fsdp2(rows=True, axes=("replicate", "shard"))),
    "parts of the hidden gradient": (part_of_the_own_rows_taken_for_the_sum, ROWS),
    "lookup in rows": (ids_of_others_not_looked_up, replace(ROWS, model="tied")),
    "tied-weight check": (no_check_of_tied_weights, TIED_APART),
    "redirect": (no_redirect, replace(DDP, use="outside the root")),
    "upstream gradient": (upstream_gradient_forgotten, replace(_fsdp2(), accumulation=2)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_taken_away_is_missed(name: str, workers_2: Workers, workers_4: Workers) -> None:
    cell = MUTATIONS[name][1]
    skip_without(cell)
    workers = workers_2 if cell.world == 2 else workers_4
    try:
        largest = max(workers.run(largest_error, name))
    except RuntimeError as error:
        # On a GPU the comparison of tokens ends the program, at whatever operation comes next, or in a destructor.
        endings = ("device-side assert", "CUDA error", "the process died, exit code -6")
        if not (torch.cuda.is_available() and any(words in str(error) for words in endings)):
            raise
        return
    assert largest > 100 * cell.tolerance


def largest_error(name: str) -> float:
    mutate, cell = MUTATIONS[name]
    # After the probes, which would leave a wrong kernel out.
    with trusting_every_probe(), mutate():
        try:
            errors = train(replace(cell, refused="")).values()
        except (liger_dist.LigerDistError, KeyError, AssertionError):
            # Two lines guard it, and the other one has spoken; a parameter has no gradient at all; or the cell has
            # noticed what the session has made of the model.
            return math.inf
    return math.inf if any(map(math.isnan, errors)) else max(errors)
