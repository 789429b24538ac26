"""Client-selection policies by name: the built-in ones, and those that installed packages provide.

A package provides a policy by an entry point of the group `wattfleet.policies`: the policy's name, and the class or
function that builds it. `examples/own_policy` is such a package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from inspect import signature

from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.planning.policies.deadline import Deadline
from wattfleet.core.planning.policies.draws import AllDevices, Fair, FastestK, RandomK, Tiers
from wattfleet.core.planning.policies.oort import Oort
from wattfleet.core.planning.policies.policy import Policy
from wattfleet.core.planning.policies.progress import Progress

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
"""Names of the built-in policies."""

_GROUP = "wattfleet.policies"


def policy_names() -> tuple[str, ...]:
    """Names of the built-in policies, and then of those that installed packages provide."""
    return (*POLICIES, *sorted(set(_installed()) - set(POLICIES)))


def policy_named(name: str, **options: object) -> Policy:
    """Build a policy by its name.

    Args:
        name: one of `policy_names()`.
        options: options of the policy (see its attributes); None for the policy's default. Policies without random
            draws ignore a seed.

    Raises:
        InvalidInputError: the policy is unknown, an option is unknown, missing or invalid, or the package that
            provides the policy is defective.
    """
    entries = _installed().get(name, ())
    if not entries and name not in _POLICIES:
        raise InvalidInputError(f"unknown policy {name!r}: choose one of {', '.join(policy_names())}")
    chosen = _provided(name, entries) if entries else _POLICIES[name]
    takes = set(signature(chosen).parameters) - {"name"}
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
    return _checked(name, entries[0], chosen, given) if entries else chosen(**given)


def _installed() -> Mapping[str, tuple[EntryPoint, ...]]:
    """The policies that installed packages provide, by name; each package once, wherever it was found."""
    found: dict[str, dict[tuple[str, str], EntryPoint]] = {}
    for entry in _entries(tuple(sys.path)):
        found.setdefault(entry.name, {})[_distribution(entry), entry.value] = entry
    return {name: tuple(entries.values()) for name, entries in found.items()}


@cache
def _entries(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points on a search path, looked up once: each time reads the metadata of all installed packages."""
    return tuple(entry_points(group=_GROUP))


def _distribution(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else entry.dist.name


def _provided(name: str, entries: Sequence[EntryPoint]) -> Callable[..., Policy]:
    """The class or function of a policy that a package provides."""
    packages = " and ".join(sorted({_distribution(entry) for entry in entries}))
    if name in _POLICIES:
        raise InvalidInputError(
            f"policy {name!r} is built in, and {packages} provides another one of this name: rename its entry point,"
            f" or uninstall {packages}"
        )
    if len(entries) > 1:
        raise InvalidInputError(
            f"policy {name!r} is provided {len(entries)} times, by {packages}: rename one of the entry points, or"
            " uninstall one of the packages"
        )
    [entry] = entries
    try:
        provided: Callable[..., Policy] = entry.load()
        signature(provided)
    except Exception as error:  # a boundary: importing another package can fail in any way
        raise InvalidInputError(
            f"policy {name!r} of {packages} cannot be loaded from {entry.value!r} ({type(error).__name__}: {error}):"
            f" correct or reinstall {packages}"
        ) from error
    return provided


def _checked(name: str, entry: EntryPoint, provided: Callable[..., Policy], options: Mapping[str, object]) -> Policy:
    """Build a policy that a package provides."""
    package = _distribution(entry)
    try:
        policy = provided(**options)
    except WattfleetError:
        raise
    except Exception as error:  # a boundary: the constructor of another package
        raise InvalidInputError(
            f"policy {name!r} of {package} cannot be built ({type(error).__name__}: {error}): correct its options, or"
            f" {package}"
        ) from error
    is_policy = callable(getattr(policy, "request", None)) and isinstance(getattr(policy, "has_count", None), bool)
    if not is_policy or not isinstance(getattr(policy, "name", None), str):
        raise InvalidInputError(
            f"policy {name!r} of {package} lacks name, has_count or request(context): implement"
            f" wattfleet.core.planning.policies.Policy in {entry.value!r}"
        )
    return policy
