"""The identity service: operators invite machines, list and revoke certificates, and replace the authority."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta, timezone
from typing import Any

from coordinator.errors import RotationError
from coordinator.repository.repository import FleetRepository
from coordinator.services.audit import name_of_caller
from coordinator.services.issuing import CertificateOf, Issuing
from coordinator.state.identities import Identities
from coordinator.state.identity_records import CertificateRecord, InviteRecord
from coordinator.state.invite_terms import Terms
from coordinator.state.names import require_name
from wattfleet.errors import InvalidInputError, first_few
from wattfleet_identity.authority import LIFETIME, SERVER_NAME
from wattfleet_identity.invites import Invite, new_token
from wattfleet_identity.peers import Peer, Role
from wattfleet_proto.v1 import identity_pb2, identity_pb2_grpc

_PER_MESSAGE = 500
_MAX_AUDIT_ENTRIES = 10_000
_LONGEST_S = LIFETIME.total_seconds()


class IdentityServicer(identity_pb2_grpc.IdentityServiceServicer):
    """Translates between the operator's commands and the fleet's invites and certificates."""

    def __init__(
        self,
        repository: FleetRepository,
        issuing: Issuing | None,
        certificate_of: CertificateOf,
        end_invalid_sessions: Callable[[], int],
        announce_revocations: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            issuing: issues certificates; None without an authority.
            certificate_of: returns the caller's certificate.
            end_invalid_sessions: ends the sessions whose certificates are no longer valid; returns how many.
            announce_revocations: tells agents which certificates were revoked.
        """
        self._repository = repository
        self._issuing_or_none = issuing
        self._certificate_of = certificate_of
        self._end_invalid_sessions = end_invalid_sessions
        self._announce_revocations = announce_revocations

    async def Invite(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.InviteRequest, context: Any
    ) -> identity_pb2.InviteResponse:
        """Create an invite, so that machines can enrol."""
        if not 0 < request.ttl_s <= _LONGEST_S:
            raise InvalidInputError(f"an invite cannot be used for {request.ttl_s:g} s: change --ttl")
        if request.site:
            self._repository.fleet.operator.require_supply(request.site)
        role, ttl = role_by_name(request.role), timedelta(seconds=request.ttl_s)
        terms = Terms(role, request.name, request.site, frozenset(request.tags), request.uses, ttl)
        token, now = new_token(), self._issuing.now()
        record = self._identities.invite(token, terms, name_of_caller(context, self._certificate_of), now)
        await self._repository.save(record)
        authority = self._issuing.holder.folder.authority.fingerprint
        line = Invite(self._issuing.addresses().enrolment, authority, token, now).line
        return identity_pb2.InviteResponse(line=line, invite=_invite(record))

    async def ListInvites(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.ListInvitesRequest, context: Any
    ) -> identity_pb2.ListInvitesResponse:
        """List the invites that can still be used."""
        found = self._identities.invites(self._issuing.now())
        return identity_pb2.ListInvitesResponse(invites=map(_invite, found))

    async def CancelInvite(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.CancelInviteRequest, context: Any
    ) -> identity_pb2.CancelInviteResponse:
        """Close an invite."""
        record = self._identities.cancel(request.number)
        await self._repository.save(record)
        return identity_pb2.CancelInviteResponse(invite=_invite(record))

    async def ListCertificates(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.ListCertificatesRequest, context: Any
    ) -> AsyncIterator[identity_pb2.ListCertificatesResponse]:
        """List the certificates that have not expired."""
        found = self._identities.certificates(self._issuing.now())
        for start in range(0, len(found), _PER_MESSAGE):
            some = found[start : start + _PER_MESSAGE]
            yield identity_pb2.ListCertificatesResponse(certificates=map(_certificate, some))

    async def IssueCertificate(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.IssueCertificateRequest, context: Any
    ) -> identity_pb2.IssueCertificateResponse:
        """Issue a certificate to a program."""
        role = role_by_name(request.role)
        if role is Role.DEVICE:
            raise InvalidInputError("a device enrols with an invite: use `wattfleet coordinator invite`")
        require_name("a name", request.name)
        if not 0 <= request.lifetime_s <= _LONGEST_S:
            raise InvalidInputError(f"a certificate is valid for at most {LIFETIME.days:,} days: shorten --lifetime")
        lifetime = timedelta(seconds=request.lifetime_s) if request.lifetime_s else None
        folder = self._issuing.holder.folder
        peer = Peer(folder.issuer.fleet, role, request.name)
        certificate_pem, record = self._issuing.issue(request.request_pem, peer, lifetime=lifetime)
        await self._repository.save(record)
        return identity_pb2.IssueCertificateResponse(
            certificate_pem=certificate_pem,
            trusted_pem=folder.trusted_pem,
            coordinator=self._issuing.addresses().of(role),
            server_name=SERVER_NAME,
            superlink=self._issuing.addresses().superlink,
        )

    async def RevokeCertificates(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.RevokeCertificatesRequest, context: Any
    ) -> identity_pb2.RevokeCertificatesResponse:
        """Revoke certificates, and end the sessions that began with them."""
        revoked = self._identities.revoke(request.name_or_serial, request.reason, self._issuing.now())
        # End the sessions before storing: a revoked peer must not stay connected until the store is available again.
        ended = self._end_invalid_sessions()
        self._announce_revocations()
        await self._repository.save(*revoked)
        return identity_pb2.RevokeCertificatesResponse(certificates=map(_certificate, revoked), ended_sessions=ended)

    async def BeginRotation(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.BeginRotationRequest, context: Any
    ) -> identity_pb2.BeginRotationResponse:
        """Create a new authority."""
        holder, now = self._issuing.holder, self._issuing.now()
        try:
            holder.replace(holder.folder.begin_rotation(now))
        except OSError as error:
            raise _unwritable(error) from None
        return identity_pb2.BeginRotationResponse(to_renew=map(_certificate, self._to_renew(now)))

    async def FinishRotation(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.FinishRotationRequest, context: Any
    ) -> identity_pb2.FinishRotationResponse:
        """Remove the old authority once every certificate was renewed, and close open invites, which refer to it."""
        holder, now = self._issuing.holder, self._issuing.now()
        if holder.folder.successor is not None and (missing := self._to_renew(now)):
            raise RotationError(
                f"{len(missing):,} certificates of the old authority are still valid, and would not be accepted:"
                f" {first_few([str(each.peer) for each in missing])}. Wait until they are renewed, enrol these machines"
                " again, or revoke their certificates"
            )
        try:
            holder.replace(holder.folder.finish_rotation(now))
        except OSError as error:
            raise _unwritable(error) from None
        await self._repository.save(*self._identities.cancel_all(now))
        return identity_pb2.FinishRotationResponse()

    async def ReadAuditLog(  # noqa: N802 - named by the protocol
        self, request: identity_pb2.ReadAuditLogRequest, context: Any
    ) -> AsyncIterator[identity_pb2.ReadAuditLogResponse]:
        """List what operators changed."""
        since = None
        if request.HasField("since_unix_s"):
            try:
                since = datetime.fromtimestamp(request.since_unix_s, timezone.utc)
            except (OverflowError, OSError, ValueError):
                raise InvalidInputError(f"{request.since_unix_s:g} is not a valid time: change --since") from None
        found = await self._repository.audit_entries(since, _MAX_AUDIT_ENTRIES)
        for start in range(0, len(found), _PER_MESSAGE):
            entries = [
                identity_pb2.AuditEntry(
                    at_unix_s=each.at.timestamp(),
                    caller=each.caller,
                    method=each.method,
                    request=each.request,
                    outcome=each.outcome,
                )
                for each in found[start : start + _PER_MESSAGE]
            ]
            yield identity_pb2.ReadAuditLogResponse(entries=entries)

    @property
    def _issuing(self) -> Issuing:
        """The issuer of certificates.

        Raises:
            InvalidInputError: the coordinator has no authority.
        """
        if self._issuing_or_none is None:
            raise InvalidInputError(
                "this coordinator has no certificate authority: run `wattfleet coordinator init` on its machine, and"
                " start it again"
            )
        return self._issuing_or_none

    @property
    def _identities(self) -> Identities:
        return self._issuing.identities

    def _to_renew(self, now: datetime) -> list[CertificateRecord]:
        return self._identities.not_issued_by(self._issuing.holder.folder.issuer.fingerprint.hex(), now)


def role_by_name(name: str) -> Role:
    """Get a role by its name.

    Raises:
        InvalidInputError: there is no role of this name.
    """
    try:
        return Role(name)
    except ValueError:
        raise InvalidInputError(f"no role {name[:50]!r}; choose {', '.join(role.value for role in Role)}") from None


def _unwritable(error: OSError) -> RotationError:
    return RotationError(f"the identity folder cannot be written: {error.strerror}. Fix this, and repeat the command")


def _invite(record: InviteRecord) -> identity_pb2.InviteView:
    return identity_pb2.InviteView(
        number=record.number,
        role=record.role.value,
        name=record.name,
        site=record.site,
        tags=sorted(record.tags),
        made_by=record.made_by,
        expires_unix_s=record.expires_at.timestamp(),
        uses_left=record.uses_left,
    )


def _certificate(record: CertificateRecord) -> identity_pb2.CertificateView:
    return identity_pb2.CertificateView(
        serial=record.serial,
        role=record.peer.role.value,
        name=record.peer.name,
        board=record.peer.board,
        installation=record.peer.installation,
        issued_unix_s=record.issued_at.timestamp(),
        expires_unix_s=record.not_after.timestamp(),
        revoked_unix_s=None if record.revoked_at is None else record.revoked_at.timestamp(),
        reason=record.reason,
        flower_public_key=record.flower_key,
    )
