"""The operator's site file: supplies with their budgets and devices, and limits of single devices."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from coordinator.budgets.prometheus_budget import PrometheusBudget
from coordinator.state.agents import DeviceRules
from coordinator.state.names import require_tag
from wattfleet.common.parsing import parse_toml
from wattfleet.core.budgets import (
    Budget,
    ConstantBudget,
    DailySchedule,
    ReadingRule,
    Supplies,
    Supply,
    read_timed_schedule,
    require_watts,
)
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.planning import SITE

AnyBudget = Budget | PrometheusBudget
"""A budget that follows from the time, or one that is queried."""


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
    """

    supplies: Supplies
    budgets: Mapping[str, AnyBudget]
    attached: tuple[tuple[str, str], ...] = ()
    rules: Mapping[str, DeviceRules] = field(default_factory=dict)
    refuses_unplanned: bool = False

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
        try:
            zone = ZoneInfo(self.schedule.timezone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise InvalidInputError(
                f"unknown time zone {self.schedule.timezone!r}: write one such as Europe/Berlin"
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


_MODELS: dict[str, type[BaseModel]] = {"watts": _Watts, "schedule": _Schedule, "csv": _Csv, "query": _Query}


def _kind(budget: object) -> str | None:
    """The key that tells a budget's kind; None unless there is exactly one."""
    kinds = [key for key in _MODELS if isinstance(budget, dict) and key in budget]
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
            custom_error_message=f"must have exactly one of the keys {', '.join(_MODELS)}",
        ),
    ]
    devices: list[str] = Field(default_factory=list)


class _Device(_Keys):
    limit_w: float | None = None
    tags: list[str] = Field(default_factory=list)


class _Document(_Keys):
    supplies: dict[str, _Supply]
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
        return SiteFile(supplies, budgets, tuple(self._attached()), dict(self._rules()), refuses)

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
        if location[0] == "supplies" and location[2:3] == ["budget"] and len(location) > 3:
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
    elif len(table) == 2:
        model = _Supply
    elif len(table) == 3:
        model = _MODELS[kind]
    elif len(table) == 4:
        model = _Daily
    return list(model.model_fields)
