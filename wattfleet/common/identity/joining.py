"""Enrolment of a machine: from the line of an invite to an identity in a folder.

The machine checks the authority by its hash before it sends the token.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import click
import grpc

from wattfleet.common.addresses import split_address
from wattfleet.common.atomic_files import require_own_folder
from wattfleet.common.clock import utc_now
from wattfleet.common.console import plain_text, print_line
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.authority import SERVER_NAME
from wattfleet.common.identity.certificates import fingerprint, new_key, read_certificate, request_certificate
from wattfleet.common.identity.channels import open_enrolment_channel
from wattfleet.common.identity.identity_folder import Identity, make_private_folder, write_identity
from wattfleet.common.identity.invites import Invite
from wattfleet.common.identity.renewal import expiry_text, note_time
from wattfleet.common.identity.supernode_folder import SuperNodeKey, write_supernode
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import enrolment_pb2, enrolment_pb2_grpc

# --- Joining ----------------------------------------------------------------------------------------------------------

_PLAUSIBLE_LAG = timedelta(days=1)


def plausible_time(invite: Invite, now: datetime) -> datetime:
    """The later of this machine's time and the invite's, because a board without a battery may start years in the past.

    Warns if the clock is more than a day behind the invite.

    Raises:
        InvalidInputError: the clock is so wrong that no certificate is valid yet; the invite was not used.
    """
    from wattfleet.common.identity.authority import VALID_FROM  # slow to import for a command's options

    text = (
        f"this machine's clock shows {now:%Y-%m-%d %H:%M} UTC, but the invite is of {invite.issued_at:%Y-%m-%d %H:%M}"
    )
    remedy = (
        f"set it with `sudo date -u -s '{invite.issued_at:%Y-%m-%d %H:%M}'`, and let it follow a time server, such as"
        " with `sudo timedatectl set-ntp true`"
    )
    if now < VALID_FROM:
        raise InvalidInputError(f"{text}, and no certificate is valid at that time: {remedy}. The invite was not used")
    if now < invite.issued_at - _PLAUSIBLE_LAG:
        click.echo(f"warning: {text}: {remedy}", err=True)
    return max(now, invite.issued_at)


_TIMEOUT_S = 60.0
"""Enrolment takes four round trips with the connection: 40 s over a link with a latency of 5 s in each direction."""
_REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class WrongAuthorityError(WattfleetError):
    """Another server than the coordinator of the invite answers; the token was not sent."""


class EnrolmentRefusedError(InvalidInputError):
    """The coordinator refuses to enrol this machine; the message states the reason."""


@dataclass(frozen=True, slots=True)
class Applicant:
    """The machine that enrols.

    Args:
        name: a device's id; empty where the invite names the peer.
        board: a device's kind of board.
        installation: the installation of a device's agent.
    """

    name: str = ""
    board: str = ""
    installation: str = ""


def require_writable(folder: Path) -> None:
    """Create the folder of an identity before the invite is used, in case nothing can be stored there.

    Raises:
        InvalidInputError: the folder cannot be written, or belongs to another user.
    """
    try:
        require_own_folder(folder.parent)
        make_private_folder(folder)
        require_own_folder(folder)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInputError(
            f"the identity cannot be stored in {folder}: {error.strerror}. The invite was not used: run this as the"
            " user who will use the identity (root for a device's service), or name another folder with --identity"
        ) from None


def enrol(invite: Invite, describe: Callable[[], Applicant], folder: Path, supernode: Path | None = None) -> Identity:
    """Enrol as `join_and_store` does, and print who is enrolled."""
    identity = join_and_store(invite, describe, folder, supernode)
    peer, now = identity.peer, plausible_time(invite, utc_now())
    print_line(f"{peer} is enrolled in {peer.fleet}; the certificate {expiry_text(identity.certificate, now)}")
    print_line(f"identity: {folder}; coordinator: {identity.coordinator}")
    return identity


def join_and_store(
    invite: Invite, describe: Callable[[], Applicant], folder: Path, supernode: Path | None = None
) -> Identity:
    """Enrol, and store the identity in a folder.

    Args:
        invite: the invite.
        describe: describes the machine, once the folder is there.
        folder: where to store the key and the certificate; created if absent.
        supernode: the folder of a device's SuperNode, whose key is created and enrolled as well; None without one.

    Raises:
        CoordinatorUnreachableError: nothing answers at the invite's address.
        WrongAuthorityError: another coordinator answers, or somebody intercepts the connection.
        EnrolmentRefusedError: the token is unknown, used up or expired, or the name is not available to this machine.
        InvalidInputError: the identity cannot be stored, or the clock is so wrong that no certificate is valid.
    """
    now = plausible_time(invite, utc_now())
    require_writable(folder)
    key = None if supernode is None else SuperNodeKey.create()
    identity = join(invite, describe(), b"" if key is None else key.public)
    try:
        if supernode is not None and key is not None:
            write_supernode(supernode, key, identity)
        write_identity(folder, identity)
        note_time(folder, now)
    except OSError as error:
        raise InvalidInputError(
            f"the identity cannot be stored in {folder}: {error.strerror}. The invite is used up: free some space, and "
            "enrol with another one"
        ) from None
    return identity


def join(invite: Invite, applicant: Applicant, flower_public_key: bytes = b"") -> Identity:
    """Create a key, and exchange the invite's token for a certificate.

    Args:
        invite: the invite.
        applicant: the machine.
        flower_public_key: the public key of a device's SuperNode, in OpenSSH format; empty without one.

    Raises:
        CoordinatorUnreachableError: nothing answers at the invite's address.
        WrongAuthorityError: another coordinator answers, or somebody intercepts the connection.
        EnrolmentRefusedError: the token is unknown, used up or expired, or the name is not available to this machine.
    """
    leaf_pem = _server_certificate(invite.address)
    authority_pem = _authority(invite, leaf_pem)
    key_pem = new_key()
    request = enrolment_pb2.JoinRequest(
        token=invite.token,
        request_pem=request_certificate(key_pem),
        name=applicant.name,
        board=applicant.board,
        installation=applicant.installation,
        flower_public_key=flower_public_key,
    )
    with _enrolment(invite.address, authority_pem) as stub:
        answer = stub.Join(request, timeout=_TIMEOUT_S)
    return Identity(
        key_pem, answer.certificate_pem, answer.trusted_pem, answer.coordinator, answer.server_name, answer.superlink
    )


def _server_certificate(address: str) -> bytes:
    """The server's certificate, unchecked."""
    try:
        return ssl.get_server_certificate(split_address(address), timeout=_TIMEOUT_S).encode()
    except OSError as error:  # includes TLS errors
        raise CoordinatorUnreachableError(
            f"no coordinator answers for enrolment at {address} ({error.strerror or error}): check that it runs, and"
            " that this machine reaches the address"
        ) from None


def _authority(invite: Invite, leaf_pem: bytes) -> bytes:
    """The authority's certificate, after comparing its hash with that of the invite."""
    with _enrolment(invite.address, leaf_pem) as stub:
        authority_pem: bytes = stub.GetAuthority(enrolment_pb2.GetAuthorityRequest(), timeout=_TIMEOUT_S).authority_pem
    try:
        is_expected = hmac.compare_digest(fingerprint(read_certificate(authority_pem)), invite.authority)
    except InvalidInputError:
        is_expected = False
    if not is_expected:
        raise WrongAuthorityError(
            f"the server at {invite.address} is not the coordinator of this invite, and the token was not sent: ask "
            "for a new invite, and check the network in between"
        )
    return authority_pem


@contextmanager
def _enrolment(address: str, trusted_pem: bytes) -> Iterator[Any]:
    try:
        with open_enrolment_channel(address, trusted_pem, SERVER_NAME) as channel:
            yield enrolment_pb2_grpc.EnrolmentServiceStub(channel)
    except grpc.RpcError as error:
        status: Any = error
        details = plain_text(status.details() or status.code().name)
        if status.code() in _REFUSED:
            raise EnrolmentRefusedError(details) from None
        raise CoordinatorUnreachableError(f"the enrolment at {address} failed: {details}") from None
