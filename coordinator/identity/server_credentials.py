"""The server's TLS credentials, whose certificate changes without a restart.

gRPC requests the configuration at every handshake. A process with such credentials must not fork, because gRPC's
threads hold locks that the child would wait for. Children are started with `exec` (`wattfleet_io/child_process.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import grpc

from coordinator.identity.authority_folder import SERVER_LIFETIME, AuthorityFolder
from wattfleet_io.clock import utc_now

_log = logging.getLogger(__name__)

_CHECK_S = 3600.0


class ServerCredentials:
    """The credentials of all addresses with TLS, and the folder from which they are read."""

    def __init__(self, folder: AuthorityFolder, now: Callable[[], datetime] = utc_now) -> None:
        """Use a folder's certificate.

        Args:
            folder: the authority and the server's certificate.
            now: returns the time.
        """
        self.folder = folder
        self._now = now

    def requiring_certificates(self) -> grpc.ServerCredentials:
        """Credentials of an address whose clients must have a certificate."""
        return self._credentials(require=True)

    def of_enrolment(self) -> grpc.ServerCredentials:
        """Credentials of an address whose clients have no certificate yet."""
        return self._credentials(require=False)

    def replace(self, folder: AuthorityFolder) -> None:
        """Use another certificate or other authorities, beginning with the next handshake."""
        self.folder = folder

    def read_again(self) -> None:
        """Read the folder again, and use its current contents.

        Raises:
            InvalidInputError: the folder is damaged.
        """
        self.replace(AuthorityFolder.open(self.folder.folder))

    def renew_if_due(self) -> bool:
        """Issue the next certificate after two thirds of the current one's validity; return whether one was issued.

        Raises:
            OSError: the folder cannot be written; the current certificate stays in use.
        """
        server = self.folder.server
        if self._now() < server.renew_at(server.not_after - SERVER_LIFETIME):
            return False
        self.folder = self.folder.with_new_server(self._now())
        return True

    async def keep_renewed(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Renew the certificate when it is due, until cancelled."""
        while True:
            try:
                if self.renew_if_due():
                    _log.info("the coordinator's certificate was renewed")
            except OSError as error:
                _log.warning(
                    "the coordinator's certificate cannot be renewed: %s. It expires on %s; repair the folder %s",
                    error.strerror,
                    f"{self.folder.server.not_after:%Y-%m-%d}",
                    self.folder.folder,
                )
            await sleep(_CHECK_S)

    def _credentials(self, require: bool) -> grpc.ServerCredentials:
        used = self.folder

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """The configuration for a handshake; None if that of the previous handshake is still right."""
            nonlocal used
            if self.folder is used:
                return None
            used = self.folder
            return _configuration(used, require)

        fetch: Any = changed  # the stubs omit that it may return None
        return grpc.dynamic_ssl_server_credentials(_configuration(used, require), fetch, require)


def _configuration(folder: AuthorityFolder, require: bool) -> grpc.ServerCertificateConfiguration:
    pair = [(folder.server_key_pem, folder.server_pem)]
    return grpc.ssl_server_certificate_configuration(pair, folder.trusted_pem if require else None)
