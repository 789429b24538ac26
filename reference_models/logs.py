"""Logs of training in one mode after another, as a training loop and jtop or tegrastats wrote them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import Measurement, PowerMode

Values = NDArray[np.float64]

INPUT_RAILS = ("VDD_IN", "POM_5V_IN", "VIN")
"""Rails that measure what a whole board draws."""

# Power rises for 2 to 3 s after training begins (docs/profiling.md).
_SETTLING_S = 3.0
_FEWEST_SAMPLES = 4
_MINIBATCH_FILE, _JTOP_FILE, _TEGRASTATS_FILE = "minibatch.csv", "jtop.csv", "tegrastats.log"
_TIME_COLUMNS = ("minibatch_ms", "epochtime_ms")


@dataclass(frozen=True, eq=False)
class RunLog:
    """The log of training in one mode. Compared by identity.

    Attributes:
        mode: the power mode that was set.
        minibatch_ms: `[k]` times of the minibatches, ms, the first one included.
        end_s: `[k]` seconds at which they ended.
        sample_s: `[p]` seconds of the power samples, on the same clock.
        sample_mw: `[p]` power samples, mW.
        shown: `[p, 4]` online cores and clocks that the log shows, as in `PowerMode`; NaN where it shows none.
    """

    mode: PowerMode
    minibatch_ms: Values
    end_s: Values
    sample_s: Values
    sample_mw: Values
    shown: Values

    def measurement(self, minibatches: int | None = None) -> Measurement | None:
        """The medians without the first minibatch; None if there are too few power samples.

        Args:
            minibatches: count the last ones only, in which the power has settled, and any power sample. None counts all
                minibatches, and four power samples or more from 3 s after the first minibatch.
        """
        within = self._counting(minibatches)
        if within.sum() < (_FEWEST_SAMPLES if minibatches is None else 1):
            return None
        last_ms = self.minibatch_ms[1:][-(minibatches or 0) :]
        return Measurement(self.mode, float(np.median(last_ms)), float(np.median(self.sample_mw[within])))

    def contradiction(self) -> str | None:
        """How the log contradicts the mode: other cores, or a higher clock; None if it does not. A clock may idle."""
        shown = self.shown[self._counting(None)]
        for name, wanted, column in zip(PowerMode._fields, self.mode, shown.T, strict=True):
            known = column[~np.isnan(column)]
            if not len(known):
                continue
            found = float(np.median(known))
            if found > 1.01 * wanted or (name == "cores" and found != wanted):
                return f"its log shows {name} {found:.0f}, not {wanted}"
        return None

    def _counting(self, minibatches: int | None) -> NDArray[np.bool_]:
        """`[p]` which power samples count."""
        first = max(1, len(self.end_s) - (minibatches or len(self.end_s)))
        begin_s = (
            self.end_s[0] + _SETTLING_S if minibatches is None else self.end_s[first] - self.minibatch_ms[first] / 1e3
        )
        settled = (self.sample_s >= begin_s) & (self.sample_s <= self.end_s[-1])
        return np.asarray(settled & ~np.isnan(self.sample_mw))


def read_run_logs(folder: Path, rails: Sequence[str] = (), interval_s: float = 1.0) -> list[RunLog]:
    """Read the runs in the folders `pm_<cores>_<cpu kHz>_<gpu Hz>_<memory Hz>`, in the order of their names.

    Each has `minibatch.csv`, with a column `minibatch_ms` (or `epochtime_ms`), and either `jtop.csv` or
    `tegrastats.log`. A column `log_time` has seconds on the clock of the power log: Unix seconds if that states dates,
    which are read as this machine's local time. Without it, training began with the power log.

    Args:
        folder: the folder of the runs.
        rails: the rails whose sum is the board's power. By default, the board's input, or the total of an early jtop.
        interval_s: seconds between lines of tegrastats that state no time.

    Raises:
        InvalidInputError: there are none, one lacks a log, or a log cannot be read or does not show the rails.
    """
    found = [_read(run, rails, interval_s) for run in sorted(folder.glob("pm_*_*_*_*"))]
    if not found:
        raise InvalidInputError(
            f"{folder}: holds no folder pm_<cores>_<cpu kHz>_<gpu Hz>_<memory Hz>: make one for each mode, or remove it"
        )
    return found


def _read(run: Path, rails: Sequence[str], interval_s: float) -> RunLog:
    import pandas as pd

    try:
        mode = PowerMode(*(int(knob) for knob in run.name.split("_")[1:]))
        table = pd.read_csv(run / _MINIBATCH_FILE)
        minibatch_ms = next(table[name] for name in _TIME_COLUMNS if name in table).to_numpy(np.float64)
        timed = "log_time" in table
        end_s = table["log_time"].to_numpy(np.float64) if timed else np.cumsum(minibatch_ms) / 1e3
        if (run / _JTOP_FILE).exists():
            sample_s, power_mw, shown = _read_jtop(run / _JTOP_FILE)
        else:
            sample_s, power_mw, shown = _read_tegrastats(run / _TEGRASTATS_FILE, interval_s)
        if not timed:
            sample_s = sample_s - sample_s[0]
    except StopIteration:
        raise InvalidInputError(
            f"{run / _MINIBATCH_FILE}: has no column {' or '.join(_TIME_COLUMNS)}: name the times so"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(f"{run}: its raw logs cannot be read ({error}): repair or remove the folder") from None
    if len(minibatch_ms) < 2:
        raise InvalidInputError(f"{run}: logs no minibatch after the first: remove the folder")
    return RunLog(mode, minibatch_ms, end_s, sample_s, _total_mw(run, power_mw, rails), shown)


def _total_mw(run: Path, power_mw: Mapping[str, Values], rails: Sequence[str]) -> Values:
    """`[p]` the board's power, mW, from that of its rails."""
    if not rails:
        rails = [name for name in ("power cur", *INPUT_RAILS) if name in power_mw][:1]
    missing = [name for name in rails if name not in power_mw]
    if missing or not rails:
        fact = f"shows no rail {missing[0]!r}" if missing else "shows no rail of the board's input"
        raise InvalidInputError(
            f"{run}: its log {fact}, but {', '.join(power_mw) or 'none'}: give --rail once for each rail that makes up"
            " the board's power (docs/devices.md lists them)"
        )
    return np.asarray(sum(power_mw[name] for name in rails))


def _read_jtop(path: Path) -> tuple[Values, dict[str, Values], Values]:
    """Times (Unix seconds without `log_time`), power by rail, and what is shown of the mode, from `jtop.stats`."""
    import pandas as pd

    table = pd.read_csv(path)
    if table.empty:
        raise ValueError(f"{path.name} has no sample")
    if "log_time" in table:
        at_s = table["log_time"].to_numpy(np.float64)
    else:
        at_s = np.array([datetime.fromisoformat(time).timestamp() for time in table["time"]])
    power = {
        str(name).removeprefix("Power "): pd.to_numeric(table[name], errors="coerce").to_numpy(np.float64)
        for name in table
        if str(name).startswith("Power ") or name == "power cur"
    }
    shown = np.full((len(table), 4), np.nan)
    cores = [name for name in table if re.fullmatch(r"CPU\d+", str(name))]
    if cores:
        shown[:, 0] = (table[cores] != "OFF").sum(axis=1)
    return at_s, power, shown


_TIME = re.compile(r"\d\d-\d\d-\d{4} \d\d:\d\d:\d\d")
_RAIL = re.compile(r"(\w+) (-?\d+)(?:mW)?/-?\d+(?:mW)?(?=\s|$)")
_CORES = re.compile(r"\bCPU \[([^]]*)\]")
_CLOCKS = (re.compile(r"\bGR3D_FREQ \d+%@\[?(\d+)"), re.compile(r"\bEMC_FREQ \d+%@(\d+)"))


def _read_tegrastats(path: Path, interval_s: float) -> tuple[Values, dict[str, Values], Values]:
    """Times (Unix seconds if stated), power by rail, and what is shown of the mode, from the lines of tegrastats."""
    at_s: list[float] = []
    rails: list[dict[str, float]] = []
    shown: list[list[float]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        power = {name: float(mw) for name, mw in _RAIL.findall(line)}
        if not power:
            continue
        stamp = _TIME.match(line)
        at_s.append(
            interval_s * len(at_s) if stamp is None else datetime.strptime(stamp[0], "%m-%d-%Y %H:%M:%S").timestamp()
        )
        rails.append(power)
        cores = _CORES.search(line)
        online = [] if cores is None else [each for each in cores[1].split(",") if each != "off"]
        khz = [1e3 * float(each.partition("@")[2]) for each in online if "@" in each]
        clocks = [1e6 * float(found[1]) if (found := each.search(line)) else np.nan for each in _CLOCKS]
        shown.append([len(online) or np.nan, max(khz, default=np.nan), *clocks])
    if not rails:
        raise ValueError(f"{path.name} has no line of tegrastats with a power rail")
    names = dict.fromkeys(name for power in rails for name in power)
    power_mw = {name: np.array([power.get(name, np.nan) for power in rails]) for name in names}
    return np.array(at_s), power_mw, np.array(shown)
