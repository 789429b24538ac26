"""What soft boards share: a virtual clock, the transients of a training run, and measurement noise.

Every size was read off real files: the 26 raw logs of an Orin Nano (ResNet-18) and, for how far a measurement
repeats, neighbouring rows of the AGX Orin's corpora; see `docs/simulated-board.md`.
"""

from __future__ import annotations

import copy
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edge_agent.devices.device import Conditions, Knobs, Provenance
from edge_agent.devices.virtual.power_timeline import PowerTimeline
from edge_agent.devices.virtual.virtual_meter import VirtualMeter
from edge_agent.devices.virtual.virtual_training import VirtualTraining
from wattfleet.errors import InvalidInputError
from wattfleet.modes import ModeArray, PowerMode, array_to_modes
from wattfleet_io.clock import VirtualClock

if TYPE_CHECKING:
    from typing_extensions import Self

# The first minibatch after a start takes this many cycles of the CPU (4 to 30 s in the logs), give or take.
_FIRST_MINIBATCH_GCYCLES = 7.0
_FIRST_MINIBATCH_LOG_SD = 0.25
# It draws little more than an idle board: this share of the way from idle to training.
_FIRST_MINIBATCH_LOAD = 0.12
# A mode measured again differs by this much (log standard deviation), however long it is measured.
_REPEAT_TIME_LOG_SD = 0.003
_REPEAT_POWER_LOG_SD = 0.006
# Minibatches are late by more than they are early: how far the two sides reach, in jitter standard deviations.
_LATE, _EARLY = 1.6, 0.6


@dataclass(frozen=True)
class Load:
    """What training does at one mode.

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


def mean_stretch(jitter: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much longer than the median minibatch the mean one takes, as a factor, for `[n]` jitters."""
    from scipy.special import ndtr  # here, as an agent holds no scipy

    late, early = _LATE * jitter, _EARLY * jitter
    return np.asarray(np.exp(late**2 / 2) * ndtr(late) + np.exp(early**2 / 2) * ndtr(-early))


class VirtualBoard(ABC):
    """A `Device` that exists in software only; its kinds define how fast it trains and what it draws.

    A training run begins with the first minibatch after a mode was applied, and that one takes seconds; what
    was applied stays until the next `apply`. Everything follows from the seed and the order of calls.

    Args:
        board_kind: kind of board.
        provenance: where its figures come from.
        modes: `[n, 4]` modes that it offers.
        start: the mode in force at first.
        seed: decides on all noise.
    """

    def __init__(self, board_kind: str, provenance: Provenance, modes: ModeArray, start: PowerMode, seed: int) -> None:
        self._board_kind = board_kind
        self._evidence = provenance
        self._modes = modes
        self._offered = frozenset(array_to_modes(modes))
        self._switch_on(start, seed)

    def _switch_on(self, start: PowerMode, seed: int) -> None:
        self._seed = seed
        self._run_rng = np.random.default_rng([seed, 1])
        self._jitter_rng = np.random.default_rng([seed, 2])
        self._meters = 0
        self._clock = VirtualClock()
        self._mode = start
        self._cold = True
        self._begin_run()
        self._timeline = PowerTimeline(self._clock.now_s(), self._load.idle_mw)

    @abstractmethod
    def truth(self, modes: ModeArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What measurements scatter around at `[n, 4]` modes: `[n]` ms per minibatch and `[n]` mW training."""

    @property
    def mean_first_gcycles(self) -> float:
        """CPU cycles that the first minibatch of a training takes on average, in units of 1e9."""
        return _FIRST_MINIBATCH_GCYCLES * math.exp(_FIRST_MINIBATCH_LOG_SD**2 / 2)

    @abstractmethod
    def _load_at(self, mode: PowerMode) -> Load:
        """What training does at a mode that the board offers."""

    def restarted(self, seed: int) -> Self:
        """This very board, switched on anew in the mode in force; what scatters is drawn from another seed."""
        again = copy.copy(self)
        VirtualBoard._switch_on(again, self._mode, seed)
        return again

    @property
    def board_kind(self) -> str:
        """Kind of board."""
        return self._board_kind

    @property
    def provenance(self) -> Provenance:
        """Where its figures come from."""
        return self._evidence

    @property
    def clock(self) -> VirtualClock:
        """The board's own time; let it pass with `sleep_s`."""
        return self._clock

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        return self._modes

    @property
    def mode_persists(self) -> bool:
        """False: the board ends with the process."""
        return False

    @property
    def built_in_workload(self) -> Callable[[], None]:
        """The board stands for whatever its reference predictor was trained on."""
        return self.step

    def current_mode(self) -> PowerMode:
        """The mode in force."""
        return self._mode

    def apply(self, mode: PowerMode) -> None:
        """Put a mode in force; what was running ends.

        Raises:
            InvalidInputError: the board does not offer this mode.
        """
        if mode not in self._offered:
            raise InvalidInputError(
                f"{self._board_kind} does not offer the mode {mode.label()}: choose one of its {len(self._offered)}"
            )
        self._mode = mode
        self._begin_run()
        self._timeline.aim(self._clock.now_s(), self._load.idle_mw)

    def differences(self, mode: PowerMode) -> list[str]:
        """What is in force instead of a mode that was applied."""
        return [] if self._mode == mode else [f"{self._mode.label()} is in force"]

    def begin_training(self) -> VirtualTraining:
        """An app begins to train in the mode in force."""
        return VirtualTraining(self)

    def start_meter(self) -> VirtualMeter:
        """Begin to sample board power."""
        self._meters += 1
        return VirtualMeter(self._timeline, self._clock, np.random.default_rng([self._seed, 3, self._meters]))

    def conditions(self) -> Conditions:
        """Soft boards do not get hot."""
        return Conditions(temperature_c=None, throttle_events=None)

    def measuring(self) -> AbstractContextManager[None]:
        """Nothing disturbs a soft board."""
        return nullcontext()

    def knobs(self) -> Knobs:
        """The mode in force."""
        return {"mode": json.dumps(self._mode)}

    def restore(self, knobs: Knobs) -> None:
        """Put the mode back in force.

        Raises:
            InvalidInputError: these knobs hold no mode of this board.
        """
        try:
            mode = PowerMode(*json.loads(knobs["mode"]))
        except (KeyError, ValueError, TypeError):
            raise InvalidInputError(f"{self._board_kind}: cannot restore {dict(knobs)}: it holds no mode") from None
        self.apply(mode)

    def step(self) -> None:
        """Train one minibatch at the mode in force."""
        self.run(1)

    def run(self, minibatches: int) -> None:
        """Train many minibatches at the mode in force in one go; the same as so many steps."""
        if minibatches < 0:
            raise ValueError(f"cannot train {minibatches} minibatches")
        load = self._load
        if self._cold and minibatches:
            self._cold = False
            self._train(self._first_minibatch_s, load.idle_mw + _FIRST_MINIBATCH_LOAD * (load.power_mw - load.idle_mw))
            minibatches -= 1
        if minibatches:
            spread = load.jitter * self._jitter_rng.standard_normal(minibatches)
            late = np.where(spread > 0, _LATE, _EARLY) * spread
            self._train(load.minibatch_ms / 1e3 * float(np.exp(late).sum()), load.power_mw)

    def _train(self, seconds: float, power_mw: float) -> None:
        self._timeline.aim(self._clock.now_s(), power_mw)
        self._clock.sleep_s(seconds)
        self._timeline.aim(self._clock.now_s(), self._load.idle_mw)

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
