"""What commands, displays and reports read of the coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from coordinator.archive import rounds_of
from coordinator.fleet import Fleet
from coordinator.records import DeviceRecord, DeviceResult, RoundRecord
from coordinator.sessions import STATE_MESSAGE
from coordinator.store.writer import Writer
from wattfleet_proto.convert import evidence_to_message, front_to_message, plan_to_message
from wattfleet_proto.v1 import planning_pb2, view_pb2, view_pb2_grpc

_DEVICES_IN_A_MESSAGE = 100


class ViewServicer(view_pb2_grpc.ViewServiceServicer):
    """What commands, displays and reports read."""

    def __init__(self, fleet: Fleet, writer: Writer) -> None:
        """Show one fleet."""
        self._fleet = fleet
        self._writer = writer

    async def GetFleet(  # noqa: N802 - named by the protocol
        self, request: view_pb2.GetFleetRequest, context: Any
    ) -> view_pb2.GetFleetResponse:
        """What holds for the fleet as a whole."""
        return view_pb2.GetFleetResponse(site_budget_w=self._fleet.site_budget_w, policy=self._fleet.policy.name)

    async def ListDevices(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListDevicesRequest, context: Any
    ) -> AsyncIterator[view_pb2.ListDevicesResponse]:
        """Devices by id."""
        for device_id in request.device_ids:
            self._fleet.device(device_id)
        ids = sorted(set(request.device_ids) or self._fleet.devices)
        for begin in range(0, len(ids), _DEVICES_IN_A_MESSAGE):
            yield view_pb2.ListDevicesResponse(
                devices=[
                    self._device_view(self._fleet.devices[device_id], request.with_fronts)
                    for device_id in ids[begin : begin + _DEVICES_IN_A_MESSAGE]
                ]
            )

    async def ListRuns(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListRunsRequest, context: Any
    ) -> view_pb2.ListRunsResponse:
        """All runs, oldest first."""
        return view_pb2.ListRunsResponse(
            runs=[
                view_pb2.RunView(
                    run_id=run.run_id,
                    strategy=run.strategy,
                    rounds=run.rounds,
                    initial_metrics=run.initial_metrics,
                    finished=run.finished,
                    error=run.error,
                )
                for run in self._fleet.runs.values()
            ]
        )

    async def ListRounds(  # noqa: N802 - named by the protocol
        self, request: view_pb2.ListRoundsRequest, context: Any
    ) -> view_pb2.ListRoundsResponse:
        """The rounds of one run."""
        run_id = request.run_id or next(reversed(self._fleet.runs), "")
        if not run_id:
            return view_pb2.ListRoundsResponse()
        run = self._fleet.run(run_id)
        return view_pb2.ListRoundsResponse(
            run_id=run_id,
            rounds=[_round_view(record) async for record in rounds_of(self._fleet, self._writer, run_id)],
            initial_metrics=run.initial_metrics,
            finished=run.finished,
            error=run.error,
        )

    async def StreamRounds(  # noqa: N802 - named by the protocol
        self, request: view_pb2.StreamRoundsRequest, context: Any
    ) -> AsyncIterator[view_pb2.RoundView]:
        """The rounds of one run, one by one."""
        run_id = self._fleet.run(request.run_id).run_id
        async for record in rounds_of(self._fleet, self._writer, run_id):
            yield _round_view(record, not request.without_devices)

    def _device_view(self, record: DeviceRecord, with_front: bool) -> view_pb2.DeviceView:
        supply, rules = self._fleet.placement_of(record.device_id)
        say, front = self._fleet.say_of(record.device_id), record.front
        return view_pb2.DeviceView(
            device_id=record.device_id,
            board=record.board,
            evidence=evidence_to_message(record.evidence),
            state=STATE_MESSAGE[record.state],
            profiled_modes=record.profiled_modes,
            mode_count=record.mode_count,
            detail=record.detail,
            idle_w=record.idle_w,
            front=front_to_message(front) if front is not None and with_front else None,
            reference_digest=record.reference_digest,
            fastest_epoch_s=None if front is None else float(front.epoch_s.min()),
            supply=supply,
            limit_w=rules.limit_w,
            site_tags=sorted(rules.tags),
            operator_tags=sorted(say.tags),
            drained=say.drained,
        )


def _round_view(record: RoundRecord, with_devices: bool = True) -> view_pb2.RoundView:
    plan = record.plan if with_devices else replace(record.plan, assignments=(), decisions=())
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
        metrics=record.metrics,
        wall_s=record.wall_s,
        observed_site_w=record.observed_site_w,
        observed_duration_s=record.observed_duration_s,
        results=[_result(result) for result in record.results if with_devices],
        device_count=len(record.plan.assignments),
        idle_w=record.idle_w,
    )


def _result(result: DeviceResult) -> planning_pb2.DeviceResult:
    return planning_pb2.DeviceResult(
        device_id=result.device_id,
        failure=result.failure,
        num_examples=result.num_examples,
        loss=result.loss,
        share=result.share,
    )
