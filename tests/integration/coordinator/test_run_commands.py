"""Runs and rounds as the operator's commands, the page and exported tables show them."""

from __future__ import annotations

import asyncio
import csv
import re
import sys
import time
import urllib.request
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pandas as pd
import pytest
from flwr.app import MetricRecord
from flwr.serverapp.strategy import FedAvg

from coordinator.cli.export.tables import COLUMNS
from coordinator.cli.runs import run_id_of
from coordinator.display.values import energy_rows, is_in_month
from coordinator.settings import CoordinatorSettings
from tests.fakes.fleets import columns_of
from tests.fakes.flower_in_process import ARRAYS, GridOfNodes, Node
from tests.fakes.served import Client, a_round, asked, command, rack_and_roof, served_with_shell, serving_client, status
from tests.fakes.small_fleet import NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, RUN_NAME
from wattfleet.core.choosing import Front
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import PowerMode
from wattfleet.flower import PowerAware, Quorum
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import operator_pb2, planning_pb2, session_pb2, view_pb2

# --- Run commands -----------------------------------------------------------------------------------------------------
# The commands `runs` and `round`, and runs that are named by the first characters of their ids.


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


async def test_a_forecast_says_what_a_run_still_needs(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        with pytest.raises(InvalidInputError, match="no round of run .* has ended yet: ask again"):
            await shell("forecast")
        await a_round(client, orin)
        content = await asked(shell, "forecast", "--price", "0.3")
        assert (content["rounds_done"], content["further_rounds"]) == (1, [2.0, 2.0, 2.0])
        joules = content["training_j"]
        # Of two trainings, one was observed; both count.
        assert joules[0] <= 2 * 2 * JOULES["orin"] <= joules[2]
        assert content["costs"] == [{"unit": "EUR", "cost": [pytest.approx(each * 0.3 / 3.6e6) for each in joules]}]
        lines = (await shell("forecast", "--co2", "0.4", columns=100)).stdout.splitlines()
        assert lines[0] == f"run {RUN_NAME} until 3 rounds, after 1 round"
        assert [line.split("  ")[0] for line in lines[2:7]] == [
            *("rounds", "time", "done at", "energy of the trainings", "kg CO2"),
        ]
        assert "</strong> to the last round, most likely " in await page_of(client, f"/runs/{RUN}")
        with pytest.raises(InvalidInputError, match="needs 4 rounds with its value, and the run has 0: ask again"):
            await shell("forecast", "--target", "accuracy=0.9")
        with pytest.raises(InvalidInputError, match=r"has not reported 'auc': name one of accuracy, f1, loss, recall"):
            await shell("forecast", "--target", "auc=0.9")
        with pytest.raises(InvalidInputError, match="--target high: write METRIC=VALUE, such as accuracy=0.9"):
            await shell("forecast", "--target", "high")
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        with pytest.raises(InvalidInputError, match=f"run {RUN_NAME} has ended: .* shows what it needed"):
            await shell("forecast")
        assert "to the last round" not in await page_of(client, f"/runs/{RUN}")


async def test_energy_is_added_up_by_month_and_site_run_and_device(config: CoordinatorSettings, tmp_path: Path) -> None:
    config = config.model_copy(update={"site": config.site.model_copy(update=rack_and_roof(tmp_path))})
    async with served_with_shell(config) as (client, shell):
        assert (await shell("energy")).stdout == "no training yet in this time\n"
        orin, nano = await client.two_ready()
        plan = await a_round(client, orin)
        month = f"{datetime.now(timezone.utc):%Y-%m}"
        [row] = await asked(shell, "energy", "--by", "run")
        expected = {"month": month, "run": RUN_NAME, "observed_trainings": 1, "trainings": 2}
        assert row == {**expected, "training_j": pytest.approx(JOULES["orin"])}
        await nano.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=36.5, power_w=14.75))
        devices = await asked(shell, "energy", "--by", "site,device", "--month", month)
        assert {each["device"]: each["training_j"] for each in devices} == pytest.approx(JOULES)
        sites = {each["site"]: each["training_j"] for each in await asked(shell, "energy")}
        assert len(sites) == 2 and sum(sites.values()) == pytest.approx(sum(JOULES.values()))
        assert {each["site"] for each in devices} == set(sites)
        lines = (await shell("energy", "--by", "device", "--csv")).stdout.splitlines()
        assert lines[0] == "month,device,training_j,observed_trainings,trainings"
        assert [float(each["training_j"]) for each in csv.DictReader(lines)] == pytest.approx(
            sorted(JOULES.values(), reverse=True)
        )
        shown = (await shell("energy", "--by", "run", columns=100)).stdout.splitlines()
        assert shown[1].split() == [month, RUN_NAME, "1.2", "kJ", "0.000", "2", "trainings"]
        assert await asked(shell, "energy", "--month", "2001-02") == []
        for arguments, why in (
            (("--by", "room"), "name one or more of site, run, device"),
            (("--by", "run,run"), "each once"),
            (("--month", "11/2026"), "is not a month: write it as 2026-11"),
            (("--csv", "--json"), "pass --csv or --json"),
        ):
            with pytest.raises(InvalidInputError, match=why):
                await shell("energy", *arguments)
        page = await page_of(client, "/energy?by=device")
        assert page.count(month) >= 3 and "1 of 1" in page and "1.2 kJ in all" in page
        assert "No training in this month" in await page_of(client, "/energy?month=2001-02")
        assert "is not a month" in await page_of(client, "/energy?month=May")


async def test_a_training_counts_in_the_month_of_its_round() -> None:
    at_s = [datetime(2026, 10, 31, 23, 59, tzinfo=timezone.utc), datetime(2026, 11, 1, tzinfo=timezone.utc)]
    runs = {
        "a": {("2026-10", "nano"): (5.0, 1, 1), ("2026-11", "nano"): (7.0, 2, 3)},
        "b": {("2026-11", "gone"): (0.0, 0, 1)},
    }
    rows = energy_rows(runs, {"a": "first", "b": "second"}, {"nano": "roof"}, ("site",), None)
    assert [(row["month"], row["site"], row["training_j"], row["trainings"]) for row in rows] == [
        ("2026-11", "roof", 7.0, 3),
        ("2026-11", "unknown", None, 1),
        ("2026-10", "roof", 5.0, 1),
    ]
    assert [row["month"] for row in energy_rows(runs, {"a": "f", "b": "s"}, {}, ("run",), "2026-10")] == ["2026-10"]
    run = view_pb2.RunView(run_id="a", started_unix_s=at_s[0].timestamp(), finished_unix_s=at_s[1].timestamp())
    kept = [month for month in ("2026-09", "2026-10", "2026-11", "2026-12") if is_in_month(run, month)]
    assert kept == ["2026-10", "2026-11"]


async def test_a_tariff_is_read_from_its_file(config: CoordinatorSettings, tmp_path: Path) -> None:
    tariff = tmp_path / "tariff.csv"
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        tariff.write_text("hour,per_kwh\n" + "".join(f"{hour},0.5\n" for hour in range(24)))
        content = await asked(shell, "forecast", "--price", str(tariff), "--currency", "CHF")
        [cost] = content["costs"]
        assert cost == {"unit": "CHF", "cost": [pytest.approx(each * 0.5 / 3.6e6) for each in content["training_j"]]}
        for text, why in (
            ("hour,per_kwh\n0,0.5\n", "it needs a row for each hour from 0 to 23"),
            ("hour,price\n0,0.5\n", "it needs the columns hour and per_kwh with a number in each row"),
        ):
            tariff.write_text(text)
            with pytest.raises(InvalidInputError, match=why):
                await shell("forecast", "--price", str(tariff))
        with pytest.raises(InvalidInputError, match="'cheap' is neither a number nor a file that can be read"):
            await shell("forecast", "--price", "cheap")


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
    config = config.with_values(server={"http_address": "127.0.0.1:0"})
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
            metrics = (await browser.get(f"http://{client.bound.http_address}/metrics")).text
            for family in ("run_energy_joules", "device_training_energy_joules"):
                found = re.findall(rf"wattfleet_{family}_total{{.*}} (.*)", metrics)
                assert sum(map(float, found)) == pytest.approx(joules)
            for name in ("", f"/{RUN}"):
                page = (await browser.get(f"http://{client.bound.http_address}/runs{name}")).text
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


# --- Chosen epochs ----------------------------------------------------------------------------------------------------
# Local epochs that plans choose, as seen by Flower's server, by the operator and in exported tables.

# The Orin's epoch takes 10 s, the Nano's 35 s. With a progress of (1.6 + 1) / 4 in 35 + 50 s, a round of both is faster
# per second than with the same epochs for both, or with the Orin alone.
OPTIONS = [(1, 1.0), (3, 1.6)]
CHOSEN = {"nano": 1.0, "orin": 3.0}


@pytest.fixture
def choosing_config(config: CoordinatorSettings) -> CoordinatorSettings:
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


async def test_the_epochs_of_each_device_outlast_a_restart(choosing_config: CoordinatorSettings) -> None:

    async with serving_client(choosing_config) as client:
        _agents = await client.two_ready()
        planned = await plan(client, *OPTIONS)
        assert told(planned) == CHOSEN
        [before] = (await client.rounds()).rounds
        assert before.epochs == 3.0, "the most"
        assert told(before.plan) == CHOSEN
    async with serving_client(choosing_config) as client:
        [after] = (await client.rounds()).rounds
        assert (after.epochs, after.plan) == (3.0, before.plan)
        looked_up = await client.planning.GetPlan(planning_pb2.GetPlanRequest(plan_id=planned.plan_id))
        assert told(looked_up.plan) == CHOSEN
        again = await plan(client, (1, 1.0), (9, 5.0))
        assert again.assignments == planned.assignments, "a round is planned once"


async def test_a_round_lasts_as_long_as_the_epochs_of_its_slowest_device(choosing_config: CoordinatorSettings) -> None:

    async with serving_client(choosing_config) as client:
        orin, nano = await client.two_ready()
        planned = await plan(client, *OPTIONS)
        await client.end_trainings()
        for agent, epoch_s in ((orin, 12.0), (nano, 35.5)):
            seen = session_pb2.Observation(plan_id=planned.plan_id, epoch_s=epoch_s, power_w=12.0)
            await agent.send(observation=seen)
        await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=planned.plan_id, wall_s=50.0))
        [view] = (await client.rounds()).rounds
        assert view.observed_s == 3 * 12.0


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([(0, 1.0)], "not 0"),
        ([(1, 2.0), (3, 1.0)], "by ascending epochs and progress"),
        ([], "give 1 to 16 numbers of local epochs"),
    ],
)
async def test_a_choice_that_cannot_be_is_refused_and_nothing_is_planned(
    choosing_config: CoordinatorSettings, options: list[tuple[int, float]], error: str
) -> None:

    async with serving_client(choosing_config) as client:
        _agents = await client.two_ready()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await plan(client, *options)
        assert status(refused)[0] is grpc.StatusCode.INVALID_ARGUMENT
        assert error in status(refused)[1]
        assert not (await client.rounds()).rounds
        assert told(await plan(client, *OPTIONS)) == CHOSEN, "the round can still be planned"


async def test_a_look_at_the_next_plan_shows_the_epochs(choosing_config: CoordinatorSettings) -> None:

    async with served_with_shell(choosing_config) as (client, shell):
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


async def test_the_tables_have_the_epochs_of_each_device(choosing_config: CoordinatorSettings, tmp_path: Path) -> None:

    async with served_with_shell(choosing_config) as (client, shell):
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


# --- Late shown -------------------------------------------------------------------------------------------------------
# Devices that were late in a round, as shown by commands, exports and a restarted coordinator.


async def late_round(client: Client, orin: Any, nano: Any) -> str:
    """A round that ends while the Nano trains."""
    plan = await client.plan(1)
    await nano.obey(GrantPhase.TRAINING)
    await orin.obey(GrantPhase.OVER)
    await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.5, power_w=31.25))
    results = [
        planning_pb2.DeviceResult(device_id="orin", num_examples=96, loss=0.125, share=1.0),
        planning_pb2.DeviceResult(device_id="nano", late=True),
    ]
    await client.planning.FinishRound(
        planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=41.5, results=results)
    )
    return plan.plan_id


async def test_a_late_device_is_shown_as_late_and_not_as_failed(config: CoordinatorSettings, tmp_path: Path) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, nano = await client.two_ready()
        await late_round(client, orin, nano)
        [row] = [line for line in (await shell("rounds")).stdout.splitlines() if line.split()[:1] == ["1"]]
        assert row.split()[:4] == ["1", "2,", "1", "late"]
        [content] = (await asked(shell, "rounds"))["rounds"]
        assert (content["failed"], content["late"], content["devices"]) == ([], ["nano"], 2)
        await shell("export", "--format", "csv", "--out", str(tmp_path / "tables"))
        tables = {
            name: list(csv.DictReader((tmp_path / "tables" / f"{name}.csv").read_text().splitlines()))
            for name in ("rounds", "results")
        }
        assert [(each["failed"], each["late"]) for each in tables["rounds"]] == [("0", "1")]
        assert {each["device_id"]: (each["failure"], each["late"]) for each in tables["results"]} == {
            "orin": ("", "False"),
            "nano": ("", "True"),
        }


async def test_a_restarted_coordinator_keeps_the_watts_of_a_late_device(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        plan_id = await late_round(client, orin, nano)
        granted_w = (await client.devices())["nano"].granted_w
        assert granted_w > 10.0
    async with serving_client(config) as client:
        [shown] = (await client.rounds()).rounds
        assert (list(shown.late), list(shown.failed)) == (["nano"], [])
        after = (await client.devices())["nano"]
        assert (after.granted_plan_id, after.granted_w) == (plan_id, granted_w)


async def test_an_unplanned_round_has_late_devices_too(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        await client.two_ready()
        results = {
            ORIN_NODE: planning_pb2.DeviceResult(num_examples=96.0, share=1.0),
            NANO_NODE: planning_pb2.DeviceResult(late=True),
        }
        await client.planning.ReportUnplannedRound(
            planning_pb2.ReportUnplannedRoundRequest(
                run_id=RUN,
                round=2,
                began_ago_s=600.0,
                wall_s=45.0,
                results=[planning_pb2.NodeResult(node_id=node, result=result) for node, result in results.items()],
            )
        )
        [shown] = (await client.rounds()).rounds
        assert (list(shown.late), list(shown.failed)) == (["nano"], [])


async def test_a_run_with_a_quorum_plans_around_the_late_device(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        orin, nano = await client.two_ready()
        loop = asyncio.get_running_loop()
        # A round takes the Orin 5 s, so the Nano replies to the first round during the third.
        grid = GridOfNodes({ORIN_NODE: Node("orin", takes_s=5.0), NANO_NODE: Node("nano", takes_s=13.0)})

        async def obey(number: int) -> None:
            await orin.obey(GrantPhase.OVER)
            await nano.obey(GrantPhase.OVER if number == 3 else GrantPhase.TRAINING)
            if number == 3:
                await nano.lease(GrantPhase.OVER)

        def evaluated(number: int, arrays: Any) -> MetricRecord:
            if number:
                asyncio.run_coroutine_threadsafe(obey(number), loop).result(20)
            return MetricRecord({"accuracy": 0.1 * number})

        strategy = PowerAware(
            FedAvg(fraction_evaluate=0.0),
            client.bound.address,
            quorum=Quorum(replies=1),
            survey_s=None,
            measures_left_out=False,
            workload="unnamed",
            clock=grid.clock,
        )
        await asyncio.to_thread(strategy.start, grid, ARRAYS, num_rounds=4, evaluate_fn=evaluated)
        seen = (await client.rounds()).rounds
        assert [view.devices for view in seen] == [2, 1, 1, 2]
        assert [list(view.late) for view in seen] == [["nano"], [], [], ["nano"]]
        assert not any(view.failed for view in seen)
        granted = {each.device_id: each.power_limit_w for each in seen[0].plan.assignments}
        assert [view.idle_w for view in seen[1:3]] == [granted["nano"]] * 2, "its watts are set aside"


# --- Trimmed round shown ----------------------------------------------------------------------------------------------
# A round that was trimmed while it ran: the command and the page show the current plan and the original one.

_SLOWER = np.array([[0, 300_000 * k, 0, 0] for k in range(len(ORIN_FRONT))])
DISTINCT = Front(**{**columns_of(ORIN_FRONT), "modes": ORIN_FRONT.modes - _SLOWER})
"""The front of the Orin, with modes that differ in their labels."""


def label(part: planning_pb2.Assignment) -> str:
    mode = part.mode
    return PowerMode(mode.cores, mode.cpu_khz, mode.gpu_hz, mode.mem_hz).label()


async def page_of(client: Any, path: str) -> str:
    def read() -> str:
        with urllib.request.urlopen(f"http://{client.bound.http_address}{path}", timeout=60) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(read)


async def test_the_plan_in_force_is_shown_with_the_first_where_it_differs(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await orin.send(
            front=session_pb2.FrontReport(front=front_to_message(DISTINCT), idle_w=5.0, minibatches_per_epoch=100)
        )
        plan = await client.plan()
        await client.obey()
        await shell("budget", "set", "site", "35", columns=100)
        await client.obey()
        [now] = [each for each in (await client.rounds()).rounds[0].plan.assignments if each.device_id == "orin"]
        [first] = [each for each in plan.assignments if each.device_id == "orin"]
        assert label(now) != label(first), "the budget was lowered for this"
        await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=31.0, power_w=20.0))

        selected = {each["device_id"]: each for each in (await asked(shell, "round", RUN, "1"))["selected"]}
        assert PowerMode(**selected["orin"]["mode"]).label() == label(now)
        assert selected["orin"]["planned_w"] == now.power_limit_w
        assert PowerMode(**selected["orin"]["first"]["mode"]).label() == label(first)
        assert selected["orin"]["first"]["predicted_s"] == first.warmup_s + first.epoch_s
        assert selected["orin"]["observed_s"] == now.warmup_s + 31.0
        assert selected["nano"]["first"] is None
        assert f"{label(now)} (first {label(first)})" in (await shell("round", RUN, "1", columns=160)).stdout
        for path in (f"/runs/{RUN}", "/devices/orin"):
            text = await page_of(client, path)
            assert label(now) in text and f"at first {label(first)}" in text, path


async def test_a_stopped_device_keeps_its_row(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        await client.two_ready()
        plan = await client.plan()
        await shell("budget", "set", "site", "7", columns=100)
        selected = {each["device_id"]: each for each in (await asked(shell, "round", RUN, "1"))["selected"]}
        assert {each["outcome"] for each in selected.values()} == {"stopped"}
        for part in plan.assignments:
            assert selected[part.device_id]["planned_w"] == part.power_limit_w
            text = await page_of(client, f"/devices/{part.device_id}")
            assert label(part) in text and "stopped" in text
        assert (await page_of(client, f"/runs/{RUN}")).count('<span class="bad">stopped</span>') == 2


# --- Exporting --------------------------------------------------------------------------------------------------------
# Exported tables, when read again, contain what the coordinator knows.

_NEEDS_PYARROW = pytest.mark.skipif(find_spec("pyarrow") is None, reason="the extra `parquet` is not installed")
FORMATS = ["csv", pytest.param("parquet", marks=_NEEDS_PYARROW)]


def read(folder: Path, form: str) -> dict[str, list[dict[str, Any]]]:
    """Every table, row by row; None for unknown values."""
    tables = {}
    for name, types in COLUMNS.items():
        path = folder / f"{name}.{form}"
        frame = pd.read_parquet(path) if form == "parquet" else pd.read_csv(path, dtype=types)  # type: ignore[call-overload]
        assert list(frame.columns) == list(types)
        if form == "parquet":
            assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == types
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        tables[name] = [{str(key): value for key, value in row.items()} for row in rows]
    return tables


@pytest.mark.parametrize("form", FORMATS)
async def test_what_is_exported_is_what_is_known(config: CoordinatorSettings, tmp_path: Path, form: str) -> None:
    out = tmp_path / "a folder" / "tables"

    async with served_with_shell(config.with_values(site=rack_and_roof(tmp_path))) as (client, shell):
        orin, _ = await client.two_ready()
        await shell("tag", "nano", "--add", "b", "--add", "a")
        plan = await a_round(client, orin)
        await client.plan(2)
        printed = await asked(shell, "export", "--out", str(out), "--format", form)
        assert {Path(each["file"]).stem for each in printed} == set(COLUMNS)
        tables = await asyncio.to_thread(read, out, form)
        assert {Path(each["file"]).stem: each["rows"] for each in printed} == {
            name: len(rows) for name, rows in tables.items()
        }
        empty = None if form == "csv" else ""
        nano, orin_row = tables["devices"]
        assert (nano["device_id"], nano["site_tags"], nano["operator_tags"]) == ("nano", "lab", "a b")
        assert (nano["limit_w"], orin_row["limit_w"], orin_row["supply"]) == (20.0, None, "rack")
        assert (orin_row["idle_w"], orin_row["profiled_modes"], orin_row["drained"]) == (5.0, 50, False)
        front = [row for row in tables["fronts"] if row["device_id"] == "orin"]
        assert [row["epoch_s"] for row in front] == ORIN_FRONT.epoch_s.tolist()
        assert [row["gpu_hz"] for row in front] == ORIN_FRONT.modes[:, 2].astype(int).tolist()
        [run] = tables["runs"]
        began = run.pop("started_unix_s")
        assert run == {
            "run_id": RUN,
            "name": RUN_NAME,
            "labels": "{}",
            "energy_budget_j": None,
            "energy_spent_j": None,
            "energy_set_aside_j": None,
            "strategy": "FedAvg",
            "rounds": 3,
            "workload": "unnamed",
            "finished": False,
            "error": empty,
            "finished_unix_s": None,
        }
        first, second = tables["rounds"]
        assert (first["run_id"], first["round"], first["devices"], first["failed"]) == (RUN, 1, 2, 1)
        assert (first["late"], second["failed"], second["late"]) == (0, 0, 0)
        assert (first["planned_w"], first["planned_s"], first["wall_s"]) == (plan.planned_w, plan.duration_s, 41.5)
        times = [orin_row["first_seen_unix_s"], began, first["planned_unix_s"], first["finished_unix_s"], time.time()]
        assert times == sorted(times) and second["finished_unix_s"] is None
        assert (first["observed_site_w"], second["wall_s"], second["deadline_s"]) == (None, None, None)
        assert [row for row in tables["metrics"] if row["metric"] == "accuracy"] == [
            {"run_id": RUN, "round": 1, "metric": "accuracy", "value": 2 / 3}
        ]
        parts = {row["device_id"]: row for row in tables["assignments"] if row["round"] == 1}
        assert {device_id: row["node_id"] for device_id, row in parts.items()} == {
            "orin": ORIN_NODE,
            "nano": NANO_NODE,
        }
        for assignment in plan.assignments:
            row = parts[assignment.device_id]
            assert (row["power_limit_w"], row["epoch_s"]) == (assignment.power_limit_w, assignment.epoch_s)
            assert row["gpu_hz"] == assignment.mode.gpu_hz
        assert [(row["device_id"], row["selected"], row["reason"]) for row in tables["decisions"][:2]] == [
            (each.device_id, each.selected, each.reason) for each in plan.decisions
        ]
        assert tables["observations"] == [
            {"run_id": RUN, "round": 1, "device_id": "orin", "epoch_s": 20.5, "power_w": 31.25, "beside_duty": True}
        ]
        assert {row["device_id"]: (row["failure"], row["num_examples"], row["loss"]) for row in tables["results"]} == {
            "orin": (empty, 96.0, 0.125),
            "nano": ("the node, is gone\nfor good", None, None),
        }
        assert {row["supply"]: row["budget_w"] for row in tables["supplies"] if row["round"] == 1} == {
            "site": 100.0,
            "rack": 60.0,
            "roof": 40.0,
        }


@pytest.mark.parametrize("form", FORMATS)
async def test_a_trimmed_round_is_exported_as_planned_with_what_became_of_it(
    config: CoordinatorSettings, tmp_path: Path, form: str
) -> None:

    async with served_with_shell(config) as (client, shell):
        _agents = await client.two_ready()
        plan = await client.plan()
        for watts in ("40", "20"):
            await shell("budget", "set", "site", watts, columns=100)
            await client.obey()
        await shell("export", "--out", str(tmp_path / "out"), "--format", form)
        tables = await asyncio.to_thread(read, tmp_path / "out", form)
        [row] = tables["rounds"]
        assert (row["devices"], row["in_other_mode"], row["stopped"]) == (2, 0, 2 - 1)
        assert (row["site_budget_w"], row["planned_w"], row["planned_s"]) == (100.0, plan.planned_w, plan.duration_s)
        assert (row["trimmed_site_budget_w"], row["trimmed_planned_w"]) == (20.0, 20.0)
        [site] = tables["supplies"]
        assert (site["budget_w"], site["trimmed_budget_w"], site["trimmed_planned_w"]) == (100.0, 20.0, 20.0)
        nano, orin = tables["assignments"]
        for part, exported in zip(plan.assignments, (nano, orin), strict=True):
            assert (exported["epoch_s"], exported["power_limit_w"]) == (part.epoch_s, part.power_limit_w)
        assert {nano["became"], orin["became"]} == {"stopped", None}
        assert orin["trimmed_cores"] is None


async def test_one_run_of_the_archive_can_be_exported_alone(config: CoordinatorSettings, tmp_path: Path) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        for run_id in ("1", "2"):
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=1))
            await client.plan(1, run_id)
            await client.end_trainings()
            metrics = {"accuracy": 0.1}
            request = planning_pb2.ReportMetricsRequest(run_id=run_id, round=0, metrics=metrics)
            await client.planning.ReportMetrics(request)
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))
    async with served_with_shell(config) as (client, shell):
        await shell("export", "--out", str(tmp_path / "out"), "--run", "1")
        tables = read(tmp_path / "out", "csv")
        assert {row["run_id"] for name in ("runs", "rounds", "assignments") for row in tables[name]} == {"1"}
        assert tables["metrics"] == [{"run_id": "1", "round": 0, "metric": "accuracy", "value": 0.1}]
        assert len(tables["devices"]) == 2
        with pytest.raises(InvalidInputError, match="unknown run '7': it never started, or was deleted; "):
            await shell("export", "--out", str(tmp_path / "none"), "--run", "7")
        assert not (tmp_path / "none").exists()


async def test_tables_replace_those_of_before_and_nothing_else(config: CoordinatorSettings, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "devices.csv").write_text("old")

    async with served_with_shell(config) as (client, shell):
        await client.agent().hello("orin")
        await shell("export", "--out", str(tmp_path / "out"))
        assert {path.name for path in (tmp_path / "out").iterdir()} == {
            "notes.txt",
            *(f"{name}.csv" for name in COLUMNS),
        }
        assert [row["device_id"] for row in read(tmp_path / "out", "csv")["devices"]] == ["orin"]
        with pytest.raises(InvalidInputError, match=r"cannot write to .*notes.txt: "):
            await shell("export", "--out", str(tmp_path / "out" / "notes.txt"))


def test_parquet_without_its_library_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInputError, match=r"Parquet needs pyarrow: pip install 'wattfleet\[parquet\]'"):
        command("export", "--out", str(tmp_path / "out"), "--format", "parquet", "--coordinator", "127.0.0.1:1")
    assert not (tmp_path / "out").exists()
