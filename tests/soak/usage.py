"""Resource usage of a fleet's processes over time, whether it grows, and a plot of it."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import psutil
from matplotlib.figure import Figure
from scipy.stats import theilslopes

# --- Usage ------------------------------------------------------------------------------------------------------------
# Resource usage of a fleet's processes over time: memory, descriptors, threads, children, files and bytes on disk.


_KIB = 2**10


@dataclass(frozen=True)
class Usage:
    """What one process uses at one moment.

    Attributes:
        memory_kib: unique set size, which excludes memory shared with the process that it was forked from.
        descriptors: open file descriptors.
        threads: number of threads.
        children: child processes that are still running.
        files: files in its folder.
        disk_kib: size of these files.
    """

    memory_kib: float
    descriptors: float
    threads: float
    children: float
    files: float
    disk_kib: float


QUANTITIES = tuple(each.name for each in fields(Usage))


@dataclass(frozen=True)
class Member:
    """A process, and the folder that it writes to; None if it writes to none."""

    name: str
    pid: int
    folder: Path | None

    def usage(self) -> Usage:
        process = psutil.Process(self.pid)
        sizes = [] if self.folder is None else list(_sizes(self.folder))
        return Usage(
            memory_kib=process.memory_full_info().uss / _KIB,
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            children=len(process.children(recursive=True)),
            files=len(sizes),
            disk_kib=sum(sizes) / _KIB,
        )


@dataclass(frozen=True)
class Sample:
    """All members at one moment.

    Attributes:
        at_s: seconds since the first sample.
        trained_s: seconds that all boards have trained, on their own clocks.
        usages: usage by member.
    """

    at_s: float
    trained_s: float
    usages: Mapping[str, Usage]


def write_csv(samples: Sequence[Sample], path: Path) -> None:
    """Write one row for each moment and member."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["at_s", "trained_s", "process", *QUANTITIES])
        for sample in samples:
            for name, usage in sample.usages.items():
                values = [f"{getattr(usage, quantity):g}" for quantity in QUANTITIES]
                rows.writerow([f"{sample.at_s:.1f}", f"{sample.trained_s:.1f}", name, *values])


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):  # unlike `rglob`, it bears folders that are renamed meanwhile
        for name in names:
            try:
                yield os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                pass  # a temporary file that was renamed meanwhile


# --- Growth -----------------------------------------------------------------------------------------------------------
# Whether a process's resource usage grows: the robust slope of the second half of its samples, and a bound.


@dataclass(frozen=True)
class Bound:
    """The most that a quantity may grow.

    Attributes:
        at_least: absolute growth that is always allowed, even over a short time or for a small quantity.
        share: growth that is allowed as a share of the median, if that is more.
    """

    at_least: float
    share: float = 0.0


@dataclass(frozen=True)
class Growth:
    """How much a quantity of a process grew in the second half.

    Attributes:
        process: name of the process.
        quantity: the quantity.
        median: median of the second half.
        gained: the Theil-Sen slope of the second half times its length; temporary jumps have little effect.
        allowed: the most that `gained` may be.
    """

    process: str
    quantity: str
    median: float
    gained: float
    allowed: float

    @property
    def is_flat(self) -> bool:
        return self.gained <= self.allowed

    def __str__(self) -> str:
        return (
            f"{self.process:<12} {self.quantity:<12} {self.median:>12,.1f} gained {self.gained:>+10,.2f}"
            f" of {self.allowed:,.1f} allowed"
        )


def growths(samples: Sequence[Sample], bounds: dict[str, Bound]) -> Iterator[Growth]:
    """The growth of each quantity of each process in the second half of the samples."""
    half = samples[len(samples) // 2 :]
    at_s = np.array([sample.at_s for sample in half])
    for process in half[0].usages:
        for quantity in QUANTITIES:
            values = np.array([getattr(sample.usages[process], quantity) for sample in half])
            median, bound = float(np.median(values)), bounds[quantity]
            gained = float(theilslopes(values, at_s).slope) * float(at_s[-1] - at_s[0])
            yield Growth(process, quantity, median, gained, max(bound.at_least, bound.share * median))


# --- Picture ----------------------------------------------------------------------------------------------------------
# Plots the resource usage of a soak's processes over time.

_SHOWN = {
    "memory_kib": ("own memory (USS), MiB", 1024.0),
    "descriptors": ("open descriptors", 1.0),
    "threads": ("threads", 1.0),
    "disk_kib": ("bytes on disk, MiB", 1024.0),
}


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Plot four quantities of each process."""
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    minutes = [sample.at_s / 60 for sample in samples]
    for axes, (quantity, (label, unit)) in zip(figure.subplots(2, 2, sharex=True).flat, _SHOWN.items(), strict=True):
        for name in samples[0].usages:
            values = [getattr(sample.usages[name], quantity) / unit for sample in samples]
            axes.plot(minutes, values, lw=1.2, label=name)
        axes.set(ylabel=label, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    for axes in figure.axes[2:]:
        axes.set_xlabel("minutes")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=110)
