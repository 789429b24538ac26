"""The identity service: operators invite machines, list and revoke certificates, and replace the authority."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any

from coordinator.errors import InvalidInviteError, QuotaExceededError, RotationError
from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.repository.repository import FleetRepository
from coordinator.services.audit import name_of_caller
from coordinator.services.issuing import CertificateOf, Issuing, openssh_line
from coordinator.services.request_limits import HostRates, host_of, stated_since
from coordinator.state.identities import Identities
from coordinator.state.identity_records import Application, CertificateRecord, InviteRecord, Terms
from coordinator.state.names import require_name
from wattfleet.common.addresses import split_address
from wattfleet.common.identity.authority import LIFETIME, SERVER_NAME
from wattfleet.common.identity.certificates import key_digest, requested_key
from wattfleet.common.identity.invites import Invite, new_token
from wattfleet.common.identity.peers import USERS_OF_FLWR, Peer, Role
from wattfleet.core.errors import InvalidInputError, first_few
from wattfleet_proto.v1 import (
    enrolment_pb2,
    enrolment_pb2_grpc,
    identity_pb2,
    identity_pb2_grpc,
    superlink_pb2,
    superlink_pb2_grpc,
)

_log = logging.getLogger(__name__)

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
        since = stated_since(request)
        found = await self._repository.read(lambda store: store.audit_entries(since, _MAX_AUDIT_ENTRIES))
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
        """The issuer of certificates."""
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


# --- Enrolment --------------------------------------------------------------------------------------------------------
# The enrolment service: machines exchange an invite's token for a certificate, and renew it.

_WRONG_TOKENS_AT_ONCE = 10
_WRONG_TOKENS_PER_S = 0.2


class EnrolmentServicer(enrolment_pb2_grpc.EnrolmentServiceServicer):
    """Lets machines into the fleet."""

    def __init__(
        self,
        repository: FleetRepository,
        issuing: Issuing,
        certificate_of: CertificateOf,
        end_invalid_sessions: Callable[[], int],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            issuing: issues certificates.
            certificate_of: returns the caller's certificate.
            end_invalid_sessions: ends the sessions whose certificates are no longer valid; returns how many.
            now_s: the clock of the limit on wrong tokens, in seconds.
        """
        self._repository = repository
        self._issuing = issuing
        self._certificate_of = certificate_of
        self._end_invalid_sessions = end_invalid_sessions
        self._now_s = now_s
        self._wrong_tokens = HostRates(_WRONG_TOKENS_PER_S, _WRONG_TOKENS_AT_ONCE)

    async def GetAuthority(  # noqa: N802 - named by the protocol
        self, request: enrolment_pb2.GetAuthorityRequest, context: Any
    ) -> enrolment_pb2.GetAuthorityResponse:
        """Return the certificate of the authority that signs the server's certificate."""
        return enrolment_pb2.GetAuthorityResponse(authority_pem=self._issuing.holder.folder.authority.certificate_pem)

    async def Join(  # noqa: N802 - named by the protocol
        self, request: enrolment_pb2.JoinRequest, context: Any
    ) -> enrolment_pb2.JoinResponse:
        """Enrol a machine; its certificate is on disk before it is sent."""
        host = host_of(context.peer())
        wrong = self._wrong_tokens.of(host, self._now_s())
        if wrong.is_empty(self._now_s()):
            raise QuotaExceededError("too many wrong tokens came from this host: wait a minute before the next one")
        requested_key(request.request_pem)
        flower_key = openssh_line(request.flower_public_key)
        identities, now = self._issuing.identities, self._issuing.now()
        fleet = self._issuing.holder.folder.issuer.fleet
        application = Application(request.name, request.board, request.installation, flower_key)
        try:
            admission = identities.redeem(request.token, application, fleet, now)
        except InvalidInviteError as error:
            wrong.take(self._now_s())
            _log.warning("an enrolment from %s was refused: %s", host, type(error).__doc__)
            raise
        peer, invite = admission.peer, admission.invite
        certificate_pem, record = self._issuing.issue(request.request_pem, peer, flower_key)
        placed = self._repository.fleet.operator.place(peer.name, invite.site, invite.tags)
        try:
            await self._repository.save(invite, *admission.replaced, record, *placed)
        except BaseException:  # also if the machine has disconnected meanwhile
            self._repository.save_soon(*identities.take_back(admission, record, now))
            raise
        identities.admitted(admission)
        self._end_invalid_sessions()
        _log.info("%s enrolled from %s with the invite %s of %s", peer, host, invite.number, invite.made_by)
        return enrolment_pb2.JoinResponse(
            certificate_pem=certificate_pem,
            trusted_pem=self._issuing.holder.folder.trusted_pem,
            coordinator=self._issuing.addresses().of(peer.role),
            server_name=SERVER_NAME,
            superlink=self._issuing.addresses().superlink,
        )

    async def Renew(  # noqa: N802 - named by the protocol
        self, request: enrolment_pb2.RenewRequest, context: Any
    ) -> enrolment_pb2.RenewResponse:
        """Issue the caller's next certificate, with the key and the lifetime of the previous one."""
        certificate, identities = self._certificate_of(context), self._issuing.identities
        if certificate is None:
            raise InvalidInputError("there is no certificate to renew: enrol this machine first")
        record = identities.find(certificate.serial)
        if record is None:
            raise InvalidInputError(
                f"this coordinator did not issue the certificate of {certificate.peer}, or was restored from an older "
                "backup: renew it with the authority that issued it, or enrol again"
            )
        if key_digest(requested_key(request.request_pem)) != certificate.key_digest:
            raise InvalidInputError(
                f"the request has another key than the certificate of {certificate.peer}: renew it with its own key, or"
                " enrol again for a new key"
            )
        # Other roles may have a certificate with another lifetime, which a renewal must not extend.
        is_device = certificate.peer.role is Role.DEVICE
        lifetime = self._issuing.lifetime if is_device else record.not_after - record.issued_at
        identities.require_renewable(certificate.peer, lifetime, self._issuing.now())
        certificate_pem, renewed = self._issuing.issue(
            request.request_pem, certificate.peer, record.flower_key, lifetime
        )
        await self._repository.save(renewed)
        return enrolment_pb2.RenewResponse(
            certificate_pem=certificate_pem,
            trusted_pem=self._issuing.holder.folder.trusted_pem,
            superlink=self._issuing.addresses().superlink,
        )


# --- Superlink --------------------------------------------------------------------------------------------------------
# The service for Flower's SuperLink: its TLS certificate, and the list of enrolled SuperNodes.

_MAX_HOSTS = 20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class SuperLinkServicer(superlink_pb2_grpc.SuperLinkServiceServicer):
    """Gives a SuperLink its TLS certificate and the public keys of the SuperNodes."""

    def __init__(self, issuing: Issuing, hosts: tuple[str, ...] = ()) -> None:
        """Serve one fleet.

        Args:
            issuing: issues certificates.
            hosts: further names and IP addresses of the SuperLink's machine, in addition to its address.
        """
        self._issuing = issuing
        self._hosts = hosts
        self._start = secrets.token_hex(8)  # revisions count from 0 after a restart

    async def GetSuperLink(  # noqa: N802 - named by the protocol
        self, request: superlink_pb2.GetSuperLinkRequest, context: Any
    ) -> superlink_pb2.GetSuperLinkResponse:
        """Return the SuperLink's address."""
        return superlink_pb2.GetSuperLinkResponse(address=self._issuing.addresses().superlink)

    async def IssueServerCertificate(  # noqa: N802 - named by the protocol
        self, request: superlink_pb2.IssueServerCertificateRequest, context: Any
    ) -> superlink_pb2.IssueServerCertificateResponse:
        """Issue the SuperLink's TLS certificate."""
        folder = self._issuing.holder.folder
        hosts = self._known_hosts()
        unknown = [host for host in list(request.hosts)[:_MAX_HOSTS] if host not in hosts]
        if unknown:
            raise InvalidInputError(
                f"{unknown[0][:200]!r} is not a known address of the SuperLink: listen on 0.0.0.0,"
                f" or restart the coordinator with --superlink-host {unknown[0][:200]}"
            )
        # As with the coordinator's own certificate, not every peer trusts the next authority yet.
        certificate_pem = folder.authority.issue_superlink(
            request.request_pem, hosts, self._issuing.lifetime, self._issuing.now()
        )
        return superlink_pb2.IssueServerCertificateResponse(
            certificate_pem=certificate_pem, trusted_pem=folder.trusted_pem, authority=_fingerprint_of(folder)
        )

    async def ListSuperNodes(  # noqa: N802 - named by the protocol
        self, request: superlink_pb2.ListSuperNodesRequest, context: Any
    ) -> AsyncIterator[superlink_pb2.ListSuperNodesResponse]:
        """List the SuperNodes of all enrolled devices."""
        identities, now = self._issuing.identities, self._issuing.now()
        first = superlink_pb2.ListSuperNodesResponse(
            revision=f"{self._start}-{identities.revision}",
            authority=_fingerprint_of(self._issuing.holder.folder),
        )
        if request.known_revision == first.revision:
            first.is_unchanged = True
            yield first
            return
        first.revoked_serials.extend(identities.revoked(USERS_OF_FLWR, now))
        found = [
            superlink_pb2.SuperNodeView(device_id=device_id, public_key=key)
            for device_id, key in identities.supernodes(now)
        ]
        first.supernodes.extend(found[:_PER_MESSAGE])
        yield first
        for start in range(_PER_MESSAGE, len(found), _PER_MESSAGE):
            yield superlink_pb2.ListSuperNodesResponse(supernodes=found[start : start + _PER_MESSAGE])

    def _known_hosts(self) -> list[str]:
        """The names and addresses of the SuperLink."""
        address = self._issuing.addresses().superlink
        if not address:
            raise InvalidInputError(
                "this coordinator has no address of a SuperLink: restart it with --superlink-address HOST:PORT, the "
                "address at which SuperNodes and users reach the SuperLink"
            )
        return list(dict.fromkeys([split_address(address)[0].strip("[]"), *self._hosts, *_LOOPBACK]))


def _fingerprint_of(folder: AuthorityFolder) -> bytes:
    """A digest of 32 bytes of the authority that issues servers' certificates, and of the trusted authorities."""
    return sha256(folder.authority.fingerprint + folder.trusted_pem).digest()
