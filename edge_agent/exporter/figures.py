"""The figures that an agent exports of itself and its board at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.duties import KeptDuty
from wattfleet_proto.board_sample import BoardSample
from wattfleet_proto.device_state import DeviceState


@dataclass(frozen=True)
class DeviceFacts:
    """The identity of a device.

    Attributes:
        device_id: the device's name in the fleet.
        board: its kind of board.
        provenance: whether its figures are simulated, replayed or measured on hardware.
    """

    device_id: str
    board: str
    provenance: str


@dataclass(frozen=True)
class AgentFigures:
    """What the agent knows now.

    Attributes:
        sample: the latest readings of the board's sensors; None before the first, and while they cannot be read.
        state: the device's state.
        profiled_modes: number of power modes measured of the latest workload.
        modes_to_measure: maximum of modes that the profile in progress measures; None without one.
        is_connected: whether there is a session, to which the coordinator has welcomed the device.
        waiting_reports: number of reports that the coordinator has not acknowledged.
        trainings: number of trainings begun since the agent started.
        granted_w: watts that the training in progress may draw; None without one.
        duty: how the duty in force is kept; None without one.
    """

    sample: BoardSample | None
    state: DeviceState
    profiled_modes: int
    modes_to_measure: int | None
    is_connected: bool
    waiting_reports: int
    trainings: int
    granted_w: float | None
    duty: KeptDuty | None
