"""`wattfleet version`: the installed versions, for a bug report or to compare two machines."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click

from wattfleet_io.console import print_json, print_line

_LIBRARIES = ("flwr", "torch")


@click.command("version")
@click.option("--json", "json_", is_flag=True, help="Print JSON.")
def show_version(json_: bool) -> None:
    """Show the versions of Wattfleet, its protocol, Python, Flower and PyTorch."""
    found = installed_versions()
    if json_:
        print_json(found)
        return
    width = max(map(len, found))
    for name, each in found.items():
        print_line(f"{name:{width}}  {each or 'not installed'}")


def installed_versions() -> dict[str, str | None]:
    """Return the versions by name; None for software that is not installed."""
    return {
        "wattfleet": _version_of("wattfleet"),
        "protocol": _protocol(),
        "python": platform.python_version(),
        **{name: _version_of(name) for name in _LIBRARIES},
    }


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _protocol() -> str | None:
    try:
        from wattfleet_proto.version import MAJOR, MINOR
    except ModuleNotFoundError:  # the core alone does not need protobuf
        return None
    return f"{MAJOR}.{MINOR}"
