"""A state machine of which grants have yet to be sent, and which wait before they are sent or renewed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set

from coordinator.state.rounds.device_grant import DeviceGrant


class PendingGrants:
    """What remains to be done about the devices' newest grants; the grants themselves are elsewhere.

    Reviews compare all grants with the budgets, and trim where necessary. A review passes over the devices that could
    not be sent a lower limit, because they were disconnected or did not confirm in time. Their grants are neither sent
    nor renewed until a later review has included them. Otherwise, a grant from before a cut of the budget could outlast
    the stated time.
    """

    def __init__(self) -> None:
        """Start with nothing to send, before the first review."""
        self._unsent: dict[str, None] = {}  # in the order in which they became due
        self._held_back: set[str] = set()
        self._passed_over: set[str] = set()
        self._too_much: set[str] = set()

    # --- sending ------------------------------------------------------------------------------------------------

    def due(self, grants: Mapping[str, DeviceGrant], only: Collection[str] | None = None) -> list[str]:
        """The devices whose grants may be sent now. A grant that stops a training never waits.

        Args:
            grants: the newest grant of each device.
            only: restricts the result to these devices; None for all.
        """
        unsent = self._unsent if only is None else [each for each in only if each in self._unsent]
        return [each for each in unsent if grants[each].assignment is None or not self._waits(each, grants[each])]

    def _waits(self, device_id: str, known: DeviceGrant) -> bool:
        is_for_review = device_id in self._passed_over or device_id in self._too_much
        return is_for_review or known.plan_id in self._held_back

    def send(self, device_id: str) -> None:
        """Send a device's grant as soon as possible."""
        self._unsent[device_id] = None

    def sent(self, device_id: str) -> None:
        """Record that a device's grant was sent."""
        del self._unsent[device_id]

    def issued(self, device_id: str) -> None:
        """Schedule a device's new grant for sending; it already respects the budgets."""
        self._passed_over.discard(device_id)
        self._too_much.discard(device_id)
        self.send(device_id)

    def hold_back(self, plan_id: str) -> None:
        """Send no grant of a plan until `let_go`, because a restarted coordinator must know what was granted."""
        self._held_back.add(plan_id)

    def let_go(self, plan_id: str) -> None:
        """Allow sending the grants of a plan, because it is stored."""
        self._held_back.discard(plan_id)

    # --- reviews ------------------------------------------------------------------------------------------------

    def reviewed(self, passed_over: Iterable[str], too_much: Set[str] = frozenset()) -> None:
        """Record that all grants were compared with the budgets, and trimmed where necessary.

        Args:
            passed_over: devices that could not be sent a lower limit.
            too_much: devices whose first grants have to wait until others have confirmed lower limits.
        """
        self._passed_over, self._too_much = set(passed_over), set(too_much)

    def is_passed_over(self, device_id: str) -> bool:
        """Whether the last review could not have lowered a device's grant."""
        return device_id in self._passed_over

    def ended(self, device_id: str) -> None:
        """Cancel sending and reviewing, because the grant is over or forgotten."""
        self._unsent.pop(device_id, None)
        self._passed_over.discard(device_id)
        self._too_much.discard(device_id)
