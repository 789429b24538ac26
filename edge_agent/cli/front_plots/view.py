"""The data that every plot of a front shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from edge_agent.devices.mode_names import mode_argument
from edge_agent.learning.expectation import INTERVAL
from edge_agent.profiling.stored_profile import FittedDevice, own_rows
from wattfleet.choosing import Front
from wattfleet.modes import ModeArray, array_to_modes
from wattfleet.prediction import warmup_s

FRONT_COLOUR, MEASURED_COLOUR = "#0072b2", "#d55e00"
"""Okabe and Ito's blue and vermilion, which colour-blind readers can tell apart."""

TIME_LABEL = "seconds for one epoch, warm-up included"

INTERVAL_LOG_SDS = float(ndtri((1 + INTERVAL) / 2))
"""Distance from the median to either end of an interval, in standard deviations of the logarithm."""


@dataclass(frozen=True)
class FrontView:
    """A front and the measured modes.

    Attributes:
        title: device and workload of the front.
        front: the Pareto-optimal predicted modes.
        measured_modes: `[m, 4]` modes that were measured with the workload's minibatch.
        measured_warmup_s: `[m]` warm-up seconds at the start of a training.
        measured_epoch_s: `[m]` seconds per epoch.
        measured_w: `[m]` watts while training.
    """

    title: str
    front: Front
    measured_modes: ModeArray
    measured_warmup_s: NDArray[np.float64]
    measured_epoch_s: NDArray[np.float64]
    measured_w: NDArray[np.float64]

    @classmethod
    def of(cls, fitted: FittedDevice) -> FrontView:
        """The front that the agent reports, from its current fit."""
        details, header = fitted.artefact.details, fitted.measured.header
        measured = own_rows(fitted.measured.profile, header.minibatch)
        return cls(
            title=f"{header.device_id} ({details.board}, {header.provenance}), {details.workload.name}",
            front=fitted.front,
            measured_modes=measured.modes,
            measured_warmup_s=warmup_s(measured.modes, measured.minibatch_ms, fitted.measured.first_gcycles),
            measured_epoch_s=measured.minibatch_ms * fitted.minibatches_per_epoch / 1e3,
            measured_w=measured.power_mw / 1e3,
        )

    @property
    def measured_one_epoch_s(self) -> NDArray[np.float64]:
        """`[m]` seconds of a training of one epoch, as in `Front.one_epoch_s`."""
        return self.measured_warmup_s + self.measured_epoch_s

    def labels(self) -> list[str]:
        """Short labels of the front's modes."""
        return [mode.label() for mode in array_to_modes(self.front.modes)]

    def time_ticks(self) -> list[float]:
        """Axis ticks in seconds: 1, 2 and 5 times powers of ten within the data's range."""
        seconds = np.concatenate([self.front.one_epoch_s, self.measured_one_epoch_s])
        decades = range(math.floor(math.log10(seconds.min())), math.ceil(math.log10(seconds.max())) + 1)
        rounded = (times * 10.0**decade for decade in decades for times in (1, 2, 5))
        return [tick for tick in rounded if seconds.min() <= tick <= seconds.max()]

    def content(self) -> dict[str, Any]:
        """The view as JSON-compatible values."""
        front = self.front
        columns = zip(
            array_to_modes(front.modes),
            front.warmup_s.tolist(),
            front.epoch_s.tolist(),
            front.power_w.tolist(),
            front.planned_w.tolist(),
            [{}] * len(front) if front.batch is None else [{"batch": batch} for batch in front.batch.tolist()],
            strict=True,
        )
        return {
            "title": self.title,
            "front": [
                {
                    "mode": mode._asdict(),
                    "argument": mode_argument(mode),
                    "label": mode.label(),
                    "warmup_s": start_s,
                    "epoch_s": epoch_s,
                    "power_w": power_w,
                    "planned_w": planned_w,
                    **batch,
                }
                for mode, start_s, epoch_s, power_w, planned_w, batch in columns
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
