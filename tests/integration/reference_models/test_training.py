"""Training a reference, by function and by command, and the shipped one against the corpus that it was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import reference_models
from edge_agent.profiling.journal import Journal
from reference_models.commands import app
from reference_models.training import model_card, require_board_offers, train
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    FittedWorkload,
    JournalHeader,
    ModeArray,
    ModeRecord,
    Profile,
    read_profile,
    write_profile,
)
from wattfleet.core.prediction import Artefact, RooflinePredictor, read_artefact, restore_predictor
from wattfleet.core.prediction.roofline import PowerParameters, TimeParameters, power_mw, settings_of, step_time_ms

# --- Training ---------------------------------------------------------------------------------------------------------
# Training a reference, by function and by command.


SPACE = BOARDS["orin-nano"].space.array()
TIME = TimeParameters(270, 80, 16, 46, 7, 122, 3, 4, 1, 0.2, 1.9, 0.3, 6)
POWER = PowerParameters(6000, 20, 240, 650, 8300, 1100, 400, 6000, 400, 1.7, 1.2, 1.4, 0.4)
WORKLOAD = FittedWorkload("made-up", 8, 100)


def measured(modes: ModeArray, seed: int) -> Profile:
    """Synthetic measurements with 2 % noise; the true values have a mean absolute error of 1.6 %."""
    rng = np.random.default_rng(seed)
    noise = np.exp(rng.normal(0, 0.02, (2, len(modes))))
    settings = settings_of(modes, None)
    return Profile(modes, step_time_ms(TIME, settings) * noise[0], power_mw(POWER, TIME, settings) * noise[1])


CORPUS, TARGET = measured(SPACE[::4], 0), measured(SPACE[1::12], 1)


STEPS: list[str] = []


@pytest.fixture(scope="module")
def trained() -> Artefact:
    return train(CORPUS, WORKLOAD, "orin-nano", {"measurements": "made up"}, {"target": TARGET}, STEPS.append)


def test_a_reference_fits_its_corpus_to_the_noise_and_states_its_errors(trained: Artefact) -> None:
    figures = trained.details.figures
    assert figures["corpus_modes"] == len(CORPUS) == 450
    for key in ("corpus", "held_out", "transfer_target"):
        assert 0.5 < figures[key]["time_mape_pct"] < 3.5, key
        assert 0.5 < figures[key]["power_mape_pct"] < 3.5, key
    predicted = restore_predictor(trained).predict(CORPUS.modes)
    error = 100 * np.mean(np.abs(predicted.minibatch_ms / CORPUS.minibatch_ms - 1))
    assert figures["corpus"]["time_mape_pct"] == pytest.approx(error, abs=0.01)


def test_held_out_modes_are_predicted_worse_than_fitted_ones(trained: Artefact) -> None:
    figures = trained.details.figures
    assert figures["held_out"]["time_mape_pct"] > figures["corpus"]["time_mape_pct"]


def test_every_step_is_reported(trained: Artefact) -> None:
    assert any("450 modes" in step for step in STEPS)
    assert any("target" in step for step in STEPS)


def test_the_card_names_provenance_figures_and_the_command(trained: Artefact) -> None:
    card = model_card(trained, "nano", "wattfleet reference train --corpus data/nano.csv")
    for part in ("# nano", "made up", "orin-nano", trained.digest, "--corpus data/nano.csv", "450 measured"):
        assert part in card


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="this one has 150"):
        train(TARGET, WORKLOAD, "orin-nano", {}, {}, lambda step: None)


@pytest.fixture
def corpus_csv(tmp_path: Path) -> Path:
    write_profile(CORPUS, tmp_path / "corpus.csv")
    return tmp_path / "corpus.csv"


def test_a_target_with_rows_of_the_corpus_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="100 of the target's 100 rows are also in the reference's corpus"):
        train(CORPUS, WORKLOAD, "orin-nano", {}, {"part": CORPUS.rows(np.arange(100))}, lambda step: None)


def test_the_manifest_pins_the_rows_of_the_corpus(trained: Artefact) -> None:
    assert trained.details.provenance == {"measurements": "made up", "corpus_sha256": CORPUS.sha256()}


@pytest.mark.parametrize("missing", ["board", "workload", "minibatch", "minibatches-per-epoch"])
def test_workload_and_board_have_no_default(corpus_csv: Path, tmp_path: Path, missing: str) -> None:
    given = options(corpus_csv, tmp_path / "nano")
    at = given.index(f"--{missing}")
    result = CliRunner().invoke(app, given[:at] + given[at + 2 :], env={"COLUMNS": "200"})
    assert result.exit_code != 0
    assert f"--{missing}" in result.output + str(result.exception)
    assert not (tmp_path / "nano").exists()


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    path = tmp_path / "profile.jsonl"
    header = JournalHeader("jetson-1", "orin-nano", "hardware", "acme/digits", 32, "VDD_IN")
    with Journal.open(path, header) as opened:
        for row in CORPUS.measurements():
            opened.append(ModeRecord(row.mode, row.minibatch_ms, row.power_mw, 0.01, 0.01, 20, 10, 30.0))
    return path


def test_a_journal_states_its_board_workload_batch_and_meter(journal: Path, tmp_path: Path) -> None:
    words = ["train", "--corpus", str(journal), "--out", str(tmp_path / "nano"), "--minibatches-per-epoch", "100"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    details = read_artefact(tmp_path / "nano").details
    assert (details.board, details.workload) == ("orin-nano", FittedWorkload("acme/digits", 32, 100))
    assert details.facts is not None and details.facts.batch == 32
    assert details.provenance["figures of"] == "VDD_IN"
    assert "hardware" in details.provenance["measurements"]
    assert "figures of: VDD_IN" in (tmp_path / "nano" / "MODEL_CARD.md").read_text()


def test_a_minibatch_other_than_the_journals_is_refused(journal: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, options(journal, tmp_path / "nano"))
    assert isinstance(result.exception, InvalidInputError)
    assert "states minibatches of 32 samples: omit --minibatch" in str(result.exception)


def test_the_board_must_offer_the_modes_of_the_corpus() -> None:
    require_board_offers("orin-nano", CORPUS)
    with pytest.raises(InvalidInputError, match="'agx-orin' does not offer .*: give --board orin-nano$"):
        require_board_offers("agx-orin", CORPUS)
    odd = Profile(CORPUS.modes + [0, 0, 1, 0], CORPUS.minibatch_ms, CORPUS.power_mw)
    with pytest.raises(
        InvalidInputError, match="'orin-nano' does not offer .*: no known board does .* name of your own"
    ):
        require_board_offers("orin-nano", odd)
    with pytest.raises(InvalidInputError, match="name of your own"):
        require_board_offers(" ", odd)
    require_board_offers("my-board", odd)


def options(corpus: Path, out: Path, /, **changed: str) -> list[str]:
    given = {
        "--corpus": str(corpus),
        "--out": str(out),
        "--board": "orin-nano",
        "--workload": "made-up",
        "--minibatch": "8",
        "--minibatches-per-epoch": "100",
    }
    given |= {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return ["train", *(word for pair in given.items() for word in pair)]


def test_the_command_stores_the_reference_and_prints_its_manifest(corpus_csv: Path, tmp_path: Path) -> None:
    out = tmp_path / "references" / "nano"
    result = CliRunner().invoke(app, [*options(corpus_csv, out, source="made up"), "--json"])
    assert result.exit_code == 0, result.output
    stored = read_artefact(out)
    assert json.loads(result.stdout) == json.loads(stored.manifest)
    assert stored.details.workload == WORKLOAD
    assert stored.details.board == "orin-nano"
    card = (out / "MODEL_CARD.md").read_text()
    assert "made up" in card
    assert str(tmp_path) not in card + stored.manifest.decode()


@pytest.mark.slow
def test_without_json_the_command_prints_a_table(corpus_csv: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, options(corpus_csv, tmp_path / "nano"))
    assert result.exit_code == 0, result.output
    assert "held out" in result.stdout
    assert read_artefact(tmp_path / "nano").digest[:12] in result.stdout


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"corpus": "nowhere.csv"}, "nowhere.csv: no such file"),
        ({"board": "toaster"}, "unknown board 'toaster'"),
        ({"board": "agx-orin"}, "give --board orin-nano"),
        ({"minibatch": "0"}, "1 to 1,000,000 samples"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    corpus_csv: Path, tmp_path: Path, changed: dict[str, str], text: str
) -> None:
    out = tmp_path / "nano"
    result = CliRunner().invoke(app, options(corpus_csv, out, **changed))
    assert isinstance(result.exception, InvalidInputError)
    assert text in str(result.exception)
    assert not out.exists()


def population_file(folder: Path, *corpora: str, **changed: object) -> Path:
    path = folder / "population.toml"
    entry = {"network": "made-up", "board": "orin-nano", "loader_workers": 4} | changed
    keys = "".join(f"{name} = {json.dumps(value)}\n" for name, value in entry.items())
    path.write_text("".join(f"[[corpus]]\ncsv = {json.dumps(csv)}\n{keys}" for csv in corpora))
    return path


@pytest.mark.slow
def test_a_population_is_learned_from_its_corpora(corpus_csv: Path, tmp_path: Path) -> None:
    write_profile(TARGET, corpus_csv.parent / "other.csv")
    listed = population_file(tmp_path, "other.csv", corpus_csv.name)
    result = CliRunner().invoke(app, options(corpus_csv, tmp_path / "nano", population=str(listed)))
    assert result.exit_code == 0, result.output
    stored = read_artefact(tmp_path / "nano")
    assert [entry.corpus for entry in stored.details.population] == [corpus_csv.name, "other.csv"]
    assert np.isfinite(restore_predictor(stored).predict(SPACE).minibatch_ms).all()


@pytest.mark.parametrize(
    ("corpora", "changed", "text"),
    [
        ([], {}, "corpus: Field required"),
        (["nowhere.csv"], {}, "nowhere.csv: no such file"),
        (["corpus.csv"], {"board": "toaster"}, "unknown board 'toaster'"),
        (["corpus.csv"], {"loader_workers": -1}, "corpus.0.loader_workers: Input should be greater than or equal to 0"),
        (["corpus.csv"], {"loader_workers": 10**9}, "corpus.0.loader_workers: Input should be less than or equal to"),
        (["corpus.csv"], {"batch": 0}, "corpus.0.batch: Input should be greater than or equal to 1"),
        (["corpus.csv"] * 65, {}, "at most 64 items"),
        (["corpus.csv", "other.csv", "other.csv"], {}, "other.csv: its rows are listed twice"),
        (["other.csv"], {}, "does not list the reference's own corpus"),
    ],
)
def test_a_bad_population_is_refused_before_fitting(
    corpus_csv: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    corpora: list[str],
    changed: dict[str, object],
    text: str,
) -> None:
    monkeypatch.setattr(RooflinePredictor, "fit", lambda *args, **kwargs: pytest.fail("fitted"))
    write_profile(TARGET, corpus_csv.parent / "other.csv")
    listed = population_file(tmp_path, *corpora, **changed)
    result = CliRunner().invoke(app, options(corpus_csv, tmp_path / "nano", population=str(listed)))
    assert isinstance(result.exception, InvalidInputError)
    assert text in str(result.exception)
    assert not (tmp_path / "nano").exists()


def test_a_directory_with_foreign_files_is_refused_before_fitting(
    corpus_csv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reference_models.training.train", lambda *args, **kwargs: pytest.fail("trained"))
    result = CliRunner().invoke(app, options(corpus_csv, tmp_path))
    assert isinstance(result.exception, InvalidInputError)
    assert "'corpus.csv', which is not part of a reference" in str(result.exception)


# --- Shipped on corpus ------------------------------------------------------------------------------------------------
# The shipped reference against the corpus that it was trained on.


@pytest.mark.data
@pytest.mark.slow
def test_the_shipped_reference_matches_a_fit_to_its_corpus(corpora: Path) -> None:
    artefact = reference_models.load("agx_orin_resnet18")
    corpus = read_profile(corpora / "agx_orin_resnet18.csv")
    shipped, refitted = (
        restore_predictor(artefact).predict(corpus.modes),
        RooflinePredictor.fit(corpus).predict(corpus.modes),
    )
    # Not bit for bit: another numerical library may round differently.
    np.testing.assert_allclose(shipped.minibatch_ms, refitted.minibatch_ms, rtol=0.01)
    np.testing.assert_allclose(shipped.power_mw, refitted.power_mw, rtol=0.01)
    error = 100 * np.abs(shipped.minibatch_ms / corpus.minibatch_ms - 1)
    stated = json.loads(artefact.manifest)["figures"]["corpus"]
    assert error.mean() == pytest.approx(stated["time_mape_pct"], abs=0.01)
    assert np.median(error) == pytest.approx(stated["time_median_ape_pct"], abs=0.01)
