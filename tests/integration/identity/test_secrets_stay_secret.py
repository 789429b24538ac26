"""No process of a fleet prints, logs, stores, exports or otherwise exposes a secret."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import grpc
import pytest
from click.testing import CliRunner

from edge_agent.exporter import read_url
from tests.fakes.polling import until
from tests.fakes.secret_hunt import ProcessWatch, Secrets, is_key_file
from wattfleet.common import cli
from wattfleet.common.identity.channels import Endpoint
from wattfleet.common.identity.invites import new_token
from wattfleet.core.errors import WattfleetError
from wattfleet_proto.v1 import planning_pb2, planning_pb2_grpc

pytestmark = pytest.mark.timeout(1800)

_WITHIN_S = 600.0
_PROGRAM = (sys.executable, "-c", "from wattfleet.common.cli import main; main()")
_LINE = re.compile(r"wfj1/\S+")
_DATABASE_PASSWORD = "correct-horse-battery-staple"  # noqa: S105 - made up
_ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # The most verbose level of gRPC that does not print the messages themselves.
    "GRPC_VERBOSITY": "debug",
}


_KEY_FILES = [
    "flower/key.pem",
    "metadata/online.pem",
    "signing/root-ID.pem",
    "signing/targets-ID.pem",
    "state/identity/key.pem",
    "viewer/key.pem",
    "wattfleet-identity/authority.key",
    "wattfleet-identity/next.key",
    "wattfleet-identity/operator/key.pem",
    "wattfleet-identity/server.key",
]
"""The files that may have a private key, and have nothing else."""


class Fleet:
    """A coordinator, an agent and commands, each in a process of its own, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.secrets = Secrets()
        self.said: list[tuple[str, bytes, str]] = []
        """What commands printed: the command, its output, and the name of the secret that it was asked for."""

    def run(self, *words: str, line: str = "", asked_for: str = "", code: int | None = 0) -> str:
        """Run a command here, and record its output; `code` is the expected exit code, None for any failure."""
        done = CliRunner().invoke(cli.wattfleet, list(words), input=line, env={"HOME": str(self.folder)})
        error = done.exception if isinstance(done.exception, WattfleetError) else None
        text = done.output if error is None else f"{done.output}{error}\n{error!r}"
        return self._noted(words, text, done.exit_code if error is None else cli.exit_code(error), asked_for, code)

    def start_and_end(self, *words: str, line: str = "", asked_for: str = "", code: int | None = 0) -> str:
        """Run a command in a process of its own."""
        done = subprocess.run(
            [*_PROGRAM, *words],
            input=line.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env={**_ENVIRONMENT, "HOME": str(self.folder)},
            timeout=_WITHIN_S,
        )
        return self._noted(words, done.stdout.decode(), done.returncode, asked_for, code)

    def _noted(self, words: Sequence[str], text: str, ended: int, asked_for: str, code: int | None) -> str:
        assert ended == code or (code is None and ended != 0), text
        self.said.append((" ".join(words), text.encode(), asked_for))
        return text

    @contextmanager
    def running(self, name: str, *words: str) -> Iterator[Path]:
        """A service that logs to a file."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = self._start(output, *words)
            try:
                yield log
            finally:
                process.terminate()
                process.wait(_WITHIN_S)

    def _start(self, output: IO[bytes], *words: str) -> subprocess.Popen[bytes]:
        environment = {**_ENVIRONMENT, "HOME": str(self.folder)}
        return subprocess.Popen(
            [*_PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
            env=environment,
        )

    def operate(self, *words: str, address: str, **how: Any) -> str:
        return self.run("coordinator", *words, "--coordinator", address, **how)

    def invite(self, name: str, address: str, *words: str) -> str:
        """The line that an invite prints, whose token is a secret of that name."""
        printed = self.operate("invite", *words, address=address, asked_for=name)
        found = _LINE.search(printed)
        assert found is not None, printed
        self.secrets.add_token(name, found[0].split("/")[3])
        return found[0]


def _with_part(line: str, index: int, part: str) -> str:
    parts = line.split("/")
    parts[index] = part
    return "/".join(parts)


_AGENT = ("--device", "simulated:orin-nano", "--device-id", "nano-1", "--state-dir", "state")


def _enrol(fleet: Fleet, address: str) -> None:
    """Enrol a board, a Flower app and a viewer, after all possible failures have occurred."""
    wrong_token, wrong_authority = new_token(), new_token()
    fleet.secrets.add_token("an unknown token", wrong_token)
    join = ("agent", "join", *_AGENT)
    line = fleet.invite("the board's token", address)
    fleet.run(*join, line=_with_part(line, 3, wrong_token), code=None)
    fleet.run(*join, line=_with_part(line, 2, wrong_authority), code=None)
    fleet.run(*join, line=line[:-20], code=2)
    assert "nano-1" in fleet.start_and_end(*join, line=line)
    assert "used up" in fleet.run(*join, line=line, code=None)
    expired = fleet.invite("an expired token", address, "--role", "viewer", "--name", "late", "--ttl", "1s")
    time.sleep(1.1)  # the coordinator's own clock
    assert "expired" in fleet.run("join", "--identity", "late", line=expired, code=None)
    for role in ("flower", "viewer"):
        found = fleet.invite(f"the {role}'s token", address, "--role", role, "--name", f"a-{role}")
        fleet.run("join", "--identity", role, line=found)
    fleet.invite("an open token", address, "--uses", "3")


def _train(fleet: Fleet, address: str) -> None:
    """Start a run as its app does, and have another app claim it."""
    own, foreign = new_token(), new_token()
    fleet.secrets.add_token("the run's token", own)
    fleet.secrets.add_token("a foreign run's token", foreign)
    with Endpoint.of(address, fleet.folder / "flower").channel() as channel:
        planning: Any = planning_pb2_grpc.PlanningServiceStub(channel)
        start = planning_pb2.StartRunRequest(run_id="run-1", strategy="FedAvg", rounds=3, run_token=own)
        planning.StartRun(start, timeout=_WITHIN_S, wait_for_ready=True)
        with pytest.raises(grpc.RpcError) as refused:
            planning.FinishRun(planning_pb2.FinishRunRequest(run_id="run-1", run_token=foreign), timeout=_WITHIN_S)
        fleet.said.append(("a foreign FinishRun", str(refused.value).encode(), ""))
        planning.FinishRun(planning_pb2.FinishRunRequest(run_id="run-1", run_token=own), timeout=_WITHIN_S)


def _is_connected(session: Path) -> bool:
    return session.exists() and json.loads(session.read_text())["problem"] is None


def _look_at_everything(fleet: Fleet, address: str, http_address: str) -> None:
    own_metrics = read_url(fleet.folder / "state")
    assert own_metrics is not None
    for words in (
        ("devices", "--json"),
        ("device", "nano-1", "--json"),
        ("rounds", "--json"),
        ("workloads", "--json"),
        ("budget", "show", "--json"),
        ("invites", "--json"),
        ("certificates", "--json"),
        ("audit-log", "--json"),
        ("export", "--out", "export", "--format", "csv"),
    ):
        fleet.operate(*words, address=address)
    fleet.run("agent", "status", "--state-dir", "state", "--json")
    fleet.run("agent", "doctor", *_AGENT[:2], "--state-dir", "state", "--json")
    for url in (f"http://{http_address}/metrics", own_metrics):
        with urllib.request.urlopen(url, timeout=_WITHIN_S) as answer:
            fleet.said.append((url, answer.read(), ""))


def _provoke(fleet: Fleet, address: str) -> None:
    """Make commands fail because of their identities, and end the board's session."""
    key = fleet.folder / "viewer" / "key.pem"
    fleet.operate("drain", "nano-1", "--identity", "viewer", address=address, code=None)
    key.chmod(0o644)
    fleet.operate("devices", "--identity", "viewer", address=address, code=2)
    key.chmod(0o600)
    kept = key.read_bytes()
    key.write_bytes(kept[:100])
    fleet.operate("devices", "--identity", "viewer", address=address, code=2)
    key.write_bytes((fleet.folder / "flower" / "key.pem").read_bytes())
    fleet.operate("devices", "--identity", "viewer", address=address, code=2)
    key.write_bytes(kept)
    fleet.operate("rotate-authority", "begin", address=address)
    fleet.operate("revoke", "nano-1", address=address)


def _settings(folder: Path, name: str, store: str) -> str:
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(f'[store]\nlocation = "{store}"\n')
    return name


def _refuse_database(fleet: Fleet) -> None:
    """Try a store that is unreachable, and one that is specified where everybody can read it."""
    fleet.secrets.add_text("the database's password", _DATABASE_PASSWORD)
    url = f"postgresql://wattfleet:{_DATABASE_PASSWORD}@127.0.0.1:9/fleet"
    serve = ("coordinator", "serve", "--site-budget-w", "100", "--address", "127.0.0.1:0")
    config = _settings(fleet.folder, "postgresql.toml", url)
    fleet.run(*serve, "--config", config, "--print-config")
    fleet.run(*serve, "--config", config, code=None)
    fleet.run("coordinator", "store", "check", "--config", config, code=2)


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WATTFLEET_IDENTITY", raising=False)
    return Fleet(tmp_path)


def test_no_secret_is_where_others_may_read_it(fleet: Fleet) -> None:
    folder = fleet.folder
    with ProcessWatch() as watch:
        fleet.run("coordinator", "init")
        _refuse_database(fleet)
        serve = ("coordinator", "serve", "--site-budget-w", "100", "--announce", "addresses.json", "--address")
        more = ("--http-address", "127.0.0.1:0", "--reference-metadata", "metadata", "--store", "fleet.db")
        with fleet.running("coordinator", *serve, "127.0.0.1:0", *more) as coordinator_log:
            until(lambda: (folder / "addresses.json").exists(), _WITHIN_S)
            announced = json.loads((folder / "addresses.json").read_text())
            address = announced["address"]
            _enrol(fleet, address)
            fleet.operate("reference", "keys", "init", "--out", "signing", address=address)
            own = ("--socket", str(folder / "a.sock"), "--metrics-address", "127.0.0.1:0")
            with fleet.running("agent", "agent", "run", *_AGENT, *own) as agent_log:
                until(lambda: _is_connected(folder / "state" / "session.json"), _WITHIN_S)
                _train(fleet, address)
                _look_at_everything(fleet, address, announced["http_address"])
                _provoke(fleet, address)
                until(lambda: b"revoked" in agent_log.read_bytes() + coordinator_log.read_bytes(), _WITHIN_S)
    keys = fleet.secrets.add_key_files(folder)
    assert sorted({re.sub(r"-[0-9a-f]+\.", "-ID.", str(path.relative_to(folder))) for path in keys}) == _KEY_FILES
    assert [path for path in keys if stat.S_IMODE(path.stat().st_mode) != 0o600] == []
    assert len(fleet.secrets) >= len(keys) + 8
    leaks = _leaks(fleet, watch)
    assert not leaks, "\n".join(leaks)


def _leaks(fleet: Fleet, watch: ProcessWatch) -> list[str]:
    """Each place with a secret that should not be there."""
    secrets = fleet.secrets
    found = [
        f"{secret} in the output of `{command}`"
        for command, output, asked_for in fleet.said
        for secret in secrets.in_bytes(output, but=asked_for)
    ]
    for name, texts in (("arguments", watch.arguments), ("environment", watch.environments)):
        assert texts, "processes were seen"
        found += [
            f"{secret} in the {name} of a process" for text in texts for secret in secrets.in_bytes(text.encode())
        ]
    for path in sorted(fleet.folder.rglob("*")):
        if path.is_file() and not is_key_file(path) and path.name != "postgresql.toml":
            name = path.relative_to(fleet.folder)
            found += [f"{secret} in {name}" for secret in secrets.in_bytes(path.read_bytes())]
    return sorted(set(found))
