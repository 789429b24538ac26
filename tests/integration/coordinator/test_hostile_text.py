"""Hostile text from devices, apps and operators: in the terminal, in tables, in the log and in the web page."""

from __future__ import annotations

import asyncio
import csv
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client, asked, served_with_shell, serving
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import operator_pb2, planning_pb2, power_pb2, session_pb2

# --- Hostile text -----------------------------------------------------------------------------------------------------
# Hostile text from devices, apps and operators in the operator's terminal, in tables and in the coordinator's log.


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


# --- Page hostile text ------------------------------------------------------------------------------------------------
# Hostile text from devices, apps, operators and addresses in the web page's markup.

_ELEMENT = "hostile"
_WITHIN_S = 20.0


def markup(name: str) -> str:
    """A text that becomes an element wherever it is not escaped: in text, and in an attribute with either quote."""
    return f"{name}\"'><{_ELEMENT}/>&lt;"


_ORIN, _NANO, _RUN = markup("orin"), markup("nano"), markup("run")


class _Page(HTMLParser):
    """A page as a browser parses it: its elements, and all its text and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.texts += [value for _, value in attrs if value]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


async def a_hostile_round(client: Client) -> None:
    """A round and a failed run in which every text that a peer can set is markup."""
    for name, front, detail in ((_ORIN, ORIN_FRONT, "detail"), (_NANO, NANO_FRONT, "idle")):
        agent = client.agent()
        await agent.hello(name, kind=markup("board"))
        await agent.lease()
        point = power_pb2.FrontPoint(mode=front_to_message(front).points[0].mode, epoch_s=50, power_w=30)
        presets = [power_pb2.PresetPoint(name=markup("preset"), point=point)]
        workload = power_pb2.Workload(name=markup("workload"))
        await agent.send(
            front=session_pb2.FrontReport(
                front=front_to_message(front), idle_w=4.0, presets=presets, workload=workload, profiled_modes=50
            )
        )
        ready = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, profiled_modes=50, detail=markup(detail))
        await agent.send(state=ready)
    await client.operator.TagDevices(operator_pb2.TagDevicesRequest(device_ids=[_ORIN], add=[markup("tag")]))
    nodes = [
        planning_pb2.NodeBinding(node_id=ORIN_NODE, device_id=_ORIN),
        planning_pb2.NodeBinding(node_id=NANO_NODE, device_id=_NANO),
    ]
    await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=nodes))
    workload = power_pb2.Workload(name=markup("workload"))
    start = planning_pb2.StartRunRequest(
        run_id=_RUN,
        strategy=markup("strategy"),
        rounds=3,
        workload=workload,
        name=markup("name"),
        labels={markup("key"): markup("label")},
    )
    await client.planning.StartRun(start)
    request = planning_pb2.PlanRoundRequest(run_id=_RUN, round=1, node_ids=NODES, epochs=1.0)
    plan = await client.planning.PlanRound(request)
    await client.end_trainings()
    results = [
        planning_pb2.DeviceResult(device_id=each.device_id, failure=markup("failure"), share=0.0)
        for each in plan.assignments
    ]
    await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=1, results=results))
    metrics = planning_pb2.ReportMetricsRequest(run_id=_RUN, round=1, metrics={markup("metric"): 1.5})
    await client.planning.ReportMetrics(metrics)
    await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=_RUN, error=markup("error")))


async def test_no_text_of_a_peer_becomes_an_element_of_a_page(config: CoordinatorSettings) -> None:
    asked = quote(markup("asked"))
    shown = {
        "/": ("orin", "nano", "board", "tag", "detail"),
        f"/?text={asked}&state={asked}&supply={asked}&tag={asked}&order={asked}": ("asked",),
        "/runs": ("name", "key", "label", "strategy", "workload", "error"),
        f"/runs?label={asked}&state={asked}": ("asked",),
        f"/runs/{quote(_RUN)}": ("run", "name", "label", "orin", "failure", "metric", "error"),
        f"/devices/{quote(_ORIN)}": ("orin", "board", "tag", "detail", "name", "workload", "preset"),
        f"/what-if?budget:site={asked}&policy={asked}&clients={asked}&deadline_s={asked}": ("asked",),
        "/what-if?budget:site=60": ("orin",),
        f"/energy?by={asked}&month={asked}": ("asked",),
        "/events": ("orin", "name", "error", "strategy"),
        f"/events?kind={asked}&device={asked}&run={asked}&supply={asked}": ("asked",),
    }
    async with serving(config) as client:
        await a_hostile_round(client)
        for path, names in shown.items():
            missing = list(names)
            async with asyncio.timeout(_WITHIN_S):  # a page may be a second behind the fleet
                while missing:
                    url = f"http://{client.bound.http_address}{path}"
                    with await asyncio.to_thread(urlopen, url, timeout=_WITHIN_S) as answer:
                        page = _Page(answer.read().decode())
                    assert _ELEMENT not in page.elements, path
                    missing = [name for name in names if not any(markup(name) in text for text in page.texts)]
                    await asyncio.sleep(0.1)
