"""A shell for a running coordinator: the operator's commands, over real gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coordinator.settings import CoordinatorSettings
from tests.fakes.served import Client, serving_client
from tests.fakes.small_fleet import RUN
from wattfleet.errors import WattfleetError
from wattfleet_io import cli
from wattfleet_proto.device_state import GrantPhase
from wattfleet_proto.v1 import planning_pb2, session_pb2

_SITE = """
[supplies.site]
budget = { watts = 100.0 }
[supplies.rack]
parent = "site"
budget = { query = "watts", url = "http://127.0.0.1:9", fallback_w = 60.0 }
devices = ["orin*"]
[supplies.roof]
parent = "site"
budget = { watts = 40.0 }
devices = ["nano*"]
[devices.nano]
limit_w = 20.0
tags = ["lab"]
"""

Shell = Callable[..., Awaitable[Result]]


def command(*arguments: str, columns: int = 80, typed: str | None = None) -> Result:
    """A command in a terminal of the given width; its exceptions are raised.

    Args:
        arguments: words after `wattfleet coordinator`.
        columns: width of the terminal.
        typed: what the user types; None if standard input is not a terminal.
    """
    with pytest.MonkeyPatch.context() as patched:
        if typed is not None:
            patched.setattr("click.testing._NamedTextIOWrapper.isatty", lambda stream: True)
        result = CliRunner().invoke(
            cli.wattfleet, ["coordinator", *arguments], typed, {"COLUMNS": str(columns)}, prog_name="wattfleet"
        )
    if isinstance(result.exception, WattfleetError):
        raise result.exception
    return result


@asynccontextmanager
async def served_with_shell(config: CoordinatorSettings) -> AsyncIterator[tuple[Client, Shell]]:
    """A coordinator, a client of it, and a shell that runs commands against it."""
    async with serving_client(config) as client:

        async def shell(*arguments: str, columns: int = 80) -> Result:
            result = await asyncio.to_thread(
                command, *arguments, "--coordinator", client.bound.address, columns=columns
            )
            assert result.exit_code == 0, result.output
            # The length of a file's path cannot be changed.
            is_laid_out = not {"--json", "export"} & set(arguments)
            assert not is_laid_out or max(map(len, result.stdout.splitlines()), default=0) <= columns
            assert "…" not in result.stdout, "nothing is cut off"
            return result

        yield client, shell


async def asked(shell: Shell, *arguments: str) -> Any:
    return json.loads((await shell(*arguments, "--json")).stdout)


def rack_and_roof(folder: Path) -> dict[str, Any]:
    """Settings of a site with two circuits; the source of one circuit's budget is unreachable."""
    (folder / "site.toml").write_text(_SITE)
    return {"budget_w": None, "file": folder / "site.toml"}


async def a_round(client: Client, orin: Any, number: int = 1) -> planning_pb2.PlanRoundResponse:
    """A round that the Orin finished and the Nano did not."""
    plan = await client.plan(number)
    await orin.obey(GrantPhase.OVER)
    await orin.send(
        observation=session_pb2.Observation(plan_id=plan.plan_id, epoch_s=20.5, power_w=31.25, beside_duty=True)
    )
    results = [
        planning_pb2.DeviceResult(device_id="orin", num_examples=96, loss=0.125, share=1.0),
        planning_pb2.DeviceResult(device_id="nano", failure="the node, is gone\nfor good", share=0.0),
    ]
    request = planning_pb2.FinishRoundRequest(plan_id=plan.plan_id, wall_s=41.5, results=results)
    await client.planning.FinishRound(request)
    await client.end_trainings()
    metrics = {"accuracy": 2 / 3, "loss": 1.5, "f1": 0.5, "recall": 0.25}
    await client.planning.ReportMetrics(planning_pb2.ReportMetricsRequest(run_id=RUN, round=number, metrics=metrics))
    return plan
