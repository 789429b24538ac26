"""A two-layer LSTM that classifies texts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from edge_agent.workloads.loading import Processor, StepTimes
from edge_agent.workloads.loop import LOADER_WORKERS, texts, train

_WORDS, _LENGTH, _CLASSES = 10_000, 128, 2
_EMBEDDED, _HIDDEN, _LAYERS = 256, 512, 2


def lstm(*, minibatch: int, device: Processor, workers: int = LOADER_WORKERS) -> Iterator[StepTimes]:
    """Train the LSTM endlessly; yield after every minibatch.

    Args:
        minibatch: samples in a minibatch.
        device: where it computes.
        workers: processes that make samples.
    """
    return train(network(), texts(_WORDS, _LENGTH, _CLASSES), minibatch, device, workers)


def network() -> nn.Module:
    """Return a network from `[n, 128]` word indices to `[n, 2]` scores; 6.2 million parameters."""
    return _SequenceClassifier()


class _SequenceClassifier(nn.Module):
    """Classifies a text by the output at its last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _EMBEDDED)
        self.reader = nn.LSTM(_EMBEDDED, _HIDDEN, _LAYERS, batch_first=True)
        self.head = nn.Linear(_HIDDEN, _CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        read, _ = self.reader(self.embedding(words))
        scores: Tensor = self.head(read[:, -1])
        return scores
