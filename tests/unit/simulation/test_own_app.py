"""A user's own app on a large simulated fleet, without Ray: clients run in this process, or behind a fork server."""

from __future__ import annotations

import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from typer.testing import CliRunner

from wattfleet.core.errors import InfeasibleBudgetError, InvalidInputError, WattfleetError
from wattfleet.simulation import app_run, app_simulation, commands, ray_clients, simulate
from wattfleet.simulation.app_run import AppError, Journal, RunSettings, accuracy_in, context_of, run, slug
from wattfleet.simulation.app_simulation import AppSimulation, kinds_named
from wattfleet.simulation.baselines import PLAIN_FLOWER, PRESETS, PlainFlower, TrueBoard
from wattfleet.simulation.client_process import SIMULATED_KEY, ClientTask, ForkServer, handled
from wattfleet.simulation.comparison import THIS_RUN
from wattfleet.simulation.flower_task import be_task
from wattfleet.simulation.large_fleet import open_devices
from wattfleet.simulation.own_app import read_app
from wattfleet.simulation.settings import apps_named
from wattfleet_proto.assignment import RECORD_KEY, RoundAssignment

SMALL_APP = Path(__file__).parents[2] / "fixtures" / "small_app"
DEVICES = {"agx-orin": 2, "orin-nano": 4}
BUDGET_W = 100.0


class ClientsHere:
    """Runs the clients of the small app in this process, and counts them.

    Args:
        most: how many messages are handled before the simulation is interrupted.
    """

    def __init__(self, most: int = 10**9) -> None:
        self.most = most
        self.trained = 0

    def handle(self, tasks: Sequence[tuple[Message, Context]]) -> Iterator[tuple[int, Message, Context]]:
        from small_app.client_app import app

        for place, (message, context) in enumerate(tasks):
            self.trained += 1
            if self.trained > self.most:
                raise KeyboardInterrupt
            reply, context.state, report = handled(app, message, context)
            if not reply.has_error():
                known = {name: value for name, value in vars(report).items() if value is not None}
                reply.content[SIMULATED_KEY] = ConfigRecord(known)
            yield place, reply, context

    def close(self) -> None:
        pass


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSettings:
    """A run of the small app."""
    monkeypatch.syspath_prepend(str(SMALL_APP))
    app = read_app(SMALL_APP, 3, "")
    simulation = AppSimulation(
        app, DEVICES, 3, BUDGET_W, 12, "progress", None, None, 0, "agx_orin_resnet18", None, None, 0.0
    )
    return simulation.of_way(THIS_RUN, tmp_path)


def with_config(settings: RunSettings, values: Mapping[str, Any]) -> RunSettings:
    """A run with other values in the app's run config."""
    return replace(settings, app=replace(settings.app, config={**settings.app.config, **values}))


STRATEGY = "PowerAware(FedAvg(fraction_evaluate=0.0))"


def import_changed(folder: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str) -> Path:
    """Have the next import take a copy of the small app with a change; return the changed file."""
    shutil.copytree(SMALL_APP, folder)
    changed = folder / "small_app" / file
    changed.write_text(changed.read_text().replace(old, new, 1))
    monkeypatch.syspath_prepend(str(folder))
    for name in [each for each in sys.modules if each.startswith("small_app")]:
        monkeypatch.delitem(sys.modules, name)
    return changed


def run_here(settings: RunSettings, clients: ClientsHere | None = None) -> dict[str, Any]:
    found = clients or ClientsHere()
    return run(settings, lambda: found, lambda **_: None)


def test_a_run_learns_within_the_budget(settings: RunSettings) -> None:
    found = run_here(settings)
    assert [one["round"] for one in found["rounds"]] == [1, 2, 3]
    assert found["rounds"][-1]["accuracy"] > 0.5 > found["initial_accuracy"]
    watts = found["way"]["watts"]
    most_w = watts["idle_w"] + max(map(sum, zip(watts["training"], watts["measuring"], strict=True)))
    assert watts["idle_w"] < most_w <= 1.01 * BUDGET_W
    # Eight boards of a kind at most measure, and both kinds are learned before the first plan.
    assert all(kind["measured_by"] for kind in found["kinds"].values())
    assert found["batch_sizes"] == [8]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_devices_are_planned(settings: RunSettings) -> None:
    devices = {"agx-orin": 2_000, "orin-nano": 8_000}
    began_s = time.process_time()
    found = run_here(replace(settings, devices=devices, site_budget_w=120_000.0, modes=50))
    assert [one["round"] for one in found["rounds"]] == [1, 2, 3]
    assert all(one["planned_site_w"] <= 120_000.0 for one in found["rounds"])
    assert found["rounds"][-1]["accuracy"] > 0.7
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    assert memory_gb < 2
    chosen = [len(one["selected"]) for one in found["rounds"]]
    print(f"devices {chosen}, {time.process_time() - began_s:.0f} s of a core, {memory_gb:.2f} GB")


def test_baselines_train_the_same_app(settings: RunSettings) -> None:
    own = run_here(settings)
    for name in (PRESETS, PLAIN_FLOWER):
        baseline = run_here(replace(settings, way=name))
        assert baseline["initial_accuracy"] == own["initial_accuracy"]
        assert baseline["way"]["measuring_s"] == 0
        assert baseline["rounds"][-1]["accuracy"] > 0.5
        assert all(one["planned_site_w"] <= 1.01 * BUDGET_W for one in baseline["rounds"])


def test_baselines_expect_of_an_unknown_device_what_its_kind_has_reported(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(settings)
    facts = settings.folder / "facts.json"
    known = json.loads(facts.read_text())
    for number, each in enumerate(known):
        known[each]["length"] = 400 + number
    unknown = [each for each in known if each.startswith("orin-nano")][0]
    del known[unknown]
    facts.write_text(json.dumps(known))
    lengths: dict[str, int] = {}

    def plain(boards: Mapping[str, TrueBoard], site_budget_w: float, seed: int) -> PlainFlower:
        lengths.update({each: board.minibatches_per_epoch for each, board in boards.items()})
        return PlainFlower(boards, site_budget_w, seed)

    monkeypatch.setattr(app_run, "PlainFlower", plain)
    run_here(replace(settings, way=PLAIN_FLOWER))
    others = sorted(each["length"] for name, each in known.items() if name.startswith("orin-nano"))
    assert lengths[unknown] == others[len(others) // 2]


def test_a_baseline_without_enough_watts_ends_at_once(settings: RunSettings) -> None:
    with pytest.raises(InfeasibleBudgetError, match="no board fits into 40 W in MAXN"):
        run_here(replace(settings, way=PLAIN_FLOWER, site_budget_w=40.0))


def test_the_same_seed_gives_the_same_run(settings: RunSettings, tmp_path: Path) -> None:
    again = replace(settings, folder=tmp_path / "again")
    again.folder.mkdir()
    assert run_here(settings) == run_here(again)


def test_an_interrupted_run_goes_on_after_its_last_round(settings: RunSettings, tmp_path: Path) -> None:
    whole = ClientsHere()
    expected = run_here(settings, whole)
    resumed = replace(settings, folder=tmp_path / "resumed")
    resumed.folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        run_here(resumed, ClientsHere(whole.trained - 1))
    journal = Journal(Path(resumed.folder) / f"{slug(THIS_RUN)}.journal")
    assert sorted(journal.rounds) == [1, 2]
    journal.close()
    rest = ClientsHere()
    assert run_here(resumed, rest) == expected
    assert rest.trained < whole.trained / 2


def test_a_journal_with_a_torn_end_is_used_up_to_its_last_round(settings: RunSettings) -> None:
    expected = run_here(settings)
    file = settings.folder / f"{slug(THIS_RUN)}.journal"
    file.write_bytes(file.read_bytes()[:-100])
    clients = ClientsHere()
    assert run_here(settings, clients) == expected
    assert clients.trained > 1


def test_another_app_is_not_continued(tmp_path: Path) -> None:
    shutil.copytree(SMALL_APP, tmp_path / "app")
    simulation = AppSimulation(
        read_app(tmp_path / "app", 3, ""), DEVICES, 3, 70.0, 12, "progress", None, None, 0, "r", None, None, 0.0
    )
    opened = app_simulation.open_simulation
    assert opened(simulation, tmp_path / "resume") == ""
    assert "without training" in opened(simulation, tmp_path / "resume")
    with pytest.raises(InvalidInputError, match="rounds was 3, and is 4.*choose another --out"):
        opened(replace(simulation, rounds=4), tmp_path / "resume")
    (tmp_path / "app" / "small_app" / "task.py").write_text("")
    with pytest.raises(InvalidInputError, match=r"small_app/task\.py has changed"):
        opened(simulation, tmp_path / "resume")


def test_a_journal_that_others_can_write_is_not_read(tmp_path: Path) -> None:
    simulation = AppSimulation(
        read_app(SMALL_APP, 3, ""), DEVICES, 3, 70.0, 12, "progress", None, None, 0, "r", None, None, 0.0
    )
    resume = tmp_path / "resume"
    app_simulation.open_simulation(simulation, resume)
    assert resume.stat().st_mode & 0o777 == 0o700
    resume.chmod(0o777)
    with pytest.raises(InvalidInputError, match="others can write.*remove that folder"):
        app_simulation.open_simulation(simulation, resume)


def test_an_app_without_enough_partitions_ends_with_the_first_error(settings: RunSettings) -> None:
    broken = with_config(settings, {"fails-from": 1})
    with pytest.raises(AppError, match="fails on .* devices, .* partition .* of 6: IndexError: there is no partition"):
        run_here(broken)


@pytest.mark.parametrize(
    ("file", "old", "new", "error"),
    [
        ("client_app.py", "mods=[power_mode_mod]", "", "has no power_mode_mod"),
        ("server_app.py", STRATEGY, "FedAvg()", "wrap its strategy in PowerAware"),
        ("server_app.py", "import numpy as np", "import no_such_module", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_an_app_without_the_two_lines_is_refused(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, error: str
) -> None:
    import_changed(tmp_path / "app", monkeypatch, file, old, new)
    with pytest.raises(AppError, match=error):
        run_here(settings)


@pytest.mark.parametrize("way", [THIS_RUN, PRESETS])
def test_an_app_with_an_energy_budget_is_refused(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    new = 'PowerAware(FedAvg(fraction_evaluate=0.0), energy_budget="20 kJ")'
    import_changed(tmp_path / "app", monkeypatch, "server_app.py", STRATEGY, new)
    with pytest.raises(WattfleetError, match="leave energy_budget out of PowerAware") as error:
        run_here(replace(settings, way=way))
    assert "\n" not in str(error.value)


def test_a_strategy_may_be_made_when_the_app_is_imported(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = import_changed(tmp_path / "app", monkeypatch, "server_app.py", f"strategy = {STRATEGY}", "pass")
    server.write_text(server.read_text().replace("app = ServerApp()", f"app = ServerApp()\nstrategy = {STRATEGY}"))
    assert [one["round"] for one in run_here(settings)["rounds"]] == [1, 2, 3]


# --- Processes of clients ---------------------------------------------------------------------------------------------


def training_of(settings: RunSettings, partition: int, seed: int = 0) -> tuple[Message, Context]:
    """A training of the small app on a device."""
    import numpy as np

    be_task(4711, 1)
    device = list(open_devices({"orin-nano": 4}, 0).values())[partition]
    assignment = RoundAssignment("plan", device.device_id, 1.0)
    content = RecordDict(
        {
            "arrays": ArrayRecord([np.zeros((16, 4))]),
            RECORD_KEY: ConfigRecord(assignment.to_record()),
            SIMULATED_KEY: ClientTask(seed).to_record(),
        }
    )
    message = Message(content, dst_node_id=device.node_id, message_type="train")
    return message, context_of(settings, device, 4)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkServer]:
    found = ForkServer(str(SMALL_APP), "small_app.client_app:app", str(tmp_path / "clients.log"))
    yield found
    found.close()


def test_what_a_client_leaves_in_a_module_does_not_reach_the_next(settings: RunSettings, server: ForkServer) -> None:
    leaking = with_config(settings, {"leaks": True})

    def earlier(handle: Any) -> list[int]:
        replies = [handle(*training_of(leaking, partition))[0] for partition in (0, 1, 2)]
        return [reply.content["metrics"]["earlier"] for reply in replies]

    from small_app.client_app import app

    # In one process, as in Flower's actors, it does.
    assert earlier(lambda message, context: handled(app, message, context)) == [0, 1, 2]
    assert earlier(server.handle) == [0, 0, 0]


def test_a_client_draws_the_same_numbers_wherever_it_runs(settings: RunSettings, server: ForkServer) -> None:
    def drawn(partition: int, seed: int) -> float:
        reply, _, _ = server.handle(*training_of(settings, partition, seed))
        return float(reply.content["metrics"]["drawn"])

    assert drawn(0, 0) == drawn(0, 0)
    assert len({drawn(0, 0), drawn(1, 0), drawn(0, 1)}) == 3


def test_a_client_reports_what_it_has_trained(settings: RunSettings, server: ForkServer) -> None:
    message, context = training_of(settings, 0)
    reply, _, report = server.handle(message, context)
    batches = -(-int(reply.content["metrics"]["num-examples"]) // 8)
    assert (report.minibatches, report.length, report.batch) == (batches, batches, 8)
    message, context = training_of(settings, 0)
    message.content[SIMULATED_KEY] = ClientTask(0, most_minibatches=10).to_record()
    assert server.handle(message, context)[0].content["wattfleet"]["cut"] is True


def test_a_client_whose_process_dies_is_an_error(settings: RunSettings, tmp_path: Path) -> None:
    shutil.copytree(SMALL_APP, tmp_path / "app")
    client = tmp_path / "app" / "small_app" / "client_app.py"
    client.write_text(
        client.read_text().replace("    data = data_of", "    import os; os._exit(9)\n    data = data_of")
    )
    server = ForkServer(str(tmp_path / "app"), "small_app.client_app:app", str(tmp_path / "log"))
    for _ in range(2):  # the next message is handled all the same
        reply, _, _ = server.handle(*training_of(settings, 0))
        assert "exit code 9" in reply.error.reason
    server.close()


def test_a_process_that_a_client_leaves_behind_does_not_delay_its_answer(settings: RunSettings, tmp_path: Path) -> None:
    shutil.copytree(SMALL_APP, tmp_path / "app")
    client, ended = tmp_path / "app" / "small_app" / "client_app.py", tmp_path / "ended"
    leaves = f"""    import os, time
    if not os.fork():
        try:
            time.sleep(20)
            open({str(ended)!r}, "w").close()
        finally:  # the folder is gone by then
            os._exit(0)
"""
    client.write_text(client.read_text().replace("    data = data_of", f"{leaves}    data = data_of"))
    server = ForkServer(str(tmp_path / "app"), "small_app.client_app:app", str(tmp_path / "log"))
    reply, _, _ = server.handle(*training_of(settings, 0))
    assert not reply.has_error() and not ended.exists()
    server.close()


# --- Input ------------------------------------------------------------------------------------------------------------


def test_the_command_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_clients.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInputError) as error:
        ray_clients.require_ray()
    assert "pip install 'wattfleet[simulation-large]'" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "error"),
    [
        ({}, "it has no pyproject.toml: name the folder that `flwr run` takes"),
        ({"pyproject.toml": "[project]\nname = 'x'"}, "states no serverapp and no clientapp"),
        ({"pyproject.toml": "="}, "cannot be read"),
    ],
)
def test_a_folder_without_a_flower_app_is_refused(tmp_path: Path, files: dict[str, str], error: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=error):
        read_app(tmp_path, 3, "")


def test_the_run_config_is_that_of_the_app_with_changes() -> None:
    app = read_app(SMALL_APP, 7, "learning-rate=0.5")
    assert app.config["num-server-rounds"] == 7
    assert app.changed_config == {"learning-rate": 0.5}
    assert app.app_id == "wattfleet/small-app"
    with pytest.raises(InvalidInputError, match="pass --rounds instead of num-server-rounds"):
        read_app(SMALL_APP, 7, "num-server-rounds=3")
    with pytest.raises(InvalidInputError, match="has no lr in .*; it has fails-from, leaks, learning-rate"):
        read_app(SMALL_APP, 7, "lr=0.5")


def test_an_app_whose_rounds_cannot_be_set_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SMALL_APP, tmp_path / "app")
    project = tmp_path / "app" / "pyproject.toml"
    project.write_text(project.read_text().replace("num-server-rounds = 3\n", ""))
    with pytest.raises(InvalidInputError, match="has no num-server-rounds .* --rounds .*: add it"):
        read_app(tmp_path / "app", 7, "")


@pytest.mark.parametrize("text", ["", "agx-orin:0", "agx-orin:x", "agx-orin:1,agx-orin:2", "no-board:3"])
def test_a_fleet_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        kinds_named(text)


def test_the_options_of_the_command_are_passed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(app_simulation, "simulate_app", lambda **options: given.update(options))
    command = ["--app", str(tmp_path), "--devices", "agx-orin:200,orin-nano:800", "--site-budget-w", "12kW"]
    result = CliRunner().invoke(commands.app, command)
    assert result.exit_code == 0, result.output
    assert (given["folder"], given["site_budget_w"]) == (tmp_path, 12_000.0)
    assert kinds_named(given["kinds"]) == {"agx-orin": 200, "orin-nano": 800}
    refused = CliRunner().invoke(commands.app, ["--app", str(tmp_path), "--duty", "resnet:1:500"])
    assert "takes no --duty" in str(refused.exception)
    refused = CliRunner().invoke(commands.app, ["--app", str(tmp_path), "--energy-budget", "20kJ"])
    assert "takes no --energy-budget" in str(refused.exception)
    assert "are no watts" in CliRunner().invoke(commands.app, ["--site-budget-w", "much"]).output


@pytest.mark.parametrize(
    "text", ["perceptron:16/32/64", "perceptron:32:2/4/8", "perceptron:16/32:2/4/8", "convolutional:16/32+perceptron:8"]
)
def test_a_network_with_several_sizes_is_no_folder(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(simulate, "run_simulation", lambda **options: given.update(options))
    result = CliRunner().invoke(commands.app, ["--app", text])
    assert result.exit_code == 0, result.exception
    assert given["apps"] == [apps_named(text)]


@pytest.mark.parametrize("text", ["./absent", "apps/absent", "."])
def test_a_path_is_a_folder(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(app_simulation, "simulate_app", lambda **options: given.update(options))
    assert CliRunner().invoke(commands.app, ["--app", text]).exit_code == 0
    assert given["folder"] == Path(text)


def test_the_metric_that_is_compared() -> None:
    assert accuracy_in({"accuracy": 0.5, "clientapp_eval_acc": 0.4}, None) == 0.5
    assert accuracy_in({"clientapp_eval_acc": 0.4, "test_acc": 0.3}, None) == 0.3
    assert accuracy_in({"loss": 1.0}, None) is None
    assert accuracy_in({"f1": 0.7, "accuracy": 0.5}, "f1") == 0.7


def test_settings_survive_their_file(settings: RunSettings) -> None:
    assert RunSettings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
