"""Client-selection policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from wattfleet.errors import InvalidInputError
from wattfleet.planning.policies.deadline import Deadline
from wattfleet.planning.policies.fair import Fair
from wattfleet.planning.policies.fastest_k import AllDevices, FastestK
from wattfleet.planning.policies.oort import Oort
from wattfleet.planning.policies.policy import Policy
from wattfleet.planning.policies.progress import Progress
from wattfleet.planning.policies.random_k import RandomK
from wattfleet.planning.policies.tiers import Tiers

_POLICIES: Mapping[str, Callable[..., Policy]] = {
    "fastest-k": FastestK,
    "all": AllDevices,
    "random": RandomK,
    "deadline": Deadline,
    "tiers": Tiers,
    "oort": Oort,
    "fair": Fair,
    "progress": Progress,
}
POLICIES = tuple(_POLICIES)


def policy_named(name: str, **options: object) -> Policy:
    """The policy of a name.

    Args:
        name: one of `POLICIES`.
        options: options of the policy (see its attributes); None for the policy's default. Policies that draw nothing
            ignore a seed.

    Raises:
        InvalidInputError: the policy is unknown, or an option is unknown, missing or invalid.
    """
    if name not in _POLICIES:
        raise InvalidInputError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")
    chosen = _POLICIES[name]
    takes = {field.name for field in fields(chosen)} - {"name"}  # type: ignore[arg-type]
    given = {key: value for key, value in options.items() if value is not None}
    if "seed" not in takes:
        given.pop("seed", None)
    if stray := sorted(set(given) - takes):
        raise InvalidInputError(
            f"policy {name!r} does not take {', '.join(stray)}: "
            + (f"its options are {', '.join(sorted(takes))}" if takes else "it has no options")
        )
    if name == "deadline" and "deadline_s" not in given:
        raise InvalidInputError("policy 'deadline' needs a deadline: set deadline_s, in seconds")
    return chosen(**given)
