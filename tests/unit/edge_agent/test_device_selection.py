import sys
import types
from pathlib import Path

import pytest

from edge_agent.devices.jtop import JtopDevice
from edge_agent.devices.selection import folder_of_device, open_device, open_virtual_board
from tests.fakes.jetson_boards import ORIN_NANO, XAVIER_AGX
from tests.fakes.jetson_tree import FakedJetson
from wattfleet.errors import InvalidInputError
from wattfleet.modes import array_to_modes

CHOICES = (
    "auto, sysfs, sysfs:<folder>, nvpmodel, jtop, host,"
    " simulated:agx-orin, simulated:orin-nano, simulated:orin-nx, simulated:xavier-agx, simulated:<kind>:real-time,"
    " replay:<file>.csv"
)


def test_a_simulated_board_by_its_kind():
    device = open_device("simulated:orin-nx", seed=1)
    assert (device.board_kind, device.provenance) == ("orin-nx", "simulated")


def test_a_replayed_profile_by_its_file(tmp_path):
    path = tmp_path / "odd:name.csv"
    path.write_text("cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw\n2,1036800,306000000,2133000000,352.7,12928\n")
    device = open_device(f"replay:{path}", seed=1)
    assert (device.board_kind, device.provenance) == ("replay:odd:name", "replayed")


def test_a_jetson_by_the_folder_that_holds_its_files(tmp_path):
    FakedJetson(tmp_path, XAVIER_AGX)
    device = open_device(f"sysfs:{tmp_path}", seed=1)
    assert (device.board_kind, device.provenance) == ("xavier-agx", "hardware")
    before = device.knobs()
    with device.measuring():
        device.apply(device.space.lowest)
    device.restore(before)
    assert device.knobs() == before


@pytest.mark.parametrize("spec", ["auto", "sysfs"])
def test_this_machine_where_it_is_a_jetson(tmp_path, spec):
    FakedJetson(tmp_path, ORIN_NANO)
    assert open_device(spec, seed=1, root=tmp_path).board_kind == "orin-nano"


def test_a_machine_that_is_no_jetson_is_told_so(tmp_path):
    with pytest.raises(InvalidInputError, match="not a Jetson"):
        open_device("sysfs", seed=1, root=tmp_path)


@pytest.mark.parametrize("spec", ["auto", "host"])
def test_a_machine_that_is_no_jetson_is_measured_as_it_is(tmp_path, spec, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    online = tmp_path / "sys/devices/system/cpu/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-3")
    assert open_device(spec, seed=1, root=tmp_path).board_kind == "host"


def test_jtop_reads_the_jetson_that_the_kernels_files_set(tmp_path, monkeypatch):
    FakedJetson(tmp_path, ORIN_NANO)
    announcing = types.SimpleNamespace(start=lambda: None, ok=lambda: True, power={"tot": {"power": 9000}}, fan={})
    library = types.SimpleNamespace(jtop=lambda interval: announcing, JtopException=OSError)
    monkeypatch.setitem(sys.modules, "jtop", library)
    device = open_device("jtop", seed=1, root=tmp_path)
    assert isinstance(device, JtopDevice) and device.board_kind == "orin-nano"
    assert array_to_modes(device.modes) == array_to_modes(open_device("sysfs", seed=1, root=tmp_path).modes)


def test_agents_that_keep_their_state_apart_still_meet_at_a_boards_lock(tmp_path):
    FakedJetson(tmp_path, ORIN_NANO)
    folders = {
        folder_of_device(spec, tmp_path / state, tmp_path)
        for spec, state in (("sysfs", "one"), ("auto", "two"), (f"sysfs:{tmp_path}", "three"))
    }
    assert folders == {tmp_path / "var/lib/wattfleet/device"}


def test_what_is_never_set_keeps_its_lock_with_its_state(tmp_path):
    for spec in ("simulated:orin-nano", "host", "auto"):
        assert folder_of_device(spec, tmp_path, root=tmp_path) == tmp_path / "device"


def test_only_virtual_boards_have_to_be_told_that_work_is_done(tmp_path):
    with pytest.raises(InvalidInputError, match="unknown device 'sysfs'; choose one of simulated:agx-orin"):
        open_virtual_board("sysfs", seed=1)


@pytest.mark.parametrize(
    "spec", ["simulated:tx2", "simulated:", "simulated", "jtop:agx-orin", "", "replay:", "agx-orin", "sysfs:", "auto:"]
)
def test_anything_else_is_answered_with_the_choices(spec):
    with pytest.raises(InvalidInputError) as refused:
        open_device(spec, seed=1)
    assert repr(spec) in str(refused.value) and CHOICES in str(refused.value)
    with pytest.raises(InvalidInputError, match="unknown device"):
        folder_of_device(spec, Path("state"))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="nowhere.csv: no such file"):
        open_device(f"replay:{tmp_path}/nowhere.csv", seed=1)
