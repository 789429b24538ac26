"""Measured modes that devices share: the coordinator keeps them and forwards them in time."""

from __future__ import annotations

import asyncio
from functools import partial

from coordinator.services.orders import Orders, ResponseStream
from coordinator.state.fleet import Fleet
from coordinator.state.measuring import Kind, SharedModes
from tests.fakes.small_fleet import ORIN_FRONT, RUN
from wattfleet.modes import MeasuredUnit, Measurement, PowerMode, Workload
from wattfleet.planning import Allowance
from wattfleet.planning.policies import AllDevices
from wattfleet_proto.convert import measured_from_messages
from wattfleet_proto.v1 import session_pb2

ORIN, NANO = Kind("agx-orin", "simulated"), Kind("orin-nano", "simulated")
DIGITS = Workload("digits")


def rows(count: int, minibatch_ms: float = 80.0) -> tuple[Measurement, ...]:
    return tuple(
        Measurement(PowerMode(4, 10**6, 10**8 + number, 2 * 10**9), minibatch_ms, 9e3, 16) for number in range(count)
    )


def test_a_device_learns_from_others_of_its_kind_and_never_from_itself() -> None:
    shared = SharedModes(16)
    for device_id, kind, workload in [("a", ORIN, "digits"), ("b", ORIN, "text"), ("c", NANO, "digits")]:
        assert shared.report(device_id, kind, workload, rows(3))
    assert shared.of_others("d", ORIN, "digits") == [unit(3), MeasuredUnit("orin-nano", rows(3))]
    assert shared.of_others("a", ORIN, "digits") == [MeasuredUnit("orin-nano", rows(3))]
    assert shared.of_others("d", ORIN._replace(provenance="hardware"), "digits") == []


def test_a_device_learns_from_the_most_experienced_device_of_a_few_other_kinds() -> None:
    shared = SharedModes(16)
    for board, counts in {"orin-nano": (2, 7), "orin-nx": (5,), "xavier-agx": (1,)}.items():
        for number, count in enumerate(counts):
            shared.report(f"{board}-{number}", Kind(board, "simulated"), "digits", rows(count))
    told = shared.of_others("orin", ORIN, "digits")
    assert [(each.board, len(each.measured)) for each in told] == [("orin-nano", 7), ("orin-nx", 5)]


def test_those_who_have_measured_most_are_kept() -> None:
    shared = SharedModes(8)
    counts = [1, 5, 2, 8, 3, 7, 4, 20]
    for number, count in enumerate(counts):
        shared.report(f"orin-{number}", ORIN, "digits", rows(count))
    assert [len(each.measured) for each in shared.of_others("new", ORIN, "digits")] == [8, 8, 7, 5]
    assert [len(each.measured) for each in shared.of_others("orin-3", ORIN, "digits")] == [8, 7, 5, 4]


def test_what_changes_nothing_for_others_is_not_passed_on() -> None:
    shared = SharedModes(4)
    assert shared.report("a", ORIN, "digits", rows(4))
    assert not shared.report("a", ORIN, "digits", rows(6)), "the first four are the same"
    for number in range(4):
        assert shared.report(f"orin-{number}", ORIN, "digits", rows(4))
    assert not shared.report("b", ORIN, "digits", rows(4)), "five others have as many"
    assert not shared.report("a", ORIN, "digits", ()), "it is profiled again"
    assert len(shared.of_others("new", ORIN, "digits")) == 4
    assert not shared.report("a", ORIN, "text", rows(0))
    assert shared.report("a", ORIN, "text", rows(2))
    assert not shared.report("a", ORIN, "text", rows(2, minibatch_ms=90.0)), "other values, but no more modes"
    assert shared.of_others("new", ORIN, "text") == [MeasuredUnit("", rows(2, minibatch_ms=90.0))]
    assert not SharedModes(0).report("a", ORIN, "digits", rows(4))


def test_only_so_many_workloads_are_kept_and_those_without_runs_go() -> None:
    shared = SharedModes(16)
    for number in range(256):
        assert shared.report("a", ORIN, f"workload-{number}", rows(1))
    assert not shared.report("a", ORIN, "one more", rows(1))
    shared.keep({"workload-3"})
    assert shared.report("a", ORIN, "one more", rows(1))
    assert shared.of_others("b", ORIN, "workload-3") == [unit(1)]
    assert shared.of_others("b", ORIN, "workload-4") == []


def unit(count: int) -> MeasuredUnit:
    """What another device of the same kind has measured."""
    return MeasuredUnit("", rows(count))


class Sharing:
    """Devices with sessions; `told` lists, in order, the measured units that each was sent."""

    def __init__(self, share_modes: int = 16) -> None:
        self.fleet = Fleet(Allowance.of_site(100.0), AllDevices())
        self.orders = Orders(self.fleet, shared=SharedModes(share_modes), share_after_s=0.0)
        self.told: dict[str, list[list[MeasuredUnit]]] = {}
        self.fleet.flower.start_run(RUN, "FedAvg", 3, workload=DIGITS)

    def connect(self, device_id: str, board: str = "agx-orin", learns_from_others: bool = True) -> None:
        self.fleet.agents.connect(device_id, board, "simulated", 7, True)
        self.told[device_id] = []
        self.orders.begin(device_id, ResponseStream(partial(self._write, device_id)), True, learns_from_others)

    def measured(self, device_id: str, count: int) -> None:
        record = self.fleet.agents.report_front(device_id, ORIN_FRONT, 5.0, count, "", DIGITS, 100)
        self.orders.modes_measured(record, DIGITS.name, rows(count))

    async def until_told(self, device_id: str, units: list[MeasuredUnit]) -> None:
        async with asyncio.timeout(10.0):
            while units not in self.told[device_id]:
                await asyncio.sleep(0.001)

    async def _write(self, device_id: str, response: session_pb2.SessionResponse) -> None:
        if response.HasField("announced"):
            units = [
                MeasuredUnit(each.board, measured_from_messages(each.modes)) for each in response.announced.measured
            ]
            self.told[device_id].append(units)


async def test_devices_are_told_what_others_measured_while_they_have_less() -> None:
    sharing = Sharing()
    for device_id in ("a", "b", "experienced"):
        sharing.connect(device_id)
    sharing.connect("nano", "orin-nano")
    sharing.connect("old", learns_from_others=False)
    sharing.measured("experienced", 20)
    await sharing.until_told("a", [unit(16)])
    await sharing.until_told("nano", [MeasuredUnit("agx-orin", rows(16))])
    sharing.measured("a", 3)
    await sharing.until_told("b", [unit(16), unit(3)])
    assert [sharing.told[each] for each in ("experienced", "old")] == [[[]], [[]]]
    sharing.connect("late")
    await sharing.until_told("late", [unit(16), unit(3)])
    assert len(sharing.told["late"]) == 1, "with the announcement of the workload"
    await sharing.orders.close()


async def test_a_device_that_is_left_out_for_its_claims_teaches_nobody() -> None:
    sharing = Sharing()
    sharing.connect("a")
    sharing.measured("a", 3)
    sharing.fleet.agents.refuse_front("a", "no board of its kind draws so many watts", DIGITS.name)
    sharing.orders.modes_measured(sharing.fleet.agents.get("a"), DIGITS.name, rows(4))
    sharing.connect("late")
    await sharing.until_told("late", [])
    await sharing.orders.close()


async def test_modes_of_a_workload_without_a_run_are_not_kept() -> None:
    sharing = Sharing()
    sharing.connect("a")
    record = sharing.fleet.agents.report_front("a", ORIN_FRONT, 5.0, 3, "", Workload("ahead"), 100)
    sharing.orders.modes_measured(record, "ahead", rows(3))
    sharing.fleet.flower.start_run(RUN + "1", "FedAvg", 3, workload=Workload("ahead"))
    sharing.connect("late")
    await sharing.until_told("late", [])
    await sharing.orders.close()


async def test_nothing_is_shared_where_it_is_switched_off() -> None:
    sharing = Sharing(share_modes=0)
    sharing.connect("a")
    sharing.connect("b")
    sharing.measured("a", 10)
    sharing.connect("c")
    await sharing.until_told("c", [])
    assert sharing.told["b"] == [[]]
    await sharing.orders.close()
