"""Which series of samples the soak's trend test counts as growth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.soak.growth import Bound, growths
from tests.soak.usage import QUANTITIES, Sample, Usage

BOUNDS = dict.fromkeys(QUANTITIES, Bound(1.0))
FLAT = Usage(memory_kib=50_000, descriptors=20, threads=10, children=0, files=4, disk_kib=900)
COUNT = 100


def growing(**values: np.ndarray) -> list[str]:
    """The quantities that grow too much, given their values over time."""
    samples = [
        Sample(10.0 * k, 0.0, {"agent": replace(FLAT, **{name: float(each[k]) for name, each in values.items()})})
        for k in range(COUNT)
    ]
    return [each.quantity for each in growths(samples, BOUNDS) if not each.is_flat]


def test_a_leak_of_a_descriptor_every_minute_is_growth_and_a_busy_moment_is_not() -> None:
    time = np.arange(COUNT)
    assert growing(descriptors=20 + time // 6) == ["descriptors"]
    assert growing(descriptors=20 + 30 * (time % 10 == 0), threads=10 + time % 3) == []


def test_what_fills_up_at_the_start_and_stays_is_not_growth() -> None:
    time = np.arange(COUNT)
    assert growing(memory_kib=50_000 + 100 * np.minimum(time, COUNT // 2)) == []
    assert growing(memory_kib=50_000 + 100 * time) == ["memory_kib"]


def test_a_noisy_slow_leak_is_growth() -> None:
    noise = np.random.default_rng(0).normal(0, 2, COUNT)
    assert growing(disk_kib=900 + noise) == []
    assert growing(disk_kib=900 + noise + 0.1 * np.arange(COUNT)) == ["disk_kib"]
