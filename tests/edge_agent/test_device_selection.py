import pytest

from edge_agent.devices.selection import open_device
from wattfleet.errors import InvalidInputError

CHOICES = "simulated:agx-orin, simulated:orin-nano, simulated:orin-nx, simulated:xavier-agx, replay:<file>.csv"


def test_a_simulated_board_by_its_kind():
    device = open_device("simulated:orin-nx", seed=1)
    assert (device.board_kind, device.evidence) == ("orin-nx", "simulated")


def test_a_replayed_profile_by_its_file(tmp_path):
    path = tmp_path / "odd:name.csv"
    path.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n2,1036800,306000000,2133000000,352.7,12928\n")
    device = open_device(f"replay:{path}", seed=1)
    assert (device.board_kind, device.evidence) == ("replay:odd:name", "replayed")


@pytest.mark.parametrize(
    "spec", ["simulated:tx2", "simulated:", "simulated", "jtop:agx-orin", "", "replay:", "agx-orin"]
)
def test_anything_else_is_answered_with_the_choices(spec):
    with pytest.raises(InvalidInputError) as refused:
        open_device(spec, seed=1)
    assert repr(spec) in str(refused.value) and CHOICES in str(refused.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="nowhere.csv: no such file"):
        open_device(f"replay:{tmp_path}/nowhere.csv", seed=1)
