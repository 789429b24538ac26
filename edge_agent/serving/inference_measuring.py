"""Measures a duty's inference in further modes, using batches that the connected inference servers repeat."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from edge_agent.devices.device import Device, DutyNotKeptError
from edge_agent.devices.meters.power_now import power_now_mw
from edge_agent.learning.profiling_plan import Progress
from edge_agent.profiling.disturbance import DisturbedError
from edge_agent.profiling.mode_measurement import DEFAULT_SETTINGS, MeasurementError, ProfilerSettings
from edge_agent.profiling.profiler import Profiler
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_planning import DutyPlanning
from edge_agent.serving.inference_rows import InferenceRows
from edge_agent.serving.server_stream import ServerGoneError
from edge_agent.workloads.step import StepTimes
from wattfleet.choosing import PROBABILITY, spread_modes
from wattfleet.duties import ModesWithDuty
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Measurement, PowerMode, Profile, Task, array_to_modes

_log = logging.getLogger(__name__)

_WITHIN_S = 120.0
"""Measuring a mode is given up after this time, since requests may leave too little time; device-clock seconds."""


class MeasuringServers(Protocol):
    """The inference servers that repeat batches."""

    @property
    def largest_measured(self) -> int:
        """The largest batch that may be measured; 0 if none can be."""
        ...

    async def measured_ms(self, batch: int, work_ms: float) -> float:
        """Make a server answer a batch in a turn, and return the time taken, ms."""
        ...


class InferenceMeasuring:
    """Measures a few modes of the duty's inference, each with the smallest and the largest batch that fit.

    Only modes that keep the duty are measured, once trainings can be planned beside it: only then does the coordinator
    account for the power of a measuring device.

    Args:
        device: the board.
        turns: the turns of the device.
        planning: determines which modes and batches keep the duty.
        rows: stores the measured rows.
        servers: repeat batches.
        modes: number of modes to have measured rows of, including rows passed by the user; 0 for none.
        settings: the profiling settings, among them how long to measure each batch.
    """

    def __init__(
        self,
        device: Device,
        turns: DeviceTurns,
        planning: DutyPlanning,
        rows: InferenceRows,
        servers: MeasuringServers,
        modes: int,
        settings: ProfilerSettings = DEFAULT_SETTINGS,
    ) -> None:
        self._device = device
        self._turns = turns
        self._planning = planning
        self._rows = rows
        self._servers = servers
        self._modes = modes
        self._profiler = Profiler(device, settings)
        self._skipped: set[tuple[str, PowerMode]] = set()
        self._nothing_left: tuple[ModesWithDuty, int, int] | None = None

    def wanted(self, profiled: Iterable[PowerMode]) -> list[PowerMode]:
        """Return the modes to measure now; none before there are a duty, a plan beside it, and a server with answers.

        Args:
            profiled: modes with measured trainings. These come first, then others spread over all modes.
        """
        duty, kept = self._turns.duty, self._planning.keeping()
        if not self._modes or duty is None or kept is None or not self._servers.largest_measured:
            return []
        basis = kept, self._rows.revision, len(self._skipped)
        if (known := self._nothing_left) is not None and known[0] is kept and known[1:] == basis[1:]:
            return []
        measured = {each.mode for each in self._rows.usable(duty.workload).measurements()}
        left = max(0, self._modes - len(measured))
        keeping = np.unique(kept.alone.modes, axis=0)
        spread = array_to_modes(spread_modes(keeping, min(self._modes, len(keeping)), 0))
        among = set(array_to_modes(keeping)) - measured
        wanted = [
            mode
            for mode in dict.fromkeys([*profiled, *spread])
            if mode in among and (duty.workload, mode) not in self._skipped
        ][:left]
        self._nothing_left = None if wanted else basis
        return wanted

    def measure(self, modes: Sequence[PowerMode], report: Callable[[Progress], None]) -> None:
        """Measure modes in a thread, and store the rows of each.

        Ends early without an error if the duty changes or no server can measure any longer.

        Args:
            modes: the modes returned by `wanted`.
            report: called after every mode; if it raises an exception, the measurement ends.

        Raises:
            ModeNotAppliedError: a mode did not take effect, or did not last.
            StoppedError: the agent is stopping.
        """
        duty = self._turns.duty
        if duty is None:
            return
        workload = duty.workload
        if math.isnan(power_now_mw(self._device)):
            _log.warning("the inference of %r is not measured, as the board's power cannot be read", workload)
            self._skipped.update((workload, mode) for mode in modes)
            return
        for done, mode in enumerate(modes, start=1):
            kept = self._planning.keeping()
            if self._turns.duty != duty or kept is None:
                return
            try:
                for batch, work_ms in self._batches(kept, mode):
                    self._measure(workload, mode, batch, work_ms)
            except ServerGoneError as error:
                _log.info("stopped measuring the inference of %r: %s", workload, error)
                return
            except (DutyNotKeptError, DisturbedError, MeasurementError, InvalidInputError) as error:
                _log.info("the inference of %r is not measured at %s: %s", workload, mode.label(), error)
            self._skipped.add((workload, mode))
            report(Progress(done, len(modes), f"measured the inference of {workload} at {mode.label()}"))

    def _batches(self, kept: ModesWithDuty, mode: PowerMode) -> list[tuple[int, float]]:
        """Return the batches to measure in a mode, with the longest time of each, ms.

        A request that arrives during such a batch has to wait for its end, and must still be answered in time.
        """
        rows = kept.alone.among((kept.alone.modes == np.array(mode)).all(axis=1))
        times_ms = dict(zip(rows.stated_batch().tolist(), rows.safe_minibatch_ms(PROBABILITY).tolist(), strict=True))
        largest, limit_ms = self._servers.largest_measured, kept.demand.latency_ms
        fitting = sorted(batch for batch, ms in times_ms.items() if batch <= largest and 2 * ms <= limit_ms)
        return [(batch, times_ms[batch]) for batch in dict.fromkeys([*fitting[:1], *fitting[-1:]])]

    def _measure(self, workload: str, mode: PowerMode, batch: int, work_ms: float) -> None:
        clock = self._device.clock
        until_s = clock.now_s() + _WITHIN_S

        def step() -> StepTimes:
            if clock.now_s() > until_s:
                raise MeasurementError(f"{mode.label()}: requests leave too little time for batches of {batch}")
            return StepTimes(0.0, self._turns.measured(partial(self._servers.measured_ms, batch, work_ms)))

        with self._device.measuring():
            record = self._profiler.measure(mode, step)
        # Not the time of the whole step, which includes waiting for requests.
        batch_ms = record.minibatch_ms if record.compute_ms is None else record.compute_ms
        self._rows.add(workload, Profile.of([Measurement(mode, batch_ms, record.power_mw, batch)], Task.INFERENCE))
