"""The planning service: what a Flower server asks and reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from coordinator.errors import UnknownRecordError
from coordinator.repository.repository import FleetRepository
from coordinator.services.round_planning import RoundPlanning
from coordinator.state.names import require_name
from coordinator.state.records import DeviceResult, RoundRecord, plan_id_of
from coordinator.state.rounds.unplanned import reported
from coordinator.store.store import utc_now
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import plan_to_message
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_log = logging.getLogger(__name__)

_LONGEST_FAILURE = 500


class PlanningServicer(planning_pb2_grpc.PlanningServiceServicer):
    """Translates between a Flower server's messages and the fleet."""

    def __init__(
        self, repository: FleetRepository, planning: RoundPlanning, now: Callable[[], datetime] = utc_now
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            planning: plans its rounds.
            now: the date and time, with an offset.
        """
        self._repository = repository
        self._flower = repository.fleet.flower
        self._operator = repository.fleet.operator
        self._rounds = repository.fleet.rounds
        self._unplanned = repository.fleet.unplanned
        self._planning = planning
        self._now = now

    async def StartRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.StartRunRequest, context: Any
    ) -> planning_pb2.StartRunResponse:
        """Start a Flower run."""
        require_name("a run's id", request.run_id)
        require_name("a strategy's name", request.strategy)
        await self._repository.save(self._flower.start_run(request.run_id, request.strategy, request.rounds))
        return planning_pb2.StartRunResponse()

    async def ResolveNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ResolveNodesRequest, context: Any
    ) -> planning_pb2.ResolveNodesResponse:
        """Look up which nodes are bound to a device, and which of these must not train."""
        nodes = self._flower.nodes
        known = {node: nodes[node] for node in request.node_ids if node in nodes}
        return planning_pb2.ResolveNodesResponse(
            bindings=[planning_pb2.NodeBinding(node_id=n, device_id=d) for n, d in known.items()],
            unknown_node_ids=[node for node in request.node_ids if node not in known],
            exclusions=self._exclusions(known),
        )

    async def BindNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.BindNodesRequest, context: Any
    ) -> planning_pb2.BindNodesResponse:
        """Bind nodes to devices; an invalid binding is skipped, so that it does not block the others."""
        bound = []
        for binding in request.bindings:
            try:
                bound.append(self._flower.bind_node(binding.node_id, binding.device_id))
            except InvalidInputError as error:
                _log.warning("node %d is not bound: %s", binding.node_id, error)
        await self._repository.save(*bound)
        devices = {record.node_id: record.device_id for record in bound}
        return planning_pb2.BindNodesResponse(exclusions=self._exclusions(devices))

    async def PlanRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanRoundRequest, context: Any
    ) -> planning_pb2.PlanRoundResponse:
        """Plan a round; a retried request returns the plan that was made."""
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
        await self._repository.load_round(request.plan_id)
        results = [_result(message) for message in request.results]
        await self._repository.save(self._rounds.finish(request.plan_id, results, request.wall_s))
        return planning_pb2.FinishRoundResponse()

    async def ReportUnplannedRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportUnplannedRoundRequest, context: Any
    ) -> planning_pb2.ReportUnplannedRoundResponse:
        """Take a round that trained without a plan; one that is stored stays as it is."""
        run = self._flower.run(request.run_id)
        if not self._unplanned.is_known(run.run_id, request.round):
            record = reported(
                run.run_id,
                request.round,
                self._now(),
                request.began_ago_s,
                request.wall_s,
                [self._result_of_node(message) for message in request.results],
                dict(request.metrics),
            )
            await self._repository.save(record)
            self._unplanned.stored(record)
            _log.warning("run %s trained round %d without a plan: no budget was kept", run.run_id, request.round)
        return planning_pb2.ReportUnplannedRoundResponse()

    async def ReportMetrics(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportMetricsRequest, context: Any
    ) -> planning_pb2.ReportMetricsResponse:
        """Take what the strategy evaluated after a round."""
        if self._unplanned.is_known(request.run_id, request.round):
            await self._add_metrics(request.run_id, request.round, dict(request.metrics))
            return planning_pb2.ReportMetricsResponse()
        await self._repository.load_round(plan_id_of(request.run_id, request.round))
        changed = self._flower.report_metrics(request.run_id, request.round, dict(request.metrics))
        await self._repository.save(changed)
        return planning_pb2.ReportMetricsResponse()

    async def FinishRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRunRequest, context: Any
    ) -> planning_pb2.FinishRunResponse:
        """Finish a Flower run."""
        await self._repository.save(self._flower.finish_run(request.run_id, request.error))
        return planning_pb2.FinishRunResponse()

    def _exclusions(self, devices: Mapping[int, str]) -> list[planning_pb2.NodeExclusion]:
        """The nodes whose devices must not train by the operator's rules.

        Args:
            devices: Flower node id -> device id.
        """
        reasons = self._operator.exclusion_reasons(set(devices.values()))
        return [
            planning_pb2.NodeExclusion(node_id=node_id, reason=reasons[device_id])
            for node_id, device_id in devices.items()
            if device_id in reasons
        ]

    def _result_of_node(self, message: planning_pb2.NodeResult) -> DeviceResult:
        """A node's result, named by the device that the node is bound to."""
        name = self._flower.nodes.get(message.node_id) or message.result.device_id or f"node {message.node_id}"
        require_name("a device's id", name)
        return replace(_result(message.result), device_id=name)

    async def _add_metrics(self, run_id: str, number: int, metrics: dict[str, float]) -> None:
        """Add metrics to a round without a plan.

        Raises:
            UnknownRecordError: it was deleted meanwhile.
            InvalidInputError: the name of a metric is not printable.
        """
        for name in metrics:
            require_name("a metric's name", name)
        record = await self._repository.unplanned_of(run_id, number)
        if record is None:
            raise UnknownRecordError(f"unknown round {number} of run {run_id!r}")
        await self._repository.save(replace(record, metrics={**record.metrics, **metrics}))


async def _message(record: RoundRecord) -> planning_pb2.PlanRoundResponse:
    """A round's plan as a message, built in a thread since it may be large."""
    return await asyncio.to_thread(plan_to_message, record.plan_id, record.plan, record.nodes)


def _result(message: planning_pb2.DeviceResult) -> DeviceResult:
    return DeviceResult(
        device_id=message.device_id,
        failure=message.failure[:_LONGEST_FAILURE],
        num_examples=message.num_examples if message.HasField("num_examples") else None,
        loss=message.loss if message.HasField("loss") else None,
        share=message.share,
    )
