"""The physical model of a step's time and a board's power: a roofline of overlapping resources.

A step of training or inference loads its batch (on the cores that other processes leave free), launches kernels (on one
core), computes and moves data (on the GPU and the memory). Each resource takes cycles of one clock, and they overlap
imperfectly. A part of each resource's work is the same for every batch size, and the rest grows with the batch. Power
is a floor plus the power of each clock domain: one part while idle and one while busy, at a voltage that rises with the
frequency. The form was selected on the measurements behind PowerTrain (doi:10.1016/j.future.2024.07.001, section 3).

All parameters are positive and are fitted as logarithms. 1 ms at 1 GHz is 1 Mcycle. The functions also take several
parameter sets at once: each parameter is then a column `[p, 1]`, and results are `[p, n]` instead of `[n]`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.modes import BatchArray, ModeArray

if TYPE_CHECKING:
    from typing_extensions import Self

Values = NDArray[np.float64]
Settings = NDArray[np.float64]
"""`[n, 5]` what a step runs with: a power mode (cores, kHz, Hz, Hz) and the samples in its batch."""

BASE_BATCH = 16
"""The batch size that the work in `TimeParameters` is stated for, and that is assumed if none is stated."""


def settings_of(modes: ModeArray, batch: BatchArray | None) -> Settings:
    """Combine `[n, 4]` modes with `[n]` batch sizes; None assumes `BASE_BATCH`."""
    return np.column_stack([modes, np.full(len(modes), BASE_BATCH) if batch is None else batch])


@dataclass(frozen=True)
class _Parameters:
    """Positive parameters, converted with `log` and `from_log` to the logarithms that are fitted."""

    def log(self) -> Values:
        """The logarithms of the parameters, `[k]`, in the order of the fields."""
        return np.log(np.array(astuple(self), dtype=np.float64))

    @classmethod
    def from_log(cls, log: Values) -> Self:
        """Create parameters from their `[k]` logarithms, or `p` sets of them from `[k, p]`."""
        return cls(*(np.exp(log).tolist() if log.ndim == 1 else np.exp(log)[..., None]))


@dataclass(frozen=True)
class TimeParameters(_Parameters):
    """The demand of one workload's step on one board, with a batch of `BASE_BATCH` samples.

    Attributes:
        loading_mcycles: CPU work to load a batch, Mcycles of one core.
        loading_stall_mcycles: memory waits of a loading core, Mcycles of the memory clock.
        launch_mcycles: CPU work to launch a step's kernels, Mcycles of one core.
        compute_mcycles: GPU work that overlaps with memory traffic, Mcycles of the GPU clock.
        serial_compute_mcycles: GPU work that overlaps with nothing, Mcycles of the GPU clock.
        traffic_mcycles: memory work of a step on the GPU, Mcycles of the memory clock.
        fixed_ms: time that no clock changes, ms.
        workers: processes of the data loader; loading does not use more cores than these.
        main_cores: cores that the training process occupies.
        background_ghz: load of the rest of the system on all cores together, 1e9 cycles per second.
        gpu_overlap: overlap of compute and memory traffic; 0 adds their times, large values take the longer one.
        launch_overlap: the same for launches and GPU work.
        loading_overlap: the same for loading and the rest of the step.
        loading_fixed: loading that does not grow with the batch, relative to the part that grows at `BASE_BATCH`.
        launch_fixed: the same for launches.
        compute_fixed: the same for GPU work, which small batches do not use fully.
        traffic_fixed: the same for memory work: the weights are read once for each batch.
        fixed_ms_fixed: the same for `fixed_ms`.
    """

    loading_mcycles: float
    loading_stall_mcycles: float
    launch_mcycles: float
    compute_mcycles: float
    serial_compute_mcycles: float
    traffic_mcycles: float
    fixed_ms: float
    workers: float
    main_cores: float
    background_ghz: float
    gpu_overlap: float
    launch_overlap: float
    loading_overlap: float
    loading_fixed: float = 0.02
    launch_fixed: float = 3.0
    compute_fixed: float = 0.05
    traffic_fixed: float = 0.1
    fixed_ms_fixed: float = 1.0


@dataclass(frozen=True)
class PowerParameters(_Parameters):
    """The power parameters of one board that runs one workload.

    Attributes:
        floor_mw: power that no clock changes, mW.
        core_clock_mw: power of an online core's clock at 1 GHz and low voltage, mW.
        core_busy_mw: additional power of a busy core, mW at 1 GHz.
        gpu_clock_mw: power of the GPU's clock at 1 GHz and low voltage, mW.
        gpu_busy_mw: additional power of a computing GPU, mW at 1 GHz.
        gpu_stall_mw: additional power of a GPU that moves data, mW at 1 GHz.
        mem_clock_mw: power of the memory's clock at 1 GHz, mW.
        mem_traffic_mw: additional power of a step's memory traffic, mW at 1 GHz.
        mem_compute_mw: additional memory power of a computing GPU's other accesses, mW at 1 GHz.
        core_voltage: rise of the cores' power above the knee, 1/GHz^2.
        core_knee_ghz: CPU frequency from which the voltage rises, GHz.
        gpu_voltage: rise of the GPU's power above the knee, 1/GHz^2.
        gpu_knee_ghz: GPU frequency from which the voltage rises, GHz.
    """

    floor_mw: float
    core_clock_mw: float
    core_busy_mw: float
    gpu_clock_mw: float
    gpu_busy_mw: float
    gpu_stall_mw: float
    mem_clock_mw: float
    mem_traffic_mw: float
    mem_compute_mw: float
    core_voltage: float
    core_knee_ghz: float
    gpu_voltage: float
    gpu_knee_ghz: float


@dataclass(frozen=True)
class StepParts:
    """The time of each resource alone at `n` settings, and the time of the whole step; all `[n]` ms."""

    loading_ms: Values
    launch_ms: Values
    compute_ms: Values
    traffic_ms: Values
    step_ms: Values


@dataclass(frozen=True)
class StepShares:
    """The share of each resource in the step at `n` settings, `[n]` each; shares sum to 1.

    Shortening a resource's time by 1 % shortens the step by its share of 1 %. A resource that overlaps with a longer
    one has a small share, however long it takes.
    """

    loading: Values
    launch: Values
    compute: Values
    memory: Values
    fixed: Values


# Smoothing width of the cores that are free for loading. On a single core, loader and training process take turns, and
# this width gives the loader half of it. The corpora (2, 4, 6 cores) fit best with about the same width.
_SHARED_CORES = 1.0
# Smoothing width of a voltage curve's knee, GHz.
_KNEE_WIDTH_GHZ = 0.1
# Sharpness of the limit by the loader's workers; the corpora fit equally well from 3 to 8.
_WORKERS_NORM = 4


def _knobs(settings: Settings) -> tuple[Values, Values, Values, Values]:
    """Cores, and the CPU, GPU and memory clocks in GHz."""
    return settings[:, 0], settings[:, 1] / 1e6, settings[:, 2] / 1e9, settings[:, 3] / 1e9


def _growth(settings: Settings, fixed: float) -> Values:
    """Work relative to that at `BASE_BATCH`, if a part `fixed` of it does not grow with the batch."""
    return np.asarray((settings[:, 4] / BASE_BATCH + fixed) / (1 + fixed))


def _smooth_positive(x: Values, width: float) -> Values:
    """`max(x, 0)`, smoothed over `width` and always positive."""
    root = np.hypot(x, width)
    # For a negative x, the plain sum would cancel to zero.
    return np.where(x > 0, 0.5 * (x + root), 0.5 * width**2 / (root - np.minimum(x, 0)))


def _overlapped(a: Values, b: Values, overlap: float) -> Values:
    """The p-norm of two times, p = 1 + overlap: their sum at 0, the longer one as the overlap grows."""
    p = 1 + overlap
    return np.asarray(np.exp(np.logaddexp(p * np.log(a), p * np.log(b)) / p))


def loader_cores(theta: TimeParameters, cores: Values, cpu_ghz: Values) -> Values:
    """Cores that load in parallel, `[n]`: a smooth minimum of the free cores and the loader's workers.

    The rest of the system takes a larger share of the cores when their clock is lower.
    """
    free = _smooth_positive(cores - theta.main_cores - theta.background_ghz / cpu_ghz, _SHARED_CORES)
    return np.asarray(free / (1 + (free / theta.workers) ** _WORKERS_NORM) ** (1 / _WORKERS_NORM))


def step_parts(theta: TimeParameters, settings: Settings) -> StepParts:
    """The time of each resource at `[n, 5]` settings, and of the whole step."""
    cores, cpu, gpu, mem = _knobs(settings)
    core_ms = (theta.loading_mcycles / cpu + theta.loading_stall_mcycles / mem) * _growth(settings, theta.loading_fixed)
    loading = core_ms / loader_cores(theta, cores, cpu)
    launch = theta.launch_mcycles / cpu * _growth(settings, theta.launch_fixed)
    traffic = theta.traffic_mcycles / mem * _growth(settings, theta.traffic_fixed)
    per_gpu_cycle = _growth(settings, theta.compute_fixed) / gpu
    compute, serial = theta.compute_mcycles * per_gpu_cycle, theta.serial_compute_mcycles * per_gpu_cycle
    gpu_ms = _overlapped(compute, traffic, theta.gpu_overlap)
    device = _overlapped(launch, gpu_ms, theta.launch_overlap) + serial
    step = _overlapped(loading, device, theta.loading_overlap) + theta.fixed_ms * _growth(
        settings, theta.fixed_ms_fixed
    )
    return StepParts(loading, launch, compute + serial, traffic, step)


def step_shares(theta: TimeParameters, settings: Settings) -> StepShares:
    """The share of each resource in the step at `[n, 5]` settings.

    The step is a homogeneous function of its parts, so its elasticities with respect to them sum to 1 (Euler).
    """
    parts = step_parts(theta, settings)
    serial = theta.serial_compute_mcycles / _knobs(settings)[2] * _growth(settings, theta.compute_fixed)
    compute = parts.compute_ms - serial
    gpu = _overlapped(compute, parts.traffic_ms, theta.gpu_overlap)
    overlapping = _overlapped(parts.launch_ms, gpu, theta.launch_overlap)
    device = overlapping + serial
    overlapped = _overlapped(parts.loading_ms, device, theta.loading_overlap)

    def elasticity(part: Values, whole: Values, overlap: float) -> Values:
        return np.asarray((part / whole) ** (1 + overlap))

    in_step = overlapped / parts.step_ms
    of_device = in_step * elasticity(device, overlapped, theta.loading_overlap)
    of_gpu = of_device * overlapping / device * elasticity(gpu, overlapping, theta.launch_overlap)
    return StepShares(
        loading=in_step * elasticity(parts.loading_ms, overlapped, theta.loading_overlap),
        launch=of_device * overlapping / device * elasticity(parts.launch_ms, overlapping, theta.launch_overlap),
        compute=of_gpu * elasticity(compute, gpu, theta.gpu_overlap) + of_device * serial / device,
        memory=of_gpu * elasticity(parts.traffic_ms, gpu, theta.gpu_overlap),
        fixed=1 - in_step,
    )


def log_time_gradient(theta: TimeParameters, settings: Settings) -> Values:
    """Derivatives of the logarithm of the step time with respect to the log parameters at `[n, 5]` settings, `[n, k]`.

    The derivatives are exact and take a small part of the time of finite differences.
    """
    _, cpu, _, mem = _knobs(settings)
    parts, shares = step_parts(theta, settings), step_shares(theta, settings)
    serial_ms = theta.serial_compute_mcycles / (theta.compute_mcycles + theta.serial_compute_mcycles) * parts.compute_ms
    compute_ms = parts.compute_ms - serial_ms
    gpu_ms = _overlapped(compute_ms, parts.traffic_ms, theta.gpu_overlap)
    overlapping_ms = _overlapped(parts.launch_ms, gpu_ms, theta.launch_overlap)
    device_ms = overlapping_ms + serial_ms
    in_step = 1 - shares.fixed
    of_device = in_step * _elasticity(device_ms, parts.loading_ms, theta.loading_overlap)
    of_overlapping = of_device * overlapping_ms / device_ms
    of_gpu = of_overlapping * _elasticity(gpu_ms, parts.launch_ms, theta.launch_overlap)
    of_serial = of_device * serial_ms / device_ms
    core_share = theta.loading_mcycles / cpu / (theta.loading_mcycles / cpu + theta.loading_stall_mcycles / mem)
    columns = {
        "loading_mcycles": shares.loading * core_share,
        "loading_stall_mcycles": shares.loading * (1 - core_share),
        "launch_mcycles": shares.launch,
        "compute_mcycles": shares.compute - of_serial,
        "serial_compute_mcycles": of_serial,
        "traffic_mcycles": shares.memory,
        "fixed_ms": shares.fixed,
        "gpu_overlap": of_gpu * _overlap_gradient(compute_ms, parts.traffic_ms, theta.gpu_overlap),
        "launch_overlap": of_overlapping * _overlap_gradient(parts.launch_ms, gpu_ms, theta.launch_overlap),
        "loading_overlap": in_step * _overlap_gradient(parts.loading_ms, device_ms, theta.loading_overlap),
        "loading_fixed": shares.loading * _growth_gradient(settings, theta.loading_fixed),
        "launch_fixed": shares.launch * _growth_gradient(settings, theta.launch_fixed),
        "compute_fixed": shares.compute * _growth_gradient(settings, theta.compute_fixed),
        "traffic_fixed": shares.memory * _growth_gradient(settings, theta.traffic_fixed),
        "fixed_ms_fixed": shares.fixed * _growth_gradient(settings, theta.fixed_ms_fixed),
    }
    columns |= {name: -shares.loading * each for name, each in _loader_cores_gradient(theta, settings).items()}
    return np.stack([columns[field.name] for field in fields(TimeParameters)], axis=1)


def _logistic(x: Values) -> Values:
    """`1 / (1 + exp(-x))`, without SciPy, which idle agents do not import."""
    return np.asarray(np.exp(-np.logaddexp(0.0, -x)))


def _elasticity(a: Values, b: Values, overlap: float) -> Values:
    """By how many percent `_overlapped(a, b, overlap)` grows with 1 % of `a`."""
    return np.asarray(_logistic((1 + overlap) * np.log(a / b)))


def _overlap_gradient(a: Values, b: Values, overlap: float) -> Values:
    """The derivative of the logarithm of `_overlapped` with respect to the logarithm of the overlap."""
    p, share = 1 + overlap, _elasticity(a, b, overlap)
    mean_log = share * np.log(a) + (1 - share) * np.log(b)
    return np.asarray(overlap / p * (mean_log - np.log(_overlapped(a, b, overlap))))


def _growth_gradient(settings: Settings, fixed: float) -> Values:
    """The derivative of the logarithm of `_growth` with respect to the logarithm of the fixed part."""
    return np.asarray(fixed / (settings[:, 4] / BASE_BATCH + fixed) - fixed / (1 + fixed))


def _loader_cores_gradient(theta: TimeParameters, settings: Settings) -> dict[str, Values]:
    """Derivatives of the logarithm of `loader_cores` with respect to the logarithms of what limits them."""
    cores, cpu, _, _ = _knobs(settings)
    surplus = cores - theta.main_cores - theta.background_ghz / cpu
    free = _smooth_positive(surplus, _SHARED_CORES)
    limited = _logistic(_WORKERS_NORM * np.log(free / theta.workers))
    # The derivative of log free with respect to the surplus is 1 / hypot(surplus, width).
    of_surplus = (1 - limited) / np.hypot(surplus, _SHARED_CORES)
    return {
        "workers": limited,
        "main_cores": -of_surplus * theta.main_cores,
        "background_ghz": -of_surplus * theta.background_ghz / cpu,
    }


def step_time_ms(theta: TimeParameters, settings: Settings) -> Values:
    """Time of one step (a batch) at `[n, 5]` settings, `[n]` ms."""
    return step_parts(theta, settings).step_ms


@dataclass(frozen=True)
class Utilization:
    """The utilization of a board that works with `n` settings, from which its power follows.

    Attributes:
        settings: `[n, 5]` power modes and batch sizes.
        busy_cores: `[n]` mean number of cores that load or launch during a step.
        gpu_use: `[n]` share of the step in which the GPU computes.
        mem_use: `[n]` share of the step in which the GPU moves data.
    """

    settings: Settings
    busy_cores: Values
    gpu_use: Values
    mem_use: Values


def activity(theta: TimeParameters, settings: Settings) -> Utilization:
    """The utilization at `[n, 5]` settings by the time model."""
    cores, cpu, _, _ = _knobs(settings)
    parts = step_parts(theta, settings)
    loading_cores = parts.loading_ms / parts.step_ms * loader_cores(theta, cores, cpu)
    busy_cores = np.minimum(loading_cores + parts.launch_ms / parts.step_ms, cores)
    return Utilization(settings, busy_cores, parts.compute_ms / parts.step_ms, parts.traffic_ms / parts.step_ms)


def active_power_mw(power: PowerParameters, busy: Utilization) -> Values:
    """Board power at the `n` settings of an activity, `[n]` mW."""
    cores, cpu, gpu, mem = _knobs(busy.settings)
    cpu_voltage = 1 + power.core_voltage * _smooth_positive(cpu - power.core_knee_ghz, _KNEE_WIDTH_GHZ) ** 2
    gpu_voltage = 1 + power.gpu_voltage * _smooth_positive(gpu - power.gpu_knee_ghz, _KNEE_WIDTH_GHZ) ** 2
    cpu_mw = (power.core_clock_mw * cores + power.core_busy_mw * busy.busy_cores) * cpu * cpu_voltage
    gpu_busy = power.gpu_busy_mw * busy.gpu_use + power.gpu_stall_mw * busy.mem_use
    gpu_mw = (power.gpu_clock_mw + gpu_busy) * gpu * gpu_voltage
    mem_mw = (power.mem_clock_mw + power.mem_traffic_mw * busy.mem_use + power.mem_compute_mw * busy.gpu_use) * mem
    return np.asarray(power.floor_mw + cpu_mw + gpu_mw + mem_mw)


def power_mw(power: PowerParameters, theta: TimeParameters, settings: Settings) -> Values:
    """Board power while working with `[n, 5]` settings, `[n]` mW.

    The time model gives the share of a step in which each resource is busy.
    """
    return active_power_mw(power, activity(theta, settings))
