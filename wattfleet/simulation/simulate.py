"""The work of `wattfleet simulate`: check the input, run the simulation, write the report."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.live import Live

from coordinator.references.published import open_reference
from wattfleet.common.stop_signals import handled_signals
from wattfleet.core.budgets import joules_of
from wattfleet.core.errors import InvalidInputError
from wattfleet.simulation.baselines import BaselineTraining
from wattfleet.simulation.comparison import verdict
from wattfleet.simulation.devices import FleetDevice, device_specs
from wattfleet.simulation.display import LineDisplay, LiveDisplay, closing_line, closing_tables, duty_table
from wattfleet.simulation.fleet import state_directory
from wattfleet.simulation.flower import HOST
from wattfleet.simulation.report import build_report, write_json
from wattfleet.simulation.report_html import write_html
from wattfleet.simulation.run import Display, Simulation, duties_named, open_fleet, require_kept
from wattfleet.simulation.settings import DEFAULT_APPS, PATIENCE_S, Apps, SimulationSettings

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"

_AGAIN_AFTER_S = 0.05


def run_simulation(
    *,
    kinds: str,
    csv_files: Sequence[Path],
    apps: Sequence[Apps] = DEFAULT_APPS,
    rounds: int,
    site_budget_w: float,
    profile_modes: int,
    policy: str,
    clients: int | None,
    deadline_s: float | None = None,
    seed: int,
    reference: str,
    metrics_port: int,
    own_epochs: bool = False,
    duties: Sequence[str] = (),
    out: Path,
    as_json: bool,
    patience_s: float = PATIENCE_S,
    energy_budget: str | None = None,
) -> None:
    """Check the input, run the simulation, and write the report.

    Raises:
        InvalidInputError: an option is not valid; nothing was started or written.
        PartFailedError: a part of the run has failed. The logs are kept, but no report is written.
    """
    open_reference(reference)  # refuse a reference here if the coordinator would refuse it later
    duties_named(duties)
    specs = device_specs(kinds, csv_files)
    settings = SimulationSettings(
        devices=[
            FleetDevice(device_id, spec, 1000 * seed + k, k, duties[k % len(duties)] if duties else None)
            for k, (device_id, spec) in enumerate(specs)
        ],
        apps=apps,
        rounds=rounds,
        site_budget_w=site_budget_w,
        profile_modes=profile_modes,
        policy=policy,
        clients=clients,
        deadline_s=deadline_s,
        seed=seed,
        reference=reference,
        metrics_port=metrics_port,
        own_epochs=own_epochs,
        patience_s=patience_s,
        energy_budget_j=None if energy_budget is None else joules_of("--energy-budget", energy_budget),
    )
    boards = open_fleet(settings.devices, site_budget_w)
    require_kept(settings.devices, boards)
    _require_free(metrics_port)
    console = Console(stderr=as_json)
    logs = prepared(out)
    with (
        terminable(),
        _scratch() as scratch,
        _display(console) as display,
        BaselineTraining(settings, boards) as baselines,
    ):
        simulation = Simulation(settings, logs, scratch, display, baselines)
        runs = simulation.complete({device_id: board.board_kind for device_id, board in boards.items()})
        states = {device.device_id: state_directory(scratch, device.device_id) for device in settings.devices}
        report = build_report(settings, runs, boards, states, baselines)
    write_report(report, out, write_html)
    if as_json:
        print((out / REPORT_JSON).read_text(), end="")
        return
    for run in report["runs"]:
        console.print(*closing_tables(run), sep="\n")
        console.print(closing_line(run), highlight=False)
        console.print(" ".join(verdict(run)) + "\n", highlight=False)
    if report["duties"]:
        console.print(duty_table(report["duties"]), end="\n\n")
    console.print(f"report: {out / REPORT_HTML}", highlight=False)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        # As servers do, so that a closed connection does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            raise InvalidInputError(f"cannot listen on port {port}: choose another --metrics-port") from None


def prepared(out: Path) -> Path:
    """Create and return the directory for logs, in the report's directory."""
    logs = out / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"--out {out}: cannot be written: {error.strerror}") from None
    return logs


def write_report(report: Mapping[str, Any], out: Path, write_page: Callable[[Mapping[str, Any], Path], None]) -> None:
    """Write both files under temporary names, then rename them, so that no report is ever incomplete."""
    files = {REPORT_JSON: write_json, REPORT_HTML: write_page}
    drafts = {name: out / f".{name}.tmp" for name in files}
    for name, write in files.items():
        write(report, drafts[name])
    for name, draft in drafts.items():
        os.replace(draft, out / name)


@contextmanager
def _scratch() -> Iterator[Path]:
    # Not in --out, since the path of a unix socket may have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="wattfleet-") as path:
        yield Path(path)


@contextmanager
def _display(console: Console) -> Iterator[Display]:
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4) as live:
            yield LiveDisplay(live)
    else:
        yield LineDisplay(console)


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM and a closed terminal end the run and its processes within this context, as Ctrl-C does.

    With `nohup`, a closed terminal ends nothing.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _is_in_grpc(frame):
            raise KeyboardInterrupt
        # An exception would leave gRPC's locks held, so that closing its channel would wait forever.
        again = threading.Timer(_AGAIN_AFTER_S, signal.raise_signal, (number,))
        again.daemon = True
        again.start()

    before = {number: signal.signal(number, interrupt) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_in_grpc(frame: FrameType | None) -> bool:
    """Whether the main thread is in a call of gRPC."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "grpc":
            return True
        frame = frame.f_back
    return False
