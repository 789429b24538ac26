"""The view service, which commands, dashboards and reports read."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from coordinator.display.words import EVENT_KINDS
from coordinator.errors import UnknownRecordError
from coordinator.repository.repository import FleetRepository
from coordinator.services.event_log import EventLog, StateTimes
from coordinator.services.request_limits import stated_since
from coordinator.state.device_view import DeviceView
from coordinator.state.names import abbreviate
from coordinator.state.preview import FleetWorkload, known_workloads
from coordinator.state.records import (
    MAX_EVENTS,
    DeviceRecord,
    EventFilter,
    EventRecord,
    RoundRecord,
    RunRecord,
    UnplannedRound,
    plan_id_of,
)
from coordinator.state.workload_fronts import UsualLengths, WorkloadFront
from coordinator.store.tables import OF_DEVICES, OF_NODES, OF_RUNS, Times, of_rounds
from wattfleet.core.budgets import EnergyAccount
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import require_workload_name
from wattfleet.core.planning import PredictionError, RoundPlan
from wattfleet_proto.convert import (
    front_to_message,
    message_of,
    plan_to_message,
    presets_to_messages,
    state_to_message,
    workload_to_message,
)
from wattfleet_proto.v1 import planning_pb2, view_pb2, view_pb2_grpc

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
        times = await self._repository.read(lambda store: store.times(OF_DEVICES)) if request.with_times else {}
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
        times = await self._repository.read(lambda store: store.times(OF_NODES))
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
                        device_state=None if device is None else state_to_message(device.state),
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
        times = await self._repository.read(lambda store: store.times(OF_RUNS)) if request.with_times else {}
        runs = list(self._fleet.flower.runs.values())
        for begin in range(0, len(runs), _RUNS_IN_A_MESSAGE):
            some = runs[begin : begin + _RUNS_IN_A_MESSAGE]
            yield view_pb2.ListRunsResponse(
                runs=[
                    _run_view(run, times.get(run.run_id, Times()), self._fleet.flower.energy.of(run.run_id))
                    for run in some
                ]
            )

    async def ListWorkloads(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListWorkloadsRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListWorkloadsResponse]:
        """List the workloads of runs and of fronts by name."""
        times = await self._repository.read(lambda store: store.times(OF_RUNS))
        known = known_workloads(self._fleet)
        for begin in range(0, len(known), _WORKLOADS_IN_A_MESSAGE):
            some = known[begin : begin + _WORKLOADS_IN_A_MESSAGE]
            yield view_pb2.ListWorkloadsResponse(workloads=[_workload_view(each, times) for each in some])

    async def StreamRounds(  # noqa: N802 - named by the protocol
        self, request: view_pb2.StreamRoundsRequest, context: Any
    ) -> AsyncIterator[view_pb2.RoundView]:
        """Stream one or all rounds of a run, oldest first, including those without a plan."""
        run_id = self._fleet.flower.run(request.run_id).run_id
        times = await self._repository.read(lambda store: store.times(of_rounds(run_id))) if request.with_times else {}
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
        wanted = self._event_filter(request)
        found = await self._repository.read(lambda store: store.events(wanted))
        for begin in range(0, len(found), _EVENTS_IN_A_MESSAGE):
            yield view_pb2.ListEventsResponse(events=map(_event, found[begin : begin + _EVENTS_IN_A_MESSAGE]))

    def _event_filter(self, request: view_pb2.ListEventsRequest) -> EventFilter:
        """Convert a request."""
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
        """Get one round of a run, with or without a plan."""
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
        record = await self._repository.read(lambda store: store.unplanned_of(request.run_id, number))
        if record is not None:
            workload = self._fleet.flower.workload_of(record.run_id)
            yield _unplanned_view(record, workload, request.with_times, not request.without_devices)

    def _device_view(
        self, record: DeviceRecord, request: view_pb2.ListDevicesRequest, lengths: UsualLengths, times: Times
    ) -> view_pb2.DeviceView:
        view = DeviceView(self._fleet, record, request.workload, lengths)
        front = presets = None
        if view.known is not None and request.with_fronts:
            front = front_to_message(view.known.front)
            presets = presets_to_messages(self._fleet.presets.of(record.device_id, view.known.name))
        return message_of(
            view_pb2.DeviceView,
            *view.sources,
            front=front,
            presets=presets,
            workloads=[self._device_workload(view, each) for each in record.fronts if request.with_fronts],
            first_seen_unix_s=times.first_unix_s,
            last_seen_unix_s=times.last_unix_s,
            state_since_unix_s=self._state_times.since_unix_s(record),
            target_modes=self._state_times.target_modes(record),
            profiling_left_s=self._state_times.profiling_left_s(record),
            throttled_unix_s=self._state_times.throttled_unix_s(record.device_id),
            prediction_errors=_errors(view.errors),
        )

    def _device_workload(self, view: DeviceView, known: WorkloadFront) -> view_pb2.DeviceWorkload:
        claims, device_id = self._fleet.agents.claims, view.record.device_id
        return message_of(
            view_pb2.DeviceWorkload,
            known,
            workload=workload_to_message(known.workload),
            fastest_epoch_s=view.fastest_epoch_of(known),
            reference_digest=known.reference_digest or None,
            left_out=claims.exclusion_reason(view.record, known.name),
            trust=claims.trust_of(device_id, known.name),
            front=front_to_message(known.front),
        )


_EVENT_IS_ABOUT = ("device_id", "run_id", "round", "supply", "caller")


def _event(event: EventRecord) -> view_pb2.FleetEvent:
    about = {name: getattr(event, name) or None for name in _EVENT_IS_ABOUT}
    return message_of(view_pb2.FleetEvent, event, at_unix_s=event.at.timestamp(), **about)


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


def _run_view(run: RunRecord, times: Times, energy: EnergyAccount | None) -> view_pb2.RunView:
    return message_of(
        view_pb2.RunView,
        run,
        started_unix_s=times.first_unix_s,
        finished_unix_s=times.last_unix_s,
        rounds_asked_for=run.rounds,
        workload=workload_to_message(run.workload),
        energy_spent_j=None if energy is None else energy.spent_j,
        energy_set_aside_j=None if energy is None else energy.set_aside_j,
    )


def _workload_view(known: FleetWorkload, times: Mapping[str, Times]) -> view_pb2.WorkloadView:
    began = [times[run_id].first_unix_s for run_id in known.run_ids if run_id in times]
    return view_pb2.WorkloadView(
        workload=workload_to_message(known.workload),
        devices=known.device_count,
        measured_devices=len(known.profiled_modes),
        median_modes=median(known.profiled_modes) if known.profiled_modes else None,
        live_run_ids=known.live_run_ids,
        runs=len(known.run_ids),
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
    first, is_trimmed = record.plan.original, record.plan.first_planned is not None
    return message_of(
        view_pb2.RoundView,
        record,
        round=record.number,
        plan=plan_to_message(record.plan_id, plan, record.nodes),
        observations=[
            message_of(view_pb2.DeviceObservation, each) for each in record.observations.values() if with_devices
        ],
        results=[message_of(planning_pb2.DeviceResult, each) for each in record.results if with_devices],
        observed_trainings=len(record.observations),
        devices=len(first.assignments),
        in_other_mode=len(record.plan.in_other_mode),
        stopped=len(record.plan.stopped),
        site_budget_w=first.site_budget_w,
        planned_w=first.planned_w,
        planned_s=first.duration_s,
        deadline_s=record.plan.deadline_s or None,
        trimmed_site_budget_w=record.plan.site_budget_w if is_trimmed else None,
        trimmed_planned_w=record.plan.planned_w if is_trimmed else None,
        trimmed_s=record.plan.duration_s if is_trimmed else None,
        planned_unix_s=times.first_unix_s,
        finished_unix_s=times.last_unix_s,
        workload=workload or None,
    )


def _unplanned_view(record: UnplannedRound, workload: str, with_times: bool, with_devices: bool) -> view_pb2.RoundView:
    return message_of(
        view_pb2.RoundView,
        record,
        round=record.number,
        unplanned=True,
        results=[message_of(planning_pb2.DeviceResult, each) for each in record.results if with_devices],
        devices=len(record.results),
        planned_unix_s=record.began_at.timestamp() if with_times else None,
        finished_unix_s=record.ended_at.timestamp() if with_times else None,
        workload=workload or None,
    )
