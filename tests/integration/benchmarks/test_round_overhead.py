"""The benchmark of a round's overhead, with one real SuperNode."""

from __future__ import annotations

import json

import pytest

from benchmarks.round_overhead.__main__ import main
from benchmarks.round_overhead.timeline import STAGES

pytestmark = [pytest.mark.deployment, pytest.mark.timeout(180)]


def test_the_stages_make_up_the_round(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1", "--devices", "1", "--ways", "wattfleet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["wattfleet"]
    assert list(found["stages_s"]) == list(STAGES)
    assert sum(found["stages_s"].values()) == pytest.approx(found["round_s"])
    assert min(found["stages_s"].values()) >= -0.05, "the log is read every 10 ms"


def test_an_unknown_way_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--ways", "flower,teleport"])
    assert "teleport" in capsys.readouterr().err
