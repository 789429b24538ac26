"""The benchmark of federated rounds, on a few boards: all compared methods keep the budget, and runs are repeatable."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from benchmarks.federated.__main__ import main
from benchmarks.federated.boards import BASE_BATCH, Candidates, facts, keep, open_board, truth, units, with_truth
from benchmarks.federated.experiment import Experiment, run_seed
from benchmarks.federated.figures import median_figures, run_figures, seconds
from benchmarks.federated.learning import Federation, LocalWork
from benchmarks.federated.rounds import Round
from benchmarks.federated.tables import tables
from benchmarks.federated.tasks import digits
from wattfleet.choosing import predicted_front
from wattfleet.prediction import Prediction
from wattfleet_simulation.digits_app import task

MODES = 50
FLEET = {"orin-nano": 5, "orin-nx": 1}
BUDGETS_W = (45.0, 75.0)
KNOWING = ("oracle-fastest-k", "oracle-fair", "presets", "presets-equal", "maxn")
GUESSING = ("fastest-k", "uniform", "oort")


def guessed(true: Candidates, seed: int) -> Candidates:
    """Fronts with errors of some percent, and a stated uncertainty to match, as a predictor has."""
    draw = np.random.default_rng(seed)
    off = np.exp(0.03 * draw.standard_normal(3))
    spread = np.full(len(true.modes), 0.03)
    known = true.prediction
    prediction = Prediction(known.minibatch_ms * off[0], known.power_mw * off[1], spread, spread)
    return Candidates(true.modes, true.batch, prediction, true.first_gcycles * off[2])


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """Six small boards, without any measured profiles."""
    small = Experiment(
        boards=tmp_path_factory.mktemp("boards"),
        fleet=FLEET,
        modes=MODES,
        budgets_w=BUDGETS_W,
        methods=(*KNOWING, *GUESSING),
        count=3,
        rounds=2,
    )
    for unit in small.units:
        device = open_board(unit)
        known = guessed(truth(device, device.modes), unit.seed)
        keep(unit, with_truth(device, 5.5, MODES, known), small.boards)
    return small


@pytest.fixture(scope="module")
def found(experiment: Experiment) -> dict[str, Any]:
    return run_seed(experiment, 0)


def test_the_oracles_never_exceed_the_budget(found: dict[str, Any]) -> None:
    for name in KNOWING:
        for watts, run in found["runs"][name].items():
            if "infeasible" not in run:
                assert max(run["series"]["true_w"]) <= float(watts) + 0.01, (name, watts)
                assert max(run["series"]["planned_w"]) <= float(watts) + 0.01


def test_an_oracle_is_never_slower_than_what_keeps_the_same_watts(found: dict[str, Any]) -> None:
    compared = 0
    for watts, run in found["runs"]["fastest-k"].items():
        oracle = found["runs"]["oracle-fastest-k"][watts]
        kept = "infeasible" not in run and max(run["series"]["true_w"]) <= float(watts)
        if kept and run["devices"] == oracle["devices"]:
            compared += 1
            # Fronts are thinned to 64 points, and measured times scatter.
            assert oracle["training_s"] <= 1.05 * run["training_s"]
    assert compared


def test_the_same_seed_gives_the_same_result(experiment: Experiment, found: dict[str, Any]) -> None:
    some = replace(experiment, methods=("oort", "uniform"), budgets_w=BUDGETS_W[1:2])
    again = run_seed(some, 0)

    for name in some.methods:
        assert again["runs"][name]["75"] == found["runs"][name]["75"]
    assert run_seed(some, 1)["runs"]["uniform"]["75"] != found["runs"]["uniform"]["75"]


def test_too_few_watts_are_told_in_words(experiment: Experiment) -> None:
    run = run_seed(replace(experiment, methods=("fastest-k", "uniform"), budgets_w=(20.0,)), 0)["runs"]

    assert "is not enough to train one device" in run["fastest-k"]["20"]["infeasible"]
    assert "too little for any mode" in run["uniform"]["20"]["infeasible"]


def test_a_board_is_profiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (unit,) = units({"orin-nano": 1}, modes=6)
    found = facts(unit, tmp_path)
    assert found.profiled_modes == 6
    assert (found.true.prediction.power_log_sd == 0).all()
    assert (found.predicted.prediction.power_log_sd > 0).all()
    assert found.predicted.first_gcycles == pytest.approx(found.true.first_gcycles, rel=0.5)
    monkeypatch.setattr("benchmarks.federated.boards.profiled", None)

    again = facts(unit, tmp_path)
    assert again.idle_w == found.idle_w
    for name in ("predicted", "true", "presets", "maxn"):
        kept, known = getattr(again, name).front(40), getattr(found, name).front(40)
        assert (kept.planned_w == known.planned_w).all()
        assert (kept.one_epoch_s == known.one_epoch_s).all()


@pytest.mark.parametrize("minibatches", [20, 100, 3125])
def test_candidates_make_the_front_of_all_modes_for_epochs_of_any_length(minibatches: int) -> None:
    (unit,) = units({"orin-nano": 1}, modes=6)
    device = open_board(unit)
    none = np.zeros(len(device.modes))
    prediction = Prediction(*device.mean_truth(device.modes), none, none)
    whole = predicted_front(device.modes, prediction, minibatches, device.mean_first_gcycles)
    known = truth(device, device.modes, (BASE_BATCH,))
    assert len(known.modes) < len(device.modes) / 2
    assert (known.front(minibatches).modes == whole.modes).all()


def test_devices_trained_side_by_side_learn_what_each_learns_alone() -> None:
    federation = Federation(digits(), devices=20, seed=3)
    chosen = {device: LocalWork(2) for device in (1, 4, 7)}
    together = federation.after(federation.start, chosen)

    samples = torch.tensor([float(federation.samples[device]) for device in chosen])
    alone = [federation.after(federation.start, {device: LocalWork(2)}).parameters for device in chosen]
    for name, value in together.parameters.items():
        merged = sum(part[name] * share for part, share in zip(alone, samples / samples.sum(), strict=True))
        torch.testing.assert_close(value, merged)
    assert federation.after(federation.start, chosen) is together


def test_one_device_learns_as_plain_stochastic_gradient_descent_has_it() -> None:
    federation = Federation(digits(), devices=50, seed=0)
    smallest = min(range(50), key=federation.samples.__getitem__)
    assert federation.samples[smallest] <= task.MINIBATCH  # a single step, so that the order does not matter
    network = nn.Sequential(
        OrderedDict(hidden=nn.Linear(64, 64), relu=nn.ReLU(), output=nn.Linear(64, 10)),
    )
    start = federation.start.parameters
    network.load_state_dict({name: value.clone() for name, value in start.items()})
    images, labels = task.device_data(smallest, 50, 0)
    loss = nn.functional.cross_entropy(network(images.flatten(1)), labels)
    loss.backward()

    after = federation.after(federation.start, {smallest: LocalWork(1)})
    assert after.losses[smallest] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(after.parameters[name], start[name] - digits().learning_rate * parameter.grad)


def a_round(chosen: tuple[int, ...], training_s: float, observed_w: float, accuracy: float) -> Round:
    return Round(chosen, training_s, training_s - 5, 3.0, 90.0, 95.0, observed_w, accuracy)


def test_figures_of_a_run_worked_out_by_hand() -> None:
    rounds = [a_round((0, 1), 20.0, 99.0, 0.5), a_round((0, 1), 20.0, 102.0, 0.89)]
    rounds += [a_round((0, 2), 30.0, 100.0, 0.92), a_round((0, 2), 30.0, 100.0, 0.92)]
    figures = run_figures(rounds, devices=4, idle_w=10.0, budget_w=100.0, overhead_s=10.0)

    assert seconds(rounds, 10.0).tolist() == [30, 60, 100, 140]
    # The mean of three rounds reaches 0.91 only after the last one.
    assert figures["rounds"] == {"0.9": 4, "0.93": None}
    assert figures["time_s"]["0.9"] == 140
    assert figures["time_s_by_overhead"]["30"]["0.9"] == 220
    assert figures["time_s_without_first_minibatches"]["0.9"] == 120
    assert figures["energy_kj"]["0.9"] == pytest.approx(4 * 3 + 140 * 10 / 1e3)
    assert figures["participation"] == 0.75
    assert figures["fairness"] == pytest.approx(8**2 / (4 * (16 + 4 + 4)))
    assert figures["worst_excess"] == pytest.approx(0.02)
    assert figures["rounds_over_1pct"] == 1


def test_what_most_seeds_never_reach_is_not_reached() -> None:
    assert median_figures([{"a": 1.0}, {"a": None}, {"a": 3.0}]) == {"a": 3.0}
    assert median_figures([{"a": {"b": 1.0}}, {"a": {"b": None}}, {"a": {"b": None}}]) == {"a": {"b": None}}


def test_the_command_writes_a_result_that_it_can_show(
    experiment: Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.federated.__main__.Processes", InThisProcess)
    (tmp_path / "boards").symlink_to(experiment.boards)
    fleet = ",".join(f"{kind}:{count}" for kind, count in FLEET.items())
    methods = "fastest-k,presets,oracle-fastest-k,fedbuff,quorum,oracle-quorum,oracle-fedbuff"
    arguments = ["--fleet", fleet, "--budgets", "20,75", "--methods", methods, "--count", "3"]
    assert main([*arguments, "--rounds", "2", "--seeds", "2", "--out", str(tmp_path), "--json"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["provenance"] == "simulated"
    assert "infeasible" in result["runs"]["presets"]["20"]
    assert len(result["runs"]["presets"]["75"]["seeds"]) == 2
    assert result["compared"]["75"].keys() == {"fastest-k", "fedbuff", "quorum"}
    fedbuff = result["runs"]["fedbuff"]["75"]["seeds"][0]
    assert fedbuff["devices"] == 5
    assert fedbuff["time_s_by_overhead"] == {}
    assert max(fedbuff["series"]["planned_w"]) <= 75.01
    assert len(list(tables(result))) == 3
    result["runs"]["presets"]["75"]["seeds"][1] |= {"worst_excess": 0.034, "rounds_over_1pct": 2}
    shown = StringIO()
    console = Console(file=shown, width=300)
    console.print(*tables(result))
    assert "+3.4%" in shown.getvalue()  # not the median over the seeds, which would hide it
    assert main(["--show", str(tmp_path / "result.json"), "--png", str(tmp_path / "plots.png")]) == 0
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


class InThisProcess:
    """Runs the work of a process pool in the test's process."""

    def __init__(self, jobs: int) -> None:
        pass

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, work: Any, items: Any) -> list[Any]:
        return [work(item) for item in items]
