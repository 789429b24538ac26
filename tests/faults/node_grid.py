"""Flower's grid over a fleet's devices, without Flower's network: each node trains when its message is pushed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from itertools import count
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict

from tests.fakes.flower_in_process import trained
from tests.fakes.one_run_grid import OneRunGrid
from tests.faults.device import Device
from wattfleet_proto.assignment import DEVICE_ID_KEY, IDENTIFY_KEY, RECORD_KEY, RoundAssignment
from wattfleet_simulation.flower_task import be_task

_RUN_IDS = count(1)  # two fleets in one process need different ones
_FIRST_NODE = 2**63 + 5


class NodeGrid(OneRunGrid):
    """A grid whose nodes are devices on an event loop; it is used from another thread.

    Attributes:
        gone: devices whose nodes are gone: they do not reply, and are not listed.
        pushed_s: when the latest messages were pushed, on the monotonic clock.
    """

    def __init__(self, devices: Iterable[Device], loop: asyncio.AbstractEventLoop) -> None:
        run_id = next(_RUN_IDS)
        super().__init__(run_id, "wattfleet/faults")
        be_task(run_id, node_id=1)
        self.gone: set[str] = set()
        self.pushed_s = 0.0
        self._loop = loop
        self._devices = {_FIRST_NODE + number: device for number, device in enumerate(devices)}
        self._trainings: dict[str, tuple[Device, Message, Future[bool] | None]] = {}

    def get_node_ids(self) -> Iterable[int]:
        return [node_id for node_id, device in self._devices.items() if device.device_id not in self.gone]

    def _send(self, messages: list[Message]) -> None:
        self.pushed_s = time.monotonic()
        for message in messages:
            device = self._devices[message.metadata.dst_node_id]
            self._trainings[message.metadata.message_id] = device, message, self._begun(device, message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = []
        for message_id in message_ids:
            device, message, training = self._trainings.get(message_id, (None, None, None))
            if device is None or message is None or device.device_id in self.gone:
                continue
            if training is None:
                identity = RecordDict({RECORD_KEY: ConfigRecord({DEVICE_ID_KEY: device.device_id})})
                replies.append(Message(identity, reply_to=message))
            elif not training.done():
                continue
            elif training.result():
                replies.append(trained(message))
            else:
                replies.append(Message(Error(2, device.trainings[-1].stopped), reply_to=message))
            del self._trainings[message_id]
        return replies

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _begun(self, device: Device, message: Message) -> Future[bool] | None:
        """The training of a message; None if the message asks which device the node is."""
        record: Mapping[str, Any] = message.content[RECORD_KEY]
        if IDENTIFY_KEY in record:
            return None
        assignment = RoundAssignment.from_record(record)
        return asyncio.run_coroutine_threadsafe(device.train(assignment.plan_id), self._loop)
