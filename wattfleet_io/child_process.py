"""Child processes that run a module of this installation and answer requests over pipes.

The parent sends pickled requests to the child's standard input. The child answers each on its standard output, and ends
when its input ends: also when the parent was killed. Only for code that runs with the same rights: pickles are trusted.
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

from wattfleet.errors import WattfleetError

_CHECK_EVERY_S = 0.1
# An app or a profiled workload may train at the same time, and is being measured.
_NICENESS = 10


class ChildEndedError(Exception):
    """The child ended without an answer.

    Args:
        exit_code: its exit code, negative for a signal.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"ended with exit code {exit_code}")
        self.exit_code = exit_code


def never_stop() -> None:
    """Wait for the child as long as it takes."""


class ChildProcess:
    """A running child, as its parent sees it; a context manager that ends it.

    Args:
        module: the module to run; it reads requests through `parent_connection`.
        *arguments: its command-line arguments.
        ends_within_s: how long the child may take to end by itself, seconds; then it is killed.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, module: str, *arguments: str, ends_within_s: float = 0.0) -> None:
        self._ends_within_s = ends_within_s
        self._process = python_process(module, *arguments)
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._requests, self._answers = self._process.stdin, self._process.stdout
        # A request may be larger than the pipe holds, and the child may not read it.
        os.set_blocking(self._requests.fileno(), False)

    def ask(self, request: Any, check: Callable[[], None] = never_stop) -> Any:
        """Send a request and wait for its answer; see `send`.

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
        """Send a request that has no answer.

        Args:
            request: anything that can be pickled.
            check: called about ten times a second while waiting; raises to stop waiting.
        """
        pipe = self._requests.fileno()
        left = memoryview(pickle.dumps(request))
        # `ask` reports a child that has ended.
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
    """Nobody reads the answers any more."""


class ParentConnection:
    """The connection of a child to its parent; use `parent_connection`.

    Args:
        requests: pickled requests.
        answers: where pickled answers go.
    """

    def __init__(self, requests: BinaryIO, answers: BinaryIO) -> None:
        self._requests = requests
        self._answers = answers

    def requests(self) -> Iterator[Any]:
        """The parent's requests, until it closes the pipe or ends, maybe in the middle of one."""
        while True:
            try:
                yield pickle.load(self._requests)
            except (EOFError, pickle.UnpicklingError):
                return

    def answer(self, content: Any) -> None:
        """Answer a request; a `WattfleetError` is raised in the parent. Ends the block if the parent has ended."""
        try:
            pickle.dump(content, self._answers)
            self._answers.flush()
        except BrokenPipeError:
            raise _ParentEndedError from None


@contextmanager
def parent_connection() -> Iterator[ParentConnection]:
    """Connect to the parent. Until the block ends, standard output goes to standard error, out of the answers' way."""
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
    """A search path with absolute folders; without empty entries, which stand for the current folder."""
    return os.pathsep.join(os.path.abspath(folder) for folder in search_path.split(os.pathsep) if folder)


def give_way() -> None:
    """Lower this process's priority, if it is allowed to; the service's unit does not allow it."""
    with suppress(OSError):
        os.nice(_NICENESS)
