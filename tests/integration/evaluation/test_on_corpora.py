"""Choices on the measured corpora: of modes, and of training beside inference."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.short_forms import first
from wattfleet.core.choosing import InterleavingObjective, ServiceLimits
from wattfleet.core.modes import Task, read_profile
from wattfleet.core.prediction import RooflinePredictor
from wattfleet.evaluation.cli import options
from wattfleet.evaluation.judging.choices import evaluate_choice, evaluate_interleaving
from wattfleet.evaluation.judging.sources import find_reference
from wattfleet.evaluation.methods import MeasureWhatMatters, PairCorpora, interleaving_method_named

# --- Choices on corpora -----------------------------------------------------------------------------------------------
# The choices of Wattfleet's own method on the measured corpora.


@pytest.fixture(scope="module")
def reference(corpora: Path) -> RooflinePredictor:
    return RooflinePredictor.fit(read_profile(corpora / "agx_orin_resnet18.csv"))


@pytest.mark.data
@pytest.mark.parametrize(
    ("target", "limit", "budgets", "over_pct", "over_1w_pct", "median_pct", "mean_pct"),
    [
        ("agx_orin_mobilenetv3", 10, range(17, 51), 8, 2, 4, 7),
        pytest.param("agx_orin_mobilenetv3", 50, range(17, 51), 2, 0, 1.5, 3, marks=pytest.mark.slow),
        pytest.param("orin_nano_resnet18", 50, range(8, 21), 2, 0, 1, 7, marks=pytest.mark.slow),
    ],
)
def test_choices_on_the_corpora_stay_within_known_penalties(
    corpora: Path,
    reference: RooflinePredictor,
    target: str,
    limit: int,
    budgets: range,
    over_pct: float,
    over_1w_pct: float,
    median_pct: float,
    mean_pct: float,
) -> None:
    method = MeasureWhatMatters(lambda profile: RooflinePredictor.fit(profile, reference))
    cases = evaluate_choice(read_profile(corpora / f"{target}.csv"), method, limit, budgets, runs=2, seed=0)
    assert 100 * (cases.excess_w > 0).mean() <= over_pct
    assert 100 * (cases.excess_w > 1).mean() <= over_1w_pct
    assert np.median(cases.penalty_pct) <= median_pct
    assert cases.penalty_pct.mean() <= mean_pct
    assert (cases.measured <= limit).all()


# --- Interleaving on corpora ------------------------------------------------------------------------------------------
# Training beside inference on the measured corpora: the published method by plain loops, and Wattfleet's choices.

PAIRS = [("resnet18", "mobilenetv3"), ("yolov8n", "resnet"), ("mobilenetv3", "mobilenetv3")]
PROBLEMS = [
    ServiceLimits(100.0 * tenths, float(arrival), 1e3 * watts)
    for tenths in range(5, 21)
    for arrival in range(30, 121, 10)
    for watts in range(10, 51)
]
KNOBS = ("cores", "cpu_khz", "gpu_hz", "mem_hz")


def files(corpora: Path, training: str, inference: str) -> dict[Task, Path]:
    return {
        Task.TRAINING: corpora / f"agx_orin_{training}.csv",
        Task.INFERENCE: corpora / f"agx_orin_{inference}_inference.csv",
    }


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_grid_is_the_published_one() -> None:
    assert len(PROBLEMS) == 6560


@pytest.mark.parametrize(("training", "inference"), PAIRS)
def test_problems_are_counted_as_published(corpora: Path, training: str, inference: str) -> None:
    pair = files(corpora, training, inference)
    step = {tuple(row[knob] for knob in KNOBS): row for row in rows(pair[Task.TRAINING])}
    answered = [row for row in rows(pair[Task.INFERENCE]) if tuple(row[knob] for knob in KNOBS) in step]
    some, solvable, training_fits = PROBLEMS[::150], 0, 0
    for limits in some:
        counts = []
        for row in answered:
            trained = step[tuple(row[knob] for knob in KNOBS)]
            window_s, inference_s = int(row["batch"]) / limits.arrival_per_s, float(row["batch_ms"]) / 1e3
            if window_s + inference_s > limits.latency_ms / 1e3 or inference_s > window_s:
                continue
            if max(float(row["power_mw"]), float(trained["power_mw"])) <= limits.budget_mw:
                counts.append(int((window_s - inference_s) // (float(trained["minibatch_ms"]) / 1e3)))
        solvable += bool(counts)
        training_fits += max(counts, default=0) > 0
    corpus = PairCorpora.of(*(read_profile(path) for path in pair.values()))
    every = interleaving_method_named("brute-force", pytest.fail)
    figures = evaluate_interleaving(corpus, every, 15, some, InterleavingObjective.MOST_PER_WINDOW, 0).figures()
    counted = {name: figures[name] for name in ("problems", "solvable", "with_training", "found_pct")}
    assert counted == {
        "problems": len(some),
        "solvable": solvable,
        "with_training": training_fits,
        "found_pct": 100,
    }
    assert 0 < training_fits <= solvable < len(some)
    assert figures["training_share"] == {"median": 1, "p10": 1, "mean": 1}
    assert figures["over_budget_pct"] == figures["latency_broken_pct"] == 0


@pytest.mark.parametrize(("training", "inference"), first(1, PAIRS))
@pytest.mark.slow
def test_choices_are_found_and_break_nothing(corpora: Path, training: str, inference: str) -> None:
    read = {task: (path, read_profile(path)) for task, path in files(corpora, training, inference).items()}
    pair = PairCorpora.of(*(profile for _, profile in read.values()))
    method = interleaving_method_named("wattfleet", lambda task: options.fit_named(*read[task], None))
    # One of 400 problems, since more of them take minutes.
    cases = evaluate_interleaving(pair, method, 15, PROBLEMS[7::400], InterleavingObjective.MOST_PER_WINDOW, 0)
    figures = cases.figures()
    assert (~cases.found).sum() <= (1 if training == "yolov8n" else 0)
    assert not cases.excess_w.any() and not cases.latency_broken.any()
    assert cases.measured.max() <= 15
    shares = figures["training_share"]
    assert isinstance(shares, dict)
    # The published search has medians of 0.92, 0.5 and 1.
    assert shares["median"] >= (0.5 if training == "yolov8n" else 1)


@pytest.mark.parametrize(
    ("name", "network"),
    [("resnet18", "resnet"), ("yolov8n", "yolov8n"), ("mobilenetv3_inference", "mobilenetv3")],
)
def test_the_network_of_a_target_is_left_out_of_the_reference(corpora: Path, name: str, network: str) -> None:
    target = read_profile(corpora / f"agx_orin_{name}.csv")
    source = find_reference(options.DEFAULT_REFERENCE, target)
    assert source.left_out == network
    left = source.predictor("roofline", None)
    whole = find_reference(options.DEFAULT_REFERENCE, target.rows(np.arange(5))).predictor("roofline", None)
    assert isinstance(left, RooflinePredictor) and isinstance(whole, RooflinePredictor)
    assert left.population is not None and whole.population is not None
    assert len(left.population.members) < len(whole.population.members)
