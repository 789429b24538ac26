"""How many replies end a training round."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.errors import InvalidInputError
from wattfleet.planning import least_whole
from wattfleet_flower.server.sent_rounds import PlannedRound, SentRound


@dataclass(frozen=True)
class Quorum:
    """How many replies end a round, and for how many rounds the updates of the other devices may still be used.

    Without `share` and `replies`, a round ends once as many devices have replied as its plan needs without
    over-selection.

    Attributes:
        share: share of the round's devices whose replies end it, above 0 to 1.
        replies: number of replies that end a round, 1 or more. A round of fewer devices waits for all of them.
        max_staleness: rounds after which a late update is dropped; 0 drops every late update.

    Raises:
        InvalidInputError: both `share` and `replies` are given, or a value is out of range.
    """

    share: float | None = None
    replies: int | None = None
    max_staleness: int = 5

    def __post_init__(self) -> None:
        if self.share is not None and self.replies is not None:
            raise InvalidInputError(
                "a quorum is a share of the round's devices or a number of replies: state only one of"
                f" share={self.share:g} and replies={self.replies}"
            )
        if self.share is not None and not 0 < self.share <= 1:
            raise InvalidInputError(f"the share of a quorum must be above 0 and at most 1, not {self.share:g}")
        if self.replies is not None and self.replies < 1:
            raise InvalidInputError(f"the replies of a quorum must be 1 or more, not {self.replies}")
        if self.max_staleness < 0:
            raise InvalidInputError(f"max_staleness must be 0 or more, not {self.max_staleness}")

    def replies_of(self, sent: SentRound, devices: int) -> int:
        """Return the number of replies that end a round. It may exceed the number of devices.

        Args:
            sent: the round.
            devices: how many devices were sent a training.
        """
        if self.replies is not None:
            return self.replies
        if self.share is not None:
            return max(1, least_whole(self.share * devices))
        wanted = sent.plan.enough_replies if isinstance(sent, PlannedRound) else 0
        return min(wanted, devices) or devices
