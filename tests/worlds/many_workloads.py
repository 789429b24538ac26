"""A fleet that trains whatever workloads its apps bring: many devices and workloads, and runs that begin at random.

python -m tests.worlds.many_workloads --devices 100 --workloads 20 --minutes 60
"""

from __future__ import annotations

import argparse
import random
import secrets
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

from coordinator.state.records import RoundRecord
from coordinator.state.rounds.ledger import RoundRequest
from edge_agent.settings import WorkloadSettings
from tests.worlds.agent import Device
from tests.worlds.flower import FlowerServer
from tests.worlds.learning_device import BATCHES, LearningDevice
from tests.worlds.oracle import BrokenPromiseError, Oracle
from tests.worlds.rules import RULES, Step
from tests.worlds.world import World
from wattfleet.core.choosing import Front
from wattfleet.core.modes import ASSUMED_MINIBATCHES_PER_EPOCH
from wattfleet.core.planning.policies import AllDevices, FastestK
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import session_pb2

# --- Random runs ------------------------------------------------------------------------------------------------------
# A Flower server with one run after another, each with a random workload and batch size.


_LONGEST_ROUND_S = 90.0
_FORGOTTEN_S = 60.0
_ASKS_AGAIN_S = 3.0
_SMALL = 6


class RandomRuns(FlowerServer):
    """Plans one round after another, and begins another run after some rounds."""

    def __init__(self, world: ManyWorkloads) -> None:
        self._many = world
        self._left = 0
        self.run_id = ""
        self._sent_s = 0.0
        super().__init__(world, "")
        self._tick()

    def _begin_run(self) -> None:
        rng, many = self._many.rng, self._many
        if self.run_id:  # an operator ends the runs that a restarted server has forgotten
            many.timeline.after(_FORGOTTEN_S, partial(many.coordinator.finish_run, self.run_id))
        self._left = rng.randint(2, 6)
        many.counts["runs"] += 1
        self.run_id, self.number = f"{rng.choice(many.workloads)}{many.counts['runs']}", 0
        many.batches[self.run_id] = rng.choice(BATCHES)
        many.coordinator.start_run(self.run_id, lambda: None)

    def _sampled(self, free: list[int]) -> list[int]:
        rng = self._many.rng
        most = len(free) if rng.random() < 0.6 else _SMALL
        return sorted(rng.sample(free, min(most, len(free))))

    def _tick(self) -> None:
        """Do what a Flower server does by itself every few seconds."""
        now_s = self._many.timeline.now_s
        self._many.timeline.after(_ASKS_AGAIN_S * (0.5 + self._many.rng.random()), self._tick)
        if self.open:
            if now_s - self._sent_s > _LONGEST_ROUND_S:
                for plan_id in list(self.open):
                    self.finish_round(plan_id)
        elif self._left <= 0:
            self.finish_run()
        else:
            self.plan()

    def _send(self, record: RoundRecord, life: int) -> None:
        super()._send(record, life)
        if record.plan_id in self.open:
            self._sent_s = self._many.timeline.now_s

    def arrive(self, device: str, plan_id: str) -> None:
        rng = self._many.rng
        self._many.devices[device].ask_to_train(plan_id, 0.0, rng.random() < 0.05)

    def finish_round(self, plan_id: str) -> None:
        super().finish_round(plan_id)
        self._left -= 1
        self._many.counts["rounds"] += 1


# --- Many workloads ---------------------------------------------------------------------------------------------------

MOST_WORKLOADS = len(string.ascii_lowercase)
_SWEPT_EVERY_S = 60.0
_CHECKED_EVERY_S = 0.5
_W_PER_DEVICE = 15.0

# Events other than runs, with weights. Budgets change by a rule of their own, since many devices draw more power than
# the few of other worlds.
_TROUBLES = {
    "lose a session": 6,
    "flap": 3,
    "stall a session": 4,
    "drop a session": 4,
    "restart an agent": 6,
    "restart the coordinator": 1,
    "fail the store": 2,
    "restart a Flower server": 2,
    "give a device up and plan": 2,
    "repeat a message": 4,
    "ask for a made-up plan": 3,
    "cut in trouble": 2,
    "change the date": 1,
    "drain": 3,
    "kill an app": 4,
}


class WorkloadOracle(Oracle):
    """Checks what is known of workloads, as well as the power."""

    def __init__(self, world: ManyWorkloads) -> None:
        super().__init__(world)
        self._many = world
        self._lengths: dict[str, dict[str, int]] = {}

    def front_heard(self, device_id: str, workload: str, front: Front) -> None:
        heard = self._many.learning_devices[device_id].heard
        heard[workload] = [front, *heard.get(workload, [])[:3]]

    def removal_heard(self, device_id: str, workload: str) -> None:
        self._many.learning_devices[device_id].heard.pop(workload, None)

    def factor(self, device_id: str, workload: str) -> float:
        """The median of the lengths that other devices have reported, for a device that does not know its own."""
        fleet = self._many.coordinator.fleet
        assert fleet is not None
        lengths = {
            each.device_id: known.minibatches_per_epoch
            for each in fleet.agents.devices.values()
            for known in each.fronts
            if known.name == workload
        }
        if lengths.get(device_id) is not None:
            return 1.0
        told = [length for length in lengths.values() if length is not None]
        return median(told) / ASSUMED_MINIBATCHES_PER_EPOCH if told else 1.0

    def planned(self, request: RoundRequest, record: RoundRecord) -> None:
        super().planned(request, record)
        self._many.counts["plans"] += 1
        self._many.counts["plans tried by brute force"] += len(request.offers) <= 6
        for server in self._many.servers:
            for plan_id, waiting in server.open.items():
                both = [each for each in sorted(waiting & record.nodes.keys()) if self._acts_for(each, plan_id)]
                self._require("one round", not both, f"{both} are part of {plan_id} and {record.plan_id}")

    def _acts_for(self, device_id: str, plan_id: str) -> bool:
        """Whether a device trains, or may train, for a plan; after a restart, it has forgotten the plan."""
        held = self._many.devices[device_id].held
        return held.phase is not GrantPhase.OVER and held.in_force is not None and held.in_force.plan_id == plan_id

    def sweep(self) -> None:
        """Check what is stored on the devices and at the coordinator."""
        fleet = self._many.coordinator.fleet
        for device in self._many.learning_devices.values():
            self._many.check_bounds(device)
            stored = {each.name for each in device.learning.folders.stored()}
            self._many.note_most("workloads stored on a device", len(stored))
            for workload in stored:
                self._many.check_journal(device, workload)
            if fleet is None:
                continue
            fronts = fleet.agents.devices[device.id].fronts
            self._many.note_most("fronts of a device at the coordinator", len(fronts))
            self._require("bounded", len(fronts) <= self._many.max_fronts, f"{device.id} has {len(fronts)} fronts")
            untold = {each.name for each in fronts} - stored - {each for each, _ in self._many.untold(device)}
            self._require("removal told", not untold, f"{device.id} has removed {sorted(untold)} without a word")

    def require(self, promise: str, holds: bool, otherwise: str) -> None:
        """Check something at this moment."""
        self._require(promise, holds, otherwise)


class ManyWorkloads(World):
    """A world of many devices and workloads.

    Attributes:
        workloads: their names, one letter each.
        batches: samples in a minibatch, by run.
        counts: number of events of each kind.
        draws_changed: whether the power of a device has changed since the last check.
    """

    announces = True

    def __init__(
        self, seed: int, folder: Path, devices: int, workloads: int, servers: int, max_workloads: int = 8
    ) -> None:
        """Make a world.

        Args:
            seed: seed of all random choices.
            folder: folder for the devices' files.
            devices: number of devices.
            workloads: number of workloads.
            servers: number of Flower servers, each with one run after the other.
            max_workloads: the most workloads that a device stores.
        """
        self._folder, self._device_count, self._server_count = folder, devices, servers
        self.workloads = string.ascii_lowercase[:workloads]
        self.counts: Counter[str] = Counter()
        self.batches: dict[str, int] = {}
        self.draws_changed, self._checked_s = True, 0.0
        self.max_fronts = max_workloads + 2
        self._stored = WorkloadSettings(max_workloads=max_workloads)
        super().__init__(seed)
        assert isinstance(self.oracle, WorkloadOracle)
        self._workload_oracle = self.oracle

    def _draw_settings(self, rng: random.Random, seed: int) -> None:
        self.budget_w = self._device_count * _W_PER_DEVICE
        self.policy = AllDevices() if seed % 2 == 0 else FastestK(max(2, self._device_count // 3))
        self.lifetime_s, self.margin_s = 60.0, 5.0
        self.lease_s, self.slowest_s = 15.0, 0.2

    def _new_oracle(self) -> Oracle:
        return WorkloadOracle(self)

    def _new_devices(self, rng: random.Random, seed: int) -> Mapping[str, Device]:
        self.learning_devices: dict[str, LearningDevice] = {}
        self.devices = self.learning_devices
        for k in range(self._device_count):
            name = f"d{k:02}"
            device = LearningDevice(self, name, self._folder / name, self._stored, float(rng.randint(1, 4)))
            self.learning_devices[name] = device
            self.coordinator.enrol(device, k)
        return self.learning_devices

    def _new_servers(self) -> Sequence[FlowerServer]:
        self.servers = []
        self.servers = [RandomRuns(self) for _ in range(self._server_count)]
        return self.servers

    def _check(self) -> None:
        """Check when a device may have begun to draw more, and twice a second: checking many devices takes a while."""
        if self.draws_changed or self.timeline.now_s - self._checked_s > _CHECKED_EVERY_S:
            self.draws_changed, self._checked_s = False, self.timeline.now_s
            self.oracle.check()

    def batch_of(self, plan_id: str) -> int:
        """Samples in a minibatch of a plan's run."""
        return self.batches[plan_id.partition("/")[0]]

    # --- events on devices --------------------------------------------------------------------------------------

    def reported(self, device: LearningDevice, report: session_pb2.FrontReport) -> None:
        """A device puts a front into its outbox."""
        self.counts["fronts reported"] += 1

    def removed(self, device: LearningDevice, workload: str) -> None:
        """A device reports that it has removed a workload."""
        self.note(f"{device.id}: removes {workload}")
        self.counts["workloads removed"] += 1

    def untold(self, device: LearningDevice) -> list[tuple[str, int]]:
        """The removals that a device has not reported yet, with their numbers."""
        return [
            (request.removed.workload, request.sequence)
            for request in device.outbox.after(0)
            if request.HasField("removed")
        ]

    def check_bounds(self, device: LearningDevice) -> None:
        """Check that a device stores no more workloads than its limit, or than are in use."""
        count = len(list((device.learning.folders.folder("a").parent).glob("*")))
        # The workloads of all live runs, and the one that was trained last.
        most = max(self._stored.max_workloads, self._server_count + 1)
        self._workload_oracle.require("bounded", count <= most, f"{device.id} stores {count} workloads of {most}")

    def check_journal(self, device: LearningDevice, workload: str) -> None:
        """Check that a device's journal of a workload contains exactly the expected rows."""
        wrong = device.learning.wrong_rows(workload)
        self._workload_oracle.require("journal", wrong is None, f"{device.id}: the journal of {workload} {wrong}")

    def note_most(self, what: str, count: int) -> None:
        """Record the largest value of a count."""
        self.counts[what] = max(self.counts[what], count)

    # --- running the world --------------------------------------------------------------------------------------

    def live(self, minutes: float, trouble_every_s: float) -> None:
        """Run the world: begin runs and cause failures.

        Raises:
            BrokenPromiseError: an invariant does not hold.
        """
        until_s = self.timeline.now_s + 60.0 * minutes
        sweep_s = 0.0
        names, weights = list(_TROUBLES), list(_TROUBLES.values())
        ids = random.Random(self.rng.randrange(1 << 30))  # grant ids, seeded so that a world can be repeated
        with (
            patch.object(time, "time", lambda: 1.7e9 + self.timeline.now_s + self.date_s),
            patch.object(secrets, "randbits", ids.getrandbits),
        ):
            while self.timeline.now_s < until_s:
                wait_s = self.rng.expovariate(1.0 / trouble_every_s)
                seed, is_budget = self.rng.randrange(1 << 30), self.rng.random() < 0.15
                if is_budget:
                    self.timeline.advance(wait_s)
                    self.set_budget(self._device_count * _W_PER_DEVICE * self.rng.uniform(0.3, 1.2))
                else:
                    [rule] = self.rng.choices(names, weights)
                    assert rule in RULES
                    self.take(Step(rule, wait_s, seed))
                if self.timeline.now_s > sweep_s:
                    sweep_s = self.timeline.now_s + _SWEPT_EVERY_S
                    for drained in self.rng.sample(list(self.devices), len(self.devices) // 4):
                        self.coordinator.drain(drained, False)
                    self._workload_oracle.sweep()
            self._workload_oracle.sweep()
        for device in self.learning_devices.values():
            device.restart(1.0)


def main() -> int:
    """Run a world from the command line, and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=100, help="how many devices")
    parser.add_argument("--workloads", type=int, default=20, help=f"how many workloads, at most {MOST_WORKLOADS}")
    parser.add_argument("--servers", type=int, default=5, help="how many runs at once")
    parser.add_argument("--minutes", type=float, default=60.0, help="minutes of virtual time")
    parser.add_argument("--trouble-every-s", type=float, default=5.0, help="virtual seconds between two troubles")
    parser.add_argument("--seed", type=int, default=0, help="decides on everything that happens")
    options = parser.parse_args()
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="wattfleet-worlds-") as folder:
        world = ManyWorkloads(options.seed, Path(folder), options.devices, options.workloads, options.servers)
        try:
            world.live(options.minutes, options.trouble_every_s)
        except BrokenPromiseError as broken:
            print(f"seed {options.seed}: {broken.promise}: {broken}")
            return 1
    for what, count in sorted(world.counts.items()):
        print(f"{what}: {count:,}")
    print(f"every promise holds ({time.perf_counter() - begun_s:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
