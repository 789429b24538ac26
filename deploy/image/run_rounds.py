"""Start the Flower run once every device of the fleet is ready, and end as the run ends: 0, or 1 and the reason."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.cli.client import CoordinatorUnreachableError, RequestFailedError
from coordinator.cli.output.view_values import state_word
from wattfleet_proto.v1 import session_pb2, view_pb2
from wattfleet_simulation.coordinator_view import CoordinatorView, RunSeen
from wattfleet_simulation.flower import APP_DIRECTORY, FlowerDeployment
from wattfleet_simulation.processes import PartFailedError, Parts, program

READY_WITHIN_S = 600.0
ROUND_WITHIN_S = 300.0
POLL_S = 1.0
STATUS_EVERY_S = 10.0
LOG_WITHIN_S = 60.0


def await_fleet(view: CoordinatorView, devices: int) -> None:
    """Return once so many devices are ready.

    Raises:
        PartFailedError: they were not in time; the text says how far each is.
    """
    give_up_s = time.monotonic() + READY_WITHIN_S
    while True:
        fleet = view.devices()
        if sum(device.state == session_pb2.DEVICE_STATE_READY for device in fleet) >= devices:
            return
        if time.monotonic() > give_up_s:
            known = ", ".join(f"{device.device_id} {state_word(device.state)} ({device.detail})" for device in fleet)
            raise PartFailedError(f"not all of {devices} devices were ready within {READY_WITHIN_S:g} s: {known}")
        time.sleep(POLL_S)


def await_run(view: CoordinatorView, run_id: str, flower_completed: Callable[[], bool], rounds: int) -> None:
    """Return once the run completed, telling of each round as it ends.

    Raises:
        PartFailedError: the run failed, was stopped, did not end in time, or had a round in which no device trained.
    """
    give_up_s = time.monotonic() + rounds * ROUND_WITHIN_S
    ask_flower_s = time.monotonic() + STATUS_EVERY_S
    told = 0
    while True:
        run = run_of(view, run_id)
        completed = False
        # Flower has the last word, and is asked rarely otherwise: each time costs a process of some seconds.
        if run.run.finished or run.run.error or time.monotonic() > ask_flower_s:
            try:
                completed = flower_completed()
            except PartFailedError as failure:
                raise explained(failure, view, run_id) from None
            ask_flower_s = time.monotonic() + STATUS_EVERY_S
            run = run_of(view, run_id)
        ended = [one for one in run.rounds if one.HasField("wall_s") and one.metrics]
        for one in ended[told:]:
            print(round_line(one), flush=True)
        told = len(ended)
        if completed:
            return require_training(run)
        if time.monotonic() > give_up_s:
            raise PartFailedError(f"the Flower run did not end within {rounds * ROUND_WITHIN_S:g} s")
        time.sleep(POLL_S)


def require_training(run: RunSeen) -> None:
    """Refuse a run that Flower calls completed although every training of some round failed.

    Raises:
        PartFailedError: there is such a round.
    """
    lost = [one for one in run.rounds if len(one.failed_device_ids) == one.device_count]
    if lost:
        numbers = ", ".join(str(one.round) for one in lost)
        names = ", ".join(lost[0].failed_device_ids)
        raise PartFailedError(f"no device trained in round {numbers}: the logs of {names} (agent, supernode) say why")


def explained(failure: PartFailedError, view: CoordinatorView, run_id: str) -> PartFailedError:
    """Flower's word on how the run ended, with what the ServerApp told the coordinator, if it got that far."""
    reason = run_of(view, run_id).run.error
    if not reason:
        print_log(run_id)
        reason = "its log above says why"
    return PartFailedError(f"{failure}: {reason}")


def run_of(view: CoordinatorView, run_id: str) -> RunSeen:
    """What the coordinator knows of a run: nothing until the ServerApp has announced itself."""
    newest = view.newest_run()
    return newest if newest.run.run_id == run_id else RunSeen()


def print_log(run_id: str) -> None:
    """Print what the ServerApp logged, which the SuperLink's own log does not hold."""
    subprocess.run([program("flwr"), "log", run_id, "--show"], timeout=LOG_WITHIN_S, check=False)


def round_line(ended: view_pb2.RoundView) -> str:
    """What a round took and brought; what was not observed is left out."""
    parts = [", ".join(assignment.device_id for assignment in ended.plan.assignments)]
    if ended.failed_device_ids:
        parts.append(f"failed: {', '.join(ended.failed_device_ids)}")
    if ended.HasField("observed_site_w"):
        parts.append(f"{ended.observed_site_w:.1f} W of {ended.plan.site_budget_w:g} W")
    if ended.HasField("observed_duration_s"):
        parts.append(f"{ended.observed_duration_s:.0f} s, predicted {ended.plan.duration_s:.0f} s")
    if "accuracy" in ended.metrics:
        parts.append(f"accuracy {ended.metrics['accuracy']:.1%}")
    return f"round {ended.round}: {'; '.join(parts)}"


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--coordinator", required=True, help="host:port of the coordinator")
    parser.add_argument("--devices", required=True, type=int, help="devices of the fleet")
    parser.add_argument("--rounds", required=True, type=int, help="federated rounds")
    arguments = parser.parse_args()

    # Its commands alone are wanted: the SuperLink and the SuperNodes are containers of their own.
    home = Path(os.environ["FLWR_HOME"])
    flower = FlowerDeployment(Parts(home), home, nodes=[])
    try:
        with CoordinatorView(arguments.coordinator) as view:
            await_fleet(view, arguments.devices)
            config = {
                "coordinator": arguments.coordinator,
                "devices": arguments.devices,
                "rounds": arguments.rounds,
            }
            run_id = flower.submit(APP_DIRECTORY, config)
            print(f"all {arguments.devices} devices are ready: Flower run {run_id} started", flush=True)
            await_run(view, run_id, lambda: flower.completed(run_id), arguments.rounds)
    except PartFailedError as error:
        sys.exit(str(error))
    except (CoordinatorUnreachableError, RequestFailedError) as error:
        sys.exit(f"the coordinator at {arguments.coordinator}: {error}")
    print(f"Flower run {run_id} completed", flush=True)


if __name__ == "__main__":
    main()
