"""What happens to devices, runs, rounds and budgets: lines of the log, and stored events for people to read."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from coordinator.budgets.budget_watch import BudgetChange
from coordinator.display.words import age, error_text, found_troubles, is_off_prediction, sample_flags, watts
from coordinator.state.device_view import DeviceView
from coordinator.state.fleet import Fleet
from coordinator.state.records import DeviceRecord, EventRecord, RoundRecord, RunRecord
from wattfleet.common.clock import unix_now_s, utc_now
from wattfleet.common.console import count_of, duration_text, plain_text
from wattfleet.common.logs import fields
from wattfleet.core.errors import InvalidInputError, first_few
from wattfleet_proto.device_state import DeviceState
from wattfleet_proto.names import is_stopped

_log = logging.getLogger(__name__)


# --- State times ------------------------------------------------------------------------------------------------------
# Records since when each device is in its state, how long its profiling still takes, and when it last throttled.


@dataclass
class _InState:
    """A device in one state.

    Attributes:
        state: the state.
        since_unix_s: when this coordinator first saw the state, seconds since 1970.
        modes: the number of measured modes at that time.
        grown_unix_s: when the newest mode was reported, seconds since 1970.
        grown_modes: the number of measured modes then.
    """

    state: DeviceState
    since_unix_s: float
    modes: int
    grown_unix_s: float
    grown_modes: int


class StateTimes:
    """The times of devices' states since this coordinator started.

    Args:
        known: returns the ids of the fleet's devices; others are dropped.
        target_modes: the most modes that each device measures.
        now_unix_s: returns the time, seconds since 1970.
    """

    def __init__(self, known: Collection[str], target_modes: int, now_unix_s: Callable[[], float] = unix_now_s) -> None:
        self._known = known
        self._target_modes = target_modes
        self._now_unix_s = now_unix_s
        self._devices: dict[str, _InState] = {}
        self._throttled_unix_s: dict[str, float] = {}

    def note(self, device: DeviceRecord) -> None:
        """Record a device's state and progress as just reported."""
        now, modes = self._now_unix_s(), device.profiled_modes
        seen = self._devices.get(device.device_id)
        if seen is None or seen.state is not device.state or modes < seen.grown_modes:
            self._devices[device.device_id] = _InState(device.state, now, modes, now, modes)
            if len(self._devices) > len(self._known):
                self._devices = {name: each for name, each in self._devices.items() if name in self._known}
        elif modes > seen.grown_modes:
            seen.grown_unix_s, seen.grown_modes = now, modes

    def note_throttling(self, device_id: str) -> None:
        """Record that a device's board has just throttled itself."""
        self._throttled_unix_s[device_id] = self._now_unix_s()
        if len(self._throttled_unix_s) > len(self._known):
            self._throttled_unix_s = {name: at for name, at in self._throttled_unix_s.items() if name in self._known}

    def throttled_unix_s(self, device_id: str) -> float | None:
        """When a device's board last throttled itself, seconds since 1970; None if this coordinator has not seen it."""
        return self._throttled_unix_s.get(device_id)

    def since_unix_s(self, device: DeviceRecord) -> float | None:
        """When a device's state began, seconds since 1970; None if this coordinator has not seen it."""
        seen = self._devices.get(device.device_id)
        return seen.since_unix_s if seen is not None and seen.state is device.state else None

    def target_modes(self, device: DeviceRecord) -> int:
        """The most modes that a device measures."""
        return min(self._target_modes, device.mode_count)

    def profiling_left_s(self, device: DeviceRecord) -> float | None:
        """The estimated remaining seconds of a device's profiling, which may end earlier.

        None if the device is not profiling, or has not measured a mode since it began.
        """
        seen = self._devices.get(device.device_id)
        if seen is None or not seen.state is device.state is DeviceState.PROFILING or seen.grown_modes == seen.modes:
            return None
        mode_s = (seen.grown_unix_s - seen.since_unix_s) / (seen.grown_modes - seen.modes)
        left = max(0, self.target_modes(device) - seen.grown_modes)
        return max(0.0, seen.grown_unix_s + left * mode_s - self._now_unix_s())


# --- Event log --------------------------------------------------------------------------------------------------------

_OFFLINE_AFTER_S = 10.0
"""Seconds without a session after which a device's absence is an event: agents reconnect within seconds."""

_MOST_OF_ONE = {"device": 20, "round": 60, "budget": 20}
"""Events that one device, the rounds of one run, or one supply's budget cause within an hour: even a device that never
settles fills the store with no more than half of the events that are kept. The last of them says that further ones are
left out for an hour."""

_TOO_MANY_ROUND_EVENTS = "has many events, as rounds before it: those of this run's rounds are left out for an hour"

_HOUR_S = 3600.0

_LONGEST_TEXT = 500


@dataclass(frozen=True)
class _Condition:
    """What the newest events say about a device.

    Attributes:
        word: offline, degraded, profiling or connected.
        is_left_out: its reports keep it out of rounds.
        troubles: as from `found_troubles`.
    """

    word: str
    is_left_out: bool = False
    troubles: tuple[str, ...] = ()


_MOST_UNPLANNED_RUNS = 1000
"""Maximum of runs without plans that are warned of, since devices name them."""


class EventLog:
    """Writes lines of the log, and stores events. Devices that train or wait as usual are no event.

    Attributes:
        count: the events since this coordinator started.
    """

    def __init__(
        self,
        fleet: Fleet,
        save: Callable[[EventRecord], None] = lambda record: None,
        throttled_unix_s: Callable[[str], float | None] = lambda device_id: None,
        stored: Iterable[DeviceRecord] = (),
        now: Callable[[], datetime] = utc_now,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch one fleet.

        Args:
            fleet: the fleet.
            save: stores an event with the next transaction; by default, events are only logged.
            throttled_unix_s: returns when a device's board last throttled itself, in seconds since 1970.
            stored: the devices as an earlier coordinator stored them; their return is no event.
            now: returns the date and time, with an offset.
            now_s: a clock that does not jump, in seconds.
        """
        self.count = 0
        self._fleet = fleet
        self._save = save
        self._throttled_unix_s = throttled_unix_s
        self._now = now
        self._now_s = now_s
        self._known = {
            each.device_id: _Condition(
                _word_of(each.state),
                fleet.agents.claims.exclusion_reason(each) is not None,
                tuple(self._troubles_of(each)),
            )
            for each in stored
        }
        # Devices without a session that are not offline in an event yet: when it ended, by both clocks.
        self._lost: dict[str, tuple[datetime, float]] = {}
        self._offline_at: dict[str, datetime] = {}
        self._unplanned_runs: dict[str, None] = {}  # the oldest first
        # When the newest events of each kind and subject were, and from when on it may cause more, by the second clock.
        self._told_s: dict[tuple[str, str], list[float]] = {}
        self._quiet_until_s: dict[tuple[str, str], float] = {}

    # --- the coordinator and its devices ------------------------------------------------------------------------

    def started(self, version: str) -> None:
        """Record that the coordinator has started."""
        self._event("coordinator", f"started, version {version}")

    def connected(self, device: DeviceRecord) -> None:
        """Log that a device has a session."""
        _log.info("%s is connected", device.device_id, extra=fields(device=device.device_id, state=device.state.value))
        self._lost.pop(device.device_id, None)
        self.device_changed(device.device_id)

    def disconnected(self, device: DeviceRecord, is_expected_back: bool = False) -> None:
        """Log that the session of a device has ended; its absence is an event later, in `check` or `missing`.

        Args:
            device: the device.
            is_expected_back: the coordinator has ended the session so that the device reconnects.
        """
        _log.info("%s is offline", device.device_id, extra=fields(device=device.device_id, state=device.state.value))
        if not is_expected_back:
            self._lost[device.device_id] = (self._now(), self._now_s())

    def missing(self, device_ids: Collection[str]) -> None:
        """Record that devices did not reconnect, although they were expected to."""
        for device_id in device_ids:
            if not self._went_offline(device_id, self._now()):
                self._lost[device_id] = (self._now(), self._now_s())

    def check(self) -> None:
        """Record the devices that have been without a session for some time."""
        for device_id, (at, since_s) in list(self._lost.items()):
            if self._now_s() - since_s >= _OFFLINE_AFTER_S and self._went_offline(device_id, at):
                del self._lost[device_id]

    def reported(self, before: DeviceRecord, after: DeviceRecord) -> None:
        """Log a device's report: a new state at level info, progress within a state at level debug."""
        level = logging.WARNING if after.state is DeviceState.DEGRADED else logging.INFO
        _log.log(
            logging.DEBUG if after.state is before.state else level,
            "%s is %s, %s measured%s",
            after.device_id,
            after.state.value,
            count_of(after.profiled_modes, "mode"),
            f": {after.detail}" if after.detail else "",
            extra=fields(
                device=after.device_id,
                state=after.state.value,
                profiled_modes=after.profiled_modes,
                detail=after.detail or None,
            ),
        )
        self.device_changed(after.device_id)

    def device_changed(self, device_id: str) -> None:
        """Record what is different about a connected device since its last event."""
        device = self._fleet.agents.devices[device_id]
        if device.state is DeviceState.OFFLINE:
            return
        before = self._known.get(device_id)
        now = self._condition_of(device, before)
        if now == before:
            return
        if self._tell(device, self._changes(device, before, now)):
            self._known[device_id] = now

    def _changes(self, device: DeviceRecord, before: _Condition | None, now: _Condition) -> list[tuple[str, bool]]:
        """What is different about a device, in words, and whether each change needs attention."""
        found: list[tuple[str, bool]] = []
        if before is None:
            found.append((f"connected for the first time: {device.board}", False))
            before = _Condition("connected")
        if now.word != before.word:
            found += self._changes_of_word(device, before.word, now.word)
        if now.is_left_out and not before.is_left_out:
            reason = self._fleet.agents.claims.exclusion_reason(device)
            found.append((f"left out of rounds: {reason}", True))
        elif before.is_left_out and not now.is_left_out:
            found.append(("no longer left out of rounds", False))
        found += [(f"{name}{self._about(name, device)}", True) for name in now.troubles if name not in before.troubles]
        found += [(f"no longer {name}", False) for name in before.troubles if name not in now.troubles]
        return found

    def forgotten(self, device_ids: Iterable[str], caller: str) -> None:
        """Record that an operator has removed devices."""
        for device_id in device_ids:
            for known in (self._known, self._lost, self._offline_at):
                known.pop(device_id, None)
            self._forget_times("device", device_id)
            self._event("device", "forgotten", device_id=device_id, caller=caller)

    def _condition_of(self, device: DeviceRecord, before: _Condition | None) -> _Condition:
        # At the begin of a session, the device has not reported its state yet.
        is_unknown = device.state is DeviceState.ENROLLED and before is not None and before.word != "offline"
        word = before.word if is_unknown and before is not None else _word_of(device.state)
        is_left_out = self._fleet.agents.claims.exclusion_reason(device) is not None
        was_hot = before is not None and "hot" in before.troubles
        return _Condition(word, is_left_out, tuple(self._troubles_of(device, was_hot)))

    def _troubles_of(self, device: DeviceRecord, was_hot: bool = False) -> list[str]:
        view = DeviceView(self._fleet, device)
        sample, errors, is_live = view.sample, view.errors, view.is_observed_run_live
        observed_w, limit_w = view.observed_w, view.observed_limit_w
        return found_troubles(
            None if sample is None else sample.temperature_c,
            [] if sample is None else sample_flags(partial(getattr, sample)),
            self._throttled_unix_s(device.device_id),
            is_live and observed_w is not None and limit_w is not None and observed_w > limit_w,
            is_live and bool(errors) and is_off_prediction(errors[-1].time_ratio, errors[-1].power_ratio),
            self._now().timestamp(),
            was_hot,
        )

    def _about(self, trouble: str, device: DeviceRecord) -> str:
        """More about a trouble that a device has."""
        device_id, newest = device.device_id, self._fleet.rounds.latest_results
        if trouble == "hot" and (sample := self._fleet.samples.of(device_id)) is not None:
            return "" if sample.temperature_c is None else f": {sample.temperature_c:.0f} °C"
        if trouble == "over budget":
            drawn_w, limit_w = newest.observations[device_id].power_w, newest.predictions[device_id].power_limit_w
            return f": drew {drawn_w:,.1f} W of {limit_w:,.1f} W allowed{self._observed_in(device_id)}"
        if trouble == "off prediction":
            error = self._fleet.agents.claims.errors_of(device_id)[-1]
            return f": {error_text(error.time_ratio, error.power_ratio)}{self._observed_in(device_id)}"
        return ""

    def _observed_in(self, device_id: str) -> str:
        newest = self._fleet.rounds.latest_results
        run_name = self._fleet.flower.name_of(newest.observed_in[device_id])
        return f", in round {newest.observed_numbers[device_id]} of run {run_name}"

    def _changes_of_word(self, device: DeviceRecord, before: str, now: str) -> list[tuple[str, bool]]:
        found: list[tuple[str, bool]] = []
        detail = f": {device.detail}" if device.detail else ""
        if before == "offline":
            at = self._offline_at.pop(device.device_id, None)
            gone = "" if at is None else f" after {age((self._now() - at).total_seconds())}"
            found.append((f"connected again{gone}", False))
        elif before == "degraded" and now != "degraded":
            found.append(("no longer degraded", False))
        elif before == "profiling" and now == "connected":
            found.append((f"has measured {count_of(device.profiled_modes, 'power mode')}", False))
        if now == "degraded":
            found.append((f"degraded{detail}", True))
        elif now == "profiling":
            found.append((f"measures power modes{detail}", False))
        return found

    def _went_offline(self, device_id: str, at: datetime) -> bool:
        """Record that a device is offline; False if it may cause no event now."""
        device = self._fleet.agents.devices.get(device_id)
        if device is None:  # forgotten meanwhile
            return True
        before = self._known.get(device_id) or _Condition("connected")
        if before.word == "offline":
            return True
        if not self._tell(device, [("offline", True)], at):
            return False
        self._known[device_id] = _Condition("offline", before.is_left_out, before.troubles)
        self._offline_at[device_id] = at
        return True

    def _tell(self, device: DeviceRecord, changes: list[tuple[str, bool]], at: datetime | None = None) -> bool:
        """Record changes of a device as events, unless it has caused too many of them.

        What is left out stays different from what the events say about the device, so it is told later if it lasts.

        Returns:
            Whether they were recorded.
        """
        if not self._may_tell("device", device.device_id, len(changes), partial(self._device_event, device)):
            return False
        for text, needs_attention in changes:
            self._device_event(device, text, needs_attention, at)
        return True

    def _may_tell(self, kind: str, subject: str, count: int, tell: Callable[[str, bool], None]) -> bool:
        """Whether a subject may cause some events now.

        Args:
            kind: the kind of events that are counted together.
            subject: what causes them: a device, a run, or a supply.
            count: how many.
            tell: records the event which says that further ones are left out.
        """
        key, now_s = (kind, subject), self._now_s()
        if now_s < self._quiet_until_s.get(key, now_s):
            return False
        told_s = [each for each in self._told_s.get(key, ()) if now_s - each < _HOUR_S]
        if len(told_s) + count >= _MOST_OF_ONE[kind]:
            self._quiet_until_s[key] = now_s + _HOUR_S
            tell("changes too often: its events are left out for an hour", True)
            return False
        self._told_s[key] = [*told_s, *(now_s for _ in range(count))]
        return True

    def _forget_times(self, kind: str, subject: str) -> None:
        self._told_s.pop((kind, subject), None)
        self._quiet_until_s.pop((kind, subject), None)

    def _device_event(
        self, device: DeviceRecord, text: str, needs_attention: bool = False, at: datetime | None = None
    ) -> None:
        try:
            supply = self._fleet.operator.supply_of(device.device_id)
        except InvalidInputError:  # the site file does not place it
            supply = ""
        self._event("device", text, needs_attention, at, device_id=device.device_id, supply=supply)

    # --- runs and rounds ----------------------------------------------------------------------------------------

    def run_started(self, run: RunRecord, is_new: bool = True) -> None:
        """Log that a run has started, or continues after its server was restarted."""
        what = f"{run.strategy}, {count_of(run.rounds, 'round')}, workload {run.workload.name}"
        _log.info(
            "run %s has started: %s",
            _named(run),
            what,
            extra=fields(
                run=run.run_id,
                name=run.name,
                strategy=run.strategy,
                rounds=run.rounds,
                workload=run.workload.name,
                labels=dict(run.labels) or None,
            ),
        )
        if is_new:
            self._event("run", f"began: {what}", run_id=run.run_id)

    def run_finished(self, run: RunRecord, is_first: bool = True, caller: str = "") -> None:
        """Log how a run ended.

        Args:
            run: the run.
            is_first: False for a repeated report.
            caller: the operator who has ended it; empty if its app did.
        """
        has_failed = bool(run.error) and not is_stopped(run.error)
        how = f"ended with an error: {run.error}" if has_failed else f"was {run.error}" if run.error else "is finished"
        _log.log(
            logging.WARNING if has_failed else logging.INFO,
            "run %s %s",
            _named(run),
            how,
            extra=fields(run=run.run_id, error=run.error or None),
        )
        if is_first:
            self._forget_times("round", run.run_id)
            how = how.removeprefix("is ").removeprefix("was ") if not caller else "ended by an operator"
            self._event("run", how, has_failed, run_id=run.run_id, caller=caller)

    def cannot_plan(self, run_id: str, number: int, reason: str) -> None:
        """Log why a round cannot be planned."""
        run_name = self._fleet.flower.name_of(run_id)
        _log.warning(
            "round %d of run %s cannot be planned: %s", number, run_name, reason, extra=fields(run=run_id, round=number)
        )
        self._round_event(run_id, number, f"cannot be planned: {reason}", True)

    def planned(self, record: RoundRecord) -> None:
        """Log a round that was just planned."""
        plan = record.plan
        _log.info(
            "%s is planned: %s of %s, %.1f of %.1f W, %s",
            self._fleet.flower.round_text(record.plan_id),
            count_of(len(plan.assignments), "device"),
            f"{len(plan.decisions):,}",
            plan.planned_w,
            plan.site_budget_w,
            duration_text(plan.duration_s),
            extra=fields(
                run=record.run_id,
                round=record.number,
                devices=len(plan.assignments),
                considered=len(plan.decisions),
                planned_w=plan.planned_w,
                site_budget_w=plan.site_budget_w,
                planned_s=plan.duration_s,
            ),
        )

    def trimmed(self, record: RoundRecord) -> None:
        """Log a round in flight that was trimmed, for example after its budget fell."""
        plan = record.plan
        what = (
            f"trimmed to {plan.planned_w:,.1f} of {plan.site_budget_w:,.1f} W:"
            f" {count_of(len(plan.in_other_mode), 'device')} in another mode, {len(plan.stopped):,} stopped"
        )
        _log.info(
            "%s is %s",
            self._fleet.flower.round_text(record.plan_id),
            what,
            extra=fields(run=record.run_id, round=record.number, planned_w=plan.planned_w, stopped=len(plan.stopped)),
        )
        self._round_event(record.run_id, record.number, what)

    def finished(self, record: RoundRecord) -> None:
        """Log a round that Flower's server has finished."""
        failed, late, observed_w = list(record.failed), list(record.late), record.observed_site_w
        devices = count_of(len(record.plan.assignments), "device")
        parts = [
            f"{len(record.results) - len(failed):,} of {devices} trained",
            f"{duration_text(record.wall_s)} ({duration_text(record.plan.duration_s)} planned)",
        ]
        if observed_w is not None:
            parts.append(f"{observed_w:.1f} W ({record.plan.planned_w:.1f} W planned)")
        if failed:
            parts.append(f"failed: {first_few(failed)}")
        if late:
            parts.append(f"late: {first_few(late)}")
        _log.log(
            logging.WARNING if failed else logging.INFO,
            "%s is finished: %s",
            self._fleet.flower.round_text(record.plan_id),
            ", ".join(parts),
            extra=fields(
                run=record.run_id,
                round=record.number,
                devices=len(record.plan.assignments),
                failed=failed or None,
                late=late or None,
                wall_s=record.wall_s,
                observed_w=observed_w,
            ),
        )
        if failed:
            text = f"{len(failed):,} of {count_of(len(record.results), 'training')} failed: {first_few(failed)}"
            self._round_event(record.run_id, record.number, text, True)

    def unplanned(self, run_id: str, number: int) -> None:
        """Log a round that trained without a plan."""
        run_name = self._fleet.flower.name_of(run_id)
        _log.warning("run %s trained round %d without a plan: no budget was kept", run_name, number)
        self._round_event(run_id, number, "trained without a plan: no budget was kept", True)

    def unplanned_training(self, device_id: str, run_id: str, is_refused: bool) -> None:
        """Log once for each run that devices train without a plan, outside of the budget, or have refused to.

        Args:
            device_id: the first device that has reported it.
            run_id: Flower's id of the run, which this coordinator need not know.
            is_refused: whether the device has refused it.
        """
        if run_id in self._unplanned_runs:
            return
        self._unplanned_runs[run_id] = None
        if len(self._unplanned_runs) > _MOST_UNPLANNED_RUNS:
            del self._unplanned_runs[next(iter(self._unplanned_runs))]
        what = "refuses to train" if is_refused else "trains, outside of the budget,"
        text = f"{what} for Flower's run {plain_text(run_id)}, which has no plan: wrap its app's strategy in PowerAware"
        _log.warning("%s %s", device_id, text, extra=fields(device=device_id, run=run_id))
        device = self._fleet.agents.get(device_id)
        if self._may_tell("device", device_id, 1, partial(self._device_event, device)):
            self._device_event(device, text, True)

    def _round_event(self, run_id: str, number: int, text: str, needs_attention: bool = False) -> None:
        record = partial(self._event, "round", run_id=run_id, round_=number)
        if self._may_tell("round", run_id, 1, lambda _, attention: record(_TOO_MANY_ROUND_EVENTS, attention)):
            record(text, needs_attention)

    # --- budgets ------------------------------------------------------------------------------------------------

    def budget_changed(self, change: BudgetChange) -> None:
        """Record a change of a supply's budget, except for the readings of a query that answers."""
        before, after = change.before, change.after
        is_reading = before is not None and before.source == after.source == "query"
        is_same = before is not None and (before.source, before.fallback) == (after.source, after.fallback)
        if (before is None and not after.fallback) or (is_reading and is_same):
            return
        if is_same and before is not None and before.watts == after.watts:
            return
        record = partial(self._event, "budget", supply=change.supply, caller=change.caller)
        # An operator's own changes are no noise.
        if after.source == "operator" or change.caller or self._may_tell("budget", change.supply, 1, record):
            record(_budget_text(change), after.fallback)

    # --- internal -----------------------------------------------------------------------------------------------

    def _event(
        self,
        kind: str,
        text: str,
        needs_attention: bool = False,
        at: datetime | None = None,
        *,
        round_: int = 0,
        **concerns: Any,
    ) -> None:
        self.count += 1
        self._save(
            EventRecord(
                secrets.token_hex(8),
                at or self._now(),
                kind,
                text[:_LONGEST_TEXT],
                needs_attention,
                round=round_,
                **concerns,
            )
        )


def _word_of(state: DeviceState) -> str:
    is_fine = state in (DeviceState.ENROLLED, DeviceState.READY, DeviceState.TRAINING)
    return "connected" if is_fine else state.value


def _named(run: RunRecord) -> str:
    return run.name if run.name == run.run_id else f"{run.name} ({run.run_id})"


def _budget_text(change: BudgetChange) -> str:
    before, after = change.before, change.after
    now = watts(after.watts)
    if before is None or before.watts == after.watts:
        head = f"{now} in force"
    else:
        head = f"from {watts(before.watts)} to {now}"
    if after.fallback:
        return f"{head}: the fallback of its {after.source}, {after.reason}"
    if after.source == "operator":
        until = "" if change.until is None else f" until {change.until.astimezone():%Y-%m-%d %H:%M:%S}"
        return f"{head}, set by the operator{until}"
    if before is not None and before.source == "operator":
        return f"{head}: the override {'was cleared' if change.caller else 'has ended'} ({after.source})"
    if before is not None and before.fallback:
        return f"{head}: its {after.source} has a value again"
    return f"{head}: {after.source}, {after.reason}"
