"""The connection of an enrolled device's SuperNode to the SuperLink, with clear errors and patient retries."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import httpx
from flwr.common import log
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient

from wattfleet_io.clock import Clock, SystemClock, utc_now

ACCEPTED_WITHIN_S = 90.0
"""Seconds for which a SuperNode repeats its request before it gives up. A SuperLink learns of a new device within
seconds, and accepts a SuperNode that was killed again after 55 s."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
# OpenSSL's numbers of X.509 verification results.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)
_REVOKED = (
    "the SuperLink does not accept this device: it was revoked or forgotten, or has enrolled again meanwhile, or this"
    " SuperLink is not of its fleet. `wattfleet coordinator certificates` shows it; enrol it again with"
    " `wattfleet agent join`"
)


class EnrolledClient(FleetHttpClient):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Flower's client of the SuperLink, for an enrolled device."""

    _client: httpx.Client  # set by Flower's class

    def __init__(
        self,
        address: str,
        trusted: Path,
        interceptors: Sequence[Any] = (),
        clock: Clock | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Connect at the first request.

        Args:
            address: the SuperLink's host:port.
            trusted: the file with the authorities to trust, which is read for each request.
            interceptors: Flower's interceptors of requests.
            clock: measures and waits; None for the system's clock.
            now: returns this machine's time.
        """
        self._address = address
        self._trusted = trusted
        self._clock = clock or SystemClock()
        self._now = now
        self._trusted_pem = b""
        self._problem = ""
        self._lock = threading.Lock()  # heartbeats are sent by another thread
        self._requests = 0
        self._retired: list[httpx.Client] = []
        super().__init__(f"https://{address}", interceptors=interceptors, verify=_trusting(b""))
        self._trust()

    def ActivateNode(self, request: ActivateNodeRequest) -> ActivateNodeResponse:  # noqa: N802 - named by Flower
        """Activate the SuperNode, as soon as the SuperLink accepts its key.

        Raises:
            httpx.HTTPStatusError: the SuperLink refuses; for an unknown key, only after 90 s of refusals.
        """
        give_up_s, pause_s = self._clock.now_s() + ACCEPTED_WITHIN_S, _FIRST_PAUSE_S
        while True:
            try:
                activated: ActivateNodeResponse = super().ActivateNode(request)
                return activated
            except httpx.HTTPStatusError as error:
                if not _is_unknown(error):
                    raise
                if self._clock.now_s() + pause_s > give_up_s:
                    log(ERROR, "wattfleet-supernode: %s", _REVOKED)
                    raise
            self._note(INFO, "the SuperLink does not know this device's key yet; trying again")
            self._clock.sleep_s(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._close_retired()
        super().close()

    def _send(self, context: ProtobufRequestContext, *, stream: bool = False) -> httpx.Response:
        self._trust()
        with self._lock:
            self._requests += 1
        try:
            return self._answered(context, stream)
        finally:
            with self._lock:
                self._requests -= 1
                if not self._requests:
                    self._close_retired()

    def _answered(self, context: ProtobufRequestContext, stream: bool) -> httpx.Response:
        try:
            response: httpx.Response = super()._send(context, stream=stream)
        except httpx.ConnectError as error:
            if (reason := self._why(error)) is None:
                raise
            self._note(WARNING, reason)
            # Flower gives up if the text mentions TLS, and tries again otherwise.
            raise httpx.ConnectError("the SuperLink was not accepted", request=context.request) from None
        if response.status_code == httpx.codes.UNAUTHORIZED:
            self._note(ERROR, _REVOKED)
        elif response.is_success:
            self._problem = ""
        return response

    def _trust(self) -> None:
        """Trust exactly the authorities in the file, also for connections that are open."""
        with self._lock:
            try:
                trusted_pem = self._trusted.read_bytes()
                if trusted_pem == self._trusted_pem:
                    return
                context = _trusting(trusted_pem)
            except (OSError, ValueError, ssl.SSLError) as error:
                self._note(WARNING, f"the authorities in {self._trusted} cannot be read: {error}")
                return
            # A context cannot forget an authority, and an open connection is not verified again.
            self._retired.append(self._client)
            self._client = httpx.Client(verify=context, timeout=self._client.timeout, follow_redirects=True)
            self._trusted_pem = trusted_pem

    def _close_retired(self) -> None:
        for client in self._retired:
            client.close()
        self._retired.clear()

    def _why(self, error: httpx.ConnectError) -> str | None:
        """Return why the SuperLink's certificate is rejected; None if TLS is not the cause of the error."""
        found: BaseException | None = error
        while found is not None and not isinstance(found, ssl.SSLError):
            found = found.__cause__ or found.__context__
        if found is None:
            return None
        whose = f"the certificate of the SuperLink at {self._address}"
        if not isinstance(found, ssl.SSLCertVerificationError):
            return (
                f"the SuperLink at {self._address} does not speak TLS ({found.reason or found}): start it as"
                " `wattfleet-superlink` with an identity"
            )
        if found.verify_code in (_EXPIRED, _NOT_YET_VALID):
            state = "has expired" if found.verify_code == _EXPIRED else "is not valid yet"
            return (
                f"{whose} {state} at {self._now():%Y-%m-%d %H:%M} UTC, the time of this machine: set its clock if that"
                " is wrong, or else see why `wattfleet-superlink` cannot renew it"
            )
        if found.verify_code in _UNKNOWN_ISSUER:
            return (
                f"{whose} was not issued by the authority of this device's fleet: check the address. If the fleet has"
                " another"
                " authority now, enrol the device again with `wattfleet agent join`"
            )
        if found.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
            return (
                f"{whose} was issued for other names: connect to one of them, or restart the coordinator with"
                " --superlink-host for this one"
            )
        return f"{whose} cannot be verified: {found.verify_message}"

    def _note(self, level: int, problem: str) -> None:
        """Log a problem once, until a request succeeds."""
        if problem != self._problem:
            log(level, "wattfleet-supernode: %s", problem)
        self._problem = problem


def _trusting(authorities_pem: bytes) -> ssl.SSLContext:
    """Return a TLS context that trusts the given authorities only; nobody if there are none.

    Raises:
        ValueError: the text is not a certificate.
        ssl.SSLError: the same.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authorities_pem:
        context.load_verify_locations(cadata=authorities_pem.decode())
    return context


def _is_unknown(error: httpx.HTTPStatusError) -> bool:
    found = FlowerError.from_json(error.response.text)
    return found is not None and found.code == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
