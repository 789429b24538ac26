"""Builds from the settings what a coordinator plans with: the site, the client-selection policy and the selection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.budgets.site_file import SiteFile, read_site_file
from coordinator.settings import (
    CoordinatorSettings,
    PolicySettings,
    RoundSettings,
    SelectionSettings,
    SiteSettings,
)
from coordinator.state.fleet import Fleet
from coordinator.store.loading import StoredState
from wattfleet.errors import InvalidInputError
from wattfleet.modes import require_workload_name
from wattfleet.planning import Allowance, Selection
from wattfleet.planning.policies import Policy, policy_named


@dataclass(frozen=True)
class PlanningBasis:
    """The settings that determine plans; they are read before the store is opened.

    Attributes:
        site: the supplies, their budgets and the devices behind them.
        policy: selects devices.
        selection: the devices that it may select from.
        weights: the weights of runs that wait for each other, by workload.
    """

    site: SiteFile
    policy: Policy
    selection: Selection
    weights: Mapping[str, float]

    @classmethod
    def of(cls, settings: CoordinatorSettings) -> PlanningBasis:
        """Read the settings.

        Raises:
            InvalidInputError: a setting cannot be used.
        """
        policy = policy_of(settings.policy)
        selection = selection_of(settings.selection, policy)
        return cls(site_of(settings.site), policy, selection, weights_of(settings.rounds))

    def fleet(self, kept: StoredState, settings: CoordinatorSettings, now_s: Callable[[], float]) -> Fleet:
        """Build the fleet from its stored state.

        Args:
            kept: the stored state.
            settings: the settings of grants, claims and sessions.
            now_s: a clock, in seconds.
        """
        return Fleet(
            # No supply has any watts until the budget watch has read them.
            Allowance(self.site.supplies, dict.fromkeys(self.site.supplies.names, 0.0)),
            self.policy,
            kept.devices,
            kept.nodes,
            kept.runs,
            kept.rounds,
            kept.archived,
            self.site,
            self.selection,
            kept.overrides,
            grants=settings.grants,
            now_s=now_s,
            claims=settings.claims,
            unplanned=kept.unplanned,
            stored_grants=kept.grants,
            weights=self.weights,
            max_workloads=settings.sessions.max_workloads,
            pairing_problems=kept.pairing_problems,
        )


def site_of(settings: SiteSettings) -> SiteFile:
    """The site's supplies and budgets.

    Raises:
        InvalidInputError: neither or both of a budget and a site file are given, or the one given cannot be used.
    """
    if settings.file is not None and settings.budget_w is None:
        return read_site_file(settings.file)
    if settings.budget_w is not None and settings.file is None:
        return SiteFile.of_site(settings.budget_w)
    raise InvalidInputError("pass exactly one of --site-budget-w, --site-file")


def policy_of(settings: PolicySettings) -> Policy:
    """The client-selection policy.

    Raises:
        InvalidInputError: a parameter is missing, unknown or invalid for the policy.
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
    """The devices that the policy may select from, and the share of additional devices.

    Raises:
        InvalidInputError: a selector cannot be used, or devices cannot be added because the policy takes no number.
    """
    if settings.over_selection and not policy.has_count:
        raise InvalidInputError(
            f"policy {policy.name!r} determines the number of devices itself, so over_selection in [selection] cannot"
            " add to it: leave it out, or pass --clients with a policy that takes it"
        )
    return Selection(settings.include, settings.exclude, settings.over_selection)


def weights_of(settings: RoundSettings) -> dict[str, float]:
    """The weights of runs that wait for each other, by workload.

    Raises:
        InvalidInputError: an entry is not WORKLOAD=WEIGHT, or its weight is not above 0.
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
