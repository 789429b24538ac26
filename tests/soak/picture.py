"""Plots the resource usage of a soak's processes over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from tests.soak.usage import Sample

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
