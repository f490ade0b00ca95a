"""The sizes of tensors that operations allocate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operation returns."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() * leaf.element_size() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.bytes = max(self.bytes, *sizes, 0) if sizes else self.bytes
        return result


class WeightGradients(TorchDispatchMode):
    """Number of tensors in the shape of ``weight`` that operations allocate, without views of it and of ``others``."""

    def __init__(self, weight: Tensor, others: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._shape = weight.shape
        self._known = {tensor.untyped_storage().data_ptr() for tensor in (weight, *others)}
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape == self._shape:
                storage = leaf.untyped_storage().data_ptr()
                self.count += storage not in self._known
                self._known.add(storage)
        return result
