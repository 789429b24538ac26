"""`wattfleet evaluate report`: its cases, its self-contained page, and its errors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from click.testing import Result
from plotly.offline import get_plotlyjs
from typer.testing import CliRunner

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile, board_named, write_profile
from wattfleet.core.prediction import NoAuditError, RooflinePredictor, SuspectRow, audit_rows
from wattfleet.evaluation.cli.commands import app
from wattfleet.evaluation.regression.predictors import BoostingPredictor, ForestPredictor
from wattfleet.evaluation.reports.cases import (
    PUBLISHED,
    Extent,
    Folder,
    budgets_w,
    build_report,
    choice_cases,
    corpus_size_cases,
    read_folder,
    transfer_cases,
)
from wattfleet.evaluation.reports.page import figures, write_html

REFERENCE, TARGET = "agx_orin_resnet18", "orin_nano_resnet18"
REGRESSIONS = {"linear", "tree", "forest", "boosting"}
QUICK = Extent(runs=1, network_runs=0, sizes=(10, 30), corpus_sizes=(400,), minibatches=(10, 40))


def measured(kind: str, count: int, ms: float = 1.0, watts: float = 1.0) -> Profile:
    modes = board_named(kind).space.array()
    modes = modes[np.random.default_rng(0).choice(len(modes), count, replace=False)]
    cores, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    step_ms = ms * (80 / (cpu * np.minimum(cores, 4)) + 60 / gpu + 9 / mem)
    return Profile(modes, step_ms, watts * (6e3 + 9e3 * gpu + 2e3 * cpu))


@pytest.fixture(scope="module", autouse=True)
def small_ensembles() -> Iterator[None]:
    """Ensembles of five trees instead of a hundred: the report's content is tested here, not its figures."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (ForestPredictor, BoostingPredictor):
            full = kind.unfitted
            patch.setattr(kind, "unfitted", lambda full=full: full().set_params(n_estimators=5))
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_profile(measured("agx-orin", 420, watts=2), folder / f"{REFERENCE}.csv")
    nano = measured("orin-nano", 24, ms=4)
    write_profile(nano, folder / f"{TARGET}.csv")
    for row in range(8):
        write_raw_log(folder / f"{TARGET}_telemetry", nano.rows(np.array([row])), minibatches=40)
    (folder / "hosts.csv").write_text("device,workload,minibatch_ms\nrtx-3090,bert,342.3\npi-5,resnet18,6369\n")
    (folder / "inference.csv").write_text("cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n4,1,1,1,1,9,9\n")
    return folder


def write_raw_log(folder: Path, row: Profile, minibatches: int) -> None:
    """Write raw logs of one mode: a slow first minibatch, then equal ones; idle power, then its power, each second."""
    (cores, cpu, gpu, mem), ms, mw = row.modes[0], float(row.minibatch_ms[0]), float(row.power_mw[0])
    run = folder / f"pm_{cores:.0f}_{cpu:.0f}_{gpu:.0f}_{mem:.0f}"
    run.mkdir(parents=True)
    times = [5000.0, *[ms] * minibatches]
    ends = np.cumsum(times) / 1e3
    rows = [f"{time},{end}" for time, end in zip(times, ends, strict=True)]
    (run / "minibatch.csv").write_text("\n".join(["epochtime_ms,log_time", *rows]))
    samples = [f"{4000.0 if second < 5 else mw},{second}" for second in range(int(ends[-1]) + 1)]
    (run / "jtop.csv").write_text("\n".join(["power cur,log_time", *samples]))


@pytest.fixture(scope="module")
def report(data: Path) -> dict[str, Any]:
    return build_report(read_folder(data), QUICK)


def page_of(report: dict[str, Any], folder: Path) -> str:
    """The page without the Plotly library."""
    write_html(report, folder / "page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.count(get_plotlyjs()) == 1
    return page.replace(get_plotlyjs(), "")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_command_writes_both_files(
    data: Path, report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = report
    monkeypatch.setattr("wattfleet.evaluation.reports.cases.build_report", lambda profiles, extent, report: built)
    out = tmp_path / "new" / "folder"
    result = invoke("--data", data, "--out", out, "--runs", 1, "--network-runs", 0, "--json")

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((out / "report.json").read_text())
    assert "agx_orin_resnet18" in (out / "report.html").read_text(encoding="utf-8")


def test_the_report_has_every_method_and_size_with_finite_figures(report: dict[str, Any]) -> None:
    json.dumps(report, allow_nan=False)

    of_roofline = [row["modes"] for row in report["transfers"] if row["name"] == "roofline"]
    assert of_roofline == [10]  # The target has fewer than 30 modes.
    names = {row["name"] for row in report["choices"] if row["target"] == TARGET}
    methods = {"wattfleet", "maxn", "random", "binary-search", "brute-force", "presets", "roofline"}
    assert names == methods | REGRESSIONS
    assert [(front["reference"], front["target"]) for front in report["fronts"]] == [(REFERENCE, TARGET)]
    (brute,) = (row for row in report["choices"] if row["name"] == "brute-force" and row["target"] == TARGET)
    assert brute["time_penalty_pct"]["mean"] == brute["excess_w"] == 0


def test_files_are_audited_with_a_reference(report: dict[str, Any]) -> None:
    assert all(isinstance(file["suspect_rows"], int) and file["no_audit"] is None for file in report["files"].values())
    assert all("time_mape_passing" in row for row in report["transfers"])


@pytest.mark.slow
def test_small_files_and_files_without_audit_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_a_dozen(profile: Profile, known: RooflinePredictor | None) -> list[SuspectRow]:
        if len(profile) == 12:
            raise NoAuditError("9 of 12 rows contradict the audit's fit")
        return audit_rows(profile, known)

    monkeypatch.setattr("wattfleet.evaluation.judging.sources.audit_rows", refuse_a_dozen)
    six, wrong = measured("orin-nano", 6, ms=2), np.array([2.5, 0.4, 1, 1, 1, 1])
    six = Profile(six.modes, six.minibatch_ms * wrong, six.power_mw * wrong)
    dozen = measured("orin-nano", 12, ms=4)
    for stem, profile in {REFERENCE: measured("agx-orin", 420, watts=2), "six": six, "dozen": dozen}.items():
        write_profile(profile, tmp_path / f"{stem}.csv")
    found = build_report(read_folder(tmp_path), Extent(runs=1, network_runs=0, sizes=(5,)))

    assert found["files"]["six"]["suspect_rows"] >= 1
    assert found["files"]["dozen"]["suspect_rows"] is None
    assert found["files"]["dozen"]["no_audit"] == "9 of 12 rows contradict the audit's fit"
    by_target = {row["target"]: row for row in found["transfers"] if row["name"] == "roofline"}
    assert set(by_target) == {"six", "dozen"}
    assert "time_mape_passing" not in by_target["dozen"]
    assert "– / –" in page_of(found, tmp_path)


def test_networks_have_their_own_number_of_runs(data: Path) -> None:
    profiles = read_folder(data).profiles
    for cases in (transfer_cases, choice_cases):
        runs = {(case.name, case.target): case.runs for case in cases(profiles, Extent(runs=3, network_runs=2))}
        assert runs["powertrain", TARGET] == runs["scratch", TARGET] == runs["scratch", REFERENCE] == 2
        assert runs["roofline", TARGET] == 3
        assert ("powertrain", REFERENCE) not in runs  # There is nothing to transfer from.
        assert not {"powertrain", "scratch"} & {case.name for case in cases(profiles, Extent(network_runs=0))}


def test_networks_are_fitted_at_the_sizes_of_the_paper() -> None:
    corpus = measured("agx-orin", 420)
    profiles = {REFERENCE: corpus, "other": corpus, TARGET: measured("orin-nano", 120)}
    sizes: dict[tuple[str, str | None, str], list[int]] = {}
    for case in transfer_cases(profiles, Extent()):
        sizes.setdefault((case.name, case.reference, case.target), []).append(case.modes)
    assert sizes["powertrain", REFERENCE, TARGET] == sizes["scratch", None, TARGET] == [10, 20, 30, 50, 100]
    # The paper reports other references at 50 modes only.
    assert sizes["powertrain", "other", REFERENCE] == [10, 50]


def test_a_smaller_corpus_trains_another_reference(report: dict[str, Any], data: Path) -> None:
    rows = report["corpus_sizes"]
    assert [(row["corpus_modes"], row["name"]) for row in rows] == [(400, "roofline"), (420, "roofline")]
    assert rows[0]["time_mape"] != rows[1]["time_mape"]
    alone = next(row for row in rows if row["corpus_modes"] == 420)
    sizes = [size for size, _ in corpus_size_cases(read_folder(data).profiles, Extent(corpus_sizes=(100, 500)))]
    assert set(sizes) == {420}  # 100 rows are too few for a reference, and there are no 500.
    assert alone["modes"] == 23


def test_raw_logs_are_evaluated_by_their_number_of_minibatches(report: dict[str, Any]) -> None:
    rows = report["minibatches"]
    assert [(row["minibatches"], row["modes"], row["without_power"]) for row in rows] == [(10, 8, 0), (40, 8, 0)]
    # Each log repeats the file's own time and power, so the fit is the same with ten minibatches.
    assert rows[0]["time_mape"] == pytest.approx(rows[1]["time_mape"])
    assert rows[0]["time_mape"] < 15


def test_files_of_another_kind_are_left_out_and_named(report: dict[str, Any], tmp_path: Path) -> None:
    assert report["left_out"] == ["inference.csv"]
    assert "Left out" in page_of(report, tmp_path)


def test_the_quick_form_skips_the_networks(
    data: Path, report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Extent] = []

    def built(folder: Folder, extent: Extent, report: object) -> dict[str, Any]:
        seen.append(extent)
        return quick_report

    quick_report = report
    monkeypatch.setattr("wattfleet.evaluation.reports.cases.build_report", built)
    assert invoke("--data", data, "--out", tmp_path, "--quick", "--seed", 3).exit_code == 0
    assert (seen[0].network_runs, seen[0].runs, seen[0].seed) == (0, 1, 3)


def test_other_machines_are_shown_beside_the_boards(report: dict[str, Any], tmp_path: Path) -> None:
    assert report["hosts"] == {"rtx-3090": {"bert": 342.3}, "pi-5": {"resnet18": 6369}}
    row = re.search(r"<tr><td class=\"id\">pi-5</td>.*", page_of(report, tmp_path))
    assert row is not None and re.findall(r">([^<>]+)</td>", row[0]) == ["pi-5", "–", "6,369.0"]
    (tmp_path / "hosts.csv").write_text("device,minibatch_ms\npi-5,6369\n")
    write_profile(measured("agx-orin", 420), tmp_path / "big.csv")
    write_profile(measured("orin-nano", 24), tmp_path / "small.csv")
    with pytest.raises(InvalidInputError, match="hosts.csv: cannot be read .* needs the columns device, workload"):
        read_folder(tmp_path)


def test_raw_logs_that_cannot_be_read_are_named_first(tmp_path: Path) -> None:
    write_profile(measured("agx-orin", 420), tmp_path / "big.csv")
    write_profile(measured("orin-nano", 24), tmp_path / "small.csv")
    (tmp_path / "small_telemetry" / "pm_2_1_1_1").mkdir(parents=True)
    result = invoke("--data", tmp_path, "--out", tmp_path / "out", "--quick")
    assert isinstance(result.exception, InvalidInputError)
    assert "pm_2_1_1_1: its raw logs cannot be read" in str(result.exception)


def test_the_page_is_self_contained(report: dict[str, Any], tmp_path: Path) -> None:
    page = page_of(report, tmp_path)

    assert not re.search(r"https?:|\b(src|href|action|srcset|poster)\s*=|@import|url\(|\bfetch\(|XMLHttp", page)
    assert "Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline';" in page
    assert "doi:10.1016/j.future.2024.07.001" in page
    assert "Every reference is trained on the one file" in page


def test_published_figures_appear_only_with_their_own_transfer(report: dict[str, Any], tmp_path: Path) -> None:
    assert "7.85" in page_of(report, tmp_path)
    renamed = json.loads(json.dumps(report).replace(REFERENCE, "another"))
    assert "7.85" not in page_of(renamed, tmp_path)
    assert all(one.time_mape or one.power_mape for one in PUBLISHED)


def test_file_names_are_escaped(report: dict[str, Any], tmp_path: Path) -> None:
    renamed = json.loads(json.dumps(report).replace(TARGET, "</script><img>"))
    page = page_of(renamed, tmp_path)

    assert "</script><img>" not in page
    assert "&lt;/script&gt;&lt;img&gt;" in page


def test_plotly_accepts_the_figures(report: dict[str, Any], tmp_path: Path) -> None:
    drawn = set(re.findall(r'class="plot" id="([^"]+)"', page_of(report, tmp_path)))
    assert drawn == set(figures(report))
    for name, figure in figures(report).items():
        go.Figure(json.loads(json.dumps(figure).replace("@ink", "black")))
        assert all(figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis")), name


def test_budgets_are_the_published_ones_on_the_agx_orin() -> None:
    assert budgets_w(measured("agx-orin", 30)) == [float(watts) for watts in range(17, 51)]
    nano = measured("orin-nano", 30)
    assert nano.power_mw.min() <= budgets_w(nano)[0] * 1e3
    assert budgets_w(nano)[-1] * 1e3 <= nano.power_mw.max()
    assert 1 <= len(budgets_w(measured("orin-nano", 30, watts=0.04))) <= 40
    assert len(budgets_w(measured("orin-nano", 30, watts=50))) <= 40


@pytest.mark.parametrize(
    ("counts", "options", "message"),
    [
        ({}, {}, "contains no CSV files with the columns cores,"),
        ({"small": 24}, {}, "400 or more modes"),
        ({"big": 420}, {}, "no other file"),
        ({"big": 420, "tiny": 5}, {}, "tiny.csv: 5 modes"),
        ({"big": 420, "small": 24}, {"--runs": 0}, "give 1 run or more"),
        ({"big": 420, "small": 24}, {"--network-runs": -1}, "0 or more"),
        ({"big": 420, "small": 24}, {"--seed": -1}, "0 or more"),
        (None, {}, "no such folder"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(
    counts: dict[str, int] | None, options: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    if counts is not None:
        folder.mkdir()
        for name, count in counts.items():
            write_profile(measured("agx-orin", count), folder / f"{name}.csv")
    result = invoke("--data", folder, "--out", tmp_path / "out", *(part for item in options.items() for part in item))

    assert isinstance(result.exception, InvalidInputError)
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_file_of_several_batches_is_refused(tmp_path: Path) -> None:
    write_profile(measured("agx-orin", 420), tmp_path / "big.csv")
    small = measured("orin-nano", 24)
    batches = np.arange(24) % 2 + 1
    write_profile(Profile(small.modes, small.minibatch_ms, small.power_mw, batches), tmp_path / "small.csv")
    with pytest.raises(InvalidInputError, match="small.csv: has rows of the batches 1, 2: keep the rows of one"):
        read_folder(tmp_path)


@pytest.mark.slow
def test_a_file_that_states_its_batch_is_evaluated_with_every_method(tmp_path: Path) -> None:
    for stem, profile in {"big": measured("agx-orin", 420), "small": measured("orin-nano", 24)}.items():
        stated = Profile(profile.modes, profile.minibatch_ms, profile.power_mw, np.full(len(profile), 16))
        write_profile(stated, tmp_path / f"{stem}.csv")
    found = build_report(read_folder(tmp_path), Extent(runs=1, network_runs=0, sizes=(10,), corpus_sizes=()))
    assert {row["name"] for row in found["transfers"] if row["target"] == "small"} == {"roofline"} | REGRESSIONS


def test_an_output_folder_that_is_a_file_is_refused(data: Path) -> None:
    result = invoke("--data", data, "--out", data / f"{TARGET}.csv")
    assert isinstance(result.exception, InvalidInputError)
    assert "cannot create the folder" in str(result.exception)


def test_a_report_that_cannot_be_written_is_refused_before_the_evaluation(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattfleet.evaluation.reports.cases.build_report", lambda *_, **__: pytest.fail("evaluated"))
    (tmp_path / "report.html").mkdir()
    result = invoke("--data", data, "--out", tmp_path)
    assert isinstance(result.exception, InvalidInputError)
    assert "report.html: cannot be written: give another --out" in str(result.exception)


def test_a_missing_extra_is_named_with_its_install_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "wattfleet.evaluation.reports.page")
    monkeypatch.delitem(sys.modules, "wattfleet.common.html_page", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = invoke("--data", data, "--out", tmp_path)
    assert isinstance(result.exception, InvalidInputError)
    assert "wattfleet[simulation]" in str(result.exception)
