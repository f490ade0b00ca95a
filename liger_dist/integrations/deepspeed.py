"""DeepSpeed: a ``"liger_dist"`` section in its JSON, applied where the engine is built.

In your code, call :func:`initialize` instead of ``deepspeed.initialize``. If Trainer or Accelerate calls it, call
:func:`install` once before, or put ``liger-dist deepspeed`` before the usual command:

    liger-dist deepspeed deepspeed --num_gpus 4 train.py --deepspeed zero3.json
    liger-dist deepspeed torchrun --nproc-per-node 4 train.py --deepspeed zero3.json
"""

from __future__ import annotations

import base64
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import deepspeed
import hjson
from deepspeed.pipe import PipelineModule
from torch.optim import Optimizer

from liger_dist.config import WrapConfig
from liger_dist.errors import LigerDistError
from liger_dist.wrap import unwrap, wrap

from .deepspeed_section import NAME, read_section

_original: Callable[..., tuple[Any, ...]] = deepspeed.initialize


@functools.wraps(_original)
def initialize(
    *args: Any, **kwargs: Any
) -> tuple[deepspeed.DeepSpeedEngine, Optimizer, Iterable[object] | None, object]:
    """Wraps the model with the section's options, then calls ``deepspeed.initialize``. Without a section, or with
    ``"enabled": false``, only calls ``deepspeed.initialize``.

    Raises:
        LigerDistError: a section or a model that is refused, see :func:`.deepspeed_section.read_section`; the model is
            unchanged.
    """
    given = inspect.signature(_original).bind(*args, **kwargs).arguments
    wanted = config_of(given)
    model = given.get("model")
    if wanted is None or model is None:
        return _original(*args, **kwargs)
    if isinstance(model, PipelineModule):
        raise LigerDistError(
            f"the model is a PipelineModule, whose last stage computes the loss itself; leave {NAME} out of the "
            "DeepSpeed configuration, or train without pipeline parallelism."
        )
    wrap(model, "deepspeed", config=wanted)
    try:
        return _original(*args, **kwargs)
    except BaseException:
        unwrap(model)
        raise


def config_of(given: dict[str, Any]) -> WrapConfig | None:
    """Reads the section from the arguments of ``deepspeed.initialize``."""
    config = given.get("config") or given.get("config_params") or getattr(given.get("args"), "deepspeed_config", None)
    if isinstance(config, str):
        # A path, or the JSON itself in base64, as the launchers pass it; DeepSpeed reports errors in other values.
        is_path = os.path.exists(config)
        try:
            config = hjson.loads(Path(config).read_text() if is_path else base64.urlsafe_b64decode(config).decode())
        except ValueError:
            return None
    return read_section(config) if isinstance(config, dict) else None


def install() -> None:
    """Replaces ``deepspeed.initialize`` by this module's, for callers that look it up there. A second call does
    nothing."""
    deepspeed.initialize = initialize


def uninstall() -> None:
    deepspeed.initialize = _original


def run(command: Sequence[str]) -> NoReturn:
    """Replaces this process by ``command``. In it and in its children, :func:`install` follows the import of DeepSpeed.

    Raises:
        LigerDistError: there is no such program.
    """
    startup = str(Path(__file__).parent / "startup")
    paths = [startup, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    try:
        os.execvpe(command[0], list(command), os.environ | {"PYTHONPATH": os.pathsep.join(paths)})
    except (OSError, IndexError) as error:
        raise LigerDistError(
            f"the command {' '.join(command)!r} cannot be run ({error}); expected the one that starts the training, "
            "such as: deepspeed train.py --deepspeed zero3.json"
        ) from error
