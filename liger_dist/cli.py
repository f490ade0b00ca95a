"""Command line: ``liger-dist explain`` and ``verify`` for the model that a training script builds, ``deepspeed`` before
a command that trains with DeepSpeed, and ``doctor`` for the machine.

liger-dist explain my_training.py:make_model
torchrun --nproc-per-node 4 -m liger_dist verify my_training.py:make_model --strategy fsdp2
liger-dist deepspeed deepspeed --num_gpus 4 train.py --deepspeed zero3.json
torchrun --nproc-per-node 8 -m liger_dist doctor
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .doctor import diagnose
from .errors import LigerDistError
from .explain import explain
from .record import is_wrapped
from .sharding import STRATEGIES
from .sharding.process_groups import compute_device
from .verify import verify
from .wrap import wrap

RANDOM_BATCH = (2, 64)
"""number of sequences and of tokens in each"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 if all is well, 1 if verify or doctor has problems to report, 2 after an error that
    is printed in one sentence."""
    options = _parser().parse_args(arguments)
    try:
        if options.command is _deepspeed:
            _deepspeed(options.run)
        with _process_group():
            report, is_fine = options.command(options)
            if _rank() == 0:
                print(report)
    except LigerDistError as error:
        # Every rank prints it: the fault may be one rank's alone.
        where = f" [rank {_rank()}]" if "RANK" in os.environ else ""
        print(f"liger-dist{where}: {error}", file=sys.stderr)
        return 2
    return 0 if is_fine else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="liger-dist", description="Explain, verify and diagnose models wrapped by liger_dist."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, command, what in (
        ("explain", _explain, "show the facts, the sharding adapter in use, and why layers keep their own code"),
        ("verify", _verify, "run one micro-batch and compare it with the model's own loss"),
    ):
        sub = commands.add_parser(name, help=what, description=what)
        sub.set_defaults(command=command)
        sub.add_argument(
            "factory",
            help="module:function or file.py:function that takes no argument and returns the model, wrapped (sharded, "
            "or in a DeepSpeed engine) or not",
        )
        sub.add_argument("--strategy", choices=tuple(STRATEGIES), help="wrap the model with it; default: auto")
        sub.add_argument("--mesh", type=_numbers, help="shape of the mesh, such as 2,4")
        if name == "verify":
            sub.add_argument(
                "--batch",
                help="module:function or file.py:function that returns this rank's batch; default: random tokens",
            )
    what = "look at versions, GPUs, kernels, links and the host, and say what to do where something is wrong"
    commands.add_parser("doctor", help=what, description=what).set_defaults(command=_doctor)
    what = "run a command that trains with DeepSpeed, and apply the liger_dist section of its JSON"
    sub = commands.add_parser("deepspeed", help=what, description=what)
    sub.set_defaults(command=_deepspeed)
    sub.add_argument("run", nargs=argparse.REMAINDER, metavar="command ...", help="the usual command")
    return parser


def _deepspeed(command: Sequence[str]) -> NoReturn:
    # Imports DeepSpeed, which the other commands may not need.
    from .integrations.deepspeed import run

    run(command)


def _doctor(options: argparse.Namespace) -> tuple[str, bool]:
    diagnosis = diagnose()
    return str(diagnosis), diagnosis.ok


def _explain(options: argparse.Namespace) -> tuple[str, bool]:
    return str(explain(_model(options))), True


def _verify(options: argparse.Namespace) -> tuple[str, bool]:
    model = _model(options)
    verification = verify(model, _load(options.batch)() if options.batch else _random_batch(model))
    return str(verification), verification.ok


def _model(options: argparse.Namespace) -> nn.Module:
    model = _load(options.factory)()
    if not isinstance(model, nn.Module):
        raise LigerDistError(f"{options.factory} returned a {type(model).__name__}; expected a model.")
    if not is_wrapped(model):
        if not any(parameter.is_meta for parameter in model.parameters()):
            model.to(compute_device())
        wrapped: nn.Module = wrap(model, options.strategy or "auto", mesh=options.mesh)
        return wrapped
    if options.strategy or options.mesh:
        raise LigerDistError(
            f"{options.factory} returns a model that is wrapped already; leave --strategy and --mesh out, or return it "
            "unwrapped."
        )
    return model


def _load(spec: str) -> Callable[[], Any]:
    """Loads the function in ``module:function`` or ``file.py:function``."""
    place, _, name = spec.rpartition(":")
    if not place:
        raise LigerDistError(f"{spec!r} names no function; expected module:function or file.py:function.")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise LigerDistError(f"there is no file {place}; expected module:function or file.py:function.")
        # As Python does for a script, so that it can import files of the same folder.
        sys.path.insert(0, str(path.parent))
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise LigerDistError(f"{place} cannot be imported ({error}); expected module:function.") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise LigerDistError(f"{place} has no function {name!r}.")
    return function  # type: ignore[no-any-return]


def _random_batch(model: nn.Module) -> dict[str, Any]:
    """Builds random tokens that differ between data-parallel ranks and are equal within a tensor-parallel group."""
    storage = explain(model).facts.storage
    generator = torch.Generator().manual_seed(_rank() // storage.tensor_parallel_size)
    ids = torch.randint(storage.weight_shape[0], RANDOM_BATCH, generator=generator)
    first = next(model.parameters())
    ids = ids.to(compute_device() if storage.adapter.name != "replicated" else first.device)
    return {"input_ids": ids, "labels": ids.clone()}


@contextmanager
def _process_group() -> Iterator[None]:
    """Initialises the process group of torchrun within the context, if it started this process and no group exists
    yet."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; expected numbers such as 2,4") from None
