"""How Flower's nodes are paired with their devices: a SuperNode may not reach the agent of the device that it names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class PairedDevices:
    """The devices of the given nodes.

    Attributes:
        nodes: device id -> the node through which it can train.
        unpaired: device id -> why it cannot train through any of these nodes, with the remedy.
    """

    nodes: Mapping[str, int]
    unpaired: Mapping[str, str]


@dataclass
class NodePairings:
    """The known pairing of each node.

    Attributes:
        problems: node id -> why it cannot train on its device, with the remedy; empty if the node reached the device's
            agent. Nodes that were not checked are absent.
        connected_at: node id -> when a Flower app last reported it as connected.
    """

    problems: dict[int, str] = field(default_factory=dict)
    connected_at: dict[int, datetime] = field(default_factory=dict)

    def note(self, node_id: int, problem: str | None) -> None:
        """Record a node's check result; None if it was not checked."""
        if problem is None:
            self.problems.pop(node_id, None)
        else:
            self.problems[node_id] = problem

    def connected(self, node_ids: Iterable[int], at: datetime) -> None:
        """Record that a Flower app reported the given nodes as connected."""
        self.connected_at.update(dict.fromkeys(node_ids, at))

    def keep(self, node_ids: Mapping[int, str]) -> None:
        """Forget all nodes except the given ones."""
        self.problems = {node: problem for node, problem in self.problems.items() if node in node_ids}
        self.connected_at = {node: at for node, at in self.connected_at.items() if node in node_ids}

    def paired(self, devices: Mapping[int, str]) -> PairedDevices:
        """Return the devices that can train through one of the connected nodes.

        Args:
            devices: node id -> device id.
        """
        nodes: dict[str, int] = {}
        unpaired = {device: problem for node, device in devices.items() if (problem := self.problems.get(node))}
        counts: dict[str, int] = {}
        for node, device in devices.items():
            if not self.problems.get(node):
                nodes[device] = node
                counts[device] = counts.get(device, 0) + 1
        for device, count in counts.items():
            unpaired.pop(device, None)
            if count > 1:
                del nodes[device]
                unpaired[device] = shared_device(count)
        return PairedDevices(nodes, unpaired)

    def all_problems(self, devices: Mapping[int, str]) -> dict[int, str]:
        """Return `problems`, plus the nodes whose device another connected SuperNode names as well.

        Args:
            devices: device id of every known node.
        """
        together: dict[tuple[str, datetime], list[int]] = {}
        for node, device in devices.items():
            if node in self.connected_at and not self.problems.get(node):
                together.setdefault((device, self.connected_at[node]), []).append(node)
        shared = {node: shared_device(len(nodes)) for nodes in together.values() if len(nodes) > 1 for node in nodes}
        return self.problems | shared


def shared_device(count: int) -> str:
    """The reason why a device cannot train if several connected SuperNodes name it."""
    return (
        f"{count} connected SuperNodes name it: give each SuperNode its own device-id. A SuperNode that was restarted"
        " is listed twice for about a minute"
    )
