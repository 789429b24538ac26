"""The devices of a simulated fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wattfleet.core.errors import InvalidInputError

DEFAULT_FLEET = "agx-orin:2,orin-nano:2,orin-nx:1,xavier-agx:1"

_MAX_DEVICES = 32


@dataclass(frozen=True)
class FleetDevice:
    """One device of the fleet.

    Attributes:
        device_id: its name.
        spec: its virtual board, as for `wattfleet agent run --device`.
        seed: random seed of the board's deviation and noise.
        partition: index of its part of the data.
        duty: the requests that it answers, as for `wattfleet agent run --simulated-duty`; None if it answers none.
    """

    device_id: str
    spec: str
    seed: int
    partition: int
    duty: str | None = None


def device_specs(kinds: str, csv_files: Sequence[Path]) -> list[tuple[str, str]]:
    """Return device ids and specs for a fleet such as `agx-orin:2,orin-nx`, plus one device for every CSV file.

    Raises:
        InvalidInputError: a count is not a number, a kind is listed twice, or there are no or too many devices.
    """
    specs: list[tuple[str, str]] = []
    listed = [item.strip() for item in kinds.split(",") if item.strip()]
    names = [item.partition(":")[0] for item in listed]
    if len(set(names)) != len(names):
        raise InvalidInputError(f"--devices {kinds!r} lists a kind twice: write it once, with a count")
    for item, kind in zip(listed, names, strict=True):
        count = item.partition(":")[2] or "1"
        if not count.isdecimal():
            raise InvalidInputError(f"--devices {item!r}: write kind:count, such as agx-orin:2")
        specs += [(f"{kind}-{k}", f"simulated:{kind}") for k in range(int(count))]
    specs += [(f"replay-{k}-{path.stem}", f"replay:{path}") for k, path in enumerate(csv_files)]
    if not 1 <= len(specs) <= _MAX_DEVICES:
        raise InvalidInputError(
            f"a fleet on one machine has 1 to {_MAX_DEVICES} devices, not {len(specs)}: change --devices"
        )
    return specs
