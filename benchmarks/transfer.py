"""Measure a transfer on one core: fit 50 modes, predict every mode of an AGX Orin, and compute the front.

`batches_s` is the time to fit, and to predict every mode with six batch sizes.

    python -m benchmarks.transfer [--data ../shared/data] [--runs 5] [--json]

Every figure is the median of several runs. `yardstick_s` is the time to fit scikit-learn's Gaussian process to the same
50 rows for both quantities, in the same process. Ratios to it differ less between machines than seconds. The fit of
the reference needs the measured corpora. Without them, a simulated workload is transferred and `reference_s` is null.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypeVar

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from threadpoolctl import threadpool_limits

from reference_models import load
from wattfleet.core.choosing import predicted_front
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import BatchArray, ModeArray, Profile, board_named, read_profile
from wattfleet.core.prediction import (
    DEFAULT_PREDICTOR,
    Prediction,
    Predictor,
    predictor_class,
    restore_predictor,
)

REFERENCE = "agx_orin_resnet18"
TARGET = "agx_orin_mobilenetv3"
_MODES = 50
_MINIBATCHES_PER_EPOCH = 1443
_BATCHES = np.array([1, 4, 8, 16, 32, 64])
_REFERENCE_RUNS = 3
_DEFAULT = predictor_class(DEFAULT_PREDICTOR)

Result = TypeVar("Result")


def measure(data: Path | None, runs: int) -> dict[str, float | int | str | None]:
    """Return all figures, s.

    Args:
        data: folder of the measured corpora; None if there is none.
        runs: how often each step is timed, every time with other modes.
    """
    with threadpool_limits(limits=1):
        space = board_named("agx-orin").space.array()
        reference: Predictor = restore_predictor(load(REFERENCE))
        target = _stand_in(reference, space) if data is None else read_profile(data / f"{TARGET}.csv")
        fit_s, predict_s, front_s, total_s, batches_s, yardstick_s = np.median(
            [_steps(target, reference, space, run) for run in range(-1, runs)][1:], axis=0
        ).tolist()
        reference_s = None
        if data is not None:
            corpus = read_profile(data / f"{REFERENCE}.csv")
            reference_s = statistics.median(
                _timed(lambda: _DEFAULT.fit(corpus))[1] for _ in range(min(runs, _REFERENCE_RUNS))
            )
    return {
        "fit_s": fit_s,
        "predict_s": predict_s,
        "front_s": front_s,
        "total_s": total_s,
        "batches_s": batches_s,
        "reference_s": reference_s,
        "yardstick_s": yardstick_s,
        "total_over_yardstick": total_s / yardstick_s,
        "reference_over_yardstick": None if reference_s is None else reference_s / yardstick_s,
        "modes_fitted": _MODES,
        "modes_predicted": len(space),
        "batch_sizes": len(_BATCHES),
        "runs": runs,
        "threads": 1,
        "target": TARGET if data is not None else "simulated",
    }


def _steps(target: Profile, reference: Predictor, space: ModeArray, run: int) -> tuple[float, ...]:
    """Return seconds to fit, to predict, for the front, for all three, for six batch sizes, and of the yardstick.

    Run -1 warms up.
    """
    profile = target.rows(np.random.default_rng(run + 1).choice(len(target), _MODES, replace=False))
    fitted, fit_s = _timed(lambda: _DEFAULT.fit(profile, reference))
    prediction, predict_s = _timed(lambda: _with_intervals(fitted, space))
    _, front_s = _timed(lambda: predicted_front(space, prediction, _MINIBATCHES_PER_EPOCH))
    _, batches_s = _timed(lambda: _with_intervals(fitted, *_every_batch(space)))
    _, yardstick_s = _timed(lambda: _yardstick(profile))
    return fit_s, predict_s, front_s, fit_s + predict_s + front_s, fit_s + batches_s, yardstick_s


def _every_batch(space: ModeArray) -> tuple[ModeArray, BatchArray]:
    """Return every mode with every batch size."""
    return np.tile(space, (len(_BATCHES), 1)), np.repeat(_BATCHES, len(space))


def _with_intervals(fitted: Predictor, modes: ModeArray, batch: BatchArray | None = None) -> Prediction:
    """Return predictions, and the ends of their 90 % intervals."""
    prediction = fitted.predict(modes, batch)
    for q in (0.05, 0.95):
        prediction.minibatch_ms_quantile(q)
        prediction.power_mw_quantile(q)
    return prediction


def _yardstick(profile: Profile) -> None:
    """Fit a Gaussian process to the logarithms of each quantity."""
    features = np.log(profile.modes)
    features = (features - features.mean(axis=0)) / features.std(axis=0)
    for observed in (profile.minibatch_ms, profile.power_mw):
        kernel = ConstantKernel() * RBF(np.ones(4), (1e-2, 1e5))
        GaussianProcessRegressor(kernel, alpha=1e-3, normalize_y=True).fit(features, np.log(observed))


def _stand_in(reference: Predictor, space: ModeArray) -> Profile:
    """Return a workload that takes three quarters of the time of the reference's, with 2 % noise."""
    chance = np.random.default_rng(0)
    modes = space[chance.choice(len(space), 1000, replace=False)]
    predicted = reference.predict(modes)
    noise = np.exp(chance.normal(0, 0.02, (2, len(modes))))
    return Profile(modes, 0.75 * predicted.minibatch_ms * noise[0], 0.9 * predicted.power_mw * noise[1])


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    begun = perf_counter()
    result = work()
    return result, perf_counter() - begun


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer",
        description="Time a transfer on one core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data"), help="read the measured corpora from this folder"
    )
    parser.add_argument("--runs", type=int, default=5, help="set how often each step is timed")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be 1 or more")
    data = arguments.data if all((arguments.data / f"{n}.csv").is_file() for n in (REFERENCE, TARGET)) else None
    if data is None:
        print(
            f"{arguments.data} does not contain {REFERENCE}.csv and {TARGET}.csv: transferring a simulated workload"
            " without timing the fit of the reference (reference_s)",
            file=sys.stderr,
        )
    try:
        figures = measure(data, arguments.runs)
    except WattfleetError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        print(json.dumps(figures, indent=2))
    else:
        for name, value in figures.items():
            print(f"{name:<26}{'-' if value is None else f'{value:.4g}' if isinstance(value, float) else value}")


if __name__ == "__main__":
    main()
