"""The contract of every store, in SQLite and in PostgreSQL: what was saved is unchanged after a restart."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sqlalchemy import URL, create_engine, text

from coordinator.errors import UnstorableRecordError
from coordinator.state.identity_records import AuditEntry, CertificateRecord, ExpiredIdentities, InviteRecord
from coordinator.state.records import (
    ContainedEnergy,
    CountedEnergy,
    DeviceOverrides,
    DeviceRecord,
    DeviceResult,
    NodeRecord,
    ObservedTraining,
    PinnedReferences,
    PublishedReference,
    RoundObservation,
    RoundRecord,
    RunRecord,
    SupplyOverride,
    TrainingEnergy,
)
from coordinator.state.workload_fronts import WorkloadFront
from coordinator.store.database import database_url
from coordinator.store.store import Store
from coordinator.store.tables import OF_DEVICES, OF_RUNS, Times, of_rounds
from tests.fakes.fleets import front, of_batches
from tests.fakes.short_forms import examples
from tests.fakes.small_fleet import NANO_NODE, ORIN_NODE, RUN
from tests.fakes.stored_records import (
    BLANK,
    assert_devices,
    comparable,
    comparable_devices,
    finished_round,
    for_all,
    known_fronts,
    of_workloads,
    old_runs_deleted,
    planned_round,
    rounds_of,
)
from tests.fixtures.coordinator import StoreClock
from wattfleet.common.identity.invites import token_hash
from wattfleet.common.identity.peers import Peer, Role
from wattfleet.core.budgets import EnergyAccount, Override
from wattfleet.core.modes import BatchOptions, Workload, WorkloadFacts
from wattfleet_proto.device_state import DeviceState

# --- Store ------------------------------------------------------------------------------------------------------------
# The contract of every store, in SQLite and in PostgreSQL: saved records are unchanged after a restart.


CHOOSES = Workload("digits", WorkloadFacts(batch=16), BatchOptions((16, 64), (0.123456789012345, 1.0)))


def sql(location: Path | URL, query: str) -> list[tuple[object, ...]]:
    """Rows as another client of the database reads them."""
    engine = create_engine(location if isinstance(location, URL) else database_url(location))
    with engine.connect() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    engine.dispose()
    return found


def test_a_new_store_is_empty(store: Store) -> None:
    kept = store.load()
    assert (kept.devices, kept.nodes, kept.runs, kept.rounds) == ([], {}, [], [])
    assert (kept.overrides, kept.budget_overrides, kept.references, kept.pinned) == ([], {}, [], [])


# --- the operator's settings --------------------------------------------------------------------------------------


def test_what_the_operator_said_comes_back_in_its_newest_state(
    store: Store, reopen: Callable[[], Store], clock: StoreClock
) -> None:
    until = clock.now + timedelta(hours=2)
    references = [PublishedReference(digit * 64, b"{}\n", bytes(range(256))) for digit in "ab"]
    store.save(
        DeviceOverrides("orin", frozenset({"lab", "ü ö"})),
        DeviceOverrides("nano", drained=True),
        SupplyOverride("rack", Override(40.1, until)),
        SupplyOverride("roof", Override(30.0)),
        *references,
        PinnedReferences(("c" * 64, "a" * 64, "b" * 64)),
    )
    store.save(
        DeviceOverrides("nano"),
        SupplyOverride("roof", Override(20.0)),
        references[0],
        PinnedReferences(("b" * 64, "a" * 64)),
    )
    kept = reopen().load()
    assert {say.device_id: say for say in kept.overrides} == {
        "orin": DeviceOverrides("orin", frozenset({"lab", "ü ö"})),
        "nano": DeviceOverrides("nano"),
    }
    assert kept.budget_overrides == {"rack": Override(40.1, until), "roof": Override(20.0)}
    assert sorted(kept.references, key=lambda each: each.digest) == references
    assert kept.pinned == ["b" * 64, "a" * 64]


def test_what_the_operator_takes_back_is_gone(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(SupplyOverride("rack", Override(40.0)), SupplyOverride("roof", Override(40.0)), PinnedReferences(("a",)))
    store.save(SupplyOverride("rack", None), PinnedReferences(()))
    store.save(SupplyOverride("rack", None), PinnedReferences(()))
    kept = reopen().load()
    assert (set(kept.budget_overrides), kept.pinned) == ({"roof"}, [])


# --- saved records after a restart --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        BLANK,
        DeviceRecord(
            "orin",
            "agx-orin",
            "hardware",
            2**32 - 1,
            DeviceState.DEGRADED,
            2**32 - 1,
            "rail VDD_CPU: 'no' \"sample\" – 100 %",
            (
                *for_all(front((10.1, 50.3), (20.2, 30.7), power_log_sd=0.0371, epoch_log_sd=1 / 3)),
                *of_workloads(bert=(front((1.0, 2.0)), None, 0), resnet18=(front((3.0, 4.0)), 2**32 - 1, 50)),
            ),
            5.123456789012345,
        ),
        dataclasses.replace(BLANK, idle_w=0.0),
    ],
)
def test_a_device_comes_back_as_it_was(store: Store, reopen: Callable[[], Store], record: DeviceRecord) -> None:
    store.save(record)
    assert_devices(reopen().load(), record)


characters = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"))


@settings(examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    device=st.builds(
        DeviceRecord,
        device_id=characters.filter(bool),
        board=characters,
        provenance=st.sampled_from(["simulated", "replayed", "hardware"]),
        mode_count=st.integers(1, 2**32 - 1),
        state=st.sampled_from(DeviceState),
        profiled_modes=st.integers(0, 2**32 - 1),
        detail=characters,
        fronts=known_fronts(power_log_sd=0.1),
        idle_w=st.none() | st.floats(0, 1e3),
    ),
    node_id=st.integers(0, 2**64 - 1),
)
def test_any_device_and_node_come_back(store: Store, device: DeviceRecord, node_id: int) -> None:
    store.save(device, NodeRecord(node_id, device.device_id))
    kept = store.load()
    [of_same_id] = [record for record in kept.devices if record.device_id == device.device_id]
    assert comparable(of_same_id) == comparable(device)
    assert kept.nodes[node_id] == device.device_id


def test_a_character_that_databases_have_no_room_for_is_replaced(store: Store) -> None:
    store.save(dataclasses.replace(BLANK, detail="half a line\x00 of a C program"))
    store.save(RunRecord("r", "FedAvg", 1, {}, "\x00", True))
    kept = store.load()
    assert (kept.devices[0].detail, kept.runs[0].error) == ("half a line\ufffd of a C program", "\ufffd")


def test_a_front_keeps_every_bit(store: Store, reopen: Callable[[], Store]) -> None:
    values = np.random.default_rng(5).random(64)
    kept = front(*zip(np.sort(values).tolist(), np.sort(values)[::-1].tolist(), strict=True), epoch_log_sd=0.1)
    record = dataclasses.replace(BLANK, fronts=for_all(kept))
    store.save(record)
    assert_devices(reopen().load(), record)


def test_a_front_keeps_the_batches_that_plans_may_choose(store: Store, reopen: Callable[[], Store]) -> None:
    fronts = [
        WorkloadFront(of_batches(front((1, 30), (2, 20), (3, 10)), [64, 16, 64]), CHOOSES, 100, 5),
        WorkloadFront(front((1, 30), (2, 20)), dataclasses.replace(CHOOSES, name="not fitted yet"), 100, 5),
        WorkloadFront(front((1, 30), (2, 20)), dataclasses.replace(CHOOSES, name="chooses none", batches=None), 100, 5),
    ]
    record = dataclasses.replace(BLANK, fronts=tuple(fronts))
    store.save(record)
    assert_devices(reopen().load(), record)


def test_node_ids_keep_all_64_bits(store: Store, reopen: Callable[[], Store]) -> None:
    nodes = {0: "a", 1: "b", 2**63 - 1: "c", 2**63: "d", 2**64 - 1: "e"}
    store.save(*(NodeRecord(node_id, device_id) for node_id, device_id in nodes.items()))
    store.save(NodeRecord(1, "another"))
    assert reopen().load().nodes == {**nodes, 1: "another"}


@pytest.mark.parametrize(
    "record",
    [
        RunRecord("4711", "FedAvg", 3),
        RunRecord("18446744073709551615", "FedAdam", 0, {"accuracy": 0.1, "loss": 2.302585092994046}, "", True),
        RunRecord("x", "Mine", 2**32 - 1, {}, "ValueError: 'nothing' came back\nat all", True),
        RunRecord("y", "FedAvg", 3, workload=Workload("digits", WorkloadFacts(batch=16))),
        RunRecord("z", "FedAvg", 3, workload=CHOOSES),
    ],
)
def test_a_run_comes_back_as_it_was(store: Store, reopen: Callable[[], Store], record: RunRecord) -> None:
    store.save(record)
    assert reopen().load().runs == [record]


def test_a_round_comes_back_as_it_was(store: Store, reopen: Callable[[], Store]) -> None:
    planned, done = planned_round(), finished_round()
    assert set(planned.nodes.values()) == {ORIN_NODE, NANO_NODE}
    store.save(planned)
    assert rounds_of(store, RUN) == [planned]
    store.save(done)
    [kept] = rounds_of(reopen(), RUN)
    assert kept == done
    assert kept.observed_site_w == 31.25 + 14.75
    assert kept.failed == ("nano",)


def test_a_device_that_a_trimmed_plan_left_out_is_part_of_its_round_still(store: Store) -> None:
    planned = planned_round()
    trimmed = dataclasses.replace(planned.plan, assignments=planned.plan.assignments[:1])
    record = dataclasses.replace(planned, plan=trimmed)
    store.save(record)
    assert rounds_of(store, RUN) == [record]


def test_metrics_that_are_no_numbers_come_back(store: Store) -> None:
    store.save(dataclasses.replace(planned_round(), metrics={"loss": math.nan, "best": -math.inf}))
    store.save(RunRecord("r", "FedAvg", 1, {"loss": math.inf}))
    kept = store.load()
    [of_round] = rounds_of(store, RUN)
    assert math.isnan(of_round.metrics["loss"])
    assert (of_round.metrics["best"], kept.runs[0].initial_metrics) == (-math.inf, {"loss": math.inf})


def test_an_observation_alone_is_part_of_its_round(store: Store, reopen: Callable[[], Store]) -> None:
    first, second = planned_round(1), planned_round(2)
    store.save(first, second)
    store.save(RoundObservation(first.plan_id, ObservedTraining("orin", 1.0, 2.0)))
    store.save(RoundObservation(second.plan_id, ObservedTraining("orin", 3.0, 4.0, beside_duty=True)))
    store.save(RoundObservation(second.plan_id, ObservedTraining("nano", 5.0, 6.0)))
    store.save(dataclasses.replace(second, results=(DeviceResult("nano"),)))
    kept = rounds_of(reopen(), RUN)
    assert [{name: seen.power_w for name, seen in each.observations.items()} for each in kept] == [
        {"orin": 2.0},
        {"orin": 4.0, "nano": 6.0},
    ]
    assert [name for name, seen in kept[1].observations.items() if seen.beside_duty] == ["orin"]


def test_the_account_of_a_run_is_the_sum_of_its_rounds_and_reports(store: Store, reopen: Callable[[], Store]) -> None:
    def with_energy(number: int) -> RoundRecord:
        record = planned_round(number)
        counted = tuple(
            dataclasses.replace(each, idle_w=each.power_limit_w - 10.0, longest_s=50.0)
            for each in record.plan.assignments
        )
        return dataclasses.replace(record, plan=dataclasses.replace(record.plan, assignments=counted))

    first, second = with_energy(1), with_energy(2)
    store.save(RunRecord(RUN, "FedAvg", 3, energy_budget_j=5_000.0, surveys_j=40.0), RunRecord("other", "FedAvg", 3))
    store.save(first, second)
    assert store.load().energy == {RUN: EnergyAccount(5_000.0, 40.0, 2_000.0)}  # 2 rounds of 2 trainings of 500 J
    report = TrainingEnergy(second.plan_id, "orin", 300.0, 500.0)
    store.save(report)
    store.save(report, dataclasses.replace(second, results=(DeviceResult("nano"),)))
    reopened = reopen()
    assert reopened.load().energy == {RUN: EnergyAccount(5_000.0, 340.0, 1_500.0)}
    assert rounds_of(reopened, RUN)[1].energies == {"orin": report}
    while not reopened.delete_some_of(RUN):
        pass
    assert reopened.load().energy == {}


def test_energy_that_a_reading_contains_is_deleted(store: Store, reopen: Callable[[], Store]) -> None:
    date = datetime(2026, 6, 1, tzinfo=timezone.utc)
    kept, gone = (CountedEnergy(f"{RUN}/{k}", "device/orin", date, date, 5.0, 0.0) for k in (1, 2))
    same_plan = dataclasses.replace(gone, holder="supply/site")
    store.save(kept, gone, same_plan)
    store.save(ContainedEnergy(gone.plan_id, gone.holder))
    assert {(each.plan_id, each.holder) for each in reopen().load().counted} == {
        (kept.plan_id, kept.holder),
        (same_plan.plan_id, same_plan.holder),
    }


# --- which record replaces which ----------------------------------------------------------------------------------


def test_a_device_is_kept_once_in_its_newest_state(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(BLANK)
    ready = dataclasses.replace(
        BLANK, state=DeviceState.READY, profiled_modes=50, fronts=for_all(front((1, 2))), idle_w=1.0
    )
    store.save(ready)
    newest = dataclasses.replace(ready, state=DeviceState.TRAINING)
    store.save(newest)
    assert_devices(reopen().load(), newest)


def test_a_front_is_replaced_and_removed_with_what_the_device_reports(store: Store) -> None:
    for each in (front((1, 2)), front((1, 3), (2, 2)), None, front((5, 2))):
        record = dataclasses.replace(BLANK, fronts=for_all(each))
        store.save(record)
        assert_devices(store.load(), record)


def test_of_several_states_saved_at_once_the_last_one_stays(store: Store) -> None:
    states = [dataclasses.replace(BLANK, detail=str(k), fronts=for_all(front((1, k + 1)))) for k in range(3)]
    store.save(*states)
    assert_devices(store.load(), states[-1])


def test_runs_and_rounds_keep_the_order_in_which_they_began(store: Store, reopen: Callable[[], Store]) -> None:
    names = ["9", "10", "a", "1", "Z"]
    store.save(*(RunRecord(name, "FedAvg", 1) for name in names))
    rounds = [planned_round(number) for number in (3, 1, 11, 2)]
    for record in rounds:
        store.save(record)
    store.save(RunRecord("a", "FedAvg", 1, finished=True))  # a record that is saved again keeps its position
    store.save(dataclasses.replace(rounds[1], wall_s=5.0))
    store = reopen()
    after = store.load()
    assert [record.run_id for record in after.runs] == names
    assert [record.number for record in rounds_of(store, RUN)] == [3, 1, 11, 2]
    assert [record.finished for record in after.runs] == [False, False, True, False, False]


def test_records_are_saved_all_or_none(store: Store, reopen: Callable[[], Store]) -> None:
    store.save(BLANK)
    newer = dataclasses.replace(BLANK, detail="newer", fronts=for_all(front((1, 2))))
    no_number = dataclasses.replace(planned_round(), epochs=None)  # type: ignore[arg-type]
    with pytest.raises(UnstorableRecordError, match="cannot store a value"):
        store.save(newer, RunRecord(RUN, "FedAvg", 1), NodeRecord(1, "nano"), no_number)
    after = reopen()
    assert (after.load().runs, after.load().nodes) == ([], {})
    assert_devices(after.load(), BLANK)


def test_a_front_that_could_not_be_saved_is_saved_with_the_device_the_next_time(store: Store) -> None:
    newer = dataclasses.replace(BLANK, fronts=for_all(front((1, 2))))
    with pytest.raises(UnstorableRecordError):
        store.save(newer, dataclasses.replace(planned_round(), epochs=None))  # type: ignore[arg-type]
    store.save(newer)
    assert_devices(store.load(), newer)


# --- Store times ------------------------------------------------------------------------------------------------------
# When events happened, according to the store: in SQLite and in PostgreSQL, before and after a restart.

_BEGIN = datetime(2026, 3, 29, 0, 30, tzinfo=timezone.utc)


def test_times_are_when_things_were_saved_first_and_last(location: Path | URL) -> None:
    hours = 0

    def clock() -> datetime:
        return (_BEGIN + timedelta(hours=hours)).astimezone(timezone(timedelta(hours=5, minutes=30)))

    def at(hour: int) -> datetime:
        return _BEGIN + timedelta(hours=hour)

    with closing(Store(location, clock)) as store:
        store.save(BLANK, RunRecord(RUN, "FedAvg", 3), planned_round(1))
        hours = 1
        store.save(replace(BLANK, detail="parked"), finished_round(1), planned_round(2), planned_round(1, "other"))
        assert store.times(OF_RUNS) == {RUN: Times(at(0), None)}
        hours = 2
        store.save(RunRecord(RUN, "FedAvg", 3, finished=True))

    def told(ask: Callable[[Store], dict[str, Times]]) -> dict[str, Times]:
        with closing(Store(location, clock)) as after:
            return ask(after)

    assert told(lambda after: after.times(OF_DEVICES)) == {BLANK.device_id: Times(at(0), at(1))}
    assert told(lambda after: after.times(OF_RUNS)) == {RUN: Times(at(0), at(2))}
    assert told(lambda after: after.times(of_rounds(RUN))) == {
        f"{RUN}/1": Times(at(0), at(1)),
        f"{RUN}/2": Times(at(1), None),
    }
    assert Times(at(0), None).first_unix_s == _BEGIN.timestamp() and Times().first_unix_s is None


# --- Identity store ---------------------------------------------------------------------------------------------------
# Invites, certificates and the audit log in the store, in SQLite and in PostgreSQL.

HOUR = timedelta(hours=1)
KEEP = timedelta(days=400)
ORIN = Peer("lab", Role.DEVICE, "orin / ü", "agx-orin", "6f0c")


def an_invite(clock: StoreClock, token: str = "secret") -> InviteRecord:
    now = clock.now
    tags = frozenset({"b", "a"})
    return InviteRecord(token_hash(token), Role.DEVICE, "orin-3", "roof", tags, now, "operator anna", now + HOUR, 2)


def a_certificate(clock: StoreClock, serial: str = "1f") -> CertificateRecord:
    now = clock.now
    return CertificateRecord(serial, ORIN, "ab" * 32, now, now + 30 * HOUR, flower_key="ecdsa-sha2-nistp384 AAAA")


def entries(clock: StoreClock, count: int) -> list[AuditEntry]:
    return [
        AuditEntry(f"{number:x}", clock.now + number * HOUR, "operator anna", "SetBudget", f"watts={number}", "")
        for number in range(count)
    ]


def test_identities_come_back_in_their_newest_state(
    store: Store, reopen: Callable[[], Store], clock: StoreClock
) -> None:
    invite, certificate = an_invite(clock), a_certificate(clock)
    used = dataclasses.replace(invite, uses_left=0)
    revoked = dataclasses.replace(certificate, revoked_at=clock.now + HOUR, reason="stolen \0 ü")
    store.save(invite, certificate, a_certificate(clock, "2f"))
    store.save(used, revoked, DeviceOverrides("orin-3", frozenset({"a"}), supply="roof"))
    kept = reopen().load()
    assert kept.invites == [used]
    stored = dataclasses.replace(revoked, reason="stolen \ufffd ü")
    assert sorted(kept.certificates, key=lambda each: each.serial) == [stored, a_certificate(clock, "2f")]
    assert kept.overrides == [DeviceOverrides("orin-3", frozenset({"a"}), supply="roof")]


def test_the_audit_log_is_read_in_its_order_from_a_time_on(store: Store, clock: StoreClock) -> None:
    written = entries(clock, 5)
    store.save(*written[:3])
    store.save(*written[2:])
    assert store.audit_entries(None, 100) == written
    assert store.audit_entries(clock.now + 3 * HOUR, 100) == written[3:]
    assert store.audit_entries(None, 2) == written[3:], "the newest"


def test_what_has_expired_is_deleted(store: Store, reopen: Callable[[], Store], clock: StoreClock) -> None:
    other = dataclasses.replace(an_invite(clock, "other"), expires_at=clock.now + 2 * HOUR)
    late = dataclasses.replace(a_certificate(clock, "2f"), not_after=clock.now + 31 * HOUR)
    store.save(an_invite(clock), other, a_certificate(clock), late, *entries(clock, 3))
    store.save(ExpiredIdentities(clock.now + HOUR, KEEP, 100))
    assert store.load().invites == [other]
    store.save(ExpiredIdentities(clock.now + 30 * HOUR, KEEP, 100))
    kept = reopen().load()
    assert (kept.invites, kept.certificates) == ([], [late])


def test_the_audit_log_is_bounded_by_its_age_and_its_length(store: Store, clock: StoreClock) -> None:
    written = entries(clock, 6)
    store.save(*written)
    store.save(ExpiredIdentities(clock.now + 3 * HOUR, 2 * HOUR, 100))
    assert store.audit_entries(None, 100) == written[1:]
    store.save(ExpiredIdentities(clock.now, KEEP, 2))
    assert store.audit_entries(None, 100) == written[4:]


# --- Store model ------------------------------------------------------------------------------------------------------
# For random sequences of saves, a store holds the same as a dictionary.

PLANNED = dataclasses.replace(planned_round(), plan=dataclasses.replace(planned_round().plan, assignments=()))
devices = st.sampled_from(["orin", "nano"])
runs = st.sampled_from(["1", "2", "3"])
numbers = st.integers(1, 2)


class StoreMachine(RuleBasedStateMachine):
    """A store, and dictionaries of its expected content."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.now = datetime(2026, 1, 1, tzinfo=timezone.utc)
        self.store = self.opened()
        self.devices: dict[str, DeviceRecord] = {}
        self.nodes: dict[int, str] = {}
        self.runs: dict[str, RunRecord] = {}
        self.ended: dict[str, datetime] = {}
        self.rounds: dict[str, RoundRecord] = {}
        self.started: dict[str, datetime] = {}
        self.planned: dict[str, datetime] = {}
        self.finished: dict[str, datetime] = {}

    def opened(self) -> Store:
        return Store(Path(self.folder.name, "coordinator.db"), lambda: self.now)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.folder.cleanup()

    @rule(
        device=devices,
        state=st.sampled_from(DeviceState),
        fronts=known_fronts(2),
        keeps_front=st.booleans(),
    )
    def save_device(
        self, device: str, state: DeviceState, fronts: tuple[WorkloadFront, ...], keeps_front: bool
    ) -> None:
        known = self.devices.get(device)
        if known is not None and keeps_front:
            fronts = known.fronts
        self.devices[device] = DeviceRecord(device, "orin-nx", "simulated", 7, state, fronts=fronts)
        self.store.save(self.devices[device])

    @rule(node=st.integers(2**64 - 2, 2**64 - 1), device=devices)
    def save_node(self, node: int, device: str) -> None:
        self.nodes[node] = device
        self.store.save(NodeRecord(node, device))

    @rule(run=runs, finished=st.booleans(), error=st.sampled_from(["", "no"]))
    def save_run(self, run: str, finished: bool, error: str) -> None:
        self.runs[run] = RunRecord(run, "FedAvg", 3, {"accuracy": 0.5}, error, finished)
        self.started.setdefault(run, self.now)
        if finished:
            self.ended.setdefault(run, self.now)
        else:
            self.ended.pop(run, None)
        self.store.save(self.runs[run])

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), number=numbers, chosen=st.sets(devices), wall_s=st.none() | st.floats(0, 9))
    def save_round(self, data: st.DataObject, number: int, chosen: set[str], wall_s: float | None) -> None:
        run = data.draw(st.sampled_from(sorted(self.runs)))
        plan_id = f"{run}/{number}"
        before = self.rounds.get(plan_id)
        self.rounds[plan_id] = dataclasses.replace(
            PLANNED,
            plan_id=plan_id,
            run_id=run,
            number=number,
            nodes={device: 1 for device in sorted(chosen)},
            observations={} if before is None else before.observations,
            results=() if wall_s is None else (DeviceResult("orin"),),
            wall_s=wall_s,
        )
        self.planned.setdefault(plan_id, self.now)
        if wall_s is None:
            self.finished.pop(plan_id, None)
        else:
            self.finished.setdefault(plan_id, self.now)
        self.store.save(self.rounds[plan_id])

    @precondition(lambda self: self.rounds)
    @rule(data=st.data(), device=devices, watts=st.integers(1, 9))
    def save_observation(self, data: st.DataObject, device: str, watts: int) -> None:
        plan_id = data.draw(st.sampled_from(sorted(self.rounds)))
        observed, before = ObservedTraining(device, 1.0, float(watts)), self.rounds[plan_id]
        self.rounds[plan_id] = dataclasses.replace(before, observations={**before.observations, device: observed})
        self.store.save(RoundObservation(plan_id, observed))

    @rule(days=st.integers(1, 5))
    def pass_days(self, days: int) -> None:
        self.now += timedelta(days=days)

    @rule(days=st.integers(1, 9))
    def forget(self, days: int) -> None:
        old = [run for run in self.runs if self.now - self.touched(run) > timedelta(days=days)]
        assert old_runs_deleted(self.store, timedelta(days=days)) == old
        for run in old:
            del self.runs[run], self.started[run]
            self.ended.pop(run, None)
        for plan_id in [plan_id for plan_id, record in self.rounds.items() if record.run_id in old]:
            del self.rounds[plan_id], self.planned[plan_id]
            self.finished.pop(plan_id, None)

    def touched(self, run: str) -> datetime:
        """When a run ended, or was last active."""
        times = [self.finished.get(each, at) for each, at in self.planned.items() if self.rounds[each].run_id == run]
        return self.ended.get(run) or max(times, default=self.started[run])

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opened()

    @invariant()
    def it_holds_what_was_saved(self) -> None:
        if not hasattr(self, "store"):
            return
        kept = self.store.load()
        assert comparable_devices(kept) == {name: comparable(record) for name, record in self.devices.items()}
        assert kept.nodes == self.nodes
        # Dictionaries keep the order in which runs and rounds began, as the store does.
        assert list(kept.runs) == list(self.runs.values())
        assert list(kept.rounds) == self.gone_on_with()
        assert kept.archived == set(self.runs)
        for run in self.runs:
            assert rounds_of(self.store, run) == [each for each in self.rounds.values() if each.run_id == run]

    def gone_on_with(self) -> list[RoundRecord]:
        """The newest rounds, and for every device in an unfinished round, the newest round that chose it."""
        newest_of = {device: record.plan_id for record in self.rounds.values() for device in record.nodes}
        waited_for = {
            device
            for record in self.rounds.values()
            if record.wall_s is None and not self.runs[record.run_id].finished
            for device in record.nodes
        }
        wanted = {*list(self.rounds)[-3:], *(newest_of[device] for device in waited_for)}
        return [record for plan_id, record in self.rounds.items() if plan_id in wanted]


StoreMachine.TestCase.settings = settings(examples(15), stateful_step_count=20)
TestStoreMachine = StoreMachine.TestCase
