"""Evaluating choices of mode and batch size for inference, on corpora whose best rows simple loops find."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.fakes.short_forms import first
from wattfleet.core.choosing import Objective, ServiceLimits
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import BatchArray, ModeArray, Profile, Task, board_named, write_profile
from wattfleet.core.prediction import Prediction
from wattfleet.evaluation.cli.commands import app
from wattfleet.evaluation.judging.choices import ServingCases, evaluate_serving
from wattfleet.evaluation.methods import (
    SERVING_METHODS,
    Choose,
    InferenceBench,
    PredictRows,
    Session,
    serving_method_named,
)
from wattfleet.evaluation.powertrain import Schedule

SPACE = board_named("agx-orin").space.array()
MODES = SPACE[np.random.default_rng(0).choice(len(SPACE), 40, replace=False)]
BATCHES = (1, 4, 16, 32)


def truth(modes: ModeArray, batch: BatchArray) -> tuple[np.ndarray, np.ndarray]:
    """Times with a fixed part and a part per sample, and powers that rise with mode and batch size."""
    _, cpu, gpu, mem = (modes / [1.0, 1e6, 1e9, 1e9]).T
    time = 3 / cpu + (1.2 / gpu + 0.4 / mem) * batch
    return time, 5e3 + 2e3 * cpu + 1.2e4 * gpu * batch / (batch + 2)


def corpus() -> Profile:
    modes, batch = np.tile(MODES, (len(BATCHES), 1)), np.repeat(BATCHES, len(MODES))
    return Profile(modes, *truth(modes, batch), batch, Task.INFERENCE)


CORPUS = corpus()
BENCH = InferenceBench(CORPUS, Objective.LEAST_POWER)
PROBLEMS = [
    ServiceLimits(latency_ms, arrival, 1e3 * watts)
    for latency_ms in (150.0, 1000.0)
    for arrival in (30.0, 120.0)
    for watts in range(8, 24, 3)
]


class Formula:
    """A predictor that knows the corpus's formula, with a factor on the power."""

    def __init__(self, power_factor: float) -> None:
        self.power_factor = power_factor

    def predict(self, modes: ModeArray, batch: BatchArray) -> Prediction:
        time, power = truth(modes, batch)
        return Prediction(time, self.power_factor * power, np.full(len(modes), 1e-6), np.full(len(modes), 1e-6))


def evaluated(
    name: str, objective: Objective, limit: int = 30, power_factor: float = 1.0, runs: int = 3
) -> ServingCases:
    method = serving_method_named(name, lambda: lambda profile: Formula(power_factor))  # type: ignore[arg-type,return-value]
    return evaluate_serving(CORPUS, method, limit, PROBLEMS, objective, runs, 0)


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("name", [name for name in SERVING_METHODS if name not in ("wattfleet", "roofline", "network")])
def test_methods_that_only_measure_break_no_limit(name: str, objective: Objective) -> None:
    cases = evaluated(name, objective)
    assert cases.found.any()
    assert not (cases.excess_w > 0).any()
    assert not cases.latency_broken.any()
    assert (cases.measured <= (len(CORPUS) if name == "brute-force" else 30)).all()


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("name", ["brute-force", "roofline", "wattfleet"])
def test_full_knowledge_loses_nothing(name: str, objective: Objective) -> None:
    cases = evaluated(name, objective)
    assert cases.found.all()
    assert np.nanmax(cases.loss_pct) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("objective", Objective)
def test_the_other_methods_lose_something(objective: Objective) -> None:
    for name in ("random", "binary-search", "batch-1"):
        assert np.nanmean(evaluated(name, objective, limit=12).loss_pct) > 0.1


def test_every_method_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattfleet.evaluation.methods.Schedule", partial(Schedule, epochs=3))
    for name in SERVING_METHODS:
        limit, runs = (4, 1) if name == "network" else (30, 3)
        one, other = (evaluated(name, Objective.LEAST_POWER, limit, runs=runs) for _ in range(2))
        np.testing.assert_array_equal(one.loss_pct, other.loss_pct)


def test_fixed_batches_measure_only_theirs() -> None:
    for name, expected in (("batch-1", {1}), ("largest-batch", {16})):
        session = Session(BENCH, 12)
        # At 120 per second, 16 samples arrive in 133 ms and 32 in 267 ms.
        limits = [ServiceLimits(200, 120, 30e3)]
        serving_method_named(name, pytest.fail).profile(session, limits, 0)
        assert set(session.profile().batches) == expected


def test_the_search_ends_at_a_setting_that_keeps_the_limits() -> None:
    session = Session(BENCH, 50)
    limits = ServiceLimits(1000, 30, 15e3)
    assert serving_method_named("binary-search", pytest.fail).profile(session, [limits], 0)(limits) is not None
    assert session.measured <= 16, "each step halves one of five dimensions"


class Always:
    """A method that always chooses the same row."""

    name = "always"

    def __init__(self, row: int | None) -> None:
        self.row = row

    def profile(self, session: Session[ServiceLimits], problems: object, seed: int) -> Choose[ServiceLimits]:
        if self.row is not None:
            session.measure(self.row)
        return lambda limits: self.row


SMALL = Profile(
    SPACE[:4],
    np.array([10.0, 20.0, 50.0, 200.0]),
    np.array([20e3, 16e3, 12e3, 8e3]),
    np.array([4, 4, 4, 4]),
    Task.INFERENCE,
)


@pytest.mark.parametrize(
    ("row", "objective", "loss_pct", "excess_w", "broken"),
    [
        # At 50 per second a batch arrives in 80 ms. Within 140 ms and 17 W the best are row 2 (12 W) and row 1 (20 ms).
        (1, Objective.LEAST_POWER, 100 * (16 / 12 - 1), 0, False),
        (2, Objective.LEAST_POWER, 0, 0, False),
        (3, Objective.LEAST_POWER, 0, 0, True),
        (2, Objective.MOST_SAMPLES, 60, 0, False),
        (0, Objective.MOST_SAMPLES, 0, 3, False),
    ],
)
def test_hand_computed_scores(row: int, objective: Objective, loss_pct: float, excess_w: float, broken: bool) -> None:
    cases = evaluate_serving(SMALL, Always(row), 1, [ServiceLimits(140, 50, 17e3)], objective, 1, 0)
    assert cases.loss_pct[0, 0] == pytest.approx(loss_pct)
    assert cases.excess_w[0, 0] == pytest.approx(excess_w)
    assert bool(cases.latency_broken[0, 0]) is broken
    assert cases.figures()["rows_measured"] == 1


def test_a_case_without_a_choice_counts_as_not_found() -> None:
    figures = evaluate_serving(
        SMALL, Always(None), 1, [ServiceLimits(140, 50, 17e3)], Objective.LEAST_POWER, 2, 0
    ).figures()
    assert figures["found_pct"] == 0
    assert figures["loss_pct"] is None
    assert figures["over_budget_pct"] == figures["latency_broken_pct"] == 0


def test_problems_that_no_row_keeps_are_left_out() -> None:
    limits = [ServiceLimits(140, 50, 1e3), ServiceLimits(81, 50, 30e3), ServiceLimits(140, 50, 17e3)]
    figures = evaluate_serving(SMALL, Always(2), 1, limits, Objective.LEAST_POWER, 1, 0).figures()
    assert figures["problems"] == {"evaluated": 1, "left_out": 2}
    with pytest.raises(InvalidInputError, match="no row of the target keeps the limits of any problem: allow"):
        evaluate_serving(SMALL, Always(2), 1, limits[:2], Objective.LEAST_POWER, 1, 0)


def test_rows_that_fail_the_audit_are_scored_apart() -> None:
    limits, trusted = [ServiceLimits(140, 50, 17e3)], np.array([True, True, False, True])
    cases = evaluate_serving(SMALL, Always(1), 1, limits, Objective.LEAST_POWER, 1, 0, trusted=trusted)
    assert cases.loss_pct[0, 0] == pytest.approx(100 / 3)
    assert cases.figures()["loss_pct_passing"] == {"median": 0, "mean": 0, "p90": 0}
    false_row = evaluate_serving(SMALL, Always(2), 1, limits, Objective.LEAST_POWER, 1, 0, trusted=trusted)
    assert false_row.figures()["loss_pct_passing"] is None


class Doubtful(Formula):
    """A predictor with errors of 10 % in time and 5 % in power, which it states as its uncertainty."""

    def predict(self, modes: ModeArray, batch: BatchArray) -> Prediction:
        found = super().predict(modes, batch)
        time, power = np.random.default_rng(1).normal(0, [[0.1], [0.05]], (2, len(modes)))
        sd = np.ones(len(modes))
        return Prediction(found.minibatch_ms * np.exp(time), found.power_mw * np.exp(power), 0.1 * sd, 0.05 * sd)


@pytest.mark.parametrize("objective", Objective)
def test_measuring_what_matters_loses_less_than_random_rows(objective: Objective) -> None:
    losses = {}
    for name in ("wattfleet", "roofline", "random"):
        method = serving_method_named(name, lambda: lambda profile: Doubtful(1.0))  # type: ignore[arg-type,return-value]
        cases = evaluate_serving(CORPUS, method, 20, PROBLEMS, objective, 3, 0)
        losses[name] = np.nanmean(cases.loss_pct)
        assert (cases.measured <= 20).all()
        if name == "wattfleet":
            assert cases.found.all()
            assert (cases.excess_w > 1).mean() < 0.01
            assert cases.latency_broken.mean() < 0.01
    assert losses["wattfleet"] < 0.5 * losses["roofline"]
    assert losses["wattfleet"] < 0.5 * losses["random"]


def test_measured_choices_break_no_limit_whatever_is_predicted() -> None:
    class Senseless(Formula):
        def predict(self, modes: ModeArray, batch: BatchArray) -> Prediction:
            time, power = np.random.default_rng(2).uniform(1, 100, (2, len(modes)))
            return Prediction(time, 1e3 * power, np.full(len(modes), 9.0), np.full(len(modes), 9.0))

    method = serving_method_named("wattfleet", lambda: lambda profile: Senseless(1.0))  # type: ignore[arg-type,return-value]
    for objective in Objective:
        cases = evaluate_serving(CORPUS, method, 20, PROBLEMS, objective, 2, 0)
        assert cases.found.any()
        assert not cases.excess_w.any()
        assert not cases.latency_broken.any()


def test_an_optimistic_predictor_is_seen_over_budget() -> None:
    cases = evaluated("wattfleet", Objective.MOST_SAMPLES, limit=5, power_factor=0.8)
    assert (cases.excess_w > 1).any()


def test_the_predictor_gets_the_measured_rows_and_a_margin() -> None:
    seen = []

    class Wide(Formula):
        def predict(self, modes: ModeArray, batch: BatchArray) -> Prediction:
            found = super().predict(modes, batch)
            return Prediction(found.minibatch_ms, found.power_mw, found.time_log_sd, np.full(len(modes), 5.0))

    def fit(profile: Profile) -> Wide:
        seen.append(profile)
        return Wide(1.0)

    session = Session(BENCH, 20)
    limits = ServiceLimits(1000, 30, 25e3)
    choose = PredictRows(fit).profile(session, [limits], 0)  # type: ignore[arg-type]
    assert len(seen[0]) == session.measured == 20
    assert len(seen[0].batches) > 1
    found = choose(limits)
    assert found in session.rows[Task.INFERENCE], "power is too uncertain for any setting that was not measured"


@pytest.mark.parametrize(
    ("profile", "problem"),
    [(Profile(SMALL.modes, SMALL.minibatch_ms, SMALL.power_mw, None, Task.INFERENCE), "no column 'batch'")],
)
def test_a_corpus_without_batches_is_refused(profile: Profile, problem: str) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        evaluate_serving(profile, Always(0), 1, PROBLEMS, Objective.LEAST_POWER, 1, 0)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A corpus of few modes, since the audit of its rows takes most of the command's time."""
    write_profile(CORPUS.rows(np.arange(len(CORPUS))[::2]), tmp_path / "target.csv")
    return tmp_path / "target.csv"


def command(target: Path, *arguments: object) -> Result:
    common = ("choice", "--target", target, "--budgets", "12:16", "--runs", 1)
    return CliRunner().invoke(app, [*map(str, common), *map(str, arguments)])


SERVICE = ("--task", "inference", "--latency-ms", 150, "--arrival-per-s", 60)


@pytest.mark.parametrize(
    ("method", "objective"),
    first(
        2,
        [
            ("brute-force", "least-power"),
            ("binary-search", "most-samples"),
            *((method, "least-power") for method in ("random", "largest-batch")),
            *((method, "most-samples") for method in ("batch-1", "brute-force")),
        ],
    ),
)
def test_the_command_judges_the_baselines(target: Path, method: str, objective: str) -> None:
    result = command(target, *SERVICE, "--objective", objective, "--method", method, "--modes", 80, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["problems"] == {"evaluated": 5, "left_out": 0}
    assert figures["latency_broken_pct"] == figures["over_budget_1w_pct"] == 0
    if method == "brute-force":
        assert figures["loss_pct"] == {"median": 0, "mean": 0, "p90": 0}
        assert figures["rows_measured"] == 80


def test_the_command_prints_a_table(target: Path) -> None:
    result = command(target, *SERVICE, "--method", "random")
    assert result.exit_code == 0, result.output
    assert "latency broken pct" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--task", "inference", "--method", "random"), "give --latency-ms and --arrival-per-s"),
        ((*SERVICE, "--method", "maxn"), "unknown method 'maxn' for inference: choose one of wattfleet, roofline"),
        (SERVICE, "give --reference"),
        (("--latency-ms", 100, "--method", "maxn"), "--latency-ms is for inference: add --task inference"),
        (("--method", "maxn"), "has times of inference (batch_ms), not of training: give rows of training"),
        (
            ("--task", "inference", "--latency-ms", -1, "--arrival-per-s", 60, "--method", "random"),
            "the latency must be",
        ),
    ],
)
def test_the_command_refuses_what_does_not_fit(target: Path, arguments: tuple[object, ...], problem: str) -> None:
    result = command(target, *arguments)
    assert isinstance(result.exception, InvalidInputError)
    assert problem in str(result.exception)


def test_training_rows_of_several_batches_are_refused(tmp_path: Path) -> None:
    training = Profile(CORPUS.modes, CORPUS.minibatch_ms, CORPUS.power_mw, CORPUS.batch)
    write_profile(training, tmp_path / "target.csv")
    result = command(tmp_path / "target.csv", "--method", "random")
    assert isinstance(result.exception, InvalidInputError)
    assert "has rows of the batches 1, 4, 16, 32: keep the rows of one" in str(result.exception)
