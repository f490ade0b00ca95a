"""Layer operations with gradients, on whole local tensors: norms, gated activations, rotary embedding."""

from .gated_activation import gated_activation as gated_activation
from .norm import norm as norm
from .rotary import rotary as rotary
