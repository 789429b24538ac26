"""The modules that the imports of an inference server load, in a fresh Python process."""

from __future__ import annotations

import subprocess
import sys

import wattfleet_serving

HEAVY = ("numpy", "scipy", "pandas", "torch", "flwr", "pydantic", "edge_agent", "coordinator", "wattfleet_flower")


def test_an_inference_server_and_a_shared_loader_load_no_heavy_library() -> None:
    code = (
        f"import sys; from wattfleet_serving import DutyServer, share_device; print(*({HEAVY!r} & sys.modules.keys()))"
    )
    code = code.replace(repr(HEAVY), repr(set(HEAVY)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_every_public_name_can_be_imported() -> None:
    assert {"DutyServer", "share_device"} < set(wattfleet_serving.__all__)
    for name in wattfleet_serving.__all__:
        assert getattr(wattfleet_serving, name).__name__ == name
