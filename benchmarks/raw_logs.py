"""Reads raw logs of real training runs, as written by jtop and the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from edge_agent.devices.device import PowerTrace
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode


@dataclass(frozen=True)
class RawLog:
    """One run in one mode.

    Attributes:
        mode: the power mode.
        minibatch_ms: `[k]` times of all minibatches, ms, the first one included.
        minibatch_end_s: `[k]` seconds at which they ended.
        power: power samples on the same clock.
    """

    mode: PowerMode
    minibatch_ms: NDArray[np.float64]
    minibatch_end_s: NDArray[np.float64]
    power: PowerTrace


def read_raw_logs(folder: Path) -> list[RawLog]:
    """Return the runs in the folders `pm_<cores>_<cpu kHz>_<gpu Hz>_<memory Hz>`, in the order of their names.

    Raises:
        InvalidInputError: there is no such folder.
    """
    runs = sorted(folder.glob("pm_*_*_*_*"))
    if not runs:
        raise InvalidInputError(f"{folder} contains no folder pm_<cores>_<cpu kHz>_<gpu Hz>_<memory Hz>")
    return [_read(run) for run in runs]


def _read(run: Path) -> RawLog:
    minibatches, samples = pd.read_csv(run / "minibatch.csv"), pd.read_csv(run / "jtop.csv")
    return RawLog(
        PowerMode(*(int(knob) for knob in run.name.split("_")[1:])),
        minibatches["epochtime_ms"].to_numpy(np.float64),
        minibatches["log_time"].to_numpy(np.float64),
        PowerTrace(samples["log_time"].to_numpy(np.float64), samples["power cur"].to_numpy(np.float64)),
    )
