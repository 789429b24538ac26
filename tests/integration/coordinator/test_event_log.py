"""The coordinator's log entries about devices, runs and rounds."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import serving_client
from tests.fakes.small_fleet import RUN, RUN_NAME
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, session_pb2

LOGGER = "coordinator.services.event_log"


def fields_of(caplog: pytest.LogCaptureFixture, beginning: str) -> list[dict[str, Any]]:
    return [
        record.wattfleet_fields  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == LOGGER and record.getMessage().startswith(beginning)
    ]


async def test_the_log_tells_of_each_state_of_a_device_and_each_round(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="coordinator")
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        for detail in ("mode 1 of 2", "mode 2 of 2"):
            state = session_pb2.DEVICE_STATE_PROFILING
            await nano.send(state=session_pb2.StateReport(state=state, profiled_modes=7, detail=detail))
        await nano.send(state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, profiled_modes=8))
        plan = await client.plan(1)
        await nano.obey(GrantPhase.OVER)
        await orin.obey(GrantPhase.OVER)
        results = [
            planning_pb2.DeviceResult(device_id="orin", num_examples=96, loss=0.125, share=1.0),
            planning_pb2.DeviceResult(device_id="nano", failure="out of memory"),
        ]
        finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=41.5, results=results)
        for _ in range(2):  # Flower's server repeats requests that were not answered in time
            await client.planning.FinishRound(finish)
        await nano.goodbye()
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="the app crashed"))
        await client.planning.StartRun(
            planning_pb2.StartRunRequest(run_id="other", name="other", strategy="FedAvg", rounds=3)
        )
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id="other", error="stopped by SIGTERM"))
    states = [each["state"] for each in fields_of(caplog, "nano ")]
    assert states == ["enrolled", "ready", "profiling", "ready", "offline"], "progress is no line at this level"
    [planned] = fields_of(caplog, f"round 1 of run {RUN_NAME} is planned: 2 devices of 2")
    assert (planned["run"], planned["round"], planned["devices"]) == (RUN, 1, 2)
    [finished] = fields_of(caplog, f"round 1 of run {RUN_NAME} is finished: 1 of 2 devices trained, 41.5 s")
    assert (finished["failed"], finished["wall_s"]) == (["nano"], 41.5)
    assert fields_of(caplog, f"run {RUN_NAME} ({RUN}) ended with an error: the app crashed")
    assert fields_of(caplog, "run other was stopped by SIGTERM")


async def test_a_round_that_cannot_be_planned_is_told_once_however_often_flower_asks(
    config: CoordinatorSettings, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        await client.planning.StartRun(
            planning_pb2.StartRunRequest(run_id="7", strategy="FedAvg", rounds=3, name="tiny")
        )
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await client.planning.PlanRound(
                    planning_pb2.PlanRoundRequest(run_id="7", round=1, node_ids=[99], epochs=1.0)
                )
    assert len(fields_of(caplog, "round 1 of run tiny cannot be planned")) == 1
