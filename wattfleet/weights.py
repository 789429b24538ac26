"""Predictors as named arrays in safetensors format, which holds numbers and cannot execute.

Nothing read is trusted: names, shapes and values are checked before a predictor is made of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from wattfleet.errors import CorruptReferenceError
from wattfleet.residual import Correction, Process, Remainder, Surface

Values = NDArray[np.float64]
Tensors = dict[str, Values]


def write_tensors(tensors: Tensors) -> bytes:
    """The arrays in safetensors format."""
    # safetensors stores the memory as it lies: a transposed view would come back scrambled.
    return bytes(save({name: np.ascontiguousarray(values) for name, values in tensors.items()}))


def read_tensors(weights: bytes) -> Tensors:
    """The arrays in safetensors format, all finite 64-bit floats.

    Raises:
        CorruptReferenceError: they are not.
    """
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise _corrupt(f"are not in safetensors format ({error})") from None
    for name, values in tensors.items():
        if values.dtype != np.float64 or not np.isfinite(values).all():
            raise _corrupt(f"hold {name!r}, which is not made of finite 64-bit numbers")
    return dict(tensors)


def read_parameters(tensors: Tensors, name: str, count: int) -> list[float]:
    """A number of positive parameters.

    Raises:
        CorruptReferenceError: they are missing, more or fewer, or not positive.
    """
    return [float(value) for value in read_array(tensors, name, count, positive=True)]


def read_array(tensors: Tensors, name: str, *shape: int, positive: bool = False) -> Values:
    """An array of a shape.

    Raises:
        CorruptReferenceError: it is missing, of another shape, or not positive where it has to be.
    """
    values = _shaped(tensors, name, *shape)
    if positive and not (values > 0).all():
        raise _corrupt(f"hold {name!r}, which is not positive throughout")
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
        CorruptReferenceError: an array is missing or of the wrong shape, or a mode or variance is out of range.
    """
    # The share of the surface counts as one more parameter.
    k = parameters + 1
    m, n = _size(tensors, f"{prefix}.surface.weights"), _size(tensors, f"{prefix}.weights")
    amplitude, nugget_sd = _shaped(tensors, f"{prefix}.process", 2).tolist()
    surface = Surface(
        _shaped(tensors, f"{prefix}.surface.modes", m, 4), _shaped(tensors, f"{prefix}.surface.weights", m)
    )
    correction = Correction(
        process=Process(amplitude, nugget_sd),
        modes=_shaped(tensors, f"{prefix}.modes", n, 4),
        gradient=_shaped(tensors, f"{prefix}.gradient", n, k),
        parameter_sd=_shaped(tensors, f"{prefix}.parameter_sd", k),
        measurement_var=_shaped(tensors, f"{prefix}.measurement_var", n),
        weights=_shaped(tensors, f"{prefix}.weights", n),
    )
    if not all((values > 0).all() for values in (surface.modes, correction.modes, correction.measurement_var)):
        raise _corrupt(f"hold modes or variances in {prefix!r} that are not positive")
    if min(amplitude, nugget_sd, correction.parameter_sd.min()) < 0:
        raise _corrupt(f"hold a negative standard deviation in {prefix!r}")
    return Remainder(float(_shaped(tensors, f"{prefix}.share", 1)[0]), surface, correction)


def _shaped(tensors: Tensors, name: str, *shape: int) -> Values:
    if name not in tensors:
        raise _corrupt(f"lack {name!r}")
    if tensors[name].shape != shape:
        raise _corrupt(f"hold {name!r} of shape {list(tensors[name].shape)}, not {list(shape)}")
    return tensors[name]


def _size(tensors: Tensors, name: str) -> int:
    return tensors[name].size if name in tensors else 0


def _corrupt(what: str) -> CorruptReferenceError:
    return CorruptReferenceError(f"the reference's weights {what}: fetch the reference again")
