"""The small networks of the benchmark: a residual network, a depthwise-separable one, and a causal transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two convolutions whose result is added to their input, as in ResNet-18."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self._convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False),
            _norm(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            _norm(channels),
        )
        self._shortcut = (
            nn.Identity()
            if channels_in == channels and stride == 1
            else nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), _norm(channels))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return `[n, channels, height, width]` features."""
        return nn.functional.relu(self._convolutions(x) + self._shortcut(x))


class CausalTransformer(nn.Module):
    """Predicts the next character at each position of `[n, length]` characters.

    Args:
        characters: size of the vocabulary.
        length: characters in a sequence.
        width: size of an embedding.
        heads: number of attention heads per layer.
        layers: number of layers.
    """

    def __init__(self, characters: int, length: int, width: int = 32, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self._characters = nn.Embedding(characters, width)
        self._positions = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self._layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self._norm = nn.LayerNorm(width)
        self._head = nn.Linear(width, characters)
        self.register_buffer("_hidden", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return `[n, length, characters]` logits."""
        features = self._characters(x) + self._positions
        logits: Tensor = self._head(self._norm(self._layers(features, mask=self._hidden, is_causal=True)))
        return logits


def residual_network(classes: int) -> nn.Module:
    """Return a network of two residual blocks for images with one channel."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, 1, 1, bias=False),
        _norm(8),
        nn.ReLU(),
        ResidualBlock(8, 16, 2),
        ResidualBlock(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, classes),
    )


def separable_network(classes: int) -> nn.Module:
    """Return a network of three depthwise-separable convolutions, as in MobileNet, for images with one channel."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        _norm(16),
        nn.ReLU(),
        *_separable(16, 32, 2),
        *_separable(32, 32, 1),
        *_separable(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def _norm(channels: int) -> nn.Module:
    """Return batch normalisation with more momentum than by default, since a run has only a hundred large batches."""
    return nn.BatchNorm2d(channels, momentum=0.3)


def _separable(channels_in: int, channels: int, stride: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(channels_in, channels_in, 3, stride, 1, groups=channels_in, bias=False),
        _norm(channels_in),
        nn.ReLU(),
        nn.Conv2d(channels_in, channels, 1, bias=False),
        _norm(channels),
        nn.ReLU(),
    )
