"""`wattfleet coordinator install` and `uninstall`: what they write, refuse, print and keep."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import Result

from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.systemd.installation import SETTINGS_PATH, STATE_DIRECTORY, UNIT_PATH, USER, USER_PATH
from tests.fakes.shell import command
from wattfleet.errors import InvalidInputError
from wattfleet_io.systemd import InstalledCode

Commands = Callable[..., Result]
OF_THE_AGENT_ALONE = {
    "ReadWritePaths",  # the agent writes to the kernel's knobs
    "DevicePolicy",  # the coordinator's PrivateDevices hides all devices
    "DeviceAllow",
    "RuntimeDirectory",
    "RuntimeDirectoryMode",
}


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Run a command on an image in `tmp_path`, as if from an installation that only root can write to."""
    code = InstalledCode(program=Path("/bin/sh"), interpreter=(), imported=())
    monkeypatch.setattr("wattfleet_io.systemd.running_code", lambda: code)
    return lambda *words: command(*words, "--root", str(tmp_path), columns=200)


def under(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def test_a_dry_run_prints_unit_settings_and_steps_and_writes_nothing(image: Commands, tmp_path: Path) -> None:
    done = image("install", "--site-budget-w", "120", "--dry-run")
    assert done.exit_code == 0
    assert f"write {under(tmp_path, UNIT_PATH)}" in done.output
    assert "ExecStart=/bin/sh coordinator serve --config /etc/wattfleet/coordinator.toml" in done.output
    assert "budget_w = 120" in done.output
    assert "run systemctl enable wattfleet-coordinator.service" in done.output
    assert list(tmp_path.iterdir()) == []


def test_an_installation_is_removed_without_its_settings(image: Commands, tmp_path: Path) -> None:
    assert image("install", "--site-budget-w", "120.5", "--yes").exit_code == 0
    settings = under(tmp_path, SETTINGS_PATH)
    assert "budget_w = 120.5" in settings.read_text()
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600, "it may hold a password"
    assert under(tmp_path, USER_PATH).read_text().startswith(f"u {USER} ")
    settings.write_text(settings.read_text().replace("120.5", "90"))
    again = image("install", "--yes")
    assert f"keep {settings}" in again.output and "budget_w = 90" in again.output
    removed = image("uninstall", "--yes")
    assert f"remove {under(tmp_path, UNIT_PATH)}" in removed.output
    assert "systemctl disable --now wattfleet-coordinator.service" in removed.output
    assert not under(tmp_path, UNIT_PATH).exists() and settings.exists()
    assert "nothing to remove" in image("uninstall", "--yes").output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[server]\naddress = '127.0.0.1:1'", "the settings name no budget"),
        (
            "[site]\nbudget_w = 1\n[identity]\ndirectory = '/home/ann/ids'",
            "directory /home/ann/ids: is in a home",
        ),
        ("[site]\nfile = '/tmp/site.toml'", "site.file /tmp/site.toml: is in a home or temporary directory"),
        ("[site]\nbudget = 1", "unknown key 'budget' in"),
        (
            "[site]\nbudget_w = 1\n[server]\naddress = '0.0.0.0:7070'",
            "init --identity /var/lib/wattfleet-coord",
        ),
    ],
)
def test_settings_with_which_it_cannot_start_are_refused(image: Commands, tmp_path: Path, text: str, why: str) -> None:
    config = tmp_path / "given.toml"
    config.write_text(text)
    with pytest.raises(InvalidInputError, match=why):
        image("install", "--config", str(config), "--yes")
    assert list(tmp_path.iterdir()) == [config]


def test_other_machines_are_served_once_the_authority_is_there(image: Commands, tmp_path: Path) -> None:
    words = ("install", "--site-budget-w", "120", "--address", "0.0.0.0:7070", "--dry-run")
    with pytest.raises(InvalidInputError, match="would be plaintext"):
        image(*words)
    folder = under(tmp_path, STATE_DIRECTORY) / "wattfleet-identity"
    AuthorityFolder.create(folder, (), datetime.now(timezone.utc))
    assert 'address = "0.0.0.0:7070"' in image(*words).output


def test_a_password_in_the_settings_is_not_shown(image: Commands, tmp_path: Path) -> None:
    config = tmp_path / "given.toml"
    config.write_text("[site]\nbudget_w = 1\n[store]\nlocation = 'postgresql://ann:hunter2@db/fleet'")
    for form in ((), ("--json",)):
        shown = image("install", "--config", str(config), "--dry-run", *form).output
        assert "hunter2" not in shown and "ann:***@db" in shown
    assert json.loads(shown)["commands"]


def _directives(unit: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.partition("[Service]")[2].partition("[Install]")[0].splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_the_unit_is_as_hardened_as_that_of_the_agent() -> None:
    own = _directives(files("coordinator.systemd").joinpath("wattfleet-coordinator.service").read_text())
    agents = _directives(files("edge_agent.systemd").joinpath("wattfleet-agent.service").read_text())
    assert set(agents) - set(own) - OF_THE_AGENT_ALONE <= {"EnvironmentFile", "ExecStopPost", "KillMode"}
    for name in set(own) & set(agents):
        if name.startswith(("Protect", "Private", "Restrict", "Lock", "NoNew", "Capability")) and name != "RestartSec":
            assert own[name] == agents[name], name
    assert own["PrivateDevices"] == ["yes"] and own["User"] != ["root"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong_with_the_unit(image: Commands, tmp_path: Path) -> None:
    image("install", "--site-budget-w", "120", "--yes")
    unit = under(tmp_path, UNIT_PATH)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    about_unit = [line for line in checked.stderr.splitlines() if "wattfleet-coordinator" in line]
    assert (checked.returncode, about_unit) == (0, [])
