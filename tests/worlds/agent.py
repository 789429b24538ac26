"""A device with its agent: real grants and a real outbox, with a simulated session, app and board."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_agent.session.grants import AgentGrant, GrantKeeper, HeldGrant
from edge_agent.session.outbox import Outbox
from tests.worlds.flower import workload_of
from tests.worlds.oracle import PARKING_S
from tests.worlds.timeline import CLOSED, GRANT_TIMEOUT_S, LEASE_S, MISSED_LEASES, Stream
from wattfleet.core.choosing import Front
from wattfleet_proto.convert import state_to_message
from wattfleet_proto.device_state import DeviceState, GrantPhase
from wattfleet_proto.v1 import session_pb2

if TYPE_CHECKING:
    from tests.worlds.world import World


# --- Agent state ------------------------------------------------------------------------------------------------------
# The state of an agent in a world: grants without an event loop, and unsent reports in memory.


class MemoryFile:
    """Keeps an outbox's reports across restarts of the agent, as its file does."""

    def __init__(self) -> None:
        self._kept: list[session_pb2.SessionRequest] = []

    def load(self) -> list[session_pb2.SessionRequest]:
        return deepcopy(self._kept)

    def store(self, requests: list[session_pb2.SessionRequest]) -> None:
        self._kept = [deepcopy(each) for each in requests if each.HasField("observation") or each.HasField("energy")]


class OpenGrants(GrantKeeper):
    """The agent's grants with their state machine exposed, since a world has no event loop to wait in."""

    @property
    def held(self) -> HeldGrant:
        return self._held


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("a coroutine waits, although nothing contends with it")


# --- Agent ------------------------------------------------------------------------------------------------------------

PROFILE_MODES = 50
"""Modes that a device should measure of each workload."""

APPLYING_S = 2.0
"""Seconds that setting a power mode takes at most."""


@dataclass(eq=False)
class App:
    """An app's training on the agent's socket.

    Attributes:
        plan_id: the plan that it names.
        lasts_s: duration of its training, in seconds.
        is_failing: whether it crashes instead of finishing.
    """

    plan_id: str
    lasts_s: float
    is_failing: bool


class Device:
    """One device, physically, with its agent.

    Attributes:
        id: its name.
        fronts: the power of its modes, by workload.
        measured_modes: number of modes that it has measured, by workload.
        idle_w: power while parked.
        is_profiling: whether it measures itself, at worst in the mode with the highest power.
        unreachable_until_s: no session can begin before this time.
        flaps_until_s: sessions that begin before this time are lost after a few answers.
        next_lost_after: the next session loses the device's messages after this many; None to lose nothing.
    """

    def __init__(self, world: World, device_id: str, fronts: dict[str, Front], idle_w: float, drift: float) -> None:
        self.id, self.fronts, self.idle_w = device_id, fronts, idle_w
        self.measured_modes = dict.fromkeys(fronts, PROFILE_MODES)
        self.stream: Stream | None = None
        self.is_profiling = False
        self.unreachable_until_s = self.flaps_until_s = 0.0
        self.next_lost_after: int | None = None
        self._world, self._timeline, self._drift = world, world.timeline, drift
        self._silence_s = max(MISSED_LEASES * LEASE_S, MISSED_LEASES * world.lease_s)
        self._file = MemoryFile()
        self._heard_s = 0.0
        self._life = 0
        self.app: App | None = None
        self._waiting: list[App] = []
        # What the training in progress draws: plan, watts, since when; and the joules and seconds so far.
        self._metered: tuple[str, float, float] | None = None
        self._drawn_j = self._lasted_s = 0.0
        self._boot()

    @property
    def rng(self) -> random.Random:
        return self._world.rng

    def clock_s(self) -> float:
        """The device's own monotonic clock, which is not affected by changes of the date."""
        return 1e6 + self._timeline.now_s * (1 + self._drift)

    # --- physics ------------------------------------------------------------------------------------------------

    @property
    def training(self) -> AgentGrant | None:
        """The grant of the training in progress."""
        return self.held.in_force if self.held.phase is GrantPhase.TRAINING else None

    @property
    def drawn_w(self) -> float:
        """The most power that it can draw now."""
        if self.is_profiling:
            return max(self.idle_w, *(float(front.planned_w[0]) for front in self.fronts.values()))
        training = self.training
        return self.idle_w if training is None or training.power_limit_w < self.idle_w else training.power_limit_w

    def meter(self) -> None:
        """Add what was drawn since the last event, which is the only thing that changes the power."""
        now_s = self.clock_s()
        if self._metered is not None:
            plan_id, watts, since_s = self._metered
            self._drawn_j += watts * (now_s - since_s)
            self._lasted_s += now_s - since_s
            self._world.oracle.drew(plan_id, (watts - self.idle_w) * (now_s - since_s))
        training = self.training
        self._metered = None if training is None else (training.plan_id, self.drawn_w, now_s)

    # --- restarts of the agent ----------------------------------------------------------------------------------

    def _boot(self) -> None:
        self._take_grants()
        self.grants.on_change = self._lease_is_due
        self.grants.on_never_began = self._never_began
        # A file of the agent's, with two of its methods.
        self.outbox = Outbox(self._file)  # type: ignore[arg-type]
        self._is_lease_due = self._is_sending = self._is_welcomed = False
        self._sent = 0
        self._is_changing = False
        self._is_up = True
        self._report(DeviceState.READY)
        self._prepare()
        self._reconnect_soon()

    def _prepare(self) -> None:
        """Predict: these devices know their fronts of all workloads from the beginning."""
        self.outbox.add(session_pb2.SessionRequest(front=session_pb2.FrontReport(idle_w=self.idle_w)))

    def reported_fronts(self, workload: str) -> list[Front]:
        """The fronts of a workload that plans may use now: the newest reported one, and the one before it."""
        return [self.fronts[workload]]

    def _take_grants(self) -> None:
        self.grants = OpenGrants(self.clock_s)
        self.held = self.grants.held

    def restart(self, down_s: float) -> None:
        """Kill the agent; the device is parked until the agent is back."""
        self._world.note(f"{self.id}: agent restarts, down {down_s:.1f} s")
        self._life += 1
        self._world.oracle.restarted(self)
        self._is_up = False
        if self.stream is not None:
            self.stream.close("agent")
            self.stream = None
        self.app = None
        self._waiting.clear()
        self._dies()
        self._take_grants()  # none until it is back
        self.is_profiling = False
        self._in_this_life(down_s, self._boot)

    def _dies(self) -> None:
        """The state that a killed agent leaves behind."""

    def _in_this_life(self, seconds: float, action: Any) -> None:
        life = self._life

        def if_alive() -> None:
            if self._life == life:
                action()

        self._timeline.after(seconds, if_alive)

    # --- session ------------------------------------------------------------------------------------------------

    def _reconnect_soon(self) -> None:
        self._in_this_life(self.rng.random() * 3.0, self._connect)

    def _connect(self) -> None:
        if self.stream is not None:
            return
        stream = None
        if self._timeline.now_s >= self.unreachable_until_s:
            stream = self._world.coordinator.open_stream(self)
        if stream is None:
            self._reconnect_soon()
            return
        self.stream, self._is_welcomed, self._heard_s = stream, False, self._timeline.now_s
        if self._timeline.now_s < self.flaps_until_s:
            stream.down.lost_after = self.rng.randint(0, 4)
        stream.up.lost_after, self.next_lost_after = self.next_lost_after, None
        self.grants.greeting()
        self._world.oracle.greeted(self)
        stream.up.send(session_pb2.SessionRequest(hello=session_pb2.Hello(device_id=self.id, installation=self.id)))
        self._in_this_life(self._silence_s, lambda: self._listen(stream))

    def _listen(self, stream: Stream) -> None:
        """Close a session that has gone silent."""
        if self.stream is not stream:
            return
        left_s = self._heard_s + self._silence_s - self._timeline.now_s
        if left_s > 0:
            self._in_this_life(left_s, lambda: self._listen(stream))
        else:
            self.hang_up()

    def hang_up(self) -> None:
        """Close the session and open another."""
        if self.stream is not None:
            self.stream.close("agent")
            self.stream = None
            self._reconnect_soon()

    def receive(self, stream: Stream, message: Any) -> None:
        """Handle a message from the coordinator."""
        if stream is not self.stream:
            return
        self._heard_s = self._timeline.now_s
        if message is CLOSED:
            self.stream = None
            self._reconnect_soon()
            return
        body = message.WhichOneof("body")
        if body == "welcome":
            self._world.oracle.welcomed(self)
            at_once(self.grants.welcomed(message.welcome.grant_lifetime_s))
            self.outbox.requeue_latest()
            self._is_welcomed, self._is_lease_due, self._sent = True, True, 0
            self._send_soon()
            self._beat(stream)
        elif body == "grant":
            self._world.oracle.received(self, message.grant)
            at_once(self.grants.receive(message.grant))
        elif body == "announced":
            self._announced(message.announced)
        else:
            ack = message.ack
            if ack.lease_number:
                self._world.oracle.acknowledged(self, ack.lease_number, ack.is_renewed)
                at_once(self.grants.acknowledged(ack.lease_number, ack.grant_lifetime_s, ack.is_renewed))
            self.outbox.acknowledge(ack.sequence)
        self._look()

    def _announced(self, announced: session_pb2.WorkloadsAnnounced) -> None:
        """Predict the workloads of live runs."""

    def _beat(self, stream: Stream) -> None:
        if self.stream is stream:
            self._lease_is_due()
            self._in_this_life(self._world.lease_s * (0.5 + 0.3 * self.rng.random()), lambda: self._beat(stream))

    def _lease_is_due(self) -> None:
        self._is_lease_due = True
        self._send_soon()

    def _send_soon(self) -> None:
        if not self._is_sending:
            self._is_sending = True
            self._in_this_life(0.02 * self.rng.random(), self._send)

    def _send(self) -> None:
        self._is_sending = False
        if self.stream is None or not self._is_welcomed:
            return
        if self._is_lease_due:
            self._is_lease_due = False
            lease = self.grants.lease()
            self._world.oracle.leased(self, lease.number)
            self.stream.up.send(session_pb2.SessionRequest(lease=lease))
        for request in self.outbox.after(self._sent):
            self.stream.up.send(request)
            self._sent = request.sequence

    def _report(self, state: DeviceState) -> None:
        self.outbox.add(session_pb2.SessionRequest(state=session_pb2.StateReport(state=state_to_message(state))))
        self._send_soon()

    # --- trainings ----------------------------------------------------------------------------------------------

    def ask_to_train(self, plan_id: str, lasts_s: float, is_failing: bool) -> None:
        """Have an app request, over the socket, to train for a plan that is granted, old or made up."""
        if self.app is not None or self.is_profiling or not self._is_up:
            return  # busy
        app = App(plan_id, lasts_s, is_failing)
        self._waiting.append(app)
        self._in_this_life(GRANT_TIMEOUT_S, lambda: self._refuse(app))
        self._look()

    def _refuse(self, app: App) -> None:
        if app in self._waiting:
            self._waiting.remove(app)

    def _begin(self) -> None:
        """Begin the training of an app whose grant has arrived."""
        now_s = self.clock_s()
        app = next((each for each in self._waiting if self.held.may_begin(each.plan_id, now_s)), None)
        if app is None or self.is_profiling:
            return
        self.app = app
        self._waiting.remove(app)
        grant = self.held.begin(app.plan_id, now_s)
        self._world.note(f"{self.id}: begins {grant.plan_id} at {grant.power_limit_w:.0f} W, grant {grant.grant_id}")
        self.meter()
        self._drawn_j = self._lasted_s = 0.0
        self._world.oracle.began(self, grant)
        self._training_began(app, grant)
        self.grants.on_change()
        self._report(DeviceState.TRAINING)
        self._in_this_life(app.lasts_s, lambda: self._app_ends(app))
        self._watch(app)

    def _training_began(self, app: App, grant: AgentGrant) -> None:
        """Put the mode of a grant in force."""

    def _never_began(self, plan_id: str) -> None:
        """Report that a granted training has drawn nothing, as the agent's session does."""
        self._world.note(f"{self.id}: {plan_id} never began")
        self.outbox.add(session_pb2.SessionRequest(energy=session_pb2.TrainingEnergy(plan_id=plan_id)))
        self._send_soon()

    def _look(self) -> None:
        """React to a change as the training part of the agent does."""
        held, app = self.held, self.app
        if self._is_changing:
            return
        if app is None:
            self._begin()
            return
        reason = held.must_stop(self.clock_s())
        if reason is not None:
            self._world.note(f"{self.id}: must stop, {reason}")
            self._park_soon(app, False)
        elif (change := held.change()) is not None:
            self._is_changing = True
            self._in_this_life(APPLYING_S * self.rng.random(), partial(self._apply, app, change))

    def _apply(self, app: App, grant: AgentGrant) -> None:
        """Continue under another grant."""
        self._is_changing = False
        if self.app is app and self.training is not None:
            self._world.note(f"{self.id}: goes on at {grant.power_limit_w:.0f} W, grant {grant.grant_id}")
            self._change_mode(grant)
            self.held.apply(grant)
            self.grants.on_change()
            self._look()

    def _change_mode(self, grant: AgentGrant) -> None:
        """Put the mode of another grant in force during a training."""

    def _watch(self, app: App) -> None:
        """Check the training when its grant lapses, or when it has lasted too long."""
        if self.app is not app or self.training is None:
            return
        left_s = (self.held.next_check_s() - self.clock_s()) / (1 + self._drift)
        if left_s <= 0:
            self._look()
        else:
            self._in_this_life(left_s + 1e-6, lambda: self._watch(app))

    def _app_ends(self, app: App) -> None:
        if self.app is app:
            self._park_soon(app, not app.is_failing)

    def app_finishes(self) -> None:
        """The training in progress finishes."""
        if self.app is not None and self.training is not None:
            self._park_soon(self.app, True)

    def app_dies(self) -> None:
        """The app's process crashes, whatever it is doing."""
        self._waiting.clear()
        if self.app is not None:
            self._park_soon(self.app, False)

    def _park_soon(self, app: App, is_finished: bool) -> None:
        self._is_changing = True

        def parked() -> None:
            self._is_changing = False
            training = self.training
            if self.app is not app or training is None:
                return
            self._world.note(f"{self.id}: parked, {training.plan_id} is over")
            self.meter()
            if training.counts_energy:
                drawn = session_pb2.TrainingEnergy(
                    plan_id=training.plan_id, energy_j=self._drawn_j, lasted_s=self._lasted_s
                )
                self.outbox.add(session_pb2.SessionRequest(energy=drawn))
            self.grants.ended()
            self.app = None
            self._training_ended(training, is_finished)
            self._report(DeviceState.READY)
            self._world.answer(self.id, training.plan_id)
            self._look()

        self._in_this_life(PARKING_S * self.rng.random(), parked)

    def _training_ended(self, training: AgentGrant, is_finished: bool) -> None:
        """Report the observation of a finished training, or the front after one that was run in order to measure."""
        if is_finished and training.measuring is not None:
            workload = workload_of(training.plan_id)
            measured = self.measured_modes[workload] + training.measuring.modes
            self.measured_modes[workload] = min(measured, PROFILE_MODES)
            self._prepare()
            self._send_soon()
        elif is_finished:
            self._observed(training, self._epoch_s(training), training.power_limit_w)

    def _observed(self, training: AgentGrant, epoch_s: float, power_w: float) -> None:
        seen = session_pb2.Observation(plan_id=training.plan_id, epoch_s=epoch_s, power_w=power_w)
        self.outbox.add(session_pb2.SessionRequest(observation=seen))

    def _epoch_s(self, training: AgentGrant) -> float:
        """The predicted seconds per epoch, which are also the true ones in these worlds."""
        assert training.mode is not None
        front = self.fronts[workload_of(training.plan_id)]
        [[k]] = (front.modes[:, 1] == training.mode.cpu_khz).nonzero()
        return float(front.epoch_s[k])

    def profile(self, lasts_s: float) -> None:
        """Measure the device again, since it has drifted."""
        if self.app is not None or self.is_profiling or not self._is_up:
            return
        self.is_profiling = True
        self._report(DeviceState.PROFILING)

        def ended() -> None:
            self.is_profiling = False
            self._report(DeviceState.READY)

        self._in_this_life(lasts_s, ended)
