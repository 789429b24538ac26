"""`wattfleet version`: the installed versions, for a bug report or to compare two machines."""

from __future__ import annotations

import ctypes
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import click

from wattfleet.common.console import print_json, print_line

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
        "wattfleet": version_of("wattfleet"),
        "protocol": _protocol(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in _LIBRARIES},
    }


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _protocol() -> str | None:
    try:
        from wattfleet_proto.names import MAJOR, MINOR
    except ModuleNotFoundError:  # the core alone does not need protobuf
        return None
    return f"{MAJOR}.{MINOR}"


# --- Memory -----------------------------------------------------------------------------------------------------------
# Returns freed memory to the system, since a process that idles for days must not keep what one fit needed.

# The options' numbers in glibc's malloc.h, and the threshold to set, bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 256 * 1024


def give_memory_back_early() -> None:
    """Make the C library return freed memory: one heap for all threads, and large arrays outside of it.

    Call this before any thread starts. It has no effect if the C library is not glibc.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    set_option(_ARENA_MAX, 1)
    # Otherwise glibc raises the threshold each time a large array is freed.
    set_option(_MMAP_THRESHOLD, _LARGE)
    set_option(_TRIM_THRESHOLD, _LARGE)


# --- GPU --------------------------------------------------------------------------------------------------------------
# Waits for work that torch has queued on a GPU.


def wait_for_gpu() -> None:
    """If this process uses torch on a GPU, wait until the GPU has done all queued work."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
