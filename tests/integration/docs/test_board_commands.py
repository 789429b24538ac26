"""Runs the pages' commands for a single device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.fakes.documented_commands import Block, blocks_of
from tests.fakes.documented_runs import run_block, run_call
from tests.fakes.duty_agent import duty_agent_at
from tests.fakes.jetson_boards import ORIN_NANO
from tests.fakes.jetson_tree import FakedJetson

BOARD = "simulated:orin-nano"
_PROFILE = ["agent", "profile", "--modes", "12", "--name"]
_INFERENCE = "cores,cpu_khz,gpu_hz,mem_hz,batch,batch_ms,power_mw\n4,1000000,500000000,2000000000,8,41.5,9000\n"


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Options for a simulated board whose modes were measured for one workload."""
    added = {"--device": BOARD, "--state-dir": tmp_path_factory.mktemp("board"), "--device-id": "jetson-1"}
    printed, code = run_call([*_PROFILE, "acme/digits"], added)
    assert code == 0, printed
    return added


@pytest.mark.parametrize("block", blocks_of("board"), ids=str)
def test_commands_on_a_board_print_what_the_page_shows(block: Block, board: dict[str, object]) -> None:
    run_block(block, board)


def test_commands_on_a_board_with_two_workloads(board: dict[str, object], tmp_path: Path) -> None:
    added = {**board, "--state-dir": shutil.copytree(str(board["--state-dir"]), tmp_path / "state")}
    assert run_call([*_PROFILE[:2], "--modes", "3", "--name", "other"], added)[1] == 0
    for block in blocks_of("board with two workloads"):
        run_block(block, added)


@pytest.mark.parametrize("block", blocks_of("imitated board"), ids=str)
def test_commands_on_an_imitated_board(block: Block, tmp_path: Path) -> None:
    jetson = FakedJetson(tmp_path / "root", ORIN_NANO)
    state, socket = tmp_path / "state", tmp_path / "agent.sock"
    run_block(block, {"--device": f"sysfs:{jetson.location('/')}", "--state-dir": state, "--socket": socket})


@pytest.mark.parametrize("block", blocks_of("this machine"), ids=str)
def test_commands_on_this_machine(block: Block, tmp_path: Path) -> None:
    run_block(block, {"--state-dir": tmp_path / "state", "--socket": tmp_path / "agent.sock"})


def test_commands_about_a_duty(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(short_folder)
    (short_folder / "inference.csv").write_text(_INFERENCE)
    with duty_agent_at(short_folder / "agent.sock") as agent:
        for block in blocks_of("duty"):
            run_block(block, {"--socket": agent.socket})
