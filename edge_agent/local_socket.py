"""The agent's unix socket, through which an unprivileged Flower ClientApp reaches the power knobs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.link import Link
from edge_agent.training import NotTrainingError, PowerNotReadError, TrainingWatch
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet_proto.convert import mode_from_message, mode_to_message
from wattfleet_proto.error_boundary import ErrorInterceptor, StatusTable
from wattfleet_proto.v1 import local_pb2, local_pb2_grpc, session_pb2

_ACKNOWLEDGED_WITHIN_S = 2.0
_GROUP_MAY_CONNECT = 0o660

STATUS: StatusTable = {
    InvalidInputError: grpc.StatusCode.INVALID_ARGUMENT,
    NotTrainingError: grpc.StatusCode.FAILED_PRECONDITION,
    ModeNotAppliedError: grpc.StatusCode.ABORTED,
    PowerNotReadError: grpc.StatusCode.UNAVAILABLE,
}


# After these the board is not to be trusted with a round; a request that was refused says nothing about it.
_DEVICE_TROUBLE = (ModeNotAppliedError, PowerNotReadError)


class LocalAgentServicer(local_pb2_grpc.LocalAgentServiceServicer):
    """Translates between the socket and the training watch."""

    def __init__(self, device_id: str, watch: TrainingWatch, link: Link, profiled_modes: int) -> None:
        """Serve one device.

        Args:
            device_id: its name.
            watch: what runs its trainings.
            link: where states and observations are reported.
            profiled_modes: modes measured, repeated in every state report.
        """
        self._device_id = device_id
        self._watch = watch
        self._link = link
        self._profiled_modes = profiled_modes

    def _report(self, state: session_pb2.DeviceState.ValueType, detail: str) -> None:
        self._link.report_state(
            session_pb2.StateReport(state=state, profiled_modes=self._profiled_modes, detail=detail)
        )

    async def StartTraining(  # noqa: N802 - named by the protocol
        self, request: local_pb2.StartTrainingRequest, context: Any
    ) -> local_pb2.StartTrainingResponse:
        """Put the assigned mode in force and start to observe."""
        try:
            if request.device_id != self._device_id:
                raise InvalidInputError(
                    f"the assignment is {request.device_id}'s, this is {self._device_id}'s agent:"
                    " give the SuperNode its own device-id and agent-socket"
                )
            mode = mode_from_message(request.mode)
            await asyncio.to_thread(self._watch.start, request.plan_id, mode, request.epochs)
        except _DEVICE_TROUBLE as error:
            self._report(session_pb2.DEVICE_STATE_DEGRADED, str(error))
            raise
        self._report(session_pb2.DEVICE_STATE_TRAINING, f"training in {mode.label()}")
        return local_pb2.StartTrainingResponse()

    async def FinishTraining(  # noqa: N802 - named by the protocol
        self, request: local_pb2.FinishTrainingRequest, context: Any
    ) -> local_pb2.FinishTrainingResponse:
        """Stop observing, park the device, report."""
        response = local_pb2.FinishTrainingResponse()
        try:
            if request.failed:
                await asyncio.to_thread(self._watch.abandon)
            else:
                observed = await asyncio.to_thread(self._watch.finish, request.plan_id)
                response = local_pb2.FinishTrainingResponse(epoch_s=observed.epoch_s, power_w=observed.power_w)
                self._link.report_observation(
                    session_pb2.Observation(
                        plan_id=request.plan_id,
                        mode=mode_to_message(observed.mode),
                        epoch_s=observed.epoch_s,
                        power_w=observed.power_w,
                    )
                )
        except _DEVICE_TROUBLE as error:
            self._report(session_pb2.DEVICE_STATE_DEGRADED, str(error))
            raise
        self._report(session_pb2.DEVICE_STATE_READY, "parked")
        # The next plan is made from what the coordinator knows: let it know before Flower hears of the reply.
        await self._link.flush(_ACKNOWLEDGED_WITHIN_S)
        return response


@asynccontextmanager
async def serve_socket(path: Path, servicer: LocalAgentServicer) -> AsyncIterator[None]:
    """Serve the socket for the owner and the group of its file.

    Raises:
        InvalidInputError: the socket cannot be made there.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor(STATUS)])
    local_pb2_grpc.add_LocalAgentServiceServicer_to_server(servicer, server)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # left by an agent that was killed
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        os.chmod(path, _GROUP_MAY_CONNECT)
    except (OSError, RuntimeError) as error:
        raise InvalidInputError(f"{path}: cannot serve a socket there: {error}") from None
    try:
        yield
    finally:
        await server.stop(1.0)
