"""The fleet in containers enrols by itself at its first start, and not again at later starts."""

from __future__ import annotations

import asyncio
import runpy
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.client import CoordinatorClient
from coordinator.identity.authority_folder import AuthorityFolder, folder_of, make_operator
from coordinator.settings import CoordinatorSettings
from tests.fakes.certified import certified
from tests.fakes.served import serving
from wattfleet_identity.channels import Endpoint, require_identity
from wattfleet_io.clock import utc_now

IMAGE = Path(__file__).parents[3] / "deploy" / "image"
MACHINES = [("device", "orin-0"), ("superlink", "superlink")]


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    folder = tmp_path / "authority"
    make_operator(AuthorityFolder.create(folder, ["127.0.0.1"], utc_now()), utc_now())
    return folder


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(IMAGE / "make_invites.py"))


def started(command: list[str], state: Path, invite: Path) -> subprocess.CompletedProcess[str]:
    """Run a container's start script."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "WATTFLEET_INVITE": str(invite),
        "WATTFLEET_IDENTITY": str(state / "identity"),
    }
    return subprocess.run(
        [sys.executable, IMAGE / "enrolled.py", *command], env=environment, capture_output=True, text=True, timeout=120
    )


async def test_machines_enrol_once_with_the_invites_that_were_made(
    config: CoordinatorSettings, authority: Path, tmp_path: Path, script: dict[str, Any]
) -> None:
    invites = tmp_path / "invites"
    invites.mkdir()
    async with serving(certified(config, authority)) as served:

        def invited() -> list[str]:
            with CoordinatorClient(Endpoint.of(served.bound.address, folder_of(authority))) as client:
                return script["make_invites"](client, MACHINES, invites)

        async def start(state: Path, name: str, *command: str) -> subprocess.CompletedProcess[str]:
            return await asyncio.to_thread(started, [*command], tmp_path / state, invites / name)

        assert await asyncio.to_thread(invited) == ["orin-0", "superlink"]
        first_line = (invites / "orin-0").read_text()
        assert stat.S_IMODE((invites / "orin-0").stat().st_mode) == 0o600
        # Nobody has used the invites: the next start creates others, and revokes the first ones.
        assert await asyncio.to_thread(invited) == ["orin-0", "superlink"]
        assert (invites / "orin-0").read_text() != first_line

        state = tmp_path / "orin-0"
        device = ["--device=simulated:orin-nano", "--device-id=orin-0", f"--state-dir={state}", "--print-config"]
        agent = await start(Path("orin-0"), "orin-0", "wattfleet", "agent", "run", *device)
        assert agent.returncode == 0, agent.stderr
        assert "[device]" in agent.stdout, "the command has run after the enrolment"
        flower = await start(Path("superlink"), "superlink", "wattfleet", "--help")
        assert flower.returncode == 0, flower.stderr
        assert str(require_identity(tmp_path / "superlink" / "identity").peer) == "superlink superlink"
        serial = require_identity(state / "identity").certificate.serial
        assert list(invites.iterdir()) == []

        assert await asyncio.to_thread(invited) == []
        again = await start(Path("orin-0"), "orin-0", "wattfleet", "agent", "run", *device)
        assert again.returncode == 0, again.stderr
        assert require_identity(state / "identity").certificate.serial == serial

        # The first invite was revoked: whoever kept it cannot enrol as the device.
        (invites / "orin-0").write_text(first_line)
        device[2] = f"--state-dir={tmp_path / 'thief'}"
        refused = await start(Path("thief"), "orin-0", "wattfleet", "agent", "run", *device)
        assert refused.returncode != 0
        assert "unknown, has expired, or was used up" in refused.stderr
        assert "[device]" not in refused.stdout
        # A machine that is already enrolled continues without an invite.
        device[2] = f"--state-dir={state}"
        gone_on = await start(Path("orin-0"), "orin-0", "wattfleet", "agent", "run", *device)
        assert "[device]" in gone_on.stdout, gone_on.stderr


async def test_prometheus_gets_a_viewers_certificate_that_its_group_reads(
    config: CoordinatorSettings, authority: Path, tmp_path: Path, script: dict[str, Any]
) -> None:
    folder = tmp_path / "prometheus"
    trusted_pem = require_identity(folder_of(authority)).trusted_pem
    async with serving(certified(config, authority)) as served:

        def made(trusted_pem: bytes = trusted_pem) -> bool:
            with CoordinatorClient(Endpoint.of(served.bound.address, folder_of(authority))) as client:
                return script["make_prometheus_certificate"](client, folder, trusted_pem)

        assert await asyncio.to_thread(made)
        modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, folder / "key.pem")}
        assert modes == {"prometheus": 0o750, "key.pem": 0o640}
        certificate = script["Certificate"].from_pem((folder / "certificate.pem").read_bytes())
        assert str(certificate.peer) == "viewer prometheus"
        assert certificate.remaining(utc_now()).days >= 364
        assert not await asyncio.to_thread(made)
        assert await asyncio.to_thread(made, b"another authority"), "an earlier fleet's certificate is replaced"
