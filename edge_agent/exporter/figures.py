"""What an agent exports of itself and its board at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from wattfleet.duties import KeptDuty
from wattfleet_proto.board_sample import BoardSample
from wattfleet_proto.device_state import DeviceState


@dataclass(frozen=True)
class DeviceFacts:
    """What the device is.

    Attributes:
        device_id: its name in the fleet.
        board: its kind of board.
        provenance: whether its figures are simulated, replayed or of hardware.
    """

    device_id: str
    board: str
    provenance: str


@dataclass(frozen=True)
class AgentFigures:
    """What the agent knows now.

    Attributes:
        sample: what the board's sensors said last; None before the first reading, and while they cannot be read.
        state: the device's state.
        profiled_modes: power modes measured of the workload in question.
        modes_to_measure: modes that the profile in progress measures at most; None while there is none.
        is_connected: whether the coordinator has welcomed the device, and the session lasts.
        waiting_reports: reports that the coordinator has not acknowledged.
        trainings: trainings that have begun since the agent started.
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
