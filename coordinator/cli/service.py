"""`wattfleet coordinator install` and `uninstall`: the coordinator as a systemd service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.cli.options import JsonOption
from wattfleet.common import systemd
from wattfleet.common.systemd import (
    THIS_MACHINE,
    AllowWritableOption,
    DryRunOption,
    ImageToCleanOption,
    ImageToWriteOption,
    YesOption,
)

if TYPE_CHECKING:
    from coordinator.settings import CoordinatorSettings


def install(
    site_budget_w: Annotated[
        float | None,
        typer.Option(min=0, help="Limit the power of all devices together to this many watts.", show_default=False),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Serve gRPC on this host:port. Default: as `serve`, 127.0.0.1:7070.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="Install these settings, as `serve --config` reads them. Default: those of the other options, or else"
            " the installed ones.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: ImageToWriteOption = THIS_MACHINE,
    allow_writable: AllowWritableOption = False,
    json_: JsonOption = False,
) -> None:
    """Show every file and command, ask for confirmation, and install the coordinator as a systemd service."""
    from coordinator.listeners import exposed_plaintext
    from coordinator.systemd.installation import installation, require_usable
    from wattfleet.common.identity.channels import PLAINTEXT_WARNING

    text, settings = _settings(site_budget_w, address, config, root)
    require_usable(settings, root)
    plan = installation(text, systemd.running_code(), allow_writable=allow_writable)
    warning = None
    if settings.identity.insecure and (exposed := exposed_plaintext(settings, has_authority=False)):
        warning = f"{' and '.join(exposed)}: {PLAINTEXT_WARNING}"
    systemd.install(plan, root, dry_run, yes, json_, whole=True, warning=warning)


def uninstall(
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: ImageToCleanOption = THIS_MACHINE,
    json_: JsonOption = False,
) -> None:
    """Stop the service, and remove its files; keep settings, store and authority."""
    from coordinator.systemd.installation import SETTINGS_PATH, STATE_DIRECTORY, UNIT_FILE, UNIT_PATH, USER_PATH

    kept = f"{SETTINGS_PATH}, {STATE_DIRECTORY} with store and authority, and the user"
    systemd.uninstall(UNIT_FILE, [UNIT_PATH, USER_PATH], kept, root, dry_run, yes, json_)


def _settings(
    site_budget_w: float | None, address: str | None, config: Path | None, root: Path
) -> tuple[str, CoordinatorSettings]:
    """The settings file to install, and its settings."""
    from coordinator.settings import CoordinatorSettings
    from coordinator.systemd.installation import SETTINGS_PATH, settings_text
    from wattfleet.common.settings.model import settings_of
    from wattfleet.core.errors import InvalidInputError

    installed = root / SETTINGS_PATH.lstrip("/")
    if config is not None and (site_budget_w is not None or address is not None):
        raise InvalidInputError("pass --config or the other settings, not both")
    if site_budget_w is not None:
        content, source = settings_text(site_budget_w, address).encode(), installed
    elif address is not None:
        raise InvalidInputError(
            "--address also needs --site-budget-w; change an installed address in the settings file"
        )
    else:
        source = config or installed
        try:
            content = source.read_bytes()
        except OSError as error:
            remedy = "" if config else ": pass --site-budget-w WATTS, or --config FILE"
            raise InvalidInputError(f"cannot read the settings file {source}: {error.strerror}{remedy}") from None
    settings = settings_of(CoordinatorSettings, content, source)
    return content.decode(), settings
