"""A network after MobileNetV3-Large (Howard et al., 2019) on images of ImageNet's shape.

It has the published layers and channel counts, squeeze-and-excitation to a quarter of the expanded channels, and no
dropout. Its costs are MobileNetV3's; its accuracy was never measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from edge_agent.workloads.loading import Processor, StepTimes
from edge_agent.workloads.loop import CLASSES, LOADER_WORKERS, images, train

# Kernel, expanded channels, output channels, squeeze and excite, hard swish, stride: table 1 of the paper.
_LAYERS = (
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def mobilenet(*, minibatch: int, device: Processor, workers: int = LOADER_WORKERS) -> Iterator[StepTimes]:
    """Train the network endlessly; yield after every minibatch.

    Args:
        minibatch: samples in a minibatch.
        device: where it computes.
        workers: processes that make samples.
    """
    return train(network(), images(), minibatch, device, workers)


def network() -> nn.Module:
    """Return a network from `[n, 3, 224, 224]` images to `[n, 1000]` scores; 5.5 million parameters."""
    layers: list[nn.Module] = [_convolution(3, 16, 3, 2), nn.Hardswish()]
    channels = 16
    for kernel, expanded, width, squeeze, swish, stride in _LAYERS:
        layers.append(_Bottleneck(channels, kernel, expanded, width, squeeze, swish, stride))
        channels = width
    layers += [_convolution(channels, 960, 1, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, CLASSES))


def _convolution(channels: int, width: int, kernel: int, stride: int, groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(width)
    )


class _Squeeze(nn.Module):
    """Scales channels by a summary of the whole image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // 4, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels // 4, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, images: Tensor) -> Tensor:
        weighed: Tensor = images * self.weigh(images)
        return weighed


class _Bottleneck(nn.Module):
    """Expands, filters each channel separately, and projects; with a shortcut if the shape is unchanged."""

    def __init__(
        self, channels: int, kernel: int, expanded: int, width: int, squeeze: bool, swish: bool, stride: int
    ) -> None:
        super().__init__()
        activation = nn.Hardswish if swish else nn.ReLU
        layers: list[nn.Module] = []
        if expanded != channels:
            layers += [_convolution(channels, expanded, 1, 1), activation()]
        layers += [_convolution(expanded, expanded, kernel, stride, groups=expanded), activation()]
        if squeeze:
            layers.append(_Squeeze(expanded))
        self.body = nn.Sequential(*layers, _convolution(expanded, width, 1, 1))
        self.has_shortcut = stride == 1 and channels == width

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.body(images)
        return images + out if self.has_shortcut else out
