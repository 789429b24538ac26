"""Round plans for tests: policies, histories and three devices with simple fronts."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fakes.fleets import (
    Fleet,
    history_of,
)
from tests.fakes.fronts import front
from wattfleet.planning import Allowance, History, Offer, Participation, RoundPlan, Selection, plan_round
from wattfleet.planning.policies import AllDevices, Deadline, Fair, FastestK, Oort, Policy, Progress, RandomK, Tiers

sizes = st.none() | st.integers(1, 5)
seeds = st.integers(0, 9)
draws = st.builds(RandomK, sizes, seeds) | st.builds(Tiers, sizes, st.integers(1, 3), seeds) | st.builds(Oort, sizes)
policies = (
    st.builds(FastestK, sizes)
    | st.builds(AllDevices)
    | st.builds(Fair, sizes, st.none() | st.floats(0, 1))
    | st.builds(Deadline, st.integers(1, 40).map(float), st.sampled_from(["equal", "loss"]))
    | st.builds(Progress, sizes, st.sampled_from([0.5, 3.0]), st.sampled_from([0.0, 10.0]))
    | draws
)
participations = st.builds(Participation, st.booleans(), st.none() | st.integers(0, 500), st.none() | st.floats(0, 10))
histories = st.lists(
    st.dictionaries(st.sampled_from([f"device-{k}" for k in range(5)] + ["gone"]), participations, max_size=4),
    max_size=6,
).map(lambda rounds: history_of(*rounds))


def plan_of(
    fleet: Fleet,
    policy: Policy,
    epochs: float = 1.0,
    history: History | None = None,
    selection: Selection | None = None,
) -> RoundPlan:
    server_round = len(history.rounds) + 1 if history else 1
    return plan_round(fleet.offers, policy, fleet.allowance, epochs, server_round, history, selection)


def points_of(plan: RoundPlan, fleet: Fleet) -> dict[str, int]:
    """The point of its front that each chosen device is assigned."""
    by_id = {offer.device_id: offer.front for offer in fleet.offers}
    return {
        assignment.device_id: [
            by_id[assignment.device_id].mode(k) for k in range(len(by_id[assignment.device_id]))
        ].index(assignment.mode)
        for assignment in plan.assignments
    }


ORIN = Offer("orin", front((10, 50), (20, 30), (40, 20)), 5.0)
NANO = Offer("nano", front((35, 15), (60, 10)), 3.0)
XAVIER = Offer("xavier", front((25, 40), (45, 25)), 6.0)
THREE = [ORIN, NANO, XAVIER]


def site(watts: float) -> Allowance:
    return Allowance.of_site(watts)


def modes_of(plan: RoundPlan) -> dict[str, tuple[float, float]]:
    return {assignment.device_id: (assignment.epoch_s, assignment.power_w) for assignment in plan.assignments}


def reason_of(plan: RoundPlan, device_id: str) -> str:
    return next(decision.reason for decision in plan.decisions if decision.device_id == device_id)
