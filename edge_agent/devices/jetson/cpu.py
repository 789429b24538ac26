"""CPU cores and the frequency policies that they share."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jetson.knob_files import (
    KnobNames,
    Step,
    differences,
    not_lowered,
    range_increases,
    range_reductions,
    set_range,
    set_value,
    table_of,
    value_of,
    within,
)
from edge_agent.devices.tree import Tree

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
