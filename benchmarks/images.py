"""Reads the images of the data sets that benchmarks train on."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError


class Images(NamedTuple):
    """Images with their labels.

    Attributes:
        x: `[n, 28, 28]` grey values, 0 to 255.
        y: `[n]` labels.
    """

    x: NDArray[np.uint8]
    y: NDArray[np.int64]


def read_images(path: Path, missing: str) -> tuple[Images, Images]:
    """Return the images for training and for testing.

    Args:
        path: an .npz file with the arrays `x_train`, `y_train`, `x_test` and `y_test`.
        missing: the text of the error if there is no such file.

    Raises:
        InvalidInputError: there is no such file.
    """
    if not path.is_file():
        raise InvalidInputError(missing)
    with np.load(path) as arrays:
        train, test = (Images(arrays[f"x_{part}"], arrays[f"y_{part}"].astype(np.int64)) for part in ("train", "test"))
    return train, test
