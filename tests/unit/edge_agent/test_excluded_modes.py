"""A mode that overloads the board is excluded from training, and so are all higher modes."""

import json
import shutil

import pytest

from edge_agent.devices.sysfs import mode_argument
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.paths import PROFILE_FILE
from edge_agent.profiling.journal import Discarded, Journal, JournalHeader, ModeRecord, Renewal
from edge_agent.profiling.mode_measurement import DEFAULT_LIMITS, ExcludedModes
from edge_agent.profiling.stored_profile import read_fitted
from tests.fakes.stored_workloads import only_workload
from tests.fixtures.edge_agent import PROFILED
from wattfleet.modes import PowerMode, array_to_modes, modes_to_array

HEADER = JournalHeader("bench", "orin-nano", "simulated", "resnet18-imagenet", 16)
MODE = PowerMode(4, 1_036_800, 510_000_000, 2_133_000_000)
HIGHER = MODE._replace(cores=6, gpu_hz=624_750_000)
LESS_CPU = HIGHER._replace(cpu_khz=115_200)
LOWER = MODE._replace(mem_hz=204_000_000)
MODES = [HIGHER, LESS_CPU, MODE, LOWER]


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path / PROFILE_FILE, HEADER) as journal:
        yield journal


def measured(journal, mode):
    journal.append(ModeRecord(mode, 100.0, 9000.0, 0.0, 0.0, 40, 5, 10.0))


def given_up(journal, mode, overloaded=True, times=DEFAULT_LIMITS.attempts):
    for _ in range(times):
        journal.append(Discarded(mode, "the board throttled 2 times", 12, 5.0, overloaded))


def borne(journal, modes=MODES):
    return array_to_modes(modes_to_array(modes)[ExcludedModes.of(journal).allows(modes_to_array(modes))])


def test_a_board_that_was_never_overloaded_bears_all(journal):
    measured(journal, LOWER)
    assert borne(journal) == MODES


def test_a_mode_that_always_throttles_is_excluded_with_all_higher_modes(journal):
    given_up(journal, MODE)
    assert borne(journal) == [LESS_CPU, LOWER]


def test_what_was_disturbed_once_or_twice_is_borne(journal):
    given_up(journal, MODE, times=DEFAULT_LIMITS.attempts - 1)
    assert borne(journal) == MODES


def test_what_failed_without_overload_leaves_out_itself_alone(journal):
    given_up(journal, MODE, overloaded=False)
    given_up(journal, LESS_CPU, times=1)
    given_up(journal, LESS_CPU, overloaded=False, times=2)
    assert borne(journal) == [HIGHER, LOWER]


def test_a_higher_mode_that_was_measured_shows_that_it_was_not_the_modes_fault(journal):
    given_up(journal, MODE)
    highest = HIGHER._replace(cpu_khz=1_510_400)
    measured(journal, HIGHER)
    assert borne(journal, [highest, *MODES]) == [highest, HIGHER, LESS_CPU, LOWER]


def test_a_mode_that_was_measured_after_all_is_borne(journal):
    given_up(journal, MODE)
    measured(journal, MODE)
    assert borne(journal) == MODES


def test_what_was_before_a_renewal_does_not_count(journal):
    given_up(journal, MODE)
    journal.append(Renewal("power fell", 8))
    assert borne(journal) == MODES


def test_a_device_is_never_left_without_any_mode(journal):
    given_up(journal, LOWER)
    assert borne(journal, [HIGHER, MODE, LOWER]) == [HIGHER, MODE, LOWER]


def test_a_line_of_an_earlier_version_leaves_out_its_mode_alone(tmp_path, journal):
    line = {"kind": "discarded", "mode": list(MODE), "reason": "92 degrees", "minibatches": 4, "seconds": 5.0}
    with (tmp_path / PROFILE_FILE).open("a") as file:
        file.write((json.dumps(line) + "\n") * DEFAULT_LIMITS.attempts)
    with Journal.open(tmp_path / PROFILE_FILE, HEADER) as again:
        assert borne(again) == [HIGHER, LESS_CPU, LOWER]


def test_no_front_shows_and_no_budget_buys_what_the_board_does_not_bear(tmp_path, agent, profiled_state):
    state = shutil.copytree(profiled_state, tmp_path / "copied", ignore=shutil.ignore_patterns("*.sock"))
    device = SimulatedDevice("orin-nano", 0)
    fitted = read_fitted(state, device)
    hopeless = array_to_modes(fitted.front.modes)[len(fitted.front) // 2]

    def is_hopeless(mode):
        return all(knob >= low for knob, low in zip(mode, hopeless, strict=True))

    path = only_workload(state) / PROFILE_FILE
    header, *lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not is_hopeless(json.loads(line)["mode"])]
    path.write_text("".join([header, *kept]))
    with Journal.open(path, fitted.measured.header) as journal:
        given_up(journal, hopeless)

    def shown(*arguments):
        return agent(*arguments, "--device", PROFILED, "--state-dir", state, "--json").content

    assert any(map(is_hopeless, array_to_modes(fitted.front.modes)))
    front = [PowerMode(**point["mode"]) for point in shown("front")["front"]]
    assert front and not any(map(is_hopeless, front))
    chosen = PowerMode(**shown("choose", "--budget-w", 1000)["mode"])
    assert chosen in array_to_modes(device.modes) and not is_hopeless(chosen)
    assert shown("explain", mode_argument(hopeless))["measured"] is False
