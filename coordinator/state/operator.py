"""The operator's settings of the fleet: budgets, tags, drained devices and the rules for client selection."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import replace

from coordinator.errors import UnknownRecordError
from coordinator.state.agents import Agents, AssignedPlacement, DeviceRules
from coordinator.state.names import MAX_TAGS, require_tag
from coordinator.state.records import DeviceOverrides
from wattfleet.core.budgets import InForce
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import Allowance, Selection
from wattfleet_proto.device_state import PresetPoint

# --- Preset points ----------------------------------------------------------------------------------------------------
# The devices' predictions for the presets of their boards, as reported in their sessions.


class PresetPoints:
    """The presets of every connected device, by workload. They are not stored: each session reports them again."""

    def __init__(self) -> None:
        """Start without any preset."""
        self._by_device: dict[str, dict[str, tuple[PresetPoint, ...]]] = {}

    def report(
        self, device_id: str, workload: str, presets: tuple[PresetPoint, ...], workloads: Collection[str]
    ) -> None:
        """Record a device's presets for a workload, and drop those of workloads for which it no longer has a front.

        Args:
            device_id: the device.
            workload: name of the workload.
            presets: for this workload.
            workloads: names of the workloads for which the device has fronts.
        """
        before = self._by_device.get(device_id, {})
        kept = {name: each for name, each in before.items() if name in workloads}
        self._by_device[device_id] = {**kept, workload: presets}

    def of(self, device_id: str, workload: str) -> tuple[PresetPoint, ...]:
        """A device's presets for a workload; none while it is disconnected, or if it has reported none."""
        return self._by_device.get(device_id, {}).get(workload, ())

    def forget(self, device_ids: Iterable[str]) -> None:
        """Remove the presets of devices."""
        for device_id in device_ids:
            self._by_device.pop(device_id, None)


# --- Operator ---------------------------------------------------------------------------------------------------------


class OperatorSettings:
    """What the site file and the operator's commands set. Each change returns the records to store.

    Attributes:
        allowance: the watts of every supply now.
        budgets_in_force: the source of these watts, by supply; empty for a supply that was never set.
        overrides: tags and drained devices that were set by command, by device id.
    """

    def __init__(
        self,
        allowance: Allowance,
        placement: AssignedPlacement,
        selection: Selection,
        agents: Agents,
        overrides: Sequence[DeviceOverrides] = (),
    ) -> None:
        """Start with the settings of the site file and the stored overrides.

        Args:
            allowance: initial watts of every supply.
            placement: the supply that each device is behind, and its rules.
            selection: the operator's rules for client selection.
            agents: known devices.
            overrides: the stored settings that were made by command.
        """
        self.allowance = allowance
        self.budgets_in_force: dict[str, InForce] = {}
        self.overrides = {each.device_id: each for each in overrides}
        self._placement = placement
        self._selection = selection
        self._agents = agents

    @property
    def site_budget_w(self) -> float:
        """The current watts of all sites together."""
        return self.allowance.site_budget_w

    @property
    def selection(self) -> Selection:
        """The rules for client selection, including the currently drained devices."""
        drained = frozenset(device_id for device_id, each in self.overrides.items() if each.drained)
        return replace(self._selection, drained=drained)

    def exclusion_reasons(self, device_ids: Iterable[str], workload: str | None = None) -> dict[str, str]:
        """Return the devices that must not train by the operator's rules or because of their reports, with the reasons.

        Args:
            device_ids: the devices.
            workload: name of the workload that they would train; None for any.
        """
        selection = replace(self.selection, left_out=self._agents.left_out(workload))
        supplies = self.allowance.supplies
        reasons = {
            each: selection.exclusion_reason(each, self.tags_of(each), self._supply(each), supplies)
            for each in device_ids
        }
        return {device_id: reason for device_id, reason in reasons.items() if reason is not None}

    def matching(self, selection: Selection) -> list[str]:
        """The ids of the devices that a rule selects, in order, regardless of the operator's other rules."""
        supplies = self.allowance.supplies
        return [
            each
            for each in sorted(self._agents.devices)
            if selection.exclusion_reason(each, self.tags_of(each), self._supply(each), supplies) is None
        ]

    def tags_of(self, device_id: str) -> frozenset[str]:
        """All tags of a device: those of the site file and those set by command."""
        return self._placement.rules_of(device_id).tags | self.overrides_of(device_id).tags

    def overrides_of(self, device_id: str) -> DeviceOverrides:
        """The settings of a device that were made by command."""
        return self.overrides.get(device_id) or DeviceOverrides(device_id)

    def supply_of(self, device_id: str) -> str:
        """The supply that a device is behind.

        Raises:
            InvalidInputError: the site file does not place the device.
        """
        return self._placement.supply_of(device_id)

    def rules_of(self, device_id: str) -> DeviceRules:
        """The site file's rules for a device."""
        return self._placement.rules_of(device_id)

    # --- changes ------------------------------------------------------------------------------------------------

    def set_budget(self, supply: str, in_force: InForce) -> None:
        """Change a supply's budget; `Fleet.set_budget` trims the rounds in flight as well.

        Raises:
            InvalidInputError: the supply does not exist, or the watts are invalid.
        """
        self.allowance = replace(self.allowance, budget_w={**self.allowance.budget_w, supply: in_force.watts})
        self.budgets_in_force[supply] = in_force

    def tag(self, device_ids: Collection[str], add: Set[str], remove: Set[str]) -> list[DeviceOverrides]:
        """Add tags to devices in addition to those of the site file, or remove such tags; on an error none is changed.

        Raises:
            UnknownRecordError: a device never connected.
            InvalidInputError: a tag is not valid, is both added and removed, or is set in the site file; or a device
                would have too many tags.
        """
        if len(add) > MAX_TAGS:
            raise InvalidInputError(f"at most {MAX_TAGS} tags can be added by command, not {len(add):,}")
        for word in add:
            require_tag(word)
        if both := add & remove:
            raise InvalidInputError(f"{', '.join(sorted(both))}: either add a tag or remove it, not both")
        changed = []
        for device_id in dict.fromkeys(device_ids):
            before = self.overrides_of(self._agents.get(device_id).device_id)
            if in_site_file := remove & self._placement.rules_of(device_id).tags:
                raise InvalidInputError(
                    f"{device_id} has the tag {', '.join(sorted(in_site_file))} from the site file: remove it there"
                )
            tags = (before.tags | add) - remove
            if len(tags) > MAX_TAGS:
                raise InvalidInputError(
                    f"{device_id}: a device has at most {MAX_TAGS} tags set by command, not {len(tags):,}: remove some "
                    "first"
                )
            changed.append(replace(before, tags=tags))
        return self._put(changed)

    def drain(self, device_ids: Collection[str], is_drained: bool = True) -> list[DeviceOverrides]:
        """Exclude devices from new rounds, or include them again; a training in progress continues.

        Raises:
            UnknownRecordError: a device never connected; none is changed.
        """
        ids = [self._agents.get(device_id).device_id for device_id in dict.fromkeys(device_ids)]
        return self._put([replace(self.overrides_of(device_id), drained=is_drained) for device_id in ids])

    def trust_after(self, plan_id: str, device_ids: Collection[str]) -> list[DeviceOverrides]:
        """Ignore the contradictions of the given devices up to and including a plan, also after a restart."""
        return self._put(
            [replace(self.overrides_of(each), trusted_after=plan_id) for each in dict.fromkeys(device_ids)]
        )

    def require_supply(self, supply: str) -> None:
        """Check that devices can be placed behind a supply.

        Raises:
            UnknownRecordError: the supply does not exist.
        """
        if supply not in (names := self.allowance.supplies.names):
            raise UnknownRecordError(f"the site has no supply {supply!r}; it has {', '.join(names)}")

    def place(self, device_id: str, supply: str, tags: Set[str]) -> list[DeviceOverrides]:
        """Place a device behind a supply and add tags, before it connects for the first time.

        Args:
            device_id: the device.
            supply: the supply; empty leaves the device where it is.
            tags: the tags; those beyond the limit of a device are left out.
        """
        before = self.overrides_of(device_id)
        added = sorted(tags - before.tags)[: max(0, MAX_TAGS - len(before.tags))]
        changed = replace(before, tags=before.tags | set(added), supply=supply or before.supply)
        if changed == before:
            return []
        if supply:
            self._placement.assign(device_id, supply)
        return self._put([changed])

    def forget(self, device_ids: Collection[str]) -> None:
        """Remove the settings of the given devices that were made by command."""
        for device_id in device_ids:
            self.overrides.pop(device_id, None)
            self._placement.assign(device_id, "")

    def _supply(self, device_id: str) -> str:
        """The supply that a device is behind; empty if the site file does not place it."""
        try:
            return self._placement.supply_of(device_id)
        except InvalidInputError:
            return ""

    def _put(self, changed: list[DeviceOverrides]) -> list[DeviceOverrides]:
        self.overrides.update({each.device_id: each for each in changed})
        return changed
