"""Predictors as named arrays in safetensors format, which holds numbers and cannot execute.

Nothing read is trusted: names, shapes and values are checked before a predictor is made of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from wattfleet.errors import CorruptReferenceError
from wattfleet.prediction.roofline.estimation import LARGEST_LOG
from wattfleet.prediction.roofline.residual import Correction, Process, Remainder, Surface

Values = NDArray[np.float64]
Tensors = dict[str, Values]

_LARGEST = np.exp(LARGEST_LOG)


def write_tensors(tensors: Tensors) -> bytes:
    """The arrays in safetensors format."""
    # safetensors stores the memory as it lies: a transposed view would come back scrambled.
    return bytes(save({name: np.ascontiguousarray(values) for name, values in tensors.items()}))


def read_tensors(weights: bytes) -> Tensors:
    """The arrays in safetensors format, all 64-bit floats of which none is absurdly large.

    Raises:
        CorruptReferenceError: they are not.
    """
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise _corrupt(f"are not in safetensors format ({error})") from None
    for name, values in tensors.items():
        # What is not a number compares as false, too.
        if values.dtype != np.float64 or not (np.abs(values) <= _LARGEST).all():
            raise _corrupt(f"hold {name!r}, which is not made of finite 64-bit numbers up to {_LARGEST:.0e}")
    return dict(tensors)


def read_parameters(tensors: Tensors, name: str, count: int) -> list[float]:
    """A number of positive parameters.

    Raises:
        CorruptReferenceError: they are missing, more or fewer, not positive, or so small that no fit finds them.
    """
    return [float(value) for value in read_array(tensors, name, count, positive=True)]


def read_array(tensors: Tensors, name: str, *shape: int, positive: bool = False) -> Values:
    """An array of a shape.

    Raises:
        CorruptReferenceError: it is missing, of another shape, or where it has to be positive, is not or hardly is.
    """
    if name not in tensors:
        raise _corrupt(f"lack {name!r}")
    values = tensors[name]
    if values.shape != shape:
        raise _corrupt(f"hold {name!r} of shape {list(values.shape)}, not {list(shape)}")
    if positive and not (values >= 1 / _LARGEST).all():
        raise _corrupt(f"hold {name!r}, which is not positive and above {1 / _LARGEST:.0e} throughout")
    return values


def remainder_tensors(prefix: str, remainder: Remainder) -> Tensors:
    """What is added to the physics of one quantity, as named arrays."""
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
    """Read what `remainder_tensors` wrote, for physics of so many parameters.

    Raises:
        CorruptReferenceError: an array is missing or of the wrong shape, or a number is out of range.
    """
    # The share of the surface counts as one more parameter.
    k = parameters + 1
    m, n = tensors_size(tensors, f"{prefix}.surface.weights"), tensors_size(tensors, f"{prefix}.weights")
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
        raise _corrupt(f"hold a standard deviation in {prefix!r} that is negative or above {LARGEST_LOG:g}")
    if not (np.abs(np.concatenate([share, heights])) <= LARGEST_LOG).all():
        raise _corrupt(f"hold a residual in {prefix!r} beyond {LARGEST_LOG:g}")
    surface = Surface(read_array(tensors, f"{prefix}.surface.modes", m, 4, positive=True), heights)
    return Remainder(float(share[0]), surface, correction)


def tensors_size(tensors: Tensors, name: str) -> int:
    """How many numbers an array holds; 0 where it is missing."""
    return tensors[name].size if name in tensors else 0


def _corrupt(what: str) -> CorruptReferenceError:
    return CorruptReferenceError(f"the reference's weights {what}: fetch the reference again")
