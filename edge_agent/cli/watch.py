"""`wattfleet agent watch`: live power, temperature and mode beside the prediction."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.cli.options import DeviceOption, SocketOption, StateDirOption, StoredWorkloadOption, open_named
from edge_agent.paths import DEFAULT_STATE_DIRECTORY
from wattfleet_io.console import count_of, json_text, terminal
from wattfleet_proto.local_socket import DEFAULT_SOCKET

if TYPE_CHECKING:
    from rich.table import Table

    from edge_agent.devices.device import Device
    from edge_agent.diagnosis.live_samples import Sample
    from edge_agent.profiling.stored_profile import FittedDevice
    from wattfleet.duties import KeptDuty

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
    from edge_agent.diagnosis.live_samples import samples
    from wattfleet_io.stop_signals import StoppedBySignal, StopSignals

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
    from wattfleet.errors import WattfleetError

    try:
        return read_fitted(state_directory, board, workload), "no prediction for this mode"
    except WattfleetError as error:
        return None, str(error)


def _kept_duty(socket: Path) -> KeptDuty | None:
    """Return how the running agent keeps its duty; None without an agent or a duty."""
    from edge_agent.serving.duty_client import DutyClient
    from wattfleet.errors import WattfleetError

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
    from wattfleet.errors import WattfleetError
    from wattfleet_identity.channels import PLAINTEXT_WARNING

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

    from edge_agent.devices.mode_names import mode_argument
    from edge_agent.learning.expectation import lines_of
    from wattfleet_io.tables import facts

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
