"""Models that transformers shards while it loads them: ``from_pretrained(folder, distributed_config=…)``.

A training loop is held to the unwrapped, unsharded fp64 model, and a Trainer to the same Trainer without this library.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Workers
from hosts import watched
from models import assert_below, full, make_batch, make_config, relative_errors, true_loss_sum
from mtp_models import add_mtp, true_mtp_losses
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainers import (
    Sequences,
    assert_same_weights,
    forget_earlier_trainers,
    full_weights,
    logged_losses,
    pretended_gpus,
    sgd_arguments,
)

import liger_dist
from liger_dist.errors import NoAdapterError
from liger_dist.record import is_wrapped
from liger_dist.sharding.process_groups import compute_device

LEARNING_RATE = 0.1
EVEN_ROWS, UNEVEN_ROWS = 104, 101


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Fields of a ``DistributedConfig`` and what the model is like that is loaded with them."""

    name: str
    sizes: tuple[tuple[str, Any], ...]
    adapter: str
    world: int = 2
    family: str = "llama"
    tied: bool = False
    rows: int = EVEN_ROWS
    dtype: torch.dtype = torch.float64
    own_failure: str = ""
    """words of what transformers itself says of this layout in its forward; empty where it trains"""

    def __str__(self) -> str:
        return f"{self.name}, {'tied' if self.tied else 'untied'}" + (", uneven" if self.rows == UNEVEN_ROWS else "")

    @property
    def checkpoint(self) -> str:
        return f"{self.family} {self.tied} {self.rows}"

    @property
    def ranks_of_a_batch(self) -> int:
        """Ranks that see the same tokens: a tensor-parallel group."""
        size: int = dict(self.sizes).get("tp_size", 1)
        return size

    @property
    def tolerance(self) -> float:
        """Norms and softmax round to fp32 in both."""
        return 1e-6 if self.dtype == torch.float64 else 1e-4


def _layout(name: str, adapter: str, sizes: dict[str, Any], **options: Any) -> Layout:
    return Layout(name=name, adapter=adapter, sizes=tuple(sizes.items()), **options)


FSDP = _layout("fsdp", "fsdp2-gathered", {"fsdp_size": 2})
HSDP = _layout("hsdp", "fsdp2-gathered", {"dp_replicate_size": 2, "fsdp_size": 2}, world=4)
TP = _layout("tp", "tensor-parallel", {"tp_size": 2})
FSDP_TP = _layout("fsdp x tp", "fsdp2-tensor-parallel", {"fsdp_size": 2, "tp_size": 2}, world=4)
# A batch for each rank, and each expert on one rank. Where gradients are reduced in fp64 or fp16, torch divides those
# of a group of one rank twice by the divisor that transformers sets: half of the true ones, fused or not.
FSDP_EP = _layout("fsdp, ep", "fsdp2-gathered", {"fsdp_size": 2, "ep_size": 2}, family="moe", dtype=torch.float32)
TP_EP = _layout("tp, ep", "tensor-parallel", {"tp_size": 2, "ep_size": 2}, family="moe")
# Rules for the head's and the embedding's whole weight: transformers refuses to do without rules (tp_plan={}).
WHOLE_HEAD = {"lm_head": "replicate", "model.embed_tokens": "replicate"}
EP = _layout("ep", "replicated", {"tp_size": 2, "ep_size": 2, "tp_plan": WHOLE_HEAD}, family="moe")
# The embedding's rule splits the tied weight, and transformers' own head has no rule to take its rows.
TIED_EP = _layout(
    "ep, embedding split",
    "tensor-parallel",
    {"tp_size": 2, "ep_size": 2, "tp_plan": {"lm_head": "replicate"}},
    family="moe",
    tied=True,
    own_failure="got mixed torch.Tensor and DTensor",
)
HYBRIDS = [replace(layout, family="hybrid") for layout in (FSDP_EP, TP_EP)]
LAYOUTS = [
    *(replace(layout, tied=tied) for layout in (FSDP, HSDP, TP, FSDP_TP, FSDP_EP, TP_EP, EP) for tied in (False, True)),
    TIED_EP,
    *(replace(layout, rows=UNEVEN_ROWS) for layout in (FSDP, FSDP_TP)),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders that models are loaded from, by what the models are like."""
    folders = {}
    for layout in (*LAYOUTS, *TIED_AND_UNEVEN, *HYBRIDS):
        if layout.checkpoint not in folders:
            folders[layout.checkpoint] = str(tmp_path_factory.mktemp("checkpoint"))
            make_checkpointed_model(layout).save_pretrained(folders[layout.checkpoint])
    return folders


def make_checkpointed_model(layout: Layout) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3NextConfig

    config: Any = make_config("llama", tied=layout.tied, heads=4)
    if layout.family != "llama":
        shared = ("hidden_size", "num_hidden_layers", "num_attention_heads", "initializer_range", "pad_token_id")
        options: dict[str, Any] = {
            **{name: getattr(config, name) for name in shared},
            "num_key_value_heads": 4,
            "head_dim": 8,
            "moe_intermediate_size": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": layout.tied,
        }
        config = Qwen3MoeConfig(**options)
        if layout.family == "hybrid":
            options |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
            options |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
            options |= {"shared_expert_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"]}
            config = Qwen3NextConfig(**options)
    config.vocab_size = layout.rows
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).double()


def load(layout: Layout, folder: str, *, dtype: torch.dtype, sharded: bool = True) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    # Grouped matrix products take no fp64.
    options: dict[str, Any] = {"experts_implementation": "eager"} if layout.family != "llama" else {}
    if sharded:
        options["distributed_config"] = DistributedConfig(**dict(layout.sizes))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **options)
    return model if sharded else model.to(compute_device())


def skip_without(layout: Layout) -> None:
    from transformers.distributed import DistributedConfig

    known = {field.name for field in fields(DistributedConfig)}
    missing = [name for name, _ in layout.sizes if name not in known]
    if missing:
        pytest.skip(f"DistributedConfig of this transformers has no {', '.join(missing)}")
    if 0 < torch.cuda.device_count() < layout.world:
        pytest.skip(f"transformers gives each of {layout.world} ranks another GPU")
    if layout.name == FSDP_TP.name and "dp_replicate_size" not in known:
        pytest.skip("this transformers makes a mesh of one axis, for fsdp_size or tp_size")


@pytest.mark.nightly(
    layout=[
        "fsdp, untied",
        "hsdp, untied",
        "hsdp, tied",
        "fsdp, tied",
        "fsdp x tp, untied",
        "fsdp x tp, tied",
        "fsdp, ep, tied",
        "tp, ep, untied",
    ]
)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_training_loop(layout: Layout, checkpoints: dict[str, str], workers_2: Workers, workers_4: Workers) -> None:
    skip_without(layout)
    workers = workers_2 if layout.world == 2 else workers_4
    for adapters, errors in workers.run(loops, layout, checkpoints[layout.checkpoint]):
        assert adapters == {layout.adapter}
        assert_below(errors, layout.tolerance)


def loops(layout: Layout, folder: str) -> tuple[set[str | None], dict[str, float]]:
    """Two steps with each kind of mean; chosen adapters, and every error by its name."""
    adapters, errors = set(), {}
    for mean in ("local", "global"):
        if mean == "global" and layout.adapter == "replicated":
            continue  # Refused: test_a_whole_head_on_several_ranks_has_no_global_mean.
        model = load(layout, folder, dtype=layout.dtype)
        liger_dist.wrap(model, "auto", config=liger_dist.WrapConfig(token_mean=mean))  # type: ignore[arg-type]
        adapters.add(liger_dist.explain(model).adapter)
        reference = load(layout, folder, dtype=torch.float64, sharded=False)
        found = two_steps(layout, model, reference, mean=mean)
        errors |= {f"{mean} mean, {name}": error for name, error in found.items()}
    return adapters, errors


def two_steps(
    layout: Layout, model: Any, reference: Any, *, mean: str = "local", rows: str = "texts"
) -> dict[str, float]:
    """Errors of losses, gradients and weights beside the truth, whose ranks have different tokens where ``layout`` is
    data parallel; ``rows`` as of ``make_batch``."""
    rank, ranks = dist.get_rank() // layout.ranks_of_a_batch, dist.get_world_size() // layout.ranks_of_a_batch
    errors = {}
    for step in range(2):
        batches = [make_batch(r, seed=step, rows=rows) for r in range(ranks)]
        sums = [true_loss_sum(reference, batch) for batch in batches]
        counts = [count if mean == "local" else sum(c for _, c in sums) / ranks for _, count in sums]
        truths = [total / count for (total, _), count in zip(sums, counts, strict=True)]
        (sum(truths) / ranks).backward()  # type: ignore[union-attr]
        output = model(**batches[rank], use_cache=False)
        assert is_wrapped(model) != hasattr(output, "logits")
        output.loss.backward()
        errors[f"step {step}, loss"] = abs(float(output.loss) / float(truths[rank].detach()) - 1)
        pairs = dict(model.named_parameters())
        gradients = {name: full(pairs[name].grad) for name, _ in reference.named_parameters()}
        found = relative_errors(gradients, {n: p.grad for n, p in reference.named_parameters()}, floor=0.0)
        errors |= {f"step {step}, gradient of {name}": error for name, error in found.items()}
        with torch.no_grad():
            for parameter in (*reference.parameters(), *model.parameters()):
                parameter -= LEARNING_RATE * parameter.grad
                parameter.grad = None
        for name, parameter in reference.named_parameters():
            errors[f"step {step}, {name}"] = float((full(pairs[name]) - parameter).abs().max())
    return errors


@pytest.mark.parametrize("layout", HYBRIDS, ids=str)
def test_documents_of_a_hybrid_with_experts_on_several_ranks(
    layout: Layout, checkpoints: dict[str, str], workers_2: Workers
) -> None:
    """How its layers take documents is found by a run of its code on each rank alone, which needs all experts."""
    skip_without(layout)
    for packing, attention, errors in workers_2.run(documents_of_a_hybrid, layout, checkpoints[layout.checkpoint]):
        assert "one row per document" in packing
        assert "without a dense mask" in attention
        assert_below(errors, 1e-4)


def documents_of_a_hybrid(layout: Layout, folder: str) -> tuple[str | None, str, dict[str, float]]:
    model = load(layout, folder, dtype=layout.dtype)
    liger_dist.wrap(model, "auto")
    explanation = liger_dist.explain(model)
    reference = load(layout, folder, dtype=torch.float64, sharded=False)
    return explanation.packing, explanation.attention, two_steps(layout, model, reference, rows="packed")


REPEATS = [replace(layout, tied=True) for layout in (FSDP, HSDP, TP, FSDP_TP, FSDP_EP, TP_EP, EP)] + [
    HSDP,
    FSDP_EP,
    TP_EP,
]
"""tied weights, replicas, and experts beside another axis, which a Trainer treats as in the layouts that stay;
test_a_training_loop has all of them"""


@pytest.mark.nightly
@pytest.mark.nightly(layout=["fsdp, untied", "tp, untied", "ep, untied", "ep, embedding split, tied"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[pytest.mark.nightly] * (layout in REPEATS))
        for layout in LAYOUTS
        if layout.rows == EVEN_ROWS
    ],
    ids=str,
)
def test_a_trainer(layout: Layout, checkpoints: dict[str, str], workers_2: Workers, workers_4: Workers) -> None:
    """A model that is wrapped before its Trainer is made, and a Trainer that is fused."""
    from transformers import PreTrainedModel

    skip_without(layout)
    if not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"):
        pytest.skip("Trainer of this transformers takes no model that was sharded while it was loaded")
    workers = workers_2 if layout.world == 2 else workers_4
    for own, *ours in workers.run(trainers, layout, checkpoints[layout.checkpoint]):
        if layout.own_failure:
            assert layout.own_failure in own["failure"]
            own = ours[0]
        else:
            assert own["fused calls"] == 0
        assert len(set(own["losses"])) == 2
        for fused in ours:
            assert fused["fused calls"] == fused["calls"] > 2
            assert fused["losses"] == pytest.approx(own["losses"], rel=1e-5)
            assert fused["evaluation"] == pytest.approx(own["evaluation"], rel=1e-5)
            assert_same_weights(fused["weights"], own["weights"], atol=1e-5)


def trainers(layout: Layout, folder: str) -> list[dict[str, Any]]:
    return [trained(layout, folder, by) for by in ("transformers", "wrap", "fuse")]


def trained(layout: Layout, folder: str, by: str) -> dict[str, Any]:
    from liger_dist.integrations.trainer import fuse

    model = load(layout, folder, dtype=torch.float32)
    calls: list[None] = []
    model.register_forward_hook(lambda *_: calls.append(None))
    if by == "wrap":
        liger_dist.wrap(model, "auto")
    with tempfile.TemporaryDirectory() as output, watched() as seen:
        trainer = make_short_trainer(model, output)
        if by == "fuse":
            fuse(trainer)
        if by == "transformers" and layout.own_failure:
            with pytest.raises(RuntimeError) as caught:
                trainer.train()
            return {"failure": str(caught.value)}
        trainer.train()
        # FSDP2 leaves weights gathered after an evaluation.
        weights = full_weights(model)
        return {
            "weights": weights,
            "evaluation": trainer.evaluate()["eval_loss"],
            "calls": len(calls),
            "fused calls": seen.fused_calls,
            "losses": logged_losses(trainer),
        }


def make_short_trainer(model: nn.Module, folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

    forget_earlier_trainers()
    # Accelerate takes tensor parallelism on GPUs alone.
    with pretended_gpus():
        arguments = sgd_arguments(
            folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            learning_rate=0.05,
            save_strategy="no",
            use_cpu=False,
        )
        args = TrainingArguments(**arguments)
        return Trainer(model=model, args=args, train_dataset=Sequences(), eval_dataset=Sequences())


TIED_AND_UNEVEN = [replace(layout, tied=True, rows=UNEVEN_ROWS) for layout in (FSDP, HSDP, FSDP_TP)]


@pytest.mark.parametrize("layout", TIED_AND_UNEVEN, ids=str)
def test_a_tied_weight_that_transformers_updates_in_part_is_refused_by_wrap(
    layout: Layout, checkpoints: dict[str, str], workers_2: Workers, workers_4: Workers
) -> None:
    skip_without(layout)
    workers = workers_2 if layout.world == 2 else workers_4
    for sentences, own, frozen in workers.run(refused_and_unfused, layout, checkpoints[layout.checkpoint]):
        for sentence in sentences:
            assert "the optimizer updates only one of the copies" in sentence
        # transformers' own run, from the second step on.
        assert max(error for name, error in own.items() if "step 0" in name) < layout.tolerance
        assert max(error for name, error in own.items() if "step 1, gradient" in name) > 1e-3
        assert frozen == layout.adapter


def refused_and_unfused(layout: Layout, folder: str) -> tuple[list[str], dict[str, float], str | None]:
    """Refusals by ``wrap`` and by ``fuse``; errors of the model that they left alone; the adapter of a head that no
    optimizer updates."""
    from liger_dist.integrations.trainer import fuse

    model = load(layout, folder, dtype=torch.float64)
    before = instance_state(model)
    sentences = []
    with pytest.raises(NoAdapterError) as caught:
        liger_dist.wrap(model, "auto")
    sentences.append(str(caught.value))
    with tempfile.TemporaryDirectory() as output, pytest.raises(NoAdapterError) as caught:
        fuse(make_short_trainer(model, output))
    sentences.append(str(caught.value))
    assert instance_state(model) == before
    own = two_steps(layout, model, load(layout, folder, dtype=torch.float64, sharded=False))
    frozen = load(layout, folder, dtype=torch.float64)
    for parameter in frozen.parameters():
        parameter.requires_grad_(parameter is not frozen.lm_head.weight)
    return sentences, own, liger_dist.explain(liger_dist.wrap(frozen, "auto")).adapter


def instance_state(model: nn.Module) -> dict[str, Any]:
    """What ``wrap`` changes: classes, instance attributes and hooks of every module."""
    return {
        name: (
            type(module),
            {key: value for key, value in vars(module).items() if callable(value)},
            [id(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())],
        )
        for name, module in model.named_modules()
    } | {"attributes": sorted(vars(model))}


@pytest.mark.parametrize("with_norm", [False, True])
def test_a_tied_weight_that_became_two_is_refused(with_norm: bool, workers_2: Workers) -> None:
    """The head alone, and as transformers groups an untied one."""
    for sentences in workers_2.run(refusals_of_two_parameters, with_norm):
        assert len(sentences) == 2
        for sentence in sentences:
            assert "each gets one of the two gradients" in sentence


def refusals_of_two_parameters(with_norm: bool) -> list[str]:
    """Wrapped while tied and sharded apart; tied again after FSDP2 has run, which goes on with two parameters."""
    sentences = []

    def shard_apart(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        fully_shard([model.model.norm, model.lm_head] if with_norm else model.lm_head)
        fully_shard(model)

    model = make_checkpointed_model(replace(FSDP, tied=True)).to(compute_device())
    liger_dist.wrap(model, "auto")
    shard_apart(model)
    with pytest.raises(NoAdapterError) as caught:
        model(**make_batch(dist.get_rank()))
    sentences.append(str(caught.value))

    model = make_checkpointed_model(replace(FSDP, tied=True)).to(compute_device())
    shard_apart(model)
    model(**make_batch(dist.get_rank())).loss.backward()
    model.tie_weights()
    before = instance_state(model)
    with pytest.raises(NoAdapterError) as caught:
        liger_dist.wrap(model, "auto")
    assert instance_state(model) == before
    sentences.append(str(caught.value))
    return sentences


@pytest.mark.smoke
def test_a_head_split_by_columns_is_refused_by_wrap(workers_2: Workers) -> None:
    for sentence in workers_2.run(refusal_of_columns):
        assert "expected its rows on one axis, S(0)" in sentence


def refusal_of_columns() -> str:
    mesh = init_device_mesh(compute_device().type, (2,), mesh_dim_names=("tp",))
    model = make_checkpointed_model(TP).to(compute_device())
    parallelize_module(model.lm_head, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    before = instance_state(model)
    with pytest.raises(NoAdapterError) as caught:
        liger_dist.wrap(model, "auto")
    assert instance_state(model) == before
    return str(caught.value)


@pytest.mark.parametrize("layout", [FSDP, FSDP_EP, EP], ids=str)
def test_lora_on_a_sharded_model(layout: Layout, checkpoints: dict[str, str], workers_2: Workers) -> None:
    """Exact where ranks have the same tokens. FSDP2 does not know parameters that are added after it."""
    skip_without(layout)
    for found in workers_2.run(with_lora, layout, checkpoints[layout.checkpoint]):
        if layout.name == EP.name:
            assert_below(found, layout.tolerance)
        else:
            assert "nothing averages the gradients of" in found
            assert "after transformers has sharded" in found


def with_lora(layout: Layout, folder: str, parameters: tuple[str, ...] = ()) -> str | dict[str, float]:
    """Errors of every gradient, or the sentence of the refusal."""
    import peft

    def adapted(model: Any) -> Any:
        options: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], "target_parameters": [*parameters]}
        settings = peft.LoraConfig(r=2, init_lora_weights=False, **options)
        return peft.get_peft_model(model, settings, autocast_adapter_dtype=False).train()

    dtype = layout.dtype
    model, reference = (adapted(load(layout, folder, dtype=dtype, sharded=sharded)) for sharded in (True, False))
    values, before = dict(model.named_parameters()), instance_state(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_" in name:
                parameter.copy_(full(values[name]))
    try:
        wrapped: Any = liger_dist.wrap(model)
    except liger_dist.LigerDistError as error:
        assert instance_state(model) == before
        return str(error)
    batch = make_batch(0)
    wrapped(**batch, use_cache=False).loss.backward()
    total, count = true_loss_sum(reference, batch)
    (total / count).backward()
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = {name: full(p.grad) for name, p in wrapped.named_parameters() if p.grad is not None}
    return relative_errors(found, truths, floor=1e-4)


def test_lora_on_experts_of_several_ranks_is_refused(checkpoints: dict[str, str], workers_2: Workers) -> None:
    skip_without(EP)
    for sentence in workers_2.run(with_lora, EP, checkpoints[EP.checkpoint], ("mlp.experts.gate_up_proj",)):
        assert "experts that transformers has put on several ranks" in sentence


@pytest.mark.parametrize("layout", [FSDP, FSDP_EP, EP], ids=str)
def test_further_tokens_of_a_sharded_model(layout: Layout, checkpoints: dict[str, str], workers_2: Workers) -> None:
    skip_without(layout)
    for found in workers_2.run(with_further_tokens, layout, checkpoints[layout.checkpoint]):
        if layout.name == EP.name:
            assert_below(found, layout.tolerance)
        else:
            assert "is sharded already; add MultiTokenPrediction to the full model" in found


def with_further_tokens(layout: Layout, folder: str) -> str | dict[str, float]:
    reference = add_mtp(load(layout, folder, dtype=layout.dtype, sharded=False), depth=1, dtype=layout.dtype)
    model = load(layout, folder, dtype=layout.dtype).train()
    try:
        add_mtp(model, depth=1, dtype=layout.dtype)
    except liger_dist.LigerDistError as error:
        return str(error)
    model.mtp.load_state_dict(reference.mtp.state_dict())
    wrapped: Any = liger_dist.wrap(model)
    batch = make_batch(0)
    wrapped(**batch, use_cache=False).loss.backward()
    weights = (reference.mtp.main_weight, *reference.mtp.weights)
    losses = true_mtp_losses(reference, batch)
    sum(weight * total / count for weight, (total, count) in zip(weights, losses, strict=True)).backward()
    truths = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found = {name: full(p.grad) for name, p in wrapped.named_parameters() if p.grad is not None}
    return relative_errors(found, truths, floor=1e-4)


def test_wrap_waits_for_the_ranks_that_will_average(workers_4: Workers) -> None:
    """A tensor-parallel model that FSDP2 comes around after wrapping, with a mean over all ranks."""
    for error in workers_4.run(error_of_a_later_fsdp2):
        assert error < 1e-6


def error_of_a_later_fsdp2() -> float:
    mesh = init_device_mesh(compute_device().type, (2, 2), mesh_dim_names=("shard", "tp"))
    model, reference = (make_checkpointed_model(TP).to(compute_device()) for _ in range(2))
    parallelize_module(model.lm_head, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    liger_dist.wrap(model, "auto", config=liger_dist.WrapConfig(token_mean="global"))
    fully_shard(model, mesh=mesh["shard"])
    batches = [make_batch(rank) for rank in range(2)]
    loss = model(**batches[mesh.get_local_rank("shard")]).loss
    count = sum(true_loss_sum(reference, batch)[1] for batch in batches)
    total = true_loss_sum(reference, batches[mesh.get_local_rank("shard")])[0].detach()
    return abs(float(loss.detach()) / (2 * float(total) / count) - 1)


def test_a_whole_head_on_several_ranks_has_no_global_mean(checkpoints: dict[str, str], workers_2: Workers) -> None:
    """Of experts' parallelism alone nobody is known to average."""
    skip_without(EP)
    for sentence in workers_2.run(refusal_of_a_global_mean, checkpoints[EP.checkpoint]):
        assert "pass num_items_in_batch to the model" in sentence


def refusal_of_a_global_mean(folder: str) -> str:
    model = load(EP, folder, dtype=torch.float64)
    liger_dist.wrap(model, "auto", config=liger_dist.WrapConfig(token_mean="global"))
    with pytest.raises(NoAdapterError) as caught:
        model(**make_batch(0))
    return str(caught.value)


def test_what_transformers_does_not_shard(checkpoints: dict[str, str], workers_2: Workers) -> None:
    from transformers.distributed import DistributedConfig

    skip_without(EP)
    with pytest.raises(ValueError, match="`ep_size` must divide"):
        DistributedConfig(ep_size=2)
    for sentence in workers_2.run(refusal_of_no_rules, checkpoints[EP.checkpoint]):
        assert "has no `tp_plan`" in sentence


def refusal_of_no_rules(folder: str) -> str:
    """The experts' rules alone, as the documentation of ``DistributedConfig`` has it."""
    sizes = (("tp_size", 2), ("ep_size", 2), ("tp_plan", {}))
    with pytest.raises(ValueError, match="tp_plan") as caught:
        load(replace(EP, sizes=sizes), folder, dtype=torch.float64)
    return str(caught.value)
