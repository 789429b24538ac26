"""A simulated board: physics fitted to real boards, plus deviations of its own."""

from __future__ import annotations

import json
import logging
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import AppTraining, PowerMeter
from edge_agent.devices.host import PhysicalTraining
from edge_agent.devices.meters import PolledMeter
from edge_agent.devices.virtual.physics import (
    DeviationField,
    board_parameters,
    inference_deviation,
    inference_physics_of,
    physics_of,
)
from edge_agent.devices.virtual.virtual_board import Load, PowerTimeline, VirtualBoard, WorkSpan, step_times_s
from wattfleet.common.clock import Clock, SystemClock, unix_now_s
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    ModeArray,
    PowerMode,
    Task,
    Workload,
    WorkloadFacts,
    array_to_modes,
    board_named,
    modes_to_array,
    read_profile,
    require_one_training,
)
from wattfleet.core.prediction.roofline import (
    PowerParameters,
    TimeParameters,
    power_mw,
    settings_of,
    step_parts,
    step_time_ms,
)

_log = logging.getLogger(__name__)


# --- Span file --------------------------------------------------------------------------------------------------------
# Records what a virtual board did, span by span, in a file for reports.


MAX_BYTES = 256_000_000
"""Maximum size of a file; it holds about ten million requests."""


class ModePeriod(Protocol):
    """A dataclass that describes a period in one power mode."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def mode(self) -> PowerMode:
        """The power mode."""
        ...


_S = TypeVar("_S", bound=ModePeriod)


class SpanFile(Generic[_S]):
    """Appends spans to a file, which is emptied when the agent starts.

    Args:
        path: the file.
        kind: the class of the spans.
    """

    def __init__(self, path: Path, kind: type[_S]) -> None:
        self._path = path
        self._kind = kind
        self._bytes = 0

    def append(self, span: _S) -> None:
        """Write a span. If that fails, log it and write no more spans."""
        if self._bytes >= MAX_BYTES:
            return
        line = json.dumps(asdict(span), separators=(",", ":")) + "\n"
        try:
            with self._path.open("a" if self._bytes else "w", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            _log.error("%s: cannot be written: %s; nothing more is recorded", self._path, error.strerror)
            self._bytes = MAX_BYTES
        self._bytes += len(line)

    def read(self) -> Iterator[_S]:
        """Return all spans in the file; none if there is no file."""
        if self._path.exists():
            with self._path.open(encoding="utf-8") as file:
                for line in file:
                    content = json.loads(line)
                    yield self._kind(**{**content, "mode": PowerMode(*content["mode"])})


@dataclass(frozen=True)
class DatedWork(WorkSpan):
    """A period of work, with its date and the watts that the device was granted for it.

    Attributes:
        ended_unix_s: when it was known to have ended, in this machine's time, seconds since 1970.
        granted_w: watts that the device might draw then; 0 without a grant.
    """

    ended_unix_s: float
    granted_w: float


def record_work(
    board: VirtualBoard, path: Path, granted_w: Callable[[], float], unix_now_s: Callable[[], float] = unix_now_s
) -> None:
    """Record every period of a board's work in a file, from now on.

    Args:
        board: the board.
        path: the file.
        granted_w: returns the watts that the device may draw now; 0 without a grant.
        unix_now_s: returns the seconds since 1970.
    """
    file = SpanFile(path, DatedWork)
    board.on_work = lambda work: file.append(
        DatedWork(work.begin_s, work.end_s, work.mode, work.energy_j, unix_now_s(), granted_w())
    )


# --- Simulated --------------------------------------------------------------------------------------------------------

_P = TypeVar("_P", TimeParameters, PowerParameters)

# Two boards of a kind differ by a few per cent in every parameter.
_UNIT_LOG_SD = 0.03
# A minibatch's jitter grows with the share of the step in which the loader is busy: 0.3 % if it idles, 14 %
# if the step waits for it (the Orin Nano's logs: 0.2 to 0.8 % and 13 to 37 %).
_JITTER_FLOOR, _JITTER_LOADING = 0.003, 0.14

_LOADS = 1000
"""Maximum of a board's cached loads, each for one mode and workload."""


class SimulatedDevice(VirtualBoard):
    """A board of a known kind. By default, it trains ResNet-18 with minibatches of 16.

    Its true values are the physics of its kind with this unit's parameters, times a smooth deviation. The seed fixes
    both. For another workload, its facts and name determine the work of a step; a step's parameters and the smooth
    deviation remain those of the board. Inference batches have the times measured on an AGX Orin
    (`inference_physics_of`), with their own deviation.

    Args:
        board_kind: one of `wattfleet.core.modes.power_mode.BOARDS`.
        seed: random seed of the unit and its noise.

    Raises:
        InvalidInputError: there is no such kind.
    """

    def __init__(self, board_kind: str, seed: int) -> None:
        space = board_named(board_kind).space
        modes, offered = _modes_of(board_kind)
        self._seed_of_kind = (seed, zlib.crc32(board_kind.encode()))
        self._time, self._power, self._time_deviation, self._power_deviation, noise_seed = _unit_of(board_kind, seed)
        self._inference_deviations: dict[str, tuple[DeviationField, DeviationField]] = {}
        # Shared with copies of this board: thousands of devices of a simulation have the parameters of a few.
        self._known_load = lru_cache(_LOADS)(self._new_load)
        # Idle power: the clocks keep running, but nothing is busy.
        self._idle_power = replace(
            self._power, core_busy_mw=0, gpu_busy_mw=0, gpu_stall_mw=0, mem_traffic_mw=0, mem_compute_mw=0
        )
        super().__init__(board_kind, "simulated", modes, space.highest, noise_seed, offered)

    def truth(
        self, modes: ModeArray, workload: Workload | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noiseless true values in `[n, 4]` modes, offered or not: `[n]` ms per minibatch and `[n]` mW.

        Args:
            modes: the modes.
            workload: the trained or served workload; None for the training of ResNet-18 with minibatches of 16. For
                inference, the values are for the batch size in its facts, or for 16.
        """
        time, power = self._physics(workload)
        settings = _settings(modes, workload)
        of_time, of_power = self._log_deviation(settings, workload)
        return step_time_ms(time, settings) * np.exp(of_time), power_mw(power, time, settings) * np.exp(of_power)

    def _physics(self, workload: Workload | None) -> tuple[TimeParameters, PowerParameters]:
        if workload is None:
            return self._time, self._power
        physics = inference_physics_of if _is_inference(workload) else physics_of
        return physics(self._time, self._power, workload)

    def _log_deviation(
        self, settings: NDArray[np.float64], workload: Workload | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the log deviations of time and power from the physics at `[n, 5]` settings, `[n]` each."""
        if workload is None or not _is_inference(workload):
            modes = settings[:, :-1]
            return self._time_deviation.at(modes), self._power_deviation.at(modes)
        if workload.name not in self._inference_deviations:
            seed = (*self._seed_of_kind, zlib.crc32(workload.name.encode()))
            self._inference_deviations[workload.name] = inference_deviation(self.modes, workload, seed)
        of_time, of_power = self._inference_deviations[workload.name]
        return of_time.at(settings), of_power.at(settings)

    def load(self, mode: PowerMode, workload: Workload | None = None) -> Load:
        """Return time and power of a workload in a mode, without measurement noise.

        Args:
            mode: the mode.
            workload: the trained or served workload; see `truth`.
        """
        return self._known_load(mode, workload)

    def _new_load(self, mode: PowerMode, workload: Workload | None) -> Load:
        at = modes_to_array([mode])
        minibatch_ms, training_mw = self.truth(at, workload)
        idle_mw = float(power_mw(self._idle_power, self._time, settings_of(at, None))[0])
        jitter = float(self._jitter(at, workload)[0])
        # The deviation may put the training power below idle power.
        return Load(float(minibatch_ms[0]), float(training_mw[0]), min(idle_mw, float(training_mw[0])), jitter)

    def _load_at(self, mode: PowerMode) -> Load:
        return self.load(mode, self._workload)

    def _jitter(self, modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
        parts = step_parts(self._physics(workload)[0], _settings(modes, workload))
        loading = np.minimum(1.0, parts.loading_ms / parts.step_ms)
        return np.asarray(_JITTER_FLOOR + _JITTER_LOADING * loading**3)


@cache
def _modes_of(board_kind: str) -> tuple[ModeArray, frozenset[PowerMode]]:
    """Return the modes of a kind of board, which its thousands of boards in a simulation share."""
    modes = board_named(board_kind).space.array()
    modes.setflags(write=False)
    return modes, frozenset(array_to_modes(modes))


@lru_cache(256)
def _unit_of(board_kind: str, seed: int) -> tuple[TimeParameters, PowerParameters, DeviationField, DeviationField, int]:
    """Return the parameters of one unit, its deviations of time and power, and the seed of its noise.

    Drawing the deviations takes most of the time in which a board is opened, and runs open the same boards repeatedly.
    """
    kind, (modes, _) = board_parameters(board_kind), _modes_of(board_kind)
    # Boards of different kinds with the same seed must deviate differently.
    rng = np.random.default_rng([seed, zlib.crc32(board_kind.encode())])
    time, power = _varied(kind.time, rng), _varied(kind.power, rng)
    of_time = DeviationField(modes, kind.deviation.levels, kind.deviation.time, rng)
    of_power = DeviationField(modes, kind.deviation.levels, kind.deviation.power, rng)
    return time, power, of_time, of_power, int(rng.integers(2**32))


def _is_inference(workload: Workload) -> bool:
    return workload.facts.task is Task.INFERENCE


def _settings(modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
    batch = None if workload is None else workload.facts.batch
    return settings_of(modes, None if batch is None else np.full(len(modes), batch))


def _varied(kind: _P, rng: np.random.Generator) -> _P:
    """Return the parameters of one unit of a kind.

    Growth with the batch is not varied, as all batches have the same size.
    """
    varied = [each.name for each in fields(kind) if not each.name.endswith("_fixed")]
    factors = np.exp(rng.normal(0, _UNIT_LOG_SD, len(varied))).tolist()
    return replace(kind, **{name: getattr(kind, name) * by for name, by in zip(varied, factors, strict=True)})


# --- Live simulated ---------------------------------------------------------------------------------------------------
# A simulated board on the machine's own clock: apps that request turns are slowed down to its physics.


class LiveSimulatedDevice(SimulatedDevice):
    """A simulated board in real time, so that it can answer requests.

    Work in a turn takes at least the time given by the physics in the mode in force, and draws that power. Work outside
    of turns takes this machine's time, at idle power. A training program continues while the mode changes, so there are
    no longer first minibatches.

    Args:
        board_kind: one of `wattfleet.core.modes.power_mode.BOARDS`.
        seed: random seed of the unit and its noise.

    Raises:
        InvalidInputError: no such kind.
    """

    def __init__(self, board_kind: str, seed: int) -> None:
        self._drawing = threading.Lock()
        super().__init__(board_kind, seed)

    def begin_training(self, workload: Workload | None = None) -> AppTraining:
        """Begin an app's training in the mode in force; its minibatches get this workload's times."""
        self.pace(workload)
        return _LiveTraining(self)

    def start_meter(self) -> PowerMeter:
        """Start sampling board power."""
        return PolledMeter(self._power_mw, self.clock)

    def begin_minibatch(self) -> float:
        """Begin a minibatch on the device, and return its time, ms."""
        self._draw(self._load.power_mw)
        return self._step_ms(self._load)

    def begin_inference(self, workload: str, waiting: int, largest_batch: int) -> list[float]:
        """Begin a batch of requests on the device.

        Args:
            workload: name of the served workload.
            waiting: the probable number of requests in the batch.
            largest_batch: the largest possible number.

        Returns:
            The times of batches of 1, 2, 4, ... requests, ms, up to the first size that is not below the largest.
        """
        sizes = (max(1, largest_batch) - 1).bit_length() + 1
        facts = [WorkloadFacts(batch=2**size, task=Task.INFERENCE) for size in range(sizes)]
        loads = [self.load(self._mode, Workload(workload, each)) for each in facts]
        drawn = loads[min((max(1, waiting) - 1).bit_length(), sizes - 1)]
        self._draw(drawn.power_mw)
        return [self._step_ms(load) for load in loads]

    def rest(self) -> None:
        """Note that nothing uses the device any longer."""
        self._draw(self._load.idle_mw)

    def _step_ms(self, load: Load) -> float:
        return 1e3 * float(step_times_s(load, self._jitter_rng.standard_normal(1))[0])

    def _new_clock(self) -> Clock:
        return SystemClock()

    def _begin_run(self) -> None:
        super()._begin_run()
        self.stay_warm()

    def _draw(self, power_mw: float) -> None:
        # A polled meter needs only the present power; a timeline of all turns would grow endlessly.
        with self._drawing:
            self._count_energy(power_mw)
            now_s = self.clock.now_s()
            timeline = PowerTimeline(now_s, float(self._timeline.at(np.array([now_s]))[0]))
            timeline.aim(now_s, power_mw)
            self._timeline = timeline

    def _power_mw(self) -> float:
        return float(self._timeline.at(np.array([self.clock.now_s()]))[0])


class _LiveTraining(PhysicalTraining):
    """An app's training, whose minibatches are slowed down in its turns (an `AppTraining`)."""

    def __init__(self, board: LiveSimulatedDevice) -> None:
        super().__init__(board.clock)
        self._board = board

    def learned(self, workload: Workload | None) -> None:
        """Use the times of the workload as it is known now."""
        self._board.pace(workload)


# --- Replay -----------------------------------------------------------------------------------------------------------
# A board that replays a measured profile.

# A profile does not contain idle power; in the Orin Nano's logs, it is 0.75 to 0.85 of the lowest training power.
_IDLE_SHARE = 0.8
# Nor does it contain the jitter of minibatches: this is the median over the Orin Nano's 26 logged modes.
_JITTER = 0.05


class ReplayDevice(VirtualBoard):
    """A board whose modes and true values are the rows of a measured profile.

    Every workload gets the times of its file, since nothing else is known of its board.

    Args:
        csv_path: a CSV file with the columns of `wattfleet.core.modes.PROFILE_COLUMNS`.
        seed: random seed of the noise around the recorded values.

    Raises:
        InvalidInputError: the file is not a valid profile, or not a profile of training with one batch size.
    """

    def __init__(self, csv_path: Path, seed: int) -> None:
        profile = read_profile(csv_path)
        require_one_training(str(csv_path), profile)
        self._recorded = {
            mode: (float(minibatch_ms), float(power_mw))
            for mode, minibatch_ms, power_mw in zip(
                array_to_modes(profile.modes), profile.minibatch_ms, profile.power_mw, strict=True
            )
        }
        self._idle_mw = _IDLE_SHARE * float(profile.power_mw.min())
        fastest = array_to_modes(profile.modes)[int(profile.minibatch_ms.argmin())]
        super().__init__(f"replay:{csv_path.stem}", "replayed", profile.modes, fastest, seed)

    def truth(
        self, modes: ModeArray, workload: Workload | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the recorded values in `[n, 4]` recorded modes: `[n]` ms per minibatch and `[n]` mW.

        Raises:
            InvalidInputError: a mode was not recorded.
        """
        wanted = array_to_modes(modes)
        unknown = [mode for mode in wanted if mode not in self._recorded]
        if unknown:
            raise InvalidInputError(f"{self.board_kind} has no measurement of {unknown[0].label()}")
        rows = np.array([self._recorded[mode] for mode in wanted]).reshape(-1, 2)
        return rows[:, 0], rows[:, 1]

    def _jitter(self, modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
        return np.full(len(modes), _JITTER)

    def _load_at(self, mode: PowerMode) -> Load:
        minibatch_ms, power_mw = self._recorded[mode]
        return Load(minibatch_ms, power_mw, self._idle_mw, _JITTER)
