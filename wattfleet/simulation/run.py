"""One simulation, from the first process to the last round. Every part except the boards is real."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from coordinator.cli.client import CoordinatorClient, InvalidRequestError, RequestFailedError
from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.profiling.profiler import Profiler
from edge_agent.runtime.readiness import parked_mode
from edge_agent.serving.inference import batch_sizes
from edge_agent.serving.serving_board import LARGEST_BATCH, SWITCH_MS, served, simulated_duty
from wattfleet.common.console import print_line, rounds_text
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.joining import EnrolmentRefusedError
from wattfleet.core.budgets import EnergyAccount
from wattfleet.core.choosing import KnownModes
from wattfleet.core.duties import ConstantArrivals, Demand, Duty, keep_duty
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.modes import Profile, Task, Workload
from wattfleet.simulation.baselines import BaselineTraining
from wattfleet.simulation.devices import FleetDevice
from wattfleet.simulation.digits_app.task import save_digits
from wattfleet.simulation.fleet import FleetParts
from wattfleet.simulation.flower import APP_DIRECTORY, FlowerDeployment, NoAnswerError, PartFailedError, Parts
from wattfleet.simulation.settings import Apps, SimulatedApp, SimulationSettings
from wattfleet_proto.convert import workload_from_message
from wattfleet_proto.v1 import session_pb2, view_pb2

# --- Forecast ---------------------------------------------------------------------------------------------------------
# How long a simulation still takes: by usual times at first, then by the times of its own rounds.


class Stage(Enum):
    """A stage of the start, with its usual seconds: a fixed part, and a part for each device."""

    COORDINATOR = ("starting the coordinator", 8.0, 0.0)
    FLOWER = ("starting Flower's SuperLink and SuperNodes", 20.0, 2.0)
    IDLE_POWER = ("measuring idle power", 8.0, 1.0)

    def __init__(self, text: str, fixed_s: float, device_s: float) -> None:
        self.text = text
        self._fixed_s = fixed_s
        self._device_s = device_s

    def usual_s(self, devices: int) -> float:
        """The usual seconds of the stage on two cores that do nothing else."""
        return self._fixed_s + devices * self._device_s


_FIRST_ROUND_AFTER_S = 25.0
"""The usual seconds from the start of a run to its first plan."""
_ROUND_S = 40.0
"""The usual seconds of a round, for each app that trains at the same time."""


class Forecast:
    """Estimates the seconds that a simulation still takes."""

    def __init__(self, devices: int, rounds: int, together: Sequence[int], now_s: float = 0.0) -> None:
        """Begin with the first stage of the start.

        Args:
            devices: the number of boards.
            rounds: the rounds of each run.
            together: how many runs train at the same time, for each group of runs in turn.
            now_s: the time now.
        """
        self._devices = devices
        self._rounds = rounds
        self._together = list(together)
        self._stage: Stage | None = Stage.COORDINATOR
        self._stage_began_s = now_s
        self._group = 0
        self._first_plan_s: float | None = None
        self._done = 0
        self._done_s = now_s
        self._round_s = _ROUND_S  # of a single app

    def begin(self, stage: Stage, now_s: float) -> None:
        """Begin a stage of the start, unless it has begun."""
        if self._stage is not stage:
            self._stage, self._stage_began_s = stage, now_s

    def begin_group(self, index: int, now_s: float) -> None:
        """Begin the runs of a group."""
        self._stage, self._stage_began_s = None, now_s
        self._group, self._first_plan_s, self._done = index, None, 0

    def note_rounds(self, planned_s: Sequence[float], done: int, now_s: float) -> None:
        """Note the rounds of the current run.

        Args:
            planned_s: the predicted seconds of each round that is planned.
            done: how many rounds have ended.
            now_s: the time now.
        """
        if self._first_plan_s is None:
            if not planned_s:
                return
            self._first_plan_s = self._done_s = now_s
            self._round_s = max(self._round_s, planned_s[0] / self._together[self._group])
        if done > self._done:
            self._done, self._done_s = done, now_s
            self._round_s = (now_s - self._first_plan_s) / done / self._together[self._group]

    def left_s(self, now_s: float) -> float:
        """The estimated seconds until the last round has ended."""
        since_s = now_s - self._stage_began_s
        if self._stage is not None:
            stages = list(Stage)
            later = stages[stages.index(self._stage) + 1 :]
            left_s = max(0.0, self._stage.usual_s(self._devices) - since_s)
            left_s += sum(stage.usual_s(self._devices) for stage in later)
            return left_s + self._groups_s(self._together, self._round_s)
        together, later_groups = self._together[self._group], self._together[self._group + 1 :]
        if self._first_plan_s is None:
            left_s = max(0.0, _FIRST_ROUND_AFTER_S - since_s) + self._rounds * together * self._round_s
            return left_s + self._groups_s(later_groups, self._round_s)
        in_round_s = now_s - self._done_s
        rounds_left = self._rounds - self._done
        # A round that takes longer than expected is no exception: the machine may be busy.
        round_s = max(together * self._round_s, in_round_s if rounds_left else 0.0)
        left_s = max(0.0, rounds_left * round_s - in_round_s)
        return left_s + self._groups_s(later_groups, round_s / together)

    def _groups_s(self, groups: Sequence[int], round_s: float) -> float:
        """The seconds of whole groups of runs, given those of a round of a single app."""
        return sum(_FIRST_ROUND_AFTER_S + self._rounds * together * round_s for together in groups)


def left_text(left_s: float) -> str:
    """An estimate of the time that is left, as text with the precision that it has."""
    if left_s < 10:
        return "almost done"
    if left_s < 60:
        return f"about {10 * round(left_s / 10)} s left"
    return f"about {round(left_s / 60)} min left"


# --- Coordinator view -------------------------------------------------------------------------------------------------
# Reads the state of devices and runs from the coordinator of a simulation.

_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RunSeen:
    """A run and its rounds so far.

    Attributes:
        run: id, strategy and state of the run; the id is empty if the run has not started.
        rounds: its rounds, in order.
    """

    run: view_pb2.RunView = field(default_factory=view_pb2.RunView)
    rounds: Sequence[view_pb2.RoundView] = ()


class CoordinatorView:
    """Reads devices and runs from the coordinator; raises the errors of `CoordinatorClient`."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Connect at the first request.

        Args:
            endpoint: the coordinator, and how to connect to it as an operator or a viewer.

        Raises:
            InvalidInputError: the identity is damaged, or plaintext would leave this machine although it must not.
        """
        self._client = CoordinatorClient(endpoint, stream_timeout_s=_TIMEOUT_S)

    def __enter__(self) -> CoordinatorView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.__exit__(kind, error, trace)

    def devices(self, workload: str = "") -> list[view_pb2.DeviceView]:
        """Return all devices with their fronts of a workload, by id; empty: each device's latest front."""
        return list(self._client.devices(with_fronts=True, workload=workload))

    def run(self, run_id: str) -> RunSeen:
        """Return a run and its rounds with their times; an empty run if its ServerApp has not announced it yet."""
        for run in self._client.runs(with_times=True):
            if run.run_id == run_id:
                return RunSeen(run, list(self._client.rounds(run_id, with_times=True)))
        return RunSeen()

    def errors(self, run_ids: Container[str]) -> list[str]:
        """Return the errors of the given runs that have failed."""
        return [run.error for run in self._client.runs() if run.run_id in run_ids and run.error]


# --- Run waiter -------------------------------------------------------------------------------------------------------
# Waits for a fleet to be ready and for a Flower run to complete, by polling the coordinator and Flower.


class NotInTimeError(PartFailedError):
    """A time limit has passed."""


def await_ready(
    view: CoordinatorView,
    count: int,
    within_s: float,
    poll_s: float,
    on_poll: Callable[[Sequence[view_pb2.DeviceView]], None] = lambda _: None,
) -> None:
    """Return once enough devices are ready.

    Args:
        view: the coordinator.
        count: number of devices to wait for.
        within_s: time limit.
        poll_s: time between two polls.
        on_poll: called with all devices after each poll; it may raise to stop the wait.

    Raises:
        NotInTimeError: the time limit has passed; the text lists the devices that are not ready.
    """
    give_up_s = time.monotonic() + within_s
    while True:
        devices = view.devices()
        on_poll(devices)
        if sum(map(is_ready, devices)) >= count:
            return
        if time.monotonic() > give_up_s:
            missing = missing_text(devices, count)
            raise NotInTimeError(f"not all of {count} devices were ready within {within_s:g} s: {missing}")
        time.sleep(poll_s)


def is_ready(device: view_pb2.DeviceView) -> bool:
    """Whether a device can be planned."""
    return device.state == session_pb2.DEVICE_STATE_READY


def missing_text(devices: Sequence[view_pb2.DeviceView], count: int) -> str:
    """Return which devices are not ready, with the state of each, and how many have not enrolled.

    Args:
        devices: the devices that are enrolled.
        count: how many devices there should be.
    """
    missing = [_state(device) for device in devices if not is_ready(device)]
    if len(devices) < count:
        missing.append(f"{count - len(devices)} not enrolled")
    return ", ".join(missing)


def await_run(
    view: CoordinatorView,
    run_id: str,
    flower_completed: Callable[[str], bool],
    within_s: float,
    poll_s: float,
    on_poll: Callable[[RunSeen], None] = lambda _: None,
    ask_flower_every_s: float = 10.0,
    check: Callable[[RunSeen], None] | None = None,
) -> RunSeen:
    """Return the run once Flower reports it as completed.

    Args:
        view: the coordinator.
        run_id: Flower's id of the run.
        flower_completed: returns whether Flower reports the run as completed. It raises if the run failed or was
            stopped. After a `NoAnswerError` it is called again.
        within_s: time limit.
        poll_s: time between two polls of the coordinator.
        on_poll: called with the run after each poll; it may raise to stop the wait.
        ask_flower_every_s: seconds between two calls of `flower_completed` while the run goes on.
        check: raises if a completed run has not trained properly; None for `require_trained`.

    Raises:
        NotInTimeError: the time limit has passed.
        PartFailedError: the run failed or was stopped, or `check` raised it.
    """
    check = check or require_trained
    give_up_s = time.monotonic() + within_s
    ask_flower_s = time.monotonic() + ask_flower_every_s
    while True:
        run = view.run(run_id)
        on_poll(run)
        completed = False
        # Flower's answer decides. While the run goes on, Flower is rarely asked, since each call starts a process for
        # seconds.
        if run.run.finished or run.run.error or time.monotonic() > ask_flower_s:
            try:
                completed = flower_completed(run_id)
            except NoAnswerError as error:
                print_line(f"{error}; asking again")
            except PartFailedError:
                on_poll(view.run(run_id))  # the coordinator may know the reason meanwhile
                raise
            ask_flower_s = time.monotonic() + ask_flower_every_s
        if completed:
            run = view.run(run_id)
            on_poll(run)
            check(run)
            return run
        if time.monotonic() > give_up_s:
            raise NotInTimeError(f"the Flower run did not end within {within_s:g} s")
        time.sleep(poll_s)


def require_trained(run: RunSeen) -> None:
    """Raise if no device trained in some round of a completed run.

    Raises:
        PartFailedError: there is such a round.
    """
    lost = [each for each in run.rounds if len(each.failed) == each.devices]
    if lost:
        numbers = ", ".join(str(each.round) for each in lost)
        failed = ", ".join(lost[0].failed)
        raise PartFailedError(f"no device trained in round {numbers}: see the logs of {failed} (agent, SuperNode)")


def require_observed(run: RunSeen) -> None:
    """Raise if some round of a completed run was unplanned, or if no device trained in it.

    If modes are measured in a round, the rest of its trainings may be too short to observe. So only half of the rounds
    must be observed.

    Raises:
        PartFailedError: there is such a round, or too few were observed.
    """
    require_trained(run)
    if unplanned := [each.round for each in run.rounds if each.unplanned]:
        raise PartFailedError(
            f"{rounds_text(unplanned)} unplanned: no budget was kept, since the coordinator did not answer; see its log"
        )
    unseen = [each.round for each in run.rounds if not each.observations]
    if 2 * len(unseen) > len(run.rounds):
        raise PartFailedError(
            f"no device's training was observed in {rounds_text(unseen)}: see the logs of agents and SuperNodes"
        )


def _state(device: view_pb2.DeviceView) -> str:
    word = session_pb2.DeviceState.Name(device.state).removeprefix("DEVICE_STATE_").lower()
    return f"{device.device_id} {word}" + (f" ({device.detail})" if device.detail else "")


def _energy(run: view_pb2.RunView) -> EnergyAccount | None:
    """What a run has spent of its energy budget; None without one."""
    if not run.HasField("energy_budget_j"):
        return None
    return EnergyAccount(run.energy_budget_j, run.energy_spent_j, run.energy_set_aside_j)


# --- Duties -----------------------------------------------------------------------------------------------------------
# The duties of a simulated fleet, and whether its boards can keep them.

_MODES = 400
"""How many of a board's modes are tried; the fastest one is among them."""


def duties_named(texts: Sequence[str]) -> list[Duty]:
    """Parse the values of `--duty`; see `edge_agent.serving.serving_board.simulated_duty`.

    Raises:
        InvalidInputError: a value has another form, names a network without measurements, or has a number out of range.
    """
    duties = []
    for text in texts:
        try:
            duties.append(simulated_duty(text))
        except InvalidInputError as error:
            raise InvalidInputError(f"--duty: {error}") from None
    return duties


def require_kept(devices: Sequence[FleetDevice], boards: Mapping[str, VirtualBoard]) -> None:
    """Check that each board can keep its duty, by its true values, without regard to training.

    Args:
        devices: the fleet.
        boards: each device's board, by device id.

    Raises:
        InvalidInputError: a board replays measurements, or has no mode that keeps its duty; the text gives a remedy.
    """
    for device in devices:
        if device.duty is None:
            continue
        board = boards[device.device_id]
        if not isinstance(board, SimulatedDevice):
            raise InvalidInputError(
                f"{device.device_id}: a replayed board has no inference measurements: leave out --duty or --device-csv"
            )
        try:
            _require_kept(board, simulated_duty(device.duty))
        except InvalidInputError as error:
            raise InvalidInputError(f"--duty {device.duty}: {device.device_id}: {error}") from None


def _require_kept(board: SimulatedDevice, duty: Duty) -> None:
    """Check one board; see `require_kept`. The errors are those of `wattfleet.core.duties.keep_duty`."""
    assert isinstance(duty.arrivals, ConstantArrivals), "simulated requests have a constant rate"
    highest = board.modes[[int(np.lexsort(board.modes.T)[-1])]]
    modes = np.unique(np.concatenate([board.modes[:: max(1, len(board.modes) // _MODES)], highest]), axis=0)
    batches = batch_sizes(LARGEST_BATCH)
    values = [board.truth(modes, served(duty.workload, batch)) for batch in batches]
    inference = Profile(
        np.tile(modes, (len(batches), 1)),
        np.concatenate([batch_ms for batch_ms, _ in values]),
        np.concatenate([power_mw for _, power_mw in values]),
        np.repeat(batches, len(modes)),
        Task.INFERENCE,
    )
    training = Profile(modes, *board.truth(modes))
    demand = Demand(duty.arrivals.per_s, duty.latency_ms, duty.quantile)
    keep_duty(KnownModes.only_measured(training), KnownModes.only_measured(inference), demand, SWITCH_MS)


# --- Run --------------------------------------------------------------------------------------------------------------

_READY_WITHIN_S = 180.0
_RUN_WITHIN_S = 60.0
_ROUND_WITHIN_S = 180.0
_POLL_S = 0.5
_NO_RUN = RunSeen()


@dataclass(frozen=True)
class SimulationProgress:
    """The progress of a simulation.

    Attributes:
        phase: the current step, as text.
        run_number: the current run, from 1; 0 before the first.
        devices: all devices, as reported by the coordinator.
        rounds: the rounds of the current run that are planned so far.
        workload: the workload of the current run, as it states it; None before that.
        started_unix_s: when the current run began; 0 before that.
        initial_metrics: metrics before the run's first round.
        elapsed_s: seconds since the start.
        rounds_in_run: how many rounds each run has.
        left_s: estimated seconds until the last round has ended; None if it is unknown.
        energy: what the run has spent of its energy budget; None without one.
        run_error: why the run ended early, as its app has reported; empty if it has not, or as its energy was used up.
    """

    phase: str
    run_number: int
    devices: Sequence[view_pb2.DeviceView]
    rounds: Sequence[view_pb2.RoundView]
    workload: Workload | None
    started_unix_s: float
    initial_metrics: dict[str, float]
    elapsed_s: float
    rounds_in_run: int = 0
    left_s: float | None = None
    energy: EnergyAccount | None = None
    run_error: str = ""


class Display(Protocol):
    """Displays the progress of a run."""

    def announce(self, text: str) -> None:
        """Print a permanent line."""
        ...

    def show(self, snapshot: SimulationProgress) -> None:
        """Display a snapshot."""
        ...


def open_fleet(devices: Sequence[FleetDevice], site_budget_w: float) -> dict[str, VirtualBoard]:
    """Open the boards that the agents will open, to read their true time and power.

    Raises:
        InvalidInputError: a board cannot be simulated or replayed.
        InfeasibleBudgetError: the site's budget is too small for one training device.
    """
    if not 0 < site_budget_w < float("inf"):
        raise InvalidInputError(f"--site-budget-w must be finite and above 0, not {site_budget_w:g}")
    boards = {device.device_id: open_virtual_board(device.spec, device.seed) for device in devices}
    idle_w, extra_w = 0.0, []
    for device in devices:
        # Measure on a second board of the same unit, since measuring advances a board's clock and noise.
        measured = open_virtual_board(device.spec, device.seed)
        parked_w = Profiler(measured).measure_idle(parked_mode(measured)) / 1e3
        idle_w += parked_w
        extra_w.append(float(measured.truth(measured.modes)[1].min()) / 1e3 - parked_w)
    least_w = idle_w + min(extra_w)
    if site_budget_w < least_w:
        raise InfeasibleBudgetError(
            f"{site_budget_w:g} W are too few for one training device in addition to {idle_w:.1f} W of idle power:"
            f" pass at least {math.ceil(least_w)} W as --site-budget-w"
        )
    return boards


class Simulation:
    """Starts the processes of a fleet, and waits until its runs have ended."""

    def __init__(
        self, settings: SimulationSettings, logs: Path, scratch: Path, display: Display, baselines: BaselineTraining
    ) -> None:
        """Prepare a simulation.

        Args:
            settings: what to simulate.
            logs: a directory for the parts' logs.
            scratch: a directory with a short path, for keys, sockets and state.
            display: displays every step.
            baselines: trains the baselines of the runs meanwhile.
        """
        self._settings = settings
        self._logs = logs
        self._scratch = scratch
        self._display = display
        self._baselines = baselines
        self._started_s = time.monotonic()
        self._run_number = 0
        self._run_count = sum(map(len, settings.apps))
        self._forecast = Forecast(
            len(settings.devices), settings.rounds, [len(together) for together in settings.apps], self._started_s
        )
        self._data_file = scratch / "digits.pt"

    def complete(self, boards: Mapping[str, str]) -> list[SimulationProgress]:
        """Run to the end. All processes are ended, even after an error.

        Args:
            boards: each device's kind of board, by device id.

        Returns:
            The last snapshot of each run.

        Raises:
            PartFailedError: a part has failed or taken too long; the text names it.
        """
        self._show_stage(Stage.COORDINATOR, None)
        save_digits(self._data_file)
        with Parts(self._logs) as parts:
            fleet = FleetParts(parts, self._settings, self._scratch)
            flower = FlowerDeployment(parts, self._scratch / "flower", fleet.nodes(), identity=fleet.flower_identity)
            coordinator = fleet.start_coordinator(flower.address)
            self._display.announce(
                f"operate the fleet meanwhile: wattfleet coordinator devices --identity {coordinator.folder}"
            )
            with CoordinatorView(coordinator) as view:
                try:
                    fleet.start_agents(coordinator, boards)
                    self._show_stage(Stage.FLOWER, view)
                    flower.start()
                    self._await_ready(parts, view)
                    runs = [
                        last
                        for group, together in enumerate(self._settings.apps)
                        for last in self._complete_runs(parts, view, flower, coordinator.address, group, together)
                    ]
                except (
                    CoordinatorUnreachableError,
                    EnrolmentRefusedError,
                    RequestFailedError,
                    InvalidRequestError,
                ) as error:
                    parts.check()
                    raise PartFailedError(f"the coordinator failed: {error} (logs: {self._logs})") from None
        while not self._baselines.are_done:
            self._show(f"training the baselines: {self._baselines.step}", None)
            time.sleep(_POLL_S)
        return runs

    def _await_ready(self, parts: Parts, view: CoordinatorView) -> None:
        def poll(_: Sequence[view_pb2.DeviceView]) -> None:
            self._show_stage(Stage.IDLE_POWER, view)
            parts.check()

        try:
            await_ready(view, len(self._settings.devices), _READY_WITHIN_S, _POLL_S, poll)
        except NotInTimeError as error:
            raise PartFailedError(f"{error} (logs: {self._logs})") from None

    def _complete_runs(
        self, parts: Parts, view: CoordinatorView, flower: FlowerDeployment, address: str, group: int, apps: Apps
    ) -> list[SimulationProgress]:
        """Run a group of apps at the same time, and return the last snapshot of each."""
        what = " and ".join(
            f"{app.network} network, minibatches of {' or '.join(map(str, app.batch_sizes))}" for app in apps
        )
        numbers = range(self._run_number + 1, self._run_number + len(apps) + 1)
        phase = f"run {numbers[0]}" if len(apps) == 1 else f"runs {numbers[0]} to {numbers[-1]}"
        self._forecast.begin_group(group, time.monotonic())
        self._show(f"starting {phase} of {self._run_count}: {what}", None)
        run_ids = [self._submit(flower, address, app) for app in apps]
        last = []
        for number, run_id, app in zip(numbers, run_ids, apps, strict=True):
            self._run_number = number
            last.append(self._await_rounds(parts, view, flower, run_id, run_ids, app))
        return last

    def _submit(self, flower: FlowerDeployment, address: str, app: SimulatedApp) -> str:
        settings = self._settings
        return flower.submit(
            APP_DIRECTORY,
            {
                "coordinator": address,
                "data-file": str(self._data_file),
                "devices": len(settings.devices),
                "rounds": settings.rounds,
                "local-epochs": app.local_epochs[0],
                "epoch-choice": ",".join(map(str, app.local_epochs)) if len(app.local_epochs) > 1 else "",
                "own-epochs": settings.own_epochs,
                "seed": settings.seed,
                "patience-s": settings.patience_s,
                "energy-budget": "" if settings.energy_budget_j is None else f"{settings.energy_budget_j} J",
                "network": app.network,
                "batch-size": app.batch_size,
                "batches": ",".join(map(str, app.batch_sizes)) if app.further_batches else "",
            },
        )

    def _await_rounds(
        self,
        parts: Parts,
        view: CoordinatorView,
        flower: FlowerDeployment,
        run_id: str,
        together: Sequence[str],
        app: SimulatedApp,
    ) -> SimulationProgress:
        """Wait until a run has completed, or until it or one of the runs that train `together` fails."""

        def poll(seen: RunSeen) -> None:
            shown = self._show(f"training in run {self._run_number} of {self._run_count}", view, seen)
            if shown.workload is not None:
                self._baselines.begin(self._run_number, app, shown.workload)
            for error in view.errors(together):
                raise PartFailedError(f"the Flower run failed: {error} (log: {self._logs / 'superlink.log'})")
            parts.check()

        # The runs share the boards.
        within_s = len(together) * (_RUN_WITHIN_S + self._settings.rounds * _ROUND_WITHIN_S)
        try:
            last = await_run(view, run_id, flower.completed, within_s, _POLL_S, poll, check=require_observed)
        except NotInTimeError as error:
            raise PartFailedError(f"{error} (logs: {self._logs})") from None
        return self._show(f"run {self._run_number} is done", view, last)

    def _show_stage(self, stage: Stage, view: CoordinatorView | None) -> None:
        """Show a stage of the start with its usual time."""
        self._forecast.begin(stage, time.monotonic())
        self._show(f"{stage.text}, usually {stage.usual_s(len(self._settings.devices)):.0f} s", view)

    def _show(self, phase: str, view: CoordinatorView | None, seen: RunSeen = _NO_RUN) -> SimulationProgress:
        stated = seen.run.workload
        devices = view.devices(stated.name) if view else []
        now_s = time.monotonic()
        elapsed_s = now_s - self._started_s
        done = sum(each.HasField("wall_s") for each in seen.rounds)
        self._forecast.note_rounds([each.plan.duration_s for each in seen.rounds], done, now_s)
        snapshot = SimulationProgress(
            phase,
            self._run_number,
            devices,
            seen.rounds,
            workload_from_message(stated) if stated.name else None,
            seen.run.started_unix_s,
            dict(seen.run.initial_metrics),
            elapsed_s,
            self._settings.rounds,
            self._forecast.left_s(now_s),
            _energy(seen.run),
            seen.run.error,
        )
        self._display.show(snapshot)
        return snapshot
