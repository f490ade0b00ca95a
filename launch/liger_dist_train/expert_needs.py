"""What layers with experts add to a memory plan.

Legend: D hidden, F features of an expert, E experts, K experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from .config import TrainConfig
from .metrics import EXPERTS_OF_A_TOKEN


def rows_of_a_token(ranks: int, experts: int) -> float:
    """Returns how many rows of a token are sent to the ranks of its experts: about one for each rank with some of them,
    on average over balanced routers, as if experts were drawn independently; none on one rank."""
    return 0.0 if ranks == 1 else ranks * (1 - (1 - 1 / ranks) ** experts)


def stacks_of_layer(layer: nn.Module) -> tuple[str, nn.Module] | None:
    """Finds the module with the experts of a layer, and its name; None for a layer without."""
    for name, module in layer.named_modules():
        down = module._parameters.get("down_proj")
        if down is not None and down.dim() == 3:
            return name, module
    return None


@dataclass(frozen=True)
class Mixture:
    """Experts of a layer."""

    experts: int
    of_a_token: int
    features: int
    shared: int
    """features of MLPs that all tokens take"""

    @classmethod
    def of(cls, layer: nn.Module, text: Any) -> Mixture | None:
        """Finds the experts of a layer; None for a layer without, or where the config does not say how many experts a
        token is sent to."""
        counts = (getattr(text, name, None) for name in EXPERTS_OF_A_TOKEN)
        of_a_token = next((count for count in counts if isinstance(count, int)), None)
        found = stacks_of_layer(layer)
        if found is None or of_a_token is None:
            return None
        name, module = found
        down: Any = module.down_proj
        # The block around the experts, and around LoRA on them.
        block = layer.get_submodule(name.partition(".experts")[0] if ".experts" in name else name.rpartition(".")[0])
        linears = (part for key, part in block.named_modules() if isinstance(part, nn.Linear) and ".lora_" not in key)
        wide = [part.out_features for part in linears if part.in_features == text.hidden_size]
        features = down.numel() // (down.shape[0] * text.hidden_size)
        return cls(down.shape[0], of_a_token, features, sum(size for size in wide if size > 1) // 2)

    @property
    def width(self) -> int:
        """Features of an MLP that keeps as much of each token."""
        return self.of_a_token * self.features + self.shared

    def kept(self, a: TrainConfig, hidden_size: int) -> int:
        """Counts what is kept of each token beside gate and up: the input of the experts, and logits of the router, as
        they are and as probabilities in fp32. With ``--ep`` a rank keeps one row of each token that it receives.
        Without layer kernels, also sorted tokens, activations and outputs."""
        D, K, F = hidden_size, self.of_a_token, self.features
        numbers = D + 3 * self.experts
        rows = rows_of_a_token(a.ep or 1, K)
        numbers += round(rows * D)
        if not a.layer_kernels:
            numbers += K * (3 * D + 2 * F)
        return numbers

    def in_backward(self, hidden_size: int) -> int:
        """Counts what the backward of the experts has of each token at once: gradients of outputs and activations, the
        activations, and the gradients of gate and up."""
        return self.of_a_token * (hidden_size + 4 * self.features)
