"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields

from wattfleet.errors import InvalidInputError
from wattfleet.planning.policies.deadline import Deadline
from wattfleet.planning.policies.fair import Fair
from wattfleet.planning.policies.fastest_k import Everyone, FastestK
from wattfleet.planning.policies.oort import Oort
from wattfleet.planning.policies.policy import Policy
from wattfleet.planning.policies.progress import Progress
from wattfleet.planning.policies.random_k import RandomK
from wattfleet.planning.policies.tiers import Tiers

_POLICIES: Mapping[str, Callable[..., Policy]] = {
    "fastest-k": FastestK,
    "all": Everyone,
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
        options: of the policy (see its attributes); None leaves one to the policy. A seed is ignored by policies that
            draw nothing.

    Raises:
        InvalidInputError: no such policy, or an option that it does not take, lacks, or cannot use.
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
            f"policy {name!r} takes no {', '.join(stray)}" + (f", only {', '.join(sorted(takes))}" if takes else "")
        )
    if name == "deadline" and "deadline_s" not in given:
        raise InvalidInputError("policy 'deadline' needs a deadline in seconds")
    return chosen(**given)
