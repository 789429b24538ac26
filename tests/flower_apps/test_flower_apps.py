"""Flower's own examples with the two lines, on four simulated boards, compared with the same examples without.

The examples are not part of this repository: `make flower-apps FLOWER_EXAMPLES=<the folder examples of Flower>`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.cli.client import CoordinatorClient
from tests.fakes.polling import until
from tests.flower_apps.examples import (
    EXAMPLES,
    PLAIN,
    POWER_AWARE,
    ROUNDS,
    STAND_INS,
    WITHOUT_MEASURING,
    Example,
    prepared,
)
from wattfleet.common.identity.channels import Endpoint
from wattfleet.simulation.flower import (
    HOST,
    OFFLINE,
    SUPERNODE,
    FlowerDeployment,
    Part,
    Parts,
    SuperNodeConfig,
    free_ports,
    program,
)

_SOURCE = os.environ.get("FLOWER_EXAMPLES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(_SOURCE is None, reason="FLOWER_EXAMPLES names no folder"),
]
BOARDS = ("agx-orin", "orin-nx", "orin-nano", "xavier-agx")
_RESULTS = Path(os.environ.get("FLOWER_APPS_OUT", "out/flower-apps")).absolute()
_CLOSE = {"rtol": 1e-3, "atol": 1e-4}
_DEPLOYED = ("quickstart-pytorch", "quickstart-sklearn", "quickstart-numpy", "quickstart-xgboost")


@dataclass
class Fleet:
    """A coordinator and the agents of four simulated boards, as processes.

    Attributes:
        parts: all processes.
        folder: their folder.
        address: the coordinator's host:port.
    """

    parts: Parts
    folder: Path
    address: str

    @property
    def sockets(self) -> dict[str, str]:
        return {board: str(self.folder / f"{board}.sock") for board in BOARDS}

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Loaders fork from the process that has a connection in use, and gRPC's handlers may then end their processes.
        grpc = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
        return {**os.environ, **OFFLINE, **grpc, "WATTFLEET_COORDINATOR": self.address, "PYTHONPATH": path}

    def rounds(self, run_id: str) -> list[Any]:
        with CoordinatorClient(Endpoint.of(self.address, None)) as client:
            return list(client.rounds(run_id))


def started(folder: Path, budget_w: float, policy: str) -> Iterator[Fleet]:
    with Parts(folder / "logs") as parts:
        announced = folder / "coordinator.json"
        options = ("--store", str(folder / "fleet.db"), "--announce", str(announced), "--policy", policy)
        serve = ("coordinator", "serve", "--address", f"{HOST}:0", "--http-address", f"{HOST}:0")
        parts.start("coordinator", [program("wattfleet"), *serve, *options, "--site-budget-w", str(budget_w)], OFFLINE)
        until(announced.exists, within_s=120)
        fleet = Fleet(parts, folder, str(json.loads(announced.read_text())["address"]))
        for board, socket in fleet.sockets.items():
            run = ("agent", "run", "--device", f"simulated:{board}", "--device-id", board, "--coordinator")
            state = ("--state-dir", str(folder / board), "--socket", socket)
            parts.start(board, [program("wattfleet"), *run, fleet.address, *state], OFFLINE)
        until(lambda: all(Path(each).exists() for each in fleet.sockets.values()), within_s=120)
        yield fleet


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with watts for all boards, so that each plan has all nodes."""
    yield from started(tmp_path_factory.mktemp("roomy"), 300.0, "all")


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with watts for some of its boards."""
    yield from started(tmp_path_factory.mktemp("tight"), 60.0, "progress")


@dataclass
class Ran:
    """A run in one process.

    Attributes:
        told: what was sent and answered.
        arrays: the arrays of each kind of message.
        artefacts: the files that it wrote; digits, as in dates, count as the same.
        log: its output.
    """

    told: dict[str, Any]
    arrays: dict[str, Any]
    artefacts: set[str]
    log: str


def run_in_process(
    example: Example, folder: Path, variant: str, fleet: Fleet, run_id: int, rounds: int = ROUNDS
) -> Ran:
    folder.mkdir(exist_ok=True)
    app = prepared(example, Path(_SOURCE or ""), folder / variant, variant)
    into = folder / variant / "files"
    settings = {"app": str(app), "into": str(into), "config": {"num-server-rounds": rounds, **example.config}}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.flower_apps.in_process"),
            json.dumps({**settings, "sockets": fleet.sockets, "run_id": run_id}),
        ],
        env=fleet.environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    log = done.stdout + done.stderr
    (folder / f"{variant}.log").write_text(log)
    assert done.returncode == 0, log[-3000:]
    written = {re.sub(r"\d+", "#", str(each.relative_to(into))) for each in into.rglob("*") if each.is_file()}
    told = json.loads((folder / variant / "told.json").read_text())
    with np.load(folder / variant / "arrays.npz") as arrays:
        return Ran(told, dict(arrays), written, log)


def note(example: Example, how: str, **values: Any) -> None:
    """Add a row to the results, which the table in the documents is made from."""
    _RESULTS.mkdir(parents=True, exist_ok=True)
    with (_RESULTS / "results.jsonl").open("a") as file:
        file.write(json.dumps({"example": example.id, "kind": example.kind, "how": how, **values}) + "\n")


def sent(ran: Ran, example: Example) -> dict[str, Any]:
    """What each node was sent; without values that are drawn anew in each run, such as keys."""
    varying = set() if example.is_exact else {"config"}
    return {key: {k: v for k, v in each.items() if k not in varying} for key, each in ran.told["sent"].items()}


@pytest.mark.parametrize("example", EXAMPLES, ids=[each.id for each in EXAMPLES])
def test_an_example_sends_and_aggregates_the_same(example: Example, roomy: Fleet, tmp_path: Path) -> None:
    if example.absent:
        pytest.skip(f"not installed: {', '.join(example.absent)}")
    began_s = time.monotonic()
    plain = run_in_process(example, tmp_path, PLAIN, roomy, 1)
    assert not plain.told["failures"], "the example runs with made-up data"
    # A plan waits 30 s for boards to predict a new app. On a busy machine they need longer, and know it afterwards.
    run_in_process(example, tmp_path / "before", WITHOUT_MEASURING, roomy, int(time.time() * 1e6), rounds=1)
    run_id = int(time.time() * 1e6)
    ours = run_in_process(example, tmp_path, WITHOUT_MEASURING, roomy, run_id)
    assert not ours.told["failures"], ours.log[-3000:]
    assert sent(ours, example) == sent(plain, example), "each node gets the messages that it gets without plans"
    furthest = max((float(np.abs(ours.arrays[k] - each).max(initial=0)) for k, each in plain.arrays.items()), default=0)
    if example.is_exact:
        for key, each in plain.arrays.items():
            np.testing.assert_allclose(ours.arrays[key], each, **_CLOSE, err_msg=key)
    assert ours.artefacts == plain.artefacts
    metrics = {}
    for key, means in plain.told["metrics"].items():
        for name, value in means.items():
            metrics[f"{key} {name}"] = value, ours.told["metrics"][key][name]
            if "time" not in name and (example.is_exact or "acc" in name):
                noise = 0.02 if example.is_exact else 0.1
                assert ours.told["metrics"][key][name] == pytest.approx(value, rel=noise, abs=noise), name
    watts = []
    if example.has_strategy:
        rounds = roomy.rounds(str(run_id))
        assert [each.round for each in rounds] == list(range(1, ROUNDS + 1))
        for each in rounds:
            assert each.planned_w <= each.site_budget_w and not each.failed
            watts.append(round(each.planned_w, 1))
    note(
        example,
        "in process",
        seconds=round(time.monotonic() - began_s),
        messages=sum(len(each["nodes"]) for each in plain.told["sent"].values()),
        furthest=furthest,
        artefacts=len(plain.artefacts),
        planned_w=watts,
        last={name: values for name, values in metrics.items() if f"/{ROUNDS} " in name},
    )


class Deployment(FlowerDeployment):
    """A SuperLink whose ServerApps know the fleet's coordinator, and a SuperNode for each board."""

    def __init__(self, parts: Parts, home: Path, fleet: Fleet) -> None:
        nodes = [SuperNodeConfig(board, k, Path(socket)) for k, (board, socket) in enumerate(fleet.sockets.items())]
        super().__init__(parts, home, nodes)
        self._environment["WATTFLEET_COORDINATOR"] = fleet.address

    def start_supernode(self, node: SuperNodeConfig, link: str | None = None) -> Part:
        """Start a SuperNode that also knows how many parts the data has."""
        config = f'device-id="{node.device_id}" partition-id={node.partition} num-partitions={len(BOARDS)}'
        options = ("--superlink", self.address, "--host", HOST, "--port", str(free_ports(1)[0]), "--node-config")
        command = [*SUPERNODE, "--insecure", *options, f'{config} agent-socket="{node.socket}"']
        return self._parts.start(f"supernode-{node.device_id}", command, self._environment)


@pytest.mark.parametrize("example", [each for each in EXAMPLES if each.id in _DEPLOYED], ids=lambda each: each.id)
def test_an_example_trains_within_the_budget_as_a_deployment(
    example: Example, tight: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if example.absent:
        pytest.skip(f"not installed: {', '.join(example.absent)}")
    began_s = time.monotonic()
    plain = run_in_process(example, tmp_path, PLAIN, tight, 1)
    app = prepared(example, Path(_SOURCE or ""), tmp_path / "deployed", POWER_AWARE)
    for name, value in tight.environment.items():
        monkeypatch.setenv(name, value)
    with Parts(tmp_path / "logs") as parts:
        deployment = Deployment(parts, tmp_path / "home", tight)
        deployment.start()
        run_id = deployment.submit(app, {"num-server-rounds": ROUNDS, **example.config})
        until(lambda: deployment.completed(run_id), within_s=1200)
    rounds = tight.rounds(run_id)
    assert [each.round for each in rounds] == list(range(1, ROUNDS + 1))
    for each in rounds:
        assert each.planned_w <= each.site_budget_w == 60.0
        if each.HasField("observed_site_w"):
            assert each.observed_site_w <= 60.0
        assert not each.failed
    last = dict(rounds[-1].metrics)
    expected = plain.told["metrics"].get(f"evaluate/{ROUNDS}", {})
    for name in {*last} & {*expected}:
        if "acc" in name.lower() or "auc" in name.lower():
            assert last[name] >= expected[name] - 0.15
    note(
        example,
        "deployed",
        seconds=round(time.monotonic() - began_s),
        planned_w=[round(each.planned_w, 1) for each in rounds],
        devices=[each.devices for each in rounds],
        last=last,
        expected=expected,
    )
