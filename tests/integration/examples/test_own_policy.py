"""The example of a custom policy: installed as a package, and used by a coordinator by its name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.server import policy_of
from coordinator.settings import PolicySettings
from tests.fakes.fronts import front
from wattfleet.budgets import Supplies, Supply
from wattfleet.planning import SITE, Allowance, Offer, plan_round
from wattfleet.planning.policies import POLICIES, policy_names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "own_policy"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as pip installs it: its module on the path, its entry points in its metadata."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    sys.modules.pop("least_energy", None)


def test_the_coordinator_selects_by_the_installed_policy(installed: None) -> None:
    assert policy_names() == (*POLICIES, "least-energy")
    policy = policy_of(PolicySettings(name="least-energy", clients=2))
    offers = [
        Offer("hungry", front((10.0, 60.0)), 2.0),
        Offer("thrifty", front((30.0, 8.0)), 2.0),
        Offer("between", front((15.0, 30.0), (20.0, 20.0)), 2.0),
    ]
    plan = plan_round(offers, policy, Allowance(Supplies((Supply(SITE, None),)), {SITE: 200.0}, {}), 1.0, 1)
    reasons = {decision.device_id: (decision.selected, decision.reason) for decision in plan.decisions}
    assert [device for device, (selected, _) in reasons.items() if selected] == ["between", "thrifty"]
    assert reasons["thrifty"][1].startswith("selected: among the 2 devices with the least energy for an epoch")
    assert "needs 0.60 kJ for an epoch, more than those selected" in reasons["hungry"][1]
