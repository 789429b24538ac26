"""A client of the coordinator's planning service, for Flower's server.

It distinguishes an unreachable coordinator from one that refuses, and keeps reports until the coordinator accepts them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from logging import WARNING
from typing import Any

import grpc
from flwr.common.logger import log

from wattfleet.common.clock import Clock, utc_now
from wattfleet.common.console import plain_text
from wattfleet.common.coordinator_channel import UNREACHABLE, CoordinatorUnreachableError
from wattfleet.common.identity.channels import Endpoint, why_refused
from wattfleet.common.identity.identity_folder import Identity
from wattfleet.common.identity.renewal import RenewalSchedule, renew_if_due
from wattfleet.core.errors import InvalidInputError
from wattfleet.flower.server.errors import CoordinatorRefusedError
from wattfleet_proto.limits import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_ANSWER_TIMEOUT_S = 30.0
# The first connection gets a long timeout, since the coordinator may start at the same time as Flower. Reconnecting
# must not delay rounds, so it begins with a short timeout. The timeout grows with every failure up to the long one,
# since the link may have become slow.
_CONNECT_TIMEOUT_S = 15.0
_RECONNECT_TIMEOUT_S = 2.0
# Once the coordinator has answered, reports get a shorter timeout, since rounds wait for them.
_REPORT_TIMEOUT_S = 5.0
# Over a slow link all timeouts are longer: TCP, HTTP/2 and the first answer take three to four round trips.
_ROUND_TRIPS = 5.0
_LONGEST_TIMEOUT_S = 60.0
_CHECK_IDENTITY_EVERY_S = 60.0

# The method that measures the round trip. Its answer needs neither a plan nor the store, so it takes no longer than the
# link.
_ROUND_TRIP_METHOD = "ResolveNodes"


class _RetryLaterError(CoordinatorRefusedError):
    """The coordinator cannot accept a report now, but may accept it later."""


@dataclass(frozen=True)
class _Report:
    """A report to the coordinator, which may have to be sent later.

    Attributes:
        method: the method to call.
        build: builds the request when it is sent.
        corrects: called after a refusal. It may change what `build` returns, and returns whether to send again.
        accepted: called with the coordinator's answer.
    """

    method: str
    build: Callable[[], Any]
    corrects: Callable[[CoordinatorRefusedError], bool]
    accepted: Callable[[Any], None]


class PlanningClient:
    """Calls the planning service, and keeps the reports that could not be sent yet.

    Attributes:
        name: the coordinator's address.
        is_unreachable: whether the coordinator did not answer the last request.
    """

    def __init__(self, coordinator: Endpoint | Any, clock: Clock, now: Callable[[], datetime] = utc_now) -> None:
        """Use one coordinator.

        Args:
            coordinator: how to connect to it, or a stub of its PlanningService.
            clock: measures round trips.
            now: the current time, for the renewal of the certificate.

        Raises:
            InvalidInputError: the identity is damaged, or plaintext would leave this machine although it must not.
        """
        self._endpoint = coordinator if isinstance(coordinator, Endpoint) else None
        self.name = "its stub" if self._endpoint is None else self._endpoint.address
        self._stub = coordinator
        self._channel: grpc.Channel | None = None
        self._identity: Identity | None = None
        self._open()
        self._clock = clock
        self._now = now
        self._schedule: RenewalSchedule | None = None
        if self._endpoint is not None and self._endpoint.folder is not None:
            self._schedule = RenewalSchedule(self._endpoint.folder, now, clock.now_s)
        self._checked_s = clock.now_s()
        self._pending: list[_Report] = []
        self._round_trip_s = 0.0
        self._failed_attempts = 0
        self._is_examined = self._is_refused = False
        self.is_unreachable = False

    def keep_identity(self) -> None:
        """Renew the certificate if it is due, and reconnect if the identity on disk has changed."""
        if self._endpoint is None:
            return
        try:
            if (problem := renew_if_due(self._endpoint, self._now)) is not None:
                log(WARNING, "%s", problem)
            if self._endpoint.identity() != self._identity:
                self._open()
        except InvalidInputError as error:
            log(WARNING, "the identity cannot be read, so the earlier one is still used: %s", error)

    def _renew_identity_if_due(self) -> None:
        """Renew the certificate if it is due, at most once a minute; called after an answer, so that no round waits."""
        if self._endpoint is None or self._schedule is None:
            return
        if self._clock.now_s() < self._checked_s + _CHECK_IDENTITY_EVERY_S:
            return
        self._checked_s, before = self._clock.now_s(), self._identity
        try:
            found = self._endpoint.identity()
            if found == before and (found is None or self._schedule.wait_s() > 0):
                return
        except InvalidInputError as error:
            log(WARNING, "the certificate cannot be renewed: %s", error)
            return
        self.keep_identity()
        if self._identity == before:
            self._schedule.failed()
        else:
            self._schedule.renewed()

    def _open(self) -> None:
        """Replace the channel by one with the identity that is on disk now."""
        if self._endpoint is None:
            return
        if self._channel is not None:
            self._channel.close()
        self._identity = self._endpoint.identity()
        self._channel = self._endpoint.channel()
        self._stub = planning_pb2_grpc.PlanningServiceStub(self._channel)

    def connect(self, within_s: float = float("inf")) -> None:
        """Make sure that the coordinator answers, and send pending reports.

        Args:
            within_s: seconds after which to give up in any case.

        Raises:
            CoordinatorUnreachableError: it does not answer, or does not accept this client.
            CoordinatorRefusedError: another service answers.
        """
        if self._is_refused:
            self.keep_identity()  # the identity may have been replaced by a new enrolment
        timeout_s = self._reconnect_timeout_s if self.is_unreachable else self._connect_timeout_s
        try:
            self._call(_ROUND_TRIP_METHOD, planning_pb2.ResolveNodesRequest(), min(timeout_s, within_s))
        except CoordinatorRefusedError as refused:
            if refused.code not in UNREACHABLE:
                raise
            # A failed TLS handshake is looked for once per outage, and again while it lasts. Otherwise the coordinator
            # is just away, and no second connection is needed.
            may_be_handshake = not self._is_examined or self._is_refused
            self._failed_attempts += self.is_unreachable
            self.is_unreachable = self._is_examined = True
            why = why_refused(self._endpoint) if self._endpoint is not None and may_be_handshake else None
            self._is_refused = why is not None
            raise why or CoordinatorUnreachableError(str(refused)) from None
        self.is_unreachable = self._is_examined = False
        self._failed_attempts = 0
        with suppress(CoordinatorRefusedError):
            self._send_pending()

    def call(self, method: str, request: Any) -> Any:
        """Call a method and return its response.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            CoordinatorRefusedError: the coordinator answered with an error.
        """
        try:
            return self._call(method, request, _ANSWER_TIMEOUT_S, wait_for_ready=False)
        except CoordinatorRefusedError as refused:
            if refused.code in UNREACHABLE:
                # A coordinator that has no ready device answers with the same status.
                self.connect()
            raise

    def call_briefly(self, method: str, request: Any) -> Any:
        """Call a method with a short timeout, and return its response.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer within 2 s, or a few round trips.
            CoordinatorRefusedError: the coordinator answered with an error.
        """
        try:
            return self._call(method, request, self._reconnect_timeout_s, wait_for_ready=False)
        except CoordinatorRefusedError as refused:
            if refused.code not in UNREACHABLE:
                raise
            self.is_unreachable = True
            raise CoordinatorUnreachableError(str(refused)) from None

    def report(
        self,
        method: str,
        build: Callable[[], Any],
        corrects: Callable[[CoordinatorRefusedError], bool] = lambda _: False,
        accepted: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """Send a report, or keep it until the coordinator can accept it.

        Args:
            method: the method to call.
            build: builds the request when it is sent.
            corrects: called after a refusal. It may change what `build` returns, and returns whether to send again.
            accepted: called with the coordinator's answer, perhaps much later.

        Raises:
            CoordinatorRefusedError: the coordinator will never accept the report.
        """
        report = _Report(method, build, corrects, accepted)
        if not self.is_unreachable:
            try:
                self._send_pending()
                self._send(report)
                return
            except _RetryLaterError as refused:
                self.is_unreachable = refused.code in UNREACHABLE
        self._pending.append(report)

    @property
    def pending_reports(self) -> int:
        """How many reports are still to be sent."""
        return len(self._pending)

    def send_pending(self) -> None:
        """Send the pending reports in their order.

        Raises:
            CoordinatorUnreachableError: the coordinator does not answer.
            CoordinatorRefusedError: the coordinator cannot accept a report now.
        """
        if self.is_unreachable and self._pending:
            self.connect()
        try:
            self._send_pending()
        except CoordinatorRefusedError as refused:
            if refused.code in UNREACHABLE:
                self.connect()
            raise

    def _send_pending(self) -> None:
        while self._pending:
            report = self._pending[0]
            try:
                self._send(report)
            except _RetryLaterError:
                raise
            except CoordinatorRefusedError as refused:
                log(WARNING, "the coordinator rejected %s: %s", report.method, refused)
            del self._pending[0]

    def _send(self, report: _Report) -> None:
        """Send a report, and send it again as long as refusals can be corrected."""
        while True:
            request = report.build()
            try:
                report.accepted(self._call(report.method, request, self._report_timeout_s))
                return
            except CoordinatorRefusedError as refused:
                # gRPC uses the same status for a request above its own size limit, which can never be accepted.
                is_full = refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
                if refused.code in UNREACHABLE or (is_full and request.ByteSize() <= MAX_MESSAGE_BYTES):
                    raise _RetryLaterError(str(refused), refused.code) from None
                if not report.corrects(refused):
                    raise

    @property
    def _connect_timeout_s(self) -> float:
        """Timeout of a request to a coordinator that is expected to answer, including the time to connect."""
        return min(_LONGEST_TIMEOUT_S, max(_CONNECT_TIMEOUT_S, _ROUND_TRIPS * self._round_trip_s))

    @property
    def _report_timeout_s(self) -> float:
        """Timeout of a report, including the time to store it."""
        if not self._round_trip_s:
            return self._connect_timeout_s
        return min(_LONGEST_TIMEOUT_S, max(_REPORT_TIMEOUT_S, _ROUND_TRIPS * self._round_trip_s))

    @property
    def _reconnect_timeout_s(self) -> float:
        """Timeout of a request to a coordinator that did not answer last time: several measured round trips.

        gRPC goes on connecting between the attempts, so that later ones only need the time of one answer.
        """
        grown_s = min(_RECONNECT_TIMEOUT_S * 2.0 ** min(self._failed_attempts, 10), _CONNECT_TIMEOUT_S)
        return min(_LONGEST_TIMEOUT_S, max(_RECONNECT_TIMEOUT_S, grown_s, _ROUND_TRIPS * self._round_trip_s))

    def _call(self, method: str, request: Any, timeout_s: float, wait_for_ready: bool = True) -> Any:
        began_s = self._clock.now_s()
        try:
            answer = getattr(self._stub, method)(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
            if method == _ROUND_TRIP_METHOD:
                self._round_trip_s = self._clock.now_s() - began_s
            self._renew_identity_if_due()
            return answer
        except grpc.RpcError as error:
            details = plain_text(error.details() or "")
            text = f"the coordinator at {self.name}: {error.code().name}: {details}"
            raise CoordinatorRefusedError(text, error.code()) from None
