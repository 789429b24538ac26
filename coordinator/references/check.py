"""Checks a published reference predictor in a separate process, with limits on its memory and its time.

A reference is only data, but loading it and predicting with it may need any amount of memory.
"""

from __future__ import annotations

import resource
import time

from coordinator.errors import UncheckedReferenceError
from wattfleet.common.child_process import ChildEndedError, ChildProcess, parent_connection
from wattfleet.core import prediction
from wattfleet.core.errors import CorruptReferenceError, InvalidInputError, WattfleetError
from wattfleet.core.prediction import Artefact, Predictor, predictor_class, restore_predictor

CHECK_BYTES = 256 * 1024 * 1024
"""Memory that a check may use in addition to the interpreter and its packages, in bytes."""

CHECK_S = 60.0
"""The longest duration of a check, in seconds; a busy machine needs some seconds to start the process."""

MAX_CORRECTIONS = 200
"""The most modes in a reference that correct the fitted model; those from `wattfleet reference train` have none."""


def check_in_child(artefact: Artefact, memory_bytes: int = CHECK_BYTES, within_s: float = CHECK_S) -> None:
    """Check that a reference can be loaded and predicts; this blocks for some seconds.

    Args:
        artefact: the reference.
        memory_bytes: the memory limit of the check.
        within_s: the time limit of the check, in seconds.

    Raises:
        CorruptReferenceError: the reference cannot predict, or needs too much memory.
        InvalidInputError: the reference needs a package that is not installed.
        UncheckedReferenceError: the check could not start, or did not end in time.
    """
    give_up_s = time.monotonic() + within_s

    def require_time() -> None:
        if time.monotonic() > give_up_s:
            raise UncheckedReferenceError(f"the reference could not be checked within {within_s:g} s: try again later")

    try:
        with ChildProcess(__name__) as child:
            child.ask((artefact.manifest, artefact.weights, memory_bytes), require_time)
    except ChildEndedError as ended:
        raise CorruptReferenceError(
            f"the process that checks the reference {ended}, probably because the reference needs more than"
            f" {memory_bytes // 2**20} MiB of memory: train a smaller one with `wattfleet reference train`"
        ) from None
    except OSError as error:
        raise UncheckedReferenceError(
            f"cannot start a process to check the reference: {error.strerror}; try again later"
        ) from None


def _check(artefact: Artefact) -> None:
    predictor = restore_predictor(artefact)
    corrections = _corrections(predictor)
    if corrections > MAX_CORRECTIONS:
        raise CorruptReferenceError(
            f"the reference is corrected by {corrections:,} measured modes; at most {MAX_CORRECTIONS} are allowed:"
            " train it with `wattfleet reference train`"
        )


def _corrections(predictor: Predictor) -> int:
    # Imported only in the child: the coordinator predicts nothing, and SciPy would use 46 MB of its memory.
    if not isinstance(predictor, prediction.RooflinePredictor):
        return 0
    remainders = [part for each in predictor.hypotheses for part in (each.time_remainder, each.power_remainder)]
    return max(len(part.correction.weights) for part in remainders)


def _limit_memory(beyond: int) -> None:
    """Limit this process to its current memory plus the given number of bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + beyond, now + beyond))


def _answer(manifest: bytes, weights: bytes, memory_bytes: int) -> WattfleetError | None:
    try:
        artefact = Artefact(manifest, weights)
        predictor_class(artefact.details.predictor)  # imports its packages, which may map gigabytes
        _limit_memory(memory_bytes)
        _check(artefact)
    except WattfleetError as error:
        return error
    except ModuleNotFoundError as error:
        return InvalidInputError(
            f"cannot check a predictor of kind {artefact.details.predictor!r} without {error.name}: install it on the"
            " coordinator's machine"
        )
    except MemoryError:
        return CorruptReferenceError(
            f"the reference needs more than {memory_bytes // 2**20} MiB of memory: train a smaller one with"
            " `wattfleet reference train`"
        )
    return None


def main() -> None:
    """Check the reference that the parent process sends, and report the result to it."""
    with parent_connection() as parent:
        for request in parent.requests():
            parent.answer(_answer(*request))


if __name__ == "__main__":
    main()
