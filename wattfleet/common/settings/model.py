"""Building blocks of a settings model: groups of documented keys.

Example:
    class StoreSettings(Group):
        keep_days: float | None = setting(
            None, "Days to keep a finished run.", unit="days", unset="keep for ever", option="--keep-days", gt=0
        )

    class CoordinatorSettings(Settings):
        store: StoreSettings = StoreSettings()
"""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Generic, Optional, TypeVar

import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from wattfleet.common.addresses import without_passwords
from wattfleet.common.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, LogFormat, LogLevel
from wattfleet.common.parsing import parse_toml
from wattfleet.core.errors import InvalidInputError

# --- Errors -----------------------------------------------------------------------------------------------------------
# Turns pydantic's errors about settings into sentences that name the key, its origin and a remedy.


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "tuple": "a list",
    "path": "a path",
}
_BOUNDS = {
    "greater_than": ("must be above {gt}", "gt"),
    "greater_than_equal": ("must be {ge} or more", "ge"),
    "less_than": ("must be below {lt}", "lt"),
    "less_than_equal": ("must be {le} or less", "le"),
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar known one, if there is one."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(
    error: ValidationError, model: type[Settings], origins: Mapping[str, str], config: Path | None
) -> Iterator[str]:
    """Return one sentence per problem.

    Args:
        error: pydantic's error.
        model: the settings.
        origins: the origin of each given key.
        config: the settings file, if there is one.
    """
    keys = list(keys_of(model))
    for problem in error.errors(include_url=False):
        where = [str(part) for part in problem["loc"]][:2]
        if problem["type"] == "extra_forbidden":
            yield f"{config}: {_unknown(where, keys)}"
        elif problem["type"] == "missing":
            yield _missing(where, keys)
        else:
            yield f"{_subject(where, origins)} {_complaint(problem)}"


def _subject(where: list[str], origins: Mapping[str, str]) -> str:
    """Return the subject of a message: the option, variable or key that the user has set."""
    path = ".".join(where)
    origin = origins.get(path, "")
    if origin.startswith("--") or origin.endswith(path.replace(".", "_").upper()):
        return origin
    table = f"[{where[0]}] {where[1]}" if len(where) > 1 else f"[{where[0]}]"
    return f"{origin}: {table}" if origin else table


def _unknown(where: list[str], keys: list[Key]) -> str:
    if len(where) == 1:
        groups = list(dict.fromkeys(key.group for key in keys))
        if homes := [f"[{key.group}]" for key in keys if key.name == where[0]]:
            return f"{where[0]!r} belongs in the table {' or '.join(homes)}"
        return f"unknown table [{where[0]}]{suggestion(where[0], groups)}"
    group, name = where
    if homes := [f"[{key.group}]" for key in keys if key.name == name]:
        return f"unknown key {name!r} in [{group}]; it belongs in {' or '.join(homes)}"
    return f"unknown key {name!r} in [{group}]{suggestion(name, [key.name for key in keys if key.group == group])}"


def _missing(where: list[str], keys: list[Key]) -> str:
    group, name = where
    (option,) = [key.option for key in keys if [key.group, key.name] == where]
    return f"{option or name} is required: pass it, or set {name!r} in [{group}] of the settings file"


def _complaint(problem: Any) -> str:
    kind: str = problem["type"]
    context = problem.get("ctx", {})
    given = problem["input"]
    if kind in _BOUNDS:
        text, bound = _BOUNDS[kind]
        return f"{text.format(**{bound: f'{context[bound]:g}'})}, not {float(given):g}"
    if kind == "literal_error":
        return f"must be {context['expected']}, not {without_passwords(repr(given))}"
    if kind in ("model_type", "model_attributes_type"):
        return "must be a table"
    if kind == "string_too_short":  # keys do not need more than one character
        return "must not be empty"
    if kind == "finite_number":
        return f"must be a finite number, not {given}"
    if kind == "value_error":
        return str(context["error"])
    expected, _, _ = kind.partition("_")
    if expected in _TYPES:
        return f"must be {_TYPES[expected]}, not {without_passwords(repr(given))}"
    return f"is invalid: {problem['msg']}"


# --- Model ------------------------------------------------------------------------------------------------------------


def _split(value: Any) -> Any:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""Several names: a list in TOML, a comma-separated list in an environment variable, or a repeated option."""


class Group(BaseModel):
    """The keys of one table in the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


S = TypeVar("S", bound="Settings")


class Settings(BaseModel):
    """All settings of one process; every field is a `Group` with a one-word name.

    The constructor uses only its arguments; options, variables and files are read by `SettingsCommand` and `load`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefix: ClassVar[str]
    """The beginning of the environment variables, such as `WATTFLEET_COORDINATOR_`."""

    @classmethod
    def variable_of(cls, path: str) -> str:
        """Return the variable that sets a key: for `store.keep_days`, `WATTFLEET_COORDINATOR_STORE_KEEP_DAYS`."""
        return cls.prefix + path.replace(".", "_").upper()

    def with_values(self: S, **groups: Mapping[str, Any]) -> S:
        """Return a validated copy with changed keys, as in `with_values(store={"keep_days": 7})`."""
        content = self.model_dump()
        return type(self)(**{**content, **{group: {**content[group], **keys} for group, keys in groups.items()}})

    @classmethod
    def title_of(cls, group: str) -> str:
        """Return the title of a group: its docstring up to the first colon or full stop."""
        table = cls.model_fields[group].annotation
        return re.split("[:.]", (table and table.__doc__) or group)[0]


def setting(
    default: Any, description: str, *, unit: str = "", option: str = "", unset: str = "", **constraints: Any
) -> Any:
    """Define one documented key of a `Group`.

    Args:
        default: the value if none is given; `...` for a required key.
        description: the effect of the key, in full sentences without the default.
        unit: the unit, such as "s" or "W"; empty for none.
        option: the command-line option that sets the key, such as "--keep-days"; empty for none.
        unset: the meaning of None, such as "keep for ever".
        constraints: constraints of pydantic's `Field`, such as `gt=0`.
    """
    return Field(
        default,
        description=description,
        json_schema_extra={"unit": unit, "option": option, "unset": unset},
        **constraints,
    )


_REQUIRED = "required"


def with_required_keys_optional(model: type[S]) -> type[S]:
    """Return the same model, except that required keys may be absent and are then None."""
    groups: dict[str, Any] = {}
    for group, field in model.model_fields.items():
        table = field.annotation
        assert isinstance(table, type) and issubclass(table, Group), f"{group} is not a group of settings"
        keys = {name: _optional(key) for name, key in table.model_fields.items() if key.is_required()}
        if keys:
            optional = create_model(table.__name__, __base__=table, __doc__=table.__doc__, **keys)
            groups[group] = (optional, optional())
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **groups)


def _optional(key: FieldInfo) -> Any:
    extra = {**(key.json_schema_extra if isinstance(key.json_schema_extra, dict) else {}), _REQUIRED: "yes"}
    annotation: Any = Annotated[(Optional[key.annotation], *key.metadata)] if key.metadata else Optional[key.annotation]  # noqa: UP045 - a value
    return annotation, Field(None, description=key.description, json_schema_extra=extra)


@dataclass(frozen=True)
class Key:
    """One key of a settings model.

    Attributes:
        group: name of its table.
        name: its name in the table.
        field: pydantic's information about it.
    """

    group: str
    name: str
    field: FieldInfo

    @property
    def path(self) -> str:
        """The key with its table, such as `store.keep_days`."""
        return f"{self.group}.{self.name}"

    @property
    def description(self) -> str:
        """The effect of the key."""
        return self.field.description or ""

    @property
    def unit(self) -> str:
        """The unit of its value; empty for none."""
        return self._extra("unit")

    @property
    def option(self) -> str:
        """The command-line option that sets it; empty for none."""
        return self._extra("option")

    @property
    def default_text(self) -> str:
        """A sentence with the default, or stating that the key is required."""
        return "Required." if self.is_required else f"Default: {self._default_words()}."

    @property
    def is_required(self) -> bool:
        """Whether the process cannot start without the key, even in a model of `with_required_keys_optional`."""
        return self.field.is_required() or bool(self._extra(_REQUIRED))

    def _default_words(self) -> str:
        default = self.field.get_default(call_default_factory=True)
        if default is None:
            return self._extra("unset") or "not set"
        if default == ():
            return self._extra("unset") or "none"
        if isinstance(default, bool):
            return "yes" if default else "no"
        return f"{default:g}" if isinstance(default, float) else str(default)

    def _extra(self, name: str) -> str:
        extra = self.field.json_schema_extra
        return str(extra.get(name, "")) if isinstance(extra, dict) else ""


def keys_of(model: type[Settings]) -> Iterator[Key]:
    """Return all keys of a model, in the order of its groups."""
    for group, field in model.model_fields.items():
        table = field.annotation
        assert isinstance(table, type) and issubclass(table, Group), f"{group} is not a group of settings"
        for name, key in table.model_fields.items():
            yield Key(group, name, key)


# --- Loading ----------------------------------------------------------------------------------------------------------
# Reads settings from a TOML file, below the values of options and variables, and records where each value came from.


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """Settings and where their values came from.

    Attributes:
        settings: the effective values.
        origins: the option, environment variable or file that set a key, by key such as `store.keep_days`; keys with
            defaults are absent.
    """

    settings: S
    origins: Mapping[str, str]


def load(
    model: type[S], config: Path | None = None, given: Mapping[str, tuple[Any, str]] = MappingProxyType({})
) -> Loaded[S]:
    """Read the effective settings of a process.

    Args:
        model: the process's settings.
        config: the TOML file, if there is one.
        given: what options and variables override in the file: values and their origins, by key such as
            `store.keep_days`.

    Raises:
        InvalidInputError: a key is unknown, a value cannot be used, or the file cannot be read.
    """
    try:
        content = b"" if config is None else config.read_bytes()
    except OSError as error:
        raise InvalidInputError(f"cannot read the settings file {config}: {error.strerror}") from None
    return _loaded(model, content, config, given)


def settings_of(model: type[S], content: bytes, path: Path) -> S:
    """Return the settings of a file without options or environment, as for a service.

    Args:
        model: the process's settings.
        content: the file's content.
        path: the file's name, for messages.

    Raises:
        InvalidInputError: the content is not TOML, a key is unknown, or a value cannot be used.
    """
    return _loaded(model, content, path, {}).settings


def _loaded(model: type[S], content: bytes, config: Path | None, given: Mapping[str, tuple[Any, str]]) -> Loaded[S]:
    try:
        in_file = parse_toml(content)
    except ValueError as error:
        raise InvalidInputError(f"{config} is not valid TOML: {error}") from None
    origins = dict.fromkeys(_paths(in_file), str(config))
    tables: dict[str, Any] = {group: {} for group in model.model_fields} | in_file
    for path, (value, origin) in given.items():
        group, name = path.split(".")
        if isinstance(tables[group], dict):  # otherwise, the model refuses it
            tables[group][name] = value
            origins[path] = origin
    try:
        return Loaded(model(**tables), origins)
    except ValidationError as error:
        raise InvalidInputError("; ".join(explain(error, model, origins, config))) from None


def _paths(tables: Mapping[str, Any]) -> Iterator[str]:
    """Return the keys in a table of tables."""
    for group, table in tables.items():
        if isinstance(table, dict):
            yield from (f"{group}.{name}" for name in table)
        else:
            yield group


# --- Printing ---------------------------------------------------------------------------------------------------------
# Writes the effective settings of a process as a commented TOML file.

_WIDTH = 80


def as_toml(loaded: Loaded[S], command: str) -> str:
    """Return the settings with each key's description, unit, default and origin; `--config` can read this text.

    Passwords in URLs are replaced by `***`.

    Args:
        loaded: the effective settings.
        command: the command that uses them, such as `wattfleet coordinator serve`.
    """
    lines = [f"# Settings of `{command}`."]
    keys = list(keys_of(type(loaded.settings)))
    if missing := [key.option or key.path for key in keys if key.is_required and _value(loaded, key) is None]:
        lines += _comment(f"Missing: {', '.join(missing)}. The command does not start without them.")
    group = ""
    for key in keys:
        if key.group != group:
            group = key.group
            title = (type(getattr(loaded.settings, group)).__doc__ or "").partition("\n")[0]
            lines += ["", *_comment(title), f"[{group}]"]
        value = _value(loaded, key)
        lines += [*_comment(key.description), *_comment(_facts(key, loaded.origins.get(key.path))), _line(key, value)]
    return "\n".join(lines) + "\n"


def _value(loaded: Loaded[S], key: Key) -> Any:
    return getattr(getattr(loaded.settings, key.group), key.name)


def _facts(key: Key, origin: str | None) -> str:
    unit = f"Unit: {key.unit}. " if key.unit else ""
    unchanged = "Missing." if key.is_required else "Not changed."
    return f"{unit}{key.default_text} " + (f"Set by: {origin}." if origin else unchanged)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def _line(key: Key, value: Any) -> str:
    if value is None:
        return f"# {key.name} ="  # TOML has no null
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, str):
        value = without_passwords(value)
    return tomli_w.dumps({key.name: list(value) if isinstance(value, tuple) else value}).strip()


# --- Log --------------------------------------------------------------------------------------------------------------
# The settings of a service's log, in the table `[log]` of each service's settings.


class LogSettings(Group):
    """Log: level and format of the log on standard error."""

    format: LogFormat | None = setting(
        None,
        "Write the log as lines of text, or as one JSON object per line.",
        option="--log-format",
        unset=f"{FORMAT_VARIABLE}, else text",
    )
    level: LogLevel | None = setting(
        None,
        "Leave out lines below this level.",
        option="--log-level",
        unset=f"{LEVEL_VARIABLE}, else info",
    )
