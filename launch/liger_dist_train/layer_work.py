"""Counts the FLOPs and bytes of a decoder layer and of lm_head, from shapes alone.

Legend: T tokens of a micro-batch, D hidden size, F width of the MLP, E experts, K experts of a token, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .bases import quantisable
from .config import TrainConfig
from .expert_needs import Mixture, rows_of_a_token

BF16, FP32 = 2, 4
OF_NORM = (4, 8)
"""numbers of each token, by D, that a norm reads and writes in the forward and in the backward: branch and residual,
their sum and the output; gradients of both, the sum, and the output that is computed again"""
OF_SHARED_INPUTS = 9
"""the same of a layer's backward, for gradients of what several projections read: two sums for q, k and v, one for gate
and up, each of two numbers read and one written"""
OF_GATE = (3, 6)
"""the same by F: gate, up and their product; with their gradients, and the product that is computed again"""
OF_ROUTED = (3, 3)
"""the same by K x D: rows that are gathered for the experts, and the sum of the experts' outputs"""
OF_LOGITS = 3
"""numbers of a logit that the loss reads and writes, beside the products: the chunk twice, and its gradient"""
CASTS = FP32 + BF16
"""bytes of a number that is read in fp32 and written in bf16, or the other way"""
DEQUANTIZED = 0.5 + BF16
"""bytes of a weight of 4 bits that is read, and written in bf16 for a product"""


@dataclass(frozen=True)
class Work:
    """Work of a GPU."""

    products: float = 0.0
    """FLOPs of matrix products"""
    attention: float = 0.0
    """FLOPs of attention"""
    moved: float = 0.0
    """bytes that are read from memory and written to it"""

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.attention + other.attention, self.moved + other.moved)

    def __mul__(self, times: float) -> Work:
        return Work(self.products * times, self.attention * times, self.moved * times)


@dataclass(frozen=True)
class LayerWork:
    """Work of one layer, and what its parameters are."""

    forward: Work = Work()
    backward: Work = Work()
    trained: float = 0.0
    """numbers outside of experts that several ranks share"""
    frozen_bytes: float = 0.0
    """of frozen weights in the compute dtype, or in 4 bits"""
    shared_experts: float = 0.0
    """trained numbers of this rank's experts, where ``--ep`` shares them"""
    frozen_experts: float = 0.0
    """bytes of frozen ones"""
    routed_bytes: float = 0.0
    """of the rows that ``--ep`` sends once"""
    lora: int = 0
    """LoRA layers"""
    packed: int = 0
    """linear layers of 4 bits"""

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def numbers(self) -> float:
        """Counts the trained parameters."""
        return self.trained + self.shared_experts


@dataclass(frozen=True)
class Facts:
    """What the layers of a model have in common."""

    tokens: int
    text: Any
    config: TrainConfig
    under_autocast: bool
    packed: frozenset[Tensor] = frozenset()

    @classmethod
    def of(cls, config: TrainConfig, model: nn.Module, text: Any, *, under_autocast: bool) -> Facts:
        packed = frozenset(quantisable(model)) if config.load_in_4bit else frozenset()
        return cls(config.batch_size * config.sequence_length, text, config, under_autocast, packed)


def work_of_layer(layer: nn.Module, index: int, facts: Facts) -> LayerWork:
    """Counts the work of a decoder layer."""
    mixture = Mixture.of(layer, facts.text)
    found = _attention(facts, index) + _between_products(layer, facts, mixture)
    for name, module in layer.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found += _of_parameter(name, module, parameter, facts, mixture)
    if facts.config.activation_checkpointing:
        found = replace(found, backward=found.backward + found.forward + _last_product(layer, facts) * -1)
    return found


def _last_product(layer: nn.Module, facts: Facts) -> Work:
    """Counts the product that torch's checkpointing does not compute again: nothing is saved after an MLP's last."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear) and name.endswith("mlp.down_proj"):
            return _of_parameter(name, module, module.weight, facts, None).forward
    return Work()


def _of_parameter(name: str, module: nn.Module, parameter: Tensor, facts: Facts, mixture: Mixture | None) -> LayerWork:
    """Counts the products of a weight, for biases and norms nothing but the number."""
    numbers, is_trained, is_packed = parameter.numel(), parameter.requires_grad, parameter in facts.packed
    is_stacked = mixture is not None and parameter.dim() == 3
    rows = float(facts.tokens)
    ep = (facts.config.ep or 1) if is_stacked or (mixture is not None and name.endswith(".experts")) else 1
    if mixture is not None and (is_stacked or ".experts" in name):
        # A token is multiplied with those of K experts.
        rows *= mixture.of_a_token / mixture.experts
    held = numbers / ep
    storage = LayerWork(
        trained=held if is_trained and ep == 1 else 0.0,
        shared_experts=held if is_trained and ep > 1 else 0.0,
        frozen_experts=0.0 if is_trained or ep == 1 else held * BF16,
        frozen_bytes=0.0 if is_trained or ep > 1 else held * (0.5 if is_packed else BF16),
        lora=int(isinstance(module, nn.Linear) and ".lora_A." in name),
        packed=int(is_packed),
    )
    if parameter.dim() < 2 or (parameter.dim() == 2 and parameter.shape[0] == 1):
        return storage
    if is_stacked and "bias" in next((key for key, value in module._parameters.items() if value is parameter), ""):
        return storage
    return storage + of_product(
        rows * (parameter.shape[0] if is_stacked else 1),
        (parameter.shape[-2], parameter.shape[-1]),
        held,
        flops=2.0 * rows * numbers,
        is_trained=is_trained,
        more=DEQUANTIZED * held if is_packed else CASTS * held if facts.under_autocast and is_trained else 0.0,
    )


def of_product(
    rows: float, sides: tuple[int, int], held: float, *, flops: float, is_trained: bool, more: float = 0.0
) -> LayerWork:
    """Counts a product with a weight in the forward, and in the backward those of its gradients: of the input, and of
    the weight if it trains.

    Args:
        rows: of the input.
        held: numbers of the weight on this rank.
        more: bytes that each pass moves for the weight beside the product.
    """
    once = Work(products=flops, moved=BF16 * (rows * sum(sides) + held))
    passes = 2 if is_trained else 1
    extra = Work(moved=more)
    return LayerWork(forward=once + extra, backward=once * passes + extra)


def _attention(facts: Facts, index: int) -> LayerWork:
    """Counts scores and their products with values: two products in the forward, five in the backward."""
    text, config = facts.text, facts.config
    heads, scored, valued = head_sizes(text)
    keys = min(window_of(text, index) or config.sequence_length, config.sequence_length)
    # Of a causal sequence: the first tokens attend to fewer keys than the window has.
    pairs = facts.tokens * (keys - keys * keys / (2 * config.sequence_length))
    return LayerWork(
        forward=Work(attention=2.0 * pairs * heads * (scored + valued)),
        backward=Work(attention=2.0 * pairs * heads * (3 * scored + 2 * valued)),
    )


def head_sizes(text: Any) -> tuple[int, int, int]:
    """Returns the number of heads, and the sizes of their queries and values."""
    heads: int = text.num_attention_heads
    scored = getattr(text, "qk_head_dim", None) or getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, scored, getattr(text, "v_head_dim", None) or scored


def window_of(text: Any, index: int) -> int | None:
    """Returns the keys that a token of a layer attends to at most; None for all."""
    kinds = getattr(text, "layer_types", None)
    is_sliding = kinds is not None and kinds[index] == "sliding_attention"
    return getattr(text, "sliding_window", None) if is_sliding else None


def _between_products(layer: nn.Module, facts: Facts, mixture: Mixture | None) -> LayerWork:
    """Counts the bytes of norms, rotary embedding, attention's inputs and outputs, and gates."""
    text = facts.text
    D: int = text.hidden_size
    heads, scored, valued = head_sizes(text)
    groups = getattr(text, "num_key_value_heads", None) or heads
    rotated, values = scored * (heads + groups), valued * (heads + groups)
    names = [name for name, _ in layer.named_modules()]
    norms = sum("norm" in name and "q_norm" not in name and "k_norm" not in name for name in names)
    width = mixture.width if mixture is not None else text.intermediate_size
    # Under autocast the residual stream is in fp32.
    hidden = D * norms * (2 if facts.under_autocast else 1)
    of_heads = rotated * (5 if any("q_norm" in name for name in names) else 3) + values
    numbers = [OF_NORM[k] * hidden + OF_GATE[k] * width + (k + 1) * of_heads for k in (0, 1)]
    numbers[1] += OF_SHARED_INPUTS * D
    routed = 0.0
    if mixture is not None:
        copies = mixture.of_a_token * D
        numbers = [one + OF_ROUTED[k] * copies for k, one in enumerate(numbers)]
        routed = facts.tokens * D * BF16 * rows_of_a_token(facts.config.ep or 1, mixture.of_a_token)
    forward, backward = (Work(moved=float(facts.tokens * BF16 * one)) for one in numbers)
    return LayerWork(forward=forward, backward=backward, routed_bytes=routed)


def work_of_head(weight: Tensor, embedding: Tensor, facts: Facts, *, is_tied: bool) -> LayerWork:
    """Counts lm_head, its loss, whose gradients are computed with it, and the embedding."""
    V, D = weight.shape
    T, trains = facts.tokens, weight.requires_grad
    product = of_product(T, (V, D), V * D, flops=2.0 * T * V * D, is_trained=trains)
    logits = Work(moved=float(OF_LOGITS * T * V * BF16))
    # The gradient of the embedding is set to zero and added to.
    of_embedding = Work(moved=float(2 * BF16 * embedding.numel() + 3 * BF16 * T * D))
    backward = product.backward + (of_embedding if embedding.requires_grad else Work())
    numbers = V * D + (0 if is_tied else embedding.numel())
    casts = Work(moved=float(2 * CASTS * numbers)) if facts.under_autocast and trains else Work()
    return LayerWork(
        forward=product.forward + logits + Work(moved=2.0 * BF16 * T * D),
        backward=backward + casts,
        trained=float(numbers) if trains else 0.0,
        frozen_bytes=0.0 if trains else float(BF16 * numbers),
    )
