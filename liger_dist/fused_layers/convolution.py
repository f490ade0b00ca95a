"""Depthwise causal convolutions before recurrences: one autograd function, and the match of functions that compute
one.

In transformers a recurrent layer calls a function of its module, ``causal_conv1d_fn``, with the weight of a Conv1d. A
function whose code in torch agrees with the kernels' definition on probe values, forward and backward, is replaced in a
copy of the layer's forward, see :mod:`liger_dist.trials.functions`.
"""

from __future__ import annotations

from functools import lru_cache, partial
from inspect import Parameter, signature, unwrap
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from liger_dist.errors import refuse_second_order
from liger_dist.model.torch_modes import is_traced
from liger_dist.trials.functions import called_functions
from liger_dist.trials.isolated import torch_defaults
from liger_dist.trials.kinds import agrees, none_on_error
from liger_dist_kernels import MOST_TAPS, Activation, Backend, causal_convolution_bwd, causal_convolution_fwd

from .norm import refuse_freed
from .swap import has_kernels, is_local

TOLERANCE = 1e-5
PARAMETERS = ("weight", "bias", "activation")
"""parameters of a candidate after its input"""
ACTIVATIONS: dict[str | None, Activation | None] = {None: None, "silu": "silu", "swish": "silu"}


class _CausalConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_CK: Tensor,
        bias_C: Tensor | None,
        seq_idx_BS: Tensor | None,
        activation: Activation | None,
        backend: Backend,
    ) -> Tensor:
        ctx.activation, ctx.backend = activation, backend
        ctx.save_for_backward(x, weight_CK, bias_C, seq_idx_BS)
        return causal_convolution_fwd(x, weight_CK, bias_C, seq_idx_BS, activation=activation, backend=backend)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Any, ...]:
        refuse_second_order("layer kernels", "wrap with WrapConfig(layer_kernels=False)")
        x, weight_CK, bias_C, seq_idx_BS = ctx.saved_tensors
        refuse_freed(weight_CK, "a convolution")
        gradients = causal_convolution_bwd(
            d_y,
            x,
            weight_CK,
            bias_C,
            seq_idx_BS,
            needs_weight=any(ctx.needs_input_grad[1:3]),
            activation=ctx.activation,
            backend=ctx.backend,
        )
        return *gradients, None, None, None


def causal_convolution(
    x: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None = None,
    seq_idx_BS: Tensor | None = None,
    *,
    activation: Activation | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Convolves each channel of ``x`` ``[B, C, S]`` with its K taps, the last of which is that of the token itself.

    Args:
        seq_idx_BS: integers ``[B, S]``, the number of each token's document; None: each row is one document.
    """
    seq_idx_BS = None if seq_idx_BS is None else seq_idx_BS.contiguous()
    y: Tensor = _CausalConvolution.apply(x, weight_CK, bias_C, seq_idx_BS, activation, backend)  # type: ignore[no-untyped-call]
    return y


class Convolution:
    """Replacement of a function that computes a causal convolution, in the globals of one forward."""

    def __init__(self, namespace: dict[str, Any], name: str, backend: Backend) -> None:
        """Replaces the function ``name`` of the globals ``namespace`` of the forward that calls it."""
        self.namespace, self.name, self.backend = namespace, name, backend
        self.function: FunctionType = namespace[name]
        self._input = next(iter(signature(self.function).parameters))
        self._activation = self._activation_now()

    def is_current(self) -> bool:
        """True if neither the function nor its activation has been patched since."""
        is_same = self.namespace.get(self.name, self.function) is self.function
        return is_same and all(a is b for a, b in zip(self._activation, self._activation_now(), strict=True))

    def _activation_now(self) -> tuple[Any, ...]:
        """Returns transformers' table of activations in the function's file, its entries, and their forwards."""
        table = unwrap(self.function).__globals__.get("ACT2FN")
        names = [name for name in ACTIVATIONS if name is not None]
        entries = [dict.get(table, name) for name in names] if isinstance(table, dict) else []
        return table, *entries, *(getattr(entry, "forward", None) for entry in entries)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_current():
            return self.namespace[self.name](*args, **kwargs)
        given: dict[str, Any] = dict(zip((self._input, *PARAMETERS), args, strict=False)) | kwargs
        x: Any = given.get(self._input)
        weight: Any = given.get("weight")
        bias: Any = given.get("bias")
        # Without autocast: the sum is fp32 whatever the dtypes, and the result has that of the input.
        is_supported = len(args) <= 1 + len(PARAMETERS) and not is_traced() and has_kernels(x) and is_local(weight)
        is_supported = is_supported and weight.shape[1] <= MOST_TAPS and given.get("activation") in ACTIVATIONS
        if not is_supported or not (bias is None or is_local(bias)):
            seq_idx = given.pop("seq_idx", None)
            if seq_idx is None:
                return self.function(*args, **kwargs)
            lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
            parts = [self.function(**given | {self._input: part}) for part in x.split(lengths, 2)]
            return torch.cat(parts, 2)
        activation = ACTIVATIONS[given.get("activation")]
        return causal_convolution(x, weight, bias, given.get("seq_idx"), activation=activation, backend=self.backend)


def convolutions_of(forward: Any, namespace: dict[str, Any], backend: Backend) -> dict[str, Convolution]:
    """Returns replacements, by name, of the functions among its globals ``namespace`` that ``forward`` calls for causal
    convolutions."""
    called = called_functions(forward)
    return {name: Convolution(namespace, name, backend) for name in called if is_causal_convolution(called[name])}


@lru_cache(maxsize=64)
def is_causal_convolution(function: FunctionType) -> bool:
    """True if the function computes what :func:`causal_convolution` does. If it calls another package's kernels for
    tensors on a GPU, the code that it falls back to without the package is compared."""
    parameters = list(signature(function).parameters.values())
    further = [one for one in parameters[4:] if one.kind is not Parameter.VAR_KEYWORD]
    if tuple(one.name for one in parameters[1:4]) != PARAMETERS or any(
        one.default is Parameter.empty for one in further
    ):
        return False
    # The result is used for calls under other settings than those of the first one.
    with torch_defaults():
        return all(_agrees(unwrap(function), *case) for case in product((1, 3, 4), (None, "silu"), (True, False)))


def reason_against(module: nn.Module) -> str | None:
    """Says why a module with such a function runs it all the same, as a clause; None if kernels compute it."""
    taps = max((one.kernel_size[0] for one in module.children() if isinstance(one, nn.Conv1d)), default=0)
    if taps > MOST_TAPS:
        return f"it has {taps} taps, kernels at most {MOST_TAPS}"
    activation = getattr(module, "activation", None)
    if isinstance(activation, str) and activation not in ACTIVATIONS:
        return f"its activation is {activation}, that of kernels silu"
    return None


def _agrees(function: Any, taps: int, activation: Activation | None, has_bias: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 6, 9), (6, taps), (6,))[: 2 + has_bias]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    compute = partial(causal_convolution, activation=activation, backend="reference")
    return agrees(values, none_on_error(partial(function, activation=activation)), compute, tolerance=TOLERANCE)
