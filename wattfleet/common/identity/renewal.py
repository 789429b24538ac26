"""Renewal of a certificate with the same key, after two thirds of its lifetime."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc

from wattfleet.common.clock import utc_now
from wattfleet.common.console import plain_text
from wattfleet.common.coordinator_channel import UNREACHABLE, CoordinatorUnreachableError
from wattfleet.common.identity.certificates import Certificate, request_certificate
from wattfleet.common.identity.channels import Endpoint, require_identity, unreachable
from wattfleet.common.identity.identity_folder import CERTIFICATE, Identity, IdentityReplacedError, write_renewed
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import enrolment_pb2, enrolment_pb2_grpc

TIMEOUT_S = 60.0
"""Renewal takes four round trips with the connection: 40 s over a link with a latency of 5 s in each direction."""

_JITTER = 0.1
_FIRST_RETRY_S, _LONGEST_RETRY_S = 60.0, 3600.0


class RenewalError(WattfleetError):
    """A certificate could not be renewed; the old one stays."""


def stored_at(folder: Path) -> datetime:
    """When the certificate in a folder was stored.

    Raises:
        InvalidInputError: the folder has no certificate.
    """
    try:
        return datetime.fromtimestamp((folder / CERTIFICATE).stat().st_mtime, timezone.utc)
    except OSError as error:
        raise InvalidInputError(f"{folder / CERTIFICATE}: {error.strerror}") from None


def note_time(folder: Path, at: datetime) -> None:
    """Correct the recorded time at which the certificate was stored, for a machine whose clock is wrong.

    Raises:
        OSError: the time cannot be recorded.
    """
    os.utime(folder / CERTIFICATE, (at.timestamp(), at.timestamp()))


def due_at(folder: Path) -> datetime:
    """When the certificate in a folder has to be renewed: after two thirds of its lifetime since it was stored.

    Raises:
        InvalidInputError: there is no certificate, or it is damaged.
    """
    certificate, stored = require_identity(folder).certificate, stored_at(folder)
    if stored >= certificate.not_after:  # stored when the clock was ahead
        return certificate.not_before
    return min(certificate.renew_at(stored), certificate.not_after)


class RenewalSchedule:
    """Decides when to renew the certificate in a folder: once it is due, and after failures in growing intervals.

    A fleet that was enrolled together spreads its renewals over a tenth of the remaining time.
    """

    def __init__(self, folder: Path, now: Callable[[], datetime], now_s: Callable[[], float]) -> None:
        """Start with a certificate of unknown age.

        Args:
            folder: the folder of the identity.
            now: returns the time.
            now_s: a monotonic clock, in seconds.
        """
        self._folder = folder
        self._now = now
        self._now_s = now_s
        self._retry_at_s = -math.inf
        self._retry_s = _FIRST_RETRY_S
        self._lateness = random.uniform(0, _JITTER)

    def wait_s(self) -> float:
        """Seconds until the certificate should be renewed; 0 or less if it should be renewed now.

        Raises:
            InvalidInputError: there is no certificate, or it is damaged.
        """
        due, end = due_at(self._folder), require_identity(self._folder).certificate.not_after
        due_s = (due - self._now() + self._lateness * (end - due)).total_seconds()
        return max(due_s, self._retry_at_s - self._now_s())

    def renewed(self) -> None:
        """Record that there is a new certificate."""
        self._retry_at_s, self._retry_s = -math.inf, _FIRST_RETRY_S
        self._lateness = random.uniform(0, _JITTER)

    def failed(self) -> None:
        """Record that an attempt failed."""
        self._retry_at_s = self._now_s() + random.uniform(0.5, 1.0) * self._retry_s
        self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s)


def renew(endpoint: Endpoint) -> None:
    """Renew the certificate of a synchronous client, and store it.

    Raises:
        InvalidInputError: there is no identity, or it is damaged.
        CoordinatorUnreachableError: no coordinator answers, or it and the client do not accept each other.
        RenewalError: the coordinator refuses, or the certificate cannot be used or stored.
    """
    assert endpoint.folder is not None, "without an identity there is nothing to renew"
    identity = require_identity(endpoint.folder)
    with endpoint.channel() as channel:
        stub: Any = enrolment_pb2_grpc.EnrolmentServiceStub(channel)
        try:
            answer = stub.Renew(renewal_request(identity), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            status: Any = error
            if status.code() in UNREACHABLE:
                raise unreachable(endpoint) from None
            raise refusal(error) from None
    store_renewed(endpoint.folder, identity, answer)


def renew_if_due(endpoint: Endpoint, now: Callable[[], datetime] = utc_now) -> str | None:
    """Renew the certificate of a synchronous client once two thirds of its lifetime have passed.

    Returns:
        A message if this failed; None otherwise, or while no coordinator answers.

    Raises:
        InvalidInputError: the identity is damaged.
    """
    if endpoint.folder is None or endpoint.identity() is None or now() < due_at(endpoint.folder):
        return None
    try:
        renew(endpoint)
    except CoordinatorUnreachableError:  # the next request reports this
        return None
    except RenewalError as error:
        certificate = require_identity(endpoint.folder).certificate
        return f"the certificate {expiry_text(certificate, now())}, and could not be renewed: {error}"
    return None


def renewal_request(identity: Identity) -> enrolment_pb2.RenewRequest:
    """Create the request for a new certificate."""
    return enrolment_pb2.RenewRequest(request_pem=request_certificate(identity.key_pem))


def refusal(error: Any) -> RenewalError:
    """Convert a gRPC error to an error of the renewal."""
    return RenewalError(plain_text(error.details() or error.code().name))


def store_renewed(folder: Path, identity: Identity, answer: enrolment_pb2.RenewResponse) -> None:
    """Check and store a renewed certificate.

    Args:
        folder: the folder of the identity.
        identity: the identity that is renewed.
        answer: the coordinator's answer.

    Raises:
        RenewalError: the answer is not a certificate for the same key and owner, it cannot be stored, or the folder now
            has another identity.
    """
    try:
        renewed = replace(
            identity,
            certificate_pem=answer.certificate_pem,
            trusted_pem=answer.trusted_pem,
            superlink=answer.superlink or identity.superlink,
        )
    except InvalidInputError as error:
        raise RenewalError(f"the coordinator did not send a usable certificate: {error}") from None
    if renewed.certificate.uri != identity.certificate.uri:
        raise RenewalError(f"the coordinator sent a certificate of another owner, {renewed.certificate.uri!r}")
    try:
        write_renewed(folder, renewed)
    except IdentityReplacedError as error:
        raise RenewalError(str(error)) from None
    except OSError as error:
        raise RenewalError(f"the renewed certificate cannot be stored in {folder}: {error.strerror}") from None


def expiry_text(certificate: Certificate, now: datetime) -> str:
    """Describe when a certificate expires, such as "expires on 2027-02-22, in 90 days"."""
    days = certificate.remaining(now).total_seconds() / 86400
    if days < 0:
        return f"expired on {certificate.not_after:%Y-%m-%d}"
    return f"expires on {certificate.not_after:%Y-%m-%d}, in {days:.0f} day{'' if round(days) == 1 else 's'}"
