"""Base of the virtual boards: a virtual clock, the transients of a training run, and measurement noise.

All constants come from real files: the 26 raw logs of an Orin Nano (ResNet-18) and, for the repeatability of
measurements, neighbouring rows of the AGX Orin's corpora; see `docs/simulated-board.md`.
"""

from __future__ import annotations

import copy
import json
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Activity, AppTraining, Knobs, PowerMeter, PowerTrace
from wattfleet.common.clock import Clock, VirtualClock
from wattfleet.common.parsing import parse_json
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import ModeArray, PowerMode, Provenance, Workload, array_to_modes
from wattfleet_proto.device_state import BoardSample

if TYPE_CHECKING:
    from typing_extensions import Self


# --- Virtual app training ---------------------------------------------------------------------------------------------
# An app's training on a virtual board.


class SteppedBoard(Protocol):
    """A board whose clock advances only while it trains."""

    @property
    def clock(self) -> Clock:
        """The board's virtual time."""
        ...

    def pace(self, workload: Workload | None) -> None:
        """Switch to another workload."""
        ...

    def stay_warm(self) -> None:
        """Train the next minibatch without a warm-up, although the mode has changed."""
        ...

    def step(self) -> None:
        """Train one minibatch in the current mode."""
        ...

    def run(self, minibatches: int) -> None:
        """Train several minibatches at once."""
        ...


class VirtualTraining:
    """Advances a virtual board by the minibatches that an app trains elsewhere (an `AppTraining`).

    The first minibatch is trained at once, so that observations do not include it. When the mode changes during the
    training, the app's process continues, so there is no further warm-up.

    Args:
        board: the board, in the mode to train in.
        workload: the trained workload; None for the board's built-in workload.
    """

    first_minibatch_observed = False

    def __init__(self, board: SteppedBoard, workload: Workload | None = None) -> None:
        self._board = board
        self._reported = 0
        board.pace(workload)
        board.step()

    def minibatches_ended(self, seconds: Sequence[float], ended: Callable[[int, float], bool]) -> None:
        """Train the reported number of minibatches, each in its current mode; ignore the reported times."""
        for index in range(len(seconds)):
            self._board.stay_warm()
            self._board.step()
            self._reported += 1
            ended(index, self._board.clock.now_s())

    def learned(self, workload: Workload | None) -> None:
        """Use the times of the workload as it is known now."""
        self._board.pace(workload)

    def finish(self, minibatches: int) -> None:
        """Train the minibatches that were not yet reported."""
        self._board.stay_warm()
        self._board.run(max(0, minibatches - self._reported))


# --- Power timeline ---------------------------------------------------------------------------------------------------
# The power of a virtual board over time, which approaches its level as on real boards.

# The Orin Nano's logs (`orin_nano_resnet18_telemetry`): the first sample after training began, 0.7 s on
# average, is at about 60 % of the rise from idle, a sample at 2 s at about 90 %, one at 3 s at the full level.
_RESPONSE_S = 0.8


class PowerTimeline:
    """Board power over time: piecewise constant targets, each approached exponentially.

    Args:
        start_s: time from which power is known, s.
        power_mw: power at that time, mW.
    """

    def __init__(self, start_s: float, power_mw: float) -> None:
        self._start_s = [start_s]
        self._target_mw = [power_mw]
        self._initial_mw = [power_mw]

    def aim(self, from_s: float, target_mw: float) -> None:
        """Approach `target_mw` from `from_s` on, replacing all later targets."""
        initial_mw = float(self.at(np.array([from_s]))[0])
        while self._start_s and self._start_s[-1] >= from_s:
            self._start_s.pop(), self._target_mw.pop(), self._initial_mw.pop()
        if self._target_mw and self._target_mw[-1] == target_mw:
            return
        self._start_s.append(from_s)
        self._target_mw.append(target_mw)
        self._initial_mw.append(initial_mw)

    def forget_before(self, moment_s: float) -> None:
        """Forget targets that no longer affect power after a given time, to save memory during weeks of training."""
        past = max(0, bisect_right(self._start_s, moment_s) - 1)
        del self._start_s[:past], self._target_mw[:past], self._initial_mw[:past]

    def at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the power at `[n]` times from the start on, `[n]` mW."""
        start_s = np.array(self._start_s)
        piece = np.maximum(np.searchsorted(start_s, times_s, side="right") - 1, 0)
        target = np.array(self._target_mw)[piece]
        initial = np.array(self._initial_mw)[piece]
        return np.asarray(target + (initial - target) * np.exp(-(times_s - start_s[piece]) / _RESPONSE_S))


# --- Virtual meter ----------------------------------------------------------------------------------------------------
# The power meter of a virtual board, with the sampling artefacts of a real one.

# From the Orin Nano's logs: the first sample is repeated, the second comes 0.7 s later, later ones 1.3 s
# apart (1.1 to 2.5 s by mode); settled samples scatter by 1.6 %, and one in twenty falls 3 to 20 % short.
_SECOND_SAMPLE_S = 0.7
_INTERVAL_S = 1.3
_INTERVAL_LOG_SD = 0.08
_SCATTER = 0.016
_DIP_SHARE = 0.05
_DIP_DEPTH = (0.03, 0.20)
_BLOCK = 64


class VirtualMeter:
    """Samples a board's power at irregular times from its start (a `PowerMeter`).

    Samples do not depend on when, or how often, they are read.

    Args:
        timeline: the board's power over time.
        clock: the device's clock.
        rng: the random number generator for times and scatter.

    Attributes:
        start_s: its start, seconds of the clock.
    """

    def __init__(self, timeline: PowerTimeline, clock: Clock, rng: np.random.Generator) -> None:
        self._timeline = timeline
        self._clock = clock
        self._rng = rng
        self._stopped: PowerTrace | None = None
        self.start_s = clock.now_s()
        self._at_s = np.array([self.start_s, self.start_s, self.start_s + _SECOND_SAMPLE_S])
        self._factor = np.repeat(self._factors(2), [2, 1])

    def read(self) -> PowerTrace:
        """Return the samples so far."""
        if self._stopped is not None:
            return self._stopped
        until_s = self._clock.now_s()
        while self._at_s[-1] <= until_s:
            gaps_s = _INTERVAL_S * np.exp(self._rng.normal(0, _INTERVAL_LOG_SD, _BLOCK))
            self._at_s = np.concatenate([self._at_s, self._at_s[-1] + np.cumsum(gaps_s)])
            self._factor = np.concatenate([self._factor, self._factors(_BLOCK)])
        seen = slice(int(np.searchsorted(self._at_s, until_s, side="right")))
        at_s = self._at_s[seen].copy()
        return PowerTrace(at_s, self._timeline.at(at_s) * self._factor[seen])

    def stop(self) -> PowerTrace:
        """Stop sampling and return all samples."""
        self._stopped = self.read()
        return self._stopped

    @property
    def is_stopped(self) -> bool:
        """Whether it no longer needs the timeline."""
        return self._stopped is not None

    def _factors(self, n: int) -> NDArray[np.float64]:
        """Return the ratios of `n` samples to the true power."""
        dips = np.where(self._rng.random(n) < _DIP_SHARE, self._rng.uniform(*_DIP_DEPTH, n), 0.0)
        return np.asarray((1 + self._rng.normal(0, _SCATTER, n)) * (1 - dips))


# --- Virtual board ----------------------------------------------------------------------------------------------------

# The first minibatch after a start takes about this many CPU cycles (4 to 30 s in the logs).
_FIRST_MINIBATCH_GCYCLES = 7.0
_FIRST_MINIBATCH_LOG_SD = 0.25
# Its power is little above idle: by this share of the rise from idle to training power.
_FIRST_MINIBATCH_LOAD = 0.12
# Log standard deviation of repeated measurements of a mode, however long they take.
_REPEAT_TIME_LOG_SD = 0.003
_REPEAT_POWER_LOG_SD = 0.006
# Jitter is skewed towards late minibatches: the scale of each side, in jitter standard deviations.
_LATE, _EARLY = 1.6, 0.6


@dataclass(frozen=True)
class Load:
    """Time and power of training in one mode.

    Attributes:
        minibatch_ms: median time of a minibatch, ms.
        power_mw: settled board power while training, mW.
        idle_mw: board power while nothing runs, mW.
        jitter: standard deviation of the logarithm of a single minibatch's time.
    """

    minibatch_ms: float
    power_mw: float
    idle_mw: float
    jitter: float


@dataclass(frozen=True)
class WorkSpan:
    """A period in which a board worked in one mode. All times are seconds of the board's clock.

    Attributes:
        begin_s: the start.
        end_s: the end.
        mode: the power mode.
        energy_j: joules that the board drew.
    """

    begin_s: float
    end_s: float
    mode: PowerMode
    energy_j: float


def mean_stretch(jitter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ratio of the mean to the median minibatch time, for `[n]` jitters."""
    from scipy.special import ndtr  # imported here to keep scipy out of the agent's memory

    late, early = _LATE * jitter, _EARLY * jitter
    return np.asarray(np.exp(late**2 / 2) * ndtr(late) + np.exp(early**2 / 2) * ndtr(-early))


def step_times_s(load: Load, deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the times of single steps of a load, `[n]` s.

    Args:
        load: the load.
        deviations: `[n]` standard deviations of their jitter; a median step has 0.
    """
    spread = load.jitter * deviations
    return np.asarray(load.minibatch_ms / 1e3 * np.exp(np.where(spread > 0, _LATE, _EARLY) * spread))


class VirtualBoard(ABC):
    """A `Device` that exists only in software; subclasses define its speed and power.

    A training run begins with the first minibatch after a mode is applied, and that minibatch takes seconds. The mode
    stays until the next `apply`. Everything is determined by the seed and the order of calls.

    Args:
        board_kind: kind of board.
        provenance: the source of its figures.
        modes: `[n, 4]` modes that it offers.
        start: the initial mode.
        seed: random seed of all noise.
        offered: the same modes as a set, which boards of a kind can share; None to make one.
    """

    on_work: Callable[[WorkSpan], None] | None = None
    """Called with every period of work, once it has ended, which is at the latest when another mode is applied."""

    def __init__(
        self,
        board_kind: str,
        provenance: Provenance,
        modes: ModeArray,
        start: PowerMode,
        seed: int,
        offered: frozenset[PowerMode] | None = None,
    ) -> None:
        self._board_kind = board_kind
        self._provenance = provenance
        self._modes = modes
        self._offered = frozenset(array_to_modes(modes)) if offered is None else offered
        self._switch_on(start, seed)

    def _switch_on(self, start: PowerMode, seed: int) -> None:
        self._seed = seed
        self._run_rng = np.random.default_rng([seed, 1])
        self._jitter_rng = np.random.default_rng([seed, 2])
        self._meters = 0
        self._running_meters: WeakSet[VirtualMeter] = WeakSet()
        self._clock = self._new_clock()
        self._mode = start
        self._workload: Workload | None = None
        self._cold = True
        self._begin_run()
        self._timeline = PowerTimeline(self._clock.now_s(), self._load.idle_mw)
        # The current power with the time of its start, and the energy until then: one value, since other threads read
        # it.
        self._drawn = (self._clock.now_s(), self._load.idle_mw, 0.0)
        self._work: WorkSpan | None = None

    def _new_clock(self) -> Clock:
        return VirtualClock()

    @abstractmethod
    def truth(
        self, modes: ModeArray, workload: Workload | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the noiseless true values in `[n, 4]` modes: `[n]` ms per minibatch and `[n]` mW while training."""

    @abstractmethod
    def _jitter(self, modes: ModeArray, workload: Workload | None) -> NDArray[np.float64]:
        """Return the jitter of a single minibatch's time in `[n, 4]` modes, `[n]`; see `Load`."""

    def mean_truth(
        self, modes: ModeArray, workload: Workload | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the values of `truth` with the mean time of a minibatch; above the median, as jitter is skewed."""
        minibatch_ms, power_mw = self.truth(modes, workload)
        return minibatch_ms * mean_stretch(self._jitter(modes, workload)), power_mw

    @property
    def mean_first_gcycles(self) -> float:
        """Mean CPU cycles of a training's first minibatch, in units of 1e9."""
        return _FIRST_MINIBATCH_GCYCLES * math.exp(_FIRST_MINIBATCH_LOG_SD**2 / 2)

    @abstractmethod
    def _load_at(self, mode: PowerMode) -> Load:
        """Return time and power of training in a mode that the board offers."""

    def restarted(self, seed: int) -> Self:
        """Return the same board after a restart in its current mode, with noise from another seed."""
        again = copy.copy(self)
        again.on_work = None
        VirtualBoard._switch_on(again, self._mode, seed)
        return again

    @property
    def board_kind(self) -> str:
        """Kind of board."""
        return self._board_kind

    def try_knobs(self) -> None:
        """Do nothing, as every setting can be reached."""
        return

    @property
    def basis(self) -> str:
        """Empty, since only the mode matters."""
        return ""

    @property
    def provenance(self) -> Provenance:
        """The source of its figures."""
        return self._provenance

    @property
    def clock(self) -> Clock:
        """The board's time; `sleep_s` advances it."""
        return self._clock

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        return self._modes

    def offers(self, mode: PowerMode) -> bool:
        """Whether a mode can be applied."""
        return mode in self._offered

    @property
    def mode_persists(self) -> bool:
        """False, since the board ends with the process."""
        return False

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None]:
        """Return a function that trains a minibatch of a workload; None for the board's built-in one."""

        def step() -> None:
            self.pace(workload)
            self.step()

        return step

    def pace(self, workload: Workload | None) -> None:
        """Switch to another workload; None for the board's built-in one."""
        if workload == self._workload:
            return
        was_cold = self._cold
        self._end_work()
        self._workload = workload
        self._begin_run()
        self._cold = was_cold
        self._draw(self._load.idle_mw)

    @property
    def load_in_force(self) -> Load:
        """Time and power of the current workload in the current mode."""
        return self._load

    def stay_warm(self) -> None:
        """Train the next minibatch without a warm-up, since the training process has already trained."""
        self._cold = False

    def current_mode(self) -> PowerMode:
        """The current mode."""
        return self._mode

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode; a running training ends.

        Raises:
            InvalidInputError: the board does not offer this mode.
        """
        if mode not in self._offered:
            raise InvalidInputError(
                f"{self._board_kind} does not offer the mode {mode.label()}: choose one of its {len(self._offered)}"
            )
        self._end_work()
        self._mode = mode
        self._begin_run()
        self._draw(self._load.idle_mw)

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current mode differs from an applied mode."""
        return [] if self._mode == mode else [f"{self._mode.label()} is in force"]

    def begin_training(self, workload: Workload | None = None) -> AppTraining:
        """Begin an app's training in the current mode."""
        return VirtualTraining(self, workload)

    def start_meter(self) -> PowerMeter:
        """Start sampling board power."""
        self._meters += 1
        meter = VirtualMeter(self._timeline, self._clock, np.random.default_rng([self._seed, 3, self._meters]))
        self._running_meters = WeakSet(each for each in self._running_meters if not each.is_stopped)
        self._running_meters.add(meter)
        self._timeline.forget_before(min(each.start_s for each in self._running_meters))
        return meter

    def conditions(self) -> BoardSample:
        """Report nothing, since virtual boards have no temperature and never throttle."""
        return BoardSample()

    def activity(self) -> Activity:
        """Return the settled power of its current work, and the energy drawn since it was switched on."""
        since_s, power_mw, energy_mj = self._drawn
        return Activity(power_mw, energy_mj=energy_mj + power_mw * max(0.0, self._clock.now_s() - since_s))

    def measuring(self) -> AbstractContextManager[None]:
        """Do nothing, since nothing disturbs a virtual board."""
        return nullcontext()

    def knobs(self) -> Knobs:
        """The current mode."""
        return {"mode": json.dumps(self._mode)}

    def restore(self, knobs: Knobs) -> None:
        """Restore the mode.

        Raises:
            InvalidInputError: these knobs do not contain a mode of this board.
        """
        try:
            mode = PowerMode(*parse_json(knobs["mode"]))
            if any(type(knob) is not int for knob in mode):
                raise TypeError("a mode consists of integers")
        except (KeyError, ValueError, TypeError):
            raise InvalidInputError(
                f"{self._board_kind}: cannot restore {dict(knobs)}: it does not contain a mode"
            ) from None
        self.apply(mode)

    def step(self) -> None:
        """Train one minibatch in the current mode."""
        self.run(1)

    def run(self, minibatches: int) -> None:
        """Train several minibatches in the current mode at once; equivalent to the same number of steps."""
        if minibatches < 0:
            raise ValueError(f"cannot train {minibatches} minibatches")
        load = self._load
        if self._cold and minibatches:
            self._cold = False
            self._train(self._first_minibatch_s, load.idle_mw + _FIRST_MINIBATCH_LOAD * (load.power_mw - load.idle_mw))
            minibatches -= 1
        if minibatches:
            times_s = step_times_s(load, self._jitter_rng.standard_normal(minibatches))
            self._train(float(times_s.sum()), load.power_mw)

    def spend(self, seconds: NDArray[np.float64], power_mw: NDArray[np.float64]) -> None:
        """Let time pass for work that was simulated elsewhere.

        Args:
            seconds: `[n]` successive spans of time, s.
            power_mw: `[n]` mean power of each span, mW.
        """
        for span_s, span_mw in zip(seconds.tolist(), power_mw.tolist(), strict=True):
            self._train(span_s, span_mw)

    def _train(self, seconds: float, power_mw: float) -> None:
        before = self._work or WorkSpan(self._clock.now_s(), 0.0, self._mode, 0.0)
        self._draw(power_mw)
        self._clock.sleep_s(seconds)
        self._draw(self._load.idle_mw)
        energy_j = before.energy_j + power_mw * seconds / 1e3
        self._work = replace(before, end_s=self._clock.now_s(), energy_j=energy_j)

    def _end_work(self) -> None:
        work, self._work = self._work, None
        if work is not None and self.on_work is not None:
            self.on_work(work)

    def _draw(self, power_mw: float) -> None:
        """Start to approach a power."""
        self._count_energy(power_mw)
        self._timeline.aim(self._clock.now_s(), power_mw)

    def _count_energy(self, power_mw: float) -> None:
        """Add the energy drawn since the last change of power, before the power changes again."""
        now_s, energy_mj = self._clock.now_s(), self.activity().energy_mj
        self._drawn = (now_s, power_mw, energy_mj or 0.0)

    def _begin_run(self) -> None:
        exact = self._load_at(self._mode)
        time, power, first = self._run_rng.standard_normal(3) * (
            _REPEAT_TIME_LOG_SD,
            _REPEAT_POWER_LOG_SD,
            _FIRST_MINIBATCH_LOG_SD,
        )
        self._load = Load(
            exact.minibatch_ms * float(np.exp(time)), exact.power_mw * float(np.exp(power)), exact.idle_mw, exact.jitter
        )
        self._first_minibatch_s = _FIRST_MINIBATCH_GCYCLES / (self._mode.cpu_khz / 1e6) * float(np.exp(first))
        self._cold = True
