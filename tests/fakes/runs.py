"""Runs of many rounds in which a test determines what each device does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wattfleet.planning import Allowance, History, Offer, Participation, plan_round
from wattfleet.planning.policies import Policy


def run(
    offers: Sequence[Offer],
    policy: Policy,
    rounds: int,
    part: Callable[[str, int], Participation] = lambda device_id, number: Participation(),
    site_w: float = 100_000.0,
) -> History:
    """A run's history in which every chosen device completes every round."""
    history = History()
    for number in range(1, rounds + 1):
        plan = plan_round(offers, policy, Allowance.of_site(site_w), 1.0, number, history)
        parts = {a.device_id: part(a.device_id, number) for a in plan.assignments}
        history = history.after(number, parts)
    return history
