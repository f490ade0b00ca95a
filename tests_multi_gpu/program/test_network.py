"""Two hosts with a link that is cut, for a while and for good: network namespaces stand for the hosts, and a bridge for
the switch between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import LAUNCH, as_options, config_for, losses_of, metrics_of

HOSTS = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.is_available(), reason="hosts that meet on CPUs"),
    pytest.mark.timeout(400),
]


class Link:
    """Hosts in namespaces of their own, joined by a bridge."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        names = "".join(f"{address} {name}\n" for name, address in HOSTS.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def make(self) -> None:
        """Raises:
        PermissionError: this user may not make namespaces.
        """
        self._ip("link", "add", "name", "sw-test", "type", "bridge")
        self._ip("link", "set", "sw-test", "up")
        for index, (name, address) in enumerate(HOSTS.items()):
            holder = subprocess.Popen(["unshare", "--net", "--uts", "--mount", "sleep", "600"])
            self._holders[name] = holder
            while os.readlink(f"/proc/{holder.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
                time.sleep(0.05)
            self._ip("link", "add", f"port{index}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            self._ip("link", "set", f"port{index}", "master", "sw-test", "up")
            setup = f"hostname {name}; mount --bind {self._folder / 'hosts'} /etc/hosts; ip link set lo up; "
            setup += f"ip addr add {address}/24 dev eth0; ip link set eth0 up"
            subprocess.run([*self._inside(name), "sh", "-c", setup], check=True)

    def on(self, name: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._inside(name), *command], text=True, start_new_session=True, **options)

    def cut(self) -> None:
        """Packets are lost without a word."""
        self._ip("link", "set", "port1", "nomaster")

    def restore(self) -> None:
        self._ip("link", "set", "port1", "master", "sw-test")

    def remove(self) -> None:
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        for name in ("port0", "port1", "sw-test"):
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)

    def _inside(self, name: str) -> list[str]:
        return ["nsenter", "-t", str(self._holders[name].pid), "--net", "--uts", "--mount"]

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PermissionError(done.stderr)


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter")):
        pytest.skip("ip, unshare or nsenter is not installed")
    made = Link(tmp_path)
    try:
        made.make()
        yield made
    except PermissionError as error:
        pytest.skip(f"no namespaces here: {error}")
    finally:
        made.remove()


def start_both(link: Link, data: Path, cache: Path, folder: Path, **changes: Any) -> list[subprocess.Popen[str]]:
    """The launch script on both hosts; their output goes to files."""
    config = config_for(data, cache, folder / "run", eval_every=1000, checkpoint_every=1000, **changes)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "NNODES": "2",
        "NPROC_PER_NODE": "1",
    }
    environment |= {"RDZV_ENDPOINT": "node-a:29500", "PYTHON": sys.executable}
    started = []
    for name in HOSTS:
        own = environment | {"LOG_DIR": str(folder / f"logs-{name}")}
        with (folder / f"{name}.txt").open("w") as output:
            command = ["bash", str(LAUNCH / "torchrun_multi_node.sh"), *as_options(config)]
            started.append(link.on(name, command, env=own, stdout=output, stderr=output))
    return started


def steps_of(folder: Path) -> int:
    metrics = folder / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.is_file() else 0


def wait_for_steps(folder: Path, steps: int, limit: float, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + limit
    while steps_of(folder / "run") < steps:
        assert time.monotonic() < deadline, (folder / "node-a.txt").read_text()[-3000:]
        assert all(process.poll() is None for process in processes), (folder / "node-a.txt").read_text()[-3000:]
        time.sleep(0.2)


def test_a_link_that_is_cut_for_20_seconds_loses_nothing(link: Link, data: Path, cache: Path, tmp_path: Path) -> None:
    changes = {"steps": 400, "sequence_length": 32, "batch_size": 1, "global_batch_size": None}
    both = start_both(link, data, cache, tmp_path, **changes)
    wait_for_steps(tmp_path, 20, 90, *both)
    link.cut()
    time.sleep(20)
    before = steps_of(tmp_path / "run")
    assert before < 400, "it was done before the cut"
    link.restore()
    wait_for_steps(tmp_path, before + 10, 60, *both)
    for process in both:
        assert process.wait(timeout=200) == 0, (tmp_path / "node-a.txt").read_text()[-3000:]
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, 401))
    assert all(loss < 10 for loss in losses_of(tmp_path / "run"))
    printed = "".join((tmp_path / f"{name}.txt").read_text() for name in HOSTS)
    assert "error:" not in printed
    assert "continues after step" not in printed


def test_a_link_that_is_cut_for_good_ends_every_host(link: Link, data: Path, cache: Path, tmp_path: Path) -> None:
    """Within the stall limit and 30 seconds, torchrun included; each host says so."""
    limit = 15.0
    both = start_both(link, data, cache, tmp_path, steps=100000, stall_timeout=limit)
    try:
        wait_for_steps(tmp_path, 5, 90, *both)
        link.cut()
        cut_at = time.monotonic()
        for process in both:
            assert process.wait(timeout=limit + 30) != 0
        assert time.monotonic() - cut_at < limit + 30
    finally:
        for process in both:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    said = {name: (tmp_path / f"{name}.txt").read_text() for name in HOSTS}
    assert f"error: no progress for {limit:.0f} s: rank 1 does not answer" in said["node-a"]
    assert f"error: no progress for {limit:.0f} s: the store of all ranks" in said["node-b"]
