"""A device with the agent's real session, outbox and grants; its training is a wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from edge_agent.session.certificate_keeper import connects_to
from edge_agent.session.coordinator_session import CoordinatorSession
from edge_agent.session.grants import Grant, NoGrantError
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.status import SessionNews
from edge_agent.settings import SessionSettings
from tests.fakes.fronts import front
from wattfleet_identity.channels import Endpoint
from wattfleet_io.tasks import stop_tasks, with_timeout
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import power_pb2, session_pb2

WORKLOAD = "faults"
BOARD = "agx-orin"
IDLE_W = 5.0
EPOCH_S = 1.0
"""Duration of an epoch, short so that rounds end soon."""


@dataclass
class Training:
    """One training of a device.

    Attributes:
        plan_id: the plan that it trains for.
        began_s: when it began, on the loop's clock.
        ended_s: when the device parked; None while it trains.
        stopped: why it was stopped; empty if it was not.
    """

    plan_id: str
    began_s: float
    ended_s: float | None = None
    stopped: str = ""


class News(SessionNews):
    """Records why sessions and attempts ended."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[str] = []

    def failed(self, reason: str, cause: str = "") -> None:
        self.failures.append(reason)
        super().failed(reason)


class NoFile(OutboxFile):
    """Stores nothing, because twenty devices on one event loop would wait for each other's disk writes."""

    def load(self) -> list[session_pb2.SessionRequest]:
        return []

    def store(self, requests: list[session_pb2.SessionRequest]) -> None:
        """Keep the records in memory only."""


class Device:
    """One device of a fleet.

    Attributes:
        trains_s: duration of its next trainings, in seconds.
        trainings: its trainings so far.
        news: records why its sessions ended.
        welcomes: number of Welcomes from the coordinator.
    """

    def __init__(self, device_id: str, endpoint: Endpoint, folder: Path, settings: SessionSettings) -> None:
        self.device_id = device_id
        self.trains_s = EPOCH_S
        self.trainings: list[Training] = []
        self.news = News()
        self.welcomes = 0
        self.outbox = Outbox(NoFile(folder), settings)
        self._settings = settings
        hello = session_pb2.Hello(
            device_id=device_id,
            board=BOARD,
            provenance=power_pb2.PROVENANCE_SIMULATED,
            mode_count=7,
            installation=installation_of(device_id),
            protocol=own_version(),
        )
        self.session = CoordinatorSession(
            connects_to(endpoint), hello, self._welcomed, self.outbox, settings, self.news
        )
        self._running: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Connect, and report that the device is ready."""
        self.report(modes=10)
        self._running = asyncio.create_task(self.session.run(), name=f"session of {self.device_id}")

    async def end(self) -> None:
        await stop_tasks(self._running)

    def report(self, modes: int) -> None:
        """Report a front, and a state with the number of measured modes."""
        self.session.report_front(
            session_pb2.FrontReport(
                front=front_to_message(front((EPOCH_S, 20.0 + modes / 100), (2 * EPOCH_S, 10.0))),
                idle_w=IDLE_W,
                profiled_modes=modes,
                workload=power_pb2.Workload(name=WORKLOAD),
                minibatches_per_epoch=100,
            )
        )
        self._report_state(session_pb2.DEVICE_STATE_READY, modes, f"ready with {modes} modes")

    def _report_state(self, state: session_pb2.DeviceState.ValueType, modes: int, detail: str) -> None:
        self.session.report_state(session_pb2.StateReport(state=state, profiled_modes=modes, detail=detail))

    @property
    def is_delivered(self) -> bool:
        """Whether it is connected, and all its reports are acknowledged."""
        return self.session.connected and not self.outbox.has_any_up_to(self.outbox.last_sequence)

    @property
    def is_training(self) -> bool:
        return any(each.ended_s is None for each in self.trainings)

    async def train(self, plan_id: str) -> bool:
        """Train for a plan as the agent would: only within its grant. Returns whether the training was completed."""
        grants, loop = self.session.grants, asyncio.get_running_loop()
        await grants.wait_for(plan_id, self._settings.grant_timeout_s)
        try:
            grants.begin(plan_id)
        except NoGrantError as error:
            self.trainings.append(Training(plan_id, loop.time(), loop.time(), str(error)))
            return False
        training = Training(plan_id, loop.time())
        self.trainings.append(training)
        while (left_s := training.began_s + self.trains_s - loop.time()) > 0:
            try:
                change = await with_timeout(left_s, grants.next_change())
            except asyncio.TimeoutError:
                break
            if not isinstance(change, Grant):
                training.stopped = change
                break
            grants.applied(change)
        training.ended_s = loop.time()
        grants.ended()
        if training.stopped:
            return False
        self.session.report_observation(session_pb2.Observation(plan_id=plan_id, epoch_s=EPOCH_S, power_w=15.0))
        return True

    async def _welcomed(self, welcome: session_pb2.Welcome) -> None:
        self.welcomes += 1


def installation_of(device_id: str) -> str:
    """The installation of a device's agent."""
    return (device_id.encode().hex() + 32 * "0")[:32]
