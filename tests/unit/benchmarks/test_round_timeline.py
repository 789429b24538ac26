"""The benchmark that divides a round into stages, on times written by hand."""

import pytest

from benchmarks.round_overhead.timeline import STAGES, Seen, round_seconds, stage_seconds


def test_the_stages_of_the_slowest_node_add_up_to_the_round() -> None:
    rounds = [
        {
            "pushed_s": 100.0,
            "pulled_s": 110.0,
            "nodes": [
                {"started_s": 101.0, "called_s": 102.0, "trained_s": 103.0},
                {"started_s": 104.0, "called_s": 106.5, "trained_s": 107.5},
            ],
        }
    ]
    logs = [Seen([95.0, 100.5], [97.0, 103.5]), Seen([95.5, 103.0], [97.5, 108.0])]
    stages = stage_seconds(rounds, logs)
    assert list(stages.values()) == pytest.approx([3.0, 1.0, 2.5, 1.0, 0.5, 2.0])
    assert tuple(stages) == STAGES
    assert round_seconds(rounds) == [10.0]
