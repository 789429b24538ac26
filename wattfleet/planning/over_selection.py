"""How many replies are enough for a round in which more devices were selected than the policy wants."""

from __future__ import annotations

from dataclasses import replace

from wattfleet.errors import WattfleetError
from wattfleet.planning.policies.policy import PlanningContext, Policy, any_devices
from wattfleet.planning.policy_failures import attempt


def enough_replies(policy: Policy, context: PlanningContext, selected: int) -> int | None:
    """The number of devices that a policy wants without over-selection; None if it wants all that were selected.

    Args:
        policy: the client-selection policy, a pure function of the context.
        context: what it knew when the devices were selected.
        selected: how many devices were selected.
    """
    if not context.over_selection:
        return None
    plain = replace(context, over_selection=0.0)
    try:
        request = attempt(policy, plain)
    except WattfleetError:  # it refuses so few devices
        return None
    wanted = any_devices(plain, None).count if isinstance(request, str) else request.count
    return fewer_than(selected, wanted)


def fewer_than(devices: int, wanted: int | None) -> int | None:
    """The number of devices that are wanted, if it is below their number; else None, for all of them."""
    return None if wanted is None or wanted >= devices else wanted
