"""Who may read over HTTP, by certificates; and a browser's certificate."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12

from wattfleet.common.identity.certificates import Certificate, CertificateCheck, read_key
from wattfleet.common.identity.identity_folder import Identity
from wattfleet.common.identity.peers import Role
from wattfleet.core.errors import InvalidInputError, WattfleetError

_log = logging.getLogger(__name__)


# --- HTTP access ------------------------------------------------------------------------------------------------------
# TLS and access control for addresses that serve HTTP to viewers and operators.


VIEWING = frozenset({Role.OPERATOR, Role.VIEWER})
"""The roles that may read everything."""


class AccessDeniedError(WattfleetError):
    """The caller's role may not do this: use a certificate of another role, or enrol."""


class ServerTls(NamedTuple):
    """A server's key and certificate, and the authorities of its callers' certificates; each part is PEM.

    Attributes:
        key_pem: its private key.
        certificate_pem: its certificate.
        trusted_pem: the certificates of the authorities that callers' certificates must come from.
    """

    key_pem: bytes
    certificate_pem: bytes
    trusted_pem: bytes


class HttpAccess:
    """Lets viewers and operators read over HTTPS with their certificates, which Prometheus can send."""

    def __init__(self, tls: Callable[[], ServerTls], certificates: CertificateCheck) -> None:
        """Serve with a certificate that may be replaced at any time.

        Args:
            tls: returns the server's current certificate. If it raises a `WattfleetError`, the previous one stays in
                use.
            certificates: checks whether a caller's certificate is valid.

        Raises:
            WattfleetError: there is no certificate.
        """
        self._tls = tls
        self._certificates = certificates
        self._used = tls()
        self._context = server_context(self._used)

    def context(self) -> ssl.SSLContext:
        """The TLS settings of the next connection."""
        try:
            tls = self._tls()
        except WattfleetError as error:
            _log.debug("the previous certificate stays in use: %s", error)
            return self._context
        if tls != self._used:
            self._context, self._used = server_context(tls), tls
        return self._context

    def require_viewer(self, connection: ssl.SSLSocket | ssl.SSLObject) -> Role:
        """Check after the handshake that a caller may read, and return the caller's role.

        Raises:
            AccessDeniedError: its role may not read.
            InvalidCertificateError: its certificate has expired, was revoked, or belongs to another fleet.
            UnknownPeerError: its certificate does not name a peer.
        """
        der = connection.getpeercert(binary_form=True)
        assert der is not None, "the handshake requires a certificate"
        certificate = Certificate.from_pem(ssl.DER_cert_to_PEM_cert(der).encode())
        self._certificates.require_valid(certificate)
        if certificate.peer.role not in VIEWING:
            raise AccessDeniedError(f"{certificate.peer} may not read this: use a certificate of the role viewer")
        return certificate.peer.role


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """Create a TLS context with the server's certificate, for clients with a certificate from a trusted authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    # Python's TLS reads certificates only from files, and the files on disk may be replaced meanwhile.
    with open(os.memfd_create("server certificate"), "w+b") as memory:
        memory.write(tls.key_pem + tls.certificate_pem)
        memory.flush()
        context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}")
    context.load_verify_locations(cadata=tls.trusted_pem.decode())
    return context


# --- Browser bundle ---------------------------------------------------------------------------------------------------
# Converts an identity to a file for browsers: PKCS #12 with the key, the certificate and its authorities.


def browser_bundle(identity: Identity, password: str) -> bytes:
    """Convert an identity to one file.

    Args:
        identity: the identity of a viewer or an operator.
        password: encrypts the key; a browser prompts for it at the import.

    Returns:
        The file's content, in DER.

    Raises:
        InvalidInputError: the identity's role may not read the coordinator's page.
    """
    peer = identity.peer
    if peer.role not in VIEWING:
        raise InvalidInputError(
            f"the page is only for viewers and operators, but this is the identity of {peer}: name another folder with"
            " --identity, or enrol with an invite from `wattfleet coordinator invite --role viewer`"
        )
    return pkcs12.serialize_key_and_certificates(
        f"Wattfleet {peer}".encode(),
        read_key(identity.key_pem),
        x509.load_pem_x509_certificate(identity.certificate_pem),
        x509.load_pem_x509_certificates(identity.trusted_pem),
        BestAvailableEncryption(password.encode()),
    )
