"""Waits for a fleet to be ready and for a Flower run to complete, by polling the coordinator and Flower."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from wattfleet_io.console import print_line, rounds_text
from wattfleet_proto.v1 import session_pb2, view_pb2
from wattfleet_simulation.coordinator_view import CoordinatorView, RunSeen
from wattfleet_simulation.processes import NoAnswerError, PartFailedError


class NotInTimeError(PartFailedError):
    """A time limit has passed."""


def await_ready(
    view: CoordinatorView,
    count: int,
    within_s: float,
    poll_s: float,
    on_poll: Callable[[Sequence[view_pb2.DeviceView]], None] = lambda _: None,
) -> None:
    """Return once enough devices are ready.

    Args:
        view: the coordinator.
        count: number of devices to wait for.
        within_s: time limit.
        poll_s: time between two polls.
        on_poll: called with all devices after each poll; it may raise to stop the wait.

    Raises:
        NotInTimeError: the time limit has passed; the text lists the devices that are not ready.
    """
    give_up_s = time.monotonic() + within_s
    while True:
        devices = view.devices()
        on_poll(devices)
        if sum(map(is_ready, devices)) >= count:
            return
        if time.monotonic() > give_up_s:
            missing = missing_text(devices, count)
            raise NotInTimeError(f"not all of {count} devices were ready within {within_s:g} s: {missing}")
        time.sleep(poll_s)


def is_ready(device: view_pb2.DeviceView) -> bool:
    """Whether a device can be planned."""
    return device.state == session_pb2.DEVICE_STATE_READY


def missing_text(devices: Sequence[view_pb2.DeviceView], count: int) -> str:
    """Return which devices are not ready, with the state of each, and how many have not enrolled.

    Args:
        devices: the devices that are enrolled.
        count: how many devices there should be.
    """
    missing = [_state(device) for device in devices if not is_ready(device)]
    if len(devices) < count:
        missing.append(f"{count - len(devices)} not enrolled")
    return ", ".join(missing)


def await_run(
    view: CoordinatorView,
    run_id: str,
    flower_completed: Callable[[str], bool],
    within_s: float,
    poll_s: float,
    on_poll: Callable[[RunSeen], None] = lambda _: None,
    ask_flower_every_s: float = 10.0,
    check: Callable[[RunSeen], None] | None = None,
) -> RunSeen:
    """Return the run once Flower reports it as completed.

    Args:
        view: the coordinator.
        run_id: Flower's id of the run.
        flower_completed: returns whether Flower reports the run as completed. It raises if the run failed or was
            stopped. After a `NoAnswerError` it is called again.
        within_s: time limit.
        poll_s: time between two polls of the coordinator.
        on_poll: called with the run after each poll; it may raise to stop the wait.
        ask_flower_every_s: seconds between two calls of `flower_completed` while the run goes on.
        check: raises if a completed run has not trained properly; None for `require_trained`.

    Raises:
        NotInTimeError: the time limit has passed.
        PartFailedError: the run failed or was stopped, or `check` raised it.
    """
    check = check or require_trained
    give_up_s = time.monotonic() + within_s
    ask_flower_s = time.monotonic() + ask_flower_every_s
    while True:
        run = view.run(run_id)
        on_poll(run)
        completed = False
        # Flower's answer decides. While the run goes on, Flower is rarely asked, since each call starts a process for
        # seconds.
        if run.run.finished or run.run.error or time.monotonic() > ask_flower_s:
            try:
                completed = flower_completed(run_id)
            except NoAnswerError as error:
                print_line(f"{error}; asking again")
            except PartFailedError:
                on_poll(view.run(run_id))  # the coordinator may know the reason meanwhile
                raise
            ask_flower_s = time.monotonic() + ask_flower_every_s
        if completed:
            run = view.run(run_id)
            on_poll(run)
            check(run)
            return run
        if time.monotonic() > give_up_s:
            raise NotInTimeError(f"the Flower run did not end within {within_s:g} s")
        time.sleep(poll_s)


def require_trained(run: RunSeen) -> None:
    """Raise if no device trained in some round of a completed run.

    Raises:
        PartFailedError: there is such a round.
    """
    lost = [each for each in run.rounds if len(each.failed_device_ids) == each.device_count]
    if lost:
        numbers = ", ".join(str(each.round) for each in lost)
        failed = ", ".join(lost[0].failed_device_ids)
        raise PartFailedError(f"no device trained in round {numbers}: see the logs of {failed} (agent, SuperNode)")


def require_observed(run: RunSeen) -> None:
    """Raise if some round of a completed run was unplanned, or if no device trained in it.

    If modes are measured in a round, the rest of its trainings may be too short to observe. So only half of the rounds
    must be observed.

    Raises:
        PartFailedError: there is such a round, or too few were observed.
    """
    require_trained(run)
    if unplanned := [each.round for each in run.rounds if each.unplanned]:
        raise PartFailedError(
            f"{rounds_text(unplanned)} unplanned: no budget was kept, since the coordinator did not answer; see its log"
        )
    unseen = [each.round for each in run.rounds if not each.observations]
    if 2 * len(unseen) > len(run.rounds):
        raise PartFailedError(
            f"no device's training was observed in {rounds_text(unseen)}: see the logs of agents and SuperNodes"
        )


def _state(device: view_pb2.DeviceView) -> str:
    word = session_pb2.DeviceState.Name(device.state).removeprefix("DEVICE_STATE_").lower()
    return f"{device.device_id} {word}" + (f" ({device.detail})" if device.detail else "")
