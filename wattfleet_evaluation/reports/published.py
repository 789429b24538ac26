"""The figures of the paper PowerTrain (doi:10.1016/j.future.2024.07.001), to show beside those of a run."""

from __future__ import annotations

from typing import NamedTuple

from wattfleet_evaluation.reports.cases import PUBLISHED_REFERENCE


class Published(NamedTuple):
    """A published error of a transfer.

    Attributes:
        target: the file of the same workload and device.
        method: `powertrain` or `scratch`.
        modes: number of fitted modes.
        time_mape: median MAPE of the time, %; None if the paper's text does not give it.
        power_mape: median MAPE of the power, likewise.
        where: the paper's section or figure.
        reference: the file of the workload that it transfers from; None for `scratch`.
    """

    target: str
    method: str
    modes: int
    time_mape: float | None
    power_mape: float | None
    where: str
    reference: str | None = PUBLISHED_REFERENCE


_MOBILENET, _YOLO, _NANO = "agx_orin_mobilenetv3", "agx_orin_yolov8n", "orin_nano_resnet18"

PUBLISHED = (
    Published(_MOBILENET, "powertrain", 10, 26.7, None, "4.2"),
    Published(_MOBILENET, "powertrain", 20, None, 8.5, "4.2"),
    Published(_MOBILENET, "powertrain", 50, 15.7, 5.2, "4.2"),
    Published(_MOBILENET, "powertrain", 100, 11.9, 4.3, "4.2"),
    Published(_MOBILENET, "scratch", 10, 52.6, None, "4.2", None),
    Published(_MOBILENET, "scratch", 20, None, 12.0, "4.2", None),
    Published(_MOBILENET, "scratch", 30, 35.0, None, "4.2", None),
    Published(_YOLO, "powertrain", 10, 24.7, 6.8, "4.2"),
    Published(_YOLO, "powertrain", 50, 11.7, 4.9, "4.2"),
    Published(_YOLO, "powertrain", 100, 10.18, None, "4.2"),
    Published(_YOLO, "scratch", 10, None, 21.0, "4.2", None),
    Published(_NANO, "powertrain", 50, 7.85, 5.96, "4.3.4"),
    Published(PUBLISHED_REFERENCE, "powertrain", 50, 15.03, 7.98, "figure 6", _MOBILENET),
    Published(_YOLO, "powertrain", 50, 11.77, 4.98, "figure 6", _MOBILENET),
    Published(_MOBILENET, "powertrain", 50, 17.03, 9.71, "figure 6", _YOLO),
    Published(PUBLISHED_REFERENCE, "powertrain", 50, 19.76, 12.88, "figure 6", _YOLO),
)


class PublishedChoice(NamedTuple):
    """Published figures of choices under 17 to 50 W, as text; `–` if the paper's text does not give one.

    Attributes:
        target: the file of the same workload and device.
        label: the method, and the paper's section.
        penalty_pct: median time penalty, %, in which a mode that is over the budget and faster counts as negative.
        over_1w_pct: share of the budgets exceeded by more than 1 W, %.
    """

    target: str
    label: str
    penalty_pct: str
    over_1w_pct: str


PUBLISHED_CHOICES = (
    PublishedChoice(_MOBILENET, "powertrain, paper, 5", "0.7", "25"),
    PublishedChoice(_MOBILENET, "powertrain, paper, 1", "1", "26.5"),
    PublishedChoice(_MOBILENET, "scratch, paper, 5", "5", "–"),
    PublishedChoice(_MOBILENET, "random, paper, 5, its 7 cases", "12 to 28", "0"),
    PublishedChoice(_YOLO, "powertrain, paper, 5", "0", "below 20"),
    PublishedChoice(_YOLO, "scratch, paper, 5", "4", "–"),
)
