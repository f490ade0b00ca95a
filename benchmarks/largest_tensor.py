"""The largest tensor that the forward of lm_head allocates in a training step, fused and not.

python -m benchmarks.largest_tensor
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import liger_dist


class LargestTensor(TorchDispatchMode):
    """While active, notes the largest storage that any operation hands out and its inputs did not bring, and the most
    numbers in a tensor of each width."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0
        self.shape: tuple[int, ...] = ()
        self.numbers_of_width: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or _storage(leaf) in before or leaf.numel() == 0:
                continue
            if leaf.nbytes > self.num_bytes:
                self.num_bytes, self.shape = leaf.nbytes, tuple(leaf.shape)
            if leaf.dim() >= 2:
                width = leaf.shape[-1]
                self.numbers_of_width[width] = max(self.numbers_of_width.get(width, 0), leaf.numel())
        return result

    def in_words(self, tokens: int, vocab_size: int, own_rows: int, *, is_fused: bool) -> str:
        """Of a head's largest tensors, how much of the logits of one process's ``tokens`` they were.

        Args:
            own_rows: of the head on this process: logits are as wide as the vocabulary, or as these.
        """
        numbers = max(self.numbers_of_width.get(width, 0) for width in (vocab_size, own_rows))
        share = numbers / (tokens * vocab_size)
        return (
            f"at most {share:.1%} of a micro-batch's logits existed at once, the head's largest tensor was "
            f"{list(self.shape)}, {self.num_bytes / 2**20:.2f} MiB"
            + (" (a smaller --memory_budget holds less)" if is_fused and share > 0.5 else "")
        )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def measured(module: nn.Module) -> Iterator[LargestTensor]:
    """Measures every forward of ``module`` that runs inside the context."""
    largest = LargestTensor()

    def enter(*_: Any) -> None:
        largest.__enter__()  # type: ignore[no-untyped-call]

    def leave(*_: Any) -> None:
        largest.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    hooks = (module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True))
    try:
        yield largest
    finally:
        for hook in hooks:
            hook.remove()


def main() -> None:
    """Prints how much of the logits exists at once in one step of a small Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, vocab_size = 2048, 32000
    for is_fused in (True, False):
        config = LlamaConfig(vocab_size=vocab_size, hidden_size=256, num_hidden_layers=2, num_attention_heads=4)
        model = LlamaForCausalLM(config)
        if is_fused:
            liger_dist.wrap(model, config=liger_dist.WrapConfig(memory_budget=2**24))
        ids = torch.randint(vocab_size, (1, tokens))
        with measured(model.get_output_embeddings()) as largest:
            model(input_ids=ids, labels=ids).loss.backward()
        print(
            "fused:" if is_fused else "full logits:",
            largest.in_words(tokens, vocab_size, vocab_size, is_fused=is_fused),
        )


if __name__ == "__main__":
    main()
