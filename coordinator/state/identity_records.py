"""Records of the fleet's members: invites, issued certificates, and what operators changed.

No record contains a secret. All are immutable, and stored as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from wattfleet_identity.peers import Peer, Role


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
