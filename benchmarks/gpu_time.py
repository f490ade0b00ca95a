"""Splits a step's GPU time into compute, exposed communication and idle, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[int, int]


@dataclass(frozen=True)
class GpuTime:
    """Milliseconds of one step; the three add up to ``total``."""

    computing: float
    """at least one kernel that is not NCCL's runs"""
    communicating: float
    """only NCCL's kernels run"""
    waiting: float
    """nothing runs"""
    kernels: int

    @property
    def total(self) -> float:
        return self.computing + self.communicating + self.waiting


def gpu_time(step: Callable[[], object], steps: int = 2) -> GpuTime:
    """The mean over ``steps`` calls, from the first kernel to the last."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    computing: list[Interval] = []
    communicating: list[Interval] = []
    events: Any = profiled.profiler.kineto_results.events()
    for event in events:
        if event.device_type().name != "CUDA" or event.is_user_annotation():
            continue
        interval = (event.start_ns(), event.start_ns() + event.duration_ns())
        is_communication = event.name().startswith("nccl")
        (communicating if is_communication else computing).append(interval)
    both = _union_ns([*computing, *communicating])
    begin, end = min(first for first, _ in computing), max(last for _, last in [*computing, *communicating])
    alone = _union_ns(computing)
    scale = 1e-6 / steps
    return GpuTime(alone * scale, (both - alone) * scale, (end - begin - both) * scale, len(computing) // steps)


def computing_ms(step: Callable[[], object]) -> float:
    return gpu_time(step).computing


def _union_ns(intervals: Iterable[Interval]) -> int:
    """Nanoseconds that at least one interval covers."""
    total, end = 0, 0
    for first, last in sorted(intervals):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total
