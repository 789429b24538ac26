"""The environment that processes of a simulated fleet inherit from the user."""

import pytest

from wattfleet_simulation.flower import environment


def test_nothing_of_the_users_own_fleet_reaches_the_simulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = (
        "WATTFLEET_COORDINATOR",
        "WATTFLEET_COORDINATOR_STORE_KEEP_DAYS",
        "WATTFLEET_COORDINATOR_DEVICES_TAG",
        "WATTFLEET_AGENT_SESSION_COORDINATOR",
        "WATTFLEET_IDENTITY",
        "WATTFLEET_INSECURE",
        "WATTFLEET_SUPERNODE",
    )
    for name in (*own, "WATTFLEET_CONFIG", "WATTFLEET_LOG_FORMAT"):
        monkeypatch.setenv(name, "set")
    found = environment({"FLWR_HOME": "home"})
    assert not set(own) & set(found)
    assert found["WATTFLEET_CONFIG"] == "", "no settings file, not even the usual one"
    assert (found["WATTFLEET_LOG_FORMAT"], found["FLWR_HOME"]) == ("set", "home")
