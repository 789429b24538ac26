"""What a store keeps about grants, so that a restarted coordinator does not free watts too early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GivenUpTraining:
    """A device whose grant continues after its round or run has ended.

    Attributes:
        device_id: the device.
        plan_id: the plan of the grant; None once the grant is over.
        limit_w: watts of a grant to measure, which belongs to no round; None if the plan of a round states them.
    """

    device_id: str
    plan_id: str | None
    limit_w: float | None = None


@dataclass(frozen=True)
class GrantLifetime:
    """The longest lifetime that a device may still rely on.

    Attributes:
        lifetime_s: in seconds.
    """

    lifetime_s: float


@dataclass(frozen=True)
class StoredGrants:
    """What an earlier coordinator has stored.

    Attributes:
        lifetime_s: the longest lifetime that a device may still rely on, in seconds; 0 if none is stored.
        given_up: the trainings that continue after their round or run, and those that measure, by device id.
    """

    lifetime_s: float = 0.0
    given_up: Mapping[str, GivenUpTraining] = field(default_factory=dict)


NOTHING_STORED = StoredGrants()


class UnstoredGrants:
    """What has to be stored about grants with the next records.

    Attributes:
        lifetime_s: the longest lifetime that a device may still rely on, in seconds.
    """

    def __init__(self, stored: StoredGrants, own_lifetime_s: float) -> None:
        """Start with what is stored.

        Args:
            stored: what an earlier process stored.
            own_lifetime_s: the lifetime of this process's grants.
        """
        self.lifetime_s = max(own_lifetime_s, stored.lifetime_s)
        self._own_lifetime_s = own_lifetime_s
        self._given_up = dict(stored.given_up)
        self._waiting: list[GivenUpTraining | GrantLifetime] = []

    def take(self) -> list[GivenUpTraining | GrantLifetime]:
        """Return the records to store, and mark them as stored."""
        taken, self._waiting = self._waiting, []
        return taken

    def note(self, device_ids: Iterable[str], leftover: Callable[[str], GivenUpTraining | None]) -> None:
        """Schedule storing which trainings may outlast their round or run, which a restart may not load.

        Args:
            device_ids: the devices of the round or run, or more.
            leftover: returns a device's training that nobody waits for; None if there is none.
        """
        for device_id in device_ids:
            training = leftover(device_id)
            if training is not None and self._given_up.get(device_id) != training:
                self._given_up[device_id] = training
                self._waiting.append(training)

    def check(self, leftover: Callable[[str], GivenUpTraining | None]) -> None:
        """Schedule storing which trainings are over.

        Args:
            leftover: as above.
        """
        for device_id, stored in list(self._given_up.items()):
            training = leftover(device_id)
            if training is None or training.plan_id != stored.plan_id:
                del self._given_up[device_id]
                self._waiting.append(GivenUpTraining(device_id, None))

    def earlier_lapsed(self) -> None:
        """Schedule storing the own lifetime: every grant of an earlier process has lapsed or was renewed since."""
        if self.lifetime_s != self._own_lifetime_s:
            self.lifetime_s = self._own_lifetime_s
            self._waiting.append(GrantLifetime(self.lifetime_s))
