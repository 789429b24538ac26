"""Exported tables, when read again, contain what the coordinator knows."""

from __future__ import annotations

import asyncio
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from coordinator.cli.export.tables import COLUMNS
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import serving_client
from tests.fakes.shell import a_round, asked, command, rack_and_roof, served_with_shell
from tests.fakes.small_fleet import NANO_NODE, ORIN_FRONT, ORIN_NODE, RUN, RUN_NAME
from wattfleet.errors import InvalidInputError
from wattfleet_proto.v1 import planning_pb2

_NEEDS_PYARROW = pytest.mark.skipif(find_spec("pyarrow") is None, reason="the extra `parquet` is not installed")
FORMATS = ["csv", pytest.param("parquet", marks=_NEEDS_PYARROW)]


def read(folder: Path, form: str) -> dict[str, list[dict[str, Any]]]:
    """Every table, row by row; None for unknown values."""
    tables = {}
    for name, types in COLUMNS.items():
        path = folder / f"{name}.{form}"
        frame = pd.read_parquet(path) if form == "parquet" else pd.read_csv(path, dtype=types)  # type: ignore[call-overload]
        assert list(frame.columns) == list(types)
        if form == "parquet":
            assert {column: str(dtype) for column, dtype in frame.dtypes.items()} == types
        rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
        tables[name] = [{str(key): value for key, value in row.items()} for row in rows]
    return tables


@pytest.mark.parametrize("form", FORMATS)
async def test_what_is_exported_is_what_is_known(config: CoordinatorSettings, tmp_path: Path, form: str) -> None:
    out = tmp_path / "a folder" / "tables"

    async with served_with_shell(config.with_values(site=rack_and_roof(tmp_path))) as (client, shell):
        orin, _ = await client.two_ready()
        await shell("tag", "nano", "--add", "b", "--add", "a")
        plan = await a_round(client, orin)
        await client.plan(2)
        printed = await asked(shell, "export", "--out", str(out), "--format", form)
        assert {Path(each["file"]).stem for each in printed} == set(COLUMNS)
        tables = await asyncio.to_thread(read, out, form)
        assert {Path(each["file"]).stem: each["rows"] for each in printed} == {
            name: len(rows) for name, rows in tables.items()
        }
        empty = None if form == "csv" else ""
        nano, orin_row = tables["devices"]
        assert (nano["device_id"], nano["site_tags"], nano["operator_tags"]) == ("nano", "lab", "a b")
        assert (nano["limit_w"], orin_row["limit_w"], orin_row["supply"]) == (20.0, None, "rack")
        assert (orin_row["idle_w"], orin_row["profiled_modes"], orin_row["drained"]) == (5.0, 50, False)
        front = [row for row in tables["fronts"] if row["device_id"] == "orin"]
        assert [row["epoch_s"] for row in front] == ORIN_FRONT.epoch_s.tolist()
        assert [row["gpu_hz"] for row in front] == ORIN_FRONT.modes[:, 2].astype(int).tolist()
        [run] = tables["runs"]
        began = run.pop("started_unix_s")
        assert run == {
            "run_id": RUN,
            "name": RUN_NAME,
            "labels": "{}",
            "strategy": "FedAvg",
            "rounds": 3,
            "workload": "unnamed",
            "finished": False,
            "error": empty,
            "finished_unix_s": None,
        }
        first, second = tables["rounds"]
        assert (first["run_id"], first["round"], first["devices"], first["failed"]) == (RUN, 1, 2, 1)
        assert (first["late"], second["failed"], second["late"]) == (0, 0, 0)
        assert (first["planned_w"], first["planned_s"], first["wall_s"]) == (plan.planned_w, plan.duration_s, 41.5)
        times = [orin_row["first_seen_unix_s"], began, first["planned_unix_s"], first["finished_unix_s"], time.time()]
        assert times == sorted(times) and second["finished_unix_s"] is None
        assert (first["observed_site_w"], second["wall_s"], second["deadline_s"]) == (None, None, None)
        assert [row for row in tables["metrics"] if row["metric"] == "accuracy"] == [
            {"run_id": RUN, "round": 1, "metric": "accuracy", "value": 2 / 3}
        ]
        parts = {row["device_id"]: row for row in tables["assignments"] if row["round"] == 1}
        assert {device_id: row["node_id"] for device_id, row in parts.items()} == {
            "orin": ORIN_NODE,
            "nano": NANO_NODE,
        }
        for assignment in plan.assignments:
            row = parts[assignment.device_id]
            assert (row["power_limit_w"], row["epoch_s"]) == (assignment.power_limit_w, assignment.epoch_s)
            assert row["gpu_hz"] == assignment.mode.gpu_hz
        assert [(row["device_id"], row["selected"], row["reason"]) for row in tables["decisions"][:2]] == [
            (each.device_id, each.selected, each.reason) for each in plan.decisions
        ]
        assert tables["observations"] == [
            {"run_id": RUN, "round": 1, "device_id": "orin", "epoch_s": 20.5, "power_w": 31.25, "beside_duty": True}
        ]
        assert {row["device_id"]: (row["failure"], row["num_examples"], row["loss"]) for row in tables["results"]} == {
            "orin": (empty, 96.0, 0.125),
            "nano": ("the node, is gone\nfor good", None, None),
        }
        assert {row["supply"]: row["budget_w"] for row in tables["supplies"] if row["round"] == 1} == {
            "site": 100.0,
            "rack": 60.0,
            "roof": 40.0,
        }


@pytest.mark.parametrize("form", FORMATS)
async def test_a_trimmed_round_is_exported_as_planned_with_what_became_of_it(
    config: CoordinatorSettings, tmp_path: Path, form: str
) -> None:

    async with served_with_shell(config) as (client, shell):
        _agents = await client.two_ready()
        plan = await client.plan()
        for watts in ("40", "20"):
            await shell("budget", "set", "site", watts, columns=100)
            await client.obey()
        await shell("export", "--out", str(tmp_path / "out"), "--format", form)
        tables = await asyncio.to_thread(read, tmp_path / "out", form)
        [row] = tables["rounds"]
        assert (row["devices"], row["in_other_mode"], row["stopped"]) == (2, 0, 2 - 1)
        assert (row["site_budget_w"], row["planned_w"], row["planned_s"]) == (100.0, plan.planned_w, plan.duration_s)
        assert (row["trimmed_site_budget_w"], row["trimmed_planned_w"]) == (20.0, 20.0)
        [site] = tables["supplies"]
        assert (site["budget_w"], site["trimmed_budget_w"], site["trimmed_planned_w"]) == (100.0, 20.0, 20.0)
        nano, orin = tables["assignments"]
        for part, exported in zip(plan.assignments, (nano, orin), strict=True):
            assert (exported["epoch_s"], exported["power_limit_w"]) == (part.epoch_s, part.power_limit_w)
        assert {nano["became"], orin["became"]} == {"stopped", None}
        assert orin["trimmed_cores"] is None


async def test_one_run_of_the_archive_can_be_exported_alone(config: CoordinatorSettings, tmp_path: Path) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        for run_id in ("1", "2"):
            await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=run_id, strategy="FedAvg", rounds=1))
            await client.plan(1, run_id)
            await client.end_trainings()
            metrics = {"accuracy": 0.1}
            request = planning_pb2.ReportMetricsRequest(run_id=run_id, round=0, metrics=metrics)
            await client.planning.ReportMetrics(request)
            await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=run_id))
    async with served_with_shell(config) as (client, shell):
        await shell("export", "--out", str(tmp_path / "out"), "--run", "1")
        tables = read(tmp_path / "out", "csv")
        assert {row["run_id"] for name in ("runs", "rounds", "assignments") for row in tables[name]} == {"1"}
        assert tables["metrics"] == [{"run_id": "1", "round": 0, "metric": "accuracy", "value": 0.1}]
        assert len(tables["devices"]) == 2
        with pytest.raises(InvalidInputError, match="unknown run '7': it never started, or was deleted; "):
            await shell("export", "--out", str(tmp_path / "none"), "--run", "7")
        assert not (tmp_path / "none").exists()


async def test_tables_replace_those_of_before_and_nothing_else(config: CoordinatorSettings, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    (tmp_path / "out" / "devices.csv").write_text("old")

    async with served_with_shell(config) as (client, shell):
        await client.agent().hello("orin")
        await shell("export", "--out", str(tmp_path / "out"))
        assert {path.name for path in (tmp_path / "out").iterdir()} == {
            "notes.txt",
            *(f"{name}.csv" for name in COLUMNS),
        }
        assert [row["device_id"] for row in read(tmp_path / "out", "csv")["devices"]] == ["orin"]
        with pytest.raises(InvalidInputError, match=r"cannot write to .*notes.txt: "):
            await shell("export", "--out", str(tmp_path / "out" / "notes.txt"))


def test_parquet_without_its_library_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInputError, match=r"Parquet needs pyarrow: pip install 'wattfleet\[parquet\]'"):
        command("export", "--out", str(tmp_path / "out"), "--format", "parquet", "--coordinator", "127.0.0.1:1")
    assert not (tmp_path / "out").exists()
