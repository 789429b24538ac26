"""Thin servicers: each method translates, the fleet decides, the writer keeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from coordinator.errors import UnknownRecordError
from coordinator.fleet import Fleet, run_of
from coordinator.orders import Orders
from coordinator.records import DeviceRecord, DeviceResult, DeviceState, ObservedTraining, RoundRecord
from coordinator.references import Reference
from coordinator.store.writer import Writer
from wattfleet.errors import InvalidInputError
from wattfleet_proto.convert import (
    evidence_from_message,
    evidence_to_message,
    front_from_message,
    front_to_message,
    plan_to_message,
)
from wattfleet_proto.v1 import (
    planning_pb2,
    planning_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    view_pb2,
    view_pb2_grpc,
)

_log = logging.getLogger(__name__)

LEASE_S = 5.0
"""An agent says something at least this often."""

_LEASES_MISSED = 3
_CHUNK_BYTES = 64 * 1024
_STATE_MESSAGE = {state: session_pb2.DeviceState.Value(f"DEVICE_STATE_{state.name}") for state in DeviceState}
_STATE = {message: state for state, message in _STATE_MESSAGE.items() if state is not DeviceState.OFFLINE}


class SessionServicer(session_pb2_grpc.SessionServiceServicer):
    """The agents' side."""

    def __init__(self, fleet: Fleet, writer: Writer, orders: Orders, reference: Reference, profile_modes: int) -> None:
        """Serve one fleet.

        Args:
            fleet: what is known.
            writer: keeps what changed.
            orders: what devices are to be told.
            reference: the predictor that agents transfer from.
            profile_modes: modes that each agent measures at most.
        """
        self._fleet = fleet
        self._writer = writer
        self._orders = orders
        self._reference = reference
        self._profile_modes = profile_modes

    async def Session(  # noqa: N802 - named by the protocol
        self, request_iterator: AsyncIterator[session_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[session_pb2.SessionResponse]:
        """One agent's session, from its Hello until it goes silent."""
        try:
            hello = (await asyncio.wait_for(anext(request_iterator), LEASE_S)).hello
        except (StopAsyncIteration, asyncio.TimeoutError):
            return  # it never began
        device_id, evidence = hello.device_id, evidence_from_message(hello.evidence)
        connected = self._fleet.connect(device_id, hello.board, evidence, hello.mode_count)
        try:
            await self._writer.saved(connected)
            _log.info("%s connected", device_id)
            yield session_pb2.SessionResponse(
                welcome=session_pb2.Welcome(
                    reference_digest=self._reference.digest,
                    profile_modes=self._profile_modes,
                    lease_s=LEASE_S,
                )
            )
            with self._orders.session(device_id) as orders:
                async with aclosing(self._responses(device_id, request_iterator, orders)) as responses:
                    async for response in responses:
                        yield response
        finally:
            # Nobody waits for it, and a device that is known to be connected no more is so after a restart anyway.
            self._writer.save_soon(self._fleet.disconnect(device_id))
            _log.info("%s disconnected", device_id)

    async def _responses(
        self,
        device_id: str,
        requests: AsyncIterator[session_pb2.SessionRequest],
        orders: asyncio.Queue[session_pb2.Reassign],
    ) -> AsyncGenerator[session_pb2.SessionResponse, None]:
        """Acknowledgements of what comes up, and orders as they come, until the device goes silent."""
        request = asyncio.ensure_future(anext(requests))
        order = asyncio.ensure_future(orders.get())
        loop = asyncio.get_running_loop()
        lapses_s = loop.time() + LEASE_S * _LEASES_MISSED
        try:
            while await _any_done((request, order), lapses_s - loop.time()):
                if order.done():
                    yield session_pb2.SessionResponse(reassign=order.result())
                    order = asyncio.ensure_future(orders.get())
                if request.done():
                    try:
                        taken = request.result()
                    except StopAsyncIteration:
                        return
                    await self._take(device_id, taken)
                    yield session_pb2.SessionResponse(ack=session_pb2.Ack(sequence=taken.sequence))
                    request = asyncio.ensure_future(anext(requests))
                    lapses_s = loop.time() + LEASE_S * _LEASES_MISSED
        finally:
            request.cancel()
            order.cancel()

    async def _take(self, device_id: str, request: session_pb2.SessionRequest) -> None:
        """Take one report."""
        body = request.WhichOneof("body")
        if body == "state":
            if request.state.state not in _STATE:
                raise InvalidInputError(f"{device_id}: no state that a device can report")
            state = _STATE[request.state.state]
            await self._writer.saved(
                self._fleet.report_state(device_id, state, request.state.profiled_modes, request.state.detail)
            )
        elif body == "front":
            report = request.front
            front = front_from_message(report.front)
            await self._writer.saved(
                self._fleet.report_front(
                    device_id, front, report.idle_w, report.profiled_modes, report.reference_digest
                )
            )
        elif body == "observation":
            seen = request.observation
            observed = ObservedTraining(device_id, seen.epoch_s, seen.power_w)
            try:
                await _recall(self._fleet, self._writer, run_of(seen.plan_id))
                await self._writer.saved(self._fleet.observe(seen.plan_id, observed))
            except UnknownRecordError as error:
                # Of a store that was replaced, say. Refusing it would have the agent repeat it for ever.
                _log.warning("%s: an observation is let go: %s", device_id, error)
        elif body != "lease":
            raise InvalidInputError(f"{device_id}: a session goes on with reports and leases, not with {body}")

    async def FetchReference(  # noqa: N802 - named by the protocol
        self, request: session_pb2.FetchReferenceRequest, context: Any
    ) -> AsyncIterator[session_pb2.FetchReferenceResponse]:
        """The reference predictor, manifest first."""
        artefact = self._reference.of_digest(request.digest)
        yield session_pb2.FetchReferenceResponse(manifest=artefact.manifest)
        for offset in range(0, len(artefact.weights), _CHUNK_BYTES):
            yield session_pb2.FetchReferenceResponse(weights_chunk=artefact.weights[offset : offset + _CHUNK_BYTES])


class PlanningServicer(planning_pb2_grpc.PlanningServiceServicer):
    """The Flower server's side."""

    def __init__(self, fleet: Fleet, writer: Writer) -> None:
        """Serve one fleet."""
        self._fleet = fleet
        self._writer = writer

    async def StartRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.StartRunRequest, context: Any
    ) -> planning_pb2.StartRunResponse:
        """A Flower run begins."""
        await _recall(self._fleet, self._writer, request.run_id)
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
        """Tie nodes to devices."""
        bound = [self._fleet.bind_node(binding.node_id, binding.device_id) for binding in request.bindings]
        await self._writer.saved(*bound)
        return planning_pb2.BindNodesResponse()

    async def PlanRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.PlanRoundRequest, context: Any
    ) -> planning_pb2.PlanRoundResponse:
        """Plan a round."""
        await _recall(self._fleet, self._writer, request.run_id)
        record = self._fleet.plan(request.run_id, request.round, list(request.node_ids), request.epochs)
        await self._writer.saved(record)
        return plan_to_message(record.plan_id, record.plan, record.nodes)

    async def FinishRound(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRoundRequest, context: Any
    ) -> planning_pb2.FinishRoundResponse:
        """A round has all the replies it will get."""
        await _recall(self._fleet, self._writer, run_of(request.plan_id))
        results = [_result(message) for message in request.results]
        await self._writer.saved(self._fleet.finish_round(request.plan_id, results, request.wall_s))
        return planning_pb2.FinishRoundResponse()

    async def ReportMetrics(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.ReportMetricsRequest, context: Any
    ) -> planning_pb2.ReportMetricsResponse:
        """What the strategy evaluated."""
        await _recall(self._fleet, self._writer, request.run_id)
        await self._writer.saved(self._fleet.report_metrics(request.run_id, request.round, dict(request.metrics)))
        return planning_pb2.ReportMetricsResponse()

    async def FinishRun(  # noqa: N802 - named by the protocol
        self, request: planning_pb2.FinishRunRequest, context: Any
    ) -> planning_pb2.FinishRunResponse:
        """A Flower run is over."""
        await self._writer.saved(self._fleet.finish_run(request.run_id, request.error))
        return planning_pb2.FinishRunResponse()


class ViewServicer(view_pb2_grpc.ViewServiceServicer):
    """What commands, displays and reports read."""

    def __init__(self, fleet: Fleet, writer: Writer) -> None:
        """Show one fleet."""
        self._fleet = fleet
        self._writer = writer

    async def GetFleet(  # noqa: N802 - named by the protocol
        self, request: view_pb2.GetFleetRequest, context: Any
    ) -> view_pb2.GetFleetResponse:
        """All devices."""
        return view_pb2.GetFleetResponse(
            devices=[_device_view(self._fleet.devices[device_id]) for device_id in sorted(self._fleet.devices)],
            site_budget_w=self._fleet.site_budget_w,
            policy=self._fleet.policy.name,
        )

    async def ListRounds(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListRoundsRequest, context: Any
    ) -> view_pb2.ListRoundsResponse:
        """The rounds of one run."""
        run_id = request.run_id or next(reversed(self._fleet.runs), "")
        if not run_id:
            return view_pb2.ListRoundsResponse()
        run = self._fleet.run(run_id)
        await _recall(self._fleet, self._writer, run_id)
        return view_pb2.ListRoundsResponse(
            run_id=run_id,
            rounds=[_round_view(record) for record in self._fleet.rounds_of(run_id)],
            initial_metrics=run.initial_metrics,
            finished=run.finished,
            error=run.error,
        )


async def _recall(fleet: Fleet, writer: Writer, run_id: str) -> None:
    """Have the rounds of a run at hand, which for one that ended before this coordinator started are in the store."""
    if fleet.is_archived(run_id):
        fleet.recall(run_id, await writer.rounds_of(run_id))


def _result(message: planning_pb2.DeviceResult) -> DeviceResult:
    return DeviceResult(
        device_id=message.device_id,
        failure=message.failure,
        num_examples=message.num_examples if message.HasField("num_examples") else None,
        loss=message.loss if message.HasField("loss") else None,
        share=message.share,
    )


async def _any_done(tasks: Sequence[asyncio.Future[Any]], within_s: float) -> bool:
    done, _ = await asyncio.wait(tasks, timeout=max(0.0, within_s), return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


def _device_view(record: DeviceRecord) -> view_pb2.DeviceView:
    return view_pb2.DeviceView(
        device_id=record.device_id,
        board=record.board,
        evidence=evidence_to_message(record.evidence),
        state=_STATE_MESSAGE[record.state],
        profiled_modes=record.profiled_modes,
        mode_count=record.mode_count,
        detail=record.detail,
        idle_w=record.idle_w,
        front=None if record.front is None else front_to_message(record.front),
        reference_digest=record.reference_digest,
    )


def _round_view(record: RoundRecord) -> view_pb2.RoundView:
    return view_pb2.RoundView(
        run_id=record.run_id,
        round=record.number,
        plan_id=record.plan_id,
        epochs=record.epochs,
        plan=plan_to_message(record.plan_id, record.plan, record.nodes),
        observations=[
            view_pb2.DeviceObservation(device_id=seen.device_id, epoch_s=seen.epoch_s, power_w=seen.power_w)
            for seen in record.observations.values()
        ],
        failed_device_ids=record.failed,
        metrics=record.metrics,
        wall_s=record.wall_s,
        observed_site_w=record.observed_site_w,
        observed_duration_s=record.observed_duration_s,
    )


def register(
    server: grpc.aio.Server, fleet: Fleet, writer: Writer, orders: Orders, reference: Reference, profile_modes: int
) -> None:
    """Add all servicers to a server."""
    session_pb2_grpc.add_SessionServiceServicer_to_server(
        SessionServicer(fleet, writer, orders, reference, profile_modes), server
    )
    planning_pb2_grpc.add_PlanningServiceServicer_to_server(PlanningServicer(fleet, writer), server)
    view_pb2_grpc.add_ViewServiceServicer_to_server(ViewServicer(fleet, writer), server)
