"""Asyncio tasks: background tasks whose errors are logged, stopping, timeouts, and work that cannot be cancelled."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

_log = logging.getLogger(__name__)


# --- Backoff ----------------------------------------------------------------------------------------------------------
# Exponential backoff with jitter, for attempts to reach the coordinator.


MAX_S = 30.0
FIRST_S = 0.2


class Backoff:
    """Pauses of random length below a limit that doubles, so that not all of a fleet reconnects at once."""

    def __init__(self) -> None:
        self._up_to_s = FIRST_S

    def reset(self) -> None:
        """Start again with short pauses, after a success."""
        self._up_to_s = FIRST_S

    async def pause(self, max_s: float = MAX_S, spread_s: float = 0.0) -> None:
        """Wait before the next attempt.

        Args:
            max_s: maximum of the growing limit, s.
            spread_s: spread the attempts over at least this time, s.
        """
        await asyncio.sleep(random.uniform(0, max(self._up_to_s, spread_s)))
        self._up_to_s = min(max_s, 2 * self._up_to_s)


# --- Token bucket -----------------------------------------------------------------------------------------------------
# A rate limit that allows short bursts.


@dataclass(slots=True)
class TokenBucket:
    """Allows `burst` events at once, and `per_s` events each second in the long run.

    Attributes:
        per_s: allowed events per second.
        burst: maximum of events at once.
        left: events that are allowed now; negative if events were taken in advance.
        since_s: time of that count, seconds of the caller's clock.
    """

    per_s: float
    burst: float
    left: float
    since_s: float

    @classmethod
    def full(cls, per_s: float, burst: float, now_s: float) -> TokenBucket:
        """Return a full bucket."""
        return cls(per_s, burst, burst, now_s)

    def is_empty(self, now_s: float) -> bool:
        """Return whether no event is allowed now."""
        self._refill(now_s)
        return self.left < 1

    def take(self, now_s: float) -> bool:
        """Take an event if it is allowed now, and return whether it was."""
        if self.is_empty(now_s):
            return False
        self.left -= 1
        return True

    def take_later(self, now_s: float) -> float:
        """Take an event in any case, and return the seconds until it is allowed."""
        self._refill(now_s)
        self.left -= 1
        return max(0.0, -self.left / self.per_s)

    def _refill(self, now_s: float) -> None:
        self.left = min(self.burst, self.left + self.per_s * (now_s - self.since_s))
        self.since_s = now_s


# --- Completion -------------------------------------------------------------------------------------------------------
# `wattfleet completion`: prints the script that completes commands, options and their values in a shell.

# Click's own classes: Typer's, in Click's registry, use another protocol than the root command.
_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_VARIABLE = "_WATTFLEET_COMPLETE"
"""The variable's name, as Click derives it from the command's name."""


_HELP = """Print the script that completes `wattfleet` in bash, zsh or fish.

\b
bash: wattfleet completion bash > ~/.local/share/bash-completion/completions/wattfleet
zsh:  wattfleet completion zsh > "${fpath[1]}/_wattfleet"
fish: wattfleet completion fish > ~/.config/fish/completions/wattfleet.fish
"""


@click.command("completion", help=_HELP)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def print_completion(ctx: click.Context, shell: str) -> None:
    """Print the script for one shell."""
    root = ctx.find_root()
    click.echo(_SHELLS[shell](root.command, {}, "wattfleet", _VARIABLE).source())


# --- Tasks ------------------------------------------------------------------------------------------------------------

Result = TypeVar("Result")


def background_task(name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start a task that is not awaited; if it fails, its name and error are logged at once.

    Keep a reference to it, since the event loop does not, and end it with `stop_tasks`.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the background task %r failed", task.get_name(), exc_info=error)


async def stop_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait for their end, ignoring their results and errors. None stands for no task."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def run_until_first(works: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
    """Run named coroutines until the first one ends; then cancel the others and wait for their end.

    Raises:
        Exception: the error of the first one, or else an error of another one during its cancellation.
    """
    tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
    try:
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await stop_tasks(*tasks)
    for task in (*done, *pending):
        if not task.cancelled():
            task.result()


async def with_timeout(seconds: float, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, like `asyncio.wait_for`.

    Before Python 3.12, `asyncio.wait_for` loses a cancellation that arrives just as the work ends. A session cancelled
    at that moment continued, and kept the agent from stopping.

    Raises:
        TimeoutError: the work took longer, and was cancelled.
    """
    running = asyncio.create_task(work)
    try:
        await asyncio.wait([running], timeout=seconds)
        if running.done():
            return running.result()
    finally:
        await stop_tasks(running)
    raise asyncio.TimeoutError


async def shield_until_done(work: Callable[..., Result], *arguments: Any) -> Result:
    """Run `work` in a thread and wait for its end, even if cancelled, so that no change of the device is half done."""
    return await run_uncancelled(asyncio.to_thread(work, *arguments))


async def run_uncancelled(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end; a cancellation takes effect only after that."""
    running = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    # There may be several cancellations: by gRPC when the client disconnects, and by the agent when it stops.
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not running.cancelled():
        raise cancelled from running.exception()
    return running.result()
