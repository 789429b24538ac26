"""Random images of ImageNet's shape."""

from __future__ import annotations

import torch
from torch import Tensor

from edge_agent.workloads.loop import SyntheticSamples

CLASSES = 1000
_SIDE = 224


def images() -> SyntheticSamples:
    """Return random `[3, 224, 224]` images, converted from bytes to numbers around zero like decoded images."""
    return SyntheticSamples(_image)


def _image(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.randint(256, (3, _SIDE, _SIDE), generator=generator, dtype=torch.uint8)
    return pixels.float().div(127.5).sub(1), torch.randint(CLASSES, (), generator=generator)
