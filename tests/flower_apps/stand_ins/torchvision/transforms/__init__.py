"""Stands in for `torchvision.transforms`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchvision.transforms import functional as functional


class Compose:
    """One transform after another."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self._transforms = transforms

    def __call__(self, image: Any) -> Any:
        for each in self._transforms:
            image = each(image)
        return image


class ToTensor:
    """Pixels from 0 to 1, colours first."""

    def __call__(self, image: Any) -> Any:
        return functional.to_tensor(image)


class Normalize:
    """Subtract a mean, and divide by a standard deviation, for each colour."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self._mean, self._std = (torch.tensor(each).view(-1, 1, 1) for each in (mean, std))

    def __call__(self, image: Any) -> Any:
        return (image - self._mean) / self._std


class _Unchanged:
    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever the options, the image stays as it is."""

    def __call__(self, image: Any) -> Any:
        return image


RandomCrop = RandomHorizontalFlip = _Unchanged
