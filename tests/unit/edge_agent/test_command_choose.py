"""`wattfleet agent choose`, `explain` and `front` on a profiled device, and `wattfleet advise`."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import reference_models
from edge_agent.cli import front as front_command
from edge_agent.cli.choose import _PROBABILITY, app
from edge_agent.cli.front_plots.view import FrontView
from edge_agent.devices.selection import open_device
from edge_agent.devices.virtual.simulated import SimulatedDevice
from edge_agent.learning.transfer import Transfer, UnusableReferenceError
from edge_agent.profiling.stored_profile import WorkloadFolders
from tests.fakes.agent_settings import only_workload
from tests.fakes.faked_jetson import ORIN_NANO, FakedJetson
from tests.fakes.fleets import front
from tests.fixtures.edge_agent import PROFILED
from wattfleet.core.choosing import BatchEfficiency, Front
from wattfleet.core.choosing.choice import PROBABILITY
from wattfleet.core.errors import InvalidInputError
from wattfleet.core.modes import (
    BOARDS,
    PROFILE_COLUMNS,
    JournalHeader,
    PowerMode,
    Task,
    WorkloadFacts,
    board_named,
    modes_to_array,
)
from wattfleet.core.prediction import pack_artefact, restore_predictor

# --- `choose` ---------------------------------------------------------------------------------------------------------
# `wattfleet agent choose`, `explain` and `front` on a profiled device.


HIGHEST = "6,1510400,624750000,2133000000"
HIGHEST_LABEL = "6c 1.51/0.62/2.13"


@pytest.fixture
def run(agent, profiled_state):
    def with_state(command, *arguments, device=PROFILED, state=profiled_state):
        return agent(command, *arguments, "--device", device, "--state-dir", state)

    return with_state


@pytest.fixture
def copied(profiled_state, tmp_path):
    """A copy of the state directory that a test may damage."""
    return shutil.copytree(profiled_state, tmp_path / "copied", ignore=shutil.ignore_patterns("*.sock"))


@pytest.fixture
def of_unknown_length(copied):
    """A state directory in which no app has reported the minibatches per epoch."""
    folders = WorkloadFolders(copied)
    folders.note(replace(folders.known("built-in"), minibatches_per_epoch=None))
    return copied


def truth(mode):
    return tuple(
        float(value[0]) for value in SimulatedDevice("orin-nano", 0).truth(modes_to_array([PowerMode(**mode)]))
    )


# --- choose ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("watts", [8, 12, 16])
def test_a_budget_is_kept_by_the_device_as_it_really_is(run, watts):
    chosen = run("choose", "--budget-w", watts, "--json").content
    _, really_mw = truth(chosen["mode"])
    assert really_mw / 1e3 <= watts * 1.03
    assert chosen["budget_w"] == watts and chosen["power_w"] <= watts
    kept = chosen["probability_of_keeping_the_limit"]
    assert kept is None if chosen["measured"] else kept >= PROBABILITY


def test_more_watts_are_never_slower(run):
    epochs = [run("choose", "--budget-w", watts, "--json").content["epoch_s"] for watts in (8, 12, 16, 30)]
    assert epochs == sorted(epochs, reverse=True)


def test_the_chosen_mode_can_be_given_to_apply_as_it_is_printed(run, profiled_state):
    chosen = run("choose", "--budget-w", "12", "--json").content
    shown = run("choose", "--budget-w", "12").out
    hint = f"Apply it with: wattfleet agent apply {chosen['argument']} --device {PROFILED} --state-dir {profiled_state}"
    assert f"{hint}\n" in shown
    assert PowerMode(*map(int, chosen["argument"].split(","))) in board_named("orin-nano").space


def test_a_deadline_with_the_least_energy_or_the_least_power(run):
    energy = run("choose", "--deadline-s", 800, "--json").content
    power = run("choose", "--deadline-s", 800, "--least", "power", "--json").content
    for chosen in (energy, power):
        minibatch_ms, _ = truth(chosen["mode"])
        assert minibatch_ms * 2000 / 1e3 <= 800 * 1.1
    assert energy["epoch_kj"] <= power["epoch_kj"] and power["power_w"] <= energy["power_w"]


def test_the_least_deadline_that_is_named_in_seconds_can_be_kept(run):
    ended = run("choose", "--deadline-s", 100)
    assert ended.code == 2 and "minibatches per" not in ended.err and " ms" not in ended.err
    least_s = re.search(r"allow at least ([\d.]+) s", " ".join(ended.err.split()))[1]
    assert run("choose", "--deadline-s", least_s).code == 0
    assert run("choose", "--deadline-s", float(least_s) - 0.2).code == 2


def test_a_deadline_for_an_epoch_of_unknown_length_says_how_to_give_it(run, of_unknown_length):
    ended = run("choose", "--deadline-s", 800, state=of_unknown_length)
    assert (ended.code, ended.out) == (2, "")
    assert "the number of minibatches per epoch of 'built-in' is unknown" in " ".join(ended.err.split())
    assert "pass --minibatches-per-epoch" in " ".join(ended.err.split())
    given = run("choose", "--deadline-s", 800, "--minibatches-per-epoch", 2000, "--json", state=of_unknown_length)
    assert given.content == run("choose", "--deadline-s", 800, "--json").content
    halved = run("choose", "--deadline-s", 400, "--minibatches-per-epoch", 1000, "--json").content
    assert halved["mode"] == given.content["mode"]


def test_seconds_of_an_epoch_of_unknown_length_are_said_to_be_assumed(run, of_unknown_length):
    for command in (["choose", "--budget-w", 12], ["front"]):
        assert "assumed" not in run(*command).out
        assert "An epoch is assumed to have 2,000 minibatches" in run(*command, state=of_unknown_length).out
        content = run(*command, "--json", state=of_unknown_length).content
        assert (content["is_epoch_length_assumed"], content["minibatches_per_epoch"]) == (True, 2000)


def true_training():
    """Of the board as it really is: seconds of an epoch of 2,000 minibatches, and joules in all, by mode."""
    modes = SimulatedDevice("orin-nano", 0).modes
    minibatch_ms, power_mw = SimulatedDevice("orin-nano", 0).truth(modes)
    return minibatch_ms * 2, minibatch_ms * 2 * power_mw / 1e3


def test_a_training_ends_in_time_with_nearly_the_least_energy(run):
    content = run("choose", "--finish-within", "15m", "--json").content
    true_s, true_j = true_training()
    minibatch_ms, power_mw = truth(content["mode"])
    assert minibatch_ms * 2 <= 900
    assert minibatch_ms * 2 * power_mw / 1e3 <= 1.08 * true_j[true_s <= 900].min()
    assert (content["counted_energy"], content["least"]) == ("energy_j", "energy")
    assert content["energy_j"] == pytest.approx(content["power_w"] * content["training_s"])
    above = (content["power_w"] - content["idle_w"]) * content["training_s"]
    assert content["above_idle_j"] == pytest.approx(above)


def test_a_training_of_several_epochs_takes_as_many_times_as_long(run):
    one, three = (run("choose", "--finish-within", "2h", "--epochs", n, "--json").content["front"] for n in (1, 3))
    by_mode = {row["argument"]: row for row in three}
    longer = [by_mode[row["argument"]]["training_s"] / row["training_s"] for row in one if row["argument"] in by_mode]
    assert longer and all(2.5 < each <= 3 for each in longer), "the warm-up is spent once"


def test_joules_above_idle_power_are_a_smaller_number_and_slower_modes_save_more(run):
    energy = run("choose", "--finish-within", "3h", "--json").content
    above = run("choose", "--finish-within", "3h", "--above-idle", "--json").content
    assert above["above_idle_j"] <= energy["above_idle_j"] and energy["energy_j"] <= above["energy_j"]
    assert above["training_s"] >= energy["training_s"]
    idle_mw = SimulatedDevice("orin-nano", 0).load(PowerMode(1, 115_200, 306_000_000, 204_000_000)).idle_mw
    assert above["idle_w"] == pytest.approx(idle_mw / 1e3, rel=0.05)


def test_the_front_of_time_and_energy_begins_with_the_fastest_mode(run):
    front = run("choose", "--energy-j", 1e6, "--json").content["front"]
    assert [row["training_s"] for row in front] == sorted(row["training_s"] for row in front)
    assert [row["energy_j"] for row in front] == sorted((row["energy_j"] for row in front), reverse=True)
    fastest = run("choose", "--energy-j", 1e6, "--json").content
    assert fastest["argument"] == front[0]["argument"], "with joules alone, the fastest mode is chosen"
    shown = run("choose", "--energy-j", 1e6).out
    assert "Pareto front of time against energy" in shown and "energy in all" in shown


@pytest.mark.parametrize("limit", [("--finish-within", "1m"), ("--energy-j", 10), ("--finish-within", "7m")])
def test_the_least_that_an_impossible_training_names_is_enough(run, limit):
    tight = limit if limit[1] != "7m" else (*limit, "--energy-j", 10)
    ended = run("choose", *tight)
    assert ended.code == 2
    amount, unit = re.search(r"allow at least ([\d,.]+) (s|J)", " ".join(ended.err.split())).groups()
    option, value = ("--finish-within", f"{amount.replace(',', '')}s") if unit == "s" else ("--energy-j", amount)
    assert run("choose", option, str(value).replace(",", "")).code == 0


def test_the_peak_power_can_be_limited_and_is_recorded_with_the_measurement(run):
    content = run("choose", "--budget-w", 100, "--json").content
    limited = run("choose", "--budget-w", 100, "--peak-w", 12, "--json").content
    assert limited["power_w"] < 12 < content["power_w"]
    training = run("choose", "--finish-within", "3h", "--peak-w", 9, "--json").content
    assert training["power_w"] < training["peak_w"] <= 9
    ended = run("choose", "--budget-w", 100, "--peak-w", 2)
    assert ended.code == 2 and "no mode has a peak of at most 2 W" in " ".join(ended.err.split())


def test_the_batch_is_chosen_with_the_mode(run, tmp_path):
    small = BatchEfficiency("digits", (8, 16, 32), (0.2, 0.9, 1.0), (0.0, 0.0, 0.0), "runs", False)
    large = replace(small, relative_samples=(4.0, 4.0, 1.0))
    for efficiency, batch in ((small, 8), (large, 32)):
        file = tmp_path / "batch-efficiency.json"
        file.write_text(efficiency.to_json())
        content = run("choose", "--finish-within", "2h", "--batch-efficiency", file, "--json").content
        assert content["batch"] == batch
        assert {row["batch"] for row in content["front"]} == {batch}


def test_a_journal_without_peaks_can_still_be_chosen_from(run, copied):
    path = only_workload(copied) / "profile.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("peak_mw", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run("choose", "--finish-within", "2h", "--json", state=copied).content["peak_w"] is None
    ended = run("choose", "--budget-w", 12, "--peak-w", 12, state=copied)
    assert ended.code == 2 and "no peak power was recorded" in " ".join(ended.err.split())


def test_without_idle_power_only_energy_in_all_is_known(run, copied):
    (copied / "idle.json").unlink()
    assert run("choose", "--finish-within", "2h", "--json", state=copied).content["above_idle_j"] is None
    ended = run("choose", "--finish-within", "2h", "--above-idle", state=copied)
    assert ended.code == 2 and "idle power is not known" in " ".join(ended.err.split())
    (copied / "idle.json").write_text("{")
    ended = run("choose", "--finish-within", "2h", state=copied)
    assert ended.code == 2 and "is damaged; remove it" in " ".join(ended.err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--budget-w", 12, "--energy-j", 5),
        ("--budget-w", 12, "--epochs", 2),
        ("--deadline-s", 800, "--above-idle"),
        ("--energy-j", "-5"),
        ("--energy-j", "inf"),
        ("--finish-within", "soon"),
        ("--finish-within", "1h", "--epochs", 0),
        ("--deadline-s", 800, "--least", "time"),
        ("--finish-within", "1h", "--batch-efficiency", "missing.json"),
    ],
)
def test_limits_that_make_no_sense_are_refused(run, arguments):
    ended = run("choose", *arguments)
    assert (ended.code, ended.out) == (2, "") and ended.err.startswith("wattfleet: ")


def test_a_measured_mode_is_said_to_be_measured(run):
    shown = run("choose", "--budget-w", 100).out
    assert "Best mode for orin-nano within 100 W" in shown
    chosen = run("choose", "--budget-w", 100, "--probability", 0.999, "--json").content
    assert (chosen["epoch_s_interval"] is None) is chosen["measured"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget-w", "1"], "no mode draws at most 1 W with a probability of 0.95: give a budget of at least"),
        (["--deadline-s", "1"], "no mode trains an epoch of 2,000 minibatches within 1 s with a probability of 0.95"),
        (["--budget-w", "10", "--probability", "1"], "the probability must be between 0 and 1"),
        (["--budget-w", "10", "--deadline-s", "10"], "pass exactly one of --budget-w, --deadline-s, or"),
        ([], "pass exactly one of"),
        (["--budget-w", "nan"], "no mode draws at most nan W"),
    ],
)
def test_a_limit_that_cannot_be_kept_says_what_can(run, arguments, said):
    ended = run("choose", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err


def test_a_device_without_a_profile_is_told_to_measure_first(run, tmp_path):
    ended = run("choose", "--budget-w", 10, state=tmp_path)
    assert ended.code == 2
    assert "no mode is measured yet; run `wattfleet agent profile` first" in ended.err


def test_a_profile_that_goes_on_says_how_far_it_is(run, copied):
    shutil.rmtree(only_workload(copied) / "predictor")
    ended = run("choose", "--budget-w", 10, state=copied)
    assert ended.code == 2 and "12 modes are measured so far" in ended.err


def test_the_predictor_of_another_board_is_refused(run):
    ended = run("choose", "--budget-w", 10, device="simulated:agx-orin")
    assert ended.code == 2
    assert "holds the profile of the board orin-nano, but this device is agx-orin" in ended.err


def test_a_simulated_profile_is_not_taken_for_a_real_board_s(run, tmp_path):
    FakedJetson(tmp_path, ORIN_NANO)
    ended = run("choose", "--budget-w", 10, device=f"sysfs:{tmp_path}")
    assert ended.code == 2
    assert "holds a simulated profile, but this device's figures are hardware" in ended.err


def test_a_directory_that_is_only_for_others_says_who_may_look(run, monkeypatch):
    def hidden(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_dir", hidden)
    ended = run("choose", "--budget-w", 10)
    assert ended.code == 2 and "run this as root, or as a member of its group" in ended.err


def test_a_damaged_predictor_says_what_to_do(run, copied):
    (only_workload(copied) / "predictor" / "weights.safetensors").write_bytes(b"half")
    ended = run("choose", "--budget-w", 10, state=copied)
    assert ended.code == 2
    assert "is damaged; remove the folder and restart the agent" in ended.err


def test_the_stated_probability_is_the_library_s():
    assert _PROBABILITY == PROBABILITY


# --- explain --------------------------------------------------------------------------------------------------------


def test_what_bounds_a_mode_is_said_in_words_and_shares(run):
    shown = run("explain", HIGHEST)
    assert shown.code == 0
    assert "Bound by computing on the GPU" in shown.out and "█" in shown.out and "s per epoch" in shown.out
    content = run("explain", "15W", "--json").content
    assert content["argument"] == HIGHEST and content["bound"] == "compute"
    assert sum(content["shares"].values()) == pytest.approx(1)


def test_a_measured_wait_for_data_is_shown_beside_the_predicted_shares(run, copied):
    journal = only_workload(copied) / "profile.jsonl"
    header, *lines = journal.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    mode = [int(knob) for knob in HIGHEST.split(",")]
    measured = next(record for record in records if record.get("mode") == mode and "minibatch_ms" in record)
    measured |= {"fetch_stall_ms": measured["minibatch_ms"] / 4, "compute_ms": measured["minibatch_ms"] / 2}
    journal.write_text("\n".join([header, *map(json.dumps, records)]) + "\n")
    assert "a minibatch waits 25% of its time for data" in run("explain", HIGHEST, state=copied).out
    assert run("explain", HIGHEST, "--json", state=copied).content["measured_data_wait"] == pytest.approx(0.25)
    assert run("explain", HIGHEST, "--json").content["measured_data_wait"] is None


def test_slow_memory_bounds_by_memory(run):
    assert run("explain", "6,1510400,624750000,204000000", "--json").content["bound"] == "memory"


def test_explaining_what_is_not_offered_names_the_nearest(run):
    ended = run("explain", "6,1510400,624750001,2133000000")
    assert ended.code == 2 and f"its nearest mode is {HIGHEST}" in ended.err


# --- front ----------------------------------------------------------------------------------------------------------


def test_the_front_is_plotted_beside_what_was_measured(run, monkeypatch):
    for columns in (80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = run("front").out
        assert "front" in shown and "x: measured; the others are predicted" in shown
        assert "measured" in shown and "seconds for one epoch" in shown
        assert max(map(len, shown.splitlines())) <= columns
        assert "jetson-1 (orin-nano, simulated), built-in" in shown


def test_the_front_trades_time_for_power_and_is_offered(run):
    content = run("front", "--json").content
    front = content["front"]
    times_s = [point["warmup_s"] + point["epoch_s"] for point in front if not point["measured"]]
    assert times_s == sorted(times_s)
    planned = [point["planned_w"] for point in front]
    assert planned == sorted(planned, reverse=True)
    device = open_device(PROFILED, seed=0)
    assert {tuple(point["mode"].values()) for point in front} <= set(map(tuple, device.modes.tolist()))
    assert len(content["measured"]) == 12


def test_a_measured_mode_of_the_front_has_its_measured_values(run, tmp_path):
    content = run("front", "--json").content
    measured = {point["label"]: point for point in content["measured"]}
    on_front = {point["label"]: point for point in content["front"]}
    both = measured.keys() & on_front.keys()
    assert both == {label for label, point in on_front.items() if point["measured"]} and len(both) >= 3
    for label in both:
        for name in ("warmup_s", "epoch_s", "power_w"):
            assert on_front[label][name] == measured[label][name]
    # The power that a round reserves is still the predicted one.
    assert all(on_front[label]["planned_w"] != on_front[label]["power_w"] for label in both)
    chosen = run("choose", "--budget-w", 100, "--json").content
    assert (on_front[chosen["label"]]["epoch_s"], chosen["measured"]) == (chosen["epoch_s"], chosen["label"] in both)

    rows = [line.split() for line in run("front").out.splitlines() if " x " in line and "," in line]
    assert rows
    for row in rows:
        assert float(row[-3]) == pytest.approx(measured[" ".join(row[:2])]["epoch_s"], abs=0.06)
    run("front", "--html", tmp_path / "front.html")
    page = (tmp_path / "front.html").read_text(encoding="utf-8")
    assert page.count("<td>measured</td>") == len(both)
    assert f"{measured[HIGHEST_LABEL]['epoch_s']:,.1f}" in page


def test_the_front_of_a_replayed_file_is_titled_with_the_file(agent, tmp_path):
    board = SimulatedDevice("orin-nano", 0)
    modes = board.modes[:: len(board.modes) // 12]
    columns = (*modes.T.astype(int), *board.truth(modes))
    file = tmp_path / "yolo_on_a_nano.csv"
    rows = [",".join(map(str, row)) for row in zip(*columns, strict=True)]
    file.write_text("\n".join([",".join(PROFILE_COLUMNS), *rows]))
    place = ("--device", f"replay:{file}", "--state-dir", tmp_path / "state")
    assert agent("profile", *place, "--modes", 5, "--device-id", "desk").code == 0
    title = "desk, replayed from the file yolo_on_a_nano"
    assert agent("front", *place, "--json").content["title"] == title
    assert agent("front", *place).out.startswith(f"{title}\n")


def test_the_page_opens_without_any_network(run, tmp_path):
    path = tmp_path / "front.html"
    ended = run("front", "--html", path, "--json")
    assert ended.err == f"wrote {path}\n" and json.loads(ended.out)
    page = path.read_text(encoding="utf-8")
    head, _, rest = page.partition("<script>")
    body = rest.partition("</script>")[2]
    assert "src=" not in head + body and "href=" not in head + body
    assert HIGHEST in head and "Front of jetson-1" in head


def test_the_picture_is_a_png(run, tmp_path):
    assert run("front", "--png", tmp_path / "front.png").code == 0
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_file_that_cannot_be_written_is_named(run, tmp_path, option):
    ended = run("front", option, tmp_path / "nowhere" / "front")
    assert (ended.code, ended.out) == (2, "")
    assert "nowhere/front: cannot be written: No such file or directory" in ended.err


@pytest.mark.parametrize(("option", "module"), [("--html", "plotly"), ("--png", "matplotlib")])
def test_a_missing_library_is_named_with_its_extra(run, tmp_path, monkeypatch, option, module):
    drawing = ("edge_agent.cli.front_plots.", "wattfleet.common.html_page")
    for name in [name for name in sys.modules if name.split(".")[0] == module or name.startswith(drawing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    ended = run("front", option, tmp_path / "front")
    assert ended.code == 2
    assert f"{module} is not installed" in ended.err and "pip install 'wattfleet[plots]'" in ended.err


# --- `advise` ---------------------------------------------------------------------------------------------------------
# `wattfleet advise`: the output and exit code of the comparison of profiling methods.

METHODS = {"transfer", "scratch", "binary-search", "brute-force"}


def advise(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "100"})


def content(*arguments: object):
    ended = advise(*arguments, "--json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


@pytest.mark.parametrize("kind", BOARDS)
def test_every_board_gets_a_comparison_of_all_methods(kind: str) -> None:
    found = content("--board", kind, "--training-hours", 24)
    assert {row["method"] for row in found["methods"]} == METHODS
    assert found["recommended"] in found["methods"]
    brute = next(row for row in found["methods"] if row["method"] == "brute-force")
    assert brute["modes"] == len(BOARDS[kind].space)


def test_the_table_labels_every_figure_with_its_source() -> None:
    ended = advise("--board", "agx-orin", "--training-hours", 72, "--workload-changes", "often")
    words = " ".join(ended.stdout.split())
    assert "predicted by the reference agx_orin_resnet18" in words
    assert "mean of four measured workloads (docs/choosing.md)" in words
    assert "measuring of 20 workloads (the workload changes often)" in words
    assert "Recommended: transfer with " in words
    assert "Measure with: wattfleet agent profile --method transfer --modes " in words


def test_a_slower_workload_takes_longer_to_measure() -> None:
    seconds = [
        content("--board", "orin-nano", "--training-hours", 24, "--minibatch-ms", ms)["methods"][-1]["measuring_s"]
        for ms in (300, 600)
    ]
    assert seconds[1] > 1.5 * seconds[0]


def test_only_binary_search_measures_more_for_more_budgets() -> None:
    one, five = (
        {(row["method"], index): row["modes"] for index, row in enumerate(found["methods"])}
        for found in (content("--board", "orin-nano", "--training-hours", 24, "--budgets", n) for n in (1, 5))
    )
    assert {method for method, index in one if one[method, index] != five[method, index]} == {"binary-search"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--board", "tx2", "--training-hours", 1), "unknown board kind 'tx2': choose one of agx-orin"),
        (("--board", "agx-orin", "--training-hours", 0), "hours of training must be finite and above 0, not 0"),
        (("--board", "agx-orin", "--training-hours", "nan"), "must be finite and above 0, not nan"),
        (("--board", "agx-orin", "--training-hours", 1, "--reference", "none"), "unknown reference 'none': choose"),
        (("--board", "agx-orin", "--training-hours", 1, "--minibatch-ms", -1), "--minibatch-ms must be finite"),
    ],
)
def test_bad_input_is_answered_with_what_to_do(arguments: tuple[object, ...], said: str) -> None:
    ended = advise(*arguments)
    assert isinstance(ended.exception, InvalidInputError) and said in str(ended.exception)


@pytest.mark.parametrize(
    "arguments", [("--board", "agx-orin"), ("--training-hours", 1), ("--board", "agx-orin", "--training-hours", "long")]
)
def test_what_is_missing_or_no_number_is_a_usage_error(arguments: tuple[object, ...]) -> None:
    assert advise(*arguments).exit_code == 2


# --- Front batches ----------------------------------------------------------------------------------------------------
# Table and JSON output of fronts whose points differ in batch size, and references of another task.

SHIPPED = reference_models.load("agx_orin_resnet18")
HEADER = JournalHeader("jetson-07", "agx-orin", "hardware", "resnet18-imagenet", 16)


def view(batch):
    two = front((1.0, 20.0), (2.0, 10.0))
    points = Front(two.modes, two.epoch_s, two.power_w, two.epoch_log_sd, two.power_log_sd, two.warmup_s, batch)
    predicted = (points.warmup_s, points.epoch_s, points.power_w, points.epoch_log_sd, points.power_log_sd)
    nothing_measured = (np.empty((0, 4)), *np.empty((3, 0)))
    return FrontView("orin-0", points, np.zeros(2, dtype=bool), *predicted, *nothing_measured, 100, False)


def test_json_has_the_batch_only_where_it_differs():
    assert [point["batch"] for point in view(np.array([4, 1])).content()["front"]] == [4, 1]
    assert all("batch" not in point for point in view(None).content()["front"])


@pytest.mark.parametrize(("batch", "shown"), [(np.array([4, 1]), True), (None, False), (np.array([4, 4]), False)])
def test_the_table_has_a_batch_column_where_there_are_several(capsys, batch, shown):
    front_command._print(view(batch))  # noqa: SLF001
    assert ("batch" in capsys.readouterr().out) is shown


def packed(facts):
    details = SHIPPED.details
    return pack_artefact(restore_predictor(SHIPPED), details.workload, details.board, {}, {}, facts)


def test_a_reference_of_inference_is_refused_for_training():
    with pytest.raises(UnusableReferenceError, match="is for inference, but this device trains: choose a reference"):
        Transfer((packed(WorkloadFacts(Task.INFERENCE)),), HEADER, 100).priors()
    Transfer((packed(WorkloadFacts(batch=16)),), HEADER, 100).priors()
    Transfer((SHIPPED,), HEADER, 100).priors()


def test_a_fitted_predictor_keeps_what_was_known():
    transfer = Transfer((SHIPPED,), HEADER, 100, WorkloadFacts(loader_workers=0))
    fitted = transfer.packed(transfer.priors()[0], 5)
    assert fitted.details.facts == WorkloadFacts(batch=16, loader_workers=0)
