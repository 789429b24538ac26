"""The options of `wattfleet-supernode`, and its behaviour with an unknown version of Flower."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import flwr
import pytest

pytest.importorskip("flwr.supernode.start_client_internal")

from flwr.supernode import start_client_internal

from wattfleet_flower.supernode import command

pytestmark = pytest.mark.skipif(not flwr.__version__.startswith("1.41."), reason="another Flower is left as it is")

SEAMS = ("http_request_response", "time", "subprocess")


class Flower:
    """Flower's own command, which only records its arguments."""

    def __init__(self) -> None:
        self.arguments: list[list[str]] = []

    def __call__(self) -> None:
        self.arguments.append(sys.argv[1:])


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch, restored_seams: None) -> Flower:
    flower = Flower()
    monkeypatch.setattr(command, "flower_supernode", flower)
    return flower


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["wattfleet-supernode", *arguments])
    command.main()


def test_flower_gets_all_options_but_the_two_of_its_own(flower: Flower, monkeypatch: pytest.MonkeyPatch) -> None:
    flowers = ["--insecure", "--node-config", 'device-id="a"', "--port", "9094"]
    run(monkeypatch, *flowers[:2], flowers[2], "--poll-s", "0.5", *flowers[3:], "--warm-imports=torch")
    assert flower.arguments == [flowers]


def test_the_superexec_gets_flowers_options_and_the_imports(flower: Flower, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(command.subprocess, "Popen", commands.append)
    run(monkeypatch, "--warm-imports", "torch,numpy")
    start_client_internal.subprocess.Popen(["flower-superexec", "--insecure", "--parent-pid", "7"])
    [[python, *_, settings, insecure, parent, pid]] = commands
    assert python == sys.executable and (insecure, parent, pid) == ("--insecure", "--parent-pid", "7")
    assert json.loads(settings)["imports"] == ["torch", "numpy"] and not json.loads(settings)["learn"]


def test_without_warm_imports_flower_starts_its_own_superexec(flower: Flower, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--warm-imports", "none")
    assert start_client_internal.subprocess is subprocess


def test_an_unknown_flower_runs_as_it_is(
    flower: Flower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = [getattr(start_client_internal, name) for name in SEAMS]
    monkeypatch.setattr(flwr, "__version__", "1.30.0")
    run(monkeypatch, "--insecure", "--poll-s", "1")
    assert flower.arguments == [["--insecure"]]
    assert [getattr(start_client_internal, name) for name in SEAMS] == before
    assert "runs as flower-supernode: it supports Flower 1.41.x, but 1.30.0 is installed" in caplog.text


def test_a_flower_without_the_replaced_names_runs_as_it_is(
    flower: Flower, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(start_client_internal, "http_request_response")
    run(monkeypatch)
    assert flower.arguments == [[]]
    assert "has no http_request_response" in caplog.text


@pytest.mark.parametrize("value", ["0", "-1", "nan", "61", "soon"])
def test_a_pause_that_makes_no_sense_is_refused(
    flower: Flower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, f"--poll-s={value}")
    assert "--poll-s" in capsys.readouterr().err
    assert not flower.arguments


def test_the_help_shows_its_own_options_and_flowers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wattfleet_flower.supernode", "--help"], capture_output=True, text=True, check=True
    )
    for option in ("--poll-s", "--warm-imports", "--superlink", "--isolation"):
        assert option in done.stdout


WITHOUT_FLOWER = """
import sys
class Absent:
    def find_spec(self, name, *others):
        if name == "flwr":
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Absent())
from wattfleet_flower.supernode.__main__ import main
main()
"""


def test_without_flower_it_says_what_to_install() -> None:
    done: Any = subprocess.run([sys.executable, "-c", WITHOUT_FLOWER], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "wattfleet-supernode: Flower is not installed: pip install 'wattfleet[flower]'\n"
