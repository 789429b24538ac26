"""`wattfleet coordinator store`: check, back up and restore the database of a coordinator on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from coordinator.cli.options import JsonOption
from wattfleet.common.console import count_of, print_json, print_line
from wattfleet.core.errors import first_few

if TYPE_CHECKING:
    from sqlalchemy import URL

    from coordinator.state.identity_records import CertificateRecord
    from coordinator.store.restoring import CarriedOver

app = typer.Typer(no_args_is_help=True, help="Check, back up and restore the coordinator's store on this machine.")

_MOST_LISTED = 50

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
    from coordinator.store.store import check_file

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
    from coordinator.store.store import back_up
    from wattfleet.core.errors import InvalidInputError

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
    revoke: Annotated[
        list[str] | None,
        typer.Option(
            "--revoke",
            allow_from_autoenv=False,
            metavar="NAME",
            help="Also revoke the certificates of this name, or with this serial number. Repeatable. Default: none.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            allow_from_autoenv=False,
            help="Accept certificates that may have been revoked since the backup. Default: list them, and ask.",
        ),
    ] = False,
) -> None:
    """Check the file BACKUP, and replace the store by a copy of it. Stop the coordinator first.

    What was closed since the backup stays closed, as far as the replaced store can be read: revoked certificates, used
    and cancelled invites, forgotten and drained devices, and budgets that were lowered or whose overrides were cleared.
    What rounds have drawn counts for energy budgets and batteries. Runs that are newer than the backup end.
    """
    from coordinator.store.restoring import Restoration

    path = _file(store, config, "restore it with pg_restore, then use `store carry-over`", must_exist=False)
    _require_file(source)
    with ExitStack() as held:
        with _typed(path):
            restoration = held.enter_context(Restoration(source, path, revoke or ()))
        if restoration.carried.unaccounted and not yes:
            _confirm(restoration.carried.unaccounted)
        with _typed(path):
            replaced = restoration.put_in_place()
    _print_carried(restoration.carried)
    if replaced is not None:
        print(f"{path} was kept as {replaced}")
    print(f"{path} is restored from {source}")


@app.command("carry-over")
def carry_over(
    former: Annotated[
        str, typer.Argument(metavar="FORMER", help="The store that is replaced: an SQLite file or a PostgreSQL URL.")
    ],
    store: StoreOption = None,
    config: ConfigOption = None,
) -> None:
    """Carry over to a restored PostgreSQL database what `restore` does: what was closed in the store FORMER since.

    No coordinator may use one of the two. `restore` does this by itself.
    """
    from coordinator.store import restoring
    from coordinator.store.database import database_url
    from wattfleet.common.settings.command import require_no_password

    require_no_password("FORMER", former)
    carried = restoring.carry_over(database_url(former), _location(store, config))
    _print_carried(carried)
    if carried.unaccounted:
        names = first_few([str(each.peer) for each in carried.unaccounted])
        print_line(f"certificates that may have been revoked since, because {former} does not know them: {names}")


def _print_carried(carried: CarriedOver) -> None:
    """Print what a restored store takes over from the one that it replaces."""
    for what, found in (
        ("certificates that stay revoked", sorted(str(each.peer) for each in carried.revoked)),
        ("devices that stay forgotten", carried.forgotten),
        ("devices that stay drained", carried.drained),
        ("supplies that keep a newer or lower budget", sorted(carried.budgets)),
        ("supplies whose override stays cleared", sorted(carried.cleared)),
        ("supplies that keep a newer or lower energy budget", sorted(carried.energy_budgets)),
        ("runs that have ended", carried.ended),
    ):
        if found:
            print_line(f"{what}: {first_few(found)}")
    if carried.issued:
        print(f"certificates that are newer than the backup, and stay known: {carried.issued:,}")
    if carried.counted_rounds:
        print(f"rounds whose energy still counts for budgets and batteries: {carried.counted_rounds:,}")
    if carried.closed_invites:
        print(f"invites that are closed: {carried.closed_invites:,}")


def _confirm(unaccounted: Sequence[CertificateRecord]) -> None:
    """List certificates that may have been revoked since a backup, and ask whether they are accepted."""
    lines = [
        f"the backup has {count_of(len(unaccounted), 'certificate')} that may have been revoked since: the replaced"
        " store is missing or damaged, or does not know them",
        *(f"  {each.peer}, issued on {each.issued_at:%Y-%m-%d}, {each.serial}" for each in unaccounted[:_MOST_LISTED]),
    ]
    if len(unaccounted) > _MOST_LISTED:
        lines.append(f"  and {len(unaccounted) - _MOST_LISTED:,} more")
    for line in lines:
        print_line(line, to_stderr=True)
    if not typer.confirm("Accept them? (--revoke NAME revokes some, --yes skips this question)", err=True):
        print_line("nothing was restored", to_stderr=True)
        raise typer.Exit(2)


def _file(store: str | None, config: Path | None, instead: str, must_exist: bool = True) -> Path:
    """The path of the store's SQLite file.

    Args:
        store: its location as given; None for that of the settings.
        config: the settings file; None for that of the environment.
        instead: what to do if the store is PostgreSQL.
        must_exist: whether the file has to exist.
    """
    from coordinator.store.database import display_name
    from wattfleet.core.errors import InvalidInputError

    url = _location(store, config)
    if url.drivername != "sqlite":
        raise InvalidInputError(f"{display_name(url)} is a PostgreSQL database: {instead}")
    path = Path(str(url.database))
    if must_exist:
        _require_file(path)
    return path


def _location(store: str | None, config: Path | None) -> URL:
    """The store's location: as given, or else that of the settings of `serve`."""
    from coordinator.store.database import database_url
    from wattfleet.common.settings.command import effective

    group = click.get_current_context()
    while not (isinstance(group.command, click.Group) and "serve" in group.command.commands):
        assert group.parent is not None, "the command is beside `serve`"
        group = group.parent
    options = ["--store", store] if store is not None else []
    options += ["--config", str(config)] if config is not None else []
    with group.command.commands["serve"].make_context("serve", options, parent=group) as serve:
        return database_url(effective(serve).store.location)


def _require_file(path: Path) -> None:
    from wattfleet.core.errors import InvalidInputError

    if not path.is_file():
        raise InvalidInputError(f"{path} is not a file: pass the name of an SQLite file")


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    """Convert errors of the system and of SQLite to errors that name the store."""
    from coordinator.store.database import typed_opening_errors

    with typed_opening_errors(str(path)):
        yield
