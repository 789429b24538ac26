"""The modules that the imports of a Flower app load, each in a fresh Python process."""

from __future__ import annotations

import subprocess
import sys

import wattfleet_flower

CLIENT = (
    "from wattfleet_flower import AgentUnreachableError, planned_loader, planned_work, power_mode_mod, profiled,"
    " until_deadline"
)
SERVER = (
    "from wattfleet_flower import BatchChoice, FedBuff, NoUpdatesError, PlanningError, PowerAware, Quorum,"
    " TwoStrategiesError"
)
BESIDE_FLOWER = "import sys, flwr.app, flwr.clientapp, flwr.serverapp; before = set(sys.modules); "
OTHER_PARTS = ("coordinator", "edge_agent", "reference_models", "wattfleet_evaluation", "wattfleet_simulation")
HEAVY = ("scipy", "pandas", "sklearn", "torch", "safetensors", "sqlalchemy", "pydantic", "prometheus_client")


def printed_by(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def loaded_beside_flower(statement: str) -> list[str]:
    """The modules that a statement loads and that Flower had not loaded yet."""
    return printed_by(f"{BESIDE_FLOWER}{statement}; print(*sorted(set(sys.modules) - before))")


def packages_of(modules: list[str]) -> set[str]:
    return {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names)


def test_every_public_name_can_be_imported() -> None:
    assert {"FedBuff", "PowerAware", "power_mode_mod", "profiled", "until_deadline"} < set(wattfleet_flower.__all__)
    for name in wattfleet_flower.__all__:
        assert getattr(wattfleet_flower, name).__name__ == name


def test_the_client_side_loads_nothing_of_the_server_side_or_the_services() -> None:
    modules = loaded_beside_flower(CLIENT)
    own = {"wattfleet", "wattfleet_flower", "wattfleet_io", "wattfleet_proto"}
    assert packages_of(modules) <= own | {"grpc", "google", "lazy_loader", "numpy"}
    assert not [module for module in modules if module.startswith("wattfleet_flower.server")]
    # Of the core, it needs only errors: power modes are the agent's, and predictors, fronts and plans are not used.
    core = {"wattfleet", "wattfleet.errors"}
    assert {module for module in modules if module.split(".")[0] == "wattfleet"} == core


def test_the_client_side_alone_loads_no_heavy_library() -> None:
    assert printed_by(f"import sys; {CLIENT}; print(*({set(HEAVY + OTHER_PARTS)!r} & set(sys.modules)))") == []


def test_the_server_side_needs_no_other_part_installed() -> None:
    code = (
        f"{BESIDE_FLOWER}"
        f"sys.modules.update(dict.fromkeys({OTHER_PARTS + HEAVY!r}));"  # importing any of these fails
        f"{SERVER}; from flwr.serverapp.strategy import FedAvg; PowerAware(FedAvg()); PowerAware(FedBuff(2));"
        "print(*[name for name in set(sys.modules) - before if sys.modules[name] is not None])"
    )
    modules = printed_by(code)
    assert "wattfleet_flower.server.power_aware" in modules
    assert not [module for module in modules if module.startswith("wattfleet_flower.client")]
