"""A module's original forward beside the kernel that will replace it, on small made-up values. Tolerances are those of
the kinds, in ``fused_layers``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from liger_dist.model.class_swap import swapped

from .attributes import Attributes
from .isolated import in_mode

Options = TypeVar("Options")

MOSTLY = 0.97
"""share of elements that are the same where a function rounds as a module does"""
PROBE_SCALES = (0.3, 3.0, 30.0, 300.0)
"""scales of probe values, compared one by one: clipping, as by relu6, shows at large values, and the approximation of
an activation at small ones"""


def agrees(
    values: Sequence[Tensor], original: Callable[..., Any], compute: Callable[..., Any], *, tolerance: float
) -> bool:
    """True if a module's original code and the function that will replace it have the same output and gradients.

    Args:
        values: arguments of both, floating, which each gets as leaves that require gradients.
        original: the original code; it computes something else if it returns no tensor.
        compute: the function.
        tolerance: relative L2 error of the output and of each gradient.
    """
    results: list[list[Any]] = []
    for function in (original, compute):
        leaves = [value.clone().requires_grad_() for value in values]
        with torch.enable_grad():
            output = function(*leaves)
        if not isinstance(output, Tensor):
            return False
        upstream = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, upstream, allow_unused=True)])
    return all(
        a is not None and b is not None and a.shape == b.shape and bool((b - a).norm() <= tolerance * a.norm())
        for a, b in zip(*results, strict=True)
    )


@contextmanager
def exchanged(module: nn.Module, parts: Mapping[str, Any]) -> Iterator[None]:
    """Gives a module other parameters, submodules and attributes, by their names, within the context."""
    places: tuple[dict[str, Any], ...] = (module._parameters, module._modules, vars(module))
    with ExitStack() as stack:
        for name, part in parts.items():
            stack.enter_context(swapped(next((held for held in places if name in held), places[-1]), name, part))
        yield


def run_class_forward(
    module: nn.Module, inputs: Sequence[Tensor], parts: Mapping[str, Any], *, training: bool = False
) -> Any:
    """Runs the forward of the module's class in the given mode; ``parts`` as for :func:`exchanged`."""
    with in_mode(module, training), exchanged(module, parts):
        forward: Any = type(module).forward
        return forward(module, *inputs)


def none_on_error(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of a model's file, with None for any error: whatever it raises on probe values, it computes
    something else, and its layer keeps it."""

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            return None

    return call


class Trial(Generic[Options]):
    """A module's original forward on made-up inputs and parameters, and the function of options that may compute the
    same.

    Args:
        inputs: of the forward, fp32.
        parameters: values for the module's parameters, by their names, fp32.
        compute: the function, of inputs, parameters and options.
        tolerance: relative L2 error of outputs and gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        compute: Callable[[Sequence[Tensor], Mapping[str, Tensor], Options], Tensor],
        *,
        tolerance: float,
    ) -> None:
        self.module, self.inputs, self.parameters, self.compute = module, tuple(inputs), dict(parameters), compute
        self.attributes = Attributes(module)
        """with what the original forward has read from configs"""
        self._tolerance = tolerance

    def original(self, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor], *, training: bool = False) -> Any:
        """Runs the forward of the module's class."""
        with self.attributes.noting(self.module):
            return run_class_forward(self.module, inputs, parameters, training=training)

    def agrees(self, options: Options, *, training: bool = False) -> bool:
        """True if outputs and gradients are those of the function."""

        def split(leaves: Sequence[Tensor]) -> tuple[Sequence[Tensor], dict[str, Tensor]]:
            num_inputs = len(self.inputs)
            return leaves[:num_inputs], dict(zip(self.parameters, leaves[num_inputs:], strict=True))

        return agrees(
            (*self.inputs, *self.parameters.values()),
            lambda *leaves: self.original(*split(leaves), training=training),
            lambda *leaves: self.compute(*split(leaves), options),
            tolerance=self._tolerance,
        )

    @torch.no_grad()
    def has_output_of(self, options: Options) -> bool:
        """True if the output is that of the function; its gradients are not compared."""
        original = self.original(self.inputs, self.parameters)
        ours = self.compute(self.inputs, self.parameters, options)
        is_alike = isinstance(original, Tensor) and original.shape == ours.shape
        return is_alike and bool((ours - original).norm() <= self._tolerance * original.norm())

    def first_that_rounds_alike(self, candidates: Iterable[Options]) -> Options | None:
        """Returns the first of the candidates that rounds as the module does: inputs in bf16, and parameters in bf16
        and in fp32; None if none does."""
        dtypes = (torch.bfloat16, torch.float32)
        return next((one for one in candidates if all(self.rounds_alike(one, dtype) for dtype in dtypes)), None)

    def rounds_alike(self, options: Options, dtype: torch.dtype) -> bool:
        """True if nearly all elements are the same, with inputs in bf16 and parameters in ``dtype``."""
        inputs = [tensor.bfloat16() for tensor in self.inputs]
        parameters = {name: value.to(dtype) for name, value in self.parameters.items()}
        try:
            with torch.no_grad():
                original = self.original(inputs, parameters)
        except RuntimeError:
            # A module that does not mix dtypes is never called that way; with one dtype it has to run.
            return dtype != torch.bfloat16
        with torch.no_grad():
            ours = self.compute(inputs, parameters, options)
        return original.dtype == ours.dtype and float((original == ours).float().mean()) > MOSTLY
