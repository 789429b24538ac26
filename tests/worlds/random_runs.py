"""A Flower server with one run after another, each with a random workload and batch size."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from coordinator.state.records import RoundRecord
from tests.worlds.flower import FlowerServer
from tests.worlds.learning_device import BATCHES

if TYPE_CHECKING:
    from tests.worlds.many_workloads import ManyWorkloads

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
