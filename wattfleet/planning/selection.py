"""Rules that exclude devices from a round before the policy selects: the operator's, and backoff after failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from wattfleet.budgets import Supplies
from wattfleet.errors import InvalidInputError
from wattfleet.planning.history import History
from wattfleet.planning.offers import Offer

_KINDS = ("id", "tag", "site")
_MAX_BACKOFF_ROUNDS = 16
_MAX_OVER_SELECTION = 10.0

DRAINED = "drained by the operator"
"""The reason why a drained device is not selected."""


@dataclass(frozen=True)
class Selection:
    """The operator's rules for the selection.

    Attributes:
        include: patterns such as `id:orin-*`, `tag:lab` or `site:roof`. Only devices that match one are candidates;
            empty for all devices. `site:` matches any supply that feeds the device.
        exclude: patterns of devices that are never selected.
        over_selection: share of devices to select beyond the policy's number, so that some may fail.
        drained: ids of devices that are excluded from new rounds.
        left_out: reasons why devices are left out because of what they reported, by id.

    Raises:
        InvalidInputError: a pattern has another form, or the share is not 0 to 10.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    over_selection: float = 0.0
    drained: frozenset[str] = frozenset()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            kind, colon, name = pattern.partition(":")
            if kind not in _KINDS or not colon or not name:
                raise InvalidInputError(f"invalid device pattern {pattern!r}: write id:NAME, tag:NAME or site:NAME")
        if not 0 <= self.over_selection <= _MAX_OVER_SELECTION:
            raise InvalidInputError(
                f"the share of over-selection must be 0 to {_MAX_OVER_SELECTION:g}, not {self.over_selection}"
            )

    def exclusion_reason(self, device_id: str, tags: Set[str], supply: str, supplies: Supplies) -> str | None:
        """Why a device must not be selected; None if it may be.

        Args:
            device_id: the device.
            tags: its tags.
            supply: the supply that it is behind; empty if it is unknown.
            supplies: all supplies.
        """
        if device_id in self.drained:
            return DRAINED
        if device_id in self.left_out:
            return f"left out: {self.left_out[device_id]}"
        if not self.include and not self.exclude:
            return None
        names = {"id": {device_id}, "tag": tags, "site": supplies.path(supply) if supply else ()}

        def matches(pattern: str) -> bool:
            kind, _, name = pattern.partition(":")
            return any(fnmatchcase(own, name) for own in names[kind])

        if self.include and not any(map(matches, self.include)):
            return f"not included: matches none of {', '.join(self.include)}"
        for pattern in self.exclude:
            if matches(pattern):
                return f"excluded: matches {pattern}"
        return None


def next_round(failures: int, last: int) -> int:
    """The first round in which a device that kept failing may be selected again.

    After two failures in a row a device skips one round, after three it skips three. From then on each failure doubles
    the backoff, up to `_MAX_BACKOFF_ROUNDS`.

    Args:
        failures: number of failures in a row; 1 or more.
        last: number of the round in which it failed last.
    """
    return last + min(1 << (failures - 1), _MAX_BACKOFF_ROUNDS)


def backing_off(offers: Sequence[Offer], history: History, server_round: int) -> dict[str, str]:
    """Devices that are excluded for some rounds because they kept failing, each with the reason.

    If all devices would back off, none does.
    """
    found: dict[str, str] = {}
    for offer in offers:
        failures, last = history.consecutive_failures.get(offer.device_id, (0, 0))
        if failures and server_round < (until := next_round(failures, last)):
            found[offer.device_id] = f"failed {failures} times in a row: excluded until round {until}"
    return {} if len(found) == len(offers) else found
