"""Certificates for simulated agents, and for the Flower app that plans their rounds."""

from __future__ import annotations

import ssl
from datetime import timedelta
from pathlib import Path

from benchmarks.fleet import requests
from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.state.identity_records import CertificateRecord
from coordinator.store.store import Store
from wattfleet.common.clock import utc_now
from wattfleet.common.identity.authority import CertificateAuthority
from wattfleet.common.identity.certificates import Certificate, new_key, request_certificate
from wattfleet.common.identity.peers import Peer, Role

_LIFETIME = timedelta(days=30)


class FleetIdentities:
    """An authority, and the certificates that it has issued to a fleet.

    All agents share one key, since creating keys would be the work of boards. Each has its own certificate and id.

    Attributes:
        folder: the authority's folder, which a server needs.
        flower: folder with the identity of a Flower app.
    """

    def __init__(self, count: int, folder: Path, host: str) -> None:
        """Issue a certificate to each agent.

        Args:
            count: number of agents.
            folder: folder for the new authority.
            host: host name of the server.
        """
        self.folder = folder
        now = utc_now()
        authority = AuthorityFolder.create(folder, [host], now)
        self.flower = authority.own_identity(Role.FLOWER, "app", "", _LIFETIME, now)
        trusted = authority.trusted_pem.decode()
        self._records: list[CertificateRecord] = []
        self._contexts: list[ssl.SSLContext] = []
        key_pem = new_key()
        request_pem = request_certificate(key_pem)
        pair = folder / "agent.pem"
        for number in range(count):
            peer = Peer(
                authority.issuer.fleet,
                Role.DEVICE,
                requests.device_id(number),
                requests.BOARD,
                requests.installation(number),
            )
            certificate_pem = authority.issuer.issue(request_pem, peer, _LIFETIME, now)
            self._records.append(_record(certificate_pem, peer, authority.issuer))
            pair.write_bytes(certificate_pem + key_pem)
            self._contexts.append(_context(pair, trusted))
        pair.unlink()

    def store(self, file: Path) -> None:
        """Write the certificates to a coordinator's store, as if the agents had enrolled."""
        store = Store(file)
        try:
            store.save(*self._records)
        finally:
            store.close()

    def context(self, number: int) -> ssl.SSLContext:
        """Return an agent's TLS context. It does not resume TLS sessions, like real agents."""
        return self._contexts[number]


def _record(certificate_pem: bytes, peer: Peer, issuer: CertificateAuthority) -> CertificateRecord:
    certificate = Certificate.from_pem(certificate_pem)
    return CertificateRecord(certificate.serial, peer, issuer.fingerprint.hex(), utc_now(), certificate.not_after)


def _context(pair: Path, trusted: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(cadata=trusted)
    context.load_cert_chain(pair)
    return context
