"""How long the work of a turn takes at least, on a simulated board in real time."""

from __future__ import annotations

from edge_agent.devices.device import Device
from edge_agent.devices.virtual.live_simulated import LiveSimulatedDevice
from wattfleet_proto.v1 import duty_pb2


class TurnPace:
    """Makes the messages that begin turns, and tells a simulated board what has the device.

    Args:
        device: the board; one that is not simulated in real time takes its own time.
    """

    def __init__(self, device: Device) -> None:
        self._board = device if isinstance(device, LiveSimulatedDevice) else None

    def minibatch(self) -> duty_pb2.Turn:
        """The turn of a minibatch that begins now."""
        return duty_pb2.Turn(least_ms=[] if self._board is None else [self._board.begin_minibatch()])

    def batch(self, number: int, workload: str | None, waiting: int, largest_batch: int) -> duty_pb2.Turn:
        """The turn of a batch of requests that begins now.

        Args:
            number: of the server's question.
            workload: what is served; None if no duty says it, so that nothing is known of its time.
            waiting: requests that wait.
            largest_batch: most requests that the server answers at once.
        """
        if self._board is None or workload is None:
            return duty_pb2.Turn(number=number)
        return duty_pb2.Turn(number=number, least_ms=self._board.begin_inference(workload, waiting, largest_batch))

    def end(self) -> None:
        """A turn has ended."""
        if self._board is not None:
            self._board.rest()
