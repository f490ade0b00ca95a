"""Fused training kernels for Hugging Face models under any sharding: ``model = liger_dist.wrap(model,
strategy="fsdp2")``."""

from . import mtp as mtp
from ._version import __version__ as __version__
from .clip import clip_grad_norm_ as clip_grad_norm_
from .config import WrapConfig as WrapConfig
from .distillation import distillation_loss as distillation_loss
from .errors import LigerDistError as LigerDistError
from .explain import explain as explain
from .functional import cross_entropy as cross_entropy
from .functional import linear_cross_entropy as linear_cross_entropy
from .fused_layers.attention import register_attention as register_attention
from .fused_layers.expert_exchange import register_expert_parallelism as register_expert_parallelism
from .head_loss import lm_head_loss as lm_head_loss
from .losses.draft_vocabulary import draft_labels as draft_labels
from .losses.outputs import LossOutput as LossOutput
from .losses.spec import Uncast as Uncast
from .losses.support import pad_support as pad_support
from .model.compile import compile_layers as compile_layers
from .model.four_bit_experts import four_bit_experts as four_bit_experts
from .pipeline import pipeline_loss as pipeline_loss
from .pipeline import pipeline_stage as pipeline_stage
from .pipeline import pipeline_step as pipeline_step
from .record import is_wrapped as is_wrapped
from .routing import Routes as Routes
from .routing import record_routing as record_routing
from .routing import replay_routing as replay_routing
from .sequences import gather_sequence as gather_sequence
from .sequences import shard_sequence as shard_sequence
from .sharding.ddp import DDP as DDP
from .sharding.fsdp1 import FSDP1 as FSDP1
from .sharding.fsdp2.loading import sharded_loading as sharded_loading
from .sharding.fsdp2.strategy import FSDP2 as FSDP2
from .sharding.tensor_parallel import TensorParallel as TensorParallel
from .verify import verify as verify
from .wrap import unwrap as unwrap
from .wrap import wrap as wrap
