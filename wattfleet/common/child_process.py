"""Child processes that run a module of this installation and answer requests over pipes.

The parent sends pickled requests to the child's standard input. The child answers each on its standard output. It ends
when its input ends, and therefore also when the parent is killed. Use this only for code that runs with the same
rights, since pickles are trusted.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, BinaryIO

from wattfleet.core.errors import WattfleetError

_CHECK_EVERY_S = 0.1
# Lowest priority, since an app or a profiled workload may be training and measured at the same time.
_NICENESS = 10


class ChildEndedError(Exception):
    """The child process ended without an answer.

    Args:
        exit_code: its exit code, negative for a signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"ended with exit code {exit_code}")
        self.exit_code = exit_code


def never_stop() -> None:
    """Do not limit the time to wait for the child."""


class ChildProcess:
    """The parent's side of a running child process; as a context manager, it ends the child.

    Args:
        module: the module to run; it reads requests through `parent_connection`.
        *arguments: its command-line arguments.
        ends_within_s: time for the child to end by itself, s; then it is killed.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, module: str, *arguments: str, ends_within_s: float = 0.0) -> None:
        self._ends_within_s = ends_within_s
        self._process = python_process(module, *arguments)
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._requests, self._answers = self._process.stdin, self._process.stdout
        # Needed since a request may be larger than the pipe's buffer, and the child may not read it.
        os.set_blocking(self._requests.fileno(), False)

    def ask(self, request: Any, check: Callable[[], None] = never_stop) -> Any:
        """Send a request, wait for its answer and return it; see `send`.

        Raises:
            ChildEndedError: the child ended without an answer.
            WattfleetError: the child answered with this error.
        """
        self.send(request, check)
        while not select.select([self._answers], [], [], _CHECK_EVERY_S)[0]:
            check()
        try:
            answer = pickle.load(self._answers)
        except (EOFError, pickle.UnpicklingError):
            raise ChildEndedError(self._process.wait()) from None
        if isinstance(answer, WattfleetError):
            raise answer
        return answer

    def send(self, request: Any, check: Callable[[], None] = never_stop) -> None:
        """Send a request without an answer.

        Args:
            request: anything that can be pickled.
            check: called about ten times a second while waiting; it raises an error to stop waiting.
        """
        pipe = self._requests.fileno()
        left = memoryview(pickle.dumps(request))
        # `ask` reports that the child has ended.
        with suppress(BrokenPipeError):
            while left:
                if select.select([], [pipe], [], _CHECK_EVERY_S)[1]:
                    left = left[os.write(pipe, left) :]
                else:
                    check()

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(BrokenPipeError):
            self._requests.close()
        try:
            if self._ends_within_s:
                self._process.wait(self._ends_within_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            self._answers.close()


class _ParentEndedError(Exception):
    """The parent has ended, so nobody reads the answers."""


class ParentConnection:
    """The connection of a child to its parent; use `parent_connection`.

    Args:
        requests: the stream of pickled requests.
        answers: the stream for pickled answers.
    """

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests = requests
        self._answers = answers

    def requests(self) -> Iterator[Any]:
        """Yield the parent's requests until it closes the pipe or ends, possibly in the middle of a request."""
        while True:
            try:
                yield pickle.load(self._requests)
            except (EOFError, pickle.UnpicklingError):
                return

    def answer(self, content: Any) -> None:
        """Answer a request. A `WattfleetError` is raised in the parent. If the parent has ended, end the block."""
        try:
            pickle.dump(content, self._answers)
            self._answers.flush()
        except BrokenPipeError:
            raise _ParentEndedError from None


@contextmanager
def parent_connection() -> Iterator[ParentConnection]:
    """Connect to the parent. Until the block ends, standard output goes to standard error, to keep answers separate."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield ParentConnection(sys.stdin.buffer, answers)
    except _ParentEndedError:
        pass
    finally:
        with suppress(BrokenPipeError):
            answers.close()


def python_process(module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `python -m module` with pipes to its standard input and from its standard output.

    It gets its own session, so that Ctrl-C reaches only the parent, which then ends it. It runs in `/` with a safe
    path: `-m` would import from the current folder first, and a user's `torch.py` there must not run as root.

    Args:
        module: the module to run.
        *arguments: its command-line arguments.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": _absolute(os.environ.get("PYTHONPATH", ""))},
    )


def _absolute(search_path: str) -> str:
    """Return a search path with absolute folders, and without empty entries, which mean the current folder."""
    return os.pathsep.join(os.path.abspath(folder) for folder in search_path.split(os.pathsep) if folder)


def lower_priority() -> None:
    """Lower this process's priority, if that is allowed; the service's unit does not allow it."""
    with suppress(OSError):
        os.nice(_NICENESS)
