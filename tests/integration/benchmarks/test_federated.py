"""The benchmark of federated rounds, on a few boards: budgets, tuned parameters, and asynchronous rounds."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from benchmarks.federated import tasks
from benchmarks.federated.__main__ import main
from benchmarks.federated.asynchronous import Asynchronous, run_asynchronously
from benchmarks.federated.boards import BASE_BATCH, Candidates, facts, keep, open_board, truth, units, with_truth
from benchmarks.federated.efficiency import epoch_choice_of
from benchmarks.federated.experiment import Experiment, run_seed
from benchmarks.federated.figures import median_figures, run_figures, seconds
from benchmarks.federated.jobs import Job
from benchmarks.federated.learning import Federation, LocalWork
from benchmarks.federated.methods import Planned
from benchmarks.federated.rounds import Member, Round
from benchmarks.federated.server_steps import Arrival, BufferedSteps, QuorumSteps, Stepping
from benchmarks.federated.site_watts import Draw, SiteWatts
from benchmarks.federated.tables import tables
from benchmarks.federated.tasks import Parameters, digits
from benchmarks.federated.tuning import TUNES
from edge_agent.runtime.readiness import parked_mode
from tests.fakes.short_forms import examples
from wattfleet.core.choosing import BatchEfficiency, Front, predicted_front
from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError
from wattfleet.core.planning import EpochChoice, History, Offer
from wattfleet.core.planning.policies import FastestK, Policy, Progress
from wattfleet.core.prediction import Prediction
from wattfleet.simulation.digits_app import task

# --- Federated --------------------------------------------------------------------------------------------------------
# The benchmark of federated rounds, on a few boards: all compared methods keep the budget, and runs are repeatable.


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


@pytest.mark.slow
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


# The short forms are the tests of `found`, which an experiment gives, and of `median_figures`.
@pytest.mark.slow
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


# --- Federated levers -------------------------------------------------------------------------------------------------
# The parameters that the benchmark of federated rounds tunes besides modes: batch sizes and local epochs.

EQUAL = BatchEfficiency("all alike", (8, 16, 32, 64), (1.0,) * 4, (0.0,) * 4, "assumed")


def test_normalised_average_weighs_updates_per_epoch() -> None:
    federation = Federation(tasks.digits(), devices=20, seed=3)
    work = {1: LocalWork(1, 8), 4: LocalWork(4, 16), 7: LocalWork(2, 32)}
    start = federation.start.parameters
    after = federation.after(federation.start, work, normalised=True).parameters

    samples = {device: federation.samples[device] for device in work}
    mean_epochs = (1 + 4 + 2) / 3
    alone = {device: federation.after(federation.start, {device: each}).parameters for device, each in work.items()}
    for name, value in after.items():
        per_epoch = sum(
            samples[k] / sum(samples.values()) * (alone[k][name] - start[name]) / work[k].epochs for k in work
        )
        torch.testing.assert_close(value, start[name] + mean_epochs * per_epoch, rtol=1e-4, atol=1e-6)


def test_part_of_an_epoch_is_fewer_minibatches() -> None:
    assert LocalWork(2, 16).steps(40) == 6
    assert LocalWork(0.5, 16).steps(40) == 2
    assert LocalWork(0.01, 16).steps(40) == 1


def test_a_proxy_shows_how_many_devices_a_round_needs() -> None:
    def rounds(progress: float, half: float) -> tuple[float, float]:
        return 100 / progress * (1 + half / 5 * 45 / 49), 100 / progress * (1 + half / 20 * 30 / 49)

    fewest, most = epoch_choice_of({2: rounds(1, 3), 4: rounds(0.9, 3), 8: rounds(4, 9)}, 50).options
    assert (fewest.epochs, fewest.progress, fewest.half_devices) == (2, 1.0, pytest.approx(3))
    assert (most.epochs, most.progress, most.half_devices) == (8, pytest.approx(4), pytest.approx(9))


def test_batches_on_the_front_never_exceed_what_the_data_allow() -> None:
    (unit,) = units({"orin-nano": 1}, modes=6)
    device = open_board(unit)
    known = truth(device, device.modes[::20])
    wide, narrow = known.batch_front(1600, 64, EQUAL), known.batch_front(1600, 20, EQUAL)
    assert wide.batch is not None and narrow.batch is not None
    assert wide.batch.max() == 64
    assert set(narrow.batch.tolist()) <= {8, BASE_BATCH}
    base = known.front(100)
    for epoch_s, planned_w in zip(base.one_epoch_s, base.planned_w, strict=True):
        # Fronts are thinned to 64 points.
        assert wide.one_epoch_s[wide.planned_w <= planned_w * 1.02].min() <= epoch_s


def test_more_epochs_are_chosen_where_rounds_have_a_high_overhead() -> None:
    (unit,) = units({"orin-nano": 1}, modes=6)
    device = open_board(unit)
    offers = [Offer("a", truth(device, device.modes[::20]).front(20), 5.0)]
    choice = EpochChoice.of({2: 1.0, 8: 2.0})
    chosen = [
        Planned(offers, Progress(overhead_s=overhead_s), 40.0, choice).plan(1, History()) for overhead_s in (0, 1000)
    ]
    assert [[job.epochs for job in jobs] for jobs in chosen] == [[2.0], [8.0]]


def test_networks_side_by_side_compute_what_convolutions_do() -> None:
    torch.manual_seed(0)
    first, second, output = nn.Conv2d(1, 8, 4, 2, padding=2), nn.Conv2d(8, 16, 2, 2), nn.Linear(256, 10)
    images = torch.rand(3, 28, 28)
    small = nn.functional.avg_pool2d(images[:, None], 2)
    found = second(first(small).relu()).relu()
    expected = output(found.permute(0, 2, 3, 1).flatten(1))
    assert first.bias is not None and second.bias is not None
    parameters = {
        "first.weight": first.weight.flatten(1),
        "first.bias": first.bias,
        "second.weight": second.weight.permute(0, 2, 3, 1).flatten(1),
        "second.bias": second.bias,
        "output.weight": output.weight,
        "output.bias": output.bias,
    }
    stacked = {name: value[None] for name, value in parameters.items()}
    patches = tasks.patches(images.numpy())
    torch.testing.assert_close(tasks.convolutional(stacked, patches[None])[0], expected)


def test_a_missing_data_set_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tasks, "DATA", tmp_path)
    tasks.fashion.cache_clear()
    with pytest.raises(InvalidInputError, match=r"fashion_mnist.npz is missing .* --task digits"):
        tasks.fashion()


@pytest.mark.parametrize("tune", TUNES)
def test_every_tuning_is_compared_with_presets(tune: str) -> None:
    assert {"presets", "presets-equal"} <= set(TUNES[tune])
    assert {"fedbuff", "quorum", "oracle-fedbuff", "oracle-quorum"} <= set(TUNES[tune]) or tune not in {"async", "all"}


# --- Federated asynchronous -------------------------------------------------------------------------------------------
# Asynchronous rounds of the benchmark: their times, their power, and how updates are averaged.

IDLE_W = 5.0
OVERHEAD_S = 1.0
MODE = (1.0e9, 1.0e9, 1.0e9, 1.0e9)


@dataclass
class Fixed:
    """A worker whose trainings take given times and power."""

    warmup_s: float
    steady_s: float
    watts: float
    jobs: list[Job] = field(default_factory=list)

    def train(self, job: Job) -> tuple[float, float, float]:
        self.jobs.append(job)
        return self.warmup_s, self.steady_s, self.watts

    def true_w(self, job: Job) -> float:
        return self.watts


def offer(device: int, epoch_s: float, watts: float) -> Offer:
    front = Front(np.array([MODE]), *(np.array([value]) for value in (epoch_s, watts, 0.0, 0.0, 0.0)))
    return Offer(f"device-{device}", front, IDLE_W)


@pytest.fixture(scope="module")
def member() -> Member:
    (unit,) = units({"orin-nano": 1}, modes=6)
    board = open_board(unit)
    return Member("device-0", board, parked_mode(board), IDLE_W, 10)


def fleet_of(member: Member, devices: int) -> list[Member]:
    return [
        Member(f"device-{k}", member.board, member.parked, member.idle_w, member.minibatches) for k in range(devices)
    ]


def run(
    member: Member,
    federation: Federation,
    workers: Sequence[Fixed],
    stepping: Stepping,
    budget_w: float,
    steps: int,
    policy: Policy | None = None,
) -> list[Round]:
    """A run that plans for all free devices within the budget, or with another policy."""
    offers = [offer(k, (each.warmup_s + each.steady_s) / 2, each.watts) for k, each in enumerate(workers)]
    method = Asynchronous(offers, policy or FastestK(len(workers)), budget_w, OVERHEAD_S, stepping)
    return run_asynchronously(method, fleet_of(member, len(workers)), workers, federation, steps)


def test_two_devices_follow_a_timeline_worked_out_by_hand(member: Member) -> None:
    workers = [Fixed(2.0, 8.0, 15.0), Fixed(2.0, 23.0, 25.0)]
    rounds = run(member, Federation(digits(), 2, 0), workers, BufferedSteps(1), budget_w=40.0, steps=4)

    # Device 0 trains from 1 s to 11 s, 12 s to 22 s and 23 s to 33 s; device 1 from 1 s to 26 s.
    assert [one.chosen for one in rounds] == [(0,), (0,), (1,), (0,)]
    assert np.cumsum([one.training_s for one in rounds]).tolist() == [11.0, 22.0, 26.0, 33.0]
    # Above idle power, device 0 draws 10 W from 3 to 11 s, 14 to 22 s and 25 to 33 s; device 1 draws 20 W from 3 to 26
    # s and from 29 s on.
    expected_kj = [0.08 + 8 * 0.02, 0.08 + 11 * 0.02, 0.01 + 4 * 0.02, 0.07 + 4 * 0.02]
    assert [one.training_kj for one in rounds] == pytest.approx(expected_kj)
    assert [one.observed_w for one in rounds] == [40.0, 40.0, 40.0, 40.0]


def test_devices_wait_for_watts_that_trainings_in_flight_hold(member: Member) -> None:
    workers = [Fixed(0.0, 10.0, 15.0), Fixed(0.0, 24.0, 25.0)]
    federation, policy = Federation(digits(), 2, 0), Progress(overhead_s=OVERHEAD_S)
    rounds = run(member, federation, workers, BufferedSteps(1), 39.0, 6, policy)

    assert max(one.observed_w for one in rounds) == IDLE_W + 25.0
    assert {device for one in rounds for device in one.chosen} == {0, 1}
    for one in rounds:  # never both, so that each step follows a whole training and its overhead
        assert one.training_s == {0: 11.0, 1: 25.0}[one.chosen[0]]


def test_too_few_watts_for_any_device_are_refused(member: Member) -> None:
    with pytest.raises(InfeasibleBudgetError, match="is not enough to train one device"):
        run(member, Federation(digits(), 1, 0), [Fixed(0.0, 10.0, 15.0)], BufferedSteps(1), budget_w=14.0, steps=1)


def change(federation: Federation, base: Parameters, device: int, version: int) -> Parameters:
    """The change that one device alone causes, when trained by synchronous rounds."""
    model = federation.model(base, server_round=version)
    after = federation.after(model, {device: LocalWork(2)}).parameters
    return {name: after[name] - value for name, value in base.items()}


def test_full_buffer_at_equal_speeds_is_averaging_with_equal_weights(member: Member) -> None:
    devices = 4
    federation = Federation(digits(), devices, 0)
    rounds = run(
        member, federation, [Fixed(1.0, 9.0, 15.0) for _ in range(devices)], BufferedSteps(devices), 100.0, steps=3
    )

    expected = dict(federation.start.parameters)
    for version, one in enumerate(rounds):
        assert (one.training_s, sorted(one.chosen)) == (11.0, list(range(devices)))
        changes = [change(federation, expected, device, version) for device in range(devices)]
        mean = {name: sum(each[name] for each in changes) / devices for name in expected}
        expected = {name: value + mean[name] for name, value in expected.items()}
        assert one.accuracy == pytest.approx(federation.model(expected).accuracy, abs=0.003)


def test_quorum_of_all_devices_is_federated_averaging(member: Member) -> None:
    federation = Federation(digits(), 3, 0)
    workers = [Fixed(1.0, seconds, 15.0) for seconds in (4.0, 6.0, 9.0)]
    rounds = run(member, federation, workers, QuorumSteps(1.0), 100.0, steps=3)

    model = federation.start
    for one in rounds:
        model = federation.after(model, dict.fromkeys(range(3), LocalWork(2)))
        assert one.training_s == 11.0
        assert one.accuracy == pytest.approx(model.accuracy, abs=0.003)


def test_late_update_counts_in_the_round_after_its_own(member: Member) -> None:
    workers = [*(Fixed(0.0, 10.0, 15.0) for _ in range(4)), Fixed(0.0, 15.0, 15.0)]
    rounds = run(member, Federation(digits(), 5, 0), workers, QuorumSteps(0.8), 100.0, steps=2)

    assert [sorted(one.chosen) for one in rounds] == [[0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert np.cumsum([one.training_s for one in rounds]).tolist() == [11.0, 22.0]


def test_late_update_weighs_its_samples_over_the_root_of_its_age() -> None:
    federation = Federation(digits(), 3, 0)
    old = federation.start
    now = federation.model(federation.after(old, {2: LocalWork(1)}).parameters, server_round=3)
    late = Arrival(0, 30, old, federation.updates(old, {0: LocalWork(2)}, 0)[0])
    timely = Arrival(1, 20, now, federation.updates(now, {1: LocalWork(2)}, 3)[1])
    merged = QuorumSteps(0.8).merged(now, [late, timely])

    weights = 30 / math.sqrt(1 + 3), 20.0
    for name, value in now.parameters.items():
        moved = [each.trained.parameters[name] - each.base.parameters[name] for each in (late, timely)]
        expected = value + (weights[0] * moved[0] + weights[1] * moved[1]) / sum(weights)
        torch.testing.assert_close(merged[name], expected)


@cache
def few_digits(devices: int) -> Federation:
    (images, labels), (test_images, test_labels) = digits().train, digits().test
    task = replace(digits(), train=(images[:160], labels[:160]), test=(test_images[:10], test_labels[:10]))
    return Federation(task, devices, 0)


speeds = st.lists(st.tuples(st.floats(0, 20), st.floats(1, 200), st.floats(IDLE_W + 0.5, 60)), min_size=2, max_size=8)


@examples(10)
@given(speeds, st.floats(0, 1), st.sampled_from([BufferedSteps(1), BufferedSteps(5), QuorumSteps(0.8)]))
def test_watts_never_exceed_the_budget(
    member: Member, found: list[tuple[float, float, float]], level: float, stepping: Stepping
) -> None:
    idle_w = IDLE_W * len(found)
    least_w, most_w = (idle_w - IDLE_W + choose(watts for *_, watts in found) for choose in (min, max))
    budget_w = least_w + 0.01 + level * (most_w - least_w) * len(found)
    workers = [Fixed(*each) for each in found]
    rounds = run(
        member, few_digits(len(found)), workers, stepping, budget_w, steps=6, policy=Progress(overhead_s=OVERHEAD_S)
    )

    assert len(rounds) == 6
    for one in rounds:
        assert one.observed_w <= one.planned_w + 1e-6
        assert idle_w < one.planned_w <= budget_w * (1 + 1e-9)


draws = st.lists(st.tuples(*[st.integers(0, 30)] * 3, st.floats(0, 50)), max_size=12)


@given(draws, st.lists(st.integers(1, 90), min_size=1, max_size=4, unique=True).map(sorted))
def test_watts_and_energy_are_those_of_every_moment(found: list[tuple[int, int, int, float]], ends: list[int]) -> None:
    site = SiteWatts(IDLE_W)
    every = [
        Draw(since, since + start, since + start + 1 + rest, watts, 2 * watts, 3 * watts)
        for since, start, rest, watts in found
    ]
    for draw in every:
        site.add(draw)
    begin = 0
    for end in ends:
        stretch = site.until(end)
        moments = [
            IDLE_W + sum(draw.planned_w for draw in every if draw.since_s <= second < draw.until_s)
            for second in range(begin, end)
        ]
        energy_j = sum(
            draw.observed_w for draw in every for second in range(begin, end) if draw.steady_s <= second < draw.until_s
        )
        assert stretch.planned_w == pytest.approx(max(moments))
        assert stretch.training_kj == pytest.approx(energy_j / 1e3)
        begin = end
