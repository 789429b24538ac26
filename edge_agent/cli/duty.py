"""`wattfleet agent duty`: the requests that the device has to answer in time before it may train."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_agent.cli.options import JsonOption, SocketOption
from wattfleet.common.console import print_json, print_line, terminal
from wattfleet_proto.names import DEFAULT_SOCKET

if TYPE_CHECKING:
    from wattfleet.core.duties import Arrivals

_HELP = "Set, show or clear the requests that the device answers before it trains."

app = typer.Typer(no_args_is_help=True, help=_HELP)


@app.callback(help=_HELP)
def group() -> None:
    """Keep the commands in a group."""


@app.command("set")
def set_duty(
    workload: Annotated[str, typer.Option(help="Name the inference workload, such as mobilenet-camera.")],
    latency_ms: Annotated[float, typer.Option(help="Answer requests within this time, in milliseconds.")],
    arrivals_per_s: Annotated[
        float | None, typer.Option(help="Expect this number of requests per second.", show_default=False)
    ] = None,
    arrivals_schedule: Annotated[
        str | None,
        typer.Option(
            help="Expect these numbers of requests per second by time of day, such as 06:00-18:00=30,18:00-06:00=2.",
            show_default=False,
        ),
    ] = None,
    assumed_arrivals_per_s: Annotated[
        float | None,
        typer.Option(
            help="Measure the requests per second, and expect this number until they are measured.", show_default=False
        ),
    ] = None,
    time_zone: Annotated[str, typer.Option(help="Interpret the schedule's times in this time zone.")] = "UTC",
    quantile: Annotated[float, typer.Option(help="Keep to the latency for this share of the requests.")] = 0.95,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="Predict its inference from these rows, measured on this device: a CSV file with the columns cores,"
            " cpu_khz, gpu_hz, mem_hz, batch, batch_ms and power_mw.",
            show_default=False,
        ),
    ] = None,
    socket: SocketOption = Path(DEFAULT_SOCKET),
) -> None:
    """Put a duty in force on the running agent; it stays in force after a restart.

    Give exactly one of --arrivals-per-s, --arrivals-schedule and --assumed-arrivals-per-s.
    """
    from edge_agent.serving.duty_service import DutyClient
    from wattfleet.core.duties import Duty
    from wattfleet.core.modes import read_profile

    arrivals = _arrivals(arrivals_per_s, arrivals_schedule, assumed_arrivals_per_s, time_zone)
    duty = Duty(workload, arrivals, latency_ms, quantile)
    DutyClient(socket).set(duty, None if measured is None else read_profile(measured))
    print_line(f"in force: {100 * duty.quantile:g}% of the requests of {duty.workload} within {duty.latency_ms:g} ms")


@app.command("show")
def show_duty(socket: SocketOption = Path(DEFAULT_SOCKET), json_: JsonOption = False) -> None:
    """Show the duty in force and how it is kept."""
    import json
    from dataclasses import asdict

    from edge_agent.serving.duty_service import DutyClient

    shown = DutyClient(socket).show()
    if json_:
        print_json({} if shown is None else {"duty": json.loads(shown[0].to_json()), "kept": asdict(shown[1])})
    elif shown is None:
        print_line("no duty")
    else:
        from wattfleet.common.tables import facts

        terminal().print(facts(shown[1].lines()))


@app.command("clear")
def clear_duty(socket: SocketOption = Path(DEFAULT_SOCKET)) -> None:
    """End the duty in force; inference servers are still served first."""
    from edge_agent.serving.duty_service import DutyClient

    print_line("cleared" if DutyClient(socket).clear() else "there was no duty")


def _arrivals(per_s: float | None, schedule: str | None, assumed_per_s: float | None, time_zone: str) -> Arrivals:
    from wattfleet.core.duties import ConstantArrivals, MeasuredArrivals, arrivals_from_content
    from wattfleet.core.errors import InvalidInputError

    if sum(given is not None for given in (per_s, schedule, assumed_per_s)) != 1:
        raise InvalidInputError(
            "give exactly one of --arrivals-per-s, --arrivals-schedule and --assumed-arrivals-per-s"
        )
    if per_s is not None:
        return ConstantArrivals(per_s)
    if assumed_per_s is not None:
        return MeasuredArrivals(assumed_per_s)
    spans = {}
    for part in (schedule or "").split(","):
        span, equals, rate = part.partition("=")
        try:
            spans[span.strip()] = float(rate)
        except ValueError:
            raise InvalidInputError(
                f"--arrivals-schedule: {part.strip()[:40]!r} is not a part of a schedule: write it as 06:00-18:00=30"
            ) from None
    return arrivals_from_content({"zone": time_zone, "schedule": spans})
