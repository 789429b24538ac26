"""The invariants of every world, and what a coordinator may count on, stated without the code under test."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from itertools import combinations
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceRecord, RoundRecord, run_of
from coordinator.state.rounds.grants import DeviceGrant, Grant
from coordinator.state.rounds.ledger import RoundRequest
from edge_agent.session.grants import AgentGrant
from tests.worlds.flower import workload_of
from tests.worlds.timeline import CONFIRM_TIMEOUT_S, DRIFT, TICK_S
from wattfleet.core.choosing import Front
from wattfleet.core.planning import SITE, Assignment, History
from wattfleet.core.planning.policies import FastestK, RandomK
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import session_pb2

if TYPE_CHECKING:
    from coordinator.state.records import RoundRecord
    from coordinator.state.rounds.grants import Grant
    from coordinator.state.rounds.ledger import RoundRequest
    from tests.worlds.agent import Device
    from tests.worlds.timeline import Stream
    from tests.worlds.world import World
    from wattfleet.core.choosing import Front
    from wattfleet.core.planning import Offer


# --- Account ----------------------------------------------------------------------------------------------------------
# What a coordinator counts for its devices, and which of them it can count on, stated without its own rules.


# Events are put just at a time-out, too. By then, sums of times may differ by rounding.
_ROUNDING_S = 1e-9


class Account:
    """The account of one coordinator, from its start to its end."""

    def __init__(self, world: World, fleet: Fleet, now_s: Callable[[], float]) -> None:
        """Open the account of a coordinator that starts now.

        Args:
            world: the world.
            fleet: the coordinator's fleet.
            now_s: the coordinator's clock.
        """
        self._world, self._fleet, self._now_s = world, fleet, now_s
        self._started_s = now_s()
        self._counted: dict[str, tuple[DeviceRecord, DeviceGrant | None, float]] = {}
        # The newest grant sent in each session, with its time; and the devices whose session has brought a lease.
        self._sent: dict[str, tuple[int, float]] = {}
        self._heard: set[str] = set()

    def session_began(self, device_id: str) -> None:
        """A session begins: nothing was sent in it, and no lease has come."""
        self._sent.pop(device_id, None)
        self._heard.discard(device_id)

    def heard(self, device_id: str) -> None:
        """A session brings a lease."""
        self._heard.add(device_id)

    def sent(self, device_id: str, grant: Grant) -> None:
        """A grant is sent in a session."""
        self._sent[device_id] = grant.grant_id, self._now_s()

    def counted_w(self, device_id: str) -> float:
        """The power that the coordinator counts for a device."""
        record, grant = self._fleet.agents.devices[device_id], self._fleet.rounds.grants.of(device_id)
        before = self._counted.get(device_id)
        if before is None or before[0] is not record or before[1] is not grant:
            others = self._fleet.agents.devices.keys() - {device_id}
            before = record, grant, sum(self._fleet.draw.elsewhere_w(others).values())
            self._counted[device_id] = before
        return before[2]

    def excess(self) -> tuple[float, list[str]]:
        """The watts above the budget once every device that can be counted on keeps to its newest grant.

        A device can be counted on once its session has brought a lease or has carried this grant to it. This ends when
        the device has failed to confirm the grant in time. After a restart of the coordinator, an absent device is
        expected to return for the lifetime of a grant.

        Returns:
            The watts, negative if the budget holds, and the devices of these that could be sent a lower limit.
        """
        fleet, world = self._fleet, self._world
        if sum(map(self.counted_w, world.devices)) <= world.budget_w:
            return -1.0, []
        could_be_told = []
        for device_id in world.devices:
            record, grant = fleet.agents.devices[device_id], fleet.rounds.grants.of(device_id)
            if grant is not None and all(self._counts_on(device_id)):
                can_be_lowered = grant.is_given_up or not fleet.agents.is_profiling(device_id)
                if can_be_lowered and grant.granted_w > (record.idle_w or 0.0):
                    could_be_told.append(device_id)
        return self._expected_w() - world.budget_w, could_be_told

    def _expected_w(self) -> float:
        """The power of all devices once every device that can be counted on keeps to its newest grant."""
        fleet, total_w = self._fleet, 0.0
        for device_id in self._world.devices:
            others = fleet.agents.devices.keys() - {device_id}
            believed = {device_id} if self._counts_on(device_id)[1] else frozenset()
            total_w += sum(fleet.draw.elsewhere_w(others, believed).values())
        return total_w

    def limits_w(self) -> dict[str, float]:
        """The power that rounds grant each of their devices, idle power included."""
        return {
            device_id: max(known.granted_w, self._fleet.agents.devices[device_id].idle_w or 0.0)
            for device_id, known in self._fleet.rounds.grants.in_flight()
        }

    def spared_w(self, before_w: Mapping[str, float]) -> float:
        """The watts within the budget that are left if the rounds in flight keep the limits that they had before."""
        now_w = self.limits_w()
        lowered_w = sum(watts - now_w.get(device_id, watts) for device_id, watts in before_w.items())
        return self._world.budget_w - self._expected_w() - lowered_w

    def measuring(self) -> dict[str, str]:
        """The devices that can be counted on and may measure, each with the id of its training."""
        grants, found = self._fleet.rounds.grants, {}
        for device_id in self._world.devices:
            known = grants.of(device_id)
            if known is not None and known.grant.measuring and known.granted_w and self._counts_on(device_id)[1]:
                found[device_id] = known.plan_id
        return found

    def _counts_on(self, device_id: str) -> tuple[bool, bool]:
        """Whether a device with a grant can be sent another one, and whether it can be counted on."""
        fleet, now_s, grant = self._fleet, self._now_s(), self._fleet.rounds.grants.of(device_id)
        if grant is None or grant.is_over:
            return False, False
        sent_id, sent_s = self._sent.get(device_id, (0, 0.0))
        is_sent = sent_id == grant.grant.grant_id
        is_late = is_sent and now_s - sent_s >= CONFIRM_TIMEOUT_S - _ROUNDING_S
        is_there = fleet.agents.is_connected(device_id) and (device_id in self._heard or is_sent)
        is_expected = not grant.was_sent and now_s - self._started_s < self._world.lifetime_s
        return is_there, grant.is_confirmed or not is_late if is_there else is_expected


# --- Plan oracle ------------------------------------------------------------------------------------------------------
# Conditions on a plan: it uses the devices' own fronts for the run's workload, and no plan is better.

MOST_TRIED = 6
"""Devices up to which every set of them is tried."""

_Z_WATTS = NormalDist().inv_cdf(0.95)
_Z_TIME = NormalDist().inv_cdf(0.9)
_CLOSE = 1e-9

Points = Sequence[tuple[float, float]]
"""The seconds and watts of each mode that a device may train in."""


def points_of(front: Front, idle_w: float, factor: float = 1.0) -> Points:
    """The points of a front as plans count them: 90 % of the trainings take less time, 95 % draw less power."""
    return [
        (
            float(front.warmup_s[k] + factor * front.epoch_s[k] * math.exp(_Z_TIME * front.epoch_log_sd[k])),
            max(idle_w, float(front.power_w[k] * math.exp(_Z_WATTS * front.power_log_sd[k]))),
        )
        for k in range(len(front))
    ]


def is_on(assignment: Assignment, front: Front, factor: float) -> bool:
    """Whether a device's assignment is a point of a front.

    Args:
        assignment: the device's assignment.
        front: a front that it reported.
        factor: minibatches of an epoch, as a ratio to those of the front.
    """
    for k in range(len(front)):
        told = (front.epoch_s[k] * factor, front.power_w[k], front.warmup_s[k])
        planned = (assignment.epoch_s, assignment.power_w, assignment.warmup_s)
        is_close = all(math.isclose(*pair, rel_tol=_CLOSE, abs_tol=_CLOSE) for pair in zip(told, planned, strict=True))
        if front.mode(k) == assignment.mode and is_close:
            return True
    return False


def better_plan(request: RoundRequest, record: RoundRecord, fronts: Mapping[str, Points]) -> str | None:
    """A better plan for a few devices, in words; None if there is none.

    The best plan has as many devices as the policy requests and the budget allows, and then the shortest makespan. All
    sets of devices are tried, with each of their times as the limit.

    Args:
        request: the request for the plan.
        record: the plan.
        fronts: the modes of each offered device.
    """
    chosen = {each.device_id for each in record.plan.assignments}
    candidates = _candidates(request)
    wanted = len(candidates)
    if isinstance(request.policy, RandomK):  # the set is random
        candidates, wanted = sorted(chosen), len(chosen)
    elif isinstance(request.policy, FastestK) and request.policy.count is not None:
        wanted = min(wanted, request.policy.count)
    idle_w = {offer.device_id: offer.idle_w for offer in request.offers}
    used_w = sum(request.allowance.elsewhere_w.values()) + sum(request.allowance.left_w.values())
    spare_w = request.allowance.budget_w[SITE] - used_w - sum(idle_w.values())
    extra = {each: [(seconds, watts - idle_w[each]) for seconds, watts in fronts[each]] for each in candidates}
    best = min(((-len(found), seconds) for found, seconds in _plans(extra, wanted, spare_w)), default=(0, 0.0))
    longest_s = max(map(_seconds_of, record.plan.assignments))
    if len(chosen) < -best[0] or (len(chosen) == -best[0] and longest_s > best[1] * (1 + _CLOSE)):
        return f"{len(chosen)} devices in {longest_s:.2f} s, and {-best[0]} in {best[1]:.2f} s are possible"
    return None


def _candidates(request: RoundRequest) -> list[str]:
    """The offered devices that no rule excludes before the policy selects."""
    selection, ids = request.selection, [offer.device_id for offer in request.offers]
    failing = {each for each in ids if _backs_off(request.history, each, request.number)}
    if failing == set(ids):
        failing = set()
    return sorted(set(ids) - selection.drained - selection.left_out.keys() - failing)


def _backs_off(history: History, device_id: str, number: int) -> bool:
    """Whether a device skips this round because of failures: one round after two failures in a row, and so on."""
    failures, last = history.consecutive_failures.get(device_id, (0, 0))
    return failures > 0 and number < last + min(2 ** (failures - 1), 16)


def _plans(extra: Mapping[str, Points], wanted: int, spare_w: float) -> Iterator[tuple[tuple[str, ...], float]]:
    limits_s = sorted({seconds for points in extra.values() for seconds, _ in points})
    for count in range(1, wanted + 1):
        for devices in combinations(extra, count):
            for limit_s in limits_s:
                least_w = [
                    min((watts for seconds, watts in extra[each] if seconds <= limit_s), default=math.inf)
                    for each in devices
                ]
                if sum(least_w) <= spare_w:
                    yield devices, limit_s
                    break


def _seconds_of(assignment: Assignment) -> float:
    """The seconds of a training that 90 % of the trainings do not exceed."""
    return assignment.warmup_s + assignment.epoch_s * math.exp(_Z_TIME * assignment.epoch_log_sd)


# --- Oracle -----------------------------------------------------------------------------------------------------------
# The invariants of every world, stated without the code under test.

PARKING_S = 3.0
"""Seconds in which a device parks, which the margin of a grant covers."""


_EPS_W = 1e-6
PROMPTLY_S = 8.0
"""Seconds in which a lower budget holds while every session is sound: two mode changes, a park and a tick."""
_FREED_S = 8.0
"""Seconds in which a sound session reports that a training is over, even if its grant is sent again: two leases."""


class BrokenPromiseError(AssertionError):
    """An invariant that does not hold in a world; the text states which, and when."""

    def __init__(self, promise: str, text: str) -> None:
        """Name the invariant, and state what happened instead."""
        super().__init__(text)
        self.promise = promise


class Ledger:
    """The grants that one life of an agent has received, and when they end."""

    def __init__(self) -> None:
        self.sent_s: dict[int, float] = {}
        self.contact_s = self.lapses_s = -float("inf")
        self.newest: session_pb2.Grant | None = None
        self.trained_plans: set[str] = set()
        self.trained_grants: set[int] = set()


class Oracle:
    """Checks the invariants of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cut_s = -float("inf")
        self._ended_s: dict[str, float] = {}
        self._sent_w: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        self._newest_plan: dict[str, str] = {}
        self._ledgers: dict[str, Ledger] = defaultdict(Ledger)
        self._unanswered_since_s: float | None = None
        # The plans of trainings that are over but count, each with the session and since when.
        self._overcounted: dict[str, tuple[str, Stream, float]] = {}
        self.worst_excess_w = 0.0
        self._drawn_j: dict[str, float] = defaultdict(float)
        self._planned_on: dict[str, date] = {}
        self._day_j: dict[date, float] = defaultdict(float)

    # --- events -------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """The budget falls."""
        self._cut_s = self._world.timeline.now_s

    def cut_answered(self) -> None:
        """The coordinator has taken the lower budget: its orders are made by now."""
        self._check_orders(is_due=True)

    def run_ended(self, run_id: str) -> None:
        """The coordinator learns that a run has ended."""
        self._ended_s[run_id] = self._world.timeline.now_s

    def issued(self, device_id: str, grant: Grant) -> None:
        """The coordinator sends a grant."""
        self._sent_w[device_id, grant.plan_id].append((self._world.timeline.now_s, grant.limit_w))
        self._newest_plan[device_id] = grant.plan_id

    def started(self) -> None:
        """Another coordinator has started: it knows the trainings that its predecessor granted."""
        fleet = self._world.coordinator.fleet
        assert fleet is not None
        for device_id, plan_id in self._newest_plan.items():
            held, known = self._world.devices[device_id].held, fleet.rounds.grants.of(device_id)
            if held.phase is not GrantPhase.OVER and held.in_force is not None and held.in_force.plan_id == plan_id:
                named = None if known is None else known.plan_id
                self._require("restored", named == plan_id, f"{device_id} is granted {plan_id}, restored is {named}")

    def restarted(self, device: Device) -> None:
        """The agent is restarted."""
        self._ledgers[device.id] = Ledger()

    def drew(self, plan_id: str, joules: float) -> None:
        """A training has drawn joules above idle; those of a run never exceed its energy budget."""
        run_id = run_of(plan_id)
        self._drawn_j[run_id] += joules
        budget_j = self._world.energy_budget_j(run_id)
        if budget_j is not None and self._drawn_j[run_id] > budget_j * (1 + _CLOSE):
            raise self._broken("joules", f"{run_id} has drawn {self._drawn_j[run_id]:.0f} J of {budget_j:.0f} J")
        if self._world.shares_energy and plan_id in self._planned_on:
            day = self._planned_on[plan_id]
            self._day_j[day] += joules
            if self._day_j[day] > self._world.site_energy_j * (1 + _CLOSE):
                raise self._broken(
                    "joules of a day",
                    f"{self._day_j[day]:.0f} J were drawn on {day} of {self._world.site_energy_j:.0f} J",
                )
        fleet = self._world.coordinator.fleet
        account = None if fleet is None else fleet.flower.energy.of(run_id)
        if account is not None:
            counted_j = account.spent_j + account.set_aside_j
            if self._drawn_j[run_id] > counted_j * (1 + _CLOSE) + _CLOSE:
                raise self._broken(
                    "joules counted", f"{run_id} has drawn {self._drawn_j[run_id]:.0f} J and counts {counted_j:.0f} J"
                )

    def spent(self, run_id: str, spent_j: float, budget_j: float, least_j: float) -> None:
        """No further round of a run can be planned, because its energy is used up.

        Args:
            run_id: the run.
            spent_j: what its trainings have reported, or what was set aside for those that did not report.
            budget_j: its energy budget.
            least_j: the least that was set aside for one of its trainings.
        """
        self._require(
            "spent",
            budget_j - max(0.05 * budget_j, least_j) <= spent_j <= budget_j * (1 + _CLOSE),
            f"{run_id} has spent {spent_j:.0f} J of {budget_j:.0f} J",
        )
        drawn_j = self._drawn_j[run_id]
        self._require("spent", drawn_j <= spent_j * (1 + _CLOSE), f"{run_id} has drawn {drawn_j:.0f} J")

    def greeted(self, device: Device) -> None:
        """The agent sends a Hello."""
        self._ledgers[device.id].sent_s = {0: device.clock_s()}

    def leased(self, device: Device, number: int) -> None:
        """The agent sends a lease."""
        self._ledgers[device.id].sent_s[number] = device.clock_s()

    def welcomed(self, device: Device) -> None:
        """A Hello is answered: grants after it have a lease."""
        ledger = self._ledgers[device.id]
        ledger.contact_s = max(ledger.contact_s, ledger.sent_s[0])

    def acknowledged(self, device: Device, number: int, is_renewed: bool) -> None:
        """A lease is acknowledged."""
        ledger = self._ledgers[device.id]
        if is_renewed and number in ledger.sent_s:
            ledger.contact_s = max(ledger.contact_s, ledger.sent_s[number])
            ledger.lapses_s = ledger.contact_s + self._world.lifetime_s

    def received(self, device: Device, grant: session_pb2.Grant) -> None:
        """The agent receives a grant."""
        ledger = self._ledgers[device.id]
        ledger.newest = grant
        ledger.lapses_s = ledger.contact_s + self._world.lifetime_s

    def began(self, device: Device, grant: AgentGrant) -> None:
        """The agent begins a training."""
        ledger = self._ledgers[device.id]
        newest = ledger.newest
        self._require("granted", newest is not None and newest.HasField("mode"), f"{device.id} trains without a grant")
        assert newest is not None
        self._require(
            "granted",
            newest.plan_id == grant.plan_id,
            f"{device.id} trains {grant.plan_id}, granted is {newest.plan_id}",
        )
        self._require(
            "granted", newest.power_limit_w == grant.power_limit_w, f"{device.id} trains at another limit than granted"
        )
        self._require("granted", device.clock_s() < ledger.lapses_s, f"{device.id} begins under a lapsed grant")
        self._require("once", newest.id not in ledger.trained_grants, f"{device.id} trains twice for grant {newest.id}")
        self._require(
            "once", grant.plan_id not in ledger.trained_plans, f"{device.id} trains twice for plan {grant.plan_id}"
        )
        ledger.trained_grants.add(newest.id)
        ledger.trained_plans.add(grant.plan_id)

    def has_trained(self, device_id: str, plan_id: str) -> bool:
        """Whether a device has begun the training of a plan in this life of its agent."""
        return plan_id in self._ledgers[device_id].trained_plans

    def planned(self, request: RoundRequest, record: RoundRecord) -> None:
        """A plan is put in force."""
        self._planned_on[record.plan_id] = self._world.date().date()
        workload = workload_of(record.run_id)
        for device_id, plan_id in self._world.coordinator.account.measuring().items():
            self._require(
                "yields",
                device_id not in request.nodes and run_of(plan_id) == record.run_id,
                f"{device_id} measures for {plan_id} while {record.plan_id} is planned",
            )
        factors = {each.device_id: self.factor(each.device_id, workload) for each in request.offers}
        for assigned in record.plan.assignments:
            fronts = self._world.devices[assigned.device_id].reported_fronts(workload)
            self._require(
                "own front",
                any(is_on(assigned, front, factors[assigned.device_id]) for front in fronts),
                f"{assigned.device_id} is planned for {record.plan_id} with another front than that of {workload}",
            )
        if len(request.offers) > MOST_TRIED or request.energy is not None or request.stores is not None:
            return
        fronts_of = {
            each.device_id: points_of(
                self._front_of(each, workload, factors[each.device_id]), each.idle_w, factors[each.device_id]
            )
            for each in request.offers
        }
        better = better_plan(request, record, fronts_of)
        self._require("best plan", better is None, f"{record.plan_id} has {better}")

    def measures(self, plan_id: str) -> None:
        """Devices are granted watts to measure."""
        counted_w = sum(map(self._world.coordinator.account.counted_w, self._world.devices))
        budget_w = self._world.budget_w
        self._require("fits", counted_w <= budget_w + _EPS_W, f"{counted_w:.0f} W of {budget_w:.0f} W with {plan_id}")

    def trimmed(self, records: Sequence[RoundRecord], before_w: Mapping[str, float]) -> None:
        """Rounds are trimmed to a budget; this must be necessary, although nobody measures any more."""
        if records:
            account = self._world.coordinator.account
            measuring, spared_w = account.measuring(), account.spared_w(before_w)
            trimmed = [each.plan_id for each in records]
            self._require("measuring first", not measuring, f"{trimmed} are trimmed, although {measuring} measure")
            self._require("measuring first", spared_w < 0, f"{trimmed} are trimmed, although {spared_w:.0f} W are left")

    def _front_of(self, offer: Offer, workload: str, factor: float) -> Front:
        """The reported front of a device that the plan was made from."""
        reported = self._world.devices[offer.device_id].reported_fronts(workload)
        found = [each for each in reported if np.allclose(each.epoch_s[0] * factor, offer.front.epoch_s[0])]
        self._require("own front", bool(found), f"{offer.device_id} is offered with another front than of {workload}")
        return found[0]

    def factor(self, device_id: str, workload: str) -> float:
        """Minibatches of a device's epoch, as a ratio to those of its front."""
        return 1.0

    def front_heard(self, device_id: str, workload: str, front: Front) -> None:
        """The coordinator receives a front."""

    def removal_heard(self, device_id: str, workload: str) -> None:
        """The coordinator receives the report that a device has removed a workload."""

    # --- invariants ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check everything at this moment."""
        world, now_s = self._world, self._world.timeline.now_s
        devices = world.devices.values()
        self._check_orders()
        self._check_ended()
        for device in devices:
            self._check_freed(device)
        drawing = [device for device in devices if device.training is not None or device.is_profiling]
        if not drawing:
            return
        for device in drawing:
            drawn_w = device.drawn_w
            counted_w = drawn_w if world.coordinator.fleet is None else world.coordinator.account.counted_w(device.id)
            if counted_w < drawn_w:
                raise self._broken("counted", f"{device.id} draws {drawn_w:.0f} W but counts {counted_w:.0f} W")
            if device.training is not None:
                late_s = device.clock_s() - self._ledgers[device.id].lapses_s
                if late_s > PARKING_S + 0.1:
                    raise self._broken("lapsed", f"{device.id} trains {late_s:.1f} s after its grant lapsed")
                if device.training.measuring is not None:
                    self._check_measuring(device, run_of(device.training.plan_id))
        total_w = sum(device.drawn_w for device in devices)
        if total_w <= world.budget_w + _EPS_W:
            return
        excess = f"{total_w:.0f} W are drawn of {world.budget_w:.0f} W: {[device.drawn_w for device in devices]}"
        self.worst_excess_w = max(self.worst_excess_w, total_w - world.budget_w)
        for device in drawing:
            plan_id = "" if device.training is None else device.training.plan_id
            sent = self._sent_w[device.id, plan_id]
            before_w = max((watts for at_s, watts in sent if at_s <= self._cut_s), default=0.0)
            if device.drawn_w > max(before_w, device.idle_w):
                raise self._broken(
                    "cut", f"{excess}; {device.id} had {before_w:.0f} W when the budget fell at {self._cut_s:.1f} s"
                )
        since_s = now_s - self._cut_s
        if since_s > world.lifetime_s * (1 + DRIFT) + world.margin_s:
            raise self._broken("stated time", f"{excess}, {since_s:.1f} s after the budget fell")
        if since_s > PROMPTLY_S and world.is_sound_since(self._cut_s):
            raise self._broken("promptly", f"{excess}, {since_s:.1f} s after the budget fell, with all sessions sound")

    def _check_orders(self, is_due: bool = False) -> None:
        """Check the coordinator's own account: an excess that an order could end has its order by the next look.

        After the budget has fallen, the orders are made at once. Other reasons for an excess, such as a device that
        turns out not to obey, are looked for once per tick. So is a device that can be counted on again, even if its
        lease arrives at the moment of the cut, but after it.

        Args:
            is_due: whether the coordinator has just made its orders, so that no excess may wait for the next look.
        """
        world, now_s = self._world, self._world.timeline.now_s
        if world.coordinator.fleet is None:
            self._unanswered_since_s = None
            return
        excess_w, could_be_told = world.coordinator.account.excess()
        if excess_w <= _EPS_W or not could_be_told:
            self._unanswered_since_s = None
            return
        since_s = self._unanswered_since_s = now_s if self._unanswered_since_s is None else self._unanswered_since_s
        if is_due or now_s - since_s > TICK_S + _EPS_W:
            waited_s = now_s - since_s
            raise self._broken(
                "answered",
                f"devices may draw {excess_w:.0f} W above the budget of {world.budget_w:.0f} W, although"
                f" {could_be_told} could be sent an order; no order is on its way since {waited_s:.2f} s",
            )

    def _check_ended(self) -> None:
        """Check the coordinator's own account: nobody may measure for a run that has ended."""
        fleet = self._world.coordinator.fleet
        if fleet is None:
            return
        for device_id, plan_id in fleet.rounds.grants.of_measuring():
            known = fleet.rounds.grants.of(device_id)
            if known is not None and known.granted_w and fleet.flower.run(run_of(plan_id)).finished:
                raise self._broken("ended", f"{device_id} may measure for {plan_id}, although the run has ended")

    def _check_freed(self, device: Device) -> None:
        """Check the coordinator's own account: watts of a training that is over are free, unless its session fails."""
        now_s, fleet, stream = self._world.timeline.now_s, self._world.coordinator.fleet, device.stream
        known = None if fleet is None else fleet.rounds.grants.of(device.id)
        is_over = known is not None and device.training is None and self.has_trained(device.id, known.plan_id)
        if known is None or not is_over or not known.counted_w or stream is None or not stream.is_sound:
            self._overcounted.pop(device.id, None)
            return
        before = self._overcounted.get(device.id)
        if before is None or before[:2] != (known.plan_id, stream):
            self._overcounted[device.id] = known.plan_id, stream, now_s
        elif now_s - before[2] > _FREED_S:
            text = f"{device.id} counts {known.counted_w:.0f} W for {known.plan_id} since {before[2]:.2f} s"
            raise self._broken("freed", f"{text}, although this training is over")

    def _check_measuring(self, device: Device, run_id: str) -> None:
        """Check that a device stops measuring soon after the end of the run."""
        world, fleet = self._world, self._world.coordinator.fleet
        if fleet is None or not fleet.flower.run(run_id).finished:
            return
        since_s = world.timeline.now_s - self._ended_s[run_id]
        is_late = since_s > world.lifetime_s * (1 + DRIFT) + world.margin_s
        if is_late or (since_s > PROMPTLY_S and world.is_sound_since(self._ended_s[run_id])):
            raise self._broken("ended", f"{device.id} measures {since_s:.1f} s after the end of {run_id}")

    def _broken(self, promise: str, text: str) -> BrokenPromiseError:
        return BrokenPromiseError(promise, f"at {self._world.timeline.now_s:.2f} s: {text}")

    def _require(self, promise: str, holds: bool, otherwise: str) -> None:
        if not holds:
            raise self._broken(promise, otherwise)
