"""Draw the errors of transfers against the number of measured rows.

    python -m benchmarks.prediction_picture docs/images/prediction.png [--data ../shared/data] [--runs 20]

Each target's own network is left out of the shipped reference's population.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from wattfleet.core.modes import board_with_modes, read_profile
from wattfleet.core.prediction import RooflinePredictor
from wattfleet.evaluation.judging.sources import find_reference, references_of
from wattfleet.evaluation.judging.transfer import evaluate_transfer

REFERENCE = "agx_orin_resnet18"
SIZES = (2, 5, 10, 20, 50, 100)
TARGETS = {
    "agx_orin_mobilenetv3": ("MobileNetV3, AGX Orin", "C0", "-"),
    "agx_orin_resnet18": ("ResNet-18, AGX Orin", "C1", "-"),
    "agx_orin_yolov8n": ("YOLOv8n, AGX Orin", "C2", "-"),
    "orin_nano_resnet18": ("ResNet-18, Orin Nano", "C3", "-"),
    "agx_orin_mobilenetv3_inference": ("MobileNetV3, inference", "C0", "--"),
    "agx_orin_resnet_inference": ("ResNet, inference", "C1", "--"),
}


def errors_pct(data: Path, target: str, runs: int) -> tuple[list[float], list[float]]:
    """Return the median MAPE of time and of power for each of `SIZES`, %."""
    profile = read_profile(data / f"{target}.csv")
    references = references_of([find_reference(REFERENCE, profile)], "roofline", board_with_modes(profile.modes))
    scores = [evaluate_transfer(RooflinePredictor, references, profile, n, runs, 0, lambda: 0.0) for n in SIZES]
    return [float(np.median(s.time_mape)) for s in scores], [float(np.median(s.power_mape)) for s in scores]


def draw(path: Path, data: Path, runs: int) -> None:
    """Draw the picture and write it to a file."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for target, (label, colour, style) in TARGETS.items():
        for each, errors in zip(axes, errors_pct(data, target, runs), strict=True):
            each.plot(SIZES, errors, style, color=colour, marker="o", ms=3.5, label=label)
    for each, title, ticks in zip(axes, ("Time", "Power"), ((2, 3, 5, 10, 20), (1, 2, 3, 5, 10)), strict=True):
        each.set(xscale="log", yscale="log", xlabel="measured rows", ylabel="error (MAPE), %", title=title)
        _label(each.xaxis, SIZES)
        _label(each.yaxis, ticks)
        each.grid(alpha=0.3)
    axes[1].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=130)


def _label(axis: Axis, values: Iterable[int]) -> None:
    """Label these values of a logarithmic axis as plain numbers."""
    axis.set_ticks(list(values), labels=[str(value) for value in values])
    axis.set_ticks([], minor=True)


def main() -> None:
    """Draw the picture to the path on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction_picture", description="Draw the errors of transfers."
    )
    parser.add_argument("path", type=Path, help="write the picture to this file")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="read the measured corpora from here")
    parser.add_argument("--runs", type=int, default=20, help="set the number of draws of each size")
    arguments = parser.parse_args()
    draw(arguments.path, arguments.data, arguments.runs)


if __name__ == "__main__":
    main()
