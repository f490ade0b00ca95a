"""How the tokens of a run are spread over experts: numbers for ``metrics.jsonl``, ``experts.json`` and ``experts.png``.

Counts stay on the device until they are read. A forward that is computed again for activation checkpointing counts
again, so that all numbers are shares.

Legend: L layers with experts, E experts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .distributed import device, total_on_device
from .metrics import NUMBERS_OF_EXPERTS
from .output_folder import write_text

_PAIRS, _ENTROPY = "_liger_dist_train_pairs", "_liger_dist_train_entropy"
"""attributes of modules of experts and of routers: pairs of token and expert, and the sum of entropies with its number
of tokens"""


class ExpertLoads:
    """Counts the tokens of each expert in training forwards; made after the model has been wrapped."""

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: wrapped, also inside DDP, FSDP1 or a DeepSpeed engine.
        """
        configs: Any = (getattr(module, "config", None) for module in model.modules())
        text = next(config for config in configs if hasattr(config, "get_text_config")).get_text_config()
        counts = [getattr(text, name, None) for name in NUMBERS_OF_EXPERTS]
        self.num_experts = next((count for count in counts if isinstance(count, int) and count > 1), 0)
        modules = list(model.modules())
        kinds = {type(module) for module in modules if _records_router(module)}
        recorders = [_recorder(cls) for cls in kinds]
        self.modules = [m for m in modules if hasattr(m, "is_transposed") and hasattr(m, "num_experts")]
        self._routers: list[nn.Module] = []
        for module in self.modules if self.num_experts else ():
            setattr(module, _PAIRS, torch.zeros(self.num_experts + 1, device=device()))
            module.register_forward_pre_hook(self._count_pairs)
        for target, index in dict.fromkeys(recorders) if self.modules else ():
            for module in (m for m in modules if isinstance(m, target)):
                if index == 0:
                    setattr(module, _ENTROPY, torch.zeros(2, device=device()))
                    module.register_forward_hook(self._add_entropy)
                    self._routers.append(module)
        self._total_LE: Tensor | None = None
        self._before_step: Tensor | float = 0.0
        self.token_mask: Tensor | None = None
        """of the running forward: bool, false for padding, which is not counted; None without padding"""

    def read(self) -> dict[str, float]:
        """Computes the entries of ``metrics.jsonl`` for the forwards since the last call, over all ranks; none for a
        model without experts. One all-reduce."""
        if not (self.modules and self.num_experts):
            return {}
        pairs = torch.stack([getattr(module, _PAIRS) for module in self.modules])
        entropies = [getattr(module, _ENTROPY) for module in self._routers]
        flat = total_on_device(torch.cat([pairs.flatten(), *entropies]).double())
        pairs, entropies_R2 = flat[: pairs.numel()].view_as(pairs), flat[pairs.numel() :].view(-1, 2)
        for module in self.modules:
            getattr(module, _PAIRS).zero_()
        for module in self._routers:
            getattr(module, _ENTROPY).zero_()
        self._before_step = 0.0
        counts_LE = pairs[:, :-1]
        if not counts_LE.any():
            return {}
        self._total_LE = counts_LE if self._total_LE is None else self._total_LE + counts_LE
        loads_LE = counts_LE / counts_LE.mean(1, keepdim=True)
        numbers = [loads_LE.max(), loads_LE.min(), pairs[:, -1].sum() / pairs.sum()]
        if self._routers:
            numbers.append((entropies_R2[:, 0] / entropies_R2[:, 1]).mean())
        names = ("experts/max_load", "experts/min_load", "experts/dropped", "experts/router_entropy")
        return dict(zip(names, torch.stack(numbers).tolist(), strict=False))

    def of_step(self) -> Tensor:
        """Returns this rank's counts since the last call, ``[L, E]``; what names no expert is in none."""
        now = torch.stack([getattr(module, _PAIRS) for module in self.modules])
        counts, self._before_step = now - self._before_step, now
        return counts[:, :-1]

    def _count_pairs(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled() and len(args) > 1:
            pairs: Tensor = getattr(module, _PAIRS)
            index = args[1].detach().flatten(0, -2)
            weight = self._weight_of(index.shape[0]).repeat_interleave(index.shape[1])
            index = index.reshape(-1)
            # What names no expert is counted after the last one.
            index = torch.where((index < 0) | (index >= pairs.shape[0] - 1), pairs.shape[0] - 1, index).long()
            pairs.scatter_add_(0, index, weight)

    def _add_entropy(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled():
            logits = (output[0] if isinstance(output, tuple) else output).detach().float().flatten(0, -2)
            logs = logits.log_softmax(-1)
            weight = self._weight_of(logits.shape[0])
            entropy = -((logs.exp() * logs).sum(-1) * weight).sum()
            sums: Tensor = getattr(module, _ENTROPY)
            sums += torch.stack([entropy, weight.sum()])

    def _weight_of(self, tokens: int) -> Tensor:
        """Returns 1 for a token and 0 for padding: fp32 ``[tokens]``."""
        mask = self.token_mask
        # Layers of multi-token prediction see fewer places, and experts of other ranks other tokens.
        if mask is None or mask.numel() != tokens:
            return torch.ones(tokens, device=device())
        return mask.reshape(-1).float()

    def write(self, folder: Path) -> bool:
        """Writes the load of each expert over the run, relative to the mean of its layer, as a file and as a plot.

        Returns:
            False without loads.
        """
        if self._total_LE is None:
            return False
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        loads = (self._total_LE / self._total_LE.mean(1, keepdim=True)).cpu()
        write_text(folder / "experts.json", json.dumps({"loads": loads.tolist()}) + "\n")
        figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
        image = axes.imshow(loads, aspect="auto", interpolation="nearest", vmin=0.0)
        axes.set(xlabel="expert", ylabel="layer with experts")
        figure.colorbar(image, label="tokens, relative to the mean of the layer")
        figure.savefig(folder / "experts.png", dpi=120)
        pyplot.close(figure)
        return True


def _records_router(module: nn.Module) -> bool:
    # Of the class: a PeftModel passes on the attributes of its base model.
    recorded = getattr(type(module), "_can_record_outputs", None)
    return isinstance(recorded, dict) and hasattr(recorded.get("router_logits"), "target_class")


def _recorder(cls: Any) -> tuple[type[nn.Module], int]:
    """Returns the class of a model's routers, and which of their outputs are the logits, as transformers has it."""
    recorder = cls._can_record_outputs["router_logits"]
    return recorder.target_class, recorder.index
