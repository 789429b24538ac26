"""Local epochs that plans choose, as seen by Flower's server, by the operator and in exported tables."""

from __future__ import annotations

from pathlib import Path

import grpc
import pandas as pd
import pytest

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client, serving_client, status
from tests.fakes.shell import asked, served_with_shell
from tests.fakes.small_fleet import NODES, RUN
from wattfleet_proto.v1 import operator_pb2, planning_pb2, session_pb2

# The Orin's epoch takes 10 s, the Nano's 35 s. With a progress of (1.6 + 1) / 4 in 35 + 50 s, a round of both is faster
# per second than with the same epochs for both, or with the Orin alone.
OPTIONS = [(1, 1.0), (3, 1.6)]
CHOSEN = {"nano": 1.0, "orin": 3.0}


@pytest.fixture
def config(config: CoordinatorSettings) -> CoordinatorSettings:
    """A coordinator whose policy chooses the epochs."""
    return config.with_values(policy={"name": "progress", "half_devices": 2.0, "overhead_s": 50.0})


async def plan(client: Client, *options: tuple[int, float], number: int = 1) -> planning_pb2.PlanRoundResponse:
    """Request a round that may choose between numbers of epochs, given the progress of each."""
    choice = planning_pb2.EpochChoice(
        options=[planning_pb2.EpochOption(epochs=epochs, progress=progress) for epochs, progress in options],
        per_device=True,
    )
    request = planning_pb2.PlanRoundRequest(run_id=RUN, round=number, node_ids=NODES, epochs=1.0, epoch_choice=choice)
    planned: planning_pb2.PlanRoundResponse = await client.planning.PlanRound(request)
    return planned


def told(planned: planning_pb2.PlanRoundResponse) -> dict[str, float]:
    return {each.device_id: each.epochs for each in planned.assignments}


async def test_the_epochs_of_each_device_outlast_a_restart(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        planned = await plan(client, *OPTIONS)
        assert told(planned) == CHOSEN
        [before] = (await client.rounds()).rounds
        assert before.epochs == 3.0, "the most"
        assert told(before.plan) == CHOSEN
    async with serving_client(config) as client:
        [after] = (await client.rounds()).rounds
        assert (after.epochs, after.plan) == (3.0, before.plan)
        looked_up = await client.planning.GetPlan(planning_pb2.GetPlanRequest(plan_id=planned.plan_id))
        assert told(looked_up.plan) == CHOSEN
        again = await plan(client, (1, 1.0), (9, 5.0))
        assert again.assignments == planned.assignments, "a round is planned once"


async def test_a_round_lasts_as_long_as_the_epochs_of_its_slowest_device(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        planned = await plan(client, *OPTIONS)
        await client.end_trainings()
        for agent, epoch_s in ((orin, 12.0), (nano, 35.5)):
            seen = session_pb2.Observation(plan_id=planned.plan_id, epoch_s=epoch_s, power_w=12.0)
            await agent.send(observation=seen)
        await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=planned.plan_id, wall_s=50.0))
        [view] = (await client.rounds()).rounds
        assert view.observed_duration_s == 3 * 12.0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([(0, 1.0)], "not 0"),
        ([(1, 2.0), (3, 1.0)], "by ascending epochs and progress"),
        ([], "give 1 to 16 numbers of local epochs"),
    ],
)
async def test_a_choice_that_cannot_be_is_refused_and_nothing_is_planned(
    config: CoordinatorSettings, options: list[tuple[int, float]], error: str
) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plan(client, *options)
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert error in status(refused)[1]
        assert not (await client.rounds()).rounds
        assert told(await plan(client, *OPTIONS)) == CHOSEN, "the round can still be planned"


async def test_a_look_at_the_next_plan_shows_the_epochs(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        _agents = await client.two_ready()
        looked = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest(epochs=2.5))
        assert set(told(looked.plan).values()) == {2.5}
        await shell("drain", "orin")
        content = await asked(shell, "plan", "--dry-run", "--epochs", "2.5")
        assert [(each["device_id"], each["epochs"]) for each in content["devices"]] == [("nano", 2.5), ("orin", None)]
        lines = (await shell("plan", "--dry-run", "--epochs", "2.5", columns=100)).stdout.splitlines()
        [head] = [line.split() for line in lines if line.split()[:2] == ["selected", "mode"]]
        assert head[2:4] == ["batch", "epochs"]
        [row] = [line.split() for line in lines if line.split()[:1] == ["nano"] and "2.5" in line.split()]
        # The last columns: epochs, warm-up, seconds per epoch, power, and planned power.
        assert float(row[-5]) == 2.5
        assert float(row[-3]) == 35.0


async def test_the_tables_have_the_epochs_of_each_device(config: CoordinatorSettings, tmp_path: Path) -> None:

    async with served_with_shell(config) as (client, shell):
        _agents = await client.two_ready()
        await plan(client, *OPTIONS)
        await shell("budget", "set", "site", "50", columns=100)
        await client.obey()
        await shell("export", "--out", str(tmp_path / "out"))
        rows = pd.read_csv(tmp_path / "out" / "assignments.csv").to_dict("records")
        assert {row["device_id"]: row["epochs"] for row in rows} == CHOSEN
        assert any(row["became"] == "other mode" for row in rows), "it was trimmed"
        [of_round] = pd.read_csv(tmp_path / "out" / "rounds.csv").to_dict("records")
        assert of_round["epochs"] == 3.0
