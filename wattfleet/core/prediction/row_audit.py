"""Auditing a profile: finding rows whose measurements do not belong to the mode that they name.

A device can report a mode without applying it. In the corpora behind PowerTrain (doi:10.1016/j.future.2024.07.001), the
first modes of a sweep hold the time and the power of another CPU frequency. Such rows hardly affect a robust fit, so
they differ clearly from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import ModeArray, PowerMode, Profile, WorkloadFacts, array_to_modes
from wattfleet.core.prediction.predictor import MIN_MODES, Prediction
from wattfleet.core.prediction.roofline.predictor import RooflinePredictor

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

TIME_THRESHOLD, POWER_THRESHOLD = 0.15, 0.08
"""Log residuals of time and power beyond which a row is suspect: about 15 % and 8 %."""

# A suspect row also lies beyond this many standard deviations of the fit, which are large where little was measured.
_MIN_DEVIATIONS = 4.0
# A setting explains a suspect row if time and power both lie within this many standard deviations. `_UNSTEADY_SD` adds
# to the fit's own standard deviation, since a mode may not have been held throughout its measurement.
_MAX_EXPLAINED_DEVIATIONS = 2.0
_UNSTEADY_SD = 0.02
# The second fit leaves out what the first one found, if enough rows remain.
_FITS = 2

_KNOB_FORMATS = ("{:,.0f} cores", "CPU {:,.0f} kHz", "GPU {:,.2f} MHz", "memory {:,.2f} MHz")
_KNOB_UNITS = (1.0, 1.0, 1e6, 1e6)


class NoAuditError(InvalidInputError):
    """The audit is impossible: there are too few rows to fit, or most of them contradict the fit."""


@dataclass(frozen=True)
class SuspectRow:
    """A row that contradicts the other rows.

    Attributes:
        row: its index in the profile, from 0.
        mode: the mode that it names.
        batch: the samples in its batch; None if the profile does not state them.
        minibatch_ms: its time, ms.
        power_mw: its power, mW.
        expected_ms: the time expected from the other rows, ms.
        expected_mw: the power expected from the other rows, mW.
        reason: how it differs, as text.
        applied: the mode, one knob away, whose time and power it has; None if there is none.
        looks_like: the same as text.
    """

    row: int
    mode: PowerMode
    batch: int | None
    minibatch_ms: float
    power_mw: float
    expected_ms: float
    expected_mw: float
    reason: str
    applied: PowerMode | None
    looks_like: str


@dataclass(frozen=True)
class _Comparison:
    """All rows compared with the fit: log residuals, and the standard deviations expected of correct rows."""

    predictor: RooflinePredictor
    expected: Prediction
    time: Values
    power: Values
    time_sd: Values
    power_sd: Values

    def suspect(self) -> Mask:
        time = np.abs(self.time) > np.maximum(TIME_THRESHOLD, _MIN_DEVIATIONS * self.time_sd)
        power = np.abs(self.power) > np.maximum(POWER_THRESHOLD, _MIN_DEVIATIONS * self.power_sd)
        return np.asarray(time | power)


def audit_rows(profile: Profile, reference: RooflinePredictor | None = None) -> list[SuspectRow]:
    """Find the rows that contradict the others, the largest deviation first.

    A row is suspect if its time or power differs from a robust fit by more than `TIME_THRESHOLD` or `POWER_THRESHOLD`,
    and clearly more than the fit's uncertainty. Either the row or the fit is wrong. If another setting of one knob
    explains both time and power, the mode was probably not applied. Settings that differ little from the named one
    cannot be distinguished. The rows of each batch size are audited on their own.

    Args:
        profile: the rows; at least five of each batch size without a reference.
        reference: the predictor of another workload or board, which helps if there are few rows.

    Raises:
        NoAuditError: there are too few rows to fit, or the fit contradicts more than half of them, so that the fit
            itself is not credible.
    """
    if profile.batch is None or len(profile.batches) < 2:
        found = _audit_one_batch(profile, reference)
    else:
        found = []
        for batch in profile.batches:
            rows = np.flatnonzero(profile.batch == batch)
            try:
                suspects = _audit_one_batch(profile.rows(rows), reference)
            except NoAuditError as error:
                raise NoAuditError(f"batch {batch}: {error}") from None
            found += [(distance, replace(suspect, row=int(rows[suspect.row]))) for distance, suspect in suspects]
    return [suspect for _, suspect in sorted(found, key=lambda ranked: -ranked[0])]


def _audit_one_batch(profile: Profile, reference: RooflinePredictor | None) -> list[tuple[float, SuspectRow]]:
    """The suspect rows of one batch size, each with its deviation."""
    fewest = MIN_MODES if reference is None else 1
    if len(profile) < fewest:
        raise NoAuditError(
            f"{len(profile)} measured modes are too few to audit: measure at least {MIN_MODES}, or give a reference"
        )
    kept = np.ones(len(profile), dtype=bool)
    for _ in range(_FITS):
        compared = _compare(profile, kept, reference)
        kept = ~compared.suspect()
        if 2 * kept.sum() < len(profile):
            raise NoAuditError(
                f"{(~kept).sum()} of {len(profile)} rows contradict the audit's fit, so the fit is not credible:"
                " check that all rows are from one workload on one device and in the right units, measure more modes,"
                " or give a reference with a more similar workload"
            )
        if kept.sum() < fewest:
            break
    found = np.flatnonzero(~kept)
    distance = np.abs(compared.time) / TIME_THRESHOLD + np.abs(compared.power) / POWER_THRESHOLD
    return [(float(distance[row]), _suspect(int(row), profile, compared)) for row in found]


def passing_rows(profile: Profile, suspects: Sequence[SuspectRow]) -> Mask:
    """`[n]` true for the rows of the profile that are not suspect."""
    passing = np.ones(len(profile), dtype=bool)
    passing[[suspect.row for suspect in suspects]] = False
    return passing


def _compare(profile: Profile, kept: Mask, reference: RooflinePredictor | None) -> _Comparison:
    """Fit the kept rows and compare all rows with the fit; each of a few kept rows is compared with the others."""
    fitted = RooflinePredictor.fit(profile.rows(kept), reference, WorkloadFacts(profile.task))
    expected = fitted.predict(profile.modes, profile.batch)
    time = np.log(profile.minibatch_ms / expected.minibatch_ms)
    power = np.log(profile.power_mw / expected.power_mw)
    time_sd, power_sd = expected.time_log_sd.copy(), expected.power_log_sd.copy()
    likeliest = fitted.likeliest
    time_correction, power_correction = likeliest.time_remainder.correction, likeliest.power_remainder.correction
    if len(time_correction.weights):
        time[kept], time_sd[kept] = time_correction.left_out()
        power[kept], power_sd[kept] = power_correction.left_out()
        left_out = Prediction(
            profile.minibatch_ms * np.exp(-time), profile.power_mw * np.exp(-power), time_sd, power_sd
        )
        return _Comparison(fitted, left_out, time, power, time_sd, power_sd)
    return _Comparison(fitted, expected, time, power, time_sd, power_sd)


def _suspect(row: int, profile: Profile, compared: _Comparison) -> SuspectRow:
    time, power = float(compared.time[row]), float(compared.power[row])
    named = profile.modes[row]
    applied = _explaining_setting(row, profile, compared.predictor)
    mode = array_to_modes(named[None])[0]
    looks_like = "no other setting of a single knob"
    if applied is not None:
        knob = int(np.flatnonzero(applied != named)[0])
        looks_like = f"time and power of {_setting(knob, applied)} instead of {_setting(knob, named)}"
    return SuspectRow(
        row,
        mode,
        None if profile.batch is None else int(profile.batch[row]),
        float(profile.minibatch_ms[row]),
        float(profile.power_mw[row]),
        float(compared.expected.minibatch_ms[row]),
        float(compared.expected.power_mw[row]),
        ("mode not applied: " if applied is not None else "the other rows contradict it: ")
        + f"time {_difference(time)}, power {_difference(power)}",
        None if applied is None else array_to_modes(applied[None])[0],
        looks_like,
    )


def _difference(log_residual: float) -> str:
    percent = 100 * np.expm1(log_residual)
    return f"{abs(percent):.0f} % {'above' if percent > 0 else 'below'} the expected value"


def _setting(knob: int, mode: Values) -> str:
    return _KNOB_FORMATS[knob].format(mode[knob] / _KNOB_UNITS[knob])


def _settings_one_knob_away(mode: Values, modes: ModeArray) -> Iterator[Values]:
    """The mode with one knob set to another value that occurs in the profile."""
    for knob in range(4):
        for value in np.unique(modes[:, knob]):
            if value != mode[knob]:
                changed = mode.copy()
                changed[knob] = value
                yield changed


def _explaining_setting(row: int, profile: Profile, predictor: RooflinePredictor) -> Values | None:
    """The setting one knob away that best explains time and power, if it explains both."""
    settings = list(_settings_one_knob_away(profile.modes[row], profile.modes))
    if not settings:
        return None
    batch = None if profile.batch is None else np.full(len(settings), profile.batch[row])
    predicted = predictor.predict(np.array(settings), batch)
    time = np.log(profile.minibatch_ms[row] / predicted.minibatch_ms) / np.hypot(predicted.time_log_sd, _UNSTEADY_SD)
    power = np.log(profile.power_mw[row] / predicted.power_mw) / np.hypot(predicted.power_log_sd, _UNSTEADY_SD)
    worst = np.maximum(np.abs(time), np.abs(power))
    best = int(worst.argmin())
    return settings[best] if worst[best] <= _MAX_EXPLAINED_DEVIATIONS else None
