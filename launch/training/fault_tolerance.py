"""How a run ends: by itself, by a signal, or by an error that is printed once; and NaN and Inf."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from liger_dist import LigerDistError

from .distributed import gathered, is_first_to_report, say, say_error, speaks_for_machine, stop_launcher
from .watchdog import gone_ranks

LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "ncclRemoteError",
)
"""in messages of gloo and NCCL"""
SAME_SIGNAL = 2.0
"""seconds within which a second signal is the first one, handed on"""


def run(main: Callable[[], None]) -> None:
    """Calls ``main``; an error is printed by one rank, and every rank ends with a non-zero status.

    A refusal (LigerDistError) or a file that cannot be read or written is one sentence, anything else a traceback.
    torchrun ends the ranks that still wait for the one that failed, and starts all of them again; but not after a
    refusal, which would only come again.
    """
    try:
        main()
        if dist.is_initialized():
            # Together: a rank that leaves early closes connections that the others may still be using.
            dist.barrier()
            dist.destroy_process_group()
            sys.stdout.flush()
            # Meshes and models still hold their groups; gloo can abort while the interpreter takes them down.
            os._exit(0)
        return
    except LigerDistError as error:
        _report(f"error: {error}", is_refusal=True)
        stop_launcher()
    except OSError as error:
        _report(f"error: {error}", is_refusal=True)
    except SystemExit as error:
        # The command line could not be read, which argparse has said; or --help.
        if error.code:
            stop_launcher()
        raise
    except KeyboardInterrupt:
        _report("error: interrupted", is_refusal=True)
    except Exception as error:
        if dist.is_initialized() and any(sign in str(error) for sign in LOST):
            gone = ", ".join(map(str, gone_ranks()))
            who = f"rank {gone} is gone" if gone else "another rank is gone, and torchrun says which"
            _report(f"error: {who}: {(str(error).splitlines() or [''])[0]}", is_refusal=True)
        else:
            _report(traceback.format_exc(), is_refusal=False)
    # No clean-up: another rank may be inside a collective, and leaving the group would wait for it.
    os._exit(1)


def _report(message: str, *, is_refusal: bool) -> None:
    # Before they meet, a machine's processes find the same things wrong.
    if is_first_to_report() if dist.is_initialized() else speaks_for_machine() or not is_refusal:
        say(message)
    sys.stdout.flush()


class Interruption:
    """Turns SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 into a flag that the loop reads between micro-batches.

    Where the process has not ended after ``grace`` seconds, because a micro-batch or a checkpoint takes longer, a
    thread ends it. A second Ctrl-C ends it at once. The same signal comes twice where torchrun hands on what the whole
    process group was sent already.

    Args:
        newest_step: step of the newest checkpoint, for the message.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, grace: float, newest_step: Callable[[], int]) -> None:
        self.requested = False
        self._grace, self._newest_step = grace, newest_step
        self._since = 0.0
        self._ended = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        # Python runs a handler between two bytecodes only, and a collective or a kernel may take longer; the number of
        # a signal is written to this pipe at once.
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before_pipe = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        before = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        threading.Thread(target=self._end_in_time, args=(reading,), daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_pipe)
            os.close(writing)

    def _end_in_time(self, reading: int) -> None:
        while (number := os.read(reading, 1)) and number[0] not in self.SIGNALS:
            continue
        if not number or self._ended.wait(self._grace):
            return
        step = self._newest_step()
        say_error(
            f"asked to end by {signal.Signals(number[0]).name}, and neither the micro-batch nor a checkpoint was done "
            f"after --grace_seconds {self._grace:g}; the newest checkpoint is "
            + (f"that of step {step}" if step else "none")
        )
        os._exit(1)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT and time.monotonic() - self._since > SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._since = self._since or time.monotonic()
        self.requested = True


def refuse_numbers(step: int, loss: float, own_loss: float, places: list[str], broken_gradients: list[str]) -> NoReturn:
    """Where the loss or the gradient norm of a rank is NaN or Inf: called by every rank, before gradients are cleared.

    Args:
        loss: of all ranks together.
        own_loss: this rank's part of it.
        places: files of this rank's sequences, as far as they are known.
        broken_gradients: names of this rank's parameters.

    Raises:
        LigerDistError: the same on every rank, with the ranks, the files of their sequences and the parameters, as far
            as they are known.
    """
    by_rank = dict(enumerate(gathered((loss, own_loss, places, broken_gradients))))
    is_loss = not all(math.isfinite(theirs[0]) for theirs in by_rank.values())
    said = [f"the {'loss' if is_loss else 'gradient norm'} of step {step} is not finite"]
    for broken, (_, theirs, files, _) in by_rank.items():
        if not math.isfinite(theirs):
            of = f" from sequences with documents of {', '.join(files[:3])}" if files else ""
            said.append(f"rank {broken} has loss {theirs}{of}")
    names = list(dict.fromkeys(name for *_, theirs in by_rank.values() for name in theirs))
    if names:
        said.append(f"gradients that are not: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}")
    raise LigerDistError(
        f"{'; '.join(said)}. No checkpoint was written of it; go on from the newest one with --resume true and a lower "
        "--learning_rate or --max_grad_norm, or without the data that does it."
    )


def check_weights(step: int, broken_weights: list[str], held_out_loss: float | None) -> None:
    """Refuses, on every rank, weights that hold NaN or Inf after a step whose loss and gradient were: before they
    are written over the last ones that are.

    Raises:
        LigerDistError: with the parameters.
    """
    names = list(dict.fromkeys(name for theirs in gathered(broken_weights) for name in theirs))
    is_known = held_out_loss is None or math.isfinite(held_out_loss)
    if names or not is_known:
        what = (
            f"weights after step {step} are not finite: {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"
        )
        raise LigerDistError(
            f"{what if names else f'the held-out loss of step {step} is not finite'}. No checkpoint was written of it; "
            "go on from the newest one with --resume true and a lower --learning_rate."
        )
