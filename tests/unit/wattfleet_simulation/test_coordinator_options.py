"""A simulated fleet starts its coordinator with the options of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from wattfleet.errors import InvalidInputError
from wattfleet_simulation.fleet import FleetParts
from wattfleet_simulation.settings import DEFAULT_APPS, SimulatedDevice, SimulationSettings


class StartedError(Exception):
    """Raised instead of starting a process."""


class NoProcesses:
    """A starter that raises an error with the command instead of running it."""

    def start(self, name: str, command: Sequence[str], *_: Any) -> None:
        raise StartedError(" ".join(command))


def settings(policy: str, deadline_s: float | None, clients: int | None = None) -> SimulationSettings:
    return SimulationSettings(
        devices=[SimulatedDevice("nano-0", "simulated:orin-nano", 0, 0, None)],
        apps=DEFAULT_APPS,
        rounds=1,
        site_budget_w=50.0,
        profile_modes=5,
        policy=policy,
        clients=clients,
        seed=0,
        reference="agx_orin_resnet18",
        metrics_port=0,
        deadline_s=deadline_s,
    )


def command_of(simulated: SimulationSettings, scratch: Path) -> str:
    with pytest.raises(StartedError) as started:
        FleetParts(NoProcesses(), simulated, scratch).start_coordinator("127.0.0.1:1")  # type: ignore[arg-type]
    return str(started.value)


def test_the_policy_and_its_options_reach_the_coordinator(tmp_path: Path) -> None:
    assert "--policy deadline" in (command := command_of(settings("deadline", 62.5), tmp_path / "a"))
    assert command.endswith("--deadline-s 62.5") and "--clients" not in command
    other = command_of(settings("fastest-k", None, clients=2), tmp_path / "b")
    assert "--clients 2" in other and "--deadline-s" not in other


def test_a_deadline_is_asked_for_before_anything_starts() -> None:
    with pytest.raises(InvalidInputError, match="pass it as --deadline-s"):
        settings("deadline", None)
