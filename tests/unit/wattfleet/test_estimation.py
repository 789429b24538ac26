"""Fits compared with closed-form solutions, also with some wrong observations."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from wattfleet.prediction.roofline import Prior, robust_fit
from wattfleet.prediction.roofline.estimation import generalised_fit, jacobian, residual_weights

Values = NDArray[np.float64]

RNG = np.random.default_rng(1)
DESIGN = RNG.normal(size=(40, 3))
TRUTH = np.array([0.7, -0.4, 0.2])
VAGUE = Prior.independent(np.zeros(3), np.full(3, 10.0))


def linear(parameters: Values) -> Values:
    return np.asarray((DESIGN @ parameters).T)


def test_exact_observations_give_the_true_parameters() -> None:
    fitted = robust_fit(linear, DESIGN @ TRUTH, VAGUE, 0.02, "soft_l1", 1)
    np.testing.assert_allclose(fitted, TRUTH, atol=1e-5)


def test_wrong_observations_do_not_change_a_robust_fit() -> None:
    observed = DESIGN @ TRUTH
    observed[:6] += 3.0
    np.testing.assert_allclose(robust_fit(linear, observed, VAGUE, 0.02, "cauchy", 3), TRUTH, atol=1e-3)


def test_unobserved_parameters_keep_their_prior_mean() -> None:
    prior = Prior.independent(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]))
    fitted = robust_fit(lambda p: np.repeat(p[0][:, None], 5, axis=1), np.full(5, 1.0), prior, 0.02, "soft_l1", 2)
    np.testing.assert_allclose(fitted, prior.mean, atol=1e-6)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_generalised_fit_of_a_linear_model_is_the_bayesian_posterior_mean(correlation: float) -> None:
    mean, sd = np.array([0.5, 0.5, -0.5]), np.array([0.3, 1.0, 0.5])
    between = np.outer(sd, sd) * (correlation + (1 - correlation) * np.eye(3))
    root = RNG.normal(size=(40, 40)) * 0.05
    covariance = root @ root.T + 0.01 * np.eye(40)
    observed = DESIGN @ TRUTH + RNG.normal(size=40) * 0.1
    precision = DESIGN.T @ np.linalg.inv(covariance) @ DESIGN + np.linalg.inv(between)
    pull = DESIGN.T @ np.linalg.inv(covariance) @ observed + np.linalg.solve(between, mean)
    fitted = generalised_fit(linear, observed, Prior.correlated(mean, between), covariance, mean)
    np.testing.assert_allclose(fitted, np.linalg.solve(precision, pull), atol=1e-5)


def test_a_further_parameter_is_independent_of_the_others() -> None:
    covariance = np.array([[2.0, 0.5], [0.5, 1.0]])
    longer = Prior.correlated(np.array([1.0, 2.0]), covariance).extended(0.4, 0.25)
    assert longer.mean.tolist() == [1.0, 2.0, 0.4]
    expected = [[2, 0.5, 0], [0.5, 1, 0], [0, 0, 0.0625]]
    np.testing.assert_allclose(longer.root @ longer.root.T, expected, atol=1e-8)


def test_deviations_and_parameters_are_inverse() -> None:
    prior = Prior.correlated(np.array([1.0, 2.0]), np.array([[2.0, 0.5], [0.5, 1.0]]))
    parameters = np.array([[3.0, 1.0], [-2.0, 0.5]])
    found = prior.parameters(np.stack([prior.deviations(column) for column in parameters.T], axis=1))
    np.testing.assert_allclose(found, parameters)


def test_fits_survive_parameters_whose_exponentials_overflow() -> None:
    prior = Prior.independent(np.array([700.0]), np.array([1000.0]))
    fitted = robust_fit(
        lambda p: np.repeat(np.log(np.exp(p.T) + 1), 2, axis=1), np.array([2.0, 2.0]), prior, 0.02, "soft_l1", 1
    )
    assert np.isfinite(fitted).all()


def test_the_jacobian_of_a_linear_model_is_its_design() -> None:
    np.testing.assert_allclose(jacobian(linear, TRUTH), DESIGN, atol=1e-6)


def test_residual_weights_halve_at_the_width_and_fall_with_the_4th_power() -> None:
    assert residual_weights(np.array([0.0, 0.1, -0.3]), 0.1).tolist() == pytest.approx([1.0, 0.5, 1 / 82])
