"""The physics of workloads other than the one to which a simulated board's parameters were fitted."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import numpy as np

from wattfleet.modes import Workload
from wattfleet.prediction.roofline import PowerParameters, TimeParameters

# The workload of the boards' own parameters: ResNet-18 on ImageNet's images, with batches of 16.
_PARAMETERS = 11.7e6
_STEP_FLOPS_OF_A_SAMPLE = 3 * 2 * 1.8e9
# The work of a network grows more slowly than its size: large networks reuse less of each parameter.
_GROWTH_WITH_PARAMETERS = 0.5
_TRAFFIC_GROWTH = 0.8
# A training process that loads its data itself uses about one core for this, and does nothing else meanwhile.
_ALONE_WORKERS, _ALONE_OVERLAP = 0.4, 0.075
_LEAST, _MOST = 0.02, 50.0
# The difference between two workloads of the same size, as a standard deviation of the logarithm.
_COMPUTE_LOG_SD, _LOADING_LOG_SD, _LAUNCH_LOG_SD, _TRAFFIC_LOG_SD, _POWER_LOG_SD = 0.3, 0.5, 0.4, 0.25, 0.12


def physics_of(
    time: TimeParameters, power: PowerParameters, workload: Workload
) -> tuple[TimeParameters, PowerParameters]:
    """Return the parameters of a workload on a board.

    The network's size sets how much is computed. Anything that the facts leave open is derived from the workload's
    name, and is the same on every board.

    Args:
        time: the board's time parameters for its own workload.
        power: its power parameters for the same.
        workload: the workload to simulate.
    """
    rng = np.random.default_rng([zlib.crc32(workload.name.encode())])
    compute, loading, launch, traffic, core_w, gpu_w, memory_w = np.exp(
        rng.standard_normal(7)
        * (
            _COMPUTE_LOG_SD,
            _LOADING_LOG_SD,
            _LAUNCH_LOG_SD,
            _TRAFFIC_LOG_SD,
            _POWER_LOG_SD,
            _POWER_LOG_SD,
            _POWER_LOG_SD,
        )
    ).tolist()
    size = _relative_size(workload)
    workers = workload.facts.loader_workers
    if workers == 0:
        time = replace(time, workers=_ALONE_WORKERS, loading_overlap=_ALONE_OVERLAP)
    return (
        replace(
            time,
            compute_mcycles=time.compute_mcycles * size * compute,
            serial_compute_mcycles=time.serial_compute_mcycles * size * compute,
            traffic_mcycles=time.traffic_mcycles * size**_TRAFFIC_GROWTH * traffic,
            loading_mcycles=time.loading_mcycles * loading,
            loading_stall_mcycles=time.loading_stall_mcycles * loading,
            launch_mcycles=time.launch_mcycles * launch,
            workers=float(workers) if workers else time.workers,
        ),
        replace(
            power,
            core_busy_mw=power.core_busy_mw * core_w,
            gpu_busy_mw=power.gpu_busy_mw * gpu_w,
            mem_traffic_mw=power.mem_traffic_mw * memory_w,
        ),
    )


def _relative_size(workload: Workload) -> float:
    """Return the work of a sample, relative to the board's own workload."""
    facts = workload.facts
    if facts.step_flops is not None and facts.batch is not None:
        size = facts.step_flops / facts.batch / _STEP_FLOPS_OF_A_SAMPLE
    elif facts.parameters is not None:
        size = (facts.parameters / _PARAMETERS) ** _GROWTH_WITH_PARAMETERS
    else:
        size = 1.0
    return min(max(size, _LEAST), _MOST) if math.isfinite(size) else 1.0
