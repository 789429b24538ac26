"""Everything a coordinator has stored, as tables with a type and a unit for every column."""

from __future__ import annotations

import csv
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from coordinator.display.values import (
    HEAVY_FIELDS,
    device_values,
    device_workload_values,
    round_parts,
    round_values,
    run_values,
)
from coordinator.display.words import Values
from wattfleet.common.console import plain_text
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Assignment, SupplyUse
from wattfleet_proto.convert import plan_from_message, values_of
from wattfleet_proto.v1 import planning_pb2, power_pb2, view_pb2

if TYPE_CHECKING:
    import pandas as pd

Format = Literal["csv", "parquet"]

_TEXT, _COUNT, _NODE, _NUMBER, _FLAG = "string", "Int64", "UInt64", "Float64", "boolean"

_DTYPES = {
    FieldDescriptor.TYPE_STRING: _TEXT,
    FieldDescriptor.TYPE_ENUM: _TEXT,
    FieldDescriptor.TYPE_BOOL: _FLAG,
    FieldDescriptor.TYPE_DOUBLE: _NUMBER,
    FieldDescriptor.TYPE_UINT32: _COUNT,
    FieldDescriptor.TYPE_UINT64: _COUNT,
}


def _columns(kind: Descriptor, leave_out: Collection[str] = ()) -> dict[str, str]:
    """The columns of a message's fields, as `values_of` names them.

    Several words are one text. The values of a message within it have its field's name before their own, such as
    `sample_power_w`. Other fields that repeat are left out.
    """
    found: dict[str, str] = {}
    for field_ in kind.fields:
        inner = field_.message_type
        if field_.name in leave_out:
            continue
        if inner is not None and not field_.is_repeated:
            of_inner = _columns(inner)
            found |= {f"{field_.name}_{name}": dtype for name, dtype in of_inner.items()}
        elif inner is None and (not field_.is_repeated or field_.type == FieldDescriptor.TYPE_STRING):
            found[field_.name] = _DTYPES[field_.type]
    return found


_MODE = _columns(power_pb2.PowerMode.DESCRIPTOR)
_PART = {**_MODE, "epoch_s": _NUMBER, "power_w": _NUMBER, "power_limit_w": _NUMBER, "warmup_s": _NUMBER}
_ROUND = {"run_id": _TEXT, "round": _COUNT}
_WORKLOAD = {
    "workload": _TEXT,
    "batch": _COUNT,
    **_columns(view_pb2.DeviceWorkload.DESCRIPTOR, leave_out=("workload", "front")),
    "epoch_length_assumed": _FLAG,
}

COLUMNS: dict[str, dict[str, str]] = {
    "devices": _columns(view_pb2.DeviceView.DESCRIPTOR, leave_out=HEAVY_FIELDS),
    "fronts": {
        "device_id": _TEXT,
        "workload": _TEXT,
        **_MODE,
        "epoch_s": _NUMBER,
        "power_w": _NUMBER,
        "epoch_log_sd": _NUMBER,
        "power_log_sd": _NUMBER,
        "warmup_s": _NUMBER,
        "batch": _COUNT,
    },
    "workloads": {"device_id": _TEXT, **_WORKLOAD},
    "runs": {
        **_columns(view_pb2.RunView.DESCRIPTOR, leave_out=("rounds_asked_for", "workload")),
        "workload": _TEXT,
        "rounds": _COUNT,
        "labels": _TEXT,
    },
    "rounds": {**_columns(view_pb2.RoundView.DESCRIPTOR, leave_out=("plan",)), "failed": _COUNT, "late": _COUNT},
    "metrics": {**_ROUND, "metric": _TEXT, "value": _NUMBER},
    "supplies": {
        **_ROUND,
        "supply": _TEXT,
        "budget_w": _NUMBER,
        "planned_w": _NUMBER,
        "trimmed_budget_w": _NUMBER,
        "trimmed_planned_w": _NUMBER,
    },
    "assignments": {
        **_ROUND,
        "device_id": _TEXT,
        "node_id": _NODE,
        "batch": _COUNT,
        "epochs": _NUMBER,
        **_PART,
        "became": _TEXT,
        **{f"trimmed_{name}": dtype for name, dtype in _PART.items()},
    },
    "decisions": {**_ROUND, "device_id": _TEXT, "selected": _FLAG, "reason": _TEXT},
    "observations": {**_ROUND, **_columns(view_pb2.DeviceObservation.DESCRIPTOR)},
    "results": {**_ROUND, **_columns(planning_pb2.DeviceResult.DESCRIPTOR)},
}
"""Columns of every table, with the pandas name of their type. Tags are separated by spaces. Labels are a JSON object.

A round that is `unplanned` trained without a plan while its Flower server could not reach the coordinator, so that no
budget was kept; its columns of the plan are empty.

Plans are listed as first made. Columns named `trimmed_...` hold what replaced them in flight, when the budget fell or a
duty left less time, and are empty otherwise. The column `became` of an assignment is empty, `other mode` or `stopped`.
"""

_FORMULA_SIGNS = ("=", "+", "-", "@")

_Row = tuple[Any, ...]


@dataclass
class Tables:
    """The tables, built row by row.

    Attributes:
        rows: the rows of every table in `COLUMNS`, with values in the order of its columns; None for an unknown value.
    """

    rows: dict[str, list[_Row]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def add_devices(self, views: Iterable[view_pb2.DeviceView]) -> None:
        """Add devices with their workloads and fronts."""
        for view in views:
            self._add("devices", device_values(view))
            self.rows["workloads"] += [
                (view.device_id, *(device_workload_values(each)[name] for name in _WORKLOAD)) for each in view.workloads
            ]
            self.rows["fronts"] += [
                (
                    *(view.device_id, each.workload.name or None, *_mode(p.mode)),
                    *(p.epoch_s, p.power_w, p.epoch_log_sd, p.power_log_sd, p.warmup_s, p.batch or None),
                )
                for each in view.workloads
                for p in each.front.points
            ]

    def add_run(self, run: view_pb2.RunView, rounds: Iterable[view_pb2.RoundView]) -> None:
        """Add a run with its rounds; round 0 holds the metrics from before the first round."""
        values = run_values(run)
        self._add(
            "runs",
            {**values, "rounds": run.rounds_asked_for, "labels": json.dumps(values["labels"], ensure_ascii=False)},
        )
        self._add_metrics((run.run_id, 0), run.initial_metrics)
        for view in rounds:
            self._add_round(view)

    def _add_round(self, view: view_pb2.RoundView) -> None:
        key = (view.run_id, view.round)
        values = round_values(view)
        counts = {name: len(values[name]) for name in ("failed", "late")}
        self._add("rounds", {**values, "run_id": view.run_id, **counts})
        self._add_metrics(key, view.metrics)
        if not view.unplanned:
            self._add_plan(key, view)
        for name, messages in (("observations", view.observations), ("results", view.results)):
            self.rows[name] += [(*key, *values_of(each).values()) for each in messages]

    def _add_plan(self, key: tuple[str, int], view: view_pb2.RoundView) -> None:
        """Add a plan's decisions, and its assignments and supplies as first made and as trimmed."""
        plan = plan_from_message(view.plan)
        self.rows["decisions"] += [(*key, each.device_id, each.selected, each.reason) for each in plan.decisions]
        now = {} if plan.first_planned is None else {use.supply: use for use in plan.supplies}
        self.rows["supplies"] += [
            (*key, use.supply, use.budget_w, use.planned_w, *_use(now.get(use.supply)))
            for use in plan.original.supplies
        ]
        self.rows["assignments"] += [
            (
                *(*key, each.first.device_id, each.node_id, each.first.batch, each.first.epochs, *_part(each.first)),
                *(each.became, *_part(each.now if each.became == "other mode" else None)),
            )
            for each in round_parts(view, plan)
        ]

    def _add(self, name: str, values: Values) -> None:
        """Add one row from values by column name."""
        known = dict(_flat(values))
        # A column without a value belongs to a message that is absent, such as the sample of a device that is offline.
        self.rows[name].append(tuple(known.get(column) for column in COLUMNS[name]))

    def _add_metrics(self, key: tuple[str, int], metrics: Any) -> None:
        self.rows["metrics"] += [(*key, name, value) for name, value in sorted(metrics.items())]


def _flat(values: Values, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values by column, as `_columns` names them."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}_")
        elif isinstance(value, list):
            yield f"{prefix}{name}", " ".join(map(str, value))
        else:
            yield f"{prefix}{name}", value


def _use(use: SupplyUse | None) -> tuple[float | None, ...]:
    return (None, None) if use is None else (use.budget_w, use.planned_w)


def _part(part: Assignment | None) -> tuple[float | None, ...]:
    if part is None:
        return (None,) * len(_PART)
    return (*part.mode, part.epoch_s, part.power_w, part.power_limit_w, part.warmup_s)


def _mode(mode: Any) -> tuple[int, ...]:
    return tuple(getattr(mode, knob) for knob in _MODE)


def frame(name: str, rows: Sequence[_Row]) -> pd.DataFrame:
    """Convert one table to a data frame; unknown values and NaN metrics are NA."""
    import pandas as pd

    types = COLUMNS[name]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(types)
    return pd.DataFrame(
        {
            column: pd.array(list(values), dtype=dtype)  # type: ignore[call-overload]  # dtypes are named
            for (column, dtype), values in zip(types.items(), columns, strict=True)
        }
    )


def require_format(form: Format) -> None:
    """Check that a format can be written, before querying the coordinator.

    Raises:
        InvalidInputError: a package that the format needs is not installed.
    """
    if form != "parquet":
        return
    try:
        # Imported only to find out whether they are installed.
        import pandas  # noqa: F401
        import pyarrow  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"Parquet needs {error.name}: pip install 'wattfleet[parquet]', or write --format csv"
        ) from None


def write(tables: Tables, folder: Path, form: Format) -> list[Path]:
    """Write every table to its own file, replacing existing files atomically.

    Raises:
        InvalidInputError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as scratch:
            drafts = [_written(Path(scratch), name, rows, form) for name, rows in tables.rows.items()]
            written = [folder / draft.name for draft in drafts]
            for draft, path in zip(drafts, written, strict=True):
                os.replace(draft, path)
    except OSError as error:
        raise InvalidInputError(f"cannot write to {folder}: {error.strerror}") from None
    return written


def _written(folder: Path, name: str, rows: Sequence[_Row], form: Format) -> Path:
    path = folder / f"{name}.{form}"
    if form == "parquet":
        frame(name, rows).to_parquet(path, index=False, engine="pyarrow")
    else:
        types = COLUMNS[name].values()
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS[name])
            writer.writerows([_csv_cell(cell, dtype) for cell, dtype in zip(row, types, strict=True)] for row in rows)
    return path


def _csv_cell(cell: Any, dtype: str) -> str | int | float | None:
    """Format a value as pandas would, without pandas; an unknown value is None."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return None
    if dtype == _TEXT:
        return _csv_text(cell)
    if dtype == _NUMBER:
        return float(cell)
    return bool(cell) if dtype == _FLAG else int(cell)


def _csv_text(text: str) -> str:
    """Make a text harmless for terminals and spreadsheets; a quote precedes apparent formulas, as OWASP advises."""
    plain = plain_text(text, keep_newlines=True)
    return f"'{plain}" if plain.lstrip().startswith(_FORMULA_SIGNS) else plain
