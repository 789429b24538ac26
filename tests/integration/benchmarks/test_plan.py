"""The planning benchmark runs and prints its results."""

from __future__ import annotations

import json

import pytest

from benchmarks import plan


def figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    tiny = ["--points", "4", "--repeats", "1", "--instances", "2"]
    monkeypatch.setattr("sys.argv", ["plan", *tiny, *options])
    plan.main()
    return capsys.readouterr().out


def test_it_prints_its_figures_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(figures(capsys, monkeypatch, "--json", "--devices", "3", "30", "--workloads", "2"))
    assert found["workloads"] == 2
    assert found["devices"] == [3, 30]
    for name in ("ms", "curves_ms", "plan_ms", "coordinator_ms", "coordinator_of_one_ms", "useful_ms"):
        assert len(found[name]) == 2 and all(ms > 0 for ms in found[name])
    assert isinstance(found["growth"], float)
    assert 0 <= found["gap_pct"]["median"] <= found["gap_pct"]["max"] <= 0.1


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "1,000" not in figures(capsys, monkeypatch, "--devices", "7")
    with pytest.raises(SystemExit):
        figures(capsys, monkeypatch, "--points", "65")
