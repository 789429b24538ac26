"""Predictors as named arrays in safetensors format, which holds only numbers and cannot execute code.

Names, shapes and values are checked before a predictor is made of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from wattfleet.core.errors import CorruptReferenceError
from wattfleet.core.modes import LARGEST_COUNT

Values = NDArray[np.float64]
Tensors = dict[str, Values]

LARGEST_LOG = 30.0
"""Limit of a parameter's logarithm, in either direction. Beyond it no model is plausible, and exponentials overflow."""

_LARGEST = np.exp(LARGEST_LOG)
_NO_BATCH = 0.0


def write_tensors(tensors: Tensors) -> bytes:
    """Serialize arrays in safetensors format."""
    # safetensors stores memory in its physical order: a transposed view would be read back scrambled.
    return bytes(save({name: np.ascontiguousarray(values) for name, values in tensors.items()}))


def read_tensors(weights: bytes) -> Tensors:
    """Read arrays in safetensors format; all must hold finite 64-bit floats within the limits.

    Raises:
        CorruptReferenceError: the bytes are not in this format, or a value is not such a number.
    """
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise corrupt_weights(f"are not in safetensors format ({error})") from None
    for name, values in tensors.items():
        # NaN compares as false and is refused, too.
        if values.dtype != np.float64 or not (np.abs(values) <= _LARGEST).all():
            raise corrupt_weights(f"hold {name!r}, which is not made of finite 64-bit numbers up to {_LARGEST:.0e}")
    return dict(tensors)


def read_parameters(tensors: Tensors, name: str, count: int) -> list[float]:
    """Read `count` positive parameters.

    Raises:
        CorruptReferenceError: they are missing, of another count, not positive, or smaller than any fit finds.
    """
    return [float(value) for value in read_array(tensors, name, count, positive=True)]


def read_array(tensors: Tensors, name: str, *shape: int, positive: bool = False) -> Values:
    """Read an array of the given shape.

    Raises:
        CorruptReferenceError: it is missing or of another shape, or with `positive` not clearly above 0.
    """
    if name not in tensors:
        raise corrupt_weights(f"lack {name!r}")
    values = tensors[name]
    if values.shape != shape:
        raise corrupt_weights(f"hold {name!r} of shape {list(values.shape)}, not {list(shape)}")
    if positive and not (values >= 1 / _LARGEST).all():
        raise corrupt_weights(f"hold {name!r}, which is not positive and above {1 / _LARGEST:.0e} throughout")
    return values


def batch_array(batch: int | None) -> Values:
    """A batch size as an array; None is allowed, too."""
    return np.array([_NO_BATCH if batch is None else float(batch)])


def read_batch(tensors: Tensors) -> int | None:
    """Read the array "batch", as `batch_array` makes it.

    Raises:
        CorruptReferenceError: it is missing, or not a whole number of samples up to a million.
    """
    batch = float(read_array(tensors, "batch", 1)[0])
    if batch % 1 or not 0 <= batch <= LARGEST_COUNT:
        raise corrupt_weights(f"hold the batch size {batch:g}")
    return None if batch == _NO_BATCH else int(batch)


def tensor_size(tensors: Tensors, name: str) -> int:
    """The number of elements of an array; 0 if it is missing."""
    return tensors[name].size if name in tensors else 0


def corrupt_weights(what: str) -> CorruptReferenceError:
    """The error for stored weights that cannot be used; `what` goes on after "the weights ..."."""
    return CorruptReferenceError(f"the reference's weights {what}: fetch the reference again")
