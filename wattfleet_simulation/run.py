"""One simulation, from the first process to the last round. Every part except the boards is real."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from coordinator.cli.client import RequestFailedError, RequestRefusedError
from edge_agent.devices.selection import open_virtual_board
from edge_agent.devices.virtual.virtual_board import VirtualBoard
from edge_agent.profiling.profiler import Profiler
from edge_agent.runtime.readiness import parked_mode
from edge_agent.settings import IDLE_S
from wattfleet.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.modes import Workload
from wattfleet_identity.joining import EnrolmentRefusedError
from wattfleet_io.coordinator_channel import CoordinatorUnreachableError
from wattfleet_proto.convert import workload_from_message
from wattfleet_proto.v1 import view_pb2
from wattfleet_simulation.baselines import BaselineTraining
from wattfleet_simulation.coordinator_view import CoordinatorView, RunSeen
from wattfleet_simulation.devices import SimulatedDevice
from wattfleet_simulation.digits_app.task import save_digits
from wattfleet_simulation.fleet import FleetParts
from wattfleet_simulation.flower import APP_DIRECTORY, FlowerDeployment
from wattfleet_simulation.forecast import Forecast, Stage
from wattfleet_simulation.processes import PartFailedError, Parts
from wattfleet_simulation.run_waiter import NotInTimeError, await_ready, await_run, require_observed
from wattfleet_simulation.settings import Apps, SimulatedApp, SimulationSettings

_READY_WITHIN_S = 180.0
_RUN_WITHIN_S = 60.0
_ROUND_WITHIN_S = 180.0
_POLL_S = 0.5
_NO_RUN = RunSeen()


@dataclass(frozen=True)
class Snapshot:
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


class Display(Protocol):
    """Displays the progress of a run."""

    def announce(self, text: str) -> None:
        """Print a permanent line."""
        ...

    def show(self, snapshot: Snapshot) -> None:
        """Display a snapshot."""
        ...


def open_fleet(devices: Sequence[SimulatedDevice], site_budget_w: float) -> dict[str, VirtualBoard]:
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
        parked_w = Profiler(measured).measure_idle(parked_mode(measured), IDLE_S) / 1e3
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

    def complete(self, boards: Mapping[str, str]) -> list[Snapshot]:
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
                    RequestRefusedError,
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
    ) -> list[Snapshot]:
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
    ) -> Snapshot:
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

    def _show(self, phase: str, view: CoordinatorView | None, seen: RunSeen = _NO_RUN) -> Snapshot:
        stated = seen.run.workload
        devices = view.devices(stated.name) if view else []
        now_s = time.monotonic()
        elapsed_s = now_s - self._started_s
        done = sum(each.HasField("wall_s") for each in seen.rounds)
        self._forecast.note_rounds([each.plan.duration_s for each in seen.rounds], done, now_s)
        snapshot = Snapshot(
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
        )
        self._display.show(snapshot)
        return snapshot
