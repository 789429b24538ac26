"""Every table of the operator's commands with long names, in terminals of 80 and 60 columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client
from tests.fakes.shell import served_with_shell
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2

ORIN, NANO = "jetson-agx-orin-developer-kit-in-rack-12", "jetson-orin-nano-super-on-the-laboratory-desk"
RUN = "10442098795564059557"
WORKLOAD = "wattfleet/quickstart-sklearn #d276a4d4"
SUPPLY = "circuit-breaker-17-of-the-laboratory"
SITE = f"""
[supplies.site]
budget = {{ watts = 100.0 }}
[supplies.{SUPPLY}]
parent = "site"
budget = {{ watts = 90.0 }}
devices = ["jetson*"]
[devices.{NANO}]
tags = ["desk-of-the-laboratory"]
"""


async def a_trained_round(client: Client) -> None:
    """A round of two devices with long names, of which one reports what it drew."""
    for device_id, front, idle_w in ((ORIN, ORIN_FRONT, 5.0), (NANO, NANO_FRONT, 3.0)):
        await client.agent().become_ready(device_id, front, idle_w)
    bindings = [
        planning_pb2.NodeBinding(node_id=node, device_id=name) for node, name in ((ORIN_NODE, ORIN), (NANO_NODE, NANO))
    ]
    await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
    start = planning_pb2.StartRunRequest(
        run_id=RUN, strategy="FedAvg", rounds=3, workload=power_pb2.Workload(name=WORKLOAD)
    )
    await client.planning.StartRun(start)
    plan = await client.planning.PlanRound(
        planning_pb2.PlanRoundRequest(run_id=RUN, round=1, node_ids=NODES, epochs=1.0)
    )
    orin = client.agents[0]
    await orin.obey(GrantPhase.OVER)
    await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.5, power_w=31.25))
    results = [planning_pb2.DeviceResult(device_id=name, num_examples=96, share=1.0) for name in (ORIN, NANO)]
    finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=41.5, results=results)
    await client.planning.FinishRound(finish)
    await client.end_trainings()
    metrics = {f"clientapp_evaluation_{name}": 0.5 for name in ("accuracy", "loss", "f1", "recall", "precision")}
    await client.planning.ReportMetrics(planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics=metrics))


TABLES = {
    ("devices",): [ORIN, NANO, "parked"],
    ("device", ORIN): [ORIN, "of 7 modes"],
    ("runs",): ["run-", WORKLOAD],
    ("rounds",): [RUN, WORKLOAD, "100.0"],
    ("round", RUN, "1"): [ORIN, NANO, "20.5 s"],
    ("plan", "--dry-run"): [ORIN, NANO],
    ("nodes",): [ORIN, NANO, "not checked"],
    ("workloads",): [WORKLOAD],
    ("budget", "show"): ["site", SUPPLY, "90.0"],
    ("reference", "list"): ["in force"],
}
"""A command, and words that its table has to show in any terminal."""


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("columns", [60, 80])
async def test_every_table_with_long_names_fits_and_names_what_it_leaves_out(
    config: CoordinatorSettings, tmp_path: Path, columns: int, part: int
) -> None:
    (tmp_path / "site.toml").write_text(SITE)
    site = {"budget_w": None, "file": tmp_path / "site.toml"}
    async with served_with_shell(config.with_values(site=site)) as (client, shell):
        await a_trained_round(client)
        for words, names in list(TABLES.items())[part::2]:
            printed = (await shell(*words, columns=columns)).stdout  # which checks the width, and that nothing is cut
            # A name may go over several lines, between which other columns are printed.
            letters = "".join(printed.split())
            for name in names:
                rest = iter(letters)
                assert all(letter in rest for letter in name.replace(" ", "")), f"{words}: {name} in\n{printed}"
            # A text keeps enough room to be read: the reported table had four letters in a line.
            alone = [line for line in printed.splitlines() if line.startswith(" " * 40) and len(line.split()) == 1]
            assert len(alone) < 6, printed
