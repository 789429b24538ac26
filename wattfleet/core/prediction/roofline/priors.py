"""Weak assumptions about the model's parameters, from which priors and populations start.

The general priors hold for training on a Jetson of the Orin or Xavier generation. They serve to fit a corpus, or a few
modes without a reference. With a reference, `Population` learns the prior from measured workloads. The spreads below
are what it assumes before it has seen any.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.modes import Processor, WorkloadFacts
from wattfleet.core.prediction.roofline.estimation import Prior
from wattfleet.core.prediction.roofline.physics import PowerParameters, TimeParameters

Values = NDArray[np.float64]

SCALED_TIME = 7
"""The number of leading time parameters that scale with the step: the work of each resource."""

_SCALED_POWER = 9

# Work per ms of the median step at the base batch size.
_GENERAL_TIME = TimeParameters(
    loading_mcycles=0.8,
    loading_stall_mcycles=0.2,
    launch_mcycles=0.2,
    compute_mcycles=0.3,
    serial_compute_mcycles=0.1,
    traffic_mcycles=0.5,
    fixed_ms=0.01,
    workers=4,
    main_cores=1,
    background_ghz=0.12,
    gpu_overlap=1,
    launch_overlap=1,
    loading_overlap=4,
)
GENERAL_GROWTH = astuple(_GENERAL_TIME)[-5:]
"""The last parameters: the part of each resource's work that does not grow with the batch."""
_GENERAL_TIME_SD = np.array([3, 3, 3, 3, 2, 3, 2, 0.3, 0.4, 0.7, 1, 1, 1, 1.5, 1.5, 1, 1, 1.5])
_GENERAL_POWER = PowerParameters(
    floor_mw=9000,
    core_clock_mw=50,
    core_busy_mw=400,
    gpu_clock_mw=2000,
    gpu_busy_mw=8000,
    gpu_stall_mw=500,
    mem_clock_mw=300,
    mem_traffic_mw=3000,
    mem_compute_mw=700,
    core_voltage=1,
    core_knee_ghz=1,
    gpu_voltage=1,
    gpu_knee_ghz=0.5,
)
_GENERAL_POWER_SD = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0.4, 1, 0.4])
_TYPICAL_STEP_MS = 200.0
TYPICAL_WORKERS = 4
"""Assumed number of a workload's loader workers if it is unknown."""


@dataclass(frozen=True)
class Spreads:
    """Log standard deviations of one quantity's `k` parameters.

    Attributes:
        workload: `[k, k]` covariance between workloads of one task on one board.
        task: `[k]` of the difference between inference and training.
        board: `[k]` of the difference between two boards, beyond what their data sheets say.
        unknown_board: `[k, k]` covariance of the difference from a board without a data sheet.
        anywhere: the distribution of a typical training's parameters.
        share_of_board: share of the variance between workloads that a workload has of its own on each board. A step is
            much the same work on all boards; what it draws depends more on the board.
    """

    workload: Values
    task: Values
    board: Values
    unknown_board: Values
    anywhere: Prior
    share_of_board: float


def _time_spreads() -> Spreads:
    sd = np.array(
        [0.42, 0.42, 0.42, 0.35, 0.42, 0.35, 0.56, 0.14, 0.21, 0.28, 0.35, 0.56, 0.28, 0.7, 0.5, 0.5, 0.5, 0.7]
    )
    scales = np.r_[np.ones(SCALED_TIME), np.zeros(len(sd) - SCALED_TIME)]
    board = np.array([*[0.4] * SCALED_TIME, 0.2, 0.3, 0.3, 0.3, 0.3, 0.3, *[0.01] * 5])
    return Spreads(
        # The work of all resources grows together with the size of the network.
        workload=np.diag(sd**2) + 0.6**2 * np.outer(scales, scales),
        task=np.array([2, 2, 1, 1, 1, 1, 1, 0.3, 0.5, 0.3, 0.5, 0.7, 0.7, 1.5, 1, 1, 1, 1]),
        board=board,
        # Another kind of computer may be many times as fast.
        unknown_board=np.diag((2 * board) ** 2) + 1.5**2 * np.outer(scales, scales),
        anywhere=general_time_prior(_TYPICAL_STEP_MS, WorkloadFacts()),
        share_of_board=0.1,
    )


def _power_spreads() -> Spreads:
    sd = np.array([0.035, 0.18, 0.35, 0.28, 0.5, 0.42, 0.1, 0.42, 0.35, 0.28, 0.1, 0.28, 0.14])
    scales = np.r_[np.ones(_SCALED_POWER), np.zeros(len(sd) - _SCALED_POWER)]
    board = np.array([*[0.3] * _SCALED_POWER, 0.4, 0.2, 0.4, 0.3])
    return Spreads(
        workload=np.diag(sd**2),
        task=np.array([0.1, 0.1, 0.7, 0.3, 0.7, 0.7, 0.2, 0.7, 0.7, 0.3, 0.1, 0.3, 0.2]),
        board=board,
        unknown_board=np.diag((2 * board) ** 2) + np.outer(scales, scales),
        anywhere=general_power_prior(),
        share_of_board=0.5,
    )


# Without loader workers, the main process loads the data itself: on about one core, and while nothing else runs.
_ALONE = {"workers": (np.log(0.4), 0.5), "main_cores": (-2.0, 1.0), "loading_overlap": (np.log(0.075), 1.0)}
# On the CPU, the network's work is done by all cores, as loading is, and almost nothing is left for the GPU.
_ON_CPU = {
    "loading_mcycles": (3.0, 2.0),
    "loading_stall_mcycles": (3.0, 2.0),
    "workers": (np.log(2.0), 0.7),
    "compute_mcycles": (-6.0, 2.0),
    "serial_compute_mcycles": (-6.0, 2.0),
    "traffic_mcycles": (-6.0, 2.0),
}


def known_shift(facts: WorkloadFacts) -> tuple[Values, Values]:
    """The effect of known facts on the log time parameters: `[k]` shifts, and `[k]` additional standard deviations."""
    names = list(TimeParameters.__dataclass_fields__)
    shift, sd = np.zeros((2, len(names)))
    changes = [_ALONE] if facts.loader_workers == 0 else []
    changes += [_ON_CPU] if facts.processor is Processor.CPU else []
    for change in changes:
        for name, (by, uncertainty) in change.items():
            k = names.index(name)
            shift[k] += by
            sd[k] = np.hypot(sd[k], uncertainty)
    if facts.loader_workers:
        # The population's workloads use 4 workers; their effective number differs a little.
        shift[names.index("workers")] += np.log(facts.loader_workers / TYPICAL_WORKERS)
    return shift, sd


def general_time_prior(median_ms: float, facts: WorkloadFacts) -> Prior:
    """The general prior of the log time parameters, for a workload with this median step, ms."""
    mean = _GENERAL_TIME.log()
    mean[:SCALED_TIME] += np.log(median_ms)
    shift, sd = known_shift(facts)
    return Prior.independent(mean + shift, np.hypot(_GENERAL_TIME_SD, sd))


def general_power_prior() -> Prior:
    """The general prior of a board's log power parameters."""
    return Prior.independent(_GENERAL_POWER.log(), _GENERAL_POWER_SD)


TIME_SPREADS, POWER_SPREADS = _time_spreads(), _power_spreads()


def hypotheses(facts: WorkloadFacts) -> list[tuple[float, WorkloadFacts]]:
    """The possible values of the unknown facts, each with its prior probability."""
    if facts.loader_workers is not None:
        return [(1.0, facts)]
    return [(0.8, replace(facts, loader_workers=TYPICAL_WORKERS)), (0.2, replace(facts, loader_workers=0))]
