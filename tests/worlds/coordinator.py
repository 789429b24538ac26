"""The coordinator: the real fleet and leases, with a store, driven in the same way as by its services."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from coordinator.errors import DuplicateSessionError, RunEndedError, UnknownRecordError
from coordinator.services.orders import grant_to_message
from coordinator.settings import SessionSettings
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Lease, Leases
from coordinator.state.records import (
    CountedEnergy,
    DeviceOverrides,
    DeviceRecord,
    GivenUpTraining,
    RoundRecord,
    RunRecord,
    StoredGrants,
    run_of,
)
from tests.worlds.agent import PROFILE_MODES
from tests.worlds.flower import workload_of
from tests.worlds.oracle import Account
from tests.worlds.timeline import CLOSED, RETURN_GRACE_S, TICK_S, Action, Stream
from wattfleet.core.budgets import EnergyAccount, InForce
from wattfleet.core.errors import WattfleetError
from wattfleet.core.modes import ASSUMED_MINIBATCHES_PER_EPOCH, Workload
from wattfleet.core.planning import Allowance
from wattfleet.core.planning.curves import SITE
from wattfleet_proto.convert import (
    front_from_message,
    phase_from_message,
    state_from_message,
    workload_from_message,
    workload_to_message,
)
from wattfleet_proto.v1 import session_pb2

if TYPE_CHECKING:
    from tests.worlds.agent import Device
    from tests.worlds.world import World


# --- Stored -----------------------------------------------------------------------------------------------------------
# The store of a world: its contents, what a starting coordinator loads from it, and how it is written.


Later = Callable[[float, Action], None]
"""Runs an action after some seconds, unless the coordinator has crashed by then."""

_NEWEST = 3


@dataclass
class Stored:
    """The contents of a store.

    Attributes:
        fails_until_s: writes fail before this time.
    """

    devices: dict[str, DeviceRecord] = field(default_factory=dict)
    runs: dict[str, RunRecord] = field(default_factory=dict)
    rounds: dict[str, RoundRecord] = field(default_factory=dict)
    overrides: dict[str, DeviceOverrides] = field(default_factory=dict)
    given_ups: dict[str, GivenUpTraining] = field(default_factory=dict)
    counteds: dict[str, CountedEnergy] = field(default_factory=dict)
    fails_until_s: float = 0.0

    @property
    def grants(self) -> StoredGrants:
        """The stored grants."""
        return StoredGrants(given_up={each.device_id: each for each in self.given_ups.values() if each.plan_id})

    def energy(self) -> dict[str, EnergyAccount]:
        """The accounts of runs with an energy budget, as `coordinator.store.store.energy_of` sums them up."""
        found = {}
        for run in self.runs.values():
            if run.energy_budget_j is None:
                continue
            rounds = [each for each in self.rounds.values() if each.run_id == run.run_id]
            reported = [each for record in rounds for each in record.energies.values()]
            set_aside_j = sum(record.set_aside_j or 0.0 for record in rounds)
            set_aside_j -= sum(each.set_aside_j for each in reported)
            spent_j = run.surveys_j + sum(each.energy_j for each in reported)
            found[run.run_id] = EnergyAccount(run.energy_budget_j, spent_j, max(0.0, set_aside_j))
        return found

    def current(self) -> list[RoundRecord]:
        """The rounds that are loaded at a start, oldest first, chosen as `coordinator.store.store.current` does."""
        in_flight = {each.device_id for each in self.grants.given_up.values() if each.plan_id in self.rounds}
        for record in self.rounds.values():
            if record.wall_s is None and not self.runs[record.run_id].finished:
                in_flight |= record.nodes.keys()
        wanted: list[RoundRecord] = []
        for record in reversed(list(self.rounds.values())):
            if len(wanted) < _NEWEST or not in_flight.isdisjoint(record.nodes):
                wanted.append(record)
            in_flight -= record.nodes.keys()
        return wanted[::-1]


class Repository:
    """One coordinator's access to its store, like `FleetRepository`: records are written in the background.

    Attributes:
        unsaved: the records that a crash would lose now, by kind and key.
    """

    def __init__(self, world: World, fleet: Fleet, stored: Stored, later: Later) -> None:
        self._world, self._fleet, self._stored, self._later = world, fleet, stored, later
        self.unsaved: dict[tuple[str, str], Any] = {}
        self._saving: list[Action] = []
        self._is_writing = False

    def save(self, kind: str, key: str, record: Any, then: Action | None = None) -> None:
        """Save a record in the background; call `then` once it is on disk."""
        assert self._world.coordinator.fleet is self._fleet, "a coordinator that is down saves nothing"
        self.unsaved[kind, key] = record
        self.save_grants(then)

    def save_grants(self, then: Action | None = None) -> None:
        """Save what has to be stored about grants, with all that is unsaved."""
        for each in self._fleet.rounds.grants.unstored.take():
            if isinstance(each, GivenUpTraining):
                self.unsaved["given_up", each.device_id] = each
        if then is not None:
            self._saving.append(then)
        if not self._is_writing:
            self._is_writing = True
            self._later(0.05 * self._world.rng.random(), self._write)

    def save_round(self, plan_id: str, then: Action | None = None) -> None:
        """Save the current state of a round, and what it counts for its supply."""
        for each in self._fleet.stores.of_plan(plan_id):
            self.unsaved["counted", f"{plan_id} {each.holder}"] = each
        self.save("round", plan_id, self._fleet.rounds.records[plan_id], then)

    def is_known(self, plan_id: str) -> bool:
        """Whether a round exists; one that was not loaded at the start is loaded."""
        if plan_id in self._stored.rounds:
            self._fleet.rounds.cache.restore(self._stored.rounds[plan_id])
        return plan_id in self._fleet.rounds.records

    def _write(self) -> None:
        if self._world.timeline.now_s < self._stored.fails_until_s:
            self._later(1.0, self._write)
            return
        self._is_writing = False
        for (kind, key), record in self.unsaved.items():
            getattr(self._stored, f"{kind}s")[key] = record
        self.unsaved.clear()
        done, self._saving = self._saving, []
        for each in done:
            each()


# --- Round planning ---------------------------------------------------------------------------------------------------
# Plans rounds with the real fleet, in the same way as the coordinator's service of the same name.

Reply = Callable[[RoundRecord], None]

MeasuringReply = Callable[[str, list[str]], None]
"""Takes the id that stands in place of a plan's, and the devices that measure."""

_CONFIRM_S, _CONFIRM_POLL_S = 2.0, 0.1
_MEASURING_ENDS_S = 10.0
_ATTEMPTS = 3


class RoundPlanning:
    """Plans one round at a time, while the fleet changes."""

    def __init__(
        self,
        world: World,
        fleet: Fleet,
        repository: Repository,
        is_returning: Callable[[list[int]], bool],
        later: Later,
        send_due: Callable[[], None],
    ) -> None:
        """Plan the rounds of one coordinator.

        Args:
            world: the world.
            fleet: the coordinator's fleet.
            repository: saves the plans.
            is_returning: whether devices of some nodes are expected to reconnect.
            later: runs an action after some seconds.
            send_due: sends the grants that may be sent.
        """
        self._world, self._fleet, self._repository = world, fleet, repository
        self._is_returning, self._later, self._send_due = is_returning, later, send_due
        self._is_planning = False

    def plan(self, run_id: str, number: int, nodes: list[int], reply: Reply) -> None:
        """Plan a round, and reply with it once it is stored."""
        if self._repository.is_known(f"{run_id}/{number}"):
            self._reply(f"{run_id}/{number}", reply)
            return
        if self._is_returning(nodes) or self._is_planning:
            return
        self._is_planning = True
        self._end_measuring(run_id, number, nodes, reply, self._world.timeline.now_s + _MEASURING_ENDS_S)

    def _end_measuring(self, run_id: str, number: int, nodes: list[int], reply: Reply, until_s: float) -> None:
        """Stop the devices that measure, and wait until they can train."""
        measuring = self._fleet.flower.stop_measuring(run_id, nodes)
        self._send_due()
        if measuring and self._world.timeline.now_s < until_s:
            self._later(_CONFIRM_POLL_S, lambda: self._end_measuring(run_id, number, nodes, reply, until_s))
        else:
            self._confirm(run_id, number, nodes, reply, self._world.timeline.now_s + _CONFIRM_S)

    def _confirm(self, run_id: str, number: int, nodes: list[int], reply: Reply, until_s: float) -> None:
        """Release the nodes' devices, and wait until they have confirmed this."""
        unconfirmed = self._fleet.flower.release(run_id, nodes)
        self._send_due()
        if unconfirmed and self._world.timeline.now_s < until_s:
            self._later(_CONFIRM_POLL_S, lambda: self._confirm(run_id, number, nodes, reply, until_s))
        else:
            self._plan(run_id, number, nodes, reply, _ATTEMPTS)

    def _plan(self, run_id: str, number: int, nodes: list[int], reply: Reply, attempts: int) -> None:
        try:
            request = self._fleet.copy().flower.request_round(run_id, number, nodes, 1.0)
            record = request.planned()
        except WattfleetError as error:
            self._world.note(f"{run_id}/{number} is not planned: {error}")
            self._fleet.flower.refused(run_id, nodes)
            self._is_planning = False
            return

        def planned() -> None:
            if self._fleet.is_outdated(record.run_id, record.plan.assignments):
                if attempts > 1:
                    self._plan(run_id, number, nodes, reply, attempts - 1)
                else:
                    self._is_planning = False
                return
            self._is_planning = False
            try:
                self._fleet.flower.accept_plan(request, record)
            except RunEndedError as error:
                self._world.note(f"{run_id}/{number} is not planned: {error}")
                return
            self._world.oracle.planned(request, record)
            parts = {each.device_id: each.power_limit_w for each in record.plan.assignments}
            self._world.note(f"planned {record.plan_id}: {parts} within {self._world.budget_w:.0f} W")
            self._fleet.rounds.grants.pending.hold_back(record.plan_id)
            self._reply(record.plan_id, reply)

        # The fleet changes in the meantime.
        self._later(0.3 * self._world.rng.random(), planned)

    def _reply(self, plan_id: str, reply: Reply) -> None:
        def saved() -> None:
            self._fleet.rounds.grants.pending.let_go(plan_id)
            self._send_due()
            reply(self._fleet.rounds.records[plan_id])

        self._repository.save_round(plan_id, saved)

    def measure(self, run_id: str, nodes: list[int], survey_s: float | None, reply: MeasuringReply) -> None:
        """Let devices measure with the watts that are left, and reply once it is stored."""
        if not self._is_returning(nodes) and not self._is_planning:
            self._is_planning = True
            self._measure(run_id, nodes, survey_s, reply, _ATTEMPTS)

    def _measure(
        self, run_id: str, nodes: list[int], survey_s: float | None, reply: MeasuringReply, attempts: int
    ) -> None:
        flower, pending = self._fleet.flower, self._fleet.rounds.grants.pending

        def planned() -> None:
            if self._fleet.is_outdated(run_id, plan.assignments):
                self._measure(run_id, nodes, survey_s, reply, attempts - 1)
                return
            self._is_planning = False
            try:
                plan_id = flower.accept_measuring(run_id, plan)
            except RunEndedError as error:
                self._world.note(f"nobody measures for {run_id}: {error}")
                return
            self._world.oracle.measures(plan_id)
            parts = {each.device_id: each.power_limit_w for each in plan.assignments}
            self._world.note(f"planned {plan_id}: {parts} within {self._world.budget_w:.0f} W")
            pending.hold_back(plan_id)

            def saved() -> None:
                pending.let_go(plan_id)
                self._send_due()
                reply(plan_id, sorted(parts))

            self._repository.save("run", run_id, flower.run(run_id), saved)

        try:
            plan = flower.request_measuring(run_id, nodes, 1.0, PROFILE_MODES, survey_s).planned()
        except RunEndedError as error:
            self._world.note(f"nobody measures for {run_id}: {error}")
            self._is_planning = False
            return
        if plan.assignments and attempts:  # the fleet changes in the meantime
            self._later(0.3 * self._world.rng.random(), planned)
        else:
            self._is_planning = False


# --- Coordinator ------------------------------------------------------------------------------------------------------
# The coordinator: the real fleet and leases, driven in the same way as by its services.

_STEPS_S = 2.0  # the longest time that sending the first grants of a plan may take


class Coordinator:
    """A series of coordinators over the same store.

    Attributes:
        stored: the contents of the store.
        fleet: the fleet; None while no coordinator runs.
    """

    def __init__(self, world: World) -> None:
        self._world, self._timeline = world, world.timeline
        self.stored, self._life = Stored(), 0
        self.fleet: Fleet | None = None
        self._nodes: dict[int, str] = {}
        self._connected_before: set[str] = set()
        self.start()

    # --- start and crash ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a coordinator from the store."""
        world, stored = self._world, self.stored
        self._life += 1
        self.fleet = Fleet(
            Allowance.of_site(world.budget_w),
            world.policy,
            list(stored.devices.values()),
            self._nodes,
            list(stored.runs.values()),
            stored.current(),
            stored.runs,
            overrides=list(stored.overrides.values()),
            grants=world.grant_settings,
            now_s=self._now_s,
            stored_grants=stored.grants,
            max_workloads=world.max_fronts,
            energy=stored.energy(),
            now=world.date,
            energy_budgets=world.energy_budgets(),
            counted=list(stored.counteds.values()),
        )
        settings = SessionSettings(lease_s=world.lease_s, return_grace_s=RETURN_GRACE_S)
        self._leases = Leases(self._now_s(), self._connected_before, settings)
        self._sessions: dict[Lease, Stream] = {}
        self._lease_of: dict[Stream, Lease] = {}
        self._sequence: dict[Stream, int] = {}
        self._orders_to: dict[str, Stream] = {}
        self._streams: list[Stream] = []
        self._repository = Repository(world, self.fleet, stored, self._in_this_life)
        self._planning = RoundPlanning(
            world, self.fleet, self._repository, self._is_returning, self._in_this_life, self._send_due
        )
        self.account = Account(world, self.fleet, self._now_s)
        self._tick()

    def crash(self, down_s: float) -> None:
        """Kill the coordinator; another one starts from what is stored."""
        if self.fleet is None:
            return
        self._world.note(f"coordinator crashes, down {down_s:.1f} s, unsaved {sorted(self._repository.unsaved)}")
        self._nodes = self.fleet.flower.nodes
        self._connected_before = {each for each in self.fleet.agents.devices if self.fleet.agents.is_connected(each)}
        self.fleet = None
        self._life += 1
        for stream in self._streams:
            stream.close("coordinator")

        def restart() -> None:
            self.start()
            self._world.oracle.started()

        self._timeline.after(down_s, restart)

    def _now_s(self) -> float:
        return 5e5 + self._timeline.now_s

    def _in_this_life(self, seconds: float, action: Any) -> None:
        life = self._life

        def if_alive() -> None:
            if self._life == life and self.fleet is not None:
                action()

        self._timeline.after(seconds, if_alive)

    def enrol(self, device: Device, node: int) -> None:
        """Enrol a device and its Flower node, and store them, before the world begins."""
        assert self.fleet is not None
        self.fleet.agents.connect(device.id, "orin-nx", "simulated", 100)
        self._take_fronts(device, device.idle_w)
        self._repository.save("device", device.id, self.fleet.agents.disconnect(device.id))
        self.fleet.flower.bind_node(node, device.id)

    # --- sessions (SessionServicer, Orders) ---------------------------------------------------------------------

    def open_stream(self, device: Device) -> Stream | None:
        """Accept a connection; None while no coordinator runs."""
        if self.fleet is None:
            return None
        world = self._world
        stream = Stream(self._timeline, world.rng, self._receive, device.receive, world.slowest_s)
        self._streams.append(stream)
        return stream

    def _receive(self, stream: Stream, message: Any) -> None:
        if self.fleet is None or stream not in self._streams:
            return
        if message is CLOSED:
            self._end(stream)
            return
        body = message.WhichOneof("body")
        if body == "hello":
            self._begin(stream, message.hello)
            return
        lease = self._lease_of.get(stream)
        if lease is None:
            return
        self._leases.renew(lease, self._now_s())
        device_id, number = lease.device_id, message.sequence
        if 0 < number <= self._sequence[stream]:
            self._acknowledge(stream, number)
            return
        self._sequence[stream] = max(number, self._sequence[stream])
        acknowledge = partial(self._acknowledge, stream, number)
        if body == "lease":
            self._take_lease(stream, device_id, message.lease)
        elif body == "state":
            state = state_from_message(message.state.state)
            self._repository.save(
                "device", device_id, self.fleet.agents.report_state(device_id, state, 50, ""), acknowledge
            )
        elif body == "front" and message.front.HasField("front"):
            self._repository.save("device", device_id, self._take_front(device_id, message.front), acknowledge)
        elif body == "removed":
            record = self.fleet.agents.remove_workload(device_id, message.removed.workload)
            self._world.oracle.removal_heard(device_id, message.removed.workload)
            self._repository.save("device", device_id, record, acknowledge)
        elif body == "front":
            record = self._take_fronts(self._world.devices[device_id], message.front.idle_w)
            self._repository.save("device", device_id, record, acknowledge)
        elif body == "energy":
            drawn = message.energy
            self._repository.is_known(drawn.plan_id)
            try:
                changed = self.fleet.report_energy(device_id, drawn.plan_id, drawn.energy_j, drawn.lasted_s)
            except UnknownRecordError:
                changed = []
            if changed and isinstance(changed[0], RunRecord):
                self._repository.save("run", changed[0].run_id, changed[0], acknowledge)
            elif changed:
                self._repository.save_round(drawn.plan_id, acknowledge)
            else:
                acknowledge()
        else:
            seen = message.observation
            self._repository.is_known(seen.plan_id)
            try:
                self.fleet.observe(device_id, seen.plan_id, seen.epoch_s, seen.power_w)
            except UnknownRecordError:
                acknowledge()
            else:
                self._repository.save_round(seen.plan_id, acknowledge)

    def _take_fronts(self, device: Device, idle_w: float) -> DeviceRecord:
        """Take the fronts of all workloads; the length of an epoch is known once any mode was measured."""
        assert self.fleet is not None
        record = self.fleet.agents.get(device.id)
        for name, front in device.fronts.items():
            modes = device.measured_modes[name]
            length = ASSUMED_MINIBATCHES_PER_EPOCH if modes else None
            record = self.fleet.agents.report_front(device.id, front, idle_w, modes, "", Workload(name), length)
        return record

    def _take_front(self, device_id: str, report: session_pb2.FrontReport) -> DeviceRecord:
        assert self.fleet is not None
        workload = workload_from_message(report.workload)
        length = report.minibatches_per_epoch if report.HasField("minibatches_per_epoch") else None
        front = front_from_message(report.front)
        self._world.oracle.front_heard(device_id, workload.name, front)
        return self.fleet.agents.report_front(
            device_id, front, report.idle_w, report.profiled_modes, "", workload, length
        )

    def _announce(self, stream: Stream) -> None:
        """Announce the workloads of all live runs to a device."""
        assert self.fleet is not None
        workloads = self.fleet.flower.live_workloads()[: self._world.max_fronts]
        announced = session_pb2.WorkloadsAnnounced(workloads=map(workload_to_message, workloads))
        stream.down.send(session_pb2.SessionResponse(announced=announced))

    def _begin(self, stream: Stream, hello: session_pb2.Hello) -> None:
        assert self.fleet is not None
        device_id, now_s = hello.device_id, self._now_s()
        try:
            self._leases.require_free(device_id, hello.installation)
        except DuplicateSessionError:
            stream.close("coordinator")
            return
        self._repository.save("device", device_id, self.fleet.agents.connect(device_id, "orin-nx", "simulated", 100))
        self.fleet.rounds.grants.greeted(device_id)
        lease, replaced = self._leases.begin(device_id, hello.installation, now_s)
        self.account.session_began(device_id)
        self._sessions[lease], self._lease_of[stream], self._sequence[stream] = stream, lease, 0
        if replaced is not None and (old := self._sessions.get(replaced)) is not None:
            self._in_this_life(0.0, lambda: self._end(old))
        welcome = session_pb2.Welcome(grant_lifetime_s=self.fleet.rounds.grants.lifetime_s)

        def written() -> None:
            assert self.fleet is not None
            stream.down.send(session_pb2.SessionResponse(welcome=welcome))
            if self._lease_of.get(stream) is lease:
                self._orders_to[device_id] = stream
                self.account.session_began(device_id)
                self.fleet.rounds.grants.session_began(device_id, self._now_s())
                if self._world.announces:
                    self._announce(stream)

        # Writing the Welcome has to wait for the connection.
        self._in_this_life(0.0 if self._world.rng.random() < 0.8 else 0.3 * self._world.rng.random(), written)

    def _end(self, stream: Stream) -> None:
        """End the handler of a session."""
        assert self.fleet is not None
        stream.close("coordinator")
        if stream in self._streams:
            self._streams.remove(stream)
        lease = self._lease_of.pop(stream, None)
        if lease is None:
            return
        self._sessions.pop(lease, None)
        self._sequence.pop(stream, None)
        if self._orders_to.get(lease.device_id) is stream:
            del self._orders_to[lease.device_id]
        if self._leases.end(lease):
            self._repository.save("device", lease.device_id, self.fleet.agents.disconnect(lease.device_id))

    def _acknowledge(self, stream: Stream, number: int, lease_number: int = 0, is_renewed: bool = False) -> None:
        ack = session_pb2.Ack(sequence=number, lease_number=lease_number, is_renewed=is_renewed)
        stream.down.send(session_pb2.SessionResponse(ack=ack))

    def _take_lease(self, stream: Stream, device_id: str, lease: session_pb2.Lease) -> None:
        assert self.fleet is not None
        self.account.heard(device_id)
        grants = self.fleet.rounds.grants
        grants.renew(device_id, self._now_s())
        grants.confirm(device_id, lease.grant_id, lease.plan_id, phase_from_message(lease.phase))
        # Grants are written in the background, after the acknowledgement.
        is_renewed = grants.may_be_renewed(device_id)
        due = self._take([device_id])
        self._acknowledge(stream, 0, lease.number, is_renewed)
        self._send(due)

    def _take(self, device_ids: list[str]) -> list[tuple[Stream, Any]]:
        assert self.fleet is not None
        due = []
        orders = self.fleet.take_orders(self._orders_to.__contains__, device_ids)
        for device_id, grant in sorted(orders, key=itemgetter(0)):
            self._world.note(
                f"to {device_id}: grant {grant.grant_id} of {grant.limit_w:.0f} W for {grant.plan_id or '-'}"
            )
            self._world.oracle.issued(device_id, grant)
            self.account.sent(device_id, grant)
            due.append((self._orders_to[device_id], grant))
        return due

    def _send(self, due: list[tuple[Stream, Any]]) -> None:
        for stream, grant in due:
            message = grant_to_message(grant, workload_of(grant.plan_id) if grant.plan_id else "")
            stream.down.send(session_pb2.SessionResponse(grant=message))

    def _send_due(self) -> None:
        """Send grants in steps: other events may occur between the first grants of two devices."""
        assert self.fleet is not None
        changed, first = self.fleet.rounds.grants.due()
        self._send(self._take(changed))
        for device_id in sorted(first):
            wait_s = 0.0 if self._world.rng.random() < 0.5 else _STEPS_S * self._world.rng.random()
            self._in_this_life(wait_s, lambda one=device_id: self._send(self._take([one])))

    # --- background tasks (Trimmer, SessionServicer.sweep) ------------------------------------------------------

    def _tick(self) -> None:
        assert self.fleet is not None
        self._in_this_life(TICK_S, self._tick)
        self.fleet.check_grants()
        self._trim(self.fleet.trim)
        self._leases.take_missing(self._now_s())
        for lease in self._leases.expired(self._now_s()):
            self._end(self._sessions[lease])

    def _trim(self, trim: Callable[[], list[RoundRecord]]) -> None:
        before_w = self.account.limits_w()
        trimmed = trim()
        self._world.oracle.trimmed(trimmed, before_w)
        self._send_due()
        for record in trimmed:
            self._repository.save_round(record.plan_id)

    # --- the operator -------------------------------------------------------------------------------------------

    def set_budget(self, watts: float) -> None:
        """Put another budget in force; a coordinator that is not running reads it when it starts."""
        if self.fleet is not None:
            self._trim(partial(self.fleet.set_budget, SITE, InForce(watts, "query", False, "the meter")))

    def drain(self, device_id: str, is_drained: bool) -> None:
        """Exclude a device from new rounds, or include it again."""
        if self.fleet is not None:
            for record in self.fleet.operator.drain([device_id], is_drained):
                self._repository.save("override", device_id, record)

    # --- Flower's servers (PlanningServicer, RoundPlanning) -----------------------------------------------------

    def start_run(self, run_id: str, then: Any) -> None:
        """Start a run."""
        if self.fleet is not None:
            workload = Workload(workload_of(run_id))
            budget_j = self._world.energy_budget_j(run_id)
            rounds = 100 if budget_j is None else 0
            started = self.fleet.flower.start_run(run_id, "FedAvg", rounds, workload=workload, energy_budget_j=budget_j)
            self._repository.save("run", run_id, started, then)
            if self._world.announces:
                for device_id in sorted(self._orders_to):
                    self._announce(self._orders_to[device_id])

    def finish_run(self, run_id: str) -> None:
        """Finish a run."""
        if self.fleet is not None and run_id in self.fleet.flower.runs:
            self._repository.save("run", run_id, self.fleet.flower.finish_run(run_id, ""))
            self._world.oracle.run_ended(run_id)
            self._send_due()

    def finish_round(self, plan_id: str) -> None:
        """Finish a round."""
        if self.fleet is not None and self._repository.is_known(plan_id):
            self.fleet.rounds.finish(plan_id, [], 3.0)
            self.fleet.settle_unbegun(plan_id)
            self.fleet.flower.end_measuring(run_of(plan_id))
            self._repository.save_round(plan_id)
            self._send_due()

    def abandon(self, plan_id: str) -> None:
        """Stop waiting for a round that is overdue."""
        if self.fleet is not None and self._repository.is_known(plan_id):
            self.fleet.rounds.abandon(plan_id)

    def plan(self, run_id: str, number: int, nodes: list[int], reply: Any) -> None:
        """Plan a round, and reply with it once it is stored."""
        if self.fleet is not None and run_id in self.fleet.flower.runs:
            self._planning.plan(run_id, number, nodes, reply)

    def measure(self, run_id: str, nodes: list[int], survey_s: float | None, reply: Any) -> None:
        """Let devices measure, and reply with their ids once it is stored."""
        if self.fleet is not None and run_id in self.fleet.flower.runs:
            self._planning.measure(run_id, nodes, survey_s, reply)

    def stop_measuring(self, run_id: str, nodes: list[int]) -> None:
        """Stop the devices that measure, as the next plan of a run does."""
        if self.fleet is not None:
            self.fleet.flower.stop_measuring(run_id, nodes)
            self._send_due()

    def _is_returning(self, nodes: list[int]) -> bool:
        assert self.fleet is not None
        missing, _ = self._leases.expected_back({self.fleet.flower.nodes[node] for node in nodes}, self._now_s())
        return bool(missing)
