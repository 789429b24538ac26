"""Scores of a profile that was measured with fewer minibatches for each mode, from raw logs.

PowerTrain (doi:10.1016/j.future.2024.07.001, section 2.5) varies the minibatches of a mode from 10 to 40.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reference_models.scoring import percentage_errors
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode, Profile, WorkloadFacts
from wattfleet.prediction import MIN_MODES, Predictor

Values = NDArray[np.float64]


@dataclass(frozen=True)
class RawRun:
    """The raw log of training at one mode.

    Attributes:
        mode: the power mode.
        minibatch_ms: `[k]` times of the minibatches, ms, without the first one.
        end_s: `[k]` seconds at which they ended.
        sample_s: `[p]` seconds of the power samples, on the same clock.
        sample_mw: `[p]` power samples, mW.
    """

    mode: PowerMode
    minibatch_ms: Values
    end_s: Values
    sample_s: Values
    sample_mw: Values

    def measurement(self, minibatches: int) -> Measurement | None:
        """The medians over the last minibatches, when the power has settled; None without a power sample in them.

        Of a log with fewer minibatches, all are used.
        """
        last_ms, last_s = self.minibatch_ms[-minibatches:], self.end_s[-minibatches:]
        within = (self.sample_s >= last_s[0] - last_ms[0] / 1e3) & (self.sample_s <= last_s[-1])
        if not within.any():
            return None
        return Measurement(self.mode, float(np.median(last_ms)), float(np.median(self.sample_mw[within])))


def read_raw_runs(folder: Path) -> list[RawRun]:
    """The runs in the folders `pm_<cores>_<cpu kHz>_<gpu Hz>_<memory Hz>`, in the order of their names.

    Raises:
        InvalidInputError: there are none, or one lacks its logs of minibatches and power.
    """
    found = [_read(run) for run in sorted(folder.glob("pm_*_*_*_*"))]
    if not found:
        raise InvalidInputError(f"{folder}: holds no folder pm_<cores>_<cpu kHz>_<gpu Hz>_<memory Hz>: remove it")
    return found


def _read(run: Path) -> RawRun:
    import pandas as pd

    try:
        minibatches, samples = pd.read_csv(run / "minibatch.csv"), pd.read_csv(run / "jtop.csv")
        minibatch_ms, end_s = (minibatches[name].to_numpy(np.float64)[1:] for name in ("epochtime_ms", "log_time"))
        sample_s, sample_mw = (samples[name].to_numpy(np.float64) for name in ("log_time", "power cur"))
        mode = PowerMode(*(int(knob) for knob in run.name.split("_")[1:]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{run}: its raw logs cannot be read ({error}): repair or remove the folder") from None
    if not len(minibatch_ms):
        raise InvalidInputError(f"{run}: logs no minibatch after the first: remove the folder")
    return RawRun(mode, minibatch_ms, end_s, sample_s, sample_mw)


@dataclass(frozen=True)
class MinibatchScores:
    """Scores of a predictor that was fitted to modes measured with a limited number of minibatches.

    Attributes:
        minibatches: minibatches for each mode.
        modes: number of modes with a power sample within these minibatches, which were fitted.
        without_power: number of modes without one.
        time_mape: mean absolute percentage error of the time at the modes without raw logs, %.
        power_mape: mean absolute percentage error of the power there, %.
    """

    minibatches: int
    modes: int
    without_power: int
    time_mape: float
    power_mape: float


def evaluate_minibatches(
    predictor: type[Predictor],
    reference: Predictor | None,
    target: Profile,
    facts: WorkloadFacts,
    runs: list[RawRun],
    minibatches: int,
) -> MinibatchScores | None:
    """Fit a predictor to the modes with raw logs, and predict the other modes of the target.

    Args:
        predictor: the class to fit.
        reference: a predictor of this class to transfer from; None to fit without a reference.
        target: measured modes of the workload of the raw logs.
        facts: known facts of that workload.
        runs: the raw logs.
        minibatches: number of minibatches of each log that count.

    Returns:
        The scores. None if too few modes have a power sample, or no other mode is left.
    """
    measured = [run.measurement(minibatches) for run in runs]
    profile = Profile.of(one for one in measured if one is not None)
    logged = {tuple(map(float, run.mode)) for run in runs}
    unseen = target.rows(np.array([tuple(mode) not in logged for mode in target.modes.tolist()]))
    if len(profile) < MIN_MODES or not len(unseen):
        return None
    predicted = predictor.fit(profile, reference, facts).predict(unseen.modes, unseen.batch)
    time, power = percentage_errors(predicted, unseen)
    return MinibatchScores(minibatches, len(profile), measured.count(None), float(time.mean()), float(power.mean()))
