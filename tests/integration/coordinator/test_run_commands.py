"""The commands `runs` and `round`, and runs that are named by the first characters of their ids."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import httpx
import pytest

from coordinator.cli.runs import run_id_of
from coordinator.settings import CoordinatorSettings
from tests.fakes.shell import a_round, asked, served_with_shell
from tests.fakes.small_fleet import RUN, RUN_NAME
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
        assert waiting["rounds_done"] == 1 and waiting["training_j"] == pytest.approx(JOULES["orin"])
        await nano.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=36.5, power_w=14.75))
        labels = {"site": "lab", "lr": "0.1"}
        start = planning_pb2.StartRunRequest(run_id="other", strategy="FedAvg", rounds=3, name="other", labels=labels)
        await client.planning.StartRun(start)
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id="other", error="no luck"))
        content = await asked(shell, "runs")
        first, second = content["runs"]
        assert (first["run_id"], first["rounds_done"], first["failed_trainings"]) == (RUN, 1, 1)
        assert first["training_j"] == pytest.approx(sum(JOULES.values()))
        assert (second["run_id"], second["error"], second["training_j"]) == ("other", "no luck", None)
        lines = (await shell("runs", columns=120)).stdout.splitlines()
        assert lines[1].split()[:9] == [RUN_NAME, "running", "1", "of", "3", "41.5", "s", "1.2", "kJ"]
        assert "run other: no luck" in lines
        assert "lr=0.1 site=lab" in " ".join(" ".join(lines).split())
        for labels_asked, found in ((("site=lab",), 1), (("site=lab", "lr=0.1"), 1), (("site=lab", "lr=0.2"), 0)):
            options = [word for each in labels_asked for word in ("--label", each)]
            assert len((await asked(shell, "runs", *options))["runs"]) == found, labels_asked
        assert (await shell("runs", "--label", "site=roof")).stdout.startswith("no run has these labels")
        with pytest.raises(InvalidInputError, match="a label is written as KEY=VALUE"):
            await shell("runs", "--label", "site")
        [newest] = (await asked(shell, "runs", "--limit", "1"))["runs"]
        assert newest["run_id"] == "other"
        assert "1 older run not shown: --limit 2 shows all" in (await shell("runs", "--limit", "1")).stdout
        await shell("export", "--format", "csv", "--out", str(tmp_path))
        [row] = csv.DictReader((tmp_path / "rounds.csv").read_text().splitlines())
        assert float(row["training_j"]) == pytest.approx(sum(JOULES.values()))


async def test_a_run_that_somebody_stopped_has_not_failed(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        for run_id, error in (("halted", "stopped by Flower's SuperLink, as after `flwr stop`"), ("broken", "no luck")):
            await client.planning.StartRun(
                planning_pb2.StartRunRequest(run_id=run_id, name=run_id, strategy="FedAvg", rounds=3)
            )
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id, error=error))
        states = {each["run_id"]: each["state"] for each in (await asked(shell, "runs"))["runs"]}
        assert states == {"halted": "stopped", "broken": "failed"}
        lines = (await shell("runs", columns=120)).stdout.splitlines()
        assert [line.split()[:2] for line in lines[1:3]] == [["halted", "stopped"], ["broken", "failed"]]
        assert "run halted: stopped by Flower's SuperLink, as after `flwr stop`" in lines
        assert "3 rounds requested, stopped" in (await shell("rounds", "--run", "halted", columns=160)).stdout


async def test_what_a_run_has_cost_is_the_same_everywhere_while_an_observation_is_missing(
    config: CoordinatorSettings, tmp_path: Path
) -> None:
    config = config.with_values(server={"page_address": "127.0.0.1:0"})
    async with served_with_shell(config) as (client, shell), httpx.AsyncClient() as browser:
        orin, nano = await client.two_ready()
        plan = await a_round(client, orin)

        async def costs(joules: float, of_both: str, text: str) -> None:
            """Check every place that tells what the run or its only round has cost."""
            [run] = (await asked(shell, "runs"))["runs"]
            rounds = await asked(shell, "rounds")
            for values in (run, rounds, rounds["rounds"][0], await asked(shell, "round", RUN, "1")):
                assert values["training_j"] == pytest.approx(joules)
            folder = tmp_path / str(joules)
            await shell("export", "--format", "csv", "--out", str(folder))
            [row] = csv.DictReader((folder / "rounds.csv").read_text().splitlines())
            assert float(row["training_j"]) == pytest.approx(joules)
            metrics = (await browser.get(f"http://{client.bound.metrics_address}/metrics")).text
            for family in ("run_energy_joules", "device_training_energy_joules"):
                found = re.findall(rf"wattfleet_{family}_total{{.*}} (.*)", metrics)
                assert sum(map(float, found)) == pytest.approx(joules)
            for name in ("", f"/{RUN}"):
                page = (await browser.get(f"http://{client.bound.page_address}/runs{name}")).text
                assert text in page and (not name or of_both in re.sub("<[^>]*>", "", page))
            in_table = text if of_both == "2 trainings" else f"{text}*"
            assert in_table in (await shell("runs", columns=120)).stdout
            shown = (await shell("rounds", columns=120)).stdout
            assert in_table in shown and f"energy: {text} for {of_both}" in shown
            assert re.search(
                rf"energy +{re.escape(text)} for {of_both} *\n", (await shell("round", RUN, "1", columns=120)).stdout
            )

        await costs(JOULES["orin"], "1 of 2 trainings", "641 J")
        await nano.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=36.5, power_w=14.75))
        await costs(sum(JOULES.values()), "2 trainings", "1.2 kJ")


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
        assert f"round 1 of run {RUN_NAME}: finished in 41.5 s, began" in shown
        assert "46.0 W observed" in shown and "energy   1.2 kJ" in shown
        for words in ("the node, is gone for good", "why they were selected", "mode: CPU cores"):
            assert words in shown
        with pytest.raises(InvalidInputError, match=f"run {RUN_NAME} has no round 7: list its rounds"):
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
        for run_id, name in (("other-1", "day"), ("other-2", "")):
            start = planning_pb2.StartRunRequest(
                run_id=run_id, strategy="FedAvg", rounds=3, name=name, app="acme/lenet"
            )
            named = (await client.planning.StartRun(start)).name
        assert named.startswith("lenet-")
        for given in (RUN_NAME, RUN_NAME[:3], RUN, RUN[:1]):
            assert (await asked(shell, "rounds", "--run", given))["run_id"] == RUN
        assert (await asked(shell, "round", RUN[:1], "1"))["run_id"] == RUN
        assert (await asked(shell, "plan", "--dry-run", "--run", RUN[:1]))["run_id"] == RUN
        await shell("export", "--format", "csv", "--out", str(tmp_path), "--run", RUN[:1])
        assert [each["run_id"] for each in csv.DictReader((tmp_path / "runs.csv").read_text().splitlines())] == [RUN]
        for command in (("rounds", "--run", "other"), ("round", "other", "1"), ("delete", "other")):
            with pytest.raises(
                InvalidInputError, match=rf"'other' is the beginning of several runs, day \(other-1\), {named} \("
            ):
                await shell(*command)
        assert (await shell("delete", "day", "--end")).stdout == "run day: deleted\n"


def test_a_whole_id_is_meant_even_if_another_begins_with_it() -> None:
    known = {"12": "night", "123": "night-2", "124": "12"}
    assert [run_id_of(known, given) for given in ("12", "123", "night", "night-2")] == ["12", "123", "12", "123"]
    for given in ("", "3"):
        with pytest.raises(InvalidInputError, match=f"unknown run '{given}': it never started, or was deleted; the"):
            run_id_of(known, given)
