"""Nodes that train in order to measure power modes: before a round (a survey), and beside rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet.errors import first_few
from wattfleet_flower.server.errors import RefusedError
from wattfleet_flower.server.replies import describe_error
from wattfleet_flower.server.rounds import PlannedRounds
from wattfleet_io.clock import Clock
from wattfleet_io.coordinator_channel import CoordinatorUnreachableError
from wattfleet_proto.assignment import CUT_KEY, MEASURED_KEY, RECORD_KEY, RoundAssignment
from wattfleet_proto.v1 import planning_pb2

SURVEY_S = 20.0
"""Seconds in which a device that does not know the workload begins measurements before the first plan."""

_POLL_S = 0.5
_NOT_READY_S = 10.0
_ENDS_WITHIN_S = 10.0
_LONGEST_FACTOR = 2.0
"""A measurement that has begun is completed, within this multiple of the time in which measurements may begin."""

_MOST_RESTED_ROUNDS = 64


@dataclass(frozen=True)
class _Measuring:
    """A training that is run in order to measure.

    Attributes:
        node_id: Flower's node.
        device_id: its device.
    """

    node_id: int
    device_id: str


class Measurements:
    """The trainings of a run whose purpose is to measure.

    A training ends early when nothing is left to measure, and its reply then holds no update. An app that does not
    report its minibatches cannot be ended: it trains to the end, and its update counts like any other if the round
    still waits for others.
    """

    def __init__(
        self,
        rounds: PlannedRounds,
        survey_s: float | None,
        measures_beside: bool,
        allowance_s: float | None,
        clock: Clock,
    ) -> None:
        """Start without trainings.

        Args:
            rounds: the run's rounds.
            survey_s: seconds in which a device begins measurements in a survey; None for no survey.
            measures_beside: whether devices that a round leaves out measure meanwhile.
            allowance_s: seconds to wait for the replies to a survey beyond its measurements; None for 90.
            clock: measures the waiting.
        """
        self._rounds = rounds
        self._survey_s = survey_s
        self._measures_beside = measures_beside
        self._allowance_s = 90.0 if allowance_s is None else allowance_s
        self._clock = clock
        self.begin_run()

    def begin_run(self) -> None:
        """Forget the trainings of an earlier run."""
        self._open: dict[str, _Measuring] = {}
        self._updates: list[Message] = []
        self._ends_early: set[int] = set()
        # Node id -> modes measured before the last attempt, attempts in a row without another one, and when to retry.
        self._progress: dict[int, tuple[int, int, int]] = {}

    @property
    def message_ids(self) -> list[str]:
        """The ids of the messages that are not answered yet."""
        return list(self._open)

    @property
    def busy_nodes(self) -> set[int]:
        """The nodes that have not answered yet."""
        return {each.node_id for each in self._open.values()}

    def survey(self, grid: Grid, node_ids: list[int], configure: Callable[[], Iterable[Message]]) -> None:
        """Let the devices that do not know the workload measure, before the first round that could use it.

        Args:
            grid: Flower's grid.
            node_ids: nodes that are connected and free.
            configure: returns the strategy's messages to these nodes; called only if any device has to measure.
        """
        if self._survey_s is None:
            return
        began_s = self._clock.now_s()
        longest_s = _LONGEST_FACTOR * self._survey_s + self._allowance_s
        sent_s, measured = began_s, 0
        while True:
            free = [node_id for node_id in node_ids if node_id not in self.busy_nodes]
            plan = self._plan(grid, free, self._survey_s)
            now_s = self._clock.now_s()
            if plan.assignments:
                if not measured:
                    log(INFO, "Survey: devices that do not know the workload measure it before the first plan")
                measured += len(plan.assignments)
                self.send(grid, plan, configure())
                sent_s = now_s
            elif not self._open and not (plan.not_ready and now_s - began_s < _NOT_READY_S):
                break
            elif self._open and now_s - sent_s >= longest_s:
                names = first_few(sorted(each.device_id for each in self._open.values()))
                log(WARNING, "the survey does not wait any longer for %s: the round is planned without them", names)
                break
            self._clock.sleep_s(_POLL_S)
            self.receive(list(grid.pull_messages(self.message_ids)) if self._open else [])
        if measured:
            log(INFO, "Survey: %d devices took part in %.0f s", measured, self._clock.now_s() - began_s)

    def plan_beside(self, grid: Grid, number: int, node_ids: Iterable[int]) -> planning_pb2.PlanMeasuringResponse:
        """Request which devices that a round leaves out measure with the watts that its plan leaves.

        Args:
            grid: Flower's grid.
            number: the round's number.
            node_ids: connected nodes that the round leaves out.
        """
        able = [
            node_id
            for node_id in node_ids
            if node_id in self._ends_early
            and node_id not in self.busy_nodes
            and self._progress.get(node_id, (0, 0, 0))[2] <= number
        ]
        if not self._measures_beside:
            able = []
        plan = self._plan(grid, able, None)
        for each in plan.assignments:
            modes, fruitless, _ = self._progress.get(each.node_id, (-1, 0, 0))
            fruitless = fruitless + 1 if each.profiled_modes == modes else 0
            rests = min(1 << fruitless, _MOST_RESTED_ROUNDS) if fruitless else 0
            self._progress[each.node_id] = each.profiled_modes, fruitless, number + rests
        return plan

    def receive(self, replies: Iterable[Message]) -> None:
        """Note which trainings have ended, and keep the updates of those that were trained to the end."""
        for reply in replies:
            training = self._open.pop(reply.metadata.reply_to_message_id, None)
            if training is None:
                continue
            if reply.has_error():
                log(WARNING, "%s did not measure: %s", training.device_id, describe_error(reply.error))
                continue
            record = reply.content.pop(RECORD_KEY, {})
            if record.get(MEASURED_KEY, False):
                self._ends_early.add(training.node_id)
            elif not record.get(CUT_KEY, False):
                self._updates.append(reply)

    def take_updates(self) -> list[Message]:
        """Return the updates of trainings that went on to their end, each once."""
        taken, self._updates = self._updates, []
        return taken

    def wait_for_ends(self, grid: Grid) -> set[int]:
        """Wait briefly for the trainings that a round's end has stopped; return the nodes that still train."""
        began_s = self._clock.now_s()
        while self._open:
            self.receive(list(grid.pull_messages(self.message_ids)))
            is_any_ending = any(each.node_id in self._ends_early for each in self._open.values())
            if not is_any_ending or self._clock.now_s() - began_s >= _ENDS_WITHIN_S:
                break
            self._clock.sleep_s(_POLL_S)
        return self.busy_nodes

    def _plan(self, grid: Grid, node_ids: list[int], survey_s: float | None) -> planning_pb2.PlanMeasuringResponse:
        """Request which nodes measure now; none if the coordinator does not answer or refuses."""
        if not node_ids:
            return planning_pb2.PlanMeasuringResponse()
        try:
            return self._rounds.plan_measuring(grid, node_ids, survey_s)
        except (CoordinatorUnreachableError, RefusedError) as error:
            log(INFO, "no device measures now: %s", error)
            return planning_pb2.PlanMeasuringResponse()

    def send(self, grid: Grid, plan: planning_pb2.PlanMeasuringResponse, messages: Iterable[Message]) -> None:
        """Send copies of the strategy's messages to the nodes that measure, each with an assignment to measure.

        Args:
            grid: Flower's grid.
            plan: the nodes that measure.
            messages: the strategy's messages, also to other nodes.
        """
        epochs = self._rounds.usual_epochs
        written = {message.metadata.dst_node_id: message for message in messages}
        sent = []
        for each in plan.assignments:
            if (message := written.get(each.node_id)) is None:  # the strategy does not train on every node
                continue
            content = RecordDict(dict(message.content))
            assignment = RoundAssignment(plan.plan_id, each.device_id, each.epochs or epochs, measures=True)
            content[RECORD_KEY] = ConfigRecord(assignment.to_record())
            copied = Message(
                content,
                dst_node_id=each.node_id,
                message_type=message.metadata.message_type,
                group_id=message.metadata.group_id,
            )
            sent.append((copied, _Measuring(each.node_id, each.device_id)))
        pushed = grid.push_messages([message for message, _ in sent]) if sent else []
        # A message that the SuperLink rejected has no id, and gets no reply.
        self._open.update(
            {message_id: training for message_id, (_, training) in zip(pushed, sent, strict=False) if message_id}
        )
