"""Conditions on a plan: it uses the devices' own fronts for the run's workload, and no plan is better."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import NormalDist

from coordinator.state.records import RoundRecord
from coordinator.state.rounds.ledger import RoundRequest
from wattfleet.choosing import Front
from wattfleet.planning import SITE, Assignment, History
from wattfleet.planning.policies import FastestK, RandomK

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
