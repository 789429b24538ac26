"""Measures the most promising predicted modes, each with its batch size, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np

from wattfleet.core.choosing import BatchEfficiency, JointTable, KnownModes, PowerLimit, choose_jointly
from wattfleet.core.errors import InfeasibleBudgetError
from wattfleet.core.modes import PowerMode, modes_to_array

Measure = Callable[[PowerMode, int], tuple[float, float]]
"""Measures a mode with a batch size; returns ms of a minibatch, and mW."""

_FIRST_PROBABILITY, _STEP, _LAST_PROBABILITY = 0.5, 0.1, 0.95


def measure_promising(
    table: JointTable, efficiency: BatchEfficiency, limit: PowerLimit, count: int, measure: Measure
) -> tuple[JointTable, int]:
    """Measure the rows that would be fastest if they kept the limit.

    The first row has to keep it with a probability of one half. After each measurement above the limit, the required
    probability rises. Other predictions stay as they are.

    Args:
        table: measured and predicted rows.
        efficiency: the samples needed with each batch size.
        limit: the power limit.
        count: maximum number of measurements.
        measure: measures one row.

    Returns:
        The table with the rows that are at least as fast as the choice from the original table, and the number of
        measurements.
    """
    slowest_ms = np.inf
    with suppress(InfeasibleBudgetError):
        slowest_ms = choose_jointly(table, efficiency, limit).sample_ms
    known = table.among(table.sample_ms(efficiency) <= slowest_ms).known
    probability = _FIRST_PROBABILITY
    for done in range(count):
        try:
            chosen = choose_jointly(JointTable(known), efficiency, limit, probability=probability).chosen
        except InfeasibleBudgetError:
            return JointTable(known), done
        if chosen.measured or chosen.batch is None:
            return JointTable(known), done
        minibatch_ms, power_mw = measure(chosen.mode, chosen.batch)
        known = _with_measurement(known, chosen.mode, chosen.batch, minibatch_ms, power_mw)
        if power_mw > limit.power_mw:
            probability = min(probability + _STEP, _LAST_PROBABILITY)
    return JointTable(known), count


def _with_measurement(
    known: KnownModes, mode: PowerMode, batch: int, minibatch_ms: float, power_mw: float
) -> KnownModes:
    """Return a table in which one row is measured."""
    at = (known.modes == modes_to_array([mode])).all(axis=1) & (known.stated_batch() == batch)
    return replace(
        known,
        minibatch_ms=np.where(at, minibatch_ms, known.minibatch_ms),
        power_mw=np.where(at, power_mw, known.power_mw),
        time_log_sd=np.where(at, 0.0, known.time_log_sd),
        power_log_sd=np.where(at, 0.0, known.power_log_sd),
        measured=known.measured | at,
    )
