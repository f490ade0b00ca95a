"""The command ``liger-dist``: the training program's commands, and those of the library.

    liger-dist train run.yaml --steps 100
    liger-dist train --nproc_per_node 8 run.yaml --steps 100
    torchrun --standalone --nproc-per-node 8 -m liger_dist_train run.yaml --steps 100
    liger-dist export runs/train
    torchrun --standalone --nproc-per-node 8 -m liger_dist_train score --model teacher/ --data chats.jsonl

Importing torch takes seconds: nothing here does before a command needs it.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

HELP = """usage: liger-dist COMMAND ...

  train      train a causal language model: liger-dist train [run.yaml] [--name value ...]
  show       print rows as they will be trained, and which tokens count
  tokenizer  train a tokenizer on your data
  export     write a checkpoint as safetensors that transformers loads
  generate   let an exported model go on with a text, or answer
  score      write the most likely tokens of a teacher, to distil from
  cache      list or remove tokenised data
  explain    show what liger_dist finds in a model, and why
  verify     compare a micro-batch with the model's own loss and gradients
  doctor     look at versions, GPUs, kernels and links
  deepspeed  run a command that trains with DeepSpeed

On several GPUs: liger-dist train --nproc_per_node 8 [run.yaml] ..., which is
torchrun --nproc-per-node 8 -m liger_dist_train [run.yaml] ..., and
torchrun --nproc-per-node 8 -m liger_dist verify ...
"liger-dist COMMAND --help" lists the options of a command, "liger-dist --version" prints the version."""
SHOW_HELP = """usage: liger-dist show [FILE.yaml] [--rows N] [--name value ...]

Prints the first packed rows of each source as liger-dist train would train them: tokens that count in the loss, the
borders of documents, and rows that cannot be trained on. It takes the options of liger-dist train (--help-all lists
them) and builds no model. --rows: packed rows of each source [2]"""
OF_LIBRARY = ("explain", "verify", "doctor", "deepspeed")
"""commands of ``liger_dist.cli``"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``liger-dist``; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in COMMANDS:
        return run(given)
    if not given or given[0] in ("-h", "--help"):
        print(HELP)
        return 0 if given else 2
    if given[0] == "--version":
        print(f"liger_dist {version()}")
        return 0
    if given[0] not in OF_LIBRARY:
        known = ", ".join((*COMMANDS, *OF_LIBRARY))
        print(f"liger-dist: {given[0]!r} is no command; expected one of {known}, or --help.", file=sys.stderr)
        return 2
    from liger_dist.cli import main as of_library

    return of_library(given)


def version() -> str:
    """Reads the version of the library that would be imported, without importing it."""
    spec = find_spec("liger_dist")
    assert spec is not None
    assert spec.origin is not None
    found: str = run_path(str(Path(spec.origin).with_name("_version.py")))["__version__"]
    return found


def run(arguments: Sequence[str]) -> int:
    """Runs ``python -m liger_dist_train``: one of :data:`COMMANDS`, by default ``train``."""
    given = list(arguments)
    command = given.pop(0) if given and given[0] in COMMANDS else "train"
    # torchao's words on kernels that it was not built with, which no run uses, and torch's on torchao's classes.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Torch's words on checkpoints of one process.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    if command in HELPS and any(name in given for name in ("-h", "--help", "--help-all")):
        HELPS[command]("--help-all" in given)
        return 0
    at_failure: Callable[[], str] | None = None
    if command == "train":
        from .launcher import launch, outcome, processes_of

        processes, given = processes_of(given)
        if processes is not None:
            return launch(processes, given)
        at_failure = partial(outcome, given, time.time())
    from .fault_tolerance import run as guarded

    guarded(lambda: COMMANDS[command](given), at_failure)
    return 0


def _train(arguments: list[str]) -> None:
    from .config import parse
    from .distributed import start
    from .run import train

    config = parse(arguments)
    start()
    train(config)


def _score(arguments: list[str]) -> None:
    from .distributed import start
    from .parser import parse_as
    from .scoring import ScoreConfig, score

    config = parse_as(arguments, ScoreConfig)
    start()
    score(config)


def _show(arguments: list[str]) -> None:
    from .parser import parse_as
    from .show import ShowConfig, show

    show(parse_as(arguments, ShowConfig))


def _tokenizer(arguments: list[str]) -> None:
    from .tokenizer_training import main as train_tokenizer

    train_tokenizer(arguments)


def _generate(arguments: list[str]) -> None:
    from .generation import main as generate

    generate(arguments)


def _cache(arguments: list[str]) -> None:
    from .cache import main as cache

    cache(arguments)


def _export(arguments: list[str]) -> None:
    from .export import main as export

    export(arguments)


def _help_of_train(is_whole: bool) -> None:
    from .options import TrainOptions
    from .parser import help_text

    print(help_text(TrainOptions, "liger-dist train", is_whole=is_whole))


def _help_of_score(is_whole: bool) -> None:
    from .parser import help_text
    from .score_options import ScoreOptions

    print(help_text(ScoreOptions, "liger-dist score", is_whole=True))


def _help_of_show(is_whole: bool) -> None:
    from .options import TrainOptions
    from .parser import help_text

    print(SHOW_HELP)
    if is_whole:
        print(help_text(TrainOptions, "liger-dist show", is_whole=True))


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "show": _show,
    "tokenizer": _tokenizer,
    "export": _export,
    "generate": _generate,
    "score": _score,
    "cache": _cache,
}
HELPS: dict[str, Callable[[bool], None]] = {"train": _help_of_train, "score": _help_of_score, "show": _help_of_show}
