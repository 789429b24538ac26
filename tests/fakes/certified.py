"""A coordinator with a certificate authority, and clients with certificates from it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.settings import CoordinatorSettings, IdentitySettings
from tests.fakes.served import Client, serving
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_identity.channels import open_async_channel
from wattfleet_identity.identity_folder import Identity, write_identity
from wattfleet_identity.invites import Invite
from wattfleet_identity.joining import Applicant, join
from wattfleet_identity.peers import Peer, Role
from wattfleet_io.clock import utc_now
from wattfleet_proto.v1 import identity_pb2

LIFETIME = timedelta(days=30)


@dataclass(frozen=True)
class CertifiedFleet:
    """A certificate authority, and identities that it has issued."""

    authority: AuthorityFolder

    @classmethod
    def create(cls, folder: Path) -> CertifiedFleet:
        return cls(AuthorityFolder.create(folder, ["127.0.0.1"], utc_now()))

    def identity(self, role: Role, name: str = "somebody", lifetime: timedelta = LIFETIME, **device: str) -> Identity:
        """An identity with a new key; with `device`, it has that device's board and installation."""
        key_pem, fleet = new_key(), self.authority.authority.fleet
        certificate_pem = self.authority.authority.issue(
            request_certificate(key_pem), Peer(fleet, role, name, **device), lifetime, utc_now()
        )
        return Identity(key_pem, certificate_pem, self.authority.trusted_pem)

    def renewed(self, identity: Identity) -> Identity:
        """An identity with a new certificate for the same key."""
        request = request_certificate(identity.key_pem)
        certificate_pem = self.authority.authority.issue(request, identity.peer, LIFETIME, utc_now())
        return replace(identity, certificate_pem=certificate_pem)

    def https_context(self, identity: Identity | None, folder: Path) -> ssl.SSLContext:
        """The TLS context for a client of the fleet's HTTPS servers; the identity's files are written to the folder."""
        context = ssl.create_default_context(cadata=self.authority.trusted_pem.decode())
        if identity is not None:
            write_identity(folder, identity)
            context.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
        return context


def certified(config: CoordinatorSettings, folder: Path, **identity: object) -> CoordinatorSettings:
    """Settings of a coordinator whose authority is in this folder."""
    return config.model_copy(update={"identity": IdentitySettings.model_validate({"directory": folder, **identity})})


async def invited(service: Any, role: Role, name: str = "", uses: int = 1) -> Invite:
    """An invite, as `wattfleet coordinator invite` creates it.

    Args:
        service: the coordinator's identity service, as an operator calls it.
        role: the role of the invited machine.
        name: the only name that the invite is valid for; empty for a device of any name.
        uses: how many times it can be used.
    """
    answer = await service.Invite(identity_pb2.InviteRequest(role=role.value, name=name, uses=uses, ttl_s=600))
    return Invite.parse(answer.line)


async def joined(
    service: Any, role: Role, applicant: Applicant, name: str = "", flower_public_key: bytes = b""
) -> Identity:
    """The identity that a machine receives for an invite; arguments as for `invited` and `join`."""
    return await asyncio.to_thread(join, await invited(service, role, name), applicant, flower_public_key)


@asynccontextmanager
async def client_with(config: CoordinatorSettings, identity: Identity) -> AsyncIterator[Client]:
    """A coordinator, and a client with an identity."""
    async with serving(config) as plaintext, calling(plaintext, identity) as client:
        yield client


@asynccontextmanager
async def calling(served: Client, identity: Identity | None, address: str | None = None) -> AsyncIterator[Client]:
    """Another client of a running coordinator, with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with open_async_channel(address or served.bound.address, identity, options) as channel:
        yield Client(served.bound, channel, served.stop, served.running)
