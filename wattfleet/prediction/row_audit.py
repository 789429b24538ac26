"""Rows of a profile that lie: measurements that are not those of the mode they name.

A device may take a mode's name and not the mode: in the corpora behind PowerTrain
(doi:10.1016/j.future.2024.07.001) the first modes of a sweep hold the time and the power of another CPU frequency.
A robust fit is little moved by such rows, so they stand out from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode, Profile, array_to_modes
from wattfleet.prediction.predictor import MIN_MODES, Prediction
from wattfleet.prediction.roofline.predictor import RooflinePredictor

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

TIME_THRESHOLD, POWER_THRESHOLD = 0.15, 0.08
"""A row whose time or power lies further than this from the fit is suspect (logarithms: about 15 % and 8 %)."""

# ... and further than this many of the fit's own standard deviations, which are large where little was measured.
_SURE = 4.0
# A setting explains a suspect row if time and power both lie within this many standard deviations of it; a
# measured mode that was not held throughout its measurement adds to the fit's own standard deviation.
_AGREES = 2.0
_UNSTEADY_SD = 0.02
# The second fit is made without what the first one found, if enough is left.
_ROUNDS = 2

_KNOB_WORDS = ("{:,.0f} cores", "CPU {:,.0f} kHz", "GPU {:,.2f} MHz", "memory {:,.2f} MHz")
_KNOB_UNITS = (1.0, 1.0, 1e6, 1e6)


class NoAuditError(InvalidInputError):
    """The rows cannot be judged: they are too few to fit, or most of them contradict the fit."""


@dataclass(frozen=True)
class SuspectRow:
    """A row that the others contradict.

    Attributes:
        row: its place in the profile, from 0.
        mode: the mode it names.
        minibatch_ms: the time it states, ms.
        power_mw: the power it states, mW.
        expected_ms: the time that the other rows lead to expect, ms.
        expected_mw: the power, mW.
        reason: how it differs, in words.
        applied: the mode whose time and power it has, one knob away; None where there is none.
        looks_like: the same in words.
    """

    row: int
    mode: PowerMode
    minibatch_ms: float
    power_mw: float
    expected_ms: float
    expected_mw: float
    reason: str
    applied: PowerMode | None
    looks_like: str


@dataclass(frozen=True)
class _Judged:
    """Every row against the fit: log residuals, and the standard deviations they would have if they were true."""

    predictor: RooflinePredictor
    expected: Prediction
    time: Values
    power: Values
    time_sd: Values
    power_sd: Values

    def suspect(self) -> Mask:
        time = np.abs(self.time) > np.maximum(TIME_THRESHOLD, _SURE * self.time_sd)
        power = np.abs(self.power) > np.maximum(POWER_THRESHOLD, _SURE * self.power_sd)
        return np.asarray(time | power)


def audit_rows(profile: Profile, reference: RooflinePredictor | None = None) -> list[SuspectRow]:
    """The rows that the others contradict, the furthest off first.

    A row is suspect if its time or its power lies beyond `TIME_THRESHOLD` or `POWER_THRESHOLD`, and clearly beyond
    the fit's uncertainty, of a robust fit to the rows. Some of these rows are false, at others the fit is wrong:
    where another setting of one knob explains both the time and the power, the mode was probably not applied.
    Settings that differ little from the named one cannot be told apart.

    Args:
        profile: the rows, five or more unless there is a reference.
        reference: another workload's or board's predictor, which helps where the rows are few.

    Raises:
        NoAuditError: too few rows to fit, or the fit contradicts more than half of them: then it is the fit that
            cannot be believed.
    """
    fewest = MIN_MODES if reference is None else 1
    if len(profile) < fewest:
        raise NoAuditError(
            f"{len(profile)} measured modes are too few to audit: measure at least {MIN_MODES}, or give a reference"
        )
    kept = np.ones(len(profile), dtype=bool)
    for _ in range(_ROUNDS):
        judged = _judge(profile, kept, reference)
        kept = ~judged.suspect()
        if 2 * kept.sum() < len(profile):
            raise NoAuditError(
                f"{(~kept).sum()} of {len(profile)} rows contradict the audit's fit, which cannot be believed then:"
                " check that all rows are of one workload on one device and in the right units, measure more modes, or"
                " give a reference whose workload is more alike"
            )
        if kept.sum() < fewest:
            break
    found = np.flatnonzero(~kept)
    distance = np.abs(judged.time) / TIME_THRESHOLD + np.abs(judged.power) / POWER_THRESHOLD
    return [_suspect(int(row), profile, judged) for row in found[np.argsort(-distance[found], kind="stable")]]


def passing_rows(profile: Profile, suspects: Sequence[SuspectRow]) -> Mask:
    """`[n]`, true at the rows of the profile that are not suspect."""
    passing = np.ones(len(profile), dtype=bool)
    passing[[suspect.row for suspect in suspects]] = False
    return passing


def _judge(profile: Profile, kept: Mask, reference: RooflinePredictor | None) -> _Judged:
    """Fit the rows that are kept, and judge all by it: each of a few rows by the others."""
    fitted = RooflinePredictor.fit(profile.rows(kept), reference)
    expected = fitted.predict(profile.modes)
    time = np.log(profile.minibatch_ms / expected.minibatch_ms)
    power = np.log(profile.power_mw / expected.power_mw)
    time_sd, power_sd = expected.time_log_sd.copy(), expected.power_log_sd.copy()
    time_correction, power_correction = fitted.time_remainder.correction, fitted.power_remainder.correction
    if len(time_correction.modes):
        time[kept], time_sd[kept] = time_correction.left_out()
        power[kept], power_sd[kept] = power_correction.left_out()
        left_out = Prediction(
            profile.minibatch_ms * np.exp(-time), profile.power_mw * np.exp(-power), time_sd, power_sd
        )
        return _Judged(fitted, left_out, time, power, time_sd, power_sd)
    return _Judged(fitted, expected, time, power, time_sd, power_sd)


def _suspect(row: int, profile: Profile, judged: _Judged) -> SuspectRow:
    time, power = float(judged.time[row]), float(judged.power[row])
    named = profile.modes[row]
    applied = _setting_that_agrees(row, profile, judged.predictor)
    mode = array_to_modes(named[None])[0]
    looks_like = "no other setting of a single knob"
    if applied is not None:
        knob = int(np.flatnonzero(applied != named)[0])
        looks_like = f"time and power of {_setting(knob, applied)} instead of {_setting(knob, named)}"
    return SuspectRow(
        row,
        mode,
        float(profile.minibatch_ms[row]),
        float(profile.power_mw[row]),
        float(judged.expected.minibatch_ms[row]),
        float(judged.expected.power_mw[row]),
        ("mode not applied: " if applied is not None else "the other rows contradict it: ")
        + f"time {_off(time)}, power {_off(power)}",
        None if applied is None else array_to_modes(applied[None])[0],
        looks_like,
    )


def _off(log_residual: float) -> str:
    percent = 100 * np.expm1(log_residual)
    return f"{abs(percent):.0f} % {'above' if percent > 0 else 'below'} the expected"


def _setting(knob: int, mode: Values) -> str:
    return _KNOB_WORDS[knob].format(mode[knob] / _KNOB_UNITS[knob])


def _settings_one_knob_away(mode: Values, modes: ModeArray) -> Iterator[Values]:
    """The mode with one knob at another of the values that the profile holds."""
    for knob in range(4):
        for value in np.unique(modes[:, knob]):
            if value != mode[knob]:
                changed = mode.copy()
                changed[knob] = value
                yield changed


def _setting_that_agrees(row: int, profile: Profile, predictor: RooflinePredictor) -> Values | None:
    """The setting one knob away that explains time and power best, if it explains both."""
    settings = list(_settings_one_knob_away(profile.modes[row], profile.modes))
    if not settings:
        return None
    there = predictor.predict(np.array(settings))
    time = np.log(profile.minibatch_ms[row] / there.minibatch_ms) / np.hypot(there.time_log_sd, _UNSTEADY_SD)
    power = np.log(profile.power_mw[row] / there.power_mw) / np.hypot(there.power_log_sd, _UNSTEADY_SD)
    worst = np.maximum(np.abs(time), np.abs(power))
    best = int(worst.argmin())
    return settings[best] if worst[best] <= _AGREES else None
