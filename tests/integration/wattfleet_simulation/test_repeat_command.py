"""The command line in a report that repeats its simulation."""

from __future__ import annotations

import shlex
from pathlib import Path

from wattfleet_simulation.report_html import repeat_command
from wattfleet_simulation.settings import device_specs


def test_command_repeats_the_fleet() -> None:
    specs = device_specs("orin-nx:1,agx-orin:2", [Path("my data/a.csv"), Path("b.csv")])
    settings = {
        "devices": dict(specs),
        "apps": ["convolutional:4", "perceptron:8"],
        "rounds": 5,
        "site_budget_w": 82.5,
        "modes": 20,
        "policy": "random",
        "clients": 2,
        "deadline_s": None,
        "seed": 3,
        "own_epochs": False,
        "duties": ["mobilenetv3:60:500", "resnet:30:300:0.9"],
        "reference": "agx_orin_resnet18",
    }

    assert "--own-epochs" in repeat_command({**settings, "own_epochs": True})
    in_time = {**settings, "policy": "deadline", "clients": None, "deadline_s": 62.5}
    assert "--policy deadline --deadline-s 62.5 --seed 3" in repeat_command(in_time)
    words = shlex.split(repeat_command(settings))
    given = list(zip(words[2::2], words[3::2], strict=True))
    files = [Path(value) for option, value in given if option == "--device-csv"]
    assert words[:2] == ["wattfleet", "simulate"]
    assert device_specs(dict(given)["--devices"], files) == specs
    assert [pair for pair in given if pair[0] not in ("--devices", "--device-csv")] == [
        *(("--app", "convolutional:4"), ("--app", "perceptron:8")),
        *(("--duty", "mobilenetv3:60:500"), ("--duty", "resnet:30:300:0.9")),
        *(("--rounds", "5"), ("--site-budget-w", "82.5"), ("--modes", "20"), ("--policy", "random")),
        *(("--clients", "2"), ("--seed", "3"), ("--reference", "agx_orin_resnet18")),
    ]
