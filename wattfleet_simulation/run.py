"""One simulated run, from the first process to the last round; every part but the boards is real."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
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
from wattfleet.modes import BatchOptions
from wattfleet.planning import EpochChoice
from wattfleet.planning.policies import policy_named
from wattfleet_io.coordinator_channel import CoordinatorUnreachableError
from wattfleet_proto.v1 import view_pb2
from wattfleet_simulation.coordinator_view import CoordinatorView, RunSeen
from wattfleet_simulation.devices import SimulatedDevice
from wattfleet_simulation.digits_app.task import NETWORKS
from wattfleet_simulation.flower import APP_DIRECTORY, HOST, OFFLINE, FlowerDeployment, Node
from wattfleet_simulation.processes import PartFailedError, Parts, program
from wattfleet_simulation.run_waiter import NotInTimeError, await_ready, await_run, require_observed

_READY_WITHIN_S = 180.0
_RUN_WITHIN_S = 60.0
_ROUND_WITHIN_S = 180.0
_POLL_S = 0.5
_MOST_AT_ONCE = 4  # each run has a ServerApp process of its own, and a ClientApp process for each training
_MODES_BESIDE_DUTY = 12
"""Modes that a board with a duty measures before its first round."""
_NO_RUN = RunSeen()
LOCAL_EPOCHS = 2
"""Passes over its data that each chosen device makes in a round."""
PATIENCE_S = 120.0
"""How long Flower's server waits for the SuperNodes and for a feasible first plan, seconds."""


@dataclass(frozen=True)
class SimulatedApp:
    """What one run trains.

    Attributes:
        network: one of the digits app's networks.
        batch_size: samples in a minibatch.
        further_batches: other minibatch sizes that the plan may choose for a device.
        local_epochs: the numbers of local epochs that the plan may choose; one number if it chooses none.
    """

    network: str
    batch_size: int
    further_batches: tuple[int, ...] = ()
    local_epochs: tuple[int, ...] = (LOCAL_EPOCHS,)

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise InvalidInputError(f"unknown network {self.network!r}: choose one of {', '.join(NETWORKS)}")
        sizes = tuple(sorted(self.batch_sizes))
        if sizes[0] < 1:
            raise InvalidInputError(f"a minibatch must have at least 1 sample, not {sizes[0]}")
        try:
            BatchOptions(sizes, (1.0,) * len(sizes))
            EpochChoice.of(self.local_epochs)
        except InvalidInputError as error:
            raise InvalidInputError(f"--app {self}: {error}") from None

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """All minibatch sizes; the learning rate is that of the first."""
        return self.batch_size, *self.further_batches

    def __str__(self) -> str:
        parts = [self.network, "/".join(map(str, self.batch_sizes))]
        if self.local_epochs != (LOCAL_EPOCHS,):
            parts.append("/".join(map(str, self.local_epochs)))
        return ":".join(parts)


Apps = tuple[SimulatedApp, ...]
"""The apps of runs that train at the same time."""


def apps_named(text: str) -> Apps:
    """Read apps such as `perceptron:32`, or `convolutional:16+perceptron:32` to train at the same time.

    The plan chooses among several minibatch sizes, such as `perceptron:16/32/64`; the learning rate is that of the
    first. It chooses among several numbers of local epochs, such as `perceptron:32:2/4/8`.

    Raises:
        InvalidInputError: there is no such network, a minibatch size or number of epochs is not a whole number above 0,
            or there are more apps than runs can train at the same time.
    """
    found = []
    for each in text.split("+"):
        network, *listed = each.split(":")
        numbers = [numbers.split("/") for numbers in listed]
        if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() for each in numbers for number in each):
            raise InvalidInputError(
                f"--app {text!r}: write network:minibatch size, such as perceptron:32, or perceptron:16/32/64 to let"
                " the plan choose the size; add :2/4/8 to let it choose the local epochs; join apps that train at the"
                " same time by +"
            )
        (batch_size, *further), *epochs = [tuple(map(int, each)) for each in numbers]
        found.append(SimulatedApp(network, batch_size, tuple(further), *epochs))
    if len(found) > _MOST_AT_ONCE:
        raise InvalidInputError(f"--app {text!r}: at most {_MOST_AT_ONCE} apps may train at the same time")
    return tuple(found)


DEFAULT_APPS: Sequence[Apps] = ((SimulatedApp("convolutional", 16),), (SimulatedApp("perceptron", 32),))
"""Two runs that follow each other on the same boards."""


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of a simulation.

    Attributes:
        devices: the fleet.
        apps: what the runs train: the apps of one entry at the same time, the entries one after the other.
        rounds: federated rounds of each run.
        site_budget_w: watts for the whole fleet.
        profile_modes: largest number of modes that each agent measures.
        policy: name of the client-selection policy.
        clients: devices in a round, for the policies that take a number.
        seed: of data split, boards, profiles and training.
        reference: name or directory of the reference predictor.
        metrics_port: of the coordinator's `/metrics`; 0 picks a free port.
        own_epochs: devices of one round may train different numbers of epochs, where the plan chooses them.
        patience_s: how long Flower's server waits for the SuperNodes and for a feasible first plan.
    """

    devices: Sequence[SimulatedDevice]
    apps: Sequence[Apps]
    rounds: int
    site_budget_w: float
    profile_modes: int
    policy: str
    clients: int | None
    seed: int
    reference: str
    metrics_port: int
    own_epochs: bool = False
    patience_s: float = PATIENCE_S

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidInputError(f"--rounds must be at least 1, not {self.rounds}")
        if not 5 <= self.profile_modes:
            raise InvalidInputError(f"--modes must be at least 5, not {self.profile_modes}: a predictor needs as many")
        if self.own_epochs and not any(len(app.local_epochs) > 1 for together in self.apps for app in together):
            raise InvalidInputError(
                "--own-epochs needs an app whose plan chooses epochs, such as --app perceptron:32:2/4/8"
            )
        policy_named(self.policy, count=self.clients, seed=self.seed)


@dataclass(frozen=True)
class Snapshot:
    """The progress of a simulation.

    Attributes:
        phase: the current step, in words.
        run_number: the current run, from 1; 0 before the first.
        devices: all devices, as the coordinator reports them.
        rounds: the rounds of the current run that are planned so far.
        workload: the workload of the current run; empty before the first.
        initial_metrics: metrics before its first round.
        elapsed_s: seconds since the start.
    """

    phase: str
    run_number: int
    devices: Sequence[view_pb2.DeviceView]
    rounds: Sequence[view_pb2.RoundView]
    workload: str
    initial_metrics: dict[str, float]
    elapsed_s: float


class Display(Protocol):
    """Displays the progress of a run."""

    def show(self, snapshot: Snapshot) -> None:
        """Display a snapshot."""
        ...


def open_fleet(devices: Sequence[SimulatedDevice], site_budget_w: float) -> dict[str, VirtualBoard]:
    """Open the same boards as the agents will, to read their true time and power.

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
            f"{site_budget_w:g} W are too few for one training device beside {idle_w:.1f} W of idle power:"
            f" pass at least {math.ceil(least_w)} W as --site-budget-w"
        )
    return boards


class Simulation:
    """Starts the processes of a fleet, and waits for the end of its runs."""

    def __init__(self, settings: SimulationSettings, logs: Path, scratch: Path, display: Display) -> None:
        """Prepare a simulation.

        Args:
            settings: what to simulate.
            logs: a directory for the parts' logs.
            scratch: a directory with a short path, for sockets and state.
            display: shows every step.
        """
        self._settings = settings
        self._logs = logs
        self._scratch = scratch
        self._display = display
        self._started_s = time.monotonic()
        self._run_number = 0

    def state_directory(self, device_id: str) -> Path:
        """The state directory of a device's agent."""
        return self._scratch / "agents" / device_id

    def complete(self) -> list[Snapshot]:
        """Run to the end; all processes are ended, also after an error.

        Returns:
            The last snapshot of each run.

        Raises:
            PartFailedError: a part failed or took too long; the text names it.
        """
        with Parts(self._logs) as parts:
            self._show("starting the coordinator", None)
            address = self._start_coordinator(parts)
            with CoordinatorView(address) as view:
                for device in self._settings.devices:
                    self._start_agent(parts, device, address)
                nodes = [
                    Node(device.device_id, device.partition, self._socket(device.device_id))
                    for device in self._settings.devices
                ]
                flower = FlowerDeployment(parts, self._scratch / "flower", nodes)
                self._show("starting Flower's SuperLink and SuperNodes", view)
                flower.start()
                try:
                    self._await_ready(parts, view)
                    return [
                        last
                        for together in self._settings.apps
                        for last in self._complete_runs(parts, view, flower, address, together)
                    ]
                except (CoordinatorUnreachableError, RequestFailedError, RequestRefusedError) as error:
                    parts.check()
                    raise PartFailedError(f"the coordinator failed: {error} (logs: {self._logs})") from None

    def _start_coordinator(self, parts: Parts) -> str:
        announced = self._scratch / "coordinator.json"
        settings = self._settings
        command = [
            program("wattfleet"),
            *("coordinator", "serve", "--address", f"{HOST}:0"),
            *("--metrics-address", f"{HOST}:{settings.metrics_port}"),
            *("--store", str(self._scratch / "coordinator.db"), "--announce", str(announced)),
            *("--site-budget-w", str(settings.site_budget_w), "--policy", settings.policy),
            *("--seed", str(settings.seed), "--profile-modes", str(settings.profile_modes)),
            *("--reference", settings.reference),
        ]
        if settings.clients is not None:
            command += ["--clients", str(settings.clients)]
        part = parts.start("coordinator", command, OFFLINE)
        give_up_s = time.monotonic() + _READY_WITHIN_S
        while not announced.exists():
            if failure := part.failure():
                raise failure
            if time.monotonic() > give_up_s:
                raise PartFailedError(f"the coordinator did not start within {_READY_WITHIN_S:g} s (log: {part.log})")
            time.sleep(0.1)
        return str(json.loads(announced.read_text())["address"])

    def _socket(self, device_id: str) -> Path:
        return self._scratch / f"{device_id}.sock"

    def _start_agent(self, parts: Parts, device: SimulatedDevice, address: str) -> None:
        parts.start(
            f"agent-{device.device_id}",
            [
                program("wattfleet"),
                *("agent", "run", "--device", device.spec, "--device-id", device.device_id),
                *("--seed", str(device.seed), "--coordinator", address),
                *("--state-dir", str(self.state_directory(device.device_id))),
                *("--socket", str(self._socket(device.device_id))),
                *self._duty_options(device),
            ],
            OFFLINE,
        )

    def _duty_options(self, device: SimulatedDevice) -> list[str]:
        if device.duty is None:
            return []
        # Beside requests, no modes are measured in trainings.
        ahead = min(_MODES_BESIDE_DUTY, self._settings.profile_modes)
        return ["--simulated-duty", device.duty, "--modes-first", str(ahead)]

    def _await_ready(self, parts: Parts, view: CoordinatorView) -> None:
        def poll(_: Sequence[view_pb2.DeviceView]) -> None:
            self._show("measuring idle power", view)
            parts.check()

        try:
            await_ready(view, len(self._settings.devices), _READY_WITHIN_S, _POLL_S, poll)
        except NotInTimeError as error:
            raise PartFailedError(f"{error} (logs: {self._logs})") from None

    def _complete_runs(
        self, parts: Parts, view: CoordinatorView, flower: FlowerDeployment, address: str, apps: Apps
    ) -> list[Snapshot]:
        """Run these apps at the same time; return the last snapshot of each."""
        what = " and ".join(
            f"{app.network} network, minibatches of {' or '.join(map(str, app.batch_sizes))}" for app in apps
        )
        numbers = range(self._run_number + 1, self._run_number + len(apps) + 1)
        phase = f"run {numbers[0]}" if len(apps) == 1 else f"runs {numbers[0]} to {numbers[-1]}"
        self._show(f"starting {phase}: {what}", None)
        run_ids = [self._submit(flower, address, app) for app in apps]
        last = []
        for number, run_id in zip(numbers, run_ids, strict=True):
            self._run_number = number
            last.append(self._await_rounds(parts, view, flower, run_id, run_ids))
        return last

    def _submit(self, flower: FlowerDeployment, address: str, app: SimulatedApp) -> str:
        settings = self._settings
        return flower.submit(
            APP_DIRECTORY,
            {
                "coordinator": address,
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
        self, parts: Parts, view: CoordinatorView, flower: FlowerDeployment, run_id: str, together: Sequence[str]
    ) -> Snapshot:
        """Wait for a run, unless it or one of those that train `together` fails."""

        def poll(seen: RunSeen) -> None:
            self._show(f"training in run {self._run_number}", view, seen)
            for error in view.errors(together):
                raise PartFailedError(f"the Flower run failed: {error} (log: {self._logs / 'superlink.log'})")
            parts.check()

        # They share the boards.
        within_s = len(together) * (_RUN_WITHIN_S + self._settings.rounds * _ROUND_WITHIN_S)
        try:
            last = await_run(view, run_id, flower.completed, within_s, _POLL_S, poll, check=require_observed)
        except NotInTimeError as error:
            raise PartFailedError(f"{error} (logs: {self._logs})") from None
        return self._show(f"run {self._run_number} is done", view, last)

    def _show(self, phase: str, view: CoordinatorView | None, seen: RunSeen = _NO_RUN) -> Snapshot:
        devices = view.devices(seen.run.workload.name) if view else []
        elapsed_s = time.monotonic() - self._started_s
        snapshot = Snapshot(
            phase,
            self._run_number,
            devices,
            seen.rounds,
            seen.run.workload.name,
            dict(seen.run.initial_metrics),
            elapsed_s,
        )
        self._display.show(snapshot)
        return snapshot
