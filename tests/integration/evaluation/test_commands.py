"""`wattfleet evaluate transfer`, `wattfleet evaluate interleave` and `wattfleet evaluate duty`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

import reference_models
from tests.fakes.paired_corpora import SPACE, corpora
from tests.fakes.short_forms import first
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Profile, Task, board_named, write_profile
from wattfleet.core.prediction import Artefact, NoAuditError
from wattfleet.evaluation.cli.commands import app
from wattfleet.evaluation.judging.sources import audited

# --- Evaluate commands ------------------------------------------------------------------------------------------------
# `wattfleet evaluate transfer`.


def measured(count: int, slower: float = 1.0) -> Profile:
    modes = board_named("agx-orin").space.array()
    modes = modes[np.random.default_rng(0).choice(len(modes), count, replace=False)]
    cores, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    step_ms = slower * (80 / (cpu * np.minimum(cores, 4)) + 60 / gpu + 9 / mem)
    return Profile(modes, step_ms, 6e3 + 9e3 * gpu + 2e3 * cpu)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_profile(measured(60), tmp_path / "target.csv")
    return tmp_path / "target.csv"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["transfer", *map(str, arguments)])


def test_json_has_the_documented_keys(target: Path) -> None:
    result = run("--reference", "agx_orin_resnet18", "--target", target, "--modes", 10, "--runs", 2, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["time_mape"]) == set(found["power_mape"]) == set(found["fit_seconds"]) == {"median", "q1", "q3"}
    assert set(found["coverage_90"]) == {"time", "power"}
    assert set(found["time_mape_passing"]) == set(found["power_mape_passing"]) == {"median", "q1", "q3"}
    assert 0 <= found["suspect_rows"] <= 3


def test_the_table_labels_its_figures(target: Path) -> None:
    result = run("--reference", "agx_orin_resnet18", "--target", target, "--modes", 10, "--runs", 2)
    assert result.exit_code == 0, result.output
    assert "time, MAPE %" in result.stdout
    assert "pass the audit" in result.stdout
    assert "90 % intervals" in result.stdout


def few(folder: Path, count: int) -> Path:
    """A CSV of some rows; if there are more than two, two of them are wrong."""
    profile = measured(count, slower=1.5)
    time, power = profile.minibatch_ms.copy(), profile.power_mw.copy()
    if count > 2:
        time[:2], power[:2] = time[:2] * [3, 0.3], power[:2] * [2.5, 0.4]
    write_profile(Profile(profile.modes, time, power), folder / "few.csv")
    return folder / "few.csv"


@pytest.mark.parametrize(("count", "modes"), first(2, [(1, 0), (6, 3), (2, 0), (3, 1), (4, 2), (6, 5)]))
@pytest.mark.parametrize("corpus", [True, False])
def test_small_targets_can_be_evaluated(target: Path, tmp_path: Path, count: int, modes: int, corpus: bool) -> None:
    reference = target if corpus else "agx_orin_resnet18"
    options = ("--reference", reference, "--target", few(tmp_path, count), "--modes", modes, "--runs", 1)
    result = run(*options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["suspect_rows"] is None) == (found["no_audit"] is not None)
    if found["suspect_rows"] is None:
        assert "time_mape_passing" not in found
    assert corpus or run(*options).exit_code == 0


def test_a_target_too_small_for_an_audit_has_no_trusted_rows() -> None:
    found = audited(measured(4), None)  # Without a reference, as when a network is evaluated.
    assert found.trusted is None and found.suspect_rows is None
    assert "4 measured modes are too few to audit" in str(found.no_audit_reason)


def test_the_table_states_why_there_is_no_audit(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NoAuditError("9 of 9 rows contradict [the fit]")

    monkeypatch.setattr("wattfleet.evaluation.judging.sources.audit_rows", refuse)
    result = run("--reference", "agx_orin_resnet18", "--target", target, "--modes", 10, "--runs", 1)
    assert result.exit_code == 0, result.output
    assert "the target could not be audited: 9 of 9 rows contradict [the fit]" in result.stdout
    assert "pass the audit" not in result.stdout


@pytest.mark.parametrize("command", ["transfer", "choice"])
def test_a_corpus_that_shares_rows_with_the_target_is_refused(target: Path, tmp_path: Path, command: str) -> None:
    copy = tmp_path / "copy.csv"
    write_profile(measured(60).rows(np.arange(20, 40)), copy)
    for reference in (target, copy):
        result = CliRunner().invoke(app, [command, "--reference", str(reference), "--target", str(target)])
        assert isinstance(result.exception, InvalidInputError)
        assert "rows are also in the reference's corpus" in str(result.exception)


def test_a_shipped_reference_trained_on_the_target_is_refused(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = reference_models.load("agx_orin_resnet18")
    provenance = {"corpus_sha256": measured(60).sha256()}
    manifest = json.loads(shipped.manifest) | {"provenance": provenance}
    pinned = Artefact(json.dumps(manifest).encode(), shipped.weights)
    monkeypatch.setattr("wattfleet.evaluation.judging.sources.named_reference", lambda name: pinned)
    result = run("--reference", "agx_orin_resnet18", "--target", target)
    assert isinstance(result.exception, InvalidInputError)
    assert "is the corpus that the reference 'agx_orin_resnet18' was trained on" in str(result.exception)
    other = tmp_path / "other.csv"
    write_profile(measured(60, slower=1.1), other)
    assert run("--reference", "agx_orin_resnet18", "--target", other, "--modes", 9, "--runs", 1).exit_code == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--predictor": "oracle"}, "roofline, boosting, forest, linear, powertrain, scratch, tree"),
        ({"--predictor": "powertrain"}, "give the CSV of its corpus"),
        ({"--reference": "nowhere"}, "agx_orin_resnet18"),
        ({"--modes": 60}, "draw 0 to 59 modes"),
        ({"--modes": 4, "--predictor": "scratch"}, "at least 5"),
        ({"--runs": 0}, "1 or more"),
        ({"--seed": -1}, "negative"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(target: Path, changed: dict[str, object], message: str) -> None:
    options = {"--reference": "agx_orin_resnet18", "--target": target, "--modes": 10, "--runs": 1} | changed
    result = run(*(part for option in options.items() for part in option))
    assert isinstance(result.exception, InvalidInputError)
    assert message in str(result.exception)


# --- Interleaving commands --------------------------------------------------------------------------------------------
# `wattfleet evaluate interleave` and `wattfleet evaluate duty`.

TRAINING = Profile(SPACE[:3], np.array([10.0, 30.0, 50.0]), np.array([20e3, 10e3, 8e3]))
INFERENCE = Profile(
    SPACE[:3], np.array([20.0, 50.0, 200.0]), np.array([16e3, 12e3, 6e3]), np.array([10, 10, 10]), Task.INFERENCE
)
# At 100 requests a second, 10 are collected in 100 ms. Row 0 trains 8 minibatches at 20 W; row 1 trains 1 at 12 W; row
# 2 is late.


def written(folder: Path, name: str, profile: Profile) -> Path:
    write_profile(profile, folder / name)
    return folder / name


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return written(tmp_path, "training.csv", TRAINING), written(tmp_path, "inference.csv", INFERENCE)


def evaluate(command: str, *arguments: object) -> Result:
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def interleave(files: tuple[Path, Path], *arguments: object) -> Result:
    service = ("--latency-s", 0.2, "--arrival-per-s", 100, "--budgets", "11:21:2", "--strategy", "brute-force")
    return evaluate("interleave", "--training", files[0], "--inference", files[1], *service, *arguments)


def duty(file: Path, *arguments: object) -> Result:
    service = ("--latency-ms", 200, "--arrival-per-s", 100, "--budgets", "11:21:2", "--strategy", "brute-force")
    return evaluate("duty", "--inference", file, *service, *arguments)


def refusal(result: Result) -> str:
    assert result.exit_code == 1
    assert isinstance(result.exception, InvalidInputError), result.exception
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_interleave_prints_hand_computed_figures(files: tuple[Path, Path]) -> None:
    result = interleave(files, "--json")
    assert result.exit_code == 0, result.output
    best = {"median": 1, "p10": 1, "mean": 1}
    assert json.loads(result.stdout) == {
        "problems": 6,
        "solvable": 5,  # only a budget of 11 W is below 12 W
        "with_training": 5,
        "found_pct": 100,
        "training_share": best,
        "rate_share": best,
        "over_budget_pct": 0,
        "over_budget_1w_pct": 0,
        "latency_broken_pct": 0,
        "measured": {"mean": 6, "most": 6},
    }


def test_duty_prints_hand_computed_figures(files: tuple[Path, Path]) -> None:
    result = duty(files[1], "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {
        "problems": 6,
        "solvable": 5,
        "found_pct": 100,
        "loss_pct": {"median": 0, "mean": 0, "p90": 0},
        "over_budget_pct": 0,
        "over_budget_1w_pct": 0,
        "latency_broken_pct": 0,
        "excess_w": 0,
        "measured": {"mean": 3, "most": 3},
    }


def test_the_tables_label_their_figures(files: tuple[Path, Path]) -> None:
    table = interleave(files).stdout
    assert "brute-force: training.csv beside inference.csv" in " ".join(table.split())
    assert "training share median" in table and "latency broken pct" in table
    assert "loss pct p90" in duty(files[1]).stdout


STRATEGIES = ["wattfleet", "network", "gradient", "binary-search", "random", "brute-force"]


@pytest.mark.usefixtures("few_epochs")
@pytest.mark.parametrize("shared", [(), ("--shared",)])
@pytest.mark.parametrize("strategy", first(2, STRATEGIES))
def test_interleave_knows_its_strategies(tmp_path: Path, strategy: str, shared: tuple[str, ...]) -> None:
    pair = corpora(30)
    files = written(tmp_path, "t.csv", pair.training), written(tmp_path, "i.csv", pair.inference)
    limits = ("--latency-s", 1, "--arrival-per-s", 60, "--budgets", "40:60:20", "--measure", 8)
    result = interleave(files, *limits, "--strategy", strategy, "--json", *shared)
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["problems"] == figures["solvable"] == 2
    assert figures["measured"]["most"] <= 8 or strategy == "brute-force"
    if strategy != "network" and not shared:
        assert figures["over_budget_pct"] == figures["latency_broken_pct"] == 0


@pytest.mark.usefixtures("few_epochs")
@pytest.mark.parametrize("strategy", first(2, STRATEGIES))
def test_duty_knows_its_strategies(tmp_path: Path, strategy: str) -> None:
    file = written(tmp_path, "i.csv", corpora(30).inference)
    limits = ("--latency-ms", 1000, "--arrival-per-s", 60, "--budgets", "40:60:20", "--measure", 8)
    result = duty(file, *limits, "--strategy", strategy, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["problems"] == figures["solvable"] == 2
    assert figures["measured"]["most"] <= 8 or strategy == "brute-force"
    if strategy != "network":
        assert figures["over_budget_pct"] == figures["latency_broken_pct"] == 0


def test_the_objective_is_what_is_maximized(tmp_path: Path) -> None:
    # At 40 requests a second: 3 minibatches in the 100 ms of a batch of 4, or 9 in the 400 ms of a batch of 16.
    training = Profile(SPACE[:1], np.array([30.0]), np.array([20e3]))
    modes, batch = np.repeat(SPACE[:1], 2, axis=0), np.array([4, 16])
    inference = Profile(modes, np.array([10.0, 130.0]), np.array([20e3, 20e3]), batch, Task.INFERENCE)
    files = written(tmp_path, "t.csv", training), written(tmp_path, "i.csv", inference)
    limits = ("--latency-s", 1, "--arrival-per-s", 40, "--budgets", 30, "--json")
    found = {
        objective: json.loads(interleave(files, *limits, "--objective", objective).stdout)
        for objective in ("most-per-window", "most-per-second")
    }
    assert found["most-per-window"]["training_share"]["mean"] == found["most-per-second"]["rate_share"]["mean"] == 1
    assert found["most-per-window"]["rate_share"]["mean"] == 0.75
    assert found["most-per-second"]["training_share"]["mean"] == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--latency-s", "2:0.5"), "--latency-s: the range '2:0.5' ends below its start"),
        (("--arrival-per-s", "fast"), "--arrival-per-s: invalid range 'fast': give FIRST:LAST:STEP"),
        (("--budgets", "0:10"), "--budgets: invalid range '0:10'"),
        (("--measure", 1), "--measure must be 2 or more, not 1"),
        (("--seed", -1), "--seed must be 0 or more, not -1"),
        (("--strategy", "best"), "unknown strategy 'best': choose one of wattfleet, gradient, binary-search, random"),
        (("--budgets", "1:5"), "no mode and batch keeps the limits of any problem: allow a higher latency"),
        (("--strategy", "wattfleet", "--reference", "nobody"), "'nobody' is neither a file nor a shipped reference"),
        (("--strategy", "network", "--measure", 3), "trained on 2 or more measurements, not 1"),
    ],
)
def test_interleave_refuses_bad_options(files: tuple[Path, Path], arguments: tuple[object, ...], problem: str) -> None:
    assert problem in refusal(interleave(files, *arguments))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--latency-ms", "50:10"), "--latency-ms: the range '50:10' ends below its start"),
        (("--measure", 0), "--measure must be 1 or more, not 0"),
        (("--strategy", "best"), "choose one of wattfleet, roofline"),
        (("--budgets", "1:5"), "no row of the target keeps the limits of any problem"),
        (("--strategy", "network", "--measure", 1), "trained on 2 or more measurements, not 1"),
    ],
)
def test_duty_refuses_bad_options(files: tuple[Path, Path], arguments: tuple[object, ...], problem: str) -> None:
    assert problem in refusal(duty(files[1], *arguments))


def test_interleave_refuses_files_that_do_not_fit(files: tuple[Path, Path], tmp_path: Path) -> None:
    training, inference = files
    assert "--inference: the file holds measurements of training" in refusal(interleave((training, training)))
    assert "--training: the file holds measurements of inference" in refusal(interleave((inference, inference)))
    apart = written(tmp_path, "apart.csv", replace(TRAINING, modes=SPACE[-3:]))
    assert "no power mode in common" in refusal(interleave((apart, inference)))
    bare = written(tmp_path, "bare.csv", replace(INFERENCE, batch=None))
    assert "--inference: the file has no column 'batch'" in refusal(interleave((training, bare)))
    several = written(tmp_path, "several.csv", replace(TRAINING, batch=np.array([1, 1, 2])))
    assert "--training: the file has several batch sizes" in refusal(interleave((several, inference)))


@pytest.mark.parametrize("strategy", ["random", "wattfleet"])
def test_duty_refuses_files_that_do_not_fit(files: tuple[Path, Path], tmp_path: Path, strategy: str) -> None:
    bare = written(tmp_path, "bare.csv", replace(INFERENCE, batch=None))
    assert "has no column 'batch'" in refusal(duty(bare, "--strategy", strategy))
    batches = written(tmp_path, "batches.csv", replace(TRAINING, batch=np.array([10, 10, 10])))
    assert "--inference: the file holds measurements of training" in refusal(duty(batches, "--strategy", strategy))
    assert "--inference: the file holds measurements of training" in refusal(duty(files[0], "--strategy", strategy))
