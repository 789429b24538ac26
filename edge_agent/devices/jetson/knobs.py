"""A Jetson's knobs in the kernel's files: CPU cores and clocks, GPU, memory and fan."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.tree import Tree
from wattfleet.common.programs import RunProgram
from wattfleet.core.errors import InvalidInputError

# --- Knob files -------------------------------------------------------------------------------------------------------
# Reads and writes settings in files with one number each.


_UNIT = re.compile(r"\(?[kM]?Hz\)?", re.IGNORECASE)

Step = Callable[[], None]
"""One write, or a few that belong together, of a change of settings. May raise `ModeNotAppliedError`."""


WRITABLE = "in a container, use `docker run --privileged`, or mount the host's /sys writable"
"""What makes settings writable that are mounted read-only."""


@dataclass(frozen=True)
class KnobNames:
    """The names under which a group of settings is saved.

    Attributes:
        required: names that are needed to restore the group.
        optional: names that are restored if they were saved.
    """

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)


def set_value(tree: Tree, path: str, value: int) -> None:
    """Write a number; check with `differences` that it took effect.

    Raises:
        ModeNotAppliedError: the kernel refused it.
    """
    try:
        tree.write(path, str(value))
    except PermissionError:
        raise ModeNotAppliedError(f"{path}: no permission to write {value}; run the agent as root") from None
    except OSError as error:
        if error.errno == errno.EROFS:
            raise ModeNotAppliedError(f"{path}: cannot write {value}, as it is mounted read-only; {WRITABLE}") from None
        raise ModeNotAppliedError(f"{path}: wanted {value}, the kernel refused it: {error.strerror}") from None


def range_reductions(tree: Tree, paths: tuple[str, str], limits: tuple[int, int]) -> Iterator[Step]:
    """Yield the writes of a frequency range that do not raise a limit.

    With `range_increases` after it, the minimum never exceeds the maximum. Kernel 4.9 would refuse that; 5.10 and later
    would silently clip the value. A limit that cannot be read is written here, so that a change to a lower mode lowers
    it all the same.

    Args:
        tree: the board's files.
        paths: the files of the minimum and the maximum.
        limits: the minimum and the maximum to be set.
    """
    for path, limit in zip(paths, limits, strict=True):
        held = _held(tree, path)
        if held is None or limit <= held:
            yield partial(set_value, tree, path, limit)


def range_increases(tree: Tree, paths: tuple[str, str], limits: tuple[int, int]) -> Iterator[Step]:
    """Yield the writes of a frequency range that raise a limit; see `range_reductions`."""
    for path, limit in zip(reversed(paths), reversed(limits), strict=True):
        held = _held(tree, path)
        if held is not None and limit > held:
            yield partial(set_value, tree, path, limit)


def set_range(tree: Tree, paths: tuple[str, str], limits: tuple[int, int]) -> None:
    """Set a frequency range at once, and check that it took effect.

    Raises:
        ModeNotAppliedError: the kernel refused it, or holds another value afterwards.
    """
    for change in (range_reductions, range_increases):
        for step in change(tree, paths, limits):
            step()
    if found := differences(tree, zip(paths, limits, strict=True)):
        raise ModeNotAppliedError("; ".join(found))


def value_of(tree: Tree, path: str) -> int:
    """Return the number in a file.

    Raises:
        ModeNotAppliedError: it cannot be read, or is not a number.
    """
    try:
        return int(tree.read(path))
    except OSError as error:
        raise ModeNotAppliedError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModeNotAppliedError(f"{path}: does not contain a number") from None


def _held(tree: Tree, path: str) -> int | None:
    """Return the number in a file; None if it cannot be read."""
    try:
        return value_of(tree, path)
    except ModeNotAppliedError:
        return None


def differences(tree: Tree, wanted: Iterable[tuple[str, int]]) -> list[str]:
    """Describe which files have other values than these; empty if none has."""
    found = []
    for path, value in wanted:
        try:
            held = value_of(tree, path)
        except ModeNotAppliedError as error:
            found.append(f"{error}, wanted {value}")
            continue
        if held != value:
            found.append(f"{path}: wanted {value}, found {held}")
    return found


def not_lowered(tree: Tree, wanted: Iterable[tuple[str, int]]) -> list[str]:
    """Describe which files have a higher value than these, or cannot be read; empty if none has."""
    return differences(tree, [each for each in wanted if (held := _held(tree, each[0])) is None or held > each[1]])


@contextmanager
def noting(failed: list[str]) -> Iterator[None]:
    """Collect a failure instead of raising it, so that the other settings are still restored."""
    try:
        yield
    except ModeNotAppliedError as error:
        failed.append(str(error))


def within(table: tuple[int, ...], limit: int) -> int:
    """Return the highest value of an ascending table within a limit; the limit need not be in the table."""
    return max((value for value in table if value <= limit), default=table[0])


def table_of(tree: Tree, path: str) -> tuple[int, ...]:
    """Return the possible values of a setting from the file that lists them, ascending.

    Raises:
        InvalidInputError: the file does not list any values.
    """
    try:
        # Some kernels end the list with its unit, such as `(kHz)`.
        words = (word for word in tree.read(path).split() if not _UNIT.fullmatch(word))
        table = tuple(sorted(set(map(int, words))))
    except (OSError, ValueError):
        table = ()
    if not table:
        raise InvalidInputError(f"{path}: lists no values, so this board's power modes are unknown")
    return table


# --- CPU --------------------------------------------------------------------------------------------------------------
# CPU cores and the frequency policies that they share.

_CPU = "/sys/devices/system/cpu"


@dataclass(frozen=True)
class CpuSettings:
    """What the cores are set to.

    Attributes:
        online: the cores that are online.
        limits_khz: the lowest and the highest frequency of each policy, kHz.
        limits_by_core_khz: those of the policies named after these cores, instead.
        sets_offline_policies: whether policies without an online core get their limits, too.
    """

    online: frozenset[int]
    limits_khz: tuple[int, int]
    limits_by_core_khz: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    sets_offline_policies: bool = False

    def limits_of(self, policy: str) -> tuple[int, int]:
        """Return the limits of a policy, kHz.

        Args:
            policy: its folder.
        """
        return self.limits_by_core_khz.get(_first_core(policy), self.limits_khz)


class Cpu:
    """The cores of a board and their frequencies, kHz.

    A policy without an online core does not accept limits. It still shows its old limits or cannot be read, and these
    limits apply again once a core is back online. On some kernels, it vanishes and loses them. Therefore, active
    policies are listed again each time. Core 0 stays online.

    Args:
        tree: the board's files.

    Raises:
        InvalidInputError: the kernel lists no frequencies.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.cores = len(tree.glob(f"{_CPU}/cpu[0-9]*"))
        self.table_khz = table_of(tree, f"{_CPU}/cpufreq/policy0/scaling_available_frequencies")
        # Newer kernels hide the limits of a policy whose cores are offline.
        self._left_lowest: set[str] = set()
        self._sharing: dict[str, frozenset[int]] = {}

    def online(self) -> list[int]:
        """Return the online cores, ascending."""
        return [core for core in range(self.cores) if not self._can_go_offline(core) or self._is_online(core)]

    def frequency_khz(self) -> int:
        """Return the highest frequency of the table that the cores' current limit allows, kHz.

        Raises:
            ModeNotAppliedError: the kernel does not report it.
        """
        limit = max(value_of(self._tree, f"{policy}/scaling_max_freq") for policy in self._policies())
        return within(self.table_khz, limit)

    def at(self, cores: int, khz: int) -> CpuSettings:
        """Return the settings with the first `cores` cores online, all held at one frequency."""
        return CpuSettings(frozenset(range(cores)), (khz, khz))

    def lowest(self) -> CpuSettings:
        """Return the settings with all cores at the lowest frequency, so that `reductions` takes none offline."""
        return self.at(self.cores, self.table_khz[0])

    def saved(self, knobs: Mapping[str, int]) -> CpuSettings:
        """Return the settings that `knobs` returned. A policy with missing limits gets its full range."""
        lowest, highest = self.table_khz[0], self.table_khz[-1]
        return CpuSettings(
            frozenset(core for core in range(self.cores) if knobs.get(f"cpu/{core}/online", 1)),
            (lowest, highest),
            {
                core: (knobs.get(f"policy/{core}/min_khz", lowest), knobs.get(f"policy/{core}/max_khz", highest))
                for core in range(self.cores)
            },
            sets_offline_policies=True,
        )

    def reductions(self, to: CpuSettings) -> Iterator[Step]:
        """Yield the steps to these settings that lower a limit or take a core offline.

        A policy that loses its last core is left at the lowest frequency, unless its limits are set, too. Its first
        core will come online again at this frequency, which may be too high for the mode in force by then.
        """
        kept_online = set()
        for policy in self._policies():
            is_leaving = not self._cores_of(policy) & to.online
            if is_leaving and not to.sets_offline_policies:
                limits = self.table_khz[0], self.table_khz[0]
            else:
                limits = to.limits_of(policy)
            yield from range_reductions(self._tree, _limits(policy), limits)
            if self._is_to_set_offline(policy, to):
                # See `arrivals`: its limits can be raised only while a core is online.
                kept_online.add(self._core_to_set(policy))
            self._left_lowest.discard(policy)
            if is_leaving and self._kept_khz(policy) == self.table_khz[0]:
                self._left_lowest.add(policy)
        for core in self._removable():
            if core not in to.online | kept_online:
                yield partial(self._bring, core, 0)

    def passes_old_limits(self, to: CpuSettings) -> bool:
        """Return whether `arrivals` lets a core run above these settings for a moment.

        The first core of a policy comes online with the limits that the policy still has, or with the full range if the
        policy has vanished. Only then can its limits be set. The same applies to a policy whose cores stay offline, if
        its limits are to be set.
        """
        active = self._policies()
        listed = self._all_policies()
        covered = frozenset[int]().union(*(self._cores_of(policy) for policy in active))
        for core in to.online - covered:
            policy = next((policy for policy in listed if core in self._cores_of(policy)), None)
            kept_khz = None if policy is None else self._kept_khz(policy)
            if policy is None or kept_khz is None or kept_khz > to.limits_of(policy)[1]:
                return True
        return any(self._is_to_set_offline(policy, to) for policy in listed)

    def arrivals(self, to: CpuSettings) -> Iterator[Step]:
        """Yield the steps to these settings that bring cores online, and set the limits of policies that need it."""
        for core in self._removable():
            if core in to.online and not self._is_known_online(core):
                active = self._policies()
                yield partial(self._bring, core, 1)
                for policy in self._policies():
                    if policy not in active:
                        yield partial(set_range, self._tree, _limits(policy), to.limits_of(policy))
        for policy in self._all_policies():
            if self._is_to_set_offline(policy, to):
                core = self._core_to_set(policy)
                yield partial(self._bring, core, 1)
                yield partial(set_range, self._tree, _limits(policy), to.limits_of(policy))
                self._left_lowest.discard(policy)
                yield partial(self._bring, core, 0)

    def increases(self, to: CpuSettings) -> Iterator[Step]:
        """Yield the steps to these settings that raise limits, after `arrivals`."""
        for policy in self._policies():
            if self._cores_of(policy) & to.online:
                yield from range_increases(self._tree, _limits(policy), to.limits_of(policy))

    def not_lowered(self, to: CpuSettings) -> list[str]:
        """Describe which limits are still higher than in these settings, and which cores are still online."""
        offline = [(_online_path(core), 0) for core in self._removable() if core not in to.online]
        return not_lowered(self._tree, [*offline, *self._wanted_limits(to)])

    def differences(self, to: CpuSettings) -> list[str]:
        """Describe how the current settings differ from these; policies without an online core do not count."""
        online = [(_online_path(core), int(core in to.online)) for core in self._removable()]
        return differences(self._tree, [*online, *self._wanted_limits(to)])

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that may be changed."""
        kept = {f"cpu/{core}/online": str(int(self._is_online(core))) for core in self._removable()}
        active = self._policies()
        for policy in self._all_policies():
            try:
                lowest, highest = (value_of(self._tree, path) for path in _limits(policy))
            except ModeNotAppliedError:
                if policy in active:
                    raise
                continue
            name = f"policy/{_first_core(policy)}"
            kept |= {f"{name}/min_khz": str(lowest), f"{name}/max_khz": str(highest)}
        return kept

    def written_files(self) -> list[str]:
        """Return the files that are written."""
        limits = [path for policy in self._policies() for path in _limits(policy)]
        return [*map(_online_path, self._removable()), *limits]

    def knob_names(self) -> KnobNames:
        """Return the names in `knobs`; limits of policies whose cores were offline may be missing."""
        limits = {core: {f"policy/{core}/min_khz", f"policy/{core}/max_khz"} for core in range(self.cores)}
        return KnobNames(
            required={f"cpu/{core}/online" for core in self._removable()} | limits[0],
            optional=set().union(*limits.values()),
        )

    def _wanted_limits(self, to: CpuSettings) -> list[tuple[str, int]]:
        """Return the files with the limits of all policies that keep an online core, and their values in `to`."""
        staying = [policy for policy in self._policies() if self._cores_of(policy) & to.online]
        return [each for policy in staying for each in zip(_limits(policy), to.limits_of(policy), strict=True)]

    def _is_to_set_offline(self, policy: str, to: CpuSettings) -> bool:
        """Return whether the limits of a policy have to be set although none of its cores is to be online."""
        if not to.sets_offline_policies or self._cores_of(policy) & to.online:
            return False
        return bool(differences(self._tree, zip(_limits(policy), to.limits_of(policy), strict=True)))

    def _core_to_set(self, policy: str) -> int:
        """Return the core that has to be online while the limits of a policy are set."""
        return min(filter(self._is_known_online, self._cores_of(policy)), default=_first_core(policy))

    def _kept_khz(self, policy: str) -> int | None:
        """Return the highest frequency with which the first core of a policy would come online; None if unknown."""
        try:
            return value_of(self._tree, _limits(policy)[1])
        except ModeNotAppliedError:
            return self.table_khz[0] if policy in self._left_lowest else None

    def _bring(self, core: int, online: int) -> None:
        if core in self._removable() and self._is_online(core) != bool(online):
            set_value(self._tree, _online_path(core), online)

    def _removable(self) -> list[int]:
        """Return the cores that can be taken offline."""
        return [core for core in range(self.cores) if self._can_go_offline(core)]

    def _can_go_offline(self, core: int) -> bool:
        return core > 0 and self._tree.exists(_online_path(core))

    def _is_known_online(self, core: int) -> bool:
        with suppress(ModeNotAppliedError):
            return self._is_online(core)
        return False

    def _is_online(self, core: int) -> bool:
        return value_of(self._tree, _online_path(core)) == 1

    def _all_policies(self) -> list[str]:
        return self._tree.glob(f"{_CPU}/cpufreq/policy*")

    def _policies(self) -> list[str]:
        """Return the policies with an online core."""
        return [policy for policy in self._all_policies() if self._is_active(policy)]

    def _cores_of(self, policy: str) -> frozenset[int]:
        """Return the cores that share a policy, online or not."""
        if policy not in self._sharing:
            cores = self._read_cores(policy)
            if not cores:
                # Newer kernels refuse to read an inactive policy. Policies are named after their first cores.
                first = _first_core(policy)
                others = (_first_core(other) for other in self._all_policies())
                return frozenset(range(first, min((other for other in others if other > first), default=self.cores)))
            self._sharing[policy] = cores
        return self._sharing[policy]

    def _read_cores(self, policy: str) -> frozenset[int]:
        try:
            return frozenset(map(int, self._tree.read(f"{policy}/related_cpus").split()))
        except (OSError, ValueError):
            return frozenset()

    def _is_active(self, policy: str) -> bool:
        try:
            return self._tree.read(f"{policy}/affected_cpus") != ""
        except OSError as error:
            # Newer kernels refuse to read an inactive policy. Other failures do not mean that it is inactive.
            return error.errno != errno.EBUSY


def _online_path(core: int) -> str:
    return f"{_CPU}/cpu{core}/online"


def _first_core(policy: str) -> int:
    """Return the core that a policy is named after."""
    return int(policy.rpartition("policy")[2])


def _limits(policy: str) -> tuple[str, str]:
    return f"{policy}/scaling_min_freq", f"{policy}/scaling_max_freq"


# --- GPU --------------------------------------------------------------------------------------------------------------
# The GPU's frequency.

_NODE_NAMES = ("gpu", "ga10b", "gv11b")
# The GPU of Thor has no name in the device tree, and may have a node for each of its parts.
_UNNAMED_NODES = "/sys/class/devfreq/gpu-gpc-*"
_FULL_LOAD = 1000

RangesHz = tuple[tuple[int, int], ...]
"""The lowest and the highest frequency of each node of a GPU, Hz."""


class Gpu:
    """A GPU and its frequencies, Hz.

    Args:
        tree: the board's files.
        driver: the kernel module that offers the frequencies, for messages. An upstream kernel does not have it.

    Raises:
        InvalidInputError: there is no GPU, or the kernel lists no frequencies.
    """

    def __init__(self, tree: Tree, driver: str) -> None:
        self._tree = tree
        folders = _folders(tree, driver)
        self.folder = folders[0]
        # A mode is a frequency that all nodes have.
        tables = [set(table_of(tree, f"{folder}/available_frequencies")) for folder in folders]
        self.table_hz = tuple(sorted(set.intersection(*tables)))
        if not self.table_hz:
            raise InvalidInputError(f"{', '.join(folders)}: the nodes of the GPU have no frequency in common")
        self._limits = [(f"{folder}/min_freq", f"{folder}/max_freq") for folder in folders]
        self._names = [f"gpu{f'-{place}' if place else ''}" for place in range(len(folders))]

    def at(self, lowest_hz: int, highest_hz: int) -> RangesHz:
        """Return the settings of a frequency range, the same for all nodes."""
        return ((lowest_hz, highest_hz),) * len(self._limits)

    def frequency_hz(self) -> int:
        """Return the highest frequency of the table that the GPU's current limit allows, Hz.

        Raises:
            ModeNotAppliedError: the kernel does not report it.
        """
        return within(self.table_hz, max(value_of(self._tree, highest) for _, highest in self._limits))

    def use_share(self) -> float | None:
        """Return the share of time in which it is busy, 0 to 1; None if the kernel does not report it."""
        try:
            return int(self._tree.read(f"{self.folder}/device/load")) / _FULL_LOAD
        except (OSError, ValueError):
            return None

    def reductions(self, ranges_hz: RangesHz) -> Iterator[Step]:
        """Yield the steps to these settings that do not raise a limit."""
        for paths, limits in zip(self._limits, ranges_hz, strict=True):
            yield from range_reductions(self._tree, paths, limits)

    def increases(self, ranges_hz: RangesHz) -> Iterator[Step]:
        """Yield the remaining steps to these settings."""
        for paths, limits in zip(self._limits, ranges_hz, strict=True):
            yield from range_increases(self._tree, paths, limits)

    def not_lowered(self, ranges_hz: RangesHz) -> list[str]:
        """Describe which limits are still higher than in these settings."""
        return not_lowered(self._tree, self._wanted(ranges_hz))

    def differences(self, ranges_hz: RangesHz) -> list[str]:
        """Describe how the current settings differ from these."""
        return differences(self._tree, self._wanted(ranges_hz))

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that may be changed."""
        return {
            f"{name}/{end}": str(value_of(self._tree, path))
            for name, paths in zip(self._names, self._limits, strict=True)
            for end, path in zip(_ENDS, paths, strict=True)
        }

    def written_files(self) -> list[str]:
        """Return the files that are written."""
        return [path for paths in self._limits for path in paths]

    def knob_names(self) -> KnobNames:
        """Return the names in `knobs`."""
        return KnobNames(required={f"{name}/{end}" for name in self._names for end in _ENDS})

    def saved(self, knobs: Mapping[str, int]) -> RangesHz:
        """Return the settings that `knobs` returned."""
        return tuple((knobs[f"{name}/min_hz"], knobs[f"{name}/max_hz"]) for name in self._names)

    def _wanted(self, ranges_hz: RangesHz) -> list[tuple[str, int]]:
        ends = zip(self._limits, ranges_hz, strict=True)
        return [each for paths, limits in ends for each in zip(paths, limits, strict=True)]


_ENDS = "min_hz", "max_hz"


def _folders(tree: Tree, driver: str) -> list[str]:
    for folder in tree.glob("/sys/class/devfreq/*"):
        try:
            if tree.read(f"{folder}/device/of_node/name") in _NODE_NAMES:
                return [folder]
        except OSError:
            continue
    if unnamed := tree.glob(_UNNAMED_NODES):
        return unnamed
    raise InvalidInputError(
        f"/sys/class/devfreq: no GPU among its nodes, so its clocks cannot be set: NVIDIA's driver {driver} is not"
        " loaded, or not yet"
    )


# --- Memory -----------------------------------------------------------------------------------------------------------
# The frequency of the external memory controller (EMC).

# Each with its value for "no cap": on JetPack 4 and 5, the maximum cannot be written as a number.
_CAPS = (("/sys/kernel/nvpmodel_emc_cap/emc_iso_cap", 0), ("/sys/kernel/nvpmodel_clk_cap/emc", None))
_POSSIBLE_KHZ = "/sys/kernel/debug/bpmp/debug/emc/possible_rates"
_LOCK = "/sys/kernel/debug/bpmp/debug/clk/emc"
_STATE, _LOCKED, _RATE = f"{_LOCK}/state", f"{_LOCK}/mrq_rate_locked", f"{_LOCK}/rate"
_MAXIMUM = f"{_LOCK}/max_rate"
# On Thor, a node of devfreq holds the memory, as one does the GPU.
_NODE = "/sys/class/devfreq/bwmgr"
_NODE_TABLE, _NODE_LIMITS = f"{_NODE}/available_frequencies", (f"{_NODE}/min_freq", f"{_NODE}/max_freq")


@dataclass(frozen=True)
class MemorySettings:
    """What the memory is set to.

    Attributes:
        cap: the value of NVIDIA's cap; None without a cap.
        lock_hz: the locked frequency, Hz; 0 releases the lock, and None leaves it as it is.
        state: the state of the memory's clock; None leaves it on if the memory is locked, and else as it is.
        range_hz: the lowest and the highest frequency of its node, Hz; None without a node.
    """

    cap: int | None = None
    lock_hz: int | None = None
    state: int | None = None
    range_hz: tuple[int, int] | None = None


class Memory:
    """The memory's frequencies, Hz.

    They are capped by NVIDIA's interface, and held by a lock if debugfs offers one. Without both, a node of devfreq
    that lists its frequencies holds them.

    Args:
        tree: the board's files.
        usual_hz: the frequencies of this kind of board, used if the kernel lists none.

    Attributes:
        cap_is_fixed: whether the cap has been found not to be raised before a reboot; it is then never written.
    """

    def __init__(self, tree: Tree, usual_hz: tuple[int, ...]) -> None:
        self._tree = tree
        self._cap, self._uncapped = next(((path, none) for path, none in _CAPS if tree.exists(path)), ("", None))
        self.has_lock = tree.exists(_LOCKED) and tree.exists(_RATE)
        self._has_state = self.has_lock and tree.exists(_STATE)
        self._has_node = not self._cap and not self.has_lock and tree.exists(_NODE_TABLE)
        self.cap_is_fixed = False
        self.table_is_live = True
        try:
            if self._has_node:
                self.table_hz = table_of(tree, _NODE_TABLE)
            else:
                self.table_hz = tuple(khz * 1000 for khz in table_of(tree, _POSSIBLE_KHZ))
        except InvalidInputError:
            self.table_hz, self.table_is_live = usual_hz, False
        if not self.table_is_live and self._cap:
            # The cap stands at a frequency that the board reaches, even if it is not usual for its kind.
            self.table_hz = tuple(sorted({*self.table_hz, max(self.table_hz[-1], _held(tree, self._cap) or 0)}))
        if tree.exists(_MAXIMUM):
            reachable = tuple(hz for hz in self.table_hz if hz <= value_of(tree, _MAXIMUM))
            self.table_hz = reachable or self.table_hz
        if not (self._cap or self.has_lock or self._has_node):
            # A memory that cannot be set has only one frequency in the mode space; the kernel chooses the real one.
            self.table_hz = self.table_hz[-1:]

    @property
    def interface(self) -> str:
        """The files through which the frequency is set, for messages."""
        parts = self._cap, _LOCK if self.has_lock else "", _NODE if self._has_node else ""
        return " and ".join(filter(None, parts)) or "none"

    @property
    def is_held(self) -> bool:
        """Whether the frequency can be held, and not only capped."""
        return self.has_lock or self._has_node

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
        return within(self.table_hz, value_of(self._tree, _NODE_LIMITS[1])) if self._has_node else self.table_hz[-1]

    def as_cap(self, hz: int) -> int:
        """Return the value to write into NVIDIA's cap for a frequency."""
        return self._uncapped if self._uncapped is not None and hz == self.table_hz[-1] else hz

    def at(self, hz: int, with_lock: bool = True) -> MemorySettings:
        """Return the settings that hold the memory at one frequency.

        Args:
            hz: the frequency.
            with_lock: whether to lock it, if it can be locked; if not, the lock stays as it is.
        """
        if self._has_node:
            return MemorySettings(range_hz=(hz, hz))
        is_locked = with_lock and self.has_lock
        has_cap = self._cap and not self.cap_is_fixed
        # A locked memory needs no lower cap, and some boards could not raise it again.
        cap = self.as_cap(hz) if has_cap and not (is_locked and self._cap_allows(hz)) else None
        return MemorySettings(cap, hz if is_locked else None)

    def capped_at(self, hz: int) -> MemorySettings:
        """Return the settings that let the memory run at up to a frequency; a lock stays as it is."""
        if self._has_node:
            return MemorySettings(range_hz=(self.table_hz[0], hz))
        return self.at(hz, with_lock=False)

    def try_cap(self, uses_lock: bool = True) -> bool:
        """Find out whether the cap can be raised, and leave it as it was; return whether the table has changed.

        On some boards, the cap stands until a reboot. Frequencies above it are then removed from the table, and without
        a lock also those below it, as there would be no way back. Meanwhile, the memory is locked, if it can be.

        Args:
            uses_lock: whether modes lock the memory, if it can be locked.

        Raises:
            ModeNotAppliedError: the cap or the lock cannot be restored.
        """
        held = (_held(self._tree, self._cap) or 0) if self._cap else 0
        if self.cap_is_fixed or not 0 < held < self.table_hz[-1] or not self._tree.may_write(self._cap):
            return False
        locks = self.has_lock and not self._locked_hz()
        state = _held(self._tree, _STATE) if locks and self._has_state else None
        if locks:
            self._lock(MemorySettings(lock_hz=within(self.table_hz, held)))
        with suppress(ModeNotAppliedError):
            set_value(self._tree, self._cap, self.as_cap(self.table_hz[-1]))
        is_raised = _held(self._tree, self._cap) != held
        if is_raised:
            set_value(self._tree, self._cap, held)
        if locks:
            set_value(self._tree, _LOCKED, 0)
        if state is not None:
            set_value(self._tree, _STATE, state)
        if not is_raised:
            self.cap_is_fixed = True
            reachable = tuple(hz for hz in self.table_hz if hz <= held) or self.table_hz[:1]
            self.table_hz = reachable if self.has_lock and uses_lock else reachable[-1:]
        return self.cap_is_fixed

    def held_lowest(self) -> MemorySettings:
        """Return the settings that lower the held frequency to the lowest; if none is held, they change nothing.

        The cap stays, since some boards cannot raise it again.
        """
        lowest_hz = self.table_hz[0]
        if self._has_node:
            return MemorySettings(range_hz=(lowest_hz, lowest_hz))
        return MemorySettings(lock_hz=lowest_hz if self._locked_hz() else None)

    def saved(self, knobs: Mapping[str, int]) -> MemorySettings:
        """Return the settings that `knobs` returned."""
        range_hz = (knobs["emc/min_hz"], knobs["emc/max_hz"]) if self._has_node else None
        return MemorySettings(knobs.get("emc/cap"), knobs.get("emc/lock_hz"), knobs.get("emc/state"), range_hz)

    def reductions(self, to: MemorySettings) -> Iterator[Step]:
        """Yield all steps to these settings, if they do not let the memory run faster than the current ones."""
        if to.range_hz is not None:
            yield from range_reductions(self._tree, _NODE_LIMITS, to.range_hz)
            return
        held_hz = self._held_hz()
        if held_hz is None or self._highest_hz(to) <= held_hz:
            yield from self._steps(to, is_lower=True)

    def increases(self, to: MemorySettings) -> Iterator[Step]:
        """Yield all steps to these settings, if some are left."""
        if to.range_hz is not None:
            yield from range_increases(self._tree, _NODE_LIMITS, to.range_hz)
            return
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
        if to.range_hz is not None:
            wanted += zip(_NODE_LIMITS, to.range_hz, strict=True)
        return differences(self._tree, wanted)

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that may be changed."""
        kept = {"emc/cap": value_of(self._tree, self._cap)} if self._cap else {}
        if self.has_lock:
            # Without a lock, the current rate is only momentary, so it is not restored.
            kept["emc/lock_hz"] = value_of(self._tree, _RATE) if value_of(self._tree, _LOCKED) else 0
        if self._has_state:
            kept["emc/state"] = value_of(self._tree, _STATE)
        if self._has_node:
            kept |= {f"emc/{end}": value_of(self._tree, path) for end, path in zip(_ENDS, _NODE_LIMITS, strict=True)}
        return {name: str(value) for name, value in kept.items()}

    def written_files(self) -> list[str]:
        """Return the files that are written; empty if the memory cannot be set."""
        locked = [_LOCKED, _RATE] if self.has_lock else []
        return [*([self._cap] if self._cap else []), *locked, *(_NODE_LIMITS if self._has_node else [])]

    def knob_names(self) -> KnobNames:
        """Return the names in `knobs`."""
        there = [("emc/cap", self._cap), ("emc/lock_hz", self.has_lock), ("emc/state", self._has_state)]
        there += [(f"emc/{end}", self._has_node) for end in _ENDS]
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

    def _cap_allows(self, hz: int) -> bool:
        held = _held(self._tree, self._cap)
        return held is not None and (held <= 0 or held >= hz)

    def _held_hz(self) -> int | None:
        """Return the highest frequency at which the memory may run now, Hz; None if it cannot be read."""
        try:
            return self.frequency_hz()
        except ModeNotAppliedError:
            return None

    def _highest_hz(self, to: MemorySettings) -> int:
        """Return the highest frequency at which the memory may run with these settings, Hz."""
        if to.range_hz is not None:
            return to.range_hz[1]
        lock_hz = self._locked_hz() if to.lock_hz is None else to.lock_hz
        return lock_hz or (within(self.table_hz, to.cap) if to.cap and to.cap > 0 else self.table_hz[-1])

    def _locked_hz(self) -> int:
        """Return the locked frequency, Hz; 0 if it is not locked, or cannot be read."""
        try:
            return value_of(self._tree, _RATE) if self.has_lock and value_of(self._tree, _LOCKED) == 1 else 0
        except ModeNotAppliedError:
            return 0


# --- Fan --------------------------------------------------------------------------------------------------------------
# The fan, and the service that controls its speed depending on the temperature.

_SERVICE = "nvfancontrol"
_FULL_PWM = 255


class Fan:
    """A board's fan, if it has one.

    Args:
        tree: the board's files.
        run: runs `systemctl`.
    """

    def __init__(self, tree: Tree, run: RunProgram) -> None:
        self._tree = tree
        self._run = run
        self._path = next(iter(tree.glob("/sys/devices/platform/pwm-fan*/hwmon/hwmon*/pwm1")), None)
        enable = f"{self._path}_enable"
        # On Thor, the fan is off while this is 0, whatever its speed.
        self._enable = enable if self._path and tree.exists(enable) else None

    @property
    def exists(self) -> bool:
        """Whether there is a fan that can be set."""
        return self._path is not None

    def share(self) -> float | None:
        """Return its speed, 0 to 1; None without a fan, or if the speed cannot be read."""
        if self._path is None:
            return None
        try:
            return int(self._tree.read(self._path)) / _FULL_PWM
        except (OSError, ValueError):
            return None

    def hold_full(self) -> None:
        """Run the fan at full speed.

        Raises:
            ModeNotAppliedError: it does not reach full speed.
        """
        if self._path is None:
            return
        if self._is_serviced():
            self._systemctl("stop")
        if self._enable and value_of(self._tree, self._enable) == 0:
            set_value(self._tree, self._enable, 1)
        set_value(self._tree, self._path, _FULL_PWM)
        held = value_of(self._tree, self._path)
        if held != _FULL_PWM:
            raise ModeNotAppliedError(
                f"{self._path}: wanted {_FULL_PWM}, found {held}; stop the other program that controls the fan"
            )

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that `hold_full` changes."""
        if self._path is None:
            return {}
        enabled = {"fan/enable": str(value_of(self._tree, self._enable))} if self._enable else {}
        return {
            "fan/pwm": str(value_of(self._tree, self._path)),
            "fan/service": str(int(self._is_serviced())),
            **enabled,
        }

    def written_files(self) -> list[str]:
        """Return the files that `hold_full` writes."""
        return [path for path in (self._path, self._enable) if path]

    def knob_names(self) -> KnobNames:
        """Return the settings that `put_back` accepts."""
        enabled = {"fan/enable"} if self._enable else set()
        return KnobNames(required={"fan/pwm", "fan/service", *enabled} if self.exists else set())

    def put_back(self, knobs: Mapping[str, int]) -> None:
        """Restart the fan's service if it ran before; otherwise restore the fan's speed.

        Raises:
            ModeNotAppliedError: the fan cannot be set, or its service does not start.
        """
        if self._path is None:
            return
        if not knobs["fan/service"]:
            set_value(self._tree, self._path, knobs["fan/pwm"])
            if self._enable:
                set_value(self._tree, self._enable, knobs["fan/enable"])
        elif not self._is_serviced():
            self._start_service(self._path)

    def _start_service(self, path: str) -> None:
        failed: list[str] = []
        with noting(failed):
            self._systemctl("start")
        if failed:
            # Since nothing controls the fan now, only full speed is safe.
            with noting(failed):
                set_value(self._tree, path, _FULL_PWM)
            raise ModeNotAppliedError("; ".join(failed))

    def _is_serviced(self) -> bool:
        return self._run(["systemctl", "is-active", "--quiet", _SERVICE], "").code == 0

    def _systemctl(self, verb: str) -> None:
        result = self._run(["systemctl", verb, _SERVICE], "")
        if result.code != 0:
            raise ModeNotAppliedError(f"systemctl {verb} {_SERVICE}: {result.output.strip() or 'failed'}")
