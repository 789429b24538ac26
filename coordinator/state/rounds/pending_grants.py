"""A state machine of which grants have yet to be sent, and which have to be reviewed first. It holds no grants."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from coordinator.state.rounds.device_grant import DeviceGrant


class PendingGrants:
    """What remains to be done about the devices' newest grants.

    A review compares all grants with the budgets, and trims where necessary. A device that was disconnected, or did not
    confirm its grant in time, could not be informed of a lower budget. Its grant is therefore reviewed before it is
    sent again or renewed. The review of a device that was disconnected waits for the first lease of its session, which
    states the grant that the device still has.
    """

    def __init__(self) -> None:
        """Start with nothing to send or to review."""
        self._unsent: dict[str, None] = {}  # in the order in which they became due
        self._held_back: set[str] = set()
        self._unreviewed: set[str] = set()
        self._unheard: set[str] = set()
        self._late: set[str] = set()

    def copy(self) -> PendingGrants:
        """An independent copy."""
        copied = PendingGrants()
        copied._unsent, copied._held_back = self._unsent.copy(), self._held_back.copy()  # noqa: SLF001 - of this class
        copied._unreviewed, copied._unheard = self._unreviewed.copy(), self._unheard.copy()  # noqa: SLF001
        copied._late = self._late.copy()  # noqa: SLF001
        return copied

    # --- sending ------------------------------------------------------------------------------------------------

    def due(self, grants: Mapping[str, DeviceGrant], only: Collection[str] | None = None) -> list[str]:
        """The devices whose grants may be sent now.

        A grant that was not reviewed waits. So does a grant of a plan that is held back, unless it stops the training.

        Args:
            grants: the newest grant of each device.
            only: restricts the result to these devices; None for all.
        """
        unsent = self._unsent if only is None else [each for each in only if each in self._unsent]
        return [
            each
            for each in unsent
            if grants[each].assignment is None
            or not (each in self._unreviewed or grants[each].plan_id in self._held_back)
        ]

    def send(self, device_id: str) -> None:
        """Send a device's grant as soon as possible."""
        self._unsent[device_id] = None

    def sent(self, device_id: str) -> None:
        """Record that a device's grant was sent."""
        del self._unsent[device_id]

    def hold_back(self, plan_id: str) -> None:
        """Send no grant of a plan until `let_go`, because a restarted coordinator must know what was granted."""
        self._held_back.add(plan_id)

    def let_go(self, plan_id: str) -> None:
        """Allow sending the grants of a plan, because it is stored."""
        self._held_back.discard(plan_id)

    # --- reviews ------------------------------------------------------------------------------------------------

    def is_unreviewed(self, device_id: str) -> bool:
        """Whether a device's grant has to be reviewed before it is sent again or renewed."""
        return device_id in self._unreviewed

    def needs_review(self, late: set[str]) -> bool:
        """Whether any device has returned and sent a lease, or has newly failed to confirm in time.

        Args:
            late: the devices that have not confirmed their newest grants in time.
        """
        is_new, self._late = bool(late - self._late), late
        # A device that has sent no lease yet stays unreviewed, whatever a trim decides.
        return is_new or not self._unreviewed <= self._unheard

    def reviewed(self, too_much: Set[str] = frozenset()) -> None:
        """Record that all grants were compared with the budgets, and trimmed where necessary.

        Args:
            too_much: devices whose first grants have to wait until others have confirmed lower limits.
        """
        self._unreviewed = self._unheard | too_much

    def review(self, device_id: str) -> None:
        """Review a device's grant before it is sent again or renewed."""
        self._unreviewed.add(device_id)

    # --- what happens to a device -------------------------------------------------------------------------------

    def issued(self, device_id: str) -> None:
        """Schedule a device's new grant for sending; it already respects the budgets."""
        self._unreviewed.discard(device_id)
        self.send(device_id)

    def returned(self, device_id: str) -> None:
        """Review the grant of a device whose session has just begun, once its first lease has arrived."""
        self._unreviewed.add(device_id)
        self._unheard.add(device_id)

    def heard(self, device_id: str) -> None:
        """Record that a device has sent a lease in its session."""
        self._unheard.discard(device_id)

    def confirmed(self, device_id: str) -> None:
        """Review a grant that was confirmed late, because no trim could count on its device meanwhile."""
        if device_id in self._late:
            self._unreviewed.add(device_id)

    def ended(self, device_id: str) -> None:
        """Cancel sending and reviewing, because the grant is over."""
        self._unsent.pop(device_id, None)
        self._unheard.discard(device_id)

    def forget(self, device_id: str) -> None:
        """Forget a device."""
        self.ended(device_id)
        self._unreviewed.discard(device_id)
