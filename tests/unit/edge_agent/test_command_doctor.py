"""`wattfleet agent doctor`: its findings, its advice, and when it reports that the agent cannot work."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from edge_agent.devices.host import HostDevice
from edge_agent.devices.nvml import Nvml
from edge_agent.devices.tree import Tree
from edge_agent.diagnosis import Finding, identity_findings
from edge_agent.paths import BACKUP_FILE
from edge_agent.systemd.installation import SETTINGS_PATH, InstalledConnection, ServiceSettings
from edge_agent.training.mode_change import backed_up
from tests.fakes.faked_jetson import AGX_ORIN_JP5, BPMP, FAKED_BOARDS, LOCK, NANO, ORIN_NANO, FakedJetson, open_sysfs
from tests.fakes.faked_nvml import FakeGpu, FakeNvml
from wattfleet.common.clock import SystemClock
from wattfleet.common.identity.authority import CertificateAuthority
from wattfleet.common.identity.certificates import new_key, request_certificate
from wattfleet.common.identity.identity_folder import Identity, write_identity
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.common.identity.renewal import note_time
from wattfleet.common.systemd import InstalledCode

EXISTING = Path("/usr/bin/env")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Set the running code. The default is code that the service can run, whoever owns it on this machine."""

    def be(program=EXISTING, imported=(), writable=None):
        code = InstalledCode(program, (), imported)
        monkeypatch.setattr("wattfleet.common.systemd.running_code", lambda: code)
        monkeypatch.setattr(InstalledCode, "writable_by_others", lambda code, look_at=os.stat: writable)

    be()
    return be


@pytest.fixture
def look(agent, tmp_path):
    """Run doctor on a device; returns the exit code and the findings by topic."""

    def run(device, state=tmp_path / "state"):
        socket = tmp_path / "agent.sock"
        ended = agent("doctor", "--device", device, "--state-dir", state, "--socket", socket, "--json")
        assert ended.err == ""
        found = {finding["topic"]: finding for finding in ended.content["findings"]}
        levels = {finding["level"] for finding in found.values()}
        assert ended.code == int("fails" in levels)
        assert ended.content["works"] is levels.issubset({"ok", "limited"})
        return ended.code, found

    return run


@pytest.fixture
def orin(tmp_path):
    return FakedJetson(tmp_path / "root", AGX_ORIN_JP5)


def spec(jetson):
    return f"sysfs:{jetson.location('/')}"


@pytest.mark.parametrize("board", FAKED_BOARDS, ids=lambda board: board.name)
def test_every_board_as_it_comes_can_serve_an_agent(look, tmp_path, board):
    jetson = FakedJetson(tmp_path / "root", board)
    before = jetson.everything()
    code, found = look(spec(jetson))
    assert code == 0
    assert board.kind in found["board"]["found"] and f"JetPack {board.jetpack}" in found["software"]["found"]
    assert f"{board.cores} cores" in found["CPU"]["found"] and board.gpu in found["GPU"]["found"]
    assert f"{board.power_mw / 1e3:.1f} W now" in found["power"]["found"]
    assert f"{board.modes:,} modes" in found["device"]["found"]
    assert ("live table" in found["memory"]["found"]) is board.has_bpmp
    assert (found["fan"]["level"] == "ok") is board.has_fan
    assert (found["throttling"]["level"] == "ok") is (bool(board.throttled) and not sum(board.throttled))
    assert jetson.everything() == before and not (tmp_path / "state").exists()


def test_the_table_says_what_to_do(agent, orin, tmp_path):
    ended = agent("doctor", "--device", spec(orin), "--state-dir", tmp_path, "--socket", tmp_path / "agent.sock")
    assert ended.code == 0
    assert "-> start one: `systemctl start wattfleet-agent`" in ended.out
    assert "The agent can run here: 14 ok, 5 limited." in ended.out
    assert max(map(len, ended.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ({}, None),
        ({"writable": Path("/srv/theirs")}, "users other than root can write /srv/theirs"),
        ({"program": Path("/root/env/bin/wattfleet")}, "is in a home or temporary directory"),
        ({"imported": [Path("/home/me/wattfleet")]}, "is in a home or temporary directory"),
        ({"program": Path("/opt/nowhere/bin/wattfleet")}, "does not exist"),
    ],
)
def test_doctor_says_of_an_installation_what_install_says(look, agent, orin, installed, tmp_path, code, said):
    installed(**code)
    code, found = look(spec(orin))
    install = agent("install", "--coordinator", "127.0.0.1:7070", "--dry-run", "--root", tmp_path / "image")
    assert code == 0 and (install.code == 0) is (said is None)
    finding = found["installation"]
    if said is None:
        assert (finding["level"], finding["advice"]) == ("ok", "")
        return
    assert finding["level"] == "limited" and said in finding["found"]
    refused = " ".join(install.err.split())
    what, why = finding["found"].removeprefix("`wattfleet agent install` would refuse this. "), finding["advice"]
    assert f"{what}; {why}" in refused, "the same words"


def test_a_machine_that_is_no_jetson_is_told_what_it_can_be_used_for(look, tmp_path):
    code, found = look(f"sysfs:{tmp_path}")
    assert code == 1
    assert found["board"]["level"] == "limited"
    assert "--device host" in found["board"]["advice"] and "simulated:" in found["board"]["advice"]
    assert "not a Jetson" in found["device"]["found"]


@pytest.fixture
def host(tmp_path, as_device, monkeypatch):
    """A fake workstation without a GPU, which `auto` selects."""
    monkeypatch.setattr("edge_agent.devices.selection.is_jetson", lambda tree: False)
    monkeypatch.setattr("edge_agent.diagnosis.is_jetson", lambda tree: False)
    root = tmp_path / "workstation"

    def put(path, text):
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    put("sys/devices/system/cpu/online", "0-3")

    def machine(nvml=None):
        as_device(HostDevice(Tree(root), SystemClock(), nvml))

    machine.put = put
    return machine


def test_a_workstation_whose_power_can_be_read_can_serve_an_agent(look, host):
    host(Nvml(FakeNvml(FakeGpu(power_mw=90_000, celsius=50))))
    code, found = look("auto")
    assert code == 0 and "board" not in found
    assert "its only mode is" in found["device"]["found"] and "never changed" in found["device"]["found"]
    assert found["power"] == {
        "topic": "power",
        "level": "ok",
        "found": "power of 1 GPU(s) by NVML; the rest of the machine is not included: 90.0 W now",
        "advice": "",
    }
    assert found["temperature"]["found"] == "50 degrees C"


def test_a_machine_without_a_power_meter_is_in_order_but_serves_no_round(look, agent, host, tmp_path):
    host()
    code, found = look("auto")
    assert (code, found["power"]["level"]) == (0, "absent")
    assert "cannot be profiled" in found["power"]["found"] and "wattfleet[nvml]" in found["power"]["advice"]
    ended = agent("doctor", "--state-dir", tmp_path / "state", "--socket", tmp_path / "agent.sock")
    assert ended.code == 0
    assert "joins no rounds until the absent parts are added" in " ".join(ended.out.split())
    assert "The agent can run here: " not in ended.out


def test_a_machine_whose_power_meter_does_not_answer_has_to_be_repaired(look, host):
    library = FakeNvml()
    library.fail("nvmlDeviceGetPowerUsage", library.NVML_ERROR_NOT_SUPPORTED)
    host(Nvml(library))
    code, found = look("auto")
    assert (code, found["power"]["level"]) == (1, "fails")
    assert "nvidia-smi" in found["power"]["advice"]


def test_a_machine_without_a_power_meter_fails_for_what_else_is_wrong(look, host, tmp_path):
    host()
    (tmp_path / "file").write_text("")
    code, found = look("auto", tmp_path / "file" / "state")
    assert (code, found["state directory"]["level"]) == (1, "fails")


def test_power_counters_that_only_root_may_read_say_so(look, host):
    host.put("sys/class/powercap/intel-rapl:0/name", "package-0")
    host()
    code, found = look("auto")
    assert code == 1
    assert "only root may read RAPL" in found["power"]["found"] and "sudo" in found["power"]["advice"]


def test_counters_of_energy_tell_a_power(look, host):
    for name, text in (("name", "package-0"), ("energy_uj", "100"), ("max_energy_range_uj", "1000000")):
        host.put(f"sys/class/powercap/intel-rapl:0/{name}", text)
    host()
    code, found = look("auto")
    assert (code, found["power"]["level"]) == (0, "ok")


def test_a_simulated_board_needs_nothing(look):
    code, found = look("simulated:orin-nx")
    assert code == 0
    assert set(found) == {
        "device",
        *("state directory", "restore file", "installation", "socket"),
        *("certificate", "clock", "connection"),
    }


def test_a_missing_part_hides_no_other(look, orin):
    orin.location(f"{orin.gpu}/device/of_node/name").unlink()
    code, found = look(spec(orin))
    assert code == 1
    assert [topic for topic, one in found.items() if one["level"] == "fails"] == ["GPU", "device"]
    assert "driver nvgpu is not loaded" in found["GPU"]["found"]
    assert found["power"]["level"] == found["CPU"]["level"] == "ok"


def test_without_permission_the_agent_cannot_work(look, orin, monkeypatch):
    monkeypatch.setattr(Tree, "may_write", lambda tree, path: "online" not in path)
    code, found = look(spec(orin))
    assert code == 1
    assert (
        "11 of 23 settings are not writable, such as /sys/devices/system/cpu/cpu1/online"
        in found["permission"]["found"]
    )
    assert "sudo wattfleet agent doctor" in found["permission"]["advice"]


def test_a_missing_rail_is_named(look, orin):
    orin.put(
        next(
            path for path in orin.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/in2_label") if "CPU" in orin.read(path)
        ),
        "NC",
    )
    code, found = look(spec(orin))
    assert code == 1
    assert "missing: VDD_CPU_CV" in found["power"]["found"] and "ina3221" in found["power"]["advice"]


def test_a_rail_that_does_not_answer_is_no_power(look, orin):
    for path in orin.glob("/sys/bus/i2c/drivers/ina3221/*/hwmon/*/curr1_input"):
        orin.put(path, "?")
    code, found = look(spec(orin))
    assert code == 1
    assert "a rail cannot be read" in found["power"]["found"]


def test_hidden_debugfs_only_limits(look, orin):
    for path in (f"{BPMP}/emc/possible_rates", f"{LOCK}/mrq_rate_locked"):
        orin.location(path).unlink()
    code, found = look(spec(orin))
    assert code == 0
    assert "the default table of its kind" in found["memory"]["found"]
    assert "mount debugfs" in found["memory"]["advice"]


def test_an_unknown_jetson_is_refused_with_its_part_number(look, tmp_path):
    jetson = FakedJetson(tmp_path / "root", NANO)
    jetson.put("/proc/device-tree/compatible", "nvidia,p3636-0001\0nvidia,tegra186\0")
    code, found = look(spec(jetson))
    assert code == 1
    assert "p3636-0001" in found["board"]["found"]


def test_a_kept_restore_file_is_pointed_out(look, tmp_path):
    (tmp_path / "state" / "device").mkdir(parents=True)
    (tmp_path / "state" / "device" / BACKUP_FILE).write_text("{}")
    code, found = look("simulated:orin-nx")
    assert code == 0
    assert "wattfleet agent restore" in found["restore file"]["advice"]


def test_the_process_that_has_the_device_is_named(look, orin):
    with backed_up(open_sysfs(orin), orin.location("/var/lib/wattfleet/device")):
        _, found = look(spec(orin))
        assert f"process {os.getpid()} uses the device" in found["restore file"]["found"]
    _, found = look(spec(orin))
    assert found["restore file"]["found"] == "none: the device has its owner's settings"


def test_a_state_directory_that_cannot_be_made_is_said(look, tmp_path):
    (tmp_path / "file").write_text("")
    code, found = look("simulated:orin-nx", tmp_path / "file" / "state")
    assert code == 1
    assert "--state-dir" in found["state directory"]["advice"]


def test_a_full_disk_is_said(look, tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result([*real[:4], 10, *real[5:]]))
    code, found = look("simulated:orin-nx")
    assert code == 1
    assert "only 0 MB free" in found["state directory"]["found"]


def test_a_throttle_counter_that_does_not_answer_only_limits(look, tmp_path):
    jetson = FakedJetson(tmp_path / "root", ORIN_NANO)
    jetson.put("/sys/class/hwmon/hwmon1/oc2_event_cnt", "")
    code, found = look(spec(jetson))
    assert (code, found["throttling"]["level"]) == (0, "limited")


# --- Doctor identity --------------------------------------------------------------------------------------------------
# The findings of `wattfleet agent doctor` about certificate, key, clock and plaintext connections.

ENROLLED = datetime(2027, 3, 1, 12, tzinfo=timezone.utc)
LIFETIME = timedelta(days=30)
AWAY, HERE = "site.example:7070", "127.0.0.1:7070"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "identity"


def enrol(folder: Path, role: Role = Role.DEVICE) -> None:
    """Store an identity that was issued at ENROLLED."""
    authority, key = CertificateAuthority.create("farm", ENROLLED), new_key()
    peer = Peer("farm", role, "orin-3", board="orin-nano" if role is Role.DEVICE else "")
    certificate = authority.issue(request_certificate(key), peer, LIFETIME, ENROLLED)
    write_identity(folder, Identity(key, certificate, authority.certificate_pem, AWAY))
    note_time(folder, ENROLLED)


def identity_topics(
    folder: Path, now: datetime = ENROLLED + timedelta(days=1), service: InstalledConnection | None = None
) -> dict[str, Finding]:
    return {finding.topic: finding for finding in identity_findings(folder, service, now)}


def levels(found: dict[str, Finding]) -> dict[str, str]:
    return {topic: finding.level for topic, finding in found.items()}


def test_an_enrolled_board_is_in_order(folder: Path) -> None:
    enrol(folder)
    found = identity_topics(folder, service=InstalledConnection(AWAY, is_insecure=False))
    assert levels(found) == {"key file": "ok", "certificate": "ok", "clock": "ok", "connection": "ok"}
    assert "orin-3" in found["certificate"].found and "expires on 2027-03-31, in 29 days" in found["certificate"].found
    assert found["connection"].found == "mutual TLS"


def test_a_board_without_identity_is_told_how_to_enrol(folder: Path) -> None:
    found = identity_topics(folder)
    assert levels(found) == {"certificate": "limited", "clock": "ok", "connection": "limited"}
    assert "wattfleet agent join" in found["certificate"].advice
    assert not folder.exists()


@pytest.mark.parametrize(
    ("days", "level", "says"),
    [
        (19, "ok", "in 11 days"),
        (21, "limited", "its renewal is due"),
        (31, "fails", "expired on 2027-03-31"),
    ],
)
def test_a_certificate_near_its_end_is_pointed_out(folder: Path, days: int, level: str, says: str) -> None:
    enrol(folder)
    certificate = identity_topics(folder, ENROLLED + timedelta(days=days))["certificate"]
    assert certificate.level == level and says in certificate.found


@pytest.mark.parametrize(
    ("now", "level"),
    [
        (datetime(1970, 1, 1, 0, 5, tzinfo=timezone.utc), "fails"),
        (datetime(2023, 6, 1, tzinfo=timezone.utc), "limited"),
        (ENROLLED - timedelta(hours=1), "ok"),
    ],
)
def test_a_clock_behind_the_enrolment_is_pointed_out(folder: Path, now: datetime, level: str) -> None:
    enrol(folder)
    clock = identity_topics(folder, now)["clock"]
    assert clock.level == level and f"{now:%Y-%m-%d %H:%M} UTC" in clock.found
    assert level == "ok" or "timedatectl" in clock.advice


def test_a_clock_before_all_certificates_is_pointed_out_before_the_enrolment(folder: Path) -> None:
    assert identity_topics(folder, datetime(1970, 1, 1, tzinfo=timezone.utc))["clock"].level == "fails"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_has_to_be_repaired(folder: Path, mode: int) -> None:
    enrol(folder)
    os.chmod(folder / "key.pem", mode)
    found = identity_topics(folder)
    assert found["key file"].level == "fails" and "chmod 600" in found["key file"].advice


def test_a_folder_that_others_may_enter_is_pointed_out(folder: Path) -> None:
    enrol(folder)
    os.chmod(folder, 0o755)
    found = identity_topics(folder)
    assert found["key file"].level == "limited" and f"chmod 700 {folder}" in found["key file"].advice
    assert found["certificate"].level == "ok"


def test_a_damaged_identity_has_to_be_repaired(folder: Path) -> None:
    enrol(folder)
    (folder / "certificate.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    found = identity_topics(folder)
    assert found["certificate"].level == "fails" and "wattfleet agent join" in found["certificate"].advice


def test_a_certificate_of_another_role_is_refused(folder: Path) -> None:
    enrol(folder, Role.VIEWER)
    certificate = identity_topics(folder)["certificate"]
    assert certificate.level == "fails" and "not one of a device" in certificate.found


def installed_connection(root: Path, coordinator: str, is_insecure: bool) -> InstalledConnection | None:
    """The connection settings of an installed service, as read back from below `root`."""
    path = root / SETTINGS_PATH.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text(ServiceSettings("host", "orin-3", coordinator, is_insecure=is_insecure).text())
    return InstalledConnection.read(root)


def test_plaintext_to_another_machine_is_pointed_out(folder: Path, tmp_path: Path) -> None:
    connection = identity_topics(folder, service=installed_connection(tmp_path, AWAY, is_insecure=True))["connection"]
    assert connection.level == "limited" and "anybody on the network" in connection.found


def test_plaintext_to_a_coordinator_on_this_machine_is_in_order(folder: Path, tmp_path: Path) -> None:
    connection = identity_topics(folder, service=installed_connection(tmp_path, HERE, is_insecure=False))["connection"]
    assert connection.level == "ok" and HERE in connection.found


def test_plaintext_that_is_still_allowed_after_the_enrolment_is_pointed_out(folder: Path, tmp_path: Path) -> None:
    enrol(folder)
    connection = identity_topics(folder, service=installed_connection(tmp_path, AWAY, is_insecure=True))["connection"]
    assert connection.level == "limited" and SETTINGS_PATH in connection.advice


def test_no_service_is_installed(tmp_path: Path) -> None:
    assert InstalledConnection.read(tmp_path) is None


@pytest.mark.parametrize(
    ("address", "is_enrolled", "is_insecure", "level", "says"),
    [
        ("127.0.0.1:9466", False, False, "ok", "for this machine only"),
        ("0.0.0.0:9466", True, False, "ok", "for viewers and operators"),
        ("0.0.0.0:9466", False, True, "limited", "anybody on the network can read"),
        ("0.0.0.0:9466", False, False, "fails", "has no certificate to protect it"),
        ("9466", False, False, "fails", "'9466' is not an address"),
    ],
)
def test_who_may_read_the_services_metrics_is_checked(
    folder: Path, address: str, is_enrolled: bool, is_insecure: bool, level: str, says: str
) -> None:
    if is_enrolled:
        enrol(folder)
    metrics = identity_topics(folder, service=InstalledConnection(HERE, is_insecure, address))["metrics"]
    assert metrics.level == level and says in metrics.found
    assert bool(metrics.advice) == (level != "ok")
