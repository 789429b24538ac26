"""The commands `runs` and `round`, and runs that are named by the first characters of their ids."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from coordinator.cli.run_names import run_id_of
from coordinator.settings import CoordinatorSettings
from tests.fakes.shell import a_round, asked, served_with_shell
from tests.fakes.small_fleet import RUN
from wattfleet.errors import InvalidInputError
from wattfleet_proto.v1 import planning_pb2, session_pb2

JOULES = {"orin": 20.5 * 31.25, "nano": 36.5 * 14.75}
"""By hand, from the epochs and watts below."""


async def test_a_run_is_listed_with_what_it_has_cost(config: CoordinatorSettings, tmp_path: Path) -> None:
    async with served_with_shell(config) as (client, shell):
        assert "no runs yet: start a Flower app" in " ".join((await shell("runs")).stdout.split())
        orin, nano = await client.two_ready()
        plan = await a_round(client, orin)
        [waiting] = (await asked(shell, "runs"))["runs"]
        assert (waiting["rounds_done"], waiting["training_j"]) == (1, None), "the Nano was not observed yet"
        await nano.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=36.5, power_w=14.75))
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id="other", strategy="FedAvg", rounds=3))
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id="other", error="no luck"))
        content = await asked(shell, "runs")
        first, second = content["runs"]
        assert (first["run_id"], first["rounds_done"], first["failed_trainings"]) == (RUN, 1, 1)
        assert first["training_j"] == pytest.approx(sum(JOULES.values()))
        assert (second["run_id"], second["error"], second["training_j"]) == ("other", "no luck", None)
        lines = (await shell("runs", columns=120)).stdout.splitlines()
        assert lines[1].split()[:9] == [RUN, "running", "1", "of", "3", "41.5", "s", "1.2", "kJ"]
        assert "run other: no luck" in lines
        [newest] = (await asked(shell, "runs", "--limit", "1"))["runs"]
        assert newest["run_id"] == "other"
        assert "1 older run not shown: --limit 2 shows all" in (await shell("runs", "--limit", "1")).stdout
        await shell("export", "--format", "csv", "--out", str(tmp_path))
        [row] = csv.DictReader((tmp_path / "rounds.csv").read_text().splitlines())
        assert float(row["training_j"]) == pytest.approx(sum(JOULES.values()))


async def test_a_round_says_who_trained_why_and_what_failed(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, nano = await client.two_ready()
        plan = await a_round(client, orin)
        await nano.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=36.5, power_w=14.75))
        content = await asked(shell, "round", RUN, "1")
        selected = {each["device_id"]: each for each in content["selected"]}
        assert {name: each["outcome"] for name, each in selected.items()} == {"orin": "trained", "nano": "failed"}
        assert selected["nano"]["failure"] == "the node, is gone\nfor good"
        assert {name: each["training_j"] for name, each in selected.items()} == pytest.approx(JOULES)
        by_name = {each.device_id: each for each in plan.assignments}
        assert all(each["planned_w"] == by_name[name].power_limit_w for name, each in selected.items())
        shown = (await shell("round", RUN, "1", columns=140)).stdout
        assert f"round 1 of run {RUN}: finished in 41.5 s, began" in shown
        assert "46.0 W observed" in shown and "energy   1.2 kJ" in shown
        for words in ("the node, is gone for good", "why they were selected", "mode: CPU cores"):
            assert words in shown
        with pytest.raises(InvalidInputError, match=f"run {RUN} has no round 7: list its rounds"):
            await shell("round", RUN, "7")


async def test_a_round_without_a_plan_is_shown_as_such(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        await client.two_ready()
        report = planning_pb2.ReportUnplannedRoundRequest(
            run_id=RUN,
            round=1,
            wall_s=5.0,
            results=[
                planning_pb2.NodeResult(
                    node_id=99, result=planning_pb2.DeviceResult(device_id="far", failure="out of memory")
                )
            ],
        )
        await client.planning.ReportUnplannedRound(report)
        [only] = (await asked(shell, "round", RUN, "1"))["selected"]
        assert (only["device_id"], only["outcome"], only["failure"]) == ("far", "failed", "out of memory")
        assert "no budget was kept" in (await shell("round", RUN, "1")).stdout


async def test_the_beginning_of_an_id_is_enough_wherever_a_run_is_named(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        for run_id in ("other-1", "other-2"):
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=3))
        assert (await asked(shell, "rounds", "--run", RUN[:1]))["run_id"] == RUN
        assert (await asked(shell, "round", RUN[:1], "1"))["run_id"] == RUN
        assert (await asked(shell, "plan", "--dry-run", "--run", RUN[:1]))["run_id"] == RUN
        await shell("export", "--format", "csv", "--out", str(tmp_path), "--run", RUN[:1])
        assert [each["run_id"] for each in csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())] == [RUN]
        for command in (("rounds", "--run", "other"), ("round", "other", "1"), ("delete", "other")):
            with pytest.raises(InvalidInputError, match="'other' is the beginning of several runs, other-1, other-2"):
                await shell(*command)
        assert (await shell("delete", "other-1", "--end")).stdout == "run other-1: deleted\n"


def test_a_whole_id_is_meant_even_if_another_begins_with_it() -> None:
    assert run_id_of(["12", "123"], "12") == "12"
    for given in ("", "3"):
        with pytest.raises(InvalidInputError, match=f"unknown run '{given}': it never started, or was deleted; the"):
            run_id_of(["12", "123"], given)
