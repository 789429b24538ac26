"""Profiles planned trainings of torch apps without any change to the app.

While the app trains, every DataLoader behaves as if it was wrapped with `profiled(loader)`. A pass counts as training
from the first step of an optimizer in it, so that passes over data for evaluation or for statistics are never measured.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from wattfleet.common.wrapped_loader import length_of
from wattfleet.flower.client.agent_training import CURRENT_TRAINING, AgentTraining
from wattfleet.flower.client.loaders import measured

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

# The first minibatch of a pass is not reported. A measurement may last for several passes, but each begins and ends
# with an answer from the agent, which would take too large a share of a short pass.
_LEAST_MINIBATCHES = 5

# Several trainings of one process may overlap, in Flower's simulation for example. The last one to end undoes the
# patches.
_lock = threading.Lock()
_trainings = 0
_undo = ExitStack()


@contextmanager
def automatic_profiling() -> Iterator[None]:
    """Profile every iteration of a torch DataLoader in this context, if the app has imported torch before."""
    global _trainings
    if not _is_possible():
        yield
        return
    with _lock:
        _trainings += 1
        if _trainings == 1:
            _undo.enter_context(_wrapped_loaders())
            _undo.enter_context(_counted_steps())
    try:
        yield
    finally:
        with _lock:
            _trainings -= 1
            if not _trainings:
                _undo.close()


def why_unprofiled(training: AgentTraining, is_automatic: bool) -> str | None:
    """Return why a training has reported no minibatches to the agent, with the remedy; None if it has.

    Args:
        training: a training that has ended.
        is_automatic: whether automatic profiling was switched on for it.
    """
    wrap = "wrap the loader in `wattfleet.flower.profiled`"
    remedy = (
        "whole trainings are learned from; if it has a loop over minibatches, wrap the loop's data in"
        " `wattfleet.flower.profiled`"
    )
    if training.has_reported:
        return None
    if not is_automatic:
        return f"auto-profile is false on its SuperNode: {wrap}"
    if not _is_possible():
        old = "this PyTorch is older than 2.0" if "torch" in sys.modules else "its minibatches come from no DataLoader"
        return f"{old}: {remedy}"
    if training.short_pass is not None:
        return f"a pass over its data has only {training.short_pass} minibatches: {wrap}, or use smaller batches"
    if training.optimizer_steps:
        return f"its minibatches come from no PyTorch DataLoader that is read in the training's own thread: {remedy}"
    return (
        "no step of a PyTorch optimizer was seen. If the app has some, import PyTorch at the top of its module, not in"
        f" the training; otherwise, {remedy}"
    )


def _is_possible() -> bool:
    """Whether the app has imported a torch version that has hooks for optimizer steps."""
    if sys.modules.get("torch") is None:
        return False
    # Torch 2.0 or newer.
    return hasattr(importlib.import_module("torch.optim.optimizer"), "register_optimizer_step_post_hook")


@contextmanager
def _wrapped_loaders() -> Iterator[None]:
    import torch
    from torch.utils.data import DataLoader

    iterate = DataLoader.__iter__

    def iterate_profiled(loader: DataLoader[Any]) -> Iterator[Any]:
        batches = iterate(loader)
        training = CURRENT_TRAINING.get()
        if training is None or training.is_profiled or not torch.is_grad_enabled():
            return batches
        return _measured_from_first_step(loader, batches, training)

    DataLoader.__iter__ = iterate_profiled  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = iterate  # type: ignore[method-assign]


@contextmanager
def _counted_steps() -> Iterator[None]:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def count(*_: object) -> None:
        training = CURRENT_TRAINING.get()
        if training is not None:
            training.optimizer_steps += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        handle.remove()


def _measured_from_first_step(
    loader: DataLoader[Any], batches: Iterator[Any], training: AgentTraining
) -> Iterator[Any]:
    steps_before, batches_seen = training.optimizer_steps, 0
    for batch in batches:
        yield batch
        batches_seen += 1
        if training.optimizer_steps > steps_before:
            break
    else:
        return
    # With several minibatches in a step (gradient accumulation), the first one ended earlier.
    training.report_loader(loader, after_minibatch=batches_seen == 1)
    length = length_of(loader)
    if length is not None and length < _LEAST_MINIBATCHES:
        training.short_pass = length
        yield from batches
    else:
        yield from measured(batches, training)
