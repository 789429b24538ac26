import numpy as np
import pytest

from edge_agent.devices.virtual.simulated import ReplayDevice
from wattfleet.errors import InvalidInputError
from wattfleet.modes import PowerMode, modes_to_array

HEADER = "cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n"
ROWS = "2,1036800,306000000,2133000000,352.6876,12928.0\n6,1510400,624750000,2133000000,181.8709,20445.0\n"


@pytest.fixture
def device(tmp_path):
    (tmp_path / "lab-nano.csv").write_text(HEADER + ROWS)
    return ReplayDevice(tmp_path / "lab-nano.csv", seed=0)


def test_it_is_named_after_its_file_and_starts_in_the_fastest_mode(device):
    assert device.board_kind == "replay:lab-nano"
    assert device.current_mode() == PowerMode(6, 1_510_400, 624_750_000, 2_133_000_000)


def test_its_modes_and_its_truth_are_the_recorded_ones_in_any_order(device):
    assert device.modes.tolist() == [[2, 1036800, 306e6, 2133e6], [6, 1510400, 624.75e6, 2133e6]]
    minibatch_ms, power_mw = device.truth(device.modes[::-1])
    assert minibatch_ms.tolist() == [181.8709, 352.6876]
    assert power_mw.tolist() == [20445.0, 12928.0]


def test_it_knows_nothing_of_other_modes(device):
    with pytest.raises(InvalidInputError, match="no measurement"):
        device.truth(modes_to_array([PowerMode(4, 1_510_400, 624_750_000, 2_133_000_000)]))
    assert device.truth(np.empty((0, 4)))[0].shape == (0,)


def test_a_file_that_is_no_profile_is_refused(tmp_path):
    (tmp_path / "bad.csv").write_text(HEADER + ROWS + ROWS)
    with pytest.raises(InvalidInputError, match="is repeated"):
        ReplayDevice(tmp_path / "bad.csv", seed=0)
