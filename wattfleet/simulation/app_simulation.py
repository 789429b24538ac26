"""The work of `wattfleet simulate --app DIR`: a user's app on a large simulated fleet, and the baselines."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from coordinator.references.published import open_reference
from wattfleet.common.atomic_files import replace_file
from wattfleet.common.console import count_of, energy_text
from wattfleet.common.html_page import write_page
from wattfleet.common.tables import FittingTable, columns, numbers
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import board_named
from wattfleet.core.planning.policies import policy_named
from wattfleet.simulation.app_run import PROGRAM, AppSimulation, slug
from wattfleet.simulation.baselines import PLAIN_FLOWER, PRESETS
from wattfleet.simulation.comparison import THIS_RUN, compared, comparison_figures, verdict, way_colours
from wattfleet.simulation.flower import OFFLINE, Part, PartFailedError, Parts
from wattfleet.simulation.own_app import read_app
from wattfleet.simulation.ray_clients import require_ray
from wattfleet.simulation.report_figures import percent
from wattfleet.simulation.run import left_text
from wattfleet.simulation.simulate import prepared, terminable, write_report

WAYS = (THIS_RUN, PRESETS, PLAIN_FLOWER)
"""The run with Wattfleet's plans, and the baselines, in the order in which they run."""

RESUME_FOLDER = "resume"
_SETTINGS, _PROGRESS = "settings.json", "progress.jsonl"
_POLL_S = 0.2
_MEMORY_EVERY_S = 5.0
_USUAL_START_S = 30.0
_SHOWN_EVERY_S = 10.0
_MB = 1e6


def fixed_settings(simulation: AppSimulation) -> dict[str, Any]:
    """Return what must not change between an interruption and its continuation, as JSON values."""
    settings = simulation.to_json()
    for name in ("ray_address", "gpus_per_client"):
        del settings[name]
    return {**settings, "files": simulation.app.digests(), "wattfleet": version("wattfleet")}


def kinds_named(text: str) -> dict[str, int]:
    """Parse a fleet such as `agx-orin:200,orin-nano:800`.

    Raises:
        InvalidInputError: a kind is unknown or listed twice, or a count is not a whole number above 0.
    """
    found: dict[str, int] = {}
    for item in filter(None, (each.strip() for each in text.split(","))):
        kind, _, count = item.partition(":")
        if kind in found:
            raise InvalidInputError(f"--devices {text!r} lists a kind twice: write it once, with a count")
        if not (count or "1").isdecimal() or int(count or "1") < 1:
            raise InvalidInputError(f"--devices {item!r}: write kind:count, such as agx-orin:200")
        board_named(kind)
        found[kind] = int(count or "1")
    if not found:
        raise InvalidInputError("--devices is empty: write kind:count, such as agx-orin:200,orin-nano:800")
    return found


def simulate_app(
    *,
    folder: Path,
    kinds: str,
    rounds: int,
    run_config: str,
    site_budget_w: float,
    modes: int,
    policy: str,
    clients: int | None,
    deadline_s: float | None,
    seed: int,
    reference: str,
    metric: str | None,
    ray_address: str | None,
    gpus_per_client: float,
    out: Path,
    as_json: bool,
) -> None:
    """Check the input, run the app in three ways, and write the report. An interrupted simulation goes on.

    Raises:
        InvalidInputError: an option is not valid, or differs from those of an interrupted simulation.
        PartFailedError: the app cannot be simulated; the text says why.
    """
    require_ray()
    open_reference(reference)
    policy_named(policy, count=clients, seed=seed, deadline_s=deadline_s)
    if rounds < 1 or modes < 5:
        raise InvalidInputError(f"--rounds must be at least 1 and --modes at least 5, not {rounds} and {modes}")
    simulation = AppSimulation(
        read_app(folder, rounds, run_config),
        kinds_named(kinds),
        rounds,
        site_budget_w,
        modes,
        policy,
        clients,
        deadline_s,
        seed,
        reference,
        metric,
        ray_address,
        gpus_per_client,
    )
    logs = prepared(out)
    resume = out / RESUME_FOLDER
    console = Console(stderr=as_json)
    progress = Progress(simulation, console)
    if begun := open_simulation(simulation, resume):
        progress.say(f"going on after an interruption: {begun}")
    with terminable():
        try:
            results = [_result(simulation, way, resume, logs, progress) for way in WAYS]
        except KeyboardInterrupt:
            progress.say("interrupted: the same command goes on after the last whole round")
            raise
    report = build_app_report(simulation, results, progress)
    write_report(report, out, write_app_html)
    shutil.rmtree(resume)
    if as_json:
        print((out / "report.json").read_text(), end="")
        return
    console.print(comparison_table(report["runs"][0]))
    console.print(" ".join(app_verdict(report["runs"][0])) + "\n", highlight=False)
    console.print(f"report: {out / 'report.html'}", highlight=False)


def open_simulation(simulation: AppSimulation, resume: Path) -> str:
    """Begin a simulation, or go on with an interrupted one; return what is done of it, empty for a new one.

    Raises:
        InvalidInputError: the interrupted one has other settings, or others can write its journal.
    """
    fixed, file = fixed_settings(simulation), resume / _SETTINGS
    with suppress(FileExistsError):
        resume.mkdir(mode=0o700)
    # The journal holds pickled objects: whoever writes them can run code here.
    found = resume.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise InvalidInputError(
            f"{resume} is not a folder of yours, or others can write to it, so that its journal is not safe to read:"
            " choose another --out, or remove that folder"
        )
    if not file.exists():
        replace_file(file, json.dumps(fixed).encode())
        return ""
    before = json.loads(file.read_text())
    if changed := list(_differences(before, fixed)):
        raise InvalidInputError(
            f"{resume} holds an interrupted simulation with other settings: {'; '.join(changed)}. Repeat its command to"
            " go on with it, choose another --out, or remove that folder"
        )
    done = [way for way in WAYS if (resume / f"{slug(way)}.json").exists()]
    return f"{', '.join(done)} done" if done else "its rounds are planned again, without training"


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{name} ")
        elif prefix == "files ":
            yield f"{name} has changed"
        else:
            yield f"{prefix}{name} was {old}, and is {new}"


# --- Processes --------------------------------------------------------------------------------------------------------


class Progress:
    """Shows what a simulation does, with the time that is left."""

    def __init__(self, simulation: AppSimulation, console: Console) -> None:
        """Print to a console.

        Args:
            simulation: what is simulated.
            console: where to print.
        """
        self._rounds, self._console = simulation.rounds, console
        self._began_s = time.monotonic()
        self._way, self._left_ways = THIS_RUN, len(WAYS)
        self._round_began_s = self._shown_s = self._began_s
        self._lasted_s: list[float] = []
        self._done = 0
        self.peak_bytes = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def say(self, text: str) -> None:
        """Print a line."""
        self._console.print(f"[{self.elapsed_s:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    def begin(self, way: str) -> None:
        """Begin a way."""
        self._way, self._left_ways = way, len(WAYS) - WAYS.index(way)
        self._done, self._round_began_s = 0, time.monotonic()

    def show(self, told: Mapping[str, Any]) -> None:
        """Show what a process has told."""
        now_s = time.monotonic()
        if "stage" in told:
            self.say(f"{self._way}: {told['stage']}")
            self._round_began_s = now_s
        elif "round" in told:
            self._done = told["round"]
            if not told["replayed"]:
                self._lasted_s.append(now_s - self._round_began_s)
            self._round_began_s = now_s
            accuracy = "" if told["accuracy"] is None else f", accuracy {told['accuracy']:.1%}"
            again = " (done before)" if told["replayed"] else ""
            self.say(
                f"{self._way}, round {told['round']} of {self._rounds}{again}: {told['devices']:,} devices,"
                f" {told['now_s']:,.0f} s in the boards' time{accuracy}; {self._left_text(0.0)}"
            )
            self._shown_s = now_s
        elif "handled" in told and now_s - self._shown_s > _SHOWN_EVERY_S:
            share = told["handled"] / told["of"]
            self.say(
                f"{self._way}, round {self._done + 1}: {told['handled']:,} of {told['of']:,} clients;"
                f" {self._left_text(share)}"
            )
            self._shown_s = now_s

    def _left_text(self, share: float) -> str:
        """Return the time that is left, given the share of the round's clients that are handled."""
        in_round_s = time.monotonic() - self._round_began_s
        usual_s = sum(self._lasted_s) / len(self._lasted_s) if self._lasted_s else in_round_s / max(share, 0.05)
        rounds = self._rounds - self._done + (self._left_ways - 1) * self._rounds
        left_s = max(0.0, rounds * usual_s - in_round_s) + (self._left_ways - 1) * _USUAL_START_S
        return left_text(left_s)

    def note_memory(self, part: Part) -> None:
        """Note the memory of a process and of those that it has started."""
        total = 0
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(part.process.pid)
            for each in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += each.memory_full_info().pss
        self.peak_bytes = max(self.peak_bytes, total)


def _result(simulation: AppSimulation, way: str, resume: Path, logs: Path, progress: Progress) -> dict[str, Any]:
    """Run one way, and return what it is in the report; what was run before is read.

    Raises:
        PartFailedError: the app cannot be simulated.
    """
    stored = resume / f"{slug(way)}.json"
    progress.begin(way)
    if stored.exists():
        found: dict[str, Any] = json.loads(stored.read_text())
        return found
    settings, told = resume / f"{slug(way)}.settings.json", resume / _PROGRESS
    replace_file(settings, json.dumps(simulation.of_way(way, resume).to_json()).encode())
    told.write_bytes(b"")
    with Parts(logs) as parts:
        command = [sys.executable, "-P", "-c", PROGRAM, str(settings), str(told)]
        part = parts.start(slug(way), command, {**OFFLINE, "PYTHONHASHSEED": "0", "RAY_USAGE_STATS_ENABLED": "0"})
        outcome = _followed(part, told, progress)
    if "error" in outcome:
        raise PartFailedError(f"{outcome['error']} (log: {part.log})")
    if "infeasible" in outcome:
        result = {"way": {"name": way, "reason": outcome["infeasible"]}}
        replace_file(stored, json.dumps(result).encode())
        return result
    content: dict[str, Any] = json.loads(stored.read_text())
    return content


def _followed(part: Part, told: Path, progress: Progress) -> Mapping[str, Any]:
    """Show what a process tells until it ends; return its last word.

    Raises:
        PartFailedError: it has ended without a last word.
    """
    noted_s = time.monotonic()
    with told.open(encoding="utf-8") as file:
        rest = ""
        while True:
            failure = part.failure()
            for line in (rest + file.read()).splitlines(keepends=True):
                if not line.endswith("\n"):
                    rest = line
                    break
                rest = ""
                content = json.loads(line)
                if content.keys() & {"error", "infeasible", "done"}:
                    return content  # type: ignore[no-any-return]
                progress.show(content)
            if failure is not None:
                raise failure
            if time.monotonic() - noted_s > _MEMORY_EVERY_S:
                noted_s = time.monotonic()
                progress.note_memory(part)
            time.sleep(_POLL_S)


# --- Report -----------------------------------------------------------------------------------------------------------


def build_app_report(
    simulation: AppSimulation, results: Sequence[Mapping[str, Any]], progress: Progress
) -> dict[str, Any]:
    """Return the content of `report.json`."""
    own, *baselines = results
    way = own["way"]
    content = {name: value for name, value in own.items() if name != "way"}
    return {
        "provenance": "simulated",
        "wattfleet_version": version("wattfleet"),
        "settings": {
            **{name: value for name, value in simulation.to_json().items() if name != "app"},
            "app": str(simulation.app.folder),
            "run_config": dict(simulation.app.changed_config),
        },
        "runs": [
            {
                "run": 1,
                "network": simulation.app.app_id,
                **content,
                "comparison": compared(way, [each["way"] for each in baselines], simulation.site_budget_w),
            }
        ],
        "elapsed_s": round(progress.elapsed_s, 1),
        "peak_memory_mb": round(progress.peak_bytes / _MB),
    }


def app_verdict(run: Mapping[str, Any]) -> list[str]:
    """Return what a run gained or lost against its baselines, in sentences."""
    if run["comparison"]["target"] is not None or len(run["comparison"]["ways"]) < 2:
        return verdict(run)
    ways = ", ".join(
        f"{each['name']} {each['duration_s']:,.0f} s and {energy_text(each['energy_j'])}"
        for each in run["comparison"]["ways"]
    )
    return [f"The app reports no metric that is called an accuracy: name one with --metric. All rounds took: {ways}."]


def comparison_table(run: Mapping[str, Any]) -> FittingTable:
    """Return the table of a run and its baselines."""
    comparison = run["comparison"]
    target = comparison["target"]
    until = () if target is None else (f"s to\n{percent(target)}", f"kJ to\n{percent(target)}")
    headings = (*until, "s in all", "kJ in all", "final\naccuracy", "most W", "devices\na round")
    chosen = [len(one["selected"]) for one in run["rounds"]]
    table = FittingTable(
        columns("way", *map(numbers, headings)),
        title=f"{run['network']}: simulated, in the boards' own time",
        has_lines=True,
    )
    for way in comparison["ways"]:
        to_target = way["to_target"]
        cells = [] if target is None else [f"{to_target['s']:,.0f}", f"{to_target['j'] / 1e3:,.0f}"]
        devices = [int(one["devices"][0].split()[0].replace(",", "")) for one in way["rounds"] if one["round"]]
        mean = sum(devices) / len(devices) if devices else sum(chosen) / max(1, len(chosen))
        cells += [f"{way['duration_s']:,.0f}", f"{way['energy_j'] / 1e3:,.0f}", percent(way["final_accuracy"])]
        table.add(way["name"], *cells, f"{way['most_w']:,.0f}", f"{mean:,.0f}")
    return table


def write_app_html(report: Mapping[str, Any], path: Path) -> None:
    """Write the report as an HTML page."""
    [run] = report["runs"]
    figures = comparison_figures(run, report["settings"]["site_budget_w"])
    write_page(
        path,
        "wattfleet.simulation",
        "app.html.j2",
        {f"run-1-{name}": figure for name, figure in figures.items()},
        {"percent": percent},
        report=report,
        part={"run": run, "verdict": app_verdict(run)},
        way_colours=way_colours(),
        count_of=count_of,
    )
