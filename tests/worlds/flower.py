"""A Flower server: it requests plans, sends trainings to nodes, stops waiting for them, and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from coordinator.state.records import RoundRecord

if TYPE_CHECKING:
    from tests.worlds.world import World


# --- Workloads --------------------------------------------------------------------------------------------------------
# The workloads of a world's runs: each Flower server has its own.


def workload_of(run_or_plan: str) -> str:
    """The workload of a run, or of a run's plan: the name of its Flower server."""
    return run_or_plan[0]


# --- Flower -----------------------------------------------------------------------------------------------------------

_LONGEST_TRAINING_S = 60.0
_SURVEY_S, _LONGEST_SURVEY_S, _LOOKS_EVERY_S = 20.0, 40.0, 2.0


class FlowerServer:
    """The server of one run after another.

    Attributes:
        run_id: id of its run.
        number: number of its newest round.
        open: the devices that it waits for, by plan.
        measuring: the devices that measure and have not replied, by the id that stands in place of a plan's.
        sent: every training that it ever sent, as device and plan.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name
        self._runs = self._life = self.number = 0
        self.open: dict[str, set[str]] = {}
        self.measuring: dict[str, set[str]] = {}
        self.sent: list[tuple[str, str]] = []
        self._begin_run()

    def _begin_run(self) -> None:
        self._runs += 1
        self.run_id, self.number = f"{self._name}{self._runs}", 0
        self._world.coordinator.start_run(self.run_id, lambda: None)

    @property
    def next_plan_id(self) -> str:
        """A plan id that an app may make up: of the newest round, or of one that was never planned."""
        return f"{self.run_id}/{self.number + self._world.rng.randrange(2)}"

    def restart(self, resumes: bool) -> None:
        """Lose the round in progress; resume the run, or begin another."""
        self._world.note(f"Flower's server of {self.run_id} restarts, {'resumes' if resumes else 'with a new run'}")
        self._forget()
        if resumes:
            self.number = max(0, self.number - 1)
        else:
            self._begin_run()

    def finish_run(self) -> None:
        """End the run, and begin another."""
        self._world.note(f"run {self.run_id} finishes")
        self._world.coordinator.finish_run(self.run_id)
        self._forget()
        self._begin_run()

    def _forget(self) -> None:
        """Wait for no training any more."""
        self._life += 1
        self.open.clear()
        self.measuring.clear()

    def plan(self) -> None:
        """Request the next round with the nodes that it does not wait for."""
        world, life = self._world, self._life
        if not (free := self._free()):
            return
        self.number += 1

        def replied(record: RoundRecord) -> None:
            world.timeline.after(0.2 * world.rng.random(), partial(self._send, record, life))

        world.coordinator.plan(self.run_id, self.number, free, replied)

    def survey(self) -> None:
        """Let the devices that do not know the workload measure; once they have replied, request the next round."""
        self.measure(_SURVEY_S)
        self._plan_after(self._life, self._world.timeline.now_s + _LONGEST_SURVEY_S)

    def _plan_after(self, life: int, until_s: float) -> None:
        """Look again after a moment whether the survey has ended."""

        def look() -> None:
            if self._life == life and self.measuring and self._world.timeline.now_s < until_s:
                self._plan_after(life, until_s)
            elif self._life == life:
                self.plan()

        self._world.timeline.after(_LOOKS_EVERY_S, look)

    def measure(self, survey_s: float | None) -> None:
        """Request which nodes measure that it does not wait for: in a survey of some seconds, or until stopped."""
        world, life = self._world, self._life
        if not (free := self._free()):
            return

        def send(plan_id: str, devices: list[str]) -> None:
            if self._life == life:
                self.measuring[plan_id] = set(devices)
                self._deliver(plan_id, devices)

        def replied(plan_id: str, devices: list[str]) -> None:
            world.timeline.after(0.2 * world.rng.random(), partial(send, plan_id, devices))

        world.coordinator.measure(self.run_id, free, survey_s, replied)

    def _free(self) -> list[int]:
        """The nodes to request a plan for: some of those that it does not wait for."""
        world = self._world
        awaited = set().union(*self.open.values(), *self.measuring.values())
        free = self._sampled([k for k, device in enumerate(world.devices) if device not in awaited])
        if self.run_id not in world.run_ids:  # the coordinator was unreachable when the run began
            world.coordinator.start_run(self.run_id, lambda: None)
        return free

    def _sampled(self, free: list[int]) -> list[int]:
        """The nodes to request a plan for."""
        return [k for k in free if self._world.rng.random() < 0.8]

    def _send(self, record: RoundRecord, life: int) -> None:
        if self._life != life:
            return
        if record.wall_s is None:
            self.open[record.plan_id] = set(record.nodes)
            self._deliver(record.plan_id, sorted(record.nodes))

    def _deliver(self, plan_id: str, devices: Sequence[str]) -> None:
        """Send a training to nodes, over a network that loses, delays and repeats messages."""
        rng, timeline = self._world.rng, self._world.timeline
        for device in devices:
            self.sent.append((device, plan_id))
            if rng.random() < 0.05:
                continue  # the message is lost
            timeline.after(self._delay_s(), partial(self.arrive, device, plan_id))
            if rng.random() < 0.1:
                timeline.after(3 * self._delay_s(), partial(self.arrive, device, plan_id))

    def _delay_s(self) -> float:
        rng = self._world.rng
        return rng.random() * (0.5 if rng.random() < 0.7 else 25.0)

    def arrive(self, device: str, plan_id: str) -> None:
        """A training arrives at a node: on time, late or repeated."""
        rng = self._world.rng
        lasts_s = rng.random() * _LONGEST_TRAINING_S if rng.random() < 0.8 else 1e4
        self._world.devices[device].ask_to_train(plan_id, lasts_s, rng.random() < 0.1)

    def answered(self, device: str, plan_id: str) -> None:
        """A node replies."""
        if (measuring := self.measuring.get(plan_id)) is not None:
            measuring.discard(device)
            if not measuring:
                del self.measuring[plan_id]
        if (waiting := self.open.get(plan_id)) is None:
            return
        waiting.discard(device)
        if not waiting:
            self.finish_round(plan_id)

    def give_up(self, device: str) -> None:
        """Stop waiting for a node."""
        for waiting in (*self.open.values(), *self.measuring.values()):
            waiting.discard(device)

    def finish_round(self, plan_id: str) -> None:
        """Aggregate a round without the nodes that have not replied."""
        self._world.note(f"round {plan_id} finishes without {sorted(self.open[plan_id])}")
        del self.open[plan_id]
        self._world.coordinator.finish_round(plan_id)
