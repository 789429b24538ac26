"""Each process of a fleet is killed, restarted or stopped at each stage of a round: the run goes on, and all return.

Coordinator, agents, SuperLink, SuperNodes and the app's processes are real. `make faults` runs every combination.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.real_processes import COORDINATOR, SUPERLINK, AppRun, RealFleet, agent, supernode
from tests.faults.faults import IS_LONG

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(900)]

APP = Path(__file__).parent / "boards_app"
_VICTIM = "a"
_BOARDS = {_VICTIM: "orin-nano", "b": "orin-nx", "c": "agx-orin"}
_ROUNDS = 100
"""More than a test waits for. A test stops its run when it has seen enough."""

_APP_TIMEOUT_S = 60.0
_BUSY_S = 30.0
_PAUSE_S = 20.0
"""How long a process is stopped or stays dead: longer than the coordinator's three leases of 2 s."""

_AGENT, _SUPERNODE, _APP = "agent", "SuperNode", "app"


@dataclass(frozen=True)
class Stage:
    """A stage of a round.

    Attributes:
        name: the stage in words.
        has_begun: whether a run is in this stage of its second round, or of its first for stages that occur only once.
    """

    name: str
    has_begun: Callable[[AppRun], object]

    def __str__(self) -> str:
        return self.name


BEFORE = Stage("before the run", lambda run: True)
ASKED = Stage("while it is asked for its device", lambda run: run.notes("asked", device=_VICTIM))
TRAINS = Stage("while it trains", lambda run: len(run.notes("trains", device=_VICTIM)) == 2)
AWAITED = Stage("while other replies are awaited", lambda run: len(run.notes("handled", device=_VICTIM)) == 2)
BETWEEN = Stage("between rounds", lambda run: run.notes("between", round=1))
STAGES = [BEFORE, ASKED, TRAINS, AWAITED, BETWEEN]

KILLED, RESTARTED, STOPPED = "is killed", "is killed and restarted", "hangs"

CASES = [
    (part, action, stage)
    for part in (_AGENT, _SUPERNODE, _APP, COORDINATOR, SUPERLINK)
    for action in (KILLED, RESTARTED, STOPPED)
    for stage in STAGES
    # The app's process exists only while it handles a message, and nobody restarts it.
    if part != _APP or (action != RESTARTED and stage in (ASKED, TRAINS))
]
_SHORT = [
    (_AGENT, STOPPED, TRAINS),
    (_SUPERNODE, KILLED, TRAINS),
    (_APP, KILLED, TRAINS),
    (COORDINATOR, RESTARTED, TRAINS),
    (SUPERLINK, STOPPED, AWAITED),
    (SUPERLINK, RESTARTED, TRAINS),
]


@pytest.fixture(scope="module")
def fleet() -> Iterator[RealFleet]:
    with tempfile.TemporaryDirectory(prefix="wf-") as folder, RealFleet(Path(folder), _BOARDS) as fleet:
        fleet.start_all()
        yield fleet


def strike(fleet: RealFleet, run: AppRun | None, part: str, action: str) -> None:
    """Kill, restart or stop a process for a while."""
    if part == _APP:
        assert run is not None
        process = run.app_process(_VICTIM)
        if action == KILLED:
            process.kill()
            return
        process.suspend()
        time.sleep(_PAUSE_S)
        process.resume()
        return
    name = {_AGENT: agent(_VICTIM), _SUPERNODE: supernode(_VICTIM)}.get(part, part)
    if action == STOPPED:
        fleet.pause(name)
        time.sleep(_PAUSE_S)
        fleet.resume(name)
        return
    fleet.kill(name)
    if action == KILLED:
        time.sleep(_PAUSE_S)
    fleet.start(name)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "action", "stage"), CASES if IS_LONG else _SHORT, ids=str)
def test_the_run_goes_on_and_all_devices_return(fleet: RealFleet, part: str, action: str, stage: Stage) -> None:
    fleet.until(fleet.is_ready, "all devices are ready")
    config: dict[str, str | int | float] = {"rounds": _ROUNDS, "identify-s": 1.0, "between-s": 1.0}
    if stage is AWAITED:
        config["first"] = _VICTIM
    if stage is ASKED:
        fleet.forget_nodes()
    began_s = time.monotonic()
    if stage is BEFORE:
        strike(fleet, None, part, action)
    with fleet.running(APP, **config) as run:
        if stage is not BEFORE:
            fleet.until(lambda: stage.has_begun(run), f"the stage: {stage}")
            strike(fleet, run, part, action)
        if part == SUPERLINK and action != STOPPED and stage is not BEFORE:
            fleet.until(run.has_ended, "the run has ended")
            assert run.seen().run.error == "stopped because Flower's SuperLink ended"
            run.run_id, run.notes_file = fleet.submit(APP, **config)
        healed_s = time.time()

        def all_back() -> bool:
            assert not run.has_ended(), run.seen().run.error
            sent_s = {each["round"]: each["at_s"] for each in run.notes("sent")}
            return any(sent_s[each["round"]] > healed_s for each in run.notes("closed", replies=len(_BOARDS)))

        back_s = fleet.until(all_back, "a round of all devices")
    fleet.until(run.has_ended, "the run has ended")
    assert run.seen().run.error == "stopped by Flower's SuperLink, as after `flwr stop`"
    sent = {each["round"]: each["at_s"] for each in run.notes("sent")}
    took_s = {each["round"]: each["at_s"] - sent[each["round"]] for each in run.notes("closed")}
    rounds = ", ".join(f"{took_s[each['round']]:.0f} s ({each['replies']})" for each in run.notes("closed"))
    all_s = time.monotonic() - began_s
    print(f"\n{part} {action} {stage}: rounds (replies) {rounds}; all back after {back_s:.0f} s; in all {all_s:.0f} s")
    limit_s = _APP_TIMEOUT_S + _BUSY_S + (_PAUSE_S if action == STOPPED and part in (SUPERLINK, COORDINATOR) else 0.0)
    assert max(took_s.values()) < limit_s
    for name in fleet.processes:
        assert fleet.is_running(name), fleet.log(name)[-2000:]
