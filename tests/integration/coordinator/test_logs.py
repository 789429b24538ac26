"""The coordinator's log: entries about devices, runs and rounds, whose lines they are, and lines in JSON."""

from __future__ import annotations

import http.server
import json
import logging
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.polling import until
from tests.fakes.real_processes import CoordinatorProcess
from tests.fakes.served import serving_client
from tests.fakes.small_fleet import RUN, RUN_NAME
from wattfleet.common.addresses import split_address
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, session_pb2

# --- Event log --------------------------------------------------------------------------------------------------------
# The coordinator's log entries about devices, runs and rounds.


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


# --- Json log ---------------------------------------------------------------------------------------------------------
# The lines of a coordinator's log: whose they are, and that every one is an object with `--log-format json`.

JSON = ("--http-address", "127.0.0.1:0", "--log-format", "json")
OPTIONS = ("--site-budget-w", "50", *JSON)


class Meter(http.server.BaseHTTPRequestHandler):
    """Answers queries as Prometheus does."""

    asked = 0

    def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
        Meter.asked += 1
        series = {"metric": {"__name__": "surplus_watts"}, "value": [time.time(), "80"]}
        body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": [series]}}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def meter() -> Iterator[str]:
    """The URL of a Prometheus that knows `surplus_watts`."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Meter) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_libraries_log_no_routine_and_their_warnings_are_objects(meter: str, tmp_path: Path) -> None:
    query = f'{{ query = "surplus_watts", url = "{meter}", every_s = 1, max_age_s = 60, fallback_w = 60 }}'
    (tmp_path / "site.toml").write_text(f"[supplies.site]\nbudget = {query}\n")
    process = CoordinatorProcess(
        tmp_path, tmp_path / "coordinator.db", "--site-file", str(tmp_path / "site.toml"), *JSON
    )
    await process.start()
    try:
        until(lambda: Meter.asked >= 2)
        address = process.addresses["http_address"]
        with urllib.request.urlopen(f"http://{address}/", timeout=30) as page:
            assert page.status == 200
        with socket.create_connection(split_address(address)) as strange:
            strange.sendall(b"no HTTP\r\n\r\n")
            assert strange.recv(12) == b"HTTP/1.1 400"
    finally:
        assert process.stop() == 0
    lines = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert [each for each in lines if each["message"].startswith(f"coordinator serves {process.address}")]
    of_others = [each for each in lines if not each["logger"].startswith(("coordinator.", "wattfleet."))]
    assert [(each["logger"], each["level"]) for each in of_others] == [("uvicorn.error", "warning")]


async def test_what_ends_a_coordinator_is_an_object(tmp_path: Path) -> None:
    first = CoordinatorProcess(tmp_path, tmp_path / "coordinator.db", *OPTIONS)
    await first.start()
    second_folder = tmp_path / "second"
    second_folder.mkdir()
    second = CoordinatorProcess(second_folder, second_folder / "coordinator.db", *OPTIONS)
    second.address = first.address
    try:
        second.begin()
        with pytest.raises(AssertionError):  # the process has ended
            until(lambda: second.serves)
    finally:
        first.stop()
    lines = [json.loads(line) for line in second.log.read_text().splitlines()]
    assert lines[-1]["level"] == "error" and first.address.split(":")[1] in lines[-1]["message"]
