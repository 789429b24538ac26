"""Builds what a coordinator serves with from its settings: the site, the client-selection policy, the selection."""

from __future__ import annotations

import math

from coordinator.budgets.site_file import SiteFile, read_site_file
from coordinator.settings import PolicySettings, RoundSettings, SelectionSettings, SiteSettings
from wattfleet.errors import InvalidInputError
from wattfleet.modes import require_workload_name
from wattfleet.planning import Selection
from wattfleet.planning.policies import Policy, policy_named


def site_of(settings: SiteSettings) -> SiteFile:
    """The site's supplies and budgets.

    Raises:
        InvalidInputError: neither or both of a budget and a file are given, or what is given cannot be used.
    """
    if settings.file is not None and settings.budget_w is None:
        return read_site_file(settings.file)
    if settings.budget_w is not None and settings.file is None:
        return SiteFile.of_site(settings.budget_w)
    raise InvalidInputError("pass exactly one of --site-budget-w, --site-file")


def policy_of(settings: PolicySettings) -> Policy:
    """The client-selection policy.

    Raises:
        InvalidInputError: the policy does not take, lacks or cannot use a parameter.
    """
    return policy_named(
        settings.name,
        count=settings.clients,
        seed=settings.seed,
        deadline_s=settings.deadline_s,
        utility=settings.utility,
        tiers=settings.tiers,
        floor=settings.floor,
        half_devices=settings.half_devices,
        overhead_s=settings.overhead_s,
    )


def selection_of(settings: SelectionSettings, policy: Policy) -> Selection:
    """Which devices the policy may select from, and how many more than its number.

    Raises:
        InvalidInputError: a selector cannot be used, or the policy takes no number to add to.
    """
    if settings.over_selection and not policy.has_count:
        raise InvalidInputError(
            f"policy {policy.name!r} determines the number of devices itself, so --over-selection cannot add to it:"
            " leave out --over-selection, or pass --clients with a policy that takes it"
        )
    return Selection(settings.include, settings.exclude, settings.over_selection)


def weights_of(settings: RoundSettings) -> dict[str, float]:
    """The weights of runs that wait for each other, by workload.

    Raises:
        InvalidInputError: one is not WORKLOAD=WEIGHT, or no weight above 0.
    """
    weights: dict[str, float] = {}
    for text in settings.weights:
        name, equals, weight = text.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            equals = ""
        if not equals or not 0 < weights[name] < math.inf:
            raise InvalidInputError(f"invalid weight {text!r}: write WORKLOAD=WEIGHT, with a weight above 0")
        require_workload_name(name)
    return weights
