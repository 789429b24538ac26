"""The agent as a service: what `wattfleet agent install` shows and does, and what its unit allows."""

import io
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from edge_agent.devices.jetson.programs import ProgramResult
from edge_agent.systemd.installation import (
    SETTINGS_PATH,
    UNIT_FILE,
    UNIT_PATH,
    InstallationError,
    ServiceSettings,
    installation,
)
from edge_agent.systemd.ownership import InstalledCode, running_code
from tests.edge_agent.jetson_boards import FAKED_BOARDS
from tests.edge_agent.jetson_tree import FakedJetson, open_sysfs
from wattfleet.errors import InvalidInputError

SETTINGS = ServiceSettings("auto", "jetson-1", "site.example:7070", 2000, "resnet18", 8)
PROGRAM = InstalledCode(Path(sys.executable))
UNIT = files("edge_agent.systemd").joinpath(UNIT_FILE).read_text()


def roots_own(path):
    """As if root alone had made it."""
    mode, *rest = os.stat(path)
    return os.stat_result([mode & ~0o022, *rest[:3], 0, *rest[4:]])


@pytest.fixture
def install(agent, tmp_path, monkeypatch):
    # Where the tests run, Wattfleet may be anyone's.
    monkeypatch.setattr(InstalledCode, "writable_by_others", lambda code, look_at: None)
    monkeypatch.setattr("edge_agent.systemd.installation._HIDDEN", ())

    def run(*arguments):
        return agent(
            *("install", "--coordinator", "site.example:7070", "--minibatches-per-epoch", 2000),
            *("--device-id", "jetson-1", "--root", tmp_path / "image", "--workload", "resnet18", *arguments),
        )

    return run


# --- what is done ---------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_all_and_does_nothing(install, tmp_path):
    ended = install("--dry-run")
    assert ended.code == 0
    for words in (UNIT_PATH, SETTINGS_PATH, "WATTFLEET_DEVICE_ID=jetson-1", "run groupadd --system --force wattfleet"):
        assert words in ended.out
    assert not (tmp_path / "image").exists()


def test_the_files_of_an_image_are_written_and_nothing_is_run(install, tmp_path):
    ended = install("--yes")
    assert ended.code == 0 and "run the commands on the device" in ended.err
    unit = (tmp_path / "image" / UNIT_PATH[1:]).read_text()
    assert "ExecStopPost=" in unit and "/opt/wattfleet" not in unit
    assert "WATTFLEET_COORDINATOR=site.example:7070\n" in (tmp_path / "image" / SETTINGS_PATH[1:]).read_text()


def test_nothing_is_done_without_a_yes(install, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    ended = install()
    assert ended.code == 1 and "Do this?" in ended.err
    assert not (tmp_path / "image").exists()


def test_what_would_be_replaced_is_said_beforehand(install):
    install("--yes")
    changes = {file["path"]: file["change"] for file in install("--dry-run", "--json").content["files"]}
    assert set(changes.values()) == {"leave as it is"}
    changes = {
        file["path"]: file["change"] for file in install("--dry-run", "--json", "--device", "nvpmodel").content["files"]
    }
    assert changes == {SETTINGS_PATH: "replace", UNIT_PATH: "leave as it is"}


def test_commands_run_in_order_and_stop_at_the_one_that_fails(monkeypatch):
    monkeypatch.setattr("edge_agent.systemd.installation._HIDDEN", ())
    ran = []

    def run(command, answer):
        ran.append(command[0] if command[0] != "systemctl" else command[1])
        return ProgramResult(1, "no D-Bus\n") if command[1] == "enable" else ProgramResult(0, "")

    with pytest.raises(InstallationError, match=f"systemctl enable {UNIT_FILE}: no D-Bus"):
        installation(SETTINGS, PROGRAM, roots_own).run_commands(run)
    assert ran == ["groupadd", "daemon-reload", "enable"]


def test_a_folder_that_cannot_be_written_is_named(install, tmp_path):
    (tmp_path / "image").write_text("")
    ended = install("--yes")
    assert ended.code == 1 and "install as root" in ended.err


@pytest.mark.parametrize(
    "program",
    [
        "/home/me/venv/bin/wattfleet",
        "/root/venv/bin/wattfleet",
        "/tmp/venv/bin/wattfleet",
        "/var/tmp/venv/bin/wattfleet",
    ],
)
def test_a_program_that_the_service_cannot_see_is_refused(program):
    with pytest.raises(InvalidInputError, match="whose owner would become root"):
        installation(SETTINGS, InstalledCode(Path(program)))


def test_a_program_that_is_not_there_is_refused():
    with pytest.raises(InvalidInputError, match="no such program"):
        installation(SETTINGS, InstalledCode(Path("/opt/absent/bin/wattfleet")))


@pytest.fixture
def program(tmp_path):
    made = tmp_path / "opt/wattfleet/bin/wattfleet"
    made.parent.mkdir(parents=True)
    made.write_text("")
    return made


def test_a_program_that_root_alone_may_write_is_accepted(program):
    assert InstalledCode(program).writable_by_others(roots_own) is None


@pytest.mark.parametrize("others", [{"st_uid": 1000}, {"st_mode": 0o40775}, {"st_mode": 0o41777}])
@pytest.mark.parametrize("level", range(4))
def test_a_program_that_a_user_may_replace_is_refused(program, monkeypatch, level, others):
    place = [program, *program.parents][level]

    def look_at(path):
        mode, *rest = roots_own(path)
        if path == place:
            mode, rest[3] = others.get("st_mode", mode), others.get("st_uid", 0)
        return os.stat_result([mode, *rest])

    assert InstalledCode(program).writable_by_others(look_at) == place
    monkeypatch.setattr("edge_agent.systemd.installation._HIDDEN", ())
    with pytest.raises(InvalidInputError, match=f"others than root may write {place}, and would become root"):
        installation(SETTINGS, InstalledCode(program), look_at)
    assert installation(SETTINGS, InstalledCode(program), look_at, allow_writable=True).writable == place


@pytest.fixture
def environment(program):
    """A virtual environment as `python3 -m venv` makes it, with what one package installs."""
    root = program.parents[1]
    system = root.parents[1] / "usr/bin/python3.10"
    packages = root / "lib/python3.10/site-packages"
    for file in (system, root / "pyvenv.cfg", packages / "numpy/__init__.py", packages / "numpy/__pycache__/one.pyc"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    (root / "bin/python3").symlink_to(system)
    (root / "bin/python").symlink_to("python3")
    (root / "lib64").symlink_to("lib")
    return InstalledCode(program, (root / "bin/python", root / "pyvenv.cfg"), (packages, root / "lib/python310.zip"))


def owned_by_a_user(places):
    def look_at(path):
        found = roots_own(path)
        return os.stat_result([*found[:4], 1000, *found[5:]]) if path in places else found

    return look_at


def test_an_environment_that_root_alone_may_write_is_accepted(environment):
    assert environment.writable_by_others(roots_own) is None


@pytest.mark.parametrize(
    "theirs",
    [
        "usr/bin/python3.10",
        "usr",
        "opt/wattfleet/pyvenv.cfg",
        "opt/wattfleet/lib/python3.10/site-packages",
        "opt/wattfleet/lib/python3.10/site-packages/numpy",
        "opt/wattfleet/lib/python3.10/site-packages/numpy/__init__.py",
        "opt/wattfleet/lib/python3.10/site-packages/numpy/__pycache__/one.pyc",
    ],
)
def test_an_interpreter_or_a_package_that_a_user_may_replace_is_refused(environment, tmp_path, theirs):
    assert environment.writable_by_others(owned_by_a_user({tmp_path / theirs})) == tmp_path / theirs


def test_a_package_that_is_linked_from_elsewhere_is_looked_into(environment, tmp_path):
    elsewhere = tmp_path / "srv/wattfleet"
    elsewhere.mkdir(parents=True)
    (elsewhere / "module.py").write_text("")
    packages = environment.imported[0]
    (packages / "wattfleet").symlink_to(elsewhere)
    (packages / "gone").symlink_to(tmp_path / "nowhere")
    (elsewhere / "round").symlink_to(packages)
    assert environment.writable_by_others(roots_own) is None
    assert environment.writable_by_others(owned_by_a_user({elsewhere / "module.py"})) == elsewhere / "module.py"


def test_the_quick_look_spares_the_files_and_sees_the_folders(environment):
    packages = environment.imported[0]
    look_at = owned_by_a_user({packages / "numpy/__init__.py"})
    assert environment.writable_by_others(look_at, contents=False) is None
    assert environment.writable_by_others(owned_by_a_user({packages}), contents=False) == packages


def test_an_interpreter_that_the_service_cannot_see_is_refused(environment, tmp_path, monkeypatch):
    monkeypatch.setattr("edge_agent.systemd.installation._HIDDEN", (f"{tmp_path}/usr/",))
    with pytest.raises(InvalidInputError, match="bin/python: lies in a home .* the system's own Python"):
        installation(SETTINGS, environment, roots_own)


def test_what_runs_here_is_this_interpreter_and_what_it_imports():
    code = running_code()
    assert Path(sys.executable) in code.interpreter
    assert {Path(os.__file__).parent, Path(pytest.__file__).parents[1]} <= set(code.imported)
    assert code.program.name == "wattfleet" and code.program.parent not in code.imported


def test_who_installs_may_allow_it_and_is_warned(install, monkeypatch):
    monkeypatch.setattr(InstalledCode, "writable_by_others", lambda code, look_at: Path("/opt/wattfleet"))
    refused = install("--dry-run")
    assert refused.code == 2 and "--allow-writable" in refused.err
    allowed = install("--dry-run", "--allow-writable")
    assert allowed.code == 0
    assert "warning: others than root may write /opt/wattfleet, and may become root by it" in allowed.err


def test_links_are_followed_to_where_a_user_may_write(program, tmp_path):
    theirs = tmp_path / "srv/theirs"
    theirs.mkdir(parents=True)
    (theirs / "second").symlink_to(program)
    first = tmp_path / "usr"
    first.symlink_to(theirs)

    def look_at(path):
        mode, *rest = roots_own(path)
        rest[3] = 1000 if path == theirs else 0
        return os.stat_result([mode, *rest])

    assert InstalledCode(program).writable_by_others(look_at) is None
    assert InstalledCode(first / "second").writable_by_others(look_at) == theirs


def test_a_link_into_a_home_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/wattfleet").write_text("")
    (tmp_path / "wattfleet").symlink_to(tmp_path / "home/wattfleet")
    monkeypatch.setattr("edge_agent.systemd.installation._HIDDEN", (f"{tmp_path}/home/",))
    with pytest.raises(InvalidInputError, match="which the service cannot see"):
        installation(SETTINGS, InstalledCode(tmp_path / "wattfleet"), roots_own)


@pytest.mark.parametrize(
    "wrong",
    [
        {"device_id": "two words"},
        {"device": "auto\nX=1"},
        {"coordinator": "7070"},
        {"coordinator": "a\nX=1:7070"},
        {"minibatches_per_epoch": 0},
        {"workload": None},
        {"workload": "resnet19"},
        {"workload": "apps:train --root /"},
        {"workload": "resnet18", "device": "simulated:orin-nx"},
        {"minibatch": 0},
    ],
)
def test_settings_that_no_agent_could_use_are_refused(wrong):
    with pytest.raises(InvalidInputError):
        ServiceSettings(**{**vars(SETTINGS), **wrong})


def test_the_service_trains_what_the_device_is_measured_with():
    assert "WATTFLEET_WORKLOAD=--workload resnet18 --minibatch 8 --processor cuda\n" in SETTINGS.text()
    alone = ServiceSettings("simulated:orin-nx", "orin-nx-0", "site.example:7070", 2000)
    assert "WATTFLEET_WORKLOAD=\n" in alone.text()
    # Only without braces does systemd make several words of it, or none.
    assert re.search(r"^ExecStart=.* \$WATTFLEET_WORKLOAD$", UNIT, re.M)


def test_without_a_workload_an_install_says_which_there_are(agent):
    ended = agent("install", "--coordinator", "site.example:7070", "--minibatches-per-epoch", 2000, "--dry-run")
    assert ended.code == 2 and "name a --workload, one of resnet18, mobilenet, lstm, bert" in ended.err


# --- and taken away again -------------------------------------------------------------------------------------------


def test_what_was_installed_is_removed_and_nothing_else(install, agent, tmp_path):
    install("--yes")
    other = tmp_path / "image/etc/systemd/system/other.service"
    other.write_text("")
    shown = agent("uninstall", "--root", tmp_path / "image", "--dry-run")
    assert shown.out.splitlines()[0] == f"run systemctl disable --now {UNIT_FILE}"
    assert (tmp_path / "image" / UNIT_PATH[1:]).exists()
    assert agent("uninstall", "--root", tmp_path / "image", "--yes").code == 0
    left = [path for path in (tmp_path / "image").rglob("*") if path.is_file()]
    assert left == [other]
    again = agent("uninstall", "--root", tmp_path / "image", "--yes")
    assert again.code == 0 and "nothing to remove" in again.out


# --- what the unit says ---------------------------------------------------------------------------------------------


def test_every_setting_that_the_unit_uses_is_written():
    used = set(re.findall(r"\$\{?(\w+)\}?", UNIT))
    assert used == set(re.findall(r"^(\w+)=", SETTINGS.text(), re.M))


@pytest.mark.parametrize("hook", ["ExecStart", "ExecStopPost"])
def test_the_commands_of_the_unit_exist_with_their_options(agent, hook):
    _, group, command, *options = re.search(rf"^{hook}=(.*)$", UNIT, re.M)[1].split()
    ended = agent(command, "--help")
    assert group == "agent" and ended.code == 0
    assert all(option in ended.out for option in options if option.startswith("--"))


@pytest.mark.parametrize("board", FAKED_BOARDS, ids=lambda board: board.name)
def test_the_unit_lets_exactly_the_knobs_be_written(tmp_path, board):
    allowed = " ".join(re.findall(r"^ReadWritePaths=(.*)$", UNIT, re.M)).split()
    folders = [path.removeprefix("-") for path in allowed]
    device = open_sysfs(FakedJetson(tmp_path, board))
    written = [path for group in (device.cpu, device.gpu, device.memory, device.fan) for path in group.written()]
    assert written
    assert all(any(path.startswith(f"{folder}/") for folder in folders) for path in written)
    assert not any(folder in ("/", "/sys", "/sys/devices", "/etc", "/var", "/var/lib") for folder in folders)


def test_a_stop_is_told_to_the_agent_alone_which_ends_its_workload_itself():
    assert "\nKillMode=mixed\n" in UNIT


def test_the_unit_gives_up_every_capability():
    assert "\nCapabilityBoundingSet=\n" in UNIT and "\nNoNewPrivileges=yes\n" in UNIT


def test_the_shipped_unit_is_the_installed_one():
    shipped = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / UNIT_FILE
    assert shipped.read_text() == UNIT


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here to judge the unit")
def test_systemd_finds_the_unit_little_exposed(tmp_path):
    # Older ones than 250 cannot look at a file.
    (tmp_path / UNIT_FILE).write_text(UNIT)
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(tmp_path / UNIT_FILE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    score = re.search(r"Overall exposure level for \S+: ([\d.]+)", ended.stdout)
    if score is None:
        pytest.skip(ended.stderr)
    assert float(score[1]) <= 2.2
