"""Resource usage of a fleet's processes over time: memory, descriptors, threads, children, files and bytes on disk."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

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
