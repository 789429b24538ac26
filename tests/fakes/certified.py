"""A coordinator with an authority, and peers with certificates of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.settings import CoordinatorSettings, IdentitySettings
from tests.fakes.served import Client, serving
from wattfleet_identity.certificates import new_key, request_certificate
from wattfleet_identity.channels import open_async_channel
from wattfleet_identity.identity_folder import Identity
from wattfleet_identity.peers import Peer, Role
from wattfleet_io.clock import utc_now

LIFETIME = timedelta(days=30)


@dataclass(frozen=True)
class CertifiedFleet:
    """An authority, and identities of it."""

    authority: AuthorityFolder

    @classmethod
    def create(cls, folder: Path) -> CertifiedFleet:
        return cls(AuthorityFolder.create(folder, ["127.0.0.1"], utc_now()))

    def identity(self, role: Role, name: str = "somebody", lifetime: timedelta = LIFETIME, **device: str) -> Identity:
        """An identity with a new key; `device` has the board and installation of a device."""
        key_pem, fleet = new_key(), self.authority.authority.fleet
        certificate_pem = self.authority.authority.issue(
            request_certificate(key_pem), Peer(fleet, role, name, **device), lifetime, utc_now()
        )
        return Identity(key_pem, certificate_pem, self.authority.trusted_pem)


def certified(config: CoordinatorSettings, folder: Path, **identity: object) -> CoordinatorSettings:
    """Settings of a coordinator with the authority in a folder."""
    return config.model_copy(update={"identity": IdentitySettings.model_validate({"directory": folder, **identity})})


@asynccontextmanager
async def client_with(config: CoordinatorSettings, identity: Identity) -> AsyncIterator[Client]:
    """A coordinator, and a client with an identity."""
    async with serving(config) as plaintext, calling(plaintext, identity) as client:
        yield client


@asynccontextmanager
async def calling(served: Client, identity: Identity | None, address: str | None = None) -> AsyncIterator[Client]:
    """Another client of a running coordinator; its connection is its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with open_async_channel(address or served.bound.address, identity, options) as channel:
        yield Client(served.bound, channel, served.stop, served.running)
