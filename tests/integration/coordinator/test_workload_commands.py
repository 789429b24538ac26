"""The operator's commands about workloads, as a shell sees them."""

from __future__ import annotations

import httpx
import pytest

from coordinator.cli.client import RequestRefusedError
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import READY, Agent, Client
from tests.fakes.shell import asked, served_with_shell
from tests.fakes.small_fleet import NANO_FRONT, ORIN_FRONT, RUN
from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import planning_pb2, power_pb2, session_pb2


async def ready(client: Client, device_id: str, *fronts: tuple[str, Front, int]) -> Agent:
    """A device that knows some workloads, each with its front and its minibatches in an epoch; 0 for unknown."""
    agent = client.agent()
    await agent.hello(device_id, knows_workloads=True)
    await agent.lease()
    for name, known, minibatches in fronts:
        report = session_pb2.FrontReport(
            front=front_to_message(known),
            idle_w=5.0,
            profiled_modes=4,
            workload=power_pb2.Workload(name=name, batch=32),
            minibatches_per_epoch=minibatches or None,
        )
        await agent.send(front=report)
    await agent.send(state=READY)
    return agent


async def test_a_device_shows_each_workload_and_the_front_of_the_one_asked_for(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        _agent = await ready(client, "orin", ("bert", ORIN_FRONT, 70), ("gpt", NANO_FRONT, 0))
        content = await asked(shell, "device", "orin", "--workload", "bert")
        assert [point["epoch_s"] for point in content["front"]] == [10.0, 20.0, 40.0]
        latest = await asked(shell, "device", "orin")
        assert (latest["workload"], [point["epoch_s"] for point in latest["front"]]) == ("gpt", [35.0, 60.0])
        assert [(each["workload"], each["minibatches_per_epoch"]) for each in latest["workloads"]] == [
            ("bert", 70),
            ("gpt", None),
        ]
        text = (await shell("device", "orin", "--workload", "bert")).stdout
        assert "Pareto front of bert" in text
        rows = [line.split() for line in text.splitlines()]
        assert ["32", "4", "unknown", "~35.0", "s", "gpt"] in rows and ["32", "4", "70", "10.0", "s", "bert"] in rows
        [shown] = await asked(shell, "devices", "--workload", "bert")
        assert (shown["fastest_epoch_s"], shown["profiled_modes"]) == (10.0, 4)
        [shown] = await asked(shell, "devices", "--workload", "unknown")
        assert shown["fastest_epoch_s"] is None
        assert (
            "no front for the workload unknown yet" in (await shell("device", "orin", "--workload", "unknown")).stdout
        )
        with pytest.raises(RequestRefusedError, match="a workload's name must have 1 to 200"):
            await shell("devices", "--workload", "bell\x07")


async def test_what_assumes_the_length_of_an_epoch_is_shown_as_assumed(config: CoordinatorSettings) -> None:
    config = config.with_values(server={"page_address": "127.0.0.1:0"})
    async with served_with_shell(config) as (client, shell), httpx.AsyncClient() as browser:
        _agent = await ready(client, "orin", ("bert", ORIN_FRONT, 70), ("gpt", NANO_FRONT, 0))
        bindings = [planning_pb2.NodeBinding(node_id=1, device_id="orin")]
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))

        async def shown(workload: str, run_id: str) -> tuple[list[str], list[str]]:
            """What the commands and the page show of a workload and of a round with it."""
            start = planning_pb2.StartRunRequest(
                run_id=run_id, strategy="FedAvg", rounds=3, workload={"name": workload}
            )
            await client.planning.StartRun(start)
            preview = (await shell("plan", "--dry-run", columns=120)).stdout
            what_if = (await browser.get(f"http://{client.bound.page_address}/what-if")).text
            ask = planning_pb2.PlanRoundRequest(run_id=run_id, round=1, node_ids=[1], epochs=1.0)
            await client.planning.PlanRound(ask)
            commands = [
                (await shell("devices", "--workload", workload, columns=120)).stdout,
                (await shell("device", "orin", "--workload", workload)).stdout.split("Pareto front")[1],
                (await shell("round", run_id, "1", columns=140)).stdout,
                preview,
            ]
            run = (await browser.get(f"http://{client.bound.page_address}/runs/{run_id}")).text
            device = (await browser.get(f"http://{client.bound.page_address}/devices/orin")).text
            await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=f"{run_id}/1", wall_s=1.0))
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))
            await client.end_trainings()
            return commands, [what_if, run, device]

        commands, pages = await shown("gpt", "unknown-length")
        assert all("assume" in text for text in commands), commands
        assert all("assumed length" in page for page in pages)
        assert all("~35.0" in text for text in (commands[0], commands[2], commands[3])), commands
        assert "assume 100 minibatches" in " ".join(commands[1].split())
        commands, pages = await shown("bert", "known-length")
        assert not any("assume" in text or "~" in text for text in commands), commands
        assert not any("assumed length" in page for page in pages[:2])


async def test_workloads_are_listed(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        assert "no workloads yet" in (await shell("workloads")).stdout
        _agent = await ready(client, "orin", ("bert", ORIN_FRONT, 70))
        workload = power_pb2.Workload(name="gpt", precision="bfloat16")
        await client.planning.StartRun(
            planning_pb2.StartRunRequest(run_id=RUN, strategy="FedAvg", rounds=3, workload=workload)
        )
        bert, gpt = await asked(shell, "workloads")
        assert (bert["workload"], bert["devices"], bert["median_modes"], bert["runs"]) == ("bert", 1, 4.0, 0)
        assert (gpt["workload"], gpt["live_run_ids"], gpt["precision"]) == ("gpt", [RUN], "bfloat16")
        lines = (await shell("workloads")).stdout.splitlines()
        assert lines[1].split() == ["training", "1", "1", "4", "0", "-", "bert"]
        assert lines[2].split()[-1] == "gpt"
        assert "workload gpt" in (await shell("rounds")).stdout


async def test_devices_are_told_to_measure_a_workload(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, away = await ready(client, "orin"), await ready(client, "away")
        await away.goodbye()
        await shell("tag", "orin", "away", "--add", "lab")
        order = ("profile", "--workload", "vision", "--synthetic", "resnet18", "--modes", "12", "--devices")
        lines = (await shell(*order, "tag:lab")).stdout.splitlines()
        assert lines[0] == "1 device ordered to measure vision"
        assert lines[1].startswith("progress: `devices --watch`")
        assert lines[2].split()[:6] == ["away", "not", "ordered:", "it", "is", "offline:"]
        told = await orin.hear(orin.profile_orders)
        assert (told.workload.name, told.synthetic, told.modes) == ("vision", "resnet18", 12)
        assert await asked(shell, *order, "orin") == {"device_ids": ["orin"], "not_told": {}}
        with pytest.raises(InvalidInputError, match="a workload's name must have"):
            await shell("profile", "--workload", " ", "--devices", "orin")
