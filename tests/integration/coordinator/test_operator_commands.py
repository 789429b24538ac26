"""The operator's commands as a shell sees them, on a coordinator that is served over real gRPC."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest

from coordinator.cli.client import RequestRefusedError
from coordinator.cli.plan import seconds
from coordinator.settings import CoordinatorSettings
from tests.fakes.shell import a_round, asked, rack_and_roof, served_with_shell
from tests.fakes.small_fleet import NANO_FRONT, RUN, RUN_NAME
from wattfleet.errors import InvalidInputError, WattfleetError
from wattfleet.prediction import Artefact, write_artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.v1 import planning_pb2, session_pb2


@pytest.fixture
def site(config: CoordinatorSettings, tmp_path: Path) -> CoordinatorSettings:
    return config.with_values(site=rack_and_roof(tmp_path))


# --- devices ------------------------------------------------------------------------------------------------------


async def test_devices_are_shown_and_can_be_picked_out(site: CoordinatorSettings) -> None:

    async with served_with_shell(site) as (client, shell):
        assert (await shell("devices")).stdout.startswith("no devices yet: enrol a board with")
        assert (await shell("devices", "--tag", "lab")).stdout.startswith("no device has this state and tag")
        assert await asked(shell, "devices") == []
        _, nano = await client.two_ready()
        await client.agent().hello("orin-new")
        await shell("drain", "nano")
        shown = (await shell("devices")).stdout
        assert [line.split()[:3] + line.split()[5:8] for line in shown.splitlines()[1:4]] == [
            ["orin-new", "agx-orin", "enrolled", "0", "-", "-"],
            ["nano", "agx-orin", "ready", "50", "3.0", "35.0"],
            ["drained"],
        ]
        assert "3 devices: 1 enrolled, 2 ready; 1 drained" in shown
        assert {each["device_id"] for each in await asked(shell, "devices", "--state", "ready")} == {"orin", "nano"}
        assert [each["device_id"] for each in await asked(shell, "devices", "--tag", "lab")] == ["nano"]
        listed = {each["device_id"]: each["last_seen_unix_s"] for each in await asked(shell, "devices")}
        assert listed["nano"] == (await asked(shell, "device", "nano"))["last_seen_unix_s"] is not None
        [new] = await asked(shell, "devices", "--state", "enrolled")
        assert (new["idle_w"], new["fastest_epoch_s"], new["supply"]) == (None, None, "rack")
        with pytest.raises(InvalidInputError, match="unknown state 'flying'"):
            await shell("devices", "--state", "flying")
        await nano.goodbye()
        assert [each["device_id"] for each in await asked(shell, "devices", "--state", "offline")] == ["nano"]


async def test_nodes_are_shown_outside_a_run_with_what_to_mend(site: CoordinatorSettings) -> None:
    problem = "no agent listens at /run/wattfleet/agent.sock: start it"
    async with served_with_shell(site) as (client, shell):
        assert "Nodes are queried before its first plan" in (await shell("nodes")).stdout
        await client.two_ready()
        bindings = [
            planning_pb2.NodeBinding(node_id=1, device_id="orin", pairing_problem=""),
            planning_pb2.NodeBinding(node_id=2, device_id="nano", pairing_problem=problem),
            planning_pb2.NodeBinding(node_id=3, device_id="ghost", pairing_problem=""),
        ]
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
        # A SuperNode that was there for a moment, under another number.
        gone = planning_pb2.NodeBinding(node_id=4, device_id="orin", pairing_problem="")
        await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=[gone]))
        # Of the earlier nodes, only these are connected.
        await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=[1, 2, 3]))
        nodes = {each["node_id"]: each for each in await asked(shell, "nodes")}
        assert {number: each["status"] for number, each in nodes.items()} == {
            1: "paired",
            2: "cannot train",
            3: "unknown device",
        }
        assert (nodes[2]["remedy"], nodes[2]["device_state"]) == (problem, "ready")
        assert len(await asked(shell, "nodes", "--all")) == 6
        shown = (await shell("nodes", columns=200)).stdout
        assert "3 nodes: 2 to fix" in shown and f"nano: {problem}" in shown
        known = await client.planning.ResolveNodes(planning_pb2.ResolveNodesRequest(node_ids=[2]))
        assert known.bindings[0].pairing_problem == problem
    async with served_with_shell(site) as (_, shell):
        kept = {each["node_id"]: each["pairing_problem"] for each in await asked(shell, "nodes", "--all")}
        assert (kept[1], kept[2]) == ("", problem), "a restart forgets nothing"


async def test_a_device_that_is_left_out_is_shown_with_the_reason(site: CoordinatorSettings) -> None:
    async with served_with_shell(site) as (client, shell):
        _, nano = await client.two_ready()
        await nano.send(front=session_pb2.FrontReport(front=front_to_message(NANO_FRONT), idle_w=999.0))
        [shown] = [each for each in await asked(shell, "devices") if each["device_id"] == "nano"]
        assert "999 W as its idle power" in shown["left_out"]
        assert (shown["state"], shown["idle_w"], shown["trust"]) == ("ready", 3.0, None)
        text = (await shell("devices")).stdout
        assert "left out" in text and "2 devices: 2 ready; 1 left out because of their reports" in text
        assert "left out: nano reports 999 W" in " ".join((await shell("device", "nano")).stdout.split())


async def test_a_device_is_shown_with_its_front(site: CoordinatorSettings) -> None:

    async with served_with_shell(site) as (client, shell):
        _agents = await client.two_ready()
        await client.agent().hello("orin-new")
        await shell("tag", "nano", "--add", "old")
        content = await asked(shell, "device", "nano")
        assert [point["epoch_s"] for point in content["front"]] == [35.0, 60.0]
        assert content["front"][0]["mode"].keys() == {"cores", "cpu_khz", "gpu_hz", "mem_hz"}
        assert (content["limit_w"], content["tags"], content["operator_tags"]) == (20.0, ["lab", "old"], ["old"])
        shown = (await shell("device", "nano")).stdout
        for line in ("state ready: parked", "own limit 20 W", "tags lab, old (by command)"):
            assert line in [" ".join(each.split()) for each in shown.splitlines()]
        assert shown.count("\n") == 15 + 2 + 4
        assert content["first_seen_unix_s"] <= content["last_seen_unix_s"] <= time.time()
        assert "no front yet" in (await shell("device", "orin-new")).stdout
        with pytest.raises(RequestRefusedError, match="unknown device 'none': it never connected"):
            await shell("device", "none")


async def test_names_of_devices_are_no_markup(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        await client.agent().hello("[red]orin[/]")
        assert "[red]orin[/]" in (await shell("devices")).stdout
        assert "[red]orin[/]" in (await shell("device", "[red]orin[/]")).stdout
        assert "[red]orin[/]" in (await shell("tag", "[red]orin[/]", "--add", "a")).stdout


# --- rounds -------------------------------------------------------------------------------------------------------


async def test_rounds_are_shown_as_planned_and_as_observed(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        assert (await shell("rounds")).stdout.startswith("no runs yet: start a Flower app")
        orin, nano = await client.two_ready()
        assert "no rounds yet" in (await shell("rounds")).stdout
        plan = await a_round(client, orin)
        await nano.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=36.5, power_w=14.75))
        await client.plan(2)
        title, _, head, first, second, more, total = (await shell("rounds", columns=90)).stdout.splitlines()
        assert total == "energy: 1.2 kJ for 2 of 4 trainings"
        assert title == f"run {RUN_NAME} ({RUN}): FedAvg, workload unnamed, 3 rounds requested, running"
        assert head.split()[-3:] == ["accuracy", "f1", "loss"]
        assert more == "no room for recall: widen the terminal, or use --json"
        row = first.split()
        assert row[:7] == ["1", "1", "of", "2", "100.0", f"{plan.planned_w:.1f}", "46.0"]
        assert row[7:] == [f"{plan.duration_s:.1f}", "s", "36.5", "s", "1.2", "kJ", "0.667", "0.500", "1.500"]
        assert second.split()[-5:] == ["running", "-", "-", "-", "-"]
        content = await asked(shell, "rounds", "--run", RUN)
        assert content["rounds"][0]["failed"] == ["nano"]
        assert content["rounds"][0]["metrics"] == {"accuracy": 2 / 3, "f1": 0.5, "loss": 1.5, "recall": 0.25}
        assert content["rounds"][1]["observed_s"] is None
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN, error="ValueError: [no]"))
        assert (await shell("rounds")).stdout.splitlines()[1].strip() == "ValueError: [no]"
        with pytest.raises(
            InvalidInputError,
            match=f"unknown run 'x': it never started, or was deleted; the newest runs are {RUN_NAME}",
        ):
            await shell("rounds", "--run", "x")
        brief = (await shell("rounds", columns=60)).stdout.splitlines()
        assert brief[4].split()[-1] == "taken"
        assert "no room for energy, accuracy, f1, loss, recall: " in " ".join(brief)


async def test_what_clients_evaluated_is_shown_after_what_the_server_did(config: CoordinatorSettings) -> None:
    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        request = planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics={"clientapp_accuracy": 0.625})
        await client.planning.ReportMetrics(request)
        _, _, head, _, more, unobserved, total = (await shell("rounds", columns=90)).stdout.splitlines()
        assert total == "energy: 641 J for 1 of 2 trainings; *: not all trainings were observed"
        assert head.split()[-3:] == ["accuracy", "f1", "loss"]
        assert more == "no room for recall, clientapp_accuracy: widen the terminal, or use --json"
        assert unobserved.startswith("round 1 not observed: devices measured other modes, ")
        assert "clientapp_accuracy 0.625" in " ".join((await shell("round", RUN, "1", columns=140)).stdout.split())


async def test_what_is_no_number_is_null_in_json(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        orin, _ = await client.two_ready()
        await a_round(client, orin)
        request = planning_pb2.ReportMetricsRequest(run_id=RUN, round=1, metrics={"loss": math.nan, "f1": math.inf})
        await client.planning.ReportMetrics(request)
        printed = (await shell("rounds", "--json")).stdout
        assert json.loads(printed, parse_constant=pytest.fail)["rounds"][0]["metrics"] == {
            "accuracy": 2 / 3,
            "f1": None,
            "loss": None,
            "recall": 0.25,
        }
        assert " nan\n" in (await shell("rounds", columns=90)).stdout


async def test_a_round_that_was_trimmed_is_shown_as_it_was_planned_and_what_became_of_it(
    config: CoordinatorSettings,
) -> None:

    async with served_with_shell(config) as (client, shell):
        _agents = await client.two_ready()
        plan = await client.plan()
        said = (await shell("budget", "set", "site", "20")).stdout.splitlines()
        assert said == [
            "site: 20 W in force (operator)",
            "1 round in flight trimmed",
            "1 device ordered to draw less",
            "45 W are still set aside until devices confirm, or their grants lapse",
        ]
        await client.obey()
        assert [line.split()[2] for line in (await shell("budget", "show")).stdout.splitlines()[2:3]] == ["20.0"]
        row, trimmed = (await shell("rounds")).stdout.splitlines()[3:5]
        assert row.split()[:5] == ["1", "2", "100.0", f"{plan.planned_w:.1f}", "-"]
        assert trimmed == "round 1 trimmed to 20.0 of 20.0 W: 1 device stopped"
        said = (await shell("budget", "set", "site", "7")).stdout.splitlines()
        assert said[1:] == [
            "1 round in flight trimmed",
            "1 device ordered to draw less",
            "20 W are still set aside until devices confirm, or their grants lapse",
        ]
        await client.obey()
        said = (await shell("budget", "set", "site", "7")).stdout.splitlines()
        assert said[1:] == [
            "8 W are still set aside for idle and offline devices",
        ]
        [content] = (await asked(shell, "rounds"))["rounds"]
        assert (content["devices"], content["site_budget_w"], content["planned_w"]) == (2, 100.0, plan.planned_w)
        assert (content["trimmed_site_budget_w"], content["trimmed_planned_w"], content["stopped"]) == (7.0, 8.0, 2)


# --- budgets ------------------------------------------------------------------------------------------------------


async def test_budgets_are_shown_as_a_tree_and_can_be_overridden(site: CoordinatorSettings) -> None:

    async with served_with_shell(site) as (client, shell):
        _agents = await client.two_ready()
        shown = (await shell("budget", "show")).stdout.splitlines()
        assert [line.split()[:6] for line in shown[1:5]] == [
            ["supply", "force", "aside", "drawn", "devices", "source"],
            ["site", "100.0", "8.0", "8.0", "2", "constant"],
            ["rack", "60.0", "5.0", "5.0", "1", "fallback"],
            ["roof", "40.0", "3.0", "3.0", "1", "constant"],
        ]
        assert shown[5].startswith("rack: fallback of its query in force: no reading yet: ")
        rack = (await asked(shell, "budget", "show"))[1]
        assert (rack["watts"], rack["source"], rack["fallback"], rack["set_aside_w"]) == (60.0, "query", True, 5.0)
        assert rack["reason"].startswith("no reading yet: ")
        said = (await shell("budget", "set", "rack", "50", "--for", "1h30m")).stdout
        assert said.startswith("rack: 50 W in force (operator, until ")
        rack = (await asked(shell, "budget", "show"))[1]
        assert rack["until"] is not None and rack["reason"] == "set by the operator"
        await client.plan()
        assert "1 round in flight trimmed\n" in (await shell("budget", "set", "site", "40", columns=100)).stdout
        await client.obey()
        assert (await shell("budget", "set", "site", "40")).stdout == "site: 40 W in force (operator)\n"
        assert (await shell("budget", "clear", "rack")).stdout == "rack: 60 W in force (query)\n"
        with pytest.raises(RequestRefusedError, match="unknown supply 'attic'; known: site, rack, roof"):
            await shell("budget", "set", "attic", "5")
        for watts in ("0", "-5", "-.5", "nan"):
            with pytest.raises(RequestRefusedError, match="must be finite and above 0 W"):
                await shell("budget", "set", "rack", watts)
        with pytest.raises(RequestRefusedError, match="for up to 366 days, or until it is cleared, not for 400 days"):
            await shell("budget", "set", "rack", "5", "--for", "400d")
        assert (await shell("budget", "set", "rack", "1e7")).stdout == "rack: 10,000,000 W in force (operator)\n"
        assert "rack: 55.1 W in force" in (await shell("budget", "set", "rack", "55.1235", "--for", "23h")).stdout
        for columns in (80, 60):
            shown = (await shell("budget", "show", columns=columns)).stdout
            assert "\nrack: set by the operator\n" in shown and "…" not in shown


@pytest.mark.parametrize(
    ("span", "expected"), [("90s", 90), ("45m", 2700), ("2h", 7200), ("1.5h", 5400), ("1h30m", 5400), ("1d", 86400)]
)
def test_spans_of_time_as_people_write_them(span: str, expected: float) -> None:
    assert seconds(span) == expected


@pytest.mark.parametrize("span", ["", "2", "h", "-2h", "2 h", "2h!", "0s", "ever", "nan"])
def test_what_is_no_span_of_time_is_refused(span: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a duration: write 90s"):
        seconds(span)


# --- participation of devices -------------------------------------------------------------------------------------


async def test_devices_are_tagged_and_drained(site: CoordinatorSettings) -> None:

    async with served_with_shell(site) as (client, shell):
        _agents = await client.two_ready()
        assert (await shell("tag", "orin", "nano", "--add", "b", "--add", "a")).stdout == "orin: a b\nnano: a b\n"
        assert await asked(shell, "tag", "orin", "--remove", "a") == [
            {"device_id": "orin", "operator_tags": ["b"], "drained": False}
        ]
        assert (await shell("tag", "orin", "--remove", "b")).stdout == "orin: no tags from this command\n"
        assert (await shell("drain", "orin")).stdout == "orin: drained\n"
        assert (await shell("drain", "orin", "--undo")).stdout == "orin: can be selected again\n"
        with pytest.raises(InvalidInputError, match="pass at least one of --add, --remove"):
            await shell("tag", "orin")
        with pytest.raises(RequestRefusedError, match="nano has the tag lab from the site file"):
            await shell("tag", "nano", "--remove", "lab")
        with pytest.raises(RequestRefusedError, match="unknown device 'none': it never connected"):
            await shell("drain", "none")


# --- references ---------------------------------------------------------------------------------------------------


async def test_a_reference_is_published_pinned_and_unpinned(
    config: CoordinatorSettings, artefact: Artefact, another: Artefact, tmp_path: Path
) -> None:
    write_artefact(another, tmp_path / "new")

    async with served_with_shell(config) as (client, shell):
        await client.agent().hello("orin")
        assert f"{another.digest} is published" in (await shell("reference", "publish", str(tmp_path / "new"))).stdout
        assert await asked(shell, "reference", "publish", str(tmp_path / "new")) == {
            "digest": another.digest,
            "known": True,
        }
        assert (await shell("reference", "pin", another.digest[:12])).stdout.splitlines() == [
            f"agents transfer from {another.digest[:12]}",
            "1 agent reconnects to fetch it",
        ]
        _, *lines, start = (await shell("reference", "list")).stdout.splitlines()
        assert {line.split()[0]: line.rstrip().split("  ")[-1].strip() for line in lines} == {
            artefact.digest[:12]: "published",
            another.digest[:12]: "in force, pinned",
        }
        assert start == f"{artefact.digest[:12]} comes from `serve --reference`"
        assert (await asked(shell, "reference", "unpin"))["digests"] == [artefact.digest]
        removed = await shell("reference", "remove", another.digest[:12])
        assert removed.stdout == f"{another.digest} is removed\n"
        assert [each["digest"] for each in await asked(shell, "reference", "list")] == [artefact.digest]
        weights = bytearray(another.weights)
        weights[-1] ^= 1
        (tmp_path / "new" / "weights.safetensors").write_bytes(weights)
        with pytest.raises(WattfleetError, match="has the SHA-256") as refused:
            await shell("reference", "publish", str(tmp_path / "new"))
        assert refused.value.caller_must_correct
        with pytest.raises(RequestRefusedError, match="publish it first"):
            await shell("reference", "pin", "0" * 12)
        with pytest.raises(InvalidInputError, match="the digest is empty"):
            await shell("reference", "pin", "")
        content = json.loads(another.manifest)
        content["provenance"]["note"] = "x" * 1_500_000
        (tmp_path / "new" / "weights.safetensors").write_bytes(another.weights)
        (tmp_path / "new" / "manifest.json").write_text(json.dumps(content))
        with pytest.raises(InvalidInputError, match=r"manifest.json has 1,50\d,\d{3} bytes; the limit is 102,400"):
            await shell("reference", "publish", str(tmp_path / "new"))


# --- events -------------------------------------------------------------------------------------------------------


async def test_events_are_listed_with_their_date_and_picked_out(site: CoordinatorSettings) -> None:
    async with served_with_shell(site) as (client, shell):
        _agents = await client.two_ready()
        await shell("budget", "set", "roof", "30")
        await shell("budget", "clear", "roof")
        lines = (await shell("events", "--supply", "roof", "--kind", "budget", columns=160)).stdout.splitlines()
        assert [line.split()[2:] for line in lines[1:]] == [
            words.split()
            for words in (
                "budget roof from 40 W to 30 W, set by the operator (by unauthenticated on loopback)",
                "budget roof from 30 W to 40 W: the override was cleared (constant) (by unauthenticated on loopback)",
            )
        ]
        assert lines[1].startswith(time.strftime("%Y-%m-%d "))
        [enrolled] = await asked(shell, "events", "--device", "nano")
        assert (enrolled["kind"], enrolled["supply"], enrolled["needs_attention"]) == ("device", "roof", False)
        assert enrolled["text"] == "connected for the first time: agx-orin"
        [began] = await asked(shell, "events", "--run", RUN_NAME)
        assert (began["run_id"], began["subject"]) == (RUN, RUN_NAME)
        behind = {each["supply"] for each in await asked(shell, "events", "--supply", "site")}
        assert behind == {"rack", "roof"}, "supplies and devices behind the site"
        newest = await asked(shell, "events", "--limit", "1")
        assert [each["text"] for each in newest] == ["from 30 W to 40 W: the override was cleared (constant)"]
        assert await asked(shell, "events", "--kind", "round") == []
        assert (await shell("events", "--kind", "round")).stdout.startswith("nothing has happened that is an event")
        for options, said in (
            (("--kind", "party"), "unknown kind of event 'party': use device, run, round, budget, coordinator"),
            (("--supply", "attic"), "unknown supply 'attic': use one of site, rack, roof"),
            (("--since", "yesterday"), "'yesterday' is not a duration"),
        ):
            with pytest.raises(InvalidInputError, match=said):
                await shell("events", *options)
    async with served_with_shell(site) as (_, shell):
        assert [each["text"] for each in await asked(shell, "events", "--device", "nano")][0] == enrolled["text"]
        started = await asked(shell, "events", "--kind", "coordinator")
        assert [each["text"].split(",")[0] for each in started] == ["started", "started"]
