"""Child processes end when their parent is killed."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

_REQUEST = pickle.dumps(list(range(10_000)))
_ECHO = """
from wattfleet_io.child_process import parent_connection
with parent_connection() as parent:
    for request in parent.requests():
        parent.answer(request)
"""


def ended(command: list[str], sent: bytes, reads_answers: bool) -> tuple[int, bytes]:
    """The exit status and the error output of a child whose parent ends after sending something."""
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        if not reads_answers:
            child.stdout.close()
        child.stdin.write(sent)
        child.stdin.close()
        return child.wait(60), child.stderr.read()


@pytest.mark.parametrize("sent", [b"", _REQUEST[:5000]], ids=["before a request", "in a request"])
def test_a_fitting_process_whose_agent_was_killed_ends_in_silence(sent: bytes) -> None:
    assert ended(["-m", "edge_agent.learning.fitting_process"], sent, reads_answers=True) == (0, b"")


def test_a_child_whose_parent_was_killed_before_the_answer_ends_in_silence() -> None:
    assert ended(["-c", _ECHO], _REQUEST, reads_answers=False) == (0, b"")
