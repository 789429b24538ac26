"""The encoded messages of a simulated agent."""

from __future__ import annotations

import numpy as np

from coordinator.settings import GrantSettings, SessionSettings
from coordinator.state.leases import Pace
from wattfleet.core.choosing import MAX_FRONT_POINTS, Front
from wattfleet.core.modes import Workload, WorkloadFacts
from wattfleet_proto.convert import front_to_message, phase_to_message, workload_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.names import own_version
from wattfleet_proto.v1 import power_pb2, session_pb2

SERVICE = "/wattfleet.v1.SessionService"
BOARD = "agx-orin"

# The number of knob values of a Jetson AGX Orin.
_KNOBS = (
    np.arange(1, 13),
    np.linspace(115_200, 2_201_600, 29),
    np.linspace(306_000_000, 1_300_500_000, 11),
    np.array([204_000_000, 665_600_000, 2_133_000_000, 3_199_000_000]),
)

ACK_BYTES = len(
    session_pb2.SessionResponse(
        ack=session_pb2.Ack(
            sequence=1000,
            lease_s=SessionSettings().lease_s,
            reconnect_s=1.0,
            lease_number=1000,
            grant_lifetime_s=GrantSettings().lifetime_s,
            is_renewed=True,
        )
    ).SerializeToString()
)


def state(sequence: int) -> bytes:
    """Return a state report of an agent; it differs with every sequence number."""
    return session_pb2.SessionRequest(
        sequence=sequence,
        state=session_pb2.StateReport(
            state=session_pb2.DEVICE_STATE_READY, profiled_modes=sequence, detail=f"ready: {sequence} modes measured"
        ),
    ).SerializeToString()


def device_id(number: int) -> str:
    """Return the device id of an agent."""
    return f"device-{number:06}"


def installation(number: int) -> str:
    """Return the installation id of an agent."""
    return f"{number:032x}"


def hello(number: int) -> bytes:
    """Return the first message of an agent, which identifies it."""
    return session_pb2.SessionRequest(
        hello=session_pb2.Hello(
            device_id=device_id(number),
            board=BOARD,
            provenance=power_pb2.PROVENANCE_SIMULATED,
            mode_count=18_096,
            protocol=own_version(),
            installation=installation(number),
        )
    ).SerializeToString()


def workload(number: int) -> Workload:
    """Return the name of the workload with this number."""
    return Workload(f"workload-{number}", WorkloadFacts(batch=16, parameters=11e6))


def fronts(workloads: int) -> list[bytes]:
    """Return a front of each workload with the maximum number of points, to send after the first state."""
    return [_front(number) for number in range(workloads)]


def _front(number: int) -> bytes:
    slowdown = np.linspace(1.0, 6.0 + number, MAX_FRONT_POINTS)
    rng = np.random.default_rng(number)
    modes = np.column_stack([rng.choice(values, MAX_FRONT_POINTS) for values in _KNOBS]).round()
    spread = np.full(MAX_FRONT_POINTS, 0.03)
    reported = Front(modes, 40.0 * slowdown, 10.0 + 40.0 / slowdown, spread, spread, np.full(MAX_FRONT_POINTS, 4.0))
    return session_pb2.SessionRequest(
        sequence=2 + number,
        front=session_pb2.FrontReport(
            front=front_to_message(reported),
            idle_w=5.0,
            profiled_modes=50,
            reference_digest="0" * 64,
            workload=workload_to_message(workload(number)),
            minibatches_per_epoch=500,
        ),
    ).SerializeToString()


def lease(number: int, grant: session_pb2.Grant | None, phase: GrantPhase) -> bytes:
    """Return a lease, which states the grant in force and the progress of its training."""
    said = session_pb2.Lease(number=number, phase=phase_to_message(phase))
    if grant is not None:
        said.grant_id, said.plan_id = grant.id, grant.plan_id
    return session_pb2.SessionRequest(lease=said).SerializeToString()


def reaction_to(response: bytes) -> Pace | session_pb2.Grant | None:
    """Return the part of a server message that needs a reaction: a pace or a grant; None if it needs none."""
    parsed = session_pb2.SessionResponse.FromString(response)
    if parsed.HasField("grant"):
        return parsed.grant
    if parsed.HasField("announced"):
        return None
    asked = parsed.welcome if parsed.HasField("welcome") else parsed.ack
    return Pace(asked.lease_s, asked.reconnect_s)
