"""Lists that one app or operator can fill: limits on their size, and long lists returned in parts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from coordinator.cli.client import CoordinatorClient
from coordinator.settings import CoordinatorSettings
from coordinator.state.names import MAX_METRICS, MAX_TAGS
from coordinator.state.records import DeviceOverrides, RunRecord
from coordinator.store.store import Store
from tests.fakes.records_to_store import BLANK
from tests.fakes.served import serving_client, status
from tests.fakes.small_fleet import RUN
from wattfleet_flower.server.errors import RefusedError
from wattfleet_flower.server.planning_client import PlanningClient
from wattfleet_identity.channels import Endpoint
from wattfleet_io.clock import SystemClock
from wattfleet_proto.limits import MAX_MESSAGE_BYTES
from wattfleet_proto.v1 import operator_pb2, planning_pb2, view_pb2

# Eight of these fill the largest reply; one exceeds what this test's client accepts.
_LARGE = {f"{k:0190}": 1.0 for k in range(40_000)}
_MANY = {f"{k:0190}": 1.0 for k in range(5_000)}


async def test_metrics_of_8_mb_are_refused_and_runs_can_be_listed(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        for k in range(12):
            started = planning_pb2.StartRunRequest(run_id=f"run-{k}", strategy="FedAvg", rounds=1)
            await client.planning.StartRun(started)
            request = planning_pb2.ReportMetricsRequest(run_id=f"run-{k}", metrics=_LARGE)
            assert MAX_MESSAGE_BYTES > request.ByteSize() > 0.9 * MAX_MESSAGE_BYTES
            with pytest.raises(grpc.aio.AioRpcError, match="is too large: at most 1,048,576 bytes") as refused:
                await client.planning.ReportMetrics(request)
            assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.planning.ReportMetrics(planning_pb2.ReportMetricsRequest(run_id=f"run-{k}", metrics=_MANY))
            assert status(refused) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                f"run run-{k}, round 0: a round has at most {MAX_METRICS} metrics, not 5,000: report fewer",
            )
        assert [run.run_id for run in await client.runs()] == [f"run-{k}" for k in range(12)]


async def test_flowers_server_does_not_keep_a_report_that_is_too_large(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id="run", strategy="FedAvg", rounds=1))
        flower = PlanningClient(Endpoint.of(client.bound.address, None), SystemClock())
        request = planning_pb2.ReportMetricsRequest(run_id="run", metrics=_LARGE)
        with pytest.raises(RefusedError, match="is too large"):
            await asyncio.to_thread(flower.report, "ReportMetrics", lambda: request)
        assert flower.pending_reports == 0


async def test_metrics_of_a_round_are_counted_over_all_its_reports(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.two_ready()
        await client.plan()
        names = [f"metric-{k}" for k in range(MAX_METRICS)]
        for _ in range(2):  # a repeated report adds nothing
            request = planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics=dict.fromkeys(names, 0.5))
            await client.planning.ReportMetrics(request)
        with pytest.raises(grpc.aio.AioRpcError, match=f"at most {MAX_METRICS} metrics, not {MAX_METRICS + 1}"):
            more = planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics={"one more": 0.5})
            await client.planning.ReportMetrics(more)
        [shown] = (await client.rounds()).rounds
        assert sorted(shown.metrics) == sorted(names)


async def test_400_000_tags_on_a_device_are_refused_and_none_is_added(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.two_ready()
        request = operator_pb2.TagDevicesRequest(device_ids=["orin", "nano"], add=[f"t{k}" for k in range(400_000)])
        with pytest.raises(grpc.aio.AioRpcError, match="a list in a message is too long") as refused:
            await client.operator.TagDevices(request)
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
        del request.add[10_000:]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.operator.TagDevices(request)
        assert status(refused) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"at most {MAX_TAGS} tags can be added by command, not 10,000",
        )
        for word in ("a", "b"):
            request = operator_pb2.TagDevicesRequest(device_ids=["orin"], add=[f"{word}{k}" for k in range(MAX_TAGS)])
            if word == "a":
                await client.operator.TagDevices(request)
                continue
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.operator.TagDevices(request)
        assert status(refused)[1] == (
            f"orin: a device has at most {MAX_TAGS} tags set by command, not {2 * MAX_TAGS}: remove some first"
        )
        tags = {device_id: len(device.operator_tags) for device_id, device in (await client.devices()).items()}
        assert tags == {"nano": 0, "orin": MAX_TAGS}


async def test_a_store_of_before_with_too_much_in_it_is_still_listed(config: CoordinatorSettings) -> None:

    store = Store(Path(config.store.location))
    store.save(RunRecord(RUN, "FedAvg", 1, _LARGE, finished=True))
    store.save(BLANK, DeviceOverrides(BLANK.device_id, frozenset(_LARGE)))
    store.close()
    async with serving_client(config) as client:
        [run] = await client.runs()
        assert (run.run_id, len(run.initial_metrics)) == (RUN, MAX_METRICS)
        device = (await client.devices())[BLANK.device_id]
        assert list(device.operator_tags) == [f"{k:0190}" for k in range(MAX_TAGS)]
        removed = operator_pb2.TagDevicesRequest(device_ids=[BLANK.device_id], remove=list(device.operator_tags))
        await client.operator.TagDevices(removed)
        after = (await client.devices())[BLANK.device_id]
        assert list(after.operator_tags) == [f"{k:0190}" for k in range(MAX_TAGS, 2 * MAX_TAGS)]


async def test_runs_come_in_parts_and_the_commands_read_all(
    config: CoordinatorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.services.views._RUNS_IN_A_MESSAGE", 2)

    async with serving_client(config) as client:
        for k in range(5):
            started = planning_pb2.StartRunRequest(run_id=f"run-{k}", strategy="FedAvg", rounds=1)
            await client.planning.StartRun(started)
        answers = [answer async for answer in client.view.ListRuns(view_pb2.ListRunsRequest(with_times=True))]
        assert [len(answer.runs) for answer in answers] == [2, 2, 1]
        assert all(run.HasField("started_unix_s") for answer in answers for run in answer.runs)

        def command() -> list[str]:
            with CoordinatorClient(Endpoint(client.bound.address)) as connection:
                return [run.run_id for run in connection.runs()]

        assert await asyncio.to_thread(command) == [f"run-{k}" for k in range(5)]
