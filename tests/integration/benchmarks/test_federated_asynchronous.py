"""Asynchronous rounds of the benchmark: their times, their power, and how updates are averaged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.federated.asynchronous import Asynchronous, run_asynchronously
from benchmarks.federated.boards import open_board, units
from benchmarks.federated.jobs import Job
from benchmarks.federated.learning import Federation, LocalWork
from benchmarks.federated.rounds import Member, Round
from benchmarks.federated.server_steps import Arrival, BufferedSteps, QuorumSteps, Stepping
from benchmarks.federated.site_watts import Draw, SiteWatts
from benchmarks.federated.tasks import Parameters, digits
from edge_agent.runtime.readiness import parked_mode
from wattfleet.choosing import Front
from wattfleet.errors import InfeasibleBudgetError
from wattfleet.planning import Offer
from wattfleet.planning.policies import FastestK, Policy, Progress

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


@settings(max_examples=10, deadline=None)
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
