"""The totals of runs; those of ended runs are cached, so that their rounds are read only once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from coordinator.display.run_totals import run_totals
from coordinator.display.view_values import Values
from coordinator.page.queries import Queries
from wattfleet_proto.v1 import view_pb2

_KEPT_RUNS = 1_000

_LATE_S = 10.0
"""How long the totals of an ended run are shown while observations are missing, which may still arrive."""


class RunCosts:
    """The totals of runs."""

    def __init__(self, queries: Queries, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without any run.

        Args:
            queries: read the fleet.
            now_s: a clock, in seconds.
        """
        self._queries = queries
        self._now_s = now_s
        self._ended: OrderedDict[tuple[str, float | None], tuple[float, Values]] = OrderedDict()

    async def of(self, run: view_pb2.RunView) -> Values:
        """The values of a run with its totals.

        Raises:
            UnknownRecordError: the run was deleted.
        """
        key = (run.run_id, run.finished_unix_s if run.HasField("finished_unix_s") else None)
        read_s, found = self._ended.get(key, (0.0, None))
        if run.finished and found is not None:
            is_complete = found["observed_trainings"] >= found["trainings"]
            if is_complete or self._now_s() - read_s < _LATE_S:
                return found
        found = run_totals(run, await self._queries.rounds(run.run_id))
        if run.finished:
            self._ended[key] = (self._now_s(), found)
            if len(self._ended) > _KEPT_RUNS:
                self._ended.popitem(last=False)
        return found
