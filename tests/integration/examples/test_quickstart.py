"""The quickstarts: two or three lines differ, and without a coordinator the training result is the same."""

from __future__ import annotations

import difflib
import importlib
import logging
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from flwr.app import Context, RecordDict

from tests.fakes.fleet_in_process import RUN_ID, InProcessGrid
from wattfleet_flower.server import planning_client
from wattfleet_identity.channels import Endpoint

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
QUICKSTARTS = [EXAMPLES / "quickstart-pytorch", EXAMPLES / "quickstart-sklearn"]

each_quickstart = pytest.mark.parametrize("quickstart", QUICKSTARTS, ids=lambda folder: folder.name)


def files(app: Path) -> dict[str, str]:
    kept = [path for path in app.rglob("*") if path.suffix in (".py", ".toml")]
    return {str(path.relative_to(app)): path.read_text() for path in sorted(kept)}


WRAPPED = {  # only a loader that is not a PyTorch DataLoader
    "quickstart-pytorch": [],
    "quickstart-sklearn": [
        "-         for images, labels in batches:",
        "+         for images, labels in until_deadline(profiled(batches)):",
    ],
}


@each_quickstart
def test_two_lines_or_three_are_the_difference_with_what_they_import(quickstart: Path) -> None:
    plain, power_aware = files(quickstart / "plain"), files(quickstart / "power_aware")
    assert list(plain) == list(power_aware)
    changed = [
        line
        for name in plain
        for line in difflib.ndiff(plain[name].splitlines(), power_aware[name].splitlines())
        if line[0] in "+-" and line[1:].strip()
    ]
    lines = [line for line in changed if "import " not in line and "wattfleet[" not in line]
    wrapped = WRAPPED[quickstart.name]
    assert lines == [
        "- app = ClientApp()",
        "+ app = ClientApp(mods=[power_mode_mod])",
        "-     strategy = FedAvg(fraction_evaluate=0.5)",
        "+     strategy = PowerAware(FedAvg(fraction_evaluate=0.5))",
        *wrapped,
    ]
    assert sorted(set(changed) - set(lines)) == [
        '+   "wattfleet[flower]",',
        "+ from wattfleet_flower import PowerAware",
        "+ from wattfleet_flower import power_mode_mod",
        *(["+ from wattfleet_flower import profiled, until_deadline"] if wrapped else []),
    ]
    readme = (quickstart / "README.md").read_text()
    assert all(line[0] + line[2:] in readme for line in lines), "the README shows them"


def accuracies(app: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The accuracy on the server after every round, for an app whose nodes run in this process."""
    package = app.parent.name.replace("-", "_")
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(app))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            patch.delitem(sys.modules, name)
        client = importlib.import_module(f"{package}.client_app")
        server = importlib.import_module(f"{package}.server_app")
        config = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
        nodes = {2**63 + k: {"device-id": f"device-{k}", "partition-id": k, "num-partitions": 3} for k in range(3)}
        grid = InProcessGrid(client.app, nodes, config)
        seen: list[float] = []
        evaluate = server.global_evaluate

        def kept(server_round: int, arrays: Any) -> Any:
            metrics = evaluate(server_round, arrays)
            seen.append(metrics["accuracy"])
            return metrics

        patch.setattr(server, "global_evaluate", kept)
        if hasattr(server, "PowerAware"):
            patch.setattr(server, "PowerAware", partial(server.PowerAware, on_coordinator_away="unplanned"))
        random.seed(0)
        torch.manual_seed(0)
        context = Context(run_id=RUN_ID, node_id=1, node_config={}, state=RecordDict(), run_config=dict(config))
        server.main(grid, context)
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        return seen


@each_quickstart
def test_without_a_coordinator_both_learn_the_same(
    quickstart: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The default address must be unreachable, even if a coordinator runs on this machine.
    nobody = grpc.insecure_channel("127.0.0.1:1")
    monkeypatch.setattr(Endpoint, "channel", lambda endpoint: nobody)
    monkeypatch.setattr("wattfleet_flower.server.rounds._FINAL_REPORTS_WITHIN_S", 0.0)
    monkeypatch.setattr(planning_client, "_CONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(planning_client, "_RECONNECT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    plain = accuracies(quickstart / "plain", monkeypatch)
    assert "NO BUDGET IS KEPT" not in caplog.text
    power_aware = accuracies(quickstart / "power_aware", monkeypatch)
    assert "NO BUDGET IS KEPT" in caplog.text
    assert plain == power_aware
    assert len(plain) == 4 and plain[-1] > 0.8 > plain[0]
    nobody.close()
