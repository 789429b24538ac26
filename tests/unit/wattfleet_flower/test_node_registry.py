"""A SuperLink's registered SuperNodes follow the enrolled ones."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest
from flwr.proto.control_pb2 import ListNodesResponse, RegisterNodeResponse, UnregisterNodeResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.error import ApiErrorCode, FlowerError

from wattfleet_flower.superlink.access import NodeRegistry, flower_key
from wattfleet_identity.supernode_folder import SuperNodeKey


class FlowersNodes:
    """SuperNodes as Flower's SuperLink keeps them: an unregistered key cannot be used again."""

    def __init__(self) -> None:
        self.nodes: list[NodeInfo] = []
        self.calls = 0

    def ListNodes(self, request: Any) -> ListNodesResponse:  # noqa: N802 - named by Flower
        return ListNodesResponse(nodes_info=self.nodes)

    def RegisterNode(self, request: Any) -> RegisterNodeResponse:  # noqa: N802 - named by Flower
        self.calls += 1
        if any(node.public_key == request.public_key for node in self.nodes):
            raise refused(ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE)
        number = len(self.nodes) + 1
        self.nodes.append(
            NodeInfo(node_id=number, status="registered", public_key=request.public_key, name=request.name)
        )
        return RegisterNodeResponse(node_id=number)

    def UnregisterNode(self, request: Any) -> UnregisterNodeResponse:  # noqa: N802 - named by Flower
        self.calls += 1
        found = [node for node in self.nodes if node.node_id == request.node_id and node.status != "unregistered"]
        if not found:
            raise refused(ApiErrorCode.NODE_NOT_FOUND)
        found[0].status = "unregistered"
        return UnregisterNodeResponse()

    @property
    def names(self) -> list[str]:
        return [node.name for node in self.nodes if node.status != "unregistered"]


def refused(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://localhost")
    body = FlowerError(code, "internal").to_json("refused")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(409, text=json.dumps(body)))


def test_missing_ones_are_registered_and_others_unregistered() -> None:
    flowers = FlowersNodes()
    registry = NodeRegistry(flowers)
    assert registry.synchronise({b"a": "orin-1", b"b": "orin-2"}) == 0
    assert flowers.names == ["orin-1", "orin-2"]
    assert registry.synchronise({b"b": "orin-2", b"c": "orin-3"}) == 0
    assert flowers.names == ["orin-2", "orin-3"]
    before = flowers.calls
    registry.synchronise({b"b": "orin-2", b"c": "orin-3"})
    assert flowers.calls == before


def test_a_key_that_was_unregistered_needs_a_new_enrolment(caplog: pytest.LogCaptureFixture) -> None:
    flowers = FlowersNodes()
    registry = NodeRegistry(flowers)
    registry.synchronise({b"a": "orin-1"})
    registry.synchronise({})
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING, "flwr"):
        assert registry.synchronise({b"a": "orin-1", b"b": "orin-2"}) == 1
        assert registry.synchronise({b"a": "orin-1", b"b": "orin-2"}) == 1
    assert flowers.names == ["orin-2"]
    assert [record.getMessage() for record in caplog.records if "Enrol the device" in record.getMessage()] != []
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_a_key_of_openssh_is_what_flowers_own_command_sends(tmp_path: Any) -> None:
    from flwr.cli.supernode.register import try_load_public_key

    key = SuperNodeKey.create()
    file = tmp_path / "node.pub"
    file.write_bytes(key.public)
    assert flower_key(key.public.decode()) == try_load_public_key(file)
