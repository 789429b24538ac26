"""The server's TLS credentials, whose certificate changes without a restart.

gRPC asks for the configuration at every handshake. A process with such credentials must not fork: gRPC's threads hold
locks that the child would wait for. Children are started by `exec` (`wattfleet_io/child_process.py`).
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
    """The credentials of all addresses with TLS, and the folder that they come from."""

    def __init__(self, folder: AuthorityFolder, now: Callable[[], datetime] = utc_now) -> None:
        """Use a folder's certificate.

        Args:
            folder: the authority and the server's certificate.
            now: the time.
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
        """Use another certificate, or other authorities, from the next handshake on."""
        self.folder = folder

    def read_again(self) -> None:
        """Use what the folder has now.

        Raises:
            InvalidInputError: it is damaged.
        """
        self.replace(AuthorityFolder.open(self.folder.folder))

    def renew_if_due(self) -> bool:
        """Issue the next certificate if two thirds of the current one's life are over; returns whether it did.

        Raises:
            OSError: it cannot be written; the current one stays in use.
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
                    "the coordinator's certificate cannot be renewed: %s. It expires on %s; mend the folder %s",
                    error.strerror,
                    f"{self.folder.server.not_after:%Y-%m-%d}",
                    self.folder.folder,
                )
            await sleep(_CHECK_S)

    def _credentials(self, require: bool) -> grpc.ServerCredentials:
        used = self.folder

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """The configuration for a handshake; None for that of the handshake before, which spares building it."""
            nonlocal used
            if self.folder is used:
                return None
            used = self.folder
            return _configuration(used, require)

        fetch: Any = changed  # the stubs forget that it may return None
        return grpc.dynamic_ssl_server_credentials(_configuration(used, require), fetch, require)


def _configuration(folder: AuthorityFolder, require: bool) -> grpc.ServerCertificateConfiguration:
    pair = [(folder.server_key_pem, folder.server_pem)]
    return grpc.ssl_server_certificate_configuration(pair, folder.trusted_pem if require else None)
