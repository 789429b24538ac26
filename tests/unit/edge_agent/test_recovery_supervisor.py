"""The supervisor while the device starts or ends, when nothing may change the device."""

import asyncio
import threading

import pytest

from edge_agent.runtime.recovery_supervisor import RecoverySupervisor
from edge_agent.runtime.states import DeviceFailed, StateReporter, TrainingBegan, TrainingEnded
from edge_agent.session.grants import Grants
from edge_agent.settings import RecoverySettings
from wattfleet_proto.v1 import session_pb2

READY, TRAINING = session_pb2.DEVICE_STATE_READY, session_pb2.DEVICE_STATE_TRAINING


class Reports:
    """A link that records the reported states in order."""

    def __init__(self):
        self.states = []
        self.grants = Grants()

    def report_state(self, report):
        self.states.append(report.state)

    def report_front(self, report):
        pass


class Board:
    """A fake learner and training watch that record each change of the device."""

    profiled_modes = 6

    @property
    def latest(self):
        return self

    def __init__(self):
        self.touched = []

    def reprofile(self, report):
        self.touched.append("profiled again")

    def recover(self):
        self.touched.append("recovered")

    def park(self):
        self.touched.append("parked")


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def reports():
    return Reports()


def supervisor_of(board, reports, due_fronts=lambda: [session_pb2.FrontReport()]):
    return RecoverySupervisor(board, reports, StateReporter(reports), board, due_fronts, RecoverySettings(retry_s=0))


@pytest.mark.parametrize("event", [TrainingEnded(drift="slower"), DeviceFailed("no permission")])
async def test_nothing_touches_the_device_once_its_supervisor_was_closed(board, reports, event):
    async def last_training_ends_while_the_agent_does():
        supervisor = supervisor_of(board, reports)
        await supervisor.start()
        async with supervisor.device_lock:
            supervisor.handle(TrainingBegan("4c"))
            closing = asyncio.create_task(supervisor.aclose())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await supervisor.handle_with_front(event)
        await closing
        closed_with = list(board.touched)
        for _ in range(20):
            await asyncio.sleep(0.001)
        return closed_with

    assert (await last_training_ends_while_the_agent_does()) == board.touched == []


async def test_a_supervisor_that_is_closed_twice_over_still_waits_for_the_last_training(board, reports):

    supervisor = supervisor_of(board, reports)
    await supervisor.device_lock.acquire()
    closing = asyncio.create_task(supervisor.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0.001)
    assert not closing.done()
    supervisor.device_lock.release()
    with pytest.raises(asyncio.CancelledError):
        await closing


async def test_a_training_waits_while_the_resting_mode_changes_and_is_not_refused(board, reports):
    parking, go_on = threading.Event(), threading.Event()

    def park():
        parking.set()
        assert go_on.wait(10)

    board.park = park
    supervisor = supervisor_of(board, reports)
    await supervisor.start()
    resting = asyncio.create_task(supervisor.rest())
    await asyncio.to_thread(parking.wait, 10)
    assert supervisor.device_lock.locked() and not supervisor.is_busy
    go_on.set()
    await resting
    async with supervisor.device_lock:
        assert supervisor.is_busy


async def test_a_training_is_not_reported_before_the_readiness_that_it_follows(board, reports):
    computing, train = threading.Event(), threading.Event()

    def slow_front():
        computing.set()
        assert train.wait(10)
        return [session_pb2.FrontReport()]

    supervisor = supervisor_of(board, reports, slow_front)
    beginning = asyncio.create_task(supervisor.start())
    await asyncio.to_thread(computing.wait, 10)
    assert supervisor.device_lock.locked(), "a training cannot begin yet"
    train.set()
    await beginning
    async with supervisor.device_lock:
        supervisor.handle(TrainingBegan("4c"))
    assert reports.states == [READY, TRAINING]
