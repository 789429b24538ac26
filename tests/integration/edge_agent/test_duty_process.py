"""The process that finds the modes in which a duty is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from edge_agent.profiling.profiled_workload import StoppedError
from edge_agent.serving.duty_process import keep_duty_in_process
from tests.fakes.planned_duty import MODES, TRAINING
from wattfleet.choosing import KnownModes
from wattfleet.duties import Demand

INFERENCE = KnownModes.of(MODES, TRAINING, None, np.ones(3, dtype=np.int64))


class Slow(float):
    """A number that takes a minute to arrive in the other process, so that no answer can be early."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[float]]:
        return time.sleep, (60.0,)


def test_an_agent_that_stops_does_not_wait_for_the_modes_that_keep_a_duty() -> None:
    questions = iter([False, True])
    with pytest.raises(StoppedError):
        keep_duty_in_process(lambda: next(questions), KnownModes.of(MODES, TRAINING), INFERENCE, Demand(1, 500), Slow())


def test_the_modes_that_keep_a_duty_are_found_aside() -> None:
    found = keep_duty_in_process(lambda: False, KnownModes.of(MODES, TRAINING), INFERENCE, Demand(1, 500), 0.0)
    assert len(found.beside.modes) == 3
