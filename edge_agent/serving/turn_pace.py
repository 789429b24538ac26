"""The minimum time of a turn's work on a simulated board in real time."""

from __future__ import annotations

from edge_agent.devices.device import Device
from edge_agent.devices.virtual.live_simulated import LiveSimulatedDevice
from wattfleet_proto.v1 import duty_pb2


class TurnPace:
    """Makes the messages that begin turns, and informs a simulated board of the work that uses the device.

    Args:
        device: the board. If it is not simulated in real time, turns have no minimum time.
    """

    def __init__(self, device: Device) -> None:
        self._board = device if isinstance(device, LiveSimulatedDevice) else None

    def minibatch(self) -> duty_pb2.Turn:
        """Return the message for a minibatch's turn that begins now."""
        return duty_pb2.Turn(least_ms=[] if self._board is None else [self._board.begin_minibatch()])

    def batch(self, number: int, workload: str | None, waiting: int, largest_batch: int) -> duty_pb2.Turn:
        """Return the message for a turn of a batch of requests that begins now.

        Args:
            number: the number of the server's request for a turn.
            workload: the served workload; None without a duty, when its time is unknown.
            waiting: number of waiting requests.
            largest_batch: maximum number of requests that the server answers at once.
        """
        if self._board is None or workload is None:
            return duty_pb2.Turn(number=number)
        return duty_pb2.Turn(number=number, least_ms=self._board.begin_inference(workload, waiting, largest_batch))

    def end(self) -> None:
        """Note that a turn has ended."""
        if self._board is not None:
            self._board.rest()
