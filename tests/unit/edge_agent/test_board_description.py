"""`wattfleet agent describe`: a file of a board that is read back as a device, and boards added without code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_agent.devices.jetson.board import parse_description
from edge_agent.devices.jetson.description import describe, open_described, read_described
from edge_agent.diagnosis import jetson_findings
from tests.fakes.faked_jetson import JETSONS, NANO, ORIN_NANO, FakedJetson, conf_text, open_sysfs
from wattfleet.core.errors import InvalidInputError

UNKNOWN = "nvidia,p4999-0000+p3999-0001\0nvidia,p3999-0001\0nvidia,tegra234"
SECRETS = ("1424121055555", "48:b0:2d:aa:bb:cc", "janes-orin", "/home/jane", "hid_a4_c1_e8_01_02_03_battery")


@pytest.fixture
def unknown(tmp_path):
    """A board that Wattfleet does not know, with what names its owner and itself."""
    tree = FakedJetson(tmp_path / "root", ORIN_NANO)
    tree.put("/proc/device-tree/compatible", UNKNOWN)
    serial, address, host, home, mouse = SECRETS
    tree.put("/proc/device-tree/serial-number", serial)
    tree.put("/sys/class/net/eth0/address", address)
    tree.put("/sys/class/hwmon/hwmon9/name", mouse)
    tree.put("/sys/class/hwmon/hwmon9/in0_label", mouse)
    tree.put("/etc/hostname", host)
    tree.put("/etc/nvpmodel.conf", f"# changed by {home}, see {host}\n{conf_text(tree)}")
    return tree


@pytest.mark.parametrize("board", JETSONS, ids=lambda board: board.name)
def test_a_description_is_read_back_as_the_same_board(tmp_path, board):
    tree = FakedJetson(tmp_path / "root", board)
    tree.put("/etc/nvpmodel.conf", conf_text(tree))
    path = tmp_path / "board.toml"
    text, is_known = describe(tree)
    path.write_text(text)
    assert is_known
    assert list(jetson_findings(read_described(path))) == list(jetson_findings(tree))
    described, device = open_described(path), open_sysfs(tree)
    assert (described.modes == device.modes).all()
    # The service of the fan is a program, and in no file.
    unserviced = {"fan/service": "0"} if board.has_fan else {}
    assert described.knobs() == {**device.knobs(), **unserviced}
    assert (described.presets, described.basis) == (device.presets, device.basis)


def test_an_unknown_board_is_described_and_then_used_without_code(agent, unknown, tmp_path):
    root, path = unknown.location("/"), tmp_path / "board.toml"
    refused = agent("modes", "--device", f"sysfs:{root}")
    assert refused.code == 2 and "unknown board" in refused.err and "sudo wattfleet agent describe" in refused.err
    written = agent("describe", path, "--device", f"sysfs:{root}")
    assert written.code == 0 and "This board is unknown" in written.out
    looked = agent("doctor", "--device", f"description:{path}", "--json")
    assert looked.code == 0 and looked.content["works"]
    found = {finding["topic"]: finding["found"] for finding in looked.content["findings"]}
    assert "kind jetson-p3999-0001" in found["board"] and "VDD_IN: 7.0 W now" in found["power"]
    # As the file says: the owner checks the rails, and copies it.
    assert "/etc/wattfleet/boards/" in path.read_text()
    unknown.put("/etc/wattfleet/boards/ours.toml", path.read_text())
    assert open_sysfs(unknown).board_kind == "jetson-p3999-0001"
    mode = "4,1113600,408000000,2133000000"
    assert agent("apply", mode, "--device", f"sysfs:{root}").code == 0
    assert agent("restore", "--device", f"sysfs:{root}").code == 0


def test_a_description_names_neither_the_board_nor_its_owner(unknown):
    text, _ = describe(unknown)
    assert "p3999-0001" in text and not [secret for secret in SECRETS if secret in text]


def test_a_described_board_cannot_be_set(agent, tmp_path):
    path = tmp_path / "board.toml"
    path.write_text(describe(FakedJetson(tmp_path / "root", ORIN_NANO))[0])
    mode = "4,1113600,408000000,2133000000"
    refused = agent("apply", mode, "--device", f"description:{path}", "--state-dir", tmp_path / "state")
    assert refused.code == 2 and "cannot keep a mode" in refused.err
    trained = agent(
        *("profile", "--workload", "resnet18", "--device", f"description:{path}", "--state-dir", tmp_path / "state")
    )
    assert trained.code == 1 and "is the description of a board, which cannot be set" in trained.err


def test_a_description_of_the_owner_takes_the_place_of_the_shipped_one(tmp_path):
    tree = FakedJetson(tmp_path, NANO)
    board = '[board]\nkind = "nano"\nmodules = ["ours"]\ncompatible = ["p3448-", "p3450-"]\n'
    tree.put("/etc/wattfleet/boards/nano.toml", f'{board}rails = ["POM_5V_GPU", "POM_5V_CPU"]\nmemory_hz = [1]')
    assert open_sysfs(tree).power.read_mw() == 400 + 700


GOOD = '[board]\nkind = "new"\nmodules = ["New"]\ncompatible = ["p1-"]\nrails = ["VDD_IN"]\nmemory_hz = [1]\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("board = ", "own.toml: "),
        ("", r"own.toml: has no table \[board\]; `wattfleet agent describe` writes one"),
        (GOOD.replace('rails = ["VDD_IN"]', ""), "lacks rails"),
        (GOOD.replace('["VDD_IN"]', "[]"), "lacks rails"),
        (GOOD.replace('["VDD_IN"]', '"VDD_IN"'), "rails has to be a list of texts, not 'VDD_IN'"),
        (GOOD.replace("[1]", "[0]"), "memory_hz has to be a list of positive numbers"),
        (GOOD.replace('"new"', '"New board"'), "kind may have"),
        (f"{GOOD}tpcs = true", "tpcs has to be a positive number, not True"),
        (f"{GOOD}rail = 1", r"unknown rail; \[board\] may have kind, modules, compatible, rails"),
    ],
)
def test_a_description_that_is_wrong_is_named_with_what_is_wrong(tmp_path, text, said):
    assert parse_description(GOOD.encode(), "good").kind == "new"
    tree = FakedJetson(tmp_path, NANO)
    tree.put("/etc/wattfleet/boards/own.toml", text)
    with pytest.raises(InvalidInputError, match=said):
        open_sysfs(tree)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{GOOD}[files]\nx = 1", r"\[files\] has to hold texts"),
        (f"{GOOD}[folders]\npaths = 1", r"paths of \[folders\]"),
        (f"folders = 1\n{GOOD}", r"paths of \[folders\]"),
        (f"{GOOD}[unreadable]\n'/proc/device-tree/compatible' = 'errorcode'", "not a Jetson"),
        (f"{GOOD}# {'x' * 4_000_000}", "has more than 4,000,000 bytes"),
        (GOOD, "not a Jetson"),
    ],
)
def test_a_file_that_is_no_description_is_refused(tmp_path, text, said):
    path = tmp_path / "board.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=said):
        open_described(path)
    with pytest.raises(InvalidInputError, match="nowhere.toml: cannot be read: No such file"):
        open_described(tmp_path / "nowhere.toml")


def test_a_device_is_no_description():
    with pytest.raises(InvalidInputError, match="/dev/zero: is not a regular file"):
        open_described(Path("/dev/zero"))


def test_more_modes_than_any_board_has_are_refused(tmp_path):
    tree = FakedJetson(tmp_path / "root", ORIN_NANO)
    for path in tree.glob("/sys/devices/system/cpu/cpufreq/policy*/scaling_available_frequencies"):
        tree.put(path, " ".join(map(str, range(115_200, 125_200))))
    path = tmp_path / "board.toml"
    path.write_text(describe(tree)[0])
    with pytest.raises(InvalidInputError, match="modes, more than 100,000: no board has so many"):
        open_described(path)


def test_a_board_without_a_name_is_described(unknown, tmp_path):
    unknown.put("/proc/device-tree/model", "")
    path = tmp_path / "board.toml"
    path.write_text(describe(unknown)[0])
    assert open_described(path).identity.board.modules == ("unnamed",)


def test_a_file_or_device_that_exists_is_not_replaced(agent, tmp_path):
    FakedJetson(tmp_path / "root", NANO)
    kept, link, pipe = (tmp_path / name for name in ("kept", "link", "pipe"))
    kept.write_text("kept")
    link.symlink_to(kept)
    os.mkfifo(pipe)
    for path in (kept, link, pipe):
        refused = agent("describe", path, "--device", f"sysfs:{tmp_path}/root")
        assert refused.code == 2 and "exists already, and is not replaced; name another file" in refused.err
    assert kept.read_text() == "kept" and link.is_symlink() and pipe.is_fifo()


def test_what_is_no_jetson_is_not_described(agent, tmp_path):
    assert "not a Jetson" in agent("describe", tmp_path / "a", "--device", f"sysfs:{tmp_path}").err
    for device in ("host", "auto:foo"):
        assert "only a Jetson" in agent("describe", tmp_path / "a", "--device", device).err
    FakedJetson(tmp_path / "root", NANO)
    refused = agent("describe", tmp_path / "no" / "where", "--device", f"sysfs:{tmp_path}/root")
    assert refused.code == 2 and "cannot be written: No such file" in refused.err
