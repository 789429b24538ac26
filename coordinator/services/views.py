"""The view service, which commands, dashboards and reports read."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from coordinator.display.words import EVENT_KINDS
from coordinator.errors import UnknownRecordError
from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import EventLog, StateTimes
from coordinator.services.request_limits import stated_since
from coordinator.state.names import abbreviate
from coordinator.state.preview import FleetWorkload, known_workloads
from coordinator.state.records import (
    MAX_EVENTS,
    DeviceRecord,
    DeviceResult,
    EventFilter,
    EventRecord,
    RoundRecord,
    RunRecord,
    UnplannedRound,
    plan_id_of,
)
from coordinator.state.workload_fronts import UsualLengths, WorkloadFront
from coordinator.store.tables import OF_DEVICES, OF_NODES, OF_RUNS, Times, of_rounds
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import require_workload_name
from wattfleet.core.planning import PredictionError, RoundPlan
from wattfleet_proto.convert import (
    board_sample_to_message,
    front_to_message,
    kept_duty_to_message,
    plan_to_message,
    presets_to_messages,
    provenance_to_message,
    state_to_message,
    workload_to_message,
)
from wattfleet_proto.v1 import planning_pb2, session_pb2, view_pb2, view_pb2_grpc

_DEVICES_IN_A_MESSAGE = 100
"""A device with the fronts of several workloads counts several times."""

_RUNS_IN_A_MESSAGE = 100
_WORKLOADS_IN_A_MESSAGE = 100
_NODES_IN_A_MESSAGE = 500
_EVENTS_IN_A_MESSAGE = 500


class ViewServicer(view_pb2_grpc.ViewServiceServicer):
    """Translates the fleet into messages for display."""

    def __init__(self, repository: FleetRepository, times: StateTimes, events: EventLog | None = None) -> None:
        """Show one fleet.

        Args:
            repository: the fleet and its store.
            times: records since when devices are in their states.
            events: the log of what happens to the fleet; None for one that stores nothing.
        """
        self._events = events or EventLog(repository.fleet)
        self._repository = repository
        self._fleet = repository.fleet
        self._state_times = times

    async def GetFleet(  # noqa: N802 - named by the protocol
        self, request: view_pb2.GetFleetRequest, context: Any
    ) -> view_pb2.GetFleetResponse:
        """Report the properties of the whole fleet."""
        return view_pb2.GetFleetResponse(
            site_budget_w=self._fleet.operator.site_budget_w,
            policy=self._fleet.flower.policy.name,
            event_count=self._events.count,
        )

    async def ListDevices(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListDevicesRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListDevicesResponse]:
        """List devices by id."""
        agents = self._fleet.agents
        for device_id in request.device_ids:
            agents.get(device_id)
        ids = sorted(set(request.device_ids) or agents.devices)
        if request.workload:
            require_workload_name(request.workload)
        times = await self._repository.times(OF_DEVICES) if request.with_times else {}
        lengths = agents.usual_lengths()
        answer, size = view_pb2.ListDevicesResponse(), 0
        for each in ids:
            if each not in agents.devices:  # forgotten meanwhile
                continue
            view = self._device_view(agents.devices[each], request, lengths, times.get(each, Times()))
            answer.devices.append(view)
            size += max(1, len(view.workloads))
            if size >= _DEVICES_IN_A_MESSAGE:
                yield answer
                answer, size = view_pb2.ListDevicesResponse(), 0
        if answer.devices:
            yield answer

    async def ListNodes(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListNodesRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListNodesResponse]:
        """List Flower's nodes by device and node id."""
        times = await self._repository.times(OF_NODES)
        flower, devices = self._fleet.flower, self._fleet.agents.devices
        problems = flower.pairings.all_problems(flower.nodes)
        found = sorted(flower.nodes.items(), key=lambda node: (node[1], node[0]))
        for begin in range(0, len(found), _NODES_IN_A_MESSAGE):
            views = []
            for node_id, device_id in found[begin : begin + _NODES_IN_A_MESSAGE]:
                device, connected_at = devices.get(device_id), flower.pairings.connected_at.get(node_id)
                views.append(
                    view_pb2.NodeView(
                        node_id=node_id,
                        device_id=device_id,
                        device_state=session_pb2.DEVICE_STATE_UNSPECIFIED
                        if device is None
                        else state_to_message(device.state),
                        pairing_problem=problems.get(node_id),
                        bound_unix_s=times.get(str(node_id), Times()).first_unix_s,
                        connected_unix_s=None if connected_at is None else connected_at.timestamp(),
                    )
                )
            yield view_pb2.ListNodesResponse(nodes=views)

    async def ListRuns(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListRunsRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListRunsResponse]:
        """List all runs, oldest first."""
        times = await self._repository.times(OF_RUNS) if request.with_times else {}
        runs = list(self._fleet.flower.runs.values())
        for begin in range(0, len(runs), _RUNS_IN_A_MESSAGE):
            some = runs[begin : begin + _RUNS_IN_A_MESSAGE]
            yield view_pb2.ListRunsResponse(runs=[_run_view(run, times.get(run.run_id, Times())) for run in some])

    async def ListWorkloads(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListWorkloadsRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListWorkloadsResponse]:
        """List the workloads of runs and of fronts by name."""
        times = await self._repository.times(OF_RUNS)
        known = known_workloads(self._fleet)
        for begin in range(0, len(known), _WORKLOADS_IN_A_MESSAGE):
            some = known[begin : begin + _WORKLOADS_IN_A_MESSAGE]
            yield view_pb2.ListWorkloadsResponse(workloads=[_workload_view(each, times) for each in some])

    async def StreamRounds(  # noqa: N802 - named by the protocol
        self, request: view_pb2.StreamRoundsRequest, context: Any
    ) -> AsyncIterator[view_pb2.RoundView]:
        """Stream one or all rounds of a run, oldest first, including those without a plan."""
        run_id = self._fleet.flower.run(request.run_id).run_id
        times = await self._repository.times(of_rounds(run_id)) if request.with_times else {}
        if request.round:
            yield await self._one_round(request, times)
            return
        unplanned = deque(self._fleet.unplanned.of_run(run_id))
        async for record in self._repository.rounds_of(run_id):
            while unplanned and unplanned[0] < record.number:
                async for view in self._unplanned_view(unplanned.popleft(), request):
                    yield view
            if record.wall_s is None and self._fleet.unplanned.is_known(run_id, record.number):
                continue  # its plan never reached the Flower server
            workload = self._fleet.flower.workload_of(run_id)
            yield _round_view(record, workload, times.get(record.plan_id, Times()), not request.without_devices)
        for number in unplanned:
            async for view in self._unplanned_view(number, request):
                yield view

    async def ListEvents(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListEventsRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListEventsResponse]:
        """List what happened, newest first."""
        found = await self._repository.events(self._event_filter(request))
        for begin in range(0, len(found), _EVENTS_IN_A_MESSAGE):
            yield view_pb2.ListEventsResponse(events=map(_event, found[begin : begin + _EVENTS_IN_A_MESSAGE]))

    def _event_filter(self, request: view_pb2.ListEventsRequest) -> EventFilter:
        """Convert a request.

        Raises:
            InvalidInputError: a kind or the supply does not exist, or the time is not valid.
        """
        for kind in request.kinds:
            if kind not in EVENT_KINDS:
                raise InvalidInputError(f"unknown kind of event {abbreviate(kind)}: use {', '.join(EVENT_KINDS)}")
        supplies = self._fleet.operator.allowance.supplies
        if request.supply and request.supply not in supplies.names:
            raise InvalidInputError(
                f"unknown supply {abbreviate(request.supply)}: use one of {', '.join(supplies.names)}"
            )
        return EventFilter(
            tuple(request.kinds),
            request.device_id,
            request.run_id,
            supplies.behind(request.supply) if request.supply else None,
            stated_since(request),
            min(request.limit or MAX_EVENTS, MAX_EVENTS),
        )

    async def _one_round(self, request: view_pb2.StreamRoundsRequest, times: Mapping[str, Times]) -> view_pb2.RoundView:
        """Get one round of a run, with or without a plan.

        Raises:
            UnknownRecordError: the run has no such round.
        """
        run_id, number = request.run_id, request.round
        if self._fleet.unplanned.is_known(run_id, number):
            async for view in self._unplanned_view(number, request):
                return view
        plan_id = plan_id_of(run_id, number)
        await self._repository.load_round(plan_id)
        try:
            record = self._fleet.rounds.get(plan_id)
        except UnknownRecordError:
            name = self._fleet.flower.name_of(run_id)
            raise UnknownRecordError(
                f"run {name} has no round {number}: list its rounds with `wattfleet coordinator rounds --run {name}`"
            ) from None
        workload = self._fleet.flower.workload_of(run_id)
        if request.device_id:
            record = _only(record, request.device_id)
        return _round_view(record, workload, times.get(plan_id, Times()), not request.without_devices)

    async def _unplanned_view(
        self, number: int, request: view_pb2.StreamRoundsRequest
    ) -> AsyncIterator[view_pb2.RoundView]:
        """Yield one round without a plan, or nothing if it was deleted meanwhile."""
        record = await self._repository.unplanned_of(request.run_id, number)
        if record is not None:
            workload = self._fleet.flower.workload_of(record.run_id)
            yield _unplanned_view(record, workload, request.with_times, not request.without_devices)

    def _device_view(
        self, record: DeviceRecord, request: view_pb2.ListDevicesRequest, lengths: UsualLengths, times: Times
    ) -> view_pb2.DeviceView:
        operator = self._fleet.operator
        known = record.front_for(request.workload) if request.workload else record.latest_front
        rules, overrides = operator.rules_of(record.device_id), operator.overrides_of(record.device_id)
        grant = self._fleet.rounds.grants.of(record.device_id)
        if grant is not None and grant.is_over:
            grant = None
        newest = self._fleet.rounds.latest_results
        observed_run_id = newest.observed_in.get(record.device_id, "")
        observed_run = self._fleet.flower.runs.get(observed_run_id)
        observed, predicted = newest.observations.get(record.device_id), newest.predictions.get(record.device_id)
        sample = self._fleet.samples.of(record.device_id)
        kept = self._fleet.duties.of(record.device_id)
        return view_pb2.DeviceView(
            device_id=record.device_id,
            board=record.board,
            provenance=provenance_to_message(record.provenance),
            state=state_to_message(record.state),
            profiled_modes=known.profiled_modes if known is not None and request.workload else record.profiled_modes,
            mode_count=record.mode_count,
            detail=record.detail,
            idle_w=record.idle_w,
            front=front_to_message(known.front) if known is not None and request.with_fronts else None,
            reference_digest="" if known is None else known.reference_digest,
            fastest_epoch_s=None if known is None else _fastest_epoch_s(known, record, lengths, rules.limit_w),
            epoch_length_assumed=known is not None and known.is_length_assumed,
            workload=request.workload or ("" if known is None else known.name),
            workloads=[
                self._device_workload(record, each, lengths, rules.limit_w)
                for each in record.fronts
                if request.with_fronts
            ],
            supply=self._supply(record.device_id),
            limit_w=rules.limit_w,
            site_tags=sorted(rules.tags),
            operator_tags=sorted(overrides.tags),
            drained=overrides.drained,
            first_seen_unix_s=times.first_unix_s,
            last_seen_unix_s=times.last_unix_s,
            granted_w=None if grant is None else grant.granted_w,
            confirmed_w=None if grant is None else grant.confirmed_w,
            observed_w=None if observed is None else observed.power_w,
            granted_plan_id="" if grant is None else grant.plan_id,
            left_out=self._fleet.agents.claims.exclusion_reason(record, request.workload or None) or "",
            trust=self._fleet.agents.claims.trust_of(record.device_id, request.workload or None),
            duty=None if kept is None else kept_duty_to_message(kept),
            state_since_unix_s=self._state_times.since_unix_s(record),
            target_modes=self._state_times.target_modes(record),
            profiling_left_s=self._state_times.profiling_left_s(record),
            presets=presets_to_messages(self._fleet.presets.of(record.device_id, known.name))
            if known is not None and request.with_fronts
            else None,
            sample=None if sample is None else board_sample_to_message(sample),
            throttled_unix_s=self._state_times.throttled_unix_s(record.device_id),
            observed_limit_w=None if observed is None or predicted is None else predicted.power_limit_w,
            observed_run_id=observed_run_id,
            observed_round=newest.observed_numbers.get(record.device_id, 0),
            is_observed_run_live=observed_run is not None and not observed_run.finished,
            prediction_errors=_errors(self._fleet.agents.claims.errors_of(record.device_id, request.workload or None)),
        )

    def _device_workload(
        self, record: DeviceRecord, known: WorkloadFront, lengths: UsualLengths, limit_w: float | None
    ) -> view_pb2.DeviceWorkload:
        claims, name = self._fleet.agents.claims, known.name
        return view_pb2.DeviceWorkload(
            workload=workload_to_message(known.workload),
            profiled_modes=known.profiled_modes,
            minibatches_per_epoch=known.minibatches_per_epoch,
            fastest_epoch_s=_fastest_epoch_s(known, record, lengths, limit_w),
            reference_digest=known.reference_digest,
            left_out=claims.exclusion_reason(record, name) or "",
            trust=claims.trust_of(record.device_id, name),
            front=front_to_message(known.front),
        )

    def _supply(self, device_id: str) -> str:
        """The supply that a device is behind; empty if the site file does not place it."""
        try:
            return self._fleet.operator.supply_of(device_id)
        except InvalidInputError:
            return ""


def _fastest_epoch_s(
    known: WorkloadFront, record: DeviceRecord, lengths: UsualLengths, limit_w: float | None
) -> float | None:
    """Seconds of a one-epoch training in the fastest mode within the device's own limit; None if no mode fits."""
    front = lengths.planned(known)
    allowed = np.maximum(front.planned_w, record.idle_w or 0.0) <= (np.inf if limit_w is None else limit_w)
    return float(front.one_epoch_s[allowed].min()) if allowed.any() else None


def _event(event: EventRecord) -> view_pb2.FleetEvent:
    return view_pb2.FleetEvent(
        event_id=event.event_id,
        at_unix_s=event.at.timestamp(),
        kind=event.kind,
        text=event.text,
        needs_attention=event.needs_attention,
        device_id=event.device_id,
        run_id=event.run_id,
        round=event.round,
        supply=event.supply,
        caller=event.caller,
    )


def _errors(errors: Sequence[PredictionError]) -> view_pb2.PredictionErrors | None:
    if not errors:
        return None
    times = [each.time_ratio for each in errors if each.time_ratio is not None]
    powers = [each.power_ratio for each in errors]
    return view_pb2.PredictionErrors(
        trainings=len(errors),
        least_time_ratio=min(times, default=None),
        most_time_ratio=max(times, default=None),
        least_power_ratio=min(powers),
        most_power_ratio=max(powers),
        last_time_ratio=errors[-1].time_ratio,
        last_power_ratio=errors[-1].power_ratio,
    )


def _run_view(run: RunRecord, times: Times) -> view_pb2.RunView:
    return view_pb2.RunView(
        run_id=run.run_id,
        strategy=run.strategy,
        rounds=run.rounds,
        initial_metrics=run.initial_metrics,
        finished=run.finished,
        error=run.error,
        started_unix_s=times.first_unix_s,
        finished_unix_s=times.last_unix_s,
        workload=workload_to_message(run.workload),
        name=run.name,
        labels=run.labels,
    )


def _workload_view(known: FleetWorkload, times: Mapping[str, Times]) -> view_pb2.WorkloadView:
    began = [times[run_id].first_unix_s for run_id in known.run_ids if run_id in times]
    return view_pb2.WorkloadView(
        workload=workload_to_message(known.workload),
        device_count=known.device_count,
        measured_devices=len(known.profiled_modes),
        median_modes=median(known.profiled_modes) if known.profiled_modes else None,
        live_run_ids=known.live_run_ids,
        run_count=len(known.run_ids),
        last_used_unix_s=max((each for each in began if each is not None), default=None),
    )


def _without_devices(plan: RoundPlan) -> RoundPlan:
    first = None if plan.first_planned is None else _without_devices(plan.first_planned)
    return replace(plan, assignments=(), decisions=(), first_planned=first)


def _only(record: RoundRecord, device_id: str) -> RoundRecord:
    """A copy of a round that contains only one device."""
    seen = {each: observed for each, observed in record.observations.items() if each == device_id}
    results = tuple(each for each in record.results if each.device_id == device_id)
    return replace(record, plan=_plan_of(record.plan, device_id), observations=seen, results=results)


def _plan_of(plan: RoundPlan, device_id: str) -> RoundPlan:
    return replace(
        plan,
        assignments=tuple(each for each in plan.assignments if each.device_id == device_id),
        decisions=tuple(each for each in plan.decisions if each.device_id == device_id),
        first_planned=None if plan.first_planned is None else _plan_of(plan.first_planned, device_id),
    )


def _round_view(record: RoundRecord, workload: str, times: Times, with_devices: bool) -> view_pb2.RoundView:
    plan = record.plan if with_devices else _without_devices(record.plan)
    return view_pb2.RoundView(
        run_id=record.run_id,
        round=record.number,
        plan_id=record.plan_id,
        epochs=record.epochs,
        plan=plan_to_message(record.plan_id, plan, record.nodes),
        observations=[
            view_pb2.DeviceObservation(
                device_id=seen.device_id, epoch_s=seen.epoch_s, power_w=seen.power_w, beside_duty=seen.beside_duty
            )
            for seen in record.observations.values()
            if with_devices
        ],
        failed_device_ids=record.failed,
        late_device_ids=record.late,
        metrics=record.metrics,
        wall_s=record.wall_s,
        observed_site_w=record.observed_site_w,
        observed_duration_s=record.observed_duration_s,
        training_j=record.training_j,
        observed_count=len(record.observations),
        results=[_result(result) for result in record.results if with_devices],
        device_count=len(record.plan.original.assignments),
        idle_w=record.idle_w,
        planned_unix_s=times.first_unix_s,
        finished_unix_s=times.last_unix_s,
        other_mode_count=len(record.plan.in_other_mode),
        stopped_count=len(record.plan.stopped),
        workload=workload,
    )


def _unplanned_view(record: UnplannedRound, workload: str, with_times: bool, with_devices: bool) -> view_pb2.RoundView:
    return view_pb2.RoundView(
        run_id=record.run_id,
        round=record.number,
        unplanned=True,
        failed_device_ids=record.failed,
        late_device_ids=record.late,
        metrics=record.metrics,
        wall_s=record.wall_s,
        results=[_result(result) for result in record.results if with_devices],
        device_count=len(record.results),
        planned_unix_s=record.began_at.timestamp() if with_times else None,
        finished_unix_s=record.ended_at.timestamp() if with_times else None,
        workload=workload,
    )


def _result(result: DeviceResult) -> planning_pb2.DeviceResult:
    return planning_pb2.DeviceResult(
        device_id=result.device_id,
        failure=result.failure,
        num_examples=result.num_examples,
        loss=result.loss,
        share=result.share,
        late=result.late,
    )
