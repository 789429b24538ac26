"""The benchmarks of planning, of the first run and of a round's overhead, in short forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import plan
from benchmarks.federated.learning import Federation
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
