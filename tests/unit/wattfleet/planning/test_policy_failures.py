"""Plans stay finite whatever devices report, and a device with which a policy fails is left out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.fleets import many
from tests.fakes.fronts import front
from wattfleet.choosing import predicted_front
from wattfleet.errors import ImplausibleError, InvalidInputError, WattfleetError
from wattfleet.planning import Allowance, History, Offer, Participation, RoundPlan, Selection, plan_round
from wattfleet.planning.policies import POLICIES, PlanningContext, Policy, SelectionRequest, policy_named
from wattfleet.prediction import Prediction

anything = st.floats() | st.sampled_from([5e-324, 1e-200, 800.0, 1e200, 1e300])
plausible = st.floats(1e-6, 1e7)


def named(name: str, utility: str = "equal") -> Policy:
    return policy_named("deadline", deadline_s=100.0, utility=utility) if name == "deadline" else policy_named(name)


def assert_finite(plan: RoundPlan) -> None:
    numbers = [plan.duration_s, plan.planned_w]
    for each in plan.assignments:
        numbers += [each.epoch_s, each.power_w, each.power_limit_w, each.warmup_s]
    assert plan.assignments and all(map(math.isfinite, numbers)) and plan.duration_s > 0


@given(epoch_s=anything, power_w=anything, log_sd=anything, power_log_sd=anything, warmup_s=anything, idle_w=anything)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15)
def test_a_front_is_refused_or_planned_with_finite_numbers(
    name: str, epoch_s: float, power_w: float, log_sd: float, power_log_sd: float, warmup_s: float, idle_w: float
) -> None:
    point = ((epoch_s, power_w),)
    try:
        odd_front = front(*point, epoch_log_sd=log_sd, power_log_sd=power_log_sd, warmup_s=warmup_s)
        odd = Offer("odd", odd_front, idle_w)
    except InvalidInputError:
        return
    try:
        assert_finite(plan_round([*many(4), odd], named(name), Allowance.of_site(2e5), 1.0, 1))
    except WattfleetError:
        assert name == "deadline"


@given(
    epoch_s=plausible,
    power_w=st.floats(1e-3, 1e3),
    log_sd=st.floats(0, 2),
    warmup_s=st.floats(0, 1e7),
    epochs=st.floats(1e-6, 1e6),
)
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15)
def test_a_plausible_front_never_ends_the_planning_of_others(
    name: str, epoch_s: float, power_w: float, log_sd: float, warmup_s: float, epochs: float
) -> None:
    odd = Offer("odd", front((epoch_s, power_w), epoch_log_sd=log_sd, warmup_s=warmup_s), 2.0)
    try:
        assert_finite(plan_round([*many(4), odd], named(name), Allowance.of_site(150.0), epochs, 1))
    except WattfleetError:
        assert name == "deadline" and epochs > 1


@given(loss=anything, num_examples=anything, number=st.integers(1, 2**32 - 1))
@pytest.mark.parametrize("utility", ["equal", "loss"])
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15)
def test_any_finite_results_are_planned_with(
    name: str, utility: str, loss: float, num_examples: float, number: int
) -> None:
    ordinary = Participation(num_examples=100.0, loss=2.0)
    try:
        odd = Participation(num_examples=num_examples, loss=loss)
    except InvalidInputError:
        return
    history = History()
    for past in range(1, 42):
        history = history.after(past, {"device-000": odd, "device-001": ordinary, "device-002": ordinary})
    assert_finite(plan_round(many(4), named(name, utility), Allowance.of_site(150.0), 1.0, number, history))


def test_a_claim_of_many_samples_does_not_displace_the_other_devices() -> None:
    parts = {f"device-{k:03}": Participation(num_examples=100.0, loss=2.0) for k in range(6)}
    honest = plan_round(many(6), named("progress"), Allowance.of_site(300.0), 1.0, 2, History().after(1, parts))
    parts["device-000"] = Participation(num_examples=1e9, loss=2.0)
    plan = plan_round(many(6), named("progress"), Allowance.of_site(300.0), 1.0, 2, History().after(1, parts))
    assert len(plan.assignments) == len(honest.assignments) == 6


@pytest.mark.parametrize("epochs", [math.nan, math.inf, 0.0, -1.0, 1e300, 5e-324])
def test_a_number_of_epochs_that_no_round_has_is_refused(epochs: float) -> None:
    with pytest.raises(InvalidInputError, match="number of epochs above 0 and at most 1,000,000"):
        plan_round(many(2), named("all"), Allowance.of_site(100.0), epochs, 1)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"epoch_log_sd": 800.0}, "at most 2"),
        ({"power_log_sd": 2.1}, "at most 2"),
        ({"warmup_s": 2e7}, "up to 10,000,000 s"),
    ],
)
def test_an_implausible_front_is_refused_with_its_range(values: dict[str, float], text: str) -> None:
    with pytest.raises(ImplausibleError, match=text):
        front((10, 20), **values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Failing:
    """A policy that selects all devices and raises an error if certain devices are offered."""

    with_any_of: frozenset[str]
    name: str = "failing"
    has_count: bool = False

    def request(self, context: PlanningContext) -> SelectionRequest:
        failing = self.with_any_of & {offer.device_id for offer in context.offers}
        if failing:
            raise OverflowError("too large")
        return policy_named("all").request(context)


@pytest.mark.parametrize("bad", [{0}, {5}, {9}, {2, 7}, {0, 1, 9}])
def test_a_policy_that_fails_leaves_out_the_devices_it_fails_with(bad: set[int]) -> None:
    ids = frozenset(f"device-{k:03}" for k in bad)
    plan = plan_round(many(10), Failing(ids), Allowance.of_site(1_000.0), 1.0, 1)
    assert {each.device_id for each in plan.assignments} == {f"device-{k:03}" for k in range(10)} - ids
    for decision in plan.decisions:
        says_so = decision.reason == "left out: the policy failing fails with its values (OverflowError: too large)"
        assert says_so == (decision.device_id in ids) == (not decision.selected)


def test_a_policy_that_fails_with_all_devices_is_replaced_for_the_round() -> None:
    everyone = frozenset(f"device-{k:03}" for k in range(10))
    plan = plan_round(many(10), Failing(everyone), Allowance.of_site(1_000.0), 1.0, 1)
    assert [each.device_id for each in plan.assignments] == [f"device-{k:03}" for k in range(5)]
    assert "since the policy failing fails (OverflowError: too large)" in plan.decisions[0].reason


def test_a_device_that_is_left_out_is_not_selected_but_counts_as_idle() -> None:
    selection = Selection(left_out={"device-000": "its front is refused"})
    plan = plan_round(many(2, idle_w=2.0), named("all"), Allowance.of_site(100.0), 1.0, 1, selection=selection)
    assert [each.device_id for each in plan.assignments] == ["device-001"]
    assert plan.decisions[0].reason == "left out: its front is refused"
    assert plan.planned_w == plan.assignments[0].power_limit_w + 2.0


def test_a_prediction_is_thinned_to_its_plausible_modes() -> None:

    modes = np.array([[1 + k, 1e6, 1e9, 2e9] for k in range(3)], dtype=np.float64)
    sd = np.array([0.1, 5.0, 0.1])
    made = predicted_front(modes, Prediction(np.array([10.0, 20.0, 30.0]), np.array([30e3, 20e3, 10e3]), sd, sd), 100)
    assert made.modes[:, 0].tolist() == [1, 3]
    with pytest.raises(ImplausibleError, match="standard deviation"):
        predicted_front(modes, Prediction(np.ones(3), np.ones(3), sd + 5, sd), 100)
