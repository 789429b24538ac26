"""The frequency of the external memory controller (EMC)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jetson.knob_files import KnobNames, Step, differences, set_value, table_of, value_of, within
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError

# Each with its value for "no cap": on JetPack 4 and 5, the maximum cannot be written as a number.
_CAPS = (("/sys/kernel/nvpmodel_emc_cap/emc_iso_cap", 0), ("/sys/kernel/nvpmodel_clk_cap/emc", None))
_POSSIBLE_KHZ = "/sys/kernel/debug/bpmp/debug/emc/possible_rates"
_LOCK = "/sys/kernel/debug/bpmp/debug/clk/emc"
_STATE, _LOCKED, _RATE = f"{_LOCK}/state", f"{_LOCK}/mrq_rate_locked", f"{_LOCK}/rate"
_MAXIMUM = f"{_LOCK}/max_rate"


@dataclass(frozen=True)
class MemorySettings:
    """What the memory is set to.

    Attributes:
        cap: the value of NVIDIA's cap; None without a cap.
        lock_hz: the locked frequency, Hz; 0 releases the lock, and None leaves it as it is.
        state: the state of the memory's clock; None leaves it on if the memory is locked, and else as it is.
    """

    cap: int | None
    lock_hz: int | None
    state: int | None


class Memory:
    """The memory's frequencies, Hz: capped by NVIDIA's interface, and held by a lock if debugfs offers one.

    Args:
        tree: the board's files.
        usual_hz: the frequencies of this kind of board, used if the kernel lists none.
    """

    def __init__(self, tree: Tree, usual_hz: tuple[int, ...]) -> None:
        self._tree = tree
        self._cap, self._uncapped = next(((path, none) for path, none in _CAPS if tree.exists(path)), ("", None))
        self.has_lock = tree.exists(_LOCKED) and tree.exists(_RATE)
        self._has_state = self.has_lock and tree.exists(_STATE)
        self.table_is_live = True
        try:
            self.table_hz = tuple(khz * 1000 for khz in table_of(tree, _POSSIBLE_KHZ))
        except InvalidInputError:
            self.table_hz, self.table_is_live = usual_hz, False
        if tree.exists(_MAXIMUM):
            reachable = tuple(hz for hz in self.table_hz if hz <= value_of(tree, _MAXIMUM))
            self.table_hz = reachable or self.table_hz
        if not (self._cap or self.has_lock):
            # A memory that cannot be set has only one frequency in the mode space; the kernel chooses the real one.
            self.table_hz = self.table_hz[-1:]

    @property
    def interface(self) -> str:
        """The files through which the frequency is set, for messages."""
        return " and ".join([path for path in (self._cap, _LOCK if self.has_lock else "") if path]) or "none"

    def frequency_hz(self) -> int:
        """Return the locked frequency or, without a lock, the highest of the table within the cap, Hz.

        Raises:
            ModeNotAppliedError: the kernel does not report it.
        """
        if self.has_lock and value_of(self._tree, _LOCKED) == 1:
            return value_of(self._tree, _RATE)
        if self._cap:
            cap = value_of(self._tree, self._cap)
            return within(self.table_hz, cap) if cap > 0 else self.table_hz[-1]
        return self.table_hz[-1]

    def as_cap(self, hz: int) -> int:
        """Return the value to write into NVIDIA's cap for a frequency."""
        return self._uncapped if self._uncapped is not None and hz == self.table_hz[-1] else hz

    def at(self, hz: int, with_lock: bool = True) -> MemorySettings:
        """Return the settings that hold the memory at one frequency.

        Args:
            hz: the frequency.
            with_lock: whether to lock it, if it can be locked; if not, the lock stays as it is.
        """
        return MemorySettings(
            self.as_cap(hz) if self._cap else None, hz if with_lock and self.has_lock else None, state=None
        )

    def locked_lowest(self) -> MemorySettings:
        """Return the settings that lower the locked frequency to the lowest; without a lock, they change nothing.

        The cap stays, since some boards cannot raise it again.
        """
        return MemorySettings(cap=None, lock_hz=self.table_hz[0] if self._locked_hz() else None, state=None)

    def saved(self, knobs: Mapping[str, int]) -> MemorySettings:
        """Return the settings that `knobs` returned."""
        return MemorySettings(knobs.get("emc/cap"), knobs.get("emc/lock_hz"), knobs.get("emc/state"))

    def reductions(self, to: MemorySettings) -> Iterator[Step]:
        """Yield all steps to these settings, if they do not let the memory run faster than the current ones."""
        held_hz = self._held_hz()
        if held_hz is None or self._highest_hz(to) <= held_hz:
            yield from self._steps(to, is_lower=True)

    def increases(self, to: MemorySettings) -> Iterator[Step]:
        """Yield all steps to these settings, if some are left."""
        held_hz = self._held_hz()
        if held_hz is not None and self._highest_hz(to) >= held_hz and self.differences(to):
            yield from self._steps(to, is_lower=False)

    def not_lowered(self, to: MemorySettings) -> list[str]:
        """Describe how the current settings differ from these, if the memory may still run faster."""
        held_hz = self._held_hz()
        return self.differences(to) if held_hz is None or held_hz > self._highest_hz(to) else []

    def differences(self, to: MemorySettings) -> list[str]:
        """Describe how the current settings differ from these."""
        wanted = [] if to.cap is None else [(self._cap, to.cap)]
        if to.lock_hz is not None:
            wanted += [(_LOCKED, 1), (_RATE, to.lock_hz)] if to.lock_hz else [(_LOCKED, 0)]
        return differences(self._tree, wanted)

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that may be changed."""
        kept = {"emc/cap": value_of(self._tree, self._cap)} if self._cap else {}
        if self.has_lock:
            # Without a lock, the current rate is only momentary, so it is not restored.
            kept["emc/lock_hz"] = value_of(self._tree, _RATE) if value_of(self._tree, _LOCKED) else 0
        if self._has_state:
            kept["emc/state"] = value_of(self._tree, _STATE)
        return {name: str(value) for name, value in kept.items()}

    def written_files(self) -> list[str]:
        """Return the files that are written; empty if the memory cannot be set."""
        return ([self._cap] if self._cap else []) + ([_LOCKED, _RATE] if self.has_lock else [])

    def knob_names(self) -> KnobNames:
        """Return the names in `knobs`."""
        there = (("emc/cap", self._cap), ("emc/lock_hz", self.has_lock), ("emc/state", self._has_state))
        return KnobNames(required={name for name, exists in there if exists})

    def _steps(self, to: MemorySettings, is_lower: bool) -> Iterator[Step]:
        """Yield the steps to these settings.

        While the memory is locked, its cap does not matter. The cap is therefore set before a lock is released. A lock
        is lowered before the cap and raised after it, since the kernel might refuse a lock above the cap.
        """
        lock_first = is_lower and to.lock_hz and self._locked_hz()
        if lock_first:
            yield partial(self._lock, to)
        if to.cap is not None:
            yield partial(set_value, self._tree, self._cap, to.cap)
        if not lock_first:
            yield partial(self._lock, to)
        if to.state is not None:
            yield partial(set_value, self._tree, _STATE, to.state)

    def _lock(self, to: MemorySettings) -> None:
        if to.lock_hz is None:
            return
        set_value(self._tree, _LOCKED, int(to.lock_hz > 0))
        if to.lock_hz:
            if self._has_state:
                # JetPack 6: a disabled clock ignores its rate.
                set_value(self._tree, _STATE, 1)
            set_value(self._tree, _RATE, to.lock_hz)

    def _held_hz(self) -> int | None:
        """Return the highest frequency at which the memory may run now, Hz; None if it cannot be read."""
        try:
            return self.frequency_hz()
        except ModeNotAppliedError:
            return None

    def _highest_hz(self, to: MemorySettings) -> int:
        """Return the highest frequency at which the memory may run with these settings, Hz."""
        lock_hz = self._locked_hz() if to.lock_hz is None else to.lock_hz
        return lock_hz or (within(self.table_hz, to.cap) if to.cap and to.cap > 0 else self.table_hz[-1])

    def _locked_hz(self) -> int:
        """Return the locked frequency, Hz; 0 if it is not locked, or cannot be read."""
        try:
            return value_of(self._tree, _RATE) if self.has_lock and value_of(self._tree, _LOCKED) == 1 else 0
        except ModeNotAppliedError:
            return 0
