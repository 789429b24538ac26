"""CPU cores and the frequency policies that they share."""

from __future__ import annotations

import errno
from collections.abc import Mapping

from edge_agent.devices.device import ModeNotAppliedError
from edge_agent.devices.jetson.knob_files import (
    KnobNames,
    differences,
    noting,
    set_range,
    set_value,
    table_of,
    value_of,
    within,
)
from edge_agent.devices.tree import Tree

_CPU = "/sys/devices/system/cpu"


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

    def set(self, cores: int, khz: int) -> None:
        """Bring the first `cores` cores online, take the others offline, and hold them at one frequency.

        Raises:
            ModeNotAppliedError: the kernel refused a step.
        """
        for core in range(cores):
            self._bring(core, 1)
        for policy in self._policies():
            set_range(self._tree, *_limits(policy), khz, khz)
        for core in range(cores, self.cores):
            self._bring(core, 0)

    def differences(self, cores: int, khz: int) -> list[str]:
        """Describe how the current settings differ from these values."""
        wanted = [(path, khz) for policy in self._policies() for path in _limits(policy)]
        return self._online_differences(range(cores)) + differences(self._tree, wanted)

    def knobs(self) -> dict[str, str]:
        """Return the current values of all settings that `set` may change."""
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
        """Return the files that `set` writes."""
        limits = [path for policy in self._policies() for path in _limits(policy)]
        return [*map(_online_path, self._removable()), *limits]

    def knob_names(self) -> KnobNames:
        """Return the settings that `put_back` accepts; limits of policies whose cores were offline may be missing."""
        limits = {core: {f"policy/{core}/min_khz", f"policy/{core}/max_khz"} for core in range(self.cores)}
        return KnobNames(
            required={f"cpu/{core}/online" for core in self._removable()} | limits[0],
            optional=set().union(*limits.values()),
        )

    def put_back(self, knobs: Mapping[str, int]) -> None:
        """Restore what `knobs` returned.

        A policy with missing limits gets its full range, as at start-up. A policy with only offline cores and
        wrong limits is set while its first core is briefly online.

        Raises:
            ModeNotAppliedError: the kernel refused a step, or holds another value afterwards.
        """
        online = [core for core in range(self.cores) if knobs.get(f"cpu/{core}/online", 1)]
        failed: list[str] = []
        for core in online:
            with noting(failed):
                self._bring(core, 1)
        active = self._policies()
        for policy in self._all_policies():
            wanted = zip(_limits(policy), self._saved_range(policy, knobs), strict=True)
            if policy not in active and differences(self._tree, wanted):
                with noting(failed):
                    self._bring(_first_core(policy), 1)
        for policy in self._policies():
            lowest, highest = self._saved_range(policy, knobs)
            with noting(failed):
                set_range(self._tree, *_limits(policy), lowest, highest)
                failed += differences(self._tree, zip(_limits(policy), (lowest, highest), strict=True))
        for core in self._removable():
            with noting(failed):
                self._bring(core, int(core in online))
        failed += self._online_differences(online)
        if failed:
            raise ModeNotAppliedError("; ".join(dict.fromkeys(failed)))

    def _saved_range(self, policy: str, knobs: Mapping[str, int]) -> tuple[int, int]:
        saved = f"policy/{_first_core(policy)}"
        return knobs.get(f"{saved}/min_khz", self.table_khz[0]), knobs.get(f"{saved}/max_khz", self.table_khz[-1])

    def _bring(self, core: int, online: int) -> None:
        if core in self._removable() and self._is_online(core) != bool(online):
            set_value(self._tree, _online_path(core), online)

    def _online_differences(self, wanted: range | list[int]) -> list[str]:
        return differences(self._tree, ((_online_path(core), int(core in wanted)) for core in self._removable()))

    def _removable(self) -> list[int]:
        """Return the cores that can be taken offline."""
        return [core for core in range(self.cores) if self._can_go_offline(core)]

    def _can_go_offline(self, core: int) -> bool:
        return core > 0 and self._tree.exists(_online_path(core))

    def _is_online(self, core: int) -> bool:
        return value_of(self._tree, _online_path(core)) == 1

    def _all_policies(self) -> list[str]:
        return self._tree.glob(f"{_CPU}/cpufreq/policy*")

    def _policies(self) -> list[str]:
        """Return the policies with an online core."""
        return [policy for policy in self._all_policies() if self._is_active(policy)]

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
