"""Start the Flower run once the devices are ready; exit with 0 if it completes, or else with 1 and a reason."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.cli.client import RequestFailedError
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.common.identity.channels import Endpoint, named_folder
from wattfleet.common.identity.renewal import renew_if_due
from wattfleet.core.errors import InvalidInputError
from wattfleet.simulation.flower import APP_DIRECTORY, FlowerDeployment, NoAnswerError, PartFailedError, Parts, program
from wattfleet.simulation.run import (
    CoordinatorView,
    NotInTimeError,
    RunSeen,
    await_ready,
    await_run,
    is_ready,
    missing_text,
)
from wattfleet_proto.v1 import view_pb2

READY_WITHIN_S = 300.0
REPEATED_AFTER_S = 60.0
ROUND_WITHIN_S = 300.0
POLL_S = 1.0
LOG_WITHIN_S = 60.0


class WaitPrinter:
    """Prints which devices are waited for, when they change and once a minute.

    Attributes:
        ready: how many devices were ready at the last poll.
    """

    def __init__(self, count: int, within_s: float) -> None:
        """Start before the first poll.

        Args:
            count: how many devices are waited for.
            within_s: seconds after which the run starts without the others.
        """
        self.ready = 0
        self._count = count
        self._until_s = time.monotonic() + within_s
        self._printed = ""
        self._printed_s = 0.0

    def __call__(self, devices: Sequence[view_pb2.DeviceView]) -> None:
        """Note the state of all devices."""
        self.ready = sum(map(is_ready, devices))
        missing, now_s = missing_text(devices, self._count), time.monotonic()
        if self.ready >= self._count or (missing == self._printed and now_s < self._printed_s + REPEATED_AFTER_S):
            return
        self._printed, self._printed_s = missing, now_s
        left_s = max(0.0, self._until_s - now_s)
        print(
            f"{self.ready} of {self._count} devices are ready; waiting up to {left_s:.0f} s for the others: {missing}",
            flush=True,
        )


class RoundPrinter:
    """Prints one line for each round that has ended."""

    def __init__(self) -> None:
        """Start before the first round."""
        self._printed = 0

    def __call__(self, run: RunSeen) -> None:
        """Print the rounds that have ended since the last call."""
        ended = [one for one in run.rounds if one.HasField("wall_s") and one.metrics]
        for one in ended[self._printed :]:
            print(round_line(one), flush=True)
        self._printed = len(ended)


def await_devices(view: CoordinatorView, count: int, within_s: float) -> None:
    """Return once all devices are ready, or after a while if at least one is.

    Args:
        view: the coordinator.
        count: how many devices there are.
        within_s: how long to wait for all of them.

    Raises:
        NotInTimeError: no device became ready.
    """
    waiting = WaitPrinter(count, within_s)
    try:
        await_ready(view, count, within_s, POLL_S, waiting)
    except NotInTimeError as error:
        if not waiting.ready:
            raise
        print(f"{error}. The run starts with {waiting.ready} of them; the others join when they are ready", flush=True)
        return
    print(f"all {count} devices are ready", flush=True)


def completed(flower: FlowerDeployment, view: CoordinatorView, run_id: str) -> bool:
    """Return whether Flower reports the run as completed.

    Raises:
        PartFailedError: the run failed or was stopped; the text gives the reason.
        NoAnswerError: Flower did not answer in time.
    """
    try:
        return flower.completed(run_id)
    except NoAnswerError:
        raise
    except PartFailedError as failure:
        raise explained(failure, view, run_id) from None


def explained(failure: PartFailedError, view: CoordinatorView, run_id: str) -> PartFailedError:
    """Add the reason that the ServerApp has reported to the coordinator to an error; without one, print the log."""
    reason = view.run(run_id).run.error
    if not reason:
        print_log(run_id)
        reason = "see its log above"
    return PartFailedError(f"{failure}: {reason}")


def print_log(run_id: str) -> None:
    """Print the ServerApp's log, which the SuperLink's own log does not contain."""
    try:
        subprocess.run([program("flwr"), "log", run_id, "--show"], timeout=LOG_WITHIN_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"flwr log did not end within {LOG_WITHIN_S:g} s: the log above may be incomplete", flush=True)


def round_line(ended: view_pb2.RoundView) -> str:
    """Return one line about a round: devices, and the watts, seconds and accuracy if known."""
    if ended.unplanned:
        parts = ["unplanned: no budget was kept"]
    else:
        parts = [", ".join(assignment.device_id for assignment in ended.plan.assignments)]
    if ended.failed:
        parts.append(f"failed: {', '.join(ended.failed)}")
    if ended.HasField("observed_site_w"):
        parts.append(f"{ended.observed_site_w:.1f} W of {ended.plan.site_budget_w:g} W")
    if ended.HasField("observed_s"):
        parts.append(f"{ended.observed_s:.0f} s, predicted {ended.plan.duration_s:.0f} s")
    if "accuracy" in ended.metrics:
        parts.append(f"accuracy {ended.metrics['accuracy']:.1%}")
    return f"round {ended.round}: {'; '.join(parts)}"


def main() -> None:
    """Wait for the fleet, then run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, help="host:port of the coordinator")
    parser.add_argument("--devices", required=True, type=int, help="number of devices to wait for")
    parser.add_argument("--rounds", required=True, type=int, help="number of federated rounds")
    parser.add_argument(
        "--wait-s",
        type=float,
        default=READY_WITHIN_S,
        help="seconds after which the run starts without the devices that are not ready (default: %(default)g)",
    )
    arguments = parser.parse_args()

    # Only for the `flwr` command: SuperLink and SuperNodes run in their own containers.
    home = Path(os.environ["FLWR_HOME"])
    try:
        folder = named_folder(None)  # the identity that WATTFLEET_IDENTITY names
        flower = FlowerDeployment(Parts(home), home, nodes=[], identity=folder)
        flower.connect()
        endpoint = Endpoint.of(arguments.coordinator, folder)
        if (problem := renew_if_due(endpoint)) is not None:
            print(f"warning: {problem}", flush=True)
        with CoordinatorView(endpoint) as view:
            await_devices(view, arguments.devices, arguments.wait_s)
            config = {
                "coordinator": arguments.coordinator,
                "devices": arguments.devices,
                "rounds": arguments.rounds,
            }
            run_id = flower.submit(APP_DIRECTORY, config)
            print(f"Flower run {run_id} started", flush=True)
            await_run(
                view,
                run_id,
                lambda _: completed(flower, view, run_id),
                arguments.rounds * ROUND_WITHIN_S,
                POLL_S,
                RoundPrinter(),
            )
    except PartFailedError as error:
        sys.exit(str(error))
    except (CoordinatorUnreachableError, InvalidInputError, RequestFailedError) as error:
        sys.exit(f"the coordinator at {arguments.coordinator}: {error}")
    print(f"Flower run {run_id} completed", flush=True)


if __name__ == "__main__":
    main()
