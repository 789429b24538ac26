"""A fleet in its own network namespace, whose loopback device has a queueing discipline during the fault.

unshare --net --map-root-user python -m tests.faults.in_namespace FOLDER netem delay 500ms
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from coordinator.settings import CoordinatorSettings, SiteSettings
from tests.faults.faults import Fault, through

_DEVICE = ("dev", "lo", "root")


def main(folder: Path, discipline: list[str]) -> None:
    """Run the fleet through the fault, and print the outcome."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)

    def begin(*_: object) -> None:
        subprocess.run(["tc", "qdisc", "add", *_DEVICE, *discipline], check=True)

    def end(*_: object) -> None:
        subprocess.run(["tc", "qdisc", "del", *_DEVICE], check=True)

    fault = Fault(" ".join(discipline), begin, end=end)
    config = CoordinatorSettings(site=SiteSettings(budget_w=100.0))
    outcome = asyncio.run(through(fault, config, folder, devices=3))
    everybody = ["orin-0", "orin-1", "orin-2"]
    *_, last = outcome.observed.values()
    assert last == everybody, last
    print(f"outcome: {outcome}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
