"""The totals of runs; those of ended runs are cached, so that their rounds are read only once."""

from __future__ import annotations

from collections import OrderedDict

from coordinator.display.run_totals import run_totals
from coordinator.display.view_values import Values
from coordinator.page.queries import Queries
from wattfleet_proto.v1 import view_pb2

_KEPT_RUNS = 1_000


class RunCosts:
    """The totals of runs."""

    def __init__(self, queries: Queries) -> None:
        """Start without any run.

        Args:
            queries: read the fleet.
        """
        self._queries = queries
        self._ended: OrderedDict[tuple[str, float | None], Values] = OrderedDict()

    async def of(self, run: view_pb2.RunView) -> Values:
        """The values of a run with its totals.

        Raises:
            UnknownRecordError: the run was deleted.
        """
        key = (run.run_id, run.finished_unix_s if run.HasField("finished_unix_s") else None)
        if run.finished and key in self._ended:
            return self._ended[key]
        found = run_totals(run, await self._queries.rounds(run.run_id))
        if run.finished:
            self._ended[key] = found
            if len(self._ended) > _KEPT_RUNS:
                self._ended.popitem(last=False)
        return found
