"""Registers exactly the SuperNodes with the SuperLink that are enrolled in the fleet.

All changes go through Flower's Control API.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import Protocol

import httpx
from cryptography.hazmat.primitives import serialization
from flwr.common import log
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListNodesResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    UnregisterNodeRequest,
    UnregisterNodeResponse,
)
from flwr.supercore.error import ApiErrorCode, FlowerError

UNREGISTERED = "unregistered"


class Control(Protocol):
    """The part of Flower's Control API that is used here."""

    def ListNodes(self, request: ListNodesRequest) -> ListNodesResponse:  # noqa: N802 - named by Flower
        """List all SuperNodes, unregistered ones included."""
        ...

    def RegisterNode(self, request: RegisterNodeRequest) -> RegisterNodeResponse:  # noqa: N802 - named by Flower
        """Register a SuperNode."""
        ...

    def UnregisterNode(self, request: UnregisterNodeRequest) -> UnregisterNodeResponse:  # noqa: N802 - named by Flower
        """Unregister a SuperNode. Its key can never be registered again."""
        ...


def flower_key(openssh: str) -> bytes:
    """Convert a public key from an OpenSSH line to PEM, the format of Flower's API."""
    return serialization.load_ssh_public_key(openssh.encode()).public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


@dataclass
class NodeRegistry:
    """Registers and unregisters SuperNodes.

    Args:
        control: Flower's Control API.
    """

    control: Control
    _refused: set[bytes] = field(default_factory=set)

    def synchronise(self, enrolled: Mapping[bytes, str]) -> int:
        """Register the enrolled SuperNodes that are missing, and unregister all others.

        Args:
            enrolled: device id of each public key; keys in PEM.

        Returns:
            How many SuperNodes could not be registered or unregistered. Each is logged once.

        Raises:
            httpx.HTTPError: the SuperLink does not answer, or refuses to list its SuperNodes.
        """
        nodes = self.control.ListNodes(ListNodesRequest()).nodes_info
        registered = {node.public_key: node for node in nodes if node.status != UNREGISTERED}
        failed = 0
        for key, node in registered.items():
            if key not in enrolled:
                failed += not self._unregister(node.node_id, node.name)
        for key, device_id in enrolled.items():
            if key not in registered:
                failed += not self._register(key, device_id)
        return failed

    def _register(self, key: bytes, device_id: str) -> bool:
        try:
            self.control.RegisterNode(RegisterNodeRequest(public_key=key, name=device_id))
        except httpx.HTTPStatusError as error:
            found = FlowerError.from_json(error.response.text)
            if key not in self._refused:
                self._refused.add(key)
                reason = str(error) if found is None else found.message
                if found is not None and found.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                    reason = "its key was unregistered before, so Flower rejects it. Enrol the device with a new invite"
                log(WARNING, "The SuperNode of %s cannot be registered: %s", device_id, reason)
            return False
        log(INFO, "The SuperNode of %s is registered", device_id)
        return True

    def _unregister(self, node_id: int, name: str) -> bool:
        try:
            self.control.UnregisterNode(UnregisterNodeRequest(node_id=node_id))
        except httpx.HTTPStatusError as error:
            found = FlowerError.from_json(error.response.text)
            if found is not None and found.code == ApiErrorCode.NODE_NOT_FOUND:
                return True
            log(WARNING, "The SuperNode of %s cannot be unregistered: %s", name or node_id, error)
            return False
        log(INFO, "The SuperNode of %s is unregistered, because it is no longer enrolled", name or node_id)
        return True
