"""The terms of an invite, what an enrolling machine states about itself, and the peer that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from coordinator.state.identity_records import CertificateRecord, InviteRecord
from coordinator.state.names import MAX_TAGS, require_name, require_tag
from wattfleet.errors import InvalidInputError
from wattfleet_identity.peers import Peer, Role

MAX_USES = 10_000
MAX_TTL = timedelta(days=30)


@dataclass(frozen=True)
class Terms:
    """What an invite permits.

    Args:
        role: the role of the machine that enrols.
        name: its name in the fleet; empty if a device names itself.
        site: the supply that the device is behind; empty to leave it to the site file.
        tags: words attached to the device.
        uses: how many machines may enrol.
        ttl: how long the invite can be used.

    Raises:
        InvalidInputError: a value is not valid, or not allowed for the role.
    """

    role: Role = Role.DEVICE
    name: str = ""
    site: str = ""
    tags: frozenset[str] = frozenset()
    uses: int = 1
    ttl: timedelta = timedelta(hours=1)

    def __post_init__(self) -> None:
        if self.name:
            require_name("a name", self.name)
        elif self.role is not Role.DEVICE:
            raise InvalidInputError(f"an invite for the role {self.role.value} needs a name: pass --name")
        if (self.site or self.tags) and self.role is not Role.DEVICE:
            raise InvalidInputError("only devices have a site and tags: leave out --site and --tag")
        for word in self.tags:
            require_tag(word)
        if len(self.tags) > MAX_TAGS:
            raise InvalidInputError(f"an invite has at most {MAX_TAGS} tags, not {len(self.tags):,}")
        if not 1 <= self.uses <= MAX_USES:
            raise InvalidInputError(f"an invite can be used 1 to {MAX_USES:,} times, not {self.uses:,}")
        if self.name and self.uses > 1:
            raise InvalidInputError(
                "an invite with a name is for one machine: leave out --uses, or make an invite for each machine"
            )
        if not timedelta(0) < self.ttl <= MAX_TTL:
            raise InvalidInputError(f"an invite can be used for up to {MAX_TTL.days} days: shorten --ttl")


@dataclass(frozen=True)
class Application:
    """What a machine states about itself when it enrols.

    Args:
        name: a device's id; empty where the invite names the peer.
        board: a device's kind of board.
        installation: the installation of a device's agent.
        flower_key: the public key of a device's SuperNode in OpenSSH format; empty without one.
    """

    name: str = ""
    board: str = ""
    installation: str = ""
    flower_key: str = ""


@dataclass(frozen=True)
class Admission:
    """A peer that may enrol, and what its enrolment changes.

    Attributes:
        peer: the peer.
        invite: the invite, with one use less.
        replaced: certificates of the same device that the enrolment revokes.
    """

    peer: Peer
    invite: InviteRecord
    replaced: Sequence[CertificateRecord]


def peer_of(invite: InviteRecord, application: Application, fleet: str) -> Peer:
    """The peer that a machine becomes with an invite.

    Raises:
        InvalidInputError: a device's id, board or installation is not valid.
    """
    if invite.role is not Role.DEVICE:
        return Peer(fleet, invite.role, invite.name)
    name = invite.name or application.name
    require_name("a device id", name)
    for what, value in (("a board", application.board), ("an installation", application.installation)):
        if value:
            require_name(what, value)
    return Peer(fleet, Role.DEVICE, name, application.board, application.installation)
