"""Hostile text from devices, apps and operators in the operator's terminal, in tables and in the coordinator's log."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client
from tests.fakes.shell import asked, served_with_shell
from tests.fakes.small_fleet import RUN
from wattfleet_proto.v1 import planning_pb2, session_pb2

ESCAPES = "\x1b[2J\x1b]0;title\x07\x1b]52;c;ZXZpbA==\x07\x9b31m\u202ereversed"
FORMULA = '=HYPERLINK("http://evil")'


async def a_hostile_run(client: Client, orin: Any, text: str) -> None:
    """A round and a run in which every text that a peer can set is `text`."""
    plan = await client.plan(1)
    await client.end_trainings()
    await orin.send(
        state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail=f"{text} detail")
    )
    results = [planning_pb2.DeviceResult(device_id="nano", failure=f"{text} failure", share=0.0)]
    await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=1, results=results))
    name = text if text.isprintable() else "metric"  # others are refused
    metrics = planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics={name: -1.5})
    await client.planning.ReportMetrics(metrics)
    await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error=f"{text} error"))


async def test_no_control_character_of_a_peer_reaches_the_terminal(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_hostile_run(client, orin, ESCAPES)
        for arguments in (("devices",), ("device", "orin"), ("rounds",), ("plan", "--dry-run"), ("budget", "show")):
            shown = (await shell(*arguments, columns=200)).stdout
            assert all(line.isprintable() for line in shown.splitlines()), arguments
        assert "detail" in (await shell("devices", columns=200)).stdout
        assert "error" in (await shell("rounds", columns=200)).stdout
        details = [each["detail"] for each in await asked(shell, "devices")]
        assert f"{ESCAPES} detail" in details, "JSON escapes the characters and loses none"


@pytest.mark.parametrize("text", [FORMULA, "+1+2", "-1+2", "@SUM(A1)", "\t=1", "\r=1"])
async def test_no_cell_of_a_csv_table_is_a_formula(config: CoordinatorSettings, tmp_path: Path, text: str) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_hostile_run(client, orin, text)
        await shell("export", "--out", str(tmp_path), "--format", "csv")
    cells: dict[str, list[dict[str, str]]] = {}
    for path in tmp_path.glob("*.csv"):
        with path.open(newline="") as file:
            cells[path.stem] = list(csv.DictReader(file))
    texts = [
        cells["devices"][1]["detail"],
        cells["results"][0]["failure"],
        cells["runs"][0]["error"],
    ]
    texts += [cells["metrics"][0]["metric"]] if text.isprintable() else []
    assert all(cell.startswith("'") and text.strip() in cell for cell in texts)
    assert cells["metrics"][0]["value"] == "-1.5", "a negative number stays a number"


async def test_a_csv_table_has_no_escapes(config: CoordinatorSettings, tmp_path: Path) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_hostile_run(client, orin, ESCAPES)
        await shell("export", "--out", str(tmp_path), "--format", "csv")
    for path in tmp_path.glob("*.csv"):
        assert all(line.isprintable() for line in path.read_text().splitlines()), path.name
