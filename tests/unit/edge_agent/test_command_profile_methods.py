"""`wattfleet agent profile --method ...`: what each method measures, and that the journal records the method."""

import json
import os
import signal

import pytest

from edge_agent.devices.selection import open_virtual_board
from edge_agent.profiling.stored_profile import read_predictor
from tests.fakes.stored_workloads import only_workload
from tests.fixtures.edge_agent import PROFILED
from wattfleet.modes import BOARDS, write_profile
from wattfleet.modes import Profile as Rows
from wattfleet.prediction import RooflinePredictor, restore_predictor

NANO = BOARDS["orin-nano"].space


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def small(tmp_path):
    """A replayed board with 12 modes, which brute force can measure in minutes."""
    modes = NANO.array()[[row for row in range(len(NANO)) if row % 150 == 149]]
    work = modes.prod(axis=1) ** 0.25
    path = tmp_path / "small.csv"
    write_profile(Rows(modes, 4e8 / work, 6e3 + work / 1e3), path)
    return f"replay:{path}"


@pytest.fixture
def profile(agent, state):
    return lambda *arguments, device=PROFILED: agent(
        "profile", "--device", device, "--state-dir", state, "--device-id", "jetson-1", *arguments
    )


def journalled(state):
    return [json.loads(line) for line in (only_workload(state) / "profile.jsonl").read_text().splitlines()[1:]]


def measured(state):
    return [tuple(line["mode"]) for line in journalled(state) if "kind" not in line]


def methods(state):
    return [line["method"] for line in journalled(state) if line.get("kind") == "method"]


def test_transfer_is_the_default_and_needs_no_record(profile, agent, state):
    profile("--modes", 6)
    named = profile("--modes", 7, "--method", "transfer", "--tolerance", 0, "--json").content
    assert methods(state) == [] and named["method"] == "transfer" and len(named["modes"]) == 7
    status = agent("status", "--device", PROFILED, "--state-dir", state, "--json").content
    assert status["workloads"]["built-in"]["profile"]["method"] == "transfer"


def test_scratch_fits_without_a_reference(profile, agent, state):
    ended = profile("--method", "scratch", "--modes", 8, "--tolerance", 0, "--json")
    assert ended.code == 0, ended.err
    assert methods(state) == ["scratch"] and len(measured(state)) == 8
    stored = read_predictor(only_workload(state))
    assert stored.details.provenance["reference"] == "none"
    again = agent("fit", "--device", PROFILED, "--state-dir", state, "--json")
    assert again.code == 0 and again.content["predictor"]["digest"] == stored.digest
    assert isinstance(restore_predictor(stored), RooflinePredictor)


def test_scratch_does_not_depend_on_the_reference(profile, agent, state, tmp_path):
    profile("--method", "scratch", "--modes", 8, "--tolerance", 0)
    first = measured(state)
    from_reference = tmp_path / "other"
    agent(
        *("profile", "--device", PROFILED, "--state-dir", from_reference, "--device-id", "jetson-1"),
        *("--modes", 8, "--tolerance", 0),
    )
    assert first[:5] == measured(from_reference)[:5], "both begin with modes that are spread over the space"
    assert first[5:] != measured(from_reference)[5:]


def test_binary_search_ends_by_itself_near_each_budget(profile, agent, state):
    ended = profile("--method", "binary-search", "--budget-w", 10, "--budget-w", 13)
    assert ended.code == 0, ended.err
    assert methods(state) == ["binary-search"]
    assert len(measured(state)) <= 2 * 15
    assert "all searches have ended" in " ".join(ended.out.split())
    for budget in (10, 13):
        within = [line["power_mw"] for line in journalled(state) if line.get("power_mw", 1e9) <= budget * 1e3]
        assert 0.85 * budget * 1e3 <= max(within)
        assert agent("choose", "--budget-w", budget, "--device", PROFILED, "--state-dir", state).code == 0


def test_brute_force_measures_every_mode_once(profile, state, small):
    ended = profile("--method", "brute-force", "--json", device=small)
    assert ended.code == 0, ended.err
    assert methods(state) == ["brute-force"]
    assert len(set(measured(state))) == len(measured(state)) == ended.content["at_most"] == 12


def test_a_brute_force_of_many_hours_has_to_be_confirmed(profile, state):
    ended = profile("--method", "brute-force")
    assert ended.code == 2 and not (state / "workloads").exists()
    assert "brute force measures 1,800 modes, which takes about " in ended.err and " h: pass --yes" in ended.err


@pytest.fixture
def board(as_device):
    """A simulated board that keeps its state between commands."""
    device = open_virtual_board(PROFILED, seed=0)
    as_device(device)
    return device


def stopped(device, at_mode):
    """Send an interrupt during the measurement of mode number `at_mode`, counted from 1."""
    applied, real_apply, real_step = [], device.apply, device.step

    def apply(mode):
        applied.append(mode)
        real_apply(mode)

    def step():
        real_step()
        if len(applied) == at_mode:
            os.kill(os.getpid(), signal.SIGINT)

    device.apply, device.step = apply, step
    return applied


@pytest.mark.parametrize(
    "arguments", [("scratch", "--modes", 7, "--tolerance", 0), ("binary-search", "--budget-w", 10)]
)
def test_an_interrupted_method_continues_where_it_stopped(profile, agent, state, tmp_path, board, arguments):
    whole = tmp_path / "whole"
    agent(*("profile", "--device", PROFILED, "--state-dir", whole, "--device-id", "jetson-1", "--method", *arguments))
    applied = stopped(board, at_mode=4)
    assert profile("--method", *arguments).code == 130
    first = measured(state)
    assert len(first) == 3
    applied[:] = [None] * 4
    assert profile("--method", *arguments).code == 0
    assert measured(state)[:3] == first and len(set(measured(state))) == len(measured(state))
    assert methods(state) == [arguments[0]]
    assert len(measured(state)) == pytest.approx(len(measured(whole)), abs=2)


def test_a_journal_names_each_method_that_added_modes(profile, state):
    profile("--modes", 5)
    profile("--method", "binary-search", "--budget-w", 10)
    profile("--method", "transfer", "--modes", 24, "--tolerance", 0)
    kinds = [line.get("method", "mode") for line in journalled(state)]
    assert kinds[:6] == ["mode"] * 5 + ["binary-search"]
    assert methods(state) == ["binary-search", "transfer"]


def test_auto_takes_the_advice_and_says_why(profile):
    short = profile("--method", "auto", "--training-hours", 0.1, "--workload-changes", "often", "--json")
    assert short.code == 0, short.err
    assert short.content["method"] == "transfer" and len(short.content["modes"]) == 5
    assert "auto: transfer with 5 modes takes the least time in all" in short.err
    assert short.content["reason"].startswith("transfer with 5 modes")


def test_auto_lets_every_search_end_as_binary_search_does(profile, agent, tmp_path):
    board, searches = "simulated:xavier-agx", ("--budget-w", 12, "--budget-w", 20)
    found = profile("--method", "auto", "--training-hours", 0.003, *searches, "--json", device=board).content
    assert found["method"] == "binary-search"
    place = ("--device", board, "--state-dir", tmp_path / "other", "--device-id", "jetson-1")
    alone = agent("profile", *place, "--method", "binary-search", *searches, "--json").content
    assert [row["argument"] for row in found["modes"]] == [row["argument"] for row in alone["modes"]]


def test_auto_measures_a_small_board_as_a_whole(profile, state, small):
    ended = profile("--method", "auto", "--training-hours", 5000, "--workload-changes", "never", "--json", device=small)
    assert ended.code == 0, ended.err
    assert ended.content["method"] == "brute-force" and len(measured(state)) == 12


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--method", "auto"), "--method auto needs --training-hours"),
        (("--method", "binary-search"), "needs a budget: pass --budget-w once for each budget"),
        (("--method", "binary-search", "--budget-w", "nan"), "--budget-w must be finite and above 0 W"),
        (("--method", "binary-search", "--budget-w", 0), "--budget-w must be finite and above 0 W"),
        (("--budget-w", 10), "--budget-w applies only to --method auto and binary-search; omit it"),
        (("--training-hours", 3), "--training-hours applies only to --method auto; omit it"),
        (("--workload-changes", "often"), "--workload-changes applies only to --method auto; omit it"),
        (("--method", "brute-force", "--modes", 9), "--modes applies only to"),
        (("--method", "scratch", "--modes", 4), "--method scratch needs --modes 5 or more, not 4"),
        (("--method", "luck"), "'luck' is not one of"),
        (("--method", "auto", "--training-hours", -1), "hours of training must be finite and above 0, not -1"),
    ],
)
def test_bad_input_is_answered_with_what_to_do(profile, state, arguments, said):
    ended = profile(*arguments)
    assert ended.code == 2 and ended.out == "" and not (state / "workloads").exists()
    assert said in " ".join(ended.err.replace("│", " ").split()), ended.err
