"""The operator's commands as a shell sees them, on a coordinator that is served over real gRPC."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import grpc
import pytest

from coordinator.cli.client import InvalidRequestError, RequestFailedError
from coordinator.settings import CoordinatorSettings
from tests.fakes.served import (
    READY,
    Agent,
    Client,
    a_round,
    asked,
    rack_and_roof,
    served_with_shell,
    serving_client,
    status,
)
from tests.fakes.small_fleet import NANO_FRONT, NANO_NODE, NODES, ORIN_FRONT, ORIN_NODE, RUN, RUN_NAME
from wattfleet.common.parsing import seconds
from wattfleet.core.errors import InvalidInputError, WattfleetError
from wattfleet.core.prediction import Artefact, write_artefact
from wattfleet_proto.convert import front_to_message
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import operator_pb2, planning_pb2, power_pb2, session_pb2


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
        await nano.send(
            front=session_pb2.FrontReport(front=front_to_message(NANO_FRONT), idle_w=999.0, minibatches_per_epoch=100)
        )
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
        assert shown.count("\n") == 15 + 4 + 2 + 4, "facts, workloads and the front"
        assert content["first_seen_unix_s"] <= content["last_seen_unix_s"] <= time.time()
        assert "no front yet" in (await shell("device", "orin-new")).stdout
        with pytest.raises(InvalidRequestError, match="unknown device 'none': it never connected"):
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
        with pytest.raises(InvalidRequestError, match="unknown supply 'attic'; known: site, rack, roof"):
            await shell("budget", "set", "attic", "5")
        for watts in ("0", "-5", "-.5", "nan"):
            with pytest.raises(InvalidRequestError, match="must be finite and above 0 W"):
                await shell("budget", "set", "rack", watts)
        with pytest.raises(InvalidRequestError, match="for up to 366 days, or until it is cleared, not for 400 days"):
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
        with pytest.raises(InvalidRequestError, match="nano has the tag lab from the site file"):
            await shell("tag", "nano", "--remove", "lab")
        with pytest.raises(InvalidRequestError, match="unknown device 'none': it never connected"):
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
        with pytest.raises(InvalidRequestError, match="publish it first"):
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


# --- Next plan --------------------------------------------------------------------------------------------------------
# The preview of the next plan, from a client and from a shell: it shows the plan and changes nothing.

RUN_AFTER = "4712"


async def back(client: Client, *device_ids: str) -> list[Agent]:
    """Reconnect devices that were ready before a restart; sessions last as long as the agents are referenced."""
    agents = [client.agent() for _ in device_ids]
    for agent, device_id in zip(agents, device_ids, strict=True):
        await agent.hello(device_id)
        await agent.lease()
        await agent.send(state=READY)
    return agents


async def test_a_look_at_the_next_plan_is_what_it_becomes_and_stores_nothing(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        looked = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())
        assert (looked.run_id, looked.round, looked.epochs, looked.all_devices) == (RUN, 1, 1.0, False)
        assert not (await client.rounds()).rounds
        planned = await client.plan()
        planned.plan_id = ""
        assert looked.plan == planned
        await client.planning.FinishRound(planning_pb2.FinishRoundRequest(plan_id=f"{RUN}/1", wall_s=1.0))
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=RUN_AFTER, strategy="FedAvg", rounds=1))
    async with serving_client(config) as client:
        _agents = await back(client, "orin", "nano")
        for run_id, code in (("none", grpc.StatusCode.NOT_FOUND), (RUN, grpc.StatusCode.INVALID_ARGUMENT)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest(run_id=run_id))
            assert status(refused)[0] is code
        assert status(refused)[1].startswith(f"run {RUN_NAME} has ended: ")
        assert (await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())).run_id == RUN_AFTER
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN_AFTER))
        looked = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())
        assert (looked.run_id, looked.round, looked.all_devices) == ("", 1, True)


async def test_right_after_a_restart_a_look_waits_for_the_fleet_as_the_plan_does(config: CoordinatorSettings) -> None:

    async with serving_client(config) as client:
        _agents = await client.two_ready()
        client.stop.set()  # while the sessions last
        await client.running
    async with serving_client(config) as client:
        _orin = await back(client, "orin")
        refusals = []
        for asking in (client.plan(), client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asking
            refusals.append((status(refused)[0], status(refused)[1].partition(";")[0]))
        assert refusals[0] == refusals[1]
        assert "waiting for devices to reconnect: 1 still missing" in refusals[0][1]
        _nano = await back(client, "nano")
        looked = await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())
        planned = await client.plan()
        assert looked.plan.assignments == planned.assignments and looked.plan.decisions == planned.decisions


async def test_a_look_at_the_next_plan_gives_every_reason(site: CoordinatorSettings) -> None:

    async with served_with_shell(site) as (client, shell):
        with pytest.raises(InvalidInputError, match="this command only previews a round"):
            await shell("plan")
        with pytest.raises(RequestFailedError, match="no device is ready to train: none ever connected"):
            await shell("plan", "--dry-run")
        _agents = await client.two_ready()
        await shell("drain", "orin")
        shown = " ".join((await shell("plan", "--dry-run", "--epochs", "2")).stdout.split())
        assert f"round 1 of run {RUN_NAME}, 2 epochs, if planned now: 1 of 2 devices selected" in shown
        assert "drained by the operator" in shown and "roof 40.0" in shown
        content = await asked(shell, "plan", "--dry-run", "--all-devices")
        nano, orin = content["devices"]
        assert (nano["selected"], nano["epoch_s"], orin["mode"]) == (True, 35.0, None)
        assert content["supplies"][1] == {"supply": "rack", "budget_w": 60.0, "planned_w": 5.0}
        assert not (await client.rounds()).rounds
        with pytest.raises(InvalidInputError, match="--epochs must be above 0 and finite"):
            await shell("plan", "--dry-run", "--epochs", "-1")
        with pytest.raises(InvalidInputError, match="unknown run 'x': it never started"):
            await shell("plan", "--dry-run", "--run", "x")
        await shell("budget", "set", "site", "9")
        with pytest.raises(InvalidRequestError, match="is not enough to train one device"):
            await shell("plan", "--dry-run")


async def test_a_look_names_devices_that_are_not_looked_at(config: CoordinatorSettings) -> None:

    async with served_with_shell(config) as (client, shell):
        agents = await client.two_ready()
        others = [client.agent() for _ in range(14)]
        for k, agent in enumerate(others):
            await agent.hello(f"new-{k:02}")
        _, _, said = (await shell("plan", "--dry-run")).stdout.partition("14 devices not considered\n")
        assert said.split()[:4] == ["new-00,", "new-01,", "new-02,", "new-03,"]
        assert "enrolled" in said.splitlines()[0] and "new-11 and 2 more" in " ".join(said.split())
        content = await asked(shell, "plan", "--dry-run")
        assert content["not_looked_at"] == [{"device_id": f"new-{k:02}", "reason": "enrolled"} for k in range(14)]
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN))
        assert "round 1 of a new run, 1 epoch" in (await shell("plan", "--dry-run")).stdout
        with pytest.raises(InvalidRequestError, match=f"run {RUN_NAME} has ended"):
            await shell("plan", "--dry-run", "--run", RUN)
        for agent in (*agents, *others):
            await agent.goodbye()


async def test_in_the_middle_of_a_round_the_one_after_it_is_previewed(site: CoordinatorSettings) -> None:
    async with served_with_shell(site) as (client, shell):
        agents = await client.two_ready()
        plan = await client.plan(1)
        before = await client.devices()
        for agent in agents:
            await agent.lease(GrantPhase.TRAINING, await agent.grant())
            await agent.send(state=session_pb2.StateReport(state=session_pb2.DEVICE_STATE_TRAINING, profiled_modes=50))
        with pytest.raises(grpc.aio.AioRpcError, match="no device is ready to train"):
            await client.plan(2)
        content = await asked(shell, "plan", "--dry-run")
        assert (content["round"], content["assumed_ended"]) == (2, [plan.plan_id])
        assert {each["device_id"]: each["selected"] for each in content["devices"]} == {"orin": True, "nano": True}
        shown = " ".join((await shell("plan", "--dry-run", columns=120)).stdout.split())
        assert f"assuming that round 1 of run {RUN_NAME}, which is in flight, has ended" in shown
        assert {each: view.state for each, view in before.items()} != {
            each: view.state for each, view in (await client.devices()).items()
        }, "they train, as before the preview"
        new_run = await asked(shell, "plan", "--dry-run", "--workload", "unnamed")
        assert (new_run["run_id"], new_run["round"], new_run["assumed_ended"]) == (None, 1, [plan.plan_id])


async def test_a_newer_run_that_has_ended_does_not_hide_the_one_that_goes_on(config: CoordinatorSettings) -> None:
    async with serving_client(config) as client:
        _agents = await client.two_ready()
        await client.planning.StartRun(planning_pb2.StartRunRequest(run_id=RUN_AFTER, strategy="FedAvg", rounds=1))
        await client.planning.FinishRun(planning_pb2.FinishRunRequest(run_id=RUN_AFTER))
        assert (await client.operator.PreviewPlan(operator_pb2.PreviewPlanRequest())).run_id == RUN


async def test_any_supply_can_be_assumed_to_have_other_watts(site: CoordinatorSettings) -> None:
    async with served_with_shell(site) as (client, shell):
        _agents = await client.two_ready()
        usual = {each["supply"]: each for each in (await asked(shell, "plan", "--dry-run"))["supplies"]}
        options = ("--budget", "rack=25", "--budget", "roof=13.5")
        assumed = {each["supply"]: each for each in (await asked(shell, "plan", "--dry-run", *options))["supplies"]}
        assert {name: each["budget_w"] for name, each in assumed.items()} == {"site": 100.0, "rack": 25.0, "roof": 13.5}
        assert assumed["rack"]["planned_w"] <= 25 < usual["rack"]["planned_w"]
        assert assumed["roof"]["planned_w"] <= 13.5 < usual["roof"]["planned_w"]
        assert {each["supply"]: each["watts"] for each in await asked(shell, "budget", "show")} == {
            each: usual[each]["budget_w"] for each in usual
        }, "no budget has changed"
        for option, said in (
            ("attic=5", "unknown supply 'attic': use one of site, rack, roof"),
            ("rack=0", "the assumed budget of rack must be finite and above 0 W, not 0"),
            ("rack", "--budget is written as SUPPLY=WATTS, such as site=60, not 'rack'"),
            ("rack=many", "--budget is written as SUPPLY=WATTS, such as site=60, not 'rack=many'"),
        ):
            with pytest.raises(InvalidInputError, match=said):
                await shell("plan", "--dry-run", "--budget", option)


# --- Narrow terminals -------------------------------------------------------------------------------------------------
# Every table of the operator's commands with long names, in terminals of 80 and 60 columns.

ORIN, NANO = "jetson-agx-orin-developer-kit-in-rack-12", "jetson-orin-nano-super-on-the-laboratory-desk"
RUN_OF_20_DIGITS = "10442098795564059557"
WORKLOAD = "wattfleet/quickstart-sklearn #d276a4d4"
SUPPLY = "circuit-breaker-17-of-the-laboratory"
SITE = f"""
[supplies.site]
budget = {{ watts = 100.0 }}
[supplies.{SUPPLY}]
parent = "site"
budget = {{ watts = 90.0 }}
devices = ["jetson*"]
[devices.{NANO}]
tags = ["desk-of-the-laboratory"]
"""


async def a_trained_round(client: Client) -> None:
    """A round of two devices with long names, of which one reports what it drew."""
    for device_id, front, idle_w in ((ORIN, ORIN_FRONT, 5.0), (NANO, NANO_FRONT, 3.0)):
        await client.agent().become_ready(device_id, front, idle_w, WORKLOAD)
    bindings = [
        planning_pb2.NodeBinding(node_id=node, device_id=name) for node, name in ((ORIN_NODE, ORIN), (NANO_NODE, NANO))
    ]
    await client.planning.BindNodes(planning_pb2.BindNodesRequest(bindings=bindings))
    start = planning_pb2.StartRunRequest(
        run_id=RUN_OF_20_DIGITS, strategy="FedAvg", rounds=3, workload=power_pb2.Workload(name=WORKLOAD)
    )
    await client.planning.StartRun(start)
    plan = await client.planning.PlanRound(
        planning_pb2.PlanRoundRequest(run_id=RUN_OF_20_DIGITS, round=1, node_ids=NODES, epochs=1.0)
    )
    orin = client.agents[0]
    await orin.obey(GrantPhase.OVER)
    await orin.send(observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.5, power_w=31.25))
    results = [planning_pb2.DeviceResult(device_id=name, num_examples=96, share=1.0) for name in (ORIN, NANO)]
    finish = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=41.5, results=results)
    await client.planning.FinishRound(finish)
    await client.end_trainings()
    metrics = {f"clientapp_evaluation_{name}": 0.5 for name in ("accuracy", "loss", "f1", "recall", "precision")}
    await client.planning.ReportMetrics(
        planning_pb2.ReportMetricsRequest(run_id=RUN_OF_20_DIGITS, round=1, metrics=metrics)
    )


TABLES = {
    ("devices",): [ORIN, NANO, "parked"],
    ("device", ORIN): [ORIN, "of 7 modes"],
    ("runs",): ["run-", WORKLOAD],
    ("rounds",): [RUN_OF_20_DIGITS, WORKLOAD, "100.0"],
    ("round", RUN_OF_20_DIGITS, "1"): [ORIN, NANO, "20.5 s"],
    ("plan", "--dry-run"): [ORIN, NANO],
    ("nodes",): [ORIN, NANO, "not checked"],
    ("workloads",): [WORKLOAD],
    ("budget", "show"): ["site", SUPPLY, "90.0"],
    ("reference", "list"): ["in force"],
}
"""A command, and words that its table has to show in any terminal."""


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("columns", [60, 80])
async def test_every_table_with_long_names_fits_and_names_what_it_leaves_out(
    config: CoordinatorSettings, tmp_path: Path, columns: int, part: int
) -> None:
    (tmp_path / "site.toml").write_text(SITE)
    site = {"budget_w": None, "file": tmp_path / "site.toml"}
    async with served_with_shell(config.with_values(site=site)) as (client, shell):
        await a_trained_round(client)
        for words, names in list(TABLES.items())[part::2]:
            printed = (await shell(*words, columns=columns)).stdout  # which checks the width, and that nothing is cut
            # A name may go over several lines, between which other columns are printed.
            letters = "".join(printed.split())
            for name in names:
                rest = iter(letters)
                assert all(letter in rest for letter in name.replace(" ", "")), f"{words}: {name} in\n{printed}"
            # A text keeps enough room to be read: the reported table had four letters in a line.
            alone = [line for line in printed.splitlines() if line.startswith(" " * 40) and len(line.split()) == 1]
            assert len(alone) < 6, printed
