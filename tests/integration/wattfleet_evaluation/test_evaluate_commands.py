"""`wattfleet evaluate transfer`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

import reference_models
from wattfleet.errors import InvalidInputError
from wattfleet.modes import Profile, board_named, write_profile
from wattfleet.prediction import Artefact, NoAuditError
from wattfleet_evaluation.cli.commands import app
from wattfleet_evaluation.judging.sources import audited


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


@pytest.mark.parametrize(("count", "modes"), [(1, 0), (2, 0), (3, 1), (4, 2), (6, 3), (6, 5)])
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

    monkeypatch.setattr("wattfleet_evaluation.judging.sources.audit_rows", refuse)
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
    monkeypatch.setattr("wattfleet_evaluation.judging.sources.load", lambda name: pinned)
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
