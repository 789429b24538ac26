"""Rounds trained without a plan during an outage: reported later, and shown; and devices that may not train."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from coordinator.settings import CoordinatorSettings
from coordinator.state.records import DeviceResult, RunRecord, UnplannedRound
from coordinator.store.store import Store
from tests.fakes.flower_in_process import GridOfNodes, Node, StatusError
from tests.fakes.power_aware_runs import ARRAYS
from tests.fakes.records_to_store import old_runs_deleted
from tests.fakes.served import Client, serving_client, status
from tests.fakes.shell import a_round, asked, rack_and_roof, served_with_shell
from tests.fakes.small_fleet import NANO_NODE, ORIN_NODE, RUN
from wattfleet_flower import PowerAware
from wattfleet_proto.v1 import operator_pb2, planning_pb2, planning_pb2_grpc, view_pb2

STRANGER = 4711


def report(number: int = 2, **changes: Any) -> planning_pb2.ReportUnplannedRoundRequest:
    """Report a round without a plan: the Orin trained, the Nano failed, and a third node is unknown."""
    results = {
        ORIN_NODE: planning_pb2.DeviceResult(num_examples=96.0, loss=0.25, share=1.0),
        NANO_NODE: planning_pb2.DeviceResult(device_id="nano", failure="the node is gone"),
        STRANGER: planning_pb2.DeviceResult(share=1.0),
    }
    fields: dict[str, Any] = {
        "run_id": RUN,
        "round": number,
        "began_ago_s": 600.0,
        "wall_s": 45.0,
        "results": [planning_pb2.NodeResult(node_id=node, result=result) for node, result in results.items()],
    }
    return planning_pb2.ReportUnplannedRoundRequest(**{**fields, **changes})


async def tell(client: Client, *reports: planning_pb2.ReportUnplannedRoundRequest) -> None:
    for each in reports:
        await client.planning.ReportUnplannedRound(each)


async def streamed(client: Client) -> list[view_pb2.RoundView]:
    request = view_pb2.StreamRoundsRequest(run_id=RUN, with_times=True)
    return [view async for view in client.view.StreamRounds(request)]


# --- rounds without a plan ------------------------------------------------------------------------------------------


async def test_a_round_without_a_plan_is_shown_among_the_others_and_after_a_restart(
    config: CoordinatorSettings,
) -> None:
    async with serving_client(config) as client:
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        await client.end_trainings()
        await client.plan(4)
        await tell(client, report(3), report(2))
        before = await streamed(client)
        assert [(view.round, view.unplanned) for view in before] == [(1, False), (2, True), (3, True), (4, False)]
        second = before[1]
        assert (second.device_count, second.wall_s, list(second.failed_device_ids)) == (3, 45.0, ["nano"])
        assert [each.device_id for each in second.results] == ["orin", "nano", f"node {STRANGER}"]
        assert (second.results[0].num_examples, second.results[1].failure) == (96.0, "the node is gone")
        assert not second.HasField("plan") and not second.HasField("observed_site_w")
        assert time.time() - second.planned_unix_s == pytest.approx(600.0, abs=60.0)
        assert second.finished_unix_s - second.planned_unix_s == pytest.approx(45.0)
    async with serving_client(config) as client:
        assert (await streamed(client))[1:3] == before[1:3]


async def test_a_plan_whose_answer_was_lost_is_not_shown_beside_the_round(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        await client.plan(1)
        await tell(client, report(1))
        await client.end_trainings()
        await client.plan(2)
        assert [(view.round, view.unplanned) for view in await streamed(client)] == [(1, True), (2, False)]


async def test_a_repeated_report_changes_nothing(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        await tell(client, report())
        metrics = planning_pb2.ReportMetricsRequest(run_id=RUN, round=2, metrics={"accuracy": 0.5})
        await client.planning.ReportMetrics(metrics)
        before = await streamed(client)
        await tell(client, report(), report(began_ago_s=9999.0, wall_s=1.0, results=[]))
        assert await streamed(client) == before
        assert before[0].metrics == {"accuracy": 0.5}
    async with serving_client(config) as client:
        await tell(client, report(wall_s=1.0))
        assert await streamed(client) == before, "nor after a restart"


async def test_metrics_that_are_told_later_count_with_those_told_before(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        await tell(client, report(metrics={f"m{k}": 1.0 for k in range(60)}))
        more = planning_pb2.ReportMetricsRequest(run_id=RUN, round=2, metrics={f"n{k}": 1.0 for k in range(60)})
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.planning.ReportMetrics(more)
        given, text = status(refused)
        assert given is grpc.StatusCode.INVALID_ARGUMENT and "at most 100 metrics, not 120" in text
        assert len((await streamed(client))[0].metrics) == 60


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"run_id": "never"}, grpc.StatusCode.NOT_FOUND, "it never started"),
        ({"round": 0}, grpc.StatusCode.INVALID_ARGUMENT, "numbered from 1"),
        ({"began_ago_s": -1.0}, grpc.StatusCode.INVALID_ARGUMENT, "must have begun 0 to"),
        ({"began_ago_s": 1e300}, grpc.StatusCode.INVALID_ARGUMENT, "must have begun 0 to"),
        ({"began_ago_s": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT, "must have begun 0 to"),
        ({"wall_s": float("inf")}, grpc.StatusCode.INVALID_ARGUMENT, "duration must be 0 to"),
        ({"round": 2**32 - 1}, grpc.StatusCode.INVALID_ARGUMENT, "a run has at most"),
        ({"metrics": {f"m{k}": 1.0 for k in range(101)}}, grpc.StatusCode.INVALID_ARGUMENT, "at most 100 metrics"),
        ({"metrics": {"\x1b": 1.0}}, grpc.StatusCode.INVALID_ARGUMENT, "a metric's name"),
        (
            {"results": [{"node_id": 5, "result": {"device_id": "\x1b[2J"}}]},
            grpc.StatusCode.INVALID_ARGUMENT,
            "a device's id",
        ),
        (
            {"results": [{"node_id": 5, "result": {"share": 7.0}}]},
            grpc.StatusCode.INVALID_ARGUMENT,
            "the share of its work",
        ),
    ],
)
async def test_a_report_that_cannot_be_true_is_refused(
    config: CoordinatorSettings, changes: dict[str, Any], code: grpc.StatusCode, reason: str
) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tell(client, report(**changes))
        given, text = status(refused)
        assert given is code and reason in text and "\n" not in text
        assert not await streamed(client)


async def test_rounds_without_a_plan_are_listed_exported_and_counted(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        await tell(client, report(2), report(3), report(5, metrics={"accuracy": 0.75}))
        shown = (await shell("rounds", columns=200)).stdout.splitlines()
        assert "rounds 2–3, 5 unplanned: no budget was kept" in shown
        [row] = [line.split() for line in shown if line.split()[:1] == ["5"]]
        assert row == ["5", "2", "of", "3", "-", "-", "-", "-", "45.0", "s", "-", "0.750", "-", "-", "-"]
        listed = (await asked(shell, "rounds"))["rounds"][1]
        assert (listed["unplanned"], listed["site_budget_w"], listed["planned_w"]) == (True, None, None)
        await shell("export", "--out", str(tmp_path / "out"))
        rounds = (tmp_path / "out" / "rounds.csv").read_text().splitlines()
        column = rounds[0].split(",").index("unplanned")
        assert [line.split(",")[column] for line in rounds[1:]] == ["False", "True", "True", "True"]
        results = (tmp_path / "out" / "results.csv").read_text()
        assert f"{RUN},2,nano,the node is gone" in results and f"{RUN},3,node {STRANGER}," in results
        metrics = await asyncio.to_thread(scraped, client)
        assert "wattfleet_unplanned_rounds 3.0" in metrics


def scraped(client: Client) -> str:
    with urllib.request.urlopen(f"http://{client.bound.metrics_address}/metrics", timeout=20) as answer:
        return str(answer.read(), "utf-8")


def test_they_are_deleted_with_their_run(tmp_path: Path) -> None:
    now = datetime(2026, 5, 1, tzinfo=timezone.utc)
    times = [now]
    store = Store(tmp_path / "coordinator.db", lambda: times[0])
    store.save(RunRecord("left alone", "FedAvg", 3), RunRecord("kept", "FedAvg", 3))
    rounds = [
        UnplannedRound("left alone", number, now, 45.0, (DeviceResult("orin"),), {"f1": 0.5}) for number in range(1, 20)
    ]
    store.save(*rounds, UnplannedRound("kept", 1, now + timedelta(days=20), 45.0))
    assert store.unplanned_of("left alone", 7) == rounds[6]
    assert old_runs_deleted(store, timedelta(days=30)) == []
    times[0] += timedelta(days=40)
    assert old_runs_deleted(store, timedelta(days=30)) == ["left alone"], "the other trained ten days later"
    assert store.load().unplanned == [("kept", 1)]
    store.close()


# --- who may not train ----------------------------------------------------------------------------------------------


async def exclusions(client: Client, *node_ids: int) -> dict[int, str]:
    answer = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=node_ids))
    return {each.node_id: each.reason for each in answer.exclusions}


async def test_a_lookup_names_drained_and_excluded_devices(config: CoordinatorSettings, tmp_path: Path) -> None:
    site = config.with_values(site=rack_and_roof(tmp_path), selection={"exclude": ["tag:attic", "site:roof"]})
    async with serving_client(site) as client:
        orin, _ = await client.two_ready()
        nodes = (ORIN_NODE, NANO_NODE, STRANGER)
        assert await exclusions(client, *nodes) == {NANO_NODE: "excluded: matches site:roof"}
        await client.operator.DrainDevices(operator_pb2.DrainDevicesRequest(device_ids=["orin"]))
        # Its connection state does not matter.
        await orin.goodbye()
        assert (await exclusions(client, *nodes))[ORIN_NODE] == "drained by the operator"
        assert await exclusions(client, ORIN_NODE) == {ORIN_NODE: "drained by the operator"}
        binding = planning_pb2.NodeBinding(node_id=STRANGER, device_id="orin")
        bound = await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=[binding]))
        assert [(each.node_id, each.reason) for each in bound.exclusions] == [(STRANGER, "drained by the operator")]


# --- with PowerAware ------------------------------------------------------------------------------------------------


class Link:
    """A coordinator's stub that can be cut off."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = planning_pb2_grpc.PlanningServiceStub(self._channel)
        self.is_cut = False

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(request: Any, **options: Any) -> Any:
            if self.is_cut:
                raise StatusError(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")
            return getattr(self._stub, method)(request, **options)

        return call

    def close(self) -> None:
        self._channel.close()


async def test_a_run_through_an_outage_is_shown_whole(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        loop = asyncio.get_running_loop()
        await client.operator.DrainDevices(operator_pb2.DrainDevicesRequest(device_ids=["nano"]))
        link = Link(client.bound.address)
        grid = GridOfNodes({ORIN_NODE: Node("orin"), NANO_NODE: Node("nano")})
        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1),
            link,
            clock=grid.clock,
            on_coordinator_away="unplanned",
            survey_s=None,
            measures_left_out=False,
        )

        def evaluated(number: int, arrays: Any) -> MetricRecord:
            asyncio.run_coroutine_threadsafe(client.end_trainings(), loop).result(20)
            link.is_cut = number in (1, 2)
            return MetricRecord({"accuracy": 0.1 * number})

        await asyncio.to_thread(strategy.start, grid, ARRAYS, num_rounds=4, evaluate_fn=evaluated)
        link.close()
        seen = await client.rounds()
        assert [(view.round, view.unplanned, view.device_count) for view in seen.rounds] == [
            (1, False, 1),
            (2, True, 1),
            (3, True, 1),
            (4, False, 1),
        ]
        assert [view.metrics["accuracy"] for view in seen.rounds] == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert {each.device_id for view in seen.rounds for each in view.results} == {"orin"}
        assert seen.run.finished and not seen.run.error
