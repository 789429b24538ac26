"""A simulated board that answers simulated requests in its own time, while it trains for an app and while it rests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np

from edge_agent.devices.device import (
    Activity,
    AppTraining,
    Device,
    Knobs,
    PowerMeter,
)
from edge_agent.devices.virtual.physics import inference_workloads
from edge_agent.devices.virtual.served_duty import RequestService, ServedDuty, SharedBoard
from edge_agent.devices.virtual.simulated import SimulatedDevice, SpanFile
from edge_agent.devices.virtual.virtual_board import Load, VirtualTraining
from edge_agent.profiling.profiler import Profiler
from edge_agent.serving.device_turns import DeviceTurns, ServedSpan
from edge_agent.serving.inference import InferenceRows
from edge_agent.serving.turns import TurnPurpose
from wattfleet.common.clock import Clock
from wattfleet.core.duties import ConstantArrivals, Demand, Duty
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.modes import (
    Measurement,
    ModeArray,
    PowerMode,
    Profile,
    Provenance,
    Task,
    Workload,
    WorkloadFacts,
    array_to_modes,
)
from wattfleet_proto.device_state import BoardSample

_log = logging.getLogger(__name__)


# --- Duty device ------------------------------------------------------------------------------------------------------
# A board that answers requests: its mode changes between turns, and only to modes that keep its duty.


class DutyDevice:
    """Passes all calls on to a board, but changes the mode only in a turn of its own.

    Args:
        board: the board.
        turns: the turns of this device.
    """

    def __init__(self, board: Device, turns: DeviceTurns) -> None:
        self._board = board
        self._turns = turns

    @property
    def board_kind(self) -> str:
        """Kind of board."""
        return self._board.board_kind

    @property
    def basis(self) -> str:
        """What its figures depend on apart from the mode."""
        return self._board.basis

    @property
    def provenance(self) -> Provenance:
        """The source of its figures."""
        return self._board.provenance

    @property
    def clock(self) -> Clock:
        """The time base of everything measured on it."""
        return self._board.clock

    @property
    def modes(self) -> ModeArray:
        """`[n, 4]` modes that can be applied."""
        return self._board.modes

    @property
    def mode_persists(self) -> bool:
        """Whether a mode stays in force after the process that applied it has ended."""
        return self._board.mode_persists

    def built_in_workload(self, workload: Workload | None = None) -> Callable[[], None] | None:
        """Return a function that trains one minibatch of a workload in a turn; None if a program has to be run."""
        step = self._board.built_in_workload(workload)
        if step is None:
            return None

        def step_in_turn() -> None:
            with self._turns.from_thread(TurnPurpose.MINIBATCH):
                step()

        return step_in_turn

    def try_knobs(self) -> None:
        """Find out which settings the board does not reach."""
        self._board.try_knobs()

    def current_mode(self) -> PowerMode:
        """The current mode, read back from the board."""
        return self._board.current_mode()

    def apply(self, mode: PowerMode) -> None:
        """Apply a mode as soon as neither a batch of requests nor a minibatch is using the device.

        Raises:
            DutyNotKeptError: requests would not be answered in time in this mode.
            InvalidInputError: the board does not offer this mode.
            ModeNotAppliedError: it was set, but another one was read back.
        """
        self._turns.require_kept(mode)
        with self._turns.from_thread(TurnPurpose.CHANGE):
            self._set(mode)

    def _set(self, mode: PowerMode) -> None:
        """Apply a mode now, and note the mode in force."""
        try:
            self._board.apply(mode)
        except WattfleetError:
            self._note_mode()
            raise
        self._turns.in_mode(mode)

    def differences(self, mode: PowerMode) -> list[str]:
        """Describe how the current settings differ from an applied mode; empty while they match."""
        return self._board.differences(mode)

    def begin_training(self, workload: Workload | None = None) -> AppTraining:
        """Begin an app's training in the mode in force."""
        return self._board.begin_training(workload)

    def start_meter(self) -> PowerMeter:
        """Start sampling board power."""
        return self._board.start_meter()

    def conditions(self) -> BoardSample:
        """Return the current temperature and throttle count."""
        return self._board.conditions()

    def activity(self) -> Activity:
        """Return what the board is doing now."""
        return self._board.activity()

    def measuring(self) -> AbstractContextManager[None]:
        """Until the block ends, keep constant whatever would disturb a measurement, such as the fan."""
        return self._board.measuring()

    def knobs(self) -> Knobs:
        """Return the current settings, for `restore`."""
        return self._board.knobs()

    def restore(self, knobs: Knobs) -> None:
        """Restore settings that `knobs` returned.

        Raises:
            InvalidInputError: the settings are not this board's.
            ModeNotAppliedError: they were written, but other values were read back.
        """
        try:
            self._board.restore(knobs)
        finally:
            self._note_mode()

    def _note_mode(self) -> None:
        """Note the mode that is read back; if it cannot be read, note that it is unknown."""
        try:
            self._turns.in_mode(self._board.current_mode())
        except WattfleetError:
            self._turns.in_mode(None)


# --- Serving board ----------------------------------------------------------------------------------------------------

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


# --- Simulated duty ---------------------------------------------------------------------------------------------------
# The duty of a simulated board, with simulated requests; its inference is measured before they arrive.

LARGEST_BATCH = 64
"""Maximum of requests that a simulated inference server accepts at once: the largest measured batch."""

SWITCH_MS = 5.0
"""Time of a simulated board between inference and training, ms. Assumed, since no measured file states it."""

_MEASURED_ROWS = 40
_FORM = "write network:requests per second:latency in ms, such as mobilenetv3:60:500, and :0.99 for another quantile"


def simulated_duty(text: str) -> Duty:
    """Read a duty such as `mobilenetv3:60:500`, or `mobilenetv3:60:500:0.99`.

    Args:
        text: the network, requests per second, the limit of their latency in ms, and the share of the requests that
            must be answered within it (0.95 by default).

    Raises:
        InvalidInputError: the text has another form, the network was not measured, or a number is out of range.
    """
    network, *numbers = text.split(":")
    try:
        per_s, latency_ms, *quantile = map(float, numbers)
        is_complete = len(quantile) <= 1
    except ValueError:
        is_complete = False
    if not is_complete:
        raise InvalidInputError(f"the duty {text[:60]!r} cannot be parsed: {_FORM}")
    if network not in inference_workloads():
        raise InvalidInputError(
            f"there are no measurements of the inference of {network[:40]!r}: choose one of "
            f"{', '.join(inference_workloads())}"
        )
    try:
        return Duty(network, ConstantArrivals(per_s), latency_ms, *quantile)
    except InvalidInputError as error:
        raise InvalidInputError(f"the duty {text[:60]!r}: {error}") from None


def require_simulated(device: Device) -> SimulatedDevice:
    """Return the device if requests can be simulated on it.

    Raises:
        InvalidInputError: it is not a simulated board.
    """
    if isinstance(device, SimulatedDevice):
        return device
    raise InvalidInputError(
        f"{device.board_kind} is not simulated ({device.provenance}), and requests can be simulated only on "
        f"simulated boards: omit --simulated-duty, or pass --device simulated:<kind>"
    )


def served(network: str, requests: int) -> Workload:
    """Return the workload of inference with a given batch size."""
    return Workload(network, WorkloadFacts(Task.INFERENCE, batch=requests))


def measure_inference(board: SimulatedDevice, network: str, rows: InferenceRows, seed: int) -> None:
    """Measure the inference of a network in some modes and batches, unless its rows are already stored.

    Each is measured on a restarted board, so that the board's own clock does not advance.

    Args:
        board: the board.
        network: the network's name.
        rows: stores the measured rows.
        seed: seed for the modes, the batches and the noise.

    Raises:
        InvalidInputError: the rows cannot be stored.
    """
    if len(rows.usable(network)):
        return
    rng = np.random.default_rng([seed, 4])
    modes = array_to_modes(board.modes[rng.choice(len(board.modes), _MEASURED_ROWS, replace=False)])
    batches = rng.choice([2**power for power in range(LARGEST_BATCH.bit_length())], _MEASURED_ROWS).tolist()
    fast = array_to_modes(board.modes[[int(np.lexsort(board.modes.T)[-1])]])
    settings = [*zip(modes, batches, strict=True), *((fast[0], batch) for batch in (1, LARGEST_BATCH))]
    found = [_measured(board.restarted(int(rng.integers(2**32))), network, *each) for each in dict.fromkeys(settings)]
    rows.add(network, Profile.of(found, Task.INFERENCE))


def _measured(board: SimulatedDevice, network: str, mode: PowerMode, batch: int) -> Measurement:
    board.pace(served(network, batch))
    record = Profiler(board).measure(mode, board.step)
    return Measurement(mode, record.minibatch_ms, record.power_mw, batch)
