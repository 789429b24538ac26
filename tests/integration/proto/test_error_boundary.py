"""The error boundary: every error has a status, and a client receives only the status and the message."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import grpc
import pytest

import coordinator
import edge_agent
import wattfleet.core
from coordinator.services.request_limits import STATUS as COORDINATOR_STATUS
from edge_agent.runtime.app_requests import STATUS as AGENT_STATUS
from wattfleet.core.errors import EnergySpentError, InfeasibleBudgetError, InvalidInputError, WattfleetError
from wattfleet_proto.error_boundary import ErrorInterceptor, StatusTable, status_of

# Raised outside the service's process, or before the service is up; a new error has to be added here or get a status.
NOT_RAISED_BY_A_SERVICER = {
    "coordinator.cli.client.RequestFailedError",  # in the operator's commands
    "coordinator.errors.AmbiguousQueryError",  # while budgets are watched, like the other errors of a budget's source
    "coordinator.errors.BudgetSourceError",
    "coordinator.errors.NoReadingError",
    "coordinator.errors.SourceFailedError",
    "coordinator.errors.StaleReadingError",
    "coordinator.errors.UnsuitableQueryError",
    "coordinator.errors.UnusableReadingError",
    "wattfleet.flower.server.errors.NoUpdatesError",  # in Flower's ServerApp
    "wattfleet.flower.server.errors.PlanningError",  # in Flower's ServerApp
    "wattfleet.flower.server.errors.CoordinatorRefusedError",  # in Flower's ServerApp
    "wattfleet.flower.server.errors.EnergyUsedUpError",  # in Flower's ServerApp
    "wattfleet.flower.server.errors.TwoStrategiesError",  # in Flower's ServerApp
    "edge_agent.selftest._OutOfTimeError",  # in an owner's own command
    "edge_agent.selftest._TooHotError",
    "coordinator.errors.StoreInUseError",  # before the service is up
    "wattfleet.flower.client.agent_training.AgentUnreachableError",  # in Flower's ClientApp
    "edge_agent.devices.external_meters.MeterError",  # in the thread that reads an external meter
    "edge_agent.devices.jtop.JtopUnavailableError",  # before profiling
    "edge_agent.profiling.mode_measurement.DisturbedError",  # while profiling
    "edge_agent.profiling.mode_measurement.OverloadedError",
    "edge_agent.profiling.mode_measurement.TooHotError",  # while profiling
    "edge_agent.profiling.mode_measurement.MeasurementError",  # while profiling
    "edge_agent.learning.transfer.UnusableReferenceError",  # before profiling
    "edge_agent.serving.duty_service.NoAgentError",  # by a command, not by the service
    "edge_agent.serving.duty_process.DutyProcessError",  # while planning beside a duty
    "edge_agent.serving.server_stream.ServerGoneError",  # while measuring the inference of a duty
    "edge_agent.session.outbox.UnusableAnswerError",  # in the agent's session
    "edge_agent.session.references.CoordinatorAwayError",  # before profiling
    "edge_agent.session.references.ReferenceUntrustedError",  # before profiling
    "edge_agent.session.references.ReferenceRefusedError",  # before profiling
    "edge_agent.training.mode_change.DeviceBusyError",  # before the socket is served
    "edge_agent.training.mode_change.KnobBackupError",  # before the socket is served
    "wattfleet.common.systemd.InstallationError",  # by a command, not by the service
    "edge_agent.workloads.process.WorkloadFailedError",  # while profiling
}


def errors_of(package: ModuleType) -> set[type[WattfleetError]]:
    """Every error that the modules of a package define."""
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    pending, found = [WattfleetError], set()
    while pending:
        for error in pending.pop().__subclasses__():
            pending.append(error)
            if error.__module__.startswith(f"{package.__name__}."):
                found.add(error)
    return found


def name_of(error: type[WattfleetError]) -> str:
    return f"{error.__module__}.{error.__qualname__}"


@pytest.mark.parametrize(
    ("package", "table", "needs"),
    [(coordinator, COORDINATOR_STATUS, "prometheus_client"), (edge_agent, AGENT_STATUS, "torch")],
)
def test_every_error_that_a_service_can_raise_has_a_status(package: ModuleType, table: StatusTable, needs: str) -> None:
    pytest.importorskip(needs, reason=f"without {needs}, not all of {package.__name__} can be imported")
    own = errors_of(package)
    assert own, "the search found at least one"
    unmapped = {name_of(error) for error in own if status_of(error("why"), table) is grpc.StatusCode.UNKNOWN}
    assert unmapped == {name for name in NOT_RAISED_BY_A_SERVICER if name.startswith(package.__name__)}


def test_the_coordinator_maps_every_error_of_the_core() -> None:
    core = errors_of(wattfleet.core)
    assert InfeasibleBudgetError in core
    for error in core:
        assert status_of(error("why"), COORDINATOR_STATUS) is not grpc.StatusCode.UNKNOWN, error


def test_bad_input_is_told_from_a_budget_that_is_too_small() -> None:
    assert status_of(InvalidInputError("why"), COORDINATOR_STATUS) is grpc.StatusCode.INVALID_ARGUMENT
    assert status_of(InfeasibleBudgetError("why"), COORDINATOR_STATUS) is grpc.StatusCode.FAILED_PRECONDITION


def test_energy_that_is_used_up_is_told_from_watts_that_may_rise() -> None:
    assert status_of(EnergySpentError("why"), COORDINATOR_STATUS) is grpc.StatusCode.OUT_OF_RANGE


class WaitError(WattfleetError):
    pass


class WaitLongerError(WaitError):
    pass


class UnlistedError(WattfleetError):
    pass


TABLE: StatusTable = {
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    WaitError: grpc.StatusCode.UNAVAILABLE,
}
SHAPES = ["unary", "client_stream", "server_stream", "bidi"]
FIRST = b"first"


class AbortsItself(Exception):  # noqa: N818 - not an error: it asks the servicer to abort the call itself
    pass


async def outcome(shape: str, error: Exception | None) -> tuple[list[bytes], grpc.StatusCode, str]:
    """What a client receives for each kind of method when a servicer raises."""

    async def fail(context: Any) -> None:
        if isinstance(error, AbortsItself):
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "by itself")
        if error:
            raise error

    async def unary(request: bytes, context: Any) -> bytes:
        await fail(context)
        return request

    async def client_stream(requests: AsyncIterator[bytes], context: Any) -> bytes:
        # All of them are read first: what a client still sends to an ended call races with the call's status.
        joined = b"".join([request async for request in requests])
        await fail(context)
        return joined

    async def server_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield FIRST
        await fail(context)
        yield request

    async def bidi(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield FIRST
            await fail(context)
            yield request

    methods = {
        "unary": grpc.unary_unary_rpc_method_handler(unary),
        "client_stream": grpc.stream_unary_rpc_method_handler(client_stream),
        "server_stream": grpc.unary_stream_rpc_method_handler(server_stream),
        "bidi": grpc.stream_stream_rpc_method_handler(bidi),
    }
    server = grpc.aio.server(interceptors=[ErrorInterceptor(TABLE)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    received: list[bytes] = []
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            path = f"/test.Service/{shape}"
            if shape == "unary":
                call: Any = channel.unary_unary(path)(b"last")
            elif shape == "client_stream":
                call = channel.stream_unary(path)(iter([b"la", b"st"]))
            elif shape == "bidi":
                call = channel.stream_stream(path)(iter([b"last"]))
            else:
                call = channel.unary_stream(path)(b"last")
            try:
                if shape in ("unary", "client_stream"):
                    received.append(await call)
                else:
                    async for response in call:
                        received.append(response)
            except grpc.aio.AioRpcError as refused:
                return received, refused.code(), refused.details() or ""
            return received, await call.code(), await call.details()
    finally:
        await server.stop(None)


@pytest.mark.parametrize("shape", SHAPES)
async def test_what_goes_well_is_left_alone(shape: str) -> None:
    received, code, _ = await outcome(shape, None)
    assert code is grpc.StatusCode.OK
    assert received[-1] == b"last"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidInputError("0 W: give more than zero"), grpc.StatusCode.INVALID_ARGUMENT),
        (InfeasibleBudgetError("5 W carry none: allow 9 W"), grpc.StatusCode.INVALID_ARGUMENT),
        (WaitLongerError("näher am Wochenende"), grpc.StatusCode.UNAVAILABLE),
        (UnlistedError("nobody thought of it"), grpc.StatusCode.UNKNOWN),
    ],
)
async def test_a_domain_error_shows_its_status_and_its_text(
    shape: str, error: WattfleetError, expected: grpc.StatusCode
) -> None:
    assert (await outcome(shape, error))[1:] == (expected, str(error))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [RuntimeError, KeyError, TimeoutError, grpc.RpcError])
async def test_an_unexpected_exception_is_internal_and_only_the_log_has_its_text(
    shape: str, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    _, code, details = await outcome(shape, kind("password=hunter2"))
    assert code is grpc.StatusCode.INTERNAL
    assert "hunter2" not in details
    assert details
    assert f"/test.Service/{shape}" in caplog.text
    assert "hunter2" in caplog.text


@pytest.mark.parametrize("shape", ["server_stream", "bidi"])
async def test_what_was_sent_before_the_error_arrives(shape: str) -> None:
    assert (await outcome(shape, WaitError("later")))[0] == [FIRST]


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_servicer_that_aborts_by_itself_keeps_its_status(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    assert (await outcome(shape, AbortsItself()))[1:] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "by itself")
    assert not caplog.records, "nothing failed"


@pytest.mark.parametrize("letter", ["x", "ä", "\0"])
async def test_of_a_text_that_no_status_can_carry_the_beginning_is_shown(letter: str) -> None:
    _, code, details = await outcome("unary", WaitError(letter * 100_000))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert details.startswith(letter * 100) and details.endswith(" ...")


async def test_a_method_that_does_not_exist_is_unimplemented() -> None:

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        server = grpc.aio.server(interceptors=[ErrorInterceptor(TABLE)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                await channel.unary_unary("/test.Service/absent")(b"")
        finally:
            await server.stop(None)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
