"""A small BERT (Devlin et al., 2019; four layers of width 512, as BERT-Small) that classifies texts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from edge_agent.workloads.loading import Processor, StepTimes
from edge_agent.workloads.loop import LOADER_WORKERS, texts, train

_WORDS, _LENGTH, _CLASSES = 30_522, 128, 2
_WIDTH, _HEADS, _LAYERS = 512, 8, 4


def bert(*, minibatch: int, device: Processor, workers: int = LOADER_WORKERS) -> Iterator[StepTimes]:
    """Train the transformer endlessly; yield after every minibatch.

    Args:
        minibatch: samples in a minibatch.
        device: where it computes.
        workers: processes that make samples.
    """
    return train(network(), texts(_WORDS, _LENGTH, _CLASSES), minibatch, device, workers)


def network() -> nn.Module:
    """Return a network from `[n, 128]` word indices to `[n, 2]` scores; 28.3 million parameters."""
    return _TextClassifier()


class _TextClassifier(nn.Module):
    """Classifies a text by the output at its first position."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.positions = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 4 * _WIDTH, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, _LAYERS)
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        read = self.layers(self.words(words) + self.positions)
        scores: Tensor = self.head(read[:, 0])
        return scores
