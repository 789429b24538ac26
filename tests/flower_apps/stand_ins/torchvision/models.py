"""Stands in for `torchvision.models`, which TorchMetrics imports without a need."""

from typing import Any


def __getattr__(name: str) -> Any:
    return None
