"""Gets a policy's request. If the policy fails, the device that causes it is found and left out of the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from wattfleet.errors import WattfleetError
from wattfleet.planning.policies.policy import PlanningContext, Policy, SelectionRequest, any_devices

_MAX_LEFT_OUT = 3
"""Maximum number of devices to leave out; if the policy still fails, the round is planned without the policy."""

_MAX_PROBLEM_CHARACTERS = 200

ContextWithout = Callable[[Collection[str]], PlanningContext]
"""Returns the policy's context without some devices, given by id; at least one device must remain."""


def requested(
    policy: Policy, context_without: ContextWithout, excluded: Collection[str]
) -> tuple[PlanningContext, SelectionRequest, Mapping[str, str]]:
    """Get a policy's request, if necessary without the devices that make it fail.

    If it still fails without them, half of all devices are requested, for the least makespan.

    Args:
        policy: the client-selection policy.
        context_without: the policy's context without some devices.
        excluded: devices that are not candidates.

    Returns:
        The context of the request, the request, and why devices were left out, by id.

    Raises:
        WattfleetError: the policy refuses the round, for example because no device can meet its deadline.
    """
    whole = context = context_without(excluded)
    left_out: dict[str, str] = {}
    while True:
        request = attempt(policy, context)
        if isinstance(request, SelectionRequest):
            return context, request, left_out
        if len(context.offers) == 1 or len(left_out) == _MAX_LEFT_OUT:
            anybody = any_devices(whole, None)
            reason = f"among the devices with the least makespan, since the policy {policy.name} fails ({request})"
            return whole, replace(anybody, selection_reasons=dict.fromkeys(range(len(whole.offers)), reason)), {}
        ids = [offer.device_id for offer in context.offers]
        failing = _failing_device(policy, context_without, {*excluded, *left_out}, ids)
        left_out[failing] = f"left out: the policy {policy.name} fails with its values ({request})"
        context = context_without({*excluded, *left_out})


def attempt(policy: Policy, context: PlanningContext) -> SelectionRequest | str:
    """A policy's request, or a description of its failure."""
    try:
        request = policy.request(context)
    except WattfleetError:
        raise
    except Exception as error:  # a boundary: the defect of a policy must not end the planning of all runs
        return f"{type(error).__name__}: {error}"[:_MAX_PROBLEM_CHARACTERS]
    return request if request.count >= 1 and request.eligible.any() else "it requests no device"


def _failing_device(policy: Policy, context_without: ContextWithout, excluded: set[str], ids: Sequence[str]) -> str:
    """A device that makes the policy fail: the last one of the shortest failing prefix of `ids`, by bisection."""
    works, fails = 0, len(ids)
    while fails - works > 1:
        middle = (works + fails) // 2
        try:
            is_failing = isinstance(attempt(policy, context_without({*excluded, *ids[middle:]})), str)
        except WattfleetError:
            is_failing = False  # the policy refuses such a small number
        works, fails = (works, middle) if is_failing else (middle, fails)
    return ids[fails - 1]
