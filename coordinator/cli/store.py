"""`wattfleet coordinator store`: check, back up and restore the database of a coordinator on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import click
import typer

from coordinator.cli.options import JsonOption
from wattfleet_io.console import count_of, print_json

app = typer.Typer(no_args_is_help=True, help="Check, back up and restore the coordinator's store on this machine.")

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        allow_from_autoenv=False,
        help="Use this SQLite file. Default: the store of the settings, as for `serve`.",
        show_default=False,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        allow_from_autoenv=False,
        help="Read the store's location from this TOML file. Default: WATTFLEET_COORDINATOR_CONFIG, else no file.",
        show_default=False,
    ),
]


@app.command()
def check(store: StoreOption = None, config: ConfigOption = None, json_: JsonOption = False) -> None:
    """Check that the store contains what was written to it. A coordinator may be using it."""
    from coordinator.store.backups import check_file

    path = _file(store, config, "check it with pg_amcheck")
    with _typed(path):
        rows = check_file(path)
    if json_:
        print_json({"store": str(path), "undamaged": True, "rows": rows})
        return
    for table, count in rows.items():
        print(f"{table}: {count_of(count, 'row')}")
    print(f"{path} is undamaged")


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(metavar="BACKUP", help="File to write; it must not exist.")],
    store: StoreOption = None,
    config: ConfigOption = None,
) -> None:
    """Copy the store to the file BACKUP, and check the copy. A coordinator may be using the store."""
    from coordinator.store.backups import back_up
    from wattfleet.errors import InvalidInputError

    path = _file(store, config, "back it up with pg_dump")
    if target.exists():
        raise InvalidInputError(f"{target} exists: choose another name, or remove it first")
    with _typed(path):
        back_up(path, target)
    print(f"{target} is a checked backup of {path}")


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="File written by `store backup`.")],
    store: StoreOption = None,
    config: ConfigOption = None,
) -> None:
    """Check the file BACKUP, and replace the store by a copy of it. Stop the coordinator first."""
    from coordinator.store.backups import restore_file

    path = _file(store, config, "restore it with pg_restore", must_exist=False)
    _require_file(source)
    with _typed(path):
        replaced = restore_file(source, path)
    if replaced is not None:
        print(f"{path} was kept as {replaced}")
    print(f"{path} is restored from {source}")


def _file(store: str | None, config: Path | None, instead: str, must_exist: bool = True) -> Path:
    """The path of the store's SQLite file.

    Args:
        store: its location as given; None for that of the settings.
        config: the settings file; None for that of the environment.
        instead: what to do if the store is PostgreSQL.
        must_exist: whether the file has to exist.

    Raises:
        InvalidInputError: the store is PostgreSQL, or the file does not exist.
    """
    from coordinator.settings import ENVIRONMENT_PREFIX, CoordinatorSettings
    from coordinator.store.database import database_url, display_name
    from wattfleet.errors import InvalidInputError
    from wattfleet_io.settings.command import require_no_password
    from wattfleet_io.settings.loading import load
    from wattfleet_io.settings.option_variables import variables_beside

    if store is not None:
        require_no_password("--store", store)
    options = {} if store is None else {"store.location": store}
    of_others = variables_beside(click.get_current_context())
    loaded = load(CoordinatorSettings, ENVIRONMENT_PREFIX, options, config, of_others)
    url = database_url(loaded.settings.store.location)
    if url.drivername != "sqlite":
        raise InvalidInputError(f"{display_name(url)} is a PostgreSQL database: {instead}")
    path = Path(str(url.database))
    if must_exist:
        _require_file(path)
    return path


def _require_file(path: Path) -> None:
    from wattfleet.errors import InvalidInputError

    if not path.is_file():
        raise InvalidInputError(f"{path} is not a file: pass the name of an SQLite file")


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    """Convert errors of the system and of SQLite to errors that name the store."""
    from coordinator.store.database import typed_opening_errors

    with typed_opening_errors(str(path)):
        yield
