"""How Flower's nodes are paired with their devices: a SuperNode may not reach the agent of the device that it names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class PairedDevices:
    """The devices of some nodes.

    Attributes:
        nodes: device id -> the node by which it can train.
        unpaired: device id -> why it cannot train by any of these nodes, with the remedy.
    """

    nodes: Mapping[str, int]
    unpaired: Mapping[str, str]


@dataclass
class NodePairings:
    """What is known of the pairing of each node.

    Attributes:
        problems: node id -> why it cannot train on its device, with the remedy; empty if the device's agent has
            answered it. Nodes that were not checked are absent.
        connected_at: node id -> when a Flower app last had it connected.
    """

    problems: dict[int, str] = field(default_factory=dict)
    connected_at: dict[int, datetime] = field(default_factory=dict)

    def copy(self) -> NodePairings:
        """An independent copy."""
        return NodePairings(self.problems.copy(), self.connected_at.copy())

    def note(self, node_id: int, problem: str | None) -> None:
        """Note what a node has told; None if it was not checked."""
        if problem is None:
            self.problems.pop(node_id, None)
        else:
            self.problems[node_id] = problem

    def connected(self, node_ids: Iterable[int], at: datetime) -> None:
        """Note that a Flower app has nodes connected."""
        self.connected_at.update(dict.fromkeys(node_ids, at))

    def keep(self, node_ids: Mapping[int, str]) -> None:
        """Forget all but some nodes."""
        self.problems = {node: problem for node, problem in self.problems.items() if node in node_ids}
        self.connected_at = {node: at for node, at in self.connected_at.items() if node in node_ids}

    def paired(self, devices: Mapping[int, str]) -> PairedDevices:
        """The devices that can train by one of some connected nodes.

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
        """As `problems`, and nodes whose device another connected SuperNode names as well.

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
    """Why a device cannot train that several connected SuperNodes name."""
    return (
        f"{count} connected SuperNodes name it: give each SuperNode its own device-id. A SuperNode that was restarted"
        " is listed twice for about a minute"
    )
