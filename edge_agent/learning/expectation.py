"""Expected time and power of one mode: measured, or predicted with an interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from edge_agent.profiling.stored_profile import FittedDevice
from wattfleet.modes import PowerMode, modes_to_array

INTERVAL = 0.9
"""The share of modes whose true value lies within the interval."""


@dataclass(frozen=True)
class Expectation:
    """Time and power of one mode.

    Attributes:
        measured: whether the values were measured; otherwise they are predicted medians.
        minibatch_ms: milliseconds per minibatch.
        power_w: watts while training.
        time_log_sd: standard deviation of the time's logarithm; 0 if measured.
        power_log_sd: standard deviation of the power's logarithm; 0 if measured.
        minibatches_per_epoch: minibatches of one pass over the device's data.
    """

    measured: bool
    minibatch_ms: float
    power_w: float
    time_log_sd: float
    power_log_sd: float
    minibatches_per_epoch: int

    @property
    def epoch_s(self) -> float:
        """Seconds per epoch."""
        return self.minibatch_ms * self.minibatches_per_epoch / 1e3

    def keeps_power(self, watts: float) -> float | None:
        """Return the probability that training draws at most this power, W; None if the power was measured."""
        return None if self.measured else _below(watts / self.power_w, self.power_log_sd)

    def keeps_epoch(self, seconds: float) -> float | None:
        """Return the probability that an epoch takes at most this time, s; None if the time was measured."""
        return None if self.measured else _below(seconds / self.epoch_s, self.time_log_sd)

    def content(self) -> dict[str, Any]:
        """Return the expectation as a JSON object."""
        return {
            "measured": self.measured,
            "minibatch_ms": self.minibatch_ms,
            "epoch_s": self.epoch_s,
            "epoch_s_interval": _interval(self.epoch_s, self.time_log_sd),
            "power_w": self.power_w,
            "power_w_interval": _interval(self.power_w, self.power_log_sd),
            "epoch_kj": self.epoch_s * self.power_w / 1e3,
        }


def expectation_of(fitted: FittedDevice, mode: PowerMode) -> Expectation:
    """Return the expectation of a mode that the device offers."""
    known = fitted.known
    place = int(np.flatnonzero((known.modes == modes_to_array([mode])).all(axis=1))[0])
    return Expectation(
        bool(known.measured[place]),
        float(known.minibatch_ms[place]),
        float(known.power_mw[place]) / 1e3,
        float(known.time_log_sd[place]),
        float(known.power_log_sd[place]),
        fitted.minibatches_per_epoch,
    )


def lines_of(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the lines of text for `Expectation.content`."""
    return {
        "source": "measured" if content["measured"] else f"predicted, with {INTERVAL:.0%} interval",
        "minibatch": f"{content['minibatch_ms']:.1f} ms",
        "epoch": f"{content['epoch_s']:.1f} s{_bracket(content['epoch_s_interval'])}",
        "power": f"{content['power_w']:.1f} W{_bracket(content['power_w_interval'])}",
        "energy": f"{content['epoch_kj']:.1f} kJ per epoch",
    }


def assumed_length(minibatches_per_epoch: int) -> str:
    """Return the remark that an epoch's length is assumed, and how to state it."""
    return (
        f"An epoch is assumed to have {minibatches_per_epoch:,} minibatches: no app has reported their number yet. "
        f"State it with `wattfleet agent fit --minibatches-per-epoch`."
    )


def _below(ratio: float, log_sd: float) -> float:
    return float(ndtr(np.log(ratio) / log_sd))


def _interval(median: float, log_sd: float) -> list[float] | None:
    if log_sd == 0:
        return None
    factor = float(np.exp(ndtri((1 + INTERVAL) / 2) * log_sd))
    return [median / factor, median * factor]


def _bracket(interval: list[float] | None) -> str:
    return "" if interval is None else f" [{interval[0]:.1f} to {interval[1]:.1f}]"
