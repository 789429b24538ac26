"""Checks that the agent that begins a session is the device of its certificate."""

from __future__ import annotations

from collections.abc import Callable

from coordinator.errors import ForeignDeviceError
from wattfleet_identity.certificates import Certificate
from wattfleet_proto.v1 import session_pb2


def require_own(
    hello: session_pb2.Hello, certificate: Certificate | None, has_certificate: Callable[[str], bool]
) -> None:
    """Check that a device is the one that its certificate names.

    Args:
        hello: the session's first message.
        certificate: the certificate of the connection; None on plaintext.
        has_certificate: returns whether the device with an id has a valid certificate.

    Raises:
        ForeignDeviceError: the certificate belongs to another device, or the device has one and does not use it.
    """
    if certificate is None:
        if has_certificate(hello.device_id):
            raise ForeignDeviceError(
                f"{hello.device_id} has a certificate: its agent must use it, at the coordinator's address with TLS"
            )
        return
    peer = certificate.peer
    for what, claimed, certified in (
        ("device", hello.device_id, peer.name),
        ("board", hello.board, peer.board),
        ("installation", hello.installation, peer.installation),
    ):
        if certified and claimed != certified:
            raise ForeignDeviceError(
                f"{hello.device_id}: the certificate is for the {what} {certified!r}, not {claimed!r}: enrol this"
                " device with `wattfleet agent join`"
            )
