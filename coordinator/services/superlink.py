"""The service for Flower's SuperLink: its TLS certificate, and the list of enrolled SuperNodes."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.services.issuing import Issuing
from wattfleet.errors import InvalidInputError
from wattfleet_identity.peers import USERS_OF_FLWR
from wattfleet_io.addresses import split_address
from wattfleet_proto.v1 import superlink_pb2, superlink_pb2_grpc

_PER_MESSAGE = 500
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
        """The names and addresses of the SuperLink.

        Raises:
            InvalidInputError: the coordinator's settings do not state them.
        """
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
