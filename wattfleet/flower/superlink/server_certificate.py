"""The SuperLink's TLS certificate: issued by the fleet's authority, and renewed while the SuperLink runs."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc

from wattfleet.common.atomic_files import read_regular_file, replace_file
from wattfleet.common.clock import utc_now
from wattfleet.common.console import plain_text
from wattfleet.common.coordinator_channel import UNREACHABLE, CoordinatorUnreachableError
from wattfleet.common.identity.certificates import Certificate, matches, new_key, request_certificate
from wattfleet.common.identity.channels import Endpoint, unreachable
from wattfleet.common.identity.identity_folder import (
    CERTIFICATE,
    SECRET_MODE,
    TRUSTED,
    make_private_folder,
    require_secret,
)
from wattfleet.common.identity.renewal import TIMEOUT_S, note_time, stored_at
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import superlink_pb2, superlink_pb2_grpc

# --- TLS files --------------------------------------------------------------------------------------------------------
# Notices when the TLS files of a running server are replaced, and loads them without a restart.


class WatchedFiles:
    """TLS files that are replaced from outside, for example by a tool that renews certificates."""

    def __init__(self, *paths: Path) -> None:
        """Watch files, with their current content as the one in use.

        Raises:
            OSError: one of them cannot be read.
        """
        self._paths = paths
        self._used = _states(paths)

    def replaced(self) -> list[tuple[int, int, int]] | None:
        """Return the state of the files if it differs from the one in use; else None.

        Raises:
            OSError: one of them cannot be read.
        """
        found = _states(self._paths)
        return None if found == self._used else found

    def use(self, state: list[tuple[int, int, int]]) -> None:
        """Record which state of the files is in use."""
        self._used = state


def load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    """Make the next connections use a certificate and its key. If these do not match, the earlier ones stay in use.

    Raises:
        OSError: they cannot be read, or do not belong together.
    """
    # A context cannot serve any more after it failed to load a pair. So the pair is tried with another context first.
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    context.load_cert_chain(certificate, key)


def _states(paths: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Return the inode, modification time (ns) and size (bytes) of each file; links are followed."""
    return [(found.st_ino, found.st_mtime_ns, found.st_size) for found in map(os.stat, paths)]


# --- Server certificate -----------------------------------------------------------------------------------------------

FOLDER = "superlink"
"""The subfolder of the identity's folder."""

KEY = "server.key"


class SuperLinkRefusedError(WattfleetError):
    """The coordinator refuses a request of the SuperLink; the text gives the reason."""

    caller_must_correct = True


class ServerCertificate:
    """The SuperLink's TLS certificate, its key and the authorities to trust, as files.

    Attributes:
        folder: the folder with the files.
    """

    def __init__(self, endpoint: Endpoint, hosts: Sequence[str] = (), now: Callable[[], datetime] = utc_now) -> None:
        """Use the files in a subfolder of an identity's folder.

        Args:
            endpoint: the coordinator, and the folder with the identity.
            hosts: addresses that the SuperLink listens on, in addition to those that the coordinator knows.
            now: returns the current time.
        """
        assert endpoint.folder is not None, "a certificate needs an identity"
        self.folder = endpoint.folder / FOLDER
        self._endpoint = endpoint
        self._hosts = hosts
        self._now = now
        self._authority = b""

    @property
    def key_file(self) -> Path:
        """The private key."""
        return self.folder / KEY

    @property
    def certificate_file(self) -> Path:
        """The certificate."""
        return self.folder / CERTIFICATE

    @property
    def trusted_file(self) -> Path:
        """The authorities to trust."""
        return self.folder / TRUSTED

    def prepare(self) -> str:
        """Get a certificate for the start, or use the stored one while the coordinator is away.

        Returns:
            Why the stored certificate is used; empty if there is a new one.

        Raises:
            InvalidInputError: the files cannot be read or written, or there is no certificate that is still valid.
            SuperLinkRefusedError: the coordinator refuses.
        """
        try:
            self.renew()
        except CoordinatorUnreachableError as error:
            certificate = self._stored()
            if certificate is None or certificate.not_after <= self._now():
                raise InvalidInputError(
                    f"the SuperLink has no valid TLS certificate, and cannot get one now: {error}. Start it when the"
                    " coordinator answers"
                ) from None
            return str(error)
        return ""

    def is_due(self, authority: bytes) -> bool:
        """Whether the certificate has to be renewed.

        Args:
            authority: the coordinator's current description of the issuing and the trusted authorities.

        Raises:
            InvalidInputError: the files cannot be read.
        """
        certificate = self._stored()
        if certificate is None or authority != self._authority:
            return True
        return self._now() >= min(certificate.renew_at(stored_at(self.folder)), certificate.not_after)

    def renew(self) -> None:
        """Get a new certificate for the same key.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            SuperLinkRefusedError: the coordinator refuses.
            InvalidInputError: the files cannot be read or written.
        """
        key_pem = self._key()
        request = superlink_pb2.IssueServerCertificateRequest(
            request_pem=request_certificate(key_pem), hosts=self._hosts
        )
        with superlink_service(self._endpoint) as stub:
            answer = stub.IssueServerCertificate(request, timeout=TIMEOUT_S)
        if not matches(key_pem, answer.certificate_pem):
            raise SuperLinkRefusedError("the coordinator sent a certificate for another key: check its version")
        try:
            replace_file(self.trusted_file, answer.trusted_pem)
            replace_file(self.certificate_file, answer.certificate_pem)
            note_time(self.folder, self._now())
        except OSError as error:
            raise InvalidInputError(f"cannot write to {self.folder}: {error.strerror}") from None
        self._authority = answer.authority

    def _stored(self) -> Certificate | None:
        try:
            return Certificate.from_pem(read_regular_file(self.certificate_file))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInputError(f"cannot read {self.certificate_file}: {error.strerror}") from None

    def _key(self) -> bytes:
        try:
            if self.key_file.exists():
                require_secret(self.key_file)
                return read_regular_file(self.key_file)
            make_private_folder(self.folder)
            key_pem = new_key()
            replace_file(self.key_file, key_pem, mode=SECRET_MODE)
        except OSError as error:
            raise InvalidInputError(f"cannot use the folder {self.folder}: {error.strerror}") from None
        return key_pem


@contextmanager
def superlink_service(endpoint: Endpoint) -> Iterator[Any]:
    """Yield a stub of the coordinator's service for SuperLinks.

    Raises:
        CoordinatorUnreachableError: the coordinator does not answer.
        SuperLinkRefusedError: it refuses.
    """
    try:
        with endpoint.channel() as channel:
            yield superlink_pb2_grpc.SuperLinkServiceStub(channel)
    except grpc.RpcError as error:
        status: Any = error
        if status.code() in UNREACHABLE:
            raise unreachable(endpoint) from None
        if status.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise SuperLinkRefusedError(
                f"the coordinator at {endpoint.address} does not serve SuperLinks: make its authority with"
                " `wattfleet coordinator init`"
            ) from None
        raise SuperLinkRefusedError(plain_text(status.details() or status.code().name)) from None
