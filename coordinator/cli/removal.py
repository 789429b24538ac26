"""`wattfleet coordinator forget` and `delete`: remove devices and runs."""

from __future__ import annotations

from typing import Annotated

import typer

from coordinator.cli.options import JsonOption, connected
from coordinator.cli.overrides import DevicesArgument
from coordinator.cli.run_names import run_ids_of
from wattfleet_io.console import print_json, print_line


def forget(
    devices: DevicesArgument,
    json_: JsonOption = False,
) -> None:
    """Remove disconnected devices with their tags and Flower nodes. A device may enrol again later."""
    from wattfleet_proto.v1 import operator_pb2

    with connected() as client:
        answer = client.operate("ForgetDevices", operator_pb2.ForgetDevicesRequest(device_ids=devices))
    if json_:
        print_json([{"device_id": device_id, "forgotten": True} for device_id in answer.device_ids])
        return
    for device_id in answer.device_ids:
        print(f"{device_id}: forgotten")


def delete(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN...", help="Names or Flower's ids of the runs, or their beginnings.")
    ],
    end: Annotated[
        bool,
        typer.Option(
            "--end",
            allow_from_autoenv=False,
            help="End the runs that are running first, and stop their trainings. Default: refuse them.",
        ),
    ] = False,
    json_: JsonOption = False,
) -> None:
    """Delete finished runs with their rounds."""
    deleted = []
    with connected() as client:
        names = run_ids_of(client, runs)
        for run_id in client.deleted_runs(names, end):
            deleted.append(run_id)
            if not json_:
                print_line(f"run {names[run_id]}: deleted")
    if json_:
        print_json([{"run_id": run_id, "name": names[run_id], "deleted": True} for run_id in deleted])
