"""The training loop of the shipped workloads: makes synthetic samples, and times every minibatch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from edge_agent.workloads.loading import Processor, StepTimes
from wattfleet.core.errors import InvalidInputError

LOADER_WORKERS = 4
"""Number of processes that make samples, as in the published measurements."""

Sample = tuple[Tensor, Tensor]
"""An input and its class."""


class SyntheticSamples(IterableDataset[Sample]):
    """Endless random samples, made one by one, like a real loader decodes them.

    Args:
        make: makes a sample.
    """

    def __init__(self, make: Callable[[torch.Generator], Sample]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(0 if worker is None else worker.id)
        while True:
            yield self._make(generator)


def train(
    network: nn.Module, samples: SyntheticSamples, minibatch: int, device: Processor, workers: int
) -> Iterator[StepTimes]:
    """Train a classifier endlessly; yield after every minibatch.

    Args:
        network: maps `[minibatch, ...]` inputs to `[minibatch, classes]` scores.
        samples: inputs with the number of their class.
        minibatch: samples in a minibatch.
        device: where it computes.
        workers: processes that make samples; 0 makes them in this one.

    Raises:
        InvalidInputError: the device does not exist.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInputError(
            "torch finds no CUDA device; pass --processor cpu, or install a torch built for this board"
        )
    network = network.to(device).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(samples, batch_size=minibatch, num_workers=workers, pin_memory=device == "cuda")
    batches = iter(loader)
    stopwatch = _gpu_time_ms if device == "cuda" else _cpu_time_ms
    while True:
        requested_s = time.perf_counter()
        inputs, classes = (part.to(device, non_blocking=True) for part in next(batches))
        fetch_stall_ms = (time.perf_counter() - requested_s) * 1e3
        yield StepTimes(fetch_stall_ms, stopwatch(partial(_learn, network, optimizer, inputs, classes)))


def _learn(network: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, classes: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(network(inputs), classes).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _cpu_time_ms(work: Callable[[], None]) -> float:
    begin_s = time.perf_counter()
    work()
    return (time.perf_counter() - begin_s) * 1e3


def _gpu_time_ms(work: Callable[[], None]) -> float:
    """Return the time until the GPU has done some work, ms; when `work` returns, the CPU has only queued it."""
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


# --- Images -----------------------------------------------------------------------------------------------------------
# Random images of ImageNet's shape.

CLASSES = 1000
_SIDE = 224


def images() -> SyntheticSamples:
    """Return random `[3, 224, 224]` images, converted from bytes to numbers around zero like decoded images."""
    return SyntheticSamples(_image)


def _image(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.randint(256, (3, _SIDE, _SIDE), generator=generator, dtype=torch.uint8)
    return pixels.float().div(127.5).sub(1), torch.randint(CLASSES, (), generator=generator)


# --- Texts ------------------------------------------------------------------------------------------------------------
# Random texts as word indices.


def texts(words: int, length: int, classes: int) -> SyntheticSamples:
    """Return random texts of `[length]` word indices below `words`, with a class below `classes` for each text."""
    return SyntheticSamples(partial(_text, words, length, classes))


def _text(words: int, length: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(words, (length,), generator=generator), torch.randint(classes, (), generator=generator)
