"""The end of a run that somebody stops: with `flwr stop`, or by ending Flower's SuperLink or the ServerApp.

Flower tells a ServerApp to end with a signal. Its handler ends the process within seconds, often before an exception
reaches the strategy. So the run is reported as stopped as soon as the signal arrives.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from wattfleet_proto.names import STOPPED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_ASKED_WITHIN_S = 2.0
_REPORTED_WITHIN_S = 4.0
_REFUSED = (401, 403)
_RUNTIME_API = "/v1/runtime/"

_BY_SUPERLINK = f"{STOPPED}by Flower's SuperLink, as after `flwr stop`"
_WITH_SUPERLINK = f"{STOPPED}because Flower's SuperLink ended"


@contextmanager
def reported_stop(report: Callable[[str], None], ask: Callable[[], object]) -> Iterator[None]:
    """Report a stop when the process is told to end, and then let it end as it would have without this context.

    In a thread other than the main one, Python allows no handlers of signals, and nothing is reported.

    Args:
        report: reports why the run has ended.
        ask: sends a request to Flower's SuperLink, which fails if the SuperLink has ended the run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    parent_pid = os.getppid()
    earlier: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in earlier.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)

    def stop(number: int, frame: FrameType | None) -> None:
        restore()
        if _is_refusal(sys.exc_info()[1]):  # what the interrupted code was handling
            why = _BY_SUPERLINK
        elif os.getppid() != parent_pid:  # the SuperLink's process that has started this one
            why = _WITH_SUPERLINK
        elif number == signal.SIGINT and _is_refused(ask):
            why = _BY_SUPERLINK
        else:
            why = f"{STOPPED}by {signal.Signals(number).name}, which its ServerApp got"
        # The interrupted code may hold a lock that the report needs, so the process does not wait for it without limit.
        _in_thread(lambda: report(why), _REPORTED_WITHIN_S)
        if callable(earlier[number]):
            earlier[number](number, frame)
        else:
            signal.raise_signal(number)

    for number in _SIGNALS:
        handler = signal.getsignal(number)
        if callable(handler) or handler is signal.SIG_DFL:
            earlier[number] = handler
            signal.signal(number, stop)
    try:
        yield
    finally:
        restore()


def end_of(error: BaseException, ask: Callable[[], object]) -> str:
    """Return why a run has ended, for the coordinator.

    Args:
        error: the exception that ended it.
        ask: as for `reported_stop`.
    """
    if _is_refusal(error):
        return _BY_SUPERLINK
    if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
        return f"{STOPPED}with its ServerApp"
    # A request that a stop interrupts fails in its own way: a message in the midst of being sent loses its session.
    if isinstance(error, Exception) and _is_refused(ask):
        return _BY_SUPERLINK
    return f"{type(error).__name__}: {error}"


def _is_refused(ask: Callable[[], object]) -> bool:
    """Whether the SuperLink does not accept requests of this run any more."""
    refusals: list[bool] = []

    def attempt() -> None:
        try:
            ask()
        except Exception as error:
            refusals.append(_is_refusal(error))

    _in_thread(attempt, _ASKED_WITHIN_S)
    return any(refusals)


def _is_refusal(error: BaseException | None) -> bool:
    """Whether an error is Flower's, because the SuperLink has ended the run."""
    while error is not None:
        if type(error).__name__ == "RunNotRunningException":
            return True
        # An app may use httpx for requests of its own.
        response: Any = getattr(error, "response", None)
        if getattr(response, "status_code", None) in _REFUSED and response.url.path.startswith(_RUNTIME_API):
            return True
        error = error.__cause__ or error.__context__
    return False


def _in_thread(task: Callable[[], None], within_s: float) -> None:
    def run() -> None:
        with suppress(Exception):  # the process ends anyway
            task()

    thread = threading.Thread(target=run, name="wattfleet stop", daemon=True)
    thread.start()
    thread.join(within_s)
