"""The operator's site file: supplies with their budgets, devices and batteries, and limits of single devices."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from coordinator.budgets.prometheus_budget import PrometheusBudget, PrometheusNumber
from coordinator.state.agents import DeviceRules
from coordinator.state.names import require_tag
from coordinator.state.stores import PlacedBattery
from wattfleet.common.parsing import parse_toml
from wattfleet.core.budgets import (
    NOT_MEASURED,
    Battery,
    Budget,
    ConstantBudget,
    DailySchedule,
    Harvest,
    HourlyHarvest,
    NoHarvest,
    ReadingRule,
    Supplies,
    Supply,
    joules_of,
    read_dated_harvest,
    read_timed_schedule,
    require_watts,
    zone_named,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import SITE

AnyBudget = Budget | PrometheusBudget
"""A budget that follows from the time, or one that is queried."""


DEVICE = "$device"
"""Stands for a device's id in the query or the file of a battery."""


@dataclass(frozen=True)
class ChargeFile:
    """A file that contains the charge of a battery in percent.

    Attributes:
        path: the file.
        every_s: seconds between two reads.
    """

    path: str
    every_s: float


@dataclass(frozen=True)
class SiteBattery:
    """A battery, and where its charge and its harvest are read.

    Attributes:
        placed: the battery.
        charge: the query or file of its charge in percent; None if the agent or the operator reports it.
        harvest: the query of the watts that charge it; None if its harvest is a table.
    """

    placed: PlacedBattery
    charge: PrometheusNumber | ChargeFile | None = None
    harvest: PrometheusNumber | None = None


@dataclass(frozen=True)
class SiteFile:
    """The contents of a site file.

    Attributes:
        supplies: the tree of supplies.
        budgets: the budget of every supply, by its name.
        attached: patterns of device ids, with `*`, `?` and `[...]` as in a shell, and the supply that matching
            devices are behind.
        rules: the rules for single devices, by id.
        refuses_unplanned: whether devices refuse trainings without a plan.
        batteries: the batteries.
    """

    supplies: Supplies
    budgets: Mapping[str, AnyBudget]
    attached: tuple[tuple[str, str], ...] = ()
    rules: Mapping[str, DeviceRules] = field(default_factory=dict)
    refuses_unplanned: bool = False
    batteries: tuple[SiteBattery, ...] = ()

    @classmethod
    def of_site(cls, site_budget_w: float) -> SiteFile:
        """One supply for all devices, with the same watts at all times.

        Raises:
            InvalidInputError: the watts are not finite and above zero.
        """
        return cls(Supplies((Supply(SITE),)), {SITE: ConstantBudget(site_budget_w)})

    def supply_of(self, device_id: str) -> str:
        """The supply that a device is behind: the one whose pattern matches its id, or else the only site's.

        Raises:
            InvalidInputError: patterns of several supplies match, or none matches and there are several sites.
        """
        matching = {supply: pattern for pattern, supply in self.attached if fnmatchcase(device_id, pattern)}
        if len(matching) > 1:
            named = " and ".join(f"{pattern!r} of {supply}" for supply, pattern in sorted(matching.items()))
            raise InvalidInputError(f"device {device_id!r} matches {named}: let only one supply match")
        if matching:
            return next(iter(matching))
        if len(self.supplies.roots) > 1:
            raise InvalidInputError(
                f"device {device_id!r} matches no supply, and there are several sites"
                f" ({', '.join(self.supplies.roots)}): add it to the devices of a supply"
            )
        return self.supplies.roots[0]

    def rules_of(self, device_id: str) -> DeviceRules:
        """The rules for a device; no limit and no tags unless the file has some."""
        return self.rules.get(device_id, DeviceRules())


def read_site_file(path: Path) -> SiteFile:
    """Read and check a site file, and the CSV files that it names.

    Raises:
        InvalidInputError: a file cannot be read, is not TOML, or has an invalid key or value; the text names both.
    """
    try:
        document = _Document.model_validate(parse_toml(_content(path)))
    except ValidationError as error:
        raise InvalidInputError(f"{path}: {'; '.join(_messages(error))}") from None
    except ValueError as error:
        raise InvalidInputError(f"{path} is not valid TOML: {error}") from None
    try:
        return document.site_file(path.parent)
    except InvalidInputError as error:
        raise InvalidInputError(f"{path}: {error}") from None


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InvalidInputError(f"{str(path)!r} cannot be read: {error}") from None


def _text(path: Path) -> str:
    try:
        return _content(path).decode()
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path} is not UTF-8 text") from None


class _Keys(BaseModel):
    """A table of the file: unknown keys are refused, and values are not converted to other types."""

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
        return DailySchedule.of(zone_named(self.schedule.timezone), self.schedule.spans)


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


_MODELS: dict[str, type[BaseModel]] = {"watts": _Watts, "schedule": _Schedule, "csv": _Csv, "query": _Query}


def _kind_of(kinds: Mapping[str, type[BaseModel]]) -> Callable[[object], str | None]:
    """A function that returns the key which tells a table's kind; None unless there is exactly one."""

    def kind(table: object) -> str | None:
        found = [key for key in kinds if isinstance(table, dict) and key in table]
        return found[0] if len(found) == 1 else None

    return kind


class _Supply(_Keys):
    parent: str | None = None
    budget: Annotated[
        Annotated[_Watts, Tag("watts")]
        | Annotated[_Schedule, Tag("schedule")]
        | Annotated[_Csv, Tag("csv")]
        | Annotated[_Query, Tag("query")],
        Discriminator(
            _kind_of(_MODELS),
            custom_error_type="kind_of_budget",
            custom_error_message=f"must have exactly one of the keys {', '.join(_MODELS)}",
        ),
    ]
    devices: list[str] = Field(default_factory=list)


class _Device(_Keys):
    limit_w: float | None = None
    tags: list[str] = Field(default_factory=list)


class _ChargeQuery(_Keys):
    query: str
    url: str
    every_s: float = 60.0

    def source(self, folder: Path, max_age_s: float) -> PrometheusNumber | ChargeFile | None:
        return PrometheusNumber(self.url, self.query, self.every_s, max_age_s, "percent", 100.0)


class _ChargeFile(_Keys):
    file: str
    every_s: float = 60.0

    def source(self, folder: Path, max_age_s: float) -> PrometheusNumber | ChargeFile | None:
        if not 1 <= self.every_s <= max_age_s:
            raise InvalidInputError(f"every_s must be from 1 s to max_age_s ({max_age_s:g} s), not {self.every_s:g} s")
        return ChargeFile(str(folder / self.file), self.every_s)


class _ReportedCharge(_Keys):
    def source(self, folder: Path, max_age_s: float) -> PrometheusNumber | ChargeFile | None:
        return None


class _ChargeOfAgent(_ReportedCharge):
    agent: Literal[True]


class _ChargeOfOperator(_ReportedCharge):
    operator: Literal[True]


class _HarvestHours(_Keys):
    timezone: str
    hourly_w: list[float]

    def harvest(self, folder: Path) -> Harvest:
        return HourlyHarvest(zone_named(self.timezone), tuple(self.hourly_w))


class _HarvestTable(_Keys):
    csv: str

    def harvest(self, folder: Path) -> Harvest:
        path = folder / self.csv
        text = _text(path)
        try:
            return read_dated_harvest(text)
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: {error}") from None


class _HarvestQuery(_Keys):
    query: str
    url: str
    every_s: float = 60.0
    max_age_s: float = 3600.0

    def harvest(self, folder: Path) -> Harvest:
        return NOT_MEASURED

    @property
    def source(self) -> PrometheusNumber:
        return PrometheusNumber(self.url, self.query, self.every_s, self.max_age_s, "watts")


_CHARGES: dict[str, type[BaseModel]] = {
    "query": _ChargeQuery,
    "file": _ChargeFile,
    "agent": _ChargeOfAgent,
    "operator": _ChargeOfOperator,
}
_HARVESTS: dict[str, type[BaseModel]] = {"hourly_w": _HarvestHours, "csv": _HarvestTable, "query": _HarvestQuery}


class _Battery(_Keys):
    supply: str = ""
    devices: list[str] = Field(default_factory=list)
    capacity: str
    charge: Annotated[
        Annotated[_ChargeQuery, Tag("query")]
        | Annotated[_ChargeFile, Tag("file")]
        | Annotated[_ChargeOfAgent, Tag("agent")]
        | Annotated[_ChargeOfOperator, Tag("operator")],
        Discriminator(
            _kind_of(_CHARGES),
            custom_error_type="kind_of_charge",
            custom_error_message=f"must have exactly one of the keys {', '.join(_CHARGES)}",
        ),
    ]
    harvest: (
        Annotated[
            Annotated[_HarvestHours, Tag("hourly_w")]
            | Annotated[_HarvestTable, Tag("csv")]
            | Annotated[_HarvestQuery, Tag("query")],
            Discriminator(
                _kind_of(_HARVESTS),
                custom_error_type="kind_of_harvest",
                custom_error_message=f"must have exactly one of the keys {', '.join(_HARVESTS)}",
            ),
        ]
        | None
    ) = None
    reserve_percent: float = 20.0
    self_discharge_percent_per_day: float = 0.1
    parked_h: float | None = None
    max_age_s: float | None = None
    decay_h: float = 4.0

    @property
    def _is_of_many(self) -> bool:
        """Whether several devices may have such a battery."""
        return len(self.devices) > 1 or any(sign in each for each in self.devices for sign in "*?[")

    def battery(self, name: str, folder: Path, supplies: Supplies) -> SiteBattery:
        """The battery.

        Raises:
            InvalidInputError: a value cannot be used.
        """
        if bool(self.supply) == bool(self.devices):
            raise InvalidInputError(
                "give either supply or devices: a battery belongs to a supply, or each device has one"
            )
        if self.supply and self.supply not in supplies.names:
            raise InvalidInputError(f"unknown supply {self.supply!r}: use one of {', '.join(supplies.names)}")
        source = next(key for key, model in _CHARGES.items() if isinstance(self.charge, model))
        if isinstance(self.charge, _ChargeQuery):
            read = self.charge.query
        else:
            read = self.charge.file if isinstance(self.charge, _ChargeFile) else DEVICE
        if self._is_of_many and DEVICE not in read:
            raise InvalidInputError(
                f"the {source} of its charge is the same for all of its devices: write {DEVICE} where it contains the"
                " id of the device"
            )
        if source == "agent" and self.supply:
            raise InvalidInputError("the charge of a supply's battery cannot come from an agent: use query or file")
        # What a person states is not measured again soon.
        usual_age_s = 24 * 3600.0 if source == "operator" else 900.0
        max_age_s = usual_age_s if self.max_age_s is None else self.max_age_s
        parked_h = self.parked_h
        if parked_h is None:
            parked_h = 0.0 if self.harvest is None else 24.0
        battery = Battery(
            joules_of("capacity", self.capacity),
            self.reserve_percent / 100,
            NoHarvest() if self.harvest is None else self.harvest.harvest(folder),
            self.self_discharge_percent_per_day / 100,
            parked_h * 3600.0,
            max_age_s,
            self.decay_h * 3600.0,
        )
        placed = PlacedBattery(name, battery, source, self.supply, tuple(self.devices))
        measured = self.harvest.source if isinstance(self.harvest, _HarvestQuery) else None
        return SiteBattery(placed, self.charge.source(folder, max_age_s), measured)


class _Document(_Keys):
    supplies: dict[str, _Supply]
    batteries: dict[str, _Battery] = Field(default_factory=dict)
    devices: dict[str, _Device] = Field(default_factory=dict)
    unplanned_trainings: Literal["warn", "refuse"] = "warn"

    def site_file(self, folder: Path) -> SiteFile:
        """The document as a `SiteFile`."""
        supplies = Supplies(tuple(Supply(name, supply.parent) for name, supply in self.supplies.items()))
        budgets = {}
        for name, supply in self.supplies.items():
            try:
                budgets[name] = supply.budget.budget(folder)
            except InvalidInputError as error:
                raise InvalidInputError(f"supplies.{name}.budget: {error}") from None
        refuses = self.unplanned_trainings == "refuse"
        batteries = tuple(self._batteries(folder, supplies))
        return SiteFile(supplies, budgets, tuple(self._attached()), dict(self._rules()), refuses, batteries)

    def _batteries(self, folder: Path, supplies: Supplies) -> Iterator[SiteBattery]:
        """The batteries, of which a supply or a pattern of devices has at most one."""
        seen: dict[str, str] = {}
        patterns: dict[str, str] = {}
        for name, table in self.batteries.items():
            try:
                found = table.battery(name, folder, supplies)
            except InvalidInputError as error:
                raise InvalidInputError(f"batteries.{name}: {error}") from None
            if table.supply in seen:
                raise InvalidInputError(
                    f"batteries.{name}: {table.supply} already has the battery {seen[table.supply]}"
                )
            if table.supply:
                seen[table.supply] = name
            for pattern in table.devices:
                if other := next((each for each in patterns if patterns[each] != name and _overlap(each, pattern)), ""):
                    raise InvalidInputError(
                        f"batteries.{name}: devices that match {pattern!r} and {other!r} already have the battery"
                        f" {patterns[other]}: let only one battery match"
                    )
                patterns[pattern] = name
            yield found

    def _attached(self) -> Iterator[tuple[str, str]]:
        """The patterns of device ids with their supply."""
        seen: dict[str, str] = {}
        for name, supply in self.supplies.items():
            for pattern in supply.devices:
                if not pattern:
                    raise InvalidInputError(f"supplies.{name}.devices: an empty pattern matches no device")
                if pattern in seen:
                    raise InvalidInputError(
                        f"supplies.{name}.devices: {pattern!r} is already listed in {seen[pattern]}: a device is behind"
                        " one supply"
                    )
                seen[pattern] = name
                yield pattern, name

    def _rules(self) -> Iterator[tuple[str, DeviceRules]]:
        """The rules for single devices, by id."""
        for device_id, device in self.devices.items():
            key = f'devices."{device_id}"'
            if any(sign in device_id for sign in "*?["):
                raise InvalidInputError(
                    f"{key}: write the complete id of one device; patterns are for a supply's devices"
                )
            if device.limit_w is not None:
                require_watts(f"{key}.limit_w", device.limit_w)
            for tag in device.tags:
                try:
                    require_tag(tag)
                except InvalidInputError as error:
                    raise InvalidInputError(f"{key}.tags: {error}") from None
            yield device_id, DeviceRules(device.limit_w, frozenset(device.tags))


def _overlap(one: str, other: str) -> bool:
    """Whether a device id may match both patterns."""
    left, right = (re.findall(r"\[!?\]?[^\]]*\]|.", pattern) for pattern in (one, other))
    # Whether the first i signs of the left pattern and the first j of the right one may match the same text.
    reached = [[False] * (len(right) + 1) for _ in range(len(left) + 1)]
    reached[0][0] = True
    for i, j in product(range(len(left) + 1), range(len(right) + 1)):
        if i and j and _share_a_character(left[i - 1], right[j - 1]):
            reached[i][j] |= reached[i - 1][j - 1]
        # A star matches nothing, or one more sign of the other pattern.
        if i and (left[i - 1] == "*" or (j and right[j - 1] == "*")):
            reached[i][j] |= reached[i - 1][j]
        if j and (right[j - 1] == "*" or (i and left[i - 1] == "*")):
            reached[i][j] |= reached[i][j - 1]
    return reached[-1][-1]


def _share_a_character(one: str, other: str) -> bool:
    """Whether two signs of patterns, such as `?` and `[a-f]`, match a common character."""
    candidates = {*one, *other, *map(chr, range(33, 127))}
    return any(fnmatchcase(each, one) and fnmatchcase(each, other) for each in candidates)


_MESSAGES = {
    "missing": "is missing",
    "model_type": "must be a table",
    "dict_type": "must be a table",
}
"""Messages for errors that pydantic describes in terms of Python."""


def _messages(error: ValidationError) -> Iterator[str]:
    """What is wrong with a document's keys and types, one message per key."""
    for problem in error.errors(include_url=False):
        location = [str(part) for part in problem["loc"]]
        # pydantic adds the kind of a budget to the path, which is not a key of the file.
        of_kinds = {"supplies": ["budget"], "batteries": ["charge", "harvest"]}.get(location[0], [])
        if location[2:3] and location[2] in of_kinds and len(location) > 3:
            kind = location.pop(3)
        else:
            kind = ""
        if problem["type"] == "extra_forbidden":
            yield _unknown_key(location, kind)
        else:
            yield f"{'.'.join(location)}: {_MESSAGES.get(problem['type'], problem['msg'])}"


def _unknown_key(location: Sequence[str], kind: str) -> str:
    """The message for an unknown key, with the most similar known one."""
    *table, key = location
    similar = difflib.get_close_matches(key, _known_keys(table, kind), n=1, cutoff=0.5)
    where = f" in [{'.'.join(table)}]" if table else ""
    return f"unknown key {key!r}{where}" + (f"; did you mean {similar[0]!r}?" if similar else "")


def _known_keys(table: Sequence[str], kind: str) -> list[str]:
    """The keys that a table of the file may have.

    Args:
        table: path of the table.
        kind: of the budget, where the table is one or lies inside one.
    """
    model: type[BaseModel] = _Document
    if table[:1] == ["devices"]:
        model = _Device
    elif table[:1] == ["batteries"]:
        kinds = {"charge": _CHARGES, "harvest": _HARVESTS}
        model = _Battery if len(table) == 2 else kinds[table[2]][kind]
    elif len(table) == 2:
        model = _Supply
    elif len(table) == 3:
        model = _MODELS[kind]
    elif len(table) == 4:
        model = _Daily
    return list(model.model_fields)
