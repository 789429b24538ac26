"""Running system programs such as nvpmodel."""

import sys

from wattfleet_io.programs import run_no_program, run_program


def test_a_program_is_answered_and_all_that_it_says_is_heard():
    asks = "import sys; print('reboot?'); print(input(), file=sys.stderr, flush=True); sys.exit(3)"
    result = run_program([sys.executable, "-c", asks], "no\n")
    assert result.code == 3
    assert sorted(result.output.split()) == ["no", "reboot?"]


def test_a_program_that_is_not_there_has_no_exit_status():
    result = run_program(["nvpmodel-that-is-not-installed", "-q"], "")
    assert (result.code, result.output) == (None, "No such file or directory")


def test_for_another_machines_files_no_program_is_run():
    assert run_no_program(["systemctl", "stop", "nvfancontrol"], "").code is None
