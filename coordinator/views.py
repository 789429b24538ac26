"""What commands, displays and reports read of the coordinator."""

from __future__ import annotations

from typing import Any

from coordinator.archive import recalled
from coordinator.fleet import Fleet
from coordinator.records import DeviceRecord, RoundRecord
from coordinator.sessions import STATE_MESSAGE
from coordinator.store.writer import Writer
from wattfleet_proto.convert import evidence_to_message, front_to_message, plan_to_message
from wattfleet_proto.v1 import view_pb2, view_pb2_grpc


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
        await recalled(self._fleet, self._writer, run_id)
        return view_pb2.ListRoundsResponse(
            run_id=run_id,
            rounds=[_round_view(record) for record in self._fleet.rounds_of(run_id)],
            initial_metrics=run.initial_metrics,
            finished=run.finished,
            error=run.error,
        )


def _device_view(record: DeviceRecord) -> view_pb2.DeviceView:
    return view_pb2.DeviceView(
        device_id=record.device_id,
        board=record.board,
        evidence=evidence_to_message(record.evidence),
        state=STATE_MESSAGE[record.state],
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
