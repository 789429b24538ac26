"""A simulated board that answers simulated requests in its own time, while it trains for an app and while it rests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from edge_agent.devices.device import AppTraining
from edge_agent.devices.virtual.served_duty import RequestService, ServedDuty, SharedBoard
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.span_file import SpanFile
from edge_agent.devices.virtual.virtual_app_training import VirtualTraining
from edge_agent.devices.virtual.virtual_board import Load
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_device import DutyDevice
from edge_agent.serving.served_spans import ServedSpan
from edge_agent.serving.simulated_duty import LARGEST_BATCH, SWITCH_MS, served
from wattfleet.duties import ConstantArrivals, Demand, Duty
from wattfleet.modes import PowerMode, Workload

_log = logging.getLogger(__name__)

_REST_S = 1.0
"""Time between two answers of the requests to a resting board, s."""

_FIRST_REST_S = 30.0
"""The first rest, s: long enough to know the rate of requests."""

_POWER_S = 1.0
"""Power is averaged over this time, s, about as slowly as a power meter follows changes."""

_SLOWEST = 50.0
"""A training that becomes slower than this factor beside requests is given up: its mode leaves no time for it."""

_MOST_LOADS = 1000


class ServingBoard(DutyDevice):
    """Serves the requests of a duty on a simulated board, beside its trainings.

    Requests arrive at random. They pause while modes or idle power are measured. A training's first minibatch is work
    of the CPU, so requests are answered meanwhile.

    Args:
        board: the board.
        turns: the turns of the device, which provide the duty in force and the planned batches, and count how it is
            kept.
        duty: its network and the rate of its requests; both stay the same until it is cleared.
        seed: seed for requests and jitter.
        file: records what was served.
    """

    def __init__(
        self, board: SimulatedDevice, turns: DeviceTurns, duty: Duty, seed: int, file: SpanFile[ServedSpan]
    ) -> None:
        super().__init__(board, turns)
        assert isinstance(duty.arrivals, ConstantArrivals), "simulated requests have a constant rate"
        self._simulated = board
        self._duty = duty
        self._service = RequestService(Demand(duty.arrivals.per_s, duty.latency_ms, duty.quantile), seed)
        self._file = file
        self._loads: dict[tuple[PowerMode, int], Load] = {}

    @property
    def turns(self) -> DeviceTurns:
        """The given turns."""
        return self._turns

    def begin(self) -> None:
        """Put the duty in force, and let its requests arrive."""
        self._turns.in_mode(self._board.current_mode())
        self._turns.server_connected(LARGEST_BATCH)
        self._turns.duty = self._duty

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None] | None:
        """Return a function that trains one minibatch of a workload; requests pause meanwhile."""
        return self._board.built_in_workload(workload)

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode, even one that does not keep the duty, so that it can be measured.

        Raises:
            InvalidInputError: the board does not offer this mode.
        """
        self._set(mode)

    def begin_training(self, workload: Workload | None = None) -> AppTraining:
        """Begin an app's training in the mode in force; requests are answered during its first minibatch."""
        self._service.pause_until(self.clock.now_s())
        training = _ServedTraining(self._simulated, workload, self._train)
        run = self._serve(None, self.clock.now_s())
        self.clock.sleep_s(max(0.0, run.begin_s + run.duration_s - self.clock.now_s()))
        return training

    async def serve_at_rest(self, is_resting: Callable[[], bool]) -> None:
        """Answer requests while the board rests, in real time, until cancelled.

        Args:
            is_resting: returns whether the board is unused, which holds until the event loop runs something else.
        """
        since_s, due_s = time.monotonic(), _FIRST_REST_S
        while True:
            await asyncio.sleep(_REST_S)
            if is_resting() and self._turns.duty is not None:
                self.rest(max(due_s, time.monotonic() - since_s))
                due_s = 0.0
            since_s = time.monotonic()

    def rest(self, seconds: float) -> None:
        """Answer requests for some time without training."""
        self._service.pause_until(self.clock.now_s())
        self._spend(self._serve(None, self.clock.now_s() + seconds))

    def _train(self, minibatches: int) -> None:
        """Train some minibatches between requests, in the mode in force."""
        if self._turns.duty is None:
            self._simulated.run(minibatches)
            return
        load = self._simulated.load_in_force
        alone_s = minibatches * load.minibatch_ms / 1e3
        run = self._serve(load, self.clock.now_s() + _SLOWEST * alone_s, minibatches)
        self._spend(run)
        if len(run.minibatch_end_s) < minibatches:
            _log.warning(
                "only %d of %d minibatches were trained in %.0f s: requests leave too little time at %s",
                len(run.minibatch_end_s),
                minibatches,
                run.duration_s,
                self.current_mode().label(),
            )

    def _serve(self, training: Load | None, until_s: float, minibatches: int | None = None) -> ServedDuty:
        """Serve until a given time in the mode in force; the board's own clock does not advance."""
        mode, batch = self.current_mode(), self._turns.batching.batch or LARGEST_BATCH
        shared = SharedBoard(training, partial(self._inference, mode), batch, SWITCH_MS)
        run = self._service.serve(shared, until_s, minibatches)
        self._turns.served(run)
        self._file.append(ServedSpan.of(run, mode, batch, training is not None))
        return run

    def _spend(self, run: ServedDuty) -> None:
        self._simulated.spend(*run.mean_powers(_POWER_S))

    def _inference(self, mode: PowerMode, requests: int) -> Load:
        if (mode, requests) not in self._loads:
            if len(self._loads) >= _MOST_LOADS:
                self._loads.clear()
            self._loads[mode, requests] = self._simulated.load(mode, served(self._duty.workload, requests))
        return self._loads[mode, requests]


class _ServedTraining(VirtualTraining):
    """An app's training between requests."""

    def __init__(self, board: SimulatedDevice, workload: Workload | None, train: Callable[[int], None]) -> None:
        super().__init__(board, workload)
        self._train = train

    def finish(self, minibatches: int) -> None:
        """Train the minibatches that were not yet reported."""
        self._board.stay_warm()
        self._train(max(0, minibatches - self._reported))
