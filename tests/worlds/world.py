"""One random world: devices with agents, a coordinator, two Flower servers, an operator, and their failures."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from unittest.mock import patch

from coordinator.settings import GrantSettings
from tests.fakes.fleets import front
from tests.worlds.agent import PROFILE_MODES, Device
from tests.worlds.coordinator import Coordinator
from tests.worlds.flower import FlowerServer, workload_of
from tests.worlds.oracle import BrokenPromiseError, Oracle
from tests.worlds.rules import RULES, Step
from tests.worlds.timeline import CONFIRM_TIMEOUT_S, LEASE_S, LIFETIMES_S, MARGIN_S, Timeline
from wattfleet.core.budgets import Period, PeriodBudget
from wattfleet.core.choosing import Front
from wattfleet.core.errors import EnergySpentError
from wattfleet.core.planning.curves import SITE
from wattfleet.core.planning.policies import AllDevices, FastestK, Policy, RandomK


class World:
    """One world.

    Attributes:
        devices: the devices by id.
        budget_w: the site's current budget.
        date_s: offset of the date, in seconds.
        focus: the device of the last event.
        announces: whether the coordinator announces workloads.
        max_fronts: the most fronts of a device that the coordinator keeps.
        has_energy: whether each run has an energy budget.
        shares_energy: whether the site has an energy budget for each day, which all runs share.
    """

    announces = False
    max_fronts = 32
    has_energy = shares_energy = False
    devices: Mapping[str, Device]
    servers: Sequence[FlowerServer]

    def __init__(
        self, seed: int, notes: list[str] | None = None, has_energy: bool = False, shares_energy: bool = False
    ) -> None:
        """Make a world.

        Args:
            seed: seed of its devices, settings and first details.
            notes: receives a line of text for every event.
            has_energy: whether each run has an energy budget.
            shares_energy: whether the site has an energy budget for each day.
        """
        self._seed, self.has_energy, self._is_settling = seed, has_energy, False
        self.shares_energy = shares_energy
        self.site_energy_j = random.Random(f"{seed} energy of a day").uniform(300.0, 6e3)
        self._budgets_j: dict[str, float] = {}
        self.rng = random.Random(seed)
        self._notes = notes
        self.timeline = Timeline(self._check)
        self.date_s = 0.0
        self._draw_settings(self.rng, seed)
        self.grant_settings = GrantSettings(
            lifetime_s=self.lifetime_s, stop_margin_s=self.margin_s, confirm_timeout_s=CONFIRM_TIMEOUT_S
        )
        self.oracle = self._new_oracle()
        self.coordinator = Coordinator(self)
        self.devices = self._new_devices(self.rng, seed)
        self.focus = next(iter(self.devices.values()))
        self.servers = self._new_servers()
        self.timeline.advance(4.0)

    def _draw_settings(self, rng: random.Random, seed: int) -> None:
        self.budget_w = float(rng.randint(30, 120))
        policies: list[Policy] = [AllDevices(), AllDevices(), FastestK(2), RandomK(2, seed=seed)]
        self.policy: Policy = rng.choice(policies)
        self.lifetime_s = rng.choice(LIFETIMES_S)
        self.margin_s = MARGIN_S
        self.lease_s, self.slowest_s = LEASE_S, rng.choice([0.05, 0.5])

    def _new_oracle(self) -> Oracle:
        return Oracle(self)

    def _new_devices(self, rng: random.Random, seed: int) -> Mapping[str, Device]:
        devices = {}
        others = random.Random(-1 - seed)
        measured = random.Random(f"modes measured in world {seed}")
        for k in range(rng.randint(2, 4)):
            fronts = {"a": _front(rng), "b": _front(others)}
            device = Device(self, f"d{k}", fronts, float(rng.randint(1, 4)), rng.uniform(-0.009, 0.009))
            device.measured_modes = {name: measured.choice((0, 0, 5, PROFILE_MODES)) for name in fronts}
            devices[device.id] = device
            self.coordinator.enrol(device, k)
        return devices

    def _new_servers(self) -> Sequence[FlowerServer]:
        return [FlowerServer(self, "a"), FlowerServer(self, "b")]

    def _check(self) -> None:
        for device in self.devices.values():
            device.meter()
        self.oracle.check()

    def energy_budget_j(self, run_id: str) -> float | None:
        """The joules above idle that a run may draw; None without an energy budget.

        While the world is eventful, the energy of most runs is used up soon.
        """
        if not self.has_energy:
            return None
        if run_id not in self._budgets_j:
            draw = random.Random(f"{self._seed} {run_id}")
            is_scarce = not self._is_settling and draw.random() < 0.7
            self._budgets_j[run_id] = draw.uniform(300.0, 2e3) if is_scarce else draw.uniform(2.5e3, 1.5e4)
        return self._budgets_j[run_id]

    def date(self) -> datetime:
        """The date and time."""
        return datetime.fromtimestamp(1.7e9 + self.timeline.now_s + self.date_s, timezone.utc)

    def energy_budgets(self) -> dict[str, PeriodBudget]:
        """The energy budgets of supplies."""
        return {SITE: PeriodBudget(self.site_energy_j, Period.DAY)} if self.shares_energy else {}

    @property
    def run_ids(self) -> set[str]:
        """The runs that the coordinator knows."""
        fleet = self.coordinator.fleet
        return set() if fleet is None else set(fleet.flower.runs)

    def note(self, text: str) -> None:
        """Record an event, if `notes` is given."""
        if self._notes is not None:
            self._notes.append(f"{self.timeline.now_s:8.2f}  {text}")

    def is_sound_since(self, since_s: float) -> bool:
        """Whether no session has been disturbed since a given time."""
        return self.coordinator.fleet is not None and all(
            device.stream is not None
            and device.stream.is_sound
            and device.stream.began_s < since_s
            and max(device.stream.up.stalled_until_s, device.stream.down.stalled_until_s) < since_s
            for device in self.devices.values()
        )

    def take(self, step: Step) -> None:
        """Let time pass, and perform a step."""
        self.timeline.advance(step.wait_s)
        self.rng.seed(step.seed)
        self.note(f"-- {step.rule}")
        RULES[step.rule][1](self)
        self.oracle.check()

    def answer(self, device_id: str, plan_id: str) -> None:
        """A node replies to the Flower server that sent the message."""
        for server in self.servers:
            self.timeline.after(self.rng.random(), partial(server.answered, device_id, plan_id))

    def set_budget(self, watts: float) -> None:
        """Put another budget in force."""
        self.note(f"the budget is {watts:.0f} W")
        falls = watts < self.budget_w
        self.budget_w = watts
        if falls:
            self.oracle.cut()
        self.coordinator.set_budget(watts)
        if falls:
            self.oracle.cut_answered()

    def settle(self) -> None:
        """Let everything come to rest, and check that every device can be planned and trains.

        Raises:
            BrokenPromiseError: a device cannot.
        """
        self.note("-- settle")
        self._is_settling = True
        self.site_energy_j = 1e9
        if self.coordinator.fleet is not None and self.shares_energy:
            self.coordinator.fleet.stores.set_budget(SITE, self.energy_budgets()[SITE])
        self.coordinator.stored.fails_until_s = 0.0
        for device in self.devices.values():
            device.unreachable_until_s = device.flaps_until_s = 0.0
            device.app_dies()
        # The last server may forget what it has sent, and be silent from now on.
        ending = self.servers if self.rng.random() < 0.5 else self.servers[:-1]
        for server in self.servers[len(ending) :]:
            server.restart(resumes=True)
        self.timeline.advance(40.0)  # coordinators and agents that are down restart, and silent sessions end
        for server in ending:
            server.finish_run()
        for device in self.devices.values():
            self.coordinator.drain(device.id, False)
            device.app_dies()
        self.set_budget(1e4)
        fleet = self.coordinator.fleet
        assert fleet is not None
        for record in fleet.rounds.in_flight():  # rounds that their server has forgotten
            self.coordinator.abandon(record.plan_id)
        self.timeline.advance(self.lifetime_s * 1.01 + self.margin_s + 2.0)
        run_id, nodes = self.servers[0].run_id, list(range(len(self.devices)))
        if not (self.has_energy or self.shares_energy):
            self._measure_at_rest(run_id, nodes)
        request = None
        try:
            request = fleet.flower.request_round(run_id, 1, nodes, 1.0)
        finally:
            offered = {offer.device_id for offer in request.offers} if request else set()
            if left_out := self.devices.keys() - offered:
                raise BrokenPromiseError("plannable", f"{sorted(left_out)} cannot be planned in a quiet world")
        record = fleet.flower.accept_plan(request, request.planned())
        self.timeline.advance(1.0)
        self._train_at_rest(record.plan_id, sorted(record.nodes), 5.0)
        if self.has_energy:
            self._spend_at_rest(run_id, nodes)

    def _spend_at_rest(self, run_id: str, nodes: list[int]) -> None:
        """Train until the energy of a run is used up, and check that nearly all of it was spent."""
        fleet = self.coordinator.fleet
        assert fleet is not None
        least_j = float("inf")
        for number in range(2, 2_000):
            fleet.flower.release(run_id, nodes)
            self.timeline.advance(4.0)
            try:
                request = fleet.flower.request_round(run_id, number, nodes, 1.0)
                record = fleet.flower.accept_plan(request, request.planned())
            except EnergySpentError:
                break
            least_j = min(least_j, *(each.set_aside_j for each in record.plan.assignments))
            self.timeline.advance(1.0)
            for device_id in sorted(record.nodes):
                self.devices[device_id].ask_to_train(record.plan_id, 5.0, False)
            self.timeline.advance(15.0)
            self.coordinator.finish_round(record.plan_id)
        account = fleet.flower.energy.of(run_id)
        assert account is not None
        self.oracle.spent(run_id, account.spent_j + account.set_aside_j, account.budget_j, least_j)

    def _measure_at_rest(self, run_id: str, nodes: list[int]) -> None:
        """Check that devices measure, whatever was forgotten, and stop when a round needs them."""
        self.coordinator.stop_measuring(run_id, nodes)
        self.timeline.advance(3.0)
        measuring: dict[str, list[str]] = {}
        self.coordinator.measure(run_id, nodes, None, measuring.__setitem__)
        self.timeline.advance(1.0)
        name = workload_of(run_id)
        should = {each.id for each in self.devices.values() if each.measured_modes[name] < PROFILE_MODES}
        if left_out := should.difference(*measuring.values()):
            raise BrokenPromiseError("measurable", f"{sorted(left_out)} do not measure in a quiet world")
        for plan_id, device_ids in measuring.items():
            self._train_at_rest(plan_id, device_ids, 1e4)
        self.coordinator.stop_measuring(run_id, nodes)
        self.timeline.advance(5.0)

    def _train_at_rest(self, plan_id: str, device_ids: Sequence[str], lasts_s: float) -> None:
        for device_id in device_ids:
            self.devices[device_id].ask_to_train(plan_id, lasts_s, False)
        self.timeline.advance(8.0)
        idle = [each for each in device_ids if not self.oracle.has_trained(each, plan_id)]
        if idle:
            raise BrokenPromiseError("plannable", f"{idle} do not train for {plan_id} in a quiet world")


def run(
    seed: int,
    steps: Sequence[Step],
    notes: list[str] | None = None,
    has_energy: bool = False,
    shares_energy: bool = False,
) -> BrokenPromiseError | None:
    """Run a world; returns the invariant that was broken."""
    ids = random.Random(seed)  # grant ids, seeded so that a world can be repeated exactly
    with patch.object(secrets, "randbits", ids.getrandbits):
        world = World(seed, notes, has_energy, shares_energy)
        try:
            with patch.object(time, "time", lambda: 1.7e9 + world.timeline.now_s + world.date_s):
                for step in steps:
                    world.take(step)
                world.settle()
        except BrokenPromiseError as error:
            return error
    return None


def _front(rng: random.Random) -> Front:
    """A front of whole seconds and watts: either one slow mode, so that other devices can be slow, or several modes."""
    is_slow = rng.random() < 0.3
    k = 1 if is_slow else rng.randint(2, 4)
    seconds = sorted(rng.sample(range(20, 30) if is_slow else range(2, 30), k))
    watts = sorted(rng.sample(range(6, 30), k), reverse=True)
    return front(*zip(map(float, seconds), map(float, watts), strict=True))
