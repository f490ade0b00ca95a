"""Fused training kernels for Hugging Face models under any sharding: ``model = liger_dist.wrap(model,
strategy="fsdp2")``."""

from ._version import __version__ as __version__
from .config import WrapConfig as WrapConfig
from .errors import LigerDistError as LigerDistError
from .explain import Explanation as Explanation
from .explain import explain as explain
from .losses.arguments import LossOutput as LossOutput
from .losses.cross_entropy import cross_entropy as cross_entropy
from .losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .verify import Verification as Verification
from .verify import verify as verify
from .wrap import unwrap as unwrap
from .wrap import wrap as wrap
