"""Runs the clients of a simulation on Flower's simulation engine, which needs Ray. Nothing else imports Ray."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, Protocol

from flwr.app import Context, Message

from wattfleet.core.errors import InvalidInputError
from wattfleet.simulation.client_process import IsolatedApp

INSTALL = "pip install 'wattfleet[simulation-large]'"
_OBJECT_STORE_BYTES = 256 * 1024 * 1024
"""Memory for messages between processes. Only those that are being handled are in it."""

_ATTEMPTS = 4
"""Ray gives up if its processes have not started within 15 to 30 s, which cannot be changed (its issue 65983)."""
_LOOPBACK = ("127.", "localhost:", "[::1]:")


class Clients(Protocol):
    """Runs ClientApps."""

    def handle(self, tasks: Sequence[tuple[Message, Context]]) -> Iterator[tuple[int, Message, Context]]:
        """Handle messages, several at the same time; yield each one's place, its reply and its context when it ends."""
        ...


def require_ray() -> None:
    """Check that Ray is installed.

    Raises:
        InvalidInputError: it is not; the text says what to install.
    """
    if importlib.util.find_spec("ray") is None:
        raise InvalidInputError(f"a simulation of your own app needs Ray, which is not installed: {INSTALL}")


class RayClients:
    """Flower's Ray backend: a pool of actors, one for each core.

    Args:
        app: the app.
        address: address of a Ray cluster; None to start Ray on this machine.
        gpus_per_client: GPUs, or the share of one, that each client gets.

    Raises:
        InvalidInputError: Ray cannot be used; the text gives the reason.
    """

    def __init__(self, app: IsolatedApp, address: str | None, gpus_per_client: float = 0.0) -> None:
        require_ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address is None or address.startswith(_LOOPBACK):
            # Otherwise, Ray puts the machine's own address in the place of loopback.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Otherwise, Ray's workers have niceness 15, and hardly run beside other programs.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # On a busy machine, a worker may import Ray for longer than the 60 s after which another one is started.
        os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        # Without an address, Ray would join the cluster of RAY_ADDRESS or of the last `ray start`.
        local = {"address": "local", "_node_ip_address": "127.0.0.1", "object_store_memory": _OBJECT_STORE_BYTES}
        config: dict[str, Any] = {
            "init_args": {**quiet, **(local if address is None else {"address": address})},
            "client_resources": {"num_cpus": 1, "num_gpus": gpus_per_client},
        }
        for attempt in range(_ATTEMPTS):
            try:
                self._backend = RayBackend(config)
                self._backend.build(app.itself)
                return
            except Exception as error:  # Ray raises a plain Exception if it has not started in time
                shutdown = importlib.import_module("ray").shutdown
                shutdown()
                if address is None and attempt + 1 < _ATTEMPTS:
                    continue
                why = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
                if address is None:
                    why += ". Ray starts only on cores that other programs leave free: repeat the command then"
                raise InvalidInputError(f"Ray cannot be used at {address or 'this machine'}: {why}") from error

    @property
    def count(self) -> int:
        """How many messages are handled at the same time."""
        return int(self._backend.num_workers)

    def handle(self, tasks: Iterable[tuple[Message, Context]]) -> Iterator[tuple[int, Message, Context]]:
        """See `Clients.handle`."""
        waiting = enumerate(tasks)
        with ThreadPoolExecutor(self.count) as pool:
            running = {pool.submit(self._backend.process_message, *task): place for place, task in self._some(waiting)}
            while running:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    place = running.pop(future)
                    for following, task in islice(waiting, 1):
                        running[pool.submit(self._backend.process_message, *task)] = following
                    yield place, *future.result()

    def _some(self, waiting: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        return islice(waiting, self.count)

    def close(self) -> None:
        """End the actors, and Ray if it was started here."""
        self._backend.terminate()
