"""Forwards of recurrent layers with functions replaced: causal convolutions by kernels, and recurrences of other
packages by calls with the lengths of documents."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Callable
from inspect import Parameter, signature, unwrap
from types import ModuleType
from typing import Any

import pytest
import torch
from documents import alone, assert_equal, packed, trained, wrapped
from documents import quiet as quiet
from models import HYBRIDS, make_model
from torch import Tensor

import liger_dist
from liger_dist.fused_layers.convolution import is_causal_convolution

FP32 = 1e-4
"""tolerance of models in fp32, relative to the unwrapped model in fp64"""
RECURRENCES = {
    "qwen3_5_text": ("qwen3_5", "torch_chunk_gated_delta_rule", "cu_seqlens"),
    "mamba2": ("mamba2", "mamba2_chunk_scan", "seq_idx"),
    "falcon_h1": ("falcon_h1", "mamba2_chunk_scan", "seq_idx"),
}
"""modelling file of a family, its function for the recurrence, and the parameter for documents of the package's"""


def model_of(family: str) -> Any:
    return make_model(family).float()


@pytest.mark.parametrize("family", HYBRIDS)
def test_convolutions_by_kernels(family: str) -> None:
    batch = packed([5, 1, 13, 9])
    want = alone(make_model(family), batch)
    model = wrapped(model_of(family))
    report = liger_dist.explain(model).layers
    assert sum(count for what, count in report.swapped if ": convolution" in what) > 0
    assert_equal(trained(model, batch), want, FP32)
    without = wrapped(model_of(family), layer_kernels=False)
    assert not liger_dist.explain(without).layers.swapped
    assert_equal(trained(without, batch), want, FP32)


def test_generation_with_convolutions_by_kernels() -> None:
    ids = packed([9])["input_ids"]
    results = [
        model.eval().generate(ids, max_new_tokens=6, do_sample=False)
        for model in (model_of("qwen3_5_text"), wrapped(model_of("qwen3_5_text")))
    ]
    assert torch.equal(*results)


def test_a_patched_convolution_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    modelling = importlib.import_module("transformers.models.lfm2.modeling_lfm2")
    model, batch = wrapped(model_of("lfm2")), packed([5, 13])
    own, calls = modelling.causal_conv1d_fn, []

    def patched(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        result: Tensor = own(*args, **kwargs)
        return result

    monkeypatch.setattr(modelling, "causal_conv1d_fn", patched)
    assert_equal(trained(model, batch), alone(make_model("lfm2"), batch), FP32)
    assert calls


class Package(ModuleType):
    """Package whose function computes the recurrence of a modelling file, each document alone."""

    def __init__(self, name: str, own: Callable[..., Any], parameter: str, takes: tuple[str, ...]) -> None:
        super().__init__(name)
        self.own, self.parameter, self.takes = own, parameter, takes
        self.documents: list[list[int] | None] = []
        """lengths that the calls were told"""

    def recurrence(self, *args: Any, **kwargs: Any) -> Any:
        told = kwargs.pop(self.parameter, None)
        kwargs = {name: value for name, value in kwargs.items() if name in self.takes}
        if told is None:
            self.documents.append(None)
            return self.own(*args, **kwargs)
        lengths = (told.diff() if self.parameter == "cu_seqlens" else told[0].unique(return_counts=True)[1]).tolist()
        self.documents.append(lengths)
        assert args[0].shape[:2] == (1, sum(lengths))

        def parts(value: Any) -> list[Any]:
            of_tokens = isinstance(value, Tensor) and value.shape[:2] == (1, sum(lengths))
            return list(value.split(lengths, 1)) if of_tokens else [value] * len(lengths)

        results = [
            self.own(*some, **dict(zip(kwargs, more, strict=True)))
            for some, more in zip(
                zip(*map(parts, args), strict=True),
                zip(*map(parts, kwargs.values()), strict=True),
                strict=True,
            )
        ]
        if isinstance(results[0], Tensor):
            return torch.cat(results, 1)
        return torch.cat([result[0] for result in results], 1), None


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Package]:
    """Installs such a package for a family, as transformers looks for it."""

    def installed(family: str) -> Package:
        hub = pytest.importorskip("transformers.integrations.hub_kernels")
        file, name, parameter = RECURRENCES[family]
        modelling = importlib.import_module(f"transformers.models.{file}.modeling_{file}")
        if not hasattr(hub, "use_kernel_func_from_hub_with_fallback"):
            pytest.skip("another transformers")
        own = unwrap(getattr(modelling, name))
        parameters = [one for one in signature(own).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        package = Package("package_of_recurrences", own, parameter, tuple(one.name for one in parameters))

        def recurrence(*args: Any, **kwargs: Any) -> Any:
            return package.recurrence(*args, **kwargs)

        more = Parameter(parameter, Parameter.KEYWORD_ONLY, default=None)
        vars(recurrence)["__signature__"] = signature(own).replace(parameters=[*parameters, more])
        vars(package)["recurrence_of_package"] = recurrence
        monkeypatch.setitem(sys.modules, package.__name__, package)
        decorated = hub.use_kernel_func_from_hub_with_fallback("recurrence_of_package", package.__name__)(own)
        monkeypatch.setattr(modelling, name, decorated)
        return package

    return installed


@pytest.mark.nightly
@pytest.mark.smoke
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", RECURRENCES)
def test_packages_that_read_lengths_get_one_row(
    family: str, checkpointing: bool, install: Callable[[str], Package]
) -> None:
    lengths, batch = [5, 1, 13, 9], packed([5, 1, 13, 9])
    want = alone(make_model(family), batch)
    package = install(family)
    model: Any = model_of(family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped(model)
    assert "one row of all documents" in (liger_dist.explain(model).packing or "")
    assert not package.documents, "wrap autotunes nothing"
    assert_equal(trained(model, batch), want, FP32)
    assert package.documents
    assert all(told == lengths for told in package.documents)
    if not checkpointing:  # transformers' hooks have no name.
        assert_equal(trained(pickle.loads(pickle.dumps(model)), batch), want, FP32)


def test_padded_rows_become_one_row_without_padding(install: Callable[[str], Package]) -> None:
    ids = packed([7, 7, 7])["input_ids"].view(3, 7)
    mask = torch.ones_like(ids)
    mask[0, 4:], mask[2, :5] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[2, 5] = -100  # Padding would predict it.
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    unwrapped: Any = make_model("qwen3_5_text").train()
    texts = [row[kept.bool()] for row, kept in zip(ids, mask, strict=True)]
    total = sum(len(text) - 1 for text in texts)
    loss = sum(
        unwrapped(input_ids=text[None], labels=text[None], use_cache=False).loss * ((len(text) - 1) / total)
        for text in texts
    )
    loss.backward()
    gradients = {name: parameter.grad.double() for name, parameter in unwrapped.named_parameters()}
    package = install("qwen3_5_text")
    got = trained(wrapped(model_of("qwen3_5_text")), batch)
    assert_equal(got, ([float(loss)], gradients), FP32)
    assert all(told == [4, 7, 2] for told in package.documents)


def test_documents_are_apart_where_lengths_are_not_read(install: Callable[[str], Package]) -> None:
    """In fp64, without kernels, and where the package's function has been patched since."""
    batch = packed([5, 1, 13, 9])
    want = alone(make_model("qwen3_5_text"), batch)
    package = install("qwen3_5_text")
    assert_equal(trained(wrapped(make_model("qwen3_5_text")), batch), want)
    assert_equal(trained(wrapped(model_of("qwen3_5_text"), layer_kernels=False), batch), want, FP32)
    model = wrapped(model_of("qwen3_5_text"))
    assert all(told is None for told in package.documents)
    install("qwen3_5_text")
    assert_equal(trained(model, batch), want, FP32)
    assert all(told is None for told in package.documents)


def test_one_text_in_each_row_is_told_no_lengths(install: Callable[[str], Package]) -> None:
    ids = packed([12, 16])["input_ids"].view(2, 14)
    package = install("qwen3_5_text")
    model = wrapped(model_of("qwen3_5_text"))
    model(input_ids=ids, labels=ids).loss.backward()
    assert package.documents
    assert all(told is None for told in package.documents)


def test_a_copy_after_a_patch_has_rows(install: Callable[[str], Package], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = packed([5, 1, 13, 9])
    want = alone(make_model("qwen3_5_text"), batch)
    package, modelling = (
        install("qwen3_5_text"),
        importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5"),
    )
    model = wrapped(model_of("qwen3_5_text"))
    own = modelling.causal_conv1d_fn
    monkeypatch.setattr(modelling, "causal_conv1d_fn", lambda *args, **kwargs: own(*args, **kwargs))
    copied = copy.deepcopy(model)
    assert_equal(trained(copied, batch), want, FP32)
    assert "one row per document" in (liger_dist.explain(copied).packing or "")
    assert all(told is None for told in package.documents)


@pytest.mark.smoke
def test_a_function_that_reads_no_lengths_keeps_rows(
    install: Callable[[str], Package], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of Mamba2 for training calls another package, whose parameters have no place for documents."""
    hub = pytest.importorskip("transformers.integrations.hub_kernels")
    modelling = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    install("mamba2")
    own = unwrap(modelling.mamba2_split_conv1d_scan_combined)
    module = ModuleType("package_without_lengths")
    vars(module)["in_one"] = lambda *args, chunk_size=None: None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    decorated = hub.use_kernel_func_from_hub_with_fallback("in_one", module.__name__)(own)
    monkeypatch.setattr(modelling, "mamba2_split_conv1d_scan_combined", decorated)
    model, batch = wrapped(model_of("mamba2")), packed([5, 1, 13, 9])
    assert "one row per document" in (liger_dist.explain(model).packing or "")
    assert_equal(trained(model, batch), alone(make_model("mamba2"), batch), FP32)


def test_activations_that_kernels_lack(install: Callable[[str], Package]) -> None:
    def of_gelu(model: Any) -> Any:
        model.model.layers[0].linear_attn.activation = "gelu"
        return model

    batch = packed([5, 1, 13, 9])
    want = alone(of_gelu(make_model("qwen3_5_text")), batch)
    package = install("qwen3_5_text")
    model = wrapped(of_gelu(model_of("qwen3_5_text")))
    left = dict(liger_dist.explain(model).layers.left)
    assert "its activation is gelu" in left["Qwen3_5GatedDeltaNet (convolution)"]
    assert_equal(trained(model, batch), want, FP32)
    assert all(told == [5, 1, 13, 9] for told in package.documents)


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "meta", "autocast"],
)
def test_convolutions_are_detected_in_every_context(context: Callable[[], Any]) -> None:
    is_causal_convolution.cache_clear()
    model = model_of("lfm2")
    with context():
        wrapped(model)
    assert any(": convolution" in what for what, _ in liger_dist.explain(model).layers.swapped)
