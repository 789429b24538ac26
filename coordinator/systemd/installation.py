"""Plans the installation and removal of the coordinator's service."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from wattfleet.common.addresses import without_passwords
from wattfleet.common.systemd import (
    SETTINGS_FOLDER,
    UNIT_FOLDER,
    Installation,
    InstalledCode,
    Stat,
    require_visible,
    unit_of,
)
from wattfleet.core.errors import InvalidInputError

if TYPE_CHECKING:
    from coordinator.settings import CoordinatorSettings

UNIT_FILE = "wattfleet-coordinator.service"
"""The unit file, next to this module."""

UNIT_PATH = f"{UNIT_FOLDER}/{UNIT_FILE}"
SETTINGS_PATH = f"{SETTINGS_FOLDER}/coordinator.toml"
USER_PATH = "/etc/sysusers.d/wattfleet-coordinator.conf"
USER = "wattfleet-coordinator"
STATE_DIRECTORY = "/var/lib/wattfleet-coordinator"
"""The service's working directory: relative paths of the settings are below it."""


def settings_text(site_budget_w: float, address: str | None) -> str:
    """The text of a settings file for a new service.

    Args:
        site_budget_w: the power budget of all devices together, in watts.
        address: host:port for gRPC; None for the default of `serve`.
    """
    lines = [
        "# Settings of wattfleet-coordinator.service. To apply a change: systemctl restart wattfleet-coordinator",
        "# `wattfleet coordinator serve --config THIS_FILE --print-config` explains every key.",
        "",
        *([] if address is None else ["[server]", f'address = "{address}"', ""]),
        "[site]",
        f"budget_w = {site_budget_w:g}",
    ]
    return "\n".join(lines) + "\n"


def require_usable(settings: CoordinatorSettings, root: Path) -> None:
    """Check that the service can start with its settings.

    Args:
        settings: the settings from its file.
        root: root of the machine's files; `/` on the machine itself.

    Raises:
        InvalidInputError: the settings have no budget, name a file that the service cannot see, or would serve other
            machines in plaintext.
    """
    from coordinator.identity.authority_folder import AuthorityFolder
    from coordinator.listeners import exposed_plaintext

    if settings.site.budget_w is None and settings.site.file is None:
        raise InvalidInputError("the settings name no budget: set budget_w or file in [site]")
    for what, path in _paths(settings):
        require_visible(what, path)
    authority = Path(STATE_DIRECTORY) / settings.identity.directory
    has_authority = AuthorityFolder.exists(root / str(authority).lstrip("/"))
    if (exposed := exposed_plaintext(settings, has_authority)) and not settings.identity.insecure:
        remedy = (
            "leave out plaintext_address"
            if has_authority
            else f"create the fleet's authority first, with `wattfleet coordinator init --identity {authority}`"
        )
        raise InvalidInputError(
            f"{' and '.join(exposed)} would be plaintext, and other machines reach it: {remedy}, or set insecure in"
            " [identity]"
        )


def _paths(settings: CoordinatorSettings) -> Iterator[tuple[str, Path]]:
    for group in type(settings).model_fields:
        for name, value in getattr(settings, group):
            if isinstance(value, Path):
                yield f"{group}.{name}", value
    if "://" not in settings.store.location:
        yield "store.location", Path(settings.store.location)


def installation(
    settings: str, code: InstalledCode, look_at: Stat = os.stat, allow_writable: bool = False
) -> Installation:
    """Plan an installation.

    Args:
        settings: the content of the settings file.
        code: the installed `wattfleet` and the code that it imports.
        look_at: `os.stat`, except in tests.
        allow_writable: whether to allow code that users other than root may write.

    Raises:
        InvalidInputError: the service cannot or must not run that program.
    """
    shipped = files(__package__).joinpath(UNIT_FILE).read_text(encoding="utf-8")
    unit, writable = unit_of(shipped, code, look_at, allow_writable)
    return Installation(
        UNIT_FILE,
        files={
            SETTINGS_PATH: settings,
            USER_PATH: f'u {USER} - "Wattfleet coordinator" {STATE_DIRECTORY}\n',
            UNIT_PATH: unit,
        },
        commands=(
            ("systemd-sysusers", USER_PATH),
            # The settings may contain the password of a database.
            ("chown", f"root:{USER}", SETTINGS_PATH),
            ("chmod", "0640", SETTINGS_PATH),
            # Root may have created the authority there.
            ("install", "--directory", "--mode=0700", STATE_DIRECTORY),
            ("chown", "--recursive", f"{USER}:{USER}", STATE_DIRECTORY),
        ),
        writable=writable,
        shown={SETTINGS_PATH: "\n".join(map(without_passwords, settings.splitlines()))},
        modes={SETTINGS_PATH: 0o600},
    )
