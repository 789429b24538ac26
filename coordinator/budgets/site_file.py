"""The operator's site file: supplies and their budgets, which devices hang where, and what single devices may draw."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from coordinator.budgets.prometheus_budget import PrometheusBudget
from coordinator.state.names import require_tag
from coordinator.state.placement import DeviceRules
from wattfleet.budgets import (
    Budget,
    ConstantBudget,
    DailySchedule,
    ReadingRule,
    Supplies,
    Supply,
    read_timed_schedule,
    require_watts,
)
from wattfleet.errors import InvalidInputError
from wattfleet.planning import SITE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

AnyBudget = Budget | PrometheusBudget
"""Watts that follow from the time alone, or that have to be asked for."""


@dataclass(frozen=True)
class SiteFile:
    """What a site file states.

    Attributes:
        supplies: the tree of supplies.
        budgets: of every supply, by its name.
        attached: patterns of device ids, `*`, `?` and `[...]` as in a shell, with the supply that matching devices
            hang behind.
        rules: what is stated of single devices, by id.
    """

    supplies: Supplies
    budgets: Mapping[str, AnyBudget]
    attached: tuple[tuple[str, str], ...] = ()
    rules: Mapping[str, DeviceRules] = field(default_factory=dict)

    @classmethod
    def of_site(cls, site_budget_w: float) -> SiteFile:
        """One supply for all devices, with the same watts at all times.

        Raises:
            InvalidInputError: the watts are not finite and above zero.
        """
        return cls(Supplies((Supply(SITE),)), {SITE: ConstantBudget(site_budget_w)})

    def supply_of(self, device_id: str) -> str:
        """The supply that a device hangs behind: the one whose pattern its id matches, else the only site's own.

        Raises:
            InvalidInputError: it matches patterns of several supplies, or of none where there are several sites.
        """
        matching = {supply: pattern for pattern, supply in self.attached if fnmatchcase(device_id, pattern)}
        if len(matching) > 1:
            named = " and ".join(f"{pattern!r} of {supply}" for supply, pattern in sorted(matching.items()))
            raise InvalidInputError(f"device {device_id!r} matches {named}: let it match one supply's devices")
        if matching:
            return next(iter(matching))
        if len(self.supplies.roots) > 1:
            raise InvalidInputError(
                f"device {device_id!r} hangs behind no supply, and there are several sites"
                f" ({', '.join(self.supplies.roots)}): name it in the devices of a supply"
            )
        return self.supplies.roots[0]

    def rules_of(self, device_id: str) -> DeviceRules:
        """What is stated of a device; no limit and no tags where nothing is."""
        return self.rules.get(device_id, DeviceRules())


def read_site_file(path: Path) -> SiteFile:
    """Read and check a site file, and the plans that it names.

    Raises:
        InvalidInputError: a file cannot be read, is no TOML, or states what cannot be; the text names file and key.
    """
    try:
        document = _Document.model_validate(tomllib.loads(_text(path)))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{path} is no TOML: {error}") from None
    except ValidationError as error:
        raise InvalidInputError(f"{path}: {'; '.join(_told(error))}") from None
    try:
        return document.site_file(path.parent)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is no UTF-8 text") from None


class _Keys(BaseModel):
    """Keys of the file: only those that are known, and no value turned into another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Watts(_Keys):
    watts: float

    def budget(self, folder: Path) -> AnyBudget:
        return ConstantBudget(self.watts)


class _Daily(_Keys):
    timezone: str
    spans: dict[str, float]


class _Schedule(_Keys):
    schedule: _Daily

    def budget(self, folder: Path) -> AnyBudget:
        try:
            zone = ZoneInfo(self.schedule.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise InvalidInputError(
                f"{self.schedule.timezone!r} is no time zone that is known here: write one such as Europe/Berlin"
            ) from None
        return DailySchedule.of(zone, self.schedule.spans)


class _Csv(_Keys):
    csv: str
    fallback_w: float

    def budget(self, folder: Path) -> AnyBudget:
        path = folder / self.csv
        text = _text(path)
        try:
            return read_timed_schedule(text, self.fallback_w)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None


class _Query(_Keys):
    query: str
    url: str
    fallback_w: float
    every_s: float = 15.0
    max_age_s: float = 60.0

    def budget(self, folder: Path) -> AnyBudget:
        return PrometheusBudget(self.url, self.query, self.every_s, ReadingRule(self.max_age_s, self.fallback_w))


_KINDS = ("watts", "schedule", "csv", "query")


def _kind(budget: object) -> str | None:
    """The key that says what kind a budget is; None unless there is exactly one."""
    kinds = [key for key in _KINDS if isinstance(budget, dict) and key in budget]
    return kinds[0] if len(kinds) == 1 else None


class _Supply(_Keys):
    parent: str | None = None
    budget: Annotated[
        Annotated[_Watts, Tag("watts")]
        | Annotated[_Schedule, Tag("schedule")]
        | Annotated[_Csv, Tag("csv")]
        | Annotated[_Query, Tag("query")],
        Discriminator(
            _kind,
            custom_error_type="kind_of_budget",
            custom_error_message=f"state exactly one of {', '.join(_KINDS)}",
        ),
    ]
    devices: list[str] = Field(default_factory=list)


class _Device(_Keys):
    limit_w: float | None = None
    tags: list[str] = Field(default_factory=list)


class _Document(_Keys):
    supplies: dict[str, _Supply]
    devices: dict[str, _Device] = Field(default_factory=dict)

    def site_file(self, folder: Path) -> SiteFile:
        """The file in the house's own types.

        Raises:
            InvalidInputError: what is stated cannot be; the text names the key.
        """
        supplies = Supplies(tuple(Supply(name, supply.parent) for name, supply in self.supplies.items()))
        budgets = {}
        for name, supply in self.supplies.items():
            try:
                budgets[name] = supply.budget.budget(folder)
            except InvalidInputError as error:
                raise InvalidInputError(f"supplies.{name}.budget: {error}") from None
        return SiteFile(supplies, budgets, tuple(self._attached()), dict(self._rules()))

    def _attached(self) -> Iterator[tuple[str, str]]:
        """The patterns of devices with their supply."""
        seen: dict[str, str] = {}
        for name, supply in self.supplies.items():
            for pattern in supply.devices:
                if not pattern:
                    raise InvalidInputError(f"supplies.{name}.devices: an empty pattern matches no device")
                if pattern in seen:
                    raise InvalidInputError(
                        f"supplies.{name}.devices: {pattern!r} is attached to {seen[pattern]} already: a device hangs"
                        " behind one supply"
                    )
                seen[pattern] = name
                yield pattern, name

    def _rules(self) -> Iterator[tuple[str, DeviceRules]]:
        """What is stated of single devices."""
        for device_id, device in self.devices.items():
            key = f'devices."{device_id}"'
            if any(sign in device_id for sign in "*?["):
                raise InvalidInputError(
                    f"{key}: write the whole id of one device; patterns belong to a supply's devices"
                )
            if device.limit_w is not None:
                require_watts(f"{key}.limit_w", device.limit_w)
            for tag in device.tags:
                try:
                    require_tag(tag)
                except InvalidInputError as error:
                    raise InvalidInputError(f"{key}.tags: {error}") from None
            yield device_id, DeviceRules(device.limit_w, frozenset(device.tags))


_SAID = {
    "extra_forbidden": "is no key that is known here",
    "missing": "has to be stated",
    "model_type": "has to be a table",
    "dict_type": "has to be a table",
}
"""What to say of the problems that pydantic tells in the words of Python."""


def _told(error: ValidationError) -> Iterator[str]:
    """What is wrong with a document's keys and types, one text a key."""
    for problem in error.errors(include_url=False):
        key = [str(part) for part in problem["loc"]]
        # pydantic names the kind of a budget in the path, which no key of the file does.
        if key[0] == "supplies" and key[2:3] == ["budget"] and len(key) > 3:
            del key[3]
        yield f"{'.'.join(key)}: {_SAID.get(problem['type'], problem['msg'])}"
