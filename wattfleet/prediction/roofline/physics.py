"""How a training step's time and a board's power follow from its clocks: a roofline of overlapping resources.

A step loads its minibatch (on the cores that other processes leave free), launches kernels (on one core),
computes and moves data (on the GPU and the memory). Each takes cycles of one clock; they overlap imperfectly.
Power is a floor plus, per clock domain, what its clock draws idle and what it adds while busy, at a voltage
that rises with the frequency. The form was chosen on the measurements behind PowerTrain
(doi:10.1016/j.future.2024.07.001, section 3).

All parameters are positive and are fitted by their logarithms; 1 ms at 1 GHz is 1 Mcycle.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wattfleet.modes import ModeArray

if TYPE_CHECKING:
    from typing_extensions import Self

Values = NDArray[np.float64]


@dataclass(frozen=True)
class _Parameters:
    """Positive parameters; `log` and `from_log` are the coordinates in which they are fitted."""

    def log(self) -> Values:
        """The logarithms of the parameters, `[k]`, in the order of the fields."""
        return np.log(np.array(astuple(self), dtype=np.float64))

    @classmethod
    def from_log(cls, log: Values) -> Self:
        """The parameters whose logarithms these are, `[k]`."""
        return cls(*np.exp(log).tolist())


@dataclass(frozen=True)
class TimeParameters(_Parameters):
    """What one workload's step asks of one board.

    Attributes:
        loading_mcycles: CPU work to load a minibatch, Mcycles of one core.
        loading_stall_mcycles: what a loading core waits for the memory, Mcycles of the memory clock.
        launch_mcycles: CPU work to launch a step's kernels, Mcycles of one core.
        compute_mcycles: GPU work that overlaps with memory traffic, Mcycles of the GPU clock.
        serial_compute_mcycles: GPU work that nothing overlaps with, Mcycles of the GPU clock.
        traffic_mcycles: memory work of a step on the GPU, Mcycles of the memory clock.
        fixed_ms: time that no clock changes, ms.
        workers: cores beyond which loading gains nothing (the loader's processes), cores.
        main_cores: cores that the training process keeps for itself, cores.
        background_ghz: what the rest of the system takes of all cores together, 1e9 cycles a second.
        gpu_overlap: how well compute and memory traffic overlap; 0 adds them, large takes the longer one.
        launch_overlap: the same for launching and the GPU's work.
        loading_overlap: the same for loading and the device's step.
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


@dataclass(frozen=True)
class PowerParameters(_Parameters):
    """What one board draws while it trains one workload.

    Attributes:
        floor_mw: power that no clock changes, mW.
        core_clock_mw: an online core's clock at 1 GHz and low voltage, mW.
        core_busy_mw: what a busy core adds, mW at 1 GHz.
        gpu_clock_mw: the GPU's clock at 1 GHz and low voltage, mW.
        gpu_busy_mw: what a computing GPU adds, mW at 1 GHz.
        gpu_stall_mw: what a GPU that moves data adds, mW at 1 GHz.
        mem_clock_mw: the memory's clock at 1 GHz, mW.
        mem_traffic_mw: what a step's memory traffic adds, mW at 1 GHz.
        mem_compute_mw: what a computing GPU's other accesses add, mW of the memory at 1 GHz.
        core_voltage: rise of the cores' power above their knee, 1/GHz^2.
        core_knee_ghz: CPU frequency from which the voltage rises, GHz.
        gpu_voltage: rise of the GPU's power above its knee, 1/GHz^2.
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
    """What each resource would take alone at `n` modes, and the step they make together; all `[n]` ms."""

    loading_ms: Values
    launch_ms: Values
    compute_ms: Values
    traffic_ms: Values
    step_ms: Values


@dataclass(frozen=True)
class StepShares:
    """What each resource is worth at `n` modes, `[n]` shares of the step that sum to 1.

    Taking 1 % off a resource's time takes its share of 1 % off the step: what overlaps with something longer is
    worth little, however long it takes itself.
    """

    loading: Values
    launch: Values
    compute: Values
    memory: Values
    fixed: Values


# How gradually the loader runs out of free cores. With one core, loader and training process take turns: at
# this width the loader gets half of it. The corpora (2, 4, 6 cores) prefer about the same.
_SHARED_CORES = 1.0
# How gradually a voltage curve leaves its flat part, GHz.
_KNEE_WIDTH_GHZ = 0.1
# Sharpness with which the loader's workers limit it; the corpora do not tell 3 from 8.
_WORKERS_NORM = 4


def _knobs(modes: ModeArray) -> tuple[Values, Values, Values, Values]:
    """Cores, and CPU, GPU and memory clocks in GHz."""
    return modes[:, 0], modes[:, 1] / 1e6, modes[:, 2] / 1e9, modes[:, 3] / 1e9


def _smooth_positive(x: Values, width: float) -> Values:
    """`max(x, 0)`, rounded over `width` and never zero."""
    root = np.hypot(x, width)
    # For a negative x the plain sum cancels to zero.
    return np.where(x > 0, 0.5 * (x + root), 0.5 * width**2 / (root - np.minimum(x, 0)))


def _overlapped(a: Values, b: Values, overlap: float) -> Values:
    """The p-norm of two times, p = 1 + overlap: their sum at 0, the longer one as the overlap grows."""
    p = 1 + overlap
    return np.asarray(np.exp(np.logaddexp(p * np.log(a), p * np.log(b)) / p))


def loader_cores(theta: TimeParameters, cores: Values, cpu_ghz: Values) -> Values:
    """Cores that load in parallel, `[n]`: a smooth minimum of those left free and the loader's workers.

    The rest of the system takes a share of the cores that grows as their clock falls.
    """
    free = _smooth_positive(cores - theta.main_cores - theta.background_ghz / cpu_ghz, _SHARED_CORES)
    return np.asarray(free / (1 + (free / theta.workers) ** _WORKERS_NORM) ** (1 / _WORKERS_NORM))


def step_parts(theta: TimeParameters, modes: ModeArray) -> StepParts:
    """What each resource takes at `[n, 4]` modes, and the step they make together."""
    cores, cpu, gpu, mem = _knobs(modes)
    core_ms = theta.loading_mcycles / cpu + theta.loading_stall_mcycles / mem
    loading = core_ms / loader_cores(theta, cores, cpu)
    launch, traffic = theta.launch_mcycles / cpu, theta.traffic_mcycles / mem
    compute, serial = theta.compute_mcycles / gpu, theta.serial_compute_mcycles / gpu
    gpu_ms = _overlapped(compute, traffic, theta.gpu_overlap)
    device = _overlapped(launch, gpu_ms, theta.launch_overlap) + serial
    step = _overlapped(loading, device, theta.loading_overlap) + theta.fixed_ms
    return StepParts(loading, launch, compute + serial, traffic, step)


def step_shares(theta: TimeParameters, modes: ModeArray) -> StepShares:
    """What each resource is worth at `[n, 4]` modes.

    The p-norms of the step are homogeneous, so that the elasticities of the step by its parts sum to 1 (Euler).
    """
    parts = step_parts(theta, modes)
    serial = theta.serial_compute_mcycles / _knobs(modes)[2]
    compute = parts.compute_ms - serial
    gpu = _overlapped(compute, parts.traffic_ms, theta.gpu_overlap)
    overlapping = _overlapped(parts.launch_ms, gpu, theta.launch_overlap)
    device = overlapping + serial
    overlapped = _overlapped(parts.loading_ms, device, theta.loading_overlap)

    def worth(part: Values, whole: Values, overlap: float) -> Values:
        return np.asarray((part / whole) ** (1 + overlap))

    in_step = overlapped / parts.step_ms
    of_device = in_step * worth(device, overlapped, theta.loading_overlap)
    of_gpu = of_device * overlapping / device * worth(gpu, overlapping, theta.launch_overlap)
    return StepShares(
        loading=in_step * worth(parts.loading_ms, overlapped, theta.loading_overlap),
        launch=of_device * overlapping / device * worth(parts.launch_ms, overlapping, theta.launch_overlap),
        compute=of_gpu * worth(compute, gpu, theta.gpu_overlap) + of_device * serial / device,
        memory=of_gpu * worth(parts.traffic_ms, gpu, theta.gpu_overlap),
        fixed=1 - in_step,
    )


def step_time_ms(theta: TimeParameters, modes: ModeArray) -> Values:
    """Milliseconds of one training step (a minibatch) at `[n, 4]` modes, `[n]`."""
    return step_parts(theta, modes).step_ms


@dataclass(frozen=True)
class Activity:
    """How busy a board is while it trains at `n` modes: what power follows from.

    Attributes:
        modes: `[n, 4]` power modes.
        busy_cores: `[n]` cores that load or launch, on average over a step.
        gpu_use: `[n]` share of a step in which the GPU computes.
        mem_use: `[n]` share of a step in which it moves data.
    """

    modes: ModeArray
    busy_cores: Values
    gpu_use: Values
    mem_use: Values


def activity(theta: TimeParameters, modes: ModeArray) -> Activity:
    """How busy the time model says a board is at `[n, 4]` modes."""
    cores, cpu, _, _ = _knobs(modes)
    parts = step_parts(theta, modes)
    loading_cores = parts.loading_ms / parts.step_ms * loader_cores(theta, cores, cpu)
    busy_cores = np.minimum(loading_cores + parts.launch_ms / parts.step_ms, cores)
    return Activity(modes, busy_cores, parts.compute_ms / parts.step_ms, parts.traffic_ms / parts.step_ms)


def active_power_mw(power: PowerParameters, busy: Activity) -> Values:
    """Board milliwatts at the `n` modes of an activity, `[n]`."""
    cores, cpu, gpu, mem = _knobs(busy.modes)
    cpu_voltage = 1 + power.core_voltage * _smooth_positive(cpu - power.core_knee_ghz, _KNEE_WIDTH_GHZ) ** 2
    gpu_voltage = 1 + power.gpu_voltage * _smooth_positive(gpu - power.gpu_knee_ghz, _KNEE_WIDTH_GHZ) ** 2
    cpu_mw = (power.core_clock_mw * cores + power.core_busy_mw * busy.busy_cores) * cpu * cpu_voltage
    gpu_busy = power.gpu_busy_mw * busy.gpu_use + power.gpu_stall_mw * busy.mem_use
    gpu_mw = (power.gpu_clock_mw + gpu_busy) * gpu * gpu_voltage
    mem_mw = (power.mem_clock_mw + power.mem_traffic_mw * busy.mem_use + power.mem_compute_mw * busy.gpu_use) * mem
    return np.asarray(power.floor_mw + cpu_mw + gpu_mw + mem_mw)


def power_mw(power: PowerParameters, theta: TimeParameters, modes: ModeArray) -> Values:
    """Board milliwatts while training at `[n, 4]` modes, `[n]`.

    The time model says what share of a step each resource is busy.
    """
    return active_power_mw(power, activity(theta, modes))
