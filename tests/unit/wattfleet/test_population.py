"""The prior from a population of workloads, compared with explicit normal distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from wattfleet.modes import BOARDS, Hardware, Task, WorkloadFacts
from wattfleet.prediction.roofline import Member, Population, PowerParameters, Prior, TimeParameters
from wattfleet.prediction.roofline.estimation import Surface
from wattfleet.prediction.roofline.population import Estimate, _fit_effects
from wattfleet.prediction.roofline.priors import Spreads, general_power_prior, general_time_prior

Values = NDArray[np.float64]

AGX, NANO, UNKNOWN = BOARDS["agx-orin"].hardware, BOARDS["orin-nano"].hardware, Hardware(512, 64, 5)
FOUR = WorkloadFacts(loader_workers=4)
SPREADS = Spreads(
    workload=np.array([[0.2, 0.05], [0.05, 0.1]]),
    task=np.array([0.5, 0.3]),
    board=np.array([0.4, 0.2]),
    unknown_board=np.diag([4.0, 1.0]),
    anywhere=Prior.correlated(np.array([1.0, -1.0]), np.diag([4.0, 9.0])),
    share_of_board=0.2,
)
LOW, HIGH = np.diag([30.0, 20.0]), np.array([[900.0, 200.0], [200.0, 500.0]])
CASES = [
    (Task.TRAINING, AGX, np.array([2.0, 0.3]), HIGH),
    (Task.INFERENCE, AGX, np.array([1.2, 0.5]), LOW),
    (Task.TRAINING, NANO, np.array([2.6, -0.4]), HIGH),
    # The second parameter has no information.
    (Task.TRAINING, AGX, np.array([1.7, 99.0]), np.diag([400.0, 0.0])),
]


def by_size(of: Hardware, to: Hardware) -> Values:
    return np.array([np.log(of.gpu_cores / to.gpu_cores), 0.0])


def design(task: Task, board: Hardware) -> Values:
    return np.hstack([part * np.eye(2) for part in (1.0, float(task is Task.INFERENCE), float(board == NANO))])


ASSUMED_MEAN = np.array([1.0, -1.0, 0, 0, 0, 0])
ASSUMED = np.diag([4.0, 9.0, 0.25, 0.09, 0.16, 0.04])
VALUES = [value - by_size(AGX, board) for _, board, value, _ in CASES]
# A parameter without information has an enormous error.
ERRORS = [np.linalg.inv(information + 1e-9 * np.eye(2)) for *_, information in CASES]


def log_density(values: Values, mean: Values, covariance: Values) -> float:
    quadratic = (values - mean) @ np.linalg.solve(covariance, values - mean)
    return float(-0.5 * (quadratic + np.linalg.slogdet(covariance)[1]))


def log_posterior(between: Values, effects: Values) -> float:
    """The density that the estimates of effects and covariance maximise, up to a constant."""
    found = log_density(effects, ASSUMED_MEAN, ASSUMED)
    for (task, board, *_), value, error in zip(CASES, VALUES, ERRORS, strict=True):
        found += log_density(value, design(task, board) @ effects, between + error)
    wishart = np.linalg.slogdet(between)[1] + np.trace(np.linalg.solve(between, SPREADS.workload))
    return float(found - 0.5 * 4 * wishart)


def joint(between: Values) -> tuple[Values, Values]:
    """Mean and covariance of the effects, taken from the joint distribution of effects and all estimates."""
    designs = np.vstack([design(task, board) for task, board, *_ in CASES])
    noise = np.zeros((8, 8))
    for k, error in enumerate(ERRORS):
        noise[2 * k : 2 * k + 2, 2 * k : 2 * k + 2] = between + error
    gain = ASSUMED @ designs.T @ np.linalg.inv(designs @ ASSUMED @ designs.T + noise)
    mean = ASSUMED_MEAN + gain @ (np.concatenate(VALUES) - designs @ ASSUMED_MEAN)
    return mean, ASSUMED - gain @ designs @ ASSUMED


def learned():
    members = [
        Member(WorkloadFacts(task), board, *[Estimate(value, information, Surface.zero())] * 2)
        for task, board, value, information in CASES
    ]
    return _fit_effects(members, [each.time for each in members], [np.zeros(2)] * 4, SPREADS, by_size)


def test_the_effects_are_the_conditional_distribution_given_all_estimates() -> None:
    found = learned()
    mean, covariance = joint(found.between)
    np.testing.assert_allclose(found.mean, mean, atol=1e-4)
    np.testing.assert_allclose(found.covariance, covariance, atol=1e-4)


def test_the_covariance_between_workloads_is_the_most_probable_one() -> None:
    def cost(parameters: Values) -> float:
        root = np.array([[np.exp(parameters[0]), 0], [parameters[1], np.exp(parameters[2])]])
        return -log_posterior(root @ root.T, joint(root @ root.T)[0])

    best = minimize(cost, [-1.0, 0.0, -1.0], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-10})
    root = np.array([[np.exp(best.x[0]), 0], [best.x[1], np.exp(best.x[2])]])
    np.testing.assert_allclose(learned().between, root @ root.T, rtol=0.01, atol=1e-4)


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("board", [AGX, NANO, UNKNOWN])
def test_the_prior_is_the_effects_and_the_covariance_between_workloads(task: Task, board: Hardware) -> None:
    found = learned()
    mean, covariance = found.workload(task, board)
    effects, uncertain = joint(found.between)
    parts = design(task, board)
    expected = found.between + parts @ uncertain @ parts.T
    if board == UNKNOWN:
        expected = expected + np.diag([0.16, 0.04])
    np.testing.assert_allclose(mean, parts @ effects + by_size(AGX, board), atol=1e-4)
    np.testing.assert_allclose(covariance, expected, atol=1e-4)


def population(factors: Sequence[float], information: float = 1e4) -> Population:
    """Workloads of the AGX Orin whose work is a multiple of a typical one, with typical power."""

    def estimate(mean: Values) -> Estimate:
        return Estimate(mean, information * np.eye(len(mean)), Surface.zero())

    typical = general_time_prior(200.0, FOUR).mean
    scaled = np.arange(len(typical)) < 7
    return Population(
        tuple(
            Member(FOUR, AGX, estimate(typical + np.log(by) * scaled), estimate(general_power_prior().mean))
            for by in factors
        )
    )


def sd(prior: Prior) -> Values:
    return np.sqrt(np.diag(prior.root @ prior.root.T))


def test_the_prior_lies_between_the_members() -> None:
    typical = general_time_prior(200.0, FOUR).mean
    found = population([3.0, 9.0]).time_prior(FOUR, AGX)
    assert (typical[:7] + np.log(3) < found.mean[:7]).all() and (found.mean[:7] < typical[:7] + np.log(9)).all()
    np.testing.assert_allclose(found.mean[7:], typical[7:], atol=0.01)


def test_an_unknown_board_is_less_certain_than_a_measured_one() -> None:
    members = population([1.0, 2.0, 4.0])
    for prior in (members.time_prior, members.power_prior):
        assert (sd(prior(FOUR, UNKNOWN)) > sd(prior(FOUR, AGX))).all()
        np.testing.assert_array_equal(prior(FOUR, None).mean, prior(FOUR, AGX).mean)


def test_members_that_differ_more_give_a_wider_prior() -> None:
    alike, unlike = (population(factors).time_prior(FOUR, AGX) for factors in ([4, 4, 4, 4], [1, 4, 4, 16]))
    assert (sd(unlike)[:7] > sd(alike)[:7]).all()
    # The parameters of work are correlated: a large network needs more of everything.
    covariance = unlike.root @ unlike.root.T
    assert covariance[0, 3] / (sd(unlike)[0] * sd(unlike)[3]) > 0.7


def test_a_task_that_no_member_has_is_less_certain() -> None:
    members = population([1.0, 2.0])
    inference = WorkloadFacts(Task.INFERENCE, loader_workers=4)
    assert (sd(members.time_prior(inference, AGX)) > sd(members.time_prior(FOUR, AGX))).all()


def test_members_of_whom_nothing_is_known_leave_the_assumptions() -> None:
    found = population([50.0, 80.0], information=0.0).time_prior(FOUR, AGX)
    np.testing.assert_allclose(found.mean, general_time_prior(200.0, FOUR).mean, atol=1e-6)


def test_a_population_without_a_member_does_not_know_it() -> None:
    members = population([1.0, 2.0, 100.0])
    kept, two = members.without([2]).time_prior(FOUR, AGX), population([1.0, 2.0]).time_prior(FOUR, AGX)
    np.testing.assert_array_equal(kept.mean, two.mean)


def test_priors_have_a_value_for_every_parameter() -> None:
    members = population([1.0])
    assert len(members.time_prior(FOUR, None).mean) == len(TimeParameters.__dataclass_fields__)
    assert len(members.power_prior(FOUR, None).mean) == len(PowerParameters.__dataclass_fields__)
