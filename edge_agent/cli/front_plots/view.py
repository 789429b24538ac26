"""What every plot of a front shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from edge_agent.devices.mode_names import mode_argument
from edge_agent.learning.expectation import INTERVAL
from edge_agent.profiling.stored_profile import FittedDevice
from wattfleet.choosing import Front
from wattfleet.modes import ModeArray, array_to_modes
from wattfleet.prediction import warmup_s

Values = NDArray[np.float64]

FRONT_COLOUR, MEASURED_COLOUR = "#0072b2", "#d55e00"
"""Okabe and Ito's blue and vermilion, told apart by whoever sees fewer colours."""

INTERVAL_LOG_SDS = float(ndtri((1 + INTERVAL) / 2))
"""Standard deviations of the logarithm from the median to either end of an interval."""


@dataclass(frozen=True)
class FrontView:
    """A front beside what was measured.

    Attributes:
        title: whose front it is.
        front: the modes of which none is predicted to be both slower and hungrier than another.
        measured_modes: `[m, 4]` measured modes.
        measured_warmup_s: `[m]` seconds of a training's start.
        measured_epoch_s: `[m]` seconds per epoch.
        measured_w: `[m]` watts while training.
    """

    title: str
    front: Front
    measured_modes: ModeArray
    measured_warmup_s: Values
    measured_epoch_s: Values
    measured_w: Values

    @classmethod
    def of(cls, fitted: FittedDevice) -> FrontView:
        """The front that the agent reports, by what it has fitted now."""
        details, header = fitted.artefact.details, fitted.measured.header
        measured = fitted.measured.profile
        return cls(
            title=f"{header.device_id} ({details.board}, {header.provenance}), {details.workload.name}",
            front=fitted.front,
            measured_modes=measured.modes,
            measured_warmup_s=warmup_s(measured.modes, measured.minibatch_ms, fitted.measured.first_gcycles),
            measured_epoch_s=measured.minibatch_ms * fitted.minibatches_per_epoch / 1e3,
            measured_w=measured.power_mw / 1e3,
        )

    @property
    def measured_one_epoch_s(self) -> Values:
        """`[m]` seconds of a training of one epoch, as `Front.one_epoch_s` has them."""
        return self.measured_warmup_s + self.measured_epoch_s

    def labels(self) -> list[str]:
        """The front's modes in short."""
        return [mode.label() for mode in array_to_modes(self.front.modes)]

    def time_ticks(self) -> list[float]:
        """Round seconds to mark on an axis: 1, 2 and 5 times powers of ten, within what is shown."""
        seconds = np.concatenate([self.front.one_epoch_s, self.measured_one_epoch_s])
        decades = range(math.floor(math.log10(seconds.min())), math.ceil(math.log10(seconds.max())) + 1)
        rounded = (times * 10.0**decade for decade in decades for times in (1, 2, 5))
        return [tick for tick in rounded if seconds.min() <= tick <= seconds.max()]

    def content(self) -> dict[str, Any]:
        """All of it as JSON."""
        front = self.front
        columns = zip(
            array_to_modes(front.modes),
            front.warmup_s.tolist(),
            front.epoch_s.tolist(),
            front.power_w.tolist(),
            front.planned_w.tolist(),
            strict=True,
        )
        return {
            "title": self.title,
            "front": [
                {
                    "mode": mode._asdict(),
                    "argument": mode_argument(mode),
                    "label": mode.label(),
                    "warmup_s": first_s,
                    "epoch_s": epoch_s,
                    "power_w": power_w,
                    "planned_w": planned_w,
                }
                for mode, first_s, epoch_s, power_w, planned_w in columns
            ],
            "measured": [
                {
                    "mode": mode._asdict(),
                    "label": mode.label(),
                    "warmup_s": first_s,
                    "epoch_s": epoch_s,
                    "power_w": power_w,
                }
                for mode, first_s, epoch_s, power_w in zip(
                    array_to_modes(self.measured_modes),
                    self.measured_warmup_s.tolist(),
                    self.measured_epoch_s.tolist(),
                    self.measured_w.tolist(),
                    strict=True,
                )
            ],
        }
