"""What Wattfleet uses of Flower that Flower does not document: what a new release of Flower breaks.

`make flower-seams FLOWER=1.42.0` runs this file, and the tests of what is changed in Flower, with that release.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

import flwr
import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Flower for Python 3.10 is left as it is")

# --- Replaced names ---------------------------------------------------------------------------------------------------
# Names of modules that a part of Wattfleet sets to something of its own.

_SUPERNODE = "flwr.supernode.start_client_internal"
REPLACED = {
    # wattfleet/flower/supernode/command.py
    "flwr.supernode.cli.flower_supernode": ("start_client_internal", "uvicorn"),
    _SUPERNODE: ("http_request_response", "time", "subprocess"),
    "flwr.supernode.fleet_http_connection": ("FleetHttpClient",),
    # wattfleet/flower/supernode/superexec.py
    "flwr.supercore.superexec.executor.subprocess_executor": ("subprocess",),
    # wattfleet/flower/superlink/command.py
    "flwr.superlink.cli.flower_superlink": (
        "load_control_authn_plugin",
        "uvicorn",
        "get_uvicorn_log_config",
        "subprocess",
    ),
}


@pytest.mark.parametrize(("module", "names"), REPLACED.items(), ids=REPLACED)
def test_names_that_are_replaced_exist_and_are_used(module: str, names: tuple[str, ...]) -> None:
    found = importlib.import_module(module)
    used = {name for function in _functions(found) for name in function.__code__.co_names}
    assert not [name for name in names if not hasattr(found, name) or name not in used]


def _functions(module: Any) -> list[Any]:
    """The functions and methods that a module defines."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    methods = [each for kind in own if inspect.isclass(kind) for each in vars(kind).values()]
    unwrapped = [inspect.unwrap(getattr(each, "__func__", each)) for each in [*own, *methods] if callable(each)]
    return [each for each in unwrapped if inspect.isfunction(each)]


# What replaces these has to accept the same calls, as far as its own code names the arguments.
PARAMETERS = {
    f"{_SUPERNODE}.start_client_internal": ("state_factory",),
    "flwr.supernode.fleet_http_client.FleetHttpClient.from_server_address": (
        "server_address",
        "insecure",
        "root_certificates",
        "interceptors",
    ),
    "flwr.supernode.fleet_http_client.FleetHttpClient": ("interceptors", "verify"),
    "flwr.supernode.fleet_http_client.FleetHttpClient.RegisterNode": ("request",),
    "flwr.supernode.fleet_http_client.FleetHttpClient.ActivateNode": ("request",),
    "flwr.supernode.fleet_http_client.FleetHttpClient.SendNodeHeartbeat": ("request",),
    "flwr.supernode.fleet_http_client.FleetHttpClient.GetRun": ("request",),
    "flwr.supernode.fleet_http_client.FleetHttpClient.GetFab": ("request",),
    "flwr.supernode.fleet_http_client.FleetHttpClient._unary_unary": ("request",),
    "flwr.supernode.fleet_http_client.FleetHttpClient._send": ("context", "stream"),
    "flwr.supercore.control.ControlHttpClient": ("interceptors", "verify"),
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor": ("component_name",),
    "flwr.superlink.cli.flower_superlink.load_control_authn_plugin": (),
    "flwr.supercore.exit.flwr_exit": ("code", "message"),
    # wattfleet/flower/server: a wrapped strategy, and the grid that it gets.
    "flwr.serverapp.strategy.Strategy.start": (
        "grid",
        "initial_arrays",
        "num_rounds",
        "timeout",
        "train_config",
        "evaluate_config",
        "evaluate_fn",
    ),
    "flwr.serverapp.strategy.Strategy.configure_train": ("server_round", "arrays", "config", "grid"),
    "flwr.serverapp.strategy.Strategy.aggregate_train": ("server_round", "replies"),
    "flwr.serverapp.strategy.Strategy.configure_evaluate": ("server_round", "arrays", "config", "grid"),
    "flwr.serverapp.strategy.Strategy.aggregate_evaluate": ("server_round", "replies"),
    "flwr.serverapp.strategy.Strategy.summary": (),
    "flwr.serverapp.strategy.strategy_utils.aggregate_metricrecords": ("records", "weighting_metric_name"),
    "flwr.serverapp.Grid.push_messages": ("messages",),
    "flwr.serverapp.Grid.pull_messages": ("message_ids",),
    "flwr.serverapp.Grid.send_and_receive": ("messages", "timeout"),
}


@pytest.mark.parametrize(("path", "expected"), PARAMETERS.items(), ids=PARAMETERS)
def test_arguments_keep_their_names(path: str, expected: tuple[str, ...]) -> None:
    signature = inspect.signature(_at(path))
    assert not [name for name in expected if name not in signature.parameters], f"{path}{signature}"


OWN_GRID_METHODS = {"get_node_ids", "get_nodes", "run", "set_run", "create_message", "push_messages", "pull_messages"}


def test_a_grid_has_no_method_that_is_not_forwarded() -> None:
    grid = _at("flwr.serverapp.Grid")
    assert {name for name in vars(grid) if not name.startswith("_")} <= {*OWN_GRID_METHODS, "send_and_receive"}


# --- Names that are used ----------------------------------------------------------------------------------------------

USED = (
    "flwr.supernode.runtime.run_clientapp",
    "flwr.supercore.cli.flower_superexec",
    "flwr.supercore.exit.ExitCode.SUPERNODE_CONNECTION_ERROR",
    "flwr.supercore.error.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED",
    "flwr.supercore.error.ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE",
    "flwr.supercore.error.FlowerError.from_json",
    "flwr.supercore.run.RunNotRunningException",
    "flwr.supercore.constant.FLEET_HTTP_PUBLIC_KEY_HEADER",
    "flwr.supercore.constant.SUPERLINK_UVICORN_DEFAULT_PORT",
    "flwr.supercore.task_identity.TaskIdentity",
    "flwr.supercore.credential_store.get_credential_store",
    "flwr.superlink.auth_plugin.ControlAuthnPlugin",
    "flwr.cli.flower_config.write_superlink_connection",
    "flwr.cli.flower_config.set_default_superlink_connection",
    "flwr.common.config.parse_config_args",
)


@pytest.mark.parametrize("path", USED)
def test_names_that_are_used_exist(path: str) -> None:
    assert _at(path) is not None


# Flower does not export these; `wattfleet/flower/server/replies.py` states what each means.
ERROR_CODES = {
    "LOAD_CLIENT_APP_EXCEPTION": 1,
    "CLIENT_APP_RAISED_EXCEPTION": 2,
    "MESSAGE_UNAVAILABLE": 3,
    "REPLY_MESSAGE_UNAVAILABLE": 4,
    "NODE_UNAVAILABLE": 5,
    "MOD_FAILED_PRECONDITION": 6,
    "INVALID_FAB": 7,
    "CLIENT_APP_CRASHED": 8,
}


def test_error_codes_keep_their_numbers() -> None:
    codes = _at("flwr.common.constant.ErrorCode")
    assert {name: value for name, value in vars(codes).items() if value in range(1, 9)} == ERROR_CODES


def test_the_superexec_reads_its_pause_from_the_environment() -> None:
    from wattfleet.flower.supernode.superexec import POLL_VARIABLE

    module = importlib.import_module("flwr.supercore.superexec.run_superexec")
    constants = importlib.import_module("flwr.supercore.constant")
    assert POLL_VARIABLE in inspect.getsource(module) + inspect.getsource(constants)


def test_each_strategy_of_flower_is_tested_within_power_aware() -> None:
    """Another strategy may need every device, or be sampled by other attributes: see docs/flower.md."""
    strategies = importlib.import_module("flwr.serverapp.strategy")
    found = {name for name, each in vars(strategies).items() if inspect.isclass(each) and name != "Result"}
    assert found == {
        *("Bulyan", "DifferentialPrivacyClientSideAdaptiveClipping", "DifferentialPrivacyClientSideFixedClipping"),
        *("DifferentialPrivacyServerSideAdaptiveClipping", "DifferentialPrivacyServerSideFixedClipping"),
        *("FedAdagrad", "FedAdam", "FedAvg", "FedAvgM", "FedMedian", "FedProx", "FedTrimmedAvg"),
        *("FedXgbBagging", "FedXgbCyclic", "FedYogi", "Krum", "MultiKrum", "QFedAvg", "Strategy"),
    }, f"Flower {flwr.__version__}"


def _at(path: str) -> Any:
    """What a dotted path names."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            for name in parts[count:]:
                found = getattr(found, name)
        except AttributeError:
            continue
        return found
    raise AttributeError(path)
