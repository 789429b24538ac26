"""The data shown by every plot of a front."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from edge_agent.devices.sysfs import mode_argument
from edge_agent.learning.transfer import INTERVAL
from edge_agent.profiling.known_workload import BUILT_IN
from edge_agent.profiling.stored_profile import FittedDevice, own_rows
from wattfleet.core.choosing import Front
from wattfleet.core.modes import ModeArray, array_to_modes
from wattfleet.core.prediction import warmup_s

FRONT_COLOUR, MEASURED_COLOUR = "#0072b2", "#d55e00"
"""Okabe and Ito's blue and vermilion, which colour-blind readers can tell apart."""

TIME_LABEL = "seconds for one epoch, warm-up included"

INTERVAL_LOG_SDS = float(ndtri((1 + INTERVAL) / 2))
"""Distance from the median to either end of an interval, in standard deviations of the logarithm."""


@dataclass(frozen=True)
class FrontView:
    """A front and the measured modes.

    The front consists of the predicted Pareto-optimal modes, as the agent reports it. Measured modes are shown with
    their measured values.

    Attributes:
        title: device and workload of the front.
        front: the Pareto-optimal predicted modes.
        is_measured: `[k]` whether each mode of the front was measured.
        warmup_s: `[k]` warm-up seconds of each mode of the front, from its measured or predicted minibatch.
        epoch_s: `[k]` measured or predicted seconds per epoch.
        power_w: `[k]` measured or predicted watts while training.
        epoch_log_sd: `[k]` standard deviation of the logarithm of the time; 0 if measured.
        power_log_sd: `[k]` standard deviation of the logarithm of the power; 0 if measured.
        measured_modes: `[m, 4]` modes that were measured with the workload's minibatch.
        measured_warmup_s: `[m]` warm-up seconds at the start of a training.
        measured_epoch_s: `[m]` seconds per epoch.
        measured_w: `[m]` watts while training.
        minibatches_per_epoch: number of minibatches per epoch.
        is_length_assumed: whether this number is assumed.
    """

    title: str
    front: Front
    is_measured: NDArray[np.bool_]
    warmup_s: NDArray[np.float64]
    epoch_s: NDArray[np.float64]
    power_w: NDArray[np.float64]
    epoch_log_sd: NDArray[np.float64]
    power_log_sd: NDArray[np.float64]
    measured_modes: ModeArray
    measured_warmup_s: NDArray[np.float64]
    measured_epoch_s: NDArray[np.float64]
    measured_w: NDArray[np.float64]
    minibatches_per_epoch: int
    is_length_assumed: bool

    @classmethod
    def of(cls, fitted: FittedDevice) -> FrontView:
        """Return the front that the agent reports, from its current fit."""
        front, first_gcycles = fitted.front, fitted.measured.first_gcycles
        measured = own_rows(fitted.measured.profile, fitted.measured.header.minibatch)
        known = fitted.known.among(_rows_of(front.modes, fitted.known.modes))
        is_measured = known.measured
        warm_s = warmup_s(known.modes, known.minibatch_ms, first_gcycles)
        return cls(
            title=_title(fitted),
            front=front,
            is_measured=is_measured,
            warmup_s=np.where(is_measured, warm_s, front.warmup_s),
            epoch_s=np.where(is_measured, known.minibatch_ms * fitted.minibatches_per_epoch / 1e3, front.epoch_s),
            power_w=np.where(is_measured, known.power_mw / 1e3, front.power_w),
            epoch_log_sd=np.where(is_measured, 0.0, front.epoch_log_sd),
            power_log_sd=np.where(is_measured, 0.0, front.power_log_sd),
            measured_modes=measured.modes,
            measured_warmup_s=warmup_s(measured.modes, measured.minibatch_ms, first_gcycles),
            measured_epoch_s=measured.minibatch_ms * fitted.minibatches_per_epoch / 1e3,
            measured_w=measured.power_mw / 1e3,
            minibatches_per_epoch=fitted.minibatches_per_epoch,
            is_length_assumed=fitted.is_length_assumed,
        )

    @property
    def one_epoch_s(self) -> NDArray[np.float64]:
        """`[k]` seconds of a training of one epoch in each mode of the front, as in `Front.one_epoch_s`."""
        return self.warmup_s + self.epoch_s

    @property
    def measured_one_epoch_s(self) -> NDArray[np.float64]:
        """`[m]` seconds of a training of one epoch, as in `Front.one_epoch_s`."""
        return self.measured_warmup_s + self.measured_epoch_s

    def labels(self) -> list[str]:
        """Return short labels of the front's modes."""
        return [mode.label() for mode in array_to_modes(self.front.modes)]

    def sources(self) -> list[str]:
        """Return "measured" or "predicted" for each mode of the front."""
        return ["measured" if is_measured else "predicted" for is_measured in self.is_measured]

    def time_ticks(self) -> list[float]:
        """Return axis ticks in seconds: 1, 2 and 5 times powers of ten within the data's range."""
        seconds = np.concatenate([self.one_epoch_s, self.measured_one_epoch_s])
        decades = range(math.floor(math.log10(seconds.min())), math.ceil(math.log10(seconds.max())) + 1)
        rounded = (times * 10.0**decade for decade in decades for times in (1, 2, 5))
        return [tick for tick in rounded if seconds.min() <= tick <= seconds.max()]

    def content(self) -> dict[str, Any]:
        """Return the view as JSON-compatible values."""
        front = self.front
        columns = zip(
            array_to_modes(front.modes),
            self.is_measured.tolist(),
            self.warmup_s.tolist(),
            self.epoch_s.tolist(),
            self.power_w.tolist(),
            front.planned_w.tolist(),
            [{}] * len(front) if front.batch is None else [{"batch": batch} for batch in front.batch.tolist()],
            strict=True,
        )
        return {
            "title": self.title,
            "minibatches_per_epoch": self.minibatches_per_epoch,
            "is_epoch_length_assumed": self.is_length_assumed,
            "front": [
                {
                    "mode": mode._asdict(),
                    "argument": mode_argument(mode),
                    "label": mode.label(),
                    "measured": is_measured,
                    "warmup_s": start_s,
                    "epoch_s": epoch_s,
                    "power_w": power_w,
                    "planned_w": planned_w,
                    **batch,
                }
                for mode, is_measured, start_s, epoch_s, power_w, planned_w, batch in columns
            ],
            "measured": [
                {
                    "mode": mode._asdict(),
                    "label": mode.label(),
                    "warmup_s": start_s,
                    "epoch_s": epoch_s,
                    "power_w": power_w,
                }
                for mode, start_s, epoch_s, power_w in zip(
                    array_to_modes(self.measured_modes),
                    self.measured_warmup_s.tolist(),
                    self.measured_epoch_s.tolist(),
                    self.measured_w.tolist(),
                    strict=True,
                )
            ],
        }


def _title(fitted: FittedDevice) -> str:
    """Return the device and its workload; for a replayed board, the file and its workload."""
    header, name = fitted.measured.header, fitted.workload.workload.name
    if header.provenance != "replayed":
        return f"{header.device_id} ({header.board_kind}, {header.provenance}), {name}"
    file = f"the file {header.board_kind.removeprefix('replay:')}"
    return f"{header.device_id}, replayed from {file}" + ("" if name == BUILT_IN else f", as {name}")


def _rows_of(wanted: ModeArray, modes: ModeArray) -> NDArray[np.intp]:
    """Return `[k]` row numbers of the wanted modes among all modes."""
    rows = {tuple(mode): row for row, mode in enumerate(modes.tolist())}
    return np.array([rows[tuple(mode)] for mode in wanted.tolist()], dtype=np.intp)
