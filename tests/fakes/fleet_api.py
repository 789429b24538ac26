"""Flower's Fleet API as a SuperNode's client sees it, without a network: a SuperLink that can forget its SuperNodes."""

from __future__ import annotations

import json
from itertools import count
from typing import Any, TypeVar

import httpx
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    RegisterNodeFleetRequest,
    RegisterNodeFleetResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import ApiErrorCode

from tests.fakes.served import CertifiedFleet
from wattfleet.common.clock import VirtualClock
from wattfleet.flower.enrolment_header import HEADER, NOT_ENROLLED
from wattfleet.flower.supernode.fleet_client import EnrolledClient, SteadyClient

KEY = b"key"
ACTIVATE = ActivateNodeRequest(public_key=KEY, heartbeat_interval=30)
Client = TypeVar("Client", bound=SteadyClient)


class SuperLink(httpx.BaseTransport):
    """A SuperLink that knows some keys, in memory.

    Attributes:
        registered: node id of each key.
        enrolled: the keys that its list of enrolled SuperNodes holds; None if it has no list.
        registers_itself: whether a SuperNode registers its own key, as without node authentication.
        unregistered: the keys that were unregistered.
        accepts_heartbeats: whether heartbeats are accepted.
        errors: statuses that the next requests are answered with.
        paths: the paths of the requests.
        seen: node id of each accepted request.
    """

    def __init__(self, *keys: bytes, enrolled: set[bytes] | None = None, registers_itself: bool = False) -> None:
        self._ids = count(7)
        self.registered = {key: next(self._ids) for key in keys}
        self.enrolled = enrolled
        self.registers_itself = registers_itself
        self.unregistered: set[bytes] = set()
        self.accepts_heartbeats = True
        self.errors: list[int] = []
        self.paths: list[str] = []
        self.seen: list[int] = []

    def restart(self) -> None:
        self.registered.clear()

    def register(self, key: bytes) -> int:
        self.registered[key] = next(self._ids)
        return self.registered[key]

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path.rpartition("/")[2]
        self.paths.append(path)
        if self.errors and (status := self.errors.pop(0)):
            return httpx.Response(status)
        content = request.read()
        if path == "register-node":
            return self._register(RegisterNodeFleetRequest.FromString(content).public_key)
        if path == "activate-node":
            key = ActivateNodeRequest.FromString(content).public_key
            if key in self.registered:
                return _accepted(ActivateNodeResponse(node_id=self.registered[key]))
            return self._refused(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)
        if path == "deactivate-node":
            node_id = DeactivateNodeRequest.FromString(content).node_id
        else:
            node_id = PullMessagesRequest.FromString(content).node.node_id
        if node_id not in self.registered.values():
            return httpx.Response(401, headers=self._headers())
        self.seen.append(node_id)
        if path == "send-node-heartbeat":
            return _accepted(SendNodeHeartbeatResponse(success=self.accepts_heartbeats))
        return _accepted(PullMessagesResponse())

    def _register(self, key: bytes) -> httpx.Response:
        if not self.registers_itself:
            return self._refused(ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED)
        if key in {*self.registered, *self.unregistered}:
            return self._refused(ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE)
        return _accepted(RegisterNodeFleetResponse(node_id=self.register(key)))

    def _refused(self, code: int) -> httpx.Response:
        return httpx.Response(412, text=json.dumps({"code": code, "detail": "refused"}), headers=self._headers())

    def _headers(self) -> dict[str, str]:
        return {HEADER: NOT_ENROLLED} if self.enrolled is not None and KEY not in self.enrolled else {}


def _accepted(message: Any) -> httpx.Response:
    return httpx.Response(200, content=message.SerializeToString())


def using(client: Client, superlink: SuperLink) -> Client:
    client._client = httpx.Client(transport=superlink)  # noqa: SLF001 - Flower's class has no seam for it
    return client


def enrolled_client(fleet: CertifiedFleet, superlink: SuperLink, clock: VirtualClock | None = None) -> EnrolledClient:
    return using(client_of(fleet, clock=clock), superlink)


def plain_client(superlink: SuperLink) -> SteadyClient:
    """The client of a SuperNode without a key of its own, which has registered and activated itself."""
    client = using(SteadyClient("http://localhost:1", clock=VirtualClock()), superlink)
    client.RegisterNode(RegisterNodeFleetRequest(public_key=KEY))
    client.ActivateNode(ACTIVATE)
    return client


def pull(client: SteadyClient, node_id: int = 7) -> None:
    """Request messages as Flower does: always under the node id that it got first."""
    client.PullMessages(PullMessagesRequest(node=Node(node_id=node_id)))


def client_of(fleet: CertifiedFleet, address: str = "localhost:1", clock: VirtualClock | None = None) -> EnrolledClient:
    return EnrolledClient(address, fleet.authority.folder / "trusted.pem", clock=clock or VirtualClock())
