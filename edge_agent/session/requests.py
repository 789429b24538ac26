"""The coordinator's requests other than trainings: fronts of workloads, and measurements before their first round."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.workloads.loading import SHIPPED
from wattfleet.errors import InvalidInputError
from wattfleet.modes import MeasuredUnit, Workload
from wattfleet_io.console import plain_text
from wattfleet_proto.convert import measured_from_messages, workload_from_message
from wattfleet_proto.message_sizes import MAX_ID_CHARACTERS, MAX_REASON_LENGTH
from wattfleet_proto.session_limits import MAX_OTHER_KINDS, MAX_UNITS, PROFILE_MODES
from wattfleet_proto.v1 import session_pb2

_log = logging.getLogger(__name__)

_MOST_ANNOUNCED = 32
"""Maximum of workloads read from one announcement."""

_MOST_UNITS = MAX_UNITS + MAX_OTHER_KINDS
"""Maximum of devices and kinds of board whose measurements of one workload are read."""

_MOST_ORDERS = 32
"""Maximum of waiting orders."""

_MAX_SHOWN = 60
"""Maximum of characters of an unknown name in the log."""


@dataclass(frozen=True)
class Announced:
    """A workload that a run is going to train.

    Attributes:
        workload: the workload as the coordinator describes it.
        units: what a few other devices of this kind and of other kinds have measured; None for nothing new.
    """

    workload: Workload
    units: tuple[MeasuredUnit, ...] | None = None


@dataclass(frozen=True)
class ProfileOrder:
    """An order to measure modes without an app.

    Attributes:
        workload: the workload to measure.
        synthetic: the shipped workload to train while measuring.
        modes: maximum number of measured modes, including earlier ones.
    """

    workload: Workload
    synthetic: str
    modes: int


class CoordinatorRequests:
    """Queues the coordinator's requests for the device."""

    def __init__(self) -> None:
        """Start with no requests."""
        self._announced: Sequence[Announced] = ()
        self._orders: list[ProfileOrder] = []
        self._changed = asyncio.Event()

    def announced(self, message: session_pb2.WorkloadsAnnounced) -> None:
        """Store the workloads of all live runs; log and leave out those that are invalid."""
        if len(message.workloads) > _MOST_ANNOUNCED:
            _log.error(
                "the coordinator announced %d workloads; only %d are used", len(message.workloads), _MOST_ANNOUNCED
            )
        measured = _measured(message)
        found = []
        for each in message.workloads[:_MOST_ANNOUNCED]:
            try:
                workload = workload_from_message(each)
                found.append(Announced(workload, tuple(measured.get(workload.name, ()))))
            except InvalidInputError as error:
                _log.error("the coordinator announced an invalid workload: %s", _shown(error))
        self._announced = found
        self._changed.set()

    def ordered(self, message: session_pb2.ProfileOrder) -> None:
        """Store an order to measure modes; log one that cannot be carried out."""
        try:
            order = _order(message)
        except InvalidInputError as error:
            _log.error("the coordinator sent an invalid order to measure: %s", _shown(error))
            return
        if len(self._orders) >= _MOST_ORDERS:
            _log.error("an order to measure %r is dropped: too many are waiting", order.workload.name)
            return
        self._orders.append(order)
        self._changed.set()

    async def next(self) -> tuple[Sequence[Announced], Sequence[ProfileOrder]]:
        """Wait for a request; return the workloads of all live runs and the new orders."""
        await self._changed.wait()
        self._changed.clear()
        orders, self._orders = self._orders, []
        return self._announced, orders

    def repeat(self) -> None:
        """Make `next` return the announced workloads once more, for a device that was prepared again."""
        if self._announced or self._orders:
            self._changed.set()


def _measured(message: session_pb2.WorkloadsAnnounced) -> dict[str, list[MeasuredUnit]]:
    """Return other devices' measurements by workload; log and leave out those that are invalid."""
    found: dict[str, list[MeasuredUnit]] = {}
    for each in message.measured[: _MOST_ANNOUNCED * _MOST_UNITS]:
        units = found.setdefault(each.workload, [])
        if len(units) < _MOST_UNITS:
            try:
                units.append(MeasuredUnit(each.board[:MAX_ID_CHARACTERS], measured_from_messages(each.modes)))
            except InvalidInputError as error:
                _log.error("the coordinator sent invalid measurements of another device: %s", _shown(error))
    return found


def _order(message: session_pb2.ProfileOrder) -> ProfileOrder:
    _, most = PROFILE_MODES
    if not 1 <= message.modes <= most:
        raise InvalidInputError(f"modes must be 1 to {most:,}, not {message.modes:,}")
    workload = workload_from_message(message.workload)
    synthetic = message.synthetic or workload.name
    if synthetic not in SHIPPED:
        # Only the owner of the device may name a function to import: the agent runs as root.
        raise InvalidInputError(
            f"{plain_text(synthetic, _MAX_SHOWN)!r} is not a workload that ships with the agent: use one of"
            f" {', '.join(SHIPPED)}"
        )
    return ProfileOrder(workload, synthetic, message.modes)


def _shown(error: InvalidInputError) -> str:
    return plain_text(str(error), MAX_REASON_LENGTH)
