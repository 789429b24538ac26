"""Identifies the Jetson and its software."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError

_COMPATIBLE = "/proc/device-tree/compatible"
_MODEL = "/proc/device-tree/model"
_RELEASE = "/etc/nv_tegra_release"

# The part number of the module, or that of the kit if an old device tree names only that.
_KINDS = (
    (re.compile(r"p3701-"), "agx-orin"),
    (re.compile(r"p3767-000[0-2]"), "orin-nx"),
    (re.compile(r"p3767-000[3-5]"), "orin-nano"),
    (re.compile(r"p2888-|p2972-"), "xavier-agx"),
    (re.compile(r"p3448-|p3450-|jetson-nano"), "nano"),
)
_JETPACK_OF_L4T = {32: 4, 34: 5, 35: 5, 36: 6, 38: 7}


@dataclass(frozen=True)
class JetsonIdentity:
    """A Jetson and its software.

    Attributes:
        kind: kind of board, such as `agx-orin`.
        model: the board's own name.
        l4t: release of Jetson Linux, such as `35.4.1`; None if unknown.
        jetpack: major version of JetPack; None if unknown.
    """

    kind: str
    model: str
    l4t: str | None
    jetpack: int | None


def is_jetson(tree: Tree) -> bool:
    """Whether the device tree names an NVIDIA Tegra."""
    return "nvidia,tegra" in _text_of(tree, _COMPATIBLE)


def identify(tree: Tree) -> JetsonIdentity:
    """Identify the board and its software.

    Raises:
        InvalidInputError: it is not a Jetson, or its power rails are unknown.
    """
    compatible = _text_of(tree, _COMPATIBLE)
    if not is_jetson(tree):
        raise InvalidInputError(f"not a Jetson: {_COMPATIBLE} does not name an NVIDIA Tegra")
    kind = next((kind for pattern, kind in _KINDS if pattern.search(compatible)), None)
    if kind is None:
        raise InvalidInputError(
            f"{_COMPATIBLE}: unknown board {', '.join(compatible.split())}; supported are"
            f" {', '.join(kind for _, kind in _KINDS)}"
        )
    release = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", _text_of(tree, _RELEASE))
    return JetsonIdentity(
        kind=kind,
        model=_text_of(tree, _MODEL) or "unnamed",
        l4t=f"{release[1]}.{release[2]}" if release else None,
        jetpack=_JETPACK_OF_L4T.get(int(release[1])) if release else None,
    )


def _text_of(tree: Tree, path: str) -> str:
    """Return a file's text, with spaces for NULs; empty if it cannot be read."""
    try:
        return tree.read(path).replace("\0", " ")
    except OSError:
        return ""
