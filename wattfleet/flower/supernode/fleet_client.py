"""The connection of a SuperNode to the SuperLink: it survives a restart of the SuperLink, and explains refusals."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import Any

import httpx
from flwr.common import log
from flwr.proto.fab_pb2 import GetFabRequest, GetFabResponse
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    RegisterNodeFleetRequest,
    RegisterNodeFleetResponse,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_client import FleetHttpClient

from wattfleet.common.clock import Clock, SystemClock, utc_now
from wattfleet.flower.enrolment_header import HEADER, NOT_ENROLLED

ACCEPTED_WITHIN_S = 90.0
"""Seconds for which a SuperNode that starts repeats its request although its key is not enrolled. A SuperLink learns of
a new device within seconds, and accepts a SuperNode that was killed again after 55 s."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
_ATTEMPTS = 3
"""How often a request is sent that the SuperLink answers with a server error, if it has to be given up."""

_LEAST_SKEW_S = 4.0
"""Flower accepts signatures that are up to 305 s old, but none that are over 5 s in the future. The time in a response
has whole seconds."""

_SERVER_ERRORS = 500
_REPEATED_BY_FLOWER = (PullMessagesRequest, SendNodeHeartbeatRequest, RegisterNodeFleetRequest, ActivateNodeRequest)
_ENDED = "UNEXPECTED_EOF_WHILE_READING"
# OpenSSL's numbers of X.509 verification results.
_NOT_YET_VALID, _EXPIRED, _OTHER_NAME, _OTHER_ADDRESS = 9, 10, 62, 64
_UNKNOWN_ISSUER = (2, 18, 19, 20, 21)
_REVOKED = (
    "the SuperLink does not accept this device: it was revoked or forgotten, or has enrolled again meanwhile, or this"
    " SuperLink is not of its fleet. `wattfleet coordinator certificates` shows it; enrol it again with"
    " `wattfleet agent join`"
)
_UNREGISTERED = (
    "this SuperNode was unregistered at the SuperLink, such as with `flwr supernode unregister`: start it again, so"
    " that it registers anew"
)
_UNKNOWN = (
    "the SuperLink does not accept this SuperNode yet; trying again. A `wattfleet-superlink` registers the enrolled"
    " devices within seconds of its start; a `flower-superlink` needs `flwr supernode register`. A SuperNode that was"
    " killed is accepted again after up to 60 s"
)


class SteadyClient(FleetHttpClient):  # type: ignore[misc]  # Flower is not typed for strict checking
    """Flower's client of the SuperLink, which activates its SuperNode again if the SuperLink has forgotten it.

    A SuperLink keeps SuperNodes in memory, so it knows none of them after a restart. Flower's SuperNode then ends. This
    client gets a new node id instead. It uses the new id in all requests, although Flower goes on with the first one.

    Attributes:
        on_new_id: called with the new node id.
    """

    _client: httpx.Client  # set by Flower's class

    def __init__(self, *arguments: Any, clock: Clock | None = None, **options: Any) -> None:
        """Connect at the first request.

        Args:
            arguments: those of Flower's client.
            clock: waits; None for the system's clock.
            options: those of Flower's client.
        """
        super().__init__(*arguments, **options)
        self.on_new_id: Callable[[int], None] = lambda _: None
        self._clock = clock or SystemClock()
        self._problem = ""
        self._node_id: int | None = None
        self._returning = threading.Lock()  # heartbeats are sent by another thread
        self._registration: RegisterNodeFleetRequest | None = None
        self._activation = ActivateNodeRequest()

    def RegisterNode(self, request: RegisterNodeFleetRequest) -> RegisterNodeFleetResponse:  # noqa: N802 - named by Flower
        """Register a SuperNode without a key of its own."""
        self._registration = request
        registered: RegisterNodeFleetResponse = super().RegisterNode(request)
        return registered

    def ActivateNode(self, request: ActivateNodeRequest) -> ActivateNodeResponse:  # noqa: N802 - named by Flower
        """Activate the SuperNode, as soon as the SuperLink accepts its key.

        Raises:
            httpx.HTTPStatusError: the SuperLink refuses; for a key that is not enrolled, only after 90 s of refusals.
        """
        give_up_s, pause_s = self._clock.now_s() + ACCEPTED_WITHIN_S, _FIRST_PAUSE_S
        while True:
            try:
                activated: ActivateNodeResponse = super().ActivateNode(request)
            except httpx.HTTPStatusError as error:
                if not (_is_unauthorized(error) or _code(error) == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED):
                    raise
                if _is_not_enrolled(error) and self._clock.now_s() + pause_s > give_up_s:
                    log(ERROR, "wattfleet-supernode: %s", _REVOKED)
                    raise
                self._note(*self._why_unknown(error))
            else:
                self._activation, self._node_id = request, activated.node_id
                return activated
            self._clock.sleep_s(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def SendNodeHeartbeat(self, request: SendNodeHeartbeatRequest) -> SendNodeHeartbeatResponse:  # noqa: N802 - named by Flower
        """Send a heartbeat.

        Raises:
            httpx.ConnectError: the SuperLink did not accept it. Flower then tries again, while it would otherwise never
                send another one.
        """
        response: SendNodeHeartbeatResponse = super().SendNodeHeartbeat(request)
        if not response.success:
            raise httpx.ConnectError("the SuperLink did not accept a heartbeat")
        return response

    def GetRun(self, request: GetRunRequest) -> GetRunResponse:  # noqa: N802 - named by Flower
        """Request a run.

        Raises:
            RunNotRunningException: the SuperLink answers with errors. Flower then ignores the message.
        """
        found: GetRunResponse = _of_running_run(super().GetRun, request)
        return found

    def GetFab(self, request: GetFabRequest) -> GetFabResponse:  # noqa: N802 - named by Flower
        """Request the app of a run; raises as `GetRun`."""
        found: GetFabResponse = _of_running_run(super().GetFab, request)
        return found

    def _unary_unary(self, *, request: Any, **options: Any) -> Any:
        """Send a request under the current node id; a SuperNode that the SuperLink has forgotten returns first."""
        if self._node_id is None or isinstance(request, (RegisterNodeFleetRequest, ActivateNodeRequest)):
            return self._attempted(request, **options)
        for _ in range(2):  # a SuperLink that has just accepted it again can forget it, or learn that it was revoked
            node_id = self._node_id
            try:
                return self._attempted(_addressed(request, node_id), **options)
            except httpx.HTTPStatusError as error:
                is_leaving = isinstance(request, (DeactivateNodeRequest, UnregisterNodeFleetRequest))
                if is_leaving or not _is_unauthorized(error):
                    raise
                self._return(node_id, error)
        raise httpx.ConnectError("the SuperLink has accepted this SuperNode, but not its request")

    def _attempted(self, request: Any, **options: Any) -> Any:
        """Send a request, and again after a server error: without end if Flower waits for it, else some times.

        Flower's SuperNode does not survive such an error of a request for messages, and a heartbeat is never sent again
        after one.
        """
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return super()._unary_unary(request=request, **options)
            except httpx.HTTPStatusError as error:
                if error.response.status_code < _SERVER_ERRORS:
                    raise
                if isinstance(request, _REPEATED_BY_FLOWER):
                    status = f"{error.response.status_code} {error.response.reason_phrase}"
                    self._note(WARNING, f"the SuperLink answers with an error, {status}: see its log; trying again")
                    raise httpx.ConnectError(status, request=error.request) from None
                if attempt == _ATTEMPTS:
                    raise
            self._clock.sleep_s(_FIRST_PAUSE_S)
        raise AssertionError("the last attempt returns or raises")

    def _return(self, node_id: int, refusal: httpx.HTTPStatusError) -> None:
        """Activate the SuperNode again, once.

        Args:
            node_id: the node id that the SuperLink does not know.
            refusal: its answer.
        """
        with self._returning:
            if self._node_id != node_id:  # another thread has done it meanwhile
                return
            if _is_not_enrolled(refusal):
                log(ERROR, "wattfleet-supernode: %s", _REVOKED)
                raise refusal
            is_registered_before = False
            try:
                if self._registration is not None:
                    try:
                        super().RegisterNode(self._registration)
                    except httpx.HTTPStatusError as error:
                        if _code(error) != ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                            raise
                        is_registered_before = True
                self._node_id = super().ActivateNode(self._activation).node_id
            except httpx.HTTPStatusError as error:
                if is_registered_before and _code(error) == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED:
                    log(ERROR, "wattfleet-supernode: %s", _UNREGISTERED)
                    raise refusal from None
                if _is_not_enrolled(error):
                    log(ERROR, "wattfleet-supernode: %s", _REVOKED)
                    raise refusal from None
                self._note(*self._why_unknown(error))
                raise httpx.ConnectError("the SuperLink does not know this SuperNode", request=error.request) from None
            self.on_new_id(self._node_id)
            log(INFO, "wattfleet-supernode: the SuperLink has accepted this SuperNode again, as %d", self._node_id)
            self._problem = ""

    def _send(self, context: ProtobufRequestContext, *, stream: bool = False) -> httpx.Response:
        try:
            response: httpx.Response = super()._send(context, stream=stream)
        except httpx.ConnectError as error:
            if (reason := self._why(_tls_error(error))) is None:
                raise
            self._note(WARNING, reason)
            # Flower gives up if the text mentions TLS, and tries again otherwise.
            raise httpx.ConnectError("the SuperLink was not accepted", request=context.request) from None
        except httpx.TransportError as error:
            if _tls_error(error) is None:
                raise
            raise httpx.ReadError("the SuperLink ended the connection", request=context.request) from None
        if response.is_success:
            self._problem = ""
        return response

    def _why(self, error: ssl.SSLError | None) -> str | None:
        """Return why TLS failed, if another attempt may succeed; else None.

        Args:
            error: OpenSSL's error; None if TLS is not the cause.
        """
        if error is None or error.reason != _ENDED:
            return None
        return "the SuperLink has ended a connection before it was protected, as a SuperLink that stops does"

    def _why_unknown(self, refusal: httpx.HTTPStatusError) -> tuple[int, str]:
        """Return why the SuperLink does not accept the SuperNode now, after the level to log this at."""
        if not _is_unauthorized(refusal):
            return INFO, _UNKNOWN
        skew_s = _skew_s(refusal.response)
        if skew_s is None or abs(skew_s) < _LEAST_SKEW_S:
            return WARNING, "the SuperLink does not accept this SuperNode's signature; trying again"
        return (
            WARNING,
            f"the SuperLink does not accept this SuperNode, since the clocks of the two machines differ by"
            f" {abs(skew_s):.0f} s: set the clock of this machine, or that of the SuperLink; trying again",
        )

    def _note(self, level: int, problem: str) -> None:
        """Log a problem once, until a request succeeds."""
        if problem != self._problem:
            log(level, "wattfleet-supernode: %s", problem)
        self._problem = problem


class EnrolledClient(SteadyClient):
    """The client of an enrolled device, which trusts the fleet's authorities."""

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
        self._now = now
        self._trusted_pem = b""
        self._lock = threading.Lock()
        self._requests = 0
        self._retired: list[httpx.Client] = []
        super().__init__(f"https://{address}", interceptors=interceptors, verify=_trusting(b""), clock=clock)
        self._trust()

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
            return super()._send(context, stream=stream)
        finally:
            with self._lock:
                self._requests -= 1
                if not self._requests:
                    self._close_retired()

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

    def _why(self, error: ssl.SSLError | None) -> str | None:
        """Return why the SuperLink's certificate is rejected; None if TLS is not the cause of the error."""
        if error is None:
            return None
        if (reason := super()._why(error)) is not None:
            return reason
        whose = f"the certificate of the SuperLink at {self._address}"
        if not isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the SuperLink at {self._address} does not speak TLS ({error.reason or error}): start it as"
                " `wattfleet-superlink` with an identity"
            )
        if error.verify_code in (_EXPIRED, _NOT_YET_VALID):
            state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
            return (
                f"{whose} {state} at {self._now():%Y-%m-%d %H:%M} UTC, the time of this machine: set its clock if that"
                " is wrong, or else see why `wattfleet-superlink` cannot renew it"
            )
        if error.verify_code in _UNKNOWN_ISSUER:
            return (
                f"{whose} was not issued by the authority of this device's fleet: check the address. If the fleet has"
                " another authority now, enrol the device again with `wattfleet agent join`"
            )
        if error.verify_code in (_OTHER_NAME, _OTHER_ADDRESS):
            return (
                f"{whose} was issued for other names: connect to one of them, or restart the coordinator with"
                " --superlink-host for this one"
            )
        return f"{whose} cannot be verified: {error.verify_message}"


def _trusting(authorities_pem: bytes) -> ssl.SSLContext:
    """Return a TLS context that trusts the given authorities only; nobody if there are none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if authorities_pem:
        context.load_verify_locations(cadata=authorities_pem.decode())
    return context


def _of_running_run(send: Callable[[Any], Any], request: Any) -> Any:
    """Send a request; a server error means that the run cannot be used, which Flower's SuperNode survives."""
    try:
        return send(request)
    except httpx.HTTPStatusError as error:
        if error.response.status_code < _SERVER_ERRORS:
            raise
        raise RunNotRunningException from error


def _addressed(request: Any, node_id: int | None) -> Any:
    """Return a copy of a request under another node id."""
    addressed = type(request)()
    addressed.CopyFrom(request)
    (addressed.node if hasattr(addressed, "node") else addressed).node_id = node_id
    return addressed


def _tls_error(error: httpx.TransportError) -> ssl.SSLError | None:
    """The error of OpenSSL that caused another one; None if there is none."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    return found


def _is_unauthorized(error: httpx.HTTPStatusError) -> bool:
    return error.response.status_code == httpx.codes.UNAUTHORIZED


def _is_not_enrolled(error: httpx.HTTPStatusError) -> bool:
    """Whether the SuperLink knows that the key is not enrolled; only `wattfleet-superlink` reports this."""
    found: str | None = error.response.headers.get(HEADER)
    return found == NOT_ENROLLED


def _code(error: httpx.HTTPStatusError) -> int | None:
    """Flower's code of an error; None if it has none."""
    found = FlowerError.from_json(error.response.text)
    return None if found is None else int(found.code)


def _skew_s(response: httpx.Response) -> float | None:
    """How far this machine's clock is ahead of the server's, seconds; None if the response does not state its time."""
    try:
        return (utc_now() - parsedate_to_datetime(response.headers["date"])).total_seconds()
    except (KeyError, ValueError, TypeError):
        return None
