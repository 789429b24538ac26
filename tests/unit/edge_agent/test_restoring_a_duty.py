"""An agent that starts with a damaged duty file."""

from typing import Any

from edge_agent.runtime.agent import restore_duty
from edge_agent.serving.device_turns import DeviceTurns
from edge_agent.serving.duty_figures import DutyFile
from tests.fakes.duty_agent import LiveBoard, duty
from tests.fakes.real_time_board import MODE


def test_the_mode_in_force_is_noted_although_the_duty_file_is_damaged(tmp_path):
    DutyFile(tmp_path).write(duty())
    for each in tmp_path.iterdir():
        each.write_text("{")
    turns = DeviceTurns()
    board: Any = LiveBoard()
    restore_duty(turns, DutyFile(tmp_path), board)
    assert (turns.duty, turns.mode) == (None, MODE)
