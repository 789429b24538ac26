"""Runs the pages' commands: for a single device, and for operators on one coordinator."""

from __future__ import annotations

import asyncio
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.documented_commands import ROOT, Block, blocks_of, run_block, run_call
from tests.fakes.duties import duty_agent_at
from tests.fakes.faked_jetson import ORIN_NANO, FakedJetson, conf_text
from tests.fakes.served import READY, Agent, Client, serving
from tests.fakes.small_fleet import NANO_FRONT, ORIN_FRONT
from wattfleet.core.prediction import Artefact, write_artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2

# --- Board commands ---------------------------------------------------------------------------------------------------
# Runs the pages' commands for a single device.


BOARD = "simulated:orin-nano"
_PROFILE = ["agent", "profile", "--modes", "12", "--name"]
_INFERENCE = "cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n4,1000000,500000000,2000000000,8,41.5,9000\n"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Options for a simulated board whose modes were measured for one workload."""
    added = {"--device": BOARD, "--state-dir": tmp_path_factory.mktemp("board"), "--device-id": "jetson-1"}
    printed, code = run_call([*_PROFILE, "acme/digits"], added)
    assert code == 0, printed
    return added


@pytest.mark.parametrize("block", blocks_of("board"), ids=str)
def test_commands_on_a_board_print_what_the_page_shows(block: Block, board: dict[str, object]) -> None:
    run_block(block, board)


def test_commands_on_a_board_with_two_workloads(board: dict[str, object], tmp_path: Path) -> None:
    added = {**board, "--state-dir": shutil.copytree(str(board["--state-dir"]), tmp_path / "state")}
    assert run_call([*_PROFILE[:2], "--modes", "3", "--name", "other"], added)[1] == 0
    for block in blocks_of("board with two workloads"):
        run_block(block, added)


@pytest.mark.parametrize("block", blocks_of("imitated board"), ids=str)
def test_commands_on_an_imitated_board(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    jetson = FakedJetson(tmp_path / "root", ORIN_NANO)
    jetson.put("/etc/nvpmodel.conf", conf_text(jetson))
    state, socket = tmp_path / "state", tmp_path / "agent.sock"
    run_block(block, {"--device": f"sysfs:{jetson.location('/')}", "--state-dir": state, "--socket": socket})


@pytest.mark.parametrize("block", blocks_of("this machine"), ids=str)
def test_commands_on_this_machine(block: Block, tmp_path: Path) -> None:
    run_block(block, {"--state-dir": tmp_path / "state", "--socket": tmp_path / "agent.sock"})


def test_commands_about_a_duty(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short_folder)
    (short_folder / "inference.csv").write_text(_INFERENCE)
    with duty_agent_at(short_folder / "agent.sock") as agent:
        for block in blocks_of("duty"):
            run_block(block, {"--socket": agent.socket})


# --- Fleet commands ---------------------------------------------------------------------------------------------------
# Runs the pages' commands for operators on one coordinator.

_PAGE = (ROOT / "docs/coordinator.md").read_text()
_WORKLOAD = "digits"
_NODES = {"orin-0": 10, "orin-1": 11, "nano-0": 12, "nx-0": 13}
_ENDS = re.compile("coordinator (forget|reference)")
_SITE = """
[supplies.site]
budget = { watts = 120.0 }
[supplies.rack]
parent = "site"
budget = { watts = 80.0 }
devices = ["orin*"]
[supplies.roof]
parent = "site"
budget = { query = "watts", url = "http://127.0.0.1:9", fallback_w = 25.0 }
devices = ["n*"]
[devices.nano-0]
limit_w = 12.0
tags = ["lab"]
"""


def run_of_the_page() -> tuple[str, str]:
    """The id and the name of the run in the page's output, which is recorded again from time to time."""
    found = re.search(r"^run (\S+) \((\S+)\): FedAvg", _PAGE, re.MULTILINE)
    assert found is not None
    return found[2], found[1]


async def in_its_third_round(client: Client) -> dict[str, Agent]:
    """Four devices, and a run whose third round is in progress."""
    agents = {name: client.agent() for name in _NODES}
    for name, agent in agents.items():
        front, idle_w = (ORIN_FRONT, 5.0) if name.startswith("orin") else (NANO_FRONT, 3.0)
        await agent.hello(name)
        await agent.lease()
        points = front_to_message(front)
        for point in points.points:
            point.batch = 16
        workload = power_pb2.Workload(name=_WORKLOAD, batch=16)
        report = session_pb2.FrontReport(front=points, idle_w=idle_w, workload=workload, profiled_modes=50)
        await agent.send(front=report)
        await agent.send(state=READY)
    bindings = [planning_pb2.NodeBinding(node_id=number, device_id=name) for name, number in _NODES.items()]
    await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
    run, name = run_of_the_page()
    start = planning_pb2.StartRunRequest(
        run_id=run, strategy="FedAvg", rounds=3, workload={"name": _WORKLOAD}, name=name
    )
    await client.planning.StartRun(start)
    for number in range(1, 4):
        ask = planning_pb2.PlanRoundRequest(run_id=run, round=number, node_ids=list(_NODES.values()), epochs=1.0)
        plan = await client.planning.PlanRound(ask)
        if number == 3:
            break
        for assignment in plan.assignments:
            seen = session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.0, power_w=30.0)
            await agents[assignment.device_id].send(observation=seen)
        await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=40.0))
        await client.end_trainings()
        metrics = {"accuracy": 0.5, "loss": 1.5}
        await client.planning.ReportMetrics(
            planning_pb2.ReportMetricsRequest(run_id=run, round=number, metrics=metrics)
        )
    return agents


def of_this_fleet(block: Block, reference: Artefact) -> Block:
    """The block with the digest of this fleet's reference in its commands."""
    lines = [
        re.sub(r"\b[0-9a-f]{12}\b", reference.digest[:12], line) if line.startswith("$ ") else line
        for line in block.lines
    ]
    return replace(block, lines=lines)


@pytest.mark.timeout(300)
async def test_commands_of_an_operator(
    config: CoordinatorSettings, another: Artefact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_artefact(another, tmp_path / "second-reference")
    (tmp_path / "site.toml").write_text(_SITE)
    site = {"budget_w": None, "file": tmp_path / "site.toml"}
    # The agents here do not renew their leases by themselves.
    monkeypatch.setattr("coordinator.state.leases.MISSED_LEASES", 1000)
    async with serving(config.with_values(site=site)) as client:
        agents = await in_its_third_round(client)
        # Commands that end a run or a session come last.
        for block in sorted(blocks_of("fleet"), key=lambda block: bool(_ENDS.search(block.text))):
            if "plan --dry-run" in block.text:
                await client.end_trainings()
            if "coordinator forget" in block.text:
                await agents["nano-0"].goodbye()
                await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_of_the_page()[0]))
            shown = of_this_fleet(block, another)
            await asyncio.to_thread(run_block, shown, {"--coordinator": client.bound.address})
