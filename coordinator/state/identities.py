"""The fleet's members: open invites, and the certificates that were issued and revoked.

Each change returns the records to store.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TypeVar

from coordinator.errors import (
    AlreadyEnrolledError,
    ExpiredInviteError,
    QuotaExceededError,
    TooManyDevicesError,
    UnknownInviteError,
    UnknownRecordError,
    UsedUpInviteError,
)
from coordinator.state.identity_records import (
    Admission,
    Application,
    CertificateRecord,
    ExpiredIdentities,
    InviteRecord,
    Terms,
    peer_of,
)
from wattfleet.common.identity.invites import token_hash
from wattfleet.common.identity.peers import Peer, Role

# --- Enrolments -------------------------------------------------------------------------------------------------------
# How many new devices each peer has enrolled: a limit, since every device stays known until it is forgotten.


_MAX_REMEMBERED = 20_000
"""The most connections and hosts whose enrolments are counted; the oldest are dropped."""


class Enrolments:
    """The new devices of each connection and of each host, so that reconnecting does not reset the limit."""

    def __init__(self, per_connection: int, per_host: int) -> None:
        """Start without any.

        Args:
            per_connection: new devices per connection.
            per_host: new devices per host.
        """
        self._of_connection, self._of_host = _Counts(per_connection), _Counts(per_host)

    def require_room(self, connection: str, host: str, device_id: str) -> None:
        """Make sure that a connection may enrol another device.

        Args:
            connection: the peer's address and port.
            host: the peer's address.
            device_id: the new device.

        Raises:
            TooManyDevicesError: the connection or the host has reached its limit.
        """
        if self._of_connection.is_full(connection):
            raise TooManyDevicesError(
                f"{device_id}: this connection has reached its limit of {self._of_connection.limit:,} new devices:"
                " give each agent its own connection, or raise the coordinator's setting"
                " sessions.max_new_devices_per_connection"
            )
        if self._of_host.is_full(host):
            raise TooManyDevicesError(
                f"{device_id}: this host has reached its limit of {self._of_host.limit:,} new devices: if its devices"
                " are yours, raise the coordinator's setting sessions.max_new_devices_per_host"
            )

    def add(self, connection: str, host: str) -> None:
        """Count a new device."""
        self._of_connection.add(connection)
        self._of_host.add(host)


class _Counts:
    """Counts by name, with a limit; beyond `_MAX_PEERS` names, those counted longest ago are dropped."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._counts: dict[str, int] = {}

    def is_full(self, name: str) -> bool:
        return self._counts.get(name, 0) >= self.limit

    def add(self, name: str) -> None:
        self._counts[name] = self._counts.pop(name, 0) + 1
        if len(self._counts) > _MAX_REMEMBERED:
            del self._counts[next(iter(self._counts))]


# --- Identities -------------------------------------------------------------------------------------------------------

K = TypeVar("K", bound=Hashable)

MAX_INVITES = 1_000
MAX_CERTIFICATES = 100_000
AUDIT_KEEP = timedelta(days=400)
MAX_AUDIT_ENTRIES = 1_000_000
FORGOTTEN = "the device was forgotten"
"""The reason for which the certificates of a forgotten device are revoked."""
_MAX_EARLY_RENEWALS = 4
_EARLY = 0.9  # share of its validity that is left


class Identities:
    """The invites and the certificates of one fleet."""

    def __init__(self) -> None:
        """Start without any invite or certificate."""
        self._invites: dict[str, InviteRecord] = {}
        self._certificates: dict[str, CertificateRecord] = {}
        self._of_name: dict[tuple[Role, str], set[str]] = {}
        self._of_key: dict[str, set[str]] = {}
        self._revoked: set[str] = set()
        self._unsettled: set[str] = set()  # replaced by machines whose enrolment is not stored yet
        self._cancelled: set[str] = set()
        self.revision = 0
        """Incremented with each change of a certificate."""

    def restore(self, invites: Iterable[InviteRecord], certificates: Iterable[CertificateRecord]) -> None:
        """Load what a store holds."""
        self._invites.update((each.token_hash, each) for each in invites)
        for each in certificates:
            self._put(each)

    # --- queries ------------------------------------------------------------------------------------------------

    def invites(self, now: datetime) -> list[InviteRecord]:
        """The invites that can still be used, in order of expiry."""
        return sorted((each for each in self._invites.values() if each.is_open(now)), key=lambda each: each.expires_at)

    def certificates(self, now: datetime) -> list[CertificateRecord]:
        """The certificates that have not expired, in order of owner, the newest of each owner first."""
        unexpired = [each for each in self._certificates.values() if now < each.not_after]
        unexpired.sort(key=lambda each: each.issued_at, reverse=True)
        return sorted(unexpired, key=lambda each: (each.peer.role.value, each.peer.name))

    def expiries(self, now: datetime) -> dict[str, datetime]:
        """When the first valid certificate of each role expires; only the newest certificate of each owner counts."""
        last: dict[Peer, datetime] = {}
        for each in list(self._certificates.values()):
            if each.is_valid(now):
                last[each.peer] = max(each.not_after, last.get(each.peer, each.not_after))
        first: dict[str, datetime] = {}
        for peer, not_after in last.items():
            first[peer.role.value] = min(not_after, first.get(peer.role.value, not_after))
        return first

    def is_revoked(self, serial: str) -> bool:
        """Whether a certificate was revoked; False for an unknown one."""
        found = self._certificates.get(serial)
        return found is not None and found.revoked_at is not None

    def find(self, serial: str) -> CertificateRecord | None:
        """Get a certificate by its serial number; None if it is unknown."""
        return self._certificates.get(serial)

    def has_certificate(self, device_id: str, now: datetime) -> bool:
        """Whether a device has an unexpired certificate, even a revoked one: it may then no longer use plaintext."""
        serials = self._of_name.get((Role.DEVICE, device_id), ())
        return any(now < self._certificates[each].not_after for each in serials)

    def supernodes(self, now: datetime) -> list[tuple[str, str]]:
        """The SuperNodes of enrolled devices: pairs of device id and public key in OpenSSH format."""
        return sorted(
            {
                (each.peer.name, each.flower_key)
                for each in self._certificates.values()
                if each.flower_key and each.peer.role is Role.DEVICE and each.is_valid(now)
            }
        )

    def revoked(self, roles: Collection[Role], now: datetime) -> list[str]:
        """The serial numbers of revoked, unexpired certificates of the given roles."""
        found = (self._certificates[serial] for serial in self._revoked)
        return sorted(each.serial for each in found if each.peer.role in roles and now < each.not_after)

    def not_issued_by(self, issuer: str, now: datetime) -> list[CertificateRecord]:
        """The newest certificate of every owner without a certificate of the given authority.

        These owners would be locked out if only this authority were trusted.

        Args:
            issuer: SHA-256 of the authority's certificate, hexadecimal.
            now: the time.
        """
        valid = [each for each in self.certificates(now) if each.revoked_at is None]
        renewed = {each.peer.uri for each in valid if each.issuer == issuer}
        newest = {each.peer.uri: each for each in reversed(valid) if each.peer.uri not in renewed}
        return sorted(newest.values(), key=lambda each: (each.peer.role.value, each.peer.name))

    # --- changes ------------------------------------------------------------------------------------------------

    def invite(self, token: str, terms: Terms, made_by: str, now: datetime) -> InviteRecord:
        """Create an invite, which permits enrolment with its token.

        Raises:
            QuotaExceededError: too many invites are open.
        """
        if len(self.invites(now)) >= MAX_INVITES:
            raise QuotaExceededError(
                f"{MAX_INVITES:,} invites are open, which is the limit: wait until one expires, or make one for "
                "several devices with --uses"
            )
        until = now + terms.ttl
        record = InviteRecord(
            token_hash(token), terms.role, terms.name, terms.site, terms.tags, now, made_by, until, terms.uses
        )
        self._invites[record.token_hash] = record
        return record

    def cancel(self, number: str) -> InviteRecord:
        """Close an invite, given the first digits of its hash.

        Raises:
            UnknownRecordError: no invite matches, or several do.
        """
        found = [each for each in self._invites.values() if number and each.token_hash.startswith(number)]
        if len(found) != 1:
            raise UnknownRecordError(f"no invite {number!r}: `wattfleet coordinator invites` lists them")
        self._cancelled.add(found[0].token_hash)
        return self._close(replace(found[0], uses_left=0))

    def cancel_all(self, now: datetime) -> list[InviteRecord]:
        """Close all invites that can still be used, and return them."""
        self._cancelled.update(self._invites)
        return [self._close(replace(each, uses_left=0)) for each in self.invites(now)]

    def redeem(self, token: str, application: Application, fleet: str, now: datetime) -> Admission:
        """Use an invite once; the caller then calls `admitted` or `take_back`.

        Args:
            token: the secret.
            application: what the machine that enrols states about itself.
            fleet: the fleet's name.
            now: the time.

        Raises:
            InvalidInviteError: the token is unknown, expired or used up: the exception's type tells which, its message
                does not.
            InvalidInputError: a device's id, board or installation is not valid.
            AlreadyEnrolledError: another machine has the device's id, or the SuperNode's key was already enrolled.
        """
        invite = self._invites.get(token_hash(token))
        if invite is None:
            raise UnknownInviteError
        if now >= invite.expires_at:
            raise ExpiredInviteError
        if invite.uses_left < 1:
            raise UsedUpInviteError
        if len(self._certificates) >= MAX_CERTIFICATES:
            raise QuotaExceededError(f"{MAX_CERTIFICATES:,} certificates are valid, which is the limit: revoke some")
        peer = peer_of(invite, application, fleet)
        # An invite with the device's name lets it replace the earlier device, for example after a new disk.
        replaced = [each for each in self._of(peer) if self._counts(each, now)] if peer.role is Role.DEVICE else []
        others = [each for each in replaced if each.peer.installation != peer.installation]
        if others and not invite.name:
            raise AlreadyEnrolledError(
                f"another machine is enrolled as device {peer.name!r}: give this machine another name. If it replaces "
                f"the other machine, use an invite from `wattfleet coordinator invite --device {peer.name}`, or first "
                f"revoke the old certificate with `wattfleet coordinator revoke {peer.name}`"
            )
        if application.flower_key and application.flower_key in self._of_key:
            raise AlreadyEnrolledError(
                "the key of this SuperNode was already enrolled, and two devices must not share a key: make a new key, "
                "as `wattfleet agent join` does"
            )
        used = self._close(replace(invite, uses_left=invite.uses_left - 1))
        admission = Admission(peer, used, self._revoke(replaced, f"{peer} enrolled again", now))
        self._unsettled.update(each.serial for each in admission.replaced)
        return admission

    def admitted(self, admission: Admission) -> None:
        """Record that an admission is stored, and can no longer be taken back."""
        self._unsettled.difference_update(each.serial for each in admission.replaced)

    def take_back(
        self, admission: Admission, record: CertificateRecord, now: datetime
    ) -> list[InviteRecord | CertificateRecord]:
        """Undo an admission whose certificate could not be delivered, except where something changed meanwhile."""
        invite = self._invites.get(admission.invite.token_hash, admission.invite)
        if invite.token_hash not in self._cancelled:
            invite = self._close(replace(invite, uses_left=invite.uses_left + 1))
        for each in admission.replaced:
            # A different record means that it was revoked or replaced again meanwhile.
            if self._certificates.get(each.serial) is each and each.serial in self._unsettled:
                self._unsettled.discard(each.serial)
                self._put(replace(each, revoked_at=None, reason=""))
        now_of = [self._certificates.get(each.serial, each) for each in admission.replaced]
        lost = self._certificates.get(record.serial, record)
        if self._counts(lost, now):
            [lost] = self._revoke([lost], "it could not be stored, and was not delivered", now)
        return [invite, *now_of, lost]

    def issued(self, record: CertificateRecord) -> CertificateRecord:
        """Record an issued certificate."""
        self._put(record)
        return record

    def require_renewable(self, peer: Peer, lifetime: timedelta, now: datetime) -> None:
        """Check that a peer does not renew its certificate too often.

        Raises:
            QuotaExceededError: it has renewed several times, and its newest certificate is almost new.
        """
        early = [each for each in self._of(peer) if now < each.issued_at + lifetime * (1 - _EARLY)]
        if len(early) >= _MAX_EARLY_RENEWALS:
            raise QuotaExceededError(
                f"{peer} received {len(early)} certificates within a tenth of a certificate's validity: use the newest "
                "one"
            )

    def revoke(self, name_or_serial: str, reason: str, now: datetime) -> list[CertificateRecord]:
        """Revoke a certificate by its serial number, or all certificates of a name.

        Returns:
            The revoked certificates.

        Raises:
            UnknownRecordError: no valid certificate matches.
        """
        exact = self._certificates.get(name_or_serial)
        found = [exact] if exact is not None else [each for each in self._certificates.values()]
        valid = [
            each
            for each in found
            if self._counts(each, now) and (each is exact or name_or_serial in (each.peer.name, str(each.peer)))
        ]
        if not valid:
            raise UnknownRecordError(
                f"no valid certificate has the name or serial number {name_or_serial!r}:"
                " `wattfleet coordinator certificates` lists them"
            )
        return self._revoke(valid, reason, now)

    def forget(self, device_ids: Collection[str], now: datetime) -> list[CertificateRecord]:
        """Revoke the certificates of forgotten devices, and return them."""
        owned = [self._certificates[each] for name in device_ids for each in self._of_name.get((Role.DEVICE, name), ())]
        return self._revoke([each for each in owned if self._counts(each, now)], FORGOTTEN, now)

    def expire(self, now: datetime) -> ExpiredIdentities:
        """Drop the invites and certificates that have expired."""
        self._invites = {key: each for key, each in self._invites.items() if now < each.expires_at}
        self._cancelled.intersection_update(self._invites)
        for each in [each for each in self._certificates.values() if now >= each.not_after]:
            self.revision += 1
            del self._certificates[each.serial]
            self._unsettled.discard(each.serial)
            self._revoked.discard(each.serial)
            _remove(self._of_name, (each.peer.role, each.peer.name), each.serial)
            if each.flower_key:
                _remove(self._of_key, each.flower_key, each.serial)
        return ExpiredIdentities(now, AUDIT_KEEP, MAX_AUDIT_ENTRIES)

    def _counts(self, record: CertificateRecord, now: datetime) -> bool:
        """Whether a certificate is valid, or would be valid again if the enrolment that replaces it were undone."""
        return record.is_valid(now) or (record.serial in self._unsettled and now < record.not_after)

    def _of(self, peer: Peer) -> list[CertificateRecord]:
        """The certificates of a peer's role and name, whatever the installation."""
        return [self._certificates[each] for each in self._of_name.get((peer.role, peer.name), ())]

    def _revoke(self, records: Collection[CertificateRecord], reason: str, now: datetime) -> list[CertificateRecord]:
        revoked = [replace(each, revoked_at=now, reason=reason) for each in records]
        for each in revoked:
            self._unsettled.discard(each.serial)
            self._put(each)
        return revoked

    def _close(self, invite: InviteRecord) -> InviteRecord:
        self._invites[invite.token_hash] = invite
        return invite

    def _put(self, record: CertificateRecord) -> None:
        self.revision += 1
        self._certificates[record.serial] = record
        (self._revoked.discard if record.revoked_at is None else self._revoked.add)(record.serial)
        self._of_name.setdefault((record.peer.role, record.peer.name), set()).add(record.serial)
        if record.flower_key:
            self._of_key.setdefault(record.flower_key, set()).add(record.serial)


def _remove(index: dict[K, set[str]], key: K, serial: str) -> None:
    """Remove a serial number from an index, and also its key if no serial number is left."""
    index[key].discard(serial)
    if not index[key]:
        del index[key]
