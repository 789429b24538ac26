"""Links that another user planted in the state directory: the agent follows none of them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.profiling.journal import Journal, JournalError, JournalHeader
from edge_agent.profiling.profiled_workload import built_in_workload
from edge_agent.runtime.agent import installation_name, run_agent
from edge_agent.session.outbox import OutboxFile
from edge_agent.training.mode_change import LOCK_FILE, KnobBackupError, backed_up
from tests.fakes.agent_settings import agent_settings
from wattfleet.errors import InvalidInputError

HEADER = JournalHeader("jetson-07", "orin-nano", "hardware", "resnet18-imagenet", 16)
SECRET = "root:$6$salt$hash:19000::::::\n"


@pytest.fixture
def shadow(tmp_path: Path) -> Path:
    """A file that only root can read."""
    path = tmp_path / "shadow"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_a_journal_behind_a_link_is_refused(shadow: Path, state: Path) -> None:
    (state / "profile.jsonl").symlink_to(shadow)
    with pytest.raises(JournalError, match="profile.jsonl: cannot be opened: is a symbolic link"):
        Journal.open(state / "profile.jsonl", HEADER)
    assert shadow.read_text() == SECRET


def test_a_new_journal_is_not_created_behind_a_link(tmp_path: Path, state: Path) -> None:
    (state / "profile.jsonl").symlink_to(tmp_path / "cron.d")
    with pytest.raises(JournalError, match="is a symbolic link"):
        Journal.open(state / "profile.jsonl", HEADER)
    assert not (tmp_path / "cron.d").exists()


def test_a_lock_behind_a_link_is_refused(shadow: Path, state: Path) -> None:
    (state / LOCK_FILE).symlink_to(shadow)
    with pytest.raises(KnobBackupError, match="is a symbolic link"), backed_up(SimulatedDevice("orin-nano", 1), state):
        pass
    assert shadow.read_text() == SECRET


def test_an_outbox_behind_a_link_is_not_copied_to_where_others_can_read_it(shadow: Path, state: Path) -> None:
    (state / "outbox.jsonl").symlink_to(shadow)
    assert OutboxFile(state / "outbox.jsonl").load() == []
    assert not list(state.glob("*.damaged"))


def test_an_installation_name_behind_a_link_is_replaced(shadow: Path, state: Path) -> None:
    (state / "installation").symlink_to(shadow)
    name = installation_name(state / "installation")
    assert installation_name(state / "installation") == name
    assert shadow.read_text() == SECRET


@pytest.mark.skipif(os.geteuid() != 0, reason="an agent of an ordinary user may use any folder")
@pytest.mark.parametrize("which", ["state directory", "device folder"])
def test_an_agent_of_root_refuses_a_directory_that_everybody_can_write_to(tmp_path: Path, which: str) -> None:
    state, device_folder = tmp_path / "state", tmp_path / "device"
    state.mkdir()
    device_folder.mkdir()
    (state if which == "state directory" else device_folder).chmod(0o777)
    board = SimulatedDevice("orin-nano", 1)
    running = run_agent(agent_settings(state), board, built_in_workload(board.step), device_folder, asyncio.Event())
    with pytest.raises((InvalidInputError, KnobBackupError), match="every user may write to the folder"):
        asyncio.run(asyncio.wait_for(running, 30))
