"""A simulated board on the machine's own clock: apps that request turns are slowed down to its physics."""

from __future__ import annotations

import threading
from functools import lru_cache

import numpy as np

from edge_agent.devices.device import AppTraining, PowerMeter
from edge_agent.devices.meters.polled_meter import PolledMeter
from edge_agent.devices.physical import PhysicalTraining
from edge_agent.devices.virtual.power_timeline import PowerTimeline
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import Load, step_times_s
from wattfleet.modes import PowerMode, Task, Workload, WorkloadFacts
from wattfleet_io.clock import Clock, SystemClock

_LOADS = 1000
"""Maximum of cached loads of inference, each for one mode and batch."""


class LiveSimulatedDevice(SimulatedDevice):
    """A simulated board in real time, so that it can answer requests.

    Work in a turn takes at least the time given by the physics in the mode in force, and draws that power. Work outside
    of turns takes this machine's time, at idle power. A training program continues while the mode changes, so there are
    no longer first minibatches.

    Args:
        board_kind: one of `wattfleet.modes.boards.BOARDS`.
        seed: random seed of the unit and its noise.

    Raises:
        InvalidInputError: no such kind.
    """

    def __init__(self, board_kind: str, seed: int) -> None:
        self._drawing = threading.Lock()
        self._inference_load = lru_cache(_LOADS)(self._new_inference_load)
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
        loads = [self._inference_load(self._mode, workload, 2**size) for size in range(sizes)]
        drawn = loads[min((max(1, waiting) - 1).bit_length(), sizes - 1)]
        self._draw(drawn.power_mw)
        return [self._step_ms(load) for load in loads]

    def rest(self) -> None:
        """Note that nothing uses the device any longer."""
        self._draw(self._load.idle_mw)

    def _new_inference_load(self, mode: PowerMode, workload: str, batch: int) -> Load:
        return self.load(mode, Workload(workload, WorkloadFacts(batch=batch, task=Task.INFERENCE)))

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
