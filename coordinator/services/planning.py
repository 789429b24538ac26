"""The Flower server's side of the coordinator: its runs, their rounds, and a plan for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.errors import FleetReturningError
from coordinator.settings import RoundSettings
from coordinator.state.fleet import Fleet
from coordinator.state.leases import Leases
from coordinator.state.names import require_name
from coordinator.state.records import DeviceResult, RoundRecord, plan_id_of
from coordinator.state.round_request import RoundRequest
from coordinator.store.archive import recalled, recalled_history
from coordinator.store.writer import Writer
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import plan_to_message
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_log = logging.getLogger(__name__)

_LONGEST_FAILURE = 500


class PlanningServicer(planning_pb2_grpc.PlanningServiceServicer):
    """The Flower server's side."""

    def __init__(
        self,
        fleet: Fleet,
        writer: Writer,
        leases: Leases,
        now_s: Callable[[], float] = time.monotonic,
        settings: RoundSettings = RoundSettings(),
    ) -> None:
        """Serve one fleet.

        Args:
            fleet: what is known.
            writer: keeps what changed.
            leases: the sessions.
            now_s: the clock of the leases.
            settings: when a round is given up.
        """
        self._fleet = fleet
        self._writer = writer
        self._leases = leases
        self._now_s = now_s
        self._settings = settings
        self._awaited_since_s: dict[str, float] = {}
        self._turn = asyncio.Lock()
        self._give_up_overdue(fleet)

    async def StartRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.StartRunRequest, context: Any
    ) -> planning_pb2.StartRunResponse:
        """A Flower run begins."""
        require_name("a run's id", request.run_id)
        require_name("a strategy's name", request.strategy)
        await self._writer.saved(self._fleet.start_run(request.run_id, request.strategy, request.rounds))
        return planning_pb2.StartRunResponse()

    async def ResolveNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ResolveNodesRequest, context: Any
    ) -> planning_pb2.ResolveNodesResponse:
        """Which nodes are tied to a device."""
        known = {node: self._fleet.nodes[node] for node in request.node_ids if node in self._fleet.nodes}
        return planning_pb2.ResolveNodesResponse(
            bindings=[planning_pb2.NodeBinding(node_id=n, device_id=d) for n, d in known.items()],
            unknown_node_ids=[node for node in request.node_ids if node not in known],
        )

    async def BindNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.BindNodesRequest, context: Any
    ) -> planning_pb2.BindNodesResponse:
        """Tie nodes to devices; a node that cannot be any is left out, so that it is no hindrance to the others."""
        bound = []
        for binding in request.bindings:
            try:
                bound.append(self._fleet.bind_node(binding.node_id, binding.device_id))
            except InvalidInputError as error:
                _log.warning("node %d is left out: %s", binding.node_id, error)
        await self._writer.saved(*bound)
        return planning_pb2.BindNodesResponse()

    async def PlanRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanRoundRequest, context: Any
    ) -> planning_pb2.PlanRoundResponse:
        """Plan a round."""
        await recalled(self._fleet, self._writer, plan_id_of(request.run_id, request.round))
        if not self._fleet.is_planned(request.run_id, request.round):
            await recalled_history(self._fleet, self._writer, request.run_id)
            # What comes of one plan counts in the next.
            async with self._turn:
                await self._plan(request)
        record = self._fleet.plan(request.run_id, request.round, (), request.epochs)
        await self._writer.saved(record)
        return await asyncio.to_thread(plan_to_message, record.plan_id, record.plan, record.nodes)

    async def _plan(self, request: planning_pb2.PlanRoundRequest) -> None:
        """Plan a round while the fleet goes on: a large one takes a while, and agents are to be answered."""
        if self._fleet.is_planned(request.run_id, request.round):
            return  # it was asked for twice
        # At hand already, unless many runs were planned meanwhile.
        await recalled_history(self._fleet, self._writer, request.run_id)
        self.clear_way(self._fleet, request.node_ids)
        fleet = self._fleet.copy()

        def plan() -> tuple[RoundRequest, RoundRecord]:
            asked = fleet.request_round(request.run_id, request.round, request.node_ids, request.epochs)
            return asked, asked.planned()

        asked, record = await asyncio.to_thread(plan)
        # Another reference may have been pinned meanwhile.
        self._require_back(self._fleet, request.node_ids)
        self._fleet.take_plan(asked, record)
        self._awaited_since_s[record.plan_id] = self._now_s()

    async def FinishRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRoundRequest, context: Any
    ) -> planning_pb2.FinishRoundResponse:
        """A round has all the replies it will get."""
        await recalled(self._fleet, self._writer, request.plan_id)
        results = [_result(message) for message in request.results]
        await self._writer.saved(self._fleet.finish_round(request.plan_id, results, request.wall_s))
        return planning_pb2.FinishRoundResponse()

    async def ReportMetrics(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportMetricsRequest, context: Any
    ) -> planning_pb2.ReportMetricsResponse:
        """What the strategy evaluated."""
        await recalled(self._fleet, self._writer, plan_id_of(request.run_id, request.round))
        await self._writer.saved(self._fleet.report_metrics(request.run_id, request.round, dict(request.metrics)))
        return planning_pb2.ReportMetricsResponse()

    async def FinishRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRunRequest, context: Any
    ) -> planning_pb2.FinishRunResponse:
        """A Flower run is over."""
        await self._writer.saved(self._fleet.finish_run(request.run_id, request.error))
        return planning_pb2.FinishRunResponse()

    def clear_way(self, fleet: Fleet, node_ids: Sequence[int]) -> None:
        """What comes before every new plan.

        Args:
            fleet: that is planned for: the one that is served, or a copy of it.
            node_ids: nodes that the plan is to choose from.

        Raises:
            FleetReturningError: some of their devices are waited for still.
        """
        self._require_back(fleet, node_ids)
        self._give_up_overdue(fleet)

    def _require_back(self, fleet: Fleet, node_ids: Sequence[int]) -> None:
        """Make sure that a plan is not made for the few devices that came back first after a restart or a new pin.

        Raises:
            FleetReturningError: some are waited for still.
        """
        device_ids = {fleet.nodes[node] for node in node_ids if node in fleet.nodes}
        awaited, left_s = self._leases.awaited(device_ids, self._now_s())
        if awaited:
            raise FleetReturningError(
                f"the fleet is coming back: {awaited} of the devices that it had are not back yet; they are waited"
                f" for another {left_s:.0f} s"
            )

    def _give_up_overdue(self, fleet: Fleet) -> None:
        """Free the devices of rounds whose Flower server must have ended without a word."""
        now_s = self._now_s()
        awaited = {record.plan_id: record.plan for record in fleet.awaited_rounds()}
        since_s = {plan_id: self._awaited_since_s.get(plan_id, now_s) for plan_id in awaited}
        for plan_id, plan in awaited.items():
            longest_s = (
                self._settings.overdue_factor * max(plan.duration_s, plan.deadline_s or 0.0) + self._settings.overdue_s
            )
            if now_s - since_s[plan_id] > longest_s:
                _log.warning("round %s was never finished: its devices are free for others", plan_id)
                fleet.give_up(plan_id)
        self._awaited_since_s = since_s


def _result(message: planning_pb2.DeviceResult) -> DeviceResult:
    return DeviceResult(
        device_id=message.device_id,
        failure=message.failure[:_LONGEST_FAILURE],
        num_examples=message.num_examples if message.HasField("num_examples") else None,
        loss=message.loss if message.HasField("loss") else None,
        share=message.share,
    )
