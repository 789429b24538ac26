"""Every file format that a process reads: valid contents, and the function that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from google.protobuf import json_format

import reference_models
from coordinator.budgets.battery_watch import charge_in
from coordinator.budgets.prometheus_budget import PrometheusBudget, reading_of
from coordinator.budgets.site_file import read_site_file
from coordinator.settings import CoordinatorSettings
from coordinator.store.store import Store
from edge_agent.devices.device import Device
from edge_agent.devices.jetson.description import describe, open_described, read_described
from edge_agent.devices.jetson.nvpmodel_conf import parse_conf
from edge_agent.diagnosis import jetson_findings
from edge_agent.exporter import read_url
from edge_agent.paths import BACKUP_FILE, EXPORTER_FILE, IDLE_FILE, PROFILE_FILE, REVOKED_FILE, SESSION_FILE
from edge_agent.profiling.journal import Journal
from edge_agent.profiling.stored_profile import read_idle_mw, read_predictor, read_profile
from edge_agent.runtime.agent import installation_name
from edge_agent.session.certificate_keeper import RevokedCertificates
from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.session.status import WelcomeFile, read_session_status
from edge_agent.settings import AgentSettings
from edge_agent.training.mode_change import KnobBackup
from reference_models.proxy.proxy_runs import ProxyRun, RunsHeader, RunsJournal, stored_evaluate_every
from tests.fakes.agent_settings import only_workload
from tests.fakes.faked_jetson import ORIN_NANO, FakedJetson
from tests.fakes.fleets import front
from tests.fakes.stored_records import fill, served_by
from wattfleet.common.settings.model import load
from wattfleet.core.budgets import ReadingRule
from wattfleet.core.modes import JournalHeader
from wattfleet.core.modes import read_profile as read_corpus
from wattfleet.core.prediction import read_artefact, restore_predictor
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import session_pb2

_NOW = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)
_REFERENCE = Path(reference_models.__file__).parent / "agx_orin_resnet18"


@dataclass(frozen=True)
class Format:
    """One file format.

    Attributes:
        files: valid contents by file name; one of them is then made hostile.
        read: reads the folder with the files; may only raise errors of Wattfleet.
        is_a_file: whether something other than a file may be in its place; False for data that a process has in memory.
    """

    files: Mapping[str, bytes]
    read: Callable[[Path], object]
    is_a_file: bool = True


def formats(profiled: Path, board: Device, folder: Path) -> dict[str, Format]:
    """All formats by name.

    Args:
        profiled: the state directory of a profiled agent.
        board: a board of the same kind.
        folder: a folder for created files.
    """
    journal = (only_workload(profiled) / PROFILE_FILE).read_bytes()
    header = JournalHeader.from_line(json.loads(journal.partition(b"\n")[0]))

    def open_journal(state: Path) -> None:
        with Journal.open(state / PROFILE_FILE, header):
            pass

    def restore_knobs(state: Path) -> None:
        with KnobBackup.hold(board, state) as backup:
            backup.restore()

    reference = {path.name: path.read_bytes() for path in _REFERENCE.iterdir() if path.suffix != ".md"}
    predictor = next(
        path for path in only_workload(profiled).iterdir() if path.is_dir() and (path / "manifest.json").exists()
    )
    return {
        "site file": Format(
            {"site.toml": _SITE, "plan.csv": _PLAN, "harvest.csv": _HARVEST},
            lambda at: read_site_file(at / "site.toml"),
        ),
        "charge of a battery": Format({"charge": b"81.5 %\n"}, lambda at: charge_in(at / "charge")),
        "coordinator settings": Format(
            {"coordinator.toml": _COORDINATOR},
            lambda at: load(CoordinatorSettings, at / "coordinator.toml"),
        ),
        "agent settings": Format({"agent.toml": _AGENT}, lambda at: load(AgentSettings, at / "agent.toml")),
        "corpus": Format({"corpus.csv": _CORPUS}, lambda at: read_corpus(at / "corpus.csv")),
        "journal": Format({PROFILE_FILE: journal}, open_journal),
        "profile of the agent's commands": Format({PROFILE_FILE: journal}, read_profile),
        "idle power": Format({IDLE_FILE: (profiled / IDLE_FILE).read_bytes()}, lambda at: read_idle_mw(board, at)),
        "knob backup": Format({BACKUP_FILE: _knobs(board, folder)}, restore_knobs),
        "outbox": Format({"outbox.jsonl": _outbox(folder)}, lambda at: Outbox(OutboxFile(at / "outbox.jsonl"))),
        "welcome": Format({"welcome.json": _WELCOME}, lambda at: WelcomeFile(at / "welcome.json").load()),
        "address of metrics": Format({EXPORTER_FILE: b'{"url": "http://127.0.0.1:9466/metrics"}'}, read_url),
        "revoked certificates": Format(
            {REVOKED_FILE: b'{"serials": ["1f", "a0"]}'}, lambda at: RevokedCertificates(at / REVOKED_FILE)
        ),
        "session status": Format({SESSION_FILE: _STATUS}, read_session_status),
        "installation": Format({"installation": b"a" * 32 + b"\n"}, lambda at: installation_name(at / "installation")),
        "reference": Format(reference, lambda at: restore_predictor(read_artefact(at))),
        "predictor of the agent": Format(
            {f"{predictor.name}/{path.name}": path.read_bytes() for path in predictor.iterdir()},
            lambda at: restore_predictor(found) if (found := read_predictor(at)) else None,
        ),
        "nvpmodel.conf": Format(
            {"nvpmodel.conf": _NVPMODEL},
            lambda at: parse_conf((at / "nvpmodel.conf").read_text(errors="replace"), "nvpmodel.conf").text(),
            is_a_file=False,
        ),
        "description of a board": Format({"board.toml": _description(folder)}, _read_description, is_a_file=False),
        "Prometheus answer": Format({"answer.json": _ANSWER}, _read_answer, is_a_file=False),
        "journal of proxy runs": Format({"runs.jsonl": _proxy_runs(folder)}, _open_proxy_runs),
        "store": Format({"coordinator.db": _store(folder)}, _open_store),
    }


def _description(folder: Path) -> bytes:
    tree = FakedJetson(folder / "jetson", ORIN_NANO)
    tree.put("/etc/nvpmodel.conf", _NVPMODEL.decode())
    return describe(tree)[0].encode()


def _read_description(folder: Path) -> object:
    path = folder / "board.toml"
    return list(jetson_findings(read_described(path))), open_described(path).knobs()


def _proxy_runs(folder: Path) -> bytes:
    path = folder / "runs.jsonl"
    with RunsJournal(path, _PROXY_HEADER) as journal:
        for seed in range(3):
            journal.append(ProxyRun(8, seed, 640, 0.9, 1.5, "cpu"))
    return path.read_bytes()


def _open_proxy_runs(folder: Path) -> None:
    stored_evaluate_every(folder / "runs.jsonl")
    with RunsJournal(folder / "runs.jsonl", _PROXY_HEADER) as journal:
        journal.samples_by_batch([8], 3)


def _read_answer(folder: Path) -> None:
    budget = PrometheusBudget("http://127.0.0.1:9090", "watts", 15.0, ReadingRule(60.0, 50.0))
    reading_of((folder / "answer.json").read_bytes(), budget, _NOW)


def _open_store(folder: Path) -> None:
    with closing(Store(folder / "coordinator.db", lambda: _NOW)) as store:
        served_by(store)


def _store(folder: Path) -> bytes:
    path = folder / "full.db"
    fill(path, devices=3, rounds=2)
    return path.read_bytes()


def _knobs(board: Device, folder: Path) -> bytes:
    with KnobBackup.hold(board, folder) as backup:
        backup.save()
    return (folder / BACKUP_FILE).read_bytes()


def _outbox(folder: Path) -> bytes:
    outbox = Outbox(OutboxFile(folder / "outbox.jsonl"))
    points = front_to_message(front((10, 50), (20, 30)))
    outbox.add(
        session_pb2.SessionRequest(front=session_pb2.FrontReport(front=points, idle_w=5.0, minibatches_per_epoch=100))
    )
    for number in range(3):
        seen = session_pb2.Observation(plan_id=f"7/{number}", epoch_s=20.0, power_w=30.0)
        outbox.add(session_pb2.SessionRequest(observation=seen))
        drawn = session_pb2.TrainingEnergy(plan_id=f"7/{number}", energy_j=900.0, lasted_s=25.0)
        outbox.add(session_pb2.SessionRequest(energy=drawn))
    return (folder / "outbox.jsonl").read_bytes()


_WELCOME = json_format.MessageToJson(
    session_pb2.Welcome(reference_digest="a" * 64, profile_modes=20, lease_s=5.0), preserving_proto_field_name=True
).encode()
_PROXY_HEADER = RunsHeader("digits", "a" * 64, "b" * 64, "adam", 1e-3, 16, True, 0.9, 64, 6400)
_STATUS = b'{"address": "127.0.0.1:7070", "problem": "the coordinator is away", "is_exposed": false}\n'
_ANSWER = (
    b'{"status":"success","data":{"resultType":"vector","result":'
    b'[{"metric":{"__name__":"watts","job":"solar"},"value":[1774744200.123,"123.4"]}]}}'
)
_SITE = b"""\
[supplies.site]
budget = { schedule = { timezone = "Europe/Berlin", spans = { "06:00-22:00" = 120, "22:00-06:00" = 200.5 } } }

[supplies.rack-1]
parent = "site"
budget = { watts = 60 }
devices = ["orin-*", "nano-1"]

[supplies.rack-2]
parent = "site"
budget = { query = "clamp_min(solar_watts, 0)", url = "http://127.0.0.1:9090", fallback_w = 40, every_s = 10 }
devices = ["xavier-[12]"]

[supplies.rack-3]
parent = "site"
budget = { csv = "plan.csv", fallback_w = 50 }

[batteries.boards]
devices = ["orin-*"]
capacity = "74 Wh"
reserve_percent = 25
charge = { agent = true }
harvest = { timezone = "Europe/Berlin", hourly_w = [0,0,0,0,0,0,1,2,4,6,7,8,8,8,7,6,4,2,1,0,0,0,0,0] }

[batteries.roof]
supply = "site"
capacity = "2 kWh"
charge = { query = "soc_percent", url = "http://127.0.0.1:9090", every_s = 60 }
harvest = { csv = "harvest.csv" }
self_discharge_percent_per_day = 0.1
parked_h = 12
max_age_s = 900
decay_h = 4

[batteries.shed]
supply = "rack-2"
capacity = "500 kJ"
charge = { file = "charge/$device" }
harvest = { query = "pv_watts", url = "http://127.0.0.1:9090", max_age_s = 1800 }

[batteries.hand]
devices = ["xavier-[12]"]
capacity = "100 Wh"
charge = { operator = true }

[devices.orin-3]
limit_w = 20
tags = ["lab", "solar"]
"""
_PLAN = b"""\
from,until,watts
2026-06-01T06:00+02:00,,200
2026-06-01T18:00+02:00,2026-06-01T22:00+02:00,80
"""
_HARVEST = b"""\
from,watts
2026-06-01T06:00+02:00,20
2026-06-01T12:00+02:00,80.5
"""
_COORDINATOR = b"""\
[server]
address = "127.0.0.1:0"
stop_grace_s = 1.5

[site]
budget_w = 100

[policy]
name = "deadline"
deadline_s = 60

[selection]
exclude = ["tag:slow", "id:orin-3"]

[store]
keep_days = 30
check_rows = false
"""
_AGENT = b"""\
[device]
spec = "simulated:orin-nano"
id = "orin-nano-0"
state_dir = "/var/lib/wattfleet"

[session]
coordinator = "127.0.0.1:7070"
silence_timeout_s = 15.0

[profile]
minibatches_per_epoch = 100
"""
_CORPUS = b"""\
cores,cpu_khz,gpu_hz,mem_hz,minibatch_ms,power_mw
6,1510400,624750000,2133000000,100.5,12000
4,1190400,420750000,2133000000,150.25,9000
2,806400,306000000,665600000,400,6000
"""
_NVPMODEL = b"""\
# NVIDIA's, shortened
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
CORE_1 /sys/devices/system/cpu/cpu1/online

< PARAM TYPE=CLOCK NAME=EMC >
MAX_FREQ /sys/kernel/nvpmodel_emc_cap/emc_iso_cap

< POWER_MODEL ID=3 NAME=10W >
CPU_ONLINE CORE_0 1
CPU_ONLINE CORE_1 0
EMC MAX_FREQ 1065600000

< POWER_MODEL ID=0 NAME=MAXN >
CPU_ONLINE CORE_0 1   # always
EMC MAX_FREQ -1

< FAN_CONFIG DEFAULT=quiet >
< PM_CONFIG DEFAULT=3 >
"""
