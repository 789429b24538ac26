"""Fits compared with closed-form solutions, and with some wrong observations."""

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
VAGUE = Prior(np.zeros(3), np.full(3, 10.0))


def linear(parameters: Values) -> Values:
    return np.asarray(DESIGN @ parameters)


def test_exact_observations_give_the_true_parameters() -> None:
    fitted = robust_fit(linear, linear(TRUTH), VAGUE, 0.02, "soft_l1", 1)
    np.testing.assert_allclose(fitted, TRUTH, atol=1e-5)


def test_wrong_observations_do_not_change_a_robust_fit() -> None:
    observed = linear(TRUTH)
    observed[:6] += 3.0
    np.testing.assert_allclose(robust_fit(linear, observed, VAGUE, 0.02, "cauchy", 3), TRUTH, atol=1e-3)


def test_unobserved_parameters_keep_their_prior_mean() -> None:
    prior = Prior(np.array([1.0, 2.0, 3.0]), np.array([0.1, 0.2, 0.3]))
    fitted = robust_fit(lambda p: np.full(5, p[0]), np.full(5, 1.0), prior, 0.02, "soft_l1", 2)
    np.testing.assert_allclose(fitted, prior.mean, atol=1e-6)


def test_a_generalised_fit_of_a_linear_model_is_the_bayesian_posterior_mean() -> None:
    prior = Prior(np.array([0.5, 0.5, -0.5]), np.array([0.3, 1.0, 0.5]))
    root = RNG.normal(size=(40, 40)) * 0.05
    covariance = root @ root.T + 0.01 * np.eye(40)
    observed = linear(TRUTH) + RNG.normal(size=40) * 0.1
    precision = DESIGN.T @ np.linalg.inv(covariance) @ DESIGN + np.diag(prior.sd**-2)
    pull = DESIGN.T @ np.linalg.inv(covariance) @ observed + prior.mean / prior.sd**2
    fitted = generalised_fit(linear, observed, prior, covariance, prior.mean)
    np.testing.assert_allclose(fitted, np.linalg.solve(precision, pull), atol=1e-5)


def test_fits_survive_parameters_whose_exponentials_overflow() -> None:
    prior = Prior(np.array([700.0]), np.array([1000.0]))
    fitted = robust_fit(lambda p: np.log(np.exp(p) + 1), np.array([2.0, 2.0]), prior, 0.02, "soft_l1", 1)
    assert np.isfinite(fitted).all()


def test_the_jacobian_of_a_linear_model_is_its_design() -> None:
    np.testing.assert_allclose(jacobian(linear, TRUTH), DESIGN, atol=1e-6)


def test_residual_weights_halve_at_the_width_and_fall_with_the_4th_power() -> None:
    assert residual_weights(np.array([0.0, 0.1, -0.3]), 0.1).tolist() == pytest.approx([1.0, 0.5, 1 / 82])
