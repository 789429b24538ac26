"""Keeps a process that idles for days from holding the memory that one fit needed."""

from __future__ import annotations

import ctypes

# Of glibc's malloc.h: the number of each option, and what it is set to, bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGE = 256 * 1024


def give_memory_back_early() -> None:
    """Have freed memory given back to the system: one heap for all threads, large arrays apart from it.

    To be called before there are threads. Where the C library is not glibc, nothing changes.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    set_option(_ARENA_MAX, 1)
    # Setting it keeps glibc from raising it with every large array that is freed.
    set_option(_MMAP_THRESHOLD, _LARGE)
    set_option(_TRIM_THRESHOLD, _LARGE)
