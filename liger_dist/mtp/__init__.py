"""Multi-token prediction: modules that predict further tokens, their checkpoints, and their losses."""

from .checkpoints import has_prediction as has_prediction
from .multi_token_prediction import MultiTokenPrediction as MultiTokenPrediction
