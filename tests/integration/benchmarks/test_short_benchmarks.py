"""The benchmarks of planning, of the first run, of a round's overhead and of energy limits, in short forms."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import plan
from benchmarks.energy import METHODS as ENERGY_METHODS
from benchmarks.energy import FedJoule, expected_j, shapley_values, training_time
from benchmarks.energy import main as energy_benchmark
from benchmarks.federated.learning import Federation, Model, Trained
from benchmarks.federated.tasks import digits
from benchmarks.first_run import (
    AGAIN,
    NEW,
    OTHER,
    WATTFLEET,
    Case,
    Outcome,
    Site,
    baseline_runs,
    devices,
    gains,
    goals,
    read,
    times,
    wattfleet_runs,
    write,
)
from benchmarks.round_overhead.__main__ import main
from benchmarks.round_overhead.timeline import STAGES
from wattfleet.core.choosing import Front
from wattfleet.core.planning import History, Offer
from wattfleet.simulation.baselines import PLAIN_FLOWER, PRESETS

# --- Plan -------------------------------------------------------------------------------------------------------------
# The planning benchmark runs and prints its results.


def figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    tiny = ["--points", "4", "--repeats", "1", "--instances", "2"]
    monkeypatch.setattr("sys.argv", ["plan", *tiny, *options])
    plan.main()
    return capsys.readouterr().out


def test_it_prints_its_figures_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(figures(capsys, monkeypatch, "--json", "--devices", "3", "30", "--workloads", "2"))
    assert found["workloads"] == 2
    assert found["devices"] == [3, 30]
    for name in ("ms", "curves_ms", "plan_ms", "coordinator_ms", "coordinator_of_one_ms", "useful_ms"):
        assert len(found[name]) == 2 and all(ms > 0 for ms in found[name])
    assert isinstance(found["growth"], float)
    assert 0 <= found["gap_pct"]["median"] <= found["gap_pct"]["max"] <= 0.1


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1,000" not in figures(capsys, monkeypatch, "--devices", "7")
    with pytest.raises(SystemExit):
        figures(capsys, monkeypatch, "--points", "65")


# --- First run --------------------------------------------------------------------------------------------------------
# The benchmark of the first run, with two boards and one round: its parts add up, and its table has every run.

BUDGET_W = 45.0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    """A fleet whose watts suffice for both boards."""
    site = Site({"orin-nano": 2}, BUDGET_W, drawn=None)
    case = Case(site, BUDGET_W, 0, digits(), 1, Federation(digits(), 2, 0))
    return [*baseline_runs(case), *wattfleet_runs(case, tmp_path_factory.mktemp("fleet"))]


def test_every_run_has_its_methods(outcomes: list[Outcome]) -> None:
    runs = {(each.run, each.method) for each in outcomes}
    assert runs == {
        *((run, WATTFLEET) for run in (NEW, AGAIN, OTHER)),
        *((run, method) for run in (NEW, OTHER) for method in (PRESETS, PLAIN_FLOWER)),
    }
    assert {each.rounds for each in outcomes} == {1}


def test_the_parts_of_a_run_add_up(outcomes: list[Outcome]) -> None:
    for each in outcomes:
        assert each.survey_s + each.waiting_s + each.training_s == pytest.approx(each.total_s)
        idle_kj = 10.0 * each.total_s / 1e3  # two boards idle at more than 10 W
        assert idle_kj < each.total_kj < BUDGET_W * each.total_s / 1e3


def test_a_fleet_measures_what_it_trains(outcomes: list[Outcome]) -> None:
    new, again, other = (each for each in outcomes if each.method == WATTFLEET)
    assert new.survey_s > 0 and other.survey_s > 0, "nothing was known of the workload"
    assert again.survey_s == 0, "the boards know it from the run before"
    assert new.fewest_modes is not None and again.fewest_modes is not None
    assert 0 < new.fewest_modes <= again.fewest_modes


def test_the_tables_and_the_file_have_all_rows(outcomes: list[Outcome], tmp_path: Path) -> None:
    console = Console(width=180)
    with console.capture() as printed:
        console.print(times(outcomes), devices(outcomes), gains(outcomes), goals(outcomes))
    text = printed.get()
    assert all(name in text for name in (NEW, AGAIN, OTHER, WATTFLEET, PRESETS, PLAIN_FLOWER))
    write(outcomes, tmp_path / "out" / "rows.csv")
    assert read(tmp_path / "out" / "rows.csv") == outcomes


# --- Round overhead ---------------------------------------------------------------------------------------------------
# The benchmark of a round's overhead, with one real SuperNode.


# The short forms run the other benchmarks; `tests/integration/simulation/test_deployment.py` runs real SuperNodes.
@pytest.mark.deployment
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_stages_make_up_the_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1", "--devices", "1", "--ways", "wattfleet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["wattfleet"]
    assert list(found["stages_s"]) == list(STAGES)
    assert sum(found["stages_s"].values()) == pytest.approx(found["round_s"])
    assert min(found["stages_s"].values()) >= -0.05, "the log is read every 10 ms"


@pytest.mark.deployment
@pytest.mark.timeout(180)
def test_an_unknown_way_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--ways", "flower,teleport"])
    assert "teleport" in capsys.readouterr().err


# --- Energy -----------------------------------------------------------------------------------------------------------
# The comparison within a global energy limit: FedJoule's selection against brute force, and a run on a few boards.

SAMPLES = (10, 30, 20)
TOWARDS = (1.0, 0.2, -0.5)


def loss_of(parameters: Mapping[str, torch.Tensor]) -> float:
    """A loss that falls with the only parameter, and ever more slowly."""
    return float(torch.exp(-parameters["x"]).sum())


def test_approximate_shapley_values_are_those_of_all_orders() -> None:
    start = {"x": torch.zeros(1)}
    updates = {client: Trained({"x": torch.tensor([to])}, 0.0) for client, to in enumerate(TOWARDS)}

    def lowered(clients: Sequence[int]) -> float:
        total = sum(SAMPLES[client] for client in clients)
        mean = sum(SAMPLES[client] * TOWARDS[client] for client in clients) / total if clients else 0.0
        return 1.0 - math.exp(-mean)

    orders = list(itertools.permutations(range(3)))
    exact = [
        sum(lowered(order[: order.index(client) + 1]) - lowered(order[: order.index(client)]) for order in orders)
        / len(orders)
        for client in range(3)
    ]
    found = shapley_values(start, updates, SAMPLES, loss_of, random.Random(1), permutations=3_000, tolerance=0.0)
    assert [found[client] for client in range(3)] == pytest.approx(exact, abs=0.02)
    assert sum(found.values()) == pytest.approx(lowered([0, 1, 2])), "the values share what all clients gain"


class ChosenByFedJoule(FedJoule):
    """FedJoule with stated values of its clients."""

    def __init__(self, offers: Sequence[Offer], values: Sequence[float]) -> None:
        super().__init__(offers, 1, cast(Federation, None), loss_of, 0, len(offers))
        self._value = dict(enumerate(values))


@pytest.mark.parametrize("seed", range(5))
def test_fedjoule_takes_the_most_value_and_then_the_soonest_end(seed: int) -> None:
    draw = np.random.default_rng(seed)
    offers = [Offer(f"device-{k}", front(draw, 4), 2.0) for k in range(5)]
    values = draw.uniform(0.1, 1.0, 5)
    within_j = float(draw.uniform(0.3, 0.9)) * sum(float(expected_j(offer).min()) for offer in offers)
    best_value, best_s = 0.0, math.inf
    for points in itertools.product(range(-1, 4), repeat=5):
        chosen = [k for k in range(5) if points[k] >= 0]
        if sum(float(expected_j(offers[k])[points[k]]) for k in chosen) <= within_j and chosen:
            value = float(sum(values[chosen]))
            ends_s = max(float(training_time(offers[k])[points[k]]) for k in chosen)
            if value > best_value + 1e-9 or (value > best_value - 1e-9 and ends_s < best_s):
                best_value, best_s = value, ends_s
    jobs = ChosenByFedJoule(offers, values.tolist()).plan(1, History(), cast(Model, None), within_j)
    number = {offer.device_id: k for k, offer in enumerate(offers)}
    assert sum(values[number[job.device_id]] for job in jobs) == pytest.approx(best_value)
    ends_s = max(job.assignment.warmup_s + 2 * job.assignment.epoch_s for job in jobs)
    assert ends_s == pytest.approx(best_s)


def front(draw: np.random.Generator, points: int) -> Front:
    """A front of random times and watts."""
    modes = np.column_stack([np.arange(1, points + 1), *np.full((3, points), 1e9)])
    epoch_s, power_w = np.sort(draw.uniform(5, 60, points)), np.sort(draw.uniform(5, 40, points))[::-1]
    none = np.zeros(points)
    return Front(modes, epoch_s, power_w, none, none, none)


@pytest.mark.parametrize(
    "methods",
    [("wattfleet", "fedjoule", "flower"), pytest.param(tuple(ENERGY_METHODS), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_every_method_keeps_to_the_energy_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], methods: Sequence[str]
) -> None:
    fleet = ["--fleet", "orin-nano:2,orin-nx:1", "--limits-kj", "40", "--rounds", "2", "--seeds", "1", "--jobs", "1"]
    assert energy_benchmark([*fleet, "--methods", ",".join(methods), "--out", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["provenance"] == "simulated"
    for name, runs in found["runs"].items():
        [run] = runs["40"]
        assert 0 < run["used_share"] <= 1, name
        assert run["rounds"] >= 1 and run["time_s"] > 0, name
    goal = found["accuracy_above_best_compared"]["40"]
    compared = {
        name: runs["40"][0]["accuracy"]
        for name, runs in found["runs"].items()
        if name in ("fedjoule", "fedjoule-10", "flower", "oort", "presets")
    }
    assert compared[goal["best_compared"]] == max(compared.values())
    assert energy_benchmark(["--show", str(tmp_path / "result.json")]) == 0
    assert "40 kJ above idle, simulated, means of 1 seeds" in " ".join(capsys.readouterr().out.split())
