"""Random texts as word indices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from edge_agent.workloads.loop import SyntheticSamples


def texts(words: int, length: int, classes: int) -> SyntheticSamples:
    """Return random texts of `[length]` word indices below `words`, with a class below `classes` for each text."""
    return SyntheticSamples(partial(_text, words, length, classes))


def _text(words: int, length: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(words, (length,), generator=generator), torch.randint(classes, (), generator=generator)
