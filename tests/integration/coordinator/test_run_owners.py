"""A run belongs to the app that started it, before and after a restart of the coordinator."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from coordinator.state.records import RunRecord
from coordinator.store.store import Store
from tests.fakes.served import Client, serving_client, status
from tests.fakes.small_fleet import NODES
from wattfleet_proto.v1 import planning_pb2

OWNED, TOKEN = "owned", "a secret of one app"
PLAN_ID = f"{OWNED}/1"


def started(token: str, run_id: str = OWNED) -> planning_pb2.StartRunRequest:
    return planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3, run_token=token)


def changes(token: str, run_id: str = OWNED) -> list[tuple[str, Any]]:
    """Every request that changes a run."""
    return [
        ("StartRun", started(token, run_id)),
        (
            "PlanRound",
            planning_pb2.PlanRoundRequest(run_id=run_id, round=2, node_ids=NODES, epochs=1.0, run_token=token),
        ),
        ("FinishRound", planning_pb2.FinishRoundRequest(plan_id=f"{run_id}/1", wall_s=1.0, run_token=token)),
        ("ReportUnplannedRound", planning_pb2.ReportUnplannedRoundRequest(run_id=run_id, round=3, run_token=token)),
        (
            "ReportMetrics",
            planning_pb2.ReportMetricsRequest(run_id=run_id, round=1, metrics={"accuracy": 1.0}, run_token=token),
        ),
        ("FinishRun", planning_pb2.FinishRunRequest(run_id=run_id, error="ended by a stranger", run_token=token)),
    ]


async def assert_others_are_refused(client: Client) -> None:
    for token in ("", "another secret"):
        for method, request in changes(token):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(client.planning, method)(request)
            assert status(refused) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "run 'owned' was started by another app: only that app can plan, report and finish its rounds;"
                " start a run of your own",
            ), method


async def test_another_app_cannot_plan_report_end_or_restart_a_run(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.two_ready()
        await client.planning.StartRun(started(TOKEN))
        first = planning_pb2.PlanRoundRequest(run_id=OWNED, round=1, node_ids=NODES, epochs=1.0, run_token=TOKEN)
        plan = await client.planning.PlanRound(first)
        await assert_others_are_refused(client)
    async with serving_client(config) as client:
        await assert_others_are_refused(client)
        seen = await client.rounds(OWNED)
        assert (seen.run.finished, [view.plan.plan_id for view in seen.rounds]) == (False, [plan.plan_id])
        assert not seen.rounds[0].HasField("wall_s") and not seen.rounds[0].metrics
        for method, request in changes(TOKEN):
            if method != "PlanRound":  # no device is connected
                await getattr(client.planning, method)(request)
        seen = await client.rounds(OWNED)
        assert (seen.run.finished, seen.rounds[0].wall_s, dict(seen.rounds[0].metrics)) == (True, 1.0, {"accuracy": 1})
        await assert_others_are_refused(client)


async def test_the_store_has_no_token_in_it(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.planning.StartRun(started(TOKEN))
    [path] = [config.store.location]
    with sqlite3.connect(path) as connection:
        assert TOKEN not in "\n".join(connection.iterdump())
    connection.close()


async def test_a_start_that_is_repeated_keeps_what_was_reported(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        await client.planning.StartRun(started(TOKEN))
        reported = planning_pb2.ReportMetricsRequest(run_id=OWNED, metrics={"accuracy": 0.1}, run_token=TOKEN)
        await client.planning.ReportMetrics(reported)
        await client.planning.StartRun(started(TOKEN))
        assert dict((await client.rounds(OWNED)).run.initial_metrics) == {"accuracy": 0.1}


async def test_a_run_of_an_older_version_goes_on_with_any_token(config: CoordinatorSettings) -> None:

    store = Store(Path(config.store.location))
    store.save(RunRecord("old", "FedAvg", 3))
    store.close()
    async with serving_client(config) as client:
        for token in ("", TOKEN, "another secret"):
            reported = planning_pb2.ReportMetricsRequest(run_id="old", metrics={token: 0.1}, run_token=token)
            reported.metrics.clear()
            await client.planning.ReportMetrics(reported)
            await client.planning.StartRun(started(token, "old"))
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id="old"))
        assert (await client.rounds("old")).run.finished


async def test_a_token_that_is_too_long_is_refused(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.planning.StartRun(started("x" * 201))
        code, details = status(refused)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details == "a run's token must have at most 200 characters, not 201"


async def test_so_many_runs_go_on_at_once(config: CoordinatorSettings) -> None:
    def start(run_id: str) -> planning_pb2.StartRunRequest:
        return planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3)

    async with serving_client(config.with_values(rounds={"max_live_runs": 2})) as client:
        for run_id in ("1", "2", "1"):  # the third one continues the first
            await client.planning.StartRun(start(run_id))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await client.planning.StartRun(start("3"))
        assert status(refused) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "2 runs have not ended, which is the limit: end some with `wattfleet coordinator delete RUN --end`, or"
            " raise the coordinator's setting rounds.max_live_runs",
        )
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id="2"))
        await client.planning.StartRun(start("3"))
