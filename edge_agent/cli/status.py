"""`wattfleet agent status`, `watch`, `doctor`, `selftest` and `describe`: what the device is, does and lacks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_agent.cli.options import (
    DeviceOption,
    IdentityOption,
    JsonOption,
    SocketOption,
    StateDirOption,
    StoredWorkloadOption,
    open_named,
)
from edge_agent.paths import DEFAULT_STATE_DIRECTORY, IDENTITY_DIRECTORY
from wattfleet.common.console import count_of, json_text, print_json, terminal
from wattfleet_proto.names import DEFAULT_SOCKET

if TYPE_CHECKING:
    from rich.table import Table

    from edge_agent.devices.device import Device
    from edge_agent.diagnosis import Finding, Sample
    from edge_agent.profiling.stored_profile import FittedDevice, StoredWorkload
    from wattfleet.common.tables import FittingTable
    from wattfleet.core.duties import KeptDuty


# --- Status -----------------------------------------------------------------------------------------------------------
# `wattfleet agent status`: the current state of the device and its agent.


def status(
    device: DeviceOption = "auto",
    workload: Annotated[str | None, typer.Option(help="Show only this workload.", show_default=False)] = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    identity: IdentityOption = None,
    socket: SocketOption = Path(DEFAULT_SOCKET),
    json_: JsonOption = False,
) -> None:
    """Show the device's current mode, power and temperature, and the profile and predictor of each workload.

    The exit code is 1 if something cannot be read.
    """
    from edge_agent.devices.selection import folder_of_device

    board = open_named(device, state_dir)
    folder = folder_of_device(device, state_dir)
    problems: dict[str, str] = {}
    parts: Mapping[str, Callable[[], dict[str, Any] | None]] = {
        "device": lambda: _device(board),
        "knob_backup": lambda: _knob_backup(folder),
        "session": lambda: _session(state_dir, folder),
        "references": lambda: _references(state_dir),
        "identity": lambda: _identity(identity or state_dir / IDENTITY_DIRECTORY),
        "duty": lambda: _duty(state_dir, socket),
        "metrics": lambda: _metrics(state_dir, folder),
        "training": lambda: _training(socket),
        "workloads": lambda: _workloads(state_dir, workload, problems),
    }
    content = {name: _or_problem(name, part, problems) for name, part in parts.items()}
    if json_:
        print_json({**content, "problems": problems})
    else:
        _print_table(content, problems)
    if problems:
        raise typer.Exit(1)


def _or_problem(
    name: str, part: Callable[[], dict[str, Any] | None], problems: dict[str, str]
) -> dict[str, Any] | None:
    """Read one part of the status; on failure, note it and go on, so that the other parts are still shown."""
    from wattfleet.core.errors import WattfleetError

    try:
        return part()
    except WattfleetError as error:
        problems[name] = str(error)
        return None


def _device(board: Device) -> dict[str, Any]:
    import math

    from edge_agent.devices.meters import power_now_mw
    from edge_agent.devices.sysfs import applicable_presets, mode_argument

    mode, conditions = board.current_mode(), board.conditions()
    power_mw = power_now_mw(board)
    return {
        "board": board.board_kind,
        "provenance": board.provenance,
        "mode": mode._asdict(),
        "argument": mode_argument(mode),
        "label": mode.label(),
        "presets": [name for name, preset in applicable_presets(board).items() if preset == mode],
        "basis": board.basis,
        "supply": _supply(board),
        "power_w": None if math.isnan(power_mw) else power_mw / 1e3,
        "temperature_c": conditions.temperature_c,
        "throttle_events": conditions.throttle_events,
    }


def _supply(board: Device) -> dict[str, Any] | None:
    """Return voltage and current of the board's first rail; None if it does not measure them."""
    from dataclasses import asdict

    from edge_agent.devices.sysfs import SysfsDevice

    supply = board.power.read_supply() if isinstance(board, SysfsDevice) else None
    return None if supply is None else asdict(supply)


def _knob_backup(folder: Path) -> dict[str, Any]:
    from edge_agent.training.mode_change import has_backup, holder_of

    return {"held_by": holder_of(folder), "restore_file": has_backup(folder)}


def _session(state_directory: Path, folder: Path) -> dict[str, Any] | None:
    from dataclasses import asdict

    from edge_agent.session.status import read_session_status
    from edge_agent.training.mode_change import holder_of
    from wattfleet.common.identity.channels import PLAINTEXT_WARNING

    status = read_session_status(state_directory)
    if status is None:
        return None
    warning = PLAINTEXT_WARNING if status.is_exposed else None
    return {**asdict(status), "warning": warning, "agent_runs": holder_of(folder) is not None}


def _identity(folder: Path) -> dict[str, Any] | None:
    from wattfleet.common.clock import utc_now
    from wattfleet.common.identity.identity_folder import read_identity
    from wattfleet.common.identity.renewal import expiry_text

    identity = read_identity(folder)
    if identity is None:
        return None
    certificate, now = identity.certificate, utc_now()
    expired = certificate.not_after <= now
    return {
        "folder": str(folder),
        "peer": identity.certificate.uri,
        "not_after": certificate.not_after.isoformat(),
        "expiry": expiry_text(certificate, now),
        "remedy": "enrol again with `wattfleet agent join`" if expired else None,
    }


def _references(state_directory: Path) -> dict[str, Any] | None:
    """Return the signed references in force; None if references need not be signed."""
    from edge_agent.paths import TRUST_DIRECTORY
    from edge_agent.session.references import ReferenceTrust

    trust = ReferenceTrust(state_directory / TRUST_DIRECTORY)
    if not trust.is_required:
        return None
    status = trust.status
    return {"in_force": list(status.digests), "refused": status.refused or None}


def _duty(state_directory: Path, socket: Path) -> dict[str, Any] | None:
    import json
    from dataclasses import asdict

    from edge_agent.serving.duty_figures import DutyFile
    from edge_agent.serving.duty_service import DutyClient, NoAgentError

    stored = DutyFile(state_directory).read()
    if stored is None:
        return None
    try:
        shown = DutyClient(socket).show()
    except NoAgentError:
        shown = None
    return {**json.loads(stored.to_json()), "kept": None if shown is None else asdict(shown[1])}


def _metrics(state_directory: Path, folder: Path) -> dict[str, Any] | None:
    """Return the URL at which the running agent serves its metrics; None if it serves none."""
    from edge_agent.exporter import read_url
    from edge_agent.training.mode_change import holder_of

    url = read_url(state_directory)
    return None if url is None or holder_of(folder) is None else {"url": url}


def _training(socket: Path) -> dict[str, Any] | None:
    """Return the training in progress and its user; None without one, or if only the agent's own user may see it."""
    from edge_agent.runtime.app_trainings import training_now

    return training_now(socket)


def _workloads(state_directory: Path, only: str | None, problems: dict[str, str]) -> dict[str, Any]:
    """Return the workloads by name, the most recently used first."""
    from edge_agent.profiling.stored_profile import WorkloadFolders, chosen_workload

    stored = WorkloadFolders(state_directory).stored()
    if only is not None:
        stored = [chosen_workload(state_directory, only)]
    return {
        each.name: {
            "minibatches_per_epoch": each.known.minibatches_per_epoch,
            "is_length_estimated": each.known.is_length_estimated,
            "batch": each.known.workload.facts.batch,
            "loader_workers": each.known.workload.facts.loader_workers,
            "folder": str(each.folder),
            "profile": _or_problem(f"profile of {each.name}", partial(_profile, each), problems),
            "predictor": _or_problem(f"predictor of {each.name}", partial(_predictor, each.folder), problems),
        }
        for each in stored
    }


def _profile(stored: StoredWorkload) -> dict[str, Any] | None:
    from edge_agent.profiling.stored_profile import read_profile

    measured = read_profile(stored.folder, stored.known.workload.facts.batch)
    if measured is None:
        return None
    return {
        "device_id": measured.header.device_id,
        "workload": measured.header.workload,
        "minibatch": measured.batch,
        "provenance": measured.header.provenance,
        "method": str(measured.method),
        "measured_modes": measured.measured_modes,
        "discarded": measured.discarded,
        "seconds": measured.seconds,
        "renewed": measured.renewed,
    }


def _predictor(folder: Path) -> dict[str, Any] | None:
    from edge_agent.profiling.stored_profile import read_predictor

    artefact = read_predictor(folder)
    if artefact is None:
        return None
    details = artefact.details
    return {
        "kind": details.predictor,
        "digest": artefact.digest,
        "workload": details.workload.name,
        "fitted_to_modes": details.figures.get("profiled_modes"),
    }


def _print_table(content: Mapping[str, dict[str, Any] | None], problems: Mapping[str, str]) -> None:
    from rich.text import Text

    from wattfleet.common.tables import facts

    table = facts()
    lines = {
        "device": _device_lines,
        "knob_backup": _knob_backup_lines,
        "session": _session_lines,
        "references": _references_lines,
        "identity": _identity_lines,
        "duty": _duty_lines,
        "metrics": lambda metrics: {} if metrics is None else {"metrics": metrics["url"]},
        "training": _training_lines,
    }
    for name, in_words in lines.items():
        if name in problems:
            table.add_row(name, Text(problems[name], style="red"))
            continue
        for what, text in in_words(content[name]).items():
            table.add_row(what, Text(text))
    if "workloads" in problems:
        table.add_row("workloads", Text(problems["workloads"], style="red"))
    elif not content["workloads"]:
        table.add_row(
            "workloads", "none yet; `wattfleet agent profile` measures one, and so does a run that trains here"
        )
    for name, known in (content["workloads"] or {}).items():
        table.add_row("workload", Text(_workload_line(name, known)))
        is_length_known = known["minibatches_per_epoch"] is not None
        profile_lines = partial(_profile_lines, is_length_known=is_length_known)
        for part, in_words in (("profile", profile_lines), ("predictor", _predictor_lines)):
            if (problem := problems.get(f"{part} of {name}")) is not None:
                table.add_row(part, Text(problem, style="red"))
                continue
            for what, text in in_words(known[part]).items():
                table.add_row(what, Text(text))
    terminal().print(table)


def _device_lines(device: Any) -> dict[str, str]:
    named = f", {' or '.join(device['presets'])}" if device["presets"] else ""
    degrees, power_w, throttled = device["temperature_c"], device["power_w"], device["throttle_events"]
    return {
        "device": f"{device['board']} ({device['provenance']})",
        "mode": f"{device['argument']} ({device['label']}{named})",
        "power": "cannot be read" if power_w is None else f"{power_w:.1f} W",
        **({"supply": _supply_text(device["supply"])} if device["supply"] else {}),
        **({"figures of": device["basis"]} if device["basis"] else {}),
        "temperature": "not reported by this board" if degrees is None else f"{degrees:.1f} degrees C",
        "throttled": "not counted by this board" if throttled is None else f"{count_of(throttled, 'time')} since boot",
    }


def _supply_text(supply: Mapping[str, Any]) -> str:
    from edge_agent.devices.jetson.board import Supply

    return Supply(**supply).text


def _knob_backup_lines(backup: Any) -> dict[str, str]:
    holder, kept = backup["held_by"], backup["restore_file"]
    if holder is not None:
        return {"changed": f"in use by process {holder}{', which will restore it when it ends' if kept else ''}"}
    if kept:
        return {"changed": "yes; undo with `wattfleet agent restore`"}
    return {"changed": "no, it has its owner's settings"}


def _session_lines(session: Any) -> dict[str, str]:
    if session is None:
        return {"coordinator": "never connected"}
    if not session["agent_runs"]:
        return {"coordinator": "not connected, as no agent runs"}
    since = datetime.fromtimestamp(session["unix_s"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    lines = {"coordinator": f"{session['address']}, since {since}: {session['problem'] or 'connected'}"}
    return {**lines, "warning": session["warning"]} if session["warning"] else lines


def _identity_lines(identity: Any) -> dict[str, str]:
    if identity is None:
        return {"certificate": "none; enrol with `wattfleet agent join`"}
    remedy = f": {identity['remedy']}" if identity["remedy"] else ""
    return {"certificate": f"{identity['peer']}, {identity['expiry']}{remedy}"}


def _references_lines(references: Any) -> dict[str, str]:
    if references is None:
        return {}
    in_force = ", ".join(digest[:12] for digest in references["in_force"])
    lines = {"references": f"signed; {in_force} in force" if in_force else "have to be signed; none in force yet"}
    return lines | ({"refused": references["refused"]} if references["refused"] else {})


def _duty_lines(duty: Any) -> dict[str, str]:
    if duty is None:
        return {"duty": "none"}
    if duty["kept"] is None:
        limit = f"{duty['quantile']:.0%} of requests within {duty['latency_ms']:g} ms"
        return {"duty": f"{duty['workload']}: {limit}; no agent keeps it now"}
    from wattfleet.core.duties import KeptDuty

    return KeptDuty(**duty["kept"]).lines()


def _training_lines(training: Any) -> dict[str, str]:
    if training is None:
        return {}
    process = f"process {training['pid']}" if training["pid"] else "a process of another container"
    by = f"by user {training['user']}, {process}"
    return {"training": f"{training['plan_id']}, {by}, for {_duration(training['running_s'])}"}


def _workload_line(name: str, known: Mapping[str, Any]) -> str:
    length = known["minibatches_per_epoch"]
    if length is None:
        return name
    return name + (
        f", an epoch like {length:,} predicted minibatches"
        if known["is_length_estimated"]
        else f", {length:,} minibatches in an epoch"
    )


def _profile_lines(profile: Any, is_length_known: bool) -> dict[str, str]:
    if profile is None or not profile["measured_modes"]:
        if is_length_known:
            return {"profile": "no mode measured yet; the agent's log has the reason"}
        remedy = "if it has a loop over minibatches, wrap the loop's data in `wattfleet.flower.profiled`"
        return {"profile": f"no mode measured yet: no training has reported its data loader; {remedy}"}
    line = f"{count_of(profile['measured_modes'], 'mode')} of {profile['workload']}, minibatch {profile['minibatch']}"
    line += f" ({profile['provenance']}), in {_duration(profile['seconds'])}"
    if profile["discarded"]:
        line += f"; {count_of(profile['discarded'], 'disturbed measurement')} discarded"
    if profile["renewed"] is not None:
        line += f"; restarted: {profile['renewed']}"
    return {"profile": line}


def _predictor_lines(predictor: Any) -> dict[str, str]:
    if predictor is None:
        return {"predictor": "not fitted yet"}
    fitted = predictor["fitted_to_modes"]
    to = "" if fitted is None else f", fitted to {count_of(fitted, 'mode')}"
    return {"predictor": f"{predictor['kind']} for {predictor['workload']}{to}, digest {predictor['digest'][:12]}..."}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


# --- Watch ------------------------------------------------------------------------------------------------------------
# `wattfleet agent watch`: live power, temperature and mode beside the prediction.

_INTERVAL_S = 1.0
_DISPLAYED_SAMPLES = 60
_BARS = "▁▂▃▄▅▆▇█"


def watch(
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after this many seconds. By default, run until Ctrl-C.")
    ] = None,
    device: DeviceOption = "auto",
    workload: StoredWorkloadOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    socket: SocketOption = Path(DEFAULT_SOCKET),
    json_: Annotated[
        bool, typer.Option("--json", help="Print one line of JSON per sample instead of a table.")
    ] = False,
) -> None:
    """Show power, temperature, throttling and the current mode every second, without changing anything."""
    from edge_agent.diagnosis import samples
    from wattfleet.common.stop_signals import StoppedBySignal, StopSignals

    board = open_named(device, state_dir)
    fitted, no_prediction = _fitted(board, state_dir, workload)
    try:
        with (
            StopSignals.held() as signals,
            closing(samples(board, fitted, seconds, lambda: _wait(board))) as live_samples,
        ):
            with signals.interrupting():
                if json_:
                    _print_lines(live_samples, socket, state_dir)
                else:
                    _show(live_samples, board, no_prediction, socket, state_dir)
    except StoppedBySignal:
        # Ctrl-C is the normal way to end this command.
        return


def _wait(board: Device) -> None:
    """Wait for a second on the device's clock and, if that is virtual, also on the wall clock."""
    import time

    begun_s = time.monotonic()
    board.clock.sleep_s(_INTERVAL_S)
    time.sleep(max(0.0, _INTERVAL_S - (time.monotonic() - begun_s)))


def _fitted(board: Device, state_directory: Path, workload: str | None) -> tuple[FittedDevice | None, str]:
    """Return the fitted device if there is one, and the text to show for a mode without a prediction."""
    from edge_agent.profiling.stored_profile import read_fitted
    from wattfleet.core.errors import WattfleetError

    try:
        return read_fitted(state_directory, board, workload), "no prediction for this mode"
    except WattfleetError as error:
        return None, str(error)


def _kept_duty(socket: Path) -> KeptDuty | None:
    """Return how the running agent keeps its duty; None without an agent or a duty."""
    from edge_agent.serving.duty_service import DutyClient
    from wattfleet.core.errors import WattfleetError

    if not socket.exists():
        return None
    try:
        shown = DutyClient(socket).show()
    except WattfleetError:
        return None
    return None if shown is None else shown[1]


def _warning(state_dir: Path) -> str | None:
    """Return the problem of the agent's connection, if the agent has reported one."""
    from edge_agent.session.status import read_session_status
    from wattfleet.common.identity.channels import PLAINTEXT_WARNING
    from wattfleet.core.errors import WattfleetError

    try:
        status = read_session_status(state_dir)
    except WattfleetError:  # `status` shows it
        return None
    return PLAINTEXT_WARNING if status is not None and status.is_exposed else None


def _print_lines(live_samples: Iterator[Sample], socket: Path, state_dir: Path) -> None:
    from dataclasses import asdict

    for sample in live_samples:
        kept = _kept_duty(socket)
        duty = None if kept is None else asdict(kept)
        print(json_text({**sample.content(), "duty": duty, "warning": _warning(state_dir)}), flush=True)


def _show(live_samples: Iterator[Sample], board: Device, no_prediction: str, socket: Path, state_dir: Path) -> None:
    from rich.live import Live

    recent: deque[float | None] = deque(maxlen=_DISPLAYED_SAMPLES)
    console = terminal()
    with Live(console=console, auto_refresh=False) as live:
        for sample in live_samples:
            recent.append(sample.power_w)
            live.update(
                _table(sample, recent, board, no_prediction, _kept_duty(socket), _warning(state_dir)), refresh=True
            )
    if not console.is_terminal:
        # Without a terminal, Live ends its last output without a newline.
        console.line()


def _table(
    sample: Sample,
    recent: deque[float | None],
    board: Device,
    no_prediction: str,
    kept: KeptDuty | None,
    warning: str | None,
) -> Table:
    from rich.text import Text

    from edge_agent.devices.sysfs import mode_argument
    from edge_agent.learning.transfer import lines_of
    from wattfleet.common.tables import facts

    table = facts()
    table.add_row("device", f"{board.board_kind} ({board.provenance}), watched for {sample.at_s:.0f} s")
    if sample.mode is None:
        table.add_row("mode", Text(sample.problem or "cannot be read", style="red"))
    else:
        table.add_row("mode", f"{mode_argument(sample.mode)} ({sample.mode.label()})")
    table.add_row("power", "cannot be read" if sample.power_w is None else f"{sample.power_w:.1f} W")
    table.add_row("", Text(_bars(recent), style="cyan"))
    if sample.expected is None:
        table.add_row("expected", Text(no_prediction, style="dim"))
    else:
        lines = lines_of(sample.expected.content())
        table.add_row("expected", f"{lines['power']} while training, {lines['minibatch']} per minibatch")
        table.add_row("", lines["source"])
        ratio = sample.power_ratio
        table.add_row("observed", "" if ratio is None else f"{ratio:.0%} of the expected power")
    degrees, throttled = sample.temperature_c, sample.throttled
    table.add_row("temperature", "not reported by this board" if degrees is None else f"{degrees:.1f} degrees C")
    table.add_row(
        "throttled",
        "not counted by this board" if throttled is None else f"{count_of(throttled, 'time')} while watched",
    )
    for what, text in ({} if kept is None else kept.lines()).items():
        table.add_row(what, Text(text))
    if warning is not None:
        table.add_row("warning", Text(warning, style="bold red"))
    return table


def _bars(recent: deque[float | None]) -> str:
    """Return recent power as bars from 0 W to the highest sample, with gaps for missing samples."""
    highest = max((power_w for power_w in recent if power_w is not None), default=0.0) or 1.0
    top = len(_BARS) - 1
    return "".join(" " if power_w is None else _BARS[round(max(power_w, 0.0) / highest * top)] for power_w in recent)


# --- Doctor -----------------------------------------------------------------------------------------------------------
# `wattfleet agent doctor`: check this machine, and advise on problems.

_STYLES = {"ok": "green", "limited": "yellow", "absent": "yellow", "fails": "bold red"}


def doctor(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    socket: Annotated[Path, typer.Option(help="Unix socket where the agent serves Flower's ClientApp.")] = Path(
        DEFAULT_SOCKET
    ),
    identity: Annotated[
        Path | None,
        typer.Option(
            help="Check the key and the certificate in this folder. Default: the folder"
            f" {IDENTITY_DIRECTORY} in the state directory.",
            show_default=False,
        ),
    ] = None,
    json_: JsonOption = False,
) -> None:
    """Check everything that the agent needs and suggest fixes, without changing anything.

    The exit code is 1 if something must be fixed. A machine without a power meter exits with 0, but joins no rounds.
    """
    from edge_agent.devices.selection import folder_of_device
    from edge_agent.diagnosis import diagnose
    from wattfleet.common.systemd import running_code

    folder = folder_of_device(device, state_dir)
    findings = list(
        diagnose(
            device,
            lambda: open_named(device, state_dir),
            state_dir,
            folder,
            socket,
            running_code(),
            identity or state_dir / IDENTITY_DIRECTORY,
        )
    )
    levels = {finding.level for finding in findings}
    if json_:
        works = levels.isdisjoint({"absent", "fails"})
        print_json({"works": works, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_findings(findings)
    if "fails" in levels:
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Finding]) -> None:
    console, counts = terminal(), Counter(finding.level for finding in findings)
    console.print(_findings_table(findings))
    if counts["fails"]:
        verdict, style = "The agent cannot run here", "bold red"
    elif counts["absent"]:
        verdict, style = "The agent can run here, but joins no rounds until the absent parts are added", "bold yellow"
    else:
        verdict, style = "The agent can run here", "bold"
    console.print(f"\n{verdict}: {_summary(findings)}.", style=style)


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter[str](finding.level for finding in findings)
    return ", ".join(f"{counts[level]} {level}" for level in _STYLES if counts[level])


def _findings_table(findings: Sequence[Finding]) -> FittingTable:
    from rich.text import Text

    from wattfleet.common.tables import FittingTable, columns, texts

    table = FittingTable(columns("topic", "level", texts("found")), has_headings=False)
    for finding in findings:
        found = Text(finding.found)
        if finding.advice:
            found.append(f"\n-> {finding.advice}", style="dim")
        table.add(finding.topic, Text(finding.level, style=_STYLES[finding.level]), found)
    return table


# --- Selftest ---------------------------------------------------------------------------------------------------------
# `wattfleet agent selftest`: try every knob of the owner's board, and say what works.


def selftest(
    device: DeviceOption = "auto",
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIRECTORY),
    minutes: Annotated[float, typer.Option(min=0.1, help="Try no further knob after this many minutes.")] = 10.0,
    json_: JsonOption = False,
) -> None:
    """Set every knob of this board to both ends under load, read it back, check the watts, and restore everything.

    Stop what runs on the board first. The exit code is 1 if something does not work, or was not tried in time.
    """
    from edge_agent import selftest as test
    from edge_agent.devices.selection import folder_of_device
    from wattfleet.common.stop_signals import StoppedBySignal, StopSignals
    from wattfleet.common.version import version_of

    board, folder = open_named(device, state_dir), folder_of_device(device, state_dir)
    findings: list[Finding] = []
    progress = terminal(to_stderr=True)
    try:
        with (
            StopSignals.held() as signals,
            progress.status("trying every knob; Ctrl-C restores the board"),
            closing(test.selftest(board, folder, 60 * minutes, test.load_of(board), signals.interrupting)) as running,
        ):
            for finding in running:
                findings.append(finding)
                if not progress.is_terminal:
                    progress.print(f"{finding.topic}: {finding.found}", soft_wrap=True)
    except StoppedBySignal as stopped:
        typer.echo("stopped; device restored", err=True)
        raise typer.Exit(stopped.exit_code) from None
    result, row = test.result_of(findings), test.report_row(board, version_of("wattfleet") or "unknown", findings)
    if json_:
        print_json(
            {
                "works": result == test.WORKS,
                "result": result,
                "findings": [asdict(each) for each in findings],
                "row": row,
            }
        )
    else:
        console = terminal()
        console.print(_findings_table(findings))
        style = "bold" if result == test.WORKS else "bold red"
        console.print(f"\nThis board: {result} ({_summary(findings)}).", style=style)
        console.print("For the table in docs/devices.md:", style="dim")
        console.print(row, soft_wrap=True, markup=False)
    if result != test.WORKS:
        raise typer.Exit(1)


# --- Describe ---------------------------------------------------------------------------------------------------------
# `wattfleet agent describe`: a file with all that the agent would need of this board.


def describe(
    output: Annotated[Path, typer.Argument(help="Write the description to this file.")] = Path("board.toml"),
    device: Annotated[
        str, typer.Option(help="Describe this Jetson: auto for this machine, or sysfs:<folder> for files elsewhere.")
    ] = "auto",
) -> None:
    """Write a file that describes this Jetson, known or not, to attach to an issue; change nothing.

    It holds kernel files and NVIDIA's configuration without comments, but no serial number or address. Names that you
    have put into that configuration are kept. Run it as root, since some files are hidden from others.
    """
    import os

    from edge_agent.devices.jetson.description import describe as described
    from edge_agent.devices.tree import Tree
    from wattfleet.common.atomic_files import replace_file
    from wattfleet.core.errors import InvalidInputError

    kind, _, folder = device.partition(":")
    if device != "auto" and kind != "sysfs":
        raise InvalidInputError(f"--device {device}: only a Jetson can be described; use auto or sysfs:<folder>")
    if os.path.lexists(output):
        raise InvalidInputError(f"{output}: exists already, and is not replaced; name another file")
    tree = Tree(Path(folder or "/"))
    text, is_known = described(tree)
    try:
        replace_file(output, text.encode())
    except OSError as error:
        raise InvalidInputError(f"{output}: cannot be written: {error.strerror}; name another file") from None
    console = terminal()
    console.print(f"Wrote {output}. Read it before you share it; it should name nobody.", soft_wrap=True)
    if os.geteuid() != 0:
        console.print("Files that only root may read are missing: run this as root for all of them.", style="yellow")
    if not is_known:
        console.print("This board is unknown. The file's first lines say how to use it here, and for everybody.")
    console.print(f"Check it with: wattfleet agent doctor --device description:{output}", soft_wrap=True)
