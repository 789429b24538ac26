"""The report of a successful simulation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wattfleet.simulation.baselines import PLAIN_FLOWER, PRESETS
from wattfleet.simulation.comparison import THIS_RUN, compared

IDLE_W = 40.0


def way_values(
    name: str,
    seconds: Sequence[float],
    kilojoules: Sequence[float],
    accuracy: Sequence[float],
    measuring_s: float = 0.0,
) -> dict[str, Any]:
    """A run in virtual time that draws 100 W, and measures modes at its beginning.

    Args:
        name: its name.
        seconds: when each round ended.
        kilojoules: energy until then.
        accuracy: accuracy then.
        measuring_s: how long one board measured modes.
    """
    at_s = sorted({0.0, measuring_s, seconds[-1]})
    is_measuring = [at < measuring_s for at in at_s[:-1]]
    return {
        "name": name,
        "initial_accuracy": 0.1,
        "rounds": [
            {"round": number, "devices": ["agx-orin-0"], "end_s": end_s, "energy_j": 1e3 * energy, "accuracy": reached}
            for number, (end_s, energy, reached) in enumerate(zip(seconds, kilojoules, accuracy, strict=True), 1)
        ],
        "worked_s": 2 * seconds[-1],
        "measuring_s": measuring_s,
        "measuring_j": 20.0 * measuring_s,
        "watts": {
            "at_s": at_s,
            "idle_w": IDLE_W,
            "training": [*(0.0 if each else 60.0 for each in is_measuring), 0.0],
            "measuring": [*(60.0 if each else 0.0 for each in is_measuring), 0.0],
        },
    }


COMPARISON = compared(
    way_values(THIS_RUN, (60.0, 100.0, 140.0), (6.0, 10.0, 14.0), (0.35, 0.81, 0.85), measuring_s=42.0),
    [
        way_values(PRESETS, (50.0, 90.0, 125.0), (5.0, 9.0, 12.5), (0.4, 0.8, 0.9)),
        way_values(PLAIN_FLOWER, (80.0, 160.0, 240.0), (9.0, 18.0, 27.5), (0.9, 0.2, 0.8)),
    ],
    130.0,
)

FLEET = {  # By id: kind of board, seconds and power of the fastest epoch, idle power
    "agx-orin-0": ("agx-orin", 18.0, 48.0, 11.5),
    "agx-orin-1": ("agx-orin", 30.0, 47.0, 12.0),
    "orin-nano-0": ("orin-nano", 150.0, 17.6, 4.6),
    "orin-nano-1": ("orin-nano", 98.0, 19.6, 5.7),
    "orin-nx-0": ("orin-nx", 41.0, 29.8, 4.8),
    "xavier-agx-0": ("xavier-agx", 91.0, 33.8, 8.6),
}
CHOSEN = ("agx-orin-0", "agx-orin-1", "orin-nx-0")
LOG_SD, START_S = 0.02, 4.0


def mode_values(step: int) -> dict[str, int]:
    return {"cores": 8 - step, "cpu_khz": 1_728_000, "gpu_hz": 918_000_000, "mem_hz": 2_133_000_000}


def _device(board: str, epoch_s: float, power_w: float, idle_w: float) -> dict[str, Any]:
    return {
        "board": board,
        "provenance": "simulated",
        "mode_space": 18_096,
        "modes_profiled": 50,
        "minibatches_per_epoch": 520,
        "is_length_known": True,
        "idle_w": idle_w,
        "time_mape_pct": 6.25,
        "power_mape_pct": 3.5,
        "state": "ready",
        "reference_digest": "0bac",
        "front": [
            {
                "mode": mode_values(k),
                "warmup_s": START_S,
                "epoch_s": epoch_s * 1.6**k,
                "power_w": idle_w + (power_w - idle_w) * 0.75**k,
                "epoch_log_sd": LOG_SD,
                "power_log_sd": LOG_SD,
            }
            for k in range(8)
        ],
        "space_sample": {
            "warmup_s": [START_S] * 80,
            "epoch_s": [epoch_s * 1.6 ** (k % 8) * (1.02 + k / 200) for k in range(80)],
            "power_w": [idle_w + (power_w - idle_w) * 0.75 ** (k % 8) * (1 + k / 400) for k in range(80)],
        },
    }


def _round(number: int, devices: dict[str, Any]) -> dict[str, Any]:
    points = {device: devices[device]["front"][k] for device, k in zip(CHOSEN, (2, 1, 0), strict=True)}
    idle_w = sum(view["idle_w"] for device, view in devices.items() if device not in CHOSEN)
    # Times are within their interval, and power is outside it.
    assignments = [
        {
            "device": device,
            "mode": point["mode"],
            "batch": 4,
            "epochs": 2.0,
            "predicted_warmup_s": point["warmup_s"],
            "predicted_epoch_s": point["epoch_s"],
            "observed_epoch_s": point["epoch_s"] * (1.01 + 0.005 * number),
            "predicted_power_w": point["power_w"],
            "observed_power_w": point["power_w"] * 0.95,
            "power_limit_w": point["power_w"] * 1.03,
            "epoch_log_sd": LOG_SD,
            "power_log_sd": LOG_SD,
            "modes_profiled": 12,
            "length_assumed": False,
        }
        for device, point in points.items()
    ]
    return {
        "round": number,
        "selected": list(CHOSEN),
        "assignments": assignments,
        "decisions": {
            device: {
                "selected": device in CHOSEN,
                "reason": "selected: among the 3 devices with the least makespan"
                if device in CHOSEN
                else f"too slow: {2 * view['front'][0]['epoch_s']:.1f} s in its fastest mode",
            }
            for device, view in devices.items()
        },
        "length_assumed": False,
        "failed": [],
        "site_budget_w": 130.0,
        "planned_site_w": idle_w + sum(part["power_limit_w"] for part in assignments),
        "observed_site_w": idle_w + sum(part["observed_power_w"] for part in assignments),
        "site_budget_held": True,
        "predicted_duration_s": START_S + 2 * max(part["predicted_epoch_s"] for part in assignments),
        "observed_duration_s": START_S + 2 * max(part["observed_epoch_s"] for part in assignments),
        "random_draw": {
            "draws": 20,
            "over_budget": 2,
            "selected_duration_s": 100.0,
            "mean_duration_s": 238.5,
            "worst_duration_s": 295.7,
        },
        "training_j": 6500.0,
        "observed_trainings": 3,
        "trainings": 3,
        "wall_s": 13.0,
        "accuracy": 0.25 * number + 0.1,
        "loss": 2.0 / number,
    }


def successful_report() -> dict[str, Any]:
    """A successful run: three devices of six in three rounds."""
    devices = {device: _device(*values) for device, values in FLEET.items()}
    return {
        "provenance": "simulated",
        "wattfleet_version": "0.1.0",
        "settings": {
            "devices": {device: f"simulated:{board}" for device, (board, *_) in FLEET.items()},
            "apps": ["convolutional:4"],
            "rounds": 3,
            "site_budget_w": 130.0,
            "modes": 50,
            "policy": "fastest-k",
            **dict.fromkeys(("clients", "deadline_s")),
            "own_epochs": False,
            "duties": [],
            "seed": 7,
            "reference": "agx_orin_resnet18",
        },
        "runs": [
            {
                "run": 1,
                "network": "convolutional",
                "batch_sizes": [4],
                "local_epochs": [2],
                "workload": "wattfleet/digits#0badcafe",
                "devices": devices,
                "rounds": [_round(number, devices) for number in (1, 2, 3)],
                "comparison": COMPARISON,
                "median_error": {
                    "epoch_s": {"share": 0.02, "trainings": 9},
                    "power_w": {"share": 0.05, "trainings": 9},
                },
                "initial_accuracy": 0.1,
                "final_accuracy": 0.85,
            }
        ],
        "duties": {},
        "elapsed_s": 89.2,
    }
