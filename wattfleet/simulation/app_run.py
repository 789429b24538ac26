"""One run of a user's Flower app over a large simulated fleet, in a process of its own.

The ServerApp runs in this process, its clients on Flower's simulation engine, and time and watts are those of the
simulated boards (`wattfleet.simulation.large_fleet`). Every reply is written to a journal without its arrays, and every
round with the strategy's result, so that an interrupted run goes on after its last whole round: the rounds before are
planned again from the journal, without any training.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from coordinator.references.published import open_reference
from wattfleet.common.atomic_files import replace_file
from wattfleet.common.clock import Clock
from wattfleet.core.errors import InfeasibleBudgetError, WattfleetError
from wattfleet.core.planning.policies import policy_named
from wattfleet.flower.server.nodes import identify_request
from wattfleet.flower.server.power_aware import SIMULATION
from wattfleet.simulation.baselines import (
    PLAIN_FLOWER,
    PRESETS,
    BestPresets,
    PlainFlower,
    TrueBoard,
    Way,
    described_stretches,
)
from wattfleet.simulation.client_process import SIMULATED_KEY, ClientReport, ClientTask, IsolatedApp, seed_all
from wattfleet.simulation.flower_task import be_task
from wattfleet.simulation.large_fleet import (
    BaselinePlanner,
    CoordinatorPlanner,
    LargeFleetDevice,
    PlannedTraining,
    Planner,
    open_devices,
)
from wattfleet.simulation.own_app import OwnApp
from wattfleet.simulation.ray_clients import Clients, RayClients
from wattfleet_proto.assignment import (
    DEVICE_ID_KEY,
    IDENTIFY_KEY,
    MEASURED_KEY,
    PAIRING_PROBLEM_KEY,
    RECORD_KEY,
    RoundAssignment,
)

# Not `-m`, since what this module pickles would then belong to a module `__main__`.
PROGRAM = "from wattfleet.simulation.app_run import main; main()"
TWO_LINES = "the two lines of docs/your-app.md"
_RUN_ID, _SUPERLINK = 4711, 1
_PROGRESS_EVERY_S = 2.0


class AppError(WattfleetError):
    """The app cannot be simulated; the text says why, and what to do."""


# --- Settings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AppSimulation:
    """What `wattfleet simulate --app DIR` simulates.

    Attributes:
        app: the app.
        devices: number of devices by kind of board.
        rounds: federated rounds.
        site_budget_w: watts for the whole fleet.
        modes: the most modes that each device measures.
        policy: name of the client-selection policy.
        clients: devices in a round, for the policies that take a number.
        deadline_s: seconds that a round's training may take, for the policy deadline.
        seed: seed of boards, noise and training.
        reference: name or folder of the reference predictor.
        metric: name of the metric that is compared; None for the first one that is called an accuracy.
        ray_address: address of a Ray cluster; None for this machine alone.
        gpus_per_client: GPUs, or the share of one, that each client gets.
    """

    app: OwnApp
    devices: Mapping[str, int]
    rounds: int
    site_budget_w: float
    modes: int
    policy: str
    clients: int | None
    deadline_s: float | None
    seed: int
    reference: str
    metric: str | None
    ray_address: str | None
    gpus_per_client: float

    def of_way(self, way: str, folder: Path) -> RunSettings:
        """Return the settings of one process."""
        return RunSettings(**vars(self), way=way, folder=folder)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return content


@dataclass(frozen=True)
class RunSettings(AppSimulation):
    """What one process runs: a simulation in one way of choosing devices and modes.

    Attributes:
        way: the name of the way.
        folder: the folder for the journal and the results.
    """

    way: str
    folder: Path

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> RunSettings:
        """Return what `to_json` has described."""
        app = {**content["app"], "folder": Path(content["app"]["folder"])}
        return cls(**{**content, "app": OwnApp(**app), "folder": Path(content["folder"])})


def accuracy_in(metrics: Mapping[str, float], named: str | None) -> float | None:
    """Return the metric that is compared; None if there is none.

    Args:
        metrics: what the strategy reported after a round.
        named: its name; None for `accuracy`, or else the first one with `acc` in its name.
    """
    if named is not None:
        return metrics.get(named)
    if "accuracy" in metrics:
        return metrics["accuracy"]
    found = sorted((name for name in metrics if "acc" in name.lower()), key=lambda name: ("clientapp" in name, name))
    return metrics[found[0]] if found else None


# --- Journal ----------------------------------------------------------------------------------------------------------

_REPLY, _ROUND = "reply", "round"


@dataclass(frozen=True)
class Handled:
    """A message that was handled.

    Attributes:
        key: node, type and group of the message, to recognise it.
        content: the reply's records, without arrays in the reply to a training; None for an error.
        arrays: the names of the arrays that are left out.
        error: code and reason of an error.
        report: what the client has done.
        state: the node's state, if it has any.
    """

    key: tuple[int, str, str]
    content: RecordDict | None
    arrays: tuple[str, ...]
    error: tuple[int, str] | None
    report: ClientReport
    state: RecordDict | None

    def reply(self, message: Message) -> Message:
        """Return the reply, with the arrays of the message where the app's own are left out."""
        if self.error is not None:
            return Message(Error(*self.error), reply_to=message)
        assert self.content is not None, "it is no error"
        content = RecordDict(dict(self.content))
        sent = list(message.content.array_records.values())
        for name in self.arrays:
            content[name] = sent[0] if sent else ArrayRecord()
        return Message(content, reply_to=message)


class Journal:
    """The replies and the results of a run, in a file.

    Args:
        path: the file; one that exists is read up to its last whole round.

    Attributes:
        rounds: the stored rounds, by number.
    """

    def __init__(self, path: Path) -> None:
        self.rounds: dict[int, bytes] = {}
        self._replies: list[Handled] = []
        kept = 0
        if path.exists():
            with path.open("rb") as file:
                replies: list[Handled] = []
                for kind, content in _frames(file):
                    if kind == _REPLY:
                        replies.append(content)
                    else:
                        self.rounds[content[0]] = content[1]
                        self._replies, kept = list(replies), file.tell()
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(kept)
        self._file.seek(kept)

    def known(self, number: int, key: tuple[int, str, str]) -> Handled | None:
        """Return what is stored of a message; None for a new one.

        Args:
            number: its number, from 0.
            key: node, type and group of the message.

        Raises:
            AppError: another message was sent then.
        """
        if number >= len(self._replies):
            return None
        found = self._replies[number]
        if found.key != key:
            raise AppError(
                "the app does not repeat what it did before the interruption: its ServerApp sends other messages with"
                " the same random numbers. Remove the folder 'resume' in --out to begin anew"
            )
        return found

    def add(self, handled: Iterable[Handled]) -> None:
        """Write replies."""
        for each in handled:
            pickle.dump((_REPLY, each), self._file)
        self._file.flush()

    def add_round(self, number: int, content: bytes) -> None:
        """Write a round's result."""
        pickle.dump((_ROUND, (number, content)), self._file)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _frames(file: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a journal, up to an incomplete end."""
    while True:
        try:
            yield pickle.load(file)
        except (EOFError, pickle.UnpicklingError):
            return


# --- Simulation -------------------------------------------------------------------------------------------------------


class RunOfSimulation:
    """What `PowerAware` finds in the place of the coordinator and of the time."""

    def __init__(self, planner: Planner, journal: Journal) -> None:
        """Use a planner, and keep the results of rounds in a journal."""
        self.planner: Any = planner
        self.clock: Clock = planner.clock
        self._journal = journal

    def aggregated(self, number: int, strategy: Strategy, aggregate: Callable[[], Any]) -> Any:
        """See `wattfleet.flower.server.power_aware.Simulation`."""
        if (stored := self._journal.rounds.get(number)) is not None:
            arrays, metrics, attributes, state = pickle.loads(stored)
            vars(strategy).update(attributes)
            _restore_random(state)
            return arrays, metrics
        arrays, metrics = aggregate()
        content = arrays, metrics, _attributes(strategy), _random_state()
        self._journal.add_round(number, pickle.dumps(content))
        return arrays, metrics


def _attributes(strategy: Strategy) -> dict[str, Any]:
    """Return what a strategy remembers from round to round, as far as it can be stored."""
    found = {}
    for name, value in vars(strategy).items():
        if callable(value):
            continue
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001, S112  # any object of an app's strategy
            continue
        found[name] = value
    return found


def _random_state() -> tuple[Any, Any, Any]:
    torch = sys.modules.get("torch")
    return random.getstate(), np.random.get_state(), None if torch is None else torch.get_rng_state().numpy()


def _restore_random(state: tuple[Any, Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    if state[2] is not None and "torch" in sys.modules:
        torch: Any = sys.modules["torch"]
        torch.set_rng_state(torch.from_numpy(state[2]))


# --- Grid -------------------------------------------------------------------------------------------------------------


class FleetGrid(Grid):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Flower's grid over a large simulated fleet. What is sent is handled at once, and answered in the boards' time."""

    def __init__(
        self,
        settings: RunSettings,
        planner: Planner,
        clients: Clients,
        journal: Journal,
        progress: Callable[..., None] = lambda **_: None,
    ) -> None:
        """Send to the devices of a planner.

        Args:
            settings: what is run.
            planner: the fleet.
            clients: runs the ClientApps.
            journal: what was done before an interruption.
            progress: told how many messages are handled.
        """
        self._settings, self._planner, self._clients, self._journal = settings, planner, clients, journal
        self._progress = progress
        self._devices = {device.node_id: device for device in planner.devices.values()}
        self._states: dict[int, RecordDict] = {}
        self._replies: dict[str, tuple[float, Message]] = {}
        self._open: dict[tuple[str, str], tuple[str, Message]] = {}
        self._sent = 0
        self._has_trained = False
        if isinstance(planner, CoordinatorPlanner):
            planner.ends_beside = self._ended_beside

    @property
    def run(self) -> Any:
        """The run."""
        settings = self._settings
        return SimpleNamespace(run_id=_RUN_ID, fab_id=settings.app.app_id, override_config=settings.app.changed_config)

    def set_run(self, run: Any) -> None:
        """Do nothing, since the run is fixed."""

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Refuse, since it is deprecated in Flower."""
        raise NotImplementedError("create messages with flwr.app.Message")

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes, which are always connected."""
        return list(self._devices)

    def get_nodes(self) -> Iterable[Any]:
        """Return all nodes."""
        return [SimpleNamespace(node_id=node_id) for node_id in self._devices]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Handle messages now; their replies arrive when the boards have done their work."""
        sent = list(messages)
        keys = [self._numbered(message) for message in sent]
        first = self._sent - len(sent)
        trainings = [self._training_of(message) for message in sent]
        found: list[Handled | None] = [self._journal.known(first + k, key) for k, key in enumerate(keys)]
        wanted = [k for k, each in enumerate(found) if each is None]
        tasks = [k for k in wanted if self._needs_app(sent[k], trainings[k])]
        answers: dict[int, Message] = {}
        for k in set(wanted) - set(tasks):
            answers[k] = Message(_known_answer(sent[k], self._device_of(sent[k])), reply_to=sent[k])
            found[k] = Handled(keys[k], answers[k].content, (), None, ClientReport(), None)
        told_s = time.monotonic()
        work = (self._task(sent[k], trainings[k]) for k in tasks)
        for count, (place, reply, context) in enumerate(self._clients.handle(work), 1):  # type: ignore[arg-type]
            k = tasks[place]
            answers[k] = reply
            found[k] = self._handled(keys[k], sent[k], reply, context)
            if time.monotonic() - told_s > _PROGRESS_EVERY_S:
                told_s = time.monotonic()
                self._progress(handled=count, of=len(tasks))
        done = [each for each in found if each is not None]
        self._require_working(trainings, done)
        self._journal.add(found[k] for k in wanted)  # type: ignore[misc]
        for k, message in enumerate(sent):
            each = done[k]
            if each.state is not None:
                self._states[message.metadata.dst_node_id] = each.state
            reply = answers[k] if k in answers else each.reply(message)
            reply.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
            self._arrive(message, trainings[k], each, reply)
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived, each once."""
        now_s = self._planner.clock.now_s()
        arrived = [each for each in message_ids if each in self._replies and self._replies[each][0] <= now_s]
        return [self._replies.pop(each)[1] for each in arrived]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages, and wait for all replies."""
        ids = list(self.push_messages(messages))
        return [self._replies.pop(each)[1] for each in ids]

    def _numbered(self, message: Message) -> tuple[int, str, str]:
        """Give a message an id, and return what it is recognised by."""
        self._sent += 1
        metadata = message.metadata
        metadata.__dict__["_message_id"] = f"message-{self._sent}"
        return metadata.dst_node_id, metadata.message_type, metadata.group_id or ""

    def _device_of(self, message: Message) -> LargeFleetDevice:
        return self._devices[message.metadata.dst_node_id]

    def _training_of(self, message: Message) -> PlannedTraining | None:
        """Return the planned training that a message asks for; None for other messages.

        Raises:
            AppError: it is a training without a plan.
        """
        record = message.content.get(RECORD_KEY, {})
        if IDENTIFY_KEY in record:
            return None
        if RECORD_KEY in message.content:
            assignment = RoundAssignment.from_record(record)
            return self._planner.planned[assignment.plan_id, assignment.device_id]
        if message.metadata.message_type.startswith("train"):
            raise AppError(
                "the ServerApp sends trainings without a plan: wrap its strategy in PowerAware, as in"
                f" {TWO_LINES}, so that rounds can be planned"
            )
        return None

    def _needs_app(self, message: Message, training: PlannedTraining | None) -> bool:
        """Whether the app has to run: not for what is known of it already."""
        if training is None:
            return IDENTIFY_KEY not in message.content.get(RECORD_KEY, {})
        return training.measuring is None or training.device.report is None

    def _task(self, message: Message, training: PlannedTraining | None) -> tuple[Message, Context]:
        """Return what a client gets: a message of its own, and its context."""
        device, most = self._device_of(message), None
        if training is not None:
            deadline_s = RoundAssignment.from_record(message.content[RECORD_KEY]).deadline_s
            most = self._planner.most_minibatches(training, deadline_s)
        measures = training is not None and training.measuring is not None
        task = ClientTask(self._settings.seed, measures, most)
        # The records of a message are shared by all nodes, but not the one that tells the client about itself.
        content = RecordDict({**message.content, SIMULATED_KEY: task.to_record()})
        own = Message(content, dst_node_id=device.node_id, message_type=message.metadata.message_type)
        own.metadata.__dict__.update(message.metadata.__dict__)
        return own, context_of(self._settings, device, len(self._devices), self._states.get(device.node_id))

    def _handled(self, key: tuple[int, str, str], message: Message, reply: Message, context: Context) -> Handled:
        """Return what is stored of a reply, and take the client's report out of it."""
        state = context.state if len(context.state) else None
        if reply.has_error():
            return Handled(key, None, (), (reply.error.code, reply.error.reason), ClientReport(), state)
        report = ClientReport(**reply.content.pop(SIMULATED_KEY, {}))
        content = RecordDict(dict(reply.content))
        arrays: tuple[str, ...] = ()
        if message.metadata.message_type.startswith("train"):
            arrays = tuple(content.array_records)
            for name in arrays:
                del content[name]
        return Handled(key, content, arrays, None, report, state)

    def _require_working(self, trainings: Sequence[PlannedTraining | None], done: Sequence[Handled]) -> None:
        """Check that an app can train at all, before hours are spent.

        Raises:
            AppError: most of the first trainings have failed.
        """
        trained = [(training, each) for training, each in zip(trainings, done, strict=True) if training is not None]
        if self._has_trained or not trained:
            return
        failed = [(training, each.error) for training, each in trained if each.error is not None]
        if 2 * len(failed) > len(trained):
            training, error = failed[0]
            assert error is not None
            raise AppError(
                f"the app fails on {len(failed)} of {len(trained)} devices, the first of them with partition"
                f" {training.device.partition} of {len(self._devices)}: {error[1]}. Each device gets its own"
                " partition-id and num-partitions, which the app's data has to have"
            )
        self._has_trained = True

    def _arrive(self, message: Message, training: PlannedTraining | None, done: Handled, reply: Message) -> None:
        """Let a board do what a message asked for, and deliver the reply when it has."""
        message_id, now_s = message.metadata.message_id, self._planner.clock.now_s()
        if training is None:
            self._replies[message_id] = now_s, reply
            return
        measured = done.error is None and MEASURED_KEY in reply.content.get(RECORD_KEY, {})
        if training.measuring is not None and measured:
            at_s = self._planner.measure(training, done.report if done.report.is_power_aware else None)
            if at_s is None:  # when its round ends
                self._open[training.plan_id, training.device.device_id] = message_id, reply
                return
        else:
            examples = None if done.content is None else _examples_in(done.content)
            at_s = self._planner.train(training, done.report, examples, done.error is not None)
        self._replies[message_id] = at_s, reply

    def _ended_beside(self, training: PlannedTraining) -> None:
        """A training to measure has ended with its round."""
        message_id, reply = self._open.pop((training.plan_id, training.device.device_id))
        self._replies[message_id] = self._planner.clock.now_s(), reply


def context_of(settings: RunSettings, device: LargeFleetDevice, count: int, state: RecordDict | None = None) -> Context:
    """Return the context of a device's client."""
    node_config = {"partition-id": device.partition, "num-partitions": count, DEVICE_ID_KEY: device.device_id}
    own = RecordDict() if state is None else state
    return Context(_RUN_ID, device.node_id, node_config, own, dict(settings.app.config))


def _known_answer(message: Message, device: LargeFleetDevice) -> RecordDict:
    """Return the mod's answer where the app itself is not needed."""
    if IDENTIFY_KEY in message.content.get(RECORD_KEY, {}):
        return RecordDict({RECORD_KEY: ConfigRecord({DEVICE_ID_KEY: device.device_id, PAIRING_PROBLEM_KEY: ""})})
    return RecordDict({RECORD_KEY: ConfigRecord({MEASURED_KEY: True})})


def _examples_in(content: RecordDict) -> float | None:
    for record in content.metric_records.values():
        if isinstance(value := record.get("num-examples"), (int, float)):
            return float(value)
    return None


# --- One run ----------------------------------------------------------------------------------------------------------


def require_mod(settings: RunSettings, clients: Clients, device: LargeFleetDevice, count: int) -> None:
    """Check that the ClientApp answers, and that it has the mod.

    Raises:
        AppError: it does not.
    """
    message = identify_request(device.node_id)
    message.content[SIMULATED_KEY] = ClientTask(settings.seed).to_record()
    [(_, reply, _)] = clients.handle([(message, context_of(settings, device, count))])
    if not reply.has_error() and DEVICE_ID_KEY in reply.content.get(RECORD_KEY, {}):
        return
    reason = reply.error.reason if reply.has_error() else "it does not answer for its device"
    if reason.startswith(("ModuleNotFoundError", "ImportError", "SyntaxError", "AttributeError")):
        raise AppError(f"the ClientApp {settings.app.clientapp} cannot be imported: {reason}")
    raise AppError(
        f"the ClientApp {settings.app.clientapp} has no power_mode_mod ({reason}): add {TWO_LINES}, as in"
        " app = ClientApp(mods=[power_mode_mod])"
    )


def planner_of(settings: RunSettings, devices: dict[str, LargeFleetDevice]) -> Planner:
    """Return what chooses devices and modes.

    Raises:
        InvalidInputError: the policy or the reference is not valid.
        InfeasibleBudgetError: the watts are too few.
    """
    if settings.way not in (PRESETS, PLAIN_FLOWER):
        policy = policy_named(
            settings.policy, count=settings.clients, seed=settings.seed, deadline_s=settings.deadline_s
        )
        reference = open_reference(settings.reference).artefact
        return CoordinatorPlanner(devices, settings.seed, policy, settings.site_budget_w, reference, settings.modes)

    def way_of(boards: Mapping[str, TrueBoard]) -> Way:
        if settings.way == PRESETS:
            return BestPresets(boards, settings.site_budget_w, settings.seed, 1.0, settings.clients)
        return PlainFlower(boards, settings.site_budget_w, settings.seed)

    return BaselinePlanner(devices, settings.seed, way_of, settings.site_budget_w)


def run(settings: RunSettings, clients_of: Callable[[], Any], progress: Callable[..., None]) -> dict[str, Any]:
    """Run the app, and return what the report states of this way.

    Args:
        settings: what to run.
        clients_of: starts what runs the clients.
        progress: told what is done.

    Raises:
        WattfleetError: the app cannot be simulated.
    """
    folder = settings.folder
    be_task(_RUN_ID, _SUPERLINK)
    progress(stage="opening the boards")
    devices = open_devices(settings.devices, settings.seed)
    facts = folder / "facts.json"
    if settings.way in (PRESETS, PLAIN_FLOWER) and facts.exists():
        for device_id, known in json.loads(facts.read_text()).items():
            devices[device_id].report = ClientReport(**known)
        _complete_reports(devices.values())
    planner = planner_of(settings, devices)
    progress(stage="starting Ray and the app's clients")
    clients = clients_of()
    try:
        require_mod(settings, clients, next(iter(devices.values())), len(devices))
        journal = Journal(folder / f"{slug(settings.way)}.journal")
        reported = _Reported(settings, planner, progress, max(journal.rounds, default=0))
        grid = FleetGrid(settings, planner, clients, journal, progress)
        token = SIMULATION.set(RunOfSimulation(planner, journal))
        try:
            server_app = _server_app(settings)  # an app may make its strategy when it is imported
            seed_all(settings.seed, "server")
            context = Context(_RUN_ID, _SUPERLINK, {}, RecordDict(), dict(settings.app.config))
            server_app(grid, context)
        finally:
            SIMULATION.reset(token)
            journal.close()
        reported.flush()
    finally:
        clients.close()
    if not planner.rounds:
        raise AppError(
            f"the ServerApp {settings.app.serverapp} planned no round: wrap its strategy in PowerAware, as in"
            f" {TWO_LINES}"
        )
    known = {each: asdict(device.report) for each, device in devices.items() if device.report is not None}
    if settings.way not in (PRESETS, PLAIN_FLOWER):
        replace_file(facts, json.dumps(known).encode())
    return _described(settings, planner)


def _complete_reports(devices: Iterable[LargeFleetDevice]) -> None:
    """Give each device that has reported nothing the report of its kind that has the middle length."""
    known: dict[str, list[ClientReport]] = {}
    unknown = []
    for device in devices:
        if device.report is None:
            unknown.append(device)
        else:
            known.setdefault(device.kind, []).append(device.report)
    middle = {kind: sorted(all_, key=lambda each: each.length or 0)[len(all_) // 2] for kind, all_ in known.items()}
    for device in unknown:
        device.report = middle.get(device.kind)


def _server_app(settings: RunSettings) -> Callable[..., Any]:
    """Import the ServerApp.

    Raises:
        AppError: it cannot be imported.
    """
    module, _, name = settings.app.serverapp.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        traceback.print_exc()
        raise AppError(
            f"the ServerApp {settings.app.serverapp} cannot be imported: {type(error).__name__}: {error}"
        ) from None
    app: Callable[..., Any] = found
    return app


class _Reported:
    """Reports each round once its accuracy is known, or when the next one begins."""

    def __init__(self, settings: RunSettings, planner: Planner, progress: Callable[..., None], replayed: int) -> None:
        self._settings, self._planner, self._progress, self._replayed = settings, planner, progress, replayed
        self._waiting: int | None = None
        planner.on_round = self._ended
        report = planner._reportmetrics  # noqa: SLF001

        def reporting(request: Any) -> Any:
            answer = report(request)
            if request.round == self._waiting:
                self.flush()
            return answer

        planner._reportmetrics = reporting  # type: ignore[method-assign]  # noqa: SLF001

    def _ended(self, number: int) -> None:
        self.flush()
        self._waiting = number

    def flush(self) -> None:
        """Report the round that waits."""
        if self._waiting is None:
            return
        number, self._waiting = self._waiting, None
        one = self._planner.rounds[-1]
        self._progress(
            round=number,
            devices=len(one["selected"]),
            now_s=self._planner.clock.now_s(),
            accuracy=accuracy_in(self._planner.metrics.get(number, {}), self._settings.metric),
            replayed=number <= self._replayed,
        )


def _described(settings: RunSettings, planner: Planner) -> dict[str, Any]:
    """Return what the report states of a run."""
    accuracy = {
        number: value
        for number, metrics in planner.metrics.items()
        if number and (value := accuracy_in(metrics, settings.metric)) is not None
    }
    initial = accuracy_in(planner.metrics.get(0, {}), settings.metric)
    idle_w = {device_id: device.idle_w for device_id, device in planner.devices.items()}
    chosen = {one["round"]: f"{len(one['selected']):,} devices" for one in planner.rounds}
    worked = [[chosen.get(each.number, f"{len(each.draws):,} devices that measure")] for each in planner.stretches]
    way = described_stretches(settings.way, planner.stretches, worked, accuracy, initial, idle_w)
    rounds = [
        {**one, "accuracy": accuracy.get(one["round"]), "metrics": planner.metrics.get(one["round"], {})}
        for one in planner.rounds
    ]
    kinds: dict[str, dict[str, Any]] = {}
    trained = {device_id for one in planner.rounds for device_id in one["selected"]}
    for device_id, device in planner.devices.items():
        kind = kinds.setdefault(
            device.kind, {"devices": 0, "trained": 0, "modes_measured": 0, "measured_by": 0, "idle_w": 0.0}
        )
        kind["devices"] += 1
        kind["modes_measured"] += len(device.rows)
        kind["measured_by"] += bool(device.rows)
        kind["idle_w"] += device.idle_w / settings.devices[device.kind]
        kind["trained"] += device_id in trained
    batches = sorted(
        {device.report.batch for device in planner.devices.values() if device.report and device.report.batch}
    )
    return {
        "way": way,
        "rounds": rounds,
        "kinds": kinds,
        "workload": planner.workload.name,
        "strategy": planner.strategy,
        "batch_sizes": batches,
        "initial_accuracy": initial,
    }


def slug(way: str) -> str:
    """Return a way's name for a file."""
    return "".join(each if each.isalnum() else "-" for each in way.lower())


def main() -> None:
    """Run what the settings say, and write what is done as lines of JSON. Arguments: the files of both."""
    told = Path(sys.argv[2]).open("a", encoding="utf-8", buffering=1)

    def progress(**values: Any) -> None:
        told.write(json.dumps(values) + "\n")

    settings = RunSettings.from_json(json.loads(Path(sys.argv[1]).read_text()))
    sys.path.insert(0, str(settings.app.folder))
    log = str(settings.folder.parent / "logs" / "clients.log")
    app = IsolatedApp(str(settings.app.folder), settings.app.clientapp, log)
    try:
        found = run(settings, partial(RayClients, app, settings.ray_address, settings.gpus_per_client), progress)
    except InfeasibleBudgetError as error:
        progress(infeasible=str(error))
    except WattfleetError as error:
        progress(error=str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # the boundary of a user's app
        traceback.print_exc()
        progress(error=f"the app failed with {type(error).__name__}: {error}")
    else:
        replace_file(settings.folder / f"{slug(settings.way)}.json", json.dumps(found).encode())
        progress(done=True)
