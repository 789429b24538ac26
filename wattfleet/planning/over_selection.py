"""The number of replies that are enough for a round, if more devices were selected than the policy wants."""

from __future__ import annotations

from dataclasses import replace

from wattfleet.errors import WattfleetError
from wattfleet.planning.policies.policy import PlanningContext, Policy, any_devices
from wattfleet.planning.policy_failures import attempt


def enough_replies(policy: Policy, context: PlanningContext, selected: int) -> int | None:
    """The number of devices that a policy wants without over-selection; None if it wants all selected devices.

    Args:
        policy: the client-selection policy, a pure function of the context.
        context: the policy's context when the devices were selected.
        selected: how many devices were selected.
    """
    if not context.over_selection:
        return None
    plain = replace(context, over_selection=0.0)
    try:
        request = attempt(policy, plain)
    except WattfleetError:  # the policy refuses such a small number
        return None
    wanted = any_devices(plain, None).count if isinstance(request, str) else request.count
    return wanted_if_fewer(selected, wanted)


def wanted_if_fewer(devices: int, wanted: int | None) -> int | None:
    """`wanted` if it is below the number of devices; otherwise None, which means all devices."""
    return None if wanted is None or wanted >= devices else wanted
