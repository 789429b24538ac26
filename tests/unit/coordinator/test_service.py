"""The coordinator as a service: its settings, its installation, and its garbage collection."""

from __future__ import annotations

import gc
import importlib
import json
import shutil
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path

import pytest
from click.testing import Result

from coordinator.cli.commands import ServeCommand
from coordinator.identity.authority_folder import AuthorityFolder
from coordinator.server import policy_of, selection_of, serve_many, site_of
from coordinator.settings import (
    CoordinatorSettings,
    PolicySettings,
    SelectionSettings,
    SiteSettings,
)
from coordinator.systemd.installation import SETTINGS_PATH, STATE_DIRECTORY, UNIT_PATH, USER, USER_PATH
from tests.fakes.served import command
from wattfleet.common.settings.model import as_toml, keys_of, load
from wattfleet.common.systemd import InstalledCode
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Selection
from wattfleet.core.planning.policies import POLICIES, AllDevices, Deadline, FastestK, Policy, Progress

# --- Settings ---------------------------------------------------------------------------------------------------------


def test_every_policy_can_be_chosen_and_the_default_is_progress() -> None:
    for name in POLICIES:
        settings = PolicySettings.model_validate({"name": name, "deadline_s": 60.0 if name == "deadline" else None})
        assert policy_of(settings).name == name
    assert policy_of(PolicySettings()) == Progress()
    with pytest.raises(InvalidInputError, match="unknown policy 'best': choose one of fastest-k, "):
        policy_of(PolicySettings(name="best"))


def test_a_policy_gets_its_parameters() -> None:
    assert policy_of(PolicySettings(name="fastest-k", clients=2)) == FastestK(2)
    with pytest.raises(InvalidInputError, match="policy 'all' does not take tiers"):
        policy_of(PolicySettings(name="all", tiers=3))


def test_a_site_needs_exactly_one_of_a_budget_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    file.write_text("[supplies.house]\nbudget = { watts = 40.0 }")
    assert site_of(SiteSettings(budget_w=3.0)).supplies.names == ("site",)
    assert site_of(SiteSettings(file=file)).supplies.names == ("house",)
    for settings in (SiteSettings(), SiteSettings(budget_w=3.0, file=file)):
        with pytest.raises(InvalidInputError, match="^pass exactly one of --site-budget-w, --site-file$"):
            site_of(settings)


@pytest.mark.parametrize("policy", [Progress(), AllDevices(), Deadline(60.0)])
def test_over_selection_needs_a_policy_with_a_number_of_devices(policy: Policy) -> None:
    settings = SelectionSettings(over_selection=0.2)
    with pytest.raises(InvalidInputError, match=f"policy '{policy.name}' determines the number of devices itself"):
        selection_of(settings, policy)
    for counted in (Progress(count=4), FastestK()):
        assert selection_of(settings, counted) == Selection(over_selection=0.2)


@pytest.mark.parametrize(
    ("option", "key", "value", "message"),
    [
        ("--keep-days", "store.keep_days", 0.0, "--keep-days must be above 0, not 0"),
        ("--profile-modes", "profiling.modes", 4, "--profile-modes must be 5 or more, not 4"),
        ("--seed", "policy.seed", -1, "--seed must be 0 or more, not -1"),
    ],
)
def test_a_value_out_of_range_is_refused(option: str, key: str, value: float, message: str) -> None:
    assert option in {each.option for each in keys_of(CoordinatorSettings) if each.path == key}
    with pytest.raises(InvalidInputError) as refused:
        load(CoordinatorSettings, given={key: (value, option)})
    assert str(refused.value) == message


def test_the_printed_defaults_are_read_back_as_the_defaults(tmp_path: Path) -> None:
    loaded = load(CoordinatorSettings)
    path = tmp_path / "coordinator.toml"
    path.write_text(as_toml(loaded, "wattfleet coordinator serve"))
    assert load(CoordinatorSettings, path).settings == loaded.settings == CoordinatorSettings()


def test_every_setting_is_described_and_the_command_reads_this_model() -> None:
    for key in keys_of(CoordinatorSettings):
        assert key.description.endswith("."), key.path
        assert key.name.endswith("_s") == (key.unit == "s") or key.unit == "1/s", key.path
    assert ServeCommand.settings_model() is CoordinatorSettings
    assert importlib.import_module("coordinator.settings").CoordinatorSettings is CoordinatorSettings


# --- Service installation ---------------------------------------------------------------------------------------------
# `wattfleet coordinator install` and `uninstall`: what they write, refuse, print and keep.

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
    monkeypatch.setattr("wattfleet.common.systemd.running_code", lambda: code)
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


# --- Garbage collection -----------------------------------------------------------------------------------------------
# Garbage collection in a long-running service: objects that survive a collection are frozen, and garbage is freed.


class Ring:
    """An object that refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    switch_s, callbacks = sys.getswitchinterval(), list(gc.callbacks)
    yield
    sys.setswitchinterval(switch_s)
    gc.callbacks[:] = callbacks


def test_what_outlives_a_collection_is_left_out_of_the_next_and_new_garbage_goes() -> None:
    serve_many()
    session = Ring()
    gc.collect()
    assert not any(each is session for each in gc.get_objects()), "otherwise each collection would visit it"
    garbage = weakref.ref(Ring())
    gc.collect()
    assert garbage() is None
