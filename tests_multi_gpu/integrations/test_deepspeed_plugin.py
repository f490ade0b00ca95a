"""The liger_dist section of a DeepSpeed JSON, with the real DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from hosts import watched
from layouts import zero_settings
from models import VOCAB_SIZE, make_batch, make_model
from trainers import assert_same_weights

import liger_dist
from liger_dist.cli import main
from liger_dist.integrations.deepspeed_section import read_section
from liger_dist.record import is_wrapped

ROWS = 8
SECTION = {"memory_budget": ROWS * VOCAB_SIZE * 4}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"liger_dist": {"memory_bugdet": 1}}, "liger_dist.memory_bugdet is no key of the section"),
        ({"liger_dist": {"memory_budget": "1 GiB"}}, "liger_dist.memory_budget is '1 GiB'"),
        ({"liger_dist": {"memory_budget": 0}}, "liger_dist.memory_budget is 0"),
        ({"liger_dist": {"fused_loss": "auto"}}, "liger_dist.fused_loss is 'auto'"),
        ({"liger_dist": {"layer_kernels": 1}}, "liger_dist.layer_kernels is 1"),
        ({"liger_dist": {"enabled": False, "fused_loss": 3}}, "liger_dist.fused_loss is 3"),
        ({"liger_dist": {"outputs": ["top_k"]}}, "liger_dist.outputs of the WrapConfig contains 'top_k'"),
        ({"liger_dist": {"outputs": ["entropy", 3]}}, "liger_dist.outputs contains 3"),
        ({"liger_dist": {"outputs": ["entropyy"]}}, "liger_dist.outputs contains 'entropyy'"),
        ({"liger_dist": {}, "tensor_parallel": {"autotp_size": "auto"}}, "tensor_parallel.autotp_size is 'auto'"),
        ({"liger_dist": {"backend": "cuda"}}, "liger_dist.backend is 'cuda'"),
        ({"liger_dist": True}, "liger_dist is True"),
        ({"liger_dist": {}, "tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size is 2"),
        ({"liger_dist": {}, "hybrid_engine": {"enabled": True}}, "hybrid_engine.enabled is True"),
    ],
    ids=str,
)
def test_a_section_that_does_not_fit_is_named_by_its_path(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(liger_dist.LigerDistError) as caught:
        read_section(config)
    assert str(caught.value).removeprefix("in the DeepSpeed configuration, ").startswith(sentence)


def test_what_a_section_says() -> None:
    assert read_section({}) is None
    assert read_section({"liger_dist": {"enabled": False}, "tensor_parallel": {"autotp_size": 2}}) is None
    section = {"outputs": ["entropy"], "backend": "reference", "logits_dtype": "float32"}
    expected = liger_dist.WrapConfig(outputs=("entropy",), backend="reference", logits_dtype=torch.float32)
    assert read_section({"liger_dist": section}) == expected


@pytest.mark.nightly(stage=[1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_only_the_configuration_changes(stage: int, workers_2: Workers) -> None:
    """Or the model is wrapped first, and given to DeepSpeed's own ``initialize``."""
    for with_section, wrapped_first, disabled, without in workers_2.run(trained_in_four_ways, stage):
        for fused in (with_section, wrapped_first):
            assert fused["fused calls"] == 3
            assert 0 < fused["most logits"] <= ROWS
            assert fused["losses"] == pytest.approx(without["losses"], rel=1e-5)
            assert_same_weights(fused["weights"], without["weights"], atol=1e-6)
        assert without["fused calls"] == disabled["fused calls"] == 0
        assert without["most logits"] > ROWS
        assert without["losses"] == disabled["losses"]
        assert without["losses"][0] != without["losses"][2]


def trained_in_four_ways(stage: int) -> list[dict[str, Any]]:
    return [
        trained(stage, {"liger_dist": SECTION}),
        trained(stage, {}, is_wrapped_first=True),
        trained(stage, {"liger_dist": {"enabled": False}}),
        trained(stage, {}),
    ]


def trained(stage: int, section: dict[str, Any], *, is_wrapped_first: bool = False) -> dict[str, Any]:
    settings = zero_settings({"stage": stage}) | section
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    from liger_dist.integrations import deepspeed as plugin

    model = make_model("llama", dtype=torch.float32)
    initialize = plugin.initialize
    if is_wrapped_first:
        liger_dist.wrap(model, config=liger_dist.WrapConfig(**SECTION))
        initialize = deepspeed.initialize
    with watched() as seen:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = initialize(model=model, optimizer=optimizer, config=settings)
        losses = []
        for number in range(3):
            loss = engine(**make_batch(dist.get_rank(), seed=number), use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
    # Stage 0 in fp32 keeps no separate fp32 weights.
    weights = {
        name: (parameter if stage == 0 else safe_get_full_fp32_param(parameter)).detach().cpu().clone()
        for name, parameter in model.named_parameters()
    }
    engine.destroy()
    return {"losses": losses, "weights": weights, "fused calls": seen.fused_calls, "most logits": seen.most_logits}


def test_a_model_is_as_before_where_deepspeed_refuses(workers_2: Workers) -> None:
    assert all(workers_2.run(refused))


def refused() -> bool:
    settings = zero_settings({"stage": 2}) | {"liger_dist": {}, "train_batch_size": 1}
    from liger_dist.integrations.deepspeed import initialize

    model = make_model("llama", dtype=torch.float32)
    with pytest.raises(AssertionError):
        initialize(model=model, model_parameters=model.parameters(), config=settings)
    return not is_wrapped(model)


def test_a_command_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepspeed", "no-such-program", "--option"]) == 2
    assert "the command 'no-such-program --option' cannot be run" in capsys.readouterr().err
    assert main(["deepspeed"]) == 2
    assert "expected the one that starts the training" in capsys.readouterr().err
