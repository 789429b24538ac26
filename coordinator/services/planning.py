"""The planning service: what a Flower server asks and reports."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from coordinator.repository.repository import FleetRepository
from coordinator.services.orders import Orders
from coordinator.services.round_planning import RoundPlanning
from coordinator.state.names import require_name
from coordinator.state.records import DeviceResult, RoundRecord, plan_id_of, run_of
from wattfleet.errors import InvalidInputError, first_few
from wattfleet.planning import plausible_examples, plausible_loss
from wattfleet_proto.convert import plan_to_message
from wattfleet_proto.message_sizes import MAX_ROUNDS
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_log = logging.getLogger(__name__)

_LONGEST_FAILURE = 500


class PlanningServicer(planning_pb2_grpc.PlanningServiceServicer):
    """Translates between a Flower server's messages and the fleet."""

    def __init__(self, repository: FleetRepository, planning: RoundPlanning, orders: Orders) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            planning: plans its rounds.
            orders: sends devices their grants.
        """
        self._repository = repository
        self._flower = repository.fleet.flower
        self._rounds = repository.fleet.rounds
        self._planning = planning
        self._orders = orders

    async def StartRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.StartRunRequest, context: Any
    ) -> planning_pb2.StartRunResponse:
        """Start a Flower run."""
        require_name("a run's id", request.run_id)
        require_name("a strategy's name", request.strategy)
        _require_round(request.rounds)
        started = self._flower.start_run(request.run_id, request.strategy, request.rounds, request.run_token)
        await self._repository.save(started)
        return planning_pb2.StartRunResponse()

    async def ResolveNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ResolveNodesRequest, context: Any
    ) -> planning_pb2.ResolveNodesResponse:
        """Look up which nodes are bound to a device."""
        nodes = self._flower.nodes
        known = {node: nodes[node] for node in request.node_ids if node in nodes}
        return planning_pb2.ResolveNodesResponse(
            bindings=[planning_pb2.NodeBinding(node_id=n, device_id=d) for n, d in known.items()],
            unknown_node_ids=[node for node in request.node_ids if node not in known],
        )

    async def BindNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.BindNodesRequest, context: Any
    ) -> planning_pb2.BindNodesResponse:
        """Bind nodes to devices; an invalid binding is skipped, so that it does not block the others."""
        bound = []
        skipped, first = 0, ""
        for binding in request.bindings:
            try:
                bound.append(self._flower.bind_node(binding.node_id, binding.device_id))
            except InvalidInputError as error:
                first = first or f"the first one is node {binding.node_id}: {error}"
                skipped += 1
        if skipped:
            _log.warning("%s of %s nodes are not bound; %s", f"{skipped:,}", f"{len(request.bindings):,}", first)
        await self._repository.save(*bound)
        return planning_pb2.BindNodesResponse()

    async def PlanRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanRoundRequest, context: Any
    ) -> planning_pb2.PlanRoundResponse:
        """Plan a round; a retried request returns the plan that was made."""
        self._flower.require_owner(request.run_id, request.run_token)
        _require_round(request.round)
        return await _message(
            await self._planning.plan(request.run_id, request.round, request.node_ids, request.epochs)
        )

    async def GetPlan(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.GetPlanRequest, context: Any
    ) -> planning_pb2.GetPlanResponse:
        """Look up a plan, which may have been trimmed since it was made."""
        return planning_pb2.GetPlanResponse(plan=await _message(await self._planning.get(request.plan_id)))

    async def FinishRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRoundRequest, context: Any
    ) -> planning_pb2.FinishRoundResponse:
        """Finish a round: the Flower server has all replies that it will get."""
        results = [_result(message) for message in request.results]
        self._flower.require_owner(run_of(request.plan_id), request.run_token)
        await self._repository.load_round(request.plan_id)
        if implausible := [
            result.device_id for result, sent in zip(results, request.results, strict=True) if _lacks(result, sent)
        ]:
            _log.warning(
                "round %s: an implausible loss or number of examples counts as not reported: %s",
                request.plan_id,
                first_few(implausible),
            )
        finished = self._rounds.finish(request.plan_id, results, request.wall_s)
        self._orders.send_due()  # trainings that have not begun are called off
        await self._repository.save(finished)
        return planning_pb2.FinishRoundResponse()

    async def ReportMetrics(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportMetricsRequest, context: Any
    ) -> planning_pb2.ReportMetricsResponse:
        """Take what the strategy evaluated after a round."""
        self._flower.require_owner(request.run_id, request.run_token)
        _require_round(request.round)
        await self._repository.load_round(plan_id_of(request.run_id, request.round))
        changed = self._flower.report_metrics(request.run_id, request.round, dict(request.metrics))
        await self._repository.save(changed)
        return planning_pb2.ReportMetricsResponse()

    async def FinishRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRunRequest, context: Any
    ) -> planning_pb2.FinishRunResponse:
        """Finish a Flower run."""
        self._flower.require_owner(request.run_id, request.run_token)
        finished = self._flower.finish_run(request.run_id, request.error)
        self._orders.send_due()
        await self._repository.save(finished)
        return planning_pb2.FinishRunResponse()


def _require_round(number: int) -> None:
    """Make sure that a run may have so many rounds.

    Raises:
        InvalidInputError: it may not.
    """
    if number > MAX_ROUNDS:
        raise InvalidInputError(f"a run has at most {MAX_ROUNDS:,} rounds, not {number:,}: start another run")


async def _message(record: RoundRecord) -> planning_pb2.PlanRoundResponse:
    """A round's plan as a message, built in a thread since it may be large."""
    return await asyncio.to_thread(plan_to_message, record.plan_id, record.plan, record.nodes)


def _result(message: planning_pb2.DeviceResult) -> DeviceResult:
    require_name("a device's id", message.device_id)
    return DeviceResult(
        device_id=message.device_id,
        failure=message.failure[:_LONGEST_FAILURE],
        num_examples=plausible_examples(message.num_examples) if message.HasField("num_examples") else None,
        loss=plausible_loss(message.loss) if message.HasField("loss") else None,
        share=message.share,
    )


def _lacks(result: DeviceResult, message: planning_pb2.DeviceResult) -> bool:
    """Whether a value of the message was not plausible."""
    return (result.num_examples is None and message.HasField("num_examples")) or (
        result.loss is None and message.HasField("loss")
    )
