"""Nodes that train in order to measure power modes: before a round (a survey), and beside rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import INFO, WARNING

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from wattfleet.common.clock import Clock
from wattfleet.common.console import plain_text
from wattfleet.common.coordinator_channel import CoordinatorUnreachableError
from wattfleet.core.errors import first_few
from wattfleet.flower.server.errors import CoordinatorRefusedError
from wattfleet.flower.server.replies import describe_error
from wattfleet.flower.server.rounds import PlannedRounds
from wattfleet_proto.assignment import CUT_KEY, MEASURED_KEY, RECORD_KEY, UNPROFILED_KEY, RoundAssignment
from wattfleet_proto.limits import ENDS_WITHIN_S, LONGEST_FACTOR
from wattfleet_proto.v1 import planning_pb2

SURVEY_S = 20.0
"""Seconds in which a device that does not know the workload begins measurements before the first plan."""

_POLL_S = 0.5
_NOT_READY_S = 10.0

_PREDICTING_S = 60.0
"""Longest wait for a device that only lacks its prediction of the workload. A slow board needs half a minute to start
the process that predicts, and would train without a survey, or not at all in the first round, if it were not waited
for."""

_MOST_TURNS = 5
"""Where the watts do not suffice for all devices at once, a survey lasts at most as long as so many trainings in turn,
each of which takes as long as any is waited for."""

_GIVEN_UP_S = 3600.0
"""A node whose app has not answered for so long counts as free again, as after Flower's default timeout of a round."""

_MOST_RESTED_ROUNDS = 64


@dataclass(frozen=True)
class _Measuring:
    """A training that is run in order to measure.

    Attributes:
        node_id: Flower's node.
        device_id: its device.
        number: number of the round that it precedes, or beside which it runs.
        sent_s: when its message was sent, seconds of the clock.
    """

    node_id: int
    device_id: str
    number: int
    sent_s: float


@dataclass(frozen=True)
class _Attempt:
    """A device's newest attempt to measure.

    Attributes:
        known: what it knew of the workload before: the number of its measured modes, and whether the length of its
            epoch is unknown.
        fruitless: attempts in a row, this one excluded, from which it had learned nothing.
        rests_until: number of the round in which it may try again.
    """

    known: tuple[int, bool]
    fruitless: int
    rests_until: int


class _Attempts:
    """When devices may measure again: with each attempt that taught a device nothing, it rests for twice as long."""

    def __init__(self, rests_at_once: bool) -> None:
        """Start without attempts.

        Args:
            rests_at_once: whether a device also rests after its first attempt, for two rounds.
        """
        self._first = int(rests_at_once)
        self._newest: dict[int, _Attempt] = {}

    def may_begin(self, node_id: int, number: int) -> bool:
        """Whether a node's device may measure before or beside a round."""
        return node_id not in self._newest or self._newest[node_id].rests_until <= number

    def begin(self, assignment: planning_pb2.Assignment, number: int) -> bool:
        """Note that a device measures before or beside a round; returns whether its last attempt taught it nothing."""
        known = assignment.profiled_modes, assignment.length_assumed
        before = self._newest.get(assignment.node_id)
        is_fruitless = before is not None and before.known == known
        fruitless = before.fruitless + 1 if before is not None and is_fruitless else 0
        doublings = fruitless + self._first
        rests = min(1 << doublings, _MOST_RESTED_ROUNDS) if doublings else 0
        self._newest[assignment.node_id] = _Attempt(known, fruitless, number + rests)
        return is_fruitless


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
        self._updates: list[tuple[_Measuring, Message]] = []
        self._ends_early: set[int] = set()
        self._surveys, self._beside = _Attempts(rests_at_once=True), _Attempts(rests_at_once=False)
        self._is_surveyed = False
        self._said: set[tuple[str, str]] = set()

    @property
    def message_ids(self) -> list[str]:
        """The ids of the messages that are not answered yet."""
        return list(self._open)

    @property
    def busy_nodes(self) -> set[int]:
        """The nodes that have not answered yet."""
        return {each.node_id for each in self._open.values()}

    def poll(self, grid: Grid) -> None:
        """Receive the replies that have arrived, and no longer wait for nodes that have not answered for very long."""
        if self._open:
            self.receive(list(grid.pull_messages(self.message_ids)))
        now_s = self._clock.now_s()
        for message_id, training in list(self._open.items()):
            if now_s - training.sent_s >= _GIVEN_UP_S:
                del self._open[message_id]
                log(WARNING, "%s is given up: it has measured for %.0f s", training.device_id, now_s - training.sent_s)

    def survey(self, grid: Grid, number: int, node_ids: list[int], configure: Callable[[], Iterable[Message]]) -> None:
        """Let the devices that do not know the workload measure, before the first round that could use it.

        Each is asked once in a survey, whatever it learns, and rests for more and more rounds if it learns nothing. So
        a survey ends, and a fleet that cannot measure trains as usual.

        Args:
            grid: Flower's grid.
            number: number of the round that is planned next.
            node_ids: nodes that are connected and free.
            configure: returns the strategy's messages to these nodes; called only if any device has to measure.
        """
        if self._survey_s is None:
            return
        began_s = heard_s = self._clock.now_s()
        longest_s = LONGEST_FACTOR * self._survey_s + self._allowance_s
        asks_until_s = began_s + (_MOST_TURNS - 1) * longest_s
        # Devices need a moment when a run begins. Later ones get their turn before a later round.
        ready_until_s, predicted_until_s = began_s + _NOT_READY_S, began_s + _PREDICTING_S
        if self._is_surveyed:
            ready_until_s = predicted_until_s = began_s
        self._is_surveyed = True
        left = [node_id for node_id in node_ids if self._surveys.may_begin(node_id, number)]
        measured = 0
        while True:
            busy = self.busy_nodes
            free = [node_id for node_id in left if node_id not in busy]
            is_asking = self._clock.now_s() < asks_until_s
            plan = self._plan(grid, free if is_asking else [], self._survey_s)
            now_s = self._clock.now_s()
            if plan.assignments:
                if not measured:
                    log(INFO, "Survey: devices that do not know the workload measure it before the first plan")
                measured += len(plan.assignments)
                self._note_fruitless([each for each in plan.assignments if self._surveys.begin(each, number)])
                self.send(grid, number, plan, configure())
                asked = {each.node_id for each in plan.assignments}
                left = [node_id for node_id in left if node_id not in asked]
                heard_s = now_s
            # The watts of a device that has just ended are free once its agent has reported it.
            may_get_watts = plan.waiting and measured and now_s - heard_s < _NOT_READY_S
            waits_for_more = may_get_watts or (plan.not_ready and now_s < ready_until_s)
            waits_for_more = waits_for_more or (plan.predicting and now_s < predicted_until_s)
            waited_for = [each for each in self._open.values() if each.number == number]
            if not waits_for_more and all(now_s - each.sent_s >= longest_s for each in waited_for):
                break
            self._clock.sleep_s(_POLL_S)
            before = len(self._open)
            self.poll(grid)
            if len(self._open) < before:
                heard_s = self._clock.now_s()
        if waited_for:
            names = first_few(sorted(each.device_id for each in waited_for))
            log(WARNING, "the survey does not wait any longer for %s: the round is planned without them", names)
        if measured:
            log(INFO, "Survey: %d devices took part in %.0f s", measured, self._clock.now_s() - began_s)

    def _note_fruitless(self, assignments: Iterable[planning_pb2.Assignment]) -> None:
        """Log, once for each device, that a survey taught it nothing."""
        names = [each.device_id for each in assignments if self._is_new(each.device_id, "survey")]
        if names:
            log(
                INFO,
                "Survey: %s learned nothing in the last one, for which `wattfleet coordinator devices` may show the"
                " reason; surveyed again less and less often",
                first_few(sorted(names)),
            )

    def _is_new(self, device_id: str, what: str) -> bool:
        """Whether this has not been logged in this run yet."""
        known = (device_id, what) in self._said
        self._said.add((device_id, what))
        return not known

    def plan_beside(self, grid: Grid, number: int, node_ids: Iterable[int]) -> planning_pb2.PlanMeasuringResponse:
        """Request which devices that a round leaves out measure with the watts that its plan leaves.

        Args:
            grid: Flower's grid.
            number: the round's number.
            node_ids: connected nodes that the round leaves out.
        """
        busy = self.busy_nodes
        able = [
            node_id
            for node_id in node_ids
            if node_id in self._ends_early and node_id not in busy and self._beside.may_begin(node_id, number)
        ]
        if not self._measures_beside:
            able = []
        plan = self._plan(grid, able, None)
        for each in plan.assignments:
            self._beside.begin(each, number)
        return plan

    def receive(self, replies: Iterable[Message]) -> None:
        """Note which trainings have ended, and keep the updates of those that were trained to the end."""
        for reply in replies:
            training = self._open.pop(reply.metadata.reply_to_message_id, None)
            if training is None:
                continue
            if reply.has_error():
                self._warn(training.device_id, describe_error(reply.error))
                continue
            record = reply.content.pop(RECORD_KEY, {})
            if isinstance(why := record.get(UNPROFILED_KEY), str):
                self._warn(training.device_id, plain_text(why))
            if record.get(MEASURED_KEY, False):
                self._ends_early.add(training.node_id)
            elif not record.get(CUT_KEY, False):
                self._updates.append((training, reply))

    def _warn(self, device_id: str, why: str) -> None:
        """Log, once for each reason, why a device did not measure."""
        if self._is_new(device_id, why):
            log(WARNING, "%s did not measure: %s", device_id, why)

    def take_updates(self, number: int, own: Iterable[Message]) -> list[Message]:
        """Return the updates of trainings that went on to their end, each once.

        An update of an earlier round is dropped, since the strategy would take it for one that starts from the current
        arrays. So is the second update of a node that has also trained in the round.

        Args:
            number: number of the current round.
            own: the round's own replies.
        """
        taken, self._updates = self._updates, []
        trained = {reply.metadata.src_node_id for reply in own if not reply.has_error()}
        used = []
        for training, reply in taken:
            if training.number != number:
                log(
                    INFO,
                    "%s: its update of round %d is dropped, because that round has ended",
                    training.device_id,
                    training.number,
                )
            elif training.node_id not in trained:
                used.append(reply)
        return used

    def wait_for_ends(self, grid: Grid) -> set[int]:
        """Wait briefly for the trainings that a round's end has stopped; return the nodes that still train.

        An app that did not end in this time is not waited for again, and measures no more beside rounds until one of
        its trainings has ended early.
        """
        began_s = self._clock.now_s()
        while True:
            self.poll(grid)
            ending = [each.node_id for each in self._open.values() if each.node_id in self._ends_early]
            if not ending:
                break
            if self._clock.now_s() - began_s >= ENDS_WITHIN_S:
                self._ends_early.difference_update(ending)
                break
            self._clock.sleep_s(_POLL_S)
        return self.busy_nodes

    def _plan(self, grid: Grid, node_ids: list[int], survey_s: float | None) -> planning_pb2.PlanMeasuringResponse:
        """Request which nodes measure now; none if the coordinator does not answer or refuses."""
        if not node_ids:
            return planning_pb2.PlanMeasuringResponse()
        try:
            return self._rounds.plan_measuring(grid, node_ids, survey_s)
        except (CoordinatorUnreachableError, CoordinatorRefusedError) as error:
            if self._is_new("", str(error)):
                log(INFO, "no device measures now: %s", error)
            # The answer may have been lost, and devices may still be reconnecting.
            may_pass = isinstance(error, CoordinatorUnreachableError) or error.is_transient
            return planning_pb2.PlanMeasuringResponse(not_ready=len(node_ids) if may_pass else 0)

    def send(
        self, grid: Grid, number: int, plan: planning_pb2.PlanMeasuringResponse, messages: Iterable[Message]
    ) -> None:
        """Send copies of the strategy's messages to the nodes that measure, each with an assignment to measure.

        Args:
            grid: Flower's grid.
            number: number of the round before or beside which they measure.
            plan: the nodes that measure.
            messages: the strategy's messages, also to other nodes.
        """
        written = {message.metadata.dst_node_id: message for message in messages}
        sent, now_s = [], self._clock.now_s()
        for each in plan.assignments:
            if (message := written.get(each.node_id)) is None:  # the strategy does not train on every node
                continue
            content = RecordDict(dict(message.content))
            assignment = RoundAssignment(plan.plan_id, each.device_id, each.epochs, measures=True)
            content[RECORD_KEY] = ConfigRecord(assignment.to_record())
            copied = Message(
                content,
                dst_node_id=each.node_id,
                message_type=message.metadata.message_type,
                group_id=message.metadata.group_id,
            )
            sent.append((copied, _Measuring(each.node_id, each.device_id, number, now_s)))
        pushed = grid.push_messages([message for message, _ in sent]) if sent else []
        # A message that the SuperLink rejected has no id, and gets no reply.
        self._open.update(
            {message_id: training for message_id, (_, training) in zip(pushed, sent, strict=False) if message_id}
        )
