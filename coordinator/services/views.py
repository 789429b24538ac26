"""The view service: what commands, dashboards and reports read."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from coordinator.repository.repository import FleetRepository
from coordinator.state.names import MAX_METRICS
from coordinator.state.records import DeviceRecord, DeviceResult, RoundRecord, RunRecord, UnplannedRound
from coordinator.store.times import OF_DEVICES, OF_RUNS, Times, of_rounds
from wattfleet.choosing import Front
from wattfleet.errors import InvalidInputError
from wattfleet.planning import RoundPlan
from wattfleet_proto.convert import front_to_message, plan_to_message, provenance_to_message, state_to_message
from wattfleet_proto.v1 import planning_pb2, view_pb2, view_pb2_grpc

_DEVICES_IN_A_MESSAGE = 100
_RUNS_IN_A_MESSAGE = 100


class ViewServicer(view_pb2_grpc.ViewServiceServicer):
    """Translates the fleet into messages for display."""

    def __init__(self, repository: FleetRepository) -> None:
        """Show one fleet."""
        self._repository = repository
        self._fleet = repository.fleet

    async def GetFleet(  # noqa: N802 - named by the protocol
        self, request: view_pb2.GetFleetRequest, context: Any
    ) -> view_pb2.GetFleetResponse:
        """Report the properties of the whole fleet."""
        return view_pb2.GetFleetResponse(
            site_budget_w=self._fleet.operator.site_budget_w, policy=self._fleet.flower.policy.name
        )

    async def ListDevices(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListDevicesRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListDevicesResponse]:
        """List devices by id."""
        agents = self._fleet.agents
        for device_id in request.device_ids:
            agents.get(device_id)
        ids = sorted(set(request.device_ids) or agents.devices)
        times = await self._repository.times(OF_DEVICES) if request.with_times else {}
        for begin in range(0, len(ids), _DEVICES_IN_A_MESSAGE):
            yield view_pb2.ListDevicesResponse(
                devices=[
                    self._device_view(agents.devices[each], request.with_fronts, times.get(each, Times()))
                    for each in ids[begin : begin + _DEVICES_IN_A_MESSAGE]
                    if each in agents.devices  # not forgotten meanwhile
                ]
            )

    async def ListRuns(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListRunsRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListRunsResponse]:
        """List all runs, oldest first."""
        times = await self._repository.times(OF_RUNS) if request.with_times else {}
        runs = list(self._fleet.flower.runs.values())
        for begin in range(0, len(runs), _RUNS_IN_A_MESSAGE):
            some = runs[begin : begin + _RUNS_IN_A_MESSAGE]
            yield view_pb2.ListRunsResponse(runs=[_run_view(run, times.get(run.run_id, Times())) for run in some])

    async def StreamRounds(  # noqa: N802 - named by the protocol
        self, request: view_pb2.StreamRoundsRequest, context: Any
    ) -> AsyncIterator[view_pb2.RoundView]:
        """Stream the rounds of one run, oldest first, those without a plan among them."""
        run_id = self._fleet.flower.run(request.run_id).run_id
        times = await self._repository.times(of_rounds(run_id)) if request.with_times else {}
        unplanned = deque(self._fleet.unplanned.of_run(run_id))
        async for record in self._repository.rounds_of(run_id):
            while unplanned and unplanned[0] < record.number:
                async for view in self._unplanned_view(unplanned.popleft(), request):
                    yield view
            if record.wall_s is None and self._fleet.unplanned.is_known(run_id, record.number):
                continue  # its plan never reached the Flower server
            yield _round_view(record, times.get(record.plan_id, Times()), not request.without_devices)
        for number in unplanned:
            async for view in self._unplanned_view(number, request):
                yield view

    async def _unplanned_view(
        self, number: int, request: view_pb2.StreamRoundsRequest
    ) -> AsyncIterator[view_pb2.RoundView]:
        """One round without a plan; nothing if it was deleted meanwhile."""
        record = await self._repository.unplanned_of(request.run_id, number)
        if record is not None:
            yield _unplanned_view(record, request.with_times, not request.without_devices)

    def _device_view(self, record: DeviceRecord, with_front: bool, times: Times) -> view_pb2.DeviceView:
        operator, front = self._fleet.operator, record.front
        rules, overrides = operator.rules_of(record.device_id), operator.overrides_of(record.device_id)
        grant = self._fleet.rounds.grants.of(record.device_id)
        if grant is not None and grant.is_over:
            grant = None
        observed = self._fleet.rounds.latest_results.observations.get(record.device_id)
        return view_pb2.DeviceView(
            device_id=record.device_id,
            board=record.board,
            provenance=provenance_to_message(record.provenance),
            state=state_to_message(record.state),
            profiled_modes=record.profiled_modes,
            mode_count=record.mode_count,
            detail=record.detail,
            idle_w=record.idle_w,
            front=front_to_message(front) if front is not None and with_front else None,
            reference_digest=record.reference_digest,
            fastest_epoch_s=None if front is None else _fastest_epoch_s(front, record.idle_w or 0.0, rules.limit_w),
            supply=self._supply(record.device_id),
            limit_w=rules.limit_w,
            site_tags=sorted(rules.tags),
            operator_tags=overrides.listed_tags,
            drained=overrides.drained,
            first_seen_unix_s=times.first_unix_s,
            last_seen_unix_s=times.last_unix_s,
            granted_w=None if grant is None else grant.granted_w,
            confirmed_w=None if grant is None else grant.confirmed_w,
            observed_w=None if observed is None else observed.power_w,
            granted_plan_id="" if grant is None else grant.plan_id,
            left_out=self._fleet.agents.claims.exclusion_reason(record) or "",
            trust=self._fleet.agents.claims.trust_of(record.device_id),
        )

    def _supply(self, device_id: str) -> str:
        """The supply that a device is behind; empty if the site file does not tell."""
        try:
            return self._fleet.operator.supply_of(device_id)
        except InvalidInputError:
            return ""


def _fastest_epoch_s(front: Front, idle_w: float, limit_w: float | None) -> float | None:
    """Seconds of a one-epoch training in the fastest mode within the device's own limit; None if no mode is."""
    allowed = np.maximum(front.planned_w, idle_w) <= (np.inf if limit_w is None else limit_w)
    return float(front.one_epoch_s[allowed].min()) if allowed.any() else None


def _run_view(run: RunRecord, times: Times) -> view_pb2.RunView:
    return view_pb2.RunView(
        run_id=run.run_id,
        strategy=run.strategy,
        rounds=run.rounds,
        initial_metrics=_shown(run.initial_metrics),
        finished=run.finished,
        error=run.error,
        started_unix_s=times.first_unix_s,
        finished_unix_s=times.last_unix_s,
    )


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    """The first metrics: older versions stored any number of them."""
    return dict(islice(metrics.items(), MAX_METRICS))


def _without_devices(plan: RoundPlan) -> RoundPlan:
    first = None if plan.first_planned is None else _without_devices(plan.first_planned)
    return replace(plan, assignments=(), decisions=(), first_planned=first)


def _round_view(record: RoundRecord, times: Times, with_devices: bool) -> view_pb2.RoundView:
    plan = record.plan if with_devices else _without_devices(record.plan)
    return view_pb2.RoundView(
        run_id=record.run_id,
        round=record.number,
        plan_id=record.plan_id,
        epochs=record.epochs,
        plan=plan_to_message(record.plan_id, plan, record.nodes),
        observations=[
            view_pb2.DeviceObservation(device_id=seen.device_id, epoch_s=seen.epoch_s, power_w=seen.power_w)
            for seen in record.observations.values()
            if with_devices
        ],
        failed_device_ids=record.failed,
        metrics=_shown(record.metrics),
        wall_s=record.wall_s,
        observed_site_w=record.observed_site_w,
        observed_duration_s=record.observed_duration_s,
        results=[_result(result) for result in record.results if with_devices],
        device_count=len(record.plan.original.assignments),
        idle_w=record.idle_w,
        planned_unix_s=times.first_unix_s,
        finished_unix_s=times.last_unix_s,
        other_mode_count=len(record.plan.in_other_mode),
        stopped_count=len(record.plan.stopped),
    )


def _unplanned_view(record: UnplannedRound, with_times: bool, with_devices: bool) -> view_pb2.RoundView:
    return view_pb2.RoundView(
        run_id=record.run_id,
        round=record.number,
        unplanned=True,
        failed_device_ids=record.failed,
        metrics=_shown(record.metrics),
        wall_s=record.wall_s,
        results=[_result(result) for result in record.results if with_devices],
        device_count=len(record.results),
        planned_unix_s=record.began_at.timestamp() if with_times else None,
        finished_unix_s=record.ended_at.timestamp() if with_times else None,
    )


def _result(result: DeviceResult) -> planning_pb2.DeviceResult:
    return planning_pb2.DeviceResult(
        device_id=result.device_id,
        failure=result.failure,
        num_examples=result.num_examples,
        loss=result.loss,
        share=result.share,
    )
