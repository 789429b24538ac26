"""Which devices a round may take at all, before any policy is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from wattfleet.budgets import Supplies
from wattfleet.errors import InvalidInputError
from wattfleet.planning.history import History
from wattfleet.planning.offers import Offer

_KINDS = ("id", "tag", "site")
_LONGEST_REST = 16
_MOST_OVER_SELECTION = 10.0

DRAINED = "drained by the operator"
"""Why a drained device is not chosen."""


@dataclass(frozen=True)
class Selection:
    """The operator's own say in who trains.

    Attributes:
        include: only devices that match one of these, such as `id:orin-*`, `tag:lab` or `site:roof`, a site being any
            supply that the device hangs behind; none for all devices.
        exclude: no device that matches one of these.
        over_selection: share by which more devices are chosen than the policy wants, so that some may fail.
        drained: ids of devices that are to take part in no new round.

    Raises:
        InvalidInputError: a pattern of another form, or a share below 0 or above 10.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    over_selection: float = 0.0
    drained: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            kind, colon, name = pattern.partition(":")
            if kind not in _KINDS or not colon or not name:
                raise InvalidInputError(f"{pattern!r} names no devices: write id:NAME, tag:NAME or site:NAME")
        if not 0 <= self.over_selection <= _MOST_OVER_SELECTION:
            raise InvalidInputError(
                f"a share of over-selection is 0 to {_MOST_OVER_SELECTION:g}, not {self.over_selection}"
            )

    def refusal(self, offer: Offer, supplies: Supplies) -> str | None:
        """Why a device may not be chosen; None where it may."""
        if offer.device_id in self.drained:
            return DRAINED
        if not self.include and not self.exclude:
            return None
        names = {
            "id": {offer.device_id},
            "tag": offer.tags,
            "site": set(supplies.path(offer.supply)),
        }

        def matches(pattern: str) -> bool:
            kind, _, name = pattern.partition(":")
            return any(fnmatchcase(own, name) for own in names[kind])

        if self.include and not any(map(matches, self.include)):
            return f"not included: only {', '.join(self.include)}"
        for pattern in self.exclude:
            if matches(pattern):
                return f"excluded as {pattern}"
        return None


def resting(offers: Sequence[Offer], history: History, server_round: int) -> dict[str, str]:
    """Devices that are left alone because they kept failing, each with its reason in words.

    After two failures in a row a device is left out of one round, after three of three, after more of twice as many
    each time, `_LONGEST_REST` at most. Where all would rest, none does.
    """
    found: dict[str, str] = {}
    for offer in offers:
        failures, last = history.failures_in_a_row.get(offer.device_id, (0, 0))
        back = last + min(2 ** (failures - 1), _LONGEST_REST) if failures else 0
        if server_round < back:
            found[offer.device_id] = f"failed {failures} times in a row: left out until round {back}"
    return {} if len(found) == len(offers) else found
