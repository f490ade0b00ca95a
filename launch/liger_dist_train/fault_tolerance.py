"""How a run ends: at its last step, on a signal, on an error that one rank prints, on NaN or Inf, or because a rank
makes no progress."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from liger_dist import LigerDistError

from .distributed import (
    KILL_AFTER,
    STORE_LIMIT,
    answer_of,
    gathered,
    is_first_to_report,
    on_sign_of_life,
    own_store,
    rank,
    say,
    say_error,
    speaks_for_machine,
    speaks_without_store,
    stop_launcher,
    stop_launcher_without,
    world_size,
)
from .launcher import LAST_ERROR

T = TypeVar("T")
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "ncclRemoteError",
)
"""in messages of gloo and NCCL"""
WAIT_FOR_SPEAKER = 20.0
"""seconds in which the first process of a machine says what is wrong; it may still import torch"""
SAME_SIGNAL = 2.0
"""seconds within which a second signal is the first one, handed on"""
PHASES = (
    "preparing",
    "loading a checkpoint",
    "reading data",
    "computing",
    "evaluating",
    "writing a checkpoint",
)
"""of a step, in their order"""
SETUP = ("preparing", "loading a checkpoint")
LEAST_FOR_SETUP = 60.0
"""seconds that these have, however short the limit"""
Heartbeats = dict[int, dict[str, Any]]
"""by rank"""
NO_HEARTBEAT: dict[str, Any] = {"beats": -1, "place": [0, 0], "stack": [], "node": -1}
"""of a rank that has not begun"""
ANSWER_LIMIT = 5.0
"""seconds for the store to answer, where it is asked again and again"""
BEAT = 1.0
"""seconds between two signs of life, or a quarter of the limit if that is shorter"""
KEY = "liger_dist/watchdog"
"""prefix of the heartbeats in the store"""


def run(main: Callable[[], None], at_failure: Callable[[], str] | None = None) -> None:
    """Calls ``main``; an error is printed by one rank, with what ``at_failure`` returns below it, and every rank ends
    with a non-zero status.

    A refusal (LigerDistError) or a file that cannot be read or written is one sentence, anything else a traceback.
    torchrun ends the ranks that still wait for the one that failed, and starts all of them again; but not after a
    refusal, which would only come again.
    """
    try:
        main()
        if dist.is_initialized():
            # All ranks leave together: connections that a rank closes early may still be in use.
            dist.barrier()
            dist.destroy_process_group()
            sys.stdout.flush()
            # Meshes and models still hold their groups; gloo can abort while the interpreter takes them down.
            os._exit(0)
        return
    except LigerDistError as error:
        _report(f"error: {error}", at_failure, is_refusal=True)
        stop_launcher()
    except OSError as error:
        _report(f"error: {error}", at_failure, is_refusal=True)
    except SystemExit as error:
        # The command line could not be read, which argparse has said; or --help.
        if error.code:
            stop_launcher()
        raise
    except KeyboardInterrupt:
        _report("error: interrupted", at_failure, is_refusal=True)
    except Exception as error:
        if dist.is_initialized() and any(sign in str(error) for sign in LOST):
            gone = ", ".join(map(str, gone_ranks()))
            lost = f"rank {gone} is gone" if gone else "another rank is gone, and torchrun says which"
            _report(f"error: {lost}: {(str(error).splitlines() or [''])[0]}", at_failure, is_refusal=True)
        else:
            _report(traceback.format_exc(), at_failure, is_refusal=False)
    # No clean-up: another rank may be inside a collective, and leaving the group would wait for it.
    os._exit(1)


def _report(message: str, at_failure: Callable[[], str] | None, *, is_refusal: bool) -> None:
    is_speaker = is_first_to_report() if dist.is_initialized() else speaks_for_machine() or not is_refusal
    if not is_speaker and not dist.is_initialized():
        # Before they meet, a machine's processes find the same things wrong: the one that speaks ends all of them. If
        # it has found nothing, this one does.
        time.sleep(WAIT_FOR_SPEAKER)
        is_speaker = True
    if is_speaker:
        say(message)
        again = os.environ.get(LAST_ERROR)
        saved = "" if at_failure is None or again else at_failure()
        if saved:
            print(saved, file=sys.stderr, flush=True)
        if again:
            # The launcher prints it below torchrun's words.
            Path(again).write_text(message if is_refusal else message.splitlines()[-1])
    sys.stdout.flush()


def default_grace() -> float:
    """Returns the seconds that torchrun gives its processes to end, less what it needs itself."""
    return max(float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) - KILL_AFTER, 0.0)


class Interruption:
    """Turns SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 into a flag that the loop reads between micro-batches.

    Where the process has not ended after ``grace`` seconds, because a micro-batch or a checkpoint takes longer, a
    thread ends it. A second Ctrl-C ends it at once. The same signal comes twice where torchrun forwards one
    that the terminal has sent to all processes.

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


def describe_numbers(step: int, loss: float, own_loss: float, places: list[str], broken_gradients: list[str]) -> str:
    """Describes a loss or gradient norm that is NaN or Inf: the ranks, the files of their sequences and the parameters,
    as far as they are known. Every rank calls it, before gradients are cleared.

    Args:
        loss: of all ranks together.
        own_loss: this rank's part of it.
        places: files of this rank's sequences, as far as they are known.
        broken_gradients: names of this rank's parameters.
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
        listed = ", ".join(names[:5]) + (" and others" if len(names) > 5 else "")
        said.append(f"parameters with gradients that are not finite: {listed}")
    return "; ".join(said)


def refuse_numbers(described: str, published_step: int, most: int) -> NoReturn:
    """Refuses a step with NaN or Inf.

    Args:
        described: by :func:`describe_numbers`.
        published_step: of the newest checkpoint; 0 for none.
        most: ``--max_skipped_steps``.

    Raises:
        LigerDistError: always.
    """
    raise LigerDistError(
        f"{described}. {_way_on(published_step)} a lower --learning_rate or --max_grad_norm, or without the data that "
        f"does it, or let such steps be skipped and counted with --max_skipped_steps N; it is {most}."
    )


def _way_on(published_step: int) -> str:
    if published_step == 0:
        return "There is no checkpoint yet; begin again with"
    return (
        f"No checkpoint was written of it; continue from the newest one, of step {published_step}, with --resume true "
        "and"
    )


def check_weights(
    step: int, broken_weights: list[str], held_out_loss: float | None, published_step: Callable[[], int]
) -> None:
    """Refuses, on every rank, weights that hold NaN or Inf after a step with a finite loss: before a checkpoint of them
    replaces the last good one.

    Args:
        published_step: publishes what is being written, and returns the step of the newest checkpoint; 0 for none.

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
            f"{what if names else f'the held-out loss of step {step} is not finite'}. {_way_on(published_step())} a "
            "lower --learning_rate."
        )


class Watchdog:
    """Publishes heartbeats of this rank in torchrun's store, from a thread, and ends the program when the rank makes no
    progress. Collectives would not do: a stuck rank keeps the other ranks in one."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._place = (0, 0)
        self._written: Path | None = None
        """folder of what is being written"""
        self._bytes = 0
        """in it, when it was looked at last"""
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._main = threading.main_thread().ident
        # The main thread may be waiting on the other one.
        self._store = own_store()

    def at(self, step: int, phase: str, written: Path | None = None) -> None:
        """Notes step and phase of this rank, as progress.

        Args:
            written: folder of checkpoints; while one grows there, the ranks make progress.
        """
        self._place, self._written = (step, PHASES.index(phase)), written
        self._note_progress()

    def _note_progress(self) -> None:
        self._since = time.monotonic()

    def _is_late(self) -> bool:
        is_setup = PHASES[self._place[1]] in SETUP
        is_late = time.monotonic() - self._since > (max(self._limit, LEAST_FOR_SETUP) if is_setup else self._limit)
        if is_late and self._written is not None and self._bytes != (found := bytes_begun(self._written)):
            self._bytes = found
            self._note_progress()
            return False
        return is_late

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Ends the program where a rank makes no progress for ``limit`` seconds, as long as the context lasts; 0
        seconds for never."""
        if self._limit == 0:
            yield
            return
        self._note_progress()
        self._publish(0)
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        on_sign_of_life.append(self._note_progress)
        try:
            yield
        finally:
            on_sign_of_life.remove(self._note_progress)
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        beats, pause = 0, min(BEAT, self._limit / 4)
        while not self._ended.wait(pause):
            beats += 1
            self._publish(beats)
            if self._is_late():
                self._end(beats, pause)

    def _ask(self, ask: Callable[[], T]) -> T | None:
        """Asks the store; None where it does not answer in time: rank 0 may be frozen, or the link to its host cut."""
        return answer_of(ask, min(ANSWER_LIMIT, self._limit))

    def _heartbeat(self, beats: int) -> dict[str, Any]:
        node = int(os.environ.get("GROUP_RANK", "0"))
        return {"beats": beats, "place": self._place, "stack": self._stack(), "node": node}

    def _publish(self, beats: int) -> None:
        if self._store is not None:
            text = json.dumps(self._heartbeat(beats))
            self._ask(lambda: self._store.set(f"{KEY}/{rank()}", text))

    def _end(self, beats: int, pause: float) -> None:
        before = self._heartbeats(beats)
        # Every rank that lives publishes in this time; where the store does not answer, it is only asked once more.
        for _ in range(0 if before is None else 3):
            time.sleep(pause)
            beats += 1
            self._publish(beats)
        # At the end of a run the store may be closed.
        if self._ended.is_set() or not self._is_late():
            return
        after = self._heartbeats(beats)
        if before is None or after is None:
            if speaks_without_store():
                say_error(
                    f"no progress for {self._limit:.0f} s: the store of all ranks, which rank 0 may hold, does not "
                    f"answer; the link to its host may be cut. This rank was in {_place(self._place)}"
                )
            stop_launcher_without(1)
            os._exit(1)
        if is_first_to_report():
            say_error(f"no progress for {self._limit:.0f} s: {describe_stall(before, after)}")
        stop_launcher_without(len(silent_nodes(before, after)))
        os._exit(1)

    def _heartbeats(self, beats: int) -> Heartbeats | None:
        """Reads the heartbeats of all ranks; None where the store does not answer."""
        if self._store is None:
            return {0: self._heartbeat(beats)}
        return self._ask(lambda: read_heartbeats(self._store))

    def _stack(self) -> list[str]:
        """Lists the frames of the main thread, innermost first."""
        frame = sys._current_frames().get(self._main or 0)
        frames = traceback.extract_stack(frame) if frame is not None else []
        return [f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}" for f in reversed(frames)][:6]


def bytes_begun(folder: Path) -> int:
    """Counts the bytes of checkpoints that are being written."""
    found = 0
    # Of folders that get another name meanwhile, or are removed, os.walk lists nothing.
    for place, _, files in os.walk(folder):
        for file in files if ".partial" in place else ():
            with suppress(OSError):
                found += os.stat(os.path.join(place, file)).st_size
    return found


def read_heartbeats(store: Any) -> Heartbeats:
    """Reads the newest heartbeat of every rank. Asking for a key that no rank has set would wait."""
    keys = [f"{KEY}/{other}" for other in range(world_size())]
    # One request for all of them, unless one is missing.
    if store.check(keys):
        return {other: json.loads(value) for other, value in enumerate(store.multi_get(keys))}
    found = [json.loads(store.get(key)) if store.check([key]) else NO_HEARTBEAT for key in keys]
    return dict(enumerate(found))


def silent_ranks(before: Heartbeats, after: Heartbeats) -> list[int]:
    """Lists the ranks without a new heartbeat between two reads."""
    return [other for other in after if after[other]["beats"] == before[other]["beats"]]


def silent_nodes(before: Heartbeats, after: Heartbeats) -> set[int]:
    """Lists the nodes without a new heartbeat of any of their ranks."""
    silent = set(silent_ranks(before, after))
    nodes = {heartbeat["node"] for heartbeat in after.values()}
    return {node for node in nodes if silent >= {other for other, beat in after.items() if beat["node"] == node}}


def gone_ranks() -> list[int]:
    """Lists the ranks without a new heartbeat for 2.5 beats; none where the store does not answer, or without a
    watchdog.

    Ranks that fail because another one is gone call this as well, and have no heartbeat any more: each says so.
    """
    store = own_store()
    answer_of(lambda: store.set(f"{KEY}/failed/{rank()}", ""), STORE_LIMIT)
    before = answer_of(lambda: read_heartbeats(store), STORE_LIMIT)
    time.sleep(2.5 * BEAT)
    after = answer_of(lambda: read_heartbeats(store), STORE_LIMIT)
    if before is None or after is None:
        return []
    silent = [other for other in silent_ranks(before, after) if after[other]["beats"] >= 0]
    failed = answer_of(lambda: [other for other in silent if store.check([f"{KEY}/failed/{other}"])], STORE_LIMIT)
    return [other for other in silent if other not in (failed or [])]


def describe_stall(before: Heartbeats, after: Heartbeats) -> str:
    """Names the ranks that are stuck, from two reads of all heartbeats."""
    absent = [other for other, heartbeat in after.items() if heartbeat["beats"] < 0]
    if absent:
        return f"rank {', '.join(map(str, absent))} has not begun; the other ranks wait for it"
    frozen = silent_ranks(before, after) if len(after) > 1 else []
    least = min(heartbeat["place"] for heartbeat in after.values())
    behind = [other for other, heartbeat in after.items() if heartbeat["place"] == least]
    stuck, why = (frozen, "does not answer, last seen") if frozen else (behind, "is stuck")
    if len(stuck) == len(after) > 1:
        lines = "; ".join(f"rank {other} at {heartbeat['stack'][0]}" for other, heartbeat in after.items())
        return f"all ranks are in {_place(least)}: {lines}"
    first = after[stuck[0]]
    ranks = f"rank {', '.join(map(str, stuck))}"
    furthest = max(heartbeat["place"] for heartbeat in after.values())
    waiting = "" if len(after) == 1 else f"; the other ranks wait in {_place(furthest)}"
    return f"{ranks} {why} in {_place(first['place'])}, at {' < '.join(first['stack'][:3])}{waiting}"


def _place(place: Sequence[int]) -> str:
    step, phase = place
    return f"step {step} ({PHASES[phase]})"
