"""The enrolment service: machines exchange an invite's token for a certificate, and renew it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from coordinator.errors import InvalidInviteError, QuotaExceededError
from coordinator.repository.repository import FleetRepository
from coordinator.services.issuing import CertificateOf, Issuing, openssh_line
from coordinator.services.peer_quotas import HostRates, host_of
from coordinator.state.invite_terms import Application
from wattfleet.errors import InvalidInputError
from wattfleet_identity.authority import SERVER_NAME
from wattfleet_identity.certificates import key_digest, requested_key
from wattfleet_identity.peers import Role
from wattfleet_proto.v1 import enrolment_pb2, enrolment_pb2_grpc

_log = logging.getLogger(__name__)

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
