"""The planning service: the requests and reports of Flower servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from coordinator.errors import UnknownRecordError
from coordinator.identity.callers import peer_of
from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import EventLog
from coordinator.services.orders import Orders
from coordinator.services.round_planning import RoundPlanning
from coordinator.settings import RoundSettings
from coordinator.state.names import default_run_name, require_metrics, require_name
from coordinator.state.records import DeviceResult, RoundRecord, plan_id_of, run_of
from coordinator.state.rounds.unplanned import reported
from wattfleet.errors import InvalidInputError, first_few
from wattfleet.planning import plausible_examples, plausible_loss
from wattfleet_io.clock import utc_now
from wattfleet_proto.convert import (
    assignment_to_message,
    epochs_of_request,
    plan_to_message,
    workload_from_message,
)
from wattfleet_proto.message_sizes import MAX_ROUNDS
from wattfleet_proto.run_names import require_labels, require_run_name
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

_log = logging.getLogger(__name__)

_LONGEST_FAILURE = 500


class PlanningServicer(planning_pb2_grpc.PlanningServiceServicer):
    """Translates between a Flower server's messages and the fleet."""

    def __init__(
        self,
        repository: FleetRepository,
        planning: RoundPlanning,
        orders: Orders,
        now: Callable[[], datetime] = utc_now,
        settings: RoundSettings = RoundSettings(),
        events: EventLog | None = None,
    ) -> None:
        """Serve one fleet.

        Args:
            repository: the fleet and its store.
            planning: plans its rounds.
            orders: sends devices their grants.
            now: returns the date and time, with a UTC offset.
            settings: how many runs may exist.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._flower = repository.fleet.flower
        self._operator = repository.fleet.operator
        self._rounds = repository.fleet.rounds
        self._unplanned = repository.fleet.unplanned
        self._planning = planning
        self._orders = orders
        self._now = now
        self._max_live_runs = settings.max_live_runs

    async def StartRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.StartRunRequest, context: Any
    ) -> planning_pb2.StartRunResponse:
        """Start a Flower run."""
        require_name("a run's id", request.run_id)
        require_name("a strategy's name", request.strategy)
        _require_round(request.rounds)
        if request.name:
            require_run_name(request.name)
        require_labels(request.labels)
        workload = workload_from_message(request.workload) if request.HasField("workload") else None
        self._flower.require_room(request.run_id, self._max_live_runs)
        known = self._flower.runs.get(request.run_id)
        started = self._flower.start_run(
            request.run_id,
            request.strategy,
            request.rounds,
            request.run_token,
            workload,
            peer_of(context),
            request.name or default_run_name(request.app, self._now()),
            request.labels,
        )
        await self._repository.save(started)
        self._planning.run_started(request.run_id)
        self._events.run_started(started, is_new=known is None or known.finished)
        self._orders.announce_workloads()
        return planning_pb2.StartRunResponse(name=started.name)

    async def ResolveNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ResolveNodesRequest, context: Any
    ) -> planning_pb2.ResolveNodesResponse:
        """Look up which nodes are bound to a device, and which of these must not train."""
        nodes = self._flower.nodes
        known = {node: nodes[node] for node in request.node_ids if node in nodes}
        problems = self._flower.pairings.problems
        self._flower.pairings.connected(known, self._now())
        return planning_pb2.ResolveNodesResponse(
            bindings=[
                planning_pb2.NodeBinding(node_id=n, device_id=d, pairing_problem=problems.get(n))
                for n, d in known.items()
            ],
            unknown_node_ids=[node for node in request.node_ids if node not in known],
            exclusions=self._exclusions(known),
        )

    async def BindNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.BindNodesRequest, context: Any
    ) -> planning_pb2.BindNodesResponse:
        """Bind nodes to devices; an invalid binding is skipped, so that it does not block the others."""
        bound = []
        skipped, first = 0, ""
        for binding in request.bindings:
            try:
                problem = binding.pairing_problem if binding.HasField("pairing_problem") else None
                bound.append(self._flower.bind_node(binding.node_id, binding.device_id, problem))
            except InvalidInputError as error:
                first = first or f"the first one is node {binding.node_id}: {error}"
                skipped += 1
        if skipped:
            _log.warning("%s of %s nodes are not bound; %s", f"{skipped:,}", f"{len(request.bindings):,}", first)
        await self._repository.save(*bound)
        devices = {record.node_id: record.device_id for record in bound}
        self._flower.pairings.connected(devices, self._now())
        return planning_pb2.BindNodesResponse(exclusions=self._exclusions(devices))

    async def PlanRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanRoundRequest, context: Any
    ) -> planning_pb2.PlanRoundResponse:
        """Plan a round; a retried request returns the plan that was made."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        _require_round(request.round)
        return await _message(
            await self._planning.plan(request.run_id, request.round, request.node_ids, epochs_of_request(request))
        )

    async def PlanMeasuring(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanMeasuringRequest, context: Any
    ) -> planning_pb2.PlanMeasuringResponse:
        """Let devices measure with the watts that are left, before a round or beside one."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        plan_id, plan, nodes = await self._planning.measure(
            request.run_id,
            request.node_ids,
            request.epochs,
            request.survey_s if request.HasField("survey_s") else None,
        )
        return planning_pb2.PlanMeasuringResponse(
            plan_id=plan_id,
            assignments=[assignment_to_message(each, nodes[each.device_id]) for each in plan.assignments],
            waiting=plan.waiting,
            not_ready=plan.not_ready,
        )

    async def PredictNodes(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PredictNodesRequest, context: Any
    ) -> planning_pb2.PredictNodesResponse:
        """Predict the next round on each node."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        self._flower.require_live(request.run_id)
        predictions = await self._planning.predict(request.run_id, request.node_ids, request.epochs)
        return planning_pb2.PredictNodesResponse(
            predictions=[
                planning_pb2.NodePrediction(
                    node_id=each.node_id,
                    device_id=each.device_id,
                    assignment=(
                        None if each.assignment is None else assignment_to_message(each.assignment, each.node_id)
                    ),
                    reason=each.reason,
                )
                for each in predictions
            ]
        )

    async def GetPlan(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.GetPlanRequest, context: Any
    ) -> planning_pb2.GetPlanResponse:
        """Look up a plan, which may have been trimmed since it was made."""
        return planning_pb2.GetPlanResponse(plan=await _message(await self._planning.get(request.plan_id)))

    async def FinishRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRoundRequest, context: Any
    ) -> planning_pb2.FinishRoundResponse:
        """Finish a round: the Flower server waits for no more replies to it."""
        results = [_result(message, message.device_id) for message in request.results]
        self._flower.require_owner(run_of(request.plan_id), request.run_token, peer_of(context))
        await self._repository.load_round(request.plan_id)
        _log_implausible(request.plan_id, results, request.results)
        is_first = self._rounds.get(request.plan_id).wall_s is None
        finished = self._rounds.finish(request.plan_id, results, request.wall_s)
        self._flower.end_measuring(run_of(request.plan_id))
        if is_first:
            self._events.finished(finished)
        self._orders.send_due()  # trainings that have not begun are cancelled
        await self._repository.save(finished)
        return planning_pb2.FinishRoundResponse()

    async def ReportUnplannedRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportUnplannedRoundRequest, context: Any
    ) -> planning_pb2.ReportUnplannedRoundResponse:
        """Store a round that trained without a plan; a round that is already stored does not change."""
        run_id, number = request.run_id, request.round
        self._flower.require_owner(run_id, request.run_token, peer_of(context))
        _require_round(number)
        if not self._unplanned.is_known(run_id, number):
            results = [_result(message.result, self._name(message)) for message in request.results]
            metrics = dict(request.metrics)
            record = reported(run_id, number, self._now(), request.began_ago_s, request.wall_s, results, metrics)
            _log_implausible(plan_id_of(run_id, number), results, [message.result for message in request.results])
            await self._repository.save(record)
            self._unplanned.stored(record)
            self._events.unplanned(run_id, number)
        return planning_pb2.ReportUnplannedRoundResponse()

    async def ReportMetrics(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportMetricsRequest, context: Any
    ) -> planning_pb2.ReportMetricsResponse:
        """Add the metrics that the strategy evaluated after a round."""
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        _require_round(request.round)
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
        self._flower.require_owner(request.run_id, request.run_token, peer_of(context))
        await self._planning.finish_runs([request.run_id], request.error)
        return planning_pb2.FinishRunResponse()

    def _exclusions(self, devices: Mapping[int, str]) -> list[planning_pb2.NodeExclusion]:
        """The nodes whose devices must not train because of the operator's rules.

        Args:
            devices: Flower node id -> device id.
        """
        reasons = self._operator.exclusion_reasons(set(devices.values()))
        return [
            planning_pb2.NodeExclusion(node_id=node_id, reason=reasons[device_id])
            for node_id, device_id in devices.items()
            if device_id in reasons
        ]

    def _name(self, message: planning_pb2.NodeResult) -> str:
        """A node's display name: its device, or else its number."""
        return self._flower.nodes.get(message.node_id) or message.result.device_id or f"node {message.node_id}"

    async def _add_metrics(self, run_id: str, number: int, metrics: dict[str, float]) -> None:
        """Add metrics to a round without a plan.

        Raises:
            UnknownRecordError: the round was deleted meanwhile.
            InvalidInputError: there are too many metrics, or the name of one is not printable.
        """
        record = await self._repository.unplanned_of(run_id, number)
        if record is None:
            raise UnknownRecordError(f"unknown round {number} of run {run_id!r}")
        require_metrics(run_id, number, metrics, record.metrics)
        await self._repository.save(replace(record, metrics={**record.metrics, **metrics}))


def _require_round(number: int) -> None:
    """Check the number of a run's rounds.

    Raises:
        InvalidInputError: the number is too large.
    """
    if number > MAX_ROUNDS:
        raise InvalidInputError(f"a run has at most {MAX_ROUNDS:,} rounds, not {number:,}: start another run")


async def _message(record: RoundRecord) -> planning_pb2.PlanRoundResponse:
    """Convert a round's plan to a message, in a thread because it may be large."""
    return await asyncio.to_thread(plan_to_message, record.plan_id, record.plan, record.nodes)


def _result(message: planning_pb2.DeviceResult, device_id: str) -> DeviceResult:
    require_name("a device's id", device_id)
    return DeviceResult(
        device_id=device_id,
        failure=message.failure[:_LONGEST_FAILURE],
        num_examples=plausible_examples(message.num_examples) if message.HasField("num_examples") else None,
        loss=plausible_loss(message.loss) if message.HasField("loss") else None,
        share=message.share,
        late=message.late and not message.failure,
    )


def _log_implausible(
    round_name: str, results: Sequence[DeviceResult], messages: Sequence[planning_pb2.DeviceResult]
) -> None:
    """Log which devices' results contain an implausible value, which is left out."""
    devices = [
        result.device_id for result, sent in zip(results, messages, strict=True) if _has_implausible_value(result, sent)
    ]
    if devices:
        _log.warning(
            "round %s: an implausible loss or number of examples counts as not reported: %s",
            round_name,
            first_few(devices),
        )


def _has_implausible_value(result: DeviceResult, message: planning_pb2.DeviceResult) -> bool:
    """Whether a value of the message was implausible."""
    return (result.num_examples is None and message.HasField("num_examples")) or (
        result.loss is None and message.HasField("loss")
    )
