"""Decides who may read an agent's metrics: everybody on its machine, and viewers and operators elsewhere over TLS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from wattfleet.errors import InvalidInputError
from wattfleet_identity.certificate_check import CertificateCheck
from wattfleet_identity.certificates import may_serve
from wattfleet_identity.channels import is_loopback
from wattfleet_identity.endpoint import require_identity
from wattfleet_identity.http_access import HttpAccess, ServerTls
from wattfleet_identity.identity_folder import read_identity
from wattfleet_io.addresses import split_address


def is_exposed(address: str, identity_folder: Path, is_insecure: bool) -> bool:
    """Return whether other machines can reach an address without TLS.

    Args:
        address: host:port to serve metrics on.
        identity_folder: the folder of the agent's identity, which may be empty.
        is_insecure: whether `--insecure` was given.

    Raises:
        InvalidInputError: they could although that is not allowed, the identity is damaged, or its certificate is of a
            kind that clients do not accept from a server.
    """
    if is_loopback(split_address(address)[0]):
        return False
    identity = read_identity(identity_folder)
    if identity is None:
        if is_insecure:
            return True
        raise InvalidInputError(
            f"--metrics-address {address}: other machines can reach it, and {identity_folder} has no certificate to"
            " protect it: enrol this device with `wattfleet agent join`, use a loopback address such as"
            " 127.0.0.1:9466, or pass --insecure for plaintext"
        )
    if not may_serve(identity.certificate_pem):
        raise InvalidInputError(
            f"--metrics-address {address}: the certificate in {identity_folder} was issued by an earlier coordinator"
            " for clients only: enrol again with `wattfleet agent join`, or start the agent on a loopback address until"
            " the certificate is renewed"
        )
    return False


def access_of(
    address: str, identity_folder: Path, is_insecure: bool, is_revoked: Callable[[str], bool]
) -> HttpAccess | None:
    """Return who may read from other machines over TLS; None if TLS is not used. A renewed certificate is used at once.

    Args:
        address: host:port to serve metrics on.
        identity_folder: the folder of the agent's identity, which may be empty.
        is_insecure: whether `--insecure` was given.
        is_revoked: returns whether the certificate with a serial number was revoked.

    Raises:
        InvalidInputError: as for `is_exposed`.
    """
    if is_exposed(address, identity_folder, is_insecure) or is_loopback(split_address(address)[0]):
        return None

    def tls() -> ServerTls:
        identity = require_identity(identity_folder)
        return ServerTls(identity.key_pem, identity.certificate_pem, identity.trusted_pem)

    return HttpAccess(tls, CertificateCheck(require_identity(identity_folder).peer.fleet, is_revoked))
