"""Stands in for `torchvision.transforms.functional`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def to_tensor(image: Any) -> Any:
    """Pixels from 0 to 1, colours first."""
    array = np.asarray(image)
    array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(array)).float() / 255
