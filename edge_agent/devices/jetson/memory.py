"""The frequency of the external memory controller (EMC)."""

from __future__ import annotations

from collections.abc import Mapping

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jetson.knob_files import KnobNames, differences, noting, set_value, table_of, value_of, within
from edge_agent.devices.tree import Tree
from wattfleet.errors import InvalidInputError

# Each with its value for "no cap": on JetPack 4 and 5, the maximum cannot be written as a number.
_CAPS = (("/sys/kernel/nvpmodel_emc_cap/emc_iso_cap", 0), ("/sys/kernel/nvpmodel_clk_cap/emc", None))
_POSSIBLE_KHZ = "/sys/kernel/debug/bpmp/debug/emc/possible_rates"
_LOCK = "/sys/kernel/debug/bpmp/debug/clk/emc"
_STATE, _LOCKED, _RATE = f"{_LOCK}/state", f"{_LOCK}/mrq_rate_locked", f"{_LOCK}/rate"
_MAXIMUM = f"{_LOCK}/max_rate"


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

    def set(self, hz: int) -> None:
        """Hold the memory at one frequency.

        Raises:
            ModeNotAppliedError: the kernel refused it.
        """
        # The cap first, since a lock above the cap would be refused.
        if self._cap:
            set_value(self._tree, self._cap, self.as_cap(hz))
        if self.has_lock:
            self._lock(hz)

    def differences(self, hz: int) -> list[str]:
        """Describe how the current settings differ from this frequency."""
        wanted = [(self._cap, self.as_cap(hz))] if self._cap else []
        if self.has_lock:
            wanted += [(_LOCKED, 1), (_RATE, hz)]
        return differences(self._tree, wanted)

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that `set` may change."""
        kept = {"emc/cap": value_of(self._tree, self._cap)} if self._cap else {}
        if self.has_lock:
            # Without a lock, the current rate is only momentary, so it is not restored.
            kept["emc/lock_hz"] = value_of(self._tree, _RATE) if value_of(self._tree, _LOCKED) else 0
        if self._has_state:
            kept["emc/state"] = value_of(self._tree, _STATE)
        return {name: str(value) for name, value in kept.items()}

    def written_files(self) -> list[str]:
        """Return the files that `set` writes; empty if the memory cannot be set."""
        return ([self._cap] if self._cap else []) + ([_LOCKED, _RATE] if self.has_lock else [])

    def knob_names(self) -> KnobNames:
        """Return the settings that `put_back` accepts."""
        there = (("emc/cap", self._cap), ("emc/lock_hz", self.has_lock), ("emc/state", self._has_state))
        return KnobNames(required={name for name, exists in there if exists})

    def put_back(self, knobs: Mapping[str, int]) -> None:
        """Restore what `knobs` returned.

        Raises:
            ModeNotAppliedError: the kernel refused it, or holds another value afterwards.
        """
        failed: list[str] = []
        if self._cap:
            with noting(failed):
                set_value(self._tree, self._cap, knobs["emc/cap"])
                failed += differences(self._tree, [(self._cap, knobs["emc/cap"])])
        if self.has_lock:
            with noting(failed):
                failed += self._put_lock_back(knobs["emc/lock_hz"])
        if self._has_state:
            with noting(failed):
                set_value(self._tree, _STATE, knobs["emc/state"])
        if failed:
            raise ModeNotAppliedError("; ".join(failed))

    def _put_lock_back(self, hz: int) -> list[str]:
        """Restore the lock, or release it if `hz` is 0; describe what differs afterwards."""
        if hz:
            self._lock(hz)
            return differences(self._tree, [(_LOCKED, 1), (_RATE, hz)])
        set_value(self._tree, _LOCKED, 0)
        return differences(self._tree, [(_LOCKED, 0)])

    def _lock(self, hz: int) -> None:
        set_value(self._tree, _LOCKED, 1)
        if self._has_state:
            # JetPack 6: a disabled clock ignores its rate.
            set_value(self._tree, _STATE, 1)
        set_value(self._tree, _RATE, hz)
