"""Reads and checks everything needed before the store is opened, so that a failing start leaves no file behind."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from sqlalchemy import URL

from coordinator.composition import PlanningBasis
from coordinator.identity.access import Access
from coordinator.identity.live_calls import LiveCalls
from coordinator.identity.server_credentials import ServerCredentials
from coordinator.listeners import Listener, authority_of, listeners_of, require_free
from coordinator.references import Reference, open_reference
from coordinator.settings import CoordinatorSettings
from coordinator.state.identities import Identities
from coordinator.store.database import database_url
from wattfleet_io.addresses import split_address


@dataclass(frozen=True)
class Preparation:
    """Everything that a coordinator has read and checked before it serves.

    Attributes:
        settings: all settings.
        basis: the settings that determine plans.
        location: the store's file or database.
        keep: how long ended runs are kept; None forever.
        credentials: the server's TLS credentials; None without an authority.
        identities: invites and certificates; empty until the store is loaded.
        calls: the calls that end when their certificate expires or is revoked.
        listeners: the gRPC addresses, the main one first.
        metrics_address: host and port of the metrics.
        reference: the reference predictor of the settings.
    """

    settings: CoordinatorSettings
    basis: PlanningBasis
    location: Path | URL
    keep: timedelta | None
    credentials: ServerCredentials | None
    identities: Identities
    calls: LiveCalls
    listeners: list[Listener]
    metrics_address: tuple[str, int]
    reference: Reference

    @classmethod
    def of(cls, settings: CoordinatorSettings) -> Preparation:
        """Read the files that the settings name, and check that the addresses are free, unless this is a standby.

        Raises:
            InvalidInputError: an address is in use, or a setting or the reference cannot be used.
        """
        basis, location = PlanningBasis.of(settings), database_url(settings.store.location)
        keep = None if settings.store.keep_days is None else timedelta(days=settings.store.keep_days)
        authority = authority_of(settings)
        credentials = None if authority is None else ServerCredentials(authority)
        identities, calls = Identities(), LiveCalls()
        listeners = listeners_of(settings, credentials, identities.is_revoked, calls)
        metrics_address = split_address(settings.server.metrics_address)
        _allow_connections()
        reference = open_reference(settings.profiling.reference)
        prepared = cls(
            settings, basis, location, keep, credentials, identities, calls, listeners, metrics_address, reference
        )
        if not settings.store.standby:
            require_free(prepared.addresses)
        return prepared

    @property
    def addresses(self) -> list[str]:
        """All addresses to listen on."""
        server = self.settings.server
        # The page's default address may be in use: the coordinator then serves without a page.
        named = [] if server.page_address in (None, "none") else [server.page_address]
        return [*(listener.address for listener in self.listeners), server.metrics_address, *filter(None, named)]

    def expiries(self, now: datetime) -> dict[str, datetime]:
        """When the first valid certificate of each role expires; of an owner's certificates, the newest counts."""
        if self.credentials is None:
            return {}
        server = self.credentials.folder.server.not_after
        return {"coordinator": server, **self.identities.expiries(now)}

    @property
    def access(self) -> Access | None:
        """Which role may call which RPC at the main address; None without an authority."""
        return self.listeners[0].access


def _allow_connections() -> None:
    """Raise the limit on open files to the system's maximum; most shells start with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
