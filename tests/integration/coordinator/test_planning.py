"""The planning service: owners of runs, devices that report impossible values, and rounds without a plan."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import time
import urllib.request
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from coordinator.settings import CoordinatorSettings
from coordinator.state.records import DeviceResult, RunRecord, UnplannedRound
from coordinator.store import checksums
from coordinator.store.store import Store
from tests.fakes.flower_in_process import ARRAYS, GridOfNodes, Node, StatusError
from tests.fakes.served import (
    READY,
    Agent,
    Client,
    a_round,
    asked,
    rack_and_roof,
    served_with_shell,
    serving_client,
    status,
)
from tests.fakes.short_forms import first
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_NODE, RUN
from tests.fakes.stored_records import old_runs_deleted
from wattfleet.flower import PowerAware
from wattfleet_proto.v1 import operator_pb2, planning_pb2, planning_pb2_grpc, power_pb2, session_pb2, view_pb2

# --- Run owners -------------------------------------------------------------------------------------------------------
# A run belongs to the app that started it, before and after a restart of the coordinator.


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


# --- Implausible reports ----------------------------------------------------------------------------------------------
# A device that reports impossible values is left out, and all others are planned.

LIAR_NODE = 77
POLICIES = ("fastest-k", "all", "random", "deadline", "tiers", "oort", "fair", "progress")


def one_point(**values: float) -> power_pb2.Front:
    """A front of one mode that differs from an ordinary one in the given values."""
    mode = power_pb2.PowerMode(cores=4, cpu_khz=1_500_000, gpu_hz=600_000_000, mem_hz=2_133_000_000)
    return power_pb2.Front(points=[power_pb2.FrontPoint(mode=mode, **{"epoch_s": 20.0, "power_w": 30.0, **values})])


IMPLAUSIBLE = {
    "uncertain time": (one_point(epoch_log_sd=800.0), 5.0),
    "uncertain watts": (one_point(power_log_sd=2.1), 5.0),
    "5e-324 s": (one_point(epoch_s=5e-324), 5.0),
    "1e-200 s": (one_point(epoch_s=1e-200), 5.0),
    "1e300 s": (one_point(epoch_s=1e300), 5.0),
    "warm-up of 1e8 s": (one_point(warmup_s=1e8), 5.0),
    "1e200 W": (one_point(power_w=1e200), 5.0),
    "900 W": (one_point(power_w=900.0), 5.0),
    "idles at 999 W": (one_point(), 999.0),
    "idles at 1e300 W": (one_point(), 1e300),
}


def with_policy(config: CoordinatorSettings, policy: str) -> CoordinatorSettings:
    return config.with_values(policy={"name": policy, "deadline_s": 100.0 if policy == "deadline" else None})


async def with_liar(client: Client, front: power_pb2.Front, idle_w: float) -> Agent:
    """Two honest devices, and one that reports this front."""
    await client.two_ready()
    return await lie(client, front, idle_w)


async def lie(
    client: Client, front: power_pb2.Front, idle_w: float, device_id: str = "liar", node_id: int = LIAR_NODE
) -> Agent:
    """A new device that reports this front."""
    liar = client.agent()
    await liar.hello(device_id)
    await liar.send(front=session_pb2.FrontReport(front=front, idle_w=idle_w, minibatches_per_epoch=100))
    await liar.send(state=READY)
    binding = planning_pb2.NodeBinding(node_id=node_id, device_id=device_id)
    await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=[binding]))
    return liar


async def plan(client: Client, run_id: str = RUN, liar_node: int = LIAR_NODE) -> planning_pb2.PlanRoundResponse:
    request = planning_pb2.PlanRoundRequest(run_id=run_id, round=1, node_ids=[*NODES, liar_node], epochs=1.0)
    found: planning_pb2.PlanRoundResponse = await client.planning.PlanRound(request)
    return found


def assert_usable(made: planning_pb2.PlanRoundResponse) -> None:
    """Check that the plan selects honest devices only, and that all its numbers are finite."""
    chosen = {each.device_id for each in made.assignments}
    assert chosen and chosen <= {"orin", "nano"}
    assert 0 < made.duration_s <= 60.0 and 0 < made.planned_w <= made.site_budget_w
    for each in made.assignments:
        assert all(map(math.isfinite, (each.epoch_s, each.power_w, each.power_limit_w, each.warmup_s)))


@pytest.mark.parametrize("policy", first(3, POLICIES))
async def test_an_implausible_front_leaves_out_its_device_only(config: CoordinatorSettings, policy: str) -> None:
    async with serving_client(with_policy(config, policy)) as client:
        liar = await with_liar(client, one_point(), 5.0)
        for case, (front, idle_w) in IMPLAUSIBLE.items():
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=case, strategy="FedAvg", rounds=3))
            await liar.send(front=session_pb2.FrontReport(front=front, idle_w=idle_w, minibatches_per_epoch=100))
            assert_usable(await plan(client, case))
            shown = (await client.devices())["liar"]
            assert shown.state == session_pb2.DEVICE_STATE_READY, "its session lasts"
            assert "no device can have" in shown.left_out or "more than" in shown.left_out
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=case))
            await client.end_trainings()


async def test_a_newcomer_with_an_implausible_front_is_shown(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        for number, (front, idle_w) in enumerate(IMPLAUSIBLE.values()):
            run_id, liar, node_id = f"run {number}", f"liar {number}", LIAR_NODE + number
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3))
            await lie(client, front, idle_w, device_id=liar, node_id=node_id)
            assert_usable(await plan(client, run_id, node_id))
            assert (await client.devices())[liar].left_out
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))
            await client.end_trainings()


async def test_a_plausible_front_ends_the_exclusion(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        liar = await with_liar(client, one_point(epoch_s=1e-200), 5.0)
        assert (await client.devices())["liar"].left_out
        await liar.send(front=session_pb2.FrontReport(front=one_point(), idle_w=5.0, minibatches_per_epoch=100))
        assert not (await client.devices())["liar"].left_out
        assert "liar" in {each.device_id for each in (await plan(client)).assignments}


async def test_a_device_with_an_older_front_is_left_out_with_the_reason(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        liar = await with_liar(client, one_point(), 5.0)
        await liar.send(
            front=session_pb2.FrontReport(front=one_point(epoch_s=1e-200), idle_w=5.0, minibatches_per_epoch=100)
        )
        made = await plan(client)
        assert_usable(made)
        [reason] = [each.reason for each in made.decisions if each.device_id == "liar"]
        assert reason.startswith("left out: ") and "1e-06" in reason


async def test_the_agent_is_told_why_its_front_is_refused(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        agent = client.agent()
        await agent.hello("liar")
        await agent.send(front=session_pb2.FrontReport(front=one_point(), idle_w=999.0, minibatches_per_epoch=100))
        assert "999 W as its idle power" in agent.refusals[-1]
        await agent.send(front=session_pb2.FrontReport(front=one_point(), idle_w=5.0, minibatches_per_epoch=100))
        assert len(agent.refusals) == 1


@pytest.mark.parametrize("values", [(1e-200, 30.0), (1e200, 30.0), (20.0, 1e200), (20.0, 999.0), (math.nan, 1.0)])
async def test_an_implausible_observation_is_dropped(config: CoordinatorSettings, values: tuple[float, float]) -> None:
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        made = await client.plan()
        bad = session_pb2.Observation(plan_id=made.plan_id, epoch_s=values[0], power_w=values[1])
        await orin.send(observation=bad)
        good = session_pb2.Observation(plan_id=made.plan_id, epoch_s=36.0, power_w=14.5)
        await nano.send(observation=good)
        [shown] = (await client.rounds()).rounds
        assert [each.device_id for each in shown.observations] == ["nano"]
        assert "observed" in orin.refusals[-1]


IMPLAUSIBLE_RESULTS = (
    (1e200, 1e200),
    (1e200, 100.0),
    (-1e300, 100.0),
    (1.0, 1e300),
    (math.nan, 100.0),
    (1.0, -math.inf),
)
"""Pairs of a loss and a number of examples."""


@pytest.mark.parametrize("policy", first(3, POLICIES))
async def test_an_implausible_result_counts_as_not_reported(config: CoordinatorSettings, policy: str) -> None:
    async with serving_client(with_policy(config, policy)) as client:
        await client.two_ready()
        for loss, num_examples in IMPLAUSIBLE_RESULTS:
            run_id = f"loss {loss}, {num_examples} examples"
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3))
            for number in range(1, 4):
                made = await client.plan(number, run_id)
                assert math.isfinite(made.duration_s) and made.assignments
                results = [
                    planning_pb2.DeviceResult(device_id=each.device_id, share=1.0, loss=2.0, num_examples=100.0)
                    for each in made.assignments
                ]
                results[0].loss, results[0].num_examples = loss, num_examples
                finish = planning_pb2.FinishRoundRequest(plan_id=made.plan_id, results=results, wall_s=40.0)
                await client.planning.FinishRound(finish)
                await client.end_trainings()
            first = (await client.rounds(run_id)).rounds[0].results[0]
            assert not first.HasField("loss") or abs(first.loss) <= 1e9
            assert not first.HasField("num_examples") or 0 <= first.num_examples <= 1e9
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))


async def test_a_stored_front_that_is_not_plausible_does_not_end_the_start(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
    with closing(sqlite3.connect(config.store.location)) as store, store:
        checksums.prepare(store)
        points = np.array([[4, 1.5e6, 6e8, 2.1e9, 20.0, 30.0, 800.0, 0.0, 0.0]], dtype="<f8")
        store.execute("UPDATE workload_front SET points = ? WHERE device_id = 'orin'", (points.tobytes(),))
    async with serving_client(config) as client:
        shown = await client.devices()
        assert not shown["orin"].HasField("front") and shown["nano"].HasField("front")


# --- Unplanned rounds -------------------------------------------------------------------------------------------------
# Rounds trained without a plan during an outage: reported later, and shown; and devices that may not train.

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
        assert (second.devices, second.wall_s, list(second.failed)) == (3, 45.0, ["nano"])
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
    with urllib.request.urlopen(f"http://{client.bound.http_address}/metrics", timeout=20) as answer:
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
            workload="unnamed",
        )

        def evaluated(number: int, arrays: Any) -> MetricRecord:
            asyncio.run_coroutine_threadsafe(client.end_trainings(), loop).result(20)
            link.is_cut = number in (1, 2)
            return MetricRecord({"accuracy": 0.1 * number})

        await asyncio.to_thread(strategy.start, grid, ARRAYS, num_rounds=4, evaluate_fn=evaluated)
        link.close()
        seen = await client.rounds()
        assert [(view.round, view.unplanned, view.devices) for view in seen.rounds] == [
            (1, False, 1),
            (2, True, 1),
            (3, True, 1),
            (4, False, 1),
        ]
        assert [view.metrics["accuracy"] for view in seen.rounds] == pytest.approx([0.1, 0.2, 0.3, 0.4])
        assert {each.device_id for view in seen.rounds for each in view.results} == {"orin"}
        assert seen.run.finished and not seen.run.error
