"""Records of the fleet's members: invites, issued certificates, and what operators changed.

No record contains a secret. All are immutable, and stored as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from coordinator.state.names import MAX_TAGS, require_name, require_tag
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.errors import InvalidInputError

# --- Invite terms -----------------------------------------------------------------------------------------------------
# The terms of an invite, what an enrolling machine states about itself, and the peer that it becomes.


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


# --- Identity records -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InviteRecord:
    """A permission to enrol.

    Attributes:
        token_hash: SHA-256 of the secret token, hexadecimal.
        role: the role of the machine that enrols.
        name: its name in the fleet; empty if a device names itself.
        site: the supply that the device is behind; empty to leave it to the site file.
        tags: words attached to the device, so that rules can select it.
        made_at: when it was made.
        made_by: who made it.
        expires_at: when it expires.
        uses_left: how many machines can still enrol with it.
    """

    token_hash: str
    role: Role
    name: str
    site: str
    tags: frozenset[str]
    made_at: datetime
    made_by: str
    expires_at: datetime
    uses_left: int

    @property
    def number(self) -> str:
        """The short name shown to people: the first digits of its hash."""
        return self.token_hash[:12]

    def is_open(self, now: datetime) -> bool:
        """Whether it can still be used to enrol."""
        return self.uses_left > 0 and now < self.expires_at


@dataclass(frozen=True)
class CertificateRecord:
    """A certificate that the fleet's authority issued.

    Attributes:
        serial: its number, hexadecimal.
        peer: its owner.
        issuer: SHA-256 of the authority's certificate, hexadecimal.
        issued_at: when it was issued.
        not_after: when it expires.
        revoked_at: when it was revoked; None if it was not.
        reason: why it was revoked.
        flower_key: the public key of the device's SuperNode in OpenSSH format; empty without one.
    """

    serial: str
    peer: Peer
    issuer: str
    issued_at: datetime
    not_after: datetime
    revoked_at: datetime | None = None
    reason: str = ""
    flower_key: str = ""

    def is_valid(self, now: datetime) -> bool:
        """Whether it is accepted at the given time."""
        return self.revoked_at is None and now < self.not_after


@dataclass(frozen=True)
class AuditEntry:
    """One request to change something.

    Attributes:
        entry_id: a random id.
        at: when it was answered.
        caller: who sent the request.
        method: the RPC.
        request: a summary of the request, without secrets.
        outcome: why it was refused; empty if it was carried out.
    """

    entry_id: str
    at: datetime
    caller: str
    method: str
    request: str
    outcome: str = ""


@dataclass(frozen=True)
class ExpiredIdentities:
    """What to delete: invites and certificates that have expired, and old entries of the audit log.

    Attributes:
        now: invites and certificates that expired before this are dropped.
        keep: older entries of the audit log are dropped.
        max_entries: how many entries of the audit log are kept at most, the newest ones.
    """

    now: datetime
    keep: timedelta
    max_entries: int


IdentityRecord = InviteRecord | CertificateRecord | AuditEntry | ExpiredIdentities
"""Any stored record about the fleet's members."""
