"""Reports wait for the coordinator through restarts, power cuts, full disks and damage, and never block the agent."""

import errno
import json
import logging
import os

import pytest

from edge_agent.session.outbox import Outbox, OutboxFile
from edge_agent.settings import SessionSettings
from tests.fakes.fronts import front
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import session_pb2


def observation(plan_id, epoch_s=10.1):
    seen = session_pb2.Observation(plan_id=str(plan_id), epoch_s=epoch_s, power_w=12.3)
    return session_pb2.SessionRequest(observation=seen)


def state(detail):
    report = session_pb2.StateReport(state=session_pb2.DEVICE_STATE_READY, detail=detail)
    return session_pb2.SessionRequest(state=report)


def front_of(idle_w, warmup_s=0.0):
    known = front((50, 20), (90, 12), warmup_s=warmup_s)
    report = session_pb2.FrontReport(front=front_to_message(known), idle_w=idle_w)
    return session_pb2.SessionRequest(front=report)


def waiting(outbox):
    return [request.observation.plan_id for request in outbox.after(0) if request.HasField("observation")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "outbox.jsonl"


def opened(path, **more):
    return Outbox(OutboxFile(path), **more)


def test_what_was_not_acknowledged_waits_for_the_next_process_exactly_as_it_was(path):
    outbox = opened(path)
    for request in (front_of(3.1), observation("run/1", 1 / 3), state("ready"), observation("run/2")):
        outbox.add(request)
    again = opened(path)
    bodies = [request.WhichOneof("body") for request in again.after(0)]
    assert bodies == ["front", "observation", "observation"], "an old state is not sent again"
    assert [request.sequence for request in again.after(0)] == [1, 2, 3]
    assert again.after(0)[0].front == front_of(3.1).front
    assert again.after(0)[1].observation.epoch_s == 1 / 3
    assert waiting(again) == ["run/1", "run/2"]


def test_what_was_acknowledged_is_not_delivered_by_the_next_process(path):
    outbox = opened(path)
    outbox.add(observation(1))
    outbox.add(observation(2))
    outbox.add(state("ready"))
    outbox.acknowledge(1)
    outbox.acknowledge(0)  # the acknowledgement of a lease
    outbox.acknowledge(99)
    assert outbox.has_any_up_to(2) and not outbox.has_any_up_to(1)
    outbox.add(observation(3))
    assert waiting(opened(path)) == ["2", "3"]
    outbox.acknowledge(2)
    outbox.acknowledge(4)
    assert waiting(opened(path)) == []


def test_what_waited_long_is_delivered_without_a_write_for_each(path):
    kept = opened(path)
    for number in range(100):
        kept.add(observation(number))
    writes = []

    def write(descriptor, data):
        writes.append(len(data))
        return os.write(descriptor, data)

    outbox = Outbox(OutboxFile(path, write))
    for request in outbox.after(0):
        outbox.acknowledge(request.sequence)
    assert len(writes) <= 1
    assert waiting(opened(path)) == []


def test_only_the_newest_front_waits_an_earlier_processs_included(path):
    outbox = opened(path)
    outbox.add(front_of(1))
    outbox.add(front_of(2))
    again = opened(path)
    assert [request.front.idle_w for request in again.after(0)] == [2]
    again.add(front_of(3))
    assert [request.front.idle_w for request in opened(path).after(0)] == [3]


def test_beyond_the_bound_the_oldest_observations_are_forgotten_and_counted(path, caplog):
    outbox = opened(path, settings=SessionSettings(max_queued_observations=3))
    outbox.add(front_of(1))
    for number in range(5):
        outbox.add(observation(number))
    assert waiting(outbox) == waiting(opened(path)) == ["2", "3", "4"]
    assert outbox.dropped == 2
    assert "the observation of 1 is dropped, 2 so far" in caplog.text
    assert outbox.after(0)[0].HasField("front")


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\x00",
        b'{"observation": {"plan_id": "run/1", "epo',
        b'{"observation": {"plan_id": "run/1"}}',
        b'{"observation": {"plan_id": "run/1", "epoch_s": "NaN", "power_w": 3}}',
        b'{"front": {"idle_w": 3, "front": {"epoch_s": [1.0]}}}',
        b'{"rumour": {}}',
        b'{"lease": {}}',
        b"[]",
    ],
)
def test_damage_is_kept_aside_and_the_sound_reports_are_delivered(path, caplog, damage):
    opened(path).add(observation("run/0"))
    path.write_bytes(damage + b"\n" + path.read_bytes())
    outbox = opened(path)
    assert waiting(outbox) == ["run/0"]
    assert waiting(opened(path)) == ["run/0"], "a restart before anything is added"
    aside = path.with_name("outbox.jsonl.damaged")
    assert "skipped damaged lines: 1" in caplog.text and str(aside) in caplog.text
    assert aside.read_bytes().startswith(damage)
    outbox.add(observation("run/2"))
    assert waiting(opened(path)) == ["run/0", "run/2"]


def test_a_file_that_cannot_be_read_is_said_and_the_agent_goes_on(path, caplog):
    path.mkdir(parents=True)
    outbox = opened(path)
    outbox.add(observation(1))
    assert waiting(outbox) == ["1"]
    assert "cannot be read" in caplog.text and "kept in memory" in caplog.text


def test_on_a_full_disk_the_agent_goes_on_in_memory_and_says_so_once(path, caplog):
    caplog.set_level(logging.INFO)
    full = False

    def write(descriptor, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)

    outbox = Outbox(OutboxFile(path, write))
    outbox.add(observation(1))
    full = True
    outbox.add(observation(2))
    outbox.add(observation(3))
    assert waiting(outbox) == ["1", "2", "3"]
    assert waiting(opened(path)) == ["1"], "the earlier content is intact"
    assert caplog.text.count("No space left on device; reports are kept in memory") == 1
    full = False
    outbox.add(observation(4))
    assert waiting(opened(path)) == ["1", "2", "3", "4"]
    assert "can be written again" in caplog.text


class PowerCut(BaseException):
    """Raised at the moment of a power cut; as a BaseException, it is not handled."""


@pytest.mark.parametrize("written", [0, 1, 40, 100])
def test_a_power_cut_in_the_middle_of_a_write_loses_at_most_what_was_being_added(path, written):
    opened(path).add(observation("run/1"))

    def write(descriptor, data):
        os.write(descriptor, data[:written])
        raise PowerCut

    with pytest.raises(PowerCut):
        Outbox(OutboxFile(path, write)).add(observation("run/2"))
    assert waiting(opened(path)) == ["run/1"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_front_of_an_earlier_version_is_delivered_with_its_warm_up(path, caplog):
    opened(path).add(front_of(3.1, warmup_s=5.0))
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"warmup_s"', b'"start_s"'))
    assert path.read_bytes() != before
    assert [request.front for request in opened(path).after(0)] == [front_of(3.1, warmup_s=5.0).front]
    assert not caplog.records
