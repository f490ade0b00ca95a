"""A pass that trains nothing, at any moment of training, changes no step: weights are those of the unwrapped model that
trained without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full_parameters
from harness import Workers
from layouts import zero_settings
from models import full, make_batch, make_model, true_loss_sum
from quantized import adapted, in_fp64
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import liger_dist

LEARNING_RATE = 0.1
STEPS = 2
FSDP2_OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "fsdp2, units of two layers": {"layers_per_unit": 2},
    "fsdp2, not resharded": {"reshard_after_forward": False},
    "fsdp2, replicas": {"mesh": (2, 1)},
    "fsdp2, frozen replicated": {"frozen": "replicate"},
    "vocab-parallel": {"lm_head": "vocab_parallel"},
    "vocab-parallel, not resharded": {"lm_head": "vocab_parallel", "reshard_after_forward": False},
    "vocab-parallel, replicas": {"lm_head": "vocab_parallel", "mesh": (2, 1)},
}
FSDP1_OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp1": {},
    "fsdp1, not resharded": {"reshard_after_forward": False},
    "fsdp1, frozen replicated": {"frozen": "replicate"},
}
DECODER_ALONE = ("fsdp2", "fsdp2, units of two layers", "fsdp2, not resharded", "fsdp2, replicas")
ZERO = {"zero1": 1, "zero2": 2, "zero3": 3}
BEFORE_WRAP, AFTER_WRAP = BY_CALLER = ("sharded before wrap", "sharded after wrap")
STRATEGIES = ("ddp", *FSDP1_OPTIONS, *FSDP2_OPTIONS, *BY_CALLER, *ZERO)
LORA: dict[str, dict[str, Any]] = {
    "LoRA": {"target_modules": ["q_proj", "v_proj"]},
    "LoRA on lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "saved lm_head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "DoRA": {"target_modules": ["q_proj", "v_proj"], "use_dora": True},
    "two adapters": {"target_modules": ["q_proj", "v_proj"]},
}
FOUR_BITS = {"double": True, "storage": torch.float32}
MODELS = ("full", "tied", *LORA, "4 bits")
ADAPTED = (*LORA, "4 bits")
EVERY = "every moment"
MOMENTS = ("before the optimizer", "before the first step", "before backward", "before step", "after step", EVERY)


def build(kind: str, strategy: str) -> tuple[Any, Any]:
    """The model to wrap, and its truth in fp64."""
    if kind == "4 bits":
        model = adapted(FOUR_BITS, {}).train()
        return model, in_fp64(model, FOUR_BITS, {})
    model = with_adapters(make_model("llama", tied=kind == "tied"), kind)
    reference = copy.deepcopy(model)
    # DeepSpeed trains in fp32.
    return model.float() if strategy in ZERO else model, reference


def with_adapters(model: Any, kind: str) -> Any:
    if kind not in LORA:
        return model
    import peft

    torch.manual_seed(5)
    # Ranks of LoRA that two processes divide; B is not zero, so that A has a gradient.
    options = peft.LoraConfig(r=4, init_lora_weights=False, **LORA[kind])
    peft_model: Any = peft.get_peft_model(model, options, autocast_adapter_dtype=False)
    if kind == "two adapters":
        peft_model.add_adapter("second", peft.LoraConfig(r=4, init_lora_weights=False, **LORA[kind]))
        peft_model.double()
    return peft_model.to(next(model.parameters()).device).train()


def shard(model: Any, strategy: str) -> Any:
    if strategy in BY_CALLER:
        root = model if strategy == BEFORE_WRAP else liger_dist.wrap(model, "auto")
        for layer in model.get_decoder().layers:
            fully_shard(layer)
        fully_shard(model)
        return liger_dist.wrap(model, "auto") if strategy == BEFORE_WRAP else root
    if strategy in ZERO:
        return liger_dist.wrap(model, "deepspeed")
    if strategy == "ddp":
        return liger_dist.wrap(model, liger_dist.DDP(find_unused_parameters=True))
    if strategy in FSDP1_OPTIONS:
        return liger_dist.wrap(
            model, liger_dist.FSDP1(reduce_dtype=next(model.parameters()).dtype, **FSDP1_OPTIONS[strategy])
        )
    return liger_dist.wrap(
        model, liger_dist.FSDP2(reduce_dtype=next(model.parameters()).dtype, **FSDP2_OPTIONS[strategy])
    )


# --- passes, which train nothing ------------------------------------------------------------------------------------


def batch() -> dict[str, Tensor]:
    return make_batch(dist.get_rank(), seed=7)


def inside(model: Any) -> Any:
    """The model that has ``generate`` and adapters."""
    return getattr(model, "module", model)


def no_grad(model: Any) -> None:
    with torch.no_grad():
        assert model(**batch()).loss > 0


def inference_mode(model: Any) -> None:
    with torch.inference_mode():
        assert model(**batch()).loss > 0


def in_eval(model: Any) -> None:
    model.eval()
    no_grad(model)
    model.train()


def logits(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=batch()["input_ids"])


def hidden_states(model: Any) -> None:
    """Of the decoder alone."""
    with torch.no_grad():
        inside(model).model(input_ids=batch()["input_ids"])


def generate(model: Any) -> None:
    ids = batch()["input_ids"]
    assert inside(model).generate(input_ids=ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def without_adapter(model: Any) -> None:
    with inside(model).disable_adapter(), torch.no_grad():
        model(**batch())


def frozen(model: Any) -> None:
    """With gradients enabled, while nothing requires one."""
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    model(**batch())
    model(input_ids=batch()["input_ids"])
    # By its name, as a user finds it: FSDP may have exchanged the objects.
    for parameter in [p for p in model.parameters() if any(p is t for t in trained)]:
        parameter.requires_grad_(True)


def frozen_by_module(model: Any) -> None:
    """As PEFT does: of each module's own parameters."""
    trained = [
        (module, name)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    for module, name in trained:
        getattr(module, name).requires_grad_(False)
    with torch.no_grad():
        model(**batch())
    for module, name in trained:
        getattr(module, name).requires_grad_(True)


def unused_loss(model: Any) -> None:
    """A forward with gradients and no backward."""
    assert float(model(**batch()).loss.detach()) > 0


def other_adapter(model: Any) -> None:
    peft_model = inside(model)
    peft_model.set_adapter("second")
    no_grad(model)
    peft_model.set_adapter("default")


def has_packed_weights(model: Any) -> bool:
    return any(type(module).__name__ == "Linear4bit" for module in model.modules())


def state_dict(model: Any) -> None:
    options = StateDictOptions(ignore_frozen_params=has_packed_weights(model))
    assert get_model_state_dict(model, options=options)


def listed(model: Any) -> None:
    assert list(model.parameters())


def verified(model: Any) -> None:
    liger_dist.verify(model, batch())


def failed(model: Any) -> None:
    """A forward that ends by an exception in lm_head."""
    head = inside(model).get_output_embeddings()

    def fail(*_: Any) -> None:
        raise InterruptedError

    handle = head.register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        model(**batch())
    handle.remove()


def failed_outside(model: Any) -> None:
    """A call that ends by an exception in a hook, before the model's own forward."""

    def fail(*_: Any) -> None:
        raise InterruptedError

    handle = inside(model).register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        model(**batch())
    handle.remove()


def merged(model: Any) -> None:
    """After a loss without a backward, which leaves full parameters."""
    peft_model = inside(model)
    unused_loss(model)
    peft_model.merge_adapter()
    no_grad(model)
    peft_model.unmerge_adapter()


def failed_backward(model: Any) -> None:
    def fail(*_: Any) -> None:
        raise InterruptedError

    handle = inside(model).get_decoder().layers[0].register_full_backward_hook(fail)
    loss = model(**batch()).loss
    with pytest.raises(InterruptedError):
        loss.backward()
    handle.remove()
    model.zero_grad()


PASSES: dict[str, Callable[[Any], None]] = {
    function.__name__: function
    for function in (
        no_grad, inference_mode, in_eval, logits, hidden_states, generate, without_adapter, frozen, frozen_by_module,
        unused_loss, other_adapter, merged, state_dict, listed, verified, failed, failed_outside, failed_backward,
    )
}  # fmt: skip


def is_wrapped(strategy: str, kind: str) -> bool:
    """False for what wrap refuses, and for less of ZeRO."""
    if strategy in ZERO and kind not in ("full", "LoRA", "saved lm_head", "4 bits"):
        return False  # Nothing of these differs in an engine.
    if kind == "4 bits" and strategy in FSDP1_OPTIONS:
        return strategy.endswith("frozen replicated")
    if strategy.endswith("frozen replicated"):
        return kind in ADAPTED
    return kind != "LoRA on lm_head" or not strategy.startswith(("vocab-parallel", *BY_CALLER))


def applies(strategy: str, kind: str, name: str, moment: str) -> bool:
    if moment == EVERY and name not in ("no_grad", "generate", "hidden_states"):
        return False  # Some are refused at one of them.
    if name == "hidden_states":
        # Where FSDP2's root holds nothing of the decoder, after the first call of the model.
        return kind == "full" and strategy in DECODER_ALONE and moment in MOMENTS[2:-1]
    if name == "frozen_by_module" and moment == "before backward" and strategy in FSDP1_OPTIONS:
        return False  # Torch refuses to freeze views, which modules of FSDP1 have between forward and backward.
    if name == "failed_backward" and (
        strategy not in FSDP2_OPTIONS or moment not in ("before the first step", "after step")
    ):
        # Gradients are dropped, an optimizer that is built before the next forward is refused in its first step, and
        # DDP and FSDP1 cannot go on.
        return False
    if name in ("inference_mode", "failed", "failed_outside") and strategy == "zero3":
        return False  # DeepSpeed raises in the next backward, or in the next forward after one that has raised.
    if name == "merged":
        # Weights of other layouts are not PEFT's to write to, and of 4 bits are rounded.
        can_merge = strategy in ("ddp", "fsdp2", "fsdp2, not resharded")
        return kind in LORA and can_merge and moment not in ("before backward", EVERY)
    if name == "verified" and moment == "before backward" and strategy == "ddp":
        return False  # DDP refuses the backward of an earlier forward after another one.
    if name == "generate" and strategy in BY_CALLER and kind in ADAPTED:
        return False  # PEFT calls the base model's, which no hook of fully_shard runs for.
    if name == "without_adapter":
        return kind in ADAPTED
    return name != "other_adapter" or kind == "two adapters"


CASES = [
    (strategy, kind, name, moment)
    for strategy, kind, name, moment in product(STRATEGIES, MODELS, PASSES, MOMENTS)
    if is_wrapped(strategy, kind) and applies(strategy, kind, name, moment)
]


def refusal(strategy: str, name: str, moment: str) -> str | None:
    """The sentence that refuses a pass, after which training goes on; None where the pass runs."""
    if name == "verified" and (moment == "before step" or (moment == "before backward" and strategy in FSDP1_OPTIONS)):
        return "verify cannot run"
    return None


@pytest.mark.smoke
@pytest.mark.cover("values")
@pytest.mark.parametrize(("strategy", "kind", "name", "moment"), CASES)
def test_a_pass_changes_no_training_step(strategy: str, kind: str, name: str, moment: str, workers_2: Workers) -> None:
    for error in workers_2.run(error_after_steps, strategy, kind, name, moment):
        # DeepSpeed and layers of 4 bits train in fp32.
        assert error < (1e-4 if strategy in ZERO or kind == "4 bits" else 1e-9)


def error_after_steps(strategy: str, kind: str, name: str, moment: str) -> float:
    """The largest error of a parameter, relative to how far the largest change took one."""
    model, reference = build(kind, strategy)
    started = {key: value.detach().clone() for key, value in reference.named_parameters()}
    root = shard(model, strategy)

    def at(now: str) -> None:
        if moment not in (now, EVERY):
            return
        sentence = refusal(strategy, name, moment)
        with nullcontext() if sentence is None else pytest.raises(liger_dist.LigerDistError, match=sentence):
            PASSES[name](root)

    at("before the optimizer")
    optimizer = torch.optim.SGD([p for p in root.parameters() if p.requires_grad], lr=LEARNING_RATE, foreach=False)
    if strategy in ZERO:
        root = initialized(root, optimizer, ZERO[strategy])
    own = torch.optim.SGD((p for p in reference.parameters() if p.requires_grad), lr=LEARNING_RATE)
    at("before the first step")
    for step in range(STEPS):
        loss = root(**make_batch(dist.get_rank(), seed=step)).loss
        at("before backward")
        root.backward(loss) if strategy in ZERO else loss.backward()
        at("before step")
        if strategy in ZERO:
            root.step()
        else:
            optimizer.step()
            optimizer.zero_grad()
        at("after step")
        for rank in range(dist.get_world_size()):
            total, count = true_loss_sum(reference, make_batch(rank, seed=step))
            (total / count / dist.get_world_size()).backward()
        own.step()
        own.zero_grad()
    if strategy in FSDP2_OPTIONS and kind not in ADAPTED:
        no_grad(root)
        assert all(isinstance(parameter, DTensor) for parameter in root.parameters())
    try:
        return largest_error(model if strategy in ZERO else root, reference, started)
    finally:
        if strategy in ZERO:
            root.destroy()


def initialized(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int) -> Any:
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero_settings({"stage": stage}))
    return engine


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp1, not resharded"])
@pytest.mark.parametrize("name", ["no_grad", "listed", "other_step", "zeroed_and_listed"])
def test_fsdp1_accumulates_by_no_sync_around_a_pass(name: str, strategy: str, workers_2: Workers) -> None:
    for found, true in workers_2.run(gradients_around, strategy, name):
        assert found == pytest.approx(true, rel=1e-9)


def gradients_around(strategy: str, name: str) -> tuple[float, float]:
    """Norm of the gradients of this rank after a micro-batch without reduction, a pass and one with it; with the pass
    and without."""
    norms = []
    for with_pass in (True, False):
        root = shard(build("full", strategy)[0], strategy)
        other = nn.Linear(2, 2)
        with root.no_sync():
            root(**make_batch(dist.get_rank(), seed=0)).loss.backward()
        if with_pass and name == "no_grad":
            no_grad(root)
        loss = root(**make_batch(dist.get_rank(), seed=1)).loss
        if name == "zeroed_and_listed":
            torch.optim.SGD(root.parameters() if with_pass else [*root.parameters()], lr=0.1).zero_grad()
        if with_pass and name.endswith("listed"):
            listed(root)
        if with_pass and name == "other_step":
            torch.optim.SGD(other.parameters(), lr=0.1).step()
        loss.backward()
        gradients = (p.grad for p in root.parameters() if p.grad is not None)
        norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
    return norms[0], norms[1]


@pytest.mark.parametrize("part", ["layers.0", "layers", ""])
def test_what_was_frozen_in_its_first_forward_trains_in_bf16(part: str, workers_2: Workers) -> None:
    for error in workers_2.run(gradient_error_after_a_freeze, part):
        assert error == 0


def gradient_error_after_a_freeze(part: str) -> float:
    """The largest difference from gradients of a model that was never frozen."""
    roots = [
        liger_dist.wrap(make_model("llama", dtype=torch.float32), liger_dist.FSDP2(param_dtype=torch.bfloat16))
        for _ in range(2)
    ]
    frozen_first, _ = roots
    for name, parameter in frozen_first.named_parameters():
        parameter.requires_grad_(part not in name)
    frozen_first(**batch())
    frozen_first.requires_grad_(True)
    for root in roots:
        root(**batch()).loss.backward()
    pairs = zip(*(root.parameters() for root in roots), strict=True)
    return max(float((full(one.grad) - full(other.grad)).abs().max()) for one, other in pairs)


def largest_error(root: nn.Module, reference: nn.Module, started: dict[str, Tensor]) -> float:
    truth = {name: value for name, value in reference.named_parameters() if value.requires_grad}
    found = full_parameters(root, truth)
    largest = max(float((truth[key] - started[key]).abs().max()) for key in truth)
    return max(float((found[key] - truth[key]).abs().max()) for key in truth) / largest
