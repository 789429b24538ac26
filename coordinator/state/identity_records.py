"""Records of who may be in the fleet: invites, issued certificates, and what operators changed. No record has a secret.

They are immutable, and stored as they are.
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
        role: what enrols.
        name: what it will be called; empty if a device names itself.
        site: the supply that the device is behind; empty to leave it to the site file.
        tags: words that the device gets, by which rules select devices.
        made_at: when it was made.
        made_by: who made it.
        expires_at: from then on it cannot be used.
        uses_left: how many can still enrol with it.
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
        """What people call it: the first digits of its hash."""
        return self.token_hash[:12]

    def is_open(self, now: datetime) -> bool:
        """Whether somebody can still enrol with it."""
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
        revoked_at: when it was revoked; None while it counts.
        reason: why it was revoked.
        flower_key: the public key of the device's SuperNode, a line of OpenSSH; empty without one.
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
        """Whether its owner is let in with it."""
        return self.revoked_at is None and now < self.not_after


@dataclass(frozen=True)
class AuditEntry:
    """One request that was to change something.

    Attributes:
        entry_id: a random id.
        at: when it was answered.
        caller: who asked.
        method: the RPC.
        request: a summary of what was asked, without secrets.
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
    """What no longer matters: invites and certificates that have expired, and old entries of the audit log.

    Attributes:
        now: invites and certificates that expired before this are dropped.
        keep: entries of the audit log that are older are dropped.
        max_entries: of the audit log, the newest that are kept.
    """

    now: datetime
    keep: timedelta
    max_entries: int


IdentityRecord = InviteRecord | CertificateRecord | AuditEntry | ExpiredIdentities
"""What is stored about who may be in the fleet."""
