"""Fits the rates of ``liger-dist train --dry_run``'s predicted time to measured steps, and prints them.

    python -m benchmarks.fit_time_plan

The rows are those of ``benchmarks/time_settings.py`` that say ``fits``. On one GPU the time that it computes is fitted,
too, where it was measured. The rates go into ``liger_dist_train/time_plan.py`` by hand; nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

from liger_dist_train.time_plan import RATES, Rates

from .time_settings import SETTINGS, Setting

LOWEST, HIGHEST = 0.01, 0.95
"""bounds of a fraction"""
FRACTIONS = ("products", "attention", "memory", "links", "contention")
STEPS = (0.2, 0.05, 0.01, 0.003)
"""relative changes that are tried, one size after the other"""


def errors(rates: Rates) -> Iterator[float]:
    """Yields the logarithm of predicted over measured, of every row that is fitted."""
    for setting in SETTINGS:
        if setting.fits:
            found = setting.predicted(rates)
            yield math.log(found.step / setting.seconds)
            if setting.computing is not None:
                yield math.log(found.computing / setting.computing)


def loss(rates: Rates) -> float:
    return sum(error**2 for error in errors(rates))


def fit(rates: Rates) -> Rates:
    """Changes one rate after the other while that makes the sum of squares smaller."""
    best = loss(rates)
    for size in STEPS:
        is_better = True
        while is_better:
            is_better = False
            for name in (field.name for field in fields(Rates)):
                for factor in (1 + size, 1 / (1 + size)):
                    value = getattr(rates, name) * factor
                    if name in FRACTIONS and not LOWEST <= value <= HIGHEST:
                        continue
                    changed = replace(rates, **{name: value})
                    found = loss(changed)
                    if found < best - 1e-7:
                        rates, best, is_better = changed, found, True
    return rates


def line(setting: Setting, rates: Rates) -> str:
    found = setting.predicted(rates)
    error = found.step / setting.seconds - 1
    times = f"{setting.seconds * 1e3:8.1f} {found.step * 1e3:8.1f} {error:+7.1%}"
    parts = f"gpu {found.computing * 1e3:.0f} exposed {found.exposed * 1e3:.0f} host {found.host * 1e3:.0f}"
    return f"{'fitted  ' if setting.fits else 'held out'} {setting.card} {setting.name:<105} {times}  {parts}"


def main() -> None:
    rates = fit(RATES)
    for setting in SETTINGS:
        print(line(setting, rates))
    for name in (field.name for field in fields(Rates)):
        print(f"{name}: {getattr(rates, name):.4g}")


if __name__ == "__main__":
    main()
