"""Fused kernels for training language models. Tensors in, tensors out; nothing here knows of processes or models."""

from ._triton_utils import BACKENDS as BACKENDS
from ._triton_utils import Backend as Backend
from .cross_entropy import GradientCoefficients as GradientCoefficients
from .cross_entropy import SoftmaxStatistics as SoftmaxStatistics
from .cross_entropy import cross_entropy_bwd as cross_entropy_bwd
from .cross_entropy import cross_entropy_fwd as cross_entropy_fwd
from .cross_entropy import merge_statistics as merge_statistics
from .linear_cross_entropy import GradientNeeds as GradientNeeds
from .linear_cross_entropy import LinearCrossEntropyResult as LinearCrossEntropyResult
from .linear_cross_entropy import VocabularySlice as VocabularySlice
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .linear_cross_entropy import plan_chunks as plan_chunks
from .options import LossOptions as LossOptions
from .token_loss import TokenGradients as TokenGradients
from .token_loss import TokenTerms as TokenTerms
from .token_loss import gradient_coefficients as gradient_coefficients
from .token_loss import token_terms as token_terms
