"""Returns freed memory to the system, since a process that idles for days must not keep what one fit needed."""

from __future__ import annotations

import ctypes

# The options' numbers in glibc's malloc.h, and the threshold to set, bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 256 * 1024


def give_memory_back_early() -> None:
    """Make the C library return freed memory: one heap for all threads, and large arrays outside of it.

    Call this before any thread starts. It has no effect if the C library is not glibc.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    set_option(_ARENA_MAX, 1)
    # Otherwise glibc raises the threshold each time a large array is freed.
    set_option(_MMAP_THRESHOLD, _LARGE)
    set_option(_TRIM_THRESHOLD, _LARGE)
