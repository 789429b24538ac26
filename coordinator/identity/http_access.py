"""TLS for the coordinator's HTTP addresses: the server's certificate, and the viewers and operators who may read."""

from __future__ import annotations

import os
import ssl

from coordinator.errors import AccessDeniedError
from coordinator.identity.access import VIEWING, Access
from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.identity.server_credentials import ServerCredentials
from wattfleet_identity.certificates import Certificate
from wattfleet_identity.peers import Role


class HttpAccess:
    """Lets viewers and operators read over HTTPS with their certificates, which Prometheus can send."""

    def __init__(self, credentials: ServerCredentials, access: Access) -> None:
        """Use the certificates of the gRPC addresses.

        Args:
            credentials: the server's certificate, whichever is in use.
            access: says whether a caller's certificate is valid.
        """
        self._credentials = credentials
        self._access = access
        self._context = server_context(credentials.folder)
        self._folder = credentials.folder

    def context(self) -> ssl.SSLContext:
        """The TLS settings of the next connection."""
        if self._credentials.folder is not self._folder:
            self._folder = self._credentials.folder
            self._context = server_context(self._folder)
        return self._context

    def require_viewer(self, connection: ssl.SSLSocket | ssl.SSLObject) -> Role:
        """Make sure that a caller may read, once the handshake is over; returns the caller's role.

        Raises:
            AccessDeniedError: its role may not read.
            InvalidCertificateError: its certificate has expired or was revoked.
            UnknownPeerError: its certificate names no peer.
        """
        der = connection.getpeercert(binary_form=True)
        assert der is not None, "the handshake requires a certificate"
        certificate = Certificate.from_pem(ssl.DER_cert_to_PEM_cert(der).encode())
        self._access.require_valid(certificate)
        if certificate.peer.role not in VIEWING:
            raise AccessDeniedError(f"{certificate.peer} may not read this: use a certificate of the role viewer")
        return certificate.peer.role


def server_context(folder: AuthorityFolder) -> ssl.SSLContext:
    """TLS with the server's certificate, for clients with a certificate of a trusted authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    # The files may be replaced meanwhile, and Python's TLS takes certificates from files only.
    with open(os.memfd_create("server certificate"), "w+b") as memory:
        memory.write(folder.server_key_pem + folder.server_pem)
        memory.flush()
        context.load_cert_chain(f"/proc/self/fd/{memory.fileno()}")
    context.load_verify_locations(cadata=folder.trusted_pem.decode())
    return context
