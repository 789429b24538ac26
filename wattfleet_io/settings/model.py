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

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Optional, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict


def _split(value: Any) -> Any:
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Several names: a list in TOML, a comma-separated list in an environment variable, or a repeated option."""


class Group(BaseModel):
    """The keys of one table in the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """All settings of one process; every field is a `Group` with a one-word name.

    The constructor uses only its arguments; `wattfleet_io.settings.loading.load` reads the environment and files.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keep the environment out of the constructor."""
        return (init_settings,)

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
