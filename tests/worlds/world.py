"""One random world: devices with agents, a coordinator, two Flower servers, an operator, and all that goes wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.settings import GrantSettings
from tests.fakes.fronts import front
from tests.worlds.agent import Device
from tests.worlds.coordinator import Coordinator
from tests.worlds.flower import FlowerServer
from tests.worlds.oracle import BrokenPromiseError, Oracle
from tests.worlds.timeline import Timeline
from wattfleet.choosing import Front
from wattfleet.planning.policies import AllDevices, FastestK, Policy, RandomK

STEPS = 45


@dataclass(frozen=True)
class Step:
    """One step of a world.

    Attributes:
        rule: what happens.
        wait_s: seconds that pass before.
        seed: decides on the details.
    """

    rule: str
    wait_s: float
    seed: int

    def __str__(self) -> str:
        return f"{self.wait_s:6.2f} s, then {self.rule} ({self.seed})"


class World:
    """One world.

    Attributes:
        devices: by id.
        budget_w: what the site may draw now.
    """

    def __init__(self, seed: int, notes: list[str] | None = None) -> None:
        """Make a world.

        Args:
            seed: decides on its devices, settings and the first details.
            notes: takes a line for every event, to read.
        """
        self.rng = rng = random.Random(seed)
        self._notes = notes
        self.timeline = Timeline(self._check)
        self.budget_w = float(rng.randint(20, 70))
        self.policy: Policy = rng.choice([AllDevices(), AllDevices(), FastestK(2), RandomK(2, seed=seed)])
        self.lifetime_s = rng.choice([20.0, 30.0])
        self.margin_s = 5.0
        self.lease_s, self.slowest_s = 5.0, rng.choice([0.05, 0.5])
        self.grant_settings = GrantSettings(
            lifetime_s=self.lifetime_s, stop_margin_s=self.margin_s, confirm_timeout_s=8.0
        )
        self.devices: dict[str, Device] = {}
        self.oracle = Oracle(self)
        self.coordinator = Coordinator(self)
        for k in range(rng.randint(2, 4)):
            device = Device(self, f"d{k}", _front(rng), float(rng.randint(1, 4)), rng.uniform(-0.009, 0.009))
            self.devices[device.id] = device
            self.coordinator.enrol(device)
            self.coordinator.bind(k, device.id)
        self._focus = next(iter(self.devices.values()))
        self.servers = [FlowerServer(self, "a"), FlowerServer(self, "b")]
        self.timeline.advance(4.0)

    def _check(self) -> None:
        self.oracle.check()

    @property
    def run_ids(self) -> set[str]:
        """The runs that the coordinator knows."""
        fleet = self.coordinator.fleet
        return set() if fleet is None else set(fleet.flower.runs)

    def note(self, text: str) -> None:
        """Note an event, if anybody reads."""
        if self._notes is not None:
            self._notes.append(f"{self.timeline.now_s:8.2f}  {text}")

    def is_sound_since(self, since_s: float) -> bool:
        """Whether no session was disturbed since a moment."""
        return self.coordinator.fleet is not None and all(
            device.stream is not None
            and device.stream.is_sound
            and device.stream.began_s < since_s
            and max(device.stream.up.stalled_until_s, device.stream.down.stalled_until_s) < since_s
            for device in self.devices.values()
        )

    def take(self, step: Step) -> None:
        """Let time pass, and take a step."""
        self.timeline.advance(step.wait_s)
        self.rng.seed(step.seed)
        self.note(f"-- {step.rule}")
        _RULES[step.rule][1](self)
        self.oracle.check()

    def answer(self, device_id: str, plan_id: str) -> None:
        """A node replies to whichever Flower server asked."""
        for server in self.servers:
            self.timeline.after(self.rng.random(), lambda server=server: server.answered(device_id, plan_id))

    def set_budget(self, watts: float) -> None:
        """Put another budget in force."""
        self.note(f"the budget is {watts:.0f} W")
        falls = watts < self.budget_w
        self.budget_w = watts
        if falls:
            self.oracle.cut()
        self.coordinator.set_budget(watts)

    def settle(self) -> None:
        """Let everything come to rest, and check that every device can be planned and trains.

        Raises:
            BrokenPromiseError: one cannot.
        """
        self.note("-- settle")
        self.coordinator.store_fails_until_s = 0.0
        for device in self.devices.values():
            device.unreachable_until_s = device.flaps_until_s = 0.0
            device.app_dies()
        self.timeline.advance(40.0)  # coordinators and agents that are down come back, silent sessions end
        for server in self.servers:
            server.finish_run()
        for device in self.devices.values():
            self.coordinator.drain(device.id, False)
            device.app_dies()
        self.set_budget(1e4)
        fleet = self.coordinator.fleet
        assert fleet is not None
        for record in fleet.rounds.in_flight():  # of runs whose server has forgotten them: overdue in the end
            self.coordinator.abandon(record.plan_id)
        self.timeline.advance(self.lifetime_s * 1.01 + self.margin_s + 2.0)
        request = None
        try:
            request = fleet.flower.request_round(self.servers[0].run_id, 1, list(range(len(self.devices))), 1.0)
        finally:
            offered = {offer.device_id for offer in request.offers} if request else set()
            if left_out := self.devices.keys() - offered:
                raise BrokenPromiseError("plannable", f"{sorted(left_out)} cannot be planned in a quiet world")
        record = fleet.flower.accept_plan(request, request.planned())
        self.timeline.advance(1.0)
        for device_id in sorted(record.nodes):
            self.devices[device_id].app_dies()  # an old message waits for its grant
            self.devices[device_id].ask_to_train(record.plan_id, 5.0, False)
        self.timeline.advance(8.0)
        idle = [each for each in record.nodes if not self.oracle.has_trained(each, record.plan_id)]
        if idle:
            raise BrokenPromiseError("plannable", f"{idle} do not train in a quiet world")

    # --- rules --------------------------------------------------------------------------------------------------

    def _device(self) -> Device:
        if self.rng.random() < 0.5:  # often the same: troubles come together
            self._focus = self.rng.choice(list(self.devices.values()))
        return self._focus

    def _server(self) -> FlowerServer:
        return self.rng.choice(self.servers)

    def plan(self) -> None:
        self._server().plan()

    def plan_and_finish(self) -> None:
        """A round that is planned and given up almost at once."""
        server = self._server()
        server.plan()

        def finish() -> None:
            if server.open:
                server.finish_round(max(server.open))

        plan_id, is_abandoned = f"{server.run_id}/{server.number}", self.rng.random() < 0.3
        self.timeline.after(
            self.rng.random() * (1.5 if not is_abandoned else 0.6),
            (lambda: self.coordinator.abandon(plan_id)) if is_abandoned else finish,
        )

    def plan_and_crash(self) -> None:
        """The coordinator dies while it plans; an app asks for the plan all the same."""
        server, device = self._server(), self._device()
        server.plan()
        plan_id = f"{server.run_id}/{server.number}"
        down_s = 1.0 + self.rng.random() * 5.0
        if self.rng.random() < 0.5:
            self.coordinator.store_fails_until_s = self.timeline.now_s + 3.0
        self.timeline.after(self.rng.random(), lambda: self.coordinator.crash(down_s))
        if self.rng.random() < 0.5:
            self.timeline.after(1.0, lambda: device.ask_to_train(plan_id, 30.0, False))

    def finish_unheard(self) -> None:
        """A training finishes while the session is lost; then agent and Flower's node restart."""
        device = self._device()
        training = device.training
        if training is None or device.stream is None:
            return
        device.stream.up.lose()
        device.app_finishes()
        down_s, again_s = 4.0 + self.rng.random(), 5.0 * self.rng.random()
        self.timeline.after(down_s, lambda: device.restart(1.0))
        self.timeline.after(down_s + again_s, lambda: device.ask_to_train(training.plan_id, 30.0, False))

    def finish_round(self) -> None:
        server = self._server()
        if server.open:
            server.finish_round(self.rng.choice(sorted(server.open)))

    def give_up_device(self) -> None:
        server = self._server()
        server.give_up(self._device().id)
        server.plan()

    def repeat_message(self) -> None:
        server = self._server()
        if server.sent:
            server.arrive(*self.rng.choice(server.sent[-6:]))

    def made_up_plan(self) -> None:
        plans = [plan for server in self.servers for _, plan in server.sent[-4:]]
        plans += [server.next_plan_id for server in self.servers]
        self._device().ask_to_train(self.rng.choice(plans), self.rng.random() * 50.0, False)

    def change_budget(self) -> None:
        if self.rng.random() < 0.5:
            self._cut_to(0.4 + 0.7 * self.rng.random())
        else:
            self.set_budget(float(self.rng.randint(8, 70)))

    def cut_in_trouble(self) -> None:
        """The budget falls, twice perhaps, while it is hard to reach a device that trains."""
        training = [device for device in self.devices.values() if device.training is not None]
        if not training:
            return
        device, trouble = self.rng.choice(training), self.rng.randrange(4)
        self._focus = device
        self.note(f"{device.id} is hard to reach: {('flaps', 'answers lost', 'answers late', 'hangs up')[trouble]}")
        if trouble == 0:
            device.flaps_until_s = self.timeline.now_s + 60.0
            device.hang_up()
        elif trouble == 3:
            device.hang_up()
        elif device.stream is not None and trouble == 1:
            device.stream.down.lose()
        elif device.stream is not None:
            device.stream.down.stall(14.0 * self.rng.random())
        for seconds in (self.rng.random(), 12.0 * self.rng.random())[: self.rng.randint(1, 2)]:
            share = 0.2 + 0.8 * self.rng.random()
            self.timeline.after(seconds, lambda share=share: self._cut_to(share))

    def _cut_to(self, share: float) -> None:
        drawn_w = sum(device.drawn_w for device in self.devices.values())
        self.set_budget(float(round(share * drawn_w)))

    def lose(self) -> None:
        """A session becomes half-open."""
        device, which = self._device(), self.rng.randrange(4)
        if device.stream is not None and self.rng.random() < 0.3:  # its last answers arrive late
            stream, seconds = device.stream, self.rng.random() * 14.0
            self.note(f"{device.id}: answers stalled for {seconds:.1f} s, then lost")
            stream.down.stall(seconds)
            self.timeline.after(seconds + 0.01, stream.down.lose)
            return
        if device.stream is not None:
            self.note(f"{device.id}: {('up', 'down', 'both', 'both')[which]} lost")
            if which != 1:
                device.stream.up.lose()
            if which != 0:
                device.stream.down.lose()
        if which == 3:
            device.unreachable_until_s = self.timeline.now_s + self.rng.random() * 60.0

    def flap(self) -> None:
        """For a while, each session of a device is lost after a few answers."""
        device = self._device()
        device.flaps_until_s = self.timeline.now_s + self.rng.random() * 60.0
        self.note(f"{device.id}: flaps until {device.flaps_until_s:.1f} s")
        device.hang_up()

    def stall(self) -> None:
        device = self._device()
        if device.stream is not None:
            seconds = self.rng.random() * 20.0
            self.note(f"{device.id}: stalled for {seconds:.1f} s")
            if self.rng.random() < 0.7:
                device.stream.down.stall(seconds)
            if self.rng.random() < 0.7:
                device.stream.up.stall(seconds)

    def drop(self) -> None:
        device = self._device()
        self.note(f"{device.id}: hangs up")
        device.hang_up()

    def restart_agent(self) -> None:
        device, down_s = self._device(), self.rng.random() * 10.0
        device.restart(down_s)
        sent = [(server, plan_id) for server in self.servers for to, plan_id in server.sent[-4:] if to == device.id]
        if sent and self.rng.random() < 0.5:  # Flower's node restarts as well, and gets its message again
            server, plan_id = self.rng.choice(sent)
            self.timeline.after(down_s + self.rng.random() * 5.0, lambda: server.arrive(device.id, plan_id))

    def restart_coordinator(self) -> None:
        self.coordinator.crash(self.rng.random() * (3.0 if self.rng.random() < 0.7 else 30.0))

    def fail_store(self) -> None:
        self.coordinator.store_fails_until_s = self.timeline.now_s + self.rng.random() * 20.0

    def restart_server(self) -> None:
        self._server().restart(self.rng.random() < 0.5)

    def finish_run(self) -> None:
        self._server().finish_run()

    def abandon(self) -> None:
        fleet = self.coordinator.fleet
        if fleet is not None and (in_flight := sorted(each.plan_id for each in fleet.rounds.in_flight())):
            self.coordinator.abandon(self.rng.choice(in_flight))

    def drain(self) -> None:
        self.coordinator.drain(self._device().id, self.rng.random() < 0.6)

    def app_dies(self) -> None:
        self._device().app_dies()

    def profile(self) -> None:
        self._device().profile(self.rng.random() * 20.0)

    def wait(self) -> None:
        pass


_RULES: dict[str, tuple[int, Callable[[World], None]]] = {
    "plan": (20, World.plan),
    "plan and finish": (3, World.plan_and_finish),
    "plan and crash": (2, World.plan_and_crash),
    "finish unheard": (2, World.finish_unheard),
    "finish round": (5, World.finish_round),
    "give a device up and plan": (4, World.give_up_device),
    "repeat a message": (5, World.repeat_message),
    "ask for a made-up plan": (4, World.made_up_plan),
    "change the budget": (10, World.change_budget),
    "cut in trouble": (7, World.cut_in_trouble),
    "lose a session": (7, World.lose),
    "flap": (3, World.flap),
    "stall a session": (4, World.stall),
    "drop a session": (3, World.drop),
    "restart an agent": (4, World.restart_agent),
    "restart the coordinator": (4, World.restart_coordinator),
    "fail the store": (3, World.fail_store),
    "restart a Flower server": (2, World.restart_server),
    "finish a run": (2, World.finish_run),
    "abandon a round": (1, World.abandon),
    "drain": (2, World.drain),
    "kill an app": (2, World.app_dies),
    "profile": (3, World.profile),
    "wait": (4, World.wait),
}

NOTHING = "wait"

PROFILING = "profile"
"""A rule that is off by default: profiling is not granted."""


def steps_of(seed: int, profiling: bool = False) -> list[Step]:
    """The steps of a random world."""
    rng = random.Random(seed * 2 + 1)
    rules = [name for name in _RULES if profiling or name != PROFILING]
    weights = [_RULES[name][0] for name in rules]
    return [
        Step(rule, round(_wait_s(rng), 2), rng.randrange(1 << 30))
        for rule in rng.choices(rules, weights, k=rng.randint(5, STEPS))
    ]


def run(seed: int, steps: Sequence[Step], notes: list[str] | None = None) -> BrokenPromiseError | None:
    """Live through a world; returns the promise that was broken."""
    world = World(seed, notes)
    try:
        for step in steps:
            world.take(step)
        world.settle()
    except BrokenPromiseError as error:
        return error
    return None


def _wait_s(rng: random.Random) -> float:
    """Seconds between two steps: many things happen almost together, and some long after."""
    return rng.random() * rng.choices((0.3, 3.0, 8.0, 40.0), (35, 30, 20, 15))[0]


def _front(rng: random.Random) -> Front:
    k = rng.randint(1, 4)
    seconds = sorted(rng.sample(range(2, 30), k))
    watts = sorted(rng.sample(range(6, 30), k), reverse=True)
    return front(*zip(map(float, seconds), map(float, watts), strict=True))
