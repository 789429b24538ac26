"""ResNet-18 (He et al., 2016) on images of ImageNet's shape."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from edge_agent.workloads.loading import Processor, StepTimes
from edge_agent.workloads.loop import CLASSES, LOADER_WORKERS, images, train


def resnet18(*, minibatch: int, device: Processor, workers: int = LOADER_WORKERS) -> Iterator[StepTimes]:
    """Train ResNet-18 endlessly; yield after every minibatch.

    Args:
        minibatch: samples in a minibatch.
        device: where it computes.
        workers: processes that make samples.
    """
    return train(network(), images(), minibatch, device, workers)


def network() -> nn.Module:
    """Return a network from `[n, 3, 224, 224]` images to `[n, 1000]` scores; 11.7 million parameters."""
    stem = (nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
    blocks: list[nn.Module] = []
    channels = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [_Block(channels, width, stride), _Block(width, width, 1)]
        channels = width
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(*stem, nn.MaxPool2d(3, stride=2, padding=1), *blocks, *head)


class _Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        same_shape = stride == 1 and channels == width
        self.shortcut: nn.Module = (
            nn.Identity()
            if same_shape
            else nn.Sequential(nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width))
        )

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(self.body(images) + self.shortcut(images))
