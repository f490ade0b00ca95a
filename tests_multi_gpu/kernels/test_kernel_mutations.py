"""The tests of the kernels can fail: with one line of a kernel changed, a comparison with fp64 does.

In Triton's interpreter, which looks functions up when they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import on_device
import pytest
import torch
import triton
import triton.language as tl
from loss_inputs import DEFAULTS
from test_linear_cross_entropy import test_every_option_matches_fp64 as compares_options
from test_linear_cross_entropy import test_true_class_gradient_as_its_probability_nears_one as compares_likely_label

from liger_dist.losses.cross_entropy import fused_cross_entropy
from liger_dist.losses.execution import Execution
from liger_dist.losses.spec import LossSpec

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels do not look functions up")
cross_entropy = import_module("liger_dist_kernels.cross_entropy")
one_launch = import_module("liger_dist_kernels.one_launch")
logit_rows = import_module("liger_dist_kernels.logit_rows")
own_load, own_write = logit_rows.load_logits, logit_rows.write_gradient_of_piece


@triton.jit
def zeros_beside_the_vocabulary(row_ptr, offs_v, mask_v, *others):  # type: ignore[no-untyped-def]
    z, slope = own_load(row_ptr, offs_v, mask_v, *others)
    return tl.where(mask_v, z, 0.0), slope


@triton.jit
def half_of_the_upstream_gradient(  # type: ignore[no-untyped-def]
    out_row_ptr, row_ptr, label, first, last, class_weight_ptr, softmax, coefficients, *others
):
    halved = coefficients._replace(nll=coefficients.nll * 0.5)
    own_write(out_row_ptr, row_ptr, label, first, last, class_weight_ptr, softmax, halved, *others)


@triton.jit
def target_by_difference(  # type: ignore[no-untyped-def]
    out_row_ptr, row_ptr, label, first, last, class_weight_ptr, softmax, coefficients, *others
):
    distance = tl.load(row_ptr + label) - softmax.row_max
    probability = tl.exp2(distance * 1.4426950408889634 - softmax.log2_total)
    changed = coefficients._replace(miss=1.0 - probability)
    own_write(out_row_ptr, row_ptr, label, first, last, class_weight_ptr, softmax, changed, *others)


def options_with_a_tail() -> None:
    compares_options("plain", "triton")


def given_logits() -> None:
    """Rows of 37 numbers, which are no whole vectors: what lies beside them is masked, not replaced."""
    logits = on_device.randn(4, 37, generator=torch.Generator().manual_seed(0)) - 20.0
    labels = on_device.arange(4)
    execution = Execution(backend="triton")
    loss = fused_cross_entropy(logits, labels, spec=LossSpec(**DEFAULTS, outputs=()), execution=execution).loss
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels))


def likely_label() -> None:
    compares_likely_label("triton")


MUTATIONS: dict[str, tuple[str, Any, Callable[[], None]]] = {
    "logits of 0 beside the vocabulary": ("load_logits", zeros_beside_the_vocabulary, given_logits),
    "upstream gradient": ("write_gradient_of_piece", half_of_the_upstream_gradient, options_with_a_tail),
    "target by a difference": ("write_gradient_of_piece", target_by_difference, likely_label),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_kernel_is_noticed(name: str) -> None:
    function, changed, compares = MUTATIONS[name]
    compares()
    modules = [module for module in (logit_rows, cross_entropy, one_launch) if hasattr(module, function)]
    patches = [mock.patch.object(module, function, changed) for module in modules]
    for patch in patches:
        patch.start()
    try:
        with pytest.raises(AssertionError):
            compares()
    finally:
        for patch in patches:
            patch.stop()
