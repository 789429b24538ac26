"""A connection to a running coordinator for the operator's commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import grpc

from wattfleet.common.console import plain_text
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError, answers
from wattfleet.common.identity.channels import Endpoint, why_refused
from wattfleet.common.identity.renewal import renew
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet_proto.v1 import (
    identity_pb2,
    identity_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

_ANSWER_TIMEOUT_S = 30.0
_STREAM_TIMEOUT_S = 600.0
_PROBE_TIMEOUT_S = 5.0

_INVALID_REQUEST = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.DATA_LOSS,
)


class RequestFailedError(WattfleetError):
    """The coordinator could not carry out a request."""


class InvalidRequestError(InvalidInputError):
    """The coordinator refused a request as invalid."""


class CoordinatorClient:
    """The services of one coordinator; gRPC errors become typed errors."""

    def __init__(self, endpoint: Endpoint, stream_timeout_s: float = _STREAM_TIMEOUT_S, origin: str = "") -> None:
        """Prepare a connection; the first request opens it.

        Args:
            endpoint: the coordinator, and how to connect to it.
            stream_timeout_s: timeout of a streamed answer, in seconds.
            origin: how the coordinator's address is known, for errors; empty if the user has named it.

        Raises:
            InvalidInputError: the identity is damaged, or plaintext would leave this machine although it must not.
        """
        self._endpoint = endpoint
        self._address = endpoint.address
        self._origin = f", {origin}" if origin else ""
        self._channel = endpoint.channel()
        self._stream_timeout_s = stream_timeout_s
        self._has_answered = False
        self._operator: Any = operator_pb2_grpc.OperatorServiceStub(self._channel)
        self._identity: Any = identity_pb2_grpc.IdentityServiceStub(self._channel)
        self._view: Any = view_pb2_grpc.ViewServiceStub(self._channel)

    def __enter__(self) -> CoordinatorClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def operate(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the operator's service; `request` is a message, or an iterator of them.

        Raises:
            CoordinatorUnreachableError: nothing answers.
            InvalidRequestError: the request is invalid.
            RequestFailedError: the coordinator failed, or cannot carry out the request now.
        """
        with self._errors():
            within_s = _ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
            return getattr(self._operator, method)(request, timeout=within_s)

    def administer(self, method: str, request: Any) -> Any:
        """Call a method of the identity service; errors as for `operate`."""
        with self._errors():
            return getattr(self._identity, method)(request, timeout=_ANSWER_TIMEOUT_S)

    def renew_certificate(self) -> str:
        """Renew this client's own certificate even if it is not due; return its owner, such as "operator anna".

        Raises:
            CoordinatorUnreachableError: nothing answers.
            RenewalError: the coordinator refuses, or the certificate cannot be stored.
        """
        renew(self._endpoint)
        identity = self._endpoint.identity()
        return "" if identity is None else str(identity.peer)

    def certificates(self) -> list[identity_pb2.CertificateView]:
        """All certificates that have not expired; errors as for `operate`."""
        answers = self._streamed(self._identity.ListCertificates, identity_pb2.ListCertificatesRequest())
        return [certificate for answer in answers for certificate in answer.certificates]

    def audit_log(self, since_unix_s: float | None) -> list[identity_pb2.AuditEntry]:
        """What operators changed, oldest first; errors as for `operate`."""
        request = identity_pb2.ReadAuditLogRequest(since_unix_s=since_unix_s)
        return [entry for answer in self._streamed(self._identity.ReadAuditLog, request) for entry in answer.entries]

    def devices(
        self, *device_ids: str, with_fronts: bool = False, with_times: bool = False, workload: str | None = None
    ) -> Iterator[view_pb2.DeviceView]:
        """The named devices, or all if none is named; errors as for `operate`."""
        request = view_pb2.ListDevicesRequest(
            device_ids=device_ids, with_fronts=with_fronts, with_times=with_times, workload=workload or ""
        )
        for answer in self._streamed(self._view.ListDevices, request):
            yield from answer.devices

    def nodes(self) -> list[view_pb2.NodeView]:
        """Flower's nodes, by device and node id; errors as for `operate`."""
        answers = self._streamed(self._view.ListNodes, view_pb2.ListNodesRequest())
        return [node for answer in answers for node in answer.nodes]

    def workloads(self) -> list[view_pb2.WorkloadView]:
        """All workloads of runs and of devices' fronts, by name; errors as for `operate`."""
        answers = self._streamed(self._view.ListWorkloads, view_pb2.ListWorkloadsRequest())
        return [workload for answer in answers for workload in answer.workloads]

    def runs(self, with_times: bool = False) -> list[view_pb2.RunView]:
        """All runs, oldest first; errors as for `operate`."""
        answers = self._streamed(self._view.ListRuns, view_pb2.ListRunsRequest(with_times=with_times))
        return [run for answer in answers for run in answer.runs]

    def events(self, request: view_pb2.ListEventsRequest) -> list[view_pb2.FleetEvent]:
        """What happened in the fleet, newest first; errors as for `operate`."""
        return [event for answer in self._streamed(self._view.ListEvents, request) for event in answer.events]

    def rounds(self, run_id: str, with_devices: bool = True, with_times: bool = False) -> Iterator[view_pb2.RoundView]:
        """The rounds of a run, in order; errors as for `operate`."""
        request = view_pb2.StreamRoundsRequest(run_id=run_id, without_devices=not with_devices, with_times=with_times)
        return self._streamed(self._view.StreamRounds, request)

    def round(self, run_id: str, number: int) -> view_pb2.RoundView:
        """One round of a run with all values of its devices.

        Raises:
            InvalidRequestError: the run has no such round.
            WattfleetError: as for `operate`.
        """
        request = view_pb2.StreamRoundsRequest(run_id=run_id, with_times=True, round=number)
        found: view_pb2.RoundView | None = next(iter(self._streamed(self._view.StreamRounds, request)), None)
        if found is None:
            raise InvalidRequestError(f"run {run_id} has no round {number}")
        return found

    def deleted_runs(self, run_ids: Iterable[str], end: bool) -> Iterator[str]:
        """Delete runs, and yield the id of each deleted run; errors as for `operate`."""
        request = operator_pb2.DeleteRunsRequest(run_ids=run_ids, end=end)
        return (answer.run_id for answer in self._streamed(self._operator.DeleteRuns, request))

    def _streamed(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        with self._errors():
            yield from method(request, timeout=self._stream_timeout_s)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
            self._has_answered = True
        except grpc.RpcError as error:
            raise self._translated(error) from None

    def _translated(self, error: Any) -> WattfleetError:
        code, details = error.code(), plain_text(error.details() or "")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and self._has_answered:
            return CoordinatorUnreachableError(f"the coordinator at {self._address} stopped answering")
        # A coordinator that answers but cannot carry out the request now uses the same status.
        is_unavailable = code is grpc.StatusCode.UNAVAILABLE and not self._is_reachable()
        if is_unavailable or code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return why_refused(self._endpoint) or CoordinatorUnreachableError(
                f"no coordinator answers at {self._address}{self._origin}: start one with `wattfleet coordinator"
                " serve`, or name another with --coordinator"
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return RequestFailedError(f"the coordinator at {self._address} is older than this command: update it")
        if code is grpc.StatusCode.PERMISSION_DENIED and self._origin:
            details += f" (the coordinator at {self._address}{self._origin})"
        kind = InvalidRequestError if code in _INVALID_REQUEST else RequestFailedError
        return kind(details or code.name)

    def _is_reachable(self) -> bool:
        return answers(self._view.GetFleet, view_pb2.GetFleetRequest(), _PROBE_TIMEOUT_S)
