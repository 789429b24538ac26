"""Prior distributions of the model's parameters: general ones, and ones around a reference.

The general priors hold for training on a Jetson of the Orin or Xavier generation with a data loader of several
processes. The width of the priors around a reference was estimated on all transfers between the corpora behind
PowerTrain (doi:10.1016/j.future.2024.07.001) together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wattfleet.prediction.roofline.estimation import Prior
from wattfleet.prediction.roofline.physics import PowerParameters, TimeParameters

Values = NDArray[np.float64]

# The number of leading parameters that scale with the quantity itself: the work of a step, the board's milliwatts.
_SCALED_TIME = 7
_SCALED_POWER = 9

# Work per ms of the median step.
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
_GENERAL_TIME_SD = np.array([3, 3, 3, 3, 2, 3, 2, 0.3, 0.4, 0.7, 1, 1, 1])
_TRANSFER_TIME_SD = np.array([0.35, 0.5, 0.5, 0.35, 0.5, 0.35, 0.6, 0.2, 0.2, 0.25, 0.25, 0.3, 0.3])

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
# Another board's floor may be half of the reference's; its voltage knees are nearly the same.
_TRANSFER_POWER_SD = np.array([1, 0.75, 0.75, 0.75, 0.6, 0.75, 1, 0.75, 0.75, 0.6, 0.2, 0.6, 0.3])

UNMEASURED_TIME_SD, UNMEASURED_POWER_SD = 1.5, 0.6
"""Log standard deviations of the time and power scales, relative to the reference, if no mode was measured.

Step times and powers differ by a factor of four and more between the workloads and boards of PowerTrain
(doi:10.1016/j.future.2024.07.001).
"""

UNMEASURED_NUGGET_SD = 0.03
"""Log standard deviation of a single mode's own deviation if no mode was measured."""


def general_time_prior(median_ms: float) -> Prior:
    """The general prior of the log time parameters, for a workload with this median step, ms."""
    mean = _GENERAL_TIME.log()
    mean[:_SCALED_TIME] += np.log(median_ms)
    return Prior(mean, _GENERAL_TIME_SD)


def general_power_prior() -> Prior:
    """The general prior of a board's log power parameters."""
    return Prior(_GENERAL_POWER.log(), _GENERAL_POWER_SD)


def transfer_time_prior(reference: TimeParameters, log_ratio: float) -> Prior:
    """The prior of the log time parameters if steps take `exp(log_ratio)` times as long as the reference's."""
    mean = reference.log()
    mean[:_SCALED_TIME] += log_ratio
    return Prior(mean, _TRANSFER_TIME_SD)


def transfer_power_prior(reference: PowerParameters, log_ratio: float) -> Prior:
    """The prior of the log power parameters of a board that draws `exp(log_ratio)` times the reference's power."""
    mean = reference.log()
    mean[:_SCALED_POWER] += log_ratio
    return Prior(mean, _TRANSFER_POWER_SD)
