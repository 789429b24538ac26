"""What the roofline predictor adds to its physics, as named arrays.

All values are checked as they are read.
"""

from __future__ import annotations

import numpy as np

from wattfleet.prediction.predictor import MIN_CORPUS_MODES
from wattfleet.prediction.roofline.residual import MAX_INDUCING, Correction, Process, Remainder, Surface
from wattfleet.prediction.tensors import LARGEST_LOG, Tensors, corrupt_weights, read_array, tensor_size

_MAX_CORRECTIONS = MIN_CORPUS_MODES - 1
"""A fit to more modes has a surface instead of a correction."""


def remainder_tensors(prefix: str, remainder: Remainder) -> Tensors:
    """The correction of one quantity's physics, as named arrays."""
    surface, correction = remainder.surface, remainder.correction
    process = correction.process
    return {
        f"{prefix}.share": np.array([remainder.share]),
        f"{prefix}.surface.modes": surface.modes,
        f"{prefix}.surface.weights": surface.weights,
        f"{prefix}.process": np.array([process.amplitude, process.nugget_sd]),
        f"{prefix}.modes": correction.modes,
        f"{prefix}.gradient": correction.gradient,
        f"{prefix}.parameter_sd": correction.parameter_sd,
        f"{prefix}.measurement_var": correction.measurement_var,
        f"{prefix}.weights": correction.weights,
    }


def read_remainder(tensors: Tensors, prefix: str, parameters: int) -> Remainder:
    """Read what `remainder_tensors` wrote.

    Args:
        tensors: all arrays of the predictor.
        prefix: prefix of the arrays' names.
        parameters: number of parameters of the physics.

    Raises:
        CorruptReferenceError: an array is missing or of the wrong shape, or a number is out of range.
    """
    # The share of the surface is one more parameter.
    k = parameters + 1
    m, n = tensor_size(tensors, f"{prefix}.surface.weights"), tensor_size(tensors, f"{prefix}.weights")
    if m > MAX_INDUCING or n > _MAX_CORRECTIONS:  # a prediction takes memory for the square of both
        raise corrupt_weights(
            f"hold {m:,} inducing and {n:,} correcting modes in {prefix!r}; at most {MAX_INDUCING} inducing and"
            f" {_MAX_CORRECTIONS} correcting modes are allowed"
        )
    process = read_array(tensors, f"{prefix}.process", 2)
    parameter_sd = read_array(tensors, f"{prefix}.parameter_sd", k)
    share, heights = read_array(tensors, f"{prefix}.share", 1), read_array(tensors, f"{prefix}.surface.weights", m)
    correction = Correction(
        process=Process(*process.tolist()),
        modes=read_array(tensors, f"{prefix}.modes", n, 4, positive=True),
        gradient=read_array(tensors, f"{prefix}.gradient", n, k),
        parameter_sd=parameter_sd,
        measurement_var=read_array(tensors, f"{prefix}.measurement_var", n, positive=True),
        weights=read_array(tensors, f"{prefix}.weights", n),
    )
    sds = np.concatenate([process, parameter_sd])
    if not ((sds >= 0) & (sds <= LARGEST_LOG)).all():
        raise corrupt_weights(f"hold a standard deviation in {prefix!r} that is negative or above {LARGEST_LOG:g}")
    if not (np.abs(np.concatenate([share, heights])) <= LARGEST_LOG).all():
        raise corrupt_weights(f"hold a residual in {prefix!r} beyond {LARGEST_LOG:g}")
    surface = Surface(read_array(tensors, f"{prefix}.surface.modes", m, 4, positive=True), heights)
    return Remainder(float(share[0]), surface, correction)
